"""The 1-Wasserstein distance of samples too long to be sorted at once, range by range.

A distance in one dimension is an integral over the values, and integrals are taken in pieces. One
pass counts how many values of each sample lie in each of 65,536 ranges; neighbouring ranges are
joined as long as both samples' values in them are few enough; each further pass collects the values
of one such piece, sorts them, and integrates |F - G| from its lowest to its highest. A range too
full for that is divided again, in the end into single values, which need no sorting however many
they are. The result is as exact as when everything is sorted: only the order of a sum differs.

Ranges are of integer keys in the order of the values: a float's bits are those of an integer with
a sign, once the rest of a negative one's is inverted. -0 comes directly before +0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from numdev.metrics.blockwise import slices, sum_of_blocks
from numdev.metrics.wasserstein.counts import pattern_counts
from numdev.metrics.wasserstein.sorting import (
    Part,
    Values,
    integral,
    not_finite,
    sorted_rows,
    weights,
)

__all__ = ["w1_in_ranges"]

_BITS = 16  # of a key, told apart in one pass
_KEYS = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True)
class _Sample:
    """A tensor [n], wherever it lies, to be read on a device, a chunk at a time."""

    values: Tensor
    dtype: torch.dtype
    """float32 or float64, whichever holds the values of both samples."""
    device: torch.device
    chunk: int

    def chunks(self) -> Iterator[Tensor]:
        for part in slices(self.values.numel(), self.chunk):
            yield self.values[part].to(self.device).to(self.dtype)

    def ends(self) -> tuple[float, float]:
        """The lowest and the highest value; both NaN if there is one."""
        found = torch.stack([torch.stack(chunk.aminmax()) for chunk in self.chunks()])
        return float(found[:, 0].min()), float(found[:, 1].max())

    def counts(self, first: int, shift: int) -> Values:
        """How many keys lie in each of 65536 ranges of 2^shift keys, from key `first` on."""
        found = np.zeros(2**_BITS, dtype=np.int64)
        for chunk in self.chunks():
            keys = _keys(chunk)
            inside = (keys >= first) & (keys <= first + 2 ** (shift + _BITS) - 1)
            ranges = (keys[inside] >> shift) - (first >> shift)
            found += pattern_counts(ranges.to(torch.int16))  # the low 16 bits: no number is lost
        return found

    def between(self, first: int, last: int) -> Tensor:
        """The values with keys from `first` to `last`, in order: [p]."""
        found = []
        for chunk in self.chunks():
            keys = _keys(chunk)
            found.append(chunk[(keys >= first) & (keys <= last)])
        return sorted_rows(torch.cat(found).reshape(1, -1))[0]


@dataclass(frozen=True)
class _Piece:
    """The keys from first to last, and how many of each sample's values have one of them."""

    first: int
    last: int
    counts: tuple[int, int]

    @property
    def is_one_value(self) -> bool:
        return self.first == self.last


def w1_in_ranges(a: Tensor, b: Tensor, device: torch.device, at_once: int) -> float:
    """W1 between [n] and [m] of any real dtypes, with at most `at_once` of both on `device`.

    NaN and infinity as in `numdev.metrics.wasserstein.w1`.
    """
    dtype = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    chunk = max(1, at_once // 4)
    samples = (_Sample(a, dtype, device, chunk), _Sample(b, dtype, device, chunk))
    special = not_finite(*samples[0].ends(), *samples[1].ends())
    if special is not None:
        return special
    of_a, of_b = weights(a.numel(), b.numel())
    return sum_of_blocks(list(_addends(samples, (of_a, of_b), at_once))) / (a.numel() * of_a)


def _addends(
    samples: tuple[_Sample, _Sample], weight: tuple[int, int], at_once: int
) -> Iterator[Tensor]:
    """The integral of |F - G|, times lcm(n, m): over each piece, and from the last one to it."""
    before = (0, 0)
    reached: Tensor | None = None
    for piece in _pieces(samples, at_once):
        a, b = (_part(samples[k], piece, before[k], weight[k]) for k in (0, 1))
        low, high = _value_of(piece, samples[0]) if piece.is_one_value else _ends(a, b)
        if reached is not None and a.start != b.start:
            yield (low.double() - reached.double()) * float(abs(a.start - b.start))
        yield from integral(a, b, low, high)
        before = before[0] + piece.counts[0], before[1] + piece.counts[1]
        reached = high


def _part(sample: _Sample, piece: _Piece, before: int, weight: int) -> Part:
    """What a piece has of a sample. A single value is none: however often, it spans no range."""
    if piece.is_one_value:
        return Part(torch.empty(0, dtype=sample.dtype, device=sample.device), before, weight)
    return Part(sample.between(piece.first, piece.last), before, weight)


def _ends(a: Part, b: Part) -> tuple[Tensor, Tensor]:
    """The lowest and highest value of two sorted parts, of which one may be empty."""
    ends = [part.values[[0, -1]] for part in (a, b) if part.values.numel()]
    low, high = torch.cat(ends).aminmax()
    return low, high


def _pieces(samples: tuple[_Sample, _Sample], at_once: int) -> Iterator[_Piece]:
    """All values, in order: pieces of at most `at_once` of both samples, or of a single key."""
    bits = 8 * samples[0].dtype.itemsize
    joined: _Piece | None = None
    for piece in _ranges(samples, -(2 ** (bits - 1)), bits - _BITS, at_once):
        if joined and sum(joined.counts) + sum(piece.counts) <= at_once:
            counts = joined.counts[0] + piece.counts[0], joined.counts[1] + piece.counts[1]
            joined = _Piece(joined.first, piece.last, counts)
            continue
        if joined:
            yield joined
        joined = piece
    if joined:
        yield joined


def _ranges(
    samples: tuple[_Sample, _Sample], first: int, shift: int, at_once: int
) -> Iterator[_Piece]:
    """The ranges of 2^shift keys that hold any, from key `first` on; those too full divided."""
    of_a, of_b = (sample.counts(first, shift) for sample in samples)
    for place in np.flatnonzero(of_a + of_b).tolist():
        counts = int(of_a[place]), int(of_b[place])
        start = first + (place << shift)
        if sum(counts) > at_once and shift:
            yield from _ranges(samples, start, shift - _BITS, at_once)
        else:
            yield _Piece(start, start + (1 << shift) - 1, counts)


def _keys(x: Tensor) -> Tensor:
    """Integers in the order of the values of float32 or float64 [n]."""
    bits = x.view(_KEYS[x.dtype])
    return bits ^ ((bits >> (8 * x.dtype.itemsize - 1)) & torch.iinfo(bits.dtype).max)


def _value_of(piece: _Piece, sample: _Sample) -> tuple[Tensor, Tensor]:
    """Lowest and highest of a single key: its value, by `_keys` backwards, which is the same."""
    key = torch.tensor([piece.first], dtype=_KEYS[sample.dtype], device=sample.device)
    value = _keys(key.view(sample.dtype)).view(sample.dtype)[0]
    return value, value
