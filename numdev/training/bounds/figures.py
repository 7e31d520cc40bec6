"""The figures of `numdev bounds`: distances by step, a curve for each kind of run, and the losses.

A curve's points are geometric means over seeds with their intervals; a distance of 0 has no place
on a logarithmic axis and is left out. Losses are ordinary means.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from numdev.report import Axis, Curve, Figure, Point, Tick
from numdev.report.statistics import Mean, factor, interval
from numdev.training.bounds.roles import PAIRED, WHOLE, Found
from numdev.training.bounds.saturation import Track, ratios
from numdev.training.report import TrainRow, VariantRecord

DRAWN: Mapping[str, str] = {
    "mean_abs": "paired mean |difference|",
    "max_abs": "max |difference|",
    "w1": "Wasserstein distance W1",
}


def axis(found: Found) -> Axis | None:
    """Every recorded step but step 0, which has no place on a logarithmic axis; None for one."""
    steps = sorted({s for t in found.tracks if t.of == "weights" for s in t.steps if s > 0})
    if len(steps) < 2:
        return None
    ticks = tuple(Tick(x=float(s), label=str(s)) for s in steps)
    return Axis(name="step", title="step", scale="log", ticks=ticks)


def figures(
    found: Found, rows: Sequence[TrainRow], variants: Sequence[VariantRecord], along: Axis
) -> tuple[Figure, ...]:
    """For every group and metric the distances by step; and the losses of all runs."""
    made = []
    distances = [t for t in found.tracks if t.of == "weights"]
    for group in dict.fromkeys(t.group for t in distances):
        for metric, words in DRAWN.items():
            same = [t for t in distances if (t.group, t.metric) == (group, metric)]
            curves = tuple(c for t in same if (c := _curve(t)) is not None)
            if curves:
                made.append(_figure(group, metric, words, curves))
        if group == WHOLE:
            made += _ratios([t for t in distances if (t.group, t.metric) == (group, PAIRED)])
    loss = _losses(rows, variants, {int(tick.x) for tick in along.ticks})
    return (*made, loss) if loss.curves else tuple(made)


def _ratios(tracks: Sequence[Track]) -> list[Figure]:
    """Flash over low precision, whole and in attention alone, step by step."""
    curves = []
    others = [t for t in tracks if t.role in ("low_precision", "attention_precision")]
    for a, b in itertools.product((t for t in tracks if t.role == "flash"), others):
        values = {s: list(ratios(a, b, (s,)).values()) for s in a.steps if s > 0}
        points = [_point(s, factor(v), len(v)) for s, v in values.items() if v and min(v) > 0]
        curve = _drawn(f"{a.label} over {b.label}", points)
        curves += [curve] if curve else []
    if not curves:
        return []
    return [
        Figure(
            title="Distance of flash over that of low precision, by step (all weights)",
            metric=PAIRED,
            relative=True,
            place={"group": WHOLE},
            y_title="ratio of mean |difference|",
            y_scale="log",
            curves=tuple(curves),
        )
    ]


def _figure(group: str, metric: str, words: str, curves: tuple[Curve, ...]) -> Figure:
    whose = "all weights" if group == "all" else f"weights: {group}"
    return Figure(
        title=f"Distance from the golden run, {words}, by step ({whose})",
        metric=metric,
        relative=False,
        place={"group": group},
        y_title=words,
        y_scale="log",
        curves=curves,
    )


def _curve(track: Track) -> Curve | None:
    points = []
    for step in track.steps:
        values = [v for s in track.by_seed.values() if (v := s.get(step, 0.0)) > 0]
        if step > 0 and values:
            points.append(_point(step, factor(values), len(values)))
    return _drawn(track.label, points)


def _losses(rows: Iterable[TrainRow], variants: Sequence[VariantRecord], steps: set[int]) -> Figure:
    """Of every run by itself, null runs too: a run that fails shows here."""
    curves = []
    here = [row for row in rows if row.step in steps and row.loss is not None]
    for name in dict.fromkeys(v.name for v in variants):
        own = [row for row in here if row.variant == name]
        points = []
        for step in sorted({row.step for row in own}):
            values = [row.loss for row in own if row.step == step and row.loss is not None]
            points.append(_point(step, interval(values), len(values)))
        curve = _drawn(name, points)
        curves += [curve] if curve else []
    return Figure(
        title="Loss, by step",
        metric="loss",
        relative=False,
        y_title="loss",
        y_scale="log",
        curves=tuple(curves),
    )


def _drawn(label: str, points: Sequence[Point]) -> Curve | None:
    return Curve(label=label, role="kernel", kernel=label, points=tuple(points)) if points else None


def _point(step: int, mean: Mean, seeds: int) -> Point:
    middle, low, high = mean
    return Point(x=float(step), label=str(step), mean=middle, low=low, high=high, seeds=seeds)
