"""Compares two reports of `numdev invariance`: which rows moved from A to B.

A row, also of the model's own output, moved where its bits were equal in one report
alone, where its cause is another one, or where one of its numbers changed by more than a
factor of TIMES."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from numdev.gate.compare_report import (
    About,
    Changed,
    Compared,
    Group,
    Move,
    Presence,
)
from numdev.gate.noise_model import FAR, log_ratio, may_differ_by_chance, ratio_of_log
from numdev.gate.row_pairs import (
    RowKeys,
    both_sides,
    lost_numbers,
    measured_pairs,
    place_without_call,
    presence_record,
)
from numdev.grouping import grouped
from numdev.report import kernel_fields
from numdev.report.number_text import label, three
from numdev.studies.invariance.report import (
    InvarianceReport,
    InvarianceRow,
    ModelRow,
)

# The numbers of a row, beside its counts, and those of the model's own output
DIFFERENCES = (
    *("difference", "floor_ratio", "error_base", "error_variant"),
    *("excess", "excess_of_a_row", "ulps"),
)
OF_MODELS = ("difference", "explained", "other_difference", "share")
TIMES = 2.0
Row = InvarianceRow | ModelRow
OF_ROWS = {  # numbers of every tensor: units in a sentence
    "floor_ratio": "× the floor's error",
    "excess": "× what roundings explain",
    "excess_of_a_row": "× what roundings explain, in its worst row",
}
OF_OUTPUTS = {
    "difference": " of the output",
    "other_difference": " of the output with attention in fp64",
}
# Numbers of all tensors but the log-sum-exp, whose error has no floor
ERRORS = {"error_base": "as it is", "error_variant": "in the other form"}


def _about(row: InvarianceRow) -> About:
    """Returns the fields of a move that say which row it is about; `tensor` is axis and
    tensor, `batch out`."""
    return {**row.who, "tensor": f"{row.axis} {row.tensor}"}


KEYS = RowKeys[InvarianceRow](
    kernel=lambda row: (label(row), row.format),
    call=lambda row: (row.case, row.axis, row.variant),
    part=lambda row: (row.tensor,),
    lost=lambda a, b: lost_numbers(a, b, DIFFERENCES),
    about=_about,
    place=lambda row: place_without_call(row.case, row.layer),
)


def moves(
    old: InvarianceReport, new: InvarianceReport
) -> tuple[RowKeys[InvarianceRow], Compared]:
    """Returns the keys by which rows are paired, and what changed from `old` to `new`: a
    group for every kernel, format, axis and tensor of which both reports measured one
    row; the moves of rows that changed; kernels that no longer repeat their bits; moves
    of the model's own output, with the rows and numbers that one report alone has of
    it."""
    pairs = measured_pairs(KEYS, old.rows, new.rows)
    groups: list[Group] = []
    moves: list[Move] = []
    by_axis = grouped(pairs, lambda p: (label(p[1]), p[1].format, p[1].axis, p[1].tensor))
    for of_axis in by_axis.values():
        axis: list[Move] = []
        for a, b in of_axis:
            about, place = KEYS.about(b), KEYS.place(b)
            axis += [
                Move(**about, place=place, **change) for change in _row_changes(a, b)
            ]
        places = {move.words.partition(": ")[0] for move in axis}
        groups.append(
            Group(
                **KEYS.about(of_axis[0][1]),
                metric="difference",
                a=_largest_ratio(a for a, _ in of_axis),
                b=_largest_ratio(b for _, b in of_axis),
                pairs=len(of_axis),
                same_bits=sum(a.same and b.same for a, b in of_axis),
                moved=len(places),
            )
        )
        moves += axis
    moves += _unsteady_moves(old, new)
    of_outputs, presences = _output_moves(old.models, new.models)
    note = (
        "An axis moved where its bits, its cause, or one of its numbers by "
        f"{TIMES:g} times did; A and B are the largest differences over the floor's "
        "error."
    )
    return KEYS, Compared(
        groups, [*moves, *of_outputs], (note,), presences=tuple(presences)
    )


def _largest_ratio(rows: Iterable[InvarianceRow]) -> float | None:
    """Returns the largest difference over the floor's error; None where no row has
    one."""
    ratios = (row.floor_ratio for row in rows)
    return max((x for x in ratios if x is not None), default=None)


class Number(NamedTuple):
    """A number of a row that changed by more than a factor of TIMES, or is 0 in one
    report alone. `excess`: by how many times the logarithm of TIMES, at most FAR."""

    metric: str
    a: float
    b: float
    change: float | None  # b / a
    excess: float


def _row_changes(a: InvarianceRow, b: InvarianceRow) -> Iterator[Changed]:
    """Yields the fields of each move in one row, `a` in report A and `b` in report B.
    First another count of elements, then one of NaN that chance does not explain. Then
    one of these: bits that are equal in one report alone, or another cause; the number
    that changed most, beyond TIMES; a count of elements that differ, beyond what
    `_counts_alike` allows."""
    fact: Changed = {
        "metric": "difference",
        "excess": FAR,
        "a": a.floor_ratio,
        "b": b.floor_ratio,
        "words": "",
    }
    if a.elements != b.elements:
        words = f"{b.variant}: elements: {a.elements}, now {b.elements}"
        yield {**fact, "metric": "elements", "words": words}
    if not may_differ_by_chance(a.nonfinite, b.nonfinite):
        counts = f"{a.nonfinite}, now {b.nonfinite}"
        words = f"{b.variant}: elements that are not finite in one form alone: {counts}"
        yield {"metric": "nonfinite", "excess": FAR, "words": words}
    if a.same != b.same or str(a.cause) != str(b.cause):
        change = ratio_of_log(log_ratio(a.floor_ratio, b.floor_ratio))
        words = f"{b.variant}: {_change_in_words(a)}, now {_change_in_words(b)}"
        yield {**fact, "change": change, "words": words}
        return
    names = OF_ROWS if b.tensor == "lse" else {**OF_ROWS, **ERRORS}
    changes = [each for name in names if (each := _number_change(a, b, name))]
    if worst := max(changes, key=lambda change: change.excess, default=None):
        name = worst.metric
        from_to = f"from {three(worst.a)} to {three(worst.b)}"
        if name == "floor_ratio":
            worst = worst._replace(metric="difference")
            words = f"{_change_in_words(a)}, now {_change_in_words(b)}"
        elif name in OF_ROWS:
            words = f"{from_to}{OF_ROWS[name]}"
        else:
            words = f"{ERRORS[name]} errs {from_to}× the floor"
        yield _move_fields(worst, f"{b.variant}: {words}")
    elif not _counts_alike(a.differ, b.differ):
        words = f"{b.variant}: elements that differ: {a.differ}, now {b.differ}"
        yield {**fact, "metric": "differ", "words": words}


def _move_fields(number: Number, words: str) -> Changed:
    """Returns the fields of a move for a number that changed, by name, with these
    words."""
    return {
        "metric": number.metric,
        "a": number.a,
        "b": number.b,
        "change": number.change,
        "excess": number.excess,
        "words": words,
    }


def _number_change(a: Row, b: Row, name: str) -> Number | None:
    """Returns how the number `name` changed from row A to B. None where either is None,
    and where they are within a factor of TIMES. A number that is 0 in one row alone
    changed by FAR."""
    one, two = getattr(a, name), getattr(b, name)
    if one is None or two is None or one == two:
        return None
    log = log_ratio(one, two)
    far = FAR if log is None else min(FAR, abs(log) / math.log(TIMES))
    if far <= 1:
        return None
    return Number(metric=name, a=one, b=two, change=ratio_of_log(log), excess=far)


def _counts_alike(a: int, b: int) -> bool:
    """Whether two counts of elements that differ are about the same: within a factor of
    TIMES, or of a difference that chance makes in so few."""
    return max(a, b) <= TIMES * min(a, b) or abs(a - b) <= 2 * math.sqrt(a + b)


def _unsteady_moves(old: InvarianceReport, new: InvarianceReport) -> Iterator[Move]:
    """Yields a move for each tensor and variant in which a kernel does not repeat its
    bits in B, where A has no such row and has numbers of the kernel. Only a kernel that
    does not repeat its bits has such a row."""
    before = {KEYS.row(row) for row in old.rows}
    kernels = {KEYS.kernel(row) for row in old.rows if row.status == "ok"}
    for row in new.rows:
        unsteady = row.axis == "repeat" and row.status == "ok" and not row.same
        if unsteady and KEYS.row(row) not in before and KEYS.kernel(row) in kernels:
            yield Move(
                **KEYS.about(row),
                place=KEYS.place(row),
                metric="difference",
                excess=FAR,
                b=row.floor_ratio,
                words=f"{row.variant}: the same bits, now {_change_in_words(row)}",
            )


def _output_moves(
    old: Sequence[ModelRow], new: Sequence[ModelRow]
) -> tuple[list[Move], list[Presence]]:
    """Returns the moves of the model's own output with each kernel along each axis, and
    presences: rows with numbers, and single numbers, that one report alone has."""
    moves: list[Move] = []
    presences: list[Presence] = []
    for a, b in both_sides(old, new, lambda m: (m.axis, label(m), m.format)):
        row = b or a
        assert row is not None
        about, tensor = kernel_fields(row.format, row.kernel), f"{row.axis} output"
        place = place_without_call(f"the model's output along {row.axis}")
        ran_in_a = a if a is not None and a.reason is None else None
        ran_in_b = b if b is not None and b.reason is None else None
        if ran_in_a and ran_in_b:
            moves += [
                Move(**about, tensor=tensor, place=place, **change)
                for change in _output_changes(ran_in_a, ran_in_b)
            ]
            for gone, pair in ((True, (a, b)), (False, (b, a))):
                lost = lost_numbers(*pair, OF_MODELS)
                if lost:
                    presences.append(
                        presence_record(about, place, gone, tensor, "no number", *lost)
                    )
        elif ran_in_a or ran_in_b:
            gone = ran_in_a is not None
            other = b if gone else a
            why = "there is no such row" if other is None else other.reason or ""
            lacks = f"the model's output along {row.axis}"
            presences.append(presence_record(about, place, gone, tensor, why, lacks))
    return moves, presences


def _output_changes(a: ModelRow, b: ModelRow) -> Iterator[Changed]:
    """Yields the fields of each move in a row of the model's own output. First another
    count of elements. Then one of these: bits that are equal in one report alone; the
    first number of OF_OUTPUTS beyond TIMES; a count of elements that differ, beyond what
    `_counts_alike` allows."""
    if a.elements != b.elements:
        words = f"elements: {a.elements}, now {b.elements}"
        yield {"metric": "elements", "excess": FAR, "words": words}
    if (a.differ == 0) != (b.differ == 0):
        words = (
            f"{a.differ} of {a.elements} elements differ, now {b.differ} of {b.elements}"
        )
        yield {
            "metric": "difference",
            "a": a.difference,
            "b": b.difference,
            "excess": FAR,
            "words": words,
        }
        return
    for name, unit in OF_OUTPUTS.items():
        if change := _number_change(a, b, name):
            words = f"from {three(change.a)} to {three(change.b)}{unit}"
            yield _move_fields(change, words)
            return
    if not _counts_alike(a.differ, b.differ):
        words = f"elements that differ: {a.differ}, now {b.differ}"
        yield {"metric": "differ", "excess": FAR, "words": words}


def _change_in_words(row: InvarianceRow) -> str:
    """Returns how far a row changes, and by which cause: `the same bits`, or `0.012× the
    floor's error (explained by tiling: ...)`; a dash in place of the number where there
    is none."""
    if row.same:
        return "the same bits"
    text = f"{three(row.floor_ratio)}× the floor's error"
    return text + (f" ({row.cause})" if row.cause is not None else "")
