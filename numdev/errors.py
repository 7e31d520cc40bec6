"""The errors of numdev. A message says `what: expected X, got Y`; a hint says what to do.

Every error a user can cause or must know of is a `NumdevError`. `cli.main` is the only
place that catches one; it prints a single line and exits with the class's code: 0 done or
passed, 1 a gate's threshold was exceeded, 2 usage or configuration, 3 could not measure,
130 interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

LONGEST_LINE = 2000  # characters of a foreign message


class NumdevError(Exception):
    """An error with a message for the user, an optional hint, and an exit code."""

    exit_code = 3

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class UsageError(NumdevError):
    """The request itself is wrong: a path, a name, a key, a combination of options."""

    exit_code = 2


class MeasurementError(NumdevError):
    """The request is sound, and yet the measurement failed."""


class Refused(NumdevError):
    """A kernel declines a case, with its reason; its rows become `skipped`, not
    `failed`."""


def cannot_write(path: Path, error: OSError) -> NumdevError:
    """Returns, without raising it, the error for a file that cannot be written: a
    UsageError where the path is wrong (no such folder, a folder, no permission), else a
    MeasurementError, as for a full disk. `error`: what the system said."""
    wrong = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
    kind = UsageError if isinstance(error, wrong) else MeasurementError
    return kind(f"{path}: cannot be written ({error.strerror or one_line(error)})")


def why_no_file(path: Path | str) -> str:
    """Returns why a path is no file, for one that is none: `expected a file, got a
    folder`, or `no such file`."""
    # Path's own raises for a name that is too long or has a zero byte
    is_folder = os.path.isdir(path)
    return "expected a file, got a folder" if is_folder else "no such file"


def one_line(error: BaseException) -> str:
    """Returns an exception as `ValueError: first line of its message`, of which at most
    LONGEST_LINE characters, without a full stop at the end; for an empty message stands
    the exception's `repr`. Where `str(error)` raises, the message is `its message raised
    KeyError`."""
    try:
        text = str(error).strip() or repr(error)
    except BaseException as another:
        text = f"its message raised {type(another).__name__}"
    return f"{type(error).__name__}: {first_line(text).removesuffix('.')}"


def first_line(text: str) -> str:
    """Returns the first line that is not blank of a foreign text: at most LONGEST_LINE
    characters, surrogates replaced by `?`. Empty for a text of blanks alone."""
    lines = text.strip().splitlines() or [""]
    return lines[0][:LONGEST_LINE].encode(errors="replace").decode()


def signal_name(number: int) -> str:
    """Returns the name of a signal, as `SIGSEGV`; of a real-time one its distance from
    the first of these, as `SIGRTMIN+1`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN{number - signal.SIGRTMIN:+d}"


def similar_file(path: Path) -> Path | None:
    """Returns the file or folder beside `path` (which cannot be read) whose name is most
    similar to that of `path`, never `path` itself. None where none is similar (0.7 by
    difflib, with and without suffix), or where the folder cannot be listed."""
    import difflib

    try:
        names = [entry.name for entry in path.parent.iterdir() if entry != path]
    except OSError:
        return None
    for name in difflib.get_close_matches(path.name, names, n=9, cutoff=0.7):
        # An ending that two names share does not make them alike
        if difflib.SequenceMatcher(None, path.stem, Path(name).stem).ratio() >= 0.7:
            return path.parent / name
    return None


def closest(name: str, candidates: Iterable[str]) -> str:
    """Returns a hint: `did you mean 'fa2'?` with the candidate most similar to `name`;
    where none is similar `known: a, b`, all candidates in alphabetical order, or `known:
    none`."""
    import difflib  # a millisecond that `--help` need not wait for

    words = sorted(candidates)
    near = difflib.get_close_matches(name, words, n=1, cutoff=0.5)
    return (
        f"did you mean {near[0]!r}?" if near else f"known: {', '.join(words) or 'none'}"
    )
