"""The first sentences of a sweep's report: one for each curve, from its first point to its last.

Ratios are taken seed by seed; their geometric mean and its interval are shown. If that interval
contains 1, the sentence says that there is no clear change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numdev.metrics.statistics import Mean, factor, interval
from numdev.report import DeviationRow
from numdev.report.curves import Estimate, Grid, Line, placed, words

SENTENCES = 12  # more are not read; the other curves are in the figures


def sentences(curves: Sequence[Line], grid: Grid, baseline: str) -> tuple[str, ...]:
    """`LABEL (PLACE): TREND` for each curve of the first metric, the baseline last."""
    drawn = [line for line in curves if line.metric == grid.request.y[0]]
    drawn = [line for line in drawn if line.row.role == "kernel" or line.label == baseline]
    text = []
    for line in sorted(drawn, key=lambda line: line.label == baseline):
        where = f" ({', '.join(placed(dict(line.place)))})" if line.place else ""
        text.append(f"{line.label}{where}: {words(line.metric)} {_trend(line, grid, baseline)}")
    more = len(text) - SENTENCES
    return (*text[:SENTENCES], *([f"and {more} curves more: see the figures"] if more > 0 else ()))


def notes(rows: Sequence[DeviationRow]) -> Iterator[str]:
    """What a sample of rows means for the numbers; which kernels could not be measured, in which
    formats and why, each reason once."""
    if sampled := max((row.rows_measured or 0 for row in rows), default=0):
        yield (
            f"At most {sampled} query rows of each head were measured, drawn anew for every seed: "
            "maxima are lower bounds, and the intervals over seeds have the sampling in them."
        )
    formats: dict[tuple[str, str, str], dict[str, None]] = {}
    for row in rows:
        if row.status != "ok":
            # A reason that names the format is the same reason in all of them.
            reason = (row.reason or "no reason given").replace(f" {row.format}", " it")
            formats.setdefault((row.kernel, row.status, reason), {})[row.format] = None
    for (kernel, status, reason), own in formats.items():
        yield f"{kernel} {status} in {', '.join(own)}: {reason}"


def _trend(line: Line, grid: Grid, baseline: str) -> str:
    """How a curve changes from its first point to its last, and its ratio to the baseline there.
    On an axis without an order: its smallest and its largest mean."""
    points = [
        (place, interval(list(estimate.by_seed.values()))[0], estimate)
        for place, estimate in line.at.values()
        if estimate.by_seed
    ]
    if not points:
        return "not measured"
    ordered = grid.axis.scale != "category"
    if not ordered:
        points.sort(key=lambda point: point[1])
    ends = points if len(points) == 1 else [points[0], points[-1]]
    text = " to ".join(f"{mean:.2g}" + (f" at {place}" if place else "") for place, mean, _ in ends)
    if len(ends) > 1 and ordered:
        text = f"{_change(ends[0][2], ends[1][2])} with {grid.axis.title} ({text})"
    ratios = [_times(factor(list(e.ratios.values()))) for *_, e in ends if e.ratios]
    if line.label == baseline or not ratios:
        return text
    return f"{text}; over {baseline} {', '.join(ratios)}"


def _change(first: Estimate, last: Estimate) -> str:
    """The direction of a curve, and its factor, taken seed by seed."""
    pairs = [(value, last.by_seed.get(seed, 0)) for seed, value in first.by_seed.items()]
    grown = [b / a for a, b in pairs if a > 0 and b > 0]
    if not grown:
        return "goes"
    mean, low, high = ratio = factor(grown)
    if low is not None and high is not None and low <= 1 <= high:
        return f"shows no clear change {_times(ratio)}"
    return (
        f"grows {_times(ratio)}" if mean >= 1 else f"falls {_times(factor([1 / x for x in grown]))}"
    )


def _times(ratio: Mean) -> str:
    mean, *ends = (f"{x:.2f}" if 0.1 <= x < 100 else f"{x:.2g}" for x in ratio if x is not None)
    return f"{mean} x [{' to '.join(ends)}]" if ends else f"{mean} x"
