"""Two reports of `numdev effects`, or of `numdev invariance`: what moved.

Of effects, a number of a run in B over that in A is taken for each sequence. Its logarithm scatters
about 0 where only the order of roundings changed; it moved where Student's t says otherwise, at 1 %
over all runs (Holm), or where every sequence says so by more than SURELY. Of invariance, and of the
model's own output in it, a row moved where bits were the same and no longer are, or the reverse,
where its cause is another one, or one of its numbers another by TIMES."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from scipy.special import stdtr

from numdev.gate.compare_report import Compared, Group, Move, Presence
from numdev.gate.consistency import COSTS, DIFFERENCES, OF_MODELS, name_of_check
from numdev.gate.findings import label
from numdev.gate.movement import FAR, by_chance, factor, log_ratio
from numdev.gate.rows import Key, grouped
from numdev.metrics.statistics import holm
from numdev.report import Place
from numdev.report.numbers import three

ALPHA = 0.01
LEAST = 3  # sequences, below which chance is unknown
SURELY = 10.0  # a factor in every sequence that is no chance, however few they are
TIMES = 2.0
SCALES = {  # numbers of a run that have a ratio, and what they are called
    "cost": "the error at the {place} (cost)",
    "log_prob": "the change of log-probabilities",
    "error": "the relative error of the {place}",
}
OF_ROWS = {  # the same of invariance, but for the log-sum-exp, whose error has no floor
    "floor_ratio": "× the floor's error",
    "excess": "× what roundings explain",
    "excess_of_a_row": "× what roundings explain, in its worst row",
}
OF_OUTPUTS = {"difference": " of the output", "rest": " of the output with attention in fp64"}
ERRORS = {"error_base": "as it is", "error_variant": "in the other form"}
NOWHERE: dict[str, Any] = {**dict.fromkeys(Place.model_fields), "module": "", "call": 0}
HOLDS = {None: "not tried", True: "holds", False: "fails"}
NOTE = (
    "A cost moved where its ratio differs from 1 over the sequences (Student's t, 1 % over all "
    "{tests} numbers of runs by Holm), or where it exceeds {surely:g} in every sequence."
)
FEW = (
    "Chance is unknown below {least} sequences: there, only a factor above {surely:g} is a change."
)


class InvarianceNames:
    """What tells rows of `numdev invariance` apart, as `movement.Names` does for an audit's."""

    def kernel(self, row: Any) -> Key:
        return label(row), row.format

    def step(self, row: Any) -> Key:
        return self.kernel(row), (row.case, row.axis, row.variant), False

    def row(self, row: Any) -> Key:
        return (*self.step(row), row.tensor)

    def lost(self, a: Any, b: Any) -> list[str]:
        return _lost(a, b, DIFFERENCES)

    def about(self, row: Any) -> dict[str, Any]:
        return {**row.who, "tensor": f"{row.axis} {row.tensor}"}

    def place(self, row: Any) -> Place:
        return Place(**{**NOWHERE, "case": row.case, "layer": row.layer})


class EffectsNames:
    """The same of `numdev effects`."""

    def kernel(self, row: Any) -> Key:
        return label(row), row.format

    def step(self, row: Any) -> Key:
        return self.kernel(row), (row.run, row.sequence), False

    row = step

    def lost(self, a: Any, b: Any) -> list[str]:
        return [*_lost(a, b, COSTS), *(["growth"] if a.growth and not b.growth else [])]

    def about(self, row: Any) -> dict[str, Any]:
        layer = "" if row.layer is None else f"L{row.layer}"
        where = " ".join(filter(None, (row.kind, row.site, layer, row.at)))
        about = {"role": "kernel", "kernel": row.kernel or "model", "options": row.options}
        return about | {"format": row.format, "tensor": where}

    def place(self, row: Any) -> Place:
        return _nowhere(self.about(row)["tensor"])


def _lost(a: Any, b: Any, names: Sequence[str]) -> list[str]:
    """Numbers that A has and B lacks."""
    return [name for name in names if getattr(a, name) is not None and getattr(b, name) is None]


