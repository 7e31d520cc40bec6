"""Bounds: what is known of curves made by hand comes back, and what is wrong is seen.

Curves follow the logistic model of `chaotic`, of which ratio and bend can be written down."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import scipy.stats

from numdev import report as reports
from numdev.errors import MeasurementError, UsageError
from numdev.report import Provenance
from numdev.report.document import Table
from numdev.training.bounds import study
from numdev.training.bounds import view as views
from numdev.training.bounds.report import BoundsReport, Comparison, Saturation
from numdev.training.bounds.study import COLUMNS, ratios, saturation
from numdev.training.report import DistanceRow, TrainReport, TrainSummary, VariantRecord

STEPS = (0, 1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50, 70, 100, 150, 200, 300, 400)
RATE = 0.1  # growth per step
LEVEL = 1e-2  # where every distance ends
STARTS = {
    "flash": 3e-7, "low-precision": 1e-6, "attention-precision": 5e-7,
    "null-rounding-1": 2e-9, "null-rounding-2": 4e-9, "null-ulp": 1e-9,
}  # fmt: skip
NAMES = ("golden", *STARTS, "other-seed", "null-repeat")


def chaotic(start: float) -> Callable[[int], float]:
    """Exponential growth from `start` that levels off: the logistic curve."""

    def at(step: int) -> float:
        grown = math.exp(RATE * step)
        return LEVEL * start * grown / (LEVEL + start * (grown - 1))

    return at


def distance(variant: str, step: int, mean: float, **changes: Any) -> DistanceRow:
    """W1 is nine tenths of the paired mean, the largest ten times it."""
    fields: dict[str, Any] = {
        "seed": 0, "variant": variant, "step": step, "of": "weights",
        "elements": 1000, "max_abs": 10 * mean, "mean_abs": mean, "rel": 5 * mean,
        "w1": 0.9 * mean, "equal": float(mean == 0),
    }  # fmt: skip
    return DistanceRow(**{**fields, **changes})


def curves(
    starts: Mapping[str, float] = STARTS, steps: Sequence[int] = STEPS, **changes: Any
) -> list[DistanceRow]:
    """Every perturbed run by its start; another seed, far away from the first step; a repeat."""
    found = []
    for step in steps:
        means = {name: chaotic(start)(step) if step else 0.0 for name, start in starts.items()}
        means |= {"other-seed": 2 * LEVEL, "null-repeat": 0.0}
        found += [distance(name, step, mean, **changes) for name, mean in means.items()]
    return found


def several(seeds: int = 3, scatter: float = 0.2) -> list[DistanceRow]:
    """Runs of several seeds: in each, every start is multiplied by its own factor."""
    rows = []
    for seed in range(seeds):
        draw = random.Random(seed)
        starts = {name: x * math.exp(draw.gauss(0, scatter)) for name, x in STARTS.items()}
        rows += curves(starts, seed=seed)
    return rows


def changed(rows: list[DistanceRow], which: Callable[[DistanceRow], Any], **update: Any) -> Any:
    """The rows, with fields of some as a function makes them of what they are."""

    def of(r: DistanceRow) -> DistanceRow:
        return r.model_copy(update={k: make(getattr(r, k)) for k, make in update.items()})

    return [of(r) if which(r) else r for r in rows]


def run_of(distances: Sequence[DistanceRow], names: Sequence[str] = NAMES) -> TrainReport:
    """A run with these distances, without those of variants that are not named."""
    kept = tuple(d for d in distances if d.variant in names)
    roles = {name: name.rstrip("-12").replace("-", "_") for name in names}
    fields: dict[str, Any] = {"kernel": "baseline", "format": "bfloat16"}
    return TrainReport(
        provenance=Provenance(numdev="0", command="", created="", system={}, source={}),
        request={"target": "a"},
        summary=TrainSummary(
            answer=(), steps=max(STEPS), seeds=(0,), parameters=1000, model="gpt", data="d"
        ),
        variants=tuple(
            VariantRecord(name=name, role=role, attention_format="bfloat16", **fields)
            for name, role in roles.items()
        ),
        rows=(),
        distances=kept,
    )


Found = Callable[..., BoundsReport]


@pytest.fixture
def bounds(tmp_path: Path) -> Found:
    """The bounds of a run with these distances."""

    def found(distances: Sequence[DistanceRow], names: Sequence[str] = NAMES) -> BoundsReport:
        reports.write(run_of(distances, names), tmp_path)
        return study.bounds(tmp_path)

    return found


def compared(
    found: BoundsReport, against: str, window: str, metric: str = "mean_abs"
) -> Comparison:
    """Of flash."""
    made = {(c.variant, c.against, c.window, c.metric): c for c in found.comparisons}
    return made["flash", against, window, metric]


def said(found: BoundsReport) -> str:
    return "\n".join(found.summary.answer)


def shown(found: BoundsReport) -> str:
    """The answer, and what stands below it."""
    return said(found) + str(list(views.blocks(found)))


def marks(**roles: Sequence[Mapping[int, float | tuple[float, ...]]]) -> Saturation:
    """Of runs of each role, by seed: step to the distance of one run, or those of several."""
    lines = [
        (role, role, seed, step, value)
        for role, seeds in roles.items()
        for seed, steps in enumerate(seeds)
        for step, values in steps.items()
        for value in (values if isinstance(values, tuple) else (values,))
    ]
    return saturation(pd.DataFrame(lines, columns=[*COLUMNS[2:]]))


def test_proportion_is_lost_where_the_model_says() -> None:
    """The ratio to the null is that of the starts times (L - a)/(L - n): half at half of L."""
    a, n = 1e-6, 1e-9
    large, small = ([{s: chaotic(start)(s) for s in range(1, 301)}] for start in (a, n))
    mark = marks(low_precision=large, null_ulp=small)
    assert mark.bends == pytest.approx(math.log((LEVEL - a) / a) / RATE, abs=1.5)
    # L a e / (L + a(e-1)) = 2 L n e / (L + n(e-1)): e = (L(a - 2n) + a n) / (a n)
    merged = math.log((LEVEL * (a - 2 * n) + a * n) / (a * n)) / RATE
    assert mark.saturated == pytest.approx(merged, abs=1.5)
    assert (mark.early[-1], mark.late[0]) == (mark.bends - 1, mark.saturated)


@pytest.mark.parametrize(
    ("flash", "bends", "saturated", "early"),
    [
        ((10.0, 1.5, 10.0, 10.0, 10.0), None, None, (1, 2, 4, 8, 16)),  # they part again
        ((10.0, 10.0, 1.9, 1.0, 1.0), 4, 4, (1, 2)),
        ((3.0, 9.0, 12.0, 5.0, 1.0), 8, 16, (1, 2, 4)),  # a rise before the peak is early
        ((1.1, 1.1, 1.1, 1.1, 1.1), 1, 1, ()),  # a null as large as all
    ],
)
def test_merging_must_last(flash: Any, bends: Any, saturated: int | None, early: Any) -> None:
    """Over a null of 1. A scale changes no mark, nor does another seed, which starts apart."""
    steps = (1, 2, 4, 8, 16)
    for scale in (1.0, 1e3):
        curve = {s: scale * v for s, v in zip(steps, flash, strict=True)}
        null, far = dict.fromkeys(steps, scale), dict.fromkeys(steps, 1e6)
        mark = marks(flash=[curve], null_ulp=[null], other_seed=[far])
        assert (mark.bends, mark.saturated, mark.early) == (bends, saturated, early)


def test_chance_decides_where_equal_causes_part() -> None:
    """The early window ends where null runs of one kind and seed are twice as far apart as at
    first; a single run, another seed and flash say nothing."""
    steps = (1, 2, 4, 8)
    flash, alone = [dict.fromkeys(steps, 10.0)] * 2, [dict.fromkeys(steps, 1.0)]
    equal: list[Any] = [
        dict.fromkeys(steps, (1.0, 3.0)),
        {1: (1.0, 1.5), 2: (1.0, 3.0), 4: (0.5, 1.6), 8: (1.0, 1.5)},
    ]
    mark = marks(flash=flash, null_ulp=alone, null_rounding=equal)
    assert (mark.chance, mark.bends, mark.early) == (4, None, (1, 2))
    assert marks(flash=flash, null_ulp=alone, null_rounding=equal[:1]).chance is None
    scattered = [{1: 10, 2: 10, 4: 100, 8: 900}, {1: 10, 2: 10, 4: 8, 8: 8}]
    mark = marks(flash=scattered, null_rounding=equal[:1] * 2)
    assert (mark.chance, mark.early) == (None, steps)


def test_the_known_ratios_come_back(bounds: Found) -> None:
    """Early ratios are those of the starts, late ones are 1; one seed has no interval; a null of
    flash's size, and a late curve that stays apart, are seen."""
    found = bounds(curves())
    for against in ("low-precision", "attention-precision"):
        exact = STARTS["flash"] / STARTS[against]
        assert compared(found, against, "first").ratio == pytest.approx(exact, rel=1e-3)
        assert compared(found, against, "early").ratio == pytest.approx(exact, rel=0.15)
        late = compared(found, against, "saturated")
        assert late.ratio == pytest.approx(1.0, abs=0.05)
        assert late.nulls == dict.fromkeys(("low", "high"), "fewer than 3 seeds")
    for null, start in (("null: one ulp", 1e-9), ("null: re-rounded", 3e-9)):
        assert compared(found, null, "first").ratio == pytest.approx(3e-7 / start, rel=1e-3)
    [by_step] = [f for f in found.figures if f.relative]
    assert [c.label for c in by_step.curves] == [
        f"flash over {kind}-precision" for kind in ("low", "attention")
    ]
    assert by_step.curves[0].points[0].mean == pytest.approx(0.3, rel=1e-3)
    large = dict.fromkeys(("null-ulp", "null-rounding-1", "null-rounding-2"), 8e-7)
    assert compared(bounds(curves({**STARTS, **large})), "low-precision", "early").ratio is None
    apart = changed(curves(), lambda r: r.variant == "flash", mean_abs=lambda x: 9 * x)
    assert bounds(apart).saturation.saturated is None


