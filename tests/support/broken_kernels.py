"""Kernels that go wrong in every way a process can, named `broken_kernels:NAME` by the
tests."""

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


def segfault(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ctypes.string_at(0)
    raise AssertionError("unreachable")


def abort(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    print("free(): invalid pointer", file=sys.stderr, flush=True)
    os.abort()


def out_of_memory(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def leaves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    os._exit(3)


def exits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise SystemExit(4)


def interrupts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise KeyboardInterrupt("from within")


def is_interrupted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By the user, while it runs."""
    signal.raise_signal(signal.SIGINT)
    return q


def turns_interrupts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Another exception in the interrupt's place."""
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt as error:
        raise RuntimeError("interrupted") from error
    return q


def raises(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise RuntimeError(
        "CUDA error: an illegal memory access was encountered\nmore, in lines"
    )


def refuses(case: AttentionCase) -> Output:
    raise Refused("head_dim 4 is too small")


def hangs(q: Tensor, k: Tensor, v: Tensor, *, note: str = "") -> Tensor:
    """Holds the interpreter's lock. `note`: a file that gets its process and its
    child's."""
    child = subprocess.Popen(["sleep", "1000"])
    if note:
        Path(f"{note}.part").write_text(f"{os.getpid()} {child.pid}")
        Path(f"{note}.part").rename(note)
    ctypes.PyDLL(None).sleep(1000)
    return q


def forks(case: AttentionCase) -> Output:
    """A child goes on that holds every pipe, and then the process dies."""
    if os.fork() == 0:
        time.sleep(30)
    os._exit(5)


def sees(case: AttentionCase) -> Output:
    """Says which of torch's settings it runs under."""
    settings = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    return Output(out=torch.zeros_like(case.q), ran=repr(settings))


def eight_bits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sound, of a format that Python's own pickle cannot read."""
    return v[:, :, : q.shape[2]].to(torch.float8_e4m3fn)


def poisons_cuda(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An index out of range on the device: every later CUDA call of this process
    fails."""
    return q[:, :, torch.full((q.shape[2],), 10**6, device=q.device)]