def effects_moves(old: Any, new: Any) -> tuple[EffectsNames, Compared]:
    """Every run that both reports have, and those that moved: a cost that was 0, and no longer is,
    or the reverse, whatever chance does; and checks that hold in one of them alone."""
    names = EffectsNames()
    pairs = grouped(_pairs(names, old.rows, new.rows), lambda pair: pair[1].run)
    ratios = {
        (run, metric): [log for a, b in both if (log := log_ratio(a, b)) is not None]
        for run, rows in pairs.items()
        for metric in SCALES
        if (both := _both(rows, metric))
    }
    p = {key: _p(logs) for key, logs in ratios.items() if len(logs) >= LEAST}
    moved = dict(zip(p, holm(list(p.values()), ALPHA), strict=True))
    groups: list[Group] = []
    moves: list[Move] = []
    for run, rows in pairs.items():
        about, place = names.about(rows[0][1]), names.place(rows[0][1])
        of_run: list[Move] = []
        for metric, words in SCALES.items():
            both = _both(rows, metric)
            zero = any((a == 0) != (b == 0) for a, b in both)
            logs = ratios.get((run, metric), [])
            if not (zero or moved.get((run, metric), False) or _surely(logs)):
                continue
            a, b = (statistics.median(side) for side in zip(*both, strict=True))
            mean = statistics.mean(logs) if logs else None
            text = f"{words.format(place=rows[0][1].place)} from {three(a)} to {three(b)}"
            excess = FAR if zero or mean is None else 1 + abs(mean)
            numbers: dict[str, Any] = {"a": a, "b": b, "change": factor(mean)}
            numbers["excess"] = min(FAR, excess)
            of_run.append(Move(**about, place=place, metric=metric, words=text, **numbers))
        of_run += [Move(**about, place=place, excess=FAR, **fact) for fact in _counts_of(rows)]
        groups.append(_group_of_run(about, rows, ratios.get((run, "cost"), []), of_run))
        moves += of_run
    notes = [NOTE.format(tests=len(p), surely=SURELY)]
    if any(group.unjudged for group in groups):
        notes.insert(0, FEW.format(least=LEAST, surely=SURELY))
    changed, presences = _checks(old.checks, new.checks)
    return names, Compared(groups, [*moves, *changed], tuple(notes), presences=tuple(presences))


