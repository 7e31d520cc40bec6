"""Every kernel on one case, in every format: the body of the main line.

The fp64 reference of the case as it came is computed once, all else of it once per
format. An error in a kernel, or in measuring what it returned, affects its own task
alone: a row says why."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from numdev.cases import AttentionCase
from numdev.errors import one_line
from numdev.formats import format_named
from numdev.kernels import Kernel
from numdev.metrics.row_samples import Sample
from numdev.report import DeviationRow
from numdev.sources.capture import Captured
from numdev.sources.case_sources import Located
from numdev.studies.audit import deviation_rows as of_rows
from numdev.studies.audit.attention import ATTENTION
from numdev.studies.audit.explanations import examine, explain, profile
from numdev.studies.audit.isolation import (
    Failure,
    Isolated,
    Runner,
    attempt,
    fitting_threads,
)
from numdev.studies.audit.mistake_search import Failing
from numdev.studies.audit.operation import Call, Operation, PreparedCall
from numdev.studies.audit.plan import Plan, Planned, Task
from numdev.studies.audit.prepared_attention import Bench, Selection, case_record
from numdev.studies.audit.section_timing import Stopwatch
from numdev.system import System
from numdev.tensor_properties import tensor_spec

# Rows of a report by kind: row, worst, profile, attribution
Rows = Mapping[str, Sequence[Any]]
Finished = tuple[str, Rows, str]  # a key of the journal, rows by kind, and what was done


def as_located(case: AttentionCase, axes: Mapping[str, object] | None = None) -> Located:
    """Returns a case in memory as a `Located` that can be pickled. Its `load` returns a
    shallow copy. `axes`: its values on a sweep's axes; None: none."""
    return Captured(ref=case.ref, axes=dict(axes or {}), load=partial(copy.copy, case))


LOADER = ThreadPoolExecutor(1)  # draws the next case


def _load_on(gpu: int, located: Located) -> AttentionCase:
    """Returns a case with its tensors, loaded on the GPU of this number where it asks for
    no certain one; -1: without a GPU. Raises what loading it raises."""
    with torch.cuda.device(gpu):
        return located.load()


