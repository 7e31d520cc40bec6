"""`numdev diagnose`: which heads' rounding errors do not cancel, why, and what each cure changes.

The line of an audit: sources hand over cases with their upstream gradients, one checkpoint after
the other; here each goes through the chain (`numdev.diagnose.chain`) in place of kernels and
metrics. Cures and real kernels run on the last checkpoint of a series alone, unless asked
otherwise: they cost most, and where a series goes is seen without them. What is finished is
journalled call by call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from numdev.audit.journal import Journal
from numdev.audit.plan import Planned, digest, header
from numdev.audit.records import recorded
from numdev.audit.run import Progress, provenance
from numdev.audit.timing import OF_DIAGNOSIS, Stopwatch, stopwatch
from numdev.config import Choice
from numdev.diagnose.chain import diagnosed
from numdev.diagnose.cures import CURES, cured, seen_from_outside
from numdev.diagnose.curves import axis_of, figures, onsets
from numdev.diagnose.heads import answer, leading, ranked, suspects
from numdev.diagnose.report import (
    Checkpoint,
    CureRow,
    DiagnoseReport,
    DiagnoseSummary,
    HeadRow,
    KernelRow,
    RunningError,
)
from numdev.diagnose.request import DiagnoseRequest
from numdev.diagnose.series import Series, Stage, series
from numdev.errors import MeasurementError, Refused, UsageError
from numdev.formats import format_named
from numdev.kernels import find
from numdev.report import Record
from numdev.sources.files import some
from numdev.sources.opening import Captured, Located, Source, TensorFileSource, open_source
from numdev.sources.projection import Projection
from numdev.system import System

# Beside the emulation where none is named.
KERNELS = (Choice(name="sdpa-flash"), Choice(name="baseline"))
DRAWN_RUNS = 3  # heads whose running sums are kept: those at fault first, then by their score


def diagnose(
    request: DiagnoseRequest,
    directory: Path,
    *,
    overwrite: bool = False,
    command: str = "",
    progress: Progress = lambda what, done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> DiagnoseReport:
    """Run `request`, journalling into `directory`; returns the report, which the caller writes.

    `say` is told what a user should know at once. Raises UsageError for a request that cannot be
    run here, before anything is measured, and MeasurementError where no call could be diagnosed.
    """
    system = System.here(request.device)
    request.recipe(), format_named(request.format)  # refuse what they do not know
    kernels, notes = _kernels(request, system)
    found = series(request.targets)
    hashes = {stage.name: stage.sha256 for stage in found.stages}
    head = header(request.model_dump(mode="json"), system, kernels, {"stages": hashes})
    with Journal.open(directory, head, overwrite=overwrite) as journal:
        watch = stopwatch(system.device, OF_DIAGNOSIS)
        run = _Run(request, system, kernels, journal, watch, progress, say, found)
        for stage in found.stages:
            run.over(stage)
        said = list(dict.fromkeys(n for row in journal.rows("stage") for n in row["notes"]))
        if not journal.rows("head"):
            why = next((note for note in said if note.startswith("Not diagnosed")), "")
            raise MeasurementError(
                f"{request.target}: {why.removesuffix('.') or 'no attention call was selected'}",
                hint="check --layers",
            )
        return _report(run, (*notes, *found.left_out, *said), command)


def _kernels(request: DiagnoseRequest, system: System) -> tuple[list[Planned], list[str]]:
    """The real kernels to run, and which were left out. Those nobody named are no loss."""
    planned, notes = [], []
    for choice in KERNELS if request.kernels is None else request.kernels:
        kernel = find(choice.name)
        options, missing = recorded(kernel.with_options(choice.options)), kernel.missing(system)
        if missing is None:
            planned.append(Planned(role="kernel", kernel=kernel, options=options))
        elif request.kernels is not None:
            notes.append(f"{kernel.name} was left out: {missing}.")
    return planned, notes


@dataclass
class _Run:
    """One pass over the stages: what is the same for all, and what became known on the way."""

    request: DiagnoseRequest
    system: System
    kernels: Sequence[Planned]
    journal: Journal
    watch: Stopwatch
    progress: Progress
    say: Callable[[str], None]
    series: Series
    done: int = 0

    def over(self, stage: Stage) -> None:
        """Diagnose every call of a stage that is not finished."""
        key = digest([stage.name, "stage"])
        if self.journal.visit(key):
            (row,) = (r for r in self.journal.rows("stage") if r["name"] == stage.name)
            for case in row["cases"]:
                self.journal.visit(digest([stage.name, case]))
            self.done += len(row["cases"])
            return
        unknown: Counter[str] = Counter()  # why W_Q of a call is not known
        refused, cases = [], []
        with self.watch("capture"):
            source = open_source(self.request.source(stage), self.system, projections=True)
            _check_gradients(source, stage)
            for note in source.notes:
                self.say(note)
            total = len(self.series.stages) * source.count()
            for located in source:
                case = located.ref.case
                self.progress(f"{stage.name} {case}", self.done, total)
                cases.append(case)
                if not self.journal.visit(digest([stage.name, case])):
                    # Its projection is taken while the model's modules are there.
                    projection, why = _projection(located)
                    unknown.update([why] if why else [])
                    try:
                        rows = self.rows_of(located, projection, stage)
                        self.journal.append(digest([stage.name, case]), rows)
                    except Refused as refusal:
                        refused.append(f"{case}: {refusal.message}")
                self.done += 1
        notes = [
            *source.notes,
            *(f"W_Q is not known in {n} {'call' if n == 1 else 'calls'}: {why}."
              for why, n in unknown.items()),
            *([f"Not diagnosed: {some(refused)}."] if refused else []),
        ]  # fmt: skip
        row = {"name": stage.name, "described": source.describe(), "cases": cases, "notes": notes}
        self.journal.append(key, {"stage": [row]})

    def rows_of(
        self, located: Located, projection: Projection | None, stage: Stage
    ) -> dict[str, Sequence[Record]]:
        """The rows of one call, by kind. Raises Refused where the recipe does not hold the case."""
        last, request = stage is self.series.stages[-1], self.request
        case = located.load().rounded_to(format_named(request.format))
        rows: dict[str, Sequence[Record]] = {}
        with self.watch("chain"):
            found = diagnosed(
                case, request.recipe(), projection, checkpoint=stage.name, step=stage.step
            )
            rows["head"] = found.heads
            if last:
                first = suspects(found.heads)[:DRAWN_RUNS]
                rows["running"] = [row for head in first for row in found.running(head.head)]
        if last or request.every_checkpoint:
            with self.watch("cures"):
                rows["cure"] = cured(found, CURES) if request.cures else ()
            with self.watch("kernels"):
                outside = (seen_from_outside(found, k.kernel, k.options) for k in self.kernels)
                rows["kernel"] = [row for of_kernel in outside for row in of_kernel]
        return rows


def _projection(located: Located) -> tuple[Projection | None, str]:
    """W_Q of a call, and why it is not known where it is not."""
    if not isinstance(located, Captured):
        return None, "the call does not come out of a model"
    try:
        return located.projection(), ""
    except MeasurementError as error:
        return None, error.message.partition(": ")[2] or error.message


def _check_gradients(source: Source, stage: Stage) -> None:
    """Raises UsageError for captured tensors without upstream gradients: drawn ones have random
    signs, and would show no bias wherever there is one."""
    cases = source.chosen if isinstance(source, TensorFileSource) else ()
    lacking = [case.ref.case for case in cases if "grad_out" not in case.tensors]
    if lacking:
        raise UsageError(
            f"{stage.target}: stores no grad_out for {some(lacking)}",
            hint="save calls with `numdev audit CHECKPOINT --backward --save-cases DIR`",
        )


def _report(run: _Run, notes: tuple[str, ...], command: str) -> DiagnoseReport:
    stages = run.series.stages
    heads = run.journal.records("head", HeadRow)
    calls: dict[str, set[tuple[str, int]]] = {}
    for head in heads:
        calls.setdefault(head.checkpoint, set()).add((head.case, head.head))
    first, *others = calls
    for name in others:
        for case, number in sorted(calls[name] ^ calls[first])[:1]:
            raise MeasurementError(
                f"{first} and {name} are no series: only one of them has {case}, head {number}",
                hint="diagnose them one at a time",
            )
    cures = run.journal.records("cure", CureRow)
    kernels = run.journal.records("kernel", KernelRow)
    running = run.journal.records("running", RunningError)
    last = [head for head in heads if head.checkpoint == stages[-1].name]
    ranking = ranked(last, cures)
    costs = {name: cure.breaks for name, cure in CURES.items()} if cures else {}
    axis = axis_of(heads) if ranking else None
    moves = onsets(heads, leading(ranking)) if axis else {}
    said = answer(ranking, last, cures, kernels, costs, moves)
    drawn = suspects(last)[:DRAWN_RUNS]
    return DiagnoseReport(
        provenance=provenance(run.system, run.journal.rows("stage")[-1]["described"], command),
        request=run.request.model_dump(mode="json"),
        timings=run.watch.seconds(),
        summary=DiagnoseSummary(answer=said, ranking=ranking, notes=notes, axis=axis),
        attention=dict(run.request.attention),
        checkpoints=tuple(Checkpoint(name=s.name, step=s.step, sha256=s.sha256) for s in stages),
        heads=heads,
        cures=cures,
        costs=costs,
        kernels=kernels,
        running=tuple(row for head in drawn for row in running if row.is_of(head)),
        figures=figures(heads, leading(ranking)) if axis else (),
    )
