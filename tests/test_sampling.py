"""Sampled rows: which are drawn, that a case of some rows is the same call to them, what
is said of the rest, and how often intervals hold."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from oracles import FEATURES, make_case, step, with_grad
from recipes import drawn
from scipy.special import stdtrit
from torch import Tensor

from numdev.cases import AttentionCase, empty_rows, explicit_mask
from numdev.errors import Refused, UsageError
from numdev.formats import FORMATS
from numdev.kernels import Kernel, find
from numdev.kernels.emulation.kernel import emulation
from numdev.kernels.reference import attend, gradients, key_gradients
from numdev.metrics.deviation import Metrics, measure, measure_plain
from numdev.metrics.intervals import RMS, intervals
from numdev.metrics.row_samples import Sample, Strata
from numdev.metrics.row_sums import GROUPS
from numdev.metrics.row_sums import _sum_by_group as dealt
from numdev.metrics.yardstick import Yardstick
from numdev.operations.attention.finiteness import _gradient_bound, elsewhere


def draw(length: int, count: int, seed: int, label: str) -> torch.Tensor | None:
    return Sample(count=count, seed=seed).draw(length, label)


@pytest.mark.parametrize(
    ("length", "count"), [(10, 3), (4096, 256), (1000, 999), (7, 1), (100, 7)]
)
def test_one_position_in_each_stratum(length: int, count: int) -> None:
    """Stratum s is [s L / n, (s + 1) L / n), rounded down; each has one position, in
    order."""
    rows = draw(length, count, 0, "queries")
    assert (rows.dtype, rows.device.type, len(rows)) == (torch.int64, "cpu", count)
    for s, row in enumerate(rows.tolist()):
        assert s * length // count <= row < (s + 1) * length // count


def test_the_same_arguments_draw_the_same_rows_and_others_other_ones() -> None:
    """Rows depend on seed and label, and on nothing that was drawn before. A count that
    reaches the length samples nothing."""
    first = draw(4096, 64, 3, "queries")
    torch.rand(5)
    assert torch.equal(first, draw(4096, 64, 3, "queries"))
    for other in (draw(4096, 64, 4, "queries"), draw(4096, 64, 3, "keys")):
        assert not torch.equal(first, other)
    assert draw(64, 64, 0, "queries") is draw(64, 65, 0, "queries") is None
    assert Sample(count=64).draw(64, "queries") is None
    assert Sample(count=64).draw(65, "keys") is not None


def test_every_position_is_drawn_equally_often() -> None:
    """Over 2000 seeds each of 12 positions is drawn 4/12 of the time, within 4 standard
    errors."""
    counts = torch.zeros(12)
    for seed in range(2000):
        counts[draw(12, 4, seed, "queries")] += 1
    assert (counts / 2000 - 1 / 3).abs().max() < 4 * (2 / 9 / 2000) ** 0.5


def case_of(feature: str, **changes: Any) -> AttentionCase:
    created: AttentionCase = make_case(
        **{**FEATURES[feature], "dtype": torch.bfloat16, **changes}
    )
    return created


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, NaN at the same places."""
    return torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("last", [False, True])
def test_the_reference_of_some_rows_is_that_of_the_call(feature: str, last: bool) -> None:
    """Row by row: out, log-sum-exp, term scale within fp64 rounding of sums of at most 10
    terms (4e-15 of the terms), and which rows are empty, exactly. So is the explicit
    mask."""
    case = case_of(feature)
    rows = torch.arange(1 if last and case.q_len > 1 else 0, case.q_len, 2)
    cut = case.restrict(rows=rows)
    whole, part = attend(case), attend(cut)
    tolerance = 4e-15 * whole.term_scale[:, :, rows] + 1e-300
    assert ((part.out - whole.out[:, :, rows]).abs() <= tolerance).all()
    assert ((part.term_scale - whole.term_scale[:, :, rows]).abs() <= tolerance).all()
    assert torch.allclose(part.lse, whole.lse[:, :, rows], rtol=1e-14, atol=1e-14)
    assert torch.equal(part.empty, whole.empty[:, :, rows])
    assert torch.equal(empty_rows(cut), empty_rows(case)[:, :, rows])
    mask, of_rows = explicit_mask(case), explicit_mask(cut)
    assert (mask is None) == (of_rows is None)
    if mask is not None and of_rows is not None:
        expected = mask.expand(*case.q.shape[:3], case.kv_len)[:, :, rows]
        assert same(of_rows.expand(expected.shape), expected)


