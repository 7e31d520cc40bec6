"""Figures by step: of a training run its losses and distances, of its bounds how distances compare.

In a training run's, runs that re-round at random are one curve, and a point is a mean and a range
over seeds and variants; in those of bounds it is a geometric mean over seeds with its interval.
Step 0 and a distance of 0 have no place on a logarithmic axis and are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from numdev.metrics.statistics import Mean, factor, interval
from numdev.report import Axis, Curve, Figure, Point, Tick
from numdev.training.bounds.report import BoundsVariant
from numdev.training.bounds.saturation import curves, ratios
from numdev.training.report import DistanceRow, TrainReport, TrainRow, VariantRecord

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
Values = Iterable[tuple[str, int, float | None]]
"""Label, step and the value of one seed."""


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

    def middle(at: Sequence[float]) -> Mean:
        return mean(at), *((min(at), max(at)) if len(at) > 1 else (None, None))

    kernels: dict[str, str] = {}
    for v in variants:
        kernels.setdefault(label_of(v), v.kernel)
    golden = {v.name for v in variants if v.role == "golden"}
    labels = {v.name: label_of(v) for v in variants}
    whole = [d for d in distances if d.group == "all" and d.of == "weights"]
    tables: Any = [*((rows, m) for m in OF_ROWS), *((whole, m) for m in OF_DISTANCES)]
    figures = (
        _figure(
            *(title, metric, y_title, kernels),
            ((labels[row.variant], row.step, getattr(row, metric)) for row in table),
            *(middle, "step {}", golden),
        )
        for table, (metric, title, y_title) in tables
    )
    return tuple(figure for figure in figures if figure.curves)


def of_bounds(
    weights: pd.DataFrame, kinds: Sequence[BoundsVariant], run: TrainReport, axis: Axis
) -> tuple[Figure, ...]:
    """For every group and metric the distances by step, of all weights flash over low precision
    too; and the losses of all runs. `weights`: of `bounds.saturation.distances_of`."""
    labels = {kind.label: kind.label for kind in kinds}
    made = []
    for group in weights.group.unique():
        whose, place = "all weights" if group == "all" else f"weights: {group}", {"group": group}
        here = weights[weights.group == group]
        for metric, words in OF_BOUNDS.items():
            title = f"Distance from the golden run, {words}, by step ({whose})"
            values = _of_table(curves(here[here.metric == metric]))
            made.append(_figure(title, metric, words, labels, values, factor, place=place))
        if group == "all":
            title = "Distance of flash over that of low precision, by step (all weights)"
            over = list(_ratios(curves(here[here.metric == "mean_abs"]), kinds))
            pairs = {label: label for label, _, _ in over}
            fields: dict[str, Any] = {"relative": True, "place": place}
            words = "ratio of mean |difference|"
            made.append(_figure(title, "mean_abs", words, pairs, over, factor, **fields))
    steps = {int(tick.x) for tick in axis.ticks}
    names = {v.name: v.name for v in run.variants}
    losses = ((row.variant, row.step, row.loss) for row in run.rows if row.step in steps)
    made.append(_figure("Loss, by step", "loss", "loss", names, losses, interval))
    return tuple(figure for figure in made if figure.curves)


def _of_table(table: pd.DataFrame) -> Values:
    """The distances that are not 0."""
    for label in table:
        positive = table[label][table[label] > 0]
        for step, value in zip(positive.index.get_level_values("step"), positive, strict=True):
            yield str(label), step, value


def _ratios(table: pd.DataFrame, kinds: Sequence[BoundsVariant]) -> Values:
    """Flash over low precision, whole and in attention alone, step by step; without zeros."""
    here = [kind for kind in kinds if kind.label in table]
    for a in (kind.label for kind in here if kind.role == "flash"):
        for b in (k.label for k in here if k.role in ("low_precision", "attention_precision")):
            for step in table.index.unique("step"):
                for ratio in ratios(table[a], table[b], (step,)).values():
                    if ratio > 0:
                        yield f"{a} over {b}", step, ratio


def _figure(
    title: str,
    metric: str,
    y_title: str,
    kernels: Mapping[str, str],
    values: Values,
    middle: Callable[[Sequence[float]], Mean],
    tick: str = "{}",
    golden: Iterable[str] = (),
    **more: Any,
) -> Figure:
    """A curve of every label of `kernels` that has a value other than 0; `middle` makes a mean and
    two ends of the values at a step."""
    lines: dict[str, dict[int, list[float]]] = {label: {} for label in kernels}
    for label, step, value in values:
        if value is not None and step > 0:
            lines[label].setdefault(int(step), []).append(value)
    made = []
    for label, steps in lines.items():
        if any(map(any, steps.values())):
            points = []
            for step, at in sorted(steps.items()):
                mean, low, high = middle(at)
                place: Any = {"x": float(step), "label": tick.format(step), "seeds": len(at)}
                points.append(Point(**place, mean=mean, low=low, high=high))
            who: Any = {"role": "baseline" if label in golden else "kernel"}
            made.append(Curve(label=label, kernel=kernels[label], points=tuple(points), **who))
    fields: dict[str, Any] = {"relative": False, "y_scale": "log", **more}
    return Figure(title=title, metric=metric, y_title=y_title, curves=tuple(made), **fields)
