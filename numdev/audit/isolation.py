"""Kernels in a process of their own, so that a crash costs one row.

A CUDA fault ruins its process for every kernel that follows, a segmentation fault ends it, a hang
never does. `Supervised` runs kernels in a worker (`numdev.audit.worker`) with a time limit. What happens
to the worker becomes the reason of one `Failure`, and the next task gets a new worker. As long as
nothing fails, the worker and what it has imported and compiled are kept from task to task.

The worker computes what this process would: the same import path, torch settings and layout of
tensors, bit for bit. What a kernel prints goes nowhere; the last line of its stderr is quoted when
it dies. Tensors cross in files (`worker` says how), in shared memory where that has room.

No orphans: the worker leads a process group, which is killed as a whole when the limit has passed,
when the worker dies, on Ctrl-C, on `close`, and when this process dies, even by SIGKILL (`BOOT`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from numdev.audit.attempt import Failure, one_line
from numdev.audit.worker import packed_case, torch_settings, unpacked_output
from numdev.cases import AttentionCase
from numdev.errors import MeasurementError
from numdev.kernels import Output
from numdev.kernels.output import as_output

BOOT = """
import json, os, sys
sys.path[:], folders, tasks, answers, lifeline = json.loads(sys.argv[1])
if os.fork() == 0:
    for inherited in (0, 1, 2, tasks, answers):
        os.close(inherited)
    os.read(lifeline, 1)
    import shutil
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, 9)
os.close(lifeline)
from numdev.audit.worker import main
main(tasks, answers)
"""
"""What the worker's interpreter runs. First it leaves a guard: a child that waits for the other end
of the lifeline to be closed, as the end of numdev's process does, and then removes its files and
kills the group. It cannot hang with the kernel, and it is there before torch is imported."""
MEMORY = Path("/dev/shm")
"""Files in memory, where the system has them: a disk is several times slower."""
START_S = 300.0
"""How long the worker may take to import torch: seconds, but minutes on a cold network disk."""
TICK_S = 0.2
"""How often it is looked whether the worker lives, in case its answers' pipe does not tell."""
TAIL = 4096
"""How many characters of the worker's stderr are kept."""


class Supervised:
    """Runs kernels in a worker process. Use as a context manager; not from two threads at once."""

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._count = 0
        places = [MEMORY] if os.access(MEMORY, os.W_OK) else []
        self._folders = [
            tempfile.TemporaryDirectory(prefix="numdev-isolated-", dir=place)
            for place in (*places, None)
        ]

    def __enter__(self) -> Supervised:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The worker's process, which leads a group of that number; None while there is none."""
        return self._worker.process.pid if self._worker else None

    def run(
        self,
        kernel: str,
        options: Mapping[str, Any],
        case: AttentionCase,
        *,
        gradients: bool = False,
        limit_s: float = 60.0,
    ) -> Output | Failure:
        """What `attempt` gives for the kernel called `kernel`, on the case's device.

        `options` must be plain data. The limit is for the kernel alone, its compilation included,
        without the start of a worker. A worker whose kernel failed is not used again. Raises
        MeasurementError where the worker cannot be started or the case not be handed over; any
        exception, Ctrl-C included, ends the worker first.
        """
        self._count += 1
        try:
            result = self._run(kernel, options, case, gradients, limit_s)
        except BaseException:
            self._end_worker()
            raise
        if isinstance(result, Failure) and result.status == "failed":
            self._end_worker()
        return result

    def close(self) -> None:
        """End the worker, and remove its files."""
        self._end_worker()
        for folder in self._folders:
            folder.cleanup()

    def _run(
        self,
        kernel: str,
        options: Mapping[str, Any],
        case: AttentionCase,
        gradients: bool,
        limit_s: float,
    ) -> Output | Failure:
        folder = self._roomy_folder(case)
        given, returned = (folder / f"{self._count}-{x}" for x in ("in", "out"))
        try:
            task = {
                "task": self._count,
                "kernel": kernel,
                "options": dict(options),
                "gradients": gradients,
                "torch": torch_settings(),
                "plain": _handed_over(case, given),
                "case": str(given),
                "to": str(returned),
            }
            answer = self._living_worker().ask(task, limit_s)
            return answer if isinstance(answer, Failure) else _result(answer, returned, case)
        finally:
            for file in (given, returned):
                file.unlink(missing_ok=True)

    def _living_worker(self) -> _Worker:
        if self._worker is None or self._worker.process.poll() is not None:
            self._end_worker()
            self._worker = _Worker([folder.name for folder in self._folders])
            self._worker.wait_until_ready()
        return self._worker

    def _roomy_folder(self, case: AttentionCase) -> Path:
        """The first that holds the case and an output with gradients twice over, else the last."""
        parts = (getattr(case, f.name) for f in dataclasses.fields(case))
        need = 4 * sum(x.nbytes for x in parts if isinstance(x, Tensor))
        paths = [Path(folder.name) for folder in self._folders]
        return next((p for p in paths if shutil.disk_usage(p).free > need), paths[-1])

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()


