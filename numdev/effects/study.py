"""`numdev effects`: the model's output in each format with each kernel beside the exact one, and
what single rounding sites do to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from numdev.audit.cluster import Cluster, client_of, shared_by, shared_out
from numdev.audit.isolation import Failure, Isolated, Runner, attempt
from numdev.audit.journal import Journal
from numdev.audit.plan import Planned, digest, header, plan_formats, plan_kernels
from numdev.audit.run import Progress, Say, provenance
from numdev.audit.timing import Stopwatch
from numdev.config import AuditRequest, Choice, EffectsRequest, Reading
from numdev.effects.checks import checks_of
from numdev.effects.outputs import Scored, compared, largest_error, outputs_of
from numdev.effects.report import Check, EffectsReport, OutputRow
from numdev.effects.running import Subject
from numdev.effects.sites import SITES
from numdev.effects.verdict import summarise, tests_of
from numdev.errors import MeasurementError, Refused, UsageError
from numdev.formats import Format
from numdev.gate.rules import default_rules
from numdev.gate.tests import judged
from numdev.kernels import find
from numdev.sources.capture import attention_modules, layer_of
from numdev.sources.files import naming
from numdev.sources.opening import CheckpointSource, open_source
from numdev.sources.pipeline import PictureSource, PipelineSource
from numdev.sources.tensorfile import holds_cases
from numdev.system import System

HINT = "does it take as many tokens as --length, and these --inputs?"
LOGITS = 1 << 27  # that are held at once for one run: 1 GB in fp64
SEEDS = {"random": 1, "moved": 2}  # beside the request's: what is drawn is another thing
Measured = tuple[int, dict[str, list[Any]]]  # the number of a run, and its rows by kind


class Run(NamedTuple):
    """One way to run the model, by the fields of `OutputRow`."""

    kind: Any
    planned: Planned | None = None
    site: str = ""
    layer: int | None = None

    def row(self, fmt: Format) -> dict[str, Any]:
        """The fields of its rows that say which it is."""
        own = {"kind": self.kind, "format": fmt.name, "site": self.site, "layer": self.layer}
        if self.planned is not None:
            own |= {"kernel": self.planned.kernel.name, "options": dict(self.planned.options)}
        return own


def effects(
    request: EffectsRequest,
    directory: Path,
    *,
    workers: Cluster | None = None,
    overwrite: bool = False,
    progress: Progress = lambda what, done, total: None,
    say: Say = lambda text: None,
    command: str = "",
) -> EffectsReport:
    """Run `request`, journalling into `directory`; returns the report, which the caller writes.
    Raises UsageError for a request that cannot be run here, and MeasurementError where the model
    cannot be run exactly."""
    watch = Stopwatch(System.here(request.device).device, ("model", "runs", "checks", "other"))
    isolated = Isolated(request.time_limit) if request.isolate else contextlib.nullcontext(attempt)
    with isolated as run, contextlib.ExitStack() as stack:
        with watch("model"):
            study = Study(request, run)
        for note in study.source.notes:
            say(note)
        asked, described = request.model_dump(mode="json"), study.source.describe()
        head = header(asked, study.system, study.kernels, described)
        with Journal.open(directory, head, overwrite=overwrite) as journal:
            measure = study.measured
            if workers is not None:
                client = stack.enter_context(client_of(workers, study.system))
                measure = partial(measured_on, client, shared_by(head), request)
            for fmt in study.formats:
                study.fill(journal, fmt, measure, watch, progress)
            rows, checks = journal.records("row", OutputRow), journal.records("check", Check)
            about = journal.rows("about")
    narrower = {x["format"]: x["narrower"] for x in about if x["narrower"]}
    logits = all(row.angle is None for row in rows)
    named = "kernels" in request.model_fields_set
    summary = summarise(rows, study.against.kernel.name, logits=logits)
    tests = list(tests_of(summary.runs, checks, narrower, default_rules().effects))
    return EffectsReport(
        provenance=provenance(study.system, described, command),
        request=asked,
        timings=watch.seconds(),
        output="logits" if logits else "states",
        summary=summary,
        checks=checks,
        narrower=narrower,
        rows=rows,
        named=named,
        tokens=tuple(int(token) for token in study.chunks[0].get("input_ids", [()])[0]),
        **judged(tests, named=named),
    )


class Study:
    """An opened request: the model, what it reads, and all ways in which it is to run."""

    def __init__(self, request: EffectsRequest, run: Runner) -> None:
        self.request, self.run, self.system = request, run, System.here(request.device)
        planned = plan_kernels((Choice(name=request.against), *request.kernels))
        for choice in (Choice(name=request.against), *request.kernels):
            if choice.name in ("floor", "reference"):
                raise UsageError(f"expected a kernel, got the {choice.name}, which always runs")
        self.kernels = [p for p in planned if p.role in ("baseline", "kernel")]
        self.against = next(p for p in self.kernels if p.kernel.name == find(request.against).name)
        self.mine = [p for p in self.kernels if p is not self.against]
        self.formats = plan_formats(request.formats, self.kernels)
        self.source = _opened_source(request, self.system)
        self.paints = isinstance(self.source, PictureSource)
        self._subject: Subject | None = None

    def subject(self, fmt: Format) -> Subject:
        """The model in a format; of several the last one is kept."""
        if self._subject is None or self._subject.format != fmt:
            self._subject = None
            self._subject = Subject(self.source, fmt, self.run, self.system)
        return self._subject

    @cached_property
    def runs(self) -> list[Run]:
        """The runs in any format: first what others are held against."""
        floor = Planned(role="floor", kernel=find("floor"), options={})
        runs = [] if self.paints else [Run("random"), Run("emulated")]
        runs += [Run("whole", p) for p in (self.against, *self.mine)]
        runs += [Run("repeat", self.against), Run("moved", self.against)]
        runs += [Run("attention", p) for p in (floor, *self.kernels)]
        runs += [Run("predicted", p) for p in self.kernels]
        runs += [Run("site", site=site) for site in SITES if self.request.sites and not self.paints]
        model = self.source.model
        names = attention_modules(model) if self.request.by_layer else ()
        layers: Any = {layer_of(model.get_submodule(name), name) for name in names} - {None}
        first = (*self.mine, self.against)[0]
        return runs + [Run("attention", first, layer=n) for n in sorted(layers)]

    @cached_property
    def chunks(self) -> list[dict[str, Any]]:
        """The inputs, as many sequences at a time as a gigabyte of logits holds."""
        inputs = self.source.prompt.inputs
        count = len(next(x for x in inputs.values() if isinstance(x, Tensor)))
        tokens = max((x.shape[1] for x in inputs.values() if x.ndim == 2), default=1)
        vocabulary = getattr(self.source.checkpoint, "vocab_size", None) or 1
        step = 1 if self.paints else max(1, LOGITS // (tokens * vocabulary))
        parts = [slice(at, at + step) for at in range(0, count, step)]
        return [{n: x[p] if len(x) == count else x for n, x in inputs.items()} for p in parts]

    def fill(
        self, journal: Journal, fmt: Format, measure: Any, watch: Stopwatch, progress: Progress
    ) -> None:
        """All that is to be measured in one format, into the journal, but for what is there;
        `measure` is `measured`, here or on workers."""
        done, total = 0, len(self.chunks) * len(self.runs)
        for number in range(len(self.chunks)):
            keys = [digest([fmt.name, number, run.row(fmt)]) for run in self.runs]
            todo = [i for i, key in enumerate(keys) if not journal.visit(key)]
            with watch("runs"):
                for i, rows in measure(fmt, number, todo) if todo else ():
                    journal.append(keys[i], rows)
                    done += 1
                    progress(f"{fmt.name} {self.runs[i].kind} {self.runs[i].site}", done, total)
        if not journal.visit(key := digest([fmt.name, "checks"])):
            with watch("checks"):
                subject = self.subject(fmt)
                exact = fmt == self.formats[0]  # in fp64 every format comes to the same
                checks = list(checks_of(subject, self.chunks[0], self.request, exact=exact))
                about = {"format": fmt.name, "narrower": subject.narrower}
                journal.append(key, {"check": checks, "about": [about]})

    def measured(self, fmt: Format, number: int, todo: Sequence[int]) -> Iterator[Measured]:
        """Of one part of the inputs, the rows of runs, each with its number."""
        subject, inputs = self.subject(fmt), self.chunks[number]
        first = sum(len(next(iter(x.values()))) for x in self.chunks[:number])
        with naming(type(subject.wide).__name__, "failed on its inputs", HINT):
            answer = subject.exactly(inputs)
        truths, how = outputs_of(answer), Scored.of(subject.wide, answer, inputs)
        del answer
        count = 1 + next(i for i, run in enumerate(self.runs) if run.kind == "whole")
        held = [self._attempted(subject, inputs, run) for run in self.runs[:count]]
        *roundings, beside = ({} if isinstance(x, Failure) else x for x in held)
        # A choice of experts that changes moves one token, and may move it far.
        errors = [largest_error(x[""], truths[""]) for x in roundings if x and not subject.routes]
        by_chance = torch.stack(errors).amax(dim=0) if errors else None
        for i in todo:
            run = self.runs[i]
            out = held[i] if i < count else self._attempted(subject, inputs, run)
            named: list[Any] = []
            for at, truth in truths.items():
                if isinstance(out, Failure):
                    rows: list[Any] = [{"status": out.status, "reason": out.reason}] * len(truth)
                else:
                    other = beside.get(at) if run.kind in ("whole", "repeat", "moved") else None
                    rows = compared(out[at], truth, how, by_chance, other)
                about = {**run.row(fmt), "at": at}
                named += [OutputRow(**about, sequence=first + n, **r) for n, r in enumerate(rows)]
            yield i, {"row": named}

    def _attempted(
        self, subject: Subject, inputs: Mapping[str, Any], run: Run
    ) -> dict[str, Tensor] | Failure:
        """The outputs of one run, or why there are none."""
        try:
            with naming(type(subject.wide).__name__, "failed", HINT):
                return outputs_of(self._answer(subject, inputs, run))
        except (Refused, MeasurementError) as error:
            return Failure("skipped" if isinstance(error, Refused) else "failed", error.message)

    def _answer(self, subject: Subject, inputs: Mapping[str, Any], run: Run) -> Any:
        seed = self.request.seed + SEEDS.get(run.kind, 0)
        if run.planned is None:
            drawn = seed if run.kind == "random" else None
            return subject.rounded(inputs, self.mine, run.site or None, drawn)
        if run.kind == "predicted":
            return subject.exactly(inputs, subject.predicted(run.planned))
        attention = subject.kernel(run.planned, run.layer)
        if run.kind == "attention":
            return subject.exactly(inputs, attention)
        return subject.as_used(inputs, attention, seed if run.kind == "moved" else None)


def _opened_source(request: EffectsRequest, system: System) -> CheckpointSource | PictureSource:
    """Raises UsageError for what is no model, and for an option that means nothing for it."""
    path, target = Path(request.checkpoint), request.target
    what = "captured tensors" if holds_cases(path) else ""
    if what := "a configuration" if path.suffix in (".yaml", ".yml") else what:
        expected = "a checkpoint, a state dict with --model, a diffusers pipeline or `demo`"
        raise UsageError(f"{target}: expected {expected}, got {what}", hint="audit it instead")
    same = (*Reading.model_fields, "stream", "denoise")
    fields: dict[str, Any] = {name: getattr(request, name) for name in same}
    asked = AuditRequest(target=target, checkpoint=request.checkpoint, **fields)
    source = open_source(asked, system)
    if not isinstance(source, PipelineSource):
        assert isinstance(source, CheckpointSource)
        return source
    for name in ("by_layer", "generate", "compile"):
        if getattr(request, name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} does not apply: {target} is a diffusers pipeline")
    return PictureSource(source, system)


def measured_on(
    client: Any, expected: str, request: EffectsRequest, fmt: Format, number: int, todo: Any
) -> Iterator[Measured]:
    """As `Study.measured`, the runs shared out among the workers of a client."""
    count, asked = max(1, len(client.nthreads())), (request.model_dump_json(), fmt.name, number)
    parts = [(*asked, todo[i::count]) for i in range(min(count, len(todo)))]
    for rows in shared_out(client, expected, _there, parts):
        yield from rows


def _there(request: str, name: str, number: int, todo: Sequence[int]) -> list[Measured]:
    study = _opened(request)
    return list(study.measured(next(f for f in study.formats if f.name == name), number, todo))


@cache
def _opened(request: str) -> Study:
    return Study(EffectsRequest.model_validate_json(request), attempt)