def _pairs(names: Any, old: Iterable[Any], new: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Rows that were measured in both."""
    before = {names.row(row): row for row in old if row.status == "ok"}
    after = {names.row(row): row for row in new if row.status == "ok"}
    return [(before[key], row) for key, row in after.items() if key in before]


def _both(rows: Iterable[tuple[Any, Any]], metric: str) -> list[tuple[float, float]]:
    """A number in both reports, where both have it."""
    values = ((getattr(a, metric), getattr(b, metric)) for a, b in rows)
    return [(a, b) for a, b in values if a is not None and b is not None]


def _surely(logs: Sequence[float]) -> bool:
    """Whether every sequence has changed by more than SURELY, the same way."""
    return bool(logs) and (min(logs) > math.log(SURELY) or max(logs) < -math.log(SURELY))


def _group_of_run(
    about: dict[str, Any], rows: Sequence[tuple[Any, Any]], logs: Sequence[float],
    moves: Sequence[Move],
) -> Group:  # fmt: skip
    """One run. It is judged where its costs are equal, where they moved, or where chance is known
    from the ratios of enough of them."""
    both = _both(rows, "cost")
    a, b = (statistics.median(side) for side in zip(*both, strict=True)) if both else (None, None)
    same = sum(x == y for x, y in both)
    judged = bool(moves) or same == len(rows) or len(logs) >= LEAST
    return Group(
        **about,
        metric="cost",
        a=a,
        b=b,
        change=factor(statistics.mean(logs)) if logs else None,
        pairs=len(rows),
        same_bits=same,
        moved=len(rows) if moves else 0,
        unjudged=0 if judged else len(rows),
    )


def _counts_of(rows: Sequence[tuple[Any, Any]]) -> Iterator[dict[str, Any]]:
    """What changed of a run's counts, over its sequences."""
    for metric, what in (
        ("positions", "positions"), ("flips", "top tokens that flip"),
        ("unexplained", "flips that are no near ties"),
    ):  # fmt: skip
        both = _both(rows, metric)
        a, b = (int(sum(side)) for side in zip(*both, strict=True)) if both else (0, 0)
        alike = {
            "positions": a == b,
            "flips": abs(a - b) <= 4 * math.sqrt(a + b),
            "unexplained": by_chance(a, b),
        }
        if not alike[metric]:
            yield {"metric": metric, "a": a, "b": b, "words": f"{what}: {a}, now {b}"}


def _p(logs: Sequence[float]) -> float:
    """The two-sided p of the mean of logarithms, 1 where all are 0."""
    spread = statistics.stdev(logs) / math.sqrt(len(logs))
    if spread == 0:
        return 0.0 if any(logs) else 1.0
    return float(2 * stdtr(len(logs) - 1, -abs(statistics.mean(logs)) / spread))


def _checks(old: Sequence[Any], new: Sequence[Any]) -> tuple[list[Move], list[Presence]]:
    """Checks that hold in one report alone, and those that one report alone could try."""
    sides = [{name_of_check(check): check for check in checks} for checks in (old, new)]
    moves: list[Move] = []
    presences: list[Presence] = []
    for key in dict.fromkeys((*sides[0], *sides[1])):
        a, b = (side.get(key) for side in sides)
        check: Any = b or a
        one, two = (None if each is None else each.holds for each in (a, b))
        if one == two:
            continue
        fmt, place = check.format or "float64", _nowhere(f"check {check.name}")
        # One that fails and was not there before is a fault, whoever asked for it.
        if (one is not None and two is not None) or (a is None and two is False):
            words = f"check {check.name}: {HOLDS[one]}, now {HOLDS[two]}"
            moves.append(
                Move(
                    **_model(fmt),
                    tensor="checks",
                    place=place,
                    metric="check",
                    a=a and a.difference,
                    b=b and b.difference,
                    excess=FAR,
                    words=f"{words} ({check.reason})" if check.reason else words,
                )
            )
        else:
            other = b if two is None else a
            why = "there is no such check" if other is None else other.reason
            lacks = f"check {check.name}"
            presences.append(_alone(_model(fmt), place, two is None, "checks", why, lacks))
    return moves, presences


def _model(fmt: str, kernel: str = "model") -> dict[str, Any]:
    """The fields that name the model, or a kernel in it, in place of a kernel of its own."""
    return {"role": "kernel", "kernel": kernel, "options": {}, "format": fmt}


def _nowhere(name: str) -> Place:
    """The place of what is in no call."""
    return Place(**{**NOWHERE, "case": name})


def _alone(
    of: dict[str, Any], place: Place, gone: bool, tensor: str, why: str, *lacks: str
) -> Presence:
    """What is gone from B, or new in it."""
    what: Any = "gone" if gone else "new"
    why = why or "no number"
    of = {**of, "tensors": (tensor,), "place": place}
    return Presence(**of, what=what, rows=1, why=why, lacks=lacks)


def invariance_moves(old: Any, new: Any) -> tuple[InvarianceNames, Compared]:
    """Every axis of every tensor that both reports have, and what moved."""
    names = InvarianceNames()
    pairs = _pairs(names, old.rows, new.rows)
    groups: list[Group] = []
    moves: list[Move] = []
    by_axis = grouped(pairs, lambda p: (label(p[1]), p[1].format, p[1].axis, p[1].tensor))
    for of_axis in by_axis.values():
        axis: list[Move] = []
        for a, b in of_axis:
            of = names.about(b) | {"place": names.place(b)}
            axis += [Move(**of, **change) for change in _of_difference(a, b)]
        ratios = [[row.floor_ratio for row in side] for side in zip(*of_axis, strict=True)]
        largest = [max((x for x in xs if x is not None), default=None) for xs in ratios]
        same = sum(a.same and b.same for a, b in of_axis)
        of = names.about(of_axis[0][1]) | {"metric": "difference", "a": largest[0], "b": largest[1]}
        places = {move.words.partition(": ")[0] for move in axis}
        groups.append(Group(**of, pairs=len(of_axis), same_bits=same, moved=len(places)))
        moves += axis
    moves += _unsteady(names, old, new)
    own_output, presences = _outputs(old.models, new.models)
    note = (
        f"An axis moved where its bits, its cause, or one of its numbers by {TIMES:g} times did; A "
        "and B are the largest differences over the floor's error."
    )
    return names, Compared(groups, [*moves, *own_output], (note,), presences=tuple(presences))


def _of_difference(a: Any, b: Any) -> Iterator[dict[str, Any]]:
    """What moved in one row: of bits, causes and counts a fact; of its numbers the farthest."""
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
        yield {**fact, "change": change, "words": f"{b.variant}: {_said(a)}, now {_said(b)}"}
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
    """A number that changed by more than TIMES, or that was 0 and no longer is; else None."""
    one, two = getattr(a, name), getattr(b, name)
    if one is None or two is None or one == two:
        return None
    log = log_ratio(one, two)
    far = FAR if log is None else min(FAR, abs(log) / math.log(TIMES))
    if far <= 1:
        return None
    return {"metric": name, "a": one, "b": two, "change": factor(log), "excess": far}


def _counts_alike(a: int, b: int) -> bool:
    """Whether two counts of elements that differ are about the same: within TIMES, or within what
    chance does to so few."""
    return max(a, b) <= TIMES * min(a, b) or abs(a - b) <= 2 * math.sqrt(a + b)


def _unsteady(names: InvarianceNames, old: Any, new: Any) -> Iterator[Move]:
    """Kernels that gave the same bits again in A, and in B do not: such a row is there only where
    they do not."""
    before = {names.row(row) for row in old.rows}
    kernels = {names.kernel(row) for row in old.rows if row.status == "ok"}
    for row in new.rows:
        if row.axis != "repeat" or row.status != "ok" or row.same or names.row(row) in before:
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
    """The model's own output with each kernel along each axis: what moved, what one report alone
    has, and numbers that are gone."""
    sides = [dict(_numbered(rows)) for rows in (old, new)]
    moves: list[Move] = []
    presences: list[Presence] = []
    for key in dict.fromkeys((*sides[0], *sides[1])):
        a, b = (side.get(key) for side in sides)
        row: Any = b or a
        of, tensor = _model(row.format, row.kernel), f"{row.axis} output"
        place = _nowhere(f"the model's output along {row.axis}")
        ran = [each is not None and each.reason is None for each in (a, b)]
        if all(ran):
            moves += [Move(**of, tensor=tensor, place=place, **x) for x in _of_output(a, b)]
            for gone, lost in ((True, _lost(a, b, OF_MODELS)), (False, _lost(b, a, OF_MODELS))):
                if lost:
                    presences.append(_alone(of, place, gone, tensor, "no number", *lost))
        elif any(ran):
            other = b if ran[0] else a
            why = "there is no such row" if other is None else other.reason
            lacks = f"the model's output along {row.axis}"
            presences.append(_alone(of, place, ran[0], tensor, why, lacks))
    return moves, presences


def _numbered(rows: Iterable[Any]) -> Iterator[tuple[Key, Any]]:
    """Rows of the model's output; those of one kernel with several options by their order, since
    they do not say which."""
    counts: Counter[Key] = Counter()
    for row in rows:
        key = (row.axis, row.kernel, row.format)
        counts[key] += 1
        yield (*key, counts[key]), row


def _of_output(a: Any, b: Any) -> Iterator[dict[str, Any]]:
    """What moved in the model's own output along one axis."""
    if a.elements != b.elements:
        words = f"elements: {a.elements}, now {b.elements}"
        yield {"metric": "elements", "excess": FAR, "words": words}
    if (a.differ == 0) != (b.differ == 0):
        words = f"{a.differ} of {a.elements} elements differ, now {b.differ} of {b.elements}"
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
            yield {**change, "words": f"from {three(change['a'])} to {three(change['b'])}{what}"}
            return
    if not _counts_alike(a.differ, b.differ):
        words = f"elements that differ: {a.differ}, now {b.differ}"
        yield {"metric": "differ", "excess": FAR, "words": words}


def _said(row: Any) -> str:
    if row.same:
        return "the same bits"
    text = f"{three(row.floor_ratio)}× the floor's error"
    return text + (f" ({row.cause})" if row.cause is not None else "")
