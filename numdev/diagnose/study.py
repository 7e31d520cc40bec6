"""`numdev diagnose`: which heads' rounding errors do not cancel, why, and what each cure changes.

The line of an audit: sources hand over cases with their upstream gradients, one checkpoint after
the other; here each goes through the chain (`numdev.diagnose.call`) in place of kernels and
metrics. Cures and real kernels run on the last checkpoint of a series alone, unless asked
otherwise: they cost most, and where a series goes is seen without them. What is finished is
journalled call by call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from numdev.audit.journal import Journal
from numdev.audit.plan import Planned, digest, header
from numdev.audit.records import recorded
from numdev.audit.run import Progress, provenance
from numdev.audit.timing import OF_DIAGNOSIS, Stopwatch, stopwatch
from numdev.diagnose.call import Diagnosis, diagnosed
from numdev.diagnose.cured import cured, seen_from_outside
from numdev.diagnose.cures import CURES
from numdev.diagnose.curves import axis_of, figures, onsets
from numdev.diagnose.guilt import leading, ranked, same_head, suspects
from numdev.diagnose.report import (
    Checkpoint,
    CureRow,
    DiagnoseReport,
    DiagnoseSummary,
    HeadRow,
    KernelRow,
    RunningError,
)
from numdev.diagnose.request import KERNELS, DiagnoseRequest
from numdev.diagnose.series import Series, Stage, series
from numdev.diagnose.words import answer
from numdev.errors import MeasurementError, Refused, UsageError
from numdev.formats import Format, format_named
from numdev.kernels import find
from numdev.kernels.emulation.recipe import Recipe
from numdev.report import Record
from numdev.sources.files import some
from numdev.sources.opening import Captured, Located, Source, TensorFileSource, open_source
from numdev.sources.projection import Projection
from numdev.system import System

DRAWN_RUNS = 3
"""Heads whose running sums are kept: those at fault first, then by their score."""


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
    made, fmt = request.recipe(), format_named(request.format)
    kernels, notes = _kernels(request, system)
    found = series(request.targets)
    watch = stopwatch(system.device, OF_DIAGNOSIS)
    asked = request.model_dump(mode="json")
    hashes = {stage.name: stage.sha256 for stage in found.stages}
    head = header(asked, system, kernels, {"stages": hashes})
    with Journal.open(directory, head, overwrite=overwrite) as journal:
        run = _Run(
            request=request, system=system, made=made, fmt=fmt, kernels=kernels, journal=journal,
            watch=watch, progress=progress, say=say, stages=found.stages,
        )  # fmt: skip
        for stage in found.stages:
            run.over(stage)
        _check_calls(run.heads, run.notes, request.target)
        notes += [*found.left_out, *run.notes]
        return _report(run, found, notes, command)


def _kernels(request: DiagnoseRequest, system: System) -> tuple[list[Planned], list[str]]:
    """The real kernels to run, and which were left out. Those nobody named are no loss."""
    if request.kernels is None:
        named = [Planned(role="kernel", kernel=find(name), options={}) for name in KERNELS]
        return [p for p in named if p.kernel.missing(system) is None], []
    planned, notes = [], []
    for choice in request.kernels:
        kernel = find(choice.name)
        options = recorded(kernel.with_options(choice.options))
        missing = kernel.missing(system)
        if missing is None:
            planned.append(Planned(role="kernel", kernel=kernel, options=options))
        else:
            notes.append(f"{kernel.name} was left out: {missing}.")
    return planned, notes


@dataclass(kw_only=True)
class _Run:
    """One pass over the stages: what is the same for all, and what became known on the way."""

    request: DiagnoseRequest
    system: System
    made: Recipe
    fmt: Format
    kernels: Sequence[Planned]
    journal: Journal
    watch: Stopwatch
    progress: Progress
    say: Callable[[str], None]
    stages: Sequence[Stage]
    done: int = 0
    unknown: Counter[str] = field(default_factory=Counter)
    """Why W_Q of a call of this stage is not known, to the number of such calls."""
    refused: list[str] = field(default_factory=list)

    @property
    def heads(self) -> tuple[HeadRow, ...]:
        return tuple(HeadRow.model_validate(row) for row in self.journal.rows("head"))

    @property
    def notes(self) -> list[str]:
        """Of all stages, each once."""
        said = (note for row in self.journal.rows("stage") for note in row["notes"])
        return list(dict.fromkeys(said))

    def over(self, stage: Stage) -> None:
        """Diagnose every call of a stage that is not finished."""
        key = digest([stage.name, "stage"])
        if self.journal.visit(key):
            (row,) = (r for r in self.journal.rows("stage") if r["name"] == stage.name)
            for case in row["cases"]:
                for kind in self._kinds(stage):
                    self.journal.visit(digest([stage.name, case, kind]))
            self.done += len(row["cases"])
            return
        self.unknown, self.refused, cases = Counter(), [], []
        with self.watch("capture"):
            source = open_source(self.request.source(stage), self.system, projections=True)
        _check_gradients(source, stage)
        for note in source.notes:
            self.say(note)
        total = len(self.stages) * source.count()

        with self.watch("capture"):
            for located in source:
                self.progress(f"{stage.name} {located.ref.case}", self.done, total)
                cases.append(located.ref.case)
                self.over_case(located, stage)
                self.done += 1
        row = {"name": stage.name, "described": source.describe(), "cases": cases}
        self.journal.append(key, {"stage": [{**row, "notes": self._notes(source)}]})

    def over_case(self, located: Located, stage: Stage) -> None:
        """The rows of one call, its projection taken while the model's modules are there."""
        kinds = self._kinds(stage)
        keys = {kind: digest([stage.name, located.ref.case, kind]) for kind in kinds}
        if all([self.journal.visit(key) for key in keys.values()]):
            return
        projection = self._projection(located)
        case = located.load().rounded_to(self.fmt)
        try:
            with self.watch("chain"):
                found = diagnosed(
                    case, self.made, projection, checkpoint=stage.name, step=stage.step
                )
        except Refused as refusal:
            self.refused.append(f"{located.ref.case}: {refusal.message}")
            return
        for kind, make in self._makers(found).items():
            if kind in keys:
                rows = [r.model_dump(mode="json") for r in make()]
                self.journal.append(keys[kind], {kind: rows})

    def _makers(self, found: Diagnosis) -> Mapping[str, Callable[[], Iterable[Record]]]:
        """The kinds of rows of a call, and how they are made; heads last, for these say that the
        call is done."""

        def cures() -> Iterable[Record]:
            with self.watch("cures"):
                return cured(found, CURES)

        def kernels() -> Iterable[Record]:
            with self.watch("kernels"):
                return [
                    row
                    for planned in self.kernels
                    for row in seen_from_outside(found, planned.kernel, planned.options)
                ]

        def running() -> Iterable[Record]:
            first = suspects(found.heads)[:DRAWN_RUNS]
            return [row for head in first for row in found.running(head.head)]

        return {"cure": cures, "kernel": kernels, "running": running, "head": lambda: found.heads}

    def _kinds(self, stage: Stage) -> tuple[str, ...]:
        """What is measured of a stage's calls."""
        last = stage is self.stages[-1]
        more = last or self.request.every_checkpoint
        kinds = [("cure", more and self.request.cures), ("kernel", more and bool(self.kernels))]
        return (*(kind for kind, wanted in kinds if wanted), *(["running"] * last), "head")

    def _projection(self, located: Located) -> Projection | None:
        if not isinstance(located, Captured):
            self.unknown["the call does not come out of a model"] += 1
            return None
        try:
            return located.projection()
        except MeasurementError as error:
            self.unknown[error.message.partition(": ")[2] or error.message] += 1
            return None

    def _notes(self, source: Source) -> list[str]:
        """What could not be seen of a stage."""
        return [
            *source.notes,
            *(
                f"W_Q is not known in {n} {'call' if n == 1 else 'calls'}: {why}."
                for why, n in self.unknown.items()
            ),
            *(f"Not diagnosed: {some(self.refused)}." for _ in self.refused[:1]),
        ]


