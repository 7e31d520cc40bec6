"""Run tasks, keep what is finished, survive an interrupt.

A task is plain data: which case, which kernel with which options, which format, which seed. Its key
is a hash of that data, and its rows depend on nothing else. The journal (`rows.jsonl`) is a header
that names the request and the environment, then one line for each finished task; killed at any
moment, it loses at most the line being written, and where a GPU was at work the few that were put
off (`numdev.audit.meanwhile`). The same request in the same environment continues where it stopped;
anything else is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_json

from numdev.cases import CaseRef
from numdev.errors import UsageError
from numdev.metrics.sampling import Sample

JOURNAL = "rows.jsonl"
RESULTS = (
    *("report.json", "report.html", "rows.csv", "weights.csv", "cells.csv", "distances.csv"),
    *("heads.csv", "cures.csv", "kernels.csv", "profiles.csv", "state.pt"),
)
"""What is built from a journal or goes on from it, and goes with it under --overwrite."""


def digest(data: Any) -> str:
    """A short, stable hash of plain data."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One kernel on one case in one format. Picklable; `key` identifies its result."""

    case: CaseRef
    role: str
    kernel: str
    options: Mapping[str, Any] = field(default_factory=dict)
    format: str
    heads: tuple[int, ...] | None = None
    """The query heads that are measured; None: all. The kernel runs whole either way."""
    gradients: bool = False
    """Whether it is a training step, and dq, dk and dv are measured too."""
    repeats: int = 1
    """How often the kernel runs on the same inputs; from two on its noise is measured."""
    sample: Sample | None = None
    """Which rows are measured; None: all. The kernel runs whole either way."""

    @cached_property
    def key(self) -> str:
        sample = None if self.sample is None else vars(self.sample)
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return digest({**plain, "case": vars(self.case), "sample": sample})


Row = dict[str, Any] | BaseModel
"""Of a journal: plain data, or what a report's models hold, which forbid what JSON cannot say."""


def plain(row: Row) -> dict[str, Any]:
    """A row as plain data."""
    return row if isinstance(row, dict) else row.model_dump(mode="json")


class Journal:
    """The finished tasks of one request in one directory. Use as a context manager.

    `visit` must be called for every task of the request, finished or not; `rows` then gives all
    rows of a kind in that order, however often the run was interrupted.
    """

    def __init__(self, directory: Path, header: Mapping[str, Any]) -> None:
        self.directory = directory
        self.header = json.loads(json.dumps(header, default=str))
        self._done: dict[str, list[Row]] = {}
        self._order: dict[str, str] = {}
        self._file: IO[str] | None = None

    @classmethod
    def open(cls, directory: Path, header: Mapping[str, Any], *, overwrite: bool) -> Journal:
        """Start or continue in `directory`.

        Raises UsageError when it holds something else, or the journal of another request or
        environment, unless `overwrite` (which removes only what numdev wrote), and when it cannot
        be written.
        """
        journal = cls(directory, header)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            journal._open(overwrite=overwrite)
        except OSError as error:
            raise UsageError(
                f"{error.filename or directory}: cannot write results there ({error.strerror})",
                hint="choose another --output",
            ) from error
        return journal

    def _open(self, *, overwrite: bool) -> None:
        directory, path = self.directory, self.directory / JOURNAL
        held = sorted(p.name for p in directory.iterdir())
        if held and not (path.exists() and (_never_began(path) or _header_of(path))):
            raise UsageError(
                f"{directory}: holds something else ({held[0]})",
                hint="choose an empty or a new --output",
            )
        if overwrite:
            for name in (*RESULTS, JOURNAL):
                (directory / name).unlink(missing_ok=True)
        if path.exists() and not _never_began(path):
            self._resume(path)
        else:
            self._file = path.open("w", encoding="utf-8")
            self._write({"header": self.header})

    @property
    def finished(self) -> int:
        return len(self._done)

    def visit(self, key: str, kind: str = "row") -> bool:
        """Note that the task belongs to this run, in this order; True if it is finished."""
        self._order.setdefault(key, kind)
        return key in self._done

    def add(self, key: str, rows: Iterable[Row], kind: str = "row") -> None:
        """Record a finished task. `kind` tells apart what goes into different lists of a report."""
        self.visit(key, kind)
        self._done[key] = list(rows)
        self._write({"task": key, "rows": self._done[key]})

    def rows(self, kind: str = "row") -> Iterator[dict[str, Any]]:
        """The rows of all visited and finished tasks of a kind, in the order of first visit."""
        return (plain(row) for row in self.kept(kind))

    def kept(self, kind: str = "row") -> Iterator[Row]:
        """The same as they were added; plain data where an earlier run did."""
        for key, its_kind in self._order.items():
            if its_kind == kind:
                yield from self._done.get(key, ())

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None
        self._file.write(_encoded(line) + "\n")
        self._file.flush()

    def _resume(self, path: Path) -> None:
        with path.open("rb") as file:
            raw = file.readline()
            self._check_header(json.loads(raw)["header"])
            good = len(raw)
            for raw in file:
                line = _parse(raw, {"task", "rows"})
                if line is None:
                    break
                self._done[line["task"]] = line["rows"]
                good += len(raw)
        self._file = path.open("r+", encoding="utf-8")
        self._file.truncate(good)  # a torn last line belongs to a task that was not finished
        self._file.seek(good)

    def _check_header(self, header: Any) -> None:
        if header == self.header:
            return
        theirs = header if isinstance(header, dict) else {}
        for part in self.header:
            ours_part, their_part = self.header[part], theirs.get(part)
            if ours_part == their_part:
                continue
            where, was, now = first_difference(their_part, ours_part)
            raise UsageError(
                f"{self.directory}: holds a run with a different {part}: "
                f"{where}{' was ' if where else ''}{was!r}, now {now!r}",
                hint="choose another --output, or --overwrite to start anew",
            )
        raise UsageError(f"{self.directory}: holds another run", hint="choose another --output")


def _encoded(line: Mapping[str, Any]) -> str:
    """Plain data as JSON, one line of ASCII; raises ValueError for a number that is not finite."""
    with suppress(PydanticSerializationError):  # a string that is not Unicode
        text = to_json(line, inf_nan_mode="constants")
        if text.isascii() and b"NaN" not in text and b"Infinity" not in text:
            return text.decode()
    # Five times as slow.
    return json.dumps(line, separators=(",", ":"), allow_nan=False, default=plain)


def _never_began(path: Path) -> bool:
    """Whether a journal was interrupted within its header: there is nothing in it to lose."""
    with path.open("rb") as file:
        raw = file.readline()
    start = b'{"header":'
    return not raw.endswith(b"\n") and raw[: len(start)] == start[: len(raw)]


def _header_of(path: Path) -> Any:
    """The header of a journal of ours; None for a file that is something else."""
    with path.open("rb") as file:
        line = _parse(file.readline(), {"header"})
    return line and line["header"]


def _parse(raw: bytes, keys: set[str]) -> dict[str, Any] | None:
    """A whole line with exactly these keys; None for anything else."""
    if not raw.endswith(b"\n"):
        return None
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) and line.keys() == keys else None


def first_difference(old: Any, new: Any, path: str = "") -> tuple[str, Any, Any]:
    """Where two unequal pieces of plain data first differ, as `key.key`, and both values there."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*new, *old]:
            if old.get(key) != new.get(key):
                return first_difference(old.get(key), new.get(key), f"{path}{key}.")
    return path.rstrip("."), old, new
