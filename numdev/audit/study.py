"""`numdev audit`: every attention call, through every kernel, against fp64, beside low precision.

The line of the design: a source, the loop, the report. What is run and measured is the loop's
(`numdev.audit.run`); what it comes to is the summary's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from numdev.audit.cluster.crew import Crew
from numdev.audit.cluster.team import working
from numdev.audit.examine import most
from numdev.audit.jobs import Setting
from numdev.audit.journal import Journal
from numdev.audit.reproduce.making import Workshop, reproduce
from numdev.audit.run import (
    Progress,
    Run,
    header,
    plan_controls,
    plan_formats,
    plan_kernels,
    provenance,
    stopwatch,
)
from numdev.config import AuditRequest
from numdev.errors import MeasurementError
from numdev.explain.words import explanations
from numdev.gate.findings import findings_of
from numdev.report import AuditReport
from numdev.report.collector import let_be, only_new
from numdev.report.summary import summarise
from numdev.sources.opening import open_source
from numdev.sources.tensorwriter import Writer
from numdev.system import System


@only_new()
def audit(
    request: AuditRequest,
    directory: Path,
    *,
    crew: Crew | None = None,
    overwrite: bool = False,
    save_cases: Path | None = None,
    command: str = "",
    progress: Progress = lambda what, done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> AuditReport:
    """Run `request`, journalling into `directory`; returns the report, which the caller writes.

    `crew`: who measures, under `cluster.crew.sharing`; None: this process. `save_cases`: a
    directory to write every case to, unrounded. `say` is told what a user should know that the
    report does not hold. Raises UsageError for a request that cannot be run here, before anything
    is measured, and MeasurementError when a sound request could not be carried out.
    """
    system = System.here(request.device)
    plan = plan_kernels(request.kernels)
    plan += plan_controls(gradients=request.gradients) if request.control else []
    formats = plan_formats(request.formats, plan)
    watch = stopwatch(system)
    with watch("capture"):
        source = open_source(request, system)
    said = [*source.notes]
    for note in said:
        say(note)
    described = source.describe()
    asked = request.model_dump(mode="json")
    head = header(asked, system, plan, described)
    writer = Writer(save_cases, overwrite=overwrite) if save_cases else None
    setting = Setting(
        system=system,
        formats=formats,
        plan=plan,
        heads=request.heads,
        explain=request.explain,
        examine=True,
        profile=True,
        gradients=request.gradients,
        sampled_rows=request.sampled_rows,
        seed=request.seed,
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
            total=source.count() * len(formats) * len(plan),
            writer=writer,
            watch=watch,
        )
        with writer or contextlib.nullcontext():
            run.over(source, say)
        for note in source.notes:  # some are known only afterwards
            if note not in said:
                say(note)
        with watch("capture"):
            weights = tuple(row for name, w in source.weights() for row in run.weight(name, w))
        rows, cases, attributions = run.rows, run.cases, run.attributions
        profiles = run.profiles
        let_be()
        if not rows:
            raise MeasurementError(
                f"{request.target}: no attention call was selected",
                hint="check --layers and --heads",
            )
        findings, tested = findings_of(rows)
        workshop = Workshop(
            plan=plan,
            system=system,
            gradients=request.gradients,
            rows=request.sampled_rows,
            seed=request.seed,
            run=where,
            most=request.reproducers,
        )
        reproduce(findings, source, workshop, directory, say)
    return AuditReport(
        provenance=provenance(system, described, command),
        request=asked,
        summary=summarise(rows, weights, explanations(attributions), most(run.worst), profiles),
        findings=findings,
        tested=tested,
        cases=cases,
        rows=rows,
        weights=weights,
        attributions=attributions,
        profiles=profiles,
        timings=watch.seconds(),
    )
