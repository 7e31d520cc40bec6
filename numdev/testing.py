"""`check`: an audit of small cases with a verdict. `check_attention` and `check_function`
raise CheckFailed for any verdict but PASS."""

from __future__ import annotations

import dataclasses
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numdev.argument_checks import checked
from numdev.cases import AttentionCase
from numdev.errors import UsageError, closest
from numdev.gate.findings import joined_words, remark_sentences
from numdev.gate.judgement import Judgement, Test
from numdev.gate.judging import check_system, judgement_of
from numdev.gate.rules import Rules, default_rules_for_checks, read_rules
from numdev.kernels import Kernel, find, kernel_of_function
from numdev.kernels.output import GRADIENTS
from numdev.kernels.plain_functions import parameters_by_role, untested_parameters
from numdev.report import AuditReport, Finding, Outcome, Place
from numdev.report.io import expect_directory, make_directory
from numdev.report.number_text import MOST, ratio, si
from numdev.report.safe_text import plain
from numdev.request_models import AXES
from numdev.studies.audit.finding_reproducers import reproduce
from numdev.studies.audit.isolation import attempt
from numdev.studies.audit.kernel_check import (
    Backward,
    CheckSource,
    Named,
    declining,
    measured,
    untested_shapes,
)
from numdev.studies.audit.plan import Plan, Planned, plan_formats, plan_kernels, recorded
from numdev.studies.audit.reproducer_script import name_of
from numdev.studies.audit.section_timing import Stopwatch
from numdev.system import System
from numdev.yamlfile import validated

if TYPE_CHECKING:
    from pydantic import BaseModel

    from numdev.studies.invariance.report import InvarianceRow
    from numdev.task_check import BuiltSolution

