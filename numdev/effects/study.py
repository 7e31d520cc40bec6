"""`numdev effects`: the model's output in each format with each kernel beside the exact
one, and what single rounding sites do to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from numdev.audit.cluster import Cluster, client_of, shared_by, shared_out
from numdev.audit.isolation import Failure, Isolated, Runner, attempt
from numdev.audit.journal import Journal
from numdev.audit.plan import Planned, digest, header, plan_formats, plan_kernels
from numdev.audit.run import Progress, Say, describe, provenance
from numdev.audit.timing import Stopwatch
from numdev.config import AuditRequest, Choice, EffectsRequest, Reading
from numdev.effects.checks import checks_of
from numdev.effects.outputs import Scored, compared, largest_error, outputs_of
from numdev.effects.report import (
    Check,
    EffectsPlan,
    EffectsReport,
    EffectsSummary,
    OutputRow,
    PlannedCheck,
    PlannedRun,
    stands_for_use,
)
from numdev.effects.rounding import SITES
from numdev.effects.running import Inputs, Source, Subject, first_nonfinite
from numdev.errors import MeasurementError, Refused, UsageError
from numdev.formats import Format
from numdev.gate.judging import check_system, judged
from numdev.gate.rules import Rules, default_rules
from numdev.kernels import find
from numdev.report import PlannedKernel
from numdev.report.numbers import labelled
from numdev.sources.capture import HINT, attention_modules, layer_of
from numdev.sources.files import naming
from numdev.sources.opening import CheckpointSource, open_source, refuse_options
from numdev.sources.pipeline import PictureSource, PipelineSource
from numdev.sources.tensorfile import holds_cases
from numdev.system import System

LOGITS = 1 << 27  # that are held at once for one run: 1 GB in fp64
Measured = tuple[int, list[OutputRow]]  # the number of a run, and its rows


class Run(NamedTuple):
    """One way to run the model, by the fields of `OutputRow`."""

    kind: Any
    planned: Planned | None = None
    site: str = ""
    layer: int | None = None

    def row(self, fmt: Format) -> dict[str, Any]:
        """The fields of its rows that say which it is."""
        own = {
            "kind": self.kind,
            "format": fmt.name,
            "site": self.site,
            "layer": self.layer,
        }
        if p := self.planned:
            own |= {"kernel": p.kernel.name, "options": dict(p.options)}
        return own

    @property
    def planned_run(self) -> PlannedRun:
        """For the report."""
        of = self.planned
        return PlannedRun(
            kind=self.kind,
            kernel=of.kernel.name if of else "",
            options=dict(of.options) if of else {},
            site=self.site,
            layer=self.layer,
        )


def effects(
    request: EffectsRequest,
    directory: Path,
    *,
    workers: Cluster | None = None,
    overwrite: bool = False,
    progress: Progress = lambda what, done, total: None,
    say: Say = lambda text: None,
    command: str = "",
    rules: Rules | None = None,
) -> EffectsReport:
    """Run `request`, journalling into `directory`; returns the report, judged by the
    rules (the default ones). Raises UsageError for what cannot be run here, and
    MeasurementError where the model cannot be run exactly."""
    rules = rules or default_rules()
    check_system(System.probe(request.device).as_dict(), rules)
    watch = Stopwatch(
        System.probe(request.device).device, ("model", "runs", "checks", "other")
    )
    runner = (
        Isolated(request.time_limit)
        if request.isolate
        else contextlib.nullcontext(attempt)
    )
    with runner as run, contextlib.ExitStack() as stack:
        with watch("model"):
            study = Study(request, run)
        for note in study.source.notes:
            say(note)
        names = [fmt.name for fmt in study.formats]
        asked = request.model_dump(mode="json") | {"formats": names}
        described = describe(study.source)
        head = header(asked, study.system, study.kernels, described)
        with Journal.open(directory, head, overwrite=overwrite) as journal:
            measure, done = study.measured, 0
            total = len(study.formats) * len(study.chunks) * len(study.runs)
            if workers is not None:
                client = stack.enter_context(client_of(workers, study.system))
                measure = partial(measured_on, client, shared_by(head), request)
            for fmt in study.formats:
                for number in range(len(study.chunks)):
                    keys = [
                        digest([fmt.name, number, run.row(fmt)]) for run in study.runs
                    ]
                    todo = [i for i, key in enumerate(keys) if not journal.visit(key)]
                    with watch("runs"):
                        for i, own in measure(fmt, number, todo) if todo else ():
                            journal.append(keys[i], {"row": own})
                            done, way = done + 1, study.runs[i]
                            progress(f"{fmt.name} {way.kind} {way.site}", done, total)
                with watch("checks"):
                    if not journal.visit(key := digest([fmt.name, "checks"])):
                        of = study.subject(fmt), study.chunks[0], request
                        before = journal.records("check", Check)
                        tried = list(checks_of(*of, before))
                        facts = [{"routes": of[0].routes}]
                        journal.append(key, {"check": tried, "model": facts})
            rows, checks = (
                journal.records("row", OutputRow),
                journal.records("check", Check),
            )
            facts = journal.rows("model")
    logits = any(row.flips is not None for row in rows)
    report = EffectsReport(
        provenance=provenance(study.system, described, command),
        request=asked,
        timings=watch.seconds(),
        plan=EffectsPlan(
            kernels=tuple(
                PlannedKernel(
                    role="kernel", kernel=p.kernel.name, options=dict(p.options)
                )
                for p in (study.against, *study.mine)
            ),
            against=study.against.kernel.name,
            sites_of=labelled(study.used.kernel.name, study.used.options),
            named="kernels" in request.model_fields_set,
            formats=tuple(fmt.name for fmt in study.formats),
            runs=tuple(run.planned_run for run in study.runs),
            outputs=tuple(dict.fromkeys(row.at for row in rows)),
            sequences=study.sequences,
            logits=logits,
            routes=any(fact["routes"] for fact in facts),
            checks=tuple(
                PlannedCheck(name=c.name, format=c.format, applies=c.applies)
                for c in checks
            ),
        ),
        output="logits" if logits else "states",
        summary=EffectsSummary(answer=(), runs=()),
        checks=checks,
        rows=rows,
        tokens=tuple(int(token) for token in study.chunks[0].get("input_ids", [()])[0]),
    )
    return judged(report, rules)


class Study:
    """An opened request: the model, what it reads, and all ways in which it is to run."""

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
        self.source = _opened_source(request, self.system)
        self._subject: Subject | None = None

    def subject(self, fmt: Format) -> Subject:
        """The model in a format; of several the last one is kept."""
        if self._subject is None or self._subject.format != fmt:
            self._subject = None
            self._subject = Subject(self.source, fmt, self.run, self.system)
        return self._subject

    @cached_property
    def runs(self) -> list[Run]:
        """The runs in any format: first those that others are held against."""
        floor = Planned(role="floor", kernel=find("floor"), options={})
        placed = isinstance(self.source, CheckpointSource)  # operations have sites
        model, main = self.source.model, (*self.mine, self.against)[0]
        names = attention_modules(model) if self.request.by_layer else ()
        layers: Any = {layer_of(model.get_submodule(name), name) for name in names} - {
            None
        }
        return [
            *((Run("random"), Run("emulated")) if placed else ()),
            *(Run("whole", p) for p in (self.against, *self.mine)),
            *(Run("repeat", self.against), Run("moved", self.against)),
            *(Run("attention", p) for p in (floor, *self.kernels)),
            *(Run("predicted", p) for p in self.kernels),
            *(Run("site", site=site) for site in SITES if self.request.sites and placed),
            *(Run("attention", main, layer=layer) for layer in sorted(layers)),
        ]

    @property
    def used(self) -> Planned:
        """The kernel that stands for what a user runs: attention's sites round as it
        does."""
        every = (*self.mine, self.against)
        return min(
            every, key=lambda p: stands_for_use(p.kernel.name, self.against.kernel.name)
        )

    @property
    def sequences(self) -> int:
        """How many the model reads."""
        return sum(len(next(iter(x.values()))) for x in self.chunks)

    @cached_property
    def chunks(self) -> list[dict[str, Any]]:
        """The inputs, as many sequences at a time as a gigabyte of logits holds; one
        image."""
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

    def measured(
        self, fmt: Format, number: int, todo: Sequence[int]
    ) -> Iterator[Measured]:
        """Of one part of the inputs, the rows of these runs, each with its number."""
        subject, inputs = self.subject(fmt), self.chunks[number]
        before = sum(len(next(iter(x.values()))) for x in self.chunks[:number])
        answer = self._answer(subject, inputs, Run("exact"))
        # No kernel can be put into it, and its own code is all there is
        if subject.by_hand:
            count = len(next(iter(inputs.values())))
            nothing: Any = {"status": "skipped", "reason": subject.by_hand}
            for i in todo:
                about = self.runs[i].row(fmt)
                yield (
                    i,
                    [
                        OutputRow(**about, **nothing, sequence=before + n)
                        for n in range(count)
                    ],
                )
            return
        truths, how = outputs_of(answer), Scored.of(subject.wide, answer, inputs)
        del answer
        lost: dict[int, str] = {}  # where the truth itself is not finite
        if not all(bool(truth.isfinite().all()) for truth in truths.values()):
            lost = self._first_nonfinite(subject, inputs, Run("exact"))
        count = 1 + next(i for i, run in enumerate(self.runs) if run.kind == "whole")
        held = [self._outputs(subject, inputs, run) for run in self.runs[:count]]
        *roundings, against = ({} if isinstance(x, Failure) else x for x in held)
        # A choice of experts that changes moves one token, and may move it far.
        errors = [
            largest_error(x[""], truths[""])
            for x in roundings
            if x and not subject.routes
        ]
        by_chance = torch.stack(errors).amax(dim=0) if errors else None
        for i in todo:
            run, named = self.runs[i], []
            out = held[i] if i < count else self._outputs(subject, inputs, run)
            first = lost
            if not isinstance(out, Failure) and any(
                bool((truth.isfinite() & ~out[at].isfinite()).any())
                for at, truth in truths.items()
            ):
                first = self._first_nonfinite(subject, inputs, run) | lost
            for at, truth in truths.items():
                if isinstance(out, Failure):
                    rows: list[Any] = [vars(out)] * len(truth)
                else:
                    beside = (
                        against.get(at)
                        if run.kind in ("whole", "repeat", "moved")
                        else None
                    )
                    rows = compared(out[at], truth, how, by_chance, beside, first)
                about = {**run.row(fmt), "at": at}
                named += [
                    OutputRow(**about, sequence=n, **x)
                    for n, x in enumerate(rows, before)
                ]
            yield i, named

    def _outputs(
        self, subject: Subject, inputs: Inputs, run: Run
    ) -> dict[str, Tensor] | Failure:
        """The outputs of one run, or why there are none."""
        try:
            return outputs_of(self._answer(subject, inputs, run))
        except (Refused, MeasurementError) as error:
            return Failure(
                "skipped" if isinstance(error, Refused) else "failed", error.message
            )

    def _first_nonfinite(
        self, subject: Subject, inputs: Inputs, run: Run
    ) -> dict[int, str]:
        """By sequence of these inputs, where a run first gives NaN or infinity."""
        as_used = run.kind in ("whole", "repeat", "moved")
        model, cast_to = (
            (subject.real, subject.format) if as_used else (subject.wide, None)
        )
        count = next(len(x) for x in inputs.values() if isinstance(x, Tensor))
        with first_nonfinite(model, count, cast_to) as first:
            self._answer(subject, inputs, run)
        return first

    def _answer(self, subject: Subject, inputs: Inputs, run: Run) -> Any:
        """What the model returns. What its own code raises becomes one line."""
        seed, planned = self.request.seed, run.planned
        with naming(type(subject.wide).__name__, "failed on its inputs", HINT):
            if run.kind == "exact":
                return subject.exactly(inputs)
            if planned is None:
                drawn = seed + 1 if run.kind == "random" else None
                others = [p for p in self.mine if p is not self.used]
                return subject.rounded(inputs, (self.used, *others), run.site, drawn)
            if run.kind == "predicted":
                return subject.exactly(inputs, partial(subject.predicted, planned))
            attention = partial(subject.kernel, planned, run.layer)
            if run.kind == "attention":
                return subject.exactly(inputs, attention)
            return subject.as_used(
                inputs, attention, seed + 2 if run.kind == "moved" else None
            )


def _opened_source(request: EffectsRequest, system: System) -> Source:
    """Raises UsageError for what is no model, and for an option that means nothing for
    it."""
    path, target = Path(request.checkpoint), request.target
    what = "captured tensors" if holds_cases(path) else ""
    if what := "a configuration" if path.suffix in (".yaml", ".yml") else what:
        expected = (
            "a checkpoint, a state dict with --model, a diffusers pipeline or `demo`"
        )
        raise UsageError(
            f"{target}: expected {expected}, got {what}", hint="audit it instead"
        )
    same = ("target", "checkpoint", *Reading.model_fields, "stream", "denoise")
    source = open_source(
        AuditRequest(**{name: getattr(request, name) for name in same}), system
    )
    if isinstance(source, PipelineSource):
        refuse_options(
            request, "a diffusers pipeline", ("by_layer", "generate", "compile")
        )
        return PictureSource(source, system)
    assert isinstance(source, CheckpointSource)
    return source


def measured_on(
    client: Any,
    expected: str,
    request: EffectsRequest,
    fmt: Format,
    number: int,
    todo: Any,
) -> Iterator[Measured]:
    """As `Study.measured`, the runs shared out among the workers of a client."""
    count = min(max(1, len(client.nthreads())), len(todo))
    parts = [
        (request.model_dump_json(), fmt, number, todo[i::count]) for i in range(count)
    ]
    for rows in shared_out(client, expected, _there, parts):
        yield from rows


def _there(request: str, *what: Any) -> list[Measured]:
    return list(_opened(request).measured(*what))


@cache
def _opened(request: str) -> Study:
    return Study(EffectsRequest.model_validate_json(request), attempt)
