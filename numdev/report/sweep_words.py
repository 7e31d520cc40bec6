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
    """One for each curve of the first metric, `LABEL (WHERE): what it does`."""
    drawn = [line for line in curves if line.metric == grid.request.y[0]]
    drawn = [line for line in drawn if line.row.role == "kernel" or line.label == baseline]
    text = []
    for line in sorted(drawn, key=lambda line: line.label == baseline):
        where = f" ({', '.join(placed(dict(line.place)))})" if line.place else ""
        text.append(f"{line.label}{where}: {words(line.metric)} {_trend(line, grid, baseline)}")
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
    first = (
        f"At most {sampled} query rows of each head were measured, drawn anew for every seed: "
        "maxima are lower bounds, and the intervals over seeds have the sampling in them."
    )
    return (
        *([first] if sampled else ()),
        *(f"{kernel} {status} in {', '.join(own)}: {reason}"
          for (kernel, status, reason), own in formats.items()),
    )  # fmt: skip


def _trend(line: Line, grid: Grid, baseline: str) -> str:
    """What a curve does between its ends (its least and its largest, where places have no order),
    and how far it is there from the baseline."""
    measured = [(called, estimate) for called, estimate in line.at.values() if estimate.by_seed]
    if not measured:
        return "not measured"
    ordered = grid.axis.scale != "category"
    if not ordered:
        measured.sort(key=lambda point: interval(list(point[1].by_seed.values()))[0])
    ends = dict([measured[0], measured[-1]])
    means = {called: interval(list(e.by_seed.values()))[0] for called, e in ends.items()}
    numbers = [
        f"{mean:.2g}" + (f" at {called}" if called else "") for called, mean in means.items()
    ]
    text = ", largest ".join(numbers)
    if len(numbers) > 1 and not ordered:
        text = f"least {text}"
    elif len(numbers) > 1:
        change = _change(measured[0][1], measured[-1][1])
        text = f"{change} with {grid.axis.title} ({' to '.join(numbers)})"
    ratios = {called: factor(list(e.ratios.values())) for called, e in ends.items() if e.ratios}
    if line.label == baseline or not ratios:
        return text
    return f"{text}; over {baseline} {', '.join(map(_times, ratios.values()))}"


def _change(first: Estimate, last: Estimate) -> str:
    """How a curve goes, in a word and a factor."""
    pairs = [(v, last.by_seed.get(s, 0)) for s, v in first.by_seed.items()]
    grown = [b / a for a, b in pairs if a > 0 and b > 0]
    if not grown:
        return "goes"
    if set(grown) == {1.0}:
        return "is the same in every seed"
    ratio = factor(grown)
    if ratio[1] is not None and ratio[2] is not None and ratio[1] <= 1 <= ratio[2]:
        return f"shows no clear change {_times(ratio)}"
    if ratio[0] >= 1:
        return f"grows {_times(ratio)}"
    return f"falls {_times(factor([1 / x for x in grown]))}"


def _times(ratio: Mean) -> str:
    mean, *ends = (
        f"{x:.2f}" if 0.1 <= abs(x) < 100 else f"{x:.2g}" for x in ratio if x is not None
    )
    return f"{mean} x [{' to '.join(ends)}]" if ends else f"{mean} x"