@pytest.mark.parametrize("seeds", [2, 5])
def test_intervals_are_those_of_a_t_test_on_logarithms(bounds: Found, seeds: int) -> None:
    """By scipy's own function; a ratio that is off lies outside. Two seeds have none, as said."""
    rows = several(seeds)
    found = bounds(rows)
    c = compared(found, "low-precision", "first")
    assert ("No verdict beside a change of format: " in said(found)) == (seeds == 2)
    at = {(r.seed, r.variant): r.mean_abs or 0.0 for r in rows if r.step == 1}
    logs = [math.log(at[s, "flash"] / at[s, "low-precision"]) for s in range(seeds)]
    assert c.ratio == pytest.approx(math.exp(sum(logs) / seeds))
    assert len(c.by_seed) == seeds
    if seeds == 2:
        assert c.low is c.high is None
        return
    test = scipy.stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    assert (c.low, c.high) == pytest.approx((math.exp(test.low), math.exp(test.high)))
    assert c.low < 0.3 < c.high < 0.9


def test_the_answer_comes_first_and_holds_both_windows(bounds: Found) -> None:
    """Early, the paper's number beside it; what early and merged are below; no false word."""
    found = bounds(several())
    first, second, last = found.summary.answer
    c = compared(found, "low-precision", "early")
    assert first == (
        f"No more than a change of format: flash moves the weights {c.ratio:.2f} times as far as "
        "computing in bfloat16 in place of bfloat16, at steps 1 to 70 (low-precision; 95 % "
        f"interval over 3 seeds {c.low:.2f} to {c.high:.2f}; the first paper reports 0.2 to 0.5)."
    )
    assert second.startswith("More than random rounding: flash moves the weights 1")
    assert last.startswith("Far less than another seed: ")
    assert views.styles(found) == ("good", "warn", "good")
    assert "from step 200 on; distances then say how chaotic " in shown(found)
    assert "stable" not in said(found).lower()


