"""`numdev bounds`: flash's distance in weights beside low precision's, another seed's and chance's,
from the report of a training run. Needs neither torch nor a GPU.

A ratio of distances means something only while they keep the proportion of what caused them. Let s
be the largest perturbation over the smallest null, at a step, of geometric means over seeds: in
proportion it stays, and as curves merge it falls to 1 (docs/bounds.md). Three marks follow:

- curves **bend** at the first recorded step after the peak of s from which on s is at most half of
  that peak;
- they are **saturated** from the first recorded step from which on s is at most 2;
- **chance decides** from the first recorded step at which in some seed the largest of the null runs
  of one kind over the smallest is more than twice what it was at first. The nulls alone say so: a
  window that ended where the ratio asked about begins to scatter would be chosen for its answer.

A window is decided by the paired mean |difference| alone, and holds for every metric."""

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
from numdev.metrics.statistics import Mean, factor
from numdev.report import Figure, Provenance
from numdev.report.numbers import si, times
from numdev.training import figures
from numdev.training.bounds import report as records
from numdev.training.bounds.report import MERGED, PAIRED, Comparison, Saturation, said
from numdev.training.report import TrainReport, VariantRecord, VariantRole

METRICS = {PAIRED: "paired mean |difference|", "max_abs": "", "w1": "Wasserstein distance W1"}
"""What is compared, and the title of its figure if it has one."""
PERTURBED: tuple[VariantRole, ...] = ("flash", "low_precision", "attention_precision")
"""Runs that start where the golden one does and compute otherwise."""
NULLS: Mapping[VariantRole, str] = {
    "null_rounding": "null: re-rounded",
    "null_ulp": "null: one ulp",
    "null_repeat": "null: repeat",
}
"""The label that all null runs of one kind share."""
REST: tuple[VariantRole, ...] = (*NULLS, "other_seed")
BESIDE: Mapping[VariantRole, tuple[VariantRole, ...]] = {
    "flash": ("low_precision", "attention_precision", *REST),
    "attention_precision": ("low_precision", *REST),
    "low_precision": REST,
}
"""What the distance of a role is divided by, in the order of a sentence."""
COLUMNS = ("of", "metric", "role", "label", "seed", "step", "value")
PARTED = 2.0  # how much farther apart than at first equal nulls are where chance decides
FEWEST_SEEDS = 3  # of an interval: that of two reaches over orders of magnitude
NOT_DETERMINISTIC = (
    "NOT REPRODUCIBLE from step {first:.0f} on: the golden run's weights differ by up to {off} "
    "when it is repeated. Only earlier steps are judged."
)
NOT_FINITE = "NOT FINITE: {label} has no finite distance in {where}, and counts in no ratio there."
UNSURE = "Not reproducible, so not judged beside"
PAPER = "; the first paper reports 0.2 to 0.5"
WORDS: Mapping[VariantRole, tuple[str, str]] = {
    "low_precision": ("a change of format", "computing in {0} in place of {1}"),
    "null_rounding": ("random rounding", "re-rounding attention's output at random"),
    "null_ulp": ("chance", "one ulp in every weight"),
    "other_seed": ("another seed", "another initialisation"),
}
"""What the answer sets a distance beside: its name, and what is done there."""


def bounds(path: Path, *, command: str = "") -> records.BoundsReport:
    """The bounds of a training run: a report.json of `numdev train`, or a directory with one.

    Raises UsageError where there is none or it is of another command, MeasurementError where no
    weights were compared in it."""
    run = reports.read(path)
    if not isinstance(run, TrainReport):
        what = f"{path}: expected the report of a training run, got one of {run.kind}"
        raise UsageError(what, hint="give the directory of a `numdev train`")
    distances = distances_of(run)
    weights = distances[distances.of == "weights"]
    if weights.empty:
        what = f"{path}: holds no distance between weights"
        raise MeasurementError(what, hint="did the run record a step with more than one variant?")
    file = path / "report.json" if path.is_dir() else path
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    roles = {label_of(v): v.role for v in run.variants}
    steps = sorted({int(step) for step in weights.step if step > 0})
    tables = {key: curves(part) for key, part in distances.groupby(["of", "metric"])}
    mark = saturation(weights[weights.metric == PAIRED])
    compared = tuple(_comparisons(tables, roles, mark, steps))
    repeat = distances[distances.role == "null_repeat"]
    off, first = repeat.value.max(), float(repeat.step[repeat.value > 0].min())
    formats = {"" if v.role == "golden" else label_of(v): v.format for v in run.variants}
    axis = figures.axis_of(steps, all_named=True) if len(steps) > 1 else None
    source = {"config": str(path), "sha256": sha256, "run": run.provenance.source}
    return records.BoundsReport(
        provenance=Provenance.now(command, run.provenance.system, source),
        request={"run": str(path), "sha256": sha256, "target": path.resolve().name},
        summary=records.BoundsSummary(
            answer=(*_warnings(run, off, first), *answer(compared, formats, first)),
            seeds=tuple(sorted({row.seed for row in run.distances})),
            deterministic=None if pd.isna(off) else bool(off == 0),
            axis=axis,
        ),
        saturation=mark,
        comparisons=compared,
        figures=tuple(f for f in _figures(tables, roles) if f.curves) if axis else (),
    )


