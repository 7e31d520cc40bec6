"""The 1-Wasserstein distance between samples that are sorted: how they are, and what follows.

Equally long samples pair off in order, so W1 = mean |sort(a) - sort(b)|. In general it is the
integral of |F^-1 - G^-1| over the probabilities (Peyre and Cuturi, "Computational Optimal
Transport", remark 2.30). Both inverses are steps: value i of n stands from i / n to (i + 1) / n.
Where the steps of two lengths meet depends on the lengths alone, so nothing is merged or searched;
in units of 1 / lcm(n, m) all positions are integers, and every term is positive: no cancellation.

The values are sorted where they lie: by numpy on a CPU, where it is faster than torch, and by torch
on any other device, which sorts 16-bit values about four times faster than float32. What the sorter
does not know (bfloat16 in numpy, 8-bit values in both) is widened to float32 first, which changes
no value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from numdev.errors import UsageError
from numdev.metrics.blockwise import block_size, slices, sum_of_blocks, total
from numdev.metrics.rowwise import gap_sums
from numdev.metrics.wasserstein.ordering import ordered

Values = np.ndarray[Any, np.dtype[Any]]

__all__ = [
    "Part",
    "both_sorted",
    "integral",
    "not_finite",
    "sorted_rows",
    "w1_of_sorted",
    "w1_of_unequal",
    "weights",
]

_WORTH_A_THREAD = 2**16  # values; fewer are sorted before a second thread has started


def sorted_rows(x: Tensor) -> Tensor:
    """Each row of [n, m] in ascending order, NaN last, as a new tensor on its device.

    What is compared with many others is sorted once (`w1_of_sorted`). The dtype is that of `x` or
    a wider one, with the same values.
    """
    x = x.detach()
    return torch.from_numpy(_sorted_numpy(x)) if x.device.type == "cpu" else _sorted_torch(x)


def both_sorted(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """`sorted_rows` of both; on a CPU at the same time, as numpy sorts without Python's lock."""
    if a.device.type != "cpu" or min(a.numel(), b.numel()) < _WORTH_A_THREAD:
        return sorted_rows(a), sorted_rows(b)
    with ThreadPoolExecutor(1) as beside:
        second = beside.submit(sorted_rows, b)
        return sorted_rows(a), second.result()


