"""`numdev sweep`: a grid of cases, formats, kernels' options and seeds through the
audit's loop.

The grid is the configuration's cells; each is drawn anew with every seed. What comes of
the rows is computed in `numdev.report.sweep_curves`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from numdev.config import SweepRequest
from numdev.gate.judging import check_system, judged
from numdev.gate.rules import Rules, default_rules
from numdev.kernels import find
from numdev.report import SweepReport, SweepSummary
from numdev.report.sweep_curves import Grid
from numdev.sources.case_sources import ConfigSource, Drawn
from numdev.studies.audit.case_measurement import Unmeasured, measured_here
from numdev.studies.audit.isolation import Runner
from numdev.studies.audit.plan import Plan, Planned, recorded
from numdev.studies.audit.run import run_plan
from numdev.studies.audit.timing import Stopwatch
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
        """Returns the number of cells, seeds and tasks as a sentence."""
        cells = len(self.request.cases) * len(self.plan.formats) * len(self.plan.kernels)
        seeds = len(self.request.seeds)
        return f"{cells} cells x {seeds} seeds: {cells * seeds} tasks."


# Multiplications of one product of a call that is tried on a CPU: some seconds in all
MOST_WORK = 2.0**29


def estimate(planned: SweepPlan, run: Runner) -> str:
    """Returns how long a sweep takes here, as a sentence: the smallest, the middle and
    the largest case are measured once with everything that is asked for, and the others
    lie between them by their work. On a CPU none is measured of more work than MOST_WORK:
    larger ones are taken to need time in proportion. Where even the smallest call has
    more, it says that the time is not known. Nothing is kept of it. What workers save is
    left out. Kernels run by `run`."""
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
    """Returns what the time of a case grows with: rows times keys times heads times
    features."""
    case = drawn.config
    keys, rows = case.kv_len or case.seq_len, case.seq_len
    return float(case.batch * case.heads * rows * keys * case.head_dim)


def _duration(seconds: float) -> str:
    """Returns a time in a unit that a reader waits in: `40 s`, `12 min`, `3.4 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def plan(request: SweepRequest) -> SweepPlan:
    """Returns the sweep that a request asks for, checked against this machine and what is
    registered; nothing is measured. Raises UsageError for what cannot be run here, and a
    grid without an axis."""
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
    """Runs the plan, journalling into `directory`; returns the report, judged by `rules`
    (None: the default ones), which the caller writes. `how`: options of `run_plan`. The
    report has rows only where the request keeps them (`keep: head`)."""
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
