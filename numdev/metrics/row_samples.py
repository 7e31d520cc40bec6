"""Which rows of a call are measured, where not all are; and in which bin of positions
each stands.

A sample is drawn with a seed and spread over positions: 0 to length - 1 are cut into as
many strata of equal length as rows are wanted (their lengths differ by one at most), and
one position is drawn uniformly in each. Every query head and batch entry of a call gets
the same ones, so that heads can be compared. What is estimated, and how well:
`numdev.metrics.intervals`.

A bin is as wide as all that comes before it, until bins of one width reach the end: 0, 1,
2-3, 4-7, 8-15 and so on, then equal ones. Under a causal mask row i averages i + 1 keys,
so that among the first rows every doubling changes what is computed, and later a position
hardly does."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 20  # at most
FEWEST = 4  # a call of fewer rows has no bins: nothing can be seen along it


@dataclass(frozen=True, kw_only=True)
class Sample:
    """How many rows of each call are measured, and from which seed they are drawn."""

    count: int
    seed: int = 0

    def draw(self, length: int, label: str) -> Tensor | None:
        """Returns `count` of the positions 0 to length - 1, ascending, int64 [count] on
        the CPU: one drawn from each of `count` parts, whose lengths differ by one at
        most. None where `count` reaches the length: then all rows are measured. `count`
        is at least 1.

        Depends on nothing but the fields and the arguments; with another `label`, the
        name of a call, other positions are drawn."""
        if self.count >= length:
            return None
        text = f"{self.seed} {label} {length} {self.count}".encode()
        number = int.from_bytes(hashlib.sha256(text).digest()[:7])
        generator = torch.Generator().manual_seed(number)
        ends = torch.arange(self.count + 1) * length // self.count
        offsets = (
            torch.rand(self.count, generator=generator, dtype=torch.float64) * ends.diff()
        )
        return ends[:-1] + offsets.long()


@dataclass(frozen=True, kw_only=True, eq=False)
class Strata:
    """Why each measured row of a call is measured, bool [rows] each: some were drawn,
    some stood out among all (`numdev.studies.audit.row_screening`). The latter stand for
    themselves alone, the others for all rows that did not stand out."""

    of: int  # rows of the call
    drawn: Tensor
    suspects: Tensor

    @classmethod
    def joined(
        cls, drawn: Tensor, suspects: Tensor, length: int
    ) -> tuple[Tensor, Strata]:
        """Returns the rows of a call of `length` rows that are `drawn` or `suspects`
        (indices, int64), ascending and each once, and why each is measured: a row may be
        both."""
        rows = torch.cat([drawn, suspects]).unique()
        was_drawn, stands_out = (torch.isin(rows, some) for some in (drawn, suspects))
        return rows, cls(of=length, drawn=was_drawn, suspects=stands_out)


@functools.lru_cache(maxsize=256)
def starts(length: int) -> tuple[int, ...]:
    """Returns the first row of every bin of positions in a call of `length` rows,
    ascending from 0, at most BINS. In a long call they are 0, 1, 2, 4, 8 and so on, then
    in steps that differ by one at most; in a call of up to BINS rows each row is a bin.
    Empty for a call of fewer than FEWEST rows."""
    first_rows: list[int] = []
    at = 0 if length >= FEWEST else length
    while at < length:
        left = BINS - len(first_rows)
        first_rows.append(at)
        even = -(-(length - at) // left)
        at += even if left == 1 else min(max(at, 1), even)
    return tuple(first_rows)


def membership(length: int, positions: Tensor) -> Tensor | None:
    """Returns which of the rows at `positions` (int64 [rows]) of a call of `length` rows
    are in which bin: 1.0 or 0.0, fp64 [rows, bins], on the device of `positions`. None
    where there are no bins. The matrix product of numbers [rows] with it sums them bin by
    bin."""
    first = starts(length)
    if not first:
        return None
    inner = torch.tensor(first[1:], device=positions.device)
    of = torch.bucketize(positions, inner, right=True)
    return (of[:, None] == torch.arange(len(first), device=positions.device)).double()
