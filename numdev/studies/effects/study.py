"""`numdev effects`: runs the model in each format with each kernel, and exactly but for
single rounding sites; compares its output with the exact one and writes the report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from numdev.errors import MeasurementError, Refused, UsageError
from numdev.formats import Format
from numdev.gate.judging import check_system, judged
from numdev.gate.rules import Rules, default_rules
from numdev.kernels import find
from numdev.report import PlannedKernel, Provenance
from numdev.report.number_text import label
from numdev.request_models import AuditRequest, Choice, EffectsRequest, Reading
from numdev.sources.capture import HINT, attention_modules, layer_of
from numdev.sources.captured_calls import holds_cases
from numdev.sources.case_sources import CheckpointSource, open_source, refuse_options
from numdev.sources.diffusers_pipeline import PictureSource, PipelineSource
from numdev.sources.tensor_files import naming
from numdev.studies.audit.dask_workers import Cluster, client_of, shared_by, shared_out
from numdev.studies.audit.isolation import Failure, Isolated, Runner, attempt
from numdev.studies.audit.journal import Journal
from numdev.studies.audit.plan import Planned, digest, header, plan_formats, plan_kernels
from numdev.studies.audit.run import Progress, Say, describe, provenance
from numdev.studies.audit.section_timing import Stopwatch
from numdev.studies.effects.model_properties import run_checks
from numdev.studies.effects.model_runs import Inputs, Source, Subject, first_nonfinite
from numdev.studies.effects.output_error import (
    Scored,
    largest_error,
    outputs_by_name,
    score_sequences,
)
from numdev.studies.effects.report import (
    Check,
    EffectsPlan,
    EffectsReport,
    EffectsSummary,
    Fields,
    Kind,
    OutputRow,
    PlannedCheck,
    PlannedRun,
    rank_for_use,
)
from numdev.studies.effects.rounding_sites import SITES
from numdev.system import System

if TYPE_CHECKING:
    from distributed import Client

LOGITS = 1 << 27  # in memory at once for one run: 1 GB in fp64
AS_USED = ("whole", "repeat", "moved")  # kinds of runs in the format, as a user runs it
Measured = tuple[int, list[OutputRow]]  # the number of a run, and its rows
# Measures runs, by their numbers, on one part of the inputs in a format
Measure = Callable[[Format, int, Sequence[int]], Iterator[Measured]]


class Run(NamedTuple):
    """One way to run the model, by the fields of `OutputRow`. `planned`: the kernel with
    its options; None: a run without one."""

    kind: Kind
    planned: Planned | None = None
    site: str = ""
    layer: int | None = None

    def row_fields(self, fmt: Format) -> Fields:
        """Returns the fields of an `OutputRow` that identify the run in a format, by
        name."""
        fields: Fields = {
            "kind": self.kind,
            "format": fmt.name,
            "site": self.site,
            "layer": self.layer,
        }
        if p := self.planned:
            fields |= {"kernel": p.kernel.name, "options": dict(p.options)}
        return fields

    @property
    def planned_run(self) -> PlannedRun:
        """Returns the run as the plan of a report records it: kind, kernel ("" for none),
        options, site and layer."""
        p = self.planned
        return PlannedRun(
            kind=self.kind,
            kernel=p.kernel.name if p else "",
            options=dict(p.options) if p else {},
            site=self.site,
            layer=self.layer,
        )


def effects(
    request: EffectsRequest,
    directory: Path | None,
    *,
    workers: Cluster | None = None,
    overwrite: bool = False,
    progress: Progress = lambda what, done, total: None,
    say: Say = lambda text: None,
    command: str = "",
    rules: Rules | None = None,
) -> EffectsReport:
    """Runs `request` and returns its report, judged by `rules` (None: the default ones).
    What is measured goes to a journal in `directory`, which is made (None: in memory
    alone). A further call with the same request, system and files goes on from there;
    `overwrite` replaces a damaged journal or any other. `workers`: the Dask workers that
    share the runs; None: they run here. `say` gets notes on the source, `progress` (what,
    done, total). `command`: the command line that the report names. Raises UsageError for
    a request that cannot be opened, for such a journal without `overwrite`, and for other
    files in `directory`; MeasurementError where the model cannot be read or run exactly,
    and for rules made for another system; and what a worker raises."""
    rules = rules or default_rules()
    check_system(System.probe(request.device).as_dict(), rules)
    sections = ("model", "runs", "checks", "other")
    watch = Stopwatch(System.probe(request.device).device, sections)
    runner = (
        Isolated(request.time_limit)
        if request.isolate
        else contextlib.nullcontext(attempt)
    )
    with runner as run, contextlib.ExitStack() as stack:
        with watch("model"):
            study = EffectsStudy(request, run)
        for note in study.source.notes:
            say(note)
        names = [fmt.name for fmt in study.formats]
        asked = request.model_dump(mode="json") | {"formats": names}
        described = describe(study.source)
        head = header(asked, study.system, study.kernels, described)
        journal = stack.enter_context(Journal.open(directory, head, overwrite=overwrite))
        measure: Measure = study.measure
        if workers is not None:
            client = stack.enter_context(client_of(workers, study.system))
            measure = partial(measure_on_workers, client, shared_by(head), request)
        _complete_journal(study, journal, measure, watch, progress)
    report = _unjudged_report(
        study,
        journal,
        asked,
        provenance=provenance(study.system, described, command, study.kernels),
        timings=watch.seconds(),
    )
    return judged(report, rules)


def _complete_journal(
    study: EffectsStudy,
    journal: Journal,
    measure: Measure,
    watch: Stopwatch,
    progress: Progress,
) -> None:
    """Measures every run and check that the journal lacks, and appends it there.
    `measure` yields the rows of runs; the seconds that this takes go to `watch` under
    `runs` and `checks`."""
    done, total = 0, len(study.formats) * len(study.chunks) * len(study.runs)
    for fmt in study.formats:
        for number in range(len(study.chunks)):
            keys = [digest([fmt.name, number, run.row_fields(fmt)]) for run in study.runs]
            todo = [i for i, key in enumerate(keys) if not journal.visit(key)]
            with watch("runs"):
                for i, rows in measure(fmt, number, todo) if todo else ():
                    journal.append(keys[i], {"row": rows})
                    done += 1
                    run = study.runs[i]
                    progress(f"{fmt.name} {run.kind} {run.site}", done, total)
        key = digest([fmt.name, "checks"])
        with watch("checks"):
            if not journal.visit(key):
                subject, before = study.model_in(fmt), journal.records("check", Check)
                checks = run_checks(subject, study.chunks[0], study.request, before)
                tried = list(checks)  # what the model does is known after the checks
                facts = [{"routes": subject.routes}]
                journal.append(key, {"check": tried, "model": facts})


def _unjudged_report(
    study: EffectsStudy,
    journal: Journal,
    request: dict[str, object],
    *,
    provenance: Provenance,
    timings: dict[str, float],
) -> EffectsReport:
    """Returns the report of what the journal has, with an empty summary and without a
    verdict. `request`: the request as it was run, in JSON's types."""
    rows = journal.records("row", OutputRow)
    checks = journal.records("check", Check)
    logits = any(row.flips is not None for row in rows)
    kernels = tuple(
        PlannedKernel(role="kernel", kernel=p.kernel.name, options=dict(p.options))
        for p in (study.against, *study.mine)
    )
    used = kernels[(study.against, *study.mine).index(study.used_kernel)]
    planned_checks = tuple(
        PlannedCheck(name=c.name, format=c.format, applies=c.applies) for c in checks
    )
    outputs = tuple(dict.fromkeys(row.at for row in rows))
    routes = any(fact["routes"] for fact in journal.rows("model"))
    plan = EffectsPlan(
        kernels=kernels,
        against=study.against.kernel.name,
        sites_of=label(used),
        named="kernels" in study.request.model_fields_set,
        formats=tuple(fmt.name for fmt in study.formats),
        runs=tuple(run.planned_run for run in study.runs),
        outputs=outputs,
        sequences=study.sequences,
        logits=logits,
        routes=routes,
        checks=planned_checks,
    )
    tokens = study.chunks[0].get("input_ids", [()])[0]
    return EffectsReport(
        provenance=provenance,
        request=request,
        timings=timings,
        plan=plan,
        output="logits" if logits else "states",
        summary=EffectsSummary(answer=(), runs=()),
        checks=checks,
        rows=rows,
        tokens=tuple(int(token) for token in tokens),
    )


