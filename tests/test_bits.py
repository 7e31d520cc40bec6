"""Checksums: what they are the sum of, and that a change shows."""

from __future__ import annotations

import pytest
import torch

from numdev.metrics.bits import _ODD, checksums

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def by_hand(bits: list[int]) -> str:
    """sum of (b_i + 1) w_i mod 2^64, in Python's integers."""

    def signed(w: int) -> int:
        return w if w < 2**63 else w - 2**64

    total = 0
    for i, b in enumerate(bits, 1):
        w = signed(i * _ODD[0] % 2**64)
        w = signed(((w >> 29) ^ w) * _ODD[1] % 2**64)
        total += (b + 1) * ((w ^ (w >> 32)) | 1)
    return f"{total % 2**64:016x}"


def test_it_is_the_sum_it_says() -> None:
    """Of each head, over the batch and its rows in their order."""
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).half()[..., None]
    bits = x.view(torch.int16).transpose(0, 1).flatten(1).tolist()
    assert checksums(x) == [by_hand(head) for head in bits]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bit_or_an_exchange_shows(dtype: torch.dtype) -> None:
    """In its head alone: another sign of a zero, and two elements that change places; strides do
    not."""
    x = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(1))
    x[0, 1, 0, 0], x[0, 2, 0, 1] = 0.0, 3.0
    x = x.to(dtype)
    before = checksums(x)
    assert checksums(x.transpose(1, 2).contiguous().transpose(1, 2)) == before
    sign, places = x.clone(), x.clone()
    sign[0, 1, 0, 0] = torch.tensor(-0.0).to(dtype)
    places[0, 2, 0, 0], places[0, 2, 0, 1] = x[0, 2, 0, 1], x[0, 2, 0, 0]
    for changed, head in ((sign, 1), (places, 2)):
        differs = [a != b for a, b in zip(before, checksums(changed), strict=True)]
        assert differs == [h == head for h in range(3)]
