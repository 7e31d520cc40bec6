"""The start and the end of the process in which foreign kernels run. Standard library
alone: a command starts it before it imports torch, which the process imports meanwhile.

`worker_supervisor` is what is started, `isolation` what speaks to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SUPERVISOR = Path(__file__).with_name("worker_supervisor.py")
END_S = 5.0  # what a supervisor may take to end what its worker started


@dataclass(frozen=True, eq=False)
class WorkerProcess:
    """A supervisor with its worker, and the ends of their pipes that are here."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    stderr: int
    # What closes it, the end of this process too, ends the supervisor and all of its
    lifeline: int

    @classmethod
    def start(cls) -> WorkerProcess:
        """Starts a supervisor and its worker, which may not be ready yet. Raises OSError
        where no process can be started."""
        ours, theirs = socket.socketpair()
        end, lifeline = os.pipe()
        stderr, written = os.pipe()
        passed = (theirs.fileno(), end)
        arguments = json.dumps([os.getpid(), *passed, sys.path])
        try:
            process = subprocess.Popen(
                [sys.executable, SUPERVISOR, arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=written,
                pass_fds=passed,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            os.close(lifeline)
            os.close(stderr)
            raise
        finally:
            theirs.close()
            os.close(end)
            os.close(written)
        return cls(process, ours, stderr, lifeline)

    def end(self) -> None:
        """Ends the process and all that it started. What it has sent can still be
        read."""
        os.close(self.lifeline)
        try:
            self.process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:  # its supervisor was stopped
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            # In the driver, nothing ends it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=2 * END_S)


@contextlib.contextmanager
def started(*, wanted: bool) -> Iterator[list[WorkerProcess]]:
    """Yields a list of a process that is starting, empty unless `wanted`. Whoever takes
    it out of the list ends it; else it ends with the block. Raises OSError where no
    process can be started."""
    waiting = [WorkerProcess.start()] if wanted else []
    try:
        yield waiting
    finally:
        for worker in waiting:
            worker.end()
            worker.socket.close()
            os.close(worker.stderr)
