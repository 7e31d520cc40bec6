"""The Wasserstein distance: known answers, scipy as the oracle, and what it is blind to."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance

from numdev.metrics.wasserstein import w1

# Differences of sorted float64 values are correctly rounded, and so is each step of both sums:
# pairwise summation of 10^6 terms and scipy's integral agree far better than this.
RELATIVE = 1e-12
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
nan, inf = math.nan, math.inf


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def by_scipy(a: torch.Tensor, b: torch.Tensor):
    """scipy's, to the agreement that is asked for; a distance that is off by 1e-11 is another."""
    oracle = wasserstein_distance(a.double().numpy(), b.double().numpy())
    return pytest.approx(float(oracle), rel=RELATIVE, abs=0.0)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([1.0], [4.0], 3.0),
     ([0.0, 1.0, 3.0], [5.0, 6.0, 8.0], 5.0),  # scipy's own example: a shift
     ([0.0, 10.0], [10.0, 0.0], 0.0), ([0.0, 0.0], [-1.0, 1.0], 1.0),
     ([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 8.0], 1.0),  # one value of four moves by 4
     ([-0.0, 0.0], [0.0, 0.0], 0.0), ([5e-324], [0.0], 5e-324)],
)  # fmt: skip
def test_known_answers(a: list[float], b: list[float], expected: float) -> None:
    """Small samples have the distance one finds by hand."""
    assert w1(*(torch.tensor(x, dtype=torch.float64) for x in (a, b))) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2, 1000, 65537])
def test_agrees_with_scipy(dtype: torch.dtype, length: int) -> None:
    """In every dtype the distance is scipy's, of the values as stored; against another dtype
    values are compared, not cast to one another."""
    a = normal(length).to(dtype)
    b = (3.0 * normal(length, seed=1) ** 3 + 0.5).clamp(-400, 400).to(dtype)
    assert w1(a, b) == by_scipy(a, b)
    assert w1(a, b) * (1 + 1e-11) != by_scipy(a, b)
    assert w1(a.double(), b) == w1(b, a.double()) == by_scipy(a, b)


def test_a_permutation_is_at_distance_zero() -> None:
    """W1 does not see which value was where; the samples stay as they are."""
    a = normal(1000)
    before = a.clone()
    assert w1(a, a[torch.randperm(1000, generator=seeded())]) == 0.0
    assert torch.equal(a, before)


def test_another_seed_looks_like_one_cast() -> None:
    """10^6 weights: W1 of two seeds is of the size of one bf16 cast's, though the weights differ
    by 1000 times as much. For N(0, s), mean |a - b| is 2 s / sqrt(pi); W1 is sampling noise, of
    the order of s / sqrt(n). A cast moves values by less than their spacing, so W1 is paired."""
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
def test_what_is_not_finite_shows(dtype: torch.dtype) -> None:
    """NaN gives NaN on either side, infinity gives infinity, two alike give NaN."""
    a = torch.tensor([[nan, 1, 2], [0, 1, 2], [inf, 1, 2], [-inf, 1, inf], [inf, 1, 2], [3, 2, 1]])
    b = torch.tensor([[0, 1, 2], [0, nan, 2], [0, 1, 2], [0, 1, 2], [1, inf, 2], [2, 3, 4]])
    expected = [nan, nan, inf, inf, nan, 1.0]
    for x, y, z in zip(a.to(dtype), b.to(dtype), expected, strict=True):
        np.testing.assert_array_equal(w1(x, y), z)
    many = normal(100_000).to(dtype)
    many[777] = nan
    assert math.isnan(w1(normal(100_000), many))


def test_threads_change_nothing() -> None:
    """Sums on a CPU are numpy's, which adds in one order."""
    a, b, threads = normal(200_001), normal(200_001, seed=1), torch.get_num_threads()
    distances = set()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            distances.add(w1(a, b))
    finally:
        torch.set_num_threads(threads)
    assert len(distances) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e5m2])
def test_the_gpu_agrees_with_the_cpu(dtype: torch.dtype) -> None:
    """Both devices give the same distances."""
    a, b = normal(16388).to(dtype), normal(16388, seed=1).to(dtype)
    assert w1(a.cuda(), b.cuda()) == pytest.approx(w1(a, b), rel=RELATIVE)
