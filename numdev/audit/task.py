"""Every kernel on one case, in every format: the body of the main line.

The fp64 reference of the case as it came is computed once, all else of it once per
format. What goes wrong in a kernel, or in measuring what it returned, reaches no other
task: a row says why."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from numdev.audit import rows as of_rows
from numdev.audit.bench import Bench, Selection
from numdev.audit.explanations import beyond, examine, explain, profile
from numdev.audit.isolation import Failure, Runner, attempt, fitting, threads
from numdev.audit.naming import FAR, Failing, has_room, name
from numdev.audit.plan import Plan, Planned, Task
from numdev.audit.screening import screened
from numdev.audit.timing import Stopwatch
from numdev.cases import AttentionCase
from numdev.errors import one_line
from numdev.formats import format_named
from numdev.kernels import Kernel, Output
from numdev.kernels.output import GRADIENTS
from numdev.metrics.sampling import Sample
from numdev.report import DeviationRow
from numdev.sources.capture import Captured
from numdev.sources.opening import Located
from numdev.system import System

# Rows of a report by kind: row, worst, profile, attribution
Rows = Mapping[str, Sequence[Any]]
Finished = tuple[str, Rows, str]  # a key of the journal, rows by kind, and what was done


def as_located(case: AttentionCase, axes: Mapping[str, Any] | None = None) -> Located:
    """A case in memory as a `Located`, which can be pickled."""
    return Captured(
        ref=case.ref, axes=dict(axes or {}), load=functools.partial(copy.copy, case)
    )


def measured_here(
    located: Located,
    tasks: Iterable[tuple[Planned, Task]],
    plan: Plan,
    run: Runner,
    watch: Stopwatch,
    later: list[Failing] | None = None,
) -> Iterator[Finished]:
    """What goes into the journal of a case, measured in this process."""
    with watch("capture"):
        case = located.load()
    with _threads(case):
        yield (
            f"case {located.ref.case}",
            {"case": [of_rows.case_record(case, located.axes, plan.formats)]},
            case.ref.module,
        )
        for task, rows in measure_case(case, tasks, plan, run, watch, later):
            yield task.key, rows, f"{task.case.module} {task.kernel}"


def _threads(case: AttentionCase) -> AbstractContextManager[None]:
    """PyTorch on as many threads as the call's scores are worth."""
    return threads(fitting(case.q.shape[:3].numel() * case.kv_len))


def measure_case(
    case: AttentionCase,
    tasks: Iterable[tuple[Planned, Task]],
    plan: Plan,
    run: Runner,
    watch: Stopwatch,
    later: list[Failing] | None = None,
) -> Iterator[tuple[Task, Rows]]:
    """Each task of a case, which come format by format, with its rows as soon as they are
    there. Kernels under audit run by `run`. Nothing where none of the plan's heads is in
    the case."""
    sample = plan.sample(case.ref)
    selection = Selection.of(case, plan.heads, gradients=plan.backward, sample=sample)
    if not selection.heads:
        return
    exact = None
    for format_name, of_format in itertools.groupby(
        tasks, key=lambda pair: pair[1].format
    ):
        try:
            if exact is None:
                with watch("reference"):
                    exact = selection.exact(selection.case)
            bench = Bench.of(selection, format_named(format_name), exact, watch)
        except of_rows.FAILS_ONE_ROW as error:  # the case is too large for its reference
            for _, task in of_format:
                yield task, {"row": [_unmeasured(task, error)]}
            continue
        for planned, task in of_format:
            yield task, _rows(planned.kernel, task, bench, plan, run, later)
        del bench  # one format's tensors are freed before the next one's are made


def _rows(
    kernel: Kernel,
    task: Task,
    bench: Bench,
    plan: Plan,
    run: Runner,
    later: list[Failing] | None = None,
) -> Rows:
    """What a task comes to: its rows, and what the plan wants to know beside them."""
    own_run = run if task.role == "kernel" else attempt
    measured = measure_task(task, kernel, bench, plan.system, own_run, later)
    rows: dict[str, Sequence[Any]] = {"row": measured.rows}
    if plan.details:
        rows["profile"] = profile(task, measured, bench)
    if plan.details and task.role == "kernel":
        with bench.watch("metrics"):
            rows["worst"] = examine(task, kernel, measured, bench, plan.system)
    if plan.explain and task.role in ("baseline", "kernel"):
        rows["attribution"] = explain(task, kernel, measured, bench, plan.system)
    return rows