WITHOUT_NULLS = [name for name in NAMES if not name.startswith("null")]
SAME = {**dict.fromkeys(STARTS, 1e-6), "null-ulp": 9e-7}
PARTING = changed(
    several(),
    lambda r: (r.seed, r.variant) == (1, "null-rounding-2") and 20 <= r.step <= 70,
    mean_abs=lambda x: 9 * x,
)


@pytest.mark.parametrize(
    ("rows", "names", "words", "last", "late"),
    [
        (PARTING, NAMES, "before step 20, where chance begins to decide.", 15, None),
        (curves(), WITHOUT_NULLS, "curves merge is not known: there", 1, "there is no null run"),
        (curves(steps=[s for s in STEPS if s <= 40]), NAMES,
         "all steps, with no sign that curves merge.", 40,
         "no curve has merged with the null by step 40"),
        (curves(SAME), NAMES, "No verdict beside random rounding: nothing can be said of flash",
         None, None),
    ],
    ids=["chance", "no null", "not merged", "merged at once"],
)  # fmt: skip
def test_which_steps_are_early(
    bounds: Found, rows: Any, names: Any, words: str, last: int | None, late: str | None
) -> None:
    """Without a null, where curves merge is not known: only the first step is quoted."""
    found = bounds(changed(rows, lambda r: not r.equal, w1=lambda x: 1.0), names)
    assert words in shown(found)
    paired, w1 = (compared(found, "low-precision", "early", m) for m in ("mean_abs", "w1"))
    assert w1.steps == paired.steps
    assert paired.steps[-1:] == ((last,) if last else ())
    assert compared(found, "low-precision", "saturated").nulls.get("ratio") == late


