"""The process between numdev and its worker: it starts the worker, and ends it with all
that the worker started.

A script of the standard library alone, so that it runs before torch is imported and
cannot hang with a kernel. It ends when numdev does, even by SIGKILL; when the worker
ends, it ends in the same way, by signal or exit code. On Linux it adopts processes that
detach themselves, and the worker dies with it; elsewhere it kills the worker's group."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
# How often it is looked whether numdev lives: a fork of it may hold the lifeline
TICK_S = 1.0


def main() -> None:
    """Starts the worker in a new process, waits until the worker or numdev ends, kills
    all that the worker started, and ends as the worker did, by signal or exit code, or
    with exit code 0 where numdev ended first. In the worker it returns when that has
    served. sys.argv[1] is a JSON list: numdev's process id, and the descriptors of the
    worker's socket and of the lifeline, which numdev closes by ending; then sys.path."""
    numdev, pipe, lifeline, sys.path[:] = json.loads(sys.argv[1])
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake)
    worker = os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # What it sends to its group or its parent's reaches nothing of numdev's
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for inherited in (lifeline, woken, wake):
            os.close(inherited)
        from numdev.studies.audit.isolation import serve

        serve(pipe)
        return
    os.close(pipe)
    for number in signal.valid_signals() - {
        signal.SIGCHLD,
        signal.SIGKILL,
        signal.SIGSTOP,
    }:
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    status = end_of(worker, numdev, lifeline, woken)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    end_children()
    end_as(status)


def prctl(option: int, value: int) -> None:
    """Sets an option of this process on Linux (prctl); does nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_of(worker: int, numdev: int, lifeline: int, woken: int) -> int:
    """Returns the worker's wait status, when it has ended; 0 as soon as numdev has closed
    the lifeline, or is gone. Reaps other children meanwhile. `woken`: a pipe that signals
    write to."""
    while True:
        ready, _, _ = select.select([lifeline, woken], [], [], TICK_S)
        if lifeline in ready or os.getppid() != numdev:
            return 0
        if woken in ready:
            os.read(woken, 4096)
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                return ended[1]


def end_children() -> None:
    """Kills every child process, and those that a killed child leaves to this process,
    until none is left. Where the system has no /proc it kills none, and waits for their
    end. A child that may not be killed is waited for too."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in children():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)


def children() -> list[int]:
    """Returns the ids of the processes whose parent is this one; empty where the system
    has no /proc."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parents[int(status.parent.name)] = int(
                status.read_text().rpartition(")")[2].split()[1]
            )
    return [child for child, parent in parents.items() if parent == os.getpid()]


def end_as(status: int) -> None:
    """Ends this process as the worker ended, by signal or exit code, for numdev to see.
    `status`: the worker's wait status. Does not return."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core is enough
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    main()