def measure_task(
    task: Task,
    kernel: Kernel,
    bench: Bench,
    system: System,
    run: Runner = attempt,
    later: list[Failing] | None = None,
) -> of_rows.Measured:
    """A kernel on a prepared case. One that is missing or declines is `skipped`; one that
    raises, or whose output cannot be measured, is `failed`. Where the forward pass runs
    and a training step does not, one row of dq says why there is no gradient. A kernel
    that declared no claim and errs beyond `fa2` is held to the known way of rounding that
    explains it, if one does."""
    if missing := kernel.missing(system):
        return of_rows.Measured(
            rows=[of_rows.bare_row(task, Failure("skipped", missing))]
        )
    try:
        with bench.watch("metrics"):
            runs, lacking = _runs(task, kernel, bench, run), None
            if isinstance(runs, Failure) and task.gradients and task.role == "kernel":
                forward = _runs(
                    dataclasses.replace(task, gradients=False), kernel, bench, run
                )
                if not isinstance(forward, Failure):
                    lacking, runs = runs, forward
            if isinstance(runs, Failure):
                return of_rows.Measured(rows=[of_rows.bare_row(task, runs)])
            if task.role == "kernel" and bench.selection.queries is not None:
                bench = screened(bench, runs[0])
            claim = kernel.claims(bench.case, runs[0], system)
            held = of_rows.Runs(task, runs, bench, claim)
            measured = held.measured()
            wrong = beyond(measured.rows) if task.role == "kernel" else ()
            far = any(
                r.tensor in wrong and (r.baseline_ratio or 0) > FAR for r in measured.rows
            )
            options = of_rows.given(task.options, kernel)
            failing = Failing(kernel, system, run, options, held, measured)
            waits = later is not None and failing.wrong and has_room(later, failing)
            if task.role == "kernel" and later is not None and waits:
                later.append(failing)
            elif task.role == "kernel":
                if (
                    not far
                    and not kernel.declares
                    and not set(wrong).isdisjoint(bench.by_row)
                ):
                    failing.held_to_its_way()
                name(failing)
                measured = failing.measured
            if lacking is not None:
                where = "in a training step: " if lacking.status == "failed" else ""
                why = Failure(lacking.status, where + lacking.reason)
                measured.rows.append(of_rows.bare_row(task, why, "dq"))
            return measured
    except of_rows.FAILS_ONE_ROW as error:
        return of_rows.Measured(rows=[_unmeasured(task, error)])


def _unmeasured(task: Task, error: Exception) -> DeviationRow:
    return of_rows.bare_row(
        task, Failure("failed", f"while measuring: {one_line(error)}")
    )


def _runs(
    task: Task, kernel: Kernel, bench: Bench, run: Runner
) -> list[Output] | Failure:
    """What the task's kernel returns, as often as asked. Floor and baseline are the
    bench's; the output of `precision` only holds a place, since `rows` compares the two
    references."""
    exact, y = bench.reference, bench.yardsticks
    names = GRADIENTS if task.gradients else ()
    if task.role == "precision":
        return [Output(out=exact.out, **{n: getattr(exact, n) for n in names})]
    if task.role == "floor":
        floors: dict[str, Any] = {n: y[n].floor for n in names}
        return [Output(out=y["out"].floor, ran=exact.by, ran_backward=exact.by, **floors)]
    if task.role == "baseline":
        return bench.baseline if isinstance(bench.baseline, Failure) else [bench.baseline]
    case = bench.restricted if task.role == "control" else bench.case
    runs: list[Output] = []
    with bench.watch("other" if task.role == "control" else "kernels"):
        for _ in range(task.repeats):
            output = run(
                kernel,
                case,
                of_rows.given(task.options, kernel),
                gradients=task.gradients,
            )
            if isinstance(output, Failure):
                return output
            runs.append(output)
    return runs


def bench_of(
    case: AttentionCase,
    format_name: str,
    heads: Sequence[int] | None = None,
    *,
    gradients: bool = False,
    sample: Sample | None = None,
) -> Bench:
    selection = Selection.of(case, heads, gradients=gradients, sample=sample)
    exact = selection.exact(selection.case)
    return Bench.of(selection, format_named(format_name), exact, Stopwatch())


def measure_one(
    task: Task, kernel: Kernel, case: AttentionCase, system: System, run: Runner = attempt
) -> list[DeviationRow]:
    """The rows of one task on a case in memory."""
    try:
        how: Any = {"gradients": task.gradients, "sample": task.sample}
        with _threads(case):
            bench = bench_of(case, task.format, task.heads, **how)
            return measure_task(task, kernel, bench, system, run).rows
    except of_rows.FAILS_ONE_ROW as error:
        return [_unmeasured(task, error)]
