"""Reports on disk: read right or not at all, written atomically, tables as CSV beside
them."""

from __future__ import annotations

import csv
import errno
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

import numdev
from numdev.errors import MeasurementError, UsageError, similar_file
from numdev.report.records.measurements import Record
from numdev.report.records.reports import SCHEMA_VERSION, Report
from numdev.report.safe_text import csv_cell, json_text
from numdev.report_kinds import REGISTERED, kind_of
from numdev.temporary_files import remove_stale, unfinished_file

HEAD = 1 << 16  # bytes of a file in which it says what it is


class _Head(BaseModel):
    """What a file says of itself: any JSON, also what a report cannot say; None where it
    says nothing."""

    schema_version: object = None
    kind: object = None
    provenance: object = None

    @property
    def registered_kind(self) -> str | None:
        """Returns the kind of report; None where numdev knows none of that name."""
        is_known = isinstance(self.kind, str) and self.kind in REGISTERED
        return str(self.kind) if is_known else None

    @property
    def version(self) -> str | None:
        """Returns the version of numdev that wrote the file; None where it says none in
        text."""
        about = self.provenance if isinstance(self.provenance, dict) else {}
        version = about.get("numdev")
        return version if isinstance(version, str) else None


def read(path: Path) -> Report:
    """Returns the report in a `report.json`, or in a directory that holds one. Raises
    UsageError where there is none or it cannot be opened. Raises MeasurementError for a
    file that is no report of this schema version, and for one that was cut off, edited or
    merged by hand, as its digest tells: a report is read right, or not at all."""
    try:
        path = path / "report.json" if path.is_dir() else path
        text = bytearray(path.read_bytes())
    except OSError as error:
        what = f"{path}: cannot read a report there ({error.strerror})"
        near = similar_file(path)
        hint = f"did you mean {str(near)!r}?" if near else ""
        hint = hint or "give a report.json, or a directory an audit wrote"
        raise UsageError(what, hint=hint) from error
    head = _Head()
    try:
        head = _head_of(bytes(text[:HEAD]))
        for name, accepted in (
            ("schema_version", [SCHEMA_VERSION]),
            ("kind", list(REGISTERED)),
        ):
            if (got := getattr(head, name)) not in accepted or isinstance(got, float):
                raise ValueError(
                    f"{name}: expected {', '.join(map(str, accepted))}, got {got!r:.80}"
                )
        end = text.rfind(b',"digest":')
        ending, text[end:] = text[end:], b""
        digest = hashlib.sha256(text).hexdigest()
        if ending.rstrip() != f',"digest":"{digest}"}}'.encode():
            raise ValueError("digest: the file was truncated or edited")
        model: type[Report] = kind_of(str(head.kind)).report
        text += b"}"
        return model.model_validate_json(text, strict=True)
    except ValueError as error:
        problem = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            problem = f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"
        hint, wrote = "measure again", head.version
        if wrote is None and head.registered_kind is None:
            hint = "give a report.json that numdev wrote"
        elif wrote not in (None, numdev.__version__):
            versions = f"numdev {wrote} wrote it, and this is {numdev.__version__}"
            hint = f"{versions}: update numdev, or {hint}"
        hint = "measure again" if problem.startswith("digest:") else hint
        what = f"{path}: not a report this numdev can read: {problem}"
        raise MeasurementError(what, hint=hint) from error


def _head_of(text: bytes) -> _Head:
    """Returns the head of a report by a file's first bytes. Raises ValueError for what is
    not the beginning of a JSON object."""
    content = from_json(text, allow_partial=True)
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object, got {content!r:.80}")
    return _Head.model_validate(content)


def text_of(report: Report) -> str:
    """Returns a report as JSON in one line, for a file as for a terminal; its last key is
    the `digest` of `with_digest`."""
    return with_digest(json_text(report.model_dump_json()).encode()).decode()


def with_digest(text: bytes) -> bytes:
    """Returns the JSON of a report with its last key, `digest`: the SHA-256, in hex, of
    all bytes before the comma in front of it. `text`: one JSON object without it, of at
    least one key."""
    body = text.removesuffix(b"}")
    return body + f',"digest":"{hashlib.sha256(body).hexdigest()}"}}'.encode()


def write(report: Report, directory: Path) -> None:
    """Writes report.json and the report's tables, as CSV, into a directory that exists;
    each file atomically, in place of an older one. Raises OSError where one cannot be
    written."""
    for name, lines in report.tables().items():
        with replacing(directory / f"{name}.csv") as file:
            write_csv(file, lines)
    with replacing(directory / "report.json") as file:
        file.write(text_of(report))


@contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """Yields a text file, in UTF-8, that takes the name `path` only when it is complete;
    after an exception the old file stays. A device, a pipe, and any path in /dev or
    /proc, such as the system's name for an open file (`/dev/stdout`), is written to
    itself; a link to a file is replaced. Raises OSError where it cannot be written, as in
    a folder that does not exist."""
    if _is_written_in_place(path):
        with path.open("w", newline="", encoding="utf-8") as file:
            yield file
        return
    with (
        unfinished_file(path) as partial,
        partial.open("w", newline="", encoding="utf-8") as file,
    ):
        yield file


def _is_written_in_place(path: Path) -> bool:
    """Whether a path lies in /dev or /proc, where the system has names for open files, or
    is a device, a pipe or a directory: no new file may replace it."""
    is_of_system = path.parts[:2] in (("/", "dev"), ("/", "proc"))
    return is_of_system or (path.exists() and not path.is_file())


def write_csv(file: IO[str], lines: Sequence[Record]) -> None:
    """Writes one line for each record, all of one class, under a line of the names of the
    fields; nothing where there is no record. Text and dicts are written as `csv_cell` has
    them."""
    writer = csv.writer(file)
    for i, line in enumerate(lines):
        values = line.model_dump()
        if i == 0:
            writer.writerow(values)
        writer.writerow(
            csv_cell(x) if isinstance(x, str | dict) else x for x in values.values()
        )  # most are numbers, which stay


def refuse_other_kind(directory: Path, kind: str) -> None:
    """Raises UsageError where a directory holds the report of another command, which no
    option replaces. A file that does not say what it is, or cannot be read, is no report.
    `kind`: the command's name."""
    try:
        with (directory / "report.json").open("rb") as file:
            text = file.read(HEAD)
        head = _head_of(text)
    except (OSError, ValueError):
        return
    older = head.registered_kind
    if older not in (None, kind):
        what = f"{directory}: already holds the report of a different numdev {older}"
        raise UsageError(what, hint="give another --output")


def expect_directory(directory: Path, option: str = "--output") -> None:
    """Raises UsageError where results cannot go into a directory: it, or the nearest
    above it that exists, is a file or may not be written to, or its name is not possible.
    Makes nothing, so that a command can ask before it measures. `option`: of the user, to
    choose another directory by."""
    try:
        _require_writable(directory)
    except OSError as error:
        raise refused_directory(directory, error, option) from error


def expect_writable_file(path: Path) -> None:
    """Raises UsageError where `replacing` could not write a file, though its directory is
    made first: it is a directory, or its directory is one that `expect_directory`
    refuses. Devices, pipes, and paths in /dev and /proc are not checked. Makes
    nothing."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not _is_written_in_place(path):
            _require_writable(path.parent)
    except OSError as error:
        raise refused_file(path, error) from error


def refused_file(path: Path, error: OSError) -> UsageError:
    """Returns the error for a file that the user named, and that cannot be written."""
    return UsageError(f"{path}: cannot be written ({error.strerror})")


def _require_writable(directory: Path) -> None:
    """Raises OSError where a directory, or the nearest above it that exists, is a file or
    may not be written to."""
    nearest = next(p for p in (directory, *directory.parents) if p.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), nearest)
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), nearest)


def make_directory(directory: Path) -> None:
    """Makes the directory of the results and those above it; one that exists stays.
    Raises UsageError where that cannot be, as `expect_directory` does."""
    expect_directory(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused_directory(directory, error) from error


def refused_directory(
    directory: Path, error: OSError, option: str = "--output"
) -> UsageError:
    """Returns the error for results that cannot be written into a directory; it names the
    file or folder at fault where the system's `error` does. `option`: of the user, to
    choose another directory by."""
    why = f"cannot write results there ({error.strerror})"
    if isinstance(error, NotADirectoryError | FileExistsError):
        why = "expected a directory for the results, got a file"
    return UsageError(
        f"{error.filename or directory}: {why}", hint=f"choose another {option}"
    )


def claim_directory(
    directory: Path, kind: str, request: Mapping[str, object], *, overwrite: bool
) -> None:
    """Makes the directory of the results, and removes unfinished files in it. Raises
    UsageError where it holds another report: one of another command than `kind` always,
    of another request unless `overwrite`; and as `make_directory`. Raises
    MeasurementError for an older report that cannot be read, unless `overwrite`."""
    make_directory(directory)
    remove_stale(directory)
    refuse_other_kind(directory, kind)
    if overwrite or not (directory / "report.json").exists():
        return
    if read(directory).request != request:
        what = f"{directory}: already holds the report of a different numdev {kind}"
        raise UsageError(what, hint="give another --output, or --overwrite")
