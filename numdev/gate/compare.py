"""`numdev compare`: two audits of the same request, or two sweeps, on two versions, machines or
commits, row by row: what moved, what ran, what is new, what is gone.

Reads rows alone; needs neither torch nor a GPU. Which change is beyond noise is `movement`'s to
say; what the two must have in common `change`'s. Planted faults (`role: control`) are left out.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import numdev
from numdev.errors import UsageError, closest
from numdev.gate.change import MUST, Difference, differences, flat, unequal
from numdev.gate.compare_report import (
    CompareReport,
    CompareSummary,
    Failed,
    Group,
    Inputs,
    Move,
    NewsOfFinding,
    Presence,
    Ran,
    Side,
)
from numdev.gate.compare_words import answer, notes, threshold
from numdev.gate.movement import FAR, Change, Noise, Pair
from numdev.gate.rows import GRADIENTS, Key, Measured, grouped, spelt
from numdev.report import (
    AuditReport,
    CaseRecord,
    DeviationRow,
    Finding,
    Place,
    Provenance,
    SweepReport,
    read,
)

# By how much the numbers of two floors may differ, each of them, for nearly the same inputs: drawn
# anew they differ by some 1 / sqrt(elements), and all at once by so little never.
NEARLY = 1e-4
FLOOR = ("rms", "mean_abs", "max_abs", "rel")
# Fields that rows may differ in though all their numbers are equal.
IDENTITY = frozenset({"source", "seed", "options", "ran", "bits"})
UNITS = {
    "floor_ratio": " x the floor",
    "expected_ratio": " x what its roundings predict",
    "worst_row": " x what is predicted for its worst row",
    "rms": " (rms)",
}
_numbers = attrgetter(*(name for name in DeviationRow.model_fields if name not in IDENTITY))
_call = attrgetter("case", "module", "layer", "call", "phase")


def compare(a: Path, b: Path, *, allow: Collection[str] = (), command: str = "") -> CompareReport:
    """B beside A, each a report.json of an audit or a sweep, or a directory with one.

    Raises UsageError where either is none, or they differ in a key of `MUST` that is not in
    `allow`; MeasurementError for a report that cannot be understood.
    """
    for key in allow:
        if key not in MUST:
            raise UsageError(f"--allow {key}: no such key", hint=closest(key, MUST))
    old, new = _read(a), _read(b)
    apart = differences(old, new)
    refused = [d for d in apart if d.root not in allow]
    if refused:
        words = ", ".join(f"{d.key} ({d.a} in A, {d.b} in B)" for d in refused)
        hint = " ".join(dict.fromkeys(f"--allow {d.root}" for d in refused if d.root in MUST))
        raise UsageError(
            f"the two do not measure the same: they differ in {words}",
            hint=f"measure the same{f', or {hint}' if hint else ''}",
        )
    result = compared(old, new)
    findings = news(old, new, result.moves)
    return CompareReport(
        provenance=Provenance(
            numdev=numdev.__version__,
            command=command,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            system=new.provenance.system,
            source={"config": str(b), "run": new.provenance.source},
        ),
        request={"a": str(a), "b": str(b), "sha256": [_sha256(a), _sha256(b)]}
        | {"allow": sorted(allow)},
        summary=CompareSummary(
            answer=answer(result, apart, findings, new.rows),
            notes=tuple(notes(result)),
            inputs={str(k): v for k, v in result.inputs.items()},
            threshold=threshold(result),
        ),
        a=_side(a, old),
        b=_side(b, new),
        allowed=apart,
        changes=_changes(old, new),
        ran=result.ran,
        groups=result.groups,
        moves=result.moves,
        presences=result.presences,
        news=findings,
        failed=result.failed,
    )


def _read(path: Path) -> Measured:
    report = read(path)
    if not isinstance(report, AuditReport | SweepReport):
        raise UsageError(
            f"{path}: is a report of numdev {report.kind}, and compare takes audits or sweeps",
            hint="give reports of `numdev audit` or `numdev sweep`",
        )
    if isinstance(report, SweepReport) and not report.rows:
        raise UsageError(
            f"{path}: is a sweep that kept cells, and no rows of heads to compare",
            hint="sweep with `rows: head`",
        )
    return report


def _side(path: Path, report: Measured) -> Side:
    origin = {name: getattr(report.provenance, name) for name in ("numdev", "command", "created")}
    return Side(path=str(path), rows=len(report.rows), **origin)


def _sha256(path: Path) -> str:
    with (path / "report.json" if path.is_dir() else path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _changes(a: Measured, b: Measured) -> tuple[Difference, ...]:
    """What else differs in where the numbers come from: versions, machine, settings, options."""
    sides = []
    for report in (a, b):
        system = dict(report.provenance.system)
        packages = dict(system.pop("packages", None) or {})
        facts = {**packages, "numdev": report.provenance.numdev, **system}
        facts |= {key: report.request.get(key) for key in ("repeats", "isolate")}
        sides.append({key: x for name, y in facts.items() for key, x in flat(y, name)})
    keys = dict.fromkeys((*sides[1], *sides[0]))
    found = [d for key in keys for d in unequal(key, *(side.get(key) for side in sides))]
    here, there = (_options(report.rows) for report in (a, b))
    for kernel in here.keys() & there.keys():
        if len(here[kernel]) == len(there[kernel]) == 1:
            (old,), (new,) = here[kernel].values(), there[kernel].values()
            for key in dict.fromkeys((*new, *old)):
                found += unequal(f"{kernel[1]}: {key}", old.get(key), new.get(key))
    return tuple(found)


def _options(
    rows: Sequence[DeviationRow],
) -> dict[tuple[str, str], dict[str, Mapping[str, Any]]]:
    """Role and kernel to the sets of options it ran with, by what tells them apart."""
    sets: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        sets.setdefault((row.role, row.kernel), {}).setdefault(spelt(row.options), row.options)
    return sets


# --- which rows are a pair -----------------------------------------------------------------------


class Names:
    """What rows are called in both reports, so that they find each other.

    A kernel's options are part of its name where it ran with several sets of them; else they may
    have changed. So with the seed.
    """

    def __init__(self, a: Sequence[DeviationRow], b: Sequence[DeviationRow]) -> None:
        sides = [_options(rows) for rows in (a, b)]
        self._several = {k for kernels in sides for k, v in kernels.items() if len(v) > 1}
        self._seeds = any(len({row.seed for row in rows}) > 1 for rows in (a, b))

    def kernel(self, row: DeviationRow) -> Key:
        several = (row.role, row.kernel) in self._several
        return (row.role, row.kernel, spelt(row.options) if several else "", row.format)

    def call(self, row: DeviationRow) -> Key:
        return (*_call(row), row.seed if self._seeds else None)

    def step(self, row: DeviationRow, tensor: str) -> Key:
        """The forward or backward pass of a call, whichever the tensor comes from."""
        return (self.kernel(row), self.call(row), tensor in GRADIENTS)

    def row(self, row: DeviationRow) -> Key:
        return (self.kernel(row), self.call(row), row.tensor, row.head)

    def inputs(self, row: DeviationRow) -> Key:
        """The floor of a row: the exact result rounded once depends on the inputs alone."""
        tensor = "out" if row.tensor == "lse" else row.tensor
        return (row.format, self.call(row), tensor, row.head)


def _inputs(a: DeviationRow | None, b: DeviationRow | None) -> Inputs:
    """Whether two rows were measured on the same inputs, by their floors."""
    if a is None or b is None:
        return "unknown"
    if (a.bits is not None and a.bits == b.bits) or (None in (a.bits, b.bits) and equal(a, b)):
        return "same"
    pairs = [(getattr(a, name), getattr(b, name)) for name in FLOOR]
    close = all(
        x == y or (None not in (x, y) and math.isclose(x, y, rel_tol=NEARLY)) for x, y in pairs
    )
    return "nearly the same" if close and a.elements == b.elements else "other"


def equal(a: DeviationRow, b: DeviationRow) -> bool:
    """Whether two rows are equal in every number, and every reason for not having one."""
    return bool(_numbers(a) == _numbers(b))


def _widths(cases: Sequence[CaseRecord]) -> dict[tuple[str, str], int]:
    """Elements in a row of each tensor of each case."""
    wide = {"out": "v_dim", "dv": "v_dim", "dq": "head_dim", "dk": "head_dim"}
    return {(c.case, tensor): getattr(c, name) for c in cases for tensor, name in wide.items()}


# --- what moved ----------------------------------------------------------------------------------


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
    names, width = Names(old, new), _widths(b.cases)
    sides = [{names.row(r): r for r in rows if r.status == "ok"} for rows in (old, new)]
    floors = [{names.inputs(r): r for r in rows.values() if r.role == "floor"} for rows in sides]
    known: dict[Key, Inputs] = {}
    pairs: list[Pair] = []
    for key, row in sides[1].items():
        if key in sides[0] and row.role in ("kernel", "baseline"):
            place = names.inputs(row)
            if place not in known:
                known[place] = _inputs(*(floor.get(place) for floor in floors))
            wide = width.get((row.case, row.tensor), 1)
            pairs.append(Pair(sides[0][key], row, known[place], wide))
    noise = Noise(pairs)
    by_tensor: dict[Key, list[Pair]] = {}
    for pair in pairs:
        by_tensor.setdefault((*names.kernel(pair.b), pair.b.tensor), []).append(pair)
    groups, moves = [], []
    for members in by_tensor.values():
        judged = [noise.judged(pair) for pair in members]
        here = [m for p, numbers in zip(members, judged, strict=True) for m in _moves(p, numbers)]
        here += _reproducible(members)
        groups.append(_group(members, judged, here))
        moves += here
    return Compared(
        groups=tuple(groups),
        moves=tuple(sorted(moves, key=lambda move: -move.excess)),
        ran=tuple(_ran(pairs, names)),
        presences=(
            *_lacking("gone", sides[0], sides[1], new, names),
            *_lacking("new", sides[1], sides[0], old, names),
        ),
        failed=tuple(_failed(old, new)),
        inputs=dict(Counter(pair.inputs for pair in pairs)),
        tests=noise.tests,
    )


def _moves(pair: Pair, judged: Sequence[Change]) -> Iterator[Move]:
    """What moved in one head: facts first; of its numbers the one farthest beyond noise."""
    a, b = pair.a, pair.b
    counts = a.nonfinite or 0, b.nonfinite or 0
    # Two counts may be equal but for chance; none and some are never.
    chance = min(counts) > 0 and abs(counts[0] - counts[1]) <= 4 * math.sqrt(sum(counts))
    if counts[0] != counts[1] and not chance:
        words = f"elements that are not finite: {counts[0]}, now {counts[1]}"
        yield _move(pair, "nonfinite", words, a=a.nonfinite, b=b.nonfinite)
    if (a.suspicion is None) != (b.suspicion is None):
        words = f"{a.suspicion or 'no other function'}, now {b.suspicion or 'no other function'}"
        yield _move(pair, "suspicion", words)
    worst = max(judged, key=lambda change: change.excess, default=None)
    if worst is not None and worst.excess > 1:
        numbers = {name: getattr(worst, name) for name in ("a", "b", "change", "excess")}
        words = f"from {worst.a:.3g} to {worst.b:.3g}{UNITS[worst.metric]}"
        yield _move(pair, worst.metric, words, noise=math.exp(worst.noise), **numbers)


def _reproducible(members: Sequence[Pair]) -> Iterator[Move]:
    """A kernel that returned the same bits in all heads, and no longer does in most; or the
    reverse. In a few heads runs may agree, or not, by luck."""
    known = [p for p in members if p.a.noise is not None and p.b.noise is not None]
    noisy = [sum(bool(getattr(p, side).noise) for p in known) for side in ("a", "b")]
    if min(noisy) or 2 * max(noisy) <= len(known):
        return
    pair = max(known, key=lambda p: max(p.a.noise or 0.0, p.b.noise or 0.0))
    state = [f"not reproducible ({n} of {len(known)} heads)" if n else "the same" for n in noisy]
    words = f"runs on the same inputs: {state[0]}, now {state[1]}"
    yield _move(pair, "noise", words, a=pair.a.noise, b=pair.b.noise)


def _who(row: DeviationRow) -> dict[str, Any]:
    return {n: getattr(row, n) for n in ("role", "kernel", "options", "format")}


def _move(pair: Pair, metric: str, words: str, **numbers: Any) -> Move:
    """A fact, or a number of which there are more."""
    nothing: dict[str, Any] = {"a": None, "b": None, "change": None, "noise": None, "excess": FAR}
    return Move(
        **_who(pair.b),
        tensor=pair.b.tensor,
        place=Place.of(pair.b),
        metric=metric,
        **(nothing | numbers),
        floor_a=pair.a.floor_ratio,
        floor_b=pair.b.floor_ratio,
        inputs=pair.inputs,
        words=words,
    )


def _group(pairs: Sequence[Pair], judged: Sequence[Sequence[Change]], moves: list[Move]) -> Group:
    """One tensor of one kernel, told by the floor ratio, which a reader knows; else by whatever
    most heads have."""
    named = [change.metric for changes in judged for change in changes]
    metric = max(("floor_ratio", *dict.fromkeys(named)), key=named.count) if named else None
    told = [
        (pair, change)
        for pair, changes in zip(pairs, judged, strict=True)
        for change in changes
        if change.metric == metric
    ]
    ratios = [(x.change, pair) for pair, x in told if x.change]
    farthest = max(ratios, key=lambda r: abs(math.log(r[0])), default=None)
    return Group(
        **_who(pairs[0].b),
        tensor=pairs[0].b.tensor,
        pairs=len(pairs),
        same_bits=sum(p.a.bits is not None and p.a.bits == p.b.bits for p in pairs),
        same_numbers=sum(equal(p.a, p.b) for p in pairs),
        moved=len({(m.place, m.tensor) for m in moves}),
        metric=metric,
        a=statistics.median(x.a for _, x in told) if told else None,
        b=statistics.median(x.b for _, x in told) if told else None,
        change=farthest[0] if farthest else None,
        where=Place.of(farthest[1].b) if farthest else None,
        unjudged=sum(
            bool(pair.metrics) and not any(math.isfinite(x.noise) for x in changes)
            for pair, changes in zip(pairs, judged, strict=True)
        ),
    )


# --- what only one of them has -------------------------------------------------------------------


def _ran(pairs: Sequence[Pair], names: Names) -> Iterator[Ran]:
    """Other code than before, by kernel and pass."""
    passes: dict[Key, dict[Key, Pair]] = {}
    for pair in pairs:
        if pair.b.role == "kernel" and pair.a.ran and pair.b.ran:
            kernel, call, backward = names.step(pair.b, pair.b.tensor)
            passes.setdefault((kernel, backward), {}).setdefault(call, pair)
    for (_, backward), calls in passes.items():
        for (a, b), count in Counter((p.a.ran, p.b.ran) for p in calls.values()).items():
            if a != b:
                row = next(p.b for p in calls.values() if p.a.ran != p.b.ran)
                who = {n: getattr(row, n) for n in ("kernel", "options", "format")}
                yield Ran(**who, backward=backward, a=a or "", b=b or "", calls=count,
                          of=len(calls))  # fmt: skip


def _lacking(
    what: Literal["gone", "new"],
    mine: Mapping[Key, DeviationRow],
    theirs: Mapping[Key, DeviationRow],
    others: Sequence[DeviationRow],
    names: Names,
) -> Iterator[Presence]:
    """What was measured in one and not in the other, of which `others` are all rows; by kernel and
    reason."""
    bare = {names.step(r, r.tensor): r for r in others if r.status != "ok"}
    kernels = {names.kernel(r) for r in others}

    def why_of(row: DeviationRow) -> str:
        if names.kernel(row) not in kernels:
            return "the kernel is not in the other report"
        other = bare.get(names.step(row, row.tensor)) or bare.get(names.step(row, "out"))
        return f"{other.status}: {other.reason}" if other else "there is no such row"

    rows = (row for key, row in mine.items() if key not in theirs)
    for (_, why), members in grouped(rows, lambda r: (names.kernel(r), why_of(r))).items():
        tensors = tuple(dict.fromkeys(r.tensor for r in members))
        place = Place.of(members[0])
        yield Presence(
            what=what, **_who(members[0]), tensors=tensors, rows=len(members), why=why, place=place
        )


def _failed(old: Sequence[DeviationRow], new: Sequence[DeviationRow]) -> Iterator[Failed]:
    counts: dict[Key, Counter[str]] = {}
    for side, rows in (("A", old), ("B", new)):
        for row in rows:
            if row.status == "failed":
                key = (row.kernel, row.format, row.reason or "")
                counts.setdefault(key, Counter())[side] += 1
    for (kernel, fmt, reason), sides in counts.items():
        both: Any = " and ".join(sides)
        yield Failed(side=both, kernel=kernel, format=fmt, calls=max(sides.values()), reason=reason)


def news(a: Measured, b: Measured, moves: Sequence[Move]) -> tuple[NewsOfFinding, ...]:
    """Findings that only one of the two has. That one is beyond its limit and the other not does
    not say that anything moved."""
    named = {(m.kernel, m.format, m.tensor) for m in moves}

    def key(f: Finding) -> Key:
        return (f.rule, f.kernel, spelt(f.options), f.formats, f.tensor)

    def only(what: Literal["new", "gone"], x: Measured, y: Measured) -> list[NewsOfFinding]:
        others = {key(f) for f in y.findings}
        return [
            NewsOfFinding(
                what=what,
                moved=any((f.kernel, fmt, f.tensor) in named for fmt in f.formats),
                finding=f,
            )
            for f in x.findings
            if key(f) not in others
        ]

    return (*only("new", b, a), *only("gone", a, b))
