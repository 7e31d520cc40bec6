"""Whether the rows of a report are all there, each of them once.

For every call, format and kernel numdev writes a row for each head of each tensor, or one that says
why there is none. A file from which rows were left out, or in which some are repeated, is not what
was measured: a head that is not there exceeds no limit, and one that is there ten times is most of
a median.

Which heads a call has is in `cases`, and which seeds a sweep has in its request. Where only some
heads were asked for (`request.heads`), or nothing is said of cases, one kernel has what another
has. The log-sum-exp need not be returned, and is of all heads where it is. Planted faults are held
to each other. Other rows are no one's to judge: what divides by them says that they are not there.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any

from numdev.errors import MeasurementError
from numdev.gate.cells import Groups, Older
from numdev.report import CaseRecord, DeviationRow

Cell = tuple[Any, ...]
"""Case, seed, module, layer, call, phase, head; without the head the call."""
ROLES = ("kernel", "control")
PASSES = {"out": ("out",), "dq": ("out", "dq"), "dk": ("out", "dq"), "dv": ("out", "dq")}
"""Each tensor, and where a row stands that says why a call has none of it."""
_CELL = attrgetter("case", "seed", "module", "layer", "call", "phase", "head")
_STATUS = attrgetter("status")
HINT = "rows were left out of it, or put into it; measure again"


@dataclass(frozen=True)
class _Run:
    """What one kernel has in one format."""

    name: str
    cells: dict[str, set[Cell]] = field(default_factory=dict)
    bare: dict[str, set[Cell]] = field(default_factory=dict)
    """Calls without numbers, by the tensor of the row that says why."""

    def has(self, tensor: str) -> set[Cell]:
        return self.cells.get(tensor, set())

    @property
    def calls(self) -> Iterator[Cell]:
        for tensor in PASSES:
            yield from (*self.has(tensor), *self.bare.get(tensor, ()))

    @property
    def cases(self) -> set[tuple[str, int | None]]:
        return set(map(_case, self.calls))

    def excused(self, tensor: str) -> set[Cell]:
        return set().union(*(self.bare.get(t, ()) for t in PASSES[tensor]))


def check_whole(report: Older, groups: Groups, what: str = "the report") -> None:
    """Raises MeasurementError, which names the first row that is missing or there twice. `groups`:
    the rows as `gating.cells.by_tensor` has them."""
    for role in ROLES:
        runs = list(_runs(role, groups, what))
        if role == "kernel" and not report.request.get("heads"):
            _check_cases(report, runs, what)
        for tensor in PASSES:
            every = _every(runs, tensor)
            for run in runs:
                _check_run(run, tensor, every, what)
        for run in runs:
            if run.has("lse") != run.has("out"):
                returned = set(map(_call, run.has("lse")))
                wanted = {c for c in run.has("out") if _call(c) in returned}
                _refuse_lacking(run, "lse", wanted, what)


_call = itemgetter(slice(0, 6))
_case = itemgetter(0, 1)


def _runs(role: str, groups: Groups, what: str) -> Iterator[_Run]:
    runs: dict[Any, _Run] = {}
    for (its, kernel, options, fmt, tensor), rows in groups.items():
        if its == role:
            run = runs.setdefault((kernel, options, fmt), _Run(f"{kernel} ({fmt})"))
            ok: Sequence[DeviationRow] = rows
            if set(map(_STATUS, rows)) != {"ok"}:
                ok = [row for row in rows if row.status == "ok"]
                run.bare[tensor] = {_CELL(row)[:6] for row in rows if row.status != "ok"}
            cells = list(map(_CELL, ok))
            run.cells[tensor] = set(cells)
            if len(run.cells[tensor]) < len(cells):
                twice = Counter(cells).most_common(1)[0][0]
                raise MeasurementError(
                    f"{what} contradicts itself: {run.name} has several rows for "
                    f"{_place(tensor, twice)}",
                    hint=HINT,
                )
    yield from runs.values()


def _every(runs: Iterable[_Run], tensor: str) -> set[Cell]:
    """What any of them has."""
    every: set[Cell] = set()
    for run in runs:
        if run.has(tensor) != every:
            every = every | run.has(tensor) if every else run.has(tensor)
    return every


def _check_run(run: _Run, tensor: str, every: set[Cell], what: str) -> None:
    """That it has what any other has, but for calls of which it says why not."""
    if run.has(tensor) != every:
        excused = run.excused(tensor)
        _refuse_lacking(run, tensor, {c for c in every if _call(c) not in excused}, what)


def _refuse_lacking(run: _Run, tensor: str, wanted: set[Cell], what: str) -> None:
    lacking = wanted - run.has(tensor)
    if lacking:
        more = f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        first = _place(tensor, min(lacking, key=str))
        raise MeasurementError(
            f"{what} is not whole: {run.name} has no row for {first}{more}", hint=HINT
        )


def _check_cases(report: Older, runs: Iterable[_Run], what: str) -> None:
    """That there is a row of every case, and of every head that it has."""
    runs = list(runs)
    known = {case.case: case for case in report.cases}
    for tensor in PASSES:
        calls: dict[Cell, set[Any]] = {}
        for cell in _every(runs, tensor) if known else ():
            calls.setdefault(_call(cell), set()).add(cell[6])
        lacking = [
            (*call, head)
            for call, heads in calls.items()
            if (case := known.get(call[0])) and len(heads) < (count := _heads(case, tensor))
            for head in itertools.islice((h for h in range(count) if h not in heads), 1)
        ]
        if lacking:
            raise MeasurementError(
                f"{what} is not whole: no kernel has a row for "
                f"{_place(tensor, min(lacking, key=str))}",
                hint=HINT,
            )
    asked = report.request.get("seeds")
    seeds = [seed for seed in asked if isinstance(seed, int)] if isinstance(asked, list) else []
    there = {(case, seed if seeds else None) for run in runs for case, seed in run.cases}
    for name, seed in itertools.product(known, seeds or (None,)):
        # A call out of a model has no seed, whatever the request says of drawn ones.
        if runs and not there & {(name, seed), (name, None)}:
            where = name if seed is None else f"{name}, seed {seed}"
            raise MeasurementError(
                f"{what} is not whole: no kernel has a row for the case {where}", hint=HINT
            )


def _heads(case: CaseRecord, tensor: str) -> int:
    return case.kv_heads if tensor in ("dk", "dv") else case.heads


def _place(tensor: str, cell: Cell) -> str:
    case, seed, _, _, _, _, head = cell
    return f"{tensor} of {case} head {head}" + ("" if seed is None else f", seed {seed}")
