"""Rows of a report in groups, whether they are all there, and what stands beside a row.

A cell is where a row was measured: case, module, layer, call, seed, phase, head, format and tensor.
A kernel has one row in it for each set of options.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, TypeVar

from numdev.errors import MeasurementError
from numdev.report import AuditReport, DeviationRow, SweepReport

Measured = AuditReport | SweepReport
GRADIENTS = ("dq", "dk", "dv")
NOT_MEASURED = "not measured"
T = TypeVar("T")
Key = tuple[Any, ...]
Groups = dict[Any, list[DeviationRow]]


def spelt(options: Mapping[str, Any]) -> str:
    """Options as text: the same for the same ones in another order."""
    return json.dumps(options, sort_keys=True, default=str) if options else ""


def grouped(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Items of equal keys, in the order they first came."""
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def by_tensor(rows: Iterable[DeviationRow]) -> Groups:
    """Rows by role, kernel, options, format and tensor."""
    return grouped(rows, lambda r: (r.role, r.kernel, spelt(r.options), r.format, r.tensor))


def measured(groups: Groups) -> Groups:
    """Of rows by tensor those that there is something to judge in."""
    chosen = {
        key: [row for row in rows if row.status == "ok" and something(row)]
        for key, rows in groups.items()
    }
    return {key: rows for key, rows in chosen.items() if rows}


def something(row: DeviationRow) -> bool:
    """Whether there is anything to judge in a measured row: not in a head without a row that sees a
    key, or that overflows as it should, unless there are more rows than those looked at."""
    return bool(row.elements != 0 or row.nonfinite or row.sampled)


# --- are they all there? -------------------------------------------------------------------------

# Each tensor, and where a row stands that says why a call has none of it.
PASSES = {"out": ("out",), "dq": ("out", "dq"), "dk": ("out", "dq"), "dv": ("out", "dq")}
CUT = "rows were left out of it, or put into it; measure again"
_cell = attrgetter("case", "seed", "module", "layer", "call", "phase", "head")


def check_whole(report: Measured, what: str = "the report") -> None:
    """Raises MeasurementError, which names a row that is missing or there twice: a head that is not
    there exceeds no limit, and one that is there ten times is most of a median.

    For every call, format and kernel there is a row for each head of each tensor, or one that says
    why not. Which heads a call has is in `cases`, which seeds in the request; where only some heads
    were asked for, one kernel has what another has. The log-sum-exp need not be returned, and is of
    all heads where it is.
    """
    groups = by_tensor(report.rows)
    for role in ("kernel", "control"):
        runs: dict[str, dict[str, set[Key]]] = {}
        without: dict[str, set[tuple[str, Key]]] = {}  # calls with a row that says why not
        for (whose_role, kernel, options, fmt, tensor), rows in groups.items():
            if whose_role != role:
                continue
            run = f"{kernel}{options} ({fmt})"
            cells = [_cell(row) for row in rows if row.status == "ok"]
            runs.setdefault(run, {})[tensor] = set(cells)
            bare = {(tensor, _cell(row)[:6]) for row in rows if row.status != "ok"}
            without.setdefault(run, set()).update(bare)
            if len(set(cells)) < len(cells):
                twice = _place(tensor, Counter(cells).most_common(1)[0][0])
                raise MeasurementError(
                    f"{what} contradicts itself: {run} has several rows for {twice}", hint=CUT
                )
        every = {t: set().union(*(its.get(t, ()) for its in runs.values())) for t in PASSES}
        if role == "kernel" and runs and not report.request.get("heads"):
            _check_cases(report, every, set().union(*without.values()), what)
        for name, its in runs.items():
            for tensor, passes in PASSES.items():
                excused = {call for t, call in without[name] if t in passes}
                wanted = {cell for cell in every[tensor] if cell[:6] not in excused}
                _require(
                    f"{what} is not whole: {name} has no", tensor, wanted - its.get(tensor, set())
                )
            returned = {cell[:6] for cell in its.get("lse", ())}
            lse = {cell for cell in its.get("out", ()) if cell[:6] in returned}
            _require(f"{what} is not whole: {name} has no", "lse", lse - its.get("lse", set()))


def _check_cases(
    report: Measured, every: dict[str, set[Key]], bare: set[tuple[str, Key]], what: str
) -> None:
    """That there is a row of every case, with every seed, and of every head that it has."""
    cases = {case.case: case for case in report.cases}
    for tensor, cells in every.items():
        calls: dict[Key, set[Any]] = {}
        for cell in cells if cases else ():
            calls.setdefault(cell[:6], set()).add(cell[6])
        lacking: set[Key] = set()
        for call, heads in calls.items():
            case = cases.get(call[0])
            count = 0 if case is None else case.kv_heads if tensor in ("dk", "dv") else case.heads
            if len(heads) < count:
                lacking.add((*call, next(h for h in itertools.count() if h not in heads)))
        _require(f"{what} is not whole: no kernel has a", tensor, lacking)
    asked = report.request.get("seeds")
    seeds = [seed for seed in asked if isinstance(seed, int)] if isinstance(asked, list) else []
    measured = {cell[:2] for cells in every.values() for cell in cells} | {c[:2] for _, c in bare}
    there = {case for case, _ in measured} if not seeds else measured
    for name, seed in itertools.product(cases, seeds or (None,)):
        # A call out of a model has no seed, whatever the request says of drawn ones.
        if not there & ({(name, seed), (name, None)} if seeds else {name}):
            where = name if seed is None else f"{name}, seed {seed}"
            raise MeasurementError(
                f"{what} is not whole: no kernel has a row for the case {where}", hint=CUT
            )


def _require(who: str, tensor: str, lacking: set[Key]) -> None:
    if lacking:
        first = _place(tensor, min(lacking, key=str))
        more = f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise MeasurementError(f"{who} row for {first}{more}", hint=CUT)


def _place(tensor: str, cell: Key) -> str:
    case, seed, *_, head = cell
    return f"{tensor} of {case} head {head}" + ("" if seed is None else f", seed {seed}")
