"""Every kernel on one case, in every format: the body of the main line.

The fp64 reference of the case as it came is computed once, all else of it once per format.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from numdev.audit.attempt import Failure, attempt, one_line
from numdev.audit.bench import Bench, Selection
from numdev.audit.examine import examine, profile, remarkable
from numdev.audit.explain_rows import explain
from numdev.audit.plan import Plan, Planned, Task
from numdev.audit.task import COUNTED, Runner, bare_row, measure_task
from numdev.audit.timing import Stopwatch
from numdev.cases import AttentionCase
from numdev.formats import format_named
from numdev.kernels import Kernel
from numdev.metrics.sampling import Sample
from numdev.report import DeviationRow
from numdev.system import System

Entry = dict[str, Sequence[Any]]  # rows of a report by kind: row, worst, profile, attribution


def measure_case(
    case: AttentionCase,
    tasks: Iterable[tuple[Planned, Task]],
    plan: Plan,
    run: Runner,
    watch: Stopwatch,
) -> Iterator[tuple[Task, Entry]]:
    """Each task of a case with its rows, as soon as they are there. Kernels under audit run by
    `run`. Nothing where none of the plan's heads is in the case."""
    sample = plan.sample(case.ref)
    selection = Selection.of(case, plan.heads, gradients=plan.gradients, sample=sample)
    if not selection.heads:
        return
    prepare = _prepared(selection, watch)
    for planned, task in tasks:
        bench, kernel = prepare(task.format), planned.kernel
        if isinstance(bench, Failure):
            yield task, {"row": [bare_row(task, bench)]}
            continue
        own_run = run if task.role == "kernel" else attempt
        measured = measure_task(task, kernel, bench, plan.system, own_run)
        entry: Entry = {"row": measured.rows}
        if plan.profile:
            entry["profile"] = profile(task, measured, bench)
        if plan.examine and task.role == "kernel" and remarkable(measured.rows):
            with watch("metrics"):
                entry["worst"] = examine(task, kernel, measured, bench, plan.system)
        if plan.explain and task.role in ("baseline", "kernel"):
            entry["attribution"] = explain(task, kernel, bench, plan.system, own_run)
        yield task, entry


def _prepared(selection: Selection, watch: Stopwatch) -> Callable[[str], Bench | Failure]:
    """A bench by format, one at a time; a Failure where the case is too large for its reference."""

    @functools.cache
    def exact() -> Any:
        with watch("reference"):
            return selection.exact(selection.case)

    @functools.lru_cache(maxsize=1)  # one format's tensors are freed before the next one's are made
    def bench(format_name: str) -> Bench | Failure:
        try:
            return Bench.of(selection, format_named(format_name), exact(), watch)
        except COUNTED as error:
            return Failure("failed", f"while measuring: {one_line(error)}")

    return bench


def bench_of(
    case: AttentionCase,
    format_name: str,
    heads: Sequence[int] | None = None,
    *,
    gradients: bool = False,
    sample: Sample | None = None,
) -> Bench:
    """A case in memory, prepared in a format."""
    selection = Selection.of(case, heads, gradients=gradients, sample=sample)
    exact = selection.exact(selection.case)
    return Bench.of(selection, format_named(format_name), exact, Stopwatch())


def measure_one(
    task: Task, kernel: Kernel, case: AttentionCase, system: System, run: Runner = attempt
) -> list[DeviationRow]:
    """The rows of one task on a case in memory."""
    selection = Selection.of(case, task.heads, gradients=task.gradients, sample=task.sample)
    bench = _prepared(selection, Stopwatch())(task.format)
    if isinstance(bench, Failure):
        return [bare_row(task, bench)]
    return measure_task(task, kernel, bench, system, run).rows
