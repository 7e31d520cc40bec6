"""A diagnosis over training: the curves of its numbers by step, and which of them moves first."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from numdev.diagnose import guilt
from numdev.diagnose.guilt import used_delta
from numdev.diagnose.report import HeadRow, Ranked
from numdev.report import Axis, Curve, Figure, Point, Tick

Value = Callable[[HeadRow], float | None]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number of a head that is followed over training."""

    name: str
    title: str
    y_title: str
    of: Value
    limit: float | None
    """From where on it counts, as in `numdev.diagnose.guilt`; None where only its ratio has a
    limit."""
    what: str
    """In the middle of a sentence."""


def _run(head: HeadRow) -> float | None:
    used = used_delta(head)
    return None if used is None else used.run


def _bias(head: HeadRow) -> float | None:
    return None if head.out.outward is None else abs(head.out.outward)


METRICS = (
    Metric(
        name="tied",
        title="Rows with tied maxima",
        y_title="share of rows",
        of=lambda head: head.tied,
        limit=guilt.TIED,
        what="tied maxima",
    ),
    Metric(
        name="out_bias",
        title="|Bias of O|",
        y_title="ulp, along the sign of O",
        of=_bias,
        limit=guilt.BIASED,
        what="the bias of O",
    ),
    Metric(
        name="delta_run",
        title="Running sum of delta's error",
        y_title="max |sum| / (rms √rows)",
        of=_run,
        limit=guilt.RUN,
        what="the running sum of delta's error",
    ),
    Metric(
        name="dw_q_predicted",
        title="dW_Q error that delta's makes",
        y_title="|error| / |dW_Q|",
        of=guilt.moved,
        limit=guilt.MOVED,
        what="the error of dW_Q",
    ),
    Metric(
        name="spectral_norm",
        title="Spectral norm of a head's W_Q",
        y_title="spectral norm",
        of=lambda head: head.spectral_norm,
        limit=None,
        what="",
    ),
    Metric(
        name="spectral_ratio",
        title="Spectral norm over the layer's median",
        y_title="ratio",
        of=lambda head: head.spectral_ratio,
        limit=guilt.LOUDER,
        what="the spectral norm beside its layer's",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Onset:
    """When a number of the head that is followed passed its limit."""

    what: str
    step: int | None
    """The first step from which on it never fell below again; None where it is below at the end."""


def axis_of(heads: Sequence[HeadRow]) -> Axis | None:
    """The steps of the series; None where there are fewer than two."""
    steps = sorted({head.step for head in heads if head.step is not None})
    if len(steps) < 2:
        return None
    ticks = tuple(Tick(x=float(step), label=str(step)) for step in steps)
    return Axis(name="step", title="step", scale="linear", ticks=ticks)


def figures(heads: Sequence[HeadRow], first: Ranked) -> tuple[Figure, ...]:
    """Each number by step: of the head `first`, of the worst head where that is another, and the
    median."""
    made = []
    for metric in METRICS:
        by_step = _by_step(heads, metric.of)
        tracked = {step: x for step, x in _followed(heads, first, metric.of) if x is not None}
        if len(by_step) < 2:
            continue
        worst = {step: max(xs) for step, xs in by_step.items()}
        curves = [
            _curve(_label(first), "kernel", tracked),
            _curve("worst head", "kernel", {} if worst == tracked else worst),
            _curve("median head", "floor", {s: statistics.median(x) for s, x in by_step.items()}),
        ]
        made.append(
            Figure(
                title=metric.title,
                metric=metric.name,
                relative=False,
                y_title=metric.y_title,
                y_scale="linear",
                curves=tuple(curve for curve in curves if curve.points),
            )
        )
    return tuple(made)


def onsets(heads: Sequence[HeadRow], first: Ranked) -> tuple[Onset, ...]:
    """For each number with a limit that is known over the series, when the head passed it."""
    found = []
    for metric in METRICS:
        values = [(s, x) for s, x in _followed(heads, first, metric.of) if x is not None]
        if metric.limit is None or len(values) < 2:
            continue
        step = None
        for at, value in reversed(values):
            if value < metric.limit:
                break
            step = at
        found.append(Onset(what=metric.what, step=step))
    return tuple(found)


def _followed(
    heads: Sequence[HeadRow], first: Ranked, of: Value
) -> Iterator[tuple[int, float | None]]:
    """One head's values, by step."""
    same = [h for h in heads if (h.case, h.head) == (first.case, first.head)]
    for head in sorted((h for h in same if h.step is not None), key=lambda h: h.step or 0):
        yield head.step or 0, of(head)


def _by_step(heads: Sequence[HeadRow], of: Value) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for head in sorted((h for h in heads if h.step is not None), key=lambda h: h.step or 0):
        value = of(head)
        if value is not None:
            found.setdefault(head.step or 0, []).append(value)
    return found


def _curve(label: str, role: str, values: Mapping[int, float]) -> Curve:
    points = tuple(
        Point(x=float(step), label=f"step {step}", mean=x, low=None, high=None, seeds=1)
        for step, x in sorted(values.items())
    )
    return Curve.model_validate({"label": label, "role": role, "kernel": "", "points": points})


def _label(first: Ranked) -> str:
    where = first.module or first.case if first.layer is None else f"layer {first.layer}"
    return f"{where}, head {first.head}"
