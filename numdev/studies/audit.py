"""`numdev audit`: every attention call, through every kernel, against fp64, beside low precision.

The line of the design: a source, the loop, the report. What is run and measured is the loop's
(`numdev.loop`); what it comes to is the summary's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from numdev.config import AuditRequest
from numdev.errors import MeasurementError
from numdev.execute import Journal
from numdev.loop import Progress, Run, header, plan_formats, plan_kernels, provenance
from numdev.report import AuditReport
from numdev.sources import open_source
from numdev.summary import summarise
from numdev.system import System
from numdev.tensorwriter import Writer


def audit(
    request: AuditRequest,
    directory: Path,
    *,
    overwrite: bool = False,
    save_cases: Path | None = None,
    command: str = "",
    progress: Progress = lambda what, done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> AuditReport:
    """Run `request`, journalling into `directory`; returns the report, which the caller writes.

    `save_cases`: a directory to write every case to, unrounded. `say` is told what a user should
    know that the report does not hold. Raises UsageError for a
    request that cannot be run here, before anything is measured, and MeasurementError when a
    sound request could not be carried out.
    """
    system = System.here(request.device)
    plan = plan_kernels(request.kernels)
    formats = plan_formats(request.formats, plan)
    source = open_source(request, system)
    for note in source.notes:
        say(note)
    described = source.describe()
    asked = request.model_dump(mode="json")
    head = header(asked, system, plan, described)
    writer = Writer(save_cases, overwrite=overwrite) if save_cases else None
    with Journal.open(directory, head, overwrite=overwrite) as journal:
        run = Run(
            journal=journal,
            system=system,
            formats=formats,
            plan=plan,
            heads=request.heads,
            progress=progress,
            total=source.count() * len(formats) * len(plan),
            writer=writer,
        )
        with writer or contextlib.nullcontext():
            run.over(source, say)
        weights = tuple(row for name, w in source.weights() for row in run.weight(name, w))
        rows, cases = run.rows, run.cases
    if not rows:
        raise MeasurementError(
            f"{request.target}: no attention call was selected", hint="check --layers and --heads"
        )
    return AuditReport(
        provenance=provenance(system, described, command),
        request=asked,
        summary=summarise(rows, weights),
        cases=cases,
        rows=rows,
        weights=weights,
    )
