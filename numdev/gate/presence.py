"""What two audits do not both have: rows, findings, calls that failed, and other code that ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from numdev.gate.comparable import Measured, spelt
from numdev.gate.compare_report import Failed, Move, NewsOfFinding, Presence, Ran
from numdev.gate.movement import Pair
from numdev.gate.pairing import Key, Names
from numdev.report import DeviationRow, Place

GRADIENTS = ("dq", "dk", "dv")


def ran(pairs: Sequence[Pair], names: Names) -> Iterator[Ran]:
    grouped: dict[Key, dict[Key, Pair]] = {}
    for pair in pairs:
        if pair.b.role == "kernel" and pair.a.ran and pair.b.ran:
            key = (*names.kernel(pair.b), pair.b.tensor in GRADIENTS)
            grouped.setdefault(key, {}).setdefault(names.call(pair.b), pair)
    for (*_, backward), calls in grouped.items():
        changed = [p for p in calls.values() if p.a.ran != p.b.ran]
        for a, b in dict.fromkeys((p.a.ran or "", p.b.ran or "") for p in changed):
            row = changed[0].b
            yield Ran(
                kernel=row.kernel, options=row.options, format=row.format, backward=backward,
                a=a, b=b, calls=sum((p.a.ran, p.b.ran) == (a, b) for p in changed), of=len(calls),
            )  # fmt: skip


def presences(
    old: Sequence[DeviationRow],
    new: Sequence[DeviationRow],
    measured: Sequence[Mapping[Key, DeviationRow]],
    names: Names,
) -> Iterator[Presence]:
    """What was measured in one and not in the other, by kernel and reason. `measured`: of the two,
    by name."""
    there, here = measured
    gone = [row for key, row in there.items() if key not in here]
    fresh = [row for key, row in here.items() if key not in there]
    if gone:
        yield from _lacking("gone", gone, new, names)
    if fresh:
        yield from _lacking("new", fresh, old, names)


def _lacking(
    what: Literal["gone", "new"],
    rows: Sequence[DeviationRow],
    others: Sequence[DeviationRow],
    names: Names,
) -> Iterator[Presence]:
    whys = {_of_call(r, names, r.tensor): r for r in others if r.status != "ok"}
    kernels = {names.kernel(r) for r in others}
    grouped: dict[Key, list[DeviationRow]] = {}
    for row in rows:
        bare = whys.get(_of_call(row, names, row.tensor)) or whys.get(_of_call(row, names, "out"))
        why = f"{bare.status}: {bare.reason}" if bare else "there is no such row"
        if names.kernel(row) not in kernels:
            why = "the kernel is not in the other report"
        grouped.setdefault((names.kernel(row), why), []).append(row)
    for (_, why), members in grouped.items():
        row = members[0]
        yield Presence(
            what=what, role=row.role, kernel=row.kernel, options=row.options, format=row.format,
            tensors=tuple(dict.fromkeys(r.tensor for r in members)), rows=len(members), why=why,
            place=Place.of(row),
        )  # fmt: skip


def _of_call(row: DeviationRow, names: Names, tensor: str) -> Key:
    """The forward or backward pass of a call, whichever the tensor comes from."""
    return (names.kernel(row), names.call(row), tensor in GRADIENTS)


def failed(old: Sequence[DeviationRow], new: Sequence[DeviationRow]) -> Iterator[Failed]:
    found: dict[Key, dict[str, int]] = {}
    for side, rows in (("A", old), ("B", new)):
        for row in rows:
            if row.status == "failed":
                sides = found.setdefault((row.kernel, row.format, row.reason or ""), {})
                sides[side] = sides.get(side, 0) + 1
    for (kernel, fmt, reason), sides in found.items():
        both: Any = " and ".join(sides)
        yield Failed(side=both, kernel=kernel, format=fmt, calls=max(sides.values()), reason=reason)


def news(a: Measured, b: Measured, moves: Sequence[Move]) -> tuple[NewsOfFinding, ...]:
    """Findings that only one of the two has. That one is beyond its limit and the other not does
    not say that anything moved."""

    def key(f: Any) -> Key:
        return (f.rule, f.kernel, spelt(f.options), f.formats, f.tensor)

    moved = {(m.kernel, m.format, m.tensor) for m in moves}
    known = [{key(f): f for f in x.findings} for x in (a, b)]
    sides: tuple[tuple[Literal["new", "gone"], int], ...] = (("new", 1), ("gone", 0))
    return tuple(
        NewsOfFinding(
            what=what,
            moved=any((f.kernel, fmt, f.tensor) in moved for fmt in f.formats),
            finding=f,
        )
        for what, at in sides
        for k, f in known[at].items()
        if k not in known[1 - at]
    )
