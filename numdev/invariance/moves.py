"""Two reports of `numdev invariance`: what moved.

A row, also of the model's own output, moved where bits were the same and no longer are,
or the reverse, where its cause is another one, or one of its numbers another by TIMES."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from numdev.gate.compare_report import Compared, Group, Move, Presence
from numdev.gate.compare_studies import (
    NOWHERE,
    in_one_alone,
    lost_numbers,
    measured_pairs,
    nowhere,
    of_model,
)
from numdev.gate.findings import label
from numdev.gate.movement import FAR, by_chance, factor, log_ratio
from numdev.gate.rows import Key
from numdev.grouping import grouped
from numdev.report import Place
from numdev.report.numbers import labelled, three

DIFFERENCES = (
    *(
        "difference",
        "floor_ratio",
        "error_base",
        "error_variant",
        "excess",
        "excess_of_a_row",
    ),
    "ulps",
)
"""The numbers of a row, beside its counts."""
OF_MODELS = ("difference", "explained", "rest", "share")
"""Those of the model's own output, beside its counts."""
TIMES = 2.0
OF_ROWS = {  # the same of invariance, but for the log-sum-exp, whose error has no floor
    "floor_ratio": "× the floor's error",
    "excess": "× what roundings explain",
    "excess_of_a_row": "× what roundings explain, in its worst row",
}
OF_OUTPUTS = {
    "difference": " of the output",
    "rest": " of the output with attention in fp64",
}
ERRORS = {"error_base": "as it is", "error_variant": "in the other form"}


class InvarianceNames:
    """What tells rows of `numdev invariance` apart, as `movement.Names` does for an
    audit's."""

    def kernel(self, row: Any) -> Key:
        return label(row), row.format

    def step(self, row: Any) -> Key:
        return self.kernel(row), (row.case, row.axis, row.variant), False

    def row(self, row: Any) -> Key:
        return (*self.step(row), row.tensor)

    def lost(self, a: Any, b: Any) -> list[str]:
        return lost_numbers(a, b, DIFFERENCES)

    def about(self, row: Any) -> dict[str, Any]:
        return {**row.who, "tensor": f"{row.axis} {row.tensor}"}

    def place(self, row: Any) -> Place:
        return Place(**{**NOWHERE, "case": row.case, "layer": row.layer})


def moves(old: Any, new: Any) -> tuple[InvarianceNames, Compared]:
    """Every axis of every tensor that both reports have, and what moved."""
    names = InvarianceNames()
    pairs = measured_pairs(names, old.rows, new.rows)
    groups: list[Group] = []
    moves: list[Move] = []
    by_axis = grouped(pairs, lambda p: (label(p[1]), p[1].format, p[1].axis, p[1].tensor))
    for of_axis in by_axis.values():
        axis: list[Move] = []
        for a, b in of_axis:
            of = names.about(b) | {"place": names.place(b)}
            axis += [Move(**of, **change) for change in _of_difference(a, b)]
        ratios = [
            [row.floor_ratio for row in side] for side in zip(*of_axis, strict=True)
        ]
        largest = [max((x for x in xs if x is not None), default=None) for xs in ratios]
        same = sum(a.same and b.same for a, b in of_axis)
        of = names.about(of_axis[0][1]) | {
            "metric": "difference",
            "a": largest[0],
            "b": largest[1],
        }
        places = {move.words.partition(": ")[0] for move in axis}
        groups.append(Group(**of, pairs=len(of_axis), same_bits=same, moved=len(places)))
        moves += axis
    moves += _unsteady(names, old, new)
    own_output, presences = _outputs(old.models, new.models)
    note = (
        "An axis moved where its bits, its cause, or one of its numbers by "
        f"{TIMES:g} times did; A "
        "and B are the largest differences over the floor's error."
    )
    return names, Compared(
        groups, [*moves, *own_output], (note,), presences=tuple(presences)
    )


def _of_difference(a: Any, b: Any) -> Iterator[dict[str, Any]]:
    """What moved in one row: of bits, causes and counts a fact; of its numbers the
    farthest."""
    numbers = {"a": a.floor_ratio, "b": b.floor_ratio}
    fact: dict[str, Any] = {"metric": "difference", "excess": FAR, **numbers}
    if a.elements != b.elements:
        words = f"{b.variant}: elements: {a.elements}, now {b.elements}"
        yield {**fact, "metric": "elements", "words": words}
    if not by_chance(a.nonfinite, b.nonfinite):
        counts = f"{a.nonfinite}, now {b.nonfinite}"
        words = f"{b.variant}: elements that are not finite in one form alone: {counts}"
        yield {"metric": "nonfinite", "excess": FAR, "words": words}
    if a.same != b.same or str(a.cause) != str(b.cause):
        change = factor(log_ratio(a.floor_ratio, b.floor_ratio))
        yield {
            **fact,
            "change": change,
            "words": f"{b.variant}: {_said(a)}, now {_said(b)}",
        }
        return
    names = OF_ROWS if b.tensor == "lse" else {**OF_ROWS, **ERRORS}
    changes = [each for name in names if (each := _change(a, b, name))]
    if worst := max(changes, key=lambda change: change["excess"], default=None):
        name, said = worst["metric"], f"{_said(a)}, now {_said(b)}"
        if name != "floor_ratio":
            from_to = f"from {three(worst['a'])} to {three(worst['b'])}"
            said = (
                f"{from_to}{OF_ROWS[name]}"
                if name in OF_ROWS
                else f"{ERRORS[name]} errs {from_to}× the floor"
            )
        worst["metric"] = "difference" if name == "floor_ratio" else name
        yield {**worst, "words": f"{b.variant}: {said}"}
    elif not _counts_alike(a.differ, b.differ):
        words = f"{b.variant}: elements that differ: {a.differ}, now {b.differ}"
        yield {**fact, "metric": "differ", "words": words}


