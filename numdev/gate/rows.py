"""Rows of a report in groups, whether they are all there, and what stands beside a row.

A cell is where a row was measured: case, module, layer, call, seed, phase, head, format and tensor.
A kernel has one row in it for each set of options."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from numdev.errors import MeasurementError
from numdev.report import AuditReport, CaseRecord, DeviationRow, PlanRecord, SweepReport

Measured = AuditReport | SweepReport
GRADIENTS = ("dq", "dk", "dv")
NOT_MEASURED = "not measured"
# How a row's claim begins where the kernel declared none and was found to round so.
FOUND = "as "
ROUNDING = 1 + 1e-9
# Formats in which an exact result may rightly be infinite once it is rounded.
OVERFLOWS = ("float16", "float8_e4m3fn", "float8_e5m2")
CUT = "rows were removed, added or changed; measure again"
OF_CALL = attrgetter("source", "module", "layer", "call", "phase", "step", "attends")
T = TypeVar("T")
Key = tuple[Any, ...]
Rows = Sequence[DeviationRow]
Groups = dict[Any, list[DeviationRow]]


def spelt(options: Mapping[str, Any]) -> str:
    """Options as text: the same for the same ones in another order."""
    return json.dumps(options, sort_keys=True, default=str) if options else ""


def grouped(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Items of equal keys, in the order they first came."""
    groups: defaultdict[Any, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)


def measured(rows: Iterable[DeviationRow]) -> Groups:
    """Rows in which there is something to judge, by role, kernel, options, format and tensor."""
    every = grouped(rows, lambda r: (r.role, r.kernel, spelt(r.options), r.format, r.tensor))
    chosen = (
        [row for row in own if row.status == "ok" and something(row)] for own in every.values()
    )
    return {key: own for key, own in zip(every, chosen, strict=True) if own}


def something(row: DeviationRow) -> bool:
    """Whether there is anything to judge in a measured row: not in a head without a row that sees a
    key, or that overflows as it should, unless there are more rows than those looked at."""
    return bool(row.elements != 0 or row.nonfinite or row.sampled)


def check_whole(report: Measured) -> None:
    """Raises MeasurementError unless each planned task has its rows: one for every head of every
    tensor, or one that says why there is none. A head that is not there exceeds no limit, and one
    that is there ten times is most of a median."""
    if not report.rows:
        return  # of which nothing can be judged
    plan, cases = report.plan, {case.case: case for case in report.cases}
    tasks = grouped(
        report.rows, lambda r: (r.case, r.seed, r.format, r.role, r.kernel, spelt(r.options))
    )
    for name, seed in plan.calls:
        if name not in cases:
            raise MeasurementError(f"incomplete report: case {name} is missing")
        heads = _heads(plan, cases[name])
        floors: dict[tuple[str, int | None], DeviationRow] = {}
        for fmt, planned in itertools.product(plan.formats, plan.kernels):
            key = (name, seed, fmt, planned.role, planned.kernel, spelt(planned.options))
            where = f"of {name}" + ("" if seed is None else f", seed {seed}")
            rows = tasks.pop(key, [])
            if planned.role == "floor":
                floors = {(row.tensor, row.head): row for row in rows}
            beside = ((row, floors.get((row.tensor, row.head), row)) for row in rows)
            wrong = _lacking(rows, heads, plan, planned.role)
            if wrong := wrong or next(filter(None, itertools.starmap(_contradiction, beside)), ""):
                what = f"inconsistent report: {planned.kernel} ({fmt}) {wrong} {where}"
                raise MeasurementError(what, hint=CUT)
    if tasks:
        name, _, fmt, _, kernel, _ = next(iter(tasks))
        what = f"the report has rows that were not planned: {kernel} ({fmt}) of {name}"
        raise MeasurementError(what, hint=CUT)


def _contradiction(row: DeviationRow, floor: DeviationRow) -> str | None:
    """What of a row cannot be, beside the floor's (or itself); None where all fits together."""
    mean, rms, largest = row.mean_abs, row.rms, row.max_abs
    if OF_CALL(row) != OF_CALL(floor):
        return "is from another call than the floor"
    if row.status != "ok" or (
        row.elements == 0 and (row.nonfinite or row.overflow or not floor.elements)
    ):
        return None
    if not row.elements or mean is None or rms is None or largest is None:
        return "has no error values"
    if not mean <= rms * ROUNDING or not rms <= largest * ROUNDING:
        return "has a mean error above the rms, or an rms above the largest,"
    for metric, (low, high) in row.interval.items():
        value = getattr(row, metric)
        if value is None or not low <= value * ROUNDING or not value <= high * ROUNDING:
            return f"has an interval of {metric} without its value"
    alike = row.role == "kernel" and row.out_format == row.format
    if row.format in OVERFLOWS and row.sequences is not None:  # of which fewer may be finite
        alike &= row.elements == floor.elements
    counts = [(each.elements, each.sequences) for each in (row, floor)]
    if alike and not row.nonfinite and not row.overflow and counts[0] != counts[1]:
        return "has more or fewer elements or sequences than the floor"
    return None


def _heads(plan: PlanRecord, case: CaseRecord) -> dict[str, range | list[int]]:
    """By tensor, the heads of a call that were to be measured; with gradients whole groups."""
    group = case.heads // case.kv_heads
    asked = set(range(case.heads) if plan.heads is None else plan.heads)
    of = {head // group for head in asked if head < case.heads}
    queries = [h for h in range(case.heads) if h in asked or (plan.backward and h // group in of)]
    passes = {"dq": queries, "dk": sorted(of), "dv": sorted(of)} if plan.backward else {}
    return {"out": queries, **passes} if queries else {}


def _lacking(
    rows: Rows, heads: Mapping[str, Sequence[int]], plan: PlanRecord, role: str
) -> str | None:
    """What one task lacks, or should not have; None where it is whole. The lse may lack."""
    cells: Counter[tuple[str, int | None]] = Counter(
        (r.tensor, r.head) for r in rows if r.status == "ok"
    )
    bare = {r.tensor for r in rows if r.status != "ok"}
    wanted = {} if "out" in bare else {"out": heads.get("out", ())} if "dq" in bare else dict(heads)
    if any(tensor == "lse" for tensor, _ in cells):
        wanted["lse"] = heads.get("out", ())
    partial = plan.rows is not None and role in ("baseline", "control")
    for tensor, own in wanted.items():
        if partial and tensor in ("dk", "dv") and (tensor, own[0]) not in cells:
            continue  # of sampled queries alone there are none
        for head in own:
            if cells.pop((tensor, head), 0) != 1:
                return f"has no row for {tensor} head {head}, or several"
    return next((f"has a row too many, {t} head {h}," for t, h in cells), None)