def w1_of_sorted(a: Tensor, b: Tensor) -> Tensor:
    """W1 of each two rows of what `sorted_rows` returned: [n, m] and [n, m] to [n] float64."""
    known = gap_sums(a, b)
    if known is not None:
        return known / a.shape[1]
    gaps = _gaps_numpy if a.device.type == "cpu" else _gaps_torch
    rows, columns = a.shape
    found = torch.zeros(rows, dtype=torch.float64, device=a.device)
    for part in slices(columns, max(1, block_size(a.device) // max(1, rows))):
        found += gaps(a[:, part], b[:, part])
    return found / columns


def w1_of_unequal(a: Tensor, b: Tensor) -> float:
    """W1 between two sorted samples of any lengths, [n] and [m], on one device."""
    ends = torch.stack([x.double() for x in (a[0], a[-1], b[0], b[-1])]).tolist()
    special = not_finite(*ends)
    if special is not None:
        return special
    of_a, of_b = weights(a.numel(), b.numel())
    few, many = sorted((Part(a, 0, of_a), Part(b, 0, of_b)), key=lambda part: part.values.numel())
    # The samples are whole: nothing lies below or above them to be faced.
    parts = list(_across(many, few, few.values[0], few.values[-1]))
    return sum_of_blocks(parts) / (a.numel() * of_a)


def not_finite(low_a: float, high_a: float, low_b: float, high_b: float) -> float | None:
    """W1 of two samples with these ends, if it is not finite; a high end of NaN is NaN anywhere.

    An infinity meets one of the same sign exactly if both samples have one: both are at an end.
    """
    if any(map(math.isnan, (low_a, high_a, low_b, high_b))):
        return math.nan
    if low_a == low_b == -math.inf or high_a == high_b == math.inf:
        return math.nan
    return math.inf if any(map(math.isinf, (low_a, high_a, low_b, high_b))) else None


def weights(n: int, m: int) -> tuple[int, int]:
    """What one value of n, and one of m, weighs in units of 1 / lcm(n, m).

    Raises `UsageError` where the whole weight, lcm(n, m), is not an int64.
    """
    units = math.lcm(n, m)
    if units >= 2**63:
        raise UsageError(
            f"the Wasserstein distance of {n} values from {m} is not supported",
            hint="the least common multiple of the lengths must be below 2^63",
        )
    return units // n, units // m


@dataclass(frozen=True)
class Part:
    """The values of a sample in one range, in order [p]: `before` others of it lie below."""

    values: Tensor
    before: int
    weight: int
    """Of one value, as `weights` gives it."""

    @property
    def start(self) -> int:
        """The weight of what lies below the range."""
        return self.before * self.weight

    @property
    def stop(self) -> int:
        """The weight of what lies below the range or in it."""
        return self.start + self.values.numel() * self.weight


def integral(a: Part, b: Part, low: Tensor, high: Tensor) -> Iterator[Tensor]:
    """The integral of |F - G| from `low` to `high`, times lcm(n, m), in float64 addends.

    The range holds all values of both parts, which are finite, and no other of their samples; the
    bounds have no dimensions. It is W1 between the samples with every value outside the range
    moved to its nearer bound.
    """
    many, few = (a, b) if a.weight <= b.weight else (b, a)
    yield from _across(many, few, low, high)
    if few.start < many.start or few.stop > many.stop:
        yield from _alone(few, many, low, high)
    apart = max(0, a.start - b.stop, b.start - a.stop)  # here one is at low, the other at high
    if apart:
        yield (high.double() - low.double()) * float(apart)


def _across(many: Part, few: Part, low: Tensor, high: Tensor) -> Iterator[Tensor]:
    """Each value of the longer sample faces one of the shorter, or the end of one and the next."""
    # In front of few's values all that lies below the range, after them all that lies above it.
    facing = torch.cat([low.reshape(1), few.values, high.reshape(1)])  # [p + 2]
    for part in slices(many.values.numel(), block_size(facing.device)):
        rank = torch.arange(part.start, part.stop, device=facing.device) + many.before
        start = rank.mul_(many.weight)
        first = start // few.weight  # the rank in its sample of the value faced first
        share = ((first + 1) * few.weight - start).clamp_(max=many.weight)
        first -= few.before - 1  # its place in `facing`
        x = many.values[part].double()
        gap = _weighted(_gap(x, facing, first), share)
        if many.weight != few.weight:  # else each faces one alone
            gap += _weighted(_gap(x, facing, first + 1), many.weight - share)
        yield total(gap)


def _gap(x: Tensor, facing: Tensor, places: Tensor) -> Tensor:
    return (x - facing.index_select(0, places.clamp(0, facing.numel() - 1))).abs_()


def _weighted(gap: Tensor, share: Tensor) -> Tensor:
    # Where a difference of float64 values is infinite, 0 times it is still 0.
    return gap.mul_(share).masked_fill_(share == 0, 0.0)


def _alone(few: Part, many: Part, low: Tensor, high: Tensor) -> Iterator[Tensor]:
    """The shorter sample's values as far as those they face lie outside the range."""
    for part in slices(few.values.numel(), block_size(low.device)):
        rank = torch.arange(part.start, part.stop, device=low.device) + few.before
        start = rank.mul_(few.weight)
        below = (many.start - start).clamp_(0, few.weight)
        above = (start + (few.weight - many.stop)).clamp_(0, few.weight)
        x = few.values[part].double()
        yield total(_weighted(x - low, below) + _weighted(high - x, above))


def _gaps_numpy(a: Tensor, b: Tensor) -> Tensor:
    """The sum of |a - b| of each row, on a CPU."""
    # inf - inf is NaN here on purpose, and what exceeds float64 is infinite.
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.subtract(a.numpy(), b.numpy(), dtype=np.float64)  # [n, block]
        np.abs(gap, out=gap)
        # numpy's sum, unlike torch's, adds in the same order however many threads there are.
        return torch.from_numpy(gap.sum(axis=1))


def _gaps_torch(a: Tensor, b: Tensor) -> Tensor:
    gap = a.double().sub_(b) if a.dtype != torch.float64 else a - b  # b is widened as it is read
    sums: Tensor = torch.linalg.vector_norm(gap, ord=1, dim=1)
    return sums


def _sorted_numpy(x: Tensor) -> Values:
    """Each row of a CPU tensor in ascending order, NaN last, as a new array."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    # Copied once, in rows, and sorted in place.
    copied: Values = x.to(wide, copy=True, memory_format=torch.contiguous_format).numpy()
    copied.sort(axis=1)
    return copied


def _sorted_torch(x: Tensor) -> Tensor:
    """Each row in ascending order, NaN last, as a new tensor."""
    found = ordered(x)
    if found is not None:
        return found
    return torch.sort(x.float() if x.dtype.itemsize == 1 else x, dim=1).values
