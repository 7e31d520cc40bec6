"""The bits of tensors: checksums head by head, and whether several runs have the same.

Checksums say whether two reports hold the very same output. Of a head's n elements, in the order of
their places, with bit patterns b_i (as signed integers),

    sum over i of (b_i + 1) w_i  mod 2^64,

w_i being odd and a fixed scramble of i. Integers add up to the same sum in any order, so neither
the device nor how it adds changes the result. One element that differs always changes it (w_i is
odd); several do but for a chance of about 2^-64, elements that changed places among them. It is no
cryptographic hash. Zeros of different sign differ, and NaN of different bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from numdev.metrics.arrival import Array, Arrival
from numdev.metrics.gpucode import if_possible, launch
from numdev.metrics.lazy import Lazy

AT_ONCE = 1 << 24
"""Elements at a time: 128 MiB as 64-bit integers."""
BLOCK, CHUNKS = 1024, 4096
"""What a program of the kernel takes at a time, and how many programs a head has at most."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = (-7046029254386353131, -4658895280553007687)
"""2^64 over the golden ratio, and a multiplier of SplitMix64, as signed numbers."""
Runs: TypeAlias = Sequence[Tensor]
"""Of one tensor [B, H, rows, ...], one run or more of the same shape and dtype."""


class Bits:
    """What the bits of several tensors come to, each of one run or more. The device is waited for
    when something is looked at, once in all."""

    def __init__(self, tensors: Sequence[Runs]) -> None:
        given = [[x.detach() for x in runs] for runs in tensors]
        self._dtypes = [runs[0].dtype for runs in given]
        self._elements = [runs[0].numel() for runs in given]
        self._others = [max(1, len(runs) - 1) for runs in given]
        """In how many pairs of runs a tensor is."""
        if given:
            device = given[0][0].device
            found = if_possible(device, lambda: by_kernel(given)) or by_steps(given)
            self._places = [(x.storage_offset(), x.shape) for x in found.pairs]
            self._arrival = Arrival([found.flat])

    def checksums(self, i: int) -> list[str]:
        """Of each head of the first run of tensor `i`, as 16 hexadecimal digits."""
        sums = self._of(i)[0][0].sum(axis=(0, 2))
        return [f"{value % (1 << 64):016x}" for value in sums.tolist()]

    def same(self, i: int) -> bool:
        """Whether all runs of tensor `i` have the same bits; others may still be equal."""
        return not any(pair[1].any() for pair in self._of(i))

    def begin_finite(self, i: int) -> list[bool]:
        """Of each head of the first run of tensor `i`, whether its first number is there and is
        finite."""
        first, dtype = self._of(i)[0][2], self._dtypes[i]
        if not self._elements[i]:
            return [False] * first.shape[1]
        bits = torch.from_numpy(first[0, :, 0].copy()).to(_BITS[dtype.itemsize])
        return [math.isfinite(x) for x in bits.view(dtype).double().tolist()]

    def _of(self, i: int) -> list[Array]:
        """The pairs of tensor `i`, as in `Found`."""
        (flat,), at = self._arrival.arrays, sum(self._others[:i])
        places = self._places[at : at + self._others[i]]
        return [flat[at : at + shape.numel()].reshape(shape) for at, shape in places]


@dataclass(frozen=True)
class Found:
    """What the bits come to, on the device."""

    flat: Tensor
    """All of it."""
    pairs: list[Tensor]
    """Of each tensor's first run beside each other one, or of a single one alone, [3, batch, heads,
    parts], within `flat`: sums, to be summed over the batch and parts, for the first pair at least;
    whether, or how often, the other is different; and the bits that a part begins with."""

    @classmethod
    def room(cls, shapes: Sequence[tuple[int, ...]], device: torch.device) -> Found:
        sizes = [3 * math.prod(shape) for shape in shapes]
        # Each begins where 16 bytes do, for which a kernel is built but once.
        ends = [size + size % 2 for size in sizes]
        flat = torch.empty(sum(ends), dtype=torch.int64, device=device)
        parts = zip(flat.split(ends), sizes, shapes, strict=True)
        return cls(flat, [part[:size].view(3, *shape) for part, size, shape in parts])


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, Sequence[str]]:
    """The checksum of every head of tensors [B, H, rows, ...]. The device is waited for when one is
    looked at, once in all."""
    bits = Bits([[x] for x in tensors.values()])
    return {name: Lazy(functools.partial(bits.checksums, i)) for i, name in enumerate(tensors)}