def _check_gradients(source: Source, stage: Stage) -> None:
    """Raises UsageError for captured tensors without upstream gradients: drawn ones have random
    signs, and would show no bias wherever there is one."""
    if not isinstance(source, TensorFileSource):
        return
    lacking = [case.ref.case for case in source.chosen if "grad_out" not in case.tensors]
    if lacking:
        raise UsageError(
            f"{stage.target}: stores no grad_out for {some(lacking)}",
            hint="save calls with `numdev audit CHECKPOINT --backward --save-cases DIR`",
        )


def _check_calls(heads: Sequence[HeadRow], notes: Sequence[str], target: str) -> None:
    """Raises MeasurementError where there are none, or those of a series are not the same calls."""
    if not heads:
        why = next((note for note in notes if note.startswith("Not diagnosed")), None)
        raise MeasurementError(
            f"{target}: {why.removesuffix('.') if why else 'no attention call was selected'}",
            hint="check --layers",
        )
    calls: dict[str, set[tuple[str, int]]] = {}
    for head in heads:
        calls.setdefault(head.checkpoint, set()).add((head.case, head.head))
    first, *others = calls.items()
    for name, found in others:
        if found != first[1]:
            case, number = sorted(found ^ first[1])[0]
            raise MeasurementError(
                f"{first[0]} and {name} are no series: only one of them has {case}, head {number}",
                hint="diagnose them one at a time",
            )


def _report(run: _Run, found: Series, notes: Sequence[str], command: str) -> DiagnoseReport:
    heads = run.heads
    last = [head for head in heads if head.checkpoint == found.stages[-1].name]
    cures = tuple(CureRow.model_validate(row) for row in run.journal.rows("cure"))
    kernels = tuple(KernelRow.model_validate(row) for row in run.journal.rows("kernel"))
    ranking = ranked(last, cures)
    running = [RunningError.model_validate(row) for row in run.journal.rows("running")]
    costs = {name: cure.breaks for name, cure in CURES.items()} if cures else {}
    axis = axis_of(heads) if ranking else None
    moves = onsets(heads, leading(ranking)) if axis else ()
    stages = list(run.journal.rows("stage"))
    described = stages[-1]["described"] if stages else {}
    return DiagnoseReport(
        provenance=provenance(run.system, described, command),
        request=run.request.model_dump(mode="json"),
        timings=run.watch.seconds(),
        summary=DiagnoseSummary(
            answer=answer(ranking, last, cures, kernels, costs, moves),
            ranking=ranking,
            notes=tuple(notes),
            axis=axis,
        ),
        attention=dict(run.request.attention),
        checkpoints=tuple(
            Checkpoint(name=stage.name, step=stage.step, sha256=stage.sha256)
            for stage in found.stages
        ),
        heads=heads,
        cures=cures,
        costs=costs,
        kernels=kernels,
        running=tuple(
            row for head in suspects(last)[:DRAWN_RUNS] for row in running if same_head(row, head)
        ),
        figures=figures(heads, leading(ranking)) if axis else (),
    )
