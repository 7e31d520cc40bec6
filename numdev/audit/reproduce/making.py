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
from pathlib import Path
from typing import Any

from numdev.audit.bench import Selection
from numdev.audit.isolation import Failure, Runner
from numdev.audit.plan import Plan, Planned
from numdev.audit.reproduce.reduction import reduce
from numdev.audit.reproduce.script import figure_for, write
from numdev.audit.rows import given
from numdev.audit.task import measure_one
from numdev.cases import AttentionCase
from numdev.errors import NumdevError
from numdev.formats import format_named
from numdev.gate.rules import value_of
from numdev.report import DeviationRow, Finding
from numdev.report.statistics import BIAS_ALPHA, BIAS_SEQUENCES, BIAS_ULP
from numdev.sources.opening import Source

FOLDER = "reproducers"
SECONDS = 20.0  # how long one finding is reduced
# A kernel that takes so many seconds to fail hangs, or takes its process along: it is not asked
# again and again, and the case is kept whole.
SLOW = 2.0
PLACE = ("case", "module", "layer", "call", "phase", "seed")


def reproduce(
    findings: Sequence[Finding],
    source: Source,
    plan: Plan,
    run: Runner,
    directory: Path,
    say: Callable[[str], None],
    *,
    count: int,
    seconds: float = SECONDS,
    folder: Path | None = None,
) -> list[Path]:
    """Write a reproducer for the first `count` findings that have a place, into
    `directory`/reproducers; returns the scripts.

    One is reduced for `seconds`; `folder` is where a script finds the module of a kernel that is a
    function, where it may not be on the way to its modules. What cannot be reproduced or written
    costs its script and no more; `say` is told.
    """
    scripts: list[Path] = []
    shutil.rmtree(directory / FOLDER, ignore_errors=True)  # of an earlier run of this request
    wanted: dict[tuple[str, str | None, str], Finding] = {}
    for finding in findings:  # one script for a fault that shows in several formats
        if finding.severity != "note" and finding.place is not None:
            wanted.setdefault((finding.kernel, finding.tensor, finding.rule), finding)
    waiting = list(wanted.values())[:count]
    try:
        for located in source if waiting else ():
            place = [getattr(located.ref, name) for name in PLACE]
            here = [f for f in waiting if [getattr(f.place, name) for name in PLACE] == place]
            waiting = [f for f in waiting if f not in here]
            for finding in here:
                try:
                    whole = Selection.of(located.load(), gradients=plan.gradients).case
                    shown = _shown(finding, whole, plan, run, seconds)
                    at = directory / FOLDER / finding.folder
                    while at.exists():  # of the same kernel with other options
                        at = at.with_name(f"{at.name}-2")
                    script = write(
                        at, words=finding.sentence, system=plan.system, folder=folder, **shown
                    )
                except (NumdevError, RuntimeError, ValueError) as error:
                    say(f"No reproducer for {finding.folder}: {error}")
                else:
                    scripts.append(script)
                    say(f"Reproducer: {script}")
    except RuntimeError as error:  # a fault that ruined the device, so that no model runs on it
        say(f"No reproducer for {', '.join(f.folder for f in waiting)}: {error}")
    if count and len(wanted) > count:
        say(f"{len(wanted) - count} more findings have no reproducer.")
    return scripts


def _shown(
    finding: Finding, whole: AttentionCase, plan: Plan, run: Runner, seconds: float
) -> dict[str, Any]:
    """A small call that shows a finding, and what a script looks at in it. Raises NumdevError where
    it does not show again."""
    planned = next(
        p
        for p in plan.kernels
        if p.kernel.name == finding.kernel and p.options == finding.options and p.role == "kernel"
    )
    case = whole.rounded_to(format_named(finding.formats[0]))
    options = given(planned.options, planned.kernel)
    shown = {"kernel": planned.kernel, "options": options, "tensor": finding.tensor or "out"}
    if finding.rule != "runs":
        return {**shown, **_accused(finding, case, planned, plan, run, seconds)}
    backward = finding.tensor == "dq"
    case = case if backward else dataclasses.replace(case, grad_out=None)

    def fails(case: AttentionCase) -> bool:
        result = run(planned.kernel, case, options, gradients=backward)
        return isinstance(result, Failure) and result.status == "failed"

    began = time.monotonic()
    slow = fails(case) and time.monotonic() - began > SLOW
    small = case if slow else reduce(case, fails, seconds)
    return {**shown, "case": small, "head": 0, "metric": "raises", "observed": None}


def _accused(
    finding: Finding,
    whole: AttentionCase,
    planned: Planned,
    plan: Plan,
    run: Runner,
    seconds: float,
) -> dict[str, Any]:
    """A small call in which the finding's row is accused again, with the figure of the row."""
    kernel, metric = planned.kernel, finding.metric or ""
    if not kernel.declares:  # what explained nothing in the whole call is not tried in its parts
        kernel = dataclasses.replace(kernel, claims=lambda case, output, system: {"preset": "fa2"})
    task = dataclasses.replace(
        plan.task(planned, finding.formats[0], whole.ref, plan.sample(whole.ref)),
        heads=None,
        repeats=3 if metric == "noise_ratio" else 1,
    )

    def accused(case: AttentionCase) -> DeviationRow | None:
        rows = measure_one(task, kernel, case, plan.system, run)
        worst_first = sorted(rows, key=lambda row: _size(row, metric), reverse=True)
        return next((row for row in worst_first if _shows(row, finding)), None)

    head = finding.place.head if finding.place is not None else None
    if finding.tensor in ("dk", "dv") and head is not None:
        head *= whole.group
    small = reduce(whole, lambda case: accused(case) is not None, seconds, head=head)
    row = accused(small) or accused(small)
    if row is None:
        raise NumdevError("it does not show every time", hint="the kernel differs between runs")
    figure = figure_for(metric, row.bias_of)
    observed, limit = getattr(row, figure), None
    if metric == "expected_ratio" and row.expected_ratio and observed:
        limit = observed * (finding.limit or 1.0) / row.expected_ratio
    shown = {"head": row.head or 0, "metric": figure, "observed": observed, "limit": limit}
    return {"case": small, **shown}


def _size(row: DeviationRow, metric: str) -> float:
    """Of a number, how large it is; 0 where there is none."""
    value = value_of(row, metric)[0]
    return abs(value) if isinstance(value, int | float) else 0.0


def _shows(row: DeviationRow, finding: Finding) -> bool:
    """Whether a row is accused as the finding's was."""
    metric = finding.metric or ""
    if row.status != "ok" or row.tensor != (finding.tensor or "out"):
        return False
    if metric == "suspicion":
        return row.suspicion is not None
    if metric == "bias_size":
        certain = row.bias_p is not None and row.bias_p <= BIAS_ALPHA
        certain = certain and (row.sequences or 0) >= BIAS_SEQUENCES
        return certain and _size(row, metric) >= BIAS_ULP
    return _size(row, metric) > (finding.limit or 0.0)
