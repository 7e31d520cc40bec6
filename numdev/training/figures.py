"""Figures by step: of a training run its losses and distances, of its bounds how distances compare.

In a training run's, runs that re-round at random are one curve, and a point is a mean and a range
over seeds and variants; in those of bounds it is a geometric mean over seeds with its interval.
Step 0 and a distance of 0 have no place on a logarithmic axis and are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
Lines = Mapping[str, Mapping[int, Sequence[float]]]
"""Of every label, step to the values of all seeds."""


def label_of(v: VariantRecord) -> str:
    """What a variant is called in curves and sentences."""
    return "re-rounded at random" if v.role == "null_rounding" else v.name


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
    who: dict[str, dict[str, str]] = {}
    for v in variants:
        role = "baseline" if v.role == "golden" else "kernel"
        who.setdefault(label_of(v), {"role": role, "kernel": v.kernel})
    labels = {v.name: label_of(v) for v in variants}
    whole = [d for d in distances if d.group == "all" and d.of == "weights"]
    made = []
    tables: Any = [*((rows, m) for m in OF_ROWS), *((whole, m) for m in OF_DISTANCES)]
    for table, (metric, title, y_title) in tables:
        found = ((labels[r.variant], r.step, getattr(r, metric)) for r in table)
        lines = {k: of for k, of in _lines(who, found).items() if any(map(any, of.values()))}
        curves = (
            curve.model_copy(update=who[curve.label]) for curve in _curves(lines, _range, "step {}")
        )
        made.append(_figure(title, metric, y_title, curves))
    return tuple(figure for figure in made if figure.curves)


def of_bounds(
    tracks: Sequence[Track], rows: Sequence[TrainRow], variants: Sequence[VariantRecord], axis: Axis
) -> tuple[Figure, ...]:
    """For every group and metric the distances by step, of all weights flash over low precision
    too; and the losses of all runs."""
    distances = [t for t in tracks if t.of == "weights"]
    made = []
    for group in dict.fromkeys(t.group for t in distances):
        whose = "all weights" if group == "all" else f"weights: {group}"
        here, place = [t for t in distances if t.group == group], {"group": group}
        for metric, words in OF_BOUNDS.items():
            title = f"Distance from the golden run, {words}, by step ({whose})"
            lines = {t.label: _by_step(t) for t in here if t.metric == metric}
            made.append(_figure(title, metric, words, _curves(lines), place=place))
        if group == "all":
            title = "Distance of flash over that of low precision, by step (all weights)"
            curves = _curves(_ratios([t for t in here if t.metric == "mean_abs"]))
            words, more = "ratio of mean |difference|", {"relative": True, "place": place}
            made.append(_figure(title, "mean_abs", words, curves, **more))
    steps = {int(tick.x) for tick in axis.ticks}
    found = ((row.variant, row.step, row.loss) for row in rows if row.step in steps)
    losses = _lines([v.name for v in variants], found)
    made.append(_figure("Loss, by step", "loss", "loss", _curves(losses, interval)))
    return tuple(figure for figure in made if figure.curves)


def _lines(labels: Iterable[str], values: Iterable[tuple[str, int, float | None]]) -> Lines:
    """Values by label and step; without step 0."""
    lines: dict[str, dict[int, list[float]]] = {label: {} for label in labels}
    for label, step, value in values:
        if value is not None and step > 0 and label in lines:
            lines[label].setdefault(step, []).append(value)
    return {label: dict(sorted(of.items())) for label, of in lines.items()}


def _by_step(track: Track) -> dict[int, list[float]]:
    """The distances of each seed that are not 0."""
    seeds = track.by_seed.values()
    return {s: [v for of in seeds if (v := of.get(s, 0.0)) > 0] for s in track.steps if s > 0}


def _ratios(tracks: Sequence[Track]) -> dict[str, dict[int, list[float]]]:
    """Flash over low precision, whole and in attention alone, step by step; without zeros."""
    flash = [t for t in tracks if t.role == "flash"]
    others = [t for t in tracks if t.role in ("low_precision", "attention_precision")]
    lines = {}
    for a, b in itertools.product(flash, others):
        values = {s: list(ratios(a, b, (s,)).values()) for s in a.steps if s > 0}
        positive = {s: v for s, v in values.items() if min(v, default=0.0) > 0}
        lines[f"{a.label} over {b.label}"] = positive
    return lines


def _curves(
    lines: Lines, middle: Callable[[Sequence[float]], Mean] = factor, label: str = "{}"
) -> Iterator[Curve]:
    """A curve of each line that has a value; `middle` makes a mean and two ends of values."""
    for name, steps in lines.items():
        points = []
        for step, values in steps.items():
            if values:
                mean, low, high = middle(values)
                place: Any = {"x": float(step), "label": label.format(step), "seeds": len(values)}
                points.append(Point(**place, mean=mean, low=low, high=high))
        if points:
            yield Curve(label=name, role="kernel", kernel=name, points=tuple(points))


def _range(at: Sequence[float]) -> Mean:
    return mean(at), *((min(at), max(at)) if len(at) > 1 else (None, None))


def _figure(title: str, metric: str, y_title: str, curves: Iterable[Curve], **more: Any) -> Figure:
    fields: dict[str, Any] = {"relative": False, "y_scale": "log", **more}
    return Figure(title=title, metric=metric, y_title=y_title, curves=tuple(curves), **fields)