Thresholds = str | Path | Mapping[str, object] | None
Cases = Named | Sequence[Named] | None
FORMATS = ("bfloat16", "float16")
SECONDS = 3.0  # how long a finding is made smaller: somebody waits for the test


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of a check. As a string, its verdict and findings in sentences, filled
    to WIDTH."""

    # `module:function`, where it can be imported as that; else the function's name
    kernel: str
    passed: bool
    report: AuditReport = field(repr=False)  # as `numdev audit` makes it
    judgement: Judgement = field(repr=False)  # as `numdev gate` makes it
    changes: tuple[Finding, ...] = ()  # along the axes of `invariant`
    untried: tuple[str, ...] = ()  # why an axis of `invariant` is not judged
    skipped: tuple[str, ...] = ()  # what was not tested, a sentence for each reason
    # What else is to be known: another format, why there is no script
    notes: tuple[str, ...] = ()
    # Of a failed check: shows the gravest finding by itself
    reproducer: Path | None = None
    words: str = field(repr=False)

    def __str__(self) -> str:
        return self.words

    @property
    def verdict(self) -> str:
        """Returns `PASS`; `FAIL` where a limit is exceeded or an axis of `invariant`
        changes bits; else `NOT JUDGED`, which is no pass."""
        if self.passed:
            return "PASS"
        return (
            "FAIL"
            if self.judgement.outcome is Outcome.EXCEEDED or self.changes
            else "NOT JUDGED"
        )

    @property
    def in_short(self) -> str:
        """Returns the result in one line: of a check that passed what was tested and the
        rules; else the first finding beyond a limit; without one `not measured: ` and
        why. Control characters are escaped."""
        if self.passed:
            return f"{_tested_in_words(self.report)}; rules: {self.judgement.rules}."
        every = (*self.report.findings, *self.changes)
        wrong = [f.sentence for f in every if f.severity == "exceeded"]
        lacking = [
            *_unmeasured_sentences(self.report, self.judgement),
            *self.untried,
            *self.skipped,
        ]
        lacking.append("nothing ran")
        return plain(wrong[0] if wrong else f"not measured: {lacking[0]}")


class CheckFailed(AssertionError):
    """A check did not pass: a limit is exceeded, an axis changes bits, or the kernel
    could not be measured. `result`: the CheckResult."""

    def __init__(self, result: CheckResult) -> None:
        super().__init__(str(result))
        self.result = result


@checked
def check(
    function: Callable[..., object] | Kernel,
    *,
    cases: Cases = None,
    formats: str | Sequence[str] = FORMATS,
    backward: Backward = "auto",
    device: str = "auto",
    seeds: int | Sequence[int] = 0,
    thresholds: Thresholds = None,
    claims: Mapping[str, object] | None = None,
    reproducers: str | Path | None = None,
    invariant: str | Sequence[str] = (),
    reference: Callable[..., object] | None = None,
    inputs: Callable[..., object] | str | Path | None = None,
    shapes: str = "",
) -> CheckResult:
    """Checks whether `function(q, k, v, ...)` computes attention as exactly as its format
    allows; with a `reference`, whether any function computes what the reference computes.

    q, k and v are [batch, heads, length, dim], k and v of kv_heads; it returns the output
    [batch, heads, q_len, v_dim], or a tuple of that and the log-sum-exp [batch, heads,
    q_len]. Its other arguments are read off its parameters' names (docs/kernels.md). A
    case for which it has no parameter, or that it refuses (NotImplementedError,
    `numdev.kernels.Refused`), is skipped, and named in `skipped`. There is no tolerance:
    errors are against the fp64 result of the same rounded inputs.

    `cases`: one or several names from configs/check/default.yaml, input regimes
    (docs/hazards.md), paths of captured tensors or YAML files, mappings of a YAML case's
    keys, or an AttentionCase; None: the default set. `backward`: True: dq, dk and dv must
    be measured; "auto": where autograd can follow. `seeds`: one, or several.
    `thresholds`: a gate file or its content; None: the default rules. `claims`: how it
    rounds, in options of `emulated`; None: as registered, else as FlashAttention-2.
    `reproducers`: a directory for a failed check's script; None: a temporary one.
    `invariant`: axes (docs/invariance.md) along which output and lse keep their bits.

    With a `reference` see `check_function`; leave out `cases`, `claims`, `invariant`, and
    `reproducers`, which has no effect.

    Returns the CheckResult: `passed` is False where a limit is exceeded, a call failed,
    an axis of `invariant` changes bits, or what was asked for could not be measured.
    Raises UsageError for wrong arguments, as a file for `reproducers`, MeasurementError
    for rules made for another system, OSError where a script cannot be written."""
    if reference is not None:
        if cases is not None or claims is not None or invariant:
            raise UsageError("reference: cases, claims and invariant are of attention")
        return _check_beside_reference(
            function, reference, inputs, shapes, formats, backward, seeds, device,
            thresholds,
        )  # fmt: skip
    name, kernel = _kernel_of(function, claims)
    rules, axes = rules_of(thresholds, default_rules_for_checks), _axes_of(invariant)
    plan = _plan_of(kernel, formats, System.probe(device), backward=backward is not False)
    seeds = (seeds,) if isinstance(seeds, int) else tuple(seeds)
    asked = {
        "target": name, "formats": [fmt.name for fmt in plan.formats],
        "backward": backward, "seeds": list(seeds), "rules": rules.name,
        "claims": claims and dict(claims),
    }  # fmt: skip
    source = _source(cases, seeds, plan)
    return _check_result(name, source, plan, rules, asked, axes, reproducers)


def _check_beside_reference(
    function: Callable[..., object] | Kernel,
    reference: Callable[..., object],
    inputs: Callable[..., object] | str | Path | None,
    shapes: str,
    formats: str | Sequence[str],
    backward: Backward,
    seeds: int | Sequence[int],
    device: str,
    thresholds: Thresholds,
) -> CheckResult:
    """Returns the result of a check of any function beside its reference. Where `formats`
    is the tuple FORMATS itself, the default of attention, arguments keep their formats.
    `backward`: "auto" stands for the default of `check_beside`."""
    from numdev.function_check import check_beside

    return check_beside(
        function.function if isinstance(function, Kernel) else function,
        reference=reference,
        inputs=inputs,
        shapes=shapes,
        formats=() if formats is FORMATS else formats,
        backward=None if backward == "auto" else backward,
        seeds=seeds,
        device=device,
        thresholds=thresholds,
    )


def _source(cases: Cases, seeds: Sequence[int], plan: Plan) -> CheckSource:
    """Returns the cases of a check: `cases` (one, several, or None: the default ones),
    drawn with each of the seeds, with upstream gradients where the plan measures
    gradients. Raises UsageError as `CheckSource`."""
    named: Sequence[Named] | None = (
        [cases] if isinstance(cases, str | Path | Mapping | AttentionCase) else cases
    )
    return CheckSource(named, seeds, plan.system.device, gradients=plan.backward)


def _plan_of(
    kernel: Kernel, formats: str | Sequence[str], system: System, *, backward: bool
) -> Plan:
    """Returns a check's plan: the floor, and the kernel, run twice on each case. Raises
    UsageError without a format, for an unknown format and for one that the kernel cannot
    run in."""
    names = (formats,) if isinstance(formats, str) else tuple(formats)
    if not names:
        raise UsageError("formats: expected at least one, got none")
    options = recorded(kernel.with_options({}))
    planned = Planned(role="kernel", kernel=declining(kernel), options=options)
    # The floor's rows tell of the inputs, and what has to be there. How far eager
    # attention errs, the kernel's say; what rounding the inputs costs is no part of a
    # check.
    kernels = [*(p for p in plan_kernels(()) if p.role == "floor"), planned]
    return Plan(
        system=system, formats=plan_formats(names, kernels), kernels=kernels,
        backward=backward, repeats=2,
    )  # fmt: skip


def _check_result(
    name: str,
    source: CheckSource,
    plan: Plan,
    rules: Rules,
    asked: Mapping[str, object],
    axes: Sequence[str],
    reproducers: str | Path | None,
) -> CheckResult:
    """Returns the result of a check: the plan's last kernel on the cases of `source`,
    judged by the rules and along the axes. `asked`: the report's request; `name`: what
    sentences call the kernel; `reproducers`: the directory for a script, None for a
    temporary one. Raises MeasurementError where the rules were made for another system,
    UsageError, before anything is measured, where `reproducers` is no place for a script,
    and UsageError or OSError where a script is to be written and cannot be."""
    if reproducers is not None:
        expect_directory(Path(reproducers), "reproducers")
    planned = plan.kernels[-1]
    # What it declines is said, not judged
    rules = rules.model_copy(update={"skipped": "allow"})
    check_system(plan.system.as_dict(), rules)
    report, judgement = measured(source, plan, rules, asked)
    messages: list[str] = []
    scripts = _write_script(report, source, plan, messages.append, reproducers, name)
    lacking = asked["backward"] is True and not _has_gradients(report)
    if lacking:
        messages.append("backward=True asks for gradients, and none could be measured.")
    left_out = tuple(_not_tested_sentences(report, planned.kernel.adapted))
    changes, untried = (
        _axis_findings(planned, source, plan, axes, rules, _noisy_formats(report))
        if axes
        else ((), [])
    )
    sound = judgement.outcome is Outcome.PASSED and not lacking
    words = _verdict_words(name, report, judgement, sound, changes, untried)
    notes = (
        *(() if scripts else dict.fromkeys(messages)),
        *remark_sentences(report.rows),
    )
    return CheckResult(
        kernel=name, passed=sound and not (changes or untried), report=report,
        judgement=judgement, changes=tuple(changes), untried=tuple(untried),
        skipped=left_out, notes=notes, reproducer=next(iter(scripts), None),
        words=filled_text(words, scripts, (*notes, *left_out)),
    )  # fmt: skip


def _has_gradients(report: AuditReport) -> bool:
    """Whether dq, dk or dv of the kernel was measured in at least one case."""
    ok = (r for r in report.rows if r.role == "kernel" and r.status == "ok")
    return any(row.tensor in GRADIENTS for row in ok)


def _noisy_formats(report: AuditReport) -> set[str]:
    """Returns the names of the formats in which the kernel's output or log-sum-exp
    changed between runs on the same inputs."""
    rows = (r for r in report.rows if r.role == "kernel" and r.tensor not in GRADIENTS)
    return {row.format for row in rows if row.noise}


def _kernel_of(
    function: Callable[..., object] | Kernel, claims: Mapping[str, object] | None
) -> tuple[str, Kernel]:
    """Returns a function's name in a check, and the function as a kernel. `claims`:
    options of `emulated` that say how it rounds; None: its own claims. Raises UsageError
    for what is no function, for one whose parameters numdev cannot serve, and for a claim
    that `emulated` does not take."""
    if isinstance(function, Kernel):
        kernel, name = function, function.name
    elif callable(function):
        name = name_of(function)
        kernel = kernel_of_function(name, function)
    else:
        hint = "numdev.audit takes names of kernels"
        raise UsageError(f"function: expected a function, got {function!r}", hint=hint)
    if claims is not None:
        find("emulated").with_options(claims)  # refuses what is no option
        kernel = dataclasses.replace(kernel, claims=lambda case, output, system: claims)
    return name, kernel


def _axes_of(invariant: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the axes of `invariant`, one or several, in order, with repetitions. Raises
    UsageError for a name that is not in AXES."""
    axes = (invariant,) if isinstance(invariant, str) else tuple(invariant)
    if unknown := [name for name in axes if name not in AXES]:
        what = f"invariant: expected an axis of invariance, got {unknown[0]!r}"
        raise UsageError(what, hint=closest(unknown[0], AXES))
    return axes