@dataclass(eq=False)
class Unmeasured:
    """A case with those of its tasks that are to be measured, ordered by format. Its
    tensors are loaded when they are first needed."""

    located: Located
    tasks: Sequence[tuple[Planned, Task]]
    plan: Plan
    watch: Stopwatch
    loading: Future[AttentionCase] | None = None  # in a thread

    def begin_loading(self) -> None:
        """Begins to load the case in another thread, while this one goes on; does nothing
        where no task is left. An error in it is raised where the case is first needed."""
        if self.tasks:
            # A thread begins with the first GPU, whichever this one is on
            gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
            self.loading = LOADER.submit(_load_on, gpu, self.located)

    @cached_property
    def case(self) -> AttentionCase:
        """Returns the case with its tensors; loads it once, or waits for the thread that
        does. Raises what loading it raises."""
        with self.watch("capture"):
            return self.loading.result() if self.loading else self.located.load()

    @cached_property
    def selection(self) -> Selection:
        """Returns the case with the plan's heads and rows, as a `Selection`. Raises what
        loading the case raises."""
        sample = self.plan.sample(self.case.ref)
        return Selection.of(
            self.case, self.plan.heads, gradients=self.plan.backward, sample=sample
        )

    def fitting_threads(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context with PyTorch on one thread for a case of few scores (fewer
        than `isolation.SMALL`), else on all. Raises what loading the case raises."""
        return fitting_threads(self.case.q.shape[:3].numel() * self.case.kv_len)

    def begin_kernel(self, run: Isolated, after: int = 0) -> bool:
        """Begins to run a kernel under audit, the first that is available on this system
        among the tasks from number `after` on, in the process of `run`, while this
        process goes on. Returns whether the tasks have such a kernel. Nothing begins for
        a call that takes much memory, nor where both processes would compute with several
        threads. An error of FAILS_ONE_ROW is not raised: the kernel's task meets it
        again. Raises other errors, as OSError where no process can be started."""
        for planned, task in self.tasks[after:]:
            if task.role == "kernel" and not planned.kernel.missing(self.plan.system):
                # What fails here fails again when its task asks, whose row it costs
                with contextlib.suppress(*of_rows.FAILS_ONE_ROW), self.fitting_threads():
                    self._begin(planned.kernel, task, run)
                return True
        return False

    def _begin(self, kernel: Kernel, task: Task, run: Isolated) -> None:
        """Begins the runs of a task in the kernel's own process. Does nothing where the
        case is not small, or both processes would compute with several threads."""
        is_parallel = not self.case.q.is_cuda and torch.get_num_threads() > 1
        if is_parallel or not is_small(self.case):
            return
        with self.watch("kernels"):
            run.begin(
                kernel,
                self.selection.in_format(format_named(task.format)),
                of_rows.options_set(task.options, kernel),
                gradients=task.gradients,
                times=task.repeats,
            )


# Of q or k, up to which there is room for another call beside this one
AHEAD_BYTES = 1 << 26


def is_small(case: AttentionCase) -> bool:
    """Whether q and k have at most AHEAD_BYTES each, so that memory has room for another
    call beside this one."""
    return max(case.q.nbytes, case.k.nbytes) <= AHEAD_BYTES


def measured_here(
    work: Unmeasured,
    run: Runner,
    later: list[Failing] | None = None,
    following: Unmeasured | None = None,
) -> Iterator[Finished]:
    """Yields what goes into the journal of a case, measured in this process: the case's
    record, then the rows of each task, as soon as they are measured; the record alone
    where the case has none of the plan's heads. Kernels under audit run by `run`, all
    else in this process. To the list `later` calls are appended whose cause is searched
    when all are measured; None: each is searched by itself. `following`: the case that is
    measured next, whose first kernel may begin; None: it is not known. Raises what
    loading the case raises, and an error of `run` or of measuring that is not in
    FAILS_ONE_ROW, as OSError where no process can be started."""
    case, plan, selection = work.case, work.plan, work.selection
    process = run if isinstance(run, Isolated) else None
    if following is not None and is_small(case):
        following.begin_loading()
    with work.fitting_threads():
        record = case_record(case, work.located.axes, plan.formats)
        yield f"case {work.located.ref.case}", {"case": [record]}, case.ref.module
        if not selection.heads:
            return
        exact = None
        numbered = enumerate(work.tasks)
        for name, of_format in itertools.groupby(
            numbered, lambda each: each[1][1].format
        ):
            fmt, unmeasured = format_named(name), list(of_format)
            if process is not None:
                work.begin_kernel(process, unmeasured[0][0])
            bench: Bench | Exception
            try:
                if exact is None:
                    with work.watch("reference"):
                        exact = selection.exact(selection.case)
                bench = Bench.of(selection, fmt, exact, work.watch)
            except of_rows.FAILS_ONE_ROW as error:  # too large for its reference
                bench = error
            for number, (planned, task) in unmeasured:
                if isinstance(bench, Exception):
                    rows: Rows = {"row": [_failed_row(task, bench)]}
                else:
                    ran = None
                    if process is not None:
                        ran = partial(_begin_next, work, following, process, number)
                    runner = run if task.role == "kernel" else attempt
                    measured = measure_task(
                        task,
                        planned.kernel,
                        bench,
                        plan.system,
                        runner,
                        later,
                        ran=ran,
                    )
                    beside = _rows_beside(planned.kernel, task, measured, bench, plan)
                    rows = {"row": measured.rows, **beside}
                yield task.key, rows, f"{task.case.module} {task.kernel}"
            del bench  # one format's tensors are freed before the next one's are made


def _begin_next(
    work: Unmeasured, following: Unmeasured | None, run: Isolated, number: int
) -> None:
    """Begins to run the first kernel under audit behind task `number` in the process of
    `run`: of this case; where it has none, and the case is small, of the `following` one
    (None: there is none)."""
    if not work.begin_kernel(run, number + 1) and following and is_small(work.case):
        following.begin_kernel(run)


def _rows_beside(
    kernel: Kernel,
    task: Task,
    measured: of_rows.Measured[Bench],
    bench: Bench,
    plan: Plan,
) -> Rows:
    """Returns the rows that the plan wants beside those of a measured task, by kind:
    `profile`, `worst` of a kernel under audit, and `attribution` of one and of the
    baseline. A kind that is not wanted is missing."""
    rows: dict[str, Sequence[object]] = {}
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
    call: Call,
    system: System,
    run: Runner = attempt,
    later: list[Any] | None = None,
    operation: Operation[Any] = ATTENTION,
    *,
    ran: Callable[[], object] | None = None,
) -> of_rows.Measured[Call]:
    """Returns the rows of a kernel on a prepared call, with what was measured. A kernel
    that is missing or declines gets one row, `skipped`; one that raises, or whose output
    cannot be measured, one row, `failed`. Where a kernel under audit runs its forward
    pass and no training step, a further row of the first gradient says why. A call that
    errs may be appended to the list `later`, to be searched with others; None: it is
    searched now. `ran` (None: nothing) is called as soon as a kernel under audit has run,
    or failed to; not for a missing one. Raises an error of `run` or of measuring that is
    not in FAILS_ONE_ROW, as OSError."""
    if missing := kernel.missing(system):
        why = Failure("skipped", missing)
        return of_rows.Measured(rows=[of_rows.bare_row(task, why)])
    try:
        with call.watch("metrics"):
            lacking: Failure | None = None
            outputs = _run_repeatedly(task, kernel, call, run)
            if isinstance(outputs, Failure) and task.gradients and task.role == "kernel":
                outputs, lacking = _run_forward_alone(task, kernel, call, run, outputs)
            if ran is not None and task.role == "kernel":
                ran()
            if isinstance(outputs, Failure):
                return of_rows.Measured(rows=[of_rows.bare_row(task, outputs)])
            if task.role == "kernel":
                call = operation.screened(call, outputs[0])
            claim = kernel.claims(call.case, outputs[0], system)
            runs = of_rows.Runs(task, outputs, call, claim)
            measured = runs.measured()
            if task.role == "kernel":
                options = of_rows.options_set(task.options, kernel)
                measured = operation.explained(
                    kernel, options, runs, measured, system, run, later
                )
            if lacking is not None:
                gradient = next(t for t in call.yardsticks if tensor_spec(t).is_gradient)
                measured.rows.append(of_rows.bare_row(task, lacking, gradient))
            return measured
    except of_rows.FAILS_ONE_ROW as error:
        return of_rows.Measured(rows=[_failed_row(task, error)])


def _run_forward_alone(
    task: Task, kernel: Kernel, call: PreparedCall, run: Runner, failure: Failure
) -> tuple[list[Any] | Failure, Failure | None]:
    """Returns what a kernel's forward pass returned in each run, and why there are no
    gradients. Where the forward pass fails too, `failure` (that of the training step),
    and None."""
    forward_task = dataclasses.replace(task, gradients=False)
    forward = _run_repeatedly(forward_task, kernel, call, run)
    if isinstance(forward, Failure):
        return failure, None
    where = "in a training step: " if failure.status == "failed" else ""
    return forward, Failure(failure.status, where + failure.reason)


def _failed_row(task: Task, error: Exception) -> DeviationRow:
    """Returns the only row of a task that failed while it was measured; its reason is
    `while measuring: ` and the error."""
    return of_rows.bare_row(
        task, Failure("failed", f"while measuring: {one_line(error)}")
    )


def _run_repeatedly(
    task: Task, kernel: Kernel, call: PreparedCall, run: Runner
) -> list[Any] | Failure:
    """Returns what the task's kernel returned in each of `task.repeats` runs, or the
    first Failure. Floor and baseline are the call's, once each. For the role `precision`
    the output is the exact one, which is not looked at: two references are compared."""
    yardsticks = call.yardsticks
    names = [t for t in yardsticks if task.gradients or not tensor_spec(t).is_gradient]
    if task.role == "precision":
        return [call.as_output({name: yardsticks[name].reference for name in names})]
    if task.role == "floor":
        floors = {name: yardsticks[name].floor for name in names}
        return [call.as_output(floors, ran=call.exact_by)]
    if task.role == "baseline":
        return call.baseline if isinstance(call.baseline, Failure) else [call.baseline]
    options = of_rows.options_set(task.options, kernel)
    case = call.restricted if task.role == "control" else call.case
    outputs: list[object] = []
    with call.watch("other" if task.role == "control" else "kernels"):
        for _ in range(task.repeats):
            output = run(kernel, case, options, gradients=task.gradients)
            if isinstance(output, Failure):
                return output
            outputs.append(output)
    return outputs


def bench_of(
    case: AttentionCase,
    format_name: str,
    heads: Sequence[int] | None = None,
    *,
    gradients: bool = False,
    sample: Sample | None = None,
) -> Bench:
    """Returns a case in a format, by its name, with reference, baseline and yardsticks.
    `heads`: query heads (None: all); `gradients`: with dq, dk and dv, for which the heads
    grow to whole groups; `sample`: which rows are measured (None: all). Raises UsageError
    for an unknown format, where the case has none of the heads, and for gradients of a
    case without grad_out."""
    selection = Selection.of(case, heads, gradients=gradients, sample=sample)
    exact = selection.exact(selection.case)
    return Bench.of(selection, format_named(format_name), exact, Stopwatch())


def measure_one(
    task: Task,
    kernel: Kernel,
    case: AttentionCase,
    system: System,
    run: Runner = attempt,
    *,
    searching: bool = True,
    later: list[Failing] | None = None,
) -> list[DeviationRow]:
    """Returns the rows of one task on a case in memory; a single failed row where it
    cannot be measured. `searching`: whether the cause of a head that is far off is
    searched in the judged format at once; False: only in a run in float32, which tells
    most. A call that errs may be appended to the list `later`, and nothing is searched
    then; None: it is searched now."""
    try:
        how: Any = {"gradients": task.gradients, "sample": task.sample}
        with fitting_threads(case.q.shape[:3].numel() * case.kv_len):
            bench = bench_of(case, task.format, task.heads, **how)
            bench.watch.searching = searching
            return measure_task(task, kernel, bench, system, run, later).rows
    except of_rows.FAILS_ONE_ROW as error:
        return [_failed_row(task, error)]
