"""The Wasserstein distance by every way it is computed: unequal lengths, counts, value ranges.

The oracle is the definition, the integral of |F - G|, in exact rationals.
"""

from __future__ import annotations

import bisect
import itertools
import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance

from numdev.errors import UsageError
from numdev.metrics import blockwise
from numdev.metrics.wasserstein import ranges as wasserstein_ranges
from numdev.metrics.wasserstein import w1, w1_of_sorted, w1_rows
from numdev.metrics.wasserstein.counts import (
    Tally,
    _counted_by_torch,
    pattern_counts,
    tally,
    tally_of_runs,
    w1_of_tallies,
)
from numdev.metrics.wasserstein.sorting import both_sorted, weights

# Every term is positive and correctly rounded; a hundred of them are added in float64.
RELATIVE = 1e-14
# scipy subtracts two rounded distribution functions, which near 1/2 differ by little.
SCIPY = 1e-12
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
NARROW = [torch.bfloat16, torch.float16, *FLOAT8]
DTYPES = [torch.float64, torch.float32, *NARROW]
nan, inf = math.nan, math.inf


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=drawn, dtype=torch.float64)


def exact(a: torch.Tensor, b: torch.Tensor) -> Fraction:
    """The integral of |F - G|, by its definition."""
    x, y = (sorted(map(Fraction, t.double().flatten().tolist())) for t in (a, b))
    points, area = sorted({*x, *y}), Fraction(0)
    for low, high in itertools.pairwise(points):
        F, G = (Fraction(bisect.bisect_right(s, low), len(s)) for s in (x, y))
        area += abs(F - G) * (high - low)
    return area


def agrees(found: float, truth: Fraction, relative: float = RELATIVE) -> bool:
    return abs(Fraction(found) - truth) <= Fraction(relative) * truth


SAMPLES = {
    "normal": lambda n, seed: normal(n, seed=seed),
    "ties": lambda n, seed: normal(n, seed=seed).round(decimals=0),
    "apart": lambda n, seed: normal(n, seed=seed) + 64 * seed,
    "one value": lambda n, seed: torch.full((n,), 1.0 + seed, dtype=torch.float64),
    "mostly zero": lambda n, seed: normal(n, seed=seed).sub(1).clamp(min=0),
    "both zeros": lambda n, seed: normal(n, seed=seed) * torch.tensor([0.0, -0.0, 1.0])[seed],
    "many binades": lambda n, seed: normal(n, seed=seed) * 2.0 ** (6 * normal(n, seed=9)).round(),
}


def test_the_oracle_is_scipys_and_notices_a_wrong_value() -> None:
    """The rationals give what scipy gives, and an error of 1e-13 is seen."""
    a, b = normal(50), normal(70, seed=1)
    truth = exact(a, b)
    assert agrees(wasserstein_distance(a.numpy(), b.numpy()), truth)
    assert not agrees(float(truth) * (1 + 1e-13), truth)


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(1, 1), (1, 9), (40, 40), (30, 20), (41, 97)], ids=str)
def test_is_the_integral(sample: str, dtype: torch.dtype, lengths: tuple[int, int]) -> None:
    """Whatever the lengths, the format and the shape of the samples, in both directions, also
    against another format and range by range."""
    a, b = (SAMPLES[sample](n, seed) for seed, n in enumerate(lengths))
    a, b = a.clamp(-200, 200).to(dtype), b.clamp(-200, 200).to(dtype)
    for other in (b, b.float()):
        truth = exact(a, other)
        assert agrees(w1(a, other), truth)
        assert agrees(w1(other, a), truth)
        assert agrees(w1(a, other, at_once=7), truth)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "m"), [(65_536, 65_537), (100_000, 3), (30_000, 60_000)])