def _write_script(
    report: AuditReport,
    source: CheckSource,
    plan: Plan,
    say: Callable[[str], None],
    reproducers: str | Path | None,
    name: str,
) -> list[Path]:
    """Writes a script that shows the gravest finding that has a place and is no note.
    Returns the script's path in a list; an empty list without such a finding, and where
    it does not show again. `say` gets the script's path, or why there is none.
    `reproducers`: the directory, None for a temporary one; it is made in any case where
    there is such a finding. Raises UsageError where it cannot be made, OSError where it
    cannot be written to."""
    # Of a row that sees no key there is no truth that a script could show an error
    # against.
    serious = (f for f in report.findings if f.place and f.metric != "empty_nonfinite")
    wanted = [f for f in serious if f.severity != "note"][:1]
    if not wanted:
        return []
    where = _new_folder(reproducers, name)
    return reproduce(wanted, source, plan, attempt, where, say, count=1, seconds=SECONDS)


def check_function(
    function: Callable[..., object],
    *,
    reference: Callable[..., object],
    inputs: Callable[..., object] | str | Path | None = None,
    shapes: str = "",
    formats: str | Sequence[str] = (),
    backward: bool | None = None,
    seeds: int | Sequence[int] = 0,
    device: str = "auto",
    thresholds: Thresholds = None,
) -> CheckResult:
    """Checks a function beside a reference as `numdev.function_check.check_beside`, with
    these of its arguments, and returns the result where it passed. Raises CheckFailed, an
    AssertionError with the result, for any other verdict; UsageError for wrong arguments;
    MeasurementError where the rules were made for another system."""
    __tracebackhide__ = True
    from numdev.function_check import check_beside

    result = check_beside(
        function,
        reference=reference,
        inputs=inputs,
        shapes=shapes,
        formats=formats,
        backward=backward,
        seeds=seeds,
        device=device,
        thresholds=thresholds,
    )
    if not result.passed:
        raise CheckFailed(result)
    return result


