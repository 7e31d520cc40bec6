"""`numdev diagnose`: which heads' rounding errors do not cancel, why, and what each cure
changes.

The line of an audit: sources hand over cases with their upstream gradients, one
checkpoint after the other; each goes through the chain (`numdev.diagnose.chain`) in place
of kernels and metrics. Cures and real kernels, which cost most, run on the last
checkpoint alone unless asked otherwise. What is finished is journalled call by call."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from numdev import temporary
from numdev.audit.journal import Journal, Row
from numdev.audit.plan import Planned, digest, header, recorded
from numdev.audit.run import Progress, provenance
from numdev.audit.timing import Stopwatch
from numdev.config import AuditConfig, AuditRequest, Choice, DiagnoseRequest, Reading
from numdev.diagnose import report as records
from numdev.diagnose.chain import diagnosed
from numdev.diagnose.cures import CURES, cured, seen_from_outside
from numdev.diagnose.heads import answer, leading, ranked
from numdev.diagnose.series import YAML, Stage, series
from numdev.diagnose.training_text import training_text
from numdev.errors import MeasurementError, Refused, UsageError
from numdev.formats import format_named
from numdev.grouping import grouped
from numdev.kernels import find, fingerprint, imported
from numdev.kernels.emulation.recipe import recipe
from numdev.report import Axis, Curve, Figure, Point, Tick
from numdev.sources.capture import Captured
from numdev.sources.files import identity, sha256, some
from numdev.sources.opening import Located, Source, open_source
from numdev.sources.projection import Projection
from numdev.sources.tensorfile import StoredCase
from numdev.system import System
from numdev.yamlfile import read_yaml

KERNELS = (Choice(name="sdpa-flash"), Choice(name="baseline"))  # where none is named


class _Reason(BaseModel):
    """Why something of a call is not known, or was not diagnosed, in words."""

    why: str


METRICS: Mapping[str, tuple[str, str]] = {
    "tied": ("Rows with tied maxima", "share of rows"),
    "out_bias": ("|Bias of O|", "ulp, along the sign of O"),
    "delta_run": ("Running sum of delta's error", "max |sum| / (rms √rows)"),
    "moved": ("dW_Q error that delta's makes", "|error| / |dW_Q|"),
    "spectral_norm": ("Spectral norm of a head's W_Q", "spectral norm"),
    "spectral_ratio": ("Spectral norm over the layer's median", "ratio"),
}
"""Numbers of a head that are followed over training, by their size: title, and that of
the axis."""


def diagnose(
    request: DiagnoseRequest,
    directory: Path,
    *,
    overwrite: bool = False,
    command: str = "",
    progress: Progress = lambda what, done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> records.DiagnoseReport:
    """Run `request`, journalling into `directory`; returns the report, which the caller
    writes.

    `say` is told what a user should know at once. Raises UsageError for a request that
    cannot be run here, before anything is measured, and MeasurementError where no call
    could be diagnosed."""
    system, fmt = System.probe(request.device), format_named(request.format)
    # Names the closest of an unknown option.
    made = recipe(**find("emulated").with_options(request.attention))
    kernels, notes = _kernels(request, system)
    stages, left_out = series(request.targets)
    notes += left_out
    watch = Stopwatch(system.device, ("capture", "chain", "cures", "kernels", "other"))

    def rows_of(stage: Stage, located: Located) -> dict[str, Sequence[Row]]:
        """The rows of one call, by kind."""
        last, case = stage is stages[-1], located.load().rounded_to(fmt)
        projection, why = _projection(located)  # while the model's modules are there
        rows: dict[str, Sequence[Row]] = {"unknown": [{"why": why}] if why else []}
        try:
            with watch("chain"):
                found = diagnosed(
                    case, made, projection, checkpoint=stage.name, step=stage.step
                )
        except Refused as refusal:
            return {"refused": [{"why": f"{case.ref.case}: {refusal.message}"}]}
        rows["head"] = found.heads
        if last or request.every_checkpoint:
            with watch("cures"):
                rows["cure"] = cured(found, CURES) if request.cures else ()
            with watch("kernels"):
                outside = (seen_from_outside(found, k.kernel, k.options) for k in kernels)
                rows["kernel"] = [row for of_kernel in outside for row in of_kernel]
        return rows

    with ExitStack() as stack:
        folder = stack.enter_context(temporary.folder())
        texts: dict[str, Path | None] = {}
        for number, stage in enumerate(stages):
            path = folder / f"training-text-{number}.safetensors"
            texts[stage.name], said = training_text(request, stage, path)
            notes += [said] if said else []
        origin = origin_of(request, stages, texts)
        head = header(request.model_dump(mode="json"), system, kernels, origin)
        journal = stack.enter_context(Journal.open(directory, head, overwrite=overwrite))
        stack.enter_context(watch("capture"))
        for number, stage in enumerate(stages):
            text = texts[stage.name]
            source = open_source(_reading(request, stage, text), system, projections=True)
            _check_gradients(source, stage)
            for note in source.notes:
                say(note)
            calls = source.count()
            for done, located in enumerate(source):
                name = f"{stage.name} {located.ref.case}"
                progress(name, number * calls + done, len(stages) * calls)
                key = digest([stage.name, located.ref.case])
                if not journal.visit(key):
                    journal.append(key, rows_of(stage, located))
            notes += source.notes
    unknown = [row.why for row in journal.records("unknown", _Reason)]
    refused = [row.why for row in journal.records("refused", _Reason)]
    notes += [f"W_Q not known, {why}: {n} calls." for why, n in Counter(unknown).items()]
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
    ranking = ranked(last, cures)
    axis = axis_of(heads)
    return records.DiagnoseReport(
        provenance=provenance(system, source.describe(), command),
        request=request.model_dump(mode="json"),
        timings=watch.seconds(),
        summary=records.DiagnoseSummary(
            answer=answer(ranking, last, cures), ranking=ranking,
            notes=tuple(dict.fromkeys(notes)), axis=axis,
        ),
        attention=dict(request.attention),
        checkpoints=tuple(
            records.Checkpoint(name=s.name, step=s.step, sha256=s.sha256) for s in stages
        ),
        heads=heads,
        cures=cures,
        costs={name: cure.breaks for name, cure in CURES.items()} if cures else {},
        kernels=journal.records("kernel", records.KernelRow),
        figures=tuple(figures(heads, leading(ranking))) if axis else (),
    )  # fmt: skip


def _reading(request: DiagnoseRequest, stage: Stage, text: Path | None) -> AuditRequest:
    """What `numdev.sources` opens for one stage, with what its training read, if
    anything.

    Raises UsageError for a YAML file that says more than which cases to draw: it would be
    ignored."""
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
    same = {name: getattr(request, name) for name in Reading.model_fields}
    if text is not None:
        same["inputs"] = str(text)
    return AuditRequest(
        target=stage.name,
        kernels=(),
        formats=(request.format,),
        backward=True,
        **cases,
        **same,
    )


def origin_of(
    request: DiagnoseRequest, stages: Iterable[Stage], texts: Mapping[str, Path | None]
) -> dict[str, Any]:
    """What tells the targets, and what their models are built by and read, from others at
    the same paths. `texts`: by a stage's name the file of ids from its training's text,
    if it has one."""
    files = {
        "text": request.text,
        "inputs": () if request.inputs is None else (request.inputs,),
    }
    places = [request.tokenizer] if request.tokenizer else request.targets
    if request.text:
        files["tokenizer"] = tuple(
            str(file)
            for place in places
            for file in sorted(Path(place).glob("*"))
            if file.suffix in (".json", ".txt", ".model")
        )
    present = {
        name: [Path(x) for x in some if Path(x).is_file()] for name, some in files.items()
    }
    hashes: dict[str, Any] = {
        name: identity(some) for name, some in present.items() if some
    }
    hashes["training_text"] = {
        name: None if path is None else sha256(path) for name, path in texts.items()
    }
    hashes["stages"] = {stage.name: stage.identity() for stage in stages}
    if request.model:
        hashes["model_made_from"] = fingerprint(imported(request.model, "model"))
    return hashes


def _kernels(request: DiagnoseRequest, system: System) -> tuple[list[Planned], list[str]]:
    """The real kernels to run, and which were left out. Those nobody named are no
    loss."""
    planned, notes = [], []
    for choice in KERNELS if request.kernels is None else request.kernels:
        kernel = find(choice.name)
        options, missing = (
            recorded(kernel.with_options(choice.options)),
            kernel.missing(system),
        )
        if missing is None:
            planned.append(Planned(role="kernel", kernel=kernel, options=options))
        elif request.kernels is not None:
            notes.append(f"{kernel.name} was left out: {missing}.")
    return planned, notes


def _projection(located: Located) -> tuple[Projection | None, str]:
    """W_Q of a call, and why it is not known where it is not."""
    if not isinstance(located, Captured) or located.projection is None:
        return None, "the call does not come out of a model"
    try:
        return located.projection(), ""
    except MeasurementError as error:
        return None, error.message.partition(": ")[2] or error.message


def _check_gradients(source: Source, stage: Stage) -> None:
    """Raises UsageError for captured tensors without upstream gradients: drawn ones have
    random signs, and would show no bias wherever there is one."""
    stored = [case for case in source.cases if isinstance(case, StoredCase)]
    if lacking := [case.ref.case for case in stored if "grad_out" not in case.tensors]:
        raise UsageError(
            f"{stage.target}: stores no grad_out for {some(lacking)}",
            hint="save calls with `numdev audit CHECKPOINT --backward --save-cases DIR`",
        )


def axis_of(heads: Sequence[records.HeadRow]) -> Axis | None:
    """The steps of the series; None where there are fewer than two."""
    steps = sorted({head.step for head in heads if head.step is not None})
    ticks = tuple(Tick(x=float(step), label=str(step)) for step in steps)
    return (
        Axis(name="step", title="step", scale="linear", ticks=ticks)
        if len(ticks) > 1
        else None
    )


def figures(heads: Sequence[records.HeadRow], first: records.Ranked) -> Iterator[Figure]:
    """Each number by step: of the head `first`, the worst where that is another, and the
    median."""
    for metric, (title, y_title) in METRICS.items():
        known = [(h.step, abs(getattr(h, metric)), (h.case, h.head)) for h in heads
                 if h.step is not None and getattr(h, metric) is not None]  # fmt: skip
        by_step = grouped(sorted(known), itemgetter(0))
        lines = {
            first.brief: {
                step: x for step, x, at in sorted(known) if at == (first.case, first.head)
            },
            "worst head": {
                step: max(x for _, x, _ in at) for step, at in by_step.items()
            },
            "median head": {
                s: statistics.median(x for _, x, _ in at) for s, at in by_step.items()
            },
        }
        curves = tuple(
            Curve(
                label=label,
                role="floor" if label == "median head" else "kernel",
                points=tuple(
                    Point(
                        x=float(step), label=f"step {step}", mean=x, low=None, high=None
                    )
                    for step, x in line.items()
                ),
            )
            for label, line in lines.items()
            if line and (label != "worst head" or line != lines[first.brief])
        )
        if len(by_step) > 1:
            yield Figure(title=title, metric=metric, y_title=y_title, y_scale="linear",
                         curves=curves)  # fmt: skip
