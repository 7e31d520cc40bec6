"""`numdev sweep`: a grid of cases, formats, kernels' options and seeds through the audit's loop.

The grid is the configuration's cells; each is drawn anew with every seed. What comes of the rows
is computed in `numdev.report.curves`, the sentences in `numdev.report.sweep_words`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from numdev.audit.cluster import Cluster, at_work
from numdev.audit.journal import Journal
from numdev.audit.plan import Plan, Planned, plan_formats, plan_kernels
from numdev.audit.records import recorded
from numdev.audit.reproduce.making import Workshop, reproduce
from numdev.audit.run import Progress, Say, measure_source, provenance, runner, silent
from numdev.audit.sweep_cost import Cost, estimate
from numdev.audit.timing import stopwatch
from numdev.config import Choice, SweepRequest
from numdev.formats import Format
from numdev.gate.findings import findings_of
from numdev.kernels import find
from numdev.report import CaseRecord, DeviationRow, SweepReport, SweepSummary
from numdev.report.curves import IN_CELLS, Grid, check_metrics, estimates, figures, lines
from numdev.report.sweep_words import notes, sentences
from numdev.sources.opening import ConfigSource
from numdev.system import System


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A sweep that has been checked, and nothing of it measured."""

    request: SweepRequest
    system: System
    source: ConfigSource
    kernels: list[Planned]
    formats: list[Format]
    baseline: Planned
    grid: Grid

    def cost(self, *, calibrate: bool = True) -> Cost:
        return estimate(
            self.request.cases,
            len(self.request.seeds),
            self.formats,
            self.kernels,
            self.system if calibrate else None,
            self.request.sampled_rows,
        )


def plan(request: SweepRequest) -> SweepPlan:
    """Check a request against this machine and what is registered; raises UsageError."""
    system = System.here(request.device)
    kernels = plan_kernels((*request.kernels, request.baseline))
    formats = plan_formats(request.formats, kernels)
    request = request.model_copy(update={"formats": tuple(fmt.name for fmt in formats)})
    check_metrics(request.y, request.target)
    grid = Grid(request, [(p.kernel.name, p.options) for p in kernels])
    _ = grid.axis  # refuse a grid without one now
    return SweepPlan(
        request=request,
        system=system,
        source=ConfigSource(
            request.target, request.cases, request.seeds, system, gradients=request.gradients
        ),
        kernels=kernels,
        formats=formats,
        baseline=_planned(request.baseline, kernels),
        grid=grid,
    )


def sweep(
    planned: SweepPlan,
    directory: Path,
    *,
    workers: Cluster | None = None,
    overwrite: bool = False,
    command: str = "",
    progress: Progress = silent,
    say: Say = lambda text: None,
) -> SweepReport:
    """Run the plan, journalling into `directory`; returns the report, which the caller writes.

    `workers`: who measures; None: this process.
    """
    request, system = planned.request, planned.system
    watch = stopwatch(system.device)
    plan = Plan(
        system=system,
        formats=planned.formats,
        kernels=planned.kernels,
        gradients=request.gradients,
        sampled_rows=request.sampled_rows,
        repeats=request.repeats,
    )
    described = planned.source.describe()
    header = plan.header(request.measured(), described)
    with (
        Journal.open(directory, header, overwrite=overwrite) as journal,
        runner(isolated=request.isolate or workers is not None, limit_s=request.time_limit) as run,
        at_work(workers, plan, header, request.time_limit, watch, say) as team,
    ):
        measure_source(
            planned.source, plan, journal, run, watch, workers=team, progress=progress, say=say
        )
        rows = journal.records("row", DeviationRow)
        cases = journal.records("case", CaseRecord)
        wrong, tested = findings_of(rows)
        workshop = Workshop(
            plan=planned.kernels,
            system=system,
            gradients=request.gradients,
            rows=request.sampled_rows,
            run=run,
            most=request.reproducers,
        )
        reproduce(wrong, planned.source, workshop, directory, say)
    baseline, grid = planned.baseline, planned.grid
    metrics = tuple(dict.fromkeys((*request.y, *IN_CELLS)))
    found = estimates(rows, metrics, (baseline.kernel.name, baseline.options))
    curves, called = lines(found, grid), grid.label(baseline.kernel.name, baseline.options)
    return SweepReport(
        provenance=provenance(system, described, command),
        request=request.model_dump(mode="json"),
        summary=SweepSummary(
            answer=sentences(curves, grid, called),
            notes=notes(rows),
            axis=grid.axis,
            cells=planned.cost(calibrate=False).cells,
            seeds=request.seeds,
            baseline=called,
        ),
        findings=wrong,
        tested=tested,
        figures=figures(curves, grid, called),
        cells=tuple(e.cell(grid.configs[e.row.case].axes) for e in found),
        cases=cases,
        rows=rows if request.rows == "head" else (),
        timings=watch.seconds(),
    )


def _planned(choice: Choice, kernels: list[Planned]) -> Planned:
    """The planned kernel a choice became."""
    kernel = find(choice.name)
    options = recorded(kernel.with_options(choice.options))
    return next(p for p in kernels if p.kernel.name == kernel.name and p.options in ({}, options))
