"""One threshold on the heads of one tensor of one kernel in one format.

Where rows were sampled, an estimate passes if the upper end of its 95 % interval is within the
limit and fails if the lower end is beyond; between them it is undecided, and so not judged. A
maximum over a sample is a lower bound: beyond its limit it fails, and else it says nothing.

Most rows are far from every limit, and reports have many: what can be seen of a whole column of
numbers at once, that all are there and within, is not asked row by row (`_at_a_glance`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter

from numdev.gate.cells import Around
from numdev.gate.change import changes, unmoved
from numdev.gate.columns import column, largest
from numdev.gate.held import Held, Lacking
from numdev.gate.rules import ESTIMATED, MAXIMA, Threshold, interval_of, parts_of, value_of
from numdev.report import DeviationRow
from numdev.report.statistics import holm


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What came of it."""

    judged: int = 0
    offending: Sequence[Held] = ()
    """The worst first."""
    shown: Held | None = None
    """What stands beside the limit: the worst, of those that offend if any do; or the median."""
    unsure: Sequence[Lacking] = ()
    """Whose interval contains the limit."""
    lacking: Sequence[Lacking] = ()
    excused: int = 0


def hold(
    threshold: Threshold,
    rows: Sequence[DeviationRow],
    around: Around,
    older: Sequence[DeviationRow] = (),
) -> Holding:
    """Hold rows that share kernel, options, format and tensor to a threshold; `older` are those of
    an older report, for one on a change."""
    seen = _at_a_glance(threshold, rows, around, older)
    if seen is not None:
        return seen
    held: list[Held] = []
    lacking: list[Lacking] = []
    if threshold.over == "before":
        held, lacking = changes(threshold, rows, older)
    else:
        for row in rows:
            found = _held(threshold, row, around)
            if isinstance(found, Held):
                held.append(found)
            else:
                lacking.append((row, found))
    held.sort(key=lambda h: -h.excess)
    if threshold.heads is not None and held and len(held) < threshold.heads:
        few = f"heads: {len(held)}, and it takes {threshold.heads}"
        lacking, held = [*lacking, *((h.row, few) for h in held)], []
    held, unsure = _by_interval(threshold, held)
    beyond = _beyond(threshold, held)
    offending = [h for h, is_beyond in zip(held, beyond, strict=True) if is_beyond]
    # Beside the limit stands the worst of what offends; a large bias that is not certain does not.
    shown = next(iter(offending or held), None)
    if threshold.heads is not None and held:
        shown = _median(held)
    return Holding(
        judged=len(held),
        offending=offending,
        shown=shown,
        unsure=unsure,
        lacking=lacking,
        excused=sum(h.excused for h in held),
    )


def _at_a_glance(
    threshold: Threshold,
    rows: Sequence[DeviationRow],
    around: Around,
    older: Sequence[DeviationRow],
) -> Holding | None:
    """The same for rows that all have the number, whole, and of which none is beyond the limit;
    None of any others."""
    if threshold.over == "before":
        change = unmoved(threshold, rows, older)
        return None if change is None else Holding(judged=len(rows), shown=change)
    if threshold.over is not None or (threshold.certain and not _testable(threshold, rows)):
        return None
    if around.sampled and any(map(attrgetter("sampled"), rows)):
        return None
    numbers = column(threshold.metric, rows)
    if numbers is None:
        return None
    if threshold.absent:
        whole = numbers.count(None) == len(rows)
        return (
            Holding(judged=len(rows), shown=Held(rows[0], threshold, None, 0.0)) if whole else None
        )
    if None in numbers or len(rows) < (threshold.heads or 0) or math.isnan(sum(numbers)):
        return None
    if threshold.equals is not None:
        at = 0 if numbers.count(threshold.equals) == len(rows) else None
    else:
        at = largest(numbers, median=threshold.heads is not None)
    if at is None or (excess := threshold.excess(numbers[at])) > 1:
        return None
    return Holding(judged=len(rows), shown=Held(rows[at], threshold, numbers[at], excess))


