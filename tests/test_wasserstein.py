"""The Wasserstein distance: known answers, scipy as the oracle, and what it is blind to."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance

from numdev.errors import UsageError
from numdev.metrics.wasserstein import _of_counts, w1, w1_rows

# Differences of sorted float64 values are correctly rounded, and so is each step of both sums:
# pairwise summation of 10^6 terms and scipy's integral agree far better than this.
RELATIVE = 1e-12
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
]
nan, inf = math.nan, math.inf


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([0.0], [0.0], 0.0),
        ([1.0], [4.0], 3.0),
        ([0.0, 1.0, 3.0], [5.0, 6.0, 8.0], 5.0),  # scipy's own example: a shift
        ([0.0, 10.0], [10.0, 0.0], 0.0),  # a permutation
        ([0.0, 0.0], [-1.0, 1.0], 1.0),
        (
            [1.0, 2.0, 3.0, 4.0],
            [1.0, 2.0, 3.0, 8.0],
            1.0,
        ),  # one value of four moves by 4
        ([-0.0, 0.0], [0.0, 0.0], 0.0),
        ([5e-324], [0.0], 5e-324),
    ],
)
def test_known_answers(a: list[float], b: list[float], expected: float) -> None:
    """Small samples have the distance one finds by hand."""
    result = w1(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
    assert type(result) is float
    assert result == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2, 7, 1000, 65537])
def test_agrees_with_scipy(dtype: torch.dtype, length: int) -> None:
    """In every dtype the distance is scipy's, of the values as stored."""
    a = normal(length).to(dtype)
    b = (3.0 * normal(length, seed=1) ** 3 + 0.5).clamp(-400, 400).to(dtype)
    oracle = wasserstein_distance(a.double().numpy(), b.double().numpy())
    assert w1(a, b) == pytest.approx(oracle, rel=RELATIVE, abs=0.0)


def test_dtypes_may_differ() -> None:
    """Samples of two dtypes are compared by value, not cast to one another."""
    a = normal(1000)
    b = a.to(torch.bfloat16)
    oracle = wasserstein_distance(a.numpy(), b.double().numpy())
    assert w1(a, b) == pytest.approx(oracle, rel=RELATIVE, abs=0.0)
    assert w1(b, a) == w1(a, b)


def test_a_permutation_is_at_distance_zero() -> None:
    """W1 does not see which value was where."""
    a = normal(8, 125)
    shuffled = a.flatten()[torch.randperm(1000, generator=seeded())]
    assert w1(a, shuffled) == 0.0


@pytest.mark.parametrize("shift", [2.0**-30, -0.25, 1024.0])
def test_a_shift_is_at_its_own_distance(shift: float) -> None:
    """Adding a constant moves every value by it (exact here: few bits, powers of two)."""
    a = torch.randint(-1000, 1000, (999,), generator=seeded()).double()
    assert w1(a, a + shift) == abs(shift)


def test_scales_with_the_values() -> None:
    """A factor that is a power of two comes out unchanged."""
    a, b = normal(1000), normal(1000, seed=1)
    assert w1(a * 2.0**-40, b * 2.0**-40) == w1(a, b) * 2.0**-40


@pytest.mark.parametrize("seed", range(10))
def test_never_exceeds_the_paired_distance(seed: int) -> None:
    """W1 <= mean |a - b|: the pairing at hand is one plan, and W1 that of the best."""
    a = normal(501, seed=seed)
    b = a + 0.1 * normal(501, seed=seed + 100)
    assert 0.0 < w1(a, b) <= float((a - b).abs().mean()) * (1 + RELATIVE)