def _handed_over(case: AttentionCase, file: Path) -> dict[str, Any]:
    try:
        return packed_case(case, file)
    except OSError as error:
        raise MeasurementError(
            f"the case cannot be handed to the isolated process: {error}",
            hint="TMPDIR says where files go",
        ) from error


def _result(answer: Mapping[str, Any], returned: Path, case: AttentionCase) -> Output | Failure:
    """The worker's answer, checked again: what has run foreign code is not believed."""
    try:
        if answer["status"] != "ok":
            return Failure(answer["status"], str(answer["reason"]))
        return as_output(unpacked_output(answer["plain"], returned, case.q.device), case)
    except Exception as error:
        return Failure("failed", f"its process gave an unusable answer ({one_line(error)})")


class _Worker:
    """One process, its pipes, and the last of what it wrote to stderr."""

    def __init__(self, folders: Sequence[str]) -> None:
        tasks, self._tasks = os.pipe()
        self._answers, answers = os.pipe()
        lifeline, self._lifeline = os.pipe()
        theirs = (tasks, answers, lifeline)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BOOT, json.dumps([sys.path, folders, *theirs])],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=theirs,
                start_new_session=True,
            )
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self._tail = ""
        assert self.process.stderr is not None
        self._drain = threading.Thread(
            target=self._listen, args=(self.process.stderr,), daemon=True
        )
        self._drain.start()

    def wait_until_ready(self) -> None:
        """Raises MeasurementError where it does not come up."""
        answer = self._answer(0, START_S)
        if isinstance(answer, Failure):
            raise MeasurementError(f"an isolated process cannot be started: {answer.reason}")

    def ask(self, task: Mapping[str, Any], limit_s: float) -> dict[str, Any] | Failure:
        """Its answer, or what became of it."""
        self._tail = ""
        with contextlib.suppress(BrokenPipeError):  # it just died, and so it will be found
            _write(self._tasks, json.dumps(task).encode() + b"\n")
        return self._answer(task["task"], limit_s)

    def kill(self) -> None:
        """End it, and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the driver, nothing ends it
            self.process.wait(timeout=10)
        self._drain.join(timeout=1)
        for descriptor in (self._tasks, self._answers, self._lifeline):
            os.close(descriptor)

    def _answer(self, number: int, limit_s: float) -> dict[str, Any] | Failure:
        deadline, received = time.monotonic() + limit_s, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    return Failure("failed", f"no answer within {limit_s:g} s")
                dead = self.process.poll() is not None
                if selector.select(0 if dead else min(left, TICK_S)):
                    piece = os.read(self._answers, 1 << 16)
                    received += piece
                    *lines, received = received.split(b"\n")
                    for line in lines:
                        answer = _parsed(line)
                        if answer.get("task") == number:
                            return answer
                    dead = not piece
                if dead:
                    return Failure("failed", self._fate())

    def _fate(self) -> str:
        """What became of a worker that answers no more."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1)
        code = self.process.poll()
        self._drain.join(timeout=0.5)
        if code is None:
            what = "its process closed its pipe"
        elif code < 0:
            what = f"its process was killed by {_signal_name(-code)}"
            if -code == signal.SIGKILL:
                what += ", as a system does that runs out of memory"
        else:
            what = f"its process ended with exit code {code}"
        last = next((x.strip() for x in reversed(self._tail.splitlines()) if x.strip()), "")
        return f"{what} ({last})" if last else what

    def _listen(self, stderr: IO[bytes]) -> None:
        with stderr, contextlib.suppress(ValueError, OSError):
            while piece := os.read(stderr.fileno(), 1 << 16):
                self._tail = (self._tail + piece.decode(errors="replace"))[-TAIL:]


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _parsed(line: bytes) -> dict[str, Any]:
    """A line of JSON; nothing for what is none."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
