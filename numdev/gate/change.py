"""A metric held to its own past: the same cells in an older report.

A cell's number is the mean over its seeds, and the change is the ratio of the two means. The mean
moves from one set of seeds to another without anything having changed, and from run to run where a
kernel sums in no fixed order. So a change counts only beyond

    t s sqrt(1 / n + 1 / m) + 2 noise

with s the standard deviation over the m seeds of the old report, n the seeds of the new one, and t
the 97.5 % point of Student's t with m - 1 degrees of freedom: the prediction interval for the mean
of n further seeds (G. Hahn and W. Meeker, "Statistical Intervals", 1991, section 4.8). `noise` is
what repeated runs on the same inputs differ by, in the same share of the mean as of rms (a norm
moves by no more: ||o' - r| - |o - r|| <= |o' - o|), once for either report. Spread and noise are
the old report's alone, so that a new one in which a seed goes wrong, or that is noisier, does not
excuse itself. From fewer than SEEDS seeds a spread is not known, and nothing is excused by it.

A cell that is in one of the reports alone is lacking, whichever it is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from operator import attrgetter

from scipy.special import stdtrit

from numdev.errors import MeasurementError
from numdev.gate.comparable import APART, MUST, Measured, differences
from numdev.gate.rows import NOT_MEASURED, grouped
from numdev.gate.rules import ERRORS, ESTIMATED, MAXIMA, Threshold, parts_of, value_of
from numdev.gate.verdict import Held, Lacking
from numdev.report import DeviationRow

SEEDS = 3
GONE = "measured in the old report, and not in this one"
NEW = "not measured in the old report"


def refuse_other(new: Measured, old: Measured) -> None:
    """Raises MeasurementError unless both are about the same inputs. The seeds may be others."""
    apart = differences(old, new, [key for key in MUST if key not in APART])
    if apart:
        what = ", ".join(f"{d.key} ({d.a} in the older, {d.b} now)" for d in apart)
        raise MeasurementError(
            f"the older report is about something else: the two differ in {what}",
            hint="give --against a report of the same request",
        )


def allowance(old: Sequence[float], new: int) -> float:
    """How far the mean of `new` more seeds may lie from that of the old ones, by chance."""
    if len(old) < SEEDS:
        return 0.0
    spread = float(stdtrit(len(old) - 1, 0.975)) * statistics.stdev(old)
    return spread * math.sqrt(1 / new + 1 / len(old))


def changes(
    threshold: Threshold, rows: Sequence[DeviationRow], older: Sequence[DeviationRow]
) -> tuple[list[Held], list[Lacking]]:
    """Each cell of a kernel held to the same one in the older report; and what is in one alone, or
    lacks the number there. All rows share kernel, options, format and tensor."""
    held: list[Held] = []
    lacking: list[Lacking] = []
    place = attrgetter("case", "module", "layer", "call", "phase", "head")
    now, before = grouped(rows, place), grouped(older, place)
    for key, mine in now.items():
        change = _change(threshold, mine, before.pop(key, []))
        if isinstance(change, str):
            lacking += [(row, change) for row in mine]
        else:
            held.append(change)
    gone = [row for theirs in before.values() for row in theirs]
    return held, [*lacking, *((row, GONE) for row in gone)]


def _change(
    threshold: Threshold, mine: Sequence[DeviationRow], theirs: Sequence[DeviationRow]
) -> Held | str:
    """A cell's change; or why there is none."""
    metric = threshold.metric
    if not theirs:
        return NEW
    sampled = any(row.sampled for row in (*mine, *theirs))
    if sampled and not (ESTIMATED | MAXIMA).isdisjoint(parts_of(metric)):
        return f"{threshold.named} of sampled rows has no interval"
    new, old = (_sizes(metric, side) for side in (mine, theirs))
    if isinstance(new, str):
        return new
    if isinstance(old, str):
        return f"in the old report: {old}"
    # In units of the largest, so that no sum or quotient overflows.
    unit = max(*new, *old) or 1.0
    now, before = (statistics.fmean([x / unit for x in side]) for side in (new, old))
    worst = mine[new.index(max(new))]
    if now and not before:
        value: float | str = f"{now * unit:.3g}, from 0"
        excess = math.inf
    else:
        value = now / before if before else 1.0
        excess = threshold.excess(value)
    if excess > 1:
        room = allowance([x / unit for x in old], len(new))
        if metric in (ESTIMATED | MAXIMA | ERRORS) - {"precision_rms", "fa_rule"}:
            # It grows as the error does, so noise is a share of it: at most all.
            shares = [row.noise / row.rms for row in theirs if row.noise and row.rms]
            room += 2 * before * min(1.0, max(shares, default=0.0))
        if abs(now - before) <= room:
            return Held(worst, threshold, value, 1.0, excused=True)
    return Held(worst, threshold, value, excess)


def _sizes(metric: str, rows: Sequence[DeviationRow]) -> list[float] | str:
    """Of every seed; or why one has none."""
    read = [value_of(row, metric) for row in rows]
    why = next((why or NOT_MEASURED for value, why in read if value is None), None)
    return why or [abs(float(value or 0.0)) for value, _ in read]
