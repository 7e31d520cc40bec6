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
from numdev.report import Provenance
from numdev.report.statistics import factor
from numdev.training import figures
from numdev.training.bounds.answer import PAIRED, WHOLE, answer, missing
from numdev.training.bounds.report import (
    BoundsReport,
    BoundsSummary,
    BoundsVariant,
    Comparison,
    Saturation,
)
from numdev.training.bounds.saturation import (
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
        missing=missing(kinds),
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
