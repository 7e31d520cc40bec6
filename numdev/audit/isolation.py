"""Kernels are foreign code: what one does wrong costs its own row.

`attempt` runs a kernel here and turns what it raises into a `Failure` with its reason in words. A
CUDA fault ruins its process, a segmentation fault ends it, a hang never does: `Isolated` runs
kernels in a worker process with a time limit, kept as long as nothing fails, bit for bit as here.
The worker leads a process group, killed as a whole at the limit, on Ctrl-C, on `close`, and by its
guard when this process is gone. (`multiprocessing` would import the caller's main module.)"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from numdev.cases import AttentionCase, strided_as
from numdev.errors import MeasurementError, NumdevError, Refused, one_line
from numdev.kernels import Kernel, Output, all_kernels, find
from numdev.kernels.output import as_output
from numdev.metrics.bits import same
from numdev.system import switches


@dataclass(frozen=True)
class Failure:
    """Why there is no output. Plain words: an exception would keep the kernel's tensors alive."""

    status: Literal["skipped", "failed"]
    reason: str


Runner = Callable[..., Output | Failure]  # `attempt`, or an `Isolated`
# How a case is laid out in memory, and in what state the process is, while a kernel runs. It can be
# pickled, and leaves the values of the tensors as they are.
Within = Callable[[AttentionCase], AbstractContextManager[AttentionCase]]


def attempt(
    kernel: Kernel,
    case: AttentionCase,
    options: Mapping[str, Any],
    *,
    gradients: bool = False,
    within: Within = contextlib.nullcontext,
) -> Output | Failure:
    """The kernel's output, with `gradients` that of one training step, or what went wrong. The
    kernel gets a copy of the inputs, so that writing into them, a failure, spoils no other's."""
    run = kernel.gradients if gradients else kernel.attend
    try:
        with torch.set_grad_enabled(gradients), within(copied(case)) as here:
            output = run(here, **options)
        if case.q.is_cuda:
            torch.cuda.synchronize()  # a fault of this kernel comes out here, not in the next one
        if written := [n for n, x in tensors_of(here).items() if not same(x, getattr(case, n))]:
            return Failure("failed", f"writes into its inputs ({', '.join(written)})")
        own: Output = copied(output)  # a kernel may return the same memory every time
        return own
    except Refused as refusal:
        return Failure("skipped", refusal.message)
    except Exception as error:
        return Failure("failed", one_line(error))
    except SystemExit as stop:
        return Failure("failed", f"ended the program (exit code {stop.code})")


def copied(record: Any, device: str | torch.device | None = None) -> Any:
    """A case or an output with detached tensors of its own, or on a device, laid out alike."""
    moved = {
        name: strided_as(x.detach().to(device or x.device, copy=device is None), x)
        for name, x in tensors_of(record).items()
    }
    return dataclasses.replace(record, **moved)


def tensors_of(record: Any) -> dict[str, Tensor]:
    return {name: x for name, x in vars(record).items() if isinstance(x, Tensor)}


# --- in a process of its own ----------------------------------------------------------------------

# What the worker's interpreter runs. First it leaves a guard: a child that waits for the other end
# of the lifeline to be closed, as the end of numdev's process does, and then kills the group. It
# cannot hang with the kernel, and it is there before torch is imported.
BOOT = """
import json, os, sys
sys.path[:], pipe, lifeline = json.loads(sys.argv[1])
if os.fork() == 0:
    for inherited in (0, 1, 2, pipe):
        os.close(inherited)
    os.read(lifeline, 1)
    os.killpg(0, 9)
os.close(lifeline)
from numdev.audit.isolation import serve
serve(pipe)
"""
TICK_S = 0.2  # how often it is looked whether the worker lives
UNUSABLE = "its process gave an unusable answer"
START_S = 300.0  # what importing torch may take: seconds, but minutes on a cold network disk


