"""The bias statistic: its arithmetic by hand, and whom it accuses.

The second half is the quick version of benchmarks/bias_calibration.py, whose kernels it
uses."""

from __future__ import annotations

import math

import bias_calibration as benchmark
import numpy as np
import pytest
import torch
from scipy import stats

from numdev.cases import AttentionCase, CaseRef
from numdev.formats import FORMATS
from numdev.kernels.reference import attend
from numdev.metrics.deviation import Metrics, Yardstick, measure
from numdev.metrics.statistics import BIAS_ULP, holm
from numdev.sources.input_regimes import Shapes, draw

BF16 = FORMATS["bfloat16"]


def judged(ulps: torch.Tensor) -> Metrics:
    """The metrics of one head off by `ulps` [sequences, rows, features] of 2^-7."""
    n, rows, features = ulps.shape
    # Every row a little different from all others, as rows of different sequences are.
    each = torch.arange(1, 1 + n * rows, dtype=torch.float64).view(n, 1, rows, 1)
    r = (1.5 * (1 + each * 2.0**-40)).expand(n, 1, rows, features)
    y = Yardstick(reference=r, term_scale=r, empty=torch.zeros(n, 1, rows, dtype=torch.bool),
                  format=BF16)  # fmt: skip
    (head,) = measure(y.floor + ulps[:, None] * 2.0**-7, y).heads
    return head


def test_large_biases_come_before_certain_ones() -> None:
    """A certain bias of 0.01 ulp does not hide a less certain one above the least
    size."""
    ulps = torch.zeros(8, 200, 2, dtype=torch.float64)
    ulps[:, 0, 0] = 1.0  # 0.005 ulp in every sequence, feature 0, without spread
    ulps[:6, :, 1] = 1.0  # 1 ulp in six of eight sequences, feature 1
    head = judged(ulps)
    assert head["bias_of"] == "feature 1" or abs(head["bias_size"]) > 0.3
    assert abs(head["bias_size"]) >= BIAS_ULP


def test_agreement_of_a_few_coarse_values_is_no_certainty() -> None:
    """Eight sequences of one row that round one feature up: by chance once in 128
    tries."""
    head = judged(torch.ones(8, 1, 1, dtype=torch.float64))
    assert math.isfinite(head["bias_t"])
    assert head["bias_p"] > 2.0**-10
    # the same in every one of 4096 elements is as certain as it gets
    assert judged(torch.ones(8, 64, 64, dtype=torch.float64))["bias_p"] < 1e-12


def yardstick_of(case: AttentionCase) -> Yardstick:
    exact = attend(case.rounded_to(BF16))
    return Yardstick(reference=exact.out, term_scale=exact.term_scale, empty=exact.empty,
                     format=BF16, lse=exact.lse)  # fmt: skip


def test_v_of_ones_is_no_repetition() -> None:
    """Equal results of different scores still count: V = 1 shows a row sum that does not
    fit P."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(8, 1, 8, 16, generator=g) for _ in range(2))
    v = torch.ones(8, 1, 8, 4)
    y = yardstick_of(AttentionCase(ref=CaseRef(case="ones"), q=q, k=k, v=v, scale=0.25))
    (head,) = measure(y.floor + 2.0**-7, y).heads
    assert (head["sequences"], head["bias_of"]) == (8, "mean")
    assert head["bias_p"] < 1e-4


def test_holm_by_hand() -> None:
    """Step-down at 0.05: 0.01 <= 0.05/4, 0.013 <= 0.05/3, 0.03 > 0.05/2, and so the last
    one. NaN is a hypothesis that is not rejected, wherever it stands."""
    for p, rejected in (
        ([0.04, 0.01, 0.03, 0.013], [False, True, False, True]), ([0.05], [True]),
        ([0.050001], [False]), ([0.02] * 3, [False] * 3), ([0.0, 0.024, 0.024], [True] * 3),
        ([], []), ([0.012, math.nan, 0.01], [True, False, True]),
    ):  # fmt: skip
        assert holm(p, 0.05) == rejected


QUICK = {"reports": 2, "heads": 52, "sequences": 8, "length": 32, "head_dim": 32}
HEADS = QUICK["reports"] * QUICK["heads"]


@pytest.mark.parametrize(
    ("regime", "fmt"),
    [
        ("normal", "bfloat16"),
        ("ties, strength 16", "bfloat16"),
        ("ties, strength 16", "float16"),
    ],
)
@pytest.mark.thorough
def test_the_sound_go_free_and_the_guilty_do_not(regime: str, fmt: str) -> None:
    """Of 104 heads sound kernels are accused in none, truncation and a drift of 0.1 ulp
    in all; the un-normalised product where few terms are added and the format keeps the
    tail of P."""
    kernels = [*benchmark.SOUND, *benchmark.GUILTY]
    tallies = benchmark.calibrate(benchmark.REGIMES[regime], fmt, kernels, **QUICK)
    assert {tally.heads for tally in tallies.values()} == {HEADS}
    accused = {name.removeprefix("planted:"): x.accused for name, x in tallies.items()}
    assert (accused["sdpa-math"], accused["fp32"]) == (0, 0)
    assert (accused["truncated"], accused["drift"]) == (HEADS, HEADS)
    if fmt == "bfloat16":
        assert accused["unnormalised"] == (0 if regime == "normal" else HEADS)


def test_against_the_truth_even_the_floor_looks_biased() -> None:
    """Why the floor is subtracted: on sharp ties correct rounding itself errs to one
    side."""
    shapes = Shapes(
        batch=8, heads=4, kv_heads=4, q_len=32, kv_len=32, head_dim=32, v_dim=32
    )
    q, k, v = draw("ties", shapes, seed=0, options={"strength": 16.0})
    y = yardstick_of(
        AttentionCase(ref=CaseRef(case="ties"), q=q, k=k, v=v, scale=32**-0.5)
    )
    per_sequence = ((y.floor - y.reference) / y.spacing).mean(dim=(1, 2, 3)).numpy()
    assert stats.ttest_1samp(per_sequence, 0.0).pvalue < 1e-6
    assert np.abs(per_sequence).mean() > BIAS_ULP
    assert all(head["bias"] == 0 for head in measure(y.floor, y).heads)
