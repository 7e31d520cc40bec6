"""`numdev invariance`: runs every kernel on a call and on the same rows computed another
way, compares their bits, and writes the report.

A source gives cases, each goes along every axis, every kernel runs both forms, and what
differs is one row for each tensor. What is finished is written to a journal variant by
variant."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from numdev.cases import AttentionCase
from numdev.errors import UsageError
from numdev.formats import Format, dtype_of, round_to
from numdev.gate.findings import joined_words
from numdev.gate.judgement import MODEL
from numdev.gate.judging import check_system, judged
from numdev.gate.rules import Rules, default_rules, rules_as_data
from numdev.kernels.reference import attend, gradients
from numdev.kernels.reference.blocked import Reference
from numdev.metrics.bit_checksums import same
from numdev.report import Finding, PlannedKernel
from numdev.request_models import (
    AXES,
    ONLY_ASKED,
    AuditRequest,
    Axis,
    InvarianceRequest,
    Reading,
)
from numdev.sources.case_sources import CheckpointSource, Source, open_source
from numdev.studies.audit.deviation_rows import options_set
from numdev.studies.audit.finding_reproducers import written
from numdev.studies.audit.isolation import (
    Failure,
    Isolated,
    Runner,
    Within,
    attempt,
    fitting_threads,
)
from numdev.studies.audit.journal import Journal
from numdev.studies.audit.plan import (
    Plan,
    Planned,
    digest,
    header,
    plan_formats,
    plan_kernels,
)
from numdev.studies.audit.prepared_attention import settled
from numdev.studies.audit.reproducer_script import folder_of
from numdev.studies.audit.run import Progress, Say, describe, provenance
from numdev.studies.audit.section_timing import Stopwatch
from numdev.studies.invariance.axes import (
    PLAIN,
    VARIANTS,
    Variant,
    single_call_variant,
    without_positions,
)
from numdev.studies.invariance.call_layouts import wrap_kernel
from numdev.studies.invariance.differences import (
    EXACT,
    Forms,
    KernelRun,
    Numbers,
    compare_forms,
    count_keys_seen,
    exact_change,
)
from numdev.studies.invariance.model_output import model_rows
from numdev.studies.invariance.report import (
    Excuse,
    InvariancePlan,
    InvarianceReport,
    InvarianceRow,
    InvarianceSummary,
    ModelRow,
    OfWay,
    Way,
)
from numdev.studies.invariance.tiling_cause import cause_fields
from numdev.studies.invariance.verdict import ALIKE
from numdev.system import System

OTHER_ANSWER = "the kernel gives another answer to the same call"
STEADY = ("out", "lse")  # what every kernel is asked to repeat, bit by bit
WATCHED = ("unwritten", "graph", "compiled")  # ways in which a sound kernel may not run
SECTIONS = ("capture", "kernels", "reference", "comparing", "causes", "model", "other")


def invariance(
    request: InvarianceRequest,
    directory: Path | None,
    *,
    rules: Rules | None = None,
    overwrite: bool = False,
    progress: Progress = lambda what, done, total: None,
    say: Say = lambda text: None,
    command: str = "",
) -> InvarianceReport:
    """Runs `request` and returns its report, judged by `rules` (None: the default ones).
    Rows go to a journal in `directory` (None: in memory), from which a call with the same
    request, system and files goes on; `overwrite` replaces any other. `say` gets notes,
    `progress` (what, done, total). Raises UsageError for a request that cannot be run or
    changes no call, another journal without `overwrite`, and other files there;
    MeasurementError for rules of another system, and a damaged source."""
    system = System.probe(request.device)
    rules = rules or default_rules()
    check_system(system.as_dict(), rules)
    planned = plan_kernels(request.kernels, under_audit=True)
    kernels = [p for p in planned if p.role == "kernel"]
    formats = plan_formats(request.formats, kernels)
    axes = request.axes_asked or tuple(name for name in AXES if name not in ONLY_ASKED)
    watch = Stopwatch(system.device, SECTIONS)
    with watch("capture"):
        source = open_cases(request, system)
    for note in source.notes:
        say(note)
    asked = request.model_dump(mode="json") | {"formats": [fmt.name for fmt in formats]}
    described = describe(source)
    isolated = Isolated(request.time_limit) if request.isolate else None
    head = header(asked, system, kernels, described)
    with (
        Journal.open(directory, head, overwrite=overwrite) as journal,
        isolated or contextlib.nullcontext(attempt) as run,
    ):
        study = InvarianceStudy(
            kernels, axes, system, run, watch, backward=request.backward
        )
        _complete_journal(study, source, formats, journal, progress)
        if request.logits:
            with watch("model"):
                study.measure_model(source, formats, journal)
        rows = journal.records("row", InvarianceRow)
        ways = journal.records("way", Way)
        models = journal.records("model", ModelRow)
    if not rows:
        raise _no_call_error(request)
    named = "kernels" in request.model_fields_set
    plan = study.plan_record(formats, ways, models, named=named)
    report = InvarianceReport(
        provenance=provenance(system, described, command, kernels),
        request=asked,
        timings=watch.seconds(),
        plan=plan.model_copy(update={"asked": bool(request.axes_asked)}),
        summary=InvarianceSummary(answer=()),
        rows=rows,
        models=models,
    )
    return judged(report, rules)


def _no_call_error(request: InvarianceRequest) -> UsageError:
    """Returns, without raising it, the error for a request none of whose calls can be
    made another way."""
    along = joined_words(request.axes_asked) or "any axis"
    what = f"{request.target}: no attention call could be made another way along {along}"
    return UsageError(what, hint="check --layers, --axis and --require")


def _complete_journal(
    study: InvarianceStudy,
    source: Source,
    formats: Sequence[Format],
    journal: Journal,
    progress: Progress,
) -> None:
    """Measures every variant of every case, in every format, that the journal lacks, and
    appends its rows and its `Way` to the journal."""
    total, done = source.count() * len(formats) * len(study.axes), 0
    with study.watch("capture"):
        for located in source:
            with study.watch("other"):
                for fmt in formats:
                    case = located.load().rounded_to(fmt)
                    case = prepare_case(case, backward=study.backward)
                    about = {"case": vars(case.ref), "format": fmt.name}
                    for axis, variant, rows_of in study.variants(case, fmt):
                        progress(f"{located.ref.case} {axis}", done, total)
                        key = digest([about, axis, variant.name, variant.options])
                        if not journal.visit(key):
                            rows = list(rows_of())
                            way = _plan_way(axis, variant, case, fmt, rows)
                            journal.append(key, {"row": rows, "way": [way]})
                    done += len(study.axes)


def _plan_way(
    axis: Axis,
    variant: Variant,
    case: AttentionCase,
    fmt: Format,
    rows: Sequence[InvarianceRow],
) -> Way:
    """Returns a variant as the plan of a report records it. Its reason is that of the
    first row that says that no such call can be made. `rows`: those of all kernels on the
    variant."""
    reason = next((row.reason for row in rows if row.excuse == "call"), None)
    return Way(
        format=fmt.name,
        case=case.ref.case,
        axis=axis,
        variant=variant.name,
        reason=reason or "",
        part=variant.part,
        adds=added_demand(axis, variant, case),
    )


def report_of_rows(
    study: InvarianceStudy, plan: Plan, rows: Sequence[InvarianceRow]
) -> InvarianceReport:
    """Returns a report, not judged, of rows that a study measured on calls in memory; its
    request and ways are empty."""
    return InvarianceReport(
        provenance=provenance(plan.system, {}, "numdev.check"),
        request={},
        plan=study.plan_record(plan.formats, (), (), named=True),
        summary=InvarianceSummary(answer=()),
        rows=tuple(rows),
    )


def reproducers(
    report: InvarianceReport, request: InvarianceRequest, directory: Path, **_: object
) -> list[Path]:
    """Writes a script for each finding on a kernel that exceeds a limit; it runs the
    kernel along that axis alone on the request's calls. Returns the scripts' paths, in
    folders below `directory`, which are made. Findings on the model's output have none.
    `report`: judged. Raises OSError where a script cannot be written."""
    rules = Rules.model_validate(report.rules)
    source = request.checkpoint
    if source is not None and Path(source).exists():
        request = request.model_copy(update={"checkpoint": str(Path(source).resolve())})

    def facts(finding: Finding) -> dict[str, object] | None:
        """Returns what the script of a finding needs, by name: the request and the rules
        as JSON, and the folders to import from. None for a finding that has no script."""
        if finding.severity != "exceeded" or finding.kernel == MODEL:
            return None
        axis = finding.rule.split()[0]
        alone: dict[str, object] = {
            "axes": (axis,),
            "require": tuple(name for name in request.require if name == axis),
            "formats": finding.formats,
            "logits": False,
            "kernels": ({"name": finding.kernel, "options": finding.options},),
        }
        asked = request.model_dump() | alone
        folder = folder_of(finding.kernel.partition(":")[0])
        return {
            "folders": [folder] if ":" in finding.kernel and folder else [],
            "request": InvarianceRequest.model_validate(asked).model_dump_json(),
            "rules": json.dumps(rules_as_data(rules)),
        }

    return written(report.findings, directory, "invariance", facts)


def open_cases(request: InvarianceRequest, system: System) -> Source:
    """Returns the source of the request's cases, opened. Raises UsageError for a source
    that is none or does not take the request's options, and what opening it raises."""
    names = ("target", "checkpoint", "cases", "backward", *Reading.model_fields)
    reading = AuditRequest(**{name: getattr(request, name) for name in names})
    return open_source(reading, system)


