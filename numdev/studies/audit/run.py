"""`numdev audit`: every attention call, through every kernel, against fp64, beside low
precision.

The main line. A source gives cases, `measured_here` turns each into finished rows, the
journal keeps them, and the report is made of them. `numdev sweep` uses the same loop
(`run_plan`)."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from numdev import report as records
from numdev.cases import CaseRef
from numdev.errors import UsageError
from numdev.gate.judging import check_system, judged
from numdev.gate.rules import Rules, default_rules
from numdev.kernels import Kernel
from numdev.metrics.finiteness import count_nonfinite, nonfinite_of
from numdev.metrics.weight_casts import weight_row
from numdev.operations.attention.explain.rounding_explanations import explanations
from numdev.request_models import AuditRequest, SweepRequest
from numdev.sources.captured_calls import Add, writing_cases
from numdev.sources.case_sources import Located, Source, open_source
from numdev.studies.audit.case_measurement import (
    Unmeasured,
    as_located,
    measured_here,
)
from numdev.studies.audit.dask_workers import Cluster, Workers, at_work
from numdev.studies.audit.explanations import most
from numdev.studies.audit.finding_reproducers import FOLDER, reproduce
from numdev.studies.audit.isolation import Isolated, Runner, attempt
from numdev.studies.audit.journal import Journal
from numdev.studies.audit.plan import Plan, Planned, header
from numdev.studies.audit.prepared_attention import Selection
from numdev.studies.audit.section_timing import Stopwatch
from numdev.studies.audit.worker_lifetime import WorkerProcess
from numdev.system import System

# Called with what is being done, how many tasks are behind it, and how many there are.
Progress = Callable[[str, int, int], None]
Say = Callable[[str], None]
Tell = Callable[[Sequence[object]], None]  # of the rows of a task


def audit(
    request: AuditRequest,
    directory: Path | None,
    *,
    opened: Callable[[AuditRequest, System], Source] = open_source,
    unregistered: Mapping[str, Kernel] | None = None,
    rules: Rules | None = None,
    **how: Any,
) -> records.AuditReport:
    """Runs `request`, journalling into `directory` (None: in memory). Returns the report,
    judged by `rules` (None: the default ones); the caller writes it. `opened` makes the
    source; `unregistered`: kernels by name that come before the registry's; `how`:
    further arguments of `run_plan`. Raises UsageError, before anything is measured, for a
    request that cannot be run here, and where no call is selected; MeasurementError where
    rules were made for another system, or a sound request cannot be carried out."""
    system = System.probe(request.device)
    watch = Stopwatch(system.device)
    plan, rules = Plan.of(request, system, unregistered), rules or default_rules()
    check_system(system.as_dict(), rules)
    with watch("capture"):
        source = opened(request, system)
    asked = request.model_dump(mode="json") | {
        "formats": [fmt.name for fmt in plan.formats]
    }
    results = run_plan(source, plan, request, asked, directory, watch, **how)
    weights: list[records.WeightRow] = []
    # NaN or infinite elements as they are stored, by tensor
    nonfinite: dict[str, int] = {}
    with watch("weights"):
        for name, stored in source.weights():
            if stored.is_floating_point():
                tensor = stored.to(system.device)
                # Cheap, and so not journalled.
                weights += [weight_row(name, tensor, fmt) for fmt in plan.formats]
                if count := count_nonfinite(tensor):
                    nonfinite[name] = count
    fields = dict(results.fields)
    if "parameters" in fields["provenance"].source:
        origin: records.Provenance = fields["provenance"]
        described = {**origin.source, "nonfinite_weights": nonfinite}
        fields["provenance"] = origin.model_copy(update={"source": described})
    journal = results.journal
    attributions = journal.records("attribution", records.AttributionRow)
    worst = most(journal.records("worst", records.WorstRow))
    report = records.AuditReport(
        **fields,
        request=asked,
        summary=records.AuditSummary(
            answer=(),
            kernels=(),
            explanations=explanations(attributions) if plan.explain else (),
            worst_rows=worst,
        ),
        rows=results.rows,
        weights=tuple(weights),
        attributions=attributions,
        profiles=journal.records("profile", records.ProfileRow),
        timings=watch.seconds(),
    )
    return judged(report, rules)


class Described(Protocol):
    """A source that says what is read, and which tensors are stored."""

    def describe(self) -> dict[str, object]:
        """Returns what a report's provenance says of what is read, as plain data that
        JSON can hold, by field name. `parameters` is among the names where there are
        stored tensors."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the stored tensors with their names; nothing for a source without
        parameters."""


def describe(source: Described) -> dict[str, object]:
    """Returns what is read, as plain data by name. For a source with `parameters` this
    has `nonfinite_weights`: by stored tensor how many elements are not finite, for which
    all weights are read."""
    described = source.describe()
    if "parameters" in described:
        described["nonfinite_weights"] = nonfinite_of(source.weights())
    return described


@contextlib.contextmanager
def running(
    request: AuditRequest | SweepRequest,
    workers: Cluster | None = None,
    started: list[WorkerProcess] | None = None,
) -> Iterator[Runner]:
    """Yields what runs kernels for a request: `attempt`; where the request isolates
    kernels or there are `workers`, a process, which ends with the block. (A kernel that
    crashed a worker must not run in this process.) Without workers that process starts at
    once, or is taken out of the list `started`, if it has one."""
    if not (request.isolate or workers):
        yield attempt
        return
    with Isolated(request.time_limit) as run:
        if workers is None:
            run.start(started.pop() if started else None)
        yield run


class Results(NamedTuple):
    """What a run measured: its journal, its rows, and fields for a report, by name."""

    journal: Journal
    rows: tuple[records.DeviationRow, ...]
    fields: Mapping[str, Any]  # of a report, whatever its kind


def run_plan(
    source: Source,
    plan: Plan,
    request: AuditRequest | SweepRequest,
    asked: Mapping[str, object],
    directory: Path | None,
    watch: Stopwatch,
    *,
    workers: Cluster | None = None,
    overwrite: bool = False,
    save_cases: Path | None = None,
    progress: Progress = lambda what, done, total: None,
    say: Say = lambda text: None,
    tell: Tell | None = None,
    command: str = "",
    runner: Runner | None = None,
) -> Results:
    """Measures a source, and returns the results. An interrupted run continues where
    `asked` and all else that decides its numbers is the same. `directory`: of the
    journal; None: in memory. `workers`: None: this process measures. `overwrite`: earlier
    results are replaced. `save_cases`: a new directory. `progress` gets the present work,
    and the counts of finished and all tasks; `say` messages that the report lacks; `tell`
    the rows of each task while others are to come. `runner`: None: that of `running`.
    Raises UsageError for no call and an unusable directory, and as source and workers."""
    notes = tuple(source.notes)
    for note in notes:
        say(note)
    described = source.describe()
    # With what a continued run and workers have to agree; else there is nobody to ask
    is_shared = directory is not None or workers is not None
    shared = header(asked, plan.system, plan.kernels, described) if is_shared else {}
    with (
        Journal.open(directory, shared, overwrite=overwrite) as journal,
        contextlib.nullcontext(runner) if runner else running(request, workers) as run,
        at_work(workers, plan, shared, request.time_limit, watch, say)
        if workers
        else contextlib.nullcontext() as team,
        writing_cases(save_cases, overwrite=overwrite)
        if save_cases
        else contextlib.nullcontext() as save,
    ):
        before = journal.finished
        calls = run_source(source, plan, journal, run, watch, team, save, progress, tell)
        if before and journal.finished == before:
            say("Every task was finished before; --overwrite measures them again.")
        elif before:
            say("Continued an earlier run; its finished tasks were kept.")
        for note in source.notes[len(notes) :]:  # some are known only afterwards
            say(note)
        rows = journal.records("row", records.DeviationRow)
        if not rows:
            what = f"{request.target}: no attention call was selected"
            raise UsageError(what, hint="check --layers and --heads")
    fields = {
        "doubts": tuple(source.doubts),
        "provenance": provenance(plan.system, described, command, plan.kernels),
        "plan": plan.record(calls),
        "cases": journal.records("case", records.CaseRecord),
    }
    return Results(journal, rows, fields)


def run_source(
    source: Source,
    plan: Plan,
    journal: Journal,
    run: Runner,
    watch: Stopwatch,
    workers: Workers | None = None,
    save: Add | None = None,
    progress: Progress = lambda what, done, total: None,
    tell: Tell | None = None,
) -> list[CaseRef]:
    """Measures every case of a source through every kernel, by `run` or on `workers`,
    into the journal. A case of which all tasks and its record are finished is not loaded,
    unless there is `save`, which writes cases as they are visited. `tell` gets the rows
    of each task but the last, and none that workers finish after the last case was sent.
    Returns the cases that came, in order. Raises what the source and measuring raise, and
    with `workers` what a worker raised."""
    calls: list[CaseRef] = []
    each = len(plan.formats) * len(plan.kernels)
    visited, total = 0, source.count() * each
    unmeasured = _unmeasured(source, plan, journal, watch, save)
    pairs: Iterable[tuple[Unmeasured, Unmeasured | None]]
    pairs = zip(unmeasured, itertools.repeat(None))
    # A kernel in its own process may begin with the next case, where that is known
    # already: of a running model it comes when this one is done with.
    if isinstance(run, Isolated) and source.cases and save is None and workers is None:
        pairs = _with_next(unmeasured)
    with watch("capture"):
        for work, following in pairs:
            with watch("other"):
                ref = work.located.ref
                calls.append(ref)
                visited += each - len(work.tasks)
                progress(ref.module, visited, total)
                if journal.visit(f"case {ref.case}") and not work.tasks:
                    continue
                if workers is not None:
                    finished = workers.submit(work.located, work.tasks)
                else:
                    finished = measured_here(work, run, following=following)
                for key, rows, what in finished:
                    visited += journal.append(key, rows) and "row" in rows
                    progress(what, visited, total)
                    if tell is not None and visited < total:
                        tell(rows.get("row", ()))
        if workers is not None:
            with watch("other"):
                for key, rows, what in workers.drain():
                    visited += journal.append(key, rows) and "row" in rows
                    progress(what, visited, total)
    return calls


def _unmeasured(
    source: Source, plan: Plan, journal: Journal, watch: Stopwatch, save: Add | None
) -> Iterator[Unmeasured]:
    """Yields every case of a source, with those of its tasks that are not finished; notes
    all tasks in the journal, in their order. `save` writes each case, which is then in
    memory."""
    for located in source:
        with watch("other"):
            if save is not None:
                located = _save_case(located, plan, save)
            journal.visit(f"case {located.ref.case}")
            tasks = list(plan.tasks(located.ref))
            unfinished = [(p, task) for p, task in tasks if not journal.visit(task.key)]
        yield Unmeasured(located, unfinished, plan, watch)


def _with_next(
    items: Iterable[Unmeasured],
) -> Iterator[tuple[Unmeasured, Unmeasured | None]]:
    """Yields each item with the item behind it, the last one with None."""
    yield from itertools.pairwise(itertools.chain(items, [None]))


def _save_case(located: Located, plan: Plan, save: Add) -> Located:
    """Writes a case, unrounded, with grad_out as the plan measures it, and returns it in
    memory."""
    case = Selection.of(located.load(), plan.heads, gradients=plan.backward).case
    save(case, located.axes)
    return as_located(case, located.axes)


def reproducers(
    report: records.AuditReport | records.SweepReport,
    request: AuditRequest | SweepRequest,
    directory: Path,
    opened: tuple[Source, Plan] | None = None,
    *,
    runner: Runner,
    say: Say,
    **how: Any,
) -> list[Path]:
    """Writes scripts for the first findings of a report, and returns their paths. Removes
    the folder of an earlier run's scripts first. `opened`: a sweep's source and plan;
    None: the source of an audit is opened again, which may raise UsageError. `runner`:
    what runs kernels; `say` gets messages; `how`: further arguments of `reproduce`. Empty
    without findings, and where the request wants no scripts."""
    # Of an earlier run of this request
    shutil.rmtree(directory / FOLDER, ignore_errors=True)
    if not (report.findings and request.reproducers):
        return []
    if opened is None:
        assert isinstance(request, AuditRequest)
        system = System.probe(request.device)
        opened = open_source(request, system), Plan.of(request, system)
    how |= {"count": request.reproducers}
    return reproduce(report.findings, *opened, runner, directory, say, **how)


def provenance(
    system: System,
    described: Mapping[str, object],
    command: str,
    kernels: Sequence[Planned] = (),
) -> records.Provenance:
    """Returns where the numbers of a report come from that is made now: the time,
    `command`, the system, what was read, and a fingerprint of the source of each of the
    `kernels` that does not ship with numdev."""
    sources = {p.kernel.name: p.kernel.made_from for p in kernels if ":" in p.kernel.name}
    more = {"kernel_sources": sources} if sources else {}
    return records.Provenance.now(command, system.as_dict(), {**described, **more})
