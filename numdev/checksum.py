"""Checksums of tensors, head by head: whether two reports hold the very same output, to the bit.

Of a head's n elements, in the order of their places, with bit patterns b_i (as signed integers),

    sum over i of (b_i + 1) w_i  mod 2^64,

w_i being odd and a fixed scramble of i. Integers add up to the same sum in any order, so neither
the device nor how it adds changes the result. One element that differs always changes it (w_i is
odd); several do but for a chance of about 2^-64, elements that changed places among them. It is no
cryptographic hash. Zeros of different sign differ, and NaN of different bits.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from numdev.arrival import Arrival
from numdev.gpucode import if_possible, launch
from numdev.lazy import Lazy

AT_ONCE = 1 << 24
"""Elements at a time: 128 MiB as 64-bit integers."""
BLOCK, CHUNKS = 1024, 4096
"""What a program of the kernel takes at a time, and how many programs a head has at most."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = (-7046029254386353131, -4658895280553007687)
"""2^64 over the golden ratio, and a multiplier of SplitMix64, as signed numbers."""


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, Sequence[str]]:
    """The checksum of every head of tensors [B, H, rows, ...], as 16 hexadecimal digits. The device
    is waited for when one is looked at, once in all."""
    given = {name: x.detach() for name, x in tensors.items() if x.shape[1]}
    if not given:
        return {name: [] for name in tensors}
    found = list(given.values())
    parts = if_possible(found[0].device, lambda: [by_kernel(x) for x in found])
    arrival = Arrival(_by_steps(found) if parts is None else parts)
    known = {name: Lazy(functools.partial(_digits, arrival, i)) for i, name in enumerate(given)}
    return {name: known.get(name, []) for name in tensors}


def _digits(arrival: Arrival, i: int) -> list[str]:
    sums = arrival.arrays[i].sum(axis=(0, 2))
    return [f"{value % (1 << 64):016x}" for value in sums.tolist()]


def by_kernel(x: Tensor) -> Tensor:
    """The checksums of [B, H, rows, ...] as signed integers, which are to be summed over the first
    and the last axis of [B, H, parts], by one pass over a GPU's memory. Raises Refused where Triton
    cannot build its kernel."""
    from numdev.rowwise_tiles import sum_bits

    bits = x.view(_BITS[x.element_size()]).contiguous()
    batch, heads = x.shape[:2]
    count = _elements(x) // batch if batch else 0
    chunk = BLOCK * max(8, -(-count // (BLOCK * CHUNKS)))
    sums = bits.new_empty(batch, heads, -(-count // chunk), dtype=torch.int64)
    if count:
        launch(sum_bits, tuple(sums.shape), bits, sums, count, CHUNK=chunk, BLOCK=BLOCK)
    return sums


def _by_steps(tensors: Sequence[Tensor]) -> list[Tensor]:
    longest = max(tensors, key=_elements)
    weights = _weights(_elements(longest), longest.device)
    return [_per_head(x, weights[: _elements(x)]) for x in tensors]


def _elements(x: Tensor) -> int:
    """Of one head."""
    return x.numel() // x.shape[1]


def _per_head(x: Tensor, weights: Tensor) -> Tensor:
    heads = x.shape[1]
    step = max(1, AT_ONCE * heads // max(1, x.numel()))
    parts = [x[:, at : at + step] for at in range(0, heads, step)]
    return torch.cat([_sum(part, weights) for part in parts])[None, :, None]


def _sum(x: Tensor, weights: Tensor) -> Tensor:
    bits = x.view(_BITS[x.element_size()]).transpose(0, 1).flatten(1)  # [H, elements]
    found: Tensor = (bits * weights).sum(dim=1) + weights.sum()  # multiplied as 64-bit integers
    return found


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd, and without the regularities of a progression, whose terms can cancel: i - 2 (i + 1) +
    (i + 2) is 0."""
    w = torch.arange(1, count + 1, device=device) * _ODD[0]
    w = (w ^ (w >> 29)) * _ODD[1]
    return (w ^ (w >> 32)) | 1
