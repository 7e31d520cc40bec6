"""The first sentences of a comparison: what was allowed, what ran, what moved, new, gone, equal.

Every number is one of the report's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from numdev.gate.comparable import Difference
from numdev.gate.compare_audits import Compared
from numdev.gate.compare_report import Group, Move, NewsOfFinding, Presence
from numdev.gate.findings import Places
from numdev.gate.movement import ALPHA, LEAST, WORST, WORST_ELSE
from numdev.gate.words import listed
from numdev.report import DeviationRow

NAMED = 3
"""So many of a kind are named in a sentence."""


def answer(
    found: Compared,
    allowed: Sequence[Difference],
    news: Sequence[NewsOfFinding],
    rows: Sequence[DeviationRow],
) -> tuple[str, ...]:
    """What a reader wants first; `rows` are those of B, by which places are named."""
    sentences = [f"Compared although they differ: {_listed_differences(allowed)}."] * bool(allowed)
    sentences += _ran(found)
    sentences.append(_headline(found, Places(rows)))
    sentences += [f"{name}: {words}." for name, words in _beside(found, news)]
    return tuple(sentences)


def threshold(found: Compared) -> str:
    """What counts as beyond noise."""
    return (
        f"Beyond noise is what {ALPHA:.0%} of comparisons would show somewhere by chance, over the "
        f"{found.tests} numbers judged; a change of less than {LEAST - 1:.0%} never is (of a worst "
        f"row: less than a factor of {WORST_ELSE:g}, of dq and dk {WORST['dq']:g})."
    )


def notes(found: Compared) -> Iterator[str]:
    """What limits what was said."""
    other = found.inputs.get("other", 0)
    if other:
        yield (
            f"The inputs are not the same in {other} of {sum(found.inputs.values())} rows, by the "
            "floor's: there errors are judged beside what each report predicts for its own inputs, "
            "and by how heads scatter."
        )
    if found.inputs.get("nearly the same"):
        yield (
            f"The inputs are nearly, and not quite, the same in {found.inputs['nearly the same']} "
            "rows, as those of a model run by another version are."
        )
    for label, groups in _by_kernel(found.groups):
        unjudged = sum(g.unjudged for g in groups)
        if unjudged:
            yield f"{label}: {unjudged} rows have no number that could be judged."


def _listed_differences(differences: Sequence[Difference]) -> str:
    return listed(f"{d.key} ({d.a} and {d.b})" for d in differences)


def _ran(found: Compared) -> Iterator[str]:
    for ran in found.ran:
        what = " backward" if ran.backward else ""
        where = f"{ran.format}, {ran.calls} of {ran.of} calls"
        yield f"Not what ran before: {ran.kernel}{what} ran {ran.a} and now {ran.b} ({where})."


def _headline(found: Compared, named: Places) -> str:
    """What moved, or that nothing did; whether anything is new or gone."""
    there = _presences(found.presences)
    if not any(group.pairs for group in found.groups):
        return f"Nothing was measured in both reports; {there}."
    if not found.moves:
        return f"Nothing moved beyond noise; {there}."
    kernels: dict[str, list[Move]] = {}
    for move in found.moves:
        kernels.setdefault(_label(move), []).append(move)
    groups = dict(_by_kernel(found.groups))
    parts = [
        f"{label} moved beyond its noise in {_tensors(moves, groups[label], named)}"
        for label, moves in kernels.items()
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
    gone, new = ([p for p in presences if p.what == what] for what in ("gone", "new"))
    if not gone and not new:
        return "nothing new, nothing gone"
    words = [f"{_rows(ps)} {what}" for what, ps in (("gone", gone), ("new", new)) if ps]
    return listed(words)


def _rows(presences: Sequence[Presence]) -> str:
    count = sum(p.rows for p in presences)
    who = dict.fromkeys(f"{p.kernel}: {p.why}" for p in presences)
    more = f" and {len(who) - NAMED} more" if len(who) > NAMED else ""
    return f"{count} row{'s' * (count != 1)} ({'; '.join([*who][:NAMED])}{more})"


def _beside(found: Compared, news: Sequence[NewsOfFinding]) -> Iterator[tuple[str, str]]:
    """Kernel by kernel what did not move and how surely; failures; findings."""
    for failed in found.failed:
        yield (
            f"{failed.kernel} failed in {failed.side}",
            f"nothing can be said of it in {failed.calls} calls ({failed.format}; {failed.reason})",
        )
    for label, groups in _by_kernel(found.groups):
        if not any(g.moved for g in groups):
            yield label, _how_equal(groups)
    for what in ("new", "gone"):
        these = [n for n in news if n.what == what]
        if these:
            near = sum(not n.moved for n in these)
            count = f"{len(these)} finding{'s' * (len(these) != 1)}"
            luck = f"; of them {near} whose number did not move beyond noise" if near else ""
            first = these[0].finding.sentence.rstrip(".")
            yield f"{count} {what}", f"{first}{' and others' * (len(these) > 1)}{luck}"


def _how_equal(groups: Sequence[Group]) -> str:
    pairs, bits, numbers = (
        sum(getattr(g, name) for g in groups) for name in ("pairs", "same_bits", "same_numbers")
    )
    if bits == pairs:
        return f"the same bits in all {pairs} rows, by their checksums"
    if numbers == pairs:
        return f"equal numbers in all {pairs} rows; {bits} of them known to be the same bits"
    widest = max((g for g in groups if g.change), key=_width, default=None)
    most = f"; the largest change is x{widest.change:.3g} ({widest.tensor})" if widest else ""
    return f"within noise in all {pairs} rows, equal numbers in {numbers}{most}"


def _width(group: Group) -> float:
    change = group.change or 1.0
    return max(change, 1 / change)


def _by_kernel(groups: Sequence[Group]) -> list[tuple[str, list[Group]]]:
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(_label(group), []).append(group)
    return list(found.items())


def _label(of: Group | Move) -> str:
    options: Mapping[str, Any] = of.options
    shown = ",".join(f"{k}={v}" for k, v in options.items() if v is not None)
    return f"{of.kernel}[{shown}] ({of.format})" if shown else f"{of.kernel} ({of.format})"