def test_agrees_with_scipy_at_length(dtype: torch.dtype, n: int, m: int) -> None:
    """As with small samples, where blocks and threads come in."""
    a, b = normal(n).to(dtype), (3.0 * normal(m, seed=1) ** 3 + 0.5).to(dtype)
    oracle = wasserstein_distance(a.double().numpy(), b.double().numpy())
    assert w1(a, b) == pytest.approx(oracle, rel=SCIPY, abs=0.0)
    assert w1(b, a) == w1(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_repeated_is_the_same_sample(dtype: torch.dtype) -> None:
    """Three times every value, shuffled: the same distribution, at distance 0."""
    a = normal(500).to(dtype)
    order = torch.randperm(1500, generator=torch.Generator().manual_seed(0))
    assert w1(a, a.repeat(3)[order]) == 0.0
    assert w1(a, a.repeat(3)[order], at_once=200) == 0.0


@pytest.mark.parametrize("dtype", NARROW)
def test_never_exceeds_the_paired_distance(dtype: torch.dtype) -> None:
    """W1 <= mean |a - b| also where it is counted."""
    a = normal(5000).to(dtype)
    b = (a.double() + 0.3 * normal(5000, seed=1)).to(dtype)
    assert 0.0 < w1(a, b) <= float((a.double() - b.double()).abs().mean()) * (1 + RELATIVE)


@pytest.mark.parametrize("scale", [2.0**-1074, 2.0**-1060])
def test_subnormals_are_values(scale: float) -> None:
    """Far below the smallest normal number nothing is rounded, whatever the lengths."""
    a = scale * torch.arange(8, dtype=torch.float64)
    assert w1(a, a[:4]) == 2 * scale  # means 3.5 and 1.5, and no value of one goes down
    assert w1(a, a[:4], at_once=2) == 2 * scale
    tiny = torch.arange(8, dtype=torch.int32).view(torch.float32)
    assert w1(tiny, tiny[:4], at_once=2) == w1(tiny, tiny[:4]) == 2 * 2.0**-149


# --- counting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*NARROW, torch.float8_e8m0fnu])
def test_counting_is_sorting(dtype: torch.dtype) -> None:
    """All finite patterns of a format, against another draw of them: as sorted in float64."""
    unsigned = torch.uint8 if dtype.itemsize == 1 else torch.int16
    bits = torch.arange(256**dtype.itemsize, dtype=torch.int32).to(unsigned)
    bits = bits[bits.view(dtype).double().isfinite()]
    drawn = torch.Generator().manual_seed(0)
    drawn_bits = bits[torch.randint(len(bits), (len(bits),), generator=drawn)]
    every, other = bits.view(dtype), drawn_bits.view(dtype)
    sorts = w1_rows(every.double()[None], other.double()[None])
    assert w1(every, other) == pytest.approx(float(sorts), rel=SCIPY, abs=0.0)
    assert w1(every, drawn_bits.flip(0).view(dtype), at_once=1000) == w1(every, other)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8])
def test_both_ways_to_count(dtype: torch.dtype) -> None:
    """numpy's bincount and torch's sorted runs give every pattern its number, one by one."""
    range_ = torch.iinfo(dtype)
    drawn = torch.Generator().manual_seed(0)
    bits = torch.randint(range_.min, range_.max + 1, (2000,), generator=drawn).to(dtype)
    counts = pattern_counts(bits)
    assert counts.sum() == 2000
    np.testing.assert_array_equal(_counted_by_torch(bits, len(counts)), counts)
    for pattern in bits[:50].tolist():
        assert counts[pattern % len(counts)] == int((bits == pattern).sum())