def test_the_table_shows_the_paired_ratio_of_each_window(bounds: Found) -> None:
    """With its interval, and not that of W1; the gradient's is of step 0, before any update."""
    sizes = (("flash", 1e-6), ("low-precision", 4e-6))
    start = [distance(name, 0, size, of="gradient") for name, size in sizes]
    found = bounds(changed(several(), lambda r: not r.equal, w1=lambda x: 1.0) + start)
    table = next(n for n in views.blocks(found) if isinstance(n, Table))
    titles = "step 1, ×|early, step 1–70, ×|merged, step 200–400, ×|gradient, ×"
    assert "|".join(column.title for column in table.columns[2:]) == titles
    expected = ["flash", "low-precision"]
    for window in ("first", "early", "saturated"):
        c = compared(found, "low-precision", window)
        expected.append(f"{c.ratio:.2f} [{c.low:.2f}, {c.high:.2f}]")
    assert [cell.text for cell in table.rows[0].cells] == [*expected, "0.25"]


def test_what_voids_the_rest_is_said_first(bounds: Found) -> None:
    """A run that is not deterministic, by one weight at any step, or that diverged, and where."""
    off = changed(
        several(), lambda r: (r.variant, r.step) == ("null-repeat", 70), max_abs=lambda x: 1e-30
    )
    found = bounds(off)
    assert said(found).startswith("NOT REPRODUCIBLE from step 70 on: ")
    assert views.styles(found) == ("bad", "", "", "")
    assert "gives the same bits" not in str(list(views.blocks(found)))
    none = dict.fromkeys(("mean_abs", "w1"), lambda x: None)
    found = bounds(changed(several(), lambda r: (r.seed, r.variant) == (2, "flash"), **none))
    assert found.summary.answer[0].startswith(
        "NOT FINITE: flash has no finite distance in seed 2 from step 0 on"
    )
    assert sorted(compared(found, "low-precision", "early").by_seed) == [0, 1]
    sound = bounds(curves())
    assert "NOT" not in said(sound)
    assert "gives the same bits" in str(list(views.blocks(sound)))


def test_what_is_no_run_with_distances_is_refused(bounds: Found, tmp_path: Path) -> None:
    """A report of bounds, and a run of the golden variant alone."""
    with pytest.raises(MeasurementError, match="no distance between weights"):
        bounds(curves(), ["golden"])
    reports.write(bounds(curves()), tmp_path)
    with pytest.raises(UsageError, match="expected the report of a training run"):
        study.bounds(tmp_path)


def test_nulls_may_have_distances_at_step_0_alone(bounds: Found) -> None:
    """Then no step has anything to compare with."""
    null = [name for name in NAMES if name.startswith("null")]
    found = bounds([d for d in curves() if d.variant not in null or d.step == 0])
    assert found.saturation.reason == "every null run is bitwise the golden one"


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
