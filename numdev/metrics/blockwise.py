"""Sums over long tensors, block by block, so that what is computed on the way stays small.

Every sum is taken in float64, within a block and then over the blocks, in an order that depends on
the length alone: a CPU gives the same bits however many threads it has.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

__all__ = ["block_size", "slices", "sum_of_blocks", "total"]

# On a CPU a block in float64 is 256 KB: it stays in the cache, and torch starts no threads for it,
# which costs more than the work where cores are shared. On an accelerator it is 32 MB, so that
# starting a kernel costs little beside running it.
_CPU_BLOCK, _DEVICE_BLOCK = 2**15, 2**22


def block_size(device: torch.device) -> int:
    """How many elements to work on at a time on a device."""
    return _CPU_BLOCK if device.type == "cpu" else _DEVICE_BLOCK


def slices(length: int, size: int) -> Iterator[slice]:
    """[0, length) in order, in slices of `size` and a last one of what is left; none of 0."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def total(x: Tensor) -> Tensor:
    """The sum of a float64 tensor, as a tensor without dimensions, on its device.

    NaN and infinity propagate, a sum beyond float64's range is infinite, and that of nothing 0.
    """
    if x.device.type != "cpu":
        return x.sum()
    # numpy's sum, unlike torch's, adds in the same order however many threads there are.
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.tensor(float(np.sum(x.numpy())), dtype=torch.float64)


def sum_of_blocks(parts: list[Tensor]) -> float:
    """The sum of `total`s of one device: the one place that waits for it. Of none, 0."""
    return float(torch.stack(parts).sum()) if parts else 0.0
