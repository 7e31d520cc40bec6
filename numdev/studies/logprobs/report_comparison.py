"""Compares two reports of `numdev logprobs`: which sides' errors moved from A to B.

The error of a sequence in B over that in A is taken for each one. Its logarithm scatters
about 0 where only chance changed it; it moved where Student's t says otherwise, at 1 %
over all numbers (Holm), or where every sequence says so by more than SURELY."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from numdev.errors import UsageError
from numdev.gate.compare_report import About, Compared, Group, Move
from numdev.gate.noise_model import FAR, log_ratio, ratio_of_log
from numdev.gate.row_checks import Key
from numdev.gate.row_pairs import lost_numbers, measured_pairs, place_without_call
from numdev.grouping import grouped
from numdev.metrics.statistics import holm
from numdev.report import Place
from numdev.report.number_text import three
from numdev.studies.logprobs.report import PAIR, LogprobsReport, PairRow, SideRow

ALPHA = 0.01
LEAST = 3  # sequences, below which chance is unknown
SURELY = 10.0  # a factor in every sequence that is no chance, however few they are
ERROR, MULTIPLE = "over_predicted", "abs"
WORDS = {
    ERROR: "the error over the predicted one",
    MULTIPLE: "the mean difference of the two sides, mean |d|",
}
NOTE = (
    "An error moved where its ratio differs from 1 over the sequences (Student's t, 1 % "
    "over all {tests} numbers by Holm), or where it exceeds {surely:g} in every sequence."
)


class SideNames:
    """The names by which rows of two reports are matched: side and sequence."""

    def kernel(self, row: SideRow) -> Key:
        """Returns what identifies the side of a row."""
        return row.side, ""

    def step(self, row: SideRow) -> tuple[Key, Key, bool]:
        """Returns what identifies a row: its side and sequence, and False, since no row
        is of a backward pass."""
        return self.kernel(row), (row.sequence, row.uid), False

    row = step

    def lost(self, a: SideRow, b: SideRow) -> list[str]:
        """Returns the names of the numbers that row A has and row B lacks."""
        return lost_numbers(a, b, ("square", "predicted_square"))

    def about(self, row: SideRow) -> About:
        """Returns the fields of a move that say which side it is of."""
        return about(row.side)

    def place(self, row: SideRow) -> Place:
        """Returns the place of a row, which belongs to no call, layer or head."""
        return place_without_call(f"sequence {row.sequence}")


def about(side: str) -> About:
    """Returns the fields of a record that say which side it is of, or that it is of
    both (PAIR)."""
    return {
        "role": "kernel",
        "kernel": side,
        "options": {},
        "format": "",
        "tensor": "logprobs",
    }


class Compare(NamedTuple):
    """One number of a side, in A and in B, for every sequence that has both."""

    side: str
    metric: str
    both: list[tuple[float, float]]

    @property
    def logs(self) -> list[float]:
        """Returns ln(B / A) for each sequence in which both are above 0."""
        logs = (log_ratio(a, b) for a, b in self.both)
        return [log for log in logs if log is not None]


def moves(old: LogprobsReport, new: LogprobsReport) -> tuple[SideNames, Compared]:
    """Returns the names by which rows are paired, and what changed from `old` to `new`.
    Raises UsageError where a side is held to another support or format."""
    for a in old.plan.sides:
        for b in new.plan.sides:
            differ = (a.support, a.format) != (b.support, b.format)
            if a.name == b.name and differ:
                what = f"{a.name}: held to {a.support} in {a.format} in A, and to "
                raise UsageError(f"{what}{b.support} in {b.format} in B")
    names = SideNames()
    compared = [x for x in _numbers(names, old, new) if x.both]
    p = {x[:2]: _p_value(x.logs) for x in compared if len(x.logs) >= LEAST}
    moved = dict(zip(p, holm(list(p.values()), ALPHA), strict=True))
    groups, changes = list[Group](), list[Move]()
    for x in compared:
        logs = x.logs
        zero = any((a == 0) != (b == 0) for a, b in x.both)
        surely = bool(logs) and (
            min(logs) > math.log(SURELY) or max(logs) < -math.log(SURELY)
        )
        a, b = (statistics.median(side) for side in zip(*x.both, strict=True))
        mean = statistics.mean(logs) if logs else None
        is_moved = zero or surely or moved.get(x[:2], False)
        if is_moved:
            changes.append(
                Move(
                    **about(x.side),
                    place=place_without_call("logprobs"),
                    metric=x.metric,
                    a=a,
                    b=b,
                    change=ratio_of_log(mean),
                    excess=FAR if zero else min(FAR, 1 + abs(mean or FAR)),
                    words=f"{WORDS[x.metric]} from {three(a)} to {three(b)}",
                )
            )
        groups.append(_group(x, a, b, mean, is_moved=is_moved))
    return names, Compared(groups, changes, (NOTE.format(tests=len(p), surely=SURELY),))


def _group(
    x: Compare, a: float, b: float, mean: float | None, *, is_moved: bool
) -> Group:
    """Returns the group of one number: medians in A and B, and how many sequences are
    equal, moved or could not be judged."""
    same = sum(first == second for first, second in x.both)
    judged = is_moved or same == len(x.both) or len(x.logs) >= LEAST
    return Group(
        **about(x.side),
        metric=x.metric,
        a=a,
        b=b,
        change=ratio_of_log(mean),
        pairs=len(x.both),
        same_bits=same,
        moved=len(x.both) if is_moved else 0,
        unjudged=0 if judged else len(x.both),
    )


def _numbers(
    names: SideNames, old: LogprobsReport, new: LogprobsReport
) -> Iterator[Compare]:
    """Yields the numbers of every side that both reports have, and of both sides
    together."""
    rows = measured_pairs(names, old.rows, new.rows)
    for side, of_side in grouped(rows, lambda pair: pair[1].side).items():
        values = [(a.over_predicted, b.over_predicted) for a, b in of_side]
        both = [(a, b) for a, b in values if a is not None and b is not None]
        yield Compare(side, ERROR, both)
    before = {(row.sequence, row.uid): row for row in old.pairs if row.tokens}
    yield Compare(
        PAIR,
        MULTIPLE,
        [
            (_mean_size(before[row.sequence, row.uid]), _mean_size(row))
            for row in new.pairs
            if row.tokens and (row.sequence, row.uid) in before
        ],
    )


def _mean_size(row: PairRow) -> float:
    """Returns mean |d| of a pair that has tokens."""
    return row.sums["abs"] / row.tokens


def _p_value(logs: Sequence[float]) -> float:
    """Returns the two-sided p of Student's t that the mean of the logarithms is 0; 1
    where all are 0, and 0 where all are the same other number. `logs`: at least two."""
    from scipy.special import stdtr

    spread = statistics.stdev(logs) / math.sqrt(len(logs))
    if spread == 0:
        return 0.0 if any(logs) else 1.0
    return float(2 * stdtr(len(logs) - 1, -abs(statistics.mean(logs)) / spread))
