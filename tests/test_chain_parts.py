"""Blocks of rows and their t, running sums, and the largest eigenvalue: the parts of a diagnosis
that numbers without attention can test."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from numdev.diagnose.projection import STEPS, largest_eigenvalue, similarity
from numdev.diagnose.statistics import BLOCKS, by_head, longest_run, mean, t_of
from numdev.sources.projection import Projection


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def everything(x: Tensor) -> Tensor:
    return torch.ones(x.shape, dtype=torch.bool)


# --- the t of a mean -----------------------------------------------------------------------------


def test_t_is_scipys_over_means_of_blocks() -> None:
    """Sixteen blocks of a sequence; a wrong number of blocks gives another t."""
    x = normal(2, 3, 64) + 0.3
    found = t_of(x, everything(x))
    for head in range(3):
        blocks = x[:, head].reshape(2 * BLOCKS, -1).mean(dim=-1)
        assert float(found[head]) == pytest.approx(stats.ttest_1samp(blocks, 0.0).statistic)
        rows = stats.ttest_1samp(x[:, head].flatten(), 0.0).statistic
        assert float(found[head]) != pytest.approx(rows, rel=1e-3)


def test_rows_that_do_not_count_are_in_no_block() -> None:
    """Whatever they hold: not even a block of nothing else."""
    x = normal(2, 1, 64)
    rows = everything(x)
    rows[1, 0, 8:] = False
    spoiled = torch.where(rows, x, math.nan)
    blocks = [*x[0, 0].reshape(BLOCKS, -1).mean(-1), *x[1, 0, :8].reshape(2, -1).mean(-1)]
    expected = stats.ttest_1samp(blocks, 0.0).statistic
    assert float(t_of(spoiled, rows)[0]) == pytest.approx(expected)
    assert float(mean(spoiled, rows)[0]) == pytest.approx(float(x[rows].mean()))


def test_a_spread_below_half_a_step_is_not_measured() -> None:
    """Rows that all err alike give no endless t where a grid is known, and none where it is not."""
    x = torch.full((1, 1, 64), 0.25, dtype=torch.float64)
    half_step = 0.5 / 4  # of a block's mean, of 4 rows
    expected = 0.25 / (half_step / math.sqrt(BLOCKS))
    assert float(t_of(x, everything(x), step=1.0)[0]) == pytest.approx(expected)
    assert math.isnan(t_of(x, everything(x))[0])


def test_few_blocks_have_no_t() -> None:
    """Three rows are three blocks, one too few; no row has no mean."""
    x = normal(1, 1, 3)
    assert math.isnan(t_of(x, everything(x))[0])
    longer = normal(1, 1, 4)
    assert math.isfinite(t_of(longer, everything(longer))[0])
    nothing = {"mean": mean(x, ~everything(x)), "t": t_of(x, ~everything(x))}
    assert by_head({"a": nothing}) == [{"a": {"mean": None, "t": None}}]


# --- running sums --------------------------------------------------------------------------------


def test_errors_of_one_sign_run_far() -> None:
    """Equal ones to sqrt(rows), random ones to about 1, and alternating ones nowhere."""
    n = 400
    one_sign = torch.ones(1, 1, n, dtype=torch.float64)
    assert float(longest_run(one_sign, everything(one_sign))) == pytest.approx(math.sqrt(n))
    random = normal(200, 1, n)
    runs = longest_run(random, everything(random))
    assert 1.0 < float(runs.median()) < 1.5  # of max |W| over [0, 1] the median is 1.15
    alternating = one_sign * (-1.0) ** torch.arange(n)
    assert float(longest_run(alternating, everything(alternating))) == pytest.approx(
        1 / math.sqrt(n)
    )


# --- similarity ----------------------------------------------------------------------------------


def test_the_largest_eigenvalue_is_numpys() -> None:
    """To fp64 rounding where the steps span the space, or its rank; nearly where they do not."""
    for n, rank in ((STEPS, STEPS), (100, 7), (1, 1)):
        x = normal(2, n, rank)
        gram = x @ x.mT
        expected = np.linalg.eigvalsh(gram.numpy())[:, -1]
        assert largest_eigenvalue(gram).numpy() == pytest.approx(expected, rel=1e-10)
    x = normal(2, 300, 600)  # a bulk without a direction that stands out
    expected = np.linalg.eigvalsh((x @ x.mT).numpy())[:, -1]
    found = largest_eigenvalue(x @ x.mT).numpy()
    assert found == pytest.approx(expected, rel=1e-2)
    assert (found <= expected * (1 + 1e-12)).all()
    assert found != pytest.approx(expected * 1.02, rel=1e-2)


def test_a_gram_matrix_that_is_not_finite_has_none() -> None:
    """And spoils no other; one of zeros has 0."""
    gram = torch.stack([torch.eye(3), torch.full((3, 3), math.nan), torch.zeros(3, 3)]).double()
    assert largest_eigenvalue(gram).nan_to_num(-1.0).tolist() == pytest.approx([1.0, -1.0, 0.0])


def projection(x: Tensor) -> Projection:
    return Projection(x=x, weight=torch.zeros(1, 1), pull=lambda dq: dq.transpose(1, 2))


def test_parallel_terms_are_all_alike() -> None:
    """R_T that differ by a factor share all their energy; orthogonal ones share none."""
    row = torch.ones(1, 1, 12, 4, dtype=torch.float64)
    factors = torch.arange(1, 13, dtype=torch.float64)[None, :, None]
    alike = similarity(projection(torch.ones(1, 12, 3).double() * factors), row)
    apart = similarity(projection(torch.eye(12, dtype=torch.float64)[None]), row)
    assert (float(alike), float(apart)) == pytest.approx((1.0, 1 / 12))


def test_of_many_tokens_some_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evenly spread, as many as are allowed, and whatever memory the Gram matrices have."""
    PK, x = normal(2, 3, 25, 4), normal(2, 25, 6, seed=1)
    monkeypatch.setattr("numdev.diagnose.projection.MOST_TOKENS", 20)
    chosen = [2 * i + i // 2 for i in range(20)]
    at, of_x = PK.transpose(1, 2).flatten(0, 1)[chosen], x.flatten(0, 1)[chosen]
    R = torch.einsum("tj,tw->tjw", at[:, 2], of_x).flatten(1)
    share = torch.linalg.svdvals(R)[0].square() / R.square().sum()
    for room in (1 << 28, 1):
        monkeypatch.setattr("numdev.diagnose.projection.GRAM_BYTES", room)
        assert float(similarity(projection(x), PK)[2]) == pytest.approx(float(share))
