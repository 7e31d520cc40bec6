"""What workers import, imported before there are any, and beside what this process imports.

Python's fork server is a process that has imported what a worker needs, PyTorch above all; workers
are copies of it. They are there at once, the ones that replace others too, and share its memory. It
ends with this process. It keeps the environment that it was started in, so it is for a process that
does nothing else than one command; elsewhere workers are started as ever, by `spawn`. On Linux
alone: what the system's libraries on a Mac do in a copy of a process is not defined.

Ctrl-C in a terminal goes to every process of a command. It is this one that acts on it: the server
and its copies never see it, not even while they import.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver, resource_tracker
from typing import Literal

from numdev.cli.ending import is_ours

NEEDED = ["distributed", "numdev.audit.cluster.remote"]
SAFE = "PYTHONSAFEPATH"
_BEGUN: list[bool] = []


def begin(workers: int) -> None:
    """Start the server, for so many workers; where it is not to be, do nothing."""
    if _BEGUN or not is_ours() or sys.platform != "linux":
        return
    multiprocessing.set_forkserver_preload(NEEDED)
    share = str(max(1, (os.cpu_count() or 1) // workers))
    # For libraries that start their threads when they are imported; PyTorch is told what to use.
    given = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or share}
    # It would import what lies in the working directory before all else.
    if not _imports_from_here():
        given[SAFE] = "1"
    atexit.register(_end)
    # Where the path of the directory for temporary files is too long for a socket, there is none.
    with contextlib.suppress(OSError):
        resource_tracker.ensure_running()  # which lets signals through again
        with _environment(given), _uninterrupted():
            forkserver.ensure_running()
        _BEGUN.append(True)


def method() -> Literal["forkserver", "spawn"]:
    """How workers are to be started."""
    return "forkserver" if _BEGUN else "spawn"


def environment() -> dict[str, str]:
    """What workers are to have in their environment again; an empty text is as good as none."""
    return {SAFE: os.environ.get(SAFE, "")} if _BEGUN else {}


def _imports_from_here() -> bool:
    """Whether this process looks for modules in the working directory."""
    try:
        return not {"", os.getcwd()}.isdisjoint(sys.path)
    except OSError:  # it was removed
        return False


@contextlib.contextmanager
def _environment(given: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """What is started here never gets SIGINT; this process gets it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end() -> None:
    """The server would first finish what it imports, and then take it all apart; until then whoever
    reads what this process prints would wait."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