@pytest.mark.parametrize("seed", range(10))
def test_obeys_the_triangle_inequality(seed: int) -> None:
    """A detour is never shorter."""
    a, b, c = (normal(300, seed=3 * seed + k) * (k + 1) for k in range(3))
    assert w1(a, c) <= (w1(a, b) + w1(b, c)) * (1 + RELATIVE)


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
    assert w1(a, cast) == pytest.approx(2.2e-5, rel=0.05)
    assert paired_seeds > 500 * w1(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_by_itself(dtype: torch.dtype) -> None:
    """Every row has the distance it has alone, in float64."""
    a, b = normal(6, 257).to(dtype), normal(6, 257, seed=1).to(dtype)
    rows = w1_rows(a, b)
    assert rows.dtype == torch.float64
    assert rows.shape == (6,)
    pairs = zip(a.double().numpy(), b.double().numpy(), strict=True)
    alone = [wasserstein_distance(x, y) for x, y in pairs]
    np.testing.assert_allclose(rows.numpy(), alone, rtol=RELATIVE, atol=0.0)


def test_comparing_rows_rejects_a_wrong_row() -> None:
    """The comparison above would notice one row that is off by 1e-11."""
    rows = w1_rows(normal(3, 50), normal(3, 50, seed=1)).numpy()
    wrong = rows * np.array([1.0, 1.0 + 1e-11, 1.0])
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(wrong, rows, rtol=RELATIVE, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_shows(dtype: torch.dtype) -> None:
    """NaN gives NaN on either side, infinity gives infinity, two alike give NaN, and the row
    beside them is left alone."""
    a = torch.tensor([[nan, 1, 2], [0, 1, 2], [inf, 1, 2], [-inf, 1, inf], [inf, 1, 2], [3, 2, 1]])
    b = torch.tensor([[0, 1, 2], [0, nan, 2], [0, 1, 2], [0, 1, 2], [1, inf, 2], [2, 3, 4]])
    expected = [nan, nan, inf, inf, nan, 1.0]
    result = w1_rows(a.to(dtype), b.to(dtype))
    np.testing.assert_array_equal(result.numpy(), expected)


def test_one_nan_in_many_is_not_dropped() -> None:
    """A single NaN among 10^5 values decides the result."""
    a = normal(100_000)
    b = a.clone()
    b[777] = nan
    assert math.isnan(w1(a, b))
    assert math.isnan(w1(b, a))


def test_shape_and_stride_do_not_matter() -> None:
    """Views, transposes and scalars are samples like any other, and gradients are no obstacle."""
    a, b = normal(10, 12), normal(10, 12, seed=1)
    assert w1(a.T, b[:, ::2].repeat_interleave(2, dim=1)) == w1(
        a.T.contiguous(), b[:, ::2].repeat_interleave(2, dim=1).flatten()
    )
    assert torch.equal(w1_rows(a.T[::2], b.T[1::2]), w1_rows(a[:, ::2].T, b[:, 1::2].T.clone()))
    assert w1(torch.tensor(1.0), torch.tensor(3.0)) == 2.0
    assert w1(a.requires_grad_(), b) > 0.0


def test_inputs_are_not_sorted_in_place() -> None:
    """The samples are as they were afterwards."""
    a, b = normal(100), normal(100, seed=1)
    before = a.clone(), b.clone()
    w1(a, b)
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (torch.zeros(0), torch.zeros(0), "no values"),
        (torch.zeros(3), torch.zeros(0), "no values"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(3), "int64"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.complex64), "complex64"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "float4"),
        (torch.zeros(3), torch.zeros(3, device="meta"), "different devices"),
    ],
)
def test_refuses_with_a_reason(a: torch.Tensor, b: torch.Tensor, says: str) -> None:
    """What has no distance here is refused in words."""
    with pytest.raises(UsageError, match=says):
        w1(a, b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(6), torch.zeros(6)),
        (torch.zeros(2, 3), torch.zeros(2, 4)),
        (torch.zeros(0, 3), torch.zeros(0, 3)),
        (torch.zeros(3, 0), torch.zeros(3, 0)),
    ],
)
def test_rows_refuse_other_shapes(a: torch.Tensor, b: torch.Tensor) -> None:
    """Rows are two equal, non-empty matrices."""
    with pytest.raises(UsageError):
        w1_rows(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e5m2])
def test_the_gpu_agrees_with_the_cpu(dtype: torch.dtype) -> None:
    """Both devices give the same distances, and the rows stay on the device."""
    a, b = normal(4, 4097).to(dtype), normal(4, 4097, seed=1).to(dtype)
    rows = w1_rows(a.cuda(), b.cuda())
    assert rows.is_cuda
    np.testing.assert_allclose(rows.cpu().numpy(), w1_rows(a, b).numpy(), rtol=RELATIVE)
    assert w1(a.cuda(), b.cuda()) == pytest.approx(w1(a, b), rel=RELATIVE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "m"), [(1, 7), (64, 96), (1000, 999)])
def test_lengths_may_differ(dtype: torch.dtype, n: int, m: int) -> None:
    """Then it is the integral of |F - G|, as scipy has it."""
    a, b = normal(n).to(dtype), (2 * normal(m, seed=1)).to(dtype)
    expected = wasserstein_distance(a.double().numpy(), b.double().numpy())
    assert w1(a, b) == pytest.approx(expected, rel=RELATIVE)


def test_weights_are_integers_or_refused() -> None:
    """In units of 1 / lcm(n, m), exact however often a value occurs: here beyond 2^53."""
    n, m = 2**28, 2**27 - 1
    values, twice = np.array([0.0, 1.0]), np.array([n - 1, 1])
    assert _of_counts(values, twice, np.array([0.0]), np.array([m])) == 1 / n
    too_long = np.array([2**33])
    with pytest.raises(UsageError, match="least common multiple"):
        _of_counts(np.array([0.0]), too_long, np.array([1.0]), too_long - 1)


def test_threads_change_nothing() -> None:
    """Sums on a CPU are numpy's, which adds in one order."""
    a, b = normal(3, 70_001), normal(3, 70_001, seed=1)
    one = w1_rows(a, b)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(w1_rows(a, b), one)
    finally:
        torch.set_num_threads(threads)