class Isolated(contextlib.AbstractContextManager["Isolated"]):
    """Runs kernels in a worker process. Use as a context manager; not from two threads at once."""

    def __init__(self, limit_s: float = 60.0) -> None:
        self.limit_s = limit_s
        self.process: subprocess.Popen[bytes] | None = None
        self._ends = contextlib.ExitStack()  # of the pipe and the lifeline
        self._pipe: Connection
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the worker lives

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(
        self,
        kernel: Kernel,
        case: AttentionCase,
        options: Any,
        *,
        gradients: bool = False,
        within: Within = contextlib.nullcontext,
    ) -> Output | Failure:
        """What `attempt` gives for the kernel of this name. The limit is for the kernel and its
        compilation, not for the start of a worker. Raises MeasurementError where none can be
        started; any exception, Ctrl-C included, ends the worker first."""
        device, on_cpu = case.q.device, copied(case, "cpu")
        how = (dict(options), gradients, within)
        task = packed((kernel.name, how, on_cpu, str(device), torch_settings()))
        try:
            if self.process is None or self.process.poll() is not None:
                self._start()
            self._stderr.truncate(0)
            with contextlib.suppress(BrokenPipeError):  # it just died, and so it will be found
                self._pipe.send_bytes(task)
            result: Output | Failure = self._answer(self.limit_s)
        except BaseException:
            self.close()
            raise
        if isinstance(result, Output):
            try:  # a process in which foreign code ran may answer anything
                return as_output(copied(result, device), case)
            except Exception as error:
                result = Failure("failed", f"{UNUSABLE} ({one_line(error)})")
        if result.status == "failed":
            self.close()
        return result

    def close(self) -> None:
        """End the worker, and all that it started."""
        process, self.process = self.process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # in the driver, nothing ends it
                process.wait(timeout=10)
        self._ends.close()

    def _start(self) -> None:
        self.close()
        ours, theirs = socket.socketpair()
        self._pipe = self._ends.enter_context(Connection(ours.detach()))
        lifeline, end = os.pipe()
        self._ends.callback(os.close, end)
        passed = (theirs.fileno(), lifeline)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BOOT, json.dumps([sys.path, *passed])],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=passed,
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(lifeline)
        ready = self._answer(START_S)
        if isinstance(ready, Failure):
            raise MeasurementError(f"an isolated process cannot be started: {ready.reason}")

    def _answer(self, limit_s: float) -> Any:
        """What the worker sends next, or what became of it."""
        assert self.process is not None
        pipe, deadline = self._pipe, time.monotonic() + limit_s
        try:
            # A process it left behind may hold the pipe, so that its end is not told.
            while not pipe.poll(min(TICK_S, max(0.0, deadline - time.monotonic()))):
                if self.process.poll() is not None and not pipe.poll():
                    return self._fate(self.process)
                if time.monotonic() >= deadline:
                    return Failure("failed", f"no answer within {limit_s:g} s")
            return unpacked(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return self._fate(self.process)
        except Exception as error:
            return Failure("failed", f"{UNUSABLE} ({one_line(error)})")

    def _fate(self, process: subprocess.Popen[bytes]) -> Failure:
        """How the worker ended, and the last line it wrote to stderr."""
        try:
            code = process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            what = "its process closed its pipe"
        else:
            what = f"its process ended with exit code {code}"
            if code < 0:
                what = f"its process was killed by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                what += ", perhaps out of memory"
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip()
        return Failure("failed", f"{what} ({said.splitlines()[-1].strip()})" if said else what)


def serve(descriptor: int) -> None:
    """The worker: run one task after another, until nobody sends any more."""
    pipe = Connection(descriptor)
    with contextlib.suppress(OSError):  # Linux: when memory runs out, take this process
        Path("/proc/self/oom_score_adj").write_text("1000")
    all_kernels()  # what they import takes no kernel's time
    pipe.send_bytes(packed("ready"))
    while True:
        try:
            name, how, case, device, settings = unpacked(pipe.recv_bytes())
        except EOFError:
            os.killpg(0, signal.SIGKILL)
        set_torch(settings)
        try:
            kernel, here = find(name), copied(case, device)
        except NumdevError as error:
            result: Any = Failure("failed", f"not found in the isolated process: {error}")
        else:
            options, gradients, within = how
            result = attempt(kernel, here, options, gradients=gradients, within=within)
        answer = result if isinstance(result, Failure) else copied(result, "cpu")
        pipe.send_bytes(packed(answer))


def packed(message: Any) -> bytes:
    """By torch's pickling: Python's own cannot read tensors of 8 bits."""
    buffer = io.BytesIO()
    torch.save(message, buffer)
    return buffer.getvalue()


def unpacked(sent: bytes) -> Any:
    """What one's own process sent."""
    return torch.load(io.BytesIO(sent), weights_only=False)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Numbers in the largest tensor; with fewer, threads wait for one another: benchmarks/threads.py.
SMALL = 1 << 20


def fitting(numbers: int) -> int:
    """On how many threads of a CPU PyTorch computes work whose largest tensor has so many numbers:
    one, or all. By the shape alone, and never by the load, since sums may depend on it."""
    return 1 if numbers < SMALL else torch.get_num_threads()


SETTINGS = {**switches(), "threads": (torch.get_num_threads, torch.set_num_threads)}


def torch_settings() -> dict[str, Any]:
    """What a kernel's result depends on in torch, as it stands."""
    return {name: read() for name, (read, _) in SETTINGS.items()}


def set_torch(wanted: Mapping[str, Any]) -> None:
    """Set what differs from what `torch_settings` gave, and nothing else: that may have effects."""
    now = torch_settings()
    for name, (_, set_to) in SETTINGS.items():
        if now[name] != wanted[name]:
            set_to(wanted[name])