def _change(a: Any, b: Any, name: str) -> dict[str, Any] | None:
    """A number that changed by more than TIMES, or that was 0 and no longer is; else
    None."""
    one, two = getattr(a, name), getattr(b, name)
    if one is None or two is None or one == two:
        return None
    log = log_ratio(one, two)
    far = FAR if log is None else min(FAR, abs(log) / math.log(TIMES))
    if far <= 1:
        return None
    return {"metric": name, "a": one, "b": two, "change": factor(log), "excess": far}


def _counts_alike(a: int, b: int) -> bool:
    """Whether two counts of elements that differ are about the same: within TIMES, or
    within what chance does to so few."""
    return max(a, b) <= TIMES * min(a, b) or abs(a - b) <= 2 * math.sqrt(a + b)


def _unsteady(names: InvarianceNames, old: Any, new: Any) -> Iterator[Move]:
    """Kernels that gave the same bits again in A, and in B do not: such a row is there
    only where they do not."""
    before = {names.row(row) for row in old.rows}
    kernels = {names.kernel(row) for row in old.rows if row.status == "ok"}
    for row in new.rows:
        if (
            row.axis != "repeat"
            or row.status != "ok"
            or row.same
            or names.row(row) in before
        ):
            continue
        if names.kernel(row) in kernels:
            words = f"{row.variant}: the same bits, now {_said(row)}"
            fact: dict[str, Any] = {
                "metric": "difference",
                "excess": FAR,
                "b": row.floor_ratio,
                "words": words,
            }
            yield Move(**names.about(row), place=names.place(row), **fact)


def _outputs(old: Sequence[Any], new: Sequence[Any]) -> tuple[list[Move], list[Presence]]:
    """The model's own output with each kernel along each axis: what moved, what one
    report alone has, and numbers that are gone."""
    sides = [dict(_numbered(rows)) for rows in (old, new)]
    moves: list[Move] = []
    presences: list[Presence] = []
    for key in dict.fromkeys((*sides[0], *sides[1])):
        a, b = (side.get(key) for side in sides)
        row: Any = b or a
        of, tensor = of_model(row.format, row.kernel), f"{row.axis} output"
        place = nowhere(f"the model's output along {row.axis}")
        ran = [each is not None and each.reason is None for each in (a, b)]
        if all(ran):
            moves += [
                Move(**of, tensor=tensor, place=place, **x) for x in _of_output(a, b)
            ]
            for gone, pair in ((True, (a, b)), (False, (b, a))):
                lost = lost_numbers(*pair, OF_MODELS)
                if lost:
                    presences.append(
                        in_one_alone(of, place, gone, tensor, "no number", *lost)
                    )
        elif any(ran):
            other = b if ran[0] else a
            why = "there is no such row" if other is None else other.reason
            lacks = f"the model's output along {row.axis}"
            presences.append(in_one_alone(of, place, ran[0], tensor, why, lacks))
    return moves, presences


def _numbered(rows: Iterable[Any]) -> Iterator[tuple[Key, Any]]:
    """Rows of the model's output, each with what tells it from the others."""
    for row in rows:
        yield (row.axis, labelled(row.kernel, row.options), row.format), row


def _of_output(a: Any, b: Any) -> Iterator[dict[str, Any]]:
    """What moved in the model's own output along one axis."""
    if a.elements != b.elements:
        words = f"elements: {a.elements}, now {b.elements}"
        yield {"metric": "elements", "excess": FAR, "words": words}
    if (a.differ == 0) != (b.differ == 0):
        words = (
            f"{a.differ} of {a.elements} elements differ, now {b.differ} of {b.elements}"
        )
        fact: dict[str, Any] = {
            "metric": "difference",
            "a": a.difference,
            "b": b.difference,
            "excess": FAR,
        }
        yield {**fact, "words": words}
        return
    for name, what in OF_OUTPUTS.items():
        if change := _change(a, b, name):
            yield {
                **change,
                "words": f"from {three(change['a'])} to {three(change['b'])}{what}",
            }
            return
    if not _counts_alike(a.differ, b.differ):
        words = f"elements that differ: {a.differ}, now {b.differ}"
        yield {"metric": "differ", "excess": FAR, "words": words}


def _said(row: Any) -> str:
    if row.same:
        return "the same bits"
    text = f"{three(row.floor_ratio)}× the floor's error"
    return text + (f" ({row.cause})" if row.cause is not None else "")