def long(length: int = 300, **changes: Any) -> AttentionCase:
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "scale": 0.25}
    return drawn(length, **shape, **changes)


@pytest.mark.parametrize("window", [None, (33, 20)])
def test_truncation_tells_the_blocks_and_they_are_the_calls(window: Any) -> None:
    """Rounding toward zero O shrinks at every tile its block takes part in, so that there
    the blocks must be those of the call; and O differs between blocks of 16 and 128."""
    case = long(256, window=window)
    rows = draw(256, 50, 2, "queries")
    outs = []
    for block in (16, 128):
        options = {"preset": "golden2024", "rounding": "toward_zero", "block_q": block}
        whole = find("emulated").attend(case, block_kv=16, **options).out
        part = (
            find("emulated").attend(case.restrict(rows=rows), block_kv=16, **options).out
        )
        assert same(part, whole[:, :, rows])
        outs.append(whole)
    assert window is None or not same(*outs)


def test_rows_must_be_in_order_and_kernels_get_whole_calls() -> None:
    """Tiles take rows for a range of positions, so disorder or repetition is refused, and
    so are places from the end, which no position has; and a kernel under audit, which
    would take rows for neighbours, never gets some of them."""
    for rows in ([2, 1], [1, 1], [-2, -1], [-1, 4], [[0, 1]], [0.0, 1.0], [False, True]):
        with pytest.raises(UsageError, match="rows: expected ascending int64 indices"):
            long().restrict(rows=torch.tensor(rows))
    with pytest.raises(UsageError, match="positions: expected"):
        dataclasses.replace(long(), positions=torch.arange(3))
    part = long(is_causal=True).restrict(rows=torch.arange(0, 300, 3))
    mine = Kernel(name="mine", function=lambda case: case.q)
    for run in (mine.attend, mine.gradients, find("sdpa-flash").attend):
        with pytest.raises(Refused, match="whole calls"):
            run(part)
    for name in ("reference", "floor", "baseline", "emulated"):
        assert find(name).attend(part).out.shape[2] == 100


@pytest.mark.parametrize("feature", FEATURES)
def test_gradients_at_some_keys_are_the_calls(feature: str) -> None:
    """dk, dv and their term scales at sampled keys are the rows of the whole backward
    reference, within fp64 rounding of some 50 operations (1e-14 of the terms), and so is
    which are unseen."""
    case = with_grad(case_of(feature, dtype=torch.float64))
    keys = torch.arange(0, case.kv_len, 2)
    whole, part = gradients(case), key_gradients(case, keys, attend(case))
    for name in ("dk", "dv"):
        terms = getattr(whole, f"{name}_terms")[:, :, keys]
        error = part[name] - getattr(whole, name)[:, :, keys]
        assert (error.abs() <= 1e-14 * terms + 1e-300).all()
        result = part[f"{name}_terms"]
        assert ((result - terms).abs() <= 1e-14 * terms + 1e-300).all()
    assert torch.equal(part["unseen"], whole.unseen[:, :, keys])


# --- what is not finite outside the rows ----------------------------------------------

nan, inf = math.nan, math.inf
ROWS = torch.tensor([0, 3])


def step_of(**changes: Any) -> AttentionCase:
    fields = {"q_len": 6, "kv_len": 6, "heads": 4, "kv_heads": 2, "dtype": torch.float16}
    return step(**{**fields, **changes})


