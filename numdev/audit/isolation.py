"""Kernels in a process of their own, so that a crash costs one row.

A CUDA fault ruins its process for every kernel that follows, a segmentation fault ends it, a hang
never does. `Isolated` runs kernels in a worker with a time limit. What happens to the worker
becomes the reason of one `Failure`, and the next task gets a new worker; as long as nothing fails,
the worker and what it has imported and compiled are kept.

The worker computes what this process would: the same import path, torch settings and layout of
tensors, bit for bit. One pipe carries cases there and outputs back, pickled, as CPU tensors. It
leads a process group, which is killed as a whole when the limit has passed, on Ctrl-C, on `close`,
and by its guard when this process is gone, even by SIGKILL. (Not `multiprocessing`: its children
import the caller's main module again, and Dask's workers may have none.)"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numdev.audit.attempt import Failure, attempt, one_line
from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, NumdevError
from numdev.kernels import Kernel, Output, find
from numdev.kernels.output import as_output
from numdev.layouts import strided_as

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
START_S = 300.0  # what importing torch may take: seconds, but minutes on a cold network disk
CPU = torch.device("cpu")


class Isolated:
    """Runs kernels in a worker process. Use as a context manager; not from two threads at once."""

    def __init__(self, limit_s: float = 60.0) -> None:
        self.limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._ends = contextlib.ExitStack()  # of the pipe and the lifeline
        self._pipe: Connection
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the worker lives

    def __enter__(self) -> Isolated:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The worker's process, which leads a group of that number; None while there is none."""
        return self._process.pid if self._process else None

    def run(
        self,
        kernel: Kernel,
        case: AttentionCase,
        options: Mapping[str, Any],
        *,
        gradients: bool = False,
    ) -> Output | Failure:
        """What `attempt` gives for the kernel of this name, on the case's device.

        The limit is for the kernel alone, its compilation included, without the start of a worker.
        A worker whose kernel failed is not used again. Raises MeasurementError where the worker
        cannot be started; any exception, Ctrl-C included, ends the worker first.
        """
        device = case.q.device
        how = (kernel.name, dict(options), gradients)
        task = pickle.dumps((*how, on_device(case, CPU), str(device), torch_settings()))
        try:
            if self._process is None or self._process.poll() is not None:
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
                return as_output(on_device(result, device), case)
            except Exception as error:
                result = _unusable(error)
        if result.status == "failed":
            self.close()
        return result

    def close(self) -> None:
        """End the worker, and all that it started."""
        process, self._process = self._process, None
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
            self._process = subprocess.Popen(
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
        assert self._process is not None
        pipe, deadline = self._pipe, time.monotonic() + limit_s
        try:
            # A process it left behind may hold the pipe, so that its end is not told.
            while not pipe.poll(min(TICK_S, max(0.0, deadline - time.monotonic()))):
                if self._process.poll() is not None and not pipe.poll():
                    return self._fate(self._process)
                if time.monotonic() >= deadline:
                    return Failure("failed", f"no answer within {limit_s:g} s")
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return self._fate(self._process)
        except Exception as error:
            return _unusable(error)

    def _fate(self, process: subprocess.Popen[bytes]) -> Failure:
        """How the worker ended, and the last line it wrote to stderr."""
        try:
            code = process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            what = "its process closed its pipe"
        else:
            what = f"its process ended with exit code {code}"
            if code < 0:
                what = f"its process was killed by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                what += ", as a system does that runs out of memory"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").split("\n")
        last = next((x.strip() for x in reversed(lines) if x.strip()), "")
        return Failure("failed", f"{what} ({last})" if last else what)


def _unusable(error: Exception) -> Failure:
    return Failure("failed", f"its process gave an unusable answer ({one_line(error)})")


def serve(descriptor: int) -> None:
    """The worker: run one task after another, until nobody sends any more."""
    pipe = Connection(descriptor)
    with contextlib.suppress(OSError):  # Linux: when memory runs out, take this process
        Path("/proc/self/oom_score_adj").write_text("1000")
    pipe.send_bytes(pickle.dumps("ready"))
    while True:
        try:
            name, options, gradients, case, device, settings = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os.killpg(0, signal.SIGKILL)
        set_torch(settings)
        try:
            kernel, here = find(name), on_device(case, torch.device(device))
        except NumdevError as error:
            result: Any = Failure("failed", f"not found in the isolated process: {error}")
        else:
            result = attempt(kernel, here, options, gradients=gradients)
        answer = result if isinstance(result, Failure) else on_device(result, CPU)
        pipe.send_bytes(pickle.dumps(answer))


def on_device(record: Any, device: torch.device) -> Any:
    """A case or an output with detached tensors on a device, which lie in memory as they did."""
    moved = {
        name: strided_as(x.detach().to(device), x)
        for name, x in vars(record).items()
        if isinstance(x, Tensor)
    }
    return dataclasses.replace(record, **moved)


MATMUL, CUDNN, CUDA = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.cuda
BF16, FP16 = (f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16"))
# The global switches of torch that a kernel's result depends on: how each is read, and set.
SWITCHES: Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "float32_matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "cudnn_tf32": (lambda: CUDNN.allow_tf32, lambda x: setattr(CUDNN, "allow_tf32", x)),
    "bf16_reduction": (lambda: getattr(MATMUL, BF16), lambda x: setattr(MATMUL, BF16, x)),
    "fp16_reduction": (lambda: getattr(MATMUL, FP16), lambda x: setattr(MATMUL, FP16, x)),
    "sdpa_math_reduction": (
        CUDA.fp16_bf16_reduction_math_sdp_allowed,
        CUDA.allow_fp16_bf16_reduction_math_sdp,
    ),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
}


def torch_settings() -> dict[str, Any]:
    """The switches as they stand."""
    return {name: read() for name, (read, _) in SWITCHES.items()}


def set_torch(wanted: Mapping[str, Any]) -> None:
    """Set what differs from what `torch_settings` gave. (Setting a switch to what it is already is
    not always without effect.)"""
    now = torch_settings()
    for name, (_, set_to) in SWITCHES.items():
        if now[name] != wanted[name]:
            set_to(wanted[name])
