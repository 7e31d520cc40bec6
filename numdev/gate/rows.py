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
_call = attrgetter("case", "seed", "module", "layer", "call", "phase")


def check_whole(report: Measured) -> None:
    """Raises MeasurementError, which names a row that is missing or there twice: a head that is not
    there exceeds no limit, and one that is there ten times is most of a median.

    For every call, format and kernel there is a row for each head of each tensor, or one that says
    why not. Which heads a call has is in `cases`, which seeds in the request; where only some heads
    were asked for, one kernel has what another has. The log-sum-exp need not be returned, and is of
    all heads where it is.
    """
    runs = grouped(report.rows, lambda r: (r.role, f"{r.kernel}{spelt(r.options)} ({r.format})"))
    for role in ("kernel", "control"):
        own: dict[str, set[Key]] = {}  # of each run: tensor, call and head
        without: dict[str, set[Key]] = {}  # tensor and call of rows that say why not
        for name, rows in ((run, rows) for (whose, run), rows in runs.items() if whose == role):
            cells = [(r.tensor, _call(r), r.head) for r in rows if r.status == "ok"]
            own[name] = set(cells)
            without[name] = {(r.tensor, _call(r)) for r in rows if r.status != "ok"}
            if without[name]:
                without[name] -= {cell[:2] for cell in cells}
            if len(own[name]) < len(cells):
                twice = _place(Counter(cells).most_common(1)[0][0])
                raise MeasurementError(
                    f"the report contradicts itself: {name} has several rows for {twice}", hint=CUT
                )
        every = set[Key]().union(*own.values())
        if role == "kernel" and own and not report.request.get("heads"):
            _check_cases(report, every, set().union(*without.values()))
        for name, cells_of in own.items():
            returned = {call for tensor, call, _ in cells_of if tensor == "lse"}
            wanted = {("lse", *cell[1:]) for cell in cells_of if cell[1] in returned}
            bare = without[name]
            wanted |= {
                cell
                for cell in every
                if cell[0] in PASSES
                and not (bare and any((t, cell[1]) in bare for t in PASSES[cell[0]]))
            }
            _require(f"{name} has no", wanted - cells_of)


def _check_cases(report: Measured, every: set[Key], bare: set[Key]) -> None:
    """That there is a row of every case, with every seed, and of every head that it has."""
    cases = {case.case: case for case in report.cases}
    heads: dict[Key, set[Any]] = {}
    for tensor, call, head in every:
        heads.setdefault((tensor, call), set()).add(head)
    lacking: set[Key] = set()
    for (tensor, call), there in heads.items():
        case = cases.get(call[0])
        count = 0 if case is None else case.kv_heads if tensor in ("dk", "dv") else case.heads
        if tensor in PASSES and len(there) < count:
            lacking.add((tensor, call, min(set(range(count)) - there)))
    _require("no kernel has a", lacking)
    asked = report.request.get("seeds")
    seeds = [seed for seed in asked if isinstance(seed, int)] if isinstance(asked, list) else []
    measured = {cell[1][:2] for cell in (*every, *bare)}
    for name, seed in itertools.product(cases, seeds or (None,)):
        # A call out of a model has no seed, whatever the request says of drawn ones.
        if not any(case == name and (not seeds or of in (seed, None)) for case, of in measured):
            where = name if seed is None else f"{name}, seed {seed}"
            raise MeasurementError(
                f"the report is not whole: no kernel has a row for the case {where}", hint=CUT
            )


def _require(who: str, lacking: set[Key]) -> None:
    if lacking:
        more = f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        first = min(lacking, key=lambda cell: (cell[0] != "out", str(cell)))
        raise MeasurementError(
            f"the report is not whole: {who} row for {_place(first)}{more}", hint=CUT
        )


def _place(cell: Key) -> str:
    tensor, (case, seed, *_), head = cell
    return f"{tensor} of {case} head {head}" + ("" if seed is None else f", seed {seed}")
