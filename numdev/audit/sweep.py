"""`numdev sweep`: a grid of cases, formats, kernels' options and seeds through the audit's loop.

The grid is the configuration's cells; each is drawn anew with every seed. What comes of the rows
is computed in `numdev.report.curves`, the sentences in `numdev.report.sweep_words`.

What it will cost is said before it is started. The model: a case takes a fixed overhead plus its
matrix products' floating-point operations at a constant rate, both fitted to the time of two small
cases of the sweep's own shapes. Expect the right order of magnitude.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from numdev.audit.attempt import attempt
from numdev.audit.cluster import Cluster
from numdev.audit.plan import Plan, Planned, plan_formats, plan_kernels
from numdev.audit.records import recorded
from numdev.audit.run import Progress, Say, measure, provenance, silent
from numdev.audit.task import measure_case
from numdev.audit.timing import stopwatch
from numdev.config import CaseConfig, SweepRequest
from numdev.kernels import find
from numdev.report import CaseRecord, SweepReport, SweepSummary
from numdev.report.curves import IN_CELLS, Grid, check_metrics, estimates, figures, lines
from numdev.report.sweep_words import notes, sentences
from numdev.sources.opening import ConfigSource
from numdev.system import System

LENGTHS = (64, 1024)  # far apart, and the second long enough that products outweigh other work


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A sweep that has been checked, and nothing of it measured."""

    request: SweepRequest
    plan: Plan
    source: ConfigSource
    baseline: Planned
    grid: Grid

    @property
    def cells(self) -> int:
        return len(self.request.cases) * len(self.plan.formats) * len(self.plan.kernels)

    def cost(self, *, calibrate: bool = True) -> str:
        """What it amounts to, in words; how long it may take too, where kernels may be run here."""
        cases, seeds, each = self.request.cases, len(self.request.seeds), self.cells
        work = [operations(config) for config in cases]
        total = sum(work) * seeds * each / len(cases)
        said = (
            f"{each} cells x {seeds} seeds: {each * seeds} tasks, "
            f"{total:.1e} floating-point operations in matrix products."
        )
        if not calibrate:
            return said
        small = [_shrunk(cases[0], length) for length in LENGTHS]
        self._time(small[0])  # what only the first use costs
        (low, high), (less, more) = map(self._time, small), map(operations, small)
        rate = max(0.0, (high - low) / (more - less)) if more > less else 0.0
        overhead = max(0.0, low - rate * less)
        seconds = seeds * sum(overhead + rate * x for x in work)
        return f"{said} Roughly {duration(seconds)} on this device, by two small cases."

    def _time(self, config: CaseConfig) -> float:
        """Seconds that a case takes, in all formats and kernels."""
        system, start = self.plan.system, time.perf_counter()
        (located,) = ConfigSource(
            "calibration", (config,), (0,), system, gradients=self.plan.gradients
        ).cases
        case = located.load()
        watch = stopwatch(system.device)
        for _ in measure_case(case, self.plan.tasks(case.ref), self.plan, attempt, watch):
            pass
        return time.perf_counter() - start


def plan(request: SweepRequest) -> SweepPlan:
    """Check a request against this machine and what is registered; raises UsageError."""
    system = System.here(request.device)
    kernels = plan_kernels((*request.kernels, request.baseline))
    formats = plan_formats(request.formats, kernels)
    request = request.model_copy(update={"formats": tuple(fmt.name for fmt in formats)})
    check_metrics(request.y, request.target)
    grid = Grid(request, [(p.kernel.name, p.options) for p in kernels])
    _ = grid.axis  # refuse a grid without one now
    baseline = find(request.baseline.name)
    options = recorded(baseline.with_options(request.baseline.options))
    return SweepPlan(
        request=request,
        plan=Plan(
            system=system,
            formats=formats,
            kernels=kernels,
            gradients=request.gradients,
            sampled_rows=request.sampled_rows,
            repeats=request.repeats,
        ),
        source=ConfigSource(
            request.target, request.cases, request.seeds, system, gradients=request.gradients
        ),
        baseline=next(
            p for p in kernels if p.kernel.name == baseline.name and p.options in ({}, options)
        ),
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
    request, grid = planned.request, planned.grid
    watch = stopwatch(planned.plan.system.device)
    results = measure(
        *(planned.source, planned.plan, request, request.measured(), directory, watch),
        workers=workers,
        overwrite=overwrite,
        progress=progress,
        say=say,
    )
    rows = results.rows
    of = (planned.baseline.kernel.name, planned.baseline.options)
    cells = estimates(rows, tuple(dict.fromkeys((*request.y, *IN_CELLS))), of)
    curves, called = lines(cells, grid), grid.label(*of)
    return SweepReport(
        provenance=provenance(planned.plan.system, results.described, command),
        request=request.model_dump(mode="json"),
        summary=SweepSummary(
            answer=sentences(curves, grid, called),
            notes=notes(rows),
            axis=grid.axis,
            cells=planned.cells,
            seeds=request.seeds,
            baseline=called,
        ),
        findings=results.findings,
        tested=results.tested,
        figures=figures(curves, grid, called),
        cells=tuple(e.cell(grid.configs[e.row.case].axes) for e in cells),
        cases=results.journal.records("case", CaseRecord),
        rows=rows if request.rows == "head" else (),
        timings=watch.seconds(),
    )


# --- what it costs -------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """A time in words a person plans with."""
    for limit, unit, length in ((90, "s", 1), (5400, "min", 60), (1.8e5, "h", 3600)):
        if seconds < limit:
            return f"{max(1, round(seconds / length))} {unit}"
    return f"{seconds / 86400:.1f} days"


def operations(config: CaseConfig) -> float:
    """Of Q Kᵀ and P V over the keys that position lets each row see: 2 for each multiply-add."""
    seen = np.full(config.seq_len, config.kv_len or config.seq_len)
    if config.causal:
        seen = np.clip(np.arange(1, len(seen) + 1) + config.causal_offset, 0, seen)
    if config.window is not None:
        seen = np.minimum(seen, config.window * (1 if config.causal else 2))
    width = config.head_dim + (config.v_dim or config.head_dim)
    return 2.0 * config.batch * config.heads * float(seen.sum()) * width


def _shrunk(config: CaseConfig, length: int) -> CaseConfig:
    """The case with fewer rows and keys and one head, of the same head dimension and mask."""
    return config.model_copy(
        update={
            "batch": 1,
            "heads": 1,
            "kv_heads": 1,
            "seq_len": min(config.seq_len, length),
            "kv_len": None if config.kv_len is None else min(config.kv_len, length),
            "causal_offset": 0,
        }
    )
