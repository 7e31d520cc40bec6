"""Blocks of rows and their t, and the largest eigenvalue: the parts of a diagnosis that numbers
without attention can test."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from numdev.diagnose.statistics import BLOCKS, STEPS, by_head, largest_eigenvalue, mean, t_of


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
    assert by_head(nothing) == [{"mean": None, "t": None}]


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