def match(
    reference: Callable[..., object], *, thresholds: Thresholds = None
) -> Callable[[object, object], tuple[bool, str]]:
    """Returns a judge of single outputs beside a reference, as
    `numdev.function_check.match`: (arguments, output) -> (whether the output is right,
    the verdict in one line). The arguments are a tuple, or the only one. Raises
    UsageError for wrong rules."""
    from numdev.function_check import match as judge

    return judge(reference, thresholds=thresholds)


class Evaluator:
    """A judge of outputs beside the reference of a definition.

    Alone, `Evaluator("definition.json")(inputs, outputs)` returns whether the outputs are
    right, and the verdict in one line. As a mixin before an evaluator class of
    flashinfer-bench, `class Exact(Evaluator, DefaultEvaluator)`, it decides correctness
    in place of a tolerance. Raises UsageError for a file that is no definition, and for
    wrong rules."""

    def __init__(self, definition: str | Path, *, thresholds: Thresholds = None) -> None:
        from numdev.task_check import output_judge

        self._judge = output_judge(definition, thresholds)

    def __call__(self, inputs: Sequence[object], outputs: object) -> tuple[bool, str]:
        """Returns whether outputs (one, a tuple in order, or a mapping by name) are what
        the reference computes from the inputs, in order, and the verdict in one line."""
        return self._judge(inputs, outputs)

    @classmethod
    def can_evaluate(cls, definition: object) -> bool:
        """Whether flashinfer-bench may use this class for a definition. False where
        another evaluator in its registry takes the definition (sampling, low-bit
        formats): it allows only one. True where the registry is not imported."""
        registry = sys.modules.get("flashinfer_bench.bench.evaluators.registry")
        others = getattr(registry, "_EVALUATORS", ())
        theirs = [x for x in others if not issubclass(x, Evaluator)]
        return not any(x.can_evaluate(definition) for x in theirs)

    @classmethod
    def check_correctness(
        cls,
        definition: BaseModel,
        sol_runnable: BuiltSolution,
        inputs: Sequence[Sequence[object]],
        ref_outputs: object,
        cfg: object,
        log_path: str,
        device: str,
    ) -> tuple[object, object]:
        """Returns correctness and evaluation, as flashinfer-bench asks of an evaluator.
        The evaluation is None where the solution passes on all inputs; else it is of the
        first input on which it raises (then correctness is None) or is not what the
        reference computes. What cannot be judged does not pass."""
        from numdev.task_check import bench_correctness

        return bench_correctness(definition, sol_runnable, inputs, log_path, device)


