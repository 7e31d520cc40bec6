"""Reports on disk: read right or not at all, written atomically, tables as CSV beside them."""

from __future__ import annotations

import csv
import gc
import importlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import from_json

from numdev.errors import MeasurementError, UsageError
from numdev.report.foreign import cell
from numdev.report.records.base import Record
from numdev.report.records.report import SCHEMA_VERSION, Report

NUMBERS = (float, int, bool, type(None))
KINDS = {
    "audit": "numdev.report.records.audit:AuditReport",
    "sweep": "numdev.report.records.sweep:SweepReport",
    "weights": "numdev.training.weights.report:WeightsReport",
    "train": "numdev.training.report:TrainReport",
    "bounds": "numdev.training.bounds.report:BoundsReport",
    "diagnose": "numdev.diagnose.report:DiagnoseReport",
    "compare": "numdev.gate.compare_report:CompareReport",
}
"""Where the class of each kind of report is; imported when one is read."""


class _Head(BaseModel):
    """What a file has to say before anything else of it is read."""

    kind: Annotated[str, Field(strict=True)]
    schema_version: Annotated[int, Field(strict=True)]
    provenance: dict[str, Any] = Field(default_factory=dict)


def read(path: Path) -> Report:
    """Read `report.json`, or a directory that holds one.

    Raises UsageError where there is none, and MeasurementError for one that cannot be understood
    (unknown schema version included): a report is read right, or not at all.
    """
    try:
        path = path / "report.json" if path.is_dir() else path
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path}: cannot read a report there ({error.strerror})",
            hint="give a report.json, or a directory an audit wrote",
        ) from error
    try:
        head = _head_of(text)
        _check(head, path)
        module, _, name = KINDS[head.kind].partition(":")
        model: type[Report] = getattr(importlib.import_module(module), name)
        with uncollected():
            return model.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "the file"
        raise MeasurementError(
            f"{path}: not a report this version understands: {where}: {problem['msg']}",
            hint=_written_by(text),
        ) from error


def _head_of(text: bytes) -> _Head:
    """From the first bytes, where numdev writes it; from all of a file that begins otherwise."""
    try:
        return _Head.model_validate(from_json(text[: 1 << 16], allow_partial=True))
    except ValueError:
        return _Head.model_validate_json(text)


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection: nothing of a report is garbage while it is read and judged, and
    looking at its rows again and again takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _written_by(text: bytes) -> str:
    """What is known of a report that was refused: rows of another version may have more fields
    under the same schema number."""
    from numdev import __version__

    read = f"this is numdev {__version__}, which reads schema {SCHEMA_VERSION}"
    try:
        by = _head_of(text).provenance.get("numdev")
    except ValidationError:
        by = None
    return read if by in (None, __version__) else f"numdev {by} wrote it, and {read}"


def _check(head: _Head, path: Path) -> None:
    """Raises MeasurementError for a report of a version or a kind that is not known here."""
    by = str(head.provenance.get("numdev", "another version"))
    what = f"{path}: not a report this version understands"
    if head.schema_version != SCHEMA_VERSION:
        newer = head.schema_version > SCHEMA_VERSION
        raise MeasurementError(
            f"{what}: schema_version: is {head.schema_version}, and this version reads "
            f"schema {SCHEMA_VERSION}",
            hint=f"{'update numdev' if newer else 'measure again'}, or read it with the numdev "
            f"that wrote it ({by})",
        )
    if head.kind not in KINDS:
        raise MeasurementError(
            f"{what}: kind: no report of kind {head.kind!r} is known here",
            hint=f"known: {', '.join(KINDS)}",
        )


def write(report: Report, directory: Path) -> None:
    """Write report.json and its tables as CSV; each atomically."""
    for name, rows in report.tables().items():
        with replacing(directory / f"{name}.csv") as file:
            write_csv(file, rows)
    with replacing(directory / "report.json") as file:
        file.write(report.model_dump_json())


@contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """A text file that takes its name only when it is complete. A device, a pipe, or the system's
    name for an open file (`/dev/stdout`) is written to, and stays what it is."""
    if path.parts[:2] in (("/", "dev"), ("/", "proc")) or (path.exists() and not path.is_file()):
        with path.open("w", newline="", encoding="utf-8") as file:
            yield file
        return
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", text=True)
    try:
        with os.fdopen(handle, "w", newline="", encoding="utf-8") as file:
            yield file
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def write_csv(file: IO[str], rows: Sequence[Record]) -> None:
    """One line a row, one column a field; nothing where there is no row. See `foreign.cell`."""
    if not rows:
        return
    writer = csv.writer(file)
    writer.writerow(type(rows[0]).model_fields)
    for row in rows:
        values = row.model_dump().values()
        writer.writerow([x if x.__class__ in NUMBERS else cell(x) for x in values])


def claim(directory: Path, kind: str, request: Mapping[str, Any], *, overwrite: bool) -> None:
    """Make the directory of the results. Raises UsageError where it holds another report: one of
    another command always, of another request unless `overwrite`."""
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "report.json").exists():
        return
    older = read(directory)
    if older.kind != kind:
        raise UsageError(
            f"{directory}: holds the report of a numdev {older.kind}, which would be lost",
            hint="give another --output",
        )
    if older.request != request and not overwrite:
        raise UsageError(
            f"{directory}: holds the {kind} of something else",
            hint="give another --output, or --overwrite",
        )
