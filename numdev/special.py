"""What is special about a row that errs: how it differs from its head's usual rows, in words.

A property stands out when it lies from the median of the usual rows by at least
- three of their standard deviations, taken from the median absolute deviation (1.4826 MAD), and
- a step that is worth mentioning, whatever the spread: `STEPS`.
Lengths and masses are compared by their base-2 logarithms. Of a normal property some 0.3 % of rows
stand out by chance. With fewer than LEAST usual rows nothing is usual, and only ties are named,
since scores are seldom equal by chance. That V has one sign among tied keys is said in any case:
together they make rounding errors of P one-sided.

Pure functions of report rows; how they are measured is said in `numdev.worst`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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


def sentence(row: WorstRow, typical: Sequence[WorstRow]) -> str:
    """How much the row errs, and what stands out beside `typical` rows of its head."""
    said = list(_of_key(row, typical) if _is_key(row) else _of_query(row, typical))
    if row.rows >= AN_END and row.row in (0, row.rows - 1):
        said.append(f"it is the {'last' if row.row else 'first'} {_kind(row)}")
    few = f" (with {len(typical)} rows to compare it with)" if len(typical) < LEAST else ""
    return f"{_name(row)} {_errs(row)}: {'; '.join(said) or NOTHING + few}."


def stands_out(row: WorstRow, typical: Sequence[WorstRow], name: str) -> int:
    """1 where a property is above what is usual, -1 where it is below, 0 where it is usual."""
    value = _value(row, name)
    usual = [x for x in (_value(t, name) for t in typical) if x is not None]
    if value is None or (len(usual) < LEAST and name != "tied"):
        return 0
    middle = median(usual) if len(usual) >= LEAST else 1.0
    spread = median(abs(x - middle) for x in usual) if len(usual) >= LEAST else 0.0
    away = value - middle
    far = abs(away) >= max(DEVIATIONS * spread, STEPS[name])
    return int(math.copysign(1, away)) if far else 0


def _value(row: WorstRow, name: str) -> float | None:
    value: float | None = getattr(row, name)
    if value is None or name not in LOGARITHMIC:
        return value
    return math.log2(max(value, 2.0**-60))


def _of_query(row: WorstRow, typical: Sequence[WorstRow]) -> Iterator[str]:
    if row.sees == 0:
        yield "it sees no key"
        return
    out = {name: stands_out(row, typical, name) for name in STEPS}
    usual = _Usual(typical, "row")
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
            f"({row.one_sign:.2f}; {usual('one_sign')})"
        )
    in_sinks = out["first_key"] or out["sink"]
    if out["first_key"]:
        yield f"key 0 has P = {row.first_key:.2g} ({usual('first_key')})"
    if out["sink"]:
        yield f"the sink has P = {row.sink:.2g} ({usual('sink')})"
    if out["max_probability"] and not tied and not in_sinks:
        yield f"its largest P is {largest:.2g} ({usual('max_probability')})"
    elif out["entropy"] and not tied and not in_sinks:
        yield f"its entropy is {row.entropy:.3g} nats ({usual('entropy')})"
    if out["lse"]:
        yield f"its log-sum-exp is {row.lse:.4g} ({usual('lse')})"
    yield from _terms(row, out["cancellation"], usual)
    if out["sees"]:
        yield f"it sees {counted(row.sees, 'key')} ({usual('sees')})"


def _of_key(row: WorstRow, typical: Sequence[WorstRow]) -> Iterator[str]:
    out = {name: stands_out(row, typical, name) for name in STEPS}
    usual = _Usual(typical, "key")
    if row.sees == 0:
        yield "no query sees it"
        return
    if out["mass"]:
        yield (
            f"it receives P = {row.mass:.3g} in all, 90 % of it from "
            f"{counted(row.carriers, 'query')} ({usual('mass')} from {usual.value('carriers')})"
        )
    elif out["carriers"]:
        yield (
            f"90 % of its probability comes from {counted(row.carriers, 'query')} "
            f"({usual('carriers')})"
        )
    if out["max_probability"]:
        yield f"its largest P is {row.max_probability:.2g} ({usual('max_probability')})"
    yield from _terms(row, out["cancellation"], usual)
    if out["sees"]:
        yield f"{counted(row.sees, 'query')} see it ({usual('sees')})"


def _terms(row: WorstRow, out: int, usual: _Usual) -> Iterator[str]:
    """Only cancellation is a hazard; that nothing cancels is none."""
    if out < 0:
        yield f"its terms cancel to {row.cancellation:.2g} of their size ({usual('cancellation')})"


class _Usual:
    """What is usual of a property, in words: `median row 0.02`."""

    def __init__(self, typical: Sequence[WorstRow], kind: str) -> None:
        self.typical, self.kind = typical, kind

    def __call__(self, name: str) -> str:
        return f"median {self.kind} {self.value(name)}"

    def value(self, name: str) -> str:
        values = [getattr(t, name) for t in self.typical]
        return f"{median(x for x in values if x is not None):.3g}"


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