def check_attention(
    function: Callable[..., object] | Kernel, **options: Any
) -> CheckResult:
    """Checks a function as `check`, whose arguments `options` are, and returns the result
    where it passed. Raises CheckFailed, an AssertionError with the result, for any other
    verdict, and what `check` raises."""
    __tracebackhide__ = True
    result = check(function, **options)
    if not result.passed:
        raise CheckFailed(result)
    return result


def _axis_findings(
    planned: Planned,
    source: CheckSource,
    plan: Plan,
    names: Sequence[str],
    rules: Rules,
    noisy: Collection[str],
) -> tuple[Sequence[Finding], list[str]]:
    """Returns findings on axes along which a kernel changes bits, on the cases that it
    takes; and a sentence for each test of an axis, in a format, that could not be judged,
    as all where the kernel does not repeat itself; or one on the outcome where it is no
    pass and nothing else says why. The axes are `names`. A change along one axis that
    follows from a graver one along another has no finding. `noisy`: formats in which the
    kernel is known not to repeat itself."""
    from numdev.studies.invariance.study import (
        SECTIONS,
        InvarianceStudy,
        prepare_case,
        report_of_rows,
    )
    from numdev.studies.invariance.verdict import findings

    study = InvarianceStudy(
        [planned], names, plan.system, attempt, Stopwatch(plan.system.device, SECTIONS)
    )
    rows = [
        row
        for located in source
        for fmt in plan.formats
        for _, _, rows_of in study.variants(
            prepare_case(located.load().rounded_to(fmt)), fmt
        )
        for row in rows_of()
    ]
    report = report_of_rows(study, plan, rows)
    limits = rules.limits_of("invariance").model_dump(mode="json") | {
        "bitwise": list(names)
    }
    strict = rules.model_copy(update={"limits": {**rules.limits, "invariance": limits}})
    judgement = judgement_of(report, strict)
    whys = [
        (*t.reasons, f"{t.rule} is not judged")[0] for t in _unjudged_tests(judgement)
    ]
    wrong = [f for f in findings(judgement, report)[0] if f.severity == "exceeded"]
    if judgement.outcome is not Outcome.PASSED and not (whys or wrong):
        whys = [f"the axes are {judgement.outcome.word}"]  # silence is no pass
    untried = [f"{planned.kernel.name}: {why}." for why in whys]
    untried += _unrepeated_sentences(report.rows, names, wrong, noisy)
    return wrong, untried


