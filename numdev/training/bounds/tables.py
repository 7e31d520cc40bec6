"""From the distances of a training run to the tables of `numdev bounds`: curves
of every kind of run, and in each window whose distance over whose.

A window is decided by the paired mean |difference| alone, group by group, and holds for every
metric of that group, so that W1 and the paired distances in one row are of the same steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from numdev.report.statistics import factor
from numdev.training.bounds.report import (
    BoundsVariant,
    Comparison,
    NullRow,
    Of,
    Saturation,
    Window,
)
from numdev.training.bounds.saturation import NULLS, Track, ratios
from numdev.training.report import DistanceRow, VariantRecord, VariantRole

METRICS = ("mean_abs", "max_abs", "rel", "w1")
PAIRED = "mean_abs"
WHOLE = "all"
NULL_LABELS: Mapping[str, str] = {
    "null_repeat": "null: repeat",
    "null_ulp": "null: one ulp",
    "null_rounding": "null: re-rounded",
}
BESIDE: Mapping[VariantRole, tuple[VariantRole, ...]] = {
    "flash": ("low_precision", "attention_precision", "other_seed", *NULLS),
    "attention_precision": ("low_precision", "other_seed", *NULLS),
    "low_precision": ("other_seed", *NULLS),
}
"""What the distance of a role is divided by."""


class Span(NamedTuple):
    """One window of one group, and why it is empty where it is."""

    of: Of
    group: str
    window: Window
    steps: tuple[int, ...]
    why: str = ""


def label_of(v: VariantRecord) -> str:
    """Its name; null runs of one kind are one."""
    return NULL_LABELS.get(v.role, v.name)


def kinds_of(
    variants: Sequence[VariantRecord], distances: Iterable[DistanceRow]
) -> Iterator[BoundsVariant]:
    """The kinds of run in their order, each with the fields of its first variant."""
    runs = Counter(name for name, _ in {(row.variant, row.seed) for row in distances})
    kinds: dict[str, list[VariantRecord]] = {}
    for v in variants:
        kinds.setdefault(label_of(v), []).append(v)
    for label, (first, *others) in kinds.items():
        shared = first.model_dump(include={"role", "kernel", "format", "attention_format"})
        count = sum(runs[v.name] for v in (first, *others))
        yield BoundsVariant(label=label, runs=count, **shared)


def tracks_of(
    variants: Sequence[VariantRecord], distances: Iterable[DistanceRow]
) -> tuple[Track, ...]:
    """Every metric of every kind of run but the golden one."""
    others = {v.name: (label_of(v), v.role) for v in variants if v.role != "golden"}
    collected: dict[tuple[Any, ...], dict[int, dict[int, list[float]]]] = {}
    for row in (row for row in distances if row.variant in others):
        for metric in METRICS:
            if (value := getattr(row, metric)) is not None:
                key = (*others[row.variant], row.of, row.group, metric)
                steps = collected.setdefault(key, {}).setdefault(row.seed, {})
                steps.setdefault(row.step, []).append(float(value))
    names = ("label", "role", "of", "group", "metric")
    return tuple(Track(**dict(zip(names, k, strict=True)), members=m) for k, m in collected.items())


def of_group(tracks: Iterable[Track], group: str, metric: str = PAIRED) -> list[Track]:
    return [t for t in tracks if (t.group, t.metric) == (group, metric)]


def lost(
    variants: Sequence[VariantRecord], distances: Iterable[DistanceRow]
) -> dict[str, dict[int, int]]:
    """Of a kind of run the seeds in which it has no finite distance, and the first such step: a run
    that diverged must not be missing without a word."""
    labels = {v.name: label_of(v) for v in variants}
    seeds: dict[str, dict[int, int]] = {}
    for row in sorted(distances, key=lambda row: row.step):
        here = (row.of, row.group) == ("weights", WHOLE) and row.variant in labels
        if here and row.elements and row.mean_abs is None:
            seeds.setdefault(labels[row.variant], {}).setdefault(row.seed, row.step)
    return seeds


def windows(marks: Iterable[Saturation]) -> Iterator[Span]:
    """The windows of a training run."""
    for mark in marks:
        yield Span("gradient", mark.group, "start", (0,))
        if mark.early:
            yield Span("weights", mark.group, "first", mark.early[:1])
        merged = mark.reason or f"curves are merged from step {mark.saturated}, the first recorded"
        yield Span("weights", mark.group, "early", mark.early, merged)
        late = mark.reason or f"no curve has merged with the null by step {mark.steps[-1]}"
        yield Span("weights", mark.group, "saturated", mark.late, late)


def _pairs(here: Sequence[Track]) -> Iterator[tuple[Track, Track, dict[str, Any]]]:
    """Whose distance is set beside whose, and the fields that say so."""
    for role, others in BESIDE.items():
        for a in (t for t in here if t.role == role):
            for b in (t for other in others for t in here if t.role == other):
                pair = {"variant": a.label, "role": a.role, "group": a.group, "metric": a.metric}
                yield a, b, {**pair, "against": b.label, "against_role": b.role}


def comparisons(tracks: Sequence[Track], spans: Iterable[Span]) -> Iterator[Comparison]:
    """All ratios."""
    for span in spans:
        here = [t for t in tracks if t.of == span.of]
        for metric in METRICS:
            for a, b, pair in _pairs(of_group(here, span.group, metric)):
                by_seed = ratios(a, b, span.steps)
                mean, low, high = factor(list(by_seed.values())) if by_seed else (None, None, None)
                none = "no seed has both, and more than 0 to divide by"
                nulls = {} if by_seed else {"ratio": none if span.steps else span.why}
                if mean is not None and low is None:
                    nulls = dict.fromkeys(("low", "high"), "one seed has no interval")
                pair |= {"ratio": mean, "low": low, "high": high, "by_seed": by_seed}
                pair |= {"of": span.of, "window": span.window, "steps": span.steps}
                yield Comparison(**pair, nulls=nulls)


def null_rows(tracks: Sequence[Track]) -> Iterator[NullRow]:
    """How far null runs of one kind are from the golden run, step by step."""
    for track in (t for t in tracks if t.role in NULLS):
        place: dict[str, Any] = {"label": track.label, "role": track.role, "of": track.of}
        place |= {"group": track.group, "metric": track.metric}
        for step in track.steps:
            values = [v for seed in track.members.values() for v in seed.get(step, ())]
            place |= {"step": step, "runs": len(values)}
            mean = sum(values) / len(values)
            yield NullRow(**place, mean=mean, smallest=min(values), largest=max(values))
