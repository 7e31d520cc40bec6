"""The 1-Wasserstein distance of 16-bit and 8-bit samples, by counting bit patterns.

However long a sample, it has at most 65,536 different values. Between two neighbouring values of
both samples F - G is constant and a ratio of integers, so W1, the integral of |F - G|, is a short
sum with exact weights. Nothing is sorted but the values that occur, and a sample is read once, a
chunk at a time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from numdev.metrics.blockwise import slices
from numdev.metrics.wasserstein.histogram import counted
from numdev.metrics.wasserstein.sorting import Values, not_finite, weights

__all__ = ["Tally", "countable", "pattern_counts", "tally", "w1_of_tallies"]

_COUNTED_AT_ONCE = 2**20  # by numpy, which makes an int64 copy of what it counts
_FEW = 2**22
"""So many on a GPU are sorted sooner than a table of all patterns is looked through."""


@dataclass(frozen=True)
class Tally:
    """A sample as its values and how often each occurs: [k] float64 in ascending order, NaN last,
    and [k] int64.

    Two patterns may have one value (both zeros, all NaN); every count is positive.
    """

    values: Values
    counts: Values


def countable(x: Tensor) -> bool:
    """Whether a tensor's format has few enough values to be counted one by one."""
    return x.dtype.itemsize <= 2


def tally(x: Tensor, device: torch.device, at_once: int) -> Tally:
    """How often each value occurs in [n] of a `countable` dtype.

    Counted on `device`, where at most `at_once` values are at a time.
    """
    bits = x.view(torch.uint8 if x.dtype.itemsize == 1 else torch.int16)
    if device.type != "cpu" and x.numel() <= min(at_once, _FEW):  # without a table of all
        return tally_of_runs(bits.to(device), x.dtype)
    counts = np.zeros(256**x.dtype.itemsize, dtype=np.int64)
    for part in slices(x.numel(), at_once):
        counts += pattern_counts(bits[part].to(device))
    values, order = _in_order(x.dtype)
    counts = counts[order]
    present = np.flatnonzero(counts)
    return Tally(values[present], counts[present])


def tally_of_runs(bits: Tensor, dtype: torch.dtype) -> Tally:
    """The tally of [n] patterns of a format, on any device."""
    patterns, counts = _runs(bits)
    values = torch.from_numpy(patterns).view(dtype).double().numpy()
    order = np.argsort(values, kind="stable")
    return Tally(values[order], counts[order])


@functools.cache
def _in_order(dtype: torch.dtype) -> tuple[Values, Values]:
    """The values of all patterns of a format in ascending order, NaN last, and the patterns."""
    patterns = np.arange(256**dtype.itemsize, dtype=f"u{dtype.itemsize}")
    values = torch.from_numpy(patterns).view(dtype).double().numpy()
    order = np.argsort(values, kind="stable")
    return values[order], order


def pattern_counts(bits: Tensor) -> Values:
    """How often each pattern occurs in [n] of uint8 or int16, by its unsigned number: int64."""
    size = 256**bits.dtype.itemsize
    if bits.device.type == "cpu":
        return _counted_by_numpy(bits.numpy(), size)
    counts = counted(bits) if bits.dtype == torch.int16 and bits.numel() > _FEW else None
    return _counted_by_torch(bits, size) if counts is None else counts.cpu().numpy()


def _counted_by_numpy(bits: Values, size: int) -> Values:
    counts = np.zeros(size, dtype=np.int64)
    for part in slices(len(bits), _COUNTED_AT_ONCE):
        counts += np.bincount(_unsigned(bits[part]), minlength=size)
    return counts


def _counted_by_torch(bits: Tensor, size: int) -> Values:
    patterns, often = _runs(bits)
    counts = np.zeros(size, dtype=np.int64)
    counts[_unsigned(patterns)] = often
    return counts


def _runs(bits: Tensor) -> tuple[Values, Values]:
    """The patterns that occur, in the dtype of [n] bits, and how often each does.

    This sorts the keys alone and counts runs: one value takes as long as a thousand.
    """
    found, often = torch.stack([x.long() for x in torch.unique(bits, return_counts=True)]).cpu()
    return found.to(bits.dtype).numpy(), often.numpy()


def _unsigned(bits: Values) -> Values:
    return bits.view(np.uint8 if bits.itemsize == 1 else np.uint16)


def w1_of_tallies(a: Tally, b: Tally) -> float:
    """W1 between two samples, of any lengths. NaN and infinity as in `numdev.metrics.wasserstein.w1`."""
    special = not_finite(a.values[0], a.values[-1], b.values[0], b.values[-1])
    if special is not None:
        return special
    n, m = int(a.counts.sum()), int(b.counts.sum())
    of_a, of_b = weights(n, m)
    values = np.concatenate([a.values, b.values])
    order = np.argsort(values, kind="stable")  # two ordered runs, which a merge sort joins
    # lcm(n, m) (F - G) above each value, but for the last one: exact integers.
    steps = np.concatenate([a.counts * of_a, -b.counts * of_b])
    ahead = np.cumsum(steps[order])[:-1]
    return float(np.sum(np.abs(ahead) * np.diff(values[order]))) / (n * of_a)
