"""`numdev sweep`: a grid of cases, formats, kernels' options and seeds through the audit's loop.

The grid is the configuration's cells; each is drawn anew with every seed. What comes of the rows
is computed in `numdev.report.curves`, the sentences in `numdev.report.sweep_words`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from numdev.audit.cluster.crew import Crew
from numdev.audit.cluster.team import working
from numdev.audit.jobs import Planned, Setting
from numdev.audit.journal import Journal
from numdev.audit.records import recorded
from numdev.audit.reproduce.making import Workshop, reproduce
from numdev.audit.run import (
    Progress,
    Run,
    header,
    plan_formats,
    plan_kernels,
    provenance,
    stopwatch,
)
from numdev.audit.sweep_cost import Cost, estimate
from numdev.config import Choice, SweepRequest
from numdev.formats import Format
from numdev.gate.findings import findings_of
from numdev.kernels import find
from numdev.report import SweepReport, SweepSummary
from numdev.report.collector import let_be, only_new
from numdev.report.curves import IN_CELLS, Grid, check_metrics, estimates, figures, lines
from numdev.report.sweep_words import notes, sentences
from numdev.sources.opening import ConfigSource
from numdev.system import System


@dataclass(frozen=True, kw_only=True)
class Plan:
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


def plan(request: SweepRequest) -> Plan:
    """Check a request against this machine and what is registered; raises UsageError."""
    system = System.here(request.device)
    kernels = plan_kernels((*request.kernels, request.baseline))
    formats = plan_formats(request.formats, kernels)
    request = request.model_copy(update={"formats": tuple(fmt.name for fmt in formats)})
    check_metrics(request.y, request.target)
    grid = Grid(request, [(p.kernel.name, p.options) for p in kernels])
    _ = grid.axis  # refuse a grid without one now
    return Plan(
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


@only_new()
def sweep(
    planned: Plan,
    directory: Path,
    *,
    crew: Crew | None = None,
    overwrite: bool = False,
    command: str = "",
    progress: Progress = lambda what, done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> SweepReport:
    """Run the plan, journalling into `directory`; returns the report, which the caller writes.

    `crew`: who measures, under `cluster.crew.sharing`; None: this process.
    """
    request, system = planned.request, planned.system
    watch = stopwatch(system)
    described = planned.source.describe()
    head = header(request.measured(), system, planned.kernels, described)
    setting = Setting(
        system=system,
        formats=planned.formats,
        plan=planned.kernels,
        gradients=request.gradients,
        sampled_rows=request.sampled_rows,
        repeats=request.repeats,
    )
    at_work = working(
        crew,
        setting,
        head,
        isolated=request.isolate,
        limit_s=request.time_limit,
        watch=watch,
        say=say,
    )
    with (
        Journal.open(directory, head, overwrite=overwrite) as journal,
        at_work as (executor, where),
    ):
        run = Run(
            journal=journal,
            setting=setting,
            executor=executor,
            progress=progress,
            total=planned.source.count() * len(planned.formats) * len(planned.kernels),
            watch=watch,
        )
        run.over(planned.source, say)
        rows, cases = run.rows, run.cases
        let_be()
        wrong, tested = findings_of(rows)
        workshop = Workshop(
            plan=planned.kernels,
            system=system,
            gradients=request.gradients,
            rows=request.sampled_rows,
            run=where,
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
