"""The first sentences of a comparison: what was allowed, what ran, what moved, new, gone, equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from numdev.gate.change import Difference
from numdev.gate.compare_report import Group, Move, NewsOfFinding, Presence
from numdev.gate.findings import Places, label, listed
from numdev.gate.movement import ALPHA, LEAST, WORST, WORST_ELSE
from numdev.report import DeviationRow

if TYPE_CHECKING:
    from numdev.gate.compare import Compared

NAMED = 3  # so many of a kind are named in a sentence
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
    result: Compared,
    allowed: Sequence[Difference],
    news: Sequence[NewsOfFinding],
    rows: Sequence[DeviationRow],
) -> tuple[str, ...]:
    """What a reader wants first; `rows` are those of B, by which places are named."""
    sentences = []
    if allowed:
        keys = listed(f"{d.key} ({d.a} and {d.b})" for d in allowed)
        sentences.append(f"Compared although they differ: {keys}.")
    for ran in result.ran:
        what = " backward" if ran.backward else ""
        where = f"{ran.format}, {ran.calls} of {ran.of} calls"
        sentences.append(
            f"Not what ran before: {ran.kernel}{what} ran {ran.a} and now {ran.b} ({where})."
        )
    sentences.append(_headline(result, Places(rows)))
    sentences += [
        f"{failed.kernel} failed in {failed.side}: nothing can be said of it in {failed.calls} "
        f"calls ({failed.format}; {failed.reason})."
        for failed in result.failed
    ]
    for kernel, groups in _by_kernel(result.groups).items():
        if not any(g.moved for g in groups):
            sentences.append(f"{kernel}: {_how_equal(groups)}.")
    for what in ("new", "gone"):
        these = [n for n in news if n.what == what]
        if these:
            near = sum(not n.moved for n in these)
            luck = f"; of them {near} whose number did not move beyond noise" if near else ""
            first = these[0].finding.sentence.rstrip(".") + " and others" * (len(these) > 1)
            count = f"{len(these)} finding{'s' * (len(these) > 1)}"
            sentences.append(f"{count} {what}: {first}{luck}.")
    return tuple(sentences)


def threshold(result: Compared) -> str:
    """What counts as beyond noise."""
    gradient = WORST["dq"]
    return THRESHOLD.format(
        alpha=ALPHA, tests=result.tests, least=LEAST - 1, worst=WORST_ELSE, gradient=gradient
    )


def notes(result: Compared) -> Iterator[str]:
    """What a reader must know of how it was judged."""
    if other := result.inputs.get("other"):
        yield OTHER.format(count=other, every=sum(result.inputs.values()))
    if nearly := result.inputs.get("nearly the same"):
        yield NEARLY.format(count=nearly)
    for kernel, groups in _by_kernel(result.groups).items():
        if unjudged := sum(g.unjudged for g in groups):
            yield f"{kernel}: {unjudged} rows have no number that could be judged."


def _headline(result: Compared, place: Places) -> str:
    """What moved, or that nothing did; whether anything is new or gone."""
    there = _presences(result.presences)
    if not any(group.pairs for group in result.groups):
        return f"Nothing was measured in both reports; {there}."
    if not result.moves:
        return f"Nothing moved beyond noise; {there}."
    parts = []
    for kernel, groups in _by_kernel(result.groups).items():
        moves = [m for m in result.moves if _name(m) == kernel]
        tensors = [words for g in groups if (words := _tensor(g, moves, place))]
        if tensors:
            excess = max(m.excess for m in moves)
            parts.append((-excess, f"{kernel} moved beyond its noise in {listed(tensors)}"))
    told = [words for _, words in sorted(parts, key=lambda part: part[0])]
    more = [f"{len(told) - NAMED} more kernels moved"] if len(told) > NAMED else []
    return f"{'; '.join((*told[:NAMED], *more))}; {there}."


def _tensor(group: Group, moves: Sequence[Move], place: Places) -> str:
    """`dq (3 of 16 heads, most in layer 2 head 1, from 1.06 to 1.41 x the floor)`."""
    here = [m for m in moves if m.tensor == group.tensor]
    if not here:
        return ""
    most = "most in " if group.moved > 1 else ""
    what = f"{most}{place(here[0].place)}, {here[0].words}"
    return f"{group.tensor} ({group.moved} of {group.pairs} heads, {what})"


def _presences(presences: Sequence[Presence]) -> str:
    """`3 rows (mine: skipped: no GPU) gone`, and the same of new ones."""
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


def _name(of: Group | Move) -> str:
    return f"{label(of)} ({of.format})"


def _by_kernel(groups: Sequence[Group]) -> dict[str, list[Group]]:
    kernels: dict[str, list[Group]] = {}
    for group in groups:
        kernels.setdefault(_name(group), []).append(group)
    return kernels
