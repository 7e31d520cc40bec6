"""What is finished stays finished: a run's rows on disk, task by task.

The journal (`rows.jsonl`) is a header that names the request and the environment, then one line for
each finished task, written at once: killed at any moment, it loses at most the line being written.
The same request in the same environment continues where it stopped; anything else is refused,
unless nothing was measured before the run failed: then there is nothing to lose."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import BaseModel

from numdev.errors import UsageError
from numdev.temporary import remove_stale

JOURNAL = "rows.jsonl"
# What is built from a journal or goes on from it, and goes with it under --overwrite.
RESULTS = (
    *("report.json", "report.html", "rows.csv", "weights.csv", "cells.csv", "distances.csv"),
    *("heads.csv", "cures.csv", "kernels.csv", "models.csv", "state.pt"),
)
START = b'{"header":'
Row = dict[str, Any] | BaseModel
M = TypeVar("M", bound=BaseModel)


class Journal(contextlib.AbstractContextManager["Journal"]):
    """The finished tasks of one request in one directory. Use as a context manager. `visit` must be
    called for every task of the request, finished or not; `rows` then gives all rows of a kind in
    that order, however often the run was interrupted."""

    def __init__(self, directory: Path, header: Mapping[str, Any]) -> None:
        self.directory = directory
        self.header = json.loads(json.dumps(header, default=str))
        self._done: dict[str, dict[str, list[Row]]] = {}
        self._order: dict[str, None] = {}
        self._file: IO[str] | None = None

    @classmethod
    def open(cls, directory: Path, header: Mapping[str, Any], *, overwrite: bool) -> Journal:
        """Start or continue in `directory`. Raises UsageError when it cannot be written, holds
        something else, or another request's journal unless `overwrite` (of what numdev wrote)."""
        journal = cls(directory, header)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            remove_stale(directory)
            journal._open(overwrite=overwrite)
        except OSError as error:
            what = f"{error.filename or directory}: cannot write results there ({error.strerror})"
            raise UsageError(what, hint="choose another --output") from error
        return journal

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def finished(self) -> int:
        return len(self._done)

    def visit(self, key: str) -> bool:
        """Note that the task belongs to this run, in this order; True if it is finished."""
        self._order.setdefault(key)
        return key in self._done

    def append(self, key: str, rows: Mapping[str, Iterable[Row]]) -> None:
        """Record a finished task: its rows, by the kind of list of a report they go into."""
        self.visit(key)
        self._done[key] = {kind: list(some) for kind, some in rows.items()}
        self._write({"task": key, "rows": self._done[key]})

    def rows(self, kind: str) -> list[Any]:
        """The rows of a kind of all visited and finished tasks, in the order of first visit: as
        they were appended, plain data where an earlier run did."""
        done = (self._done.get(key, {}) for key in self._order)
        return [row for rows in done for row in rows.get(kind, ())]

    def records(self, kind: str, model: type[M]) -> tuple[M, ...]:
        """The same as records of a report."""
        return tuple(model.model_validate(row) for row in self.rows(kind))

    def _open(self, *, overwrite: bool) -> None:
        path = self.directory / JOURNAL
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        first = lines[0] if lines else b""
        # Interrupted within its header, there is nothing in it to lose.
        blank = not first.endswith(b"\n") and START[: len(first)] == first[: len(START)]
        header = _parse(first, {"header"})
        others = sorted(p.name for p in self.directory.iterdir())
        if others and not (path.exists() and (blank or (header and header["header"]))):
            what = f"{self.directory}: holds other files ({others[0]})"
            raise UsageError(what, hint="choose an empty or a new --output")
        good = len(first)
        for raw in lines[1:] if header and not overwrite else ():
            line = _parse(raw, {"task", "rows"})
            if line is None:
                break
            self._done[line["task"]] = line["rows"]
            good += len(raw)
        measured = any(rows.keys() - {"case"} for rows in self._done.values())
        if header is None or overwrite or not (measured or header["header"] == self.header):
            for name in (*RESULTS, JOURNAL):
                (self.directory / name).unlink(missing_ok=True)
            self._done.clear()
            self._file = path.open("w", encoding="utf-8")
            self._write({"header": self.header})
            return
        for part in {**self.header, **header["header"]}:
            was, now = header["header"].get(part), self.header.get(part)
            if was != now:
                where, was, now = first_difference(was, now)
                raise UsageError(
                    f"{self.directory}: holds a run with a different {part}: "
                    f"{where}{' was ' if where else ''}{was!r}, now {now!r}",
                    hint="choose another --output, or --overwrite to replace it",
                )
        self._file = path.open("r+", encoding="utf-8")
        self._file.truncate(good)  # a torn last line belongs to a task that was not finished
        self._file.seek(good)

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None
        plain: Any = lambda row: row.model_dump(mode="json")  # noqa: E731
        text = json.dumps(line, separators=(",", ":"), allow_nan=False, default=plain)
        self._file.write(text + "\n")
        self._file.flush()


def _parse(raw: bytes, keys: set[str]) -> dict[str, Any] | None:
    """A whole line with exactly these keys; None for anything else."""
    try:
        line = json.loads(raw) if raw.endswith(b"\n") else None
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
