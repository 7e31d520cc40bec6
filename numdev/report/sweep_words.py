"""The first sentences of a sweep's report: each curve in words, from its first point to its last.

Ratios are taken seed by seed, and their geometric mean is given. A change whose interval holds 1 is
called no clear change.
"""

from __future__ import annotations

from collections.abc import Sequence

from numdev.report import DeviationRow
from numdev.report.curves import Estimate, Grid, Line, placed, words
from numdev.report.statistics import Mean, factor, interval

SENTENCES = 12
"""More than these are not read; the others are in the report's figures."""


def sentences(curves: Sequence[Line], grid: Grid, baseline: str) -> tuple[str, ...]:
    """One for each curve of the first metric, `WHERE LABEL: what it does`."""
    kernels = [
        line
        for line in curves
        if line.metric == grid.request.y[0]
        and (line.row.role == "kernel" or line.label == baseline)
    ]
    kernels.sort(key=lambda line: line.label == baseline)
    text = []
    for line in kernels:
        where = ", ".join(placed(dict(line.place)))
        name = f"{line.label} ({where})" if where else line.label
        text.append(f"{name}: {_trend(line, grid, baseline)}")
    more = len(text) - SENTENCES
    return (*text[:SENTENCES], *([f"and {more} curves more: see the figures"] if more > 0 else ()))


def notes(rows: Sequence[DeviationRow]) -> tuple[str, ...]:
    """Who could not be measured, in which format, and why; each reason once."""
    formats: dict[tuple[str, str, str], dict[str, None]] = {}
    for row in rows:
        if row.status != "ok":
            # A reason that names the format is the same reason in all of them.
            reason = (row.reason or "no reason given").replace(f" {row.format}", " it")
            formats.setdefault((row.kernel, row.status, reason), {})[row.format] = None
    sampled = max((row.rows_measured or 0 for row in rows), default=0)
    text = [
        f"{kernel} {status} in {', '.join(own)}: {reason}"
        for (kernel, status, reason), own in formats.items()
    ]
    if sampled:
        text.insert(
            0,
            f"At most {sampled} query rows of each head were measured, drawn anew for every seed: "
            "maxima are lower bounds, and the intervals over seeds have the sampling in them.",
        )
    return tuple(text)


def _trend(line: Line, grid: Grid, baseline: str) -> str:
    what = words(line.metric)
    measured = [(called, estimate) for called, estimate in line.at.values() if estimate.by_seed]
    if not measured:
        return "not measured"

    def at(called: str) -> str:
        return called if grid.x == "format" else f"{grid.axis.title} {called}"

    if line.constant or len(measured) == 1:
        ends = measured[:1]
        called, only = ends[0]
        where = f" at {at(called)}" if called else f", whatever the {grid.axis.title}"
        text = f"{what} {_mean(only):.2g}{where}"
    elif grid.axis.scale == "category":
        measured.sort(key=lambda point: _mean(point[1]))
        ends = [measured[0], measured[-1]]
        least, most = (f"{called} ({_mean(estimate):.2g})" for called, estimate in ends)
        text = f"{what} least in {least}, largest in {most}"
    else:
        ends = [measured[0], measured[-1]]
        (start, first), (end, last) = ends
        text = f"{what} {_change(first, last)} from {at(start)} ({_mean(first):.2g}) to "
        text += f"{end} ({_mean(last):.2g})"
    ratios = [(called, factor(list(e.ratios.values()))) for called, e in ends if e.ratios]
    if line.label == baseline or not ratios:
        return text
    (called, ratio), *rest = ratios
    text += f"; {_times(ratio)} {baseline}'s" + (f" at {called}" if called else "")
    return text + "".join(f", {_times(ratio)} at {called}" for called, ratio in rest)


def _change(first: Estimate, last: Estimate) -> str:
    """How a curve goes, in a word and a factor."""
    shared = [s for s, v in first.by_seed.items() if v > 0 and last.by_seed.get(s, 0) > 0]
    if not shared:
        return "goes"
    grown = factor([last.by_seed[s] / first.by_seed[s] for s in shared])
    if all(first.by_seed[s] == last.by_seed[s] for s in shared):
        return "is the same in every seed"
    if grown[1] is not None and grown[2] is not None and grown[1] <= 1 <= grown[2]:
        return f"shows no clear change ({_times(grown)})"
    if grown[0] >= 1:
        return f"grows {_times(grown)}"
    return f"falls {_times(factor([first.by_seed[s] / last.by_seed[s] for s in shared]))}"


def _mean(estimate: Estimate) -> float:
    return interval(list(estimate.by_seed.values()))[0]


def _times(ratio: Mean) -> str:
    mean, *ends = (_plain(x) for x in ratio if x is not None)
    return f"{mean} x [{' to '.join(ends)}]" if ends else f"{mean} x"


def _plain(value: float) -> str:
    return f"{value:.2f}" if 0.1 <= abs(value) < 100 else f"{value:.2g}"