def label_of(v: VariantRecord) -> str:
    return NULLS.get(v.role, v.name)


def distances_of(run: TrainReport) -> pd.DataFrame:
    """Every finite distance of all weights from the golden run, one a line, in COLUMNS."""
    others = {v.name: (v.role, label_of(v)) for v in run.variants if v.role != "golden"}
    lines = [
        (d.of, metric, *others[d.variant], d.seed, d.step, value)
        for d in run.distances
        if d.variant in others
        for metric in METRICS
        if (value := getattr(d, metric)) is not None
    ]
    return pd.DataFrame(lines, columns=list(COLUMNS))


def curves(distances: pd.DataFrame) -> pd.DataFrame:
    """One metric: a line for each seed and step, a column for each label, the mean over runs of one
    kind in it; NaN where there is none."""
    return distances.pivot_table(index=["seed", "step"], columns="label", values="value")


def saturation(distances: pd.DataFrame) -> Saturation:
    """The marks of one metric of weights."""
    steps = tuple(sorted({int(step) for step in distances.step if step > 0}))
    roles = dict(zip(distances.label, distances.role, strict=True))
    values = curves(distances[distances.step > 0])
    middle = values.where(values > 0).groupby("step").agg(_geometric)
    large = middle[[label for label in middle if roles[label] in PERTURBED]]
    small = middle[[label for label in middle if roles[label] in NULLS]]
    above = (large.max(axis=1) / small.min(axis=1)).dropna()
    if above.empty:
        reason = "every null run is bitwise the golden one"
        if not NULLS.keys() & roles.values():
            reason = "there is no null run"
        if not set(PERTURBED) & set(roles.values()):
            reason = "no run with another kernel or format has a distance"
        return Saturation(early=steps[:1], reason=reason)
    chance = _chance_decides(distances[distances.role.isin(NULLS)])
    top: Any = above.idxmax()
    merged = _from_then_on(above <= MERGED)
    halved = _from_then_on(above[above.index > top] <= above[top] / 2)
    bends = min((step for step in (halved, merged) if step is not None), default=None)
    return Saturation(
        bends=bends,
        saturated=merged,
        chance=chance,
        early=tuple(s for s in steps if all(m is None or s < m for m in (bends, chance))),
        late=tuple(s for s in steps if merged is not None and s >= merged),
    )


def _chance_decides(nulls: pd.DataFrame) -> int | None:
    """None where nulls do not part, or no seed has two of one kind."""
    ends = nulls.groupby(["label", "seed", "step"]).value.agg(["min", "max", "count"])
    ends = ends[(ends["count"] > 1) & (ends["min"] > 0)]
    apart = ends["max"] / ends["min"]
    first = apart.groupby(["label", "seed"]).transform("first")
    steps = apart[apart > PARTED * first].index.get_level_values("step")
    return None if steps.empty else int(steps.min())


def _from_then_on(holds: pd.Series[bool]) -> int | None:
    """The first step from which on it holds at every step; None if it does not at the last."""
    lasting = holds[holds[::-1].cummin()[::-1]]
    return None if lasting.empty else int(lasting.index.min())


# --- the ratios ----------------------------------------------------------------------------------


def ratios(a: pd.Series[float], b: pd.Series[float], steps: Sequence[int]) -> dict[int, float]:
    """Two of `curves`, a over b, in each seed that has both: the geometric mean over these steps,
    of those where neither is zero; 0 where a is zero at all of them and b is not."""
    ratio = (a / b)[(b > 0) & b.index.isin(steps, level="step")].dropna()
    seeds = ratio.where(ratio > 0).groupby("seed").agg(_geometric).fillna(0.0)
    return {int(seed): mean for seed, mean in zip(seeds.index, seeds, strict=True)}


def _middle(ratios: Sequence[float]) -> Mean:
    """The geometric mean over seeds, and its interval where there are enough."""
    mean, low, high = factor(ratios)
    return (mean, low, high) if len(ratios) >= FEWEST_SEEDS else (mean, None, None)


def _geometric(values: pd.Series[float]) -> float:
    """Of those that are there; NaN where none is."""
    known = values.dropna()
    return statistics.geometric_mean(known) if len(known) else math.nan


