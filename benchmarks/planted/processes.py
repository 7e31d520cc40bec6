"""Kernels that go wrong in every way a process can; `says` is how the reason of their
failure begins."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.kernels import Output, Refused
from planted.record import planted

KILLED, ENDED = "its process was killed by SIG", "its process ended with exit code "
CUDA_ERROR = "RuntimeError: CUDA error: an illegal memory access was encountered"


@planted("process", "Reads at address 0.", says=KILLED + "SEGV")
def segfault(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ctypes.string_at(0)
    raise AssertionError("unreachable")


@planted(
    "process",
    "Aborts, as malloc does.",
    says=KILLED + r"ABRT \(free\(\): invalid pointer\)",
)
def abort(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    print("free(): invalid pointer", file=sys.stderr, flush=True)
    os.abort()


@planted(
    "process",
    "Is killed, as by the kernel of Linux when memory runs out.",
    says=KILLED + "KILL, perhaps out of memory",
)
def out_of_memory(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


@planted("process", "Ends its process with code 3.", says=ENDED + "3")
def leaves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    os._exit(3)


@planted("process", "Raises SystemExit(4).")
def exits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise SystemExit(4)


@planted("process", "Raises KeyboardInterrupt.", says="KeyboardInterrupt: from within")
def interrupts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise KeyboardInterrupt("from within")


@planted("process", "Is interrupted by the user while it runs.")
def is_interrupted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By the user, while it runs."""
    signal.raise_signal(signal.SIGINT)
    return q


@planted("process", "Raises another exception in an interrupt's place.")
def turns_interrupts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Another exception in the interrupt's place."""
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt as error:
        raise RuntimeError("interrupted") from error
    return q


@planted("process", "Raises an error of CUDA, in several lines.", says=CUDA_ERROR)
def raises(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise RuntimeError(
        "CUDA error: an illegal memory access was encountered\nmore, in lines"
    )


@planted("process", "Declines the call.")
def refuses(case: AttentionCase) -> Output:
    raise Refused("head_dim 4 is too small")


@planted("process", "Sleeps, and holds the interpreter's lock.")
def hangs(q: Tensor, k: Tensor, v: Tensor, *, note: str = "") -> Tensor:
    """Holds the interpreter's lock. `note`: a file that gets its process and its
    child's."""
    child = subprocess.Popen(["sleep", "1000"])
    if note:
        Path(f"{note}.part").write_text(f"{os.getpid()} {child.pid}")
        Path(f"{note}.part").rename(note)
    ctypes.PyDLL(None).sleep(1000)
    return q


@planted("process", "Dies, and leaves a child that holds every pipe.", says=ENDED + "5")
def forks(case: AttentionCase) -> Output:
    """A child goes on that holds every pipe, and then the process dies."""
    if os.fork() == 0:
        time.sleep(30)
    os._exit(5)


@planted("process", "Says which of torch's settings it runs under.")
def sees(case: AttentionCase) -> Output:
    """Says which of torch's settings it runs under."""
    settings = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    return Output(out=torch.zeros_like(case.q), ran=repr(settings))


@planted(
    "process",
    "An index out of range on the device: every later CUDA call of this process fails.",
)
def poisons_cuda(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An index out of range on the device: every later CUDA call of this process
    fails."""
    return q[:, :, torch.full((q.shape[2],), 10**6, device=q.device)]