def _unrepeated_sentences(
    rows: Sequence[InvarianceRow],
    names: Sequence[str],
    wrong: Sequence[Finding],
    noisy: Collection[str],
) -> Iterator[str]:
    """Yields a sentence for each axis of `names`, in a format in which the
    kernel does not repeat itself: what is bit-identical along it may be so by luck. None
    for an axis along which the kernel ran in no call, or that has a finding among
    `wrong`. `rows`: those of the kernel; `noisy`: formats in which it is known not to
    repeat itself, beside those that the rows show."""
    from numdev.studies.invariance.study import OTHER_ANSWER

    unsteady = {row.format for row in rows if row.repeats is False} | {*noisy}
    unsteady |= {row.format for row in rows if row.axis == "repeat" and row.differ}
    accused = {(f.rule.partition(" ")[0], fmt) for f in wrong for fmt in f.formats}
    ran = {(r.axis, r.format): r.kernel for r in rows if r.status == "ok"}
    for (axis, fmt), kernel in ran.items():
        is_judged = fmt not in unsteady or (axis, fmt) in accused
        if axis in names and not is_judged:
            yield f"{kernel}: {axis} ({fmt}) is not judged: {OTHER_ANSWER}."


def rules_of(thresholds: Thresholds, default: Callable[[], Rules]) -> Rules:
    """Returns the rules of a gate file or of its content; None: those of `default`.
    Raises UsageError for wrong rules, and names the key if one is at fault; also for a
    file that cannot be read."""
    if thresholds is None:
        return default()
    if isinstance(thresholds, Mapping):
        return validated({"name": "given", **thresholds}, Rules, "thresholds")
    return read_rules(Path(thresholds))


def _new_folder(parent: str | Path | None, name: str) -> Path:
    """Makes a new folder for this check, and returns its path: in `parent`, which is made
    too, named `name` (with `-` for odd characters) and random letters; without a parent
    among temporary files, `numdev-check` and random letters. Raises UsageError where
    `parent` cannot be made, OSError where the folder cannot."""
    if parent is not None:
        make_directory(Path(parent))
    prefix = re.sub(r"[^\w.-]+", "-", name if parent else "numdev-check")
    return Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=parent))


# --- in words, for pytest, which indents them in 80 columns ---------------------------

WIDTH = 72
LACKS = "the function takes no "  # `numdev.kernels.plain_functions`
LISTED = 4  # findings
CLAIM = (
    "It was held against the roundings of FlashAttention-2 (P, dS and the results), "
    "and against "
    "other known ways where it errs more. One that rounds elsewhere by design says "
    "so in options "
    'of `emulated`: claims={"preset": "eager"}.'
)
DESIGNED = 10.0  # times what `fa2` predicts: no sound way of rounding errs so much