@pytest.mark.parametrize("dtype", NARROW)
def test_the_tally_of_runs_is_that_of_the_table(dtype: torch.dtype) -> None:
    """Value by value, with both zeros and a NaN; equal values come in the order of patterns."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(3000, generator=drawn), torch.tensor([0.0, -0.0, nan])]).to(dtype)
    bits = x.view(torch.uint8 if x.dtype.itemsize == 1 else torch.int16)
    table, runs = tally(x, torch.device("cpu"), 2**20), tally_of_runs(bits, dtype)
    np.testing.assert_array_equal(runs.values, table.values)
    for value in np.unique(table.values):
        same = np.isnan(table.values) if np.isnan(value) else table.values == value
        assert sorted(runs.counts[same]) == sorted(table.counts[same])


def test_counts_beyond_2_to_the_53_are_exact() -> None:
    """2^61 + 1 values against 2^61 + 1 others, of which one differs by one."""
    ends = np.array([0.0, 1.0])
    a = Tally(ends, np.array([2**61, 1]))
    b = Tally(ends, np.array([2**61 - 1, 2]))
    assert w1_of_tallies(a, b) == 1 / (2**61 + 1)


def test_weights_are_integers_or_refused() -> None:
    """Equal lengths weigh 1 however long; where the common unit is beyond int64, words say so."""
    assert weights(6, 4) == (2, 3)
    assert weights(2**40, 2**40) == (1, 1)
    with pytest.raises(UsageError, match=f"{2**40} values from {2**40 - 1}"):
        weights(2**40, 2**40 - 1)


# --- what is not finite ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at_once", [2**29, 2])
@pytest.mark.parametrize("repeats", [1, 2], ids=["equal", "unequal"])
@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([nan, 1, 2], [0, 1, 2], nan),
        ([0, 1, 2], [0, 1, -nan], nan),
        ([nan, inf, 2], [0, 1, 2], nan),
        ([inf, 1, 2], [0, 1, 2], inf),
        ([0, 1, 2], [-inf, 1, inf], inf),
        ([inf, 1, 2], [-inf, 1, 2], inf),
        ([inf, 1, 2], [1, inf, 2], nan),
        ([-inf, inf, 2], [1, -inf, 2], nan),
        ([3, 2, 1], [2, 3, 4], 1.0),
    ],
)
def test_what_is_not_finite_shows(a, b, expected, dtype, at_once: int, repeats: int) -> None:
    """The same rule for every path: NaN decides, then infinities of one sign, then any."""
    x, y = torch.tensor(a, dtype=dtype).repeat(repeats), torch.tensor(b, dtype=dtype)
    np.testing.assert_equal(w1(x, y, at_once=at_once), expected)
    np.testing.assert_equal(w1(y, x, at_once=at_once), expected)
    np.testing.assert_equal(w1(x, y.double(), at_once=at_once), expected)


def test_beyond_float64_is_infinite_without_a_warning() -> None:
    """Distances whose sum float64 cannot hold; warnings of numdev are errors here."""
    a = torch.full((3,), 1.5e308, dtype=torch.float64)
    assert w1(a, -a) == w1(a, -a.repeat(2)) == w1(a, -a, at_once=2) == inf


# --- range by range -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize(("n", "m", "at_once"), [(400, 400, 100), (301, 500, 33)])
def test_ranges_are_the_whole(sample, dtype: torch.dtype, n: int, m: int, at_once: int) -> None:
    """In pieces, the distance is that of one piece, but for the order of a sum of 1000 terms."""
    a, b = SAMPLES[sample](n, 0).to(dtype), SAMPLES[sample](m, 1).to(dtype)
    assert w1(a, b, at_once=at_once) == pytest.approx(w1(a, b), rel=2e-15, abs=0.0)


@pytest.mark.parametrize("sample", SAMPLES)
def test_no_more_than_allowed_is_sorted(sample: str, monkeypatch) -> None:
    """Both samples' values in a piece are within `at_once`, although most may be one value."""
    sorted_at_once = []

    def recorded(x: torch.Tensor) -> torch.Tensor:
        sorted_at_once.append(x.numel())
        return torch.sort(x, dim=1).values

    monkeypatch.setattr(wasserstein_ranges, "sorted_rows", recorded)
    w1(SAMPLES[sample](300, 0), SAMPLES[sample](200, 1), at_once=50)
    pairs = zip(sorted_at_once[::2], sorted_at_once[1::2], strict=True)
    assert max((sum(pair) for pair in pairs), default=0) <= 50


