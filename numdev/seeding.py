"""PyTorch's generators, seeded for a while and then as they were before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Enters a context that seeds PyTorch's generators of the CPU and of CUDA. At its end
    the CPU's is as it was before, and so are those of CUDA where CUDA was in use."""
    is_in_use = torch.cuda.is_initialized()
    devices = range(torch.cuda.device_count()) if is_in_use else ()
    with torch.random.fork_rng(devices=devices):
        # Not `torch.manual_seed`: for every kind of device that is not in use it writes
        # down the stack, and keeps that for ever. Half a millisecond, for each run.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)
        yield
