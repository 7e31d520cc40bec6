"""What follows from the rows of a sweep: its cells, figures and sentences. Needs no
torch."""

from __future__ import annotations

from pydantic import ValidationError

from numdev.errors import MeasurementError, UsageError
from numdev.gate.row_groups import CUT
from numdev.report import PlannedKernel, PlanRecord, SweepReport, SweepSummary
from numdev.report.sweep_statistics import (
    IN_CELLS,
    Grid,
    cells,
    figures,
    notes,
    sentences,
)
from numdev.request_models import SweepRequest


def summarised(report: SweepReport) -> SweepReport:
    """Returns the report with its cells, figures and summary, computed from its rows.
    Raises MeasurementError where rows, plan and request contradict each other."""
    request = _validated_request(report)
    grid = grid_of(report)
    baseline = baseline_of(request, report.plan)
    metrics = tuple(dict.fromkeys((*request.y, *IN_CELLS)))
    of = (baseline.kernel, baseline.options)
    every = cells(
        report.rows, metrics, of, {case.name: case.axes for case in request.cases}
    )
    lines, called = grid.lines(every), grid.label(*of)
    summary = SweepSummary(
        answer=sentences(lines, grid, called),
        notes=tuple(notes(report.rows)),
        axis=grid.axis,
        seeds=request.seeds,
        baseline=called,
    )
    drawn = tuple(figures(lines, grid, called))
    return report.model_copy(
        update={"summary": summary, "cells": every, "figures": drawn}
    )


def _validated_request(report: SweepReport) -> SweepRequest:
    """Returns the request of a sweep's report. Raises MeasurementError where it is not a
    sweep's."""
    try:
        return SweepRequest.model_validate(report.request)
    except ValidationError as error:
        what = "inconsistent report: its request is none of a sweep"
        raise MeasurementError(what, hint=CUT) from error


def grid_of(report: SweepReport) -> Grid:
    """Returns the grid of a sweep. Raises MeasurementError for a row of a case that the
    request does not have, for a request of another command, for an axis or metric that
    the grid does not have, and for a grid of a single cell."""
    request = _validated_request(report)
    grid = Grid(request, [(p.kernel, p.options) for p in report.plan.kernels])
    requested = {case.name for case in request.cases}
    if strays := {row.case for row in report.rows} - requested:
        what = f"inconsistent report: the request has no case {min(strays)!r}"
        raise MeasurementError(what, hint=CUT)
    try:
        grid.x  # noqa: B018  # raises where there is no such axis or metric
    except UsageError as error:
        raise MeasurementError(
            f"inconsistent report: {error.message}", hint=CUT
        ) from error
    return grid


def baseline_of(request: SweepRequest, plan: PlanRecord) -> PlannedKernel:
    """Returns the planned kernel that ratios are relative to: the first of the plan with
    the baseline's name, and with at least its options or without options. Of a name with
    `:` the part behind it alone counts. Raises MeasurementError where the plan has no
    such kernel."""
    name, options = request.baseline.name, request.baseline.options.items()
    for kernel in plan.kernels:
        same = kernel.kernel.rpartition(":")[2] == name.rpartition(":")[2]
        if same and (not kernel.options or options <= kernel.options.items()):
            return kernel
    raise MeasurementError(
        f"inconsistent report: the plan lacks its baseline {name}", hint=CUT
    )
