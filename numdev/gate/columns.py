"""One number of many rows at once: most rows are far from every limit, and reports have many."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from numdev.gate.rules import DERIVED, ERRORS, value_of
from numdev.report import DeviationRow

_NOISE = attrgetter("noise")


def column(metric: str, rows: Sequence[DeviationRow]) -> list[Any] | None:
    """The number of every row, None in its place where one has none; None where it takes more than
    a look at each."""
    if metric == "noise_ratio" and not any(noise := list(map(_NOISE, rows))):
        return noise  # of a kernel that gives the same bits each time: 0, whatever the denominator
    if metric in DERIVED:
        return list(map(DERIVED[metric], rows))
    if "/" in metric:
        return [value_of(row, metric)[0] for row in rows]
    numbers = list(map(attrgetter(metric), rows))
    return None if metric in ERRORS and None in numbers else numbers


def largest(numbers: Sequence[float], *, median: bool) -> int:
    """Where the largest magnitude is, the first of equals; or the median, of two in the middle the
    less."""
    if median:
        sizes = list(map(abs, numbers))
        return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)[len(sizes) // 2]
    low, high = min(numbers), max(numbers)
    most = max(high, -low)
    return min(numbers.index(end) for end in (low, high) if abs(end) == most)
