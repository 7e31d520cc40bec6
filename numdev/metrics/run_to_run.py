"""Noise: how far a kernel's results on the same inputs differ from run to run.

Of k runs x_1 ... x_k the noise of a head is

    sqrt( mean over pairs i < j and over elements of (x_i - x_j)^2 ),

the distance between two runs, sqrt(2) times the standard deviation of one; a mean over
pairs, it is free of the number of runs. It is exactly 0 when all runs agree bit for bit,
and only then: pairs are compared for equality first. NaN equals NaN at the same place,
and infinity itself; zeros of different sign are not told apart. Where only one of two
runs is finite there is no distance: such elements are counted (`flickering`) and left out
of the mean."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.errors import MeasurementError
from numdev.formats import all_finite
from numdev.metrics.bit_checksums import same
from numdev.metrics.yardstick import finite, widened

# Elements of one run compared at a time: 128 MiB in fp64, some six times that in all.
ELEMENTS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How far runs of one head on the same inputs differ."""

    noise: float | None
    """Root mean square difference of two runs; None for a single run, and where no pair
    of runs has an element that is finite in both."""
    # Elements that are NaN or infinite in one run and not, or not so, in another
    flickering: int


def noise(runs: Sequence[Tensor]) -> list[Noise]:
    """Returns the noise of each of the H heads of one tensor [B, H, rows, ...] over
    several runs, at least one: the root mean square difference of two runs, over all
    pairs and the elements that are finite in both. It is None for a single run, and where
    no element is finite in both of any pair; else 0 for runs of the same bits.
    `flickering` counts elements that are not finite in a run, and not the same in
    another.

    Two runs are brought to fp64 at a time, some heads at a time. Raises MeasurementError
    where runs differ in shape or dtype."""
    if len({(x.shape, x.dtype) for x in runs}) > 1:
        raise MeasurementError("runs on the same inputs differ in their shape or dtype")
    heads = runs[0].shape[1]
    step = max(1, ELEMENTS * heads // max(1, runs[0].numel()))
    if step < heads:
        parts = zip(*(x.detach().split(step, dim=1) for x in runs), strict=True)
        return [head for part in parts for head in noise(part)]
    runs = [x.detach() for x in runs]
    alike = len(runs) > 1 and all(same(runs[0], x) for x in runs[1:])
    if alike and runs[0].numel() and all_finite(runs[:1]):
        return [Noise(noise=0.0, flickering=0)] * heads
    squares = torch.zeros(runs[0].shape[1], dtype=torch.float64, device=runs[0].device)
    counts, moves = torch.zeros_like(squares), torch.zeros_like(squares)
    flickers = torch.zeros_like(runs[0], dtype=torch.bool)
    for one, other in itertools.combinations(runs, 2):
        if same(one, other):
            counts += _sum_per_head(finite(widened(one)))
            continue
        a, b = one.double(), other.double()
        equal, both = (a == b) | (a.isnan() & b.isnan()), finite(a) & finite(b)
        flickers |= ~equal & ~both
        moved = ~equal & both
        moves += _sum_per_head(moved)
        squares += _sum_per_head(torch.where(moved, a - b, 0.0) ** 2)
        counts += _sum_per_head(both)
    rms = (squares / counts).sqrt()
    # A square may underflow, but what differs is never called equal.
    rms = torch.where((moves > 0) & (rms == 0), math.ulp(0.0), rms)
    numbers = torch.stack([rms, counts, _sum_per_head(flickers)], dim=-1).tolist()
    return [Noise(noise=r if c else None, flickering=int(f)) for r, c, f in numbers]


def _sum_per_head(x: Tensor) -> Tensor:
    """Returns the sum of x [B, H, ...] over all axes but the heads', fp64 [H]."""
    return x.transpose(0, 1).flatten(1).sum(dim=1, dtype=torch.float64)
