"""What is special about a row that errs: how it differs from its head's usual rows, in words.

A property stands out when it lies from the median of the usual rows by at least
- three of their standard deviations, taken from the median absolute deviation (1.4826 MAD), and
- a step that is worth mentioning, whatever the spread: `STEPS`.
Lengths and masses are compared by their base-2 logarithms. Of a normal property some 0.3 % of rows
stand out by chance. With fewer than LEAST usual rows nothing is usual, and only ties are named,
since scores are seldom equal by chance. That V has one sign among tied keys is said in any case:
together they make rounding errors of P one-sided.

Pure functions of a report's row and of what is usual beside it (`Usual`); how they are measured is
said in `numdev.metrics.worst_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from numdev.report import WorstRow

LEAST = 8
"""Usual rows it takes to say what is unusual."""
DEVIATIONS = 3 * 1.4826
STEPS = {
    "tied": 1.0,
    "nearly_tied": 1.0,
    "first_key": 0.1,
    "sink": 0.1,
    "max_probability": 0.1,
    "entropy": 0.5,
    "lse": 1.0,
    "one_sign": 0.2,
    "cancellation": 1.0,
    "sees": 1.0,
    "mass": 1.0,
    "carriers": 1.0,
}
"""Nats for lse and entropy; for LOGARITHMIC properties a factor of two."""
LOGARITHMIC = ("cancellation", "sees", "mass", "carriers")
ONE_SIGN = 0.999
AN_END = 32
"""The first and the last of at least so many rows are special places."""
NOTHING = "nothing stands out"
_COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


class Usual:
    """What is usual of a head: how the properties of its usual rows are distributed."""

    def __init__(self, columns: Mapping[str, Sequence[float | None]], rows: int) -> None:
        """`columns` holds properties of WorstRow by name, a value for each of `rows` usual rows;
        None where a row has none."""
        self.rows = rows
        known = {name: [x for x in columns.get(name, ()) if x is not None] for name in STEPS}
        self._medians = {name: median(values) for name, values in known.items() if values}
        self._spans = {
            name: _span([_compared(x, name) for x in values])
            for name, values in known.items()
            if len(values) >= LEAST
        }

    def span(self, name: str) -> tuple[float, float] | None:
        """The median and the median absolute deviation, as compared; None of fewer than LEAST."""
        return self._spans.get(name)

    def value(self, name: str) -> str:
        """The median in words."""
        return f"{self._medians[name]:.3g}"


def sentence(row: WorstRow, usual: Usual) -> str:
    """How much the row errs, and what stands out beside the usual rows of its head."""
    said = list(_of_key(row, usual) if _is_key(row) else _of_query(row, usual))
    if row.rows >= AN_END and row.row in (0, row.rows - 1):
        said.append(f"it is the {'last' if row.row else 'first'} {_kind(row)}")
    few = f" (with {usual.rows} rows to compare it with)" if usual.rows < LEAST else ""
    return f"{_name(row)} {_errs(row)}: {'; '.join(said) or NOTHING + few}."


def stands_out(row: WorstRow, usual: Usual, name: str) -> int:
    """1 where a property is above what is usual, -1 where it is below, 0 where it is usual."""
    value: float | None = getattr(row, name)
    span = usual.span(name) or ((1.0, 0.0) if name == "tied" else None)
    if value is None or span is None:
        return 0
    middle, spread = span
    away = _compared(value, name) - middle
    far = abs(away) >= max(DEVIATIONS * spread, STEPS[name])
    return int(math.copysign(1, away)) if far else 0


def _span(values: Sequence[float]) -> tuple[float, float]:
    middle = median(values)
    return middle, median(abs(x - middle) for x in values)


def _compared(value: float, name: str) -> float:
    return math.log2(max(value, 2.0**-60)) if name in LOGARITHMIC else value


def _of_query(row: WorstRow, usual: Usual) -> Iterator[str]:
    if row.sees == 0:
        yield "it sees no key"
        return
    out = {name: stands_out(row, usual, name) for name in STEPS}
    tied = out["tied"] > 0
    largest = row.max_probability
    if tied:
        each = f", P = {largest:.2g} each"
        yield f"{counted(row.tied, 'key')} share its maximum{each}"
    elif out["nearly_tied"] > 0:
        yield f"{counted(row.nearly_tied, 'key')} are within 0.001 of its maximum"
    one_signed = (row.one_sign or 0.0) >= ONE_SIGN and (row.carriers or 0) > 1
    if one_signed and (out["one_sign"] > 0 or tied or out["nearly_tied"] > 0):
        yield f"V has one sign at the {counted(row.carriers, 'key')} that carry 90 % of it"
    elif out["one_sign"] > 0 and (row.carriers or 0) > 1:
        yield (
            f"V mostly keeps its sign at the {counted(row.carriers, 'key')} that carry 90 % of it "
            f"({row.one_sign:.2f}; median row {usual.value('one_sign')})"
        )
    in_sinks = out["first_key"] or out["sink"]
    if out["first_key"]:
        yield f"key 0 has P = {row.first_key:.2g} (median row {usual.value('first_key')})"
    if out["sink"]:
        yield f"the sink has P = {row.sink:.2g} (median row {usual.value('sink')})"
    if out["max_probability"] and not tied and not in_sinks:
        yield f"its largest P is {largest:.2g} (median row {usual.value('max_probability')})"
    elif out["entropy"] and not tied and not in_sinks:
        yield f"its entropy is {row.entropy:.3g} nats (median row {usual.value('entropy')})"
    if out["lse"]:
        yield f"its log-sum-exp is {row.lse:.4g} (median row {usual.value('lse')})"
    yield from _terms(row, out["cancellation"], usual)
    if out["sees"]:
        yield f"it sees {counted(row.sees, 'key')} (median row {usual.value('sees')})"


def _of_key(row: WorstRow, usual: Usual) -> Iterator[str]:
    out = {name: stands_out(row, usual, name) for name in STEPS}
    if row.sees == 0:
        yield "no query sees it"
        return
    if out["mass"]:
        yield (
            f"it receives P = {row.mass:.3g} in all, 90 % of it from "
            f"{counted(row.carriers, 'query')} "
            f"(median key {usual.value('mass')} from {usual.value('carriers')})"
        )
    elif out["carriers"]:
        yield (
            f"90 % of its probability comes from {counted(row.carriers, 'query')} "
            f"(median key {usual.value('carriers')})"
        )
    if out["max_probability"]:
        largest = row.max_probability
        yield f"its largest P is {largest:.2g} (median key {usual.value('max_probability')})"
    yield from _terms(row, out["cancellation"], usual)
    if out["sees"]:
        yield f"{counted(row.sees, 'query')} see it (median key {usual.value('sees')})"


def _terms(row: WorstRow, out: int, usual: Usual) -> Iterator[str]:
    """Only cancellation is a hazard; that nothing cancels is none."""
    if out < 0:
        yield (
            f"its terms cancel to {row.cancellation:.2g} of their size "
            f"(median {_kind(row)} {usual.value('cancellation')})"
        )


def counted(number: int | None, noun: str) -> str:
    """`two keys`, `17 queries`."""
    n = number or 0
    plural = noun[:-1] + "ies" if noun == "query" else noun + "s"
    return f"{_COUNTS[n] if n < len(_COUNTS) else n} {noun if n == 1 else plural}"


def _name(row: WorstRow) -> str:
    return f"{_kind(row)} {row.row} (of {row.rows}; batch entry {row.batch})"


def _errs(row: WorstRow) -> str:
    if row.nonfinite:
        return f"has {counted(row.nonfinite, 'element')} not finite where the exact result is"
    if row.ratio is None:
        return f"errs by {row.error or 0.0:.2g} where nothing is predicted or added up"
    if row.predicted:
        return f"errs {row.ratio:.3g} x what is predicted for it"
    return f"errs by {row.ratio:.2g} of the size of its terms"


def _kind(row: WorstRow) -> str:
    return "key" if _is_key(row) else "row"


def _is_key(row: WorstRow) -> bool:
    return row.tensor in ("dk", "dv")