class EffectsStudy:
    """An opened request: the model, what it reads, and all ways in which it is to run.
    Raises UsageError for the floor or the reference among its kernels, since these always
    run, and for a request that cannot be opened."""

    def __init__(self, request: EffectsRequest, run: Runner) -> None:
        self.request, self.run, self.system = request, run, System.probe(request.device)
        choices = (Choice(name=request.against), *request.kernels)
        if always := {"floor", "reference"} & {choice.name for choice in choices}:
            raise UsageError(
                f"expected a kernel, got the {min(always)}, which always runs"
            )
        self.kernels = [
            p for p in plan_kernels(choices) if p.role in ("baseline", "kernel")
        ]
        self.against = next(
            p for p in self.kernels if p.kernel.name == find(request.against).name
        )
        self.mine = [p for p in self.kernels if p is not self.against]
        self.formats = plan_formats(request.formats, self.kernels)
        self.source = _open_source(request, self.system)
        self._subject: Subject | None = None

    def model_in(self, fmt: Format) -> Subject:
        """Returns the model in a format. It is loaded unless it was the last one that was
        returned: one format is in memory at a time."""
        if self._subject is None or self._subject.format != fmt:
            self._subject = None
            self._subject = Subject(self.source, fmt, self.run, self.system)
        return self._subject

    @cached_property
    def runs(self) -> list[Run]:
        """Returns the runs to make in each format, in order. The first ones, up to the
        first run of the whole model, are those that others are compared with."""
        floor = Planned(role="floor", kernel=find("floor"), options={})
        has_sites = isinstance(self.source, CheckpointSource)
        main = (*self.mine, self.against)[0]
        runs = [Run("random"), Run("emulated")] if has_sites else []
        runs += [Run("whole", p) for p in (self.against, *self.mine)]
        runs += [Run("repeat", self.against), Run("moved", self.against)]
        runs += [Run("attention", p) for p in (floor, *self.kernels)]
        runs += [Run("predicted", p) for p in self.kernels]
        if has_sites and self.request.sites:
            runs += [Run("site", site=site) for site in SITES]
        if self.request.by_layer:
            runs += [
                Run("attention", main, layer=layer) for layer in self._attention_layers()
            ]
        return runs

    def _attention_layers(self) -> list[int]:
        """Returns the numbers of the layers that have attention, ascending; a module with
        attention whose layer has no number is left out."""
        model = self.source.model
        layers = {
            layer_of(model.get_submodule(name), name) for name in attention_modules(model)
        }
        return sorted(layer for layer in layers if layer is not None)

    @property
    def used_kernel(self) -> Planned:
        """Returns the kernel that stands for what a user runs: of those other than
        `against` `sdpa-default`, else the first; `against` where there is no other. The
        sites of attention round as this kernel does, in calls for which it has a rounding
        model."""
        return min(
            (*self.mine, self.against),
            key=lambda p: rank_for_use(p.kernel.name, self.against.kernel.name),
        )

    @property
    def sequences(self) -> int:
        """Returns the number of sequences that the model reads; of a pipeline, of
        images."""
        return sum(len(next(iter(x.values()))) for x in self.chunks)

    @cached_property
    def chunks(self) -> list[dict[str, Tensor]]:
        """Returns the inputs in parts, each a dict of tensors by name: as many sequences
        in a part as have at most a gigabyte of logits in fp64, at least one; of a
        pipeline one image. A vocabulary of unknown size counts as 1. How many sequences
        there are is the length of the first tensor; a tensor of another length is whole
        in every part."""
        inputs, step = self.source.prompt.inputs, 1
        count = len(next(x for x in inputs.values() if isinstance(x, Tensor)))
        if isinstance(self.source, CheckpointSource):
            tokens = max((x.shape[1] for x in inputs.values() if x.ndim == 2), default=1)
            vocabulary = getattr(self.source.checkpoint, "vocab_size", None) or 1
            step = max(1, LOGITS // (tokens * vocabulary))
        parts = [slice(at, at + step) for at in range(0, count, step)]
        return [
            {n: x[p] if len(x) == count else x for n, x in inputs.items()} for p in parts
        ]

    def measure(
        self, fmt: Format, number: int, todo: Sequence[int]
    ) -> Iterator[Measured]:
        """Yields (number of a run, its rows) for each run of `todo`, numbers of `runs`,
        on part `number` of the inputs, in a format. The runs that others are compared
        with are made even where they are not in `todo`. A run that fails has rows with a
        reason. All runs have that where the model makes no call of attention that a
        kernel could answer, or attends somewhere without one. Raises MeasurementError
        where the exact run fails."""
        subject, inputs = self.model_in(fmt), self.chunks[number]
        before = sum(len(next(iter(x.values()))) for x in self.chunks[:number])
        answer = self._answer(subject, inputs, None)
        # No kernel can be put into it, and its own code is all there is
        if subject.by_hand:
            count = len(next(iter(inputs.values())))
            fields: Fields = {"status": "skipped", "reason": subject.by_hand}
            for i in todo:
                about = self.runs[i].row_fields(fmt)
                yield i, _sequence_rows(about, [fields] * count, before)
            return
        truths, how = (
            outputs_by_name(answer),
            Scored.from_answer(subject.wide, answer, inputs),
        )
        del answer
        lost: dict[int, str] = {}  # where the truth itself is not finite
        if not all(bool(truth.isfinite().all()) for truth in truths.values()):
            lost = self._first_nonfinite(subject, inputs, None)
        # Up to the first run of the whole model, runs are those that others need
        count = 1 + next(i for i, run in enumerate(self.runs) if run.kind == "whole")
        outputs = [
            self._outputs_or_failure(subject, inputs, run) for run in self.runs[:count]
        ]
        *roundings, against = ({} if isinstance(x, Failure) else x for x in outputs)
        # A choice of experts that changes moves one token, and may move it far.
        by_chance = None if subject.routes else _largest_errors(roundings, truths)
        for i in todo:
            run = self.runs[i]
            output = (
                outputs[i]
                if i < count
                else self._outputs_or_failure(subject, inputs, run)
            )
            first = lost
            if not isinstance(output, Failure) and _overflows(output, truths):
                first = self._first_nonfinite(subject, inputs, run) | lost
            rows: list[OutputRow] = []
            for at, truth in truths.items():
                if isinstance(output, Failure):
                    numbers: list[Fields] = [vars(output)] * len(truth)
                else:
                    beside = against.get(at) if run.kind in AS_USED else None
                    numbers = score_sequences(
                        output[at], truth, how, by_chance, beside, first
                    )
                rows += _sequence_rows({**run.row_fields(fmt), "at": at}, numbers, before)
            yield i, rows

    def _outputs_or_failure(
        self, subject: Subject, inputs: Inputs, run: Run
    ) -> dict[str, Tensor] | Failure:
        """Returns the outputs of one run by name; a Failure where a kernel declines or
        cannot run here (`skipped`, from Refused) or the run fails (`failed`, from
        MeasurementError)."""
        try:
            return outputs_by_name(self._answer(subject, inputs, run))
        except (Refused, MeasurementError) as error:
            return Failure(
                "skipped" if isinstance(error, Refused) else "failed", error.message
            )

    def _first_nonfinite(
        self, subject: Subject, inputs: Inputs, run: Run | None
    ) -> dict[int, str]:
        """Runs the model once more and returns, by the number of a sequence in `inputs`,
        where NaN or infinity first comes up, in words. A tensor whose first axis is not
        the sequences counts for all of them. Sequences for which none comes up are
        missing. `run`: None for the exact run. Raises what `_answer` raises."""
        count = next(len(x) for x in inputs.values() if isinstance(x, Tensor))
        following = (
            first_nonfinite(subject.real, count, subject.format)
            if run is not None and run.kind in AS_USED
            else first_nonfinite(subject.wide, count)
        )
        with following as first:
            self._answer(subject, inputs, run)
        return first

    def _answer(self, subject: Subject, inputs: Inputs, run: Run | None) -> object:
        """Returns what the model returns in one run; `run` None: in the exact one. Raises
        MeasurementError of one line for any error of the model's own code, and where a
        kernel fails; Refused where a kernel declines or cannot run here."""
        seed = self.request.seed
        with naming(type(subject.wide).__name__, "failed on its inputs", HINT):
            if run is None:
                return subject.run_exactly(inputs)
            planned = run.planned
            if planned is None:
                drawn = seed + 1 if run.kind == "random" else None
                others = [p for p in self.mine if p is not self.used_kernel]
                return subject.run_rounded(
                    inputs, (self.used_kernel, *others), run.site, drawn
                )
            if run.kind == "predicted":
                return subject.run_exactly(
                    inputs, partial(subject.predicted_attention, planned)
                )
            attention = partial(subject.attention_of_kernel, planned, run.layer)
            if run.kind == "attention":
                return subject.run_exactly(inputs, attention)
            return subject.run_as_used(
                inputs, attention, seed + 2 if run.kind == "moved" else None
            )


def _sequence_rows(
    about: Fields, numbers: Sequence[Fields], first: int
) -> list[OutputRow]:
    """Returns a row for each dict of `numbers`, with the fields `about` of its run;
    sequences are numbered from `first`."""
    return [
        OutputRow.model_validate({**about, "sequence": sequence, **fields})
        for sequence, fields in enumerate(numbers, first)
    ]


def _largest_errors(
    roundings: Iterable[Mapping[str, Tensor]], truths: Mapping[str, Tensor]
) -> Tensor | None:
    """Returns the largest error of a logit at each position, [sequences, positions], over
    the runs in which everything rounds. `roundings`: the outputs of each of these by
    name, empty for a run that failed. None where all failed, or there is none."""
    errors = [largest_error(outputs[""], truths[""]) for outputs in roundings if outputs]
    return torch.stack(errors).amax(dim=0) if errors else None


def _overflows(outputs: Mapping[str, Tensor], truths: Mapping[str, Tensor]) -> bool:
    """Whether an output has NaN or infinity where the exact one is finite. `outputs`,
    `truths`: tensors of one shape by the name of the output."""
    return any(
        bool((truth.isfinite() & ~outputs[at].isfinite()).any())
        for at, truth in truths.items()
    )


def _open_source(request: EffectsRequest, system: System) -> Source:
    """Opens the model of a request: a checkpoint or a pipeline. Raises UsageError for
    captured tensors, a configuration or any other target that is no model, and for
    `by_layer`, `generate` or `compile` with a pipeline."""
    path, target = Path(request.checkpoint), request.target
    what = "captured tensors" if holds_cases(path) else ""
    if path.suffix in (".yaml", ".yml"):
        what = "a configuration"
    if what:
        expected = (
            "a checkpoint, a state dict with --model, a diffusers pipeline or `demo`"
        )
        raise UsageError(
            f"{target}: expected {expected}, got {what}", hint="audit it instead"
        )
    names = ("target", "checkpoint", *Reading.model_fields, "stream", "denoise")
    reading = AuditRequest(**{name: getattr(request, name) for name in names})
    source = open_source(reading, system)
    if isinstance(source, PipelineSource):
        refuse_options(
            request, "a diffusers pipeline", ("by_layer", "generate", "compile")
        )
        return PictureSource(source, system)
    assert isinstance(source, CheckpointSource)
    return source


def measure_on_workers(
    client: Client,
    expected: str,
    request: EffectsRequest,
    fmt: Format,
    number: int,
    todo: Sequence[int],
) -> Iterator[Measured]:
    """Yields (number of a run, its rows) for the runs of `todo`, on part `number` of the
    inputs, in the format `fmt`. The workers of a Dask client share them; all of a
    worker's share comes when it has finished it. `expected`: the versions and settings,
    as JSON, that each worker must have too. Raises UsageError where one has others, a
    NumdevError of a worker as it is, and MeasurementError for any other exception in a
    worker."""
    count = min(max(1, len(client.nthreads())), len(todo))
    parts = [
        (request.model_dump_json(), fmt, number, todo[i::count]) for i in range(count)
    ]
    for rows in shared_out(client, expected, _measure_on_worker, parts):
        yield from rows


def _measure_on_worker(
    request: str, fmt: Format, number: int, todo: Sequence[int]
) -> list[Measured]:
    """Returns (number of a run, its rows) for the runs of `todo`, on part `number` of the
    inputs, measured in this worker process. `request`: an EffectsRequest in JSON; its
    model is opened once in a process."""
    return list(_study_of_request(request).measure(fmt, number, todo))


@cache
def _study_of_request(request: str) -> EffectsStudy:
    """Returns the study of a request in JSON, opened once in a process."""
    return EffectsStudy(EffectsRequest.model_validate_json(request), attempt)
