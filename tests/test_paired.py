"""Distances of two tensors, by element, and W1: known answers, numpy, scipy, NaN,
infinity."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from oracles import normal
from scipy.stats import wasserstein_distance

from numdev.metrics.tensor_distances import Paired, paired
from numdev.metrics.wasserstein import w1

# Sums of 10^4 float64 terms in another order; of 10^6 where they are added pairwise, as
# in W1.
RELATIVE = 1e-12
NUMBERS = ("max_abs", "mean_abs", "rel", "w1", "equal")
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
]
nan, inf = math.nan, math.inf


def by_numpy(a: torch.Tensor, b: torch.Tensor) -> Paired:
    """Everything from whole float64 arrays, by the definitions."""
    x, y = (t.double().flatten().numpy() for t in (a, b))
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    norm = np.linalg.norm
    numbers = {
        "max_abs": np.max(np.abs(x - y)), "mean_abs": np.mean(np.abs(x - y)),
        "rel": norm(x - y) / norm(y),
        "w1": wasserstein_distance(x, y), "equal": np.mean(x == y),
    }  # fmt: skip
    counts = {"elements": a.numel(), "nonfinite": int((~finite).sum())}
    return Paired(**counts, **{name: float(number) for name, number in numbers.items()})


def assert_same(result: Paired, expected: Paired, relative: float = RELATIVE) -> None:
    for name, x in dataclasses.asdict(expected).items():
        assert getattr(result, name) == pytest.approx(x, rel=relative, abs=0.0), name


def test_known_answers() -> None:
    """Two vectors of four, every number as found by hand; b = 0 has no relative distance;
    both zeros are equal; a permutation is at W1 0 and far in all else."""
    a, b = torch.tensor([3.0, 0.0, -1.0, 2.0]), torch.tensor([3.0, 4.0, 0.0, 1.0])
    by_hand = Paired(elements=4, nonfinite=0, max_abs=4.0, mean_abs=1.5, rel=math.sqrt(18 / 26),
                     w1=1.0,  # -1, 0, 2, 3 to 0, 1, 3, 4
                     equal=0.25)  # fmt: skip
    assert_same(paired(a, b), by_hand, relative=4 * 2.0**-53)
    result = paired(torch.tensor([1.0, -3.0]), torch.tensor([0.0, -0.0]))
    assert result.rel is None
    assert (result.max_abs, result.mean_abs, result.w1) == (3.0, 2.0, 2.0)
    assert paired(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])).equal == 1.0
    result = paired(normal(1000), normal(1000).flip(0))
    assert (result.w1, result.rel > 1.0) == (0.0, True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
def test_agrees_with_numpy(dtype: torch.dtype, other: torch.dtype) -> None:
    """In any two dtypes, of the values as stored."""
    a = normal(40, 250)
    b = a + 0.1 * normal(40, 250, seed=1)
    a, b = a.to(dtype), b.to(other)
    assert_same(paired(a, b), by_numpy(a, b))


@pytest.mark.parametrize("dtype", [*DTYPES[:4], torch.float8_e5m2])
def test_what_is_not_finite_is_counted_and_left_out(dtype: torch.dtype) -> None:
    """NaN or infinity in either, or alike in both: the numbers are those without these
    elements. With nothing left there is none."""
    a, b = normal(12).to(dtype), normal(12, seed=1).to(dtype)
    spoilt_a = torch.tensor([nan, 1.0, inf, 1.0, inf, nan, -inf]).to(dtype)
    spoilt_b = torch.tensor([1.0, nan, 1.0, -inf, inf, nan, inf]).to(dtype)
    result = paired(torch.cat([spoilt_a, a]), torch.cat([spoilt_b, b]))
    assert_same(result, dataclasses.replace(paired(a, b), elements=19, nonfinite=7))
    for x, y in ((spoilt_a, spoilt_b), (a[:0], b[:0])):
        none = Paired(elements=len(x), nonfinite=len(x), **dict.fromkeys(NUMBERS))
        assert paired(x, y) == none


def test_beyond_float64_is_no_number() -> None:
    """Float64 values whose squares, or whose distance, it cannot hold; float32's it
    can."""
    a = torch.tensor([1e200, 2e200], dtype=torch.float64)
    result = paired(a, a.flip(0))
    assert result.rel is None
    assert result.max_abs == result.mean_abs == 1e200
    far = torch.tensor([1.7e308], dtype=torch.float64)
    assert (paired(far, -far).max_abs, paired(far, -far).w1) == (None, None)
    assert paired(torch.tensor([3e38]), torch.tensor([-3e38])).rel == pytest.approx(2.0)


def by_scipy(a: torch.Tensor, b: torch.Tensor):
    """scipy's, to the agreement that is asked for; a distance that is off by 1e-11 is
    another."""
    oracle = wasserstein_distance(a.double().numpy(), b.double().numpy())
    return pytest.approx(float(oracle), rel=RELATIVE, abs=0.0)


@pytest.mark.parametrize(("a", "b", "expected"), [
    ([0.0, 1.0, 3.0], [5.0, 6.0, 8.0], 5.0),  # scipy's own example: a shift
    ([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 8.0], 1.0),  # one value of four moves by 4
    ([0.0, 10.0], [10.0, 0.0], 0.0), ([0.0, 0.0], [-1.0, 1.0], 1.0), ([1.0], [4.0], 3.0),
    ([-0.0, 0.0], [0.0, 0.0], 0.0), ([5e-324], [0.0], 5e-324),
])  # fmt: skip
def test_w1_by_hand(a: list[float], b: list[float], expected: float) -> None:
    """Small samples have the distance one finds by hand."""
    assert w1(*(torch.tensor(x, dtype=torch.float64) for x in (a, b))) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2, 1000, 65537])
def test_w1_agrees_with_scipy(dtype: torch.dtype, length: int) -> None:
    """In every dtype the distance is scipy's, of the values as stored; against another
    dtype values are compared, not cast to one another."""
    a = normal(length).to(dtype)
    before = a.clone()
    b = (3.0 * normal(length, seed=1) ** 3 + 0.5).clamp(-400, 400).to(dtype)
    assert w1(a, b) == by_scipy(a, b)
    assert w1(a, b) * (1 + 1e-11) != by_scipy(a, b)
    assert w1(a.double(), b) == w1(b, a.double()) == by_scipy(a, b)
    assert torch.equal(a, before)


def test_another_seed_looks_like_one_cast() -> None:
    """10^6 weights: W1 of two seeds is of the size of one bf16 cast's, though the weights
    differ by 1000 times as much. For N(0, s), mean |a - b| is 2 s / sqrt(pi); W1 is
    sampling noise, of the order of s / sqrt(n). A cast moves values by less than their
    spacing, so W1 is paired."""
    n, s = 1_000_000, 0.02
    a, b = ((s * normal(n, seed=seed)).float() for seed in (0, 1))
    cast = a.to(torch.bfloat16)
    paired_seeds = float((a.double() - b.double()).abs().mean())
    paired_cast = float((a.double() - cast.double()).abs().mean())
    assert paired_seeds == pytest.approx(2 * s / math.sqrt(math.pi), rel=0.01)
    assert 0.5 * s / math.sqrt(n) < w1(a, b) < 5 * s / math.sqrt(n)
    assert w1(a, cast) == pytest.approx(paired_cast, rel=1e-6)
    assert paired_seeds > 500 * w1(a, b)


@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_w1_shows_what_is_not_finite(dtype: torch.dtype) -> None:
    """NaN gives NaN on either side, infinity gives infinity, two alike give NaN."""
    a = torch.tensor(
        [[nan, 1, 2], [0, 1, 2], [inf, 1, 2], [-inf, 1, inf], [inf, 1, 2], [3, 2, 1]]
    )
    b = torch.tensor(
        [[0, 1, 2], [0, nan, 2], [0, 1, 2], [0, 1, 2], [1, inf, 2], [2, 3, 4]]
    )
    expected = [nan, nan, inf, inf, nan, 1.0]
    for x, y, z in zip(a.to(dtype), b.to(dtype), expected, strict=True):
        np.testing.assert_array_equal(w1(x, y), z)
    many = normal(100_000).to(dtype)
    many[777] = nan
    assert math.isnan(w1(normal(100_000), many))


def test_threads_change_nothing() -> None:
    """Sums on a CPU are numpy's, which adds in one order."""
    a, b, threads = normal(200_001), normal(200_001, seed=1), torch.get_num_threads()
    before = w1(a, b)
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert w1(a, b) == before
    finally:
        torch.set_num_threads(threads)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e5m2])
def test_the_gpu_agrees_with_the_cpu(dtype: torch.dtype) -> None:
    """Both devices give the same distances."""
    a, b = normal(16388).to(dtype), normal(16388, seed=1).to(dtype)
    assert w1(a.cuda(), b.cuda()) == pytest.approx(w1(a, b), rel=RELATIVE)
