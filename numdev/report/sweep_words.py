"""The first sentences of a sweep's report: each curve in words, from its first point to its last.

Ratios are taken seed by seed, and their geometric mean is given. A change whose interval holds 1 is
called no clear change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numdev.report import DeviationRow
from numdev.report.curves import Estimate, Grid, Line, placed, words
from numdev.report.statistics import factor, interval

SENTENCES = 12
"""More than these are not read; the others are in the report's figures."""


def sentences(curves: Sequence[Line], grid: Grid, baseline: str) -> tuple[str, ...]:
    """One for each curve of the first metric, `WHERE LABEL: what it does`."""
    metric = grid.request.y[0]
    kernels = [
        line
        for line in curves
        if line.metric == metric and (line.row.role == "kernel" or line.label == baseline)
    ]
    kernels.sort(key=lambda line: line.label == baseline)
    said = [f"{_name(line)}: {_trend(line, grid, baseline)}" for line in kernels]
    more = len(said) - SENTENCES
    return (*said[:SENTENCES], *([f"and {more} curves more: see the figures"] if more > 0 else ()))


def notes(rows: Sequence[DeviationRow]) -> tuple[str, ...]:
    """Who could not be measured, in which format, and why; each reason once."""
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for row in rows:
        if row.status != "ok":
            # A reason that names the format is the same reason in all of them.
            reason = (row.reason or "no reason given").replace(f" {row.format}", " it")
            key = (row.kernel, row.status, reason)
            found.setdefault(key, {})[row.format] = None
    sampled = max((row.rows_measured or 0 for row in rows), default=0)
    some = (
        f"At most {sampled} query rows of each head were measured, drawn anew for every seed: "
        "maxima are lower bounds, and the intervals over seeds have the sampling in them.",
    )
    return (
        *(some if sampled else ()),
        *(
            f"{kernel} {status} in {', '.join(formats)}: {reason}"
            for (kernel, status, reason), formats in found.items()
        ),
    )


def _name(line: Line) -> str:
    where = ", ".join(placed(dict(line.place)))
    return f"{line.label} ({where})" if where else line.label


def _trend(line: Line, grid: Grid, baseline: str) -> str:
    what = words(line.metric)
    measured = [(called, e) for called, e in line.at.values() if e.by_seed]
    if not measured:
        return "not measured"
    if line.constant or len(measured) == 1:
        called, only = measured[0]
        at = f" at {_at(called, grid)}" if called else f", whatever the {grid.axis.title}"
        return f"{what} {_number(only)}{at}{''.join(_beside(line, [(called, only)], baseline))}"
    if grid.axis.scale == "category":
        ends = sorted(measured, key=lambda point: _mean(point[1]))
        (low, least), (high, most) = ends[0], ends[-1]
        said = f"{what} least in {low} ({_number(least)}), largest in {high} ({_number(most)})"
        return said + "".join(_beside(line, [ends[0], ends[-1]], baseline))
    ends = [measured[0], measured[-1]]
    (start, first), (end, last) = ends
    said = f"{what} {_change(first, last)} from {_at(start, grid)} ({_number(first)}) to "
    said += f"{end} ({_number(last)})"
    return said + "".join(_beside(line, ends, baseline))


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


def _beside(line: Line, ends: Sequence[tuple[str, Estimate]], baseline: str) -> Iterator[str]:
    """The ratio to the baseline at the first and the last point."""
    if line.label == baseline:
        return
    ratios = [(called, factor(list(e.ratios.values()))) for called, e in ends if e.ratios]
    if not ratios:
        return
    yield f"; {_times(ratios[0][1])}"
    if ratios[0][0]:
        yield f" {baseline}'s at {ratios[0][0]}"
    else:
        yield f" {baseline}'s"
    if len(ratios) > 1:
        yield f", {_times(ratios[-1][1])} at {ratios[-1][0]}"


def _at(called: str, grid: Grid) -> str:
    return called if grid.x == "format" else f"{grid.axis.title} {called}"


def _mean(estimate: Estimate) -> float:
    return interval(list(estimate.by_seed.values()))[0]


def _number(estimate: Estimate) -> str:
    return f"{_mean(estimate):.2g}"


def _times(ratio: tuple[float, float | None, float | None]) -> str:
    mean, low, high = ratio
    if low is None or high is None:
        return f"{_plain(mean)} x"
    return f"{_plain(mean)} x [{_plain(low)} to {_plain(high)}]"


def _plain(value: float) -> str:
    return f"{value:.2f}" if 0.1 <= abs(value) < 100 else f"{value:.2g}"
