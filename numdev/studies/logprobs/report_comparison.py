"""Compares two reports of `numdev logprobs`: which sides' errors moved from A to B.

The error of a sequence in B over that in A is taken for each one, and held to chance
(`numdev.gate.sequence_ratios`)."""

from __future__ import annotations

from collections.abc import Iterator

from numdev.errors import UsageError
from numdev.gate.compare_report import About, Compared, Group, Move
from numdev.gate.row_pairs import (
    RowKeys,
    lost_numbers,
    measured_pairs,
    numbers_in_both,
    place_without_call,
)
from numdev.gate.sequence_ratios import SURELY, SequenceRatios, moved_numbers
from numdev.grouping import grouped
from numdev.report import kernel_fields
from numdev.studies.logprobs.report import PAIR, LogprobsReport, PairRow, SideRow

ERROR, MULTIPLE = "over_predicted", "abs"
WORDS = {
    ERROR: "the error over the predicted one",
    MULTIPLE: "the mean difference of the two sides, mean |d|",
}
NOTE = (
    "An error moved where its ratio differs from 1 over the sequences (Student's t, 1 % "
    "over all {tests} numbers by Holm), or where it exceeds {surely:g} in every sequence."
)


def about(side: str) -> About:
    """Returns the fields of a record that say which side it is about, or that it is about
    both (PAIR)."""
    return {**kernel_fields("", side), "tensor": "logprobs"}


KEYS = RowKeys[SideRow](
    kernel=lambda row: (row.side, ""),
    call=lambda row: (row.sequence, row.uid),
    lost=lambda a, b: lost_numbers(a, b, ("square", "predicted_square")),
    about=lambda row: about(row.side),
    place=lambda row: place_without_call(f"sequence {row.sequence}"),
)


def moves(old: LogprobsReport, new: LogprobsReport) -> tuple[RowKeys[SideRow], Compared]:
    """Returns the keys by which rows are paired, and what changed from `old` to `new`: a
    group for each side, and for the pair, that has a sequence with numbers in both, and a
    move for each whose number moved. Raises UsageError where a side is held to another
    support or format in `new` than in `old`."""
    for a in old.plan.sides:
        for b in new.plan.sides:
            differ = (a.support, a.format) != (b.support, b.format)
            if a.name == b.name and differ:
                what = f"{a.name}: held to {a.support} in {a.format} in A, and to "
                raise UsageError(f"{what}{b.support} in {b.format} in B")
    numbers = {key: x for key, x in _numbers(old, new) if x.both}
    moved = moved_numbers(numbers)
    groups, changes = list[Group](), list[Move]()
    for (side, metric), number in numbers.items():
        is_moved = (side, metric) in moved
        if is_moved:
            place = place_without_call("logprobs")
            changes.append(number.move(about(side), place, metric, WORDS[metric]))
        pairs = len(number.both)
        groups.append(number.group(about(side), metric, pairs=pairs, is_moved=is_moved))
    tests = sum(number.is_chance_known for number in numbers.values())
    return KEYS, Compared(groups, changes, (NOTE.format(tests=tests, surely=SURELY),))


def _numbers(
    old: LogprobsReport, new: LogprobsReport
) -> Iterator[tuple[tuple[str, str], SequenceRatios]]:
    """Yields ((side, metric), numbers) for every side that has a sequence with numbers in
    both reports, then for the pair, always: by sequence the number in `old` and in `new`,
    which may be none."""
    rows = measured_pairs(KEYS, old.rows, new.rows)
    for side, of_side in grouped(rows, lambda pair: pair[1].side).items():
        both = numbers_in_both(of_side, ERROR)
        yield (side, ERROR), SequenceRatios(both=both)
    before = {(row.sequence, row.uid): row for row in old.pairs if row.tokens}
    both = [
        (_mean_size(before[row.sequence, row.uid]), _mean_size(row))
        for row in new.pairs
        if row.tokens and (row.sequence, row.uid) in before
    ]
    yield (PAIR, MULTIPLE), SequenceRatios(both=both)


def _mean_size(row: PairRow) -> float:
    """Returns the mean |d| over the tokens of a pair, which has at least one."""
    return row.sums["abs"] / row.tokens
