"""A diagnosis over training: the curves of its numbers by step, and which of them moves first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from numdev.diagnose import heads as limits
from numdev.diagnose.heads import moved, used_delta
from numdev.diagnose.report import HeadRow, Ranked
from numdev.report import Axis, Curve, Figure, Point, Tick


class Metric(NamedTuple):
    """A number of a head that is followed over training."""

    title: str
    y_title: str
    of: Callable[[HeadRow], float | None]
    limit: float | None = None  # from where on it counts; None where only its ratio has a limit
    what: str = ""  # in the middle of a sentence


METRICS: Mapping[str, Metric] = {
    "tied": Metric(
        "Rows with tied maxima", "share of rows", lambda h: h.tied, limits.TIED, "tied maxima"
    ),
    "out_bias": Metric(
        "|Bias of O|", "ulp, along the sign of O",
        lambda h: None if h.out.outward is None else abs(h.out.outward),
        limits.BIASED, "the bias of O",
    ),
    "delta_run": Metric(
        "Running sum of delta's error", "max |sum| / (rms √rows)",
        lambda h: getattr(used_delta(h), "run", None),
        limits.RUN, "the running sum of delta's error",
    ),
    "dw_q_predicted": Metric(
        "dW_Q error that delta's makes", "|error| / |dW_Q|", moved,
        limits.MOVED, "the error of dW_Q",
    ),
    "spectral_norm": Metric(
        "Spectral norm of a head's W_Q", "spectral norm", lambda h: h.spectral_norm
    ),
    "spectral_ratio": Metric(
        "Spectral norm over the layer's median", "ratio", lambda h: h.spectral_ratio,
        limits.LOUDER, "the spectral norm beside its layer's",
    ),
}  # fmt: skip


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
    where = first.module or first.case if first.layer is None else f"layer {first.layer}"
    drawn = []
    for name, metric in METRICS.items():
        everywhere, tracked = _by_step(heads, metric), _by_step(_same(heads, first), metric)
        grouped = everywhere.groupby(level="step")
        worst, median = grouped.max(), grouped.median()
        if len(worst) < 2:
            continue
        curves = [
            _curve(f"{where}, head {first.head}", "kernel", tracked),
            *([] if worst.equals(tracked) else [_curve("worst head", "kernel", worst)]),
            _curve("median head", "floor", median),
        ]
        drawn.append(
            Figure(
                title=metric.title, metric=name, relative=False, y_title=metric.y_title,
                y_scale="linear", curves=tuple(curve for curve in curves if curve.points),
            )
        )  # fmt: skip
    return tuple(drawn)


def onsets(heads: Sequence[HeadRow], first: Ranked) -> dict[str, int | None]:
    """For each number with a limit that is known over the series, the first step from which on the
    head's never fell below it again; None where it is below at the end."""
    found: dict[str, int | None] = {}
    for metric in METRICS.values():
        values = _by_step(_same(heads, first), metric)
        if metric.limit is not None and len(values) >= 2:
            beyond = (values >= metric.limit)[::-1].cummin()  # from the end: still beyond?
            found[metric.what] = int(beyond[beyond].index[-1]) if beyond.any() else None
    return found


def _same(heads: Sequence[HeadRow], first: Ranked) -> list[HeadRow]:
    return [head for head in heads if (head.case, head.head) == (first.case, first.head)]


def _by_step(heads: Sequence[HeadRow], metric: Metric) -> pd.Series:
    """What is known of a number, in the order of steps."""
    known = [(h.step, x) for h in heads if h.step is not None and (x := metric.of(h)) is not None]
    index = pd.Index([step for step, _ in known], name="step", dtype=int)
    values = pd.Series([x for _, x in known], index=index, dtype=float)
    return values.sort_index(kind="stable")


def _curve(label: str, role: str, values: pd.Series) -> Curve:
    points = tuple(
        Point(x=float(step), label=f"step {step}", mean=x, low=None, high=None, seeds=1)
        for step, x in zip(values.index, values, strict=True)
    )
    return Curve.model_validate({"label": label, "role": role, "kernel": "", "points": points})
