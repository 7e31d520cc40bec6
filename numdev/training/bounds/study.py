"""`numdev bounds`: flash's distance in weights beside low precision's, another seed's and
chance's, from the report of a training run. Needs neither torch nor a GPU.

The first answer is the first paper's question (`numdev.training.bounds.words`); distances
are read as doses, and steps chosen, by a ladder of nulls
(`numdev.training.bounds.ladder`). A window is decided by the paired mean |difference| of
nulls alone, and holds for every metric: one that ended where the ratio asked about begins
to scatter would be chosen for its answer."""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from numdev import report as reports
from numdev.errors import MeasurementError, UsageError
from numdev.grouping import grouped
from numdev.report import Figure, Provenance
from numdev.training import figures
from numdev.training.bounds import ladder, words
from numdev.training.bounds import report as records
from numdev.training.bounds.ladder import middle, saturation, strength
from numdev.training.bounds.report import (
    FEWEST_SEEDS,
    METRICS,
    PAIRED,
    Comparison,
    Saturation,
    Window,
)
from numdev.training.report import TrainReport, VariantRecord, VariantRole

PERTURBED: tuple[VariantRole, ...] = ("flash", "low_precision", "attention_precision")
"""Runs that start where the golden one does and compute otherwise."""
NULLS: Mapping[VariantRole, str] = {
    "null_rounding": "null: re-rounded",
    "null_ulp": "null: one ulp",
    "null_repeat": "null: repeat",
}
"""The label that all null runs of one kind and strength share."""
REST: tuple[VariantRole, ...] = (*NULLS, "other_seed")
BESIDE: Mapping[VariantRole, tuple[VariantRole, ...]] = {
    "flash": ("low_precision", "attention_precision", *REST),
    "attention_precision": ("low_precision", *REST),
    "null_ulp": ("low_precision",),
    "low_precision": REST,
}
"""What the distance of a role is divided by, in the order of a sentence."""
COLUMNS = ("of", "metric", "role", "label", "times", "seed", "step", "value")


def bounds(path: Path, *, command: str = "") -> records.BoundsReport:
    """The bounds of a training run: a report.json of `numdev train`, or a directory with
    one.

    Raises UsageError where there is none or it is of another command, MeasurementError
    where no weights were compared in it."""
    run = reports.read(path)
    if not isinstance(run, TrainReport):
        what = f"{path}: expected the report of a training run, got one of {run.kind}"
        raise UsageError(what, hint="give the directory of a `numdev train`")
    distances = distances_of(run)
    weights = distances[distances.of == "weights"]
    if weights.empty:
        what = f"{path}: holds no distance between weights"
        raise MeasurementError(
            what, hint="did the run record a step with more than one variant?"
        )
    file = path / "report.json" if path.is_dir() else path
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    roles = {label_of(v): v.role for v in run.variants}
    steps = sorted({int(step) for step in weights.step if step > 0})
    tables = {key: curves(part) for key, part in distances.groupby(["of", "metric"])}
    paired = distances[distances.metric == PAIRED]
    mark = saturation(paired[paired.of == "weights"])
    compared = tuple(_comparisons(tables, roles, mark, steps))
    read: dict[Window, tuple[int, ...]] = dict(_windows(mark))
    del read["saturated"]
    doses = tuple(ladder.doses(paired, roles, read))
    outputs = tuple(at_outputs(run))
    answers = tuple(words.answers(compared))
    repeat = distances[distances.role == "null_repeat"]
    off, first = repeat.value.max(), float(repeat.step[repeat.value > 0].min())
    formats = {"" if v.role == "golden" else label_of(v): v.format for v in run.variants}
    attention = {label_of(v): v.attention_format for v in run.variants}
    axis = figures.axis_of(steps, all_named=True) if len(steps) > 1 else None
    source = {"config": str(path), "sha256": sha256, "run": run.provenance.source}
    return records.BoundsReport(
        provenance=Provenance.now(command, run.provenance.system, source),
        request={"run": str(path), "sha256": sha256, "target": path.resolve().name},
        summary=records.BoundsSummary(
            answer=(
                *words.warnings(run, off, first, outputs),
                *words.of_the_paper(answers, compared, attention, first),
                *words.of_doses(doses, outputs),
                *words.of_chance(compared, formats, first),
            ),
            seeds=tuple(sorted({row.seed for row in run.distances})),
            deterministic=None if pd.isna(off) else bool(off == 0),
            axis=axis,
        ),
        saturation=mark,
        answers=answers,
        comparisons=compared,
        ladder=tuple(
            ladder.rungs(paired, {w: x for w, x in _windows(mark).items() if x})
        ),
        doses=doses,
        outputs=outputs,
        figures=tuple(f for f in _figures(tables, roles) if f.curves) if axis else (),
    )


def label_of(v: VariantRecord) -> str:
    """What a run is called: nulls of one kind and strength are one."""
    times = "" if (v.times or 1.0) == 1.0 else f" at {strength(v.times or 1.0)}"
    return NULLS.get(v.role, v.name) + times


def at_outputs(run: TrainReport) -> Iterator[records.AtOutput]:
    """What a run measured at the output of attention: of each variant the means over
    seeds."""
    for v in run.variants:
        rows = [row for row in run.outputs if row.variant == v.name]
        if rows:
            means: dict[str, float | None] = {}
            for name in ("floors", "apart", "bias", "slope", "sharp"):
                values = [x for row in rows if (x := getattr(row, name)) is not None]
                means[name] = statistics.fmean(values) if values else None
            lost = sum(row.nonfinite for row in rows)
            yield records.AtOutput(variant=v.name, role=v.role, nonfinite=lost, **means)