def _pairs(roles: Mapping[str, VariantRole], table: pd.DataFrame) -> list[tuple[str, str]]:
    """The labels of a table that are set beside each other."""
    here = grouped((label for label in roles if label in table), lambda label: roles[label])
    return [
        (a, b)
        for role, others in BESIDE.items()
        for a in here.get(role, ())
        for b in itertools.chain.from_iterable(here.get(other, ()) for other in others)
    ]


def _comparisons(
    tables: Mapping[Any, pd.DataFrame],
    roles: Mapping[str, VariantRole],
    mark: Saturation,
    steps: Sequence[int],
) -> Iterator[Comparison]:
    """All ratios, window by window."""
    merged = mark.reason or f"curves are merged from step {mark.saturated}, the first recorded"
    late = mark.reason or f"no curve has merged with the null by step {steps[-1]}"
    windows = [("start", (0,), ""), ("first", mark.early[:1], merged)]
    windows += [("early", mark.early, merged), ("saturated", mark.late, late)]
    for (window, these, why), metric in itertools.product(windows, METRICS):
        of = "gradient" if window == "start" else "weights"
        table = tables.get((of, metric), pd.DataFrame())
        for a, b in _pairs(roles, table):
            by_seed = ratios(table[a], table[b], these)
            mean, low, high = _middle(list(by_seed.values())) if by_seed else (None, None, None)
            nulls = {}
            if mean is None:
                none = "no seed has both, and more than 0 to divide by"
                nulls["ratio"] = none if these else why
            elif len(by_seed) < FEWEST_SEEDS:
                nulls = dict.fromkeys(("low", "high"), f"fewer than {FEWEST_SEEDS} seeds")
            place: Any = {"variant": a, "against": b, "role": roles[a], "against_role": roles[b]}
            place |= {"metric": metric, "window": window, "steps": these, "nulls": nulls}
            yield Comparison(**place, ratio=mean, low=low, high=high, by_seed=by_seed)


def _figures(
    tables: Mapping[Any, pd.DataFrame], roles: Mapping[str, VariantRole]
) -> Iterator[Figure]:
    """Distances by step, without zeros, and those of flash over low precision's."""
    for metric, words in METRICS.items():
        table: Any = tables["weights", metric]
        rows = [(a, at[1], x) for a in table for at, x in table[a].items() if x > 0]
        if words:
            title = f"Distance from the golden run, {words}, by step (all weights)"
            yield figures.figure(title, metric, words, roles, rows, _middle)
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
    words, pairs = "ratio of mean |difference|", dict.fromkeys(label for label, _, _ in over)
    yield figures.figure(title, PAIRED, words, pairs, over, _middle, relative=True)


# --- the first sentences -------------------------------------------------------------------------


def _warnings(run: TrainReport, off: float, step: float) -> Iterator[str]:
    """What voids the rest: a repeat that is `off` from a step on; runs that diverged, each with the
    seeds in which it has no finite distance, and from which step on."""
    if off > 0:
        yield NOT_DETERMINISTIC.format(off=si(off), first=step)
    labels = {v.name: label_of(v) for v in run.variants}
    seeds: dict[str, dict[int, int]] = {}
    for d in sorted(run.distances, key=lambda d: d.step):
        if d.of == "weights" and d.elements and d.mean_abs is None:
            seeds.setdefault(labels[d.variant], {}).setdefault(d.seed, d.step)
    for label, first in seeds.items():
        where = [f"seed {seed} from step {step} on" for seed, step in sorted(first.items())]
        yield NOT_FINITE.format(label=label, where=", ".join(where))


def answer(known: Sequence[Comparison], formats: Mapping[str, str], off: float) -> Iterator[str]:
    """Flash beside low precision, chance and another seed, while curves have not merged; or why
    nothing can be said. Only an interval gives a verdict, before a repeat is `off`. `formats` are
    by label, that of the golden run by the empty one."""
    for c in said(known):
        name, what = WORDS[c.against_role]
        over = f"{len(c.by_seed)} seed{'s' * (len(c.by_seed) != 1)}"
        over += f", and a verdict needs {FEWEST_SEEDS}" * (len(c.by_seed) < FEWEST_SEEDS)
        if c.low is not None:
            over = f"95 % interval over {over} {times(c.low)} to {times(c.high)}"
        paper = PAPER if c.against_role == "low_precision" else ""
        what = what.format(formats[c.against], formats[""])
        when = " to ".join(dict.fromkeys(str(step) for step in (*c.steps[:1], *c.steps[-1:])))
        distance = f"{c.variant} moves the weights {times(c.ratio)} times as far as {what}"
        distance += f", at step{'s' * (len(c.steps) > 1)} {when}" if when else ""
        distance += f" ({c.against}; {over}{paper})"
        if c.ratio is None:
            distance = f"nothing can be said of {c.variant}, since {c.nulls['ratio']}"
        unsure = any(step >= off for step in c.steps) and c.low is not None
        yield f"{UNSURE if unsure else c.standing} {name}: {distance}."
