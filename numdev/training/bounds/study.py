"""`numdev bounds`: flash's distance in weights beside low precision's, another seed's and chance's,
from the report of a training run. Needs neither torch nor a GPU.

A window is decided by the paired mean |difference| alone, group by group, and holds for every
metric of that group, so that W1 and the paired distances in one row are of the same steps.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

import numdev
from numdev import report as reports
from numdev.errors import MeasurementError, UsageError
from numdev.metrics.statistics import factor
from numdev.report import Provenance
from numdev.report.numbers import si, times
from numdev.training import figures
from numdev.training.bounds.report import (
    BoundsReport,
    BoundsSummary,
    BoundsVariant,
    Comparison,
    Saturation,
)
from numdev.training.bounds.saturation import (
    MERGED,
    METRICS,
    NULLS,
    curves,
    distances_of,
    label_of,
    ratios,
    saturation,
)
from numdev.training.report import TrainReport, VariantRecord, VariantRole

BESIDE: Mapping[VariantRole, tuple[VariantRole, ...]] = {
    "flash": ("low_precision", "attention_precision", "other_seed", *NULLS),
    "attention_precision": ("low_precision", "other_seed", *NULLS),
    "low_precision": ("other_seed", *NULLS),
}
"""What the distance of a role is divided by."""
PAIRED = "mean_abs"
WHOLE = "all"
ORDER: tuple[VariantRole, ...] = (
    *("low_precision", "null_rounding", "attention_precision", "null_ulp", "null_repeat"),
    "other_seed",
)
"""What a distance is set beside, in the order of a sentence."""
NOT_DETERMINISTIC = (
    "NOT DETERMINISTIC: the golden run repeated is off by up to {off}, and every distance below "
    "holds that too."
)
NOT_FINITE = "NOT FINITE: {label} has no finite distance in {where}, and counts in no ratio there."
RATIO = "{lead}: {label} changes weights {beside}."
PAPER = ", where the first paper reports 0.2 to 0.5"
MERGED_FROM = (
    "From step {step} on curves have merged: a distance there says how chaotic training is, not "
    "how large flash's deviation was."
)
NOT_MERGED = "Merging: by step {step} the curves have not merged with the null's."
NO_MARK = "Merging: where curves merge is not known, since {reason}."
REPEATED = "Null: the golden run repeated gives the same bits."
PROXIES = (
    "Proxies: distances between weights say how far runs part, as in the first paper (Golden et "
    "al. 2024), and not whether either trains well. W1 does not know which weight moved."
)


def bounds(path: Path, *, command: str = "") -> BoundsReport:
    """The bounds of a training run: a report.json of `numdev train`, or a directory with one.

    Raises UsageError where there is none or it is of another command, MeasurementError where no
    weights were compared in it.
    """
    run = reports.read(path)
    if not isinstance(run, TrainReport):
        raise UsageError(
            f"{path}: expected the report of a training run, got one of {run.kind}",
            hint="give the directory of a `numdev train`",
        )
    distances = distances_of(run)
    weights = distances[distances.of == "weights"]
    if weights.empty:
        raise MeasurementError(
            f"{path}: holds no distance between weights",
            hint="did the run record a step with more than one variant?",
        )
    file = path / "report.json" if path.is_dir() else path
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    paired = weights[weights.metric == PAIRED].groupby("group", sort=False)
    marks = [saturation(str(group), part) for group, part in paired]
    steps = sorted({int(step) for step in weights.step if step > 0})
    axis = figures.axis_of(steps, all_named=True) if len(steps) > 1 else None
    kinds = tuple(_kinds(run))
    off = distances.value[distances.role == "null_repeat"].max()
    summary = BoundsSummary(
        answer=(),
        seeds=tuple(sorted({row.seed for row in run.distances})),
        variants=kinds,
        deterministic=None if pd.isna(off) else bool(off == 0),
        axis=axis,
    )
    report = BoundsReport(
        provenance=Provenance(
            numdev=numdev.__version__,
            command=command,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            system=run.provenance.system,
            source={"config": str(path), "sha256": sha256, "run": run.provenance.source},
        ),
        request={"run": str(path), "sha256": sha256, "target": path.resolve().name},
        summary=summary,
        saturations=tuple(marks),
        comparisons=tuple(_comparisons(distances, kinds, marks)),
        figures=figures.of_bounds(weights, kinds, run, axis) if axis else (),
    )
    sentences = tuple(answer(report, _lost(run), off))
    return report.model_copy(update={"summary": summary.model_copy(update={"answer": sentences})})


def _kinds(run: TrainReport) -> Iterator[BoundsVariant]:
    """The kinds of run in their order, each with the fields of its first variant."""
    labels = {v.name: label_of(v) for v in run.variants}
    runs = Counter(labels[name] for name, _ in {(d.variant, d.seed) for d in run.distances})
    first: dict[str, VariantRecord] = {}
    for v in run.variants:
        first.setdefault(label_of(v), v)
    for label, v in first.items():
        shared = v.model_dump(include={"role", "kernel", "format", "attention_format"})
        yield BoundsVariant(label=label, runs=runs[label], **shared)


def _lost(run: TrainReport) -> dict[str, dict[int, int]]:
    """Of a kind of run the seeds in which it has no finite distance, and the first such step: a run
    that diverged must not be missing without a word."""
    labels = {v.name: label_of(v) for v in run.variants}
    seeds: dict[str, dict[int, int]] = {}
    for d in sorted(run.distances, key=lambda d: d.step):
        if (d.of, d.group) == ("weights", WHOLE) and d.elements and d.mean_abs is None:
            seeds.setdefault(labels[d.variant], {}).setdefault(d.seed, d.step)
    return seeds


def _windows(marks: Iterable[Saturation]) -> Iterator[tuple[dict[str, Any], str]]:
    """The windows of a training run, as fields of a comparison; why one is empty."""
    for mark in marks:
        merged = mark.reason or f"curves are merged from step {mark.saturated}, the first recorded"
        late = mark.reason or f"no curve has merged with the null by step {mark.steps[-1]}"
        windows = [("first", mark.early[:1], "")] if mark.early else []
        windows += [("early", mark.early, merged), ("saturated", mark.late, late)]
        yield {"of": "gradient", "group": mark.group, "window": "start", "steps": (0,)}, ""
        for window, steps, why in windows:
            place = {"of": "weights", "group": mark.group, "window": window, "steps": steps}
            yield place, why


def _comparisons(
    distances: pd.DataFrame, kinds: Iterable[BoundsVariant], marks: Iterable[Saturation]
) -> Iterator[Comparison]:
    """All ratios."""
    by_role: dict[VariantRole, list[str]] = {}
    for kind in kinds:
        by_role.setdefault(kind.role, []).append(kind.label)
    pairs = [
        {"variant": a, "role": role, "against": b, "against_role": other}
        for role, others in BESIDE.items()
        for a in by_role.get(role, ())
        for other in others
        for b in by_role.get(other, ())
    ]
    tables = {key: curves(part) for key, part in distances.groupby(["of", "group", "metric"])}
    for place, why in _windows(marks):
        for metric in METRICS:
            table = tables.get((place["of"], place["group"], metric), pd.DataFrame())
            for pair in pairs:
                if {pair["variant"], pair["against"]} <= set(table):
                    by_seed = ratios(table[pair["variant"]], table[pair["against"]], place["steps"])
                    yield _comparison({**place, **pair, "metric": metric}, by_seed, why)


def _comparison(place: Mapping[str, Any], by_seed: dict[int, float], why: str) -> Comparison:
    mean, low, high = factor(list(by_seed.values())) if by_seed else (None, None, None)
    none = "no seed has both, and more than 0 to divide by"
    nulls = {} if by_seed else {"ratio": none if place["steps"] else why}
    if mean is not None and low is None:
        nulls = dict.fromkeys(("low", "high"), "one seed has no interval")
    return Comparison(**place, ratio=mean, low=low, high=high, by_seed=by_seed, nulls=nulls)


# --- the first sentences -------------------------------------------------------------------------


def answer(
    report: BoundsReport, lost: Mapping[str, Mapping[int, int]], off: float
) -> Iterator[str]:
    """The first sentences, `WHERE: what was found`: flash beside low precision, another seed and
    chance while curves have not merged. What voids that comes first. `lost`: of a kind of run, the
    seeds in which it was not finite, and from which step on. `off`: the largest distance of a
    repeat, in any metric."""
    mark = next(s for s in report.saturations if s.group == WHOLE)
    if report.summary.deterministic is False:
        yield NOT_DETERMINISTIC.format(off=si(off))
    for label, seeds in lost.items():
        where = [f"seed {seed} from step {step} on" for seed, step in sorted(seeds.items())]
        yield NOT_FINITE.format(label=label, where=", ".join(where))
    for label in (v.label for v in report.summary.variants if v.role == "flash"):
        here = _of(report, "early", label)
        if beside := "; ".join(_beside(report, c) for c in here if c.ratio is not None):
            yield RATIO.format(lead=_early(mark), label=label, beside=beside)
        elif here:
            yield f"Early: nothing can be said, since {here[0].nulls['ratio']}."
    if mark.reason is not None:
        yield NO_MARK.format(reason=mark.reason)
    elif mark.saturated is None:
        yield NOT_MERGED.format(step=mark.steps[-1])
    else:
        yield MERGED_FROM.format(step=mark.saturated)
    if report.summary.deterministic:
        yield REPEATED
    yield PROXIES


def _of(report: BoundsReport, window: str, label: str, metric: str = PAIRED) -> list[Comparison]:
    """The comparisons of all weights of one kind of run in a window."""
    where = (WHOLE, window, label, metric)
    chosen = [c for c in report.comparisons if (c.group, c.window, c.variant, c.metric) == where]
    return sorted(chosen, key=lambda c: ORDER.index(c.against_role))


def _beside(report: BoundsReport, c: Comparison) -> str:
    """`0.97 x [0.93 to 1.00] as much as null: re-rounded, no larger (W1 0.95 x)`. An interval that
    reaches far above a null shows as little that a distance is not larger."""
    ends = "" if c.low is None or c.high is None else f" [{times(c.low)} to {times(c.high)}]"
    words = f"{times(c.ratio)} x{ends} as much as {c.against}"
    if c.against_role in NULLS and ((c.ratio or 0.0) if c.low is None else c.low) <= 1:
        words += ", no larger" if c.high is None or c.high <= MERGED else ", not told apart"
    same = _of(report, c.window, c.variant, "w1")
    w1 = next((o.ratio for o in same if o.against == c.against), None)
    return f"{words} (W1 {times(w1)} x){PAPER if c.against_role == 'low_precision' else ''}"


def _early(mark: Saturation) -> str:
    """Which steps the first window is."""
    if mark.reason is not None:
        return f"At step {mark.steps[0]}"
    if mark.chance is not None and (mark.bends is None or mark.chance < mark.bends):
        return f"Before step {mark.chance}, where chance begins to decide"
    if mark.bends is None:
        return f"Up to step {mark.steps[-1]}, with no sign that curves merge"
    return f"Before step {mark.bends}, where curves begin to merge"
