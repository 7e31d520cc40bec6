"""Which rows of a call are measured, where not all are: drawn with a seed, spread over positions.

The positions 0 to length - 1 are cut into as many strata of equal length as rows are wanted (their
lengths differ by one at most), and one position is drawn uniformly in each. So the first rows, the
last and all between are in every sample, in proportion; and every query head and batch entry of a
call gets the same ones, so that heads can be compared. What is estimated from a sample, and how
well, is the business of `numdev.metrics.intervals`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Sample:
    """How many rows of each call are measured, and from which seed they are drawn."""

    count: int
    seed: int = 0

    def queries(self, length: int) -> Tensor | None:
        """Query rows, as `draw` has them."""
        return draw(length, self.count, self.seed, "queries")

    def keys(self, length: int) -> Tensor | None:
        """Key rows, for dk and dv."""
        return draw(length, self.count, self.seed, "keys")


def draw(length: int, count: int, seed: int, label: str) -> Tensor | None:
    """`count` of the positions 0 to length - 1, ascending, int64 [count] on the CPU.

    Depends on nothing but the arguments; other labels get other positions. None where `count`
    reaches the length: then all are measured and nothing is sampled. Raises UsageError for a count
    below 1.
    """
    if count < 1:
        raise UsageError(f"{count} rows cannot be measured", hint="ask for 1 or more")
    if count >= length:
        return None
    text = f"{seed} {label} {length} {count}".encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:7])
    generator = torch.Generator().manual_seed(number)
    ends = torch.arange(count + 1) * length // count
    offsets = torch.rand(count, generator=generator, dtype=torch.float64) * ends.diff()
    return ends[:-1] + offsets.long()
