"""The rows of a run on disk, task by task, so that a finished task is never measured
twice.

The journal (`rows.jsonl`) is a header that names the request and the environment, then
one line for each finished task, written at once: killed at any moment, it loses at most
the line being written. The last key of a line is the SHA-256 of all lines up to it, by
which a line that was edited, removed, repeated or moved is told from a torn last one. The
same request in the same environment continues where it stopped. Every other one is
refused, unless nothing was measured before. A run without a directory has its journal in
memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from operator import methodcaller
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from numdev.errors import UsageError
from numdev.report.io import make_directory, refused_directory
from numdev.temporary_files import remove_stale

JOURNAL = "rows.jsonl"
# What is built from a journal or goes on from it, and goes with it under --overwrite.
RESULTS = (
    *(
        "report.json",
        "report.html",
        "rows.csv",
        "weights.csv",
        "cells.csv",
        "distances.csv",
    ),
    *("heads.csv", "cures.csv", "kernels.csv", "models.csv", "state.pt"),
)
START, TASK, DIGEST = b'{"header":', b'{"task":', b',"digest":"'
Row = dict[str, Any] | BaseModel
AS_DATA = methodcaller("model_dump", mode="json")  # of a row that is a record
M = TypeVar("M", bound=BaseModel)


class _Header(BaseModel):
    """The first line of a journal."""

    model_config = ConfigDict(extra="forbid", strict=True)

    header: dict[str, object]


class _Task(BaseModel):
    """A later line of a journal: a finished task, by its key, with its rows by kind."""

    model_config = ConfigDict(extra="forbid", strict=True)

    task: str
    rows: dict[str, list[dict[str, object]]]


class Journal(contextlib.AbstractContextManager["Journal"]):
    """The finished tasks of one request in one directory. Use as a context manager, which
    closes the file. `visit` must be called for every task of the request, finished or
    not; `rows` then returns all rows of a kind in the order of these calls, however often
    the run was interrupted."""

    def __init__(self, directory: Path | None, header: Mapping[str, object]) -> None:
        self.directory = directory
        self.header = json.loads(json.dumps(header, default=str))
        self._done: dict[str, dict[str, list[Row]]] = {}
        self._order: dict[str, None] = {}
        self._file: IO[bytes] | None = None
        self._digest = ""  # of the last line

    @classmethod
    def open(
        cls, directory: Path | None, header: Mapping[str, object], *, overwrite: bool
    ) -> Journal:
        """Returns the journal in `directory`, which is made; started or continued. None:
        a new one in memory. With `overwrite`, and where another request's run measured
        nothing, earlier results in it are removed. Raises UsageError where the directory
        cannot be written to, or has files in it and no journal; unless `overwrite` also
        for a damaged journal, and for that of another request."""
        journal = cls(directory, header)
        if directory is None:
            return journal
        make_directory(directory)
        try:
            remove_stale(directory)
            journal._open_file(directory, overwrite=overwrite)
        except OSError as error:
            raise refused_directory(directory, error) from error
        return journal

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def finished(self) -> int:
        """Returns how many tasks are finished, those of earlier runs included. The record
        of a case counts as one."""
        return len(self._done)

    def visit(self, key: str) -> bool:
        """Notes that a task belongs to this run, behind those that were noted before;
        returns whether it is finished. May be called again for the same task."""
        self._order.setdefault(key)
        return key in self._done

    def append(self, key: str, rows: Mapping[str, Iterable[Row]]) -> bool:
        """Records a finished task: its rows, by the kind of row (`row`, `worst`, `case`).
        Writes them to disk where the journal has a directory. Returns whether the task is
        new. For a task that is recorded already (seeds of one case share a record) the
        first rows stay. With a directory it raises ValueError for NaN and infinity in a
        row, and OSError where it cannot be written."""
        if self.visit(key):
            return False
        self._done[key] = {kind: list(some) for kind, some in rows.items()}
        if self.directory is not None:
            self._write_line({"task": key, "rows": self._done[key]})
        return True

    def rows(self, kind: str) -> list[Any]:
        """Returns the rows of a kind of all visited and finished tasks, in the order of
        their first visit. Rows of this run are as they were appended; those of an earlier
        run are plain data. Empty for an unknown kind."""
        done = (self._done.get(key, {}) for key in self._order)
        return [row for rows in done for row in rows.get(kind, ())]

    def records(self, kind: str, model: type[M]) -> tuple[M, ...]:
        """Returns the rows of a kind as records of a report, in the order of `rows`.
        Raises UsageError where an earlier run's row does not fit the model."""
        try:
            return tuple(model.model_validate(row) for row in self.rows(kind))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "a row"
            what = (
                f"{kind}: expected a {model.__name__}, got one with {where}: "
                f"{first['msg']}"
            )
            self._refuse(what, error)

    def _open_file(self, directory: Path, *, overwrite: bool) -> None:
        """Opens the journal's file for appending. With `overwrite`, and where there is no
        journal or one that stopped within its header, it is emptied and gets a new
        header, and earlier results are removed; so too, in any case, for a journal of
        another request in which nothing was measured. Else it is continued after its last
        whole line, and its finished tasks are read. Raises UsageError for other files in
        a directory without a journal, whatever `overwrite` is; without it also for a
        damaged journal, and for one of another request in which something was measured.
        Raises OSError where a file cannot be opened. `directory`: one that exists."""
        path = directory / JOURNAL
        *lines, torn = path.read_bytes().split(b"\n") if path.exists() else [b""]
        first = [*lines, torn][0]
        # Interrupted within its header, there is nothing in it to lose.
        blank = not lines and START[: len(first)] == first[: len(START)]
        others = sorted(p.name for p in directory.iterdir())
        if others and not (path.exists() and (blank or first.startswith((START, TASK)))):
            what = f"{directory}: holds other files ({others[0]})"
            raise UsageError(what, hint="choose an empty or a new --output")
        header = None if blank or overwrite else self._read_lines(lines or [torn])
        measured = any(rows.keys() - {"case"} for rows in self._done.values())
        if header is None or not (measured or header == self.header):
            for name in (*RESULTS, JOURNAL):
                (directory / name).unlink(missing_ok=True)
            self._done.clear()
            self._digest = ""
            self._file = path.open("wb")
            self._write_line({"header": self.header})
            return
        for part in {**self.header, **header}:
            was, now = header.get(part), self.header.get(part)
            if was != now:
                where, was, now = first_difference(was, now)
                raise UsageError(
                    f"{directory}: holds a run with a different {part}: "
                    f"{where}{' was ' if where else ''}{was!r}, now {now!r}",
                    hint="choose another --output, or --overwrite to replace it",
                )
        self._file = path.open("r+b")
        good = sum(len(line) + 1 for line in lines)
        # A torn last line belongs to a task that was not finished
        self._file.truncate(good)
        self._file.seek(good)

    def _read_lines(self, lines: Iterable[bytes]) -> dict[str, object]:
        """Takes over the tasks of a file's whole lines, and returns the header of the
        first. Raises UsageError for a line that was changed or moved, or that stands
        behind one that was removed."""
        header: dict[str, object] = {}
        for number, line in enumerate(lines, 1):
            body, _, end = line.rpartition(DIGEST)
            self._digest = _chain_digest(self._digest, body)
            if end != f'{self._digest}"}}'.encode():
                self._refuse(
                    f"line {number}: expected the digest of what was written, got another"
                )
            try:
                plain = json.loads(body + b"}")
                if number == 1:
                    header = _Header.model_validate(plain).header
                else:
                    task = _Task.model_validate(plain)
                    self._done[task.task] = {
                        kind: list(rows) for kind, rows in task.rows.items()
                    }
            except ValueError as error:
                self._refuse(
                    f"line {number}: expected a finished task, got something else", error
                )
        return header

    def _write_line(self, line: Mapping[str, object]) -> None:
        """Appends one line, with the digest of all lines up to it, and flushes the file.
        Raises ValueError for NaN and infinity, and OSError where the file cannot be
        written."""
        assert self._file is not None
        text = json.dumps(line, separators=(",", ":"), allow_nan=False, default=AS_DATA)
        body = text.removesuffix("}").encode()
        self._digest = _chain_digest(self._digest, body)
        self._file.write(body + DIGEST + f'{self._digest}"}}\n'.encode())
        self._file.flush()

    def _refuse(self, problem: str, error: Exception | None = None) -> NoReturn:
        """Raises UsageError with the problem and the journal's path. The journal must
        have a directory."""
        assert self.directory is not None
        hint = "the journal was edited or damaged: --overwrite measures again"
        raise UsageError(f"{self.directory / JOURNAL}: {problem}", hint=hint) from error


def _chain_digest(before: str, body: bytes) -> str:
    """Returns the SHA-256, in hexadecimal, of `before` (the digest of the line before)
    and `body` (a line without its own digest) together."""
    return hashlib.sha256(before.encode() + body).hexdigest()


def first_difference(
    old: object, new: object, path: str = ""
) -> tuple[str, object, object]:
    """Returns where two unequal pieces of plain data first differ, as `key.key`, and both
    values there. Only dicts are entered; a missing key counts as None. The path is empty
    where one of the two is no dict."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*new, *old]:
            if old.get(key) != new.get(key):
                return first_difference(old.get(key), new.get(key), f"{path}{key}.")
    return path.rstrip("."), old, new
