"""Kernels that take their process along, named `fragile_kernels:NAME` by the tests of clusters."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import resource
import signal
from pathlib import Path

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.kernels import Output
from numdev.kernels.baseline import baseline
from numdev.sources.opening import Drawn

LIMIT = 8 << 30
"""Bytes of address space, most of which libraries reserve."""


def segfaults(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ctypes.string_at(0)
    raise AssertionError("unreachable")


def hangs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Holds the interpreter's lock."""
    ctypes.PyDLL(None).sleep(1000)
    return q


def exhausts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Takes all the memory there is, which it has limited so that the machine keeps some."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, before[1]))
    taken = []
    try:
        while True:
            taken.append(torch.empty(1 << 28))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def raises(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise ValueError("no")


def where(case: AttentionCase) -> Output:
    """Says on which GPU it ran."""
    uuid = torch.cuda.get_device_properties(case.q.device).uuid
    return dataclasses.replace(baseline(case), ran=str(uuid))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deadly(Drawn):
    """A case of which the first so many processes die that draw it, but for the one at home."""

    home: int
    note: Path
    deaths: int

    def load(self) -> AttentionCase:
        before = len(self.note.read_text()) if self.note.exists() else 0
        if os.getpid() != self.home and before < self.deaths:
            self.note.write_text("x" * (before + 1))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load()
