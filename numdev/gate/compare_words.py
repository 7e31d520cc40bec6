"""The first sentences of a comparison: what was allowed, what ran, what moved, new, gone, equal.

Every number is one of the report's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from numdev.gate.comparable import Difference
from numdev.gate.compare_report import Group, Move, NewsOfFinding, Presence
from numdev.gate.findings import Places
from numdev.gate.movement import ALPHA, LEAST, WORST, WORST_ELSE, Change, Pair
from numdev.gate.words import label, listed
from numdev.report import DeviationRow

if TYPE_CHECKING:
    from numdev.gate.compare import Compared

NAMED = 3  # so many of a kind are named in a sentence
UNITS = {
    "floor_ratio": " x the floor",
    "expected_ratio": " x what its roundings predict",
    "worst_row": " x what is predicted for its worst row",
    "rms": " (rms)",
}
THRESHOLD = (
    "Beyond noise is what {alpha:.0%} of comparisons would show somewhere by chance, over the "
    "{tests} numbers judged; a change of less than {least:.0%} never is (of a worst row: less than "
    "a factor of {worst:g}, of dq and dk {gradient:g})."
)
OTHER = (
    "The inputs are not the same in {count} of {every} rows, by the floor's: there errors are "
    "judged beside what each report predicts for its own inputs, and by how heads scatter."
)
NEARLY = (
    "The inputs are nearly, and not quite, the same in {count} rows, as those of a model run by "
    "another version are."
)


def answer(
    found: Compared,
    allowed: Sequence[Difference],
    news: Sequence[NewsOfFinding],
    rows: Sequence[DeviationRow],
) -> tuple[str, ...]:
    """What a reader wants first; `rows` are those of B, by which places are named."""
    sentences = []
    if allowed:
        keys = listed(f"{d.key} ({d.a} and {d.b})" for d in allowed)
        sentences.append(f"Compared although they differ: {keys}.")
    for ran in found.ran:
        what = " backward" if ran.backward else ""
        where = f"{ran.format}, {ran.calls} of {ran.of} calls"
        sentences.append(
            f"Not what ran before: {ran.kernel}{what} ran {ran.a} and now {ran.b} ({where})."
        )
    sentences.append(_headline(found, Places(rows)))
    sentences += [
        f"{failed.kernel} failed in {failed.side}: nothing can be said of it in {failed.calls} "
        f"calls ({failed.format}; {failed.reason})."
        for failed in found.failed
    ]
    for kernel, groups in _by_kernel(found.groups).items():
        if not any(g.moved for g in groups):
            sentences.append(f"{kernel}: {_how_equal(groups)}.")
    for what in ("new", "gone"):
        these = [n for n in news if n.what == what]
        if these:
            near = sum(not n.moved for n in these)
            luck = f"; of them {near} whose number did not move beyond noise" if near else ""
            first = these[0].finding.sentence.rstrip(".") + " and others" * (len(these) > 1)
            count = f"{len(these)} finding{'s' * (len(these) != 1)}"
            sentences.append(f"{count} {what}: {first}{luck}.")
    return tuple(sentences)


def threshold(found: Compared) -> str:
    """What counts as beyond noise."""
    return THRESHOLD.format(
        alpha=ALPHA, tests=found.tests, least=LEAST - 1, worst=WORST_ELSE, gradient=WORST["dq"]
    )


def notes(found: Compared) -> Iterator[str]:
    """What limits what was said."""
    if other := found.inputs.get("other", 0):
        yield OTHER.format(count=other, every=sum(found.inputs.values()))
    if nearly := found.inputs.get("nearly the same"):
        yield NEARLY.format(count=nearly)
    for kernel, groups in _by_kernel(found.groups).items():
        if unjudged := sum(g.unjudged for g in groups):
            yield f"{kernel}: {unjudged} rows have no number that could be judged."


def change_words(pair: Pair, change: Change) -> str:
    """A change of a number; in units of the floor where that says as much."""
    a, b, metric = change.a, change.b, change.metric
    floors = pair.a.floor_ratio, pair.b.floor_ratio
    if metric == "expected_ratio" and pair.same and floors[0] and floors[1] and change.change:
        beside = math.log(floors[1] / floors[0]) / math.log(change.change)
        if beside > 0.5:  # plain and row by row they tell the same
            a, b, metric = floors[0], floors[1], "floor_ratio"
    return f"from {a:.3g} to {b:.3g}{UNITS[metric]}"


def _headline(found: Compared, named: Places) -> str:
    """What moved, or that nothing did; whether anything is new or gone."""
    there = _presences(found.presences)
    if not any(group.pairs for group in found.groups):
        return f"Nothing was measured in both reports; {there}."
    if not found.moves:
        return f"Nothing moved beyond noise; {there}."
    groups = _by_kernel(found.groups)
    kernels: dict[str, list[Move]] = {}
    for move in found.moves:
        kernels.setdefault(f"{label(move)} ({move.format})", []).append(move)
    parts = [
        f"{kernel} moved beyond its noise in {_tensors(moves, groups[kernel], named)}"
        for kernel, moves in kernels.items()
    ]
    more = [f"{len(parts) - NAMED} more kernels moved"] if len(parts) > NAMED else []
    return f"{'; '.join((*parts[:NAMED], *more))}; {there}."


def _tensors(moves: Sequence[Move], groups: Sequence[Group], named: Places) -> str:
    """`dq (3 of 16 heads, most in layer 2 head 1: from 1.06 to 1.41 x the floor)`, by tensor."""
    parts = []
    for group in groups:
        here = [m for m in moves if (m.tensor, m.format) == (group.tensor, group.format)]
        if here:
            most = "most in " if group.moved > 1 else ""
            what = f"{most}{named(here[0].place)}, {here[0].words}"
            parts.append(f"{group.tensor} ({group.moved} of {group.pairs} heads, {what})")
    return listed(parts)


def _presences(presences: Sequence[Presence]) -> str:
    """`3 rows gone (mine: skipped: no GPU)`, and the same of new ones."""
    words = []
    for what in ("gone", "new"):
        these = [p for p in presences if p.what == what]
        if these:
            count = sum(p.rows for p in these)
            who = list(dict.fromkeys(f"{p.kernel}: {p.why}" for p in these))
            more = f" and {len(who) - NAMED} more" if len(who) > NAMED else ""
            words.append(f"{count} row{'s' * (count != 1)} ({'; '.join(who[:NAMED])}{more}) {what}")
    return listed(words) if words else "nothing new, nothing gone"


def _how_equal(groups: Sequence[Group]) -> str:
    """How sure it is that nothing moved."""
    pairs, bits, numbers = (
        sum(getattr(g, name) for g in groups) for name in ("pairs", "same_bits", "same_numbers")
    )
    if bits == pairs:
        return f"the same bits in all {pairs} rows, by their checksums"
    if numbers == pairs:
        return f"equal numbers in all {pairs} rows; {bits} of them known to be the same bits"
    changes = [(max(g.change, 1 / g.change), g) for g in groups if g.change]
    widest = max(changes, key=lambda c: c[0], default=None)
    most = f"; the largest change is x{widest[1].change:.3g} ({widest[1].tensor})" if widest else ""
    return f"within noise in all {pairs} rows, equal numbers in {numbers}{most}"


def _by_kernel(groups: Sequence[Group]) -> dict[str, list[Group]]:
    kernels: dict[str, list[Group]] = {}
    for group in groups:
        kernels.setdefault(f"{label(group)} ({group.format})", []).append(group)
    return kernels