def by_kernel(tensors: Sequence[Runs]) -> Found:
    """By one pass over a GPU's memory. Raises Refused where Triton cannot build its kernel."""
    from numdev.metrics.row_sums_triton import sum_bits

    pairs = list(_pairs(tensors))
    grids = [_grid(x) for x, _ in pairs]
    found = Found.room(grids, pairs[0][0].device)
    for (x, y), grid, to in zip(pairs, grids, found.pairs, strict=True):
        if x.numel():
            count = x[0, 0].numel()
            other = x if y is None else y.contiguous()
            shape = {"BESIDE": y is not None, "CHUNK": _chunk(count), "BLOCK": BLOCK}
            launch(sum_bits, grid, x.contiguous(), other, to, count, **shape)
    return found


def by_steps(tensors: Sequence[Runs]) -> Found:
    """The same by PyTorch, in one part."""
    pairs = list(_pairs(tensors))
    longest = max((x for x, _ in pairs), key=_elements)
    weights = _weights(_elements(longest), longest.device)
    found = Found.room([(1, x.shape[1], 1) for x, _ in pairs], longest.device)
    summed: Tensor | None = None
    for (x, y), to in zip(pairs, found.pairs, strict=True):
        to.zero_()
        if x.shape[1] and x is not summed:
            to[0, 0, :, 0] = _per_head(x, weights[: _elements(x)])
            summed = x
        if x.numel():
            to[1] = 0 if y is None else (x != y).any()
            to[2, 0, :, 0] = _firsts(x)
    return found


def _pairs(tensors: Sequence[Runs]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The bits of what is looked at together."""
    for runs in tensors:
        first, *others = (x.view(_BITS[x.element_size()]) for x in runs)
        for other in others or (None,):
            yield first, other


def _grid(x: Tensor) -> tuple[int, int, int]:
    """Batch entries, heads and chunks of a head."""
    batch, heads = x.shape[:2]
    count = x[0, 0].numel() if batch and heads else 0
    return batch, heads, -(-count // _chunk(count))


def _chunk(count: int) -> int:
    return BLOCK * max(8, -(-count // (BLOCK * CHUNKS)))


def _elements(x: Tensor) -> int:
    """Of one head."""
    return x.numel() // x.shape[1] if x.shape[1] else 0


def _per_head(x: Tensor, weights: Tensor) -> Tensor:
    heads = x.shape[1]
    step = max(1, AT_ONCE * heads // max(1, x.numel()))
    parts = [x[:, at : at + step] for at in range(0, heads, step)]
    return torch.cat([_sum(part, weights) for part in parts])


def _sum(x: Tensor, weights: Tensor) -> Tensor:
    bits = x.transpose(0, 1).flatten(1)  # [H, elements]
    found: Tensor = (bits * weights).sum(dim=1) + weights.sum()  # multiplied as 64-bit integers
    return found


def _firsts(x: Tensor) -> Tensor:
    """[H]: what the heads of [B, H, ...] begin with."""
    first = x[0]
    while first.ndim > 1:
        first = first.select(1, 0)
    return first


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd, and without the regularities of a progression, whose terms can cancel: i - 2 (i + 1) +
    (i + 2) is 0."""
    w = torch.arange(1, count + 1, device=device) * _ODD[0]
    w = (w ^ (w >> 29)) * _ODD[1]
    return (w ^ (w >> 32)) | 1
