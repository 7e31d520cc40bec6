"""The search for a cause in a process of its own: a crash then costs the cause's name,
and no verdict. The reference with other options is foreign code in a state that nobody
has tried, on which PyTorch may crash.

The process is a fork that computes with one thread, since the parent's other threads do
not exist in it. Where a fork is not possible (no Linux, CUDA in use) the search runs in
this process, without a time limit."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping

import torch

from numdev.errors import NumdevError
from numdev.operations.function.causes import OtherFunction
from numdev.operations.function.process import ending_of

LIMIT_S = 300.0  # beyond the search's own time: where one run does not end
Named = Mapping[str, OtherFunction]  # by tensor
Search = Callable[[], Named]
RAISED = "the reference does not run again"
GIVEN_UP = "the search"  # what begins so took too long, or ended its process


def guarded(search: Search, device: str) -> tuple[Named, str | None]:
    """Returns what a search names, and None; or an empty mapping, and in words why: the
    search raised, it ended its process, or it took longer than LIMIT_S seconds. `device`:
    where it computes, `cpu` or `cuda`. Where no fork is possible, as on `cuda`, it runs
    in this process without that limit, and KeyboardInterrupt and SystemExit are
    raised."""

    def plain() -> object:
        """Returns what the search names as plain data."""
        return {name: dataclasses.asdict(x) for name, x in search().items()}

    named, why = guarded_data(plain, device)
    every: Mapping[str, dict[str, object]] = named or {}  # type: ignore[assignment]
    causes = {
        name: OtherFunction(**fields)  # type: ignore[arg-type]
        for name, fields in every.items()
    }
    return causes, why


def guarded_data(search: Callable[[], object], device: str) -> tuple[object, str | None]:
    """Returns what a search returns, and None; or None, and in words why it failed, as
    `guarded`. `search`: returns plain data that JSON has. After a fork tuples come back
    as lists. Where no fork is possible it runs in this process without a time limit, and
    KeyboardInterrupt and SystemExit are raised."""
    is_forked = device == "cpu" and sys.platform == "linux"
    if is_forked and not torch.cuda.is_initialized():
        return _in_a_fork(search)
    return _data_or_reason(search)


def _data_or_reason(search: Callable[[], object]) -> tuple[object, str | None]:
    """Returns what a search returns, and None; or None, and why it raised: the message of
    numdev's own error, else RAISED. KeyboardInterrupt and SystemExit are raised as they
    are."""
    try:
        return search(), None
    except NumdevError as error:
        return None, str(error)
    except Exception:  # the reference is foreign code
        return None, RAISED


def _in_a_fork(search: Callable[[], object]) -> tuple[object, str | None]:
    """Runs a search in a forked process. Returns its result, as JSON gives it back, and
    None; or None, and why there is none, after LIMIT_S seconds at the latest. The process
    is ended in any case. Raises OSError where none can be forked."""
    answer, write = os.pipe()
    with warnings.catch_warnings():
        # Of other threads, which the fork does not need
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(answer)
        _search_and_exit(search, write)
    os.close(write)
    try:
        text = _read(answer, time.monotonic() + LIMIT_S)
        if text is None:
            return None, f"{GIVEN_UP} took more than {LIMIT_S:g} s"
        if not text:
            return None, f"{GIVEN_UP} ended its process{ending_of(pid)}"
        data, why = json.loads(text)
        return data, why
    finally:
        os.close(answer)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _search_and_exit(search: Callable[[], object], write: int) -> None:
    """Runs in the fork: writes what `_data_or_reason` returns into the descriptor
    `write`, as JSON, and ends the process with exit code 0. Nothing is written where it
    raises. What foreign code writes to stdout goes to stderr. Does not return."""
    try:
        os.dup2(2, 1)
        # Not this process's own: what it had not yet written is the parent's to write
        sys.stdout = sys.stderr
        faulthandler.disable()  # a test runner's, which would show the parent's stack
        torch.set_num_threads(1)
        # A reference that asks for more would wait for the parent's threads for ever
        torch.set_num_threads = _ignored
        text = json.dumps(_data_or_reason(search))
        with os.fdopen(write, "w") as stream:
            stream.write(text)
    finally:
        os._exit(0)


def _ignored(nthreads: int) -> None:
    """Does nothing, in place of `torch.set_num_threads`."""


def _read(descriptor: int, until: float) -> str | None:
    """Returns all that comes from a descriptor until it is closed, as text; None where it
    is not closed by the deadline `until` (of `time.monotonic`)."""
    parts: list[bytes] = []
    while True:
        left = max(0.0, until - time.monotonic())
        if not select.select([descriptor], [], [], left)[0]:
            return None
        part = os.read(descriptor, 1 << 16)
        if not part:
            return b"".join(parts).decode()
        parts.append(part)