def test_a_device_may_be_named() -> None:
    """Samples on any device are brought to it; on the one they are on, nothing changes."""
    a, b = normal(50), normal(60, seed=1)
    assert w1(a, b, device="cpu") == w1(a, b, device=torch.device("cpu")) == w1(a, b)
    with pytest.raises(UsageError, match="at_once is 0"):
        w1(a, b, at_once=0)


# --- blocks ---------------------------------------------------------------------------------------


def test_blocks_change_nothing(monkeypatch) -> None:
    """Blocks of 24 elements, or one of all: the same distances of rows and of unequal samples."""
    a, b, c = normal(3, 100), normal(3, 100, seed=1), normal(131, seed=2)
    a16, c16 = a.bfloat16(), c.bfloat16()
    whole = [*w1_rows(a, b).tolist(), w1(a, b), w1(a, c), w1(a, c, at_once=50), w1(a16, c16)]
    monkeypatch.setattr(blockwise, "_CPU_BLOCK", 24)
    parts = [*w1_rows(a, b).tolist(), w1(a, b), w1(a, c), w1(a, c, at_once=50), w1(a16, c16)]
    np.testing.assert_allclose(parts, whole, rtol=1e-15)


def test_no_rows_have_no_distances() -> None:
    """An empty matrix, sorted, gives an empty result."""
    assert w1_of_sorted(torch.zeros(0, 5), torch.zeros(0, 5)).shape == (0,)


def test_threads_change_nothing() -> None:
    """Two samples sorted at the same time are each sorted."""
    a, b = normal(1, 2**17), normal(1, 2**17, seed=1)
    x, y = both_sorted(a, b)
    assert torch.equal(x, a.sort().values)
    assert torch.equal(y, b.sort().values)


def test_temporaries_stay_small() -> None:
    """No float64 copy of a whole difference: 16 MB would be one here."""
    a, b = both_sorted(normal(1, 2**21).float(), normal(1, 2**21, seed=1).float())
    tracemalloc.start()
    w1_of_sorted(a, b)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**21 * 8 / 4


# --- on a GPU -------------------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sample", SAMPLES)
def test_the_gpu_agrees_by_every_path(dtype: torch.dtype, sample: str) -> None:
    """Equal and unequal, counted and sorted, mixed and in ranges, from the host and from there."""
    a, b = (SAMPLES[sample](n, seed).clamp(-200, 200) for seed, n in enumerate((3000, 3000)))
    a, b = a.to(dtype), b.to(dtype)
    for x, y in [(a, b), (a, b[:2001]), (a, b.float()), (a[:999], b.double())]:
        there = pytest.approx(w1(x, y), rel=1e-14, abs=0.0)
        assert w1(x.cuda(), y.cuda()) == there
        assert w1(x.cuda(), y.cuda(), at_once=1000) == there
        assert w1(x, y, device="cuda") == there
        assert w1(x, y.cuda(), device="cuda", at_once=1000) == there


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("at_once", [2**29, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gpu_shows_what_is_not_finite(dtype: torch.dtype, at_once: int) -> None:
    """NaN, infinities alone and alike, of equal and unequal lengths."""
    for a, b, expected in (
        ([nan, 1], [0, 1], nan),
        ([inf, 1], [0, 1], inf),
        ([inf, 1], [0, inf], nan),
        ([inf, 1], [0, 1, 2], inf),
        ([inf, 1], [0, 1, nan], nan),
    ):
        x, y = (torch.tensor(v, dtype=dtype, device="cuda") for v in (a, b))
        np.testing.assert_equal(w1(x, y, at_once=at_once), expected)


@pytest.mark.gpu
@needs_cuda
def test_from_the_host_within_the_budget() -> None:
    """2^23 values through a budget of 2^20: the GPU holds a third of what sorting all takes."""
    a, b = normal(2**22).float(), normal(2**22 - 5, seed=1).float()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = w1(a, b, device="cuda", at_once=2**20)
    assert torch.cuda.max_memory_allocated() - before < 64 * 2**20
    assert found == pytest.approx(w1(a, b), rel=1e-14)
