"""Two reports of `numdev effects`, or of `numdev invariance`: what moved.

Of effects, a run's cost in B over that in A is taken for each sequence. Its logarithm scatters
about 0 where only the order of roundings changed; it moved where Student's t says otherwise, at 1 %
over all runs (Holm). Of invariance, an axis moved where bits were the same and no longer are, or
the reverse, where its cause is another one, or its size another by TIMES."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from scipy.special import stdtr

from numdev.gate.compare_report import Compared, Group, Move
from numdev.gate.findings import label
from numdev.gate.movement import FAR
from numdev.gate.rows import Key
from numdev.grouping import grouped
from numdev.metrics.statistics import holm
from numdev.report import Place
from numdev.report.numbers import three

ALPHA = 0.01
LEAST = 3  # sequences, below which nothing is judged
TIMES = 2.0
NOWHERE: dict[str, Any] = {**dict.fromkeys(Place.model_fields), "module": "", "call": 0}
NOTE = (
    "A cost moved where its ratio differs from 1 over the sequences (Student's t, 1 % over all "
    "{tests} runs by Holm)."
)


class InvarianceNames:
    """What tells rows of `numdev invariance` apart, as `movement.Names` does for an audit's."""

    def kernel(self, row: Any) -> Key:
        return label(row), row.format

    def step(self, row: Any) -> Key:
        return self.kernel(row), (row.case, row.axis, row.variant), False

    def row(self, row: Any) -> Key:
        return (*self.step(row), row.tensor)

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

    def about(self, row: Any) -> dict[str, Any]:
        layer = "" if row.layer is None else f"L{row.layer}"
        where = " ".join(filter(None, (row.kind, row.site, layer, row.at)))
        about = {"role": "kernel", "kernel": row.kernel or "model", "options": row.options}
        return about | {"format": row.format, "tensor": where}

    def place(self, row: Any) -> Place:
        return Place(**{**NOWHERE, "case": self.about(row)["tensor"]})


def invariance_moves(old: Any, new: Any) -> tuple[InvarianceNames, Compared]:
    """Every axis of every tensor that both reports have, and what moved."""
    names = InvarianceNames()
    sides: list[dict[Any, Any]] = [
        {names.row(r): r for r in report.rows if r.status == "ok"} for report in (old, new)
    ]
    pairs = [(sides[0][key], row) for key, row in sides[1].items() if key in sides[0]]
    groups, moves = [], []
    by_axis = grouped(pairs, lambda p: (label(p[1]), p[1].format, p[1].axis, p[1].tensor))
    for own in by_axis.values():
        here = []
        for a, b in own:
            change = b.floor_ratio / a.floor_ratio if a.floor_ratio and b.floor_ratio else None
            far = abs(math.log(change)) / math.log(TIMES) if change else FAR
            far = 0.0 if a.floor_ratio == b.floor_ratio else far
            if a.same == b.same and str(a.cause) == str(b.cause) and (a.same or far <= 1):
                continue
            words = f"{b.variant}: {_said(a)}, now {_said(b)}"
            numbers = {"a": a.floor_ratio, "b": b.floor_ratio, "change": change}
            excess = far if a.same == b.same and far > 1 else FAR
            of = names.about(b) | {"place": names.place(b), "metric": "difference"}
            here.append(Move(**of, words=words, excess=excess, **numbers))
        largest = [max(p[i].floor_ratio or 0.0 for p in own) for i in (0, 1)]
        same = sum(a.same and b.same for a, b in own)
        of = names.about(own[0][1]) | {"metric": "difference", "a": largest[0], "b": largest[1]}
        groups.append(Group(**of, pairs=len(own), same_bits=same, moved=len(here)))
        moves += here
    note = (
        f"An axis moved where its bits, its cause, or its size by {TIMES:g} times did; A and B are "
        "the largest differences over the floor's error."
    )
    return names, Compared(groups, moves, (note,))


def _said(row: Any) -> str:
    if row.same:
        return "the same bits"
    text = f"{three(row.floor_ratio)}× the floor's error"
    return text + (f" ({row.cause})" if row.cause is not None else "")


def effects_moves(old: Any, new: Any) -> tuple[EffectsNames, Compared]:
    """Every run that both reports have, and those that moved: a cost that was 0, and no longer is,
    or the reverse, whatever chance does."""
    names = EffectsNames()
    sides: list[dict[Any, dict[int, float]]] = [
        {
            run: {r.sequence: r.cost for r in rows if r.cost is not None}
            for run, rows in grouped(report.rows, lambda row: row.run).items()
        }
        for report in (old, new)
    ]
    about = {row.run: row for row in new.rows}
    pairs = {
        run: [(sides[0][run][i], b[i]) for i in b if i in sides[0].get(run, {})]
        for run, b in sides[1].items()
    }
    ratios = {run: [math.log(b / a) for a, b in both if a and b] for run, both in pairs.items()}
    p = {run: _p(x) for run, x in ratios.items() if len(x) >= LEAST}
    moved = dict(zip(p, holm(list(p.values()), ALPHA), strict=True))
    groups, moves = [], []
    for run, both in ((run, x) for run, x in pairs.items() if x):
        row, a, b = about[run], *map(statistics.median, zip(*both, strict=True))
        of = names.about(row) | {"metric": "cost", "a": a, "b": b}
        if ratios[run]:
            of["change"] = math.exp(statistics.mean(ratios[run]))
        zero = any((x == 0) != (y == 0) for x, y in both)
        same, far = sum(x == y for x, y in both), zero or moved.get(run, False)
        judged = run in p or zero or same == len(both)
        numbers: Any = {"pairs": len(both), "same_bits": same, "moved": len(both) * far}
        groups.append(Group(**of, **numbers, unjudged=0 if judged else len(both)))
        if far:
            words = f"the error at the {row.place} (cost) from {three(a)} to {three(b)}"
            excess = FAR if zero else 1 + abs(math.log(of["change"]))
            moves.append(Move(**of, place=names.place(row), words=words, excess=excess))
    return names, Compared(groups, moves, (NOTE.format(tests=len(p)),))


def _p(logs: Sequence[float]) -> float:
    """The two-sided p of the mean of logarithms, 1 where all are 0."""
    spread = statistics.stdev(logs) / math.sqrt(len(logs))
    if spread == 0:
        return 0.0 if any(logs) else 1.0
    return float(2 * stdtr(len(logs) - 1, -abs(statistics.mean(logs)) / spread))