def counted(case: AttentionCase, tensor: str, place: Any, value: float) -> list[Any]:
    """Per head, what is said where a gradient of zeros has this value at this place."""
    x = torch.zeros_like(getattr(case, tensor[1]))
    x[place] = value
    rows = ROWS if tensor != "dk" else torch.tensor([1])
    result = elsewhere(x, tensor, case, rows, FORMATS["float16"])
    return [(f.nonfinite, f.unknown is not None) for f in result]


@pytest.mark.parametrize("tensor", ["dq", "dk", "dv"])
def test_an_infinite_gradient_is_wrong_where_none_can_overflow(tensor: str) -> None:
    """NaN always is; infinity where a bound on the exact gradient excludes it, else it is
    open."""
    small, place = step_of(), (0, 0, 2, 0)
    large = dataclasses.replace(small, grad_out=torch.full_like(small.grad_out, 6e4))
    for case, value in ((small, nan), (small, inf), (large, nan)):
        assert counted(case, tensor, place, value)[0] == (1, False)
    assert counted(large, tensor, place, inf)[:2] == [(0, True), (0, False)]


@pytest.mark.parametrize("tensor", ["dq", "dk", "dv"])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_the_bound_is_one(tensor: str, softcap: float | None) -> None:
    """No exact gradient exceeds it, over 20 draws and soft caps; the largest is over a
    200th."""
    for seed in range(20):
        case = step_of(softcap=softcap, logits=4.0, seed=seed, dtype=torch.float64)
        exact, bound = getattr(gradients(case), tensor), _gradient_bound(case, tensor)
        largest = exact.abs().amax(dim=(0, 2, 3))
        assert (largest <= bound * (1 + 1e-12)).all()
        assert softcap or (bound <= 200 * largest.amax()).all()


# --- intervals ------------------------------------------------------------------------

BF16 = FORMATS["bfloat16"]
LENGTH = 1024
METRICS = (*RMS, "mean_abs", "floor_ratio", "baseline_ratio", "expected_ratio",
           "flash_vs_precision", "flash_vs_low_precision")  # fmt: skip


def of(metrics: list[Metrics]) -> list[dict[str, tuple[float, float]]]:
    return [head["interval"] for head in metrics]


def part(y: Yardstick, rows: Tensor) -> Yardstick:
    tensors = {f.name: getattr(y, f.name) for f in dataclasses.fields(y)}
    cut: dict[str, Any] = {
        n: x[:, :, rows] for n, x in tensors.items() if isinstance(x, Tensor)
    }
    return dataclasses.replace(y, **cut)


def prepared(regime: str, *, causal: bool) -> Any:
    """PyTorch's flash in bf16, its yardstick, and an emulation in other tiles than its
    own."""
    shape: dict[str, Any] = {
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "dtype": torch.float32,
    }
    wide = drawn(LENGTH, regime, is_causal=causal, **shape)
    case = wide.rounded_to(BF16)
    exact, baseline = attend(case), find("baseline")
    y = Yardstick(
        reference=exact.out, term_scale=exact.term_scale, empty=exact.empty, format=BF16,
        baseline=baseline.attend(case).out, baseline_fp32=baseline.attend(wide).out,
        unrounded=attend(wide).out, arithmetic=torch.full_like(exact.lse, 1e-6),
    )  # fmt: skip
    claim = {"preset": "fa2", "block_kv": 96, "kv_order": "descending"}
    return find("sdpa-flash").attend(case).out, y, emulation(case, claim)


