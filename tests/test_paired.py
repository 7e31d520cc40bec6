"""Distances of two tensors, element by element: known answers, numpy, NaN and infinity."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance

from numdev.errors import UsageError
from numdev.metrics import wasserstein
from numdev.metrics.paired import Paired, paired

# Sums of 10^4 float64 terms in another order.
RELATIVE = 1e-12
NUMBERS = ("max_abs", "mean_abs", "rel", "cosine", "w1", "spread", "equal")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
nan, inf = math.nan, math.inf


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=drawn, dtype=torch.float64)


def by_numpy(a: torch.Tensor, b: torch.Tensor) -> Paired:
    """Everything from whole float64 arrays, by the definitions."""
    x, y = (t.double().flatten().numpy() for t in (a, b))
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    norm = np.linalg.norm
    return Paired(
        elements=a.numel(),
        nonfinite=int((~finite).sum()),
        max_abs=float(np.max(np.abs(x - y))),
        mean_abs=float(np.mean(np.abs(x - y))),
        rel=float(norm(x - y) / norm(y)),
        cosine=float(np.dot(x, y) / (norm(x) * norm(y))),
        w1=float(wasserstein_distance(x, y)),
        spread=float(np.mean(np.abs(y - np.mean(y)))),
        equal=float(np.mean(x == y)),
    )


def assert_same(found: Paired, expected: Paired, relative: float = RELATIVE) -> None:
    assert (found.elements, found.nonfinite) == (expected.elements, expected.nonfinite)
    for name in NUMBERS:
        expectation = pytest.approx(getattr(expected, name), rel=relative, abs=0.0)
        assert getattr(found, name) == expectation, name


def test_known_answers() -> None:
    """Two vectors of four, every number as found by hand; b = 0 has no relative distance and no
    angle; both zeros are equal; a permutation is at W1 0 and far in all else."""
    a, b = torch.tensor([3.0, 0.0, -1.0, 2.0]), torch.tensor([3.0, 4.0, 0.0, 1.0])
    by_hand = Paired(
        elements=4,
        nonfinite=0,
        max_abs=4.0,
        mean_abs=1.5,
        rel=math.sqrt(18 / 26),
        cosine=11 / (math.sqrt(14) * math.sqrt(26)),
        w1=1.0,  # -1, 0, 2, 3 to 0, 1, 3, 4
        spread=1.5,  # from 2
        equal=0.25,
    )
    assert_same(paired(a, b), by_hand, relative=4 * 2.0**-53)
    found = paired(torch.tensor([1.0, -3.0]), torch.tensor([0.0, -0.0]))
    assert (found.rel, found.cosine) == (None, None)
    assert (found.max_abs, found.mean_abs, found.w1, found.spread) == (3.0, 2.0, 2.0, 0.0)
    assert paired(torch.zeros(2), torch.ones(2)).cosine is None
    assert paired(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])).equal == 1.0
    found = paired(normal(1000), normal(1000).flip(0))
    assert (found.w1, found.rel > 1.0) == (0.0, True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
def test_agrees_with_numpy(dtype: torch.dtype, other: torch.dtype) -> None:
    """In any two dtypes, of the values as stored."""
    a = normal(40, 250)
    b = a + 0.1 * normal(40, 250, seed=1)
    a, b = a.to(dtype), b.to(other)
    assert_same(paired(a, b), by_numpy(a, b))


def test_the_comparison_notices_a_wrong_number() -> None:
    """Each field alone, off by 1e-11 or by one, fails it."""
    found = paired(normal(100), normal(100, seed=1).index_fill(0, torch.tensor([3]), nan))
    found = dataclasses.replace(found, equal=0.5)
    for name in ("elements", "nonfinite", *NUMBERS):
        right = getattr(found, name)
        wrong = right * (1 + 1e-11) if name in NUMBERS else right + 1
        with pytest.raises(AssertionError):
            assert_same(dataclasses.replace(found, **{name: wrong}), found)


@pytest.mark.parametrize("block", [1, 7, 100])
def test_blocks_change_nothing(block: int, monkeypatch) -> None:
    """In blocks, the distances are those of the whole, NaN included."""
    a, b = normal(300), normal(300, seed=1)
    b[::17] = nan
    whole = paired(a, b)
    monkeypatch.setattr(wasserstein, "_CPU_BLOCK", block)
    assert_same(paired(a, b), whole)


@pytest.mark.parametrize("dtype", [*DTYPES[:4], torch.float8_e5m2])
def test_what_is_not_finite_is_counted_and_left_out(dtype: torch.dtype) -> None:
    """NaN or infinity in either, or alike in both: the numbers are those without these elements."""
    a, b = normal(12).to(dtype), normal(12, seed=1).to(dtype)
    without = paired(a, b)
    spoilt_a = torch.tensor([nan, 1.0, inf, 1.0, inf, nan, -inf]).to(dtype)
    spoilt_b = torch.tensor([1.0, nan, 1.0, -inf, inf, nan, inf]).to(dtype)
    found = paired(torch.cat([spoilt_a, a]), torch.cat([spoilt_b, b]))
    assert_same(found, dataclasses.replace(without, elements=19, nonfinite=7))


def test_nothing_left_is_no_number() -> None:
    """No elements, or none that is finite in both."""
    nothing = dict.fromkeys(NUMBERS)
    assert paired(torch.zeros(0, 3), torch.zeros(0, 3)) == Paired(
        elements=0, nonfinite=0, **nothing
    )
    a, b = torch.tensor([nan, 1.0]), torch.tensor([1.0, inf])
    assert paired(a, b) == Paired(elements=2, nonfinite=2, **nothing)


def test_beyond_float64_is_no_number() -> None:
    """Float64 values whose squares, or whose distance, it cannot hold; float32's it can."""
    a = torch.tensor([1e200, 2e200], dtype=torch.float64)
    found = paired(a, a.flip(0))
    assert (found.rel, found.cosine) == (None, None)
    assert found.max_abs == found.mean_abs == 1e200
    far = torch.tensor([1.7e308], dtype=torch.float64)
    assert paired(far, -far).max_abs is None
    assert paired(far, -far).w1 is None
    assert paired(torch.tensor([3e38]), torch.tensor([-3e38])).cosine == pytest.approx(-1.0)


def test_inputs_stay_as_they_are() -> None:
    """Neither tensor is changed, and gradients and strides are no obstacle."""
    a, b = normal(6, 8).requires_grad_(), normal(8, 6, seed=1)
    before = a.detach().clone(), b.clone()
    assert_same(paired(a, b.T), paired(a.detach().clone(), b.T.contiguous()))
    assert torch.equal(a.detach(), before[0])
    assert torch.equal(b, before[1])


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (torch.zeros(3), torch.zeros(4), r"\[3\] on cpu and \[4\]"),
        (torch.zeros(3), torch.zeros(3, device="meta"), "on meta"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(3), "int64"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.complex64), "complex64"),
    ],
)
def test_refuses_with_a_reason(a: torch.Tensor, b: torch.Tensor, says: str) -> None:
    """What is no pair is refused in words."""
    with pytest.raises(UsageError, match=says):
        paired(a, b)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e5m2])
def test_the_gpu_agrees_with_the_cpu(dtype: torch.dtype) -> None:
    """In every dtype, also against float32, with NaN and without."""
    a, b = normal(40_000).to(dtype), normal(40_000, seed=1).to(dtype)
    assert_same(paired(a.cuda(), b.cuda()), paired(a, b))
    other = b.float().index_fill(0, torch.tensor([5, 77]), nan)
    assert_same(paired(a.cuda(), other.cuda()), paired(a, other))
