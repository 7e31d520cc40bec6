"""`numdev diagnose`: finds the heads whose rounding errors do not cancel, why, and what
each cure changes.

Sources hand over cases with their upstream gradients, one checkpoint after the other;
each goes through the chain of biased rounding (ties, O, delta, dW_Q) in place of kernels
and metrics. Cures and real kernels, which cost most, run on the last checkpoint alone
unless asked otherwise. What is finished is written to a journal call by call."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from numdev import temporary_files
from numdev.errors import MeasurementError, Refused, UsageError
from numdev.formats import format_named
from numdev.grouping import grouped
from numdev.kernels import find, fingerprint, import_callable
from numdev.kernels.emulation.recipe import Recipe, recipe
from numdev.report import Axis, Curve, Figure, Point, Provenance, Role, Tick
from numdev.request_models import (
    AuditConfig,
    AuditRequest,
    Choice,
    DiagnoseRequest,
    Reading,
)
from numdev.sources.capture import Captured
from numdev.sources.captured_calls import StoredCase
from numdev.sources.case_sources import (
    Located,
    Source,
    open_model_weights,
    open_source,
)
from numdev.sources.query_projection import Projection
from numdev.sources.tensor_files import identity, sha256, some
from numdev.studies.audit.journal import Journal, Row
from numdev.studies.audit.plan import Planned, digest, header, recorded
from numdev.studies.audit.run import Progress, provenance
from numdev.studies.audit.section_timing import Stopwatch
from numdev.studies.diagnose import report as records
from numdev.studies.diagnose.bias_chain import diagnose_call
from numdev.studies.diagnose.cures import CURES, Cure, cure_rows, kernel_rows
from numdev.studies.diagnose.diagnosis_targets import YAML, Stage, find_stages
from numdev.studies.diagnose.head_ranking import (
    answer_sentences,
    leading_head,
    rank_heads,
)
from numdev.studies.diagnose.training_text import write_training_text
from numdev.system import System
from numdev.yamlfile import read_yaml

KERNELS = (Choice(name="sdpa-flash"), Choice(name="baseline"))  # where none is named


class _Reason(BaseModel):
    """A sentence on why W_Q of a call is unknown, or why the call was not diagnosed."""

    why: str


METRICS: Mapping[str, tuple[str, str]] = {
    "tied": ("Rows with tied maxima", "share of rows"),
    "out_bias": ("|Bias of O|", "ulp, along the sign of O"),
    "delta_run": ("Running sum of delta's error", "max |sum| / (rms √rows)"),
    "moved": ("dW_Q error that delta's makes", "|error| / |dW_Q|"),
    "spectral_norm": ("Spectral norm of a head's W_Q", "spectral norm"),
    "spectral_ratio": ("Spectral norm over the layer's median", "ratio"),
}
"""The numbers of a head that are followed over training, by their size: the title of the
figure and of its axis."""


def diagnose(
    request: DiagnoseRequest,
    directory: Path,
    *,
    overwrite: bool = False,
    command: str = "",
    progress: Progress = lambda what, done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> records.DiagnoseReport:
    """Runs `request` and returns the report, which the caller writes; `command` is the
    command line that it names. Rows go to a journal in `directory`, which is made, and
    from which a call with the same request, system and files goes on; `overwrite`
    replaces any other. `say` gets notes on each source, `progress` (what, done, total).
    Raises UsageError for a request that cannot be run, another journal without
    `overwrite`, other files in `directory`, a target that is refused, and where no call
    was selected; MeasurementError for damaged weights or where every call was refused."""
    system = System.probe(request.device)
    # Names the closest of an unknown option.
    emulated = recipe(**find("emulated").with_options(request.attention))
    kernels, notes = _planned_kernels(request, system)
    stages, left_out = find_stages(request.targets)
    notes += left_out
    watch = Stopwatch(system.device, ("capture", "chain", "cures", "kernels", "other"))
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_files.temporary_folder())
        texts, text_notes = _write_training_texts(request, stages, folder)
        notes += text_notes
        readings = _checked_readings(request, stages, texts, system)
        origin = origin_hashes(request, stages, texts)
        head = header(request.model_dump(mode="json"), system, kernels, origin)
        journal = stack.enter_context(Journal.open(directory, head, overwrite=overwrite))
        stack.enter_context(watch("capture"))
        for number, (stage, reading) in enumerate(zip(stages, readings, strict=True)):
            in_full = stage is stages[-1] or request.every_checkpoint
            steps = _Steps(
                request=request,
                recipe=emulated,
                kernels=kernels if in_full else (),
                cures=CURES if in_full and request.cures else {},
                watch=watch,
            )
            source = open_source(reading, system, projections=True)
            for note in source.notes:
                say(note)
            calls = source.count()
            for done, located in enumerate(source):
                name = f"{stage.name} {located.ref.case}"
                progress(name, number * calls + done, len(stages) * calls)
                key = digest([stage.name, located.ref.case])
                if not journal.visit(key):
                    journal.append(key, steps.measure_call(located, stage))
            notes += source.notes
    return _report_of_journal(
        request,
        stages,
        journal,
        provenance=provenance(system, source.describe(), command),
        timings=watch.seconds(),
        notes=notes,
    )


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """What is done to every call of one checkpoint."""

    request: DiagnoseRequest
    recipe: Recipe
    kernels: Sequence[Planned]
    cures: Mapping[str, Cure]
    watch: Stopwatch

    def measure_call(self, located: Located, stage: Stage) -> dict[str, Sequence[Row]]:
        """Returns the rows of one call, by kind: `head`, `cure` and `kernel` (where these
        are run), and `unknown` with the reason why W_Q is unknown, empty where it is
        known. Where the recipe refuses the call it is `refused` alone, with the
        reason."""
        case = located.load().rounded_to(format_named(self.request.format))
        projection, why = _projection_or_reason(
            located
        )  # while the model's modules are there
        rows: dict[str, Sequence[Row]] = {"unknown": [{"why": why}] if why else []}
        try:
            with self.watch("chain"):
                diagnosis = diagnose_call(
                    case, self.recipe, projection, checkpoint=stage.name, step=stage.step
                )
        except Refused as refusal:
            return {"refused": [{"why": f"{case.ref.case}: {refusal.message}"}]}
        rows["head"] = diagnosis.heads
        if self.cures:
            with self.watch("cures"):
                rows["cure"] = cure_rows(diagnosis, self.cures)
        if self.kernels:
            with self.watch("kernels"):
                rows["kernel"] = [
                    row
                    for kernel in self.kernels
                    for row in kernel_rows(diagnosis, kernel.kernel, kernel.options)
                ]
        return rows


def _write_training_texts(
    request: DiagnoseRequest, stages: Sequence[Stage], folder: Path
) -> tuple[dict[str, Path | None], list[str]]:
    """Writes files of input ids into `folder`. Returns by a stage's name the file of ids
    from its training's text, or None; and a sentence on each text that was read, or could
    not be. None without a sentence as in `write_training_text`: where the request says
    what to read, training read no bytes, or it was not by `numdev train`."""
    texts: dict[str, Path | None] = {}
    notes = []
    for number, stage in enumerate(stages):
        path = folder / f"training-text-{number}.safetensors"
        texts[stage.name], note = write_training_text(request, stage, path)
        if note:
            notes.append(note)
    return texts, notes


def _report_of_journal(
    request: DiagnoseRequest,
    stages: Sequence[Stage],
    journal: Journal,
    *,
    provenance: Provenance,
    timings: dict[str, float],
    notes: list[str],
) -> records.DiagnoseReport:
    """Returns the report of all that is in the journal. Raises UsageError where no call
    was selected, and MeasurementError where every call was refused. Only heads of the
    last checkpoint are ranked. `notes` gets further notes, in place."""
    unknown = Counter(row.why for row in journal.records("unknown", _Reason))
    refused = [row.why for row in journal.records("refused", _Reason)]
    notes += [f"W_Q not known, {why}: {n} calls." for why, n in unknown.items()]
    notes += [f"Not diagnosed: {some(refused)}."] if refused else []
    heads = journal.records("head", records.HeadRow)
    if not heads:
        if not refused:
            what = f"{request.target}: no attention call was selected"
            raise UsageError(what, hint="check --layers")
        raise MeasurementError(
            f"{request.target}: {some(refused)}", hint="check --layers"
        )
    cures = journal.records("cure", records.CureRow)
    last = [head for head in heads if head.checkpoint == stages[-1].name]
    ranking = rank_heads(last, cures)
    axis = step_axis(heads)
    summary = records.DiagnoseSummary(
        answer=answer_sentences(ranking, last, cures),
        ranking=ranking,
        notes=tuple(dict.fromkeys(notes)),
        axis=axis,
    )
    checkpoints = [
        records.DiagnosedCheckpoint(name=s.name, step=s.step, sha256=s.sha256)
        for s in stages
    ]
    costs = {name: cure.breaks for name, cure in CURES.items()} if cures else {}
    return records.DiagnoseReport(
        provenance=provenance,
        request=request.model_dump(mode="json"),
        timings=timings,
        summary=summary,
        attention=dict(request.attention),
        checkpoints=tuple(checkpoints),
        heads=heads,
        cures=cures,
        costs=costs,
        kernels=journal.records("kernel", records.KernelRow),
        figures=tuple(step_figures(heads, leading_head(ranking))) if axis else (),
    )


def _reading_request(
    request: DiagnoseRequest, stage: Stage, text: Path | None
) -> AuditRequest:
    """Returns the request by which `numdev.sources` opens one stage. `text`: a file with
    the ids of its training's text, which stand in place of the request's inputs; None:
    those of the request.

    Raises UsageError where the stage is a YAML file that has other keys than `cases`,
    which would be ignored."""
    path = Path(stage.target)
    # Gradients of its loss need the model whole, however large it is.
    cases: dict[str, Any] = {"checkpoint": stage.target}
    if path.suffix in YAML:
        config = read_yaml(path, AuditConfig)
        other = sorted(config.model_fields_set - {"cases"})
        if other:
            what = f"{path}: diagnose takes nothing but `cases`, got {other[0]!r}"
            raise UsageError(what, hint="leave it out, or give the checkpoint itself")
        cases = {"cases": config.cases}
    reading = {name: getattr(request, name) for name in Reading.model_fields}
    if text is not None:
        reading["inputs"] = str(text)
    return AuditRequest(
        target=stage.name,
        kernels=(),
        formats=(request.format,),
        backward=True,
        **cases,
        **reading,
    )


def origin_hashes(
    request: DiagnoseRequest, stages: Iterable[Stage], texts: Mapping[str, Path | None]
) -> dict[str, object]:
    """Returns hashes of the targets, and of what their models are built from and read, by
    name, so that a run is not continued on other files at the same paths. Files that do
    not exist are left out. `texts`: by the name of every stage the file of ids from its
    training's text, or None. Raises UsageError for a `model` of the request that cannot
    be imported."""
    inputs = () if request.inputs is None else (request.inputs,)
    files = {"text": _existing_files(request.text), "inputs": _existing_files(inputs)}
    if request.text:
        directories = [request.tokenizer] if request.tokenizer else request.targets
        files["tokenizer"] = _tokenizer_files(directories)
    hashes: dict[str, object] = {
        name: identity(paths) for name, paths in files.items() if paths
    }
    hashes["training_text"] = {
        name: None if path is None else sha256(path) for name, path in texts.items()
    }
    hashes["stages"] = {stage.name: stage.identifying_hashes() for stage in stages}
    if request.model:
        hashes["model_made_from"] = fingerprint(import_callable(request.model, "model"))
    return hashes


def _existing_files(paths: Iterable[str]) -> list[Path]:
    """Returns those of the paths that are files; others are left out."""
    return [Path(path) for path in paths if Path(path).is_file()]


def _tokenizer_files(directories: Iterable[str]) -> list[Path]:
    """Returns the files directly in these directories from which a tokenizer may be read:
    .json, .txt and .model; none of a directory that does not exist."""
    files = [file for path in directories for file in sorted(Path(path).glob("*"))]
    return [x for x in files if x.suffix in (".json", ".txt", ".model") and x.is_file()]


def _planned_kernels(
    request: DiagnoseRequest, system: System
) -> tuple[list[Planned], list[str]]:
    """Returns the kernels to run, those of the request or else KERNELS, and a note on
    each named one that cannot run here, which is left out. One of KERNELS that cannot run
    here is left out without a note. Raises UsageError for a name that is no kernel, and
    for options that it does not take."""
    planned, notes = [], []
    for choice in KERNELS if request.kernels is None else request.kernels:
        kernel = find(choice.name)
        options = recorded(kernel.with_options(choice.options))
        missing = kernel.missing(system)
        if missing is None:
            planned.append(Planned(role="kernel", kernel=kernel, options=options))
        elif request.kernels is not None:
            notes.append(f"{kernel.name} was left out: {missing}.")
    return planned, notes


def _projection_or_reason(located: Located) -> tuple[Projection | None, str]:
    """Returns W_Q of a call with its input, and an empty string; or None, and why it is
    unknown."""
    if not isinstance(located, Captured) or located.projection is None:
        return None, "the call does not come out of a model"
    try:
        return located.projection(), ""
    except MeasurementError as error:
        return None, error.message.partition(": ")[2] or error.message


def _checked_readings(
    request: DiagnoseRequest,
    stages: Sequence[Stage],
    texts: Mapping[str, Path | None],
    system: System,
) -> list[AuditRequest]:
    """Returns the request by which each stage is opened, in order. `texts`: by the name
    of every stage the file of ids from its training's text, or None. Raises UsageError
    for a YAML file of any stage with other keys than `cases`. Then, stage by stage,
    raises UsageError for a request that makes no sense for its target, weights that have
    no model, and captured tensors without gradients; MeasurementError where captured
    tensors, a config or an index are damaged. Weights are not read and no model is
    built."""
    readings = [_reading_request(request, x, texts[x.name]) for x in stages]
    for stage, reading in zip(stages, readings, strict=True):
        if stage.sha256 is None:  # drawn or captured: opening these costs little
            _check_gradients(open_source(reading, system), stage)
        else:
            open_model_weights(reading)
    return readings


def _check_gradients(source: Source, stage: Stage) -> None:
    """Raises UsageError for captured tensors without upstream gradients. Drawn gradients
    have random signs, and would show no bias wherever there is one."""
    stored = [case for case in source.cases if isinstance(case, StoredCase)]
    if lacking := [case.ref.case for case in stored if "grad_out" not in case.tensors]:
        raise UsageError(
            f"{stage.target}: stores no grad_out for {some(lacking)}",
            hint="save calls with `numdev audit CHECKPOINT --backward --save-cases DIR`",
        )


def step_axis(heads: Sequence[records.HeadRow]) -> Axis | None:
    """Returns the steps of the heads as a linear axis, ascending; None where there are
    fewer than two."""
    steps = sorted({head.step for head in heads if head.step is not None})
    ticks = tuple(Tick(x=float(step), label=str(step)) for step in steps)
    return (
        Axis(name="step", title="step", scale="linear", ticks=ticks)
        if len(ticks) > 1
        else None
    )


class _Sample(NamedTuple):
    """The size of one number of a head at a step of training."""

    step: int
    size: float
    head: tuple[str, int]  # its case and number


def step_figures(
    heads: Sequence[records.HeadRow], first: records.Ranked
) -> Iterator[Figure]:
    """Yields a figure by step for each number of METRICS that heads have at two steps or
    more. Its curves are of the head `first`, of the worst head at each step, and of the
    median over heads."""
    for metric, (title, y_title) in METRICS.items():
        samples = sorted(_head_samples(heads, metric))
        if len({sample.step for sample in samples}) > 1:
            yield Figure(
                title=title,
                metric=metric,
                y_title=y_title,
                y_scale="linear",
                curves=tuple(_curves(samples, first)),
            )


def _head_samples(heads: Sequence[records.HeadRow], metric: str) -> Iterator[_Sample]:
    """Yields the size |x| of the number `metric` at each head and step that has it."""
    for head in heads:
        value = getattr(head, metric)
        if head.step is not None and value is not None:
            yield _Sample(head.step, abs(value), (head.case, head.head))


def _curves(samples: Sequence[_Sample], first: records.Ranked) -> Iterator[Curve]:
    """Yields the curves of one figure by step: of the head `first`, of the worst head at
    each step, and of the median over heads. That of `first` is left out where it has the
    number at no step, that of the worst where it is the same as that of `first`."""
    sizes = {
        step: [sample.size for sample in at_step]
        for step, at_step in grouped(samples, attrgetter("step")).items()
    }
    line_of_first = {
        sample.step: sample.size
        for sample in samples
        if sample.head == (first.case, first.head)
    }
    worst = {step: max(values) for step, values in sizes.items()}
    median = {step: statistics.median(values) for step, values in sizes.items()}
    if line_of_first:
        yield _curve(first.brief, "kernel", line_of_first)
    if worst != line_of_first:
        yield _curve("worst head", "kernel", worst)
    yield _curve("median head", "floor", median)


def _curve(label: str, role: Role, line: Mapping[int, float]) -> Curve:
    """Returns a curve of a value by step, in the order of `line`, without intervals."""
    points = [
        Point(x=float(step), label=f"step {step}", mean=x, low=None, high=None)
        for step, x in line.items()
    ]
    return Curve(label=label, role=role, points=tuple(points))
