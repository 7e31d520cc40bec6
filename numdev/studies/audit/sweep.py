"""`numdev sweep`: a grid of cases, formats, kernels' options and seeds through the
audit's loop.

The grid is the configuration's cells; each is drawn anew with every seed.
`numdev.report.sweep_statistics` computes cells and curves from the rows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from numdev.gate.judging import check_system, judged
from numdev.gate.rules import Rules, default_rules
from numdev.kernels import find
from numdev.report import SweepReport, SweepSummary
from numdev.report.sweep_statistics import Grid
from numdev.request_models import SweepRequest
from numdev.sources.case_sources import ConfigSource, Drawn
from numdev.studies.audit.case_measurement import Unmeasured, measured_here
from numdev.studies.audit.isolation import Runner
from numdev.studies.audit.plan import Plan, Planned, recorded
from numdev.studies.audit.run import run_plan
from numdev.studies.audit.section_timing import Stopwatch
from numdev.system import System


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A sweep that has been checked, before anything is measured."""

    request: SweepRequest
    plan: Plan
    source: ConfigSource
    baseline: Planned
    grid: Grid

    @property
    def size(self) -> str:
        """Returns the number of cells, seeds and tasks: `6 cells x 5 seeds: 30 tasks.`"""
        cells = len(self.request.cases) * len(self.plan.formats) * len(self.plan.kernels)
        seeds = len(self.request.seeds)
        return f"{cells} cells x {seeds} seeds: {cells * seeds} tasks."


# Multiplications of one product of a call that is tried on a CPU: some seconds in all
MOST_WORK = 2.0**29


def estimate(planned: SweepPlan, run: Runner) -> str:
    """Returns in a sentence how long a sweep takes here. Of the first seed's cases the
    smallest, the middle and the largest are measured once with all kernels and formats;
    the time of the others lies between by their work. On a CPU no case of more work than
    MOST_WORK is among these; larger ones are taken to need time in proportion. Where even
    the smallest case has more, the sentence says that the time is not known. The
    measurements are dropped, and workers are not counted. `run`: what runs kernels.
    Raises what drawing a case raises."""
    request, source, plan = planned.request, planned.source, planned.plan
    every = [x for x in source.cases if isinstance(x, Drawn)]
    first = [drawn for drawn in every if drawn.seed == request.seeds[0]]
    first.sort(key=_work)
    if plan.system.device == "cpu":
        first = [drawn for drawn in first if _work(drawn) <= MOST_WORK]
    if not first:
        return "How long it takes is not known: its smallest call is too large to try."
    places = sorted({0, len(first) // 2, len(first) - 1})
    watch, seconds = Stopwatch(plan.system.device), []
    for drawn in (first[at] for at in places):
        begun = time.perf_counter()
        tasks = list(plan.tasks(drawn.ref))
        for _ in measured_here(Unmeasured(drawn, tasks, plan, watch), run):
            pass
        seconds.append(time.perf_counter() - begun)
    sizes = [_work(first[at]) for at in places]
    work = np.array([_work(x) for x in every])
    beyond = np.maximum(work / sizes[-1], 1.0)
    total = float((np.interp(work, sizes, seconds) * beyond).sum())
    sample = (
        f"{len(places)} of {len(source.cases)} calls, measured in {sum(seconds):.1f} s"
    )
    return f"About {_duration(total)} on this machine, by {sample}."


def _work(drawn: Drawn) -> float:
    """Returns a case's number of rows times keys times heads times features, with which
    its time grows."""
    case = drawn.config
    keys, rows = case.kv_len or case.seq_len, case.seq_len
    return float(case.batch * case.heads * rows * keys * case.head_dim)


def _duration(seconds: float) -> str:
    """Returns a time in words: `40 s` below 90 s, `12 min` below 90 min, else `3.4 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def plan(request: SweepRequest) -> SweepPlan:
    """Returns the sweep of a request, checked against this machine and the registered
    kernels; nothing is measured. Raises UsageError for what cannot be run here, for a
    grid without an axis, and for an unknown axis or metric."""
    system = System.probe(request.device)
    plan = Plan.of(request, system)
    request = request.model_copy(
        update={"formats": tuple(fmt.name for fmt in plan.formats)}
    )
    grid = Grid(request, [(p.kernel.name, p.options) for p in plan.kernels])
    _ = grid.axis  # refuse a grid without one, and what is no metric, now
    name = find(request.baseline.name).name
    options = recorded(find(name).with_options(request.baseline.options))
    return SweepPlan(
        request=request,
        plan=plan,
        source=ConfigSource(
            request.target,
            request.cases,
            request.seeds,
            system,
            gradients=request.backward,
        ),
        baseline=next(
            p
            for p in plan.kernels
            if p.kernel.name == name and p.options in ({}, options)
        ),
        grid=grid,
    )


def sweep(
    planned: SweepPlan, directory: Path, *, rules: Rules | None = None, **how: Any
) -> SweepReport:
    """Runs the plan, journalling into `directory`. Returns the report, judged by `rules`
    (None: the default ones); the caller writes it. `how`: further arguments of
    `run_plan`, and raises as that. The report has rows only where the request says `keep:
    head`. Raises MeasurementError where the rules were made for another system."""
    rules = rules or default_rules()
    check_system(planned.plan.system.as_dict(), rules)
    request, source, grid = planned.request, planned.source, planned.grid
    watch, asked = Stopwatch(planned.plan.system.device), request.measured()
    results = run_plan(source, planned.plan, request, asked, directory, watch, **how)
    report = SweepReport(
        **results.fields,
        request=request.model_dump(mode="json"),
        summary=SweepSummary(
            answer=(), axis=grid.axis, seeds=request.seeds, baseline=request.baseline.name
        ),
        figures=(),
        cells=(),
        rows=results.rows,
        timings=watch.seconds(),
    )
    report = judged(report, rules)
    return report if request.keep == "head" else report.model_copy(update={"rows": ()})
