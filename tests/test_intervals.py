"""Intervals of sampled rows: the right function of the right sums, and how often they hold."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from recipes import drawn as drawn_case
from scipy.special import stdtrit
from torch import Tensor

from numdev.formats import FORMATS
from numdev.kernels import find
from numdev.kernels.emulation.kernel import emulation
from numdev.kernels.reference import attend
from numdev.metrics.deviation import Metrics, measure, measure_plain
from numdev.metrics.intervals import RMS, jackknife
from numdev.metrics.row_sums import GROUPS
from numdev.metrics.row_sums import _dealt as dealt
from numdev.metrics.sampling import draw as draw_rows
from numdev.metrics.yardstick import Yardstick

BF16, FP8 = FORMATS["bfloat16"], FORMATS["float8_e4m3fn"]
LENGTH = 1024
METRICS = (*RMS, "mean_abs", "floor_ratio", "baseline_ratio", "expected_ratio",
           "flash_vs_precision", "flash_vs_low_precision")  # fmt: skip


def of(metrics: list[Metrics]) -> list[dict[str, tuple[float, float]]]:
    return [head["interval"] for head in metrics]


def part(y: Yardstick, rows: Tensor) -> Yardstick:
    tensors = {f.name: getattr(y, f.name) for f in dataclasses.fields(y)}
    cut: dict[str, Any] = {n: x[:, :, rows] for n, x in tensors.items() if isinstance(x, Tensor)}
    return dataclasses.replace(y, **cut)


def prepared(regime: str, *, causal: bool) -> Any:
    """PyTorch's flash in bf16, its yardstick, and an emulation in other tiles than its own."""
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 32, "dtype": torch.float32}
    drawn = drawn_case(LENGTH, regime, is_causal=causal, **shape)
    case = drawn.rounded_to(BF16)
    exact = attend(case)
    y = Yardstick(
        reference=exact.out,
        term_scale=exact.term_scale,
        empty=exact.empty,
        format=BF16,
        baseline=find("baseline").attend(case).out,
        baseline_fp32=find("baseline").attend(drawn).out,
        unrounded=attend(drawn).out,
        arithmetic=torch.full_like(exact.lse, 1e-6),
    )
    claim = {"preset": "fa2", "block_kv": 96, "kv_order": "descending"}
    return find("sdpa-flash").attend(case).out, y, emulation(case, claim)


def ends(absolute: Tensor, *, rows_of: int) -> tuple[float, float]:
    """Of mean_abs, of one head whose rows have these sums [rows]."""
    count = min(len(absolute), GROUPS)
    sums = {"absolute": absolute, "count": torch.ones_like(absolute)}
    groups = {name: dealt(x[None, None])[:, :count].numpy() for name, x in sums.items()}
    low, high = jackknife(groups, len(absolute), rows_of)["mean_abs"]
    return float(low[0]), float(high[0])


def test_the_jackknife_by_hand() -> None:
    """Four rows are four groups; without one of them the means are 3, 8/3, 7/3 and 2."""
    low, high = ends(torch.tensor([1.0, 2.0, 3.0, 4.0]).double(), rows_of=8)
    logs = [math.log(x) for x in (3, 8 / 3, 7 / 3, 2)]
    mean = sum(logs) / 4
    variance = (1 - 4 / 8) * 3 / 4 * sum((x - mean) ** 2 for x in logs)
    half = float(stdtrit(3, 0.975)) * math.sqrt(variance)
    assert math.isclose(low, 2.5 * math.exp(-half), rel_tol=1e-12)
    assert math.isclose(high, 2.5 * math.exp(half), rel_tol=1e-12)


def test_rows_are_dealt_to_groups_in_turn() -> None:
    """Rows i and i + 16 are one group, also where the last round is not full: an error that has
    that period spreads within no group."""
    assert dealt(torch.arange(18.0)[None, None])[0, :3].tolist() == [0.0 + 16, 1.0 + 17, 2.0]
    period = torch.arange(GROUPS).double() + 1
    widths = []
    for sums in (period.repeat(4), period.repeat_interleave(4)):
        low, high = ends(sums, rows_of=10**6)
        widths.append(high / low)
    assert widths[0] > 1.4
    assert widths[1] < widths[0] / 1.2


def test_no_error_has_no_interval_but_itself() -> None:
    """Where no row errs the estimate is 0, to 0; where only one group does, there is none."""
    exact = torch.ones(1, 2, 32, 4, dtype=torch.float64)
    got = exact.clone()
    got[:, 1, 3] += 1e-3
    empty = torch.zeros(1, 2, 32, dtype=torch.bool)
    none, one = of(measure_plain(got, exact, empty, of=1000).heads)
    assert none == {"mean_abs": (0.0, 0.0), "rms": (0.0, 0.0)}
    assert one == {}
    first = (x[:, :, :1] for x in (got, exact, empty))
    assert of(measure_plain(*first, of=1000).heads) == [{}, {}]


@pytest.mark.parametrize(
    ("regime", "causal"), [("normal", True), ("sink", True), ("sink", False), ("outliers", True)]
)
def test_intervals_hold_as_often_as_they_say(regime: str, causal: bool) -> None:
    """Of 128 of 1024 rows, over 60 samples and 4 heads, 90 % of the intervals of expected_ratio
    hold what all rows give (to 0.1 %), and 80 % of all others. 95 % is wanted; the standard error
    is 3 %, and with outliers a few rows rule a sum (86 % of rms).
    Intervals a third as wide would not pass."""
    out, y, expected = prepared(regime, causal=causal)
    whole = measure(out, y, expected).heads
    inside = dict.fromkeys(METRICS, 0)
    narrow = 0
    for seed in range(60):
        rows = draw_rows(LENGTH, 128, seed, "queries")
        assert rows is not None
        found = of(measure(out[:, :, rows], part(y, rows), expected[:, :, rows], of=LENGTH).heads)
        for head, ends in zip(whole, found, strict=True):
            for metric in METRICS:
                low, high = ends[metric]
                inside[metric] += low * 0.999 <= head[metric] <= high * 1.001
            low, high = ends["rms"]
            third = (high / low) ** (1 / 6)
            narrow += (low * high) ** 0.5 / third <= head["rms"] <= (low * high) ** 0.5 * third
    for metric, count in inside.items():
        least = 0.9 if metric == "expected_ratio" else 0.8
        assert count >= least * 240, (metric, count / 240)
    assert narrow < 0.8 * 240