def distances_of(run: TrainReport) -> pd.DataFrame:
    """Every finite distance of all weights from the golden run, one a line, in
    COLUMNS."""
    others = {
        v.name: (
            v.role,
            label_of(v),
            (v.times or 1.0) if v.role == "null_rounding" else math.nan,
        )
        for v in run.variants
        if v.role != "golden"
    }
    lines = [
        (d.of, metric, *others[d.variant], d.seed, d.step, value)
        for d in run.distances
        if d.variant in others
        for metric in METRICS
        if (value := getattr(d, metric)) is not None
    ]
    return pd.DataFrame(lines, columns=list(COLUMNS))


def curves(distances: pd.DataFrame) -> pd.DataFrame:
    """One metric: a line for each seed and step, a column for each label, the mean over
    runs of one kind in it; NaN where there is none."""
    return distances.pivot_table(index=["seed", "step"], columns="label", values="value")


# --- the ratios -----------------------------------------------------------------------


def ratios(
    a: pd.Series[float], b: pd.Series[float], steps: Sequence[int]
) -> dict[int, float]:
    """Two of `curves`, a over b, in each seed that has both: the geometric mean over
    these steps, of those where neither is zero; 0 where a is zero at all of them and b is
    not."""
    ratio = (a / b)[(b > 0) & b.index.isin(steps, level="step")].dropna()
    seeds = ratio.where(ratio > 0).groupby("seed").agg(_geometric).fillna(0.0)
    return {int(seed): mean for seed, mean in zip(seeds.index, seeds, strict=True)}


def _geometric(values: pd.Series[float]) -> float:
    """Of those that are there; NaN where none is."""
    known = values.dropna()
    return statistics.geometric_mean(known) if len(known) else math.nan


def _pairs(
    roles: Mapping[str, VariantRole], table: pd.DataFrame
) -> list[tuple[str, str]]:
    """The labels of a table that are set beside each other."""
    rungs = NULLS["null_rounding"] + " at "  # what a dose is read off, and no ratio is of
    labels = (label for label in roles if label in table and not label.startswith(rungs))
    here = grouped(labels, lambda label: roles[label])
    return [
        (a, b)
        for role, others in BESIDE.items()
        for a in here.get(role, ())
        for b in itertools.chain.from_iterable(here.get(other, ()) for other in others)
    ]


def _windows(mark: Saturation) -> Mapping[Window, tuple[int, ...]]:
    return {
        "start": (0,),
        "first": mark.early[:1],
        "early": mark.early,
        "saturated": mark.late,
    }


def _comparisons(
    tables: Mapping[Any, pd.DataFrame],
    roles: Mapping[str, VariantRole],
    mark: Saturation,
    steps: Sequence[int],
) -> Iterator[Comparison]:
    """All ratios, window by window."""
    merged = (
        mark.reason or f"curves are merged from step {mark.saturated}, the first recorded"
    )
    late = mark.reason or f"no curve has merged with the null by step {steps[-1]}"
    reasons: Mapping[Window, str] = {"start": "", "saturated": late}
    for (window, these), metric in itertools.product(_windows(mark).items(), METRICS):
        why = reasons.get(window, merged)
        table = tables.get((ladder.of_window(window), metric), pd.DataFrame())
        for a, b in _pairs(roles, table):
            by_seed = ratios(table[a], table[b], these)
            mean, low, high = (
                middle(list(by_seed.values())) if by_seed else (None, None, None)
            )
            nulls = {}
            if mean is None:
                none = "no seed has both, and more than 0 to divide by"
                nulls["ratio"] = none if these else why
            elif len(by_seed) < FEWEST_SEEDS:
                nulls = dict.fromkeys(("low", "high"), f"fewer than {FEWEST_SEEDS} seeds")
            place: Any = {
                "variant": a,
                "against": b,
                "role": roles[a],
                "against_role": roles[b],
            }
            place |= {"metric": metric, "window": window, "steps": these, "nulls": nulls}
            yield Comparison(**place, ratio=mean, low=low, high=high, by_seed=by_seed)


def _figures(
    tables: Mapping[Any, pd.DataFrame], roles: Mapping[str, VariantRole]
) -> Iterator[Figure]:
    """Distances by step, without zeros, and those of flash over low precision's."""
    soft = {label for label, role in roles.items() if role.startswith("null")}
    for metric, name in METRICS.items():
        table: Any = tables["weights", metric]
        rows = [(a, at[1], x) for a in table for at, x in table[a].items() if x > 0]
        title = f"Distance from the golden run, {name}, by step (all weights)"
        yield figures.figure(title, metric, name, roles, rows, middle, soft=soft)
    table = tables["weights", PAIRED]
    over = [
        (f"{a} over {b}", step, ratio)
        for a, b in _pairs(roles, table)
        if roles[a] == "flash" and roles[b] in PERTURBED
        for step in table.index.unique("step")
        for ratio in ratios(table[a], table[b], (step,)).values()
        if ratio > 0
    ]
    title = "Distance of flash over that of another format, by step (all weights)"
    name, pairs = (
        "ratio of mean |difference|",
        dict.fromkeys(label for label, _, _ in over),
    )
    yield figures.figure(title, PAIRED, name, pairs, over, middle, relative=True)