def _testable(threshold: Threshold, rows: Sequence[DeviationRow]) -> bool:
    """Whether all rows have what `certain` asks for."""
    test = threshold.certain
    if test is None:
        return True
    p = column(test.p, rows)
    enough = all((row.sequences or 0) >= test.sequences for row in rows)
    return enough and p is not None and None not in p


def _held(threshold: Threshold, row: DeviationRow, around: Around) -> Held | str:
    """A row held to the first limit whose number it has; else why it has none.

    The next limit is for a number that means nothing, and says why; one that was not measured at
    all is not excused by it.
    """
    test = threshold.certain
    if test is not None:
        if (row.sequences or 0) < test.sequences:
            return f"independent sequences: {row.sequences or 0}, and it takes {test.sequences}"
        if value_of(row, test.p)[0] is None:
            return row.nulls.get(test.p, "not measured")
    why = "not measured"
    for limit in threshold.limits:
        value, why, meant = around.read(row, limit)
        if value is not None or limit.absent:
            held = Held(row, limit, value, limit.excess(value))
            return _of_sample(held) if row.sampled else held
        if not meant:
            break
    return why


def _of_sample(held: Held) -> Held | str:
    """What is known of sampled rows alone, with its interval; or why that says nothing."""
    metric, parts = held.limit.metric, parts_of(held.limit.metric)
    if held.limit.over is not None or len(parts) > 1:
        whole = MAXIMA.isdisjoint(parts) and ESTIMATED.isdisjoint(parts)
        return held if whole else f"{held.limit.named} of sampled rows has no interval"
    if metric in MAXIMA:
        # flash-attention's rule compares two maxima: beyond it, the other may be too small.
        proven = held.excess > 1 and metric != "fa_rule"
        return held if proven else "a maximum over sampled rows bounds nothing"
    if metric not in ESTIMATED:
        return held
    interval = interval_of(held.row, metric)
    if interval is None:
        return f"{metric} of sampled rows has no interval"
    return replace(held, interval=interval)


def _by_interval(threshold: Threshold, held: Sequence[Held]) -> tuple[list[Held], list[Lacking]]:
    """What is decided, and what is not, with the reason: estimates whose interval contains the
    limit. For a median all of them, if the median of the lower ends is within and that of the upper
    ends beyond."""
    if threshold.heads is None or not held:
        unsure = [h.ends[0] <= 1 < h.ends[1] for h in held]
        open_ = [(h.row, _contains(h, h)) for h in compress(held, unsure)]
        return [h for h, u in zip(held, unsure, strict=True) if not u], open_
    lowest, highest = (_median(sorted(held, key=lambda h: -h.ends[end])) for end in (0, 1))
    if not lowest.ends[0] <= 1 < highest.ends[1]:
        return list(held), []
    return [], [(h.row, _contains(lowest, highest, "the median ")) for h in held]


def _contains(lower: Held, upper: Held, whose: str = "") -> str:
    low, high = (h.interval or (0.0, 0.0) for h in (lower, upper))
    what = f"the interval of {whose}{lower.limit.metric}, {low[0]:.3g} to {high[1]:.3g},"
    return f"{what} contains the limit {lower.limit.bound:g}: audit more rows"


def _beyond(threshold: Threshold, held: Sequence[Held]) -> list[bool]:
    """Which rows offend; where the limit is for the median, none does as long as that is within."""
    if threshold.certain:
        return _certain(threshold, held)
    within = threshold.heads is not None and bool(held) and _median(held).excess <= 1
    return [h.excess > 1 and not within for h in held]


def _median(held: Sequence[Held]) -> Held:
    """Of rows in order, the worst first; of two in the middle the one that is less bad."""
    return held[len(held) // 2]


def _certain(threshold: Threshold, held: Sequence[Held]) -> list[bool]:
    """Which rows are beyond the limit and significantly so, over all of them together."""
    assert threshold.certain is not None
    p = [float(value_of(h.row, threshold.certain.p)[0] or 0.0) for h in held]
    rejected = holm(p, threshold.certain.alpha)
    return [h.excess > 1 and sure for h, sure in zip(held, rejected, strict=True)]