def prepare_case(case: AttentionCase, *, backward: bool = False) -> AttentionCase:
    """Returns the case as it is compared. It has no grad_out unless gradients are
    compared (`backward`); grad_out is 0 in rows that see no key. A single query that sees
    every key (by causality, window and mask, in the first sequence and head) loses
    causality and window. Raises UsageError for a case that is some rows of a call."""
    if case.positions is not None:
        raise UsageError(f"{case.ref.case}: expected a whole call, got some of its rows")
    if case.q_len == 1 and count_keys_seen(case, (0, 0, 0, 0)) == case.kv_len:
        case = without_positions(case)
    return settled(case if backward else dataclasses.replace(case, grad_out=None))


T = TypeVar("T")


@dataclass
class InvarianceStudy:
    """The kernels and axes of a request, and how kernels are run. It remembers the shapes
    of cases, and results of the present case."""

    kernels: Sequence[Planned]
    axes: Sequence[str]
    system: System
    run: Runner
    watch: Stopwatch
    backward: bool = False
    met: set[tuple[object, ...]] = field(default_factory=set)
    """The shapes of the cases so far. Causes are searched among all tilings in the first
    case of each shape; in others they would be the same."""
    searches: bool = True
    results: dict[tuple[object, ...], tuple[Any, AttentionCase]] = field(
        default_factory=dict
    )
    """References and outputs of the present case and of an axis's bases, by the case's id
    and how it was computed."""

    def plan_record(
        self,
        formats: Sequence[Format],
        ways: Sequence[Way],
        models: Sequence[ModelRow],
        *,
        named: bool,
    ) -> InvariancePlan:
        """Returns the plan as a report records it, with `asked` set. `models`: rows of
        the model's own output, one along each axis that it can be compared along;
        `named`: whether the kernels were asked for by name."""
        kernels = [
            PlannedKernel(
                role="kernel", kernel=p.kernel.name, options=recorded_options(p)
            )
            for p in self.kernels
        ]
        return InvariancePlan(
            kernels=tuple(kernels),
            named=named,
            formats=tuple(fmt.name for fmt in formats),
            axes=tuple(self.axes),
            asked=True,
            backward=self.backward,
            ways=tuple(ways),
            models=tuple(dict.fromkeys(row.axis for row in models)),
        )

    def variants(
        self, case: AttentionCase, fmt: Format
    ) -> Iterator[tuple[str, Variant, Callable[[], Iterator[InvarianceRow]]]]:
        """Yields (axis, variant, function) for every variant of a case along every axis
        of the study. The function, without arguments, yields the variant's rows; call it,
        if at all, before taking the next item. Drops the results of the case before."""
        shape = (fmt.name, case.q.shape, case.k.shape, case.is_causal, case.mask is None)
        self.results, self.searches = {}, shape not in self.met
        self.met.add(shape)
        with fitting_threads(case.q.shape[:3].numel() * case.kv_len):
            for axis in self.axes:
                for variant in VARIANTS[axis](case):
                    yield (
                        axis,
                        variant,
                        partial(self.measure_variant, axis, variant, case, fmt),
                    )
                self.results = {
                    k: x for k, x in self.results.items() if k[:2] == (id(case), PLAIN)
                }

    def measure_model(
        self, source: Source, formats: Sequence[Format], journal: Journal
    ) -> None:
        """Measures the model's own output with each kernel in each format that the
        journal lacks, and appends the rows to it. For a format of which it lacks some,
        the model is loaded in that and in a wider one, once each. Does nothing for a
        source that is no checkpoint, that is read layer by layer, or whose prompt has no
        `input_ids`."""
        if not isinstance(source, CheckpointSource) or source.streamed is not None:
            return
        if "input_ids" not in source.prompt.inputs:
            return
        for fmt in formats:
            dtype = dtype_of(fmt)
            wider = torch.float32 if dtype.itemsize < 4 else torch.float64
            load = cache(lambda dtype: source.load(dtype).eval())
            for planned in self.kernels:
                key = digest(["model", fmt.name, planned.kernel.name, planned.options])
                if journal.visit(key):
                    continue
                run = partial(self.run_kernel, planned, gradients=False)
                of = (source.prompt.inputs, planned, fmt, run, self.axes)
                rows = list(model_rows(load(dtype), partial(load, wider), *of))
                journal.append(key, {"model": rows})

    def measure_variant(
        self, axis: str, variant: Variant, case: AttentionCase, fmt: Format
    ) -> Iterator[InvarianceRow]:
        """Yields the rows of all kernels on one variant. They are skipped, with a reason
        and without numbers, where no such call can be made, where none of the rows that
        it compares sees a key, and where the variant changes the exact answer, computed
        in fp64. A kernel that lacks the variant's options, or declines, has a skipped
        row. One that fails has a failed row; a skipped one where memory ran out, and
        along the axes WATCHED."""
        base, why = variant.base or case, variant.reason
        if not why:
            exact = self._cached(
                (id(base), PLAIN), base, partial(self.exact_answer, base)
            )
            changes = [
                exact_change(call, exact, self.exact_answer(call.case))
                for call in variant.calls
                if call.case is not base
            ]
            change = max(changes, default=0.0)
            if not change <= EXACT:
                why = f"the exact answer changes by {change:.0e} of its terms"
            elif not _compares_a_row(variant, exact):
                why = "no row that it compares sees a key"
        for planned in self.kernels:
            about: OfWay = {
                "role": "kernel", "kernel": planned.kernel.name, "format": fmt.name,
                "options": recorded_options(planned),
                "case": case.ref.case, "layer": case.ref.layer, "phase": case.ref.phase,
                "axis": axis, "variant": variant.name, "part": variant.part,
            }  # fmt: skip
            changed = _with_variant_options(planned, variant)
            excuse: Excuse = "call" if why else "option"
            forms: Forms | Failure = Failure("skipped", why or "has no such option")
            if not why and changed is not None:
                forms = self._run_forms(planned, changed, variant, base, exact, fmt)
            if isinstance(forms, Forms):
                yield from self._compared_rows(about, forms)
                continue
            if not why and changed is not None:
                excuse = _excuse(forms, added_demand(axis, variant, case))
            yield InvarianceRow(
                **about,
                tensor="out",
                tensors=(),
                status="skipped" if excuse else "failed",
                excuse=excuse,
                reason=forms.reason,
            )

    def _run_forms(
        self, planned: Planned, changed: Planned, variant: Variant, base: AttentionCase,
        exact: Reference, fmt: Format,
    ) -> Forms | Failure:  # fmt: skip
        """Returns a kernel's outputs for the base and for the variant's calls; or the
        first Failure, also where an element of `out` for the base is not finite and the
        exact one, rounded, is, in a row that sees a key. `changed`: the kernel with the
        variant's options, for the calls; `exact`: the reference of the base."""
        key = (id(base), variant.base_within, planned.kernel.name, str(planned.options))
        run = partial(self.run_kernel, planned, base, variant.base_within)
        first = self._cached(key, base, run)
        others: list[KernelRun] = []
        if isinstance(first, Failure):
            return first
        finite = round_to(exact.out, fmt).isfinite() & ~exact.empty[..., None]
        if count := int((~first.output.out.double().isfinite() & finite).sum()):
            what = (
                f"returns {count} elements that are NaN or infinite where the "
                "exact result"
            )
            return Failure("failed", f"{what} is not")
        for call in variant.calls:
            other = self.run_kernel(changed, call.case, variant.within, variant.wrap)
            if isinstance(other, Failure):
                return other
            others.append(other)
        return Forms(variant, first, others, exact, fmt)

    def _compared_rows(self, about: OfWay, forms: Forms) -> Iterator[InvarianceRow]:
        """Yields the rows of both forms, one for each tensor. Where `out` or `lse`
        differs along another axis than `repeat` the kernel runs again. One that does not
        repeat itself has rows along `repeat` first; where these explain the difference,
        one row without numbers follows in place of the others."""
        with self.watch("comparing"):
            numbers = dict(compare_forms(forms))
        repeats = None
        tensors = tuple(numbers)
        moved = any(_has_other_bits(numbers.get(name)) for name in STEADY)
        if about["axis"] != "repeat" and moved:
            unsteady = list(self._unrepeated_rows(about, forms))
            repeats = not unsteady
            yield from unsteady
            excesses = [
                0.0 if isinstance(x, str) else x["excess"]
                for n, x in numbers.items()
                if n != "lse"
            ]
            noise = max([1.0, *(row.excess or 0.0 for row in unsteady)])
            if unsteady and max(excesses, default=0.0) <= ALIKE * noise:
                yield InvarianceRow(
                    **about,
                    tensor="out",
                    tensors=(),
                    status="skipped",
                    excuse="repeat",
                    reason=OTHER_ANSWER,
                    repeats=False,
                )
                return
        with_tensor = partial(InvarianceRow, **about, tensors=tensors, repeats=repeats)
        for tensor, of_tensor in numbers.items():
            if isinstance(of_tensor, str):
                yield with_tensor(tensor=tensor, status="skipped", reason=of_tensor)
                continue
            declined = forms.first.declined or None
            row = with_tensor(tensor=tensor, reason=declined, **of_tensor)
            if row.first is not None and tensor not in ("dk", "dv"):
                keys = count_keys_seen(forms.first.case, row.first)
                row = row.model_copy(update={"keys": keys})
            # Where a kernel does not repeat itself, tilings that fit do so by chance.
            if tensor == "out" and row.differ and row.axis != "repeat" and repeats:
                with self.watch("causes"):
                    cause = cause_fields(row, forms, self.system, search=self.searches)
                row = row.model_copy(update=cause)
            yield row

    def _unrepeated_rows(self, of: OfWay, forms: Forms) -> Iterator[InvarianceRow]:
        """Runs the base twice more, since a kernel may alternate, and each other call
        once. Yields rows along `repeat` for the first run that gives other bits of `out`
        or `lse`, or fails, and runs no more: one for each tensor that differs. Bits of
        rows that see no key do not count. Yields nothing where all repeat."""
        name = f"again, {of['axis']} {of['variant']}"
        about: OfWay = {**of, "axis": "repeat", "variant": name}
        # The base twice, since a kernel may alternate.
        for run in (forms.first, forms.first, *forms.others):
            more = self.run_kernel(run.planned, run.case, run.within, run.wrap)
            if isinstance(more, Failure):
                yield InvarianceRow(
                    **about, tensor="out", tensors=(), status="failed", reason=more.reason
                )
                return
            pairs = ((getattr(run.output, n), getattr(more.output, n)) for n in STEADY)
            if all(x is y or same(x, y) for x, y in pairs):
                continue
            variant, exact = single_call_variant(name, run.case), attend(run.case)
            repeated = Forms(variant, run, [more], exact, forms.format)
            changes = {
                n: x
                for n, x in compare_forms(repeated)
                if not isinstance(x, str) and x["differ"]
            }
            for tensor, numbers in changes.items():
                yield InvarianceRow(
                    **about, tensors=tuple(changes), tensor=tensor, **numbers
                )
            if changes:
                return

    def exact_answer(self, case: AttentionCase) -> Reference:
        """Returns the reference of a case in fp64, with gradients where the study
        compares them. Computes it anew."""
        with self.watch("reference"):
            return gradients(case) if self.backward else attend(case)

    def _cached(
        self, key: tuple[object, ...], case: AttentionCase, make: Callable[[], T]
    ) -> T:
        """Returns the result of `make()`, of the first call for this key. The case is
        stored with it, so that its id, which is part of the key, stays its own."""
        if key not in self.results:
            self.results[key] = make(), case
        result: T = self.results[key][0]
        return result

    def run_kernel(
        self, planned: Planned, case: AttentionCase, within: Within = PLAIN,
        wrap: str | None = None, gradients: bool | None = None,
    ) -> KernelRun | Failure:  # fmt: skip
        """Returns a kernel's run on a case, or a Failure, where it is missing here,
        declines or fails. `within` lays the case out in memory; `wrap` (`graph` or
        `compiled`) changes how the kernel runs; `gradients`: None for as the study does.
        With a `wrap` it is a Failure too where the study compares gradients or runs
        kernels in another process. A kernel that declines the backward pass runs forward
        alone, with the reason in `declined`. Raises KeyError for another `wrap`."""
        kernel = planned.kernel
        if missing := kernel.missing(self.system):
            return Failure("skipped", missing)
        if wrap is not None:
            if self.backward or isinstance(self.run, Isolated):
                return Failure(
                    "skipped", "only the forward pass, in this process, is run so"
                )
            kernel = wrap_kernel(kernel, wrap)
        options = options_set(planned.options, kernel)
        both = self.backward if gradients is None else gradients
        with self.watch("kernels"):
            declined = ""
            output = self.run(kernel, case, options, gradients=both, within=within)
            if both and isinstance(output, Failure) and output.status == "skipped":
                declined = output.reason
                output = self.run(kernel, case, options, within=within)
        if isinstance(output, Failure):
            return output
        return KernelRun(planned, case, within, wrap, output, declined)


