"""The start and the end of the process that runs foreign kernels. Standard library alone:
a command starts the process before it imports torch, and the process imports meanwhile.

What is started is `worker_parent`; `isolation` talks to it."""

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

SUPERVISOR = Path(__file__).with_name("worker_parent.py")
END_S = 5.0  # what a supervisor may take to end what its worker started


@dataclass(frozen=True, eq=False)
class WorkerProcess:
    """A supervisor with its worker, and this process's ends of the pipes to them."""

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
        """Ends the process and all that it started; waits for that, up to END_S seconds,
        then kills it and waits up to twice as long. What it has sent can still be read.
        To be called once."""
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
    """Yields a list with one process that is starting; empty unless `wanted`. The process
    ends with the block, unless someone took it out of the list, who then must end it.
    Raises OSError where no process can be started."""
    waiting = [WorkerProcess.start()] if wanted else []
    try:
        yield waiting
    finally:
        for worker in waiting:
            worker.end()
            worker.socket.close()
            os.close(worker.stderr)
