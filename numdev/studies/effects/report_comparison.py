"""Compares two reports of `numdev effects`: which numbers moved from A to B.

A number of a run in B over that in A is taken for each sequence, and held to chance
(`numdev.gate.sequence_ratios`): what only the order of roundings changed did not move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numdev.gate.compare_report import (
    About,
    Changed,
    Compared,
    Group,
    Move,
    Presence,
)
from numdev.gate.noise_model import FAR, is_within_scatter, may_differ_by_chance
from numdev.gate.row_pairs import (
    RowKeys,
    both_sides,
    lost_numbers,
    measured_pairs,
    numbers_in_both,
    place_without_call,
    presence_record,
)
from numdev.gate.sequence_ratios import LEAST, SURELY, SequenceRatios, moved_numbers
from numdev.grouping import grouped
from numdev.report import kernel_fields
from numdev.report.number_text import label
from numdev.studies.effects.report import Check, EffectsReport, OutputRow

COSTS = (
    *("cost", "cost_p999", "cost_max", "log_prob", "log_prob_p999", "log_prob_max"),
    *("log_perplexity", "error", "angle", "from_against", "flips", "unexplained"),
)
"""The numbers of a run, but for `first_flip`, which is null where nothing flips."""
Pair = tuple[OutputRow, OutputRow]  # of A and of B
SCALES = {  # numbers of a run that have a ratio, and what they are called
    "cost": "the error at the {place} (cost)",
    "log_prob": "the change of log-probabilities",
    "error": "the relative error of the {place}",
}
HOLDS = {None: "not tried", True: "holds", False: "fails"}
NOTE = (
    "A cost moved where its ratio differs from 1 over the sequences (Student's t, 1 % "
    "over all {tests} numbers of runs by Holm), or where it exceeds {surely:g} in every "
    "sequence."
)
FEW = (
    "Chance is unknown below {least} sequences: there, only a factor above {surely:g} is "
    "a change."
)


def _about(row: OutputRow) -> About:
    """Returns the fields of a move that say which row it is about: role, kernel (`model`
    for none), options, format, and as `tensor` the kind, site, layer and output of the
    run."""
    layer = "" if row.layer is None else f"L{row.layer}"
    where = " ".join(filter(None, (row.kind, row.site, layer, row.at)))
    who = kernel_fields(row.format, row.kernel or "model", row.options)
    return {**who, "tensor": where}


def _lost(a: OutputRow, b: OutputRow) -> list[str]:
    """Returns the names of the numbers that row A has and row B lacks, of COSTS and
    `growth`."""
    growth = ["growth"] if a.growth and not b.growth else []
    return [*lost_numbers(a, b, COSTS), *growth]


KEYS = RowKeys[OutputRow](
    kernel=lambda row: (label(row), row.format),
    call=lambda row: (row.run, row.sequence),
    lost=_lost,
    about=_about,
    # It names the run alone: a model's output belongs to no call, layer or head
    place=lambda row: place_without_call(_about(row)["tensor"]),
)


def moves(old: EffectsReport, new: EffectsReport) -> tuple[RowKeys[OutputRow], Compared]:
    """Returns the keys by which rows are paired, and what changed from `old` to `new`.
    There is a group for every run that was measured on one sequence in both reports; a
    move for each number of SCALES, and each count, of such a run that changed beyond
    chance; a move or presence for each check whose result changed or that one report
    alone could try. A number of SCALES that is 0 in one report alone, in any sequence,
    moved, whatever chance does."""
    pairs = grouped(measured_pairs(KEYS, old.rows, new.rows), lambda pair: pair[1].run)
    ratios = {
        (run, metric): SequenceRatios(both=numbers_in_both(rows, metric))
        for run, rows in pairs.items()
        for metric in SCALES
    }
    moved = moved_numbers(ratios)
    groups: list[Group] = []
    moves: list[Move] = []
    for run, rows in pairs.items():
        first = rows[0][1]
        about, place = KEYS.about(first), KEYS.place(first)
        of_run = [
            ratios[run, metric].move(about, place, metric, what.format(place=first.place))
            for metric, what in SCALES.items()
            if (run, metric) in moved
        ]
        of_run += [Move(**about, place=place, **fact) for fact in _count_changes(rows)]
        cost = ratios[run, "cost"]
        groups.append(cost.group(about, "cost", pairs=len(rows), is_moved=bool(of_run)))
        moves += of_run
    tests = sum(number.is_chance_known for number in ratios.values())
    notes = [NOTE.format(tests=tests, surely=SURELY)]
    if any(group.unjudged for group in groups):
        notes.insert(0, FEW.format(least=LEAST, surely=SURELY))
    changed, presences = _check_moves(old.checks, new.checks)
    return KEYS, Compared(
        groups, [*moves, *changed], tuple(notes), presences=tuple(presences)
    )


def _count_changes(rows: Sequence[Pair]) -> Iterator[Changed]:
    """Yields the fields of a move for each count of a run (positions, top tokens that
    flip, unexplained flips) whose sum, over the sequences that both reports have, changed
    beyond chance. Positions count as changed wherever their sums differ, unexplained
    flips also where one sum alone is 0. `rows`: the run's pairs of A and B."""
    for metric, what in (
        ("positions", "positions"), ("flips", "top tokens that flip"),
        ("unexplained", "flips that are no near ties"),
    ):  # fmt: skip
        both = numbers_in_both(rows, metric)
        a, b = (int(sum(side)) for side in zip(*both, strict=True)) if both else (0, 0)
        alike = {
            "positions": a == b,
            # Chance flips near ties, also where there was no flip; it makes no other flip
            "flips": is_within_scatter(a, b),
            "unexplained": may_differ_by_chance(a, b),
        }
        if not alike[metric]:
            yield {
                "metric": metric,
                "a": a,
                "b": b,
                "excess": FAR,
                "words": f"{what}: {a}, now {b}",
            }


def _check_moves(
    old: Sequence[Check], new: Sequence[Check]
) -> tuple[list[Move], list[Presence]]:
    """Returns two lists, A's order first. Moves: checks whose result changed from one
    that was tried to another, and new checks that fail. Presences: all other checks that
    only one report could try."""
    moves: list[Move] = []
    presences: list[Presence] = []
    for a, b in both_sides(old, new, lambda check: (check.name, check.format)):
        check = b or a
        assert check is not None
        one, two = (None if each is None else each.holds for each in (a, b))
        if one == two:
            continue
        fmt, place = check.format or "float64", place_without_call(f"check {check.name}")
        # One that fails and was not there before is a fault, whoever asked for it.
        if (one is not None and two is not None) or (a is None and two is False):
            words = f"check {check.name}: {HOLDS[one]}, now {HOLDS[two]}"
            moves.append(
                Move(
                    **kernel_fields(fmt),
                    tensor="checks",
                    place=place,
                    metric="check",
                    a=a.difference if a else None,
                    b=b.difference if b else None,
                    excess=FAR,
                    words=f"{words} ({check.reason})" if check.reason else words,
                )
            )
        else:
            other = b if two is None else a
            why = "there is no such check" if other is None else other.reason
            lacks = f"check {check.name}"
            presences.append(
                presence_record(
                    kernel_fields(fmt), place, two is None, "checks", why, lacks
                )
            )
    return moves, presences
