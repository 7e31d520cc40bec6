"""What a sweep will cost before it is started: operations, and seconds by a short calibration.

The model: a kernel's time on a case is a fixed overhead plus its matrix products' floating-point
operations at a constant rate. Both are fitted, for every kernel and format, to the time of two
small cases of the sweep's own shapes, measured as the sweep measures them (so the reference and the
metrics are in it). It leaves out what a larger case changes: caches that overflow, threads and
multiprocessors that fill up, work that grows with the rows alone. Expect the right order of
magnitude, and rather too much than too little.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from numdev.audit.bench import Bench, Selection
from numdev.audit.plan import Plan, Planned
from numdev.audit.task import measure_task
from numdev.audit.timing import Stopwatch
from numdev.config import CaseConfig
from numdev.formats import Format
from numdev.sources.opening import Drawn
from numdev.system import System

LENGTHS = (64, 1024)
"""Far apart, and the second long enough that products outweigh what grows with the rows alone."""
HEADS = 1
SECONDS = 10.0
"""After which calibration begins with no further format."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a sweep amounts to."""

    cells: int
    seeds: int
    tasks: int
    operations: float
    """Floating-point operations in the matrix products of one pass of each kernel."""
    seconds: float | None = None
    """Estimated; None without a calibration."""
    calibrated_in: float = 0.0

    def __str__(self) -> str:
        plural = "" if self.cells == 1 else "s"
        said = f"{self.cells} cell{plural} x {self.seeds} seeds: {self.tasks} tasks, "
        said += f"{self.operations:.1e} floating-point operations in matrix products"
        if self.seconds is None:
            return f"{said}."
        return (
            f"{said}. Roughly {duration(self.seconds)} on this device, extrapolated from "
            f"{self.calibrated_in:.0f} s of small cases: it may be off by a factor of three."
        )


def duration(seconds: float) -> str:
    """A time in words a person plans with."""
    for limit, unit, length in ((90, "s", 1), (5400, "min", 60), (1.8e5, "h", 3600)):
        if seconds < limit:
            return f"{max(1, round(seconds / length))} {unit}"
    return f"{seconds / 86400:.1f} days"


def operations(config: CaseConfig) -> float:
    """Of Q Kᵀ and P V over the keys that position lets each row see: 2 for each multiply-add."""
    rows, keys = config.seq_len, config.kv_len or config.seq_len
    pairs = float(rows * keys)
    if config.causal:
        before = config.causal_offset
        pairs = _seen(rows + before, keys) - _seen(before, keys)
    if config.window is not None:
        pairs = min(pairs, float(rows * config.window * (1 if config.causal else 2)))
    width = config.head_dim + (config.v_dim or config.head_dim)
    return 2.0 * config.batch * config.heads * pairs * width


def _seen(count: int, keys: int) -> float:
    """The sum of min(i, keys) over i from 1 to count: what causal rows see."""
    few = min(max(count, 0), keys)
    return few * (few + 1) / 2 + keys * max(0, count - keys)


def estimate(
    cases: Sequence[CaseConfig],
    seeds: int,
    formats: Sequence[Format],
    plan: Sequence[Planned],
    system: System | None,
    rows: int | None = None,
) -> Cost:
    """The cost of a grid; with seconds where there is a system to calibrate on. With `rows` query
    rows measured of each head the seconds are too many: kernels and references are told apart
    nowhere, and only the small cases are measured so."""
    each = [operations(config) for config in cases]
    whole = Cost(
        cells=len(cases) * len(formats) * len(plan),
        seeds=seeds,
        tasks=len(cases) * seeds * len(formats) * len(plan),
        operations=sum(each) * seeds * len(formats) * len(plan),
    )
    if system is None:
        return whole
    start = time.perf_counter()
    fits = list(_calibrate(cases[0], formats, plan, system, rows))
    # Formats that the time did not reach cost what the reached ones do on average.
    scale = seeds * len(formats) * len(plan) / len(fits)
    seconds = scale * sum(a + b * work for a, b in fits for work in each)
    return Cost(
        cells=whole.cells,
        seeds=seeds,
        tasks=whole.tasks,
        operations=whole.operations,
        seconds=seconds,
        calibrated_in=time.perf_counter() - start,
    )


def _calibrate(
    config: CaseConfig,
    formats: Sequence[Format],
    plan: Sequence[Planned],
    system: System,
    rows: int | None,
) -> Iterator[tuple[float, float]]:
    """(seconds of overhead, seconds per operation) of every kernel and format, while time lasts."""
    small = [_shrunk(config, length) for length in LENGTHS]
    work = [operations(case) for case in small]
    drawn = [Drawn(config=c, seed=0, source="calibration", device=system.device) for c in small]
    plan_of = Plan(system=system, formats=formats, kernels=plan, sampled_rows=rows)
    end = time.perf_counter() + SECONDS
    for fmt in formats:
        warm, low_bench, high_bench = (_bench(case, fmt, plan_of) for case in (drawn[0], *drawn))
        for planned in plan:
            _timed(planned, warm, plan_of)  # what only the first use costs
            low, high = (_timed(planned, bench, plan_of) for bench in (low_bench, high_bench))
            rate = max(0.0, (high - low) / (work[1] - work[0])) if work[1] > work[0] else 0.0
            yield max(0.0, low - rate * work[0]), rate
        if time.perf_counter() > end:
            return


def _bench(drawn: Drawn, fmt: Format, plan: Plan) -> Bench:
    selection = Selection.of(drawn.load(), sample=plan.sample(drawn.ref))
    return Bench.of(selection, fmt, selection.exact(selection.case), Stopwatch())


def _shrunk(config: CaseConfig, length: int) -> CaseConfig:
    """The case with fewer rows, keys and heads, of the same head dimension and mask."""
    heads = min(config.heads, HEADS)
    return config.model_copy(
        update={
            "batch": 1,
            "heads": heads,
            "kv_heads": heads,
            "seq_len": min(config.seq_len, length),
            "kv_len": None if config.kv_len is None else min(config.kv_len, length),
            "causal_offset": 0,
        }
    )


def _timed(planned: Planned, bench: Bench, plan: Plan) -> float:
    start = time.perf_counter()
    ref = bench.case.ref
    task = plan.task(planned, bench.format.name, ref, plan.sample(ref))
    measure_task(task, planned.kernel, bench, plan.system)
    return time.perf_counter() - start
