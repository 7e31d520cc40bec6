"""A report's findings, each made small and written as a script.

For a finding the call it is worst in is opened again from the source, rounded as the kernel saw it,
and reduced for as long as the row that was accused is accused again: by the same measurements and
the same limit, so that what a script shows is what the report said. A kernel that raises is only
asked whether it still does. A finding that does not come again gets no script, and that is said.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numdev.audit.attempt import Failure
from numdev.audit.bench import Selection
from numdev.audit.plan import Planned, Task
from numdev.audit.reproduce.reduction import reduce
from numdev.audit.reproduce.script import figure_for, write
from numdev.audit.rows import given
from numdev.audit.task import Runner, measure_one
from numdev.cases import AttentionCase
from numdev.errors import NumdevError
from numdev.formats import format_named
from numdev.gate.rules import value_of
from numdev.metrics.sampling import Sample
from numdev.report import DeviationRow, Finding
from numdev.report.statistics import BIAS_ALPHA, BIAS_SEQUENCES, BIAS_ULP
from numdev.sources.opening import Located, Source
from numdev.system import System

FOLDER = "reproducers"
SECONDS = 20.0  # how long one finding is reduced
# A kernel that takes so many seconds to fail hangs, or takes its process along: it is not asked
# again and again, and the case is kept whole.
SLOW = 2.0
PLACE = ("case", "module", "layer", "call", "phase", "seed")


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
    waiting = list(wanted.values())[: workshop.most]
    if not waiting:
        return scripts
    try:
        for located in source:
            place = [getattr(located.ref, name) for name in PLACE]
            here = [f for f in waiting if [getattr(f.place, name) for name in PLACE] == place]
            waiting = [f for f in waiting if f not in here]
            for finding in here:
                try:
                    script = _script(finding, located, workshop, directory / FOLDER)
                except (NumdevError, RuntimeError, ValueError) as error:
                    say(f"No reproducer for {finding.folder}: {error}")
                else:
                    scripts.append(script)
                    say(f"Reproducer: {script}")
    except RuntimeError as error:  # a fault that ruined the device, so that no model runs on it
        say(f"No reproducer for {', '.join(f.folder for f in waiting)}: {error}")
    if len(wanted) > workshop.most:
        say(f"{len(wanted) - workshop.most} more findings have no reproducer.")
    return scripts


def _script(finding: Finding, located: Located, workshop: Workshop, directory: Path) -> Path:
    """Reduce and write one finding. Raises NumdevError where it does not show again."""
    planned = next(
        p
        for p in workshop.plan
        if p.kernel.name == finding.kernel and p.options == finding.options and p.role == "kernel"
    )
    raises = finding.rule == "runs"
    backward = finding.tensor == "dq" if raises else workshop.gradients
    loaded = Selection.of(located.load(), gradients=backward).case
    case = loaded.rounded_to(format_named(finding.formats[0]))
    shown = (_raised if raises else _accused)(finding, case, planned, workshop)
    folder = directory / finding.folder
    free = [folder, *(folder.with_name(f"{folder.name}-{i}") for i in range(2, 100))]
    return write(
        next(path for path in free if not path.exists()),
        kernel=planned.kernel,
        options=given(planned.options, planned.kernel),
        words=finding.sentence,
        system=workshop.system,
        folder=workshop.folder,
        **shown,
    )


def _raised(
    finding: Finding, case: AttentionCase, planned: Planned, workshop: Workshop
) -> dict[str, Any]:
    """A small call in which a kernel raises."""
    options = given(planned.options, planned.kernel)
    backward = finding.tensor == "dq"
    whole = case if backward else dataclasses.replace(case, grad_out=None)

    def fails(case: AttentionCase) -> bool:
        result = workshop.run(planned.kernel, case, options, gradients=backward)
        return isinstance(result, Failure) and result.status == "failed"

    began = time.monotonic()
    slow = fails(whole) and time.monotonic() - began > SLOW
    small = whole if slow else reduce(whole, fails, workshop.seconds)
    tensor = finding.tensor or "out"
    return {"case": small, "tensor": tensor, "head": 0, "metric": "raises", "observed": None}


def _accused(
    finding: Finding, whole: AttentionCase, planned: Planned, workshop: Workshop
) -> dict[str, Any]:
    """A small call in which the finding's row is accused again, with the figure of the row."""
    sample, kernel = None, planned.kernel
    if workshop.rows is not None:  # each seed of a sweep has its own rows
        seed = whole.ref.seed
        sample = Sample(count=workshop.rows, seed=workshop.seed if seed is None else seed)
    if not kernel.declares:  # what explained nothing in the whole call is not tried in its parts
        kernel = dataclasses.replace(kernel, claims=lambda case, output, system: {"preset": "fa2"})

    def size(row: DeviationRow) -> float:
        value = value_of(row, finding.metric)[0] if finding.metric else None
        return abs(value) if isinstance(value, int | float) else 0.0

    def accused(case: AttentionCase) -> DeviationRow | None:
        task = Task(
            case=case.ref,
            role="kernel",
            kernel=kernel.name,
            options=planned.options,
            format=finding.formats[0],
            gradients=workshop.gradients,
            repeats=3 if finding.metric == "noise_ratio" else 1,
            sample=sample,
        )
        rows = measure_one(task, kernel, case, workshop.system, workshop.run)
        worst_first = sorted(rows, key=size, reverse=True)
        return next((row for row in worst_first if _shows(row, finding)), None)

    head = finding.place.head if finding.place is not None else None
    if finding.tensor in ("dk", "dv") and head is not None:
        head *= whole.group
    small = reduce(whole, lambda case: accused(case) is not None, workshop.seconds, head=head)
    row = accused(small) or accused(small)
    if row is None:
        raise NumdevError("it does not show every time", hint="the kernel differs between runs")
    figure = figure_for(finding.metric or "", row.bias_of)
    observed = getattr(row, figure)
    limit = None
    if finding.metric == "expected_ratio" and row.expected_ratio and observed:
        limit = observed * (finding.limit or 1.0) / row.expected_ratio
    shown = {"tensor": row.tensor, "head": row.head or 0, "metric": figure, "observed": observed}
    return {"case": small, **shown, "limit": limit}


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
