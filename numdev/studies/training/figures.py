"""Figures by step, of a training run and of its bounds. Step 0 and a distance of 0 have
no place on a logarithmic axis and are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import fmean, geometric_mean
from types import MappingProxyType

from numdev.metrics.statistics import Mean
from numdev.report import Axis, Curve, Figure, Point, Role, Tick
from numdev.studies.training.report import DistanceRow, TrainRow, VariantRecord

Values = Iterable[tuple[str, int, float | None]]  # label, step and the value of one seed


def curve_name(v: VariantRecord) -> str:
    """Returns the name of a variant's curve: its own name, or `re-rounded at random`,
    with ` at 2 floors` behind it for a dose other than 1. Variants that re-round by the
    same dose share it."""
    if v.role != "null_rounding":
        return v.name
    dose = v.times or 1.0
    return "re-rounded at random" + ("" if dose == 1.0 else f" at {dose:g} floors")


def step_axis(steps: Sequence[int], *, all_named: bool = False) -> Axis:
    """Returns recorded steps as a logarithmic axis, without step 0. Its ticks are the
    first step above 0, the last one, and recorded steps that are 1, 2 or 5 times a power
    of ten; with `all_named` all steps. `steps`: ascending, at least one above 0."""
    shown = [step for step in steps if step > 0]
    usual = {step for step in shown if str(step).rstrip("0") in ("1", "2", "5")}
    usual |= {shown[0], shown[-1]} if shown else set()
    named = [step for step in shown if all_named or step in usual]
    ticks = tuple(Tick(x=float(step), label=str(step)) for step in named)
    return Axis(name="step", title="step", scale="log", ticks=ticks)


def geometric_or_plain_mean(values: Sequence[float]) -> float:
    """Returns the geometric mean; the arithmetic one where a value is 0 or less.
    `values`: at least one."""
    return (geometric_mean if min(values) > 0 else fmean)(values)


def run_figures(
    variants: Sequence[VariantRecord],
    rows: Sequence[TrainRow],
    distances: Sequence[DistanceRow],
) -> tuple[Figure, ...]:
    """Returns the figures of a training run: the losses, then the distances of all
    weights from the golden run's. A figure without a curve is left out. A curve is of the
    variants of one label (`curve_name`): geometric means (arithmetic where a value is not
    positive) and ranges, over seeds and variants. `rows`, `distances`: of these variants
    alone."""

    def middle(at: Sequence[float]) -> Mean:
        """Returns the mean of the values at a step, the least and the largest; for a
        single value the latter two are None."""
        return geometric_or_plain_mean(at), *(
            (min(at), max(at)) if len(at) > 1 else (None, None)
        )

    labels = {v.name: curve_name(v) for v in variants}
    names = dict.fromkeys(labels.values())
    golden = next((v.name for v in variants if v.role == "golden"), "")
    losses = ((labels[row.variant], row.step, row.loss) for row in rows)
    sizes = ((labels[d.variant], d.step, d.rel) for d in distances if d.of == "weights")
    title = "Distance of all weights, relative to the golden run's"
    both = (
        figure_by_step(
            "Loss", "loss", "loss of the step's batch", names, losses, middle, golden
        ),
        figure_by_step(title, "rel", "‖a − b‖ / ‖b‖", names, sizes, middle, golden),
    )
    return tuple(one for one in both if one.curves)


def figure_by_step(
    title: str,
    metric: str,
    y_title: str,
    labels: Iterable[str],
    values: Values,
    middle: Callable[[Sequence[float]], Mean],
    golden: str = "",
    soft: Collection[str] = (),
    *,
    relative: bool = False,
    place: Mapping[str, str] = MappingProxyType({}),
) -> Figure:
    """Returns a figure with a curve for every label that has a value other than 0 after
    step 0, in the order of `labels`. `values`: (label, step, value of one seed), of which
    None and step 0 are left out. `middle` gives the mean and the ends of the values at a
    step. A point's note is `2 of 3` where some of its values are None, else empty.
    `golden`: the label of the baseline; `soft`: labels whose curves are drawn behind the
    others; `relative`, `place`: passed on to Figure, `place` being what the figure is of,
    by name. Raises KeyError where a value that is not left out has a label that is not in
    `labels`."""
    lines: dict[str, dict[int, list[float]]] = {label: {} for label in labels}
    every: Counter[tuple[str, int]] = Counter()
    for label, step, value in values:
        every[label, int(step)] += 1
        if value is not None and step > 0:
            lines[label].setdefault(int(step), []).append(value)
    curves = []
    for label, steps in lines.items():
        if any(map(any, steps.values())):
            points = []
            for step, at in sorted(steps.items()):
                mean, low, high = middle(at)
                total = every[label, step]
                points.append(
                    Point(
                        x=float(step),
                        label=f"step {step}",
                        note=f"{len(at)} of {total}" if len(at) < total else "",
                        mean=mean,
                        low=low,
                        high=high,
                    )
                )
            role: Role = "floor" if label in soft else "kernel"
            role = "baseline" if label == golden else role
            curves.append(Curve(label=label, points=tuple(points), role=role))
    return Figure(
        title=title,
        metric=metric,
        relative=relative,
        place=dict(place),
        y_title=y_title,
        y_scale="log",
        curves=tuple(curves),
    )
