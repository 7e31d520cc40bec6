"""Figures by step: of a training run its losses and distances, of its bounds how distances compare.

In a training run's, runs that re-round at random are one curve, over seeds and variants together,
and a point is a mean and a range. In those of bounds a point is a geometric mean over seeds with
its interval. Step 0 and a distance of 0 have no place on a logarithmic axis and are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from numdev.report import Axis, Curve, Figure, Point, Tick
from numdev.report.statistics import Mean, factor, interval
from numdev.training.bounds.saturation import Track, ratios
from numdev.training.report import DistanceRow, TrainRow, VariantRecord

OF_ROWS = (
    ("loss", "Loss", "loss of the step's batch"),
    ("grad_norm", "Norm of the gradient, before clipping", "norm"),
    ("max_logit", "Largest attention score", "largest |scaled score|"),
    ("spectral_norm", "Largest spectral norm of a head's W_Q", "spectral norm"),
)
OF_DISTANCES = (
    ("rel", "Distance of all weights, relative to the golden run's", "‖a − b‖ / ‖b‖"),
    ("w1", "Wasserstein distance of all weights from the golden run's", "W1"),
)
OF_BOUNDS = {
    "mean_abs": "paired mean |difference|",
    "max_abs": "max |difference|",
    "w1": "Wasserstein distance W1",
}


def axis_of(steps: Sequence[int], *, all_named: bool = False) -> Axis:
    """Recorded steps on a logarithmic axis: all that are given named, or those of 1, 2, 5, 10, ...
    and the ends."""
    shown = [step for step in steps if step > 0]
    named = [
        step for step in shown
        if all_named or step in (shown[0], shown[-1]) or str(step).rstrip("0") in ("1", "2", "5")
    ]  # fmt: skip
    ticks = tuple(Tick(x=float(step), label=str(step)) for step in named)
    return Axis(name="step", title="step", scale="log", ticks=ticks)


def mean(values: Sequence[float]) -> float:
    """The geometric mean; the plain one where there are zeros."""
    if all(x > 0 for x in values):
        return math.exp(math.fsum(map(math.log, values)) / len(values))
    return math.fsum(values) / len(values)


def of_run(
    variants: Sequence[VariantRecord], rows: Sequence[TrainRow], distances: Sequence[DistanceRow]
) -> tuple[Figure, ...]:
    """Every figure of a training run that has something to show."""
    labels = {
        v.name: "re-rounded at random" if v.role == "null_rounding" else v.name for v in variants
    }
    first = {labels[v.name]: v for v in reversed(variants)}
    whole = [d for d in distances if d.group == "all" and d.of == "weights"]
    made = []
    tables: list[tuple[tuple[str, str, str], Sequence[TrainRow | DistanceRow]]] = [
        *((named, rows) for named in OF_ROWS),
        *((named, whole) for named in OF_DISTANCES),
    ]
    for (metric, title, y_title), table in tables:
        lines: dict[str, dict[int, list[float]]] = {label: {} for label in reversed(first)}
        for row in table:
            value = getattr(row, metric)
            if value is not None and row.step > 0:
                lines[labels[row.variant]].setdefault(row.step, []).append(value)
        shown = {
            k: dict(sorted(of.items())) for k, of in lines.items() if any(map(any, of.values()))
        }
        curves = [
            curve.model_copy(
                update={
                    "role": "baseline" if first[curve.label].role == "golden" else "kernel",
                    "kernel": first[curve.label].kernel,
                }
            )
            for curve in _curves(shown, _range, "step {}")
        ]
        made.append(_figure(title, metric, y_title, curves))
    return tuple(figure for figure in made if figure.curves)


def of_bounds(
    tracks: Sequence[Track],
    rows: Sequence[TrainRow],
    variants: Sequence[VariantRecord],
    along: Axis,
) -> tuple[Figure, ...]:
    """For every group and metric the distances by step, of all weights flash over low precision
    too; and the losses of all runs."""
    distances = [t for t in tracks if t.of == "weights"]
    made = []
    for group in dict.fromkeys(t.group for t in distances):
        whose = "all weights" if group == "all" else f"weights: {group}"
        here = [t for t in distances if t.group == group]
        for metric, words in OF_BOUNDS.items():
            title = f"Distance from the golden run, {words}, by step ({whose})"
            lines = {t.label: _by_step(t) for t in here if t.metric == metric}
            made.append(_figure(title, metric, words, _curves(lines), place={"group": group}))
        if group == "all":
            title = "Distance of flash over that of low precision, by step (all weights)"
            paired = [t for t in here if t.metric == "mean_abs"]
            more = {"relative": True, "place": {"group": group}}
            words = "ratio of mean |difference|"
            made.append(_figure(title, "mean_abs", words, _curves(_ratios(paired)), **more))
    steps = {int(tick.x) for tick in along.ticks}
    losses: dict[str, dict[int, list[float]]] = {v.name: {} for v in variants}
    for row in rows:
        if row.step in steps and row.loss is not None and row.variant in losses:
            losses[row.variant].setdefault(row.step, []).append(row.loss)
    curves = _curves({name: dict(sorted(of.items())) for name, of in losses.items()}, interval)
    made.append(_figure("Loss, by step", "loss", "loss", curves))
    return tuple(figure for figure in made if figure.curves)


def _by_step(track: Track) -> dict[int, list[float]]:
    """The distances of each seed that are not 0."""
    seeds = track.by_seed.values()
    return {s: [v for of in seeds if (v := of.get(s, 0.0)) > 0] for s in track.steps if s > 0}


def _ratios(tracks: Sequence[Track]) -> dict[str, dict[int, list[float]]]:
    """Flash over low precision, whole and in attention alone, step by step; without zeros."""
    flash = [t for t in tracks if t.role == "flash"]
    others = [t for t in tracks if t.role in ("low_precision", "attention_precision")]
    found = {}
    for a, b in itertools.product(flash, others):
        values = {s: list(ratios(a, b, (s,)).values()) for s in a.steps if s > 0}
        found[f"{a.label} over {b.label}"] = {
            s: v for s, v in values.items() if min(v, default=0.0) > 0
        }
    return found


def _curves(
    lines: Mapping[str, Mapping[int, Sequence[float]]], middle: Any = factor, label: str = "{}"
) -> list[Curve]:
    """A curve of each line that has a value; `middle` makes a mean and two ends of values."""
    found = []
    for name, steps in lines.items():
        points = []
        for step, values in steps.items():
            if values:
                ends = dict(zip(("mean", "low", "high"), middle(values), strict=True))
                at = label.format(step)
                points.append(Point(x=float(step), label=at, seeds=len(values), **ends))
        if points:
            found.append(Curve(label=name, role="kernel", kernel=name, points=tuple(points)))
    return found


def _range(at: Sequence[float]) -> Mean:
    return mean(at), *((min(at), max(at)) if len(at) > 1 else (None, None))


def _figure(title: str, metric: str, y_title: str, curves: Iterable[Curve], **more: Any) -> Figure:
    fields: dict[str, Any] = {"relative": False, "y_scale": "log", **more}
    return Figure(title=title, metric=metric, y_title=y_title, curves=tuple(curves), **fields)
