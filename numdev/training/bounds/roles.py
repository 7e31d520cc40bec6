"""From the distances of a training run, or of checkpoints, to what `numdev bounds` reports of them:
tracks over training, where they merge (`numdev.training.bounds.saturation`), and in each window the
ratios of flash and of low precision to whatever they are set beside.

A window is decided by the paired mean |difference| alone, group by group, and holds for every
metric of that group, so that W1 and the paired distances in one row are of the same steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from numdev.report.statistics import factor, interval
from numdev.training.bounds.report import (
    BoundsVariant,
    Comparison,
    Delay,
    NullRow,
    Saturation,
    Window,
)
from numdev.training.bounds.saturation import NULLS, Track, delays, ratios, saturation
from numdev.training.report import DistanceRow, VariantRecord, VariantRole

METRICS = ("mean_abs", "max_abs", "rel", "w1")
PAIRED = "mean_abs"
"""The metric that decides windows, and that sentences speak of."""
WHOLE = "all"
SHARED = {"role", "kernel", "format", "attention_format"}
"""What a kind of run has of its first variant."""
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


@dataclass(frozen=True, kw_only=True)
class Found:
    """Everything that follows from the distances."""

    variants: tuple[BoundsVariant, ...]
    tracks: tuple[Track, ...]
    saturations: tuple[Saturation, ...]
    comparisons: tuple[Comparison, ...]
    delays: tuple[Delay, ...]
    null_runs: tuple[NullRow, ...]
    lost: Mapping[str, Mapping[int, int]]
    """Of a kind of run, the seeds in which it was not finite, and the first such step."""

    @property
    def deterministic(self) -> bool | None:
        """Whether repeats are bitwise the golden run; None where there is none."""
        largest = [n.largest for n in self.null_runs if n.role == "null_repeat"]
        return all(x == 0 for x in largest) if largest else None

    @property
    def mark(self) -> Saturation | None:
        """Where the curves of all weights merge; None of checkpoints."""
        return next((s for s in self.saturations if s.group == WHOLE), None)


def found(
    variants: Sequence[VariantRecord], distances: Sequence[DistanceRow], *, curves: bool = True
) -> Found:
    """What distances come to; without `curves` they are of one step, and nothing merges."""
    labels = {v.name: NULL_LABELS.get(v.role, v.name) for v in variants}
    first = {labels[v.name]: v for v in reversed(variants)}
    tracks = _tracks(distances, labels, first)
    groups = dict.fromkeys(t.group for t in tracks if t.of == "weights")
    marks = tuple(saturation(g, _of(tracks, "weights", g, PAIRED)) for g in groups)
    runs: dict[str, set[tuple[str, int]]] = {label: set() for label in first}
    lost: dict[str, dict[int, int]] = {}
    for row in distances:
        if row.variant in labels:
            label = labels[row.variant]
            runs[label].add((row.variant, row.seed))
            # A run that diverged has no distance any more, and must not be missing without a word.
            whole = (row.of, row.group) == ("weights", WHOLE)
            if whole and row.elements and row.mean_abs is None:
                seeds = lost.setdefault(label, {})
                seeds[row.seed] = min(row.step, seeds.get(row.seed, row.step))
    kinds = (
        BoundsVariant(label=label, runs=len(runs[label]), **v.model_dump(include=SHARED))
        for label, v in reversed(first.items())
    )
    return Found(
        variants=tuple(kinds),
        tracks=tracks,
        saturations=marks if curves else (),
        comparisons=tuple(_comparisons(tracks, list(_windows(marks, tracks, curves=curves)))),
        delays=tuple(_delays(tracks, marks)) if curves else (),
        null_runs=tuple(_null_runs(tracks, curves=curves)),
        lost=lost,
    )


def _tracks(
    distances: Iterable[DistanceRow], labels: Mapping[str, str], first: Mapping[str, VariantRecord]
) -> tuple[Track, ...]:
    """Every metric of every kind of run but the golden one."""
    collected: dict[tuple[str, str, str, str], dict[int, dict[int, list[float]]]] = {}
    for row in distances:
        label = labels.get(row.variant)
        if label is None or first[label].role == "golden":
            continue
        for metric in METRICS:
            value = getattr(row, metric)
            if value is not None:
                seeds = collected.setdefault((label, row.of, row.group, metric), {})
                seeds.setdefault(row.seed, {}).setdefault(row.step, []).append(float(value))
    return tuple(
        Track(
            label=label, role=first[label].role, of=of, group=group, metric=metric, members=members
        )
        for (label, of, group, metric), members in collected.items()
    )


def _of(tracks: Sequence[Track], of: str, group: str, metric: str) -> list[Track]:
    return [t for t in tracks if (t.of, t.group, t.metric) == (of, group, metric)]


@dataclass(frozen=True)
class _Span:
    """One window of one group, and why it is empty where it is."""

    of: Literal["weights", "gradient"]
    group: str
    window: Window
    steps: tuple[int, ...]
    why: str = ""


def _windows(
    marks: Sequence[Saturation], tracks: Sequence[Track], *, curves: bool
) -> Iterator[_Span]:
    for group in dict.fromkeys(t.group for t in tracks if t.of == "gradient"):
        yield _Span("gradient", group, "start", (0,))
    for mark in marks:
        if not curves:
            yield _Span("weights", mark.group, "given", mark.steps)
            continue
        if mark.early:
            yield _Span("weights", mark.group, "first", mark.early[:1])
        merged = mark.reason or f"curves are merged from step {mark.saturated}, the first recorded"
        yield _Span("weights", mark.group, "early", mark.early, merged)
        late = mark.reason or f"no curve has merged with the null by step {mark.steps[-1]}"
        yield _Span("weights", mark.group, "saturated", mark.late, late)


def _pairs(here: Sequence[Track]) -> Iterator[tuple[Track, Track, dict[str, Any]]]:
    """Whose distance is set beside whose, and the fields that say so."""
    for role, others in BESIDE.items():
        for a in (t for t in here if t.role == role):
            for b in (t for other in others for t in here if t.role == other):
                pair = {"variant": a.label, "role": a.role}
                pair |= {"against": b.label, "against_role": b.role, "metric": a.metric}
                yield a, b, pair


def _comparisons(tracks: Sequence[Track], windows: Sequence[_Span]) -> Iterator[Comparison]:
    for span in windows:
        for metric in METRICS:
            for a, b, pair in _pairs(_of(tracks, span.of, span.group, metric)):
                by_seed = ratios(a, b, span.steps)
                mean, low, high = factor(list(by_seed.values())) if by_seed else (None, None, None)
                nulls = {} if by_seed else {"ratio": _why_none(a, b, span)}
                if mean is not None and low is None:
                    nulls = dict.fromkeys(("low", "high"), "one seed has no interval")
                yield Comparison(
                    **pair,
                    of=span.of,
                    group=span.group,
                    window=span.window,
                    steps=() if span.window == "given" else span.steps,
                    ratio=mean,
                    low=low,
                    high=high,
                    by_seed=by_seed,
                    nulls=nulls,
                )


def _why_none(a: Track, b: Track, span: _Span) -> str:
    if not span.steps:
        return span.why
    if not a.by_seed.keys() & b.by_seed.keys():
        return "no seed has both"
    if not any(series.get(s) for series in b.by_seed.values() for s in span.steps):
        return f"the distance of {b.label} is 0"
    return "no recorded step has both"


def _delays(tracks: Sequence[Track], marks: Sequence[Saturation]) -> Iterator[Delay]:
    for mark in marks:
        for metric in METRICS:
            for a, b, pair in _pairs(_of(tracks, "weights", mark.group, metric)):
                if b.role == "other_seed":  # it starts apart, and nothing ever reaches it in time
                    continue
                by_seed = delays(a, b, mark.early)
                mean, low, high = interval(list(by_seed.values())) if by_seed else (None,) * 3
                why = {} if by_seed else {"steps": "neither reaches what the other has early"}
                pair |= {"steps": mean, "low": low, "high": high}
                yield Delay(**pair, group=mark.group, by_seed=by_seed, nulls=why)


def _null_runs(tracks: Sequence[Track], *, curves: bool) -> Iterator[NullRow]:
    for track in (t for t in tracks if t.role in NULLS):
        place: dict[str, Any] = {"label": track.label, "role": track.role, "of": track.of}
        place |= {"group": track.group, "metric": track.metric}
        for step in track.steps:
            values = [v for seed in track.members.values() for v in seed.get(step, ())]
            yield NullRow(
                **place,
                step=step if curves else None,
                runs=len(values),
                mean=sum(values) / len(values),
                smallest=min(values),
                largest=max(values),
            )
