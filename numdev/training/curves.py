"""From the rows of a training run to its figures: curves by step, a mean and a range over seeds.

Variants that re-round at random are one curve, over seeds and variants together. Distances are of
all weights. Step 0 has no place on a logarithmic axis and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from numdev.report import Axis, Curve, Figure, Point, Tick
from numdev.training.report import DistanceRow, TrainRow, VariantRecord

Value = tuple[str, int, float]
"""Variant, step and what was measured."""
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


def label(variant: VariantRecord) -> str:
    """What its curve is called."""
    return "re-rounded at random" if variant.role == "null_rounding" else variant.name


def axis_of(steps: Sequence[int]) -> Axis:
    """Steps on a logarithmic axis, with the recorded ones of 1, 2, 5, 10, ... named."""
    shown = [step for step in steps if step > 0]
    ends = (shown[0], shown[-1])
    named = [s for s in shown if s in ends or str(s).rstrip("0") in ("1", "2", "5")]
    ticks = tuple(Tick(x=float(step), label=str(step)) for step in named)
    return Axis(name="step", title="step", scale="log", ticks=ticks)


def figures(
    variants: Sequence[VariantRecord],
    rows: Sequence[TrainRow],
    distances: Sequence[DistanceRow],
) -> tuple[Figure, ...]:
    """Every figure that has something to show."""
    whole = [d for d in distances if d.group == "all" and d.of == "weights"]
    made = []
    for names, found in ((OF_ROWS, rows), (OF_DISTANCES, whole)):
        for metric, title, y_title in names:
            values = list(_values(found, metric))
            made.append(_figure(variants, values, metric, title, y_title))
    return tuple(figure for figure in made if figure.curves)


def _values(rows: Iterable[TrainRow | DistanceRow], metric: str) -> Iterable[Value]:
    for row in rows:
        value = getattr(row, metric)
        if value is not None and row.step > 0:
            yield row.variant, row.step, value


def _figure(
    variants: Sequence[VariantRecord],
    values: Sequence[Value],
    metric: str,
    title: str,
    y_title: str,
) -> Figure:
    labels = {v.name: label(v) for v in variants}
    curves = []
    for name in dict.fromkeys(labels.values()):
        of_it = [(step, x) for variant, step, x in values if labels[variant] == name]
        role = next(v.role for v in variants if label(v) == name)
        if any(x > 0 for _, x in of_it):
            curves.append(
                Curve(
                    label=name,
                    role="baseline" if role == "golden" else "kernel",
                    kernel=next(v.kernel for v in variants if label(v) == name),
                    points=tuple(_points(of_it)),
                )
            )
    return Figure(
        title=title,
        metric=metric,
        relative=False,
        y_title=y_title,
        y_scale="log",
        curves=tuple(curves),
    )


def _points(of_it: Sequence[tuple[int, float]]) -> Iterable[Point]:
    for step in sorted({step for step, _ in of_it}):
        at = [x for s, x in of_it if s == step]
        several = len(at) > 1
        yield Point(
            x=float(step),
            label=f"step {step}",
            mean=mean(at),
            low=min(at) if several else None,
            high=max(at) if several else None,
            seeds=len(at),
        )


def mean(values: Sequence[float]) -> float:
    """The geometric mean; the plain one where there are zeros."""
    if all(x > 0 for x in values):
        return math.exp(math.fsum(map(math.log, values)) / len(values))
    return math.fsum(values) / len(values)
