"""`numdev invariance`: every kernel on a call and on the same rows computed another way.

The line of an audit: a source gives cases, each goes along every axis, every kernel runs both
forms, and what differs is one row for each tensor. What is finished is journalled variant by
variant."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from numdev.audit.isolation import Failure, Isolated, Runner, Within, attempt, fitting, threads
from numdev.audit.journal import Journal
from numdev.audit.plan import Planned, digest, header, plan_formats, plan_kernels
from numdev.audit.rows import given
from numdev.audit.run import Progress, Say, provenance
from numdev.audit.timing import Stopwatch
from numdev.cases import AttentionCase
from numdev.config import AuditRequest, InvarianceRequest, Reading
from numdev.errors import UsageError
from numdev.formats import Format
from numdev.invariance import cause
from numdev.invariance.axes import AXES, Variant, settled
from numdev.invariance.differences import EXACT, compared, exact_change, keys_seen
from numdev.invariance.models import model_of, model_rows
from numdev.invariance.names import ASKED
from numdev.invariance.report import InvarianceReport, InvarianceRow, InvarianceSummary, ModelRow
from numdev.invariance.verdict import answer, judged, known_axes, read_rules
from numdev.invariance.ways import wrapped
from numdev.kernels import Output
from numdev.kernels.reference import attend, gradients
from numdev.kernels.reference.blocked import Reference
from numdev.sources.opening import CheckpointSource, Source, open_source
from numdev.system import System

WATCHED = ("unwritten", "graph", "compiled")  # ways in which a sound kernel may not run
# The variants of an axis whose cause is searched among all tilings, on the first call of a shape:
# by number, so that an interrupted run says what one that was not says.
SEARCHED = (0, 2, 3)
SECTIONS = ("capture", "kernels", "reference", "comparing", "causes", "model", "other")


def invariance(
    request: InvarianceRequest,
    directory: Path,
    *,
    overwrite: bool = False,
    progress: Progress = lambda what, done, total: None,
    say: Say = lambda text: None,
    command: str = "",
) -> InvarianceReport:
    """Run `request`, journalling into `directory`; returns the report, which the caller writes.
    Raises UsageError for a request that cannot be run here."""
    system = System.here(request.device)
    kernels = [p for p in plan_kernels(request.kernels) if p.role == "kernel"]
    formats, axes = plan_formats(request.formats, kernels), axes_of(request.axes)
    watch = Stopwatch(system.device, SECTIONS)
    with watch("capture"):
        source = opened(request, system)
    for note in source.notes:
        say(note)
    asked, described = request.model_dump(mode="json"), source.describe()
    runs = Isolated(request.time_limit) if request.isolate else contextlib.nullcontext(attempt)
    head = header(asked, system, kernels, described)
    with Journal.open(directory, head, overwrite=overwrite) as journal, runs as run:
        study = Study(kernels, axes, system, run, watch, backward=request.backward)
        total, done = source.count() * len(formats) * len(axes), 0
        with watch("capture"):
            for located in source:
                with watch("other"):
                    for fmt in formats:
                        case = prepared(located.load().rounded_to(fmt), backward=request.backward)
                        about = {"case": vars(case.ref), "format": fmt.name}
                        for axis, variant, rows_of in study.variants(case, fmt):
                            progress(f"{located.ref.case} {axis}", done, total)
                            key = digest([about, axis, variant.name, variant.options])
                            if not journal.visit(key):
                                journal.append(key, {"row": list(rows_of())})
                        done += len(axes)
        if request.logits:
            with watch("model"):
                study.model(source, formats, journal)
        rows = journal.records("row", InvarianceRow)
        models = journal.records("model", ModelRow)
    if not rows:
        what = f"{request.target}: no attention call was selected"
        raise UsageError(what, hint="check --layers and --axis")
    rules, named = read_rules(None), "kernels" in request.model_fields_set
    result = judged(rows, rules, named=named)
    return InvarianceReport(
        provenance=provenance(system, described, command),
        request=asked,
        timings=watch.seconds(),
        rules=rules.name,
        named=named,
        outcome=result.judgement.outcome,
        verdicts=result.verdicts,
        findings=result.findings,
        tested=result.tested,
        summary=InvarianceSummary(answer=tuple(answer(rows, models))),
        rows=rows,
        models=models,
    )


def axes_of(names: Sequence[str]) -> tuple[str, ...]:
    """The axes by name; by default all but those that are only asked for. Raises UsageError for a
    name that none has."""
    try:
        return known_axes(tuple(names)) or tuple(name for name in AXES if name not in ASKED)
    except ValueError as error:
        raise UsageError(str(error)) from error


def opened(request: InvarianceRequest, system: System) -> Source:
    """What the request names, as an audit opens it."""
    fields: dict[str, Any] = {name: getattr(request, name) for name in Reading.model_fields}
    fields |= {"cases": request.cases} if request.cases else {"checkpoint": request.checkpoint}
    fields |= {"formats": request.formats, "backward": request.backward, "kernels": ()}
    return open_source(AuditRequest(target=request.target, **fields), system)


def prepared(case: AttentionCase, *, backward: bool = False) -> AttentionCase:
    """The case as it is compared; without gradients there is no grad_out."""
    if case.positions is not None:
        raise UsageError(f"{case.ref.case}: expected a whole call, got some of its rows")
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
    shapes: set[Any] = field(default_factory=set)

    def variants(
        self, case: AttentionCase, fmt: Format
    ) -> Iterator[tuple[str, Variant, Callable[[], Iterator[InvarianceRow]]]]:
        """Every variant of a case along every axis, and what measures it."""
        memory, shape = Memory(), (fmt.name, case.q.shape, case.k.shape)
        new = shape not in self.shapes
        self.shapes.add(shape)
        with threads(fitting(case.q.shape[:3].numel() * case.kv_len)):
            for axis in self.axes:
                for number, variant in enumerate(AXES[axis](case)):
                    of = (axis, variant, case, fmt, memory)
                    search = new and number in SEARCHED
                    yield axis, variant, partial(self.rows, *of, search=search)
                memory.forget(case)

    def model(self, source: Source, formats: Sequence[Format], journal: Journal) -> None:
        """The model's own output with each kernel, where the source has a model."""
        for fmt in formats:
            model = None
            for planned in self.kernels:
                key = digest(["model", fmt.name, planned.kernel.name, planned.options])
                if journal.visit(key) or planned.kernel.missing(self.system):
                    continue
                model = model or model_of(source, fmt, self.system.device)
                if not isinstance(source, CheckpointSource) or model is None:
                    return
                run = partial(self.output, planned, within=None, gradients=False)
                found = model_rows(model, source.prompt.inputs, planned, fmt, run)
                journal.append(key, {"model": list(found)})

    def rows(
        self, axis: str, variant: Variant, case: AttentionCase, fmt: Format, memory: Memory,
        *, search: bool,
    ) -> Iterator[InvarianceRow]:  # fmt: skip
        """All kernels on one variant, whose exact answer is checked first; with `search` a cause is
        looked for beyond what a kernel claims."""
        base = case if variant.base is None else variant.base
        exact = memory.kept(base, "exact", make=partial(self.exact, base))
        new = (call for call in variant.calls if call.case is not base)
        change = max((exact_change(c, exact, self.exact(c.case)) for c in new), default=0.0)
        for planned in self.kernels:
            fields: dict[str, Any] = {
                "role": "kernel", "kernel": planned.kernel.name, "format": fmt.name,
                "options": dict(planned.options) if planned.kernel.options else {},
                "case": case.ref.case, "layer": case.ref.layer, "phase": case.ref.phase,
                "axis": axis, "variant": variant.name,
            }  # fmt: skip
            changed = _changed(planned, variant)
            if changed is None:
                continue
            if not change <= EXACT:
                reason = f"the exact answer changes by {change:.0e} of its terms"
                yield InvarianceRow(**fields, tensor="out", status="skipped", reason=reason)
                continue
            own = partial(self.output, planned, base, variant.base_within)
            of = (repr(variant.base_within), planned.kernel.name, str(planned.options))
            first = memory.kept(base, *of, make=own)
            others: Any = first if isinstance(first, Failure) else self._outputs(changed, variant)
            if isinstance(first, Failure) or isinstance(others, Failure):
                full = "OutOfMemory" in others.reason  # which is no fault of the kernel's
                status: Any = "skipped" if axis in WATCHED or full else others.status
                yield InvarianceRow(**fields, tensor="out", status=status, reason=others.reason)
                continue
            with self.watch("comparing"):
                numbers = list(compared(variant.calls, exact, first, others, fmt))
            for tensor, found in numbers:
                if found["first"] is not None and tensor not in ("dk", "dv"):
                    found["keys"] = keys_seen(base, found["first"])
                row = InvarianceRow(**fields, tensor=tensor, **found)  # type: ignore[arg-type]
                if tensor == "out" and row.differ:
                    forms = (planned, changed, variant, base, first, others)
                    row = self._with_cause(row, *forms, search=search)
                yield row

    def exact(self, case: AttentionCase) -> Reference:
        """The fp64 answer; with gradients where they are compared."""
        with self.watch("reference"):
            return gradients(case) if self.backward else attend(case)

    def _outputs(self, planned: Planned, variant: Variant) -> list[Output] | Failure:
        outputs = []
        for call in variant.calls:
            done = self.output(planned, call.case, variant.within, variant.wrap)
            if isinstance(done, Failure):
                return done
            outputs.append(done)
        return outputs

    def output(
        self,
        planned: Planned,
        case: AttentionCase,
        within: Within | None,
        wrap: str | None = None,
        gradients: bool | None = None,
    ) -> Output | Failure:
        """A kernel on a case, if need be laid out and run another way."""
        kernel = planned.kernel
        if missing := kernel.missing(self.system):
            return Failure("skipped", missing)
        if wrap is not None:
            if self.backward or isinstance(self.run, Isolated):
                return Failure("skipped", "only the forward pass, in this process, is run so")
            kernel = wrapped(kernel, wrap)
        how: dict[str, Any] = {} if within is None else {"within": within}
        options = given(planned.options, kernel)
        with self.watch("kernels"):
            both = self.backward if gradients is None else gradients
            return self.run(kernel, case, options, gradients=both, **how)

    def _with_cause(
        self, row: InvarianceRow, planned: Planned, changed: Planned, variant: Variant,
        base: AttentionCase, first: Output, others: Sequence[Output], *, search: bool,
    ) -> InvarianceRow:  # fmt: skip
        """The row with what explains its difference, where something does."""
        found, left = next((c for o in others if (c := cause.by_operator(first, o))), None), None
        if found is None and row.first and not row.nonfinite:
            pairs = zip(variant.calls, others, strict=True)
            call, other = next(x for x in pairs if _holds(x[0].there.row, row.first[2]))
            with self.watch("causes"):
                claims = (
                    cause.claim_of(planned.kernel, planned.options, base, first, self.system),
                    cause.claim_of(changed.kernel, changed.options, call.case, other, self.system),
                )
                forms = (base, first, other, row.first, claims)
                found, left = cause.by_tiling(call, *forms, search=search)
        return row.model_copy(update={"cause": found, "closest": left})


def _holds(rows: slice, row: int) -> bool:
    return (rows.start or 0) <= row < (1 << 62 if rows.stop is None else rows.stop)


def _changed(planned: Planned, variant: Variant) -> Planned | None:
    """The kernel with the options and the wrap of a variant; None where they are not for it."""
    kernel, options = planned.kernel, planned.options
    if variant.options:
        if not variant.options.keys() <= kernel.options.keys():
            return None
        try:
            options = kernel.with_options({**options, **variant.options})
        except UsageError:
            return None
    return Planned(role="kernel", kernel=kernel, options=options)


class Memory(dict[Any, Any]):
    """Cases, their references and what kernels return for them, by what they are of: of one case
    and of the bases that stand for it."""

    def kept(self, case: AttentionCase, *of: Any, make: Callable[[], Any]) -> Any:
        key = (id(case), *of)
        if key not in self:
            self[key], self[id(case),] = make(), case  # which stays, and its id with it
        return self[key]

    def forget(self, case: AttentionCase) -> None:
        """All but what is of the case itself, as it is."""
        for key in [k for k in self if k[0] != id(case) or "partial" in str(k[1:2])]:
            del self[key]
