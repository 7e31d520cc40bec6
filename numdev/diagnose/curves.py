"""A diagnosis over training: its numbers by step, and at which step a head's pass their limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from numdev.diagnose import heads as limits
from numdev.diagnose.report import HeadRow, Ranked
from numdev.report import Axis, Curve, Figure, Point, Tick


class Metric(NamedTuple):
    """A number of a head that is followed over training, by its size."""

    title: str
    y_title: str
    path: str
    limit: float | None = None  # from where on it counts; None where only its ratio has a limit


METRICS: Mapping[str, Metric] = {
    "tied": Metric("Rows with tied maxima", "share of rows", "tied", limits.TIED),
    "out_bias": Metric("|Bias of O|", "ulp, along the sign of O", "out.outward", limits.BIASED),
    "delta_run": Metric(
        "Running sum of delta's error", "max |sum| / (rms √rows)", "used.run", limits.RUN
    ),
    "dw_q_predicted": Metric(
        "dW_Q error that delta's makes", "|error| / |dW_Q|", "moved", limits.MOVED
    ),
    "spectral_norm": Metric("Spectral norm of a head's W_Q", "spectral norm", "spectral_norm"),
    "spectral_ratio": Metric(
        "Spectral norm over the layer's median", "ratio", "spectral_ratio", limits.LOUDER
    ),
}


def by_step(heads: Sequence[HeadRow]) -> pd.DataFrame:
    """A column for each of METRICS, NaN where it is not known; by case, head and step."""
    index = ["case", "head", "step"]
    rows = [
        (h.case, h.head, h.step, *(h.at(metric.path) for metric in METRICS.values()))
        for h in heads
        if h.step is not None
    ]
    frame = pd.DataFrame(rows, columns=[*index, *METRICS]).set_index(index)
    return frame.astype(float).abs().sort_index()


def axis_of(heads: Sequence[HeadRow]) -> Axis | None:
    """The steps of the series; None where there are fewer than two."""
    steps = sorted({head.step for head in heads if head.step is not None})
    ticks = tuple(Tick(x=float(step), label=str(step)) for step in steps)
    return Axis(name="step", title="step", scale="linear", ticks=ticks) if len(ticks) > 1 else None


def figures(heads: Sequence[HeadRow], first: Ranked) -> tuple[Figure, ...]:
    """Each number by step: of the head `first`, of the worst head where that is another, and the
    median."""
    drawn = []
    for name, values in by_step(heads).items():
        metric, grouped = METRICS[str(name)], values.dropna().groupby(level="step")
        own, worst = values.loc[first.case, first.head].dropna(), grouped.max()
        lines = {first.brief: own, "worst head": worst, "median head": grouped.median()}
        if worst.equals(own):
            del lines["worst head"]
        curves = tuple(_curve(label, line) for label, line in lines.items() if len(line))
        if len(worst) > 1:
            figure = Figure(
                title=metric.title, metric=str(name), relative=False, y_title=metric.y_title,
                y_scale="linear", curves=curves,
            )  # fmt: skip
            drawn.append(figure)
    return tuple(drawn)


def _curve(label: str, values: pd.Series) -> Curve:
    points = tuple(
        Point(x=float(step), label=f"step {step}", mean=x, low=None, high=None, seeds=1)
        for step, x in zip(values.index, values, strict=True)
    )
    role = "floor" if label == "median head" else "kernel"
    return Curve.model_validate({"label": label, "role": role, "kernel": "", "points": points})


def onsets(heads: Sequence[HeadRow], first: Ranked) -> dict[str, int | None]:
    """For each number with a limit that is known over the series, by its title: the first step from
    which on the head's never fell below it again; None where it is below at the end."""
    steps: dict[str, int | None] = {}
    frame = pd.DataFrame(by_step(heads).xs((first.case, first.head)))
    for name, metric in METRICS.items():
        values = frame[name].dropna()
        if metric.limit is not None and len(values) >= 2:
            beyond = (values >= metric.limit)[::-1].cummin()  # from the end: still beyond?
            steps[metric.title] = int(beyond[beyond].index[-1]) if beyond.any() else None
    return steps
