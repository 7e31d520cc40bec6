"""`numdev sweep`: a grid of cases, formats, kernels' options and seeds through the audit's loop.

The grid is the configuration's cells; each is drawn anew with every seed. What comes of the rows
is computed in `numdev.report.curves`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numdev.audit.plan import Plan, Planned, plan_formats, plan_kernels, recorded
from numdev.audit.run import Say, provenance, run_plan
from numdev.audit.timing import Stopwatch
from numdev.config import SweepRequest
from numdev.kernels import find
from numdev.report import CaseRecord, SweepReport, SweepSummary
from numdev.report.curves import IN_CELLS, Grid, cells, figures, notes, sentences
from numdev.sources.opening import ConfigSource
from numdev.system import System


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A sweep that has been checked, and nothing of it measured."""

    request: SweepRequest
    plan: Plan
    source: ConfigSource
    baseline: Planned
    grid: Grid

    @property
    def size(self) -> str:
        """How much there is to measure, in words."""
        cells = len(self.request.cases) * len(self.plan.formats) * len(self.plan.kernels)
        seeds = len(self.request.seeds)
        return f"{cells} cells x {seeds} seeds: {cells * seeds} tasks."


def plan(request: SweepRequest) -> SweepPlan:
    """Check a request against this machine and what is registered; raises UsageError."""
    system = System.here(request.device)
    kernels = plan_kernels((*request.kernels, request.baseline))
    formats = plan_formats(request.formats, kernels)
    request = request.model_copy(update={"formats": tuple(fmt.name for fmt in formats)})
    grid = Grid(request, [(p.kernel.name, p.options) for p in kernels])
    _ = grid.axis  # refuse a grid without one, and what is no metric, now
    name = find(request.baseline.name).name
    options = recorded(find(name).with_options(request.baseline.options))
    return SweepPlan(
        request=request,
        plan=Plan(
            system=system,
            formats=formats,
            kernels=kernels,
            backward=request.backward,
            rows=request.rows,
            repeats=request.repeats,
            named="kernels" in request.model_fields_set,
        ),
        source=ConfigSource(
            request.target, request.cases, request.seeds, system, gradients=request.backward
        ),
        baseline=next(p for p in kernels if p.kernel.name == name and p.options in ({}, options)),
        grid=grid,
    )


def sweep(
    planned: SweepPlan,
    directory: Path,
    *,
    command: str = "",
    say: Say = lambda text: None,
    **how: Any,
) -> SweepReport:
    """Run the plan, journalling into `directory`; the caller writes it. `how`: of `run_plan`."""
    request, source, grid = planned.request, planned.source, planned.grid
    watch, asked = Stopwatch(planned.plan.system.device), request.measured()
    results = run_plan(source, planned.plan, request, asked, directory, watch, say=say, **how)
    rows = results.rows
    of = (planned.baseline.kernel.name, planned.baseline.options)
    metrics = tuple(dict.fromkeys((*request.y, *IN_CELLS)))
    every = cells(rows, metrics, of, {case.name: case.axes for case in request.cases})
    lines, called = grid.lines(every), grid.label(*of)
    return SweepReport(
        provenance=provenance(planned.plan.system, results.described, command),
        request=request.model_dump(mode="json"),
        summary=SweepSummary(
            answer=sentences(lines, grid, called),
            notes=tuple(notes(rows)),
            axis=grid.axis,
            seeds=request.seeds,
            baseline=called,
        ),
        **results.judged._asdict(),
        figures=tuple(figures(lines, grid, called)),
        cells=every,
        plan=results.plan,
        cases=results.journal.records("case", CaseRecord),
        rows=rows if request.keep == "head" else (),
        timings=watch.seconds(),
    )
