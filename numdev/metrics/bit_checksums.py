"""Checksums of tensors, head by head: whether two reports hold the very same output.

Of a head's n elements, in the order of their places, with bit patterns b_i (as signed
integers),

    sum over i of (b_i + 1) w_i  mod 2^64,

w_i being odd and a fixed scramble of i. Integers add up to the same sum in any order, so
neither the device nor how it adds changes the result. One element that differs always
changes it (w_i is odd); several do but for a chance of about 2^-64, elements that changed
places among them. It is no cryptographic hash. Zeros of different sign differ, and NaN of
different bits."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements of heads whose weights are kept for the next tensor of the same size
SMALL = 1 << 16
# 2^64 over the golden ratio, and a multiplier of SplitMix64, as signed numbers.
_ODD = (-7046029254386353131, -4658895280553007687)


def checksums(x: Tensor) -> list[str]:
    """Returns the checksum of every head of a tensor [B, H, rows, ...] of any dtype of 1,
    2, 4 or 8 bytes, as 16 hexadecimal digits."""
    heads = bits(x).transpose(0, 1).flatten(1)  # [H, elements]
    size = heads.shape[1]
    weights, total = (
        _odd_multipliers if size <= SMALL else _odd_multipliers.__wrapped__
    )(size, x.device)
    # Multiplied as 64-bit integers: small heads together, a large one alone
    parts = heads.split(max(1, SMALL // max(size, 1)))
    sums = torch.cat([(part * weights).sum(dim=1) for part in parts]) + total
    return [f"{value % (1 << 64):016x}" for value in sums.tolist()]


@functools.lru_cache(maxsize=16)
def _odd_multipliers(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the odd numbers w_i [size] by which bit patterns are multiplied, int64 on
    the device, and their sum modulo 2^64. The tensors are cached: nobody may change
    them."""
    # No progression, whose terms can cancel: i - 2 (i + 1) + (i + 2) is 0.
    w = torch.arange(1, size + 1, device=device) * _ODD[0]
    w = (w ^ (w >> 29)) * _ODD[1]
    weights = (w ^ (w >> 32)) | 1
    return weights, weights.sum()


def same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one dtype have the same shape and bits: NaN equals NaN of
    the same bits, and 0 differs from -0."""
    return bits(x).equal(bits(y))


def bits(x: Tensor) -> Tensor:
    """Returns the bit patterns of a tensor's elements as integers of their size (uint8
    for one byte, else signed), of complex ones those of their parts, [..., 2]. They share
    the tensor's memory, unless it is a lazy conjugate or negative, which is computed."""
    x = x.detach()
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.resolve_neg()
    return x.view(_BITS[x.element_size()])
