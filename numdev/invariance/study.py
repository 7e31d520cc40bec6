"""`numdev invariance`: every kernel on a call and on the same rows computed another way.

The line of an audit: a source gives cases, each goes along every axis, every kernel runs
both forms, and what differs is one row for each tensor. What is finished is journalled
variant by variant."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch

from numdev.audit.bench import settled
from numdev.audit.isolation import (
    Failure,
    Isolated,
    Runner,
    Within,
    attempt,
    fitting,
    threads,
)
from numdev.audit.journal import Journal
from numdev.audit.plan import Plan, Planned, digest, header, plan_formats, plan_kernels
from numdev.audit.reproduce import written
from numdev.audit.rows import options_set
from numdev.audit.run import Progress, Say, describe, provenance
from numdev.audit.script import folder_of
from numdev.audit.timing import Stopwatch
from numdev.cases import AttentionCase
from numdev.config import AXES, ONLY_ASKED, AuditRequest, InvarianceRequest, Reading
from numdev.errors import UsageError
from numdev.formats import Format, dtype_of, round_to
from numdev.gate.findings import listed
from numdev.gate.judgement import MODEL
from numdev.gate.judging import check_system, judged
from numdev.gate.rules import Rules, as_data, default_rules
from numdev.invariance.axes import PLAIN, VARIANTS, Variant, again, without_positions
from numdev.invariance.cause import explained
from numdev.invariance.differences import (
    EXACT,
    Forms,
    Ran,
    compared,
    exact_change,
    keys_seen,
)
from numdev.invariance.models import model_axes, model_rows
from numdev.invariance.report import (
    Excuse,
    InvariancePlan,
    InvarianceReport,
    InvarianceRow,
    InvarianceSummary,
    ModelRow,
    Way,
)
from numdev.invariance.verdict import ALIKE
from numdev.invariance.ways import wrapped
from numdev.kernels.reference import attend, gradients
from numdev.kernels.reference.blocked import Reference
from numdev.metrics.bits import same
from numdev.report import Finding, PlannedKernel
from numdev.sources.opening import CheckpointSource, Source, open_source
from numdev.system import System

STEADY = ("out", "lse")  # what every kernel is asked to repeat, bit by bit
WATCHED = ("unwritten", "graph", "compiled")  # ways in which a sound kernel may not run
SECTIONS = ("capture", "kernels", "reference", "comparing", "causes", "model", "other")


def invariance(
    request: InvarianceRequest,
    directory: Path,
    *,
    rules: Rules | None = None,
    overwrite: bool = False,
    progress: Progress = lambda what, done, total: None,
    say: Say = lambda text: None,
    command: str = "",
) -> InvarianceReport:
    """Run `request`, journalling into `directory`; returns the report, held to the rules
    (the default ones), which the caller writes. Raises UsageError for a request that
    cannot be run."""
    system = System.probe(request.device)
    rules = rules or default_rules()
    check_system(system.as_dict(), rules)
    kernels = [
        p for p in plan_kernels(request.kernels, under_audit=True) if p.role == "kernel"
    ]
    formats = plan_formats(request.formats, kernels)
    axes = request.axes or tuple(name for name in AXES if name not in ONLY_ASKED)
    watch = Stopwatch(system.device, SECTIONS)
    with watch("capture"):
        source = opened(request, system)
    for note in source.notes:
        say(note)
    asked = request.model_dump(mode="json") | {"formats": [fmt.name for fmt in formats]}
    described = describe(source)
    runs = (
        Isolated(request.time_limit)
        if request.isolate
        else contextlib.nullcontext(attempt)
    )
    head = header(asked, system, kernels, described)
    with Journal.open(directory, head, overwrite=overwrite) as journal, runs as run:
        study = Study(kernels, axes, system, run, watch, backward=request.backward)
        total, done = source.count() * len(formats) * len(axes), 0
        with watch("capture"):
            for located in source:
                with watch("other"):
                    for fmt in formats:
                        case = prepared(
                            located.load().rounded_to(fmt), backward=request.backward
                        )
                        about = {"case": vars(case.ref), "format": fmt.name}
                        for axis, variant, rows_of in study.variants(case, fmt):
                            progress(f"{located.ref.case} {axis}", done, total)
                            key = digest([about, axis, variant.name, variant.options])
                            if not journal.visit(key):
                                own = list(rows_of())
                                why = next(
                                    (r.reason for r in own if r.excuse == "call"), None
                                )
                                way = Way(
                                    format=fmt.name,
                                    case=case.ref.case,
                                    axis=axis,
                                    variant=variant.name,
                                    reason=why or "",
                                    part=variant.part,
                                    adds=added(axis, variant, case),
                                )
                                journal.append(key, {"row": own, "way": [way]})
                        done += len(axes)
        if request.logits:
            with watch("model"):
                study.model(source, formats, journal)
        rows = journal.records("row", InvarianceRow)
        ways = journal.records("way", Way)
        models = journal.records("model", ModelRow)
    if not rows:
        along = listed(axes) if request.axes else "any axis"
        what = (
            f"{request.target}: no attention call could be made another way along {along}"
        )
        raise UsageError(what, hint="check --layers and --axis")
    plan = study.plan(formats, ways, named="kernels" in request.model_fields_set)
    report = InvarianceReport(
        provenance=provenance(system, described, command),
        request=asked,
        timings=watch.seconds(),
        plan=plan.model_copy(update={"asked": bool(request.axes)}),
        summary=InvarianceSummary(answer=()),
        rows=rows,
        models=models,
    )
    return judged(report, rules)


def compared_axes(
    study: Study, plan: Plan, rows: Sequence[InvarianceRow]
) -> InvarianceReport:
    """Rows of a study of calls in memory, as a report that is not judged."""
    return InvarianceReport(
        provenance=provenance(plan.system, {}, "numdev.check"),
        request={},
        plan=study.plan(plan.formats, (), named=True),
        summary=InvarianceSummary(answer=()),
        rows=tuple(rows),
    )


def reproducers(
    report: InvarianceReport, request: InvarianceRequest, directory: Path, **_: Any
) -> list[Path]:
    """A script for each finding: its kernel along its axis alone, on these calls."""
    rules = Rules.model_validate(report.rules)
    source = request.checkpoint
    if source is not None and Path(source).exists():
        request = request.model_copy(update={"checkpoint": str(Path(source).resolve())})

    def facts(finding: Finding) -> dict[str, Any] | None:
        if finding.severity != "exceeded" or finding.kernel == MODEL:
            return None
        alone = {
            "axes": (finding.rule.split()[0],),
            "formats": finding.formats,
            "logits": False,
        }
        alone["kernels"] = ({"name": finding.kernel, "options": finding.options},)
        asked = request.model_dump() | alone
        folder = folder_of(finding.kernel.partition(":")[0])
        return {
            "folders": [folder] if ":" in finding.kernel and folder else [],
            "request": InvarianceRequest.model_validate(asked).model_dump_json(),
            "rules": json.dumps(as_data(rules)),
        }

    return written(report.findings, directory, "invariance", facts)


def opened(request: InvarianceRequest, system: System) -> Source:
    """What the request names, as an audit opens it."""
    same = ("target", "checkpoint", "cases", "backward", *Reading.model_fields)
    return open_source(
        AuditRequest(**{name: getattr(request, name) for name in same}), system
    )


def prepared(case: AttentionCase, *, backward: bool = False) -> AttentionCase:
    """The case as it is compared: without gradients there is no grad_out, and positions
    that hide nothing from a single query say nothing."""
    if case.positions is not None:
        raise UsageError(f"{case.ref.case}: expected a whole call, got some of its rows")
    if case.q_len == 1 and keys_seen(case, (0, 0, 0, 0)) == case.kv_len:
        case = without_positions(case)
    return settled(case if backward else dataclasses.replace(case, grad_out=None))


@dataclass
class Study:
    """Kernels and how they are run."""

    kernels: Sequence[Planned]
    axes: Sequence[str]
    system: System
    run: Runner
    watch: Stopwatch
    backward: bool = False
    met: set[Any] = field(default_factory=set)
    """The shapes of the cases so far. Causes are searched among all tilings in the first
    of each; in others of the same shape they would be the same."""
    searches: bool = True
    kept: dict[Any, Any] = field(default_factory=dict)
    """References and outputs of the case at hand and of an axis's bases, by what they are
    of."""
    model_axes: tuple[str, ...] = ()  # along which the model's own output is compared

    def plan(
        self, formats: Sequence[Format], ways: Sequence[Way], *, named: bool
    ) -> InvariancePlan:
        """What was to be compared, its axes asked for by name."""
        return InvariancePlan(
            kernels=tuple(
                PlannedKernel(
                    role="kernel", kernel=p.kernel.name, options=recorded_options(p)
                )
                for p in self.kernels
            ),
            named=named,
            formats=tuple(fmt.name for fmt in formats),
            axes=tuple(self.axes),
            asked=True,
            backward=self.backward,
            ways=tuple(ways),
            models=tuple(self.model_axes),
        )

    def variants(
        self, case: AttentionCase, fmt: Format
    ) -> Iterator[tuple[str, Variant, Callable[[], Iterator[InvarianceRow]]]]:
        """Every variant of a case along every axis, and what measures it."""
        shape = (fmt.name, case.q.shape, case.k.shape, case.is_causal, case.mask is None)
        self.kept, self.searches = {}, shape not in self.met
        self.met.add(shape)
        with threads(fitting(case.q.shape[:3].numel() * case.kv_len)):
            for axis in self.axes:
                for variant in VARIANTS[axis](case):
                    yield axis, variant, partial(self.rows, axis, variant, case, fmt)
                self.kept = {
                    k: x for k, x in self.kept.items() if k[:2] == (id(case), PLAIN)
                }

    def model(self, source: Source, formats: Sequence[Format], journal: Journal) -> None:
        """The model's own output with each kernel, where it is in memory and reads
        tokens."""
        if not isinstance(source, CheckpointSource) or source.streamed is not None:
            return
        if "input_ids" not in source.prompt.inputs:
            return
        for fmt in formats:
            model = source.load(dtype_of(fmt)).eval()
            wide = torch.float32 if dtype_of(fmt).itemsize < 4 else torch.float64
            wider = cache(lambda wide=wide: source.load(wide).eval())
            self.model_axes = model_axes(model, source.prompt.inputs, self.axes)
            for planned in self.kernels:
                key = digest(["model", fmt.name, planned.kernel.name, planned.options])
                if journal.visit(key):
                    continue
                run = partial(self.ran, planned, gradients=False)
                of = (model, wider, source.prompt.inputs, planned, fmt, run)
                journal.append(key, {"model": list(model_rows(*of, axes=self.axes))})

    def rows(
        self, axis: str, variant: Variant, case: AttentionCase, fmt: Format
    ) -> Iterator[InvarianceRow]:
        """All kernels on one variant, whose exact answer is checked first."""
        base, why = variant.base or case, variant.reason
        if not why:
            exact = self._kept((id(base), PLAIN), base, partial(self.exact, base))
            new = (call for call in variant.calls if call.case is not base)
            change = max(
                (exact_change(c, exact, self.exact(c.case)) for c in new), default=0.0
            )
            if not change <= EXACT:
                why = f"the exact answer changes by {change:.0e} of its terms"
        for planned in self.kernels:
            fields: dict[str, Any] = {
                "role": "kernel", "kernel": planned.kernel.name, "format": fmt.name,
                "options": recorded_options(planned),
                "case": case.ref.case, "layer": case.ref.layer, "phase": case.ref.phase,
                "axis": axis, "variant": variant.name, "part": variant.part,
            }  # fmt: skip
            changed = _changed(planned, variant)
            excuse: Excuse = "call" if why else "option"
            forms: Forms | Failure = Failure("skipped", why or "has no such option")
            if not why and changed is not None:
                forms = self._forms(planned, changed, variant, base, exact, fmt)
            if isinstance(forms, Forms):
                yield from self._compared(fields, forms)
                continue
            if not why and changed is not None:
                excuse = _excuse(forms, added(axis, variant, case))
            status = "skipped" if excuse else "failed"
            fields |= {"tensor": "out", "tensors": (), "status": status, "excuse": excuse}
            yield InvarianceRow(**fields, reason=forms.reason)

    def _forms(
        self, planned: Planned, changed: Planned, variant: Variant, base: AttentionCase,
        exact: Reference, fmt: Format,
    ) -> Forms | Failure:  # fmt: skip
        """What a kernel returns for the base, and in the other form."""
        key = (id(base), variant.base_within, planned.kernel.name, str(planned.options))
        run = partial(self.ran, planned, base, variant.base_within)
        first, others = self._kept(key, base, run), []
        if isinstance(first, Failure):
            return first
        wrong = (
            ~first.output.out.double().isfinite() & round_to(exact.out, fmt).isfinite()
        )
        if count := int((wrong & ~exact.empty[..., None]).sum()):
            what = (
                f"returns {count} elements that are NaN or infinite where the "
                "exact result"
            )
            return Failure("failed", f"{what} is not")
        for call in variant.calls:
            ran = self.ran(changed, call.case, variant.within, variant.wrap)
            if isinstance(ran, Failure):
                return ran
            others.append(ran)
        return Forms(variant, first, others, exact, fmt)

    def _compared(self, fields: dict[str, Any], forms: Forms) -> Iterator[InvarianceRow]:
        with self.watch("comparing"):
            numbers = dict(compared(forms))
        repeats = None
        tensors: Any = tuple(numbers)
        if fields["axis"] != "repeat" and any(
            numbers.get(n, {}).get("differ") for n in STEADY
        ):
            unsteady = list(self._unsteady(fields, forms))
            repeats = not unsteady
            yield from unsteady
            far = max(
                (numbers[n].get("excess", 0.0) for n in numbers if n != "lse"),
                default=0.0,
            )
            if unsteady and far <= ALIKE * max(
                1.0, *(row.excess or 0.0 for row in unsteady)
            ):
                why = "the kernel gives another answer to the same call"
                fields |= {
                    "tensor": "out",
                    "tensors": (),
                    "status": "skipped",
                    "excuse": "repeat",
                }
                yield InvarianceRow(**fields, reason=why, repeats=False)
                return
        fields |= {
            "tensors": tensors,
            "repeats": repeats,
            "reason": forms.first.declined or None,
        }
        for tensor in tensors:
            row = InvarianceRow(**fields, tensor=tensor, **numbers[tensor])
            if row.first is not None and tensor not in ("dk", "dv"):
                row = row.model_copy(
                    update={"keys": keys_seen(forms.first.case, row.first)}
                )
            # Where a kernel does not repeat itself, tilings that fit do so by chance.
            if tensor == "out" and row.differ and row.axis != "repeat" and repeats:
                with self.watch("causes"):
                    found = explained(row, forms, self.system, search=self.searches)
                row = row.model_copy(update=found)
            yield row

    def _unsteady(self, fields: dict[str, Any], forms: Forms) -> Iterator[InvarianceRow]:
        """Where one of two forms gives other bits when it runs once more: rows along
        `repeat`."""
        name = f"again, {fields['axis']} {fields['variant']}"
        about = fields | {"axis": "repeat", "variant": name}
        # The base twice, since a kernel may alternate.
        for ran in (forms.first, forms.first, *forms.others):
            more = self.ran(ran.planned, ran.case, ran.within, ran.wrap)
            if isinstance(more, Failure):
                about |= {"tensor": "out", "tensors": (), "status": "failed"}
                yield InvarianceRow(**about, reason=more.reason)
                return
            pairs = ((getattr(ran.output, n), getattr(more.output, n)) for n in STEADY)
            if all(x is y or same(x, y) for x, y in pairs):
                continue
            two = Forms(
                again(name, ran.case), ran, [more], attend(ran.case), forms.format
            )
            changes = {n: x for n, x in compared(two) if x.get("differ")}
            tensors: Any = tuple(changes)
            for tensor in tensors:
                yield InvarianceRow(
                    **about, tensors=tensors, tensor=tensor, **changes[tensor]
                )
            if changes:
                return

    def exact(self, case: AttentionCase) -> Reference:
        """The fp64 answer; with gradients where they are compared."""
        with self.watch("reference"):
            return gradients(case) if self.backward else attend(case)

    def _kept(self, key: Any, case: AttentionCase, make: Callable[[], Any]) -> Any:
        """What was made for a case before; the case is kept with it, and so its id."""
        if key not in self.kept:
            self.kept[key] = make(), case
        return self.kept[key][0]

    def ran(
        self, planned: Planned, case: AttentionCase, within: Within = PLAIN,
        wrap: str | None = None, gradients: bool | None = None,
    ) -> Ran | Failure:  # fmt: skip
        """A kernel on a case, if need be laid out and run another way. One that declines
        the backward pass runs forward alone."""
        kernel = planned.kernel
        if missing := kernel.missing(self.system):
            return Failure("skipped", missing)
        if wrap is not None:
            if self.backward or isinstance(self.run, Isolated):
                return Failure(
                    "skipped", "only the forward pass, in this process, is run so"
                )
            kernel = wrapped(kernel, wrap)
        options = options_set(planned.options, kernel)
        both = self.backward if gradients is None else gradients
        with self.watch("kernels"):
            output, declined = (
                self.run(kernel, case, options, gradients=both, within=within),
                "",
            )
            if both and isinstance(output, Failure) and output.status == "skipped":
                declined = output.reason
                output = self.run(kernel, case, options, within=within)
        if isinstance(output, Failure):
            return output
        return Ran(planned, case, within, wrap, output, declined)


def added(
    axis: str, variant: Variant, case: AttentionCase
) -> Literal["", "mask", "option", "way"]:
    """What a variant asks of a kernel that the case does not."""
    if axis in WATCHED:
        return "way"
    if variant.options:
        return "option"
    return "mask" if variant.masks(case) else ""


def _excuse(failure: Failure, adds: str) -> Excuse:
    """Why a kernel that was run gave nothing in a way that `adds` something; empty where
    that is its fault."""
    if adds == "way":
        return "way"
    if failure.status == "skipped":
        return "mask" if adds == "mask" else "kernel"
    return "memory" if out_of_memory(failure) else ""


def recorded_options(planned: Planned) -> dict[str, Any]:
    """The options of a kernel that has some, as its rows hold them."""
    return dict(planned.options) if planned.kernel.options else {}


def out_of_memory(failure: Failure) -> bool:
    """Whether a kernel failed since memory ran out. It may say so of itself: an axis
    along which it ran in no call is not excused by it (`numdev.invariance.verdict`)."""
    return failure.reason.startswith(("OutOfMemoryError: ", "MemoryError: "))


def _changed(planned: Planned, variant: Variant) -> Planned | None:
    """The kernel with the options of a variant; None where they are not for it."""
    if not variant.options:
        return planned
    if variant.options.keys() <= planned.kernel.options.keys():
        with contextlib.suppress(UsageError):
            options = planned.kernel.with_options({**planned.options, **variant.options})
            return dataclasses.replace(planned, options=options)
    return None
