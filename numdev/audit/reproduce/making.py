"""A report's findings, each made small and written as a script.

For a finding the call it is worst in is opened again from the source, rounded as the kernel saw it,
and reduced for as long as the row that was accused is accused again: by the same measurements and
the same limit, so that what a script shows is what the report said. A kernel that raises is only
asked whether it still does: nothing is measured. A finding that does not come again (a kernel that
differs from run to run) is said to, and nothing is written for it.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from numdev.audit.attempt import Failure
from numdev.audit.bench import Selection
from numdev.audit.case import measure_one
from numdev.audit.plan import Planned, Task
from numdev.audit.reproduce.reduction import reduce
from numdev.audit.reproduce.reproducer import write
from numdev.audit.reproduce.showing import figure_for
from numdev.audit.task import Runner, given
from numdev.cases import AttentionCase, CaseRef
from numdev.errors import NumdevError
from numdev.formats import format_named
from numdev.gate.rules import value_of
from numdev.metrics.sampling import Sample
from numdev.report import DeviationRow, Finding
from numdev.report.statistics import BIAS_ALPHA, BIAS_SEQUENCES, BIAS_ULP
from numdev.sources.opening import Located, Source
from numdev.system import System

FOLDER = "reproducers"
SECONDS = 20.0
"""How long one finding is reduced."""
SLOW = 2.0
"""A kernel that takes so many seconds to fail hangs, or takes its process along: it is not asked
again and again, and the case is kept whole."""


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """What all reproducers of one report share."""

    plan: Sequence[Planned]
    system: System
    gradients: bool
    run: Runner
    most: int
    """How many findings get a script, in the order of the rules."""
    rows: int | None = None
    """How many query rows of a call are measured, while it has more."""
    seed: int = 0
    seconds: float = SECONDS
    """How long one finding is reduced."""
    folder: Path | None = None
    """Where a script finds the module of a kernel that is a function, where it may not be on the
    way to its modules."""


def reproduce(
    findings: Sequence[Finding],
    source: Source,
    workshop: Workshop,
    directory: Path,
    say: Callable[[str], None],
) -> list[Path]:
    """Write a reproducer for every finding that has a place, into `directory`/reproducers; returns
    the scripts.

    What cannot be reproduced or written costs its script and no more; `say` is told.
    """
    scripts: list[Path] = []
    shutil.rmtree(directory / FOLDER, ignore_errors=True)  # of an earlier run of this request
    wanted: dict[tuple[str, str | None, str], Finding] = {}
    for finding in findings:  # one script for a fault that shows in several formats
        if finding.severity != "note" and finding.place is not None:
            wanted.setdefault((finding.kernel, finding.tensor, finding.rule), finding)
    chosen = {id(f): f for f in list(wanted.values())[: workshop.most]}
    if not chosen:
        return scripts

    try:
        for located in source:
            for key, finding in list(chosen.items()):
                if not _is_here(finding, located.ref):
                    continue
                del chosen[key]
                make = _raising if finding.rule == "runs" else _reproduce
                try:
                    script = make(finding, located, workshop, directory / FOLDER)
                except (NumdevError, RuntimeError, ValueError) as error:
                    say(f"No reproducer for {finding.folder}: {error}")
                else:
                    scripts.append(script)
                    say(f"Reproducer: {script}")
    except RuntimeError as error:  # a fault that ruined the device, so that no model runs on it
        say(f"No reproducer for {', '.join(f.folder for f in chosen.values())}: {error}")
    if len(wanted) > workshop.most:
        say(f"{len(wanted) - workshop.most} more findings have no reproducer.")
    return scripts


def _is_here(finding: Finding, ref: CaseRef) -> bool:
    place = finding.place
    same = ("case", "module", "layer", "call", "phase", "seed")
    return place is not None and all(getattr(place, n) == getattr(ref, n) for n in same)


def _planned(finding: Finding, workshop: Workshop) -> Planned:
    return next(
        p
        for p in workshop.plan
        if p.kernel.name == finding.kernel and p.options == finding.options and p.role == "kernel"
    )


def _raising(finding: Finding, located: Located, workshop: Workshop, directory: Path) -> Path:
    """Reduce and write a call in which a kernel raises. Raises MeasurementError where it does not
    again."""
    planned, fmt = _planned(finding, workshop), finding.formats[0]
    options = given(_task_of(planned, fmt), planned.kernel)
    backward = finding.tensor == "dq"
    loaded = Selection.of(located.load(), gradients=backward).case
    case = loaded.rounded_to(format_named(fmt))
    whole = case if backward else dataclasses.replace(case, grad_out=None)

    def fails(case: AttentionCase) -> bool:
        result = workshop.run(planned.kernel, case, options, gradients=backward)
        return isinstance(result, Failure) and result.status == "failed"

    began = time.monotonic()
    small = whole if fails(whole) and _slow(began) else reduce(whole, fails, workshop.seconds)
    return write(
        _free(directory / finding.folder),
        small,
        planned.kernel,
        options,
        tensor=finding.tensor or "out",
        head=0,
        metric="raises",
        observed=None,
        words=finding.sentence,
        system=workshop.system,
        folder=workshop.folder,
    )


def _slow(began: float) -> bool:
    return time.monotonic() - began > SLOW


def _reproduce(finding: Finding, located: Located, workshop: Workshop, directory: Path) -> Path:
    """Reduce and write one finding. Raises MeasurementError where it does not show again."""
    planned, fmt = _planned(finding, workshop), finding.formats[0]
    loaded = Selection.of(located.load(), gradients=workshop.gradients).case
    whole = loaded.rounded_to(format_named(fmt))
    sample = None
    if workshop.rows is not None:  # each seed of a sweep has its own rows
        seed = located.ref.seed
        sample = Sample(count=workshop.rows, seed=workshop.seed if seed is None else seed)

    kernel = planned.kernel
    if not kernel.declares:  # what explained nothing in the whole call is not tried in its parts
        kernel = dataclasses.replace(kernel, claims=lambda case, output, system: {"preset": "fa2"})

    def accused(case: AttentionCase) -> DeviationRow | None:
        task = Task(
            case=case.ref,
            role="kernel",
            kernel=planned.kernel.name,
            options=planned.options,
            format=fmt,
            gradients=workshop.gradients,
            repeats=3 if finding.metric == "noise_ratio" else 1,
            sample=sample,
        )
        rows = measure_one(task, kernel, case, workshop.system, workshop.run)
        return next((row for row in _worst_first(rows, finding) if _shows(row, finding)), None)

    head = finding.place.head if finding.place is not None else None
    if finding.tensor in ("dk", "dv") and head is not None:
        head *= whole.group
    small = reduce(whole, lambda case: accused(case) is not None, workshop.seconds, head=head)
    row = accused(small) or accused(small)
    if row is None:
        raise NumdevError("it does not show every time", hint="the kernel differs between runs")
    folder = _free(directory / finding.folder)
    metric, observed, limit = _figure(row, finding)
    return write(
        folder,
        small,
        planned.kernel,
        given(_task_of(planned, fmt), planned.kernel),
        tensor=row.tensor,
        head=row.head or 0,
        metric=metric,
        observed=observed,
        words=finding.sentence,
        system=workshop.system,
        limit=limit,
        folder=workshop.folder,
    )


def _task_of(planned: Planned, fmt: str) -> Task:
    return Task(
        case=CaseRef(case=""),
        role="kernel",
        kernel=planned.kernel.name,
        options=planned.options,
        format=fmt,
    )


def _worst_first(rows: Sequence[DeviationRow], finding: Finding) -> list[DeviationRow]:
    def size(row: DeviationRow) -> float:
        value = value_of(row, finding.metric)[0] if finding.metric else None
        return abs(value) if isinstance(value, int | float) else 0.0

    return sorted(rows, key=size, reverse=True)


def _shows(row: DeviationRow, finding: Finding) -> bool:
    """Whether a row is accused as the finding's was."""
    if row.status != "ok" or row.tensor != (finding.tensor or "out") or finding.metric is None:
        return False
    if finding.metric == "suspicion":
        return row.suspicion is not None
    value = value_of(row, finding.metric)[0]
    if not isinstance(value, int | float):
        return False
    if finding.metric == "bias_size":
        certain = row.bias_p is not None and row.bias_p <= BIAS_ALPHA
        certain &= (row.sequences or 0) >= BIAS_SEQUENCES
        return certain and abs(value) >= BIAS_ULP
    return abs(value) > (finding.limit or 0.0)


def _figure(row: DeviationRow, finding: Finding) -> tuple[str, float | None, float | None]:
    """The figure a script shows for the row, its value, and the limit from which it shows. Raises
    UsageError for a finding that is about none."""
    named = {"noise_ratio": "noise", "lse_error": "rms"}
    metric = finding.metric or ""
    figure = figure_for(named.get(metric, metric), row.bias_of)
    observed = getattr(row, figure)
    if finding.metric == "expected_ratio" and row.expected_ratio and observed:
        return figure, observed, observed * (finding.limit or 1.0) / row.expected_ratio
    return figure, observed, None


def _free(folder: Path) -> Path:
    """A folder of that name that does not exist yet."""
    tried = [folder, *(folder.with_name(f"{folder.name}-{i}") for i in range(2, 100))]
    return next(path for path in tried if not path.exists())