def ends(absolute: Tensor, *, rows_of: int) -> tuple[float, float]:
    """Of mean_abs, of one head whose rows have these sums [rows]."""
    count = min(len(absolute), GROUPS)
    sums = {"absolute": absolute, "count": torch.ones_like(absolute)}
    groups = {name: dealt(x[None, None])[:, :count].numpy() for name, x in sums.items()}
    return intervals(groups, len(absolute), rows_of)[0]["mean_abs"]


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
    """Rows i and i + 16 are one group, also where the last round is not full: an error
    that has that period spreads within no group."""
    assert dealt(torch.arange(18.0)[None, None])[0, :3].tolist() == [
        0.0 + 16,
        1.0 + 17,
        2.0,
    ]
    period = torch.arange(GROUPS).double() + 1
    widths = []
    for sums in (period.repeat(4), period.repeat_interleave(4)):
        low, high = ends(sums, rows_of=10**6)
        widths.append(high / low)
    assert widths[0] > 1.4
    assert widths[1] < widths[0] / 1.2


def test_no_error_has_no_interval_but_itself() -> None:
    """Where no row errs the estimate is 0, to 0; where only one group does, there is
    none."""
    exact = torch.ones(1, 2, 32, 4, dtype=torch.float64)
    got = exact.clone()
    got[:, 1, 3] += 1e-3
    empty = torch.zeros(1, 2, 32, dtype=torch.bool)
    none, one = of(measure_plain(got, exact, empty, of=1000).heads)
    assert none == {"mean_abs": (0.0, 0.0), "rms": (0.0, 0.0)}
    assert one == {}
    first = (x[:, :, :1] for x in (got, exact, empty))
    assert of(measure_plain(*first, of=1000).heads) == [{}, {}]


def test_intervals_hold_on_a_heavy_tail_whose_largest_rows_are_measured_too() -> None:
    """Of 64 of 2048 rows with errors of Pareto's tail 1.5, over 200 samples, the rms of
    all is in its interval in under 60 %, and with the 32 largest beside them in 80 %."""
    counts = [0, 0]
    for seed in range(200):
        created = torch.Generator().manual_seed(seed)
        x = torch.rand(1, 1, 2048, generator=created, dtype=torch.float64) ** (-1 / 1.5)
        rms, rows = float(x.square().mean().sqrt()), draw(2048, 64, seed, "queries")
        ways: Any = (rows, 2048), Strata.joined(rows, x[0, 0].topk(32).indices, 2048)  # type: ignore
        for way, (at, of) in enumerate(ways):
            result = measure_plain(x[..., at], 0 * x[..., at], x[..., at] < 0, of=of)
            low, high = result.heads[0]["interval"]["rms"]
            counts[way] += low <= rms <= high
    assert counts[0] < 120 < 160 <= counts[1]


@pytest.mark.parametrize(
    ("regime", "causal"),
    [("normal", True), ("sink", True), ("sink", False), ("outliers", True)],
)
def test_intervals_hold_as_often_as_they_say(regime: str, causal: bool) -> None:
    """Of 128 of 1024 rows, over 60 samples and 4 heads, 90 % of the intervals of
    expected_ratio hold what all rows give (to 0.1 %), and 80 % of all others. 95 % is
    wanted; the standard error is 3 %, and with outliers a few rows rule a sum (86 % of
    rms). Intervals a third as wide would not pass."""
    out, y, expected = prepared(regime, causal=causal)
    whole = measure(out, y, expected).heads
    inside = dict.fromkeys(METRICS, 0)
    narrow = 0
    for seed in range(60):
        rows = draw(LENGTH, 128, seed, "queries")
        result = of(
            measure(out[:, :, rows], part(y, rows), expected[:, :, rows], of=LENGTH).heads
        )
        for head, ends in zip(whole, result, strict=True):
            for metric in METRICS:
                low, high = ends[metric]
                inside[metric] += low * 0.999 <= head[metric] <= high * 1.001
            low, high = ends["rms"]
            third = (high / low) ** (1 / 6)
            narrow += (
                (low * high) ** 0.5 / third <= head["rms"] <= (low * high) ** 0.5 * third
            )
    for metric, count in inside.items():
        least = 0.9 if metric == "expected_ratio" else 0.8
        assert count >= least * 240, (metric, count / 240)
    assert narrow < 0.8 * 240