def _verdict_words(
    name: str,
    report: AuditReport,
    judgement: Judgement,
    sound: bool,
    changes: Sequence[Finding],
    untried: Sequence[str],
) -> list[str]:
    """Returns the paragraphs that say how a check ended: that it passed, or what is
    wrong. `sound`: whether the rules were passed; `changes`: findings along axes;
    `untried`: sentences on axes that could not be judged."""
    if not sound:
        words = _failure_paragraphs(name, report, judgement)
    elif changes or untried:
        words = []
    else:
        words = [
            f"{name} passes the rules {judgement.rules}: {_tested_in_words(report)}."
        ]
    return [*words, *(f.whole for f in changes), *untried]


def filled_text(
    words: Sequence[str], scripts: Sequence[Path], remarks: Sequence[str]
) -> str:
    """Returns the paragraphs of a check as text, filled to WIDTH, with an empty line
    between two: its verdict (`words`), how to run each script, then `remarks`. Characters
    of words and remarks that are not printable are escaped."""
    filled = [
        textwrap.fill(plain(x), WIDTH, break_on_hyphens=False) for x in (*words, *remarks)
    ]
    shows = [f"To reproduce:\n  python {script}" for script in scripts]
    return "\n\n".join([*filled[: len(words)], *shows, *filled[len(words) :]])


def _failure_paragraphs(
    kernel: str, report: AuditReport, judgement: Judgement
) -> list[str]:
    """Returns paragraphs on why a kernel did not pass. With findings beyond a limit these
    are the rules that it fails, then up to LISTED findings, the gravest first, with the
    rms error beside floor and baseline where that is known, then how many more there are,
    and CLAIM where its design may be the cause. Else they say that it was not measured,
    and why."""
    wrong = [f for f in report.findings if f.severity == "exceeded"]
    if not wrong:
        title = (
            f"{kernel} was not measured as the rules {judgement.rules} need it: no pass."
        )
        return [title, *_unmeasured_sentences(report, judgement)[:LISTED]]
    rules = joined_words(dict.fromkeys(f"`{f.rule}`" for f in wrong))
    text = [f"{kernel} fails {rules} (rules {judgement.rules})"]
    for finding in wrong[:LISTED]:
        at = (finding.formats[0], finding.tensor, finding.place)
        row = next(
            (r for r in report.rows if (r.format, r.tensor, Place.of(r)) == at), None
        )
        beside = ""
        if (
            row is not None
            and row.rms is not None
            and "nonfinite" not in (finding.metric or "")
        ):
            parts = (
                (row.floor_ratio, "the floor's"),
                (row.baseline_ratio, "eager attention's"),
            )
            times = joined_words(
                f"{ratio(x)}× {whose}" for x, whose in parts if x and x <= MOST
            )
            beside = f" The rms error there is {si(row.rms)}{times and f', {times}'}."
        text.append(f"{finding.whole}{beside}")
    text += [f"And {len(wrong) - LISTED} more."] * (len(wrong) > LISTED)
    return text + [CLAIM] * (
        report.request.get("claims") is None and _may_be_design(wrong)
    )


def _may_be_design(wrong: Sequence[Finding]) -> bool:
    """Whether a rounding model that was not declared could cause all of the findings
    `wrong`: none names a cause, and each is of a whole error up to DESIGNED times the
    predicted one, or of a single row."""
    return all(
        f.metric in ("expected_ratio", "worst_row")
        and f.cause is None
        and (f.metric == "worst_row" or (f.observed or 0.0) <= DESIGNED)
        for f in wrong
    )