def added_demand(
    axis: str, variant: Variant, case: AttentionCase
) -> Literal["", "mask", "option", "way"]:
    """Returns what a variant asks of a kernel that the case as it is does not. `way`: a
    way to run that a sound kernel may lack; `option`: an option of the kernel; `mask`: a
    mask, where the case has none. Empty for nothing; the first that holds."""
    if axis in WATCHED:
        return "way"
    if variant.options:
        return "option"
    return "mask" if variant.adds_mask(case) else ""


def _compares_a_row(variant: Variant, exact: Reference) -> bool:
    """Whether a row that the variant compares sees a key: what others hold is a
    convention, and nothing is compared there. `exact`: the reference of its base."""
    seen = (call.in_base.select("out", ~exact.empty) for call in variant.calls)
    return any(rows is not None and bool(rows.any()) for rows in seen)


def _excuse(failure: Failure, adds: str) -> Excuse:
    """Returns the excuse of a kernel that gave no output for a variant: `way`, `mask`,
    `kernel` (it declined) or `memory`. Empty where it failed without one. `adds`: what
    `added_demand` returned."""
    if adds == "way":
        return "way"
    if failure.status == "skipped":
        return "mask" if adds == "mask" else "kernel"
    return "memory" if out_of_memory(failure) else ""


def recorded_options(planned: Planned) -> dict[str, object]:
    """Returns the options of a kernel as its rows record them; empty for a kernel that
    declares none."""
    return dict(planned.options) if planned.kernel.options else {}


def _has_other_bits(numbers: Numbers | str | None) -> bool:
    """Whether a tensor was compared, and has other bits. `numbers`: its numbers, a reason
    why there are none, or None for a tensor that was not compared."""
    return isinstance(numbers, dict) and numbers["differ"] > 0


def out_of_memory(failure: Failure) -> bool:
    """Whether a kernel failed since memory ran out, by the name of the exception. A
    kernel may say so of itself: an axis along which it ran in no call is not excused by
    it."""
    return failure.reason.startswith(("OutOfMemoryError: ", "MemoryError: "))


def _with_variant_options(planned: Planned, variant: Variant) -> Planned | None:
    """Returns the kernel with the options of a variant added to its own, or in place of
    them; itself where the variant has none. None where the kernel lacks the option, or
    does not take this value."""
    if not variant.options:
        return planned
    if variant.options.keys() <= planned.kernel.options.keys():
        with contextlib.suppress(UsageError):
            options = planned.kernel.with_options({**planned.options, **variant.options})
            return dataclasses.replace(planned, options=options)
    return None
