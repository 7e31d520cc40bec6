"""The numbers of a bounds report in words: ratios and their intervals, delays, beside chance."""

from __future__ import annotations

from collections.abc import Sequence

from numdev.training.bounds.report import Comparison, Delay
from numdev.training.bounds.saturation import MERGED


def steps_later(d: Delay) -> str:
    """`12 [9 to 15] steps later`."""
    ends = sorted(abs(end) for end in (d.low, d.high) if end is not None)
    if d.low is not None and d.high is not None and d.low < 0 < d.high:
        return f"{d.steps or 0.0:+.2g} [{d.low:+.2g} to {d.high:+.2g}] steps later"
    known = f" [{ends[0]:.2g} to {ends[1]:.2g}]" if ends else ""
    return f"{abs(d.steps or 0.0):.2g}{known} steps {'earlier' if (d.steps or 0) < 0 else 'later'}"


def chance(c: Comparison) -> str:
    """What may be said of a distance that is not shown to be larger than a null's: an interval that
    reaches far above it shows as little that it is not."""
    return "no larger" if c.high is None or c.high <= MERGED else "not told apart"


def at_least(c: Comparison) -> float:
    """The lower end of its interval, or the ratio itself where there is none."""
    return (c.ratio or 0.0) if c.low is None else c.low


def times(c: Comparison) -> str:
    """`0.31 x [0.22 to 0.44]`."""
    ends = "" if c.low is None or c.high is None else f" [{number(c.low)} to {number(c.high)}]"
    return f"{number(c.ratio)} x{ends}"


def times_less(c: Comparison) -> str:
    """`8,300 x [1,900 to 37,000]`: the inverse of a ratio that is not zero."""
    ends = f" [{number(1 / c.high)} to {number(1 / c.low)}]" if c.low and c.high else ""
    return f"{number(1 / (c.ratio or 1.0))} x{ends}"


def over(known: Sequence[Comparison], seeds: Sequence[int]) -> str:
    """What the intervals are; over fewer seeds where some have no number."""
    counts = [len(c.by_seed) for c in known]
    if max(counts) == 1:
        return "one seed, so no interval"
    of = f" of {len(seeds)}" if max(counts) < len(seeds) else ""
    fewer = f", {min(counts)} for some" if min(counts) < max(counts) else ""
    return f"95 % over {max(counts)}{of} seeds{fewer}"


def number(value: float | None) -> str:
    """Two digits, thousands in groups; in powers of ten what is below 0.001 or from 1e9 on."""
    if value is None:
        return "unknown"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 99.5:
        return f"{value:#.2g}".rstrip(".")
    if 99.5 <= abs(value) < 1e9:
        return f"{float(f'{value:.2g}'):,.0f}"
    return f"{value:.1e}"
