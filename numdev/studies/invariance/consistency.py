"""Checks that a report of invariance has the rows that its plan says, and that its
numbers do not contradict each other."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from numdev.gate.row_groups import (
    HUGE,
    format_differences,
    refuse_contradictions,
    unplanned_kernels,
)
from numdev.grouping import grouped
from numdev.report import Tensor
from numdev.report.number_text import label
from numdev.studies.invariance.report import (
    InvarianceReport,
    InvarianceRow,
    ModelRow,
    Way,
)

NEARLY = 1e-6  # how far a share may be from the one that two other numbers give
# The variant of a row along `repeat` that another variant led to begins so
AGAIN = "again, "
NUMBERS = (
    *("difference", "floor_ratio", "error_base", "error_variant"),
    *("excess", "excess_of_a_row", "ulps"),
)
STEADY = ("out", "lse")
MOVES_KEYS = ("padding", "lengths", "decode")  # axes along which keys may stand elsewhere
GRADIENTS = frozenset({"dq", "dk", "dv"})


def check_consistency(report: InvarianceReport) -> None:
    """Raises MeasurementError, with the first contradiction, for a plan that is not what
    the request asked for; for rows that were not planned, or are missing; and for numbers
    that contradict each other. A missing row would exceed no limit."""
    refuse_contradictions(
        _plan_contradictions(report),
        _row_contradictions(report),
        _model_contradictions(report),
    )


def _plan_contradictions(report: InvarianceReport) -> Iterator[str]:
    """Yields a clause for each way, of those that are looked for, in which the plan is
    not what the request asked for, has a way twice, or one along an axis or in a format
    that it has not."""
    plan, request = report.plan, report.request
    asked = (*(request.get("axes") or ()), *(request.get("require") or ()))
    if list(dict.fromkeys(asked) or plan.axes) != list(plan.axes):
        yield "the plan has other axes than the request"
    if request.get("backward") != plan.backward:
        yield "the plan and the request differ in `backward`"
    yield from unplanned_kernels(request, (kernel.kernel for kernel in plan.kernels))
    if len(plan.kernels) > len(request.get("kernels") or ()):
        yield "the plan has a kernel that the request has not"
    yield from format_differences(request, plan.formats)
    if repeated := _planned_twice(plan.ways):
        yield f"the plan has {repeated} twice"
    planned = {(fmt, axis) for fmt in plan.formats for axis in plan.axes}
    if not {(way.format, way.axis) for way in plan.ways} <= planned:
        yield "the plan has a way along an axis, or in a format, that it has not"


def _planned_twice(ways: Sequence[Way]) -> str:
    """Returns the axis and variant of the first way that is planned twice for one case
    and format, `batch 2 in place of 1`; empty where none is."""
    counts = Counter((way.format, way.case, way.axis, way.variant) for way in ways)
    twice = (f"{axis} {variant}" for (_, _, axis, variant), n in counts.items() if n > 1)
    return next(twice, "")


def _row_contradictions(report: InvarianceReport) -> Iterator[str]:
    """Yields a sentence for each kernel and planned way whose rows are missing, or
    contradict themselves or each other, with the first contradiction. Yields one where a
    kernel's tensors are not those of its other ways, where gradients are missing without
    a reason, and for each way that has rows and was not planned."""
    plan = report.plan
    kernels = dict.fromkeys(label(kernel) for kernel in plan.kernels)
    rows = grouped(report.rows, lambda r: (label(r), r.format, r.case, r.axis, r.variant))
    returned: dict[tuple[str, str, str], set[Tensor]] = {}
    for way, kernel in itertools.product(plan.ways, kernels):
        where = f"{kernel} ({way.format}) of {way.case} along {way.axis} ({way.variant})"
        matching = rows.pop((kernel, way.format, way.case, way.axis, way.variant), [])
        repeated = f"{AGAIN}{way.axis} {way.variant}"
        again = rows.pop((kernel, way.format, way.case, "repeat", repeated), [])
        if wrong := _way_contradiction(way, matching) or _repeat_contradiction(
            matching, again
        ):
            yield f"{where} {wrong}"
        if matching and matching[0].status == "ok":
            tensors = {t for t in matching[0].tensors if t not in GRADIENTS}
            if returned.setdefault((kernel, way.format, way.case), tensors) != tensors:
                yield f"{where} has other tensors than in other ways"
            if plan.backward and not (
                GRADIENTS & {*matching[0].tensors} or matching[0].reason
            ):
                yield f"{where} has no gradients, and does not say why"
    for kernel, fmt, case, axis, variant in rows:
        yield f"{kernel} ({fmt}) of {case} along {axis} ({variant}) was not planned"


def _way_contradiction(way: Way, rows: Sequence[InvarianceRow]) -> str:
    """Returns the first thing that is wrong with the rows of one kernel in one planned
    way, as a clause (`has no row`); empty where nothing is."""
    if not rows:
        return "has no row"
    first = rows[0]
    if any(row.part != way.part for row in rows):
        return "compares another part of the call than the plan"
    if first.status != "ok":
        if len(rows) > 1 or first.tensor != "out" or first.tensors:
            return "has rows beside one without numbers"
        other_reason = way.reason and first.reason != way.reason
        if (first.excuse == "call") != bool(way.reason) or other_reason:
            return "gives another reason than the plan"
        if (first.status == "skipped") != bool(first.excuse):
            return "was skipped without an excuse, or failed with one"
        if first.excuse in ("mask", "option", "way") and first.excuse != way.adds:
            return f"is excused by the {first.excuse}, which the plan does not add"
        return _unmeasured_contradiction(first)
    if way.reason:
        return "was measured, and its plan says that it cannot be"
    if sorted(first.tensors) != sorted(row.tensor for row in rows):
        return f"should have a row for each of {', '.join(first.tensors)}"
    if "out" not in first.tensors or any(row.tensors != first.tensors for row in rows):
        return "has rows of different calls"
    steady = [row for row in rows if row.tensor in STEADY]
    asked = way.axis != "repeat" and any(row.differ for row in steady)
    if any((row.repeats is not None) != asked for row in rows):
        return (
            "differs, and does not say whether the kernel repeats itself, or the reverse"
        )
    return next(filter(None, map(_row_contradiction, rows)), "")


def _repeat_contradiction(
    rows: Sequence[InvarianceRow], again: Sequence[InvarianceRow]
) -> str:
    """Returns the first thing that is wrong with `again`, the rows along `repeat` that
    `rows` led to, as a clause; empty where nothing is. Either may be empty."""
    failing = [row for row in again if row.status == "failed" or row.differ]
    if len(failing) < len(again):
        return "has a row along repeat in which nothing differs"
    if bool(again) != any(row.repeats is False for row in rows):
        return "says something else of its repeats than the rows along repeat"
    if any(row.excuse == "repeat" and row.repeats is not False for row in rows):
        return "has an excuse that it does not bear out"
    wrong = (
        _unmeasured_contradiction(row)
        if row.status == "failed"
        else _row_contradiction(row)
        for row in again
    )
    return next(filter(None, wrong), "")


def _unmeasured_contradiction(row: InvarianceRow) -> str:
    """Returns, as a clause, that a row without a measurement has numbers; empty where it
    has none."""
    numbers = row.elements or row.differ or row.nonfinite or row.first is not None
    present = numbers or any(getattr(row, name) is not None for name in NUMBERS)
    return "has numbers though it was not measured" if present else ""


def _row_contradiction(row: InvarianceRow) -> str:
    """Returns the first thing that is wrong with a measured row, as a clause; empty where
    its fields fit together."""
    if row.status != "ok" or row.excuse:
        return "has measured rows beside others"
    if not 0 < row.elements < 2**63 or not 0 <= row.differ <= row.elements:
        return "has more elements that differ than there are"
    if not 0 <= row.nonfinite <= row.differ:
        return "has more NaN or infinity than elements that differ"
    for name in ("difference", "excess", "excess_of_a_row", "ulps"):
        value = getattr(row, name)
        if value is None or not 0 <= value <= HUGE:
            return f"has no {name}, or one that cannot be"
    if row.cause is not None and (row.axis == "repeat" or row.repeats is not True):
        return (
            "has a cause, and may have none: the kernel does not repeat itself, "
            "or nothing says so"
        )
    if row.cause is not None and row.cause.moved and row.axis not in MOVES_KEYS:
        return "has keys that begin elsewhere, along an axis that moves none"
    ratios = (row.floor_ratio, row.error_base, row.error_variant)
    if any(x is None for x in ratios) != all(x is None for x in ratios):
        return "has some of its ratios to the floor's error, and not all"
    if any(x is not None and not 0 <= x <= HUGE for x in ratios):
        return "has a ratio that cannot be"
    sizes = (row.difference, row.excess, row.excess_of_a_row)
    moved = any((x or 0.0) > 0 for x in sizes)
    if not row.differ and (moved or row.floor_ratio or row.ulps or row.first is not None):
        return "has a difference in no element"
    if row.differ and row.first is None:
        return "differs, and nowhere"
    if (row.difference or 0.0) > 0 and not row.excess:
        return "has a difference that is none beside what roundings explain"
    return ""


def _model_contradictions(report: InvarianceReport) -> Iterator[str]:
    """Yields a sentence for each planned row of the model's output that is missing or
    there several times, each that was not planned, and each that contradicts itself."""
    plan = report.plan
    rows = grouped(report.models, lambda m: (label(m), m.format, m.axis))
    for kernel, fmt, axis in itertools.product(plan.kernels, plan.formats, plan.models):
        key = (label(kernel), fmt, axis)
        matching = rows.pop(key, [])
        where = f"the model's output with {key[0]} ({fmt}) along {axis}"
        if len(matching) != 1:
            yield f"{where} has no row, or several"
        for row in matching:
            if wrong := _model_contradiction(row):
                yield f"{where} {wrong}"
    for name, fmt, axis in rows:
        yield f"the model's output with {name} ({fmt}) along {axis} was not planned"


def _model_contradiction(row: ModelRow) -> str:
    """Returns the first thing that is wrong with a row of the model's output, as a
    clause; empty where its fields fit together."""
    sizes = (row.difference, row.explained, row.other_difference)
    if row.reason is not None:
        bare = not (row.differ or row.elements) and all(x is None for x in sizes)
        return "" if bare else "has numbers though it was not measured"
    if not 0 < row.elements < 2**63 or not 0 <= row.differ <= row.elements:
        return "has more elements that differ than there are"
    if any(x is None or not 0 <= x <= HUGE for x in sizes):
        return "lacks a number, or has one that cannot be"
    if not row.differ and row.difference:
        return "has a difference in no element"
    if row.difference and row.other_difference is not None:
        share = max(0.0, 1 - (row.other_difference / row.difference) ** 2)
        if row.share is None or not math.isclose(row.share, share, abs_tol=NEARLY):
            return "has a share that its differences do not give"
    return ""
