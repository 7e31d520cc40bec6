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
from functools import lru_cache
from operator import attrgetter

from numdev.errors import MeasurementError
from numdev.gate.cells import Older
from numdev.gate.columns import column, largest
from numdev.gate.comparable import APART, MUST, differences
from numdev.gate.held import Held, Lacking
from numdev.gate.rules import ERRORS, ESTIMATED, MAXIMA, Threshold, parts_of, value_of
from numdev.report import DeviationRow

SEEDS = 3
Place = tuple[str, str, int | None, int, str | None, int | None]
QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""97.5 % points of Student's t, from 1 degree of freedom on."""
NORMAL = 1.959964


def quantile(freedom: int) -> float:
    """The 97.5 % point of Student's t, to 1e-3; beyond the table by its expansion in 1 / freedom
    (M. Abramowitz and I. Stegun, 26.7.5)."""
    if freedom <= len(QUANTILES):
        return QUANTILES[freedom - 1]
    z, v = NORMAL, freedom
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    return z + (z**3 + z) / (4 * v) + second + third


def allowance(old: Sequence[float], new: int) -> float:
    """How far the mean of `new` more seeds may lie from that of the old ones, by chance."""
    if len(old) < SEEDS:
        return 0.0
    spread = quantile(len(old) - 1) * statistics.stdev(old)
    return spread * math.sqrt(1 / new + 1 / len(old))


def changes(
    threshold: Threshold, rows: Sequence[DeviationRow], older: Sequence[DeviationRow]
) -> tuple[list[Held], list[Lacking]]:
    """Each cell of a kernel held to the same one in the older report; and what is in one alone, or
    lacks the number there. All rows share kernel, options, format and tensor."""
    held: list[Held] = []
    lacking: list[Lacking] = []
    before = _by_place(older)
    for place, mine in _by_place(rows).items():
        theirs = before.pop(place, [])
        found = _change(threshold, mine, theirs)
        if isinstance(found, str):
            lacking += [(row, found) for row in mine]
        else:
            held.append(found)
    gone = [row for theirs in before.values() for row in theirs]
    return held, [*lacking, *((row, GONE) for row in gone)]


GONE = "measured in the old report, and not in this one"
NEW = "not measured in the old report"


def refuse_other(new: Older, old: Older) -> None:
    """Raises MeasurementError unless both are about the same inputs. The seeds may be others."""
    apart = differences(old, new, [key for key in MUST if key not in APART])
    if apart:
        what = ", ".join(f"{d.key} ({d.a} in the older, {d.b} now)" for d in apart)
        raise MeasurementError(
            f"the older report is about something else: the two differ in {what}",
            hint="give --against a report of the same request",
        )


def unmoved(
    threshold: Threshold, rows: Sequence[DeviationRow], older: Sequence[DeviationRow]
) -> Held | None:
    """What stands beside the limit where every cell, of one seed, is the same one in both reports,
    in the same order, has its number, whole, and none is beyond; None of any others."""
    if threshold.equals is not None or len(rows) < (threshold.heads or 1):
        return None
    places = list(map(_PLACE, rows))
    if places != list(map(_PLACE, older)) or len(set(places)) < len(places):
        return None
    sides = [column(threshold.metric, side) for side in (rows, older)]
    if any(side is None or None in side for side in sides):
        return None
    if any(map(_SAMPLED, (*rows, *older))) and not _whole(threshold.metric):
        return None
    ratios = [_over(abs(new), abs(old)) for new, old in zip(*sides, strict=True)]
    if math.isnan(sum(ratios)) or not threshold.excess(max(ratios)) < 1 - CLOSE:
        return None
    at = largest(ratios, median=threshold.heads is not None)
    found = _change(threshold, rows[at : at + 1], older[at : at + 1])
    return found if isinstance(found, Held) else None


CLOSE = 1e-9
"""So near to the limit a quotient is left to `changes`, which rounds otherwise."""
_PLACE = attrgetter("case", "module", "layer", "call", "phase", "head")
_SAMPLED = attrgetter("sampled")


def _over(new: float, old: float) -> float:
    return new / old if old else (math.inf if new else 1.0)


def _by_place(rows: Sequence[DeviationRow]) -> dict[Place, list[DeviationRow]]:
    """Rows of all seeds, by where they were measured."""
    found: dict[Place, list[DeviationRow]] = {}
    for place, row in zip(map(_PLACE, rows), rows, strict=True):
        found.setdefault(place, []).append(row)
    return found


def _change(
    threshold: Threshold, mine: Sequence[DeviationRow], theirs: Sequence[DeviationRow]
) -> Held | str:
    """A cell's change; or why there is none."""
    if not theirs:
        return NEW
    if any(row.sampled for row in (*mine, *theirs)) and not _whole(threshold.metric):
        return f"{threshold.named} of sampled rows has no interval"
    new, old = (_sizes(threshold.metric, side) for side in (mine, theirs))
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
    excused = False
    if excess > 1:
        room = allowance([x / unit for x in old], len(new))
        if _error(threshold.metric):
            room += 2 * before * _noise(theirs)
        excused = abs(now - before) <= room
    return Held(worst, threshold, value, 1.0 if excused else excess, excused=excused)


def _sizes(metric: str, rows: Sequence[DeviationRow]) -> list[float] | str:
    """Of every seed; or why one has none."""
    found: list[float] = []
    for row in rows:
        value, why = value_of(row, metric)
        if value is None:
            return why or "not measured"
        found.append(abs(float(value)))
    return found


@lru_cache(maxsize=256)
def _whole(metric: str) -> bool:
    return (ESTIMATED | MAXIMA).isdisjoint(parts_of(metric))


def _error(metric: str) -> bool:
    """Whether it grows as the error does."""
    return metric in (ESTIMATED | MAXIMA | ERRORS) - {"precision_rms", "fa_rule"}


def _noise(rows: Sequence[DeviationRow]) -> float:
    """What repeated runs differ by, as a share of the error; at most all of it."""
    shares = [row.noise / row.rms for row in rows if row.noise and row.rms]
    return min(1.0, max(shares, default=0.0))
