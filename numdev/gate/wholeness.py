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
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NoReturn

from numdev.errors import MeasurementError
from numdev.gate.comparable import Measured
from numdev.gate.rows import Groups, Key

# Each tensor, and where a row stands that says why a call has none of it.
PASSES = {"out": ("out",), "dq": ("out", "dq"), "dk": ("out", "dq"), "dv": ("out", "dq")}
_cell = attrgetter("case", "seed", "module", "layer", "call", "phase", "head")


class _Run:
    """What one kernel has in one format."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cells: dict[str, set[Key]] = {}
        self.bare: dict[str, set[Key]] = {}
        """Calls without numbers, by the tensor of the row that says why."""

    def has(self, tensor: str) -> set[Key]:
        return self.cells.get(tensor, set())


def check_whole(report: Measured, groups: Groups, what: str = "the report") -> None:
    """Raises MeasurementError, which names the first row that is missing or there twice. `groups`:
    the rows by tensor."""
    for role in ("kernel", "control"):
        runs = _runs(role, groups, what)
        every = {tensor: set().union(*(run.has(tensor) for run in runs)) for tensor in PASSES}
        if role == "kernel" and not report.request.get("heads"):
            _check_cases(report, runs, every, what)
        for tensor, passes in PASSES.items():
            for run in runs:
                if run.has(tensor) != every[tensor]:
                    excused = set().union(*(run.bare.get(t, ()) for t in passes))
                    wanted = {cell for cell in every[tensor] if cell[:6] not in excused}
                    _check_run(run, tensor, wanted, what)
        for run in runs:
            returned = {cell[:6] for cell in run.has("lse")}
            _check_run(run, "lse", {c for c in run.has("out") if c[:6] in returned}, what)


def _runs(role: str, groups: Groups, what: str) -> list[_Run]:
    runs: dict[Key, _Run] = {}
    for (its, kernel, options, fmt, tensor), rows in groups.items():
        if its == role:
            run = runs.setdefault((kernel, options, fmt), _Run(f"{kernel} ({fmt})"))
            run.bare[tensor] = {_cell(row)[:6] for row in rows if row.status != "ok"}
            cells = [_cell(row) for row in rows if row.status == "ok"]
            run.cells[tensor] = set(cells)
            if len(run.cells[tensor]) < len(cells):
                twice = Counter(cells).most_common(1)[0][0]
                where = f"{run.name} has several rows for {_place(tensor, twice)}"
                _refuse(f"{what} contradicts itself: {where}")
    return list(runs.values())


def _check_run(run: _Run, tensor: str, wanted: set[Key], what: str) -> None:
    lacking = wanted - run.has(tensor)
    if lacking:
        first = _place(tensor, min(lacking, key=str))
        more = f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        _refuse(f"{what} is not whole: {run.name} has no row for {first}{more}")


def _check_cases(
    report: Measured, runs: Sequence[_Run], every: dict[str, set[Key]], what: str
) -> None:
    """That there is a row of every case, and of every head that it has."""
    known = {case.case: case for case in report.cases}
    for tensor, cells in every.items():
        calls: dict[Key, set[Any]] = {}
        for cell in cells if known else ():
            calls.setdefault(cell[:6], set()).add(cell[6])
        lacking = []
        for call, heads in calls.items():
            case = known.get(call[0])
            count = 0 if case is None else case.kv_heads if tensor in ("dk", "dv") else case.heads
            if len(heads) < count:
                lacking.append((*call, next(h for h in itertools.count() if h not in heads)))
        if lacking:
            place = _place(tensor, min(lacking, key=str))
            _refuse(f"{what} is not whole: no kernel has a row for {place}")
    asked = report.request.get("seeds")
    seeds = [seed for seed in asked if isinstance(seed, int)] if isinstance(asked, list) else []
    calls_of = (calls for run in runs for calls in (*run.cells.values(), *run.bare.values()))
    there = {(call[0], call[1] if seeds else None) for calls in calls_of for call in calls}
    for name, seed in itertools.product(known, seeds or (None,)):
        # A call out of a model has no seed, whatever the request says of drawn ones.
        if runs and not there & {(name, seed), (name, None)}:
            where = name if seed is None else f"{name}, seed {seed}"
            _refuse(f"{what} is not whole: no kernel has a row for the case {where}")


def _place(tensor: str, cell: Key) -> str:
    case, seed, *_, head = cell
    return f"{tensor} of {case} head {head}" + ("" if seed is None else f", seed {seed}")


def _refuse(why: str) -> NoReturn:
    raise MeasurementError(why, hint="rows were left out of it, or put into it; measure again")