def _tested_in_words(report: AuditReport) -> str:
    """Returns the tensors, number of cases (one for each seed) and formats in which the
    kernel was measured: `out, dq, dk, dv in 18 cases, bfloat16`."""
    ok = [r for r in report.rows if r.role == "kernel" and r.status == "ok"]
    count = len({(r.case, r.seed) for r in ok})
    tensors, ran = (
        ", ".join(dict.fromkeys(getattr(r, n) for r in ok)) for n in ("tensor", "format")
    )
    return f"{tensors} in {count} case{'s' * (count != 1)}, {ran}"


def _unjudged_tests(judgement: Judgement) -> Iterator[Test]:
    """Yields the tests of a kernel that decide nothing, without those on which calls
    ran."""
    for test in judgement.tests:
        if test.decides_nothing and test.kernel is not None and not test.runs:
            yield test


def _unmeasured_sentences(report: AuditReport, judgement: Judgement) -> list[str]:
    """Returns sentences on what had to be judged and could not be: calls of the kernel,
    then rules with up to two reasons. Empty where all was judged."""
    return [
        *(f.whole for f in report.findings if f.severity == "unmeasured"),
        *(
            (
                f"{t.rule} of {t.tensor} ({t.format}) could not be judged: "
                f"{'; '.join(t.reasons[:2])}."
            )
            for t in _unjudged_tests(judgement)
        ),
    ]


def _not_tested_sentences(
    report: AuditReport, function: Callable[..., object] | None
) -> Iterator[str]:
    """Yields sentences on what was not tested: options and masks that the function has no
    parameter for; a sentence for each other reason for which calls were skipped;
    parameters of a plain `function` that no call that ran sets; shapes that none has;
    gradients of sinks and additive masks, where others were measured; and, where the
    function does not take grouped heads, the cases in which k and v were repeated.
    `function`: None for a kernel that is no plain function."""
    rows = [r for r in report.rows if r.role == "kernel"]
    every = len({(r.case, r.seed, r.format) for r in rows})
    reasons: dict[tuple[bool, str], list[str]] = {}
    for row in rows:
        if row.status == "skipped":
            reasons.setdefault((row.tensor == "dq", row.reason or ""), []).append(
                row.case
            )
    lacking = [
        why.removeprefix(LACKS).split(":")[0] for _, why in reasons if LACKS in why
    ]
    if lacking:
        names = ", ".join(dict.fromkeys(", ".join(lacking).split(", ")))
        yield f"Not tested, since the function has no parameter for it: {names}."
    for (backward, why), cases in reasons.items():
        if LACKS in why:
            continue
        what = "backward passes" if backward else "calls"
        which = "" if len(cases) == every else f" ({', '.join(dict.fromkeys(cases))})"
        yield f"Skipped: {len(cases)} of {every} {what}{which}: {why.rstrip('.')}."
    ran = {r.case for r in rows if r.status == "ok"}
    called = [case for case in report.attention_calls if case.case in ran]
    if function and (unset := untested_parameters(function, called)):
        yield f"Not tested, since no call that ran sets it: {', '.join(unset)}."
    if called and (shapes := untested_shapes(called)):
        yield f"Not tested, since no call that ran has it: {', '.join(shapes)}."
    trained = {r.case for r in rows if r.status == "ok" and r.tensor in GRADIENTS}
    of_more = [
        c for c in called if c.case in trained and (c.sinks or c.mask == "additive")
    ]
    whose = ["sinks"] * any(c.sinks for c in of_more)
    whose += ["additive masks"] * any(c.mask == "additive" for c in of_more)
    if whose:
        which = ", ".join(dict.fromkeys(c.case for c in of_more))
        yield f"Not tested: the gradients of {' and of '.join(whose)} ({which})."
    fewer = dict.fromkeys(case.case for case in called if case.kv_heads < case.heads)
    if fewer and function and "gqa" not in parameters_by_role(function):
        yield (
            f"Not tested: fewer kv heads than query heads ({', '.join(fewer)}). k "
            "and v were "
            "repeated, since no parameter is named enable_gqa."
        )
