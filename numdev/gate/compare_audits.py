"""Two audits beside each other, row by row: what moved, what ran, what is new, what is gone.

Reads rows and nothing else. Which change is beyond noise is `numdev.gate.movement`'s to say;
what the two must have in common `numdev.gate.comparable`'s. Planted faults (`role: control`)
are left out: they are about the gate.

Besides the numbers that are compared with noise, some facts have none: elements that are not finite
where there were none, a named other function, and whether a kernel returns the same bits when it is
run again, which is told of all its heads together.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from numdev.gate.comparable import Measured
from numdev.gate.compare_report import Failed, Group, Inputs, Move, Presence, Ran
from numdev.gate.movement import Judged, Noise, Pair
from numdev.gate.pairing import Key, Names, Told, equal, widths
from numdev.gate.presence import failed, presences, ran
from numdev.report import Place


@dataclass(frozen=True)
class Compared:
    """What there is to say of two lists of rows."""

    groups: tuple[Group, ...]
    moves: tuple[Move, ...]
    ran: tuple[Ran, ...]
    presences: tuple[Presence, ...]
    failed: tuple[Failed, ...]
    inputs: dict[Inputs, int]
    tests: int
    """Numbers that were judged."""


def compared(a: Measured, b: Measured) -> Compared:
    """B beside A. Rows are told apart by what they say of themselves; a row that is there twice
    counts once."""
    old, new = ([r for r in x.rows if r.role != "control"] for x in (a, b))
    names = Names(old, new)
    there, here = ({names.row(r): r for r in rows if r.status == "ok"} for rows in (old, new))
    told = Told(there, here, names)
    wide = widths(b.cases)
    both = [(row, there[key]) for key, row in here.items() if key in there]
    judged = [(r, s) for r, s in both if r.role in ("kernel", "baseline")]
    known = [told.of(row) for row, _ in judged]
    pairs = [
        Pair(s, r, inputs != "other", wide.get((r.case, r.tensor), 1))
        for (r, s), inputs in zip(judged, known, strict=True)
    ]
    noise = Noise(pairs)
    groups, moves = _moved(pairs, known, names, noise)
    return Compared(
        groups=tuple(groups),
        moves=tuple(sorted(moves, key=lambda move: -move.excess)),
        ran=tuple(ran(pairs, names)),
        presences=tuple(presences(old, new, (there, here), names)),
        failed=tuple(failed(old, new)),
        inputs={k: known.count(k) for k in dict.fromkeys(known)},
        tests=noise.tests,
    )


def _moved(
    pairs: Sequence[Pair], inputs: Sequence[Inputs], names: Names, noise: Noise
) -> tuple[list[Group], list[Move]]:
    """A group for each tensor of each kernel, and what moved in it."""
    grouped: dict[Key, list[tuple[Pair, Inputs]]] = {}
    for pair, known in zip(pairs, inputs, strict=True):
        grouped.setdefault((*names.kernel(pair.b), pair.b.tensor), []).append((pair, known))
    groups, moves = [], []
    for members in grouped.values():
        judged = [noise.judged(pair) for pair, _ in members]
        found = [
            move
            for (pair, known), numbers in zip(members, judged, strict=True)
            for move in _moves(pair, numbers, known)
        ]
        found += _reproducible(members)
        groups.append(_group([pair for pair, _ in members], judged, found))
        moves += found
    return groups, moves


def _moves(pair: Pair, judged: Sequence[Judged], inputs: Inputs) -> Iterator[Move]:
    """What moved in one head: facts first; of its numbers the one farthest beyond noise."""
    a, b = pair.a, pair.b
    if not _same_count(a.nonfinite or 0, b.nonfinite or 0):
        words = f"elements that are not finite: {a.nonfinite or 0}, now {b.nonfinite or 0}"
        yield _move(pair, "nonfinite", inputs, words, a.nonfinite, b.nonfinite)
    if (a.suspicion is None) != (b.suspicion is None):
        words = f"{a.suspicion or 'no other function'}, now {b.suspicion or 'no other function'}"
        yield _move(pair, "suspicion", inputs, words)
    worst = max(judged, key=lambda found: found.excess, default=None)
    if worst is not None and worst.excess > 1:
        yield _move(
            pair,
            worst.metric,
            inputs,
            _from_to(pair, worst),
            worst.a,
            worst.b,
            change=worst.change,
            noise=math.exp(worst.noise),
            excess=worst.excess,
        )


def _same_count(a: int, b: int) -> bool:
    """Whether two counts may be equal but for chance; none and some are never."""
    return a == b or (min(a, b) > 0 and abs(a - b) <= 4 * math.sqrt(a + b))


UNITS = {
    "floor_ratio": " x the floor",
    "expected_ratio": " x what its roundings predict",
    "worst_row": " x what is predicted for its worst row",
    "rms": " (rms)",
}


def _from_to(pair: Pair, judged: Judged) -> str:
    """The change in words; in units of the floor where that says as much."""
    a, b, metric = judged.a, judged.b, judged.metric
    floors = pair.a.floor_ratio, pair.b.floor_ratio
    if metric == "expected_ratio" and pair.same and floors[0] and floors[1] and judged.change:
        beside = math.log(floors[1] / floors[0]) / math.log(judged.change)
        if beside > 0.5:  # plain and row by row they tell the same
            a, b, metric = floors[0], floors[1], "floor_ratio"
    return f"from {a:.3g} to {b:.3g}{UNITS[metric]}"


def _move(
    pair: Pair,
    metric: str,
    inputs: Inputs,
    words: str,
    a: float | None = None,
    b: float | None = None,
    *,
    change: float | None = None,
    noise: float | None = None,
    excess: float = 100.0,
) -> Move:
    row = pair.b
    return Move(
        role=row.role, kernel=row.kernel, options=row.options, format=row.format,
        tensor=row.tensor, place=Place.of(row), metric=metric, a=a, b=b, change=change,
        noise=noise, excess=excess, floor_a=pair.a.floor_ratio, floor_b=row.floor_ratio,
        inputs=inputs, words=words,
    )  # fmt: skip


def _reproducible(members: Sequence[tuple[Pair, Inputs]]) -> Iterator[Move]:
    """A kernel that returned the same bits in all heads, and no longer does in most; or the
    reverse. In a few heads runs may agree, or not, by luck."""
    known = [(p, i) for p, i in members if p.a.noise is not None and p.b.noise is not None]
    noisy = [sum(bool(getattr(p, side).noise) for p, _ in known) for side in ("a", "b")]
    if min(noisy, default=0) or 2 * max(noisy, default=0) <= len(known):
        return
    pair, inputs = max(known, key=lambda m: max(m[0].a.noise or 0.0, m[0].b.noise or 0.0))
    state = [f"not reproducible ({n} of {len(known)} heads)" if n else "the same" for n in noisy]
    words = f"runs on the same inputs: {state[0]}, now {state[1]}"
    yield _move(pair, "noise", inputs, words, pair.a.noise, pair.b.noise)


def _group(pairs: Sequence[Pair], judged: Sequence[Sequence[Judged]], moves: list[Move]) -> Group:
    first = pairs[0].b
    metric = _told_by(judged)
    told = [(p, j) for p, found in zip(pairs, judged, strict=True) for j in found]
    told = [(p, j) for p, j in told if j.metric == metric]
    ratios = [(p, j.change) for p, j in told if j.change]
    farthest = max(ratios, key=lambda r: abs(math.log(r[1])), default=None)
    return Group(
        role=first.role, kernel=first.kernel, options=first.options, format=first.format,
        tensor=first.tensor, pairs=len(pairs),
        same_bits=sum(p.a.bits is not None and p.a.bits == p.b.bits for p in pairs),
        same_numbers=sum(equal(p.a, p.b) for p in pairs),
        moved=len({(m.place, m.tensor) for m in moves}),
        metric=metric,
        a=statistics.median(j.a for _, j in told) if told else None,
        b=statistics.median(j.b for _, j in told) if told else None,
        change=farthest[1] if farthest else None,
        where=Place.of(farthest[0].b) if farthest else None,
        unjudged=sum(
            not any(math.isfinite(j.noise) for j in found) and bool(pair.metrics)
            for pair, found in zip(pairs, judged, strict=True)
        ),
    )  # fmt: skip


def _told_by(judged: Sequence[Sequence[Judged]]) -> str | None:
    """The floor ratio, which a reader knows; else whatever most heads have."""
    named = [j.metric for found in judged for j in found]
    return max(("floor_ratio", *dict.fromkeys(named)), key=named.count) if named else None
