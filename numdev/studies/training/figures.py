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
    """Returns the name of a variant's curve. Runs that re-round at random by one strength
    share one."""
    if v.role != "null_rounding":
        return v.name
    dose = v.times or 1.0
    return "re-rounded at random" + ("" if dose == 1.0 else f" at {dose:g} floors")


def step_axis(steps: Sequence[int], *, all_named: bool = False) -> Axis:
    """Returns recorded steps as a logarithmic axis, without step 0. Its ticks are 1, 2
    and 5 times powers of ten and both ends, or all steps with `all_named`."""
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
    """Returns the figures of a training run: the losses, and the distances of all weights
    from the golden run's, each if there are any: means and ranges over seeds and variants
    of one label."""

    def middle(at: Sequence[float]) -> Mean:
        """Returns the mean and the ends of the values at a step; None for the ends of one
        value."""
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
    """Returns a figure with a curve for every label that has a value other than 0.
    `values`: (label, step, value of one seed), of which step 0 is left out. `middle`
    gives the mean and the ends of the values at a step; a point's note says where some
    are None. `golden`: the label of the baseline; `soft`: labels whose curves are drawn
    behind the others; `place`: what the figure is of, by name."""
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
