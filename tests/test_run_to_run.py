"""Noise is exactly 0 for equal runs and the distance of two runs else; a checksum tells
one bit."""

from __future__ import annotations

import math

import pytest
import torch

from numdev.metrics import run_to_run
from numdev.metrics.bit_checksums import _ODD, checksums
from numdev.metrics.run_to_run import noise

nan, inf = math.nan, math.inf
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
]


def runs(*values: list[float]) -> list[torch.Tensor]:
    """Runs of one head of one row: each a list of features."""
    return [torch.tensor(v, dtype=torch.float64)[None, None, None] for v in values]


@pytest.mark.parametrize(("a", "b", "expected", "flickering"), [
    ([1.0, -2.0], [1.0, -2.0], 0.0, 0), ([1.0, 0.0], [4.0, 4.0], math.sqrt((9 + 16) / 2), 0),
    ([0.0, 1.0], [-0.0, 1.0], 0.0, 0), ([nan, 1.0], [nan, 1.0], 0.0, 0),
    ([-inf, 1.0], [-inf, 1.0], 0.0, 0), ([nan, 1.0], [5.0, 3.0], 2.0, 1),
    ([inf, 1.0], [-inf, 1.0], 0.0, 1), ([nan, 1.0], [inf, 1.0], 0.0, 1),
    ([nan, inf], [nan, inf], None, 0), ([nan, 1.0], [1.0, nan], None, 2),
    ([1e-200, 0.0], [0.0, 0.0], 5e-324, 0),  # the square underflows
])  # fmt: skip
def test_two_runs(
    a: list[float], b: list[float], expected: float | None, flickering: int
) -> None:
    """A table one can check by hand, in either order."""
    for pair in (runs(a, b), runs(b, a)):
        (result,) = noise(pair)
        assert result.flickering == flickering
        assert result.noise == (expected if expected is None else pytest.approx(expected))
        assert (result.noise == 0.0) == (expected == 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_of_the_same_bits(dtype: torch.dtype) -> None:
    """Runs that are equal have no noise, NaN among them and whatever their strides; the
    sign of a zero is none either, and one other number is."""
    a = torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(0)).transpose(
        1, 2
    )
    a[:, 1] = nan
    a[0, 2, 0, 0] = nan
    a[1, 0, 3, 2] = 0.0
    a = a.to(dtype)
    assert {x.noise for x in noise([a, a.clone(), a.contiguous()])} <= {0.0, None}
    b = a.clone()
    b[1, 0, 3, 2] = -0.0
    assert noise([a, b]) == noise([a, a])
    b[0, 0, 0, 0] = 3.0
    assert noise([a, b]) != noise([a, a])


def test_it_does_not_grow_with_the_number_of_runs() -> None:
    """It is the mean over pairs: of 0, 1 and 3 the differences are 1, 3 and 2; of N(0, 1)
    noise it is sqrt(2), from 2 runs as from 8. (10^4 elements: to 5 %.)"""
    (result,) = noise(runs([0.0], [1.0], [3.0]))
    assert result.noise == pytest.approx(math.sqrt((1 + 9 + 4) / 3))
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 1, 100, 100, generator=generator) for _ in range(8)]
    for count in (2, 5, 8):
        assert noise(drawn[:count])[0].noise == pytest.approx(math.sqrt(2), rel=0.05)


def test_heads_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that is reproducible is 0 beside one that is not; batch and rows are pooled;
    however many heads are compared at a time."""
    a = torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16)
    b = a.clone()
    b[1, 1, 2, 3] = 2.0
    for elements in (run_to_run.ELEMENTS, 1, 2 * 2 * 4 * 5):
        monkeypatch.setattr(run_to_run, "ELEMENTS", elements)
        result = noise([a, b, a])
        assert [f.noise for f in result] == [
            0.0,
            pytest.approx(math.sqrt(2 * 4 / (3 * 40))),
            0.0,
        ]


def by_hand(bits: list[int]) -> str:
    """sum of (b_i + 1) w_i mod 2^64, in Python's integers."""
    signed = lambda w: w if w < 2**63 else w - 2**64  # noqa: E731
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
    """In its head alone: another sign of a zero, two elements that change places; no
    strides."""
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
