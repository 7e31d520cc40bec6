"""Bounds: what is known of curves made by hand comes back, and what is wrong is seen.

Curves follow the logistic model of `training_runs.chaotic`: exponential growth from a known start
to a known level. There the exact ratio, the exact delay (ln of the starts' ratio over the rate) and
the step at which a curve bends can be written down.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import scipy.stats
from training_runs import LEVEL, RATE, ROLES, STARTS, STEPS, chaotic, curves, distance, report

from numdev import report as reports
from numdev.errors import MeasurementError, UsageError
from numdev.report.document import Table
from numdev.report.renderers import html
from numdev.report.views import bounds as views
from numdev.training.bounds import study
from numdev.training.bounds.report import BoundsReport, Comparison, Saturation
from numdev.training.bounds.saturation import COLUMNS, NULLS, ratios, saturation
from numdev.training.report import DistanceRow, TrainReport


def marks(**roles: Sequence[Mapping[int, float | tuple[float, ...]]]) -> Saturation:
    """Of runs of each role, by seed: step to the distance of one run, or those of several."""
    lines = [
        (role, role, seed, step, value)
        for role, seeds in roles.items()
        for seed, steps in enumerate(seeds)
        for step, values in steps.items()
        for value in (values if isinstance(values, tuple) else (values,))
    ]
    return saturation("all", pd.DataFrame(lines, columns=[*COLUMNS[3:]]))


def several(seeds: int = 3, scatter: float = 0.2) -> list[DistanceRow]:
    """Runs of several seeds: in each, every start is multiplied by its own factor."""
    rows = []
    for seed in range(seeds):
        draw = random.Random(seed)
        starts = {name: x * math.exp(draw.gauss(0, scatter)) for name, x in STARTS.items()}
        rows += curves(starts, seed=seed)
    return rows


def changed(rows: list[DistanceRow], which: Any, **update: Any) -> list[DistanceRow]:
    """The rows, with fields of some times a factor, or as given where that is no number."""
    return [
        r.model_copy(
            update={
                k: x * getattr(r, k) if x and x is not True else None for k, x in update.items()
            }
        )
        if which(r)
        else r
        for r in rows
    ]


def bounds_of(run: TrainReport, directory: Path) -> BoundsReport:
    directory.mkdir(exist_ok=True, parents=True)
    reports.write(run, directory)
    return study.bounds(directory)


def comparison(
    found: BoundsReport, variant: str, against: str, window: str, metric: str = "mean_abs"
) -> Comparison:
    wanted = (variant, against, window, metric, "all")
    [one] = [
        c
        for c in found.comparisons
        if (c.variant, c.against, c.window, c.metric, c.group) == wanted
    ]
    return one


def said(found: BoundsReport) -> str:
    return "\n".join(found.summary.answer)


# --- where curves merge --------------------------------------------------------------------------


def test_proportion_is_lost_where_the_model_says() -> None:
    """The largest over the null is start ratio * (L - a)/(L - n) in the logistic model: it has
    halved where the largest is at half its level, and is at most 2 once the null is too."""
    steps = tuple(range(1, 301))
    a, n = 1e-6, 1e-9
    large, small = ([{s: chaotic(start)(s) for s in steps}] for start in (a, n))
    mark = marks(low_precision=large, null_ulp=small)
    assert mark.bends == pytest.approx(math.log((LEVEL - a) / a) / RATE, abs=1.5)
    # L a e / (L + a(e-1)) = 2 L n e / (L + n(e-1)): e = (L(a - 2n) + a n) / (a n)
    merged = math.log((LEVEL * (a - 2 * n) + a * n) / (a * n)) / RATE
    assert mark.saturated == pytest.approx(merged, abs=1.5)
    assert mark.peak == pytest.approx(a / n, rel=1e-3)
    assert (mark.early[-1], mark.late[0]) == (mark.bends - 1, mark.saturated)
    assert mark.null == "null_ulp"


@pytest.mark.parametrize(
    ("flash", "bends", "saturated", "early"),
    [
        ((10.0, 1.5, 10.0, 10.0, 10.0), None, None, (1, 2, 4, 8, 16)),  # they part again
        ((10.0, 10.0, 1.9, 1.0, 1.0), 4, 4, (1, 2)),
        ((3.0, 9.0, 12.0, 5.0, 1.0), 8, 16, (1, 2, 4)),  # a rise before the peak is early
        ((1.1, 1.1, 1.1, 1.1, 1.1), 1, 1, ()),  # a null as large as all
    ],
)
def test_merging_must_last(
    flash: tuple[float, ...], bends: int | None, saturated: int | None, early: tuple[int, ...]
) -> None:
    """Over a null of 1. A scale changes no mark, nor does another seed, which starts apart."""
    steps = (1, 2, 4, 8, 16)
    for scale in (1.0, 1e3):
        curve = {s: scale * v for s, v in zip(steps, flash, strict=True)}
        null, far = dict.fromkeys(steps, scale), dict.fromkeys(steps, 1e6)
        mark = marks(flash=[curve], null_ulp=[null], other_seed=[far])
        assert (mark.bends, mark.saturated, mark.early) == (bends, saturated, early)


def test_chance_decides_where_equal_causes_part() -> None:
    """Null runs of one kind in one seed are more than twice as far apart as at first: the early
    window ends there, though means over seeds keep their proportion; the other seed, in which they
    stay together, and a kind with a single run say nothing."""
    steps = (1, 2, 4, 8)
    flash, alone = [dict.fromkeys(steps, 10.0)] * 2, [dict.fromkeys(steps, 1.0)]
    equal: list[Any] = [
        dict.fromkeys(steps, (1.0, 3.0)),
        {1: (1.0, 1.5), 2: (1.0, 3.0), 4: (0.5, 1.6), 8: (1.0, 1.5)},
    ]
    mark = marks(flash=flash, null_ulp=alone, null_rounding=equal)
    assert (mark.chance, mark.bends, mark.early) == (4, None, (1, 2))
    assert marks(flash=flash, null_ulp=alone, null_rounding=equal[:1]).chance is None


def test_a_window_is_not_chosen_for_its_answer() -> None:
    """However seeds of flash scatter, only nulls end the window: an interval that is wide stays
    wide."""
    steps = (1, 2, 4, 8)
    null: list[Any] = [dict.fromkeys(steps, (1.0, 1.1))] * 2
    scattered = [{1: 10, 2: 10, 4: 100, 8: 900}, {1: 10, 2: 10, 4: 8, 8: 8}]
    mark = marks(flash=scattered, null_rounding=null)
    assert (mark.chance, mark.early) == (None, steps)


def test_a_seed_in_which_chance_decides_early_ends_the_window(tmp_path: Path) -> None:
    """The first sentence names the step, and no ratio of the window has a step from there on."""
    rows = changed(
        several(),
        lambda r: (r.seed, r.variant) == (1, "null-rounding-2") and 20 <= r.step <= 70,
        mean_abs=9,
    )
    bounds = bounds_of(report(rows), tmp_path)
    assert bounds.summary.answer[0].startswith("Before step 20, where chance begins to decide: ")
    assert comparison(bounds, "flash", "low-precision", "early").steps[-1] == 15
    assert "chance begins to decide</text>" in html.page(bounds)


# --- a whole run ---------------------------------------------------------------------------------


def test_the_known_ratios_come_back(tmp_path: Path) -> None:
    """Early ratios are those of the starts, to what the last early steps have lost (at most half of
    the largest curve's lead, at the last alone); late ones are 1. One seed has no interval. A null
    of flash's size, and a late curve that stays apart, are seen."""
    bounds = bounds_of(report(curves()), tmp_path)
    for against in ("low-precision", "attention-precision"):
        exact = STARTS["flash"] / STARTS[against]
        ratio = {w: comparison(bounds, "flash", against, w).ratio for w in ("first", "early")}
        assert ratio["first"] == pytest.approx(exact, rel=1e-3)
        assert ratio["early"] == pytest.approx(exact, rel=0.15)
        late = comparison(bounds, "flash", against, "saturated")
        assert late.ratio == pytest.approx(1.0, abs=0.05)
        assert late.nulls == dict.fromkeys(("low", "high"), "one seed has no interval")
    for null, start in (("null: one ulp", 1e-9), ("null: re-rounded", 3e-9)):
        assert comparison(bounds, "flash", null, "first").ratio == pytest.approx(
            3e-7 / start, rel=1e-3
        )
    [by_step] = [f for f in bounds.figures if f.relative]
    assert [c.label for c in by_step.curves] == [
        f"flash over {kind}-precision" for kind in ("low", "attention")
    ]
    assert by_step.curves[0].points[0].mean == pytest.approx(0.3, rel=1e-3)
    large = dict.fromkeys(("null-ulp", "null-rounding-1", "null-rounding-2"), 8e-7)
    nulled = bounds_of(report(curves({**STARTS, **large})), tmp_path / "null")
    assert comparison(nulled, "flash", "low-precision", "early").ratio is None
    apart = changed(curves(), lambda r: r.variant == "flash", mean_abs=9)
    assert bounds_of(report(apart), tmp_path / "apart").saturations[0].saturated is None


def test_intervals_are_those_of_a_t_test_on_logarithms(tmp_path: Path) -> None:
    """Over seeds, by scipy's own function; a ratio that is off lies outside."""
    rows = several(5)
    c = comparison(bounds_of(report(rows), tmp_path), "flash", "low-precision", "first")
    at = {(r.seed, r.variant): r.mean_abs or 0.0 for r in rows if r.step == 1}
    logs = [math.log(at[s, "flash"] / at[s, "low-precision"]) for s in range(5)]
    test = scipy.stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    assert c.low is not None
    assert c.high is not None
    assert (c.low, c.high) == pytest.approx((math.exp(test.low), math.exp(test.high)))
    assert c.ratio == pytest.approx(math.exp(sum(logs) / 5))
    assert len(c.by_seed) == 5
    assert c.low < 0.3 < c.high < 0.9


def test_the_answer_comes_first_and_holds_both_windows(tmp_path: Path) -> None:
    """Early with W1 behind the paired number and the paper's beside it, late, and what that means;
    the word for what nobody has shown is in none of them."""
    bounds = bounds_of(report(several()), tmp_path)
    first = bounds.summary.answer[0]
    c = comparison(bounds, "flash", "low-precision", "early")
    w1 = comparison(bounds, "flash", "low-precision", "early", "w1")
    assert first.startswith(
        f"Before step 100, where curves begin to merge: flash changes weights {c.ratio:.2f} x "
        f"[{c.low:.2f} to {c.high:.2f}] as much as low-precision (W1 {w1.ratio:.2f} x), where the "
        "first paper reports 0.2 to 0.5; "
    )
    for words in (
        "From step 200 on curves have merged: a distance there says how chaotic training is",
        "repeated gives the same bits",
    ):
        assert words in said(bounds)
    assert bounds.summary.answer[-1].startswith("Proxies: ")
    assert "stable" not in said(bounds).lower()


def test_a_repeat_that_differs_is_said_first(tmp_path: Path) -> None:
    """A run that is not deterministic voids what follows, be it by one weight at any step."""
    off = [
        r.model_copy(update={"max_abs": 1e-30})
        if (r.variant, r.step) == ("null-repeat", 400)
        else r
        for r in curves()
    ]
    bounds = bounds_of(report(off), tmp_path / "run")
    assert bounds.summary.deterministic is False
    assert bounds.summary.answer[0].startswith("NOT DETERMINISTIC: ")
    assert "gives the same bits" not in said(bounds)
    assert bounds_of(report(curves()), tmp_path / "sound").summary.deterministic is True


def test_windows_are_the_paired_metrics_alone(tmp_path: Path) -> None:
    """W1 that merges at another step is quoted over the same steps."""
    rows = [r.model_copy(update={"w1": 1.0}) for r in curves()]
    bounds = bounds_of(report(rows), tmp_path)
    paired, w1 = (
        comparison(bounds, "flash", "low-precision", "early", m) for m in ("mean_abs", "w1")
    )
    assert w1.steps == paired.steps != ()
    assert w1.ratio == 1.0 != paired.ratio
    shown = next(n for n in views.blocks(bounds) if isinstance(n, Table) and "terminal" in n.only)
    cells = [cell.text for cell in shown.rows[0].cells]
    early = [column.title for column in shown.columns].index(f"early 1–{paired.steps[-1]}")
    assert cells[early + 1] == "1.00" != cells[early]


def test_without_a_null_only_the_first_step_is_quoted(tmp_path: Path) -> None:
    """Where curves merge is not known, so no window of several steps is believed. A run that ends
    early has not merged, and one whose null is as large as flash has no early step."""

    def late(bounds: BoundsReport) -> dict[str, str]:
        return comparison(bounds, "flash", "low-precision", "saturated").nulls

    names = [n for n in ROLES if not n.startswith("null")]
    bounds = bounds_of(report(curves(), names), tmp_path / "none")
    assert comparison(bounds, "flash", "low-precision", "early").steps == (1,)
    assert bounds.summary.answer[0].startswith("At step 1: ")
    assert late(bounds) == {"ratio": "there is no null run"}
    short = bounds_of(report(curves(steps=[s for s in STEPS if s <= 40])), tmp_path / "short")
    assert short.summary.answer[0].startswith("Up to step 40, with no sign that curves merge: ")
    assert late(short) == {"ratio": "no curve has merged with the null by step 40"}
    same = {**dict.fromkeys(STARTS, 1e-6), "null-ulp": 9e-7}
    text = said(bounds_of(report(curves(same)), tmp_path / "same"))
    assert "Early: nothing can be said, since curves are merged from step 1" in text


def test_the_first_gradient_has_a_ratio(tmp_path: Path) -> None:
    """Of step 0, before any update."""
    sizes = (("flash", 1e-6), ("low-precision", 4e-6))
    rows = curves() + [distance(name, 0, size, of="gradient") for name, size in sizes]
    bounds = bounds_of(report(rows), tmp_path)
    c = comparison(bounds, "flash", "low-precision", "start")
    assert (c.of, c.steps, c.ratio) == ("gradient", (0,), 0.25)


def test_kinds_of_parameters_have_windows_of_their_own(tmp_path: Path) -> None:
    """Each group is judged by its own curves, and the page has charts and marks of each."""
    late = {name: start / 100 for name, start in STARTS.items()}
    bounds = bounds_of(report(curves() + curves(late, group="attention")), tmp_path)
    marks = {s.group: s for s in bounds.saturations}
    assert set(marks) == {"all", "attention"}
    assert (marks["attention"].bends or 0) > (marks["all"].bends or 0)
    page = html.page(bounds)
    assert page.count("<svg") == 3 + 1 + 3 + 1
    assert "curves begin to merge</text>" in page
    assert ">merged</text>" in page


def test_a_run_that_diverged_is_not_missing_without_a_word(tmp_path: Path) -> None:
    """With the step from which on it has no distance; its seed gives no ratio. A sound run is not
    accused."""
    lost = changed(
        several(), lambda r: (r.seed, r.variant) == (2, "flash") and r.step, mean_abs=None, w1=None
    )
    bounds = bounds_of(report(lost), tmp_path / "run")
    assert bounds.summary.answer[0].startswith(
        "NOT FINITE: flash has no finite distance in seed 2 from step 1 on"
    )
    assert sorted(comparison(bounds, "flash", "low-precision", "early").by_seed) == [0, 1]
    assert "NOT FINITE" not in said(bounds_of(report(curves()), tmp_path / "sound"))


# --- the command ---------------------------------------------------------------------------------


def test_what_is_no_run_with_distances_is_refused(tmp_path: Path) -> None:
    """A report of bounds, and a run of the golden variant alone."""
    bounds = bounds_of(report(curves()), tmp_path / "run")
    reports.write(bounds, tmp_path)
    with pytest.raises(UsageError, match="expected the report of a training run"):
        study.bounds(tmp_path)
    reports.write(report(curves(), ["golden"]), tmp_path)
    with pytest.raises(MeasurementError, match="no distance between weights"):
        study.bounds(tmp_path)


def test_a_run_of_no_listed_variant_is_refused(tmp_path: Path) -> None:
    """On reading, in words."""
    run = report(curves())
    other = run.distances[-1].model_copy(update={"variant": "unlisted"})
    run = run.model_copy(update={"distances": (*run.distances, other)})
    with pytest.raises(MeasurementError, match="unlisted"):
        bounds_of(run, tmp_path)


def test_nulls_may_have_distances_at_step_0_alone(tmp_path: Path) -> None:
    """Then no step has anything to compare with."""
    run = report(curves())
    null = {v.name for v in run.variants if v.role in NULLS}
    early = tuple(d for d in run.distances if d.variant not in null or d.step == 0)
    found = bounds_of(run.model_copy(update={"distances": early}), tmp_path)
    assert [mark.null for mark in found.saturations] == [None]


def test_a_ratio_is_a_geometric_mean_in_each_seed() -> None:
    """Over the steps asked for, where neither is zero; 0 where the first alone is always zero."""

    def curve(*values: tuple[int, int, float]) -> Any:
        """Seed, step and distance."""
        return pd.DataFrame(values, columns=["seed", "step", 0]).set_index(["seed", "step"])[0]

    a = curve((0, 0, 0.0), (0, 1, 1.0), (0, 2, 8.0), (0, 3, 5.0), (1, 1, 3.0))
    b = curve((0, 0, 0.0), (0, 1, 2.0), (0, 2, 4.0), (0, 3, 1.0), (1, 1, 4.0), (2, 1, 9.0))
    assert ratios(a, b, (0, 1, 2)) == pytest.approx({0: math.sqrt(0.5 * 2.0), 1: 0.75})
    assert ratios(a, b, (7,)) == {}
    assert ratios(b, 0 * b, (1,)) == {}
    assert ratios(0 * a, b, (1,)) == {0: 0.0, 1: 0.0}
