"""Rows of a report in groups, whether they are all there, and what stands beside a row.

A cell is where a row was measured: case, module, layer, call, seed, phase, head, format
and tensor. A kernel has one row in it for each set of options."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from numdev.errors import MeasurementError
from numdev.grouping import grouped
from numdev.metrics import narrow_sum_search_scope
from numdev.metrics.metrics_by_name import FIELDS
from numdev.report import (
    AuditReport,
    BesideReference,
    CallRecord,
    CaseRecord,
    DeviationRow,
    PlanRecord,
    Request,
    SweepReport,
)
from numdev.tensor_properties import TensorSpec, tensor_spec

Measured = AuditReport | SweepReport
NOT_MEASURED = "not measured"
# How a row's claim begins where the kernel declared none, and one was inferred.
INFERRED = "as "
ROUNDING = 1 + 1e-9
# Formats in which an exact result may rightly be infinite once it is rounded.
OVERFLOWS = ("float16", "float8_e4m3fn", "float8_e5m2")
# What a row may say that it returned; of names, so that this needs no torch.
FORMAT = re.compile(r"bfloat16|float(16|32|64)|float8_\w+|e\d+m\d+")
CHECKSUM = re.compile(r"[0-9a-f]{16}")  # of `metrics.bit_checksums`
LEANS = frozenset({"slope", "slope_t", "shift", "shift_t"})  # may be below 0
SIGNED = frozenset({"bias", "bias_sign", "bias_feature", "bias_size", "bias_t"})
NUMBERS = FIELDS - {"layer", "seed", "head", "step"}  # of a row
HUGE = 1e300  # what numdev writes in place of a larger multiple
# An error in a format no wider than float32, whose largest number is 3.4e38
LARGEST = 1e39
UNSIGNED = tuple(sorted(NUMBERS - SIGNED - {"fa_rule"}))
CUT = "rows were removed, added or changed; measure again"
OF_CALL = attrgetter("source", "module", "layer", "call", "phase", "step", "attends")
Key = tuple[object, ...]
Rows = Sequence[DeviationRow]
Groups = dict[Key, list[DeviationRow]]


def options_text(options: Mapping[str, object]) -> str:
    """Returns options as JSON text, the same in whatever order the options stand; empty
    without options."""
    return json.dumps(options, sort_keys=True, default=str) if options else ""


def rows_to_judge(rows: Iterable[DeviationRow]) -> Groups:
    """Returns the rows of status `ok` in which there is something to judge
    (`has_something_to_judge`: also in a head of NaN alone, a sampled one and a tensor of
    another form), by role, kernel, options, format and tensor. A group without such a row
    is left out."""
    every = grouped(
        rows, lambda r: (r.role, r.kernel, options_text(r.options), r.format, r.tensor)
    )
    groups = {
        key: [row for row in group if row.status == "ok" and has_something_to_judge(row)]
        for key, group in every.items()
    }
    return {key: group for key, group in groups.items() if group}


def has_something_to_judge(row: DeviationRow) -> bool:
    """Whether there is anything to judge in a measured row. False for one without
    elements: no row sees a key, or all elements overflow as they should. True even so
    where some are not finite that should be, the row is sampled, or the form or the
    integers of a result were compared."""
    beside = row.beside_reference
    other = beside is not None and (beside.form or beside.mismatches is not None)
    return bool(row.elements != 0 or row.nonfinite or row.sampled or other)


def refuse_contradictions(*contradictions: Iterable[str]) -> None:
    """Raises MeasurementError for the first of these contradictions of a report, if there
    is any."""
    if wrong := next(itertools.chain(*contradictions), ""):
        raise MeasurementError(f"inconsistent report: {wrong}", hint=CUT)


def check_whole(report: Measured) -> None:
    """Raises MeasurementError unless each planned task has its rows: one for every head
    of every tensor, or one that says why there is none. Raises it too for rows that
    nobody planned, and where a row, the plan or the request contradict each other. A
    missing head would exceed no limit, and a row that is repeated ten times would be most
    of a median. Of a report without any row only the plan, request and cases are checked:
    nothing of it can be judged."""
    plan, cases = report.plan, {case.case: case for case in report.cases}
    refuse_contradictions(_request_differences(report.request, plan))
    if len(cases) != len(report.cases):
        raise MeasurementError("inconsistent report: it has a case twice", hint=CUT)
    if not report.rows:
        return  # of which nothing can be judged
    tasks = grouped(
        report.rows,
        lambda r: (r.case, r.seed, r.format, r.role, r.kernel, options_text(r.options)),
    )
    for name, seed in plan.calls:
        if name not in cases:
            raise MeasurementError(f"incomplete report: case {name} is missing")
        units = _planned_units(plan, cases[name])
        floors: dict[tuple[str, int | None], DeviationRow] = {}
        calls: set[Key] = set()
        for fmt, planned in itertools.product(plan.formats, plan.kernels):
            key = (
                name,
                seed,
                fmt,
                planned.role,
                planned.kernel,
                options_text(planned.options),
            )
            where = f"of {name}" + ("" if seed is None else f", seed {seed}")
            rows = tasks.pop(key, [])
            calls |= {OF_CALL(row) for row in rows}
            if planned.role == "floor":
                floors = {(row.tensor, row.head): row for row in rows}
            beside = ((row, floors.get((row.tensor, row.head), row)) for row in rows)
            wrong = _row_count_problem(rows, units, plan, planned.role)
            wrong = wrong or _task_contradiction(rows, plan, cases[name])
            if wrong := wrong or next(
                filter(None, itertools.starmap(_row_contradiction, beside)), ""
            ):
                what = f"inconsistent report: {planned.kernel} ({fmt}) {wrong} {where}"
                raise MeasurementError(what, hint=CUT)
        if len(calls) > 1:
            raise MeasurementError(
                f"inconsistent report: {name} has rows of another call", hint=CUT
            )
    if tasks:
        name, _, fmt, _, kernel, _ = next(iter(tasks))
        what = f"the report has rows that were not planned: {kernel} ({fmt}) of {name}"
        raise MeasurementError(what, hint=CUT)


def _request_differences(request: Request, plan: PlanRecord) -> Iterator[str]:
    """Yields a clause for each thing that was planned otherwise than the request asked
    for, or stands in the plan twice. Keys that the request does not have are not
    compared."""
    # A check's may be "auto"
    if bool(request.get("backward", plan.backward)) != plan.backward:
        yield "the plan and the request differ in `backward`"
    for name in ("rows", "repeats"):
        if name in request and request[name] != getattr(plan, name):
            yield f"the plan and the request differ in `{name}`"
    if "heads" in request and list(request["heads"] or ()) != list(plan.heads or ()):
        yield "the plan and the request differ in `heads`"
    yield from format_differences(request, plan.formats)
    chosen = {options_text(kernel) for kernel in request.get("kernels") or ()}
    audited = [kernel for kernel in plan.kernels if kernel.role == "kernel"]
    if "kernels" in request and not len(audited) <= len(chosen) + ("baseline" in request):
        yield "the plan has kernels that the request has not"
    yield from unplanned_kernels(request, (kernel.kernel for kernel in plan.kernels))
    if len(set(plan.formats)) != len(plan.formats) or len(set(plan.calls)) != len(
        plan.calls
    ):
        yield "the plan has a format or a call twice"
    tasks = [
        (kernel.role, kernel.kernel, options_text(kernel.options))
        for kernel in plan.kernels
    ]
    if len(set(tasks)) != len(tasks):
        yield "the plan has a kernel twice"


def format_differences(request: Request, planned: Sequence[str]) -> Iterator[str]:
    """Yields a clause where the formats of a request, if it has any, are not those of the
    plan in the same order."""
    if "formats" in request and list(request["formats"]) != list(planned):
        yield "the plan has other formats than the request"


def unplanned_kernels(request: Request, planned: Iterable[str]) -> Iterator[str]:
    """Yields a clause for each kernel of a request that is not in the plan. What follows
    the last `:` is compared, since a function of a file has another name before it
    there."""
    names = {name.rpartition(":")[2] for name in planned}
    for kernel in request.get("kernels") or ():
        if str(kernel["name"]).rpartition(":")[2] not in names:
            yield f"the plan lacks {kernel['name']}, which the request has"


def _task_contradiction(rows: Rows, plan: PlanRecord, case: CallRecord) -> str | None:
    """Returns the first thing that contradicts itself among the rows of one call of one
    kernel in one format, as a clause; None where nothing does. Rows that are not ok are
    passed over."""
    ok = [row for row in rows if row.status == "ok"]
    if lacking := _row_without_narrow_sum(ok, plan, case):
        return f"lacks the narrow_sum of {lacking.tensor} head {lacking.head}"
    if any(row.tensors != ok[0].tensors or row.tensor not in row.tensors for row in ok):
        return "has rows of different calls"
    if ok and {row.tensor for row in ok} != set(ok[0].tensors):
        return f"has no rows for one of {', '.join(ok[0].tensors)}"
    for tensor, of_tensor in grouped(ok, lambda r: r.tensor).items():
        if len({row.out_format for row in of_tensor}) > 1:
            return f"returned {tensor} in several formats"
        length = case.extents()[tensor].rows
        fewer = plan.rows is not None and plan.rows < length
        if any(row.sampled and not fewer for row in of_tensor):
            return f"has sampled rows of {tensor}, and was to measure all"
        if fewer and any(
            not row.sampled and row.rows_measured is not None for row in of_tensor
        ):
            measured = of_tensor[0].rows_measured or 0
            if measured < case.batch * length:
                return f"has fewer rows of {tensor} than there are"
    return None


def _row_without_narrow_sum(
    rows: Rows, plan: PlanRecord, call: CallRecord
) -> DeviationRow | None:
    """Returns the first gradient's row of an attention call in which a sum in 16 bits had
    to be looked for and was not; None where there is none."""
    if not isinstance(call, CaseRecord):
        return None
    planned = _planned_units(plan, call)
    groups = min((units for units in planned.values()), key=len, default=())
    for row in rows:
        if row.role != "kernel" or not tensor_spec(row.tensor).is_gradient or not groups:
            continue
        chosen = groups[
            narrow_sum_search_scope.chosen_head(row.layer, row.call, len(groups))
        ]
        size = call.extents()[row.tensor].units // call.kv_heads
        is_predicted = row.claim is not None or row.expected_ratio is not None
        if (
            row.narrow_sum is None
            and (row.head or 0) // size == chosen
            and is_predicted
            and (plan.rows is None or plan.rows >= call.q_len)
            and narrow_sum_search_scope.why_not_looked_for(
                row.tensor, row.format, call.q_len, call.kv_len
            )
            is None
        ):
            return row
    return None


def _row_contradiction(row: DeviationRow, floor: DeviationRow) -> str | None:
    """Returns the first thing that contradicts itself in a row, or contradicts the
    floor's row of the same head, as a clause; None where nothing does. Numbers that
    belong together may differ by ROUNDING."""
    mean, rms, largest = row.mean_abs, row.rms, row.max_abs
    if row.status != "ok":
        return _unmeasured_row_problem(row)
    if row.out_format is not None and not FORMAT.fullmatch(row.out_format):
        return f"returned a format that is none, {row.out_format!r},"
    if row.bits is not None and not CHECKSUM.fullmatch(row.bits):
        return f"has a checksum that is none, {row.bits!r},"
    numbers = vars(row)
    for name in UNSIGNED:
        value = numbers[name]
        if value is not None and not 0 <= value <= HUGE:
            return f"has a {name} that cannot be, {value!r},"
    sizes = [size for size in (rms, mean, largest) if size is not None]
    if "float64" not in (row.format, row.out_format) and max(sizes, default=0) > LARGEST:
        return f"errs by more than {row.format} can"
    if row.bias_p is not None and row.bias_p > 1:
        return "has a probability above 1"
    beside = row.beside_reference
    if beside is not None and (why := _beside_contradiction(beside)):
        return why
    if row.elements == 0 and (row.nonfinite or row.overflow or not floor.elements):
        return None
    if row.elements == 0 and beside is not None and beside.form:
        return None
    if not row.elements or mean is None or rms is None or largest is None:
        return "has no error values"
    if not mean <= rms * ROUNDING or not rms <= largest * ROUNDING:
        return "has a mean error above the rms, or an rms above the largest,"
    of = None if row.sampled else row.rows_measured
    for what, in_effect in (("an rms", row.rms_rows), ("an error", row.error_rows)):
        if in_effect and of and not 1 / ROUNDING <= in_effect <= of * ROUNDING:
            return f"has {what} of {in_effect:g} rows, of {of},"
    for metric, (low, high) in row.interval.items():
        if low < 0 and metric not in SIGNED:
            return f"has an interval of {metric} below 0"
        value = getattr(row, metric, None)
        if value is None or not low <= value * ROUNDING or not value <= high * ROUNDING:
            return f"has an interval of {metric} without its value"
    if row.sampled and (row.suspects or 0) < 0:
        return "has fewer rows than none"
    alike = row.role == "kernel" and row.out_format == row.format
    # Of which fewer may be finite
    if row.format in OVERFLOWS and row.sequences is not None:
        alike &= row.elements == floor.elements
    counts = [(each.elements, each.sequences) for each in (row, floor)]
    if alike and not row.nonfinite and not row.overflow and counts[0] != counts[1]:
        return "has more or fewer elements or sequences than the floor"
    return None


def _beside_contradiction(numbers: BesideReference) -> str | None:
    """Returns the first of the numbers that cannot be, as a clause without its subject
    (`has a slice_luck below 1`): it is too large, negative where only a lean may be, or a
    luck below 1. None where all can be; numbers that are None can."""
    for name, value in vars(numbers).items():
        if not isinstance(value, float):
            continue
        if abs(value) > HUGE or (value < 0 and name not in LEANS):
            return f"has a {name} that cannot be, {value!r},"
        if name.endswith("_luck") and value < 1:
            return f"has a {name} below 1"
    return None


def _unmeasured_row_problem(row: DeviationRow) -> str | None:
    """Returns what is wrong with a row that was not measured, as a clause: it must have a
    reason, and no numbers. None where nothing is."""
    if not row.reason:
        return f"was {row.status}, and says no why,"
    present = (name for name in sorted(NUMBERS) if getattr(row, name) is not None)
    if row.interval or row.tensors or next(present, None):
        return f"was {row.status}, and has numbers,"
    return None


def _planned_units(plan: PlanRecord, call: CallRecord) -> dict[str, Sequence[int]]:
    """Returns, by tensor of a call, the units that were to be measured, also of optional
    tensors. `plan.heads` are units of the output, of which a coarser tensor has one for a
    whole group; with gradients whole groups are measured. Empty where the call has none
    of these units."""
    extents = {
        tensor: extent
        for tensor, extent in call.extents().items()
        if plan.backward or not tensor_spec(tensor).is_gradient
    }
    finest = max(extent.units for extent in extents.values())
    group = finest // min(extent.units for extent in extents.values())
    asked = set(range(finest) if plan.heads is None else plan.heads)
    groups = {unit // group for unit in asked if unit < finest}
    measured = [unit for unit in range(finest) if unit // group in groups]
    if not plan.backward:
        measured = [unit for unit in measured if unit in asked]
    return {
        tensor: sorted({unit * extent.units // finest for unit in measured})
        for tensor, extent in extents.items()
        if measured
    }


def _row_count_problem(
    rows: Rows, units: Mapping[str, Sequence[int]], plan: PlanRecord, role: str
) -> str | None:
    """Returns which row one task lacks, or has and should not, as a clause; None where it
    is whole. `units`: those planned, by tensor; `role`: of the task's kernel."""
    cells: Counter[tuple[str, int | None]] = Counter(
        (r.tensor, r.head) for r in rows if r.status == "ok"
    )
    bare = Counter(r.tensor for r in rows if r.status != "ok")
    if twice := next((tensor for tensor, count in bare.items() if count > 1), None):
        return f"has several rows that say why there is no {twice}"
    present = {tensor for tensor, _ in cells}
    partial = plan.rows is not None and role in ("baseline", "control")
    for tensor, planned in units.items():
        spec = tensor_spec(tensor)
        if not _is_wanted(spec, bare) or (spec.is_optional and tensor not in present):
            continue
        if partial and spec.sums_over_rows and (tensor, planned[0]) not in cells:
            continue  # of sampled rows alone there is none
        for unit in planned:
            if cells.pop((tensor, unit), 0) != 1:
                return f"has no row for {tensor} head {unit}, or several"
    return next((f"has a row too many, {t} head {h}," for t, h in cells), None)


def _is_wanted(spec: TensorSpec, bare: Iterable[str]) -> bool:
    """Whether a task must have rows of a tensor, where `bare` are tensors of which one
    row says why there is none: none are wanted without an output, and no gradient is
    where another one is missing."""
    specs = [tensor_spec(tensor) for tensor in bare]
    if any(not other.is_gradient for other in specs):
        return False
    return not (specs and spec.is_gradient)
