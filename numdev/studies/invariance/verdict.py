"""Judges a report of invariance from its rows: tests, findings, what passed, the answer.
Needs no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from numdev.gate.findings import exceeded_finding, joined_words, run_findings
from numdev.gate.judgement import MODEL, RATIOS, Judgement, Statement, Test
from numdev.gate.row_tests import run_test
from numdev.gate.rules import AtMost, Rules, Tensors, default_rules
from numdev.grouping import grouped
from numdev.report import Finding, PlannedKernel, Standing, Tensor, Who, kernel_fields
from numdev.report.number_text import label, multiple, ratio, si, three
from numdev.request_models import AXES, Axes
from numdev.studies.invariance.answers import (
    AxisAnswer,
    answers_clause,
    answers_of_rows,
    details_clause,
    largest_change,
    model_answers,
)
from numdev.studies.invariance.report import (
    InvarianceReport,
    InvarianceRow,
    InvarianceSummary,
    ModelRow,
)
from numdev.tensor_properties import tensor_spec
from numdev.yamlfile import Strict

# By axis the axes along which a dependence on it shows too; these are then not accused
BRINGS: Mapping[str, Sequence[str]] = {
    "unwritten": tuple(AXES),
    "repeat": tuple(AXES),
    "beyond": ("paged", "strides"),
    "neighbours": (
        *("batch", "lengths", "order", "hidden", "heads", "longer"),
        *("padding", "rows", "chunks", "decode", "mask"),
    ),
    "hidden": ("padding", "lengths", "longer", "rows", "chunks", "decode", "mask"),
    "mask": ("padding", "lengths"),
    "rows": ("decode", "chunks"),
}
# A dependence follows from another, or is noise, up to this many times its excess
ALIKE = 2
WHOLE = 0.995  # a share that is written as 100 %
UNTRIED = ("call", "option", "mask")  # excuses of a kernel that did not refuse a call
WRONG = {  # by rule, the gravest first: how the sentence on an axis goes on
    "finite": "{row.nonfinite:,} of {row.elements:,} elements of {tensor} are NaN or "
    "infinite in one form alone",
    "rounding": "{tensor} changes by {number}× what roundings explain (limit {limit}×)",
    "row": "a row of {tensor} changes by {number}× what roundings explain (limit "
    "{limit}×)",
    "log-sum-exp": "{tensor} changes by {number} × (1 + |log-sum-exp|) (limit {limit})",
    "bitwise": "{tensor} is not bit-identical: {row.differ:,} of {row.elements:,} "
    "elements differ, by up to {ulps} ulp",
    "floor": "{tensor} changes by {number}× the floor's error (limit {limit}×)",
}


class InvarianceLimits(Strict):
    """The limits of `numdev invariance`; configs/gate/default.yaml says what each key
    means."""

    bitwise: Axes
    bitwise_tensors: Tensors
    within_floor: Axes
    beyond_roundings: AtMost
    beyond_roundings_of_a_row: dict[Tensor, AtMost]
    log_sum_exp: AtMost
    model_beyond_roundings: AtMost
    may_turn_nan: Axes


class JudgedNumber(NamedTuple):
    """A number of a row beside its limit, by a rule that is a key of WRONG."""

    row: InvarianceRow
    rule: str
    metric: str
    observed: float
    limit: float

    @property
    def fails(self) -> bool:
        """Whether the number is beyond its limit; NaN is."""
        return not self.observed <= self.limit


def gravest_number(numbers: Iterable[JudgedNumber]) -> JudgedNumber:
    """Returns the number with the gravest rule, in the order of WRONG; of equal ones the
    largest, then that of the row with the largest excess. `numbers`: at least one."""
    rules = list(WRONG)
    return max(
        numbers, key=lambda x: (-rules.index(x.rule), x.observed, x.row.excess or 0.0)
    )


def judged_numbers(
    row: InvarianceRow, limits: InvarianceLimits, required: Axes = ()
) -> Iterator[JudgedNumber]:
    """Yields the numbers of a measured row, one for each rule that judges it. A number
    that is None counts as infinite, beyond every limit; only `floor_ratio` counts as 0
    where the rms difference is 0. `required`: axes along which every tensor must keep its
    bits, also where the rules do not say so."""

    def number(name: str) -> float:
        """Returns the number `name` of the row; infinity for None."""
        value = getattr(row, name)
        return math.inf if value is None else float(value)

    if row.axis not in limits.may_turn_nan:
        yield JudgedNumber(row, "finite", "nonfinite", float(row.nonfinite), 0)
        rule, limit = "rounding", limits.beyond_roundings
        if row.tensor == "lse":
            rule, limit = "log-sum-exp", limits.log_sum_exp
        yield JudgedNumber(row, rule, "excess", number("excess"), limit)
        if limit_of_a_row := limits.beyond_roundings_of_a_row.get(row.tensor):
            yield JudgedNumber(
                row, "row", "excess_of_a_row", number("excess_of_a_row"), limit_of_a_row
            )
    by_rule = row.axis in limits.bitwise and row.tensor in limits.bitwise_tensors
    if by_rule or row.axis in required:
        yield JudgedNumber(row, "bitwise", "differ", float(row.differ), 0)
    if row.axis in limits.within_floor and row.tensor != "lse":
        # Where the exact result needs no rounding, nothing may differ.
        exact = row.floor_ratio is None and not row.difference
        yield JudgedNumber(
            row, "floor", "floor_ratio", 0.0 if exact else number("floor_ratio"), 1
        )


def tests(report: InvarianceReport, rules: Rules) -> Iterator[Test]:
    """Yields the tests of a report. For each planned kernel in each format: how often it
    ran, and each rule on each tensor along each axis, or why there is none. Axes are
    those of the plan, those that the request or a user's rules require, and those that
    have rows. Last, each row of the model's own output, but for kernels that this machine
    lacks and nobody named."""
    limits: InvarianceLimits = rules.limits_of("invariance")
    plan = report.plan
    rows = grouped(report.rows, lambda r: (label(r), r.format))
    models = grouped(report.models, lambda m: (label(m), m.format))
    # Rules that somebody wrote are for axes that the report has to have.
    ours = "invariance" not in rules.limits
    required = tuple(report.request.get("require") or ())
    needed = required if ours else (*required, *limits.bitwise, *limits.within_floor)
    every = list(itertools.product(plan.kernels, plan.formats))
    for kernel, fmt in every:
        of_kernel = rows.get((label(kernel), fmt), [])
        who = kernel_fields(fmt, kernel.kernel, kernel.options)
        yield from _run_tests(report, who, of_kernel, rules)
        absent = _is_absent(report, of_kernel)
        # A form that does not repeat itself has rows along `repeat`, asked for or not.
        axes = (*plan.axes, *needed, *(row.axis for row in of_kernel))
        for axis in dict.fromkeys(axes):
            along = [row for row in of_kernel if row.axis == axis]
            if any(row.status == "ok" for row in along):
                yield from _axis_tests(axis, who, along, limits, required)
            else:
                keeps = axis in limits.bitwise and plan.named and rules.skipped != "allow"
                asked = (plan.asked or axis in needed) and not absent
                yield _untried_test(axis, who, along, keeps_bits=keeps, asked=asked)
    for kernel, fmt in every:
        key = (label(kernel), fmt)
        if _is_absent(report, rows.get(key, ())):
            continue
        yield from _model_tests(models.get(key, ()), kernel, limits)


def _is_absent(report: InvarianceReport, rows: Sequence[InvarianceRow]) -> bool:
    """Whether a kernel, whose rows these are, is a backend that this machine lacks:
    nobody named it, all its rows are skipped, and it declined a call in at least one.
    False too where one was skipped for memory, a way to run, or bits that do not
    repeat."""
    excuses = {row.excuse for row in rows if row.status == "skipped"}
    declined = "kernel" in excuses and excuses <= {*UNTRIED, "kernel"}
    return (
        not report.plan.named
        and declined
        and all(row.status == "skipped" for row in rows)
    )


def _run_tests(
    report: InvarianceReport,
    who: Who,
    rows: Sequence[InvarianceRow],
    rules: Rules,
) -> Iterator[Test]:
    """Yields the tests of how often a kernel ran: forward, and backward where gradients
    were asked for. Calls that it may skip (UNTRIED) do not count. A way to run that a
    sound kernel may lack does count along an axis where the kernel ran in another
    variant."""
    ran = {row.axis for row in rows if row.status == "ok"}
    tried = []
    for row in rows:
        excused = UNTRIED if row.axis in ran else (*UNTRIED, "way")
        if row.tensor == "out" and row.excuse not in excused:
            tried.append(row)
    passes: dict[str, list[tuple[str, str]]] = {"out": [_run_state(row) for row in tried]}
    if report.plan.backward:
        passes["dq"] = [
            ("ok", "") if "dq" in row.tensors else ("skipped", row.reason or "")
            for row in tried
            if row.status == "ok"
        ]
    for tensor, states in passes.items():
        asked = report.plan.named or tensor == "dq"
        yield run_test(who, rules, tensor, states, asked=asked)


def _run_state(row: InvarianceRow) -> tuple[str, str]:
    """Returns whether a kernel ran, `ok`, `skipped` or `failed`, and why not (empty where
    it ran). A kernel that does not repeat itself ran."""
    why = row.reason or ""
    if row.status == "failed":
        why = f"along {row.axis} ({row.case}: {row.variant}): {why}"
    return "ok" if row.excuse == "repeat" else row.status, why


def _untried_test(
    axis: str, who: Who, rows: Sequence[InvarianceRow], *, keeps_bits: bool,
    asked: bool,
) -> Test:  # fmt: skip
    """Returns the test of an axis along which a kernel ran in no call: missing, or not
    applicable. It is missing where the axis was `asked` for, or the kernel failed, or
    memory ran out. It is missing too where the rules say that the kernel `keeps_bits`
    along it, unless all rows say that no such call can be made, or that it declines a
    mask. `rows`: those along the axis, which may be empty."""
    reasons = dict.fromkeys(row.reason or "" for row in rows) or ("no call was made so",)
    possible = any(row.excuse not in ("call", "mask") for row in rows)
    failed = any(row.excuse in ("", "memory") for row in rows)
    missing = asked or failed or (keeps_bits and possible)
    return Test(
        **who,
        rule=axis,
        standing=Standing.MISSING if missing else Standing.NOT_APPLICABLE,
        unjudged=len(rows),
        reasons=tuple(f"{axis} is not judged: {why}" for why in reasons),
    )


def _axis_tests(
    axis: str,
    who: Who,
    rows: Sequence[InvarianceRow],
    limits: InvarianceLimits,
    required: Axes,
) -> Iterator[Test]:
    """Yields a test for each rule on each tensor along one axis. `rows`: those of a
    kernel, of which those with numbers are judged; `required`: axes along which all bits
    must stay."""
    ok = [row for row in rows if row.status == "ok"]
    numbers = [number for row in ok for number in judged_numbers(row, limits, required)]
    by_rule = grouped(numbers, lambda x: (x.rule, x.row.tensor))
    for (rule, tensor), of_rule in by_rule.items():
        worst = gravest_number(of_rule)
        failing = tuple(
            sorted((x for x in of_rule if x.fails), key=lambda x: -x.observed)
        )
        yield Test(
            **who,
            rule=f"{axis} {rule}",
            tensor=tensor,
            metric=worst.metric,
            standing=Standing.EXCEEDED if failing else Standing.HELD,
            observed=worst.observed
            if math.isfinite(worst.observed)
            else str(worst.observed),
            bound=worst.limit,
            limit=f"at most {three(worst.limit)}",
            judged=len(of_rule),
            offending=len(failing),
            beyond=failing,
        )


def _model_tests(
    rows: Iterable[ModelRow], kernel: PlannedKernel, limits: InvarianceLimits
) -> Iterator[Test]:
    """Yields a test for each row of the model's own output with a kernel: its difference
    over what roundings explain, which is the error of the better form. The test is
    missing for a row without numbers."""
    for row in rows:
        name = label(kernel)
        test = partial(
            Test, kernel=MODEL, format=row.format, rule=f"{row.axis} with {name}"
        )
        number = row.times_explained
        if number is None:
            yield test(
                standing=Standing.MISSING,
                reasons=(row.reason or "",),
                unjudged=1,
            )
            continue
        limit = limits.model_beyond_roundings
        exceeds = number > limit
        yield test(
            tensor="out", metric="difference", observed=number, bound=limit,
            standing=Standing.EXCEEDED if exceeds else Standing.HELD,
            limit=f"at most {three(limit)}", judged=1, offending=int(exceeds),
            beyond=(row,) if exceeds else (),
        )  # fmt: skip


def findings(
    judgement: Judgement, report: InvarianceReport
) -> tuple[Sequence[Finding], Sequence[str]]:
    """Returns the findings, and sentences on what was judged. There is a finding for each
    exceeded axis of the model's output with a kernel, and for each dependence of a kernel
    that does not follow from a graver one. There is one for each kernel that failed, or
    had to run and did not, unless it has one already."""
    wrong: list[Finding] = []
    beyond = [test for test in judgement.tests if test.beyond]
    for of_kernel in grouped(beyond, lambda t: (label(t), t.format)).values():
        if of_kernel[0].kernel == MODEL:
            wrong += [
                exceeded_finding(test, _output_statement(test)) for test in of_kernel
            ]
        else:
            wrong += _dependence_findings(of_kernel, report.rows)
    accused = {(f.kernel, str(f.options), fmt) for f in wrong for fmt in f.formats}
    wrong += [
        f
        for f in run_findings(judgement.tests)
        if f.severity != "note"  # what a kernel declines is said axis by axis
        and not all((f.kernel, str(f.options), fmt) in accused for fmt in f.formats)
    ]
    return wrong, tuple(_judged_sentences(judgement, report))


def _dependence_findings(
    tests: Sequence[Test], rows: Sequence[InvarianceRow]
) -> Iterator[Finding]:
    """Yields one finding for each axis on which one kernel depends, by its gravest
    number, unless the dependence follows from another axis. The one farthest beyond its
    limit comes first, and says along which axes the kernel is bit-identical. `tests`: the
    exceeded ones of one kernel in one format, at least one; `rows`: all of the report."""
    by_axis = grouped(tests, lambda test: test.beyond[0].row.axis)
    gravest = {
        axis: gravest_number(number for test in of_axis for number in test.beyond)
        for axis, of_axis in by_axis.items()
    }
    follows = _consequences(gravest)
    leading: list[tuple[Test, JudgedNumber]] = []
    for axis, worst in gravest.items():
        if axis not in follows:
            leading += [(test, worst) for test in by_axis[axis] if worst in test.beyond]
    who = (label(tests[0]), tests[0].format)
    of_kernel = [row for row in rows if (label(row), row.format) == who]
    answers = answers_clause(answers_of_rows(of_kernel, ())).text
    leading.sort(key=lambda pair: -pair[0].nearness)
    for number, (test, worst) in enumerate(leading):
        also = [gravest[a].row for a, cause in follows.items() if cause == worst.row.axis]
        details = _dependence_details(worst, also)
        if not number:
            details += f" In all, {answers}."
        yield exceeded_finding(test, Statement(_dependence_sentence(worst), details))


def _output_statement(test: Test) -> Statement:
    """Returns what to say of the model's own output where it depends on an axis: the
    number that was judged; in the details with which kernel, and by how much of its size
    it changes. `test`: an exceeded one of the model."""
    row: ModelRow = test.beyond[0]
    ratio = test.observed if isinstance(test.observed, float) else None
    return Statement(
        f"output fails along {row.axis}: it changes by {multiple(ratio, test.bound)}× "
        f"what roundings explain (limit {three(test.bound)}×)",
        f"The model's output ({row.format}, with {label(row)}) "
        f"depends on {AXES[row.axis]}, by {si(row.difference)} of its size.",
    )


def _consequences(gravest: Mapping[str, JudgedNumber]) -> dict[str, str]:
    """Returns, for each axis whose failure follows from that of another axis, the other
    axis. It follows by BRINGS, from an axis that does not follow itself: always where
    that one fails by `finite`, else where it does not itself and its excess is at most
    ALIKE times the other's, taken as at least 1. Of further axes in which the call as it
    is errs, all follow from the first. `gravest`: the gravest number of a kernel by
    axis."""
    follows: dict[str, str] = {}
    for first in (axis for axis in BRINGS if axis in gravest):
        cause = gravest[first]
        for axis in BRINGS[first]:
            if axis in (first, *follows) or axis not in gravest or first in follows:
                continue
            other = gravest[axis]
            alike = (other.row.excess or 0.0) <= ALIKE * max(cause.row.excess or 0.0, 1.0)
            # Where one call does not repeat another, nothing else is known of it.
            if cause.rule == "finite" or (other.rule != "finite" and alike):
                follows[axis] = first
    # Where it is the call itself that errs, one finding says so.
    wrong = [a for a, h in gravest.items() if a not in follows and h.row.base_errs]
    return follows | dict.fromkeys(wrong[1:], *wrong[:1]) if wrong else follows


def _dependence_sentence(worst: JudgedNumber) -> str:
    """Returns what is wrong along an axis, as a predicate that follows the kernel's name:
    `fails along batch: the output changes by 12× what roundings explain (limit 2×)`, or
    along `repeat` `does not repeat itself: ...`."""
    row = worst.row
    write = multiple if worst.metric in RATIOS else three
    wrong = WRONG[worst.rule].format(
        row=row, tensor=tensor_spec(row.tensor).in_words, ulps=three(row.ulps),
        number=write(worst.observed, worst.limit), limit=three(worst.limit),
    )  # fmt: skip
    if row.axis == "repeat":
        return f"does not repeat itself: {wrong}"
    return f"fails along {row.axis}: {wrong}"


def _dependence_details(worst: JudgedNumber, also: Sequence[InvarianceRow]) -> str:
    """Returns sentences on what a kernel depends on, and the call and form that show it.
    Then the error of either form, for the rule `rounding` alone; where the difference
    begins, its cause, and other axes, each left out where unknown. `also`: the rows of
    axes along which it differs for the same cause."""
    row = worst.row
    what = f"It depends on {AXES[row.axis]}"
    if row.axis == "repeat":
        what = "The same call gives another answer"
    texts = [f"{what}: {row.case}, {other_form_in_words(row)}."]
    if worst.rule == "rounding":
        texts.append(
            f"The call as it is errs by {three(row.error_base)}× the floor's error, the "
            f"other form by {three(row.error_variant)}×."
        )
    if row.first is not None:
        sequence, head, place, _ = row.first
        part = "key" if row.tensor in ("dk", "dv") else "row"
        begins = f"First at sequence {sequence} head {head} {part} {place}"
        if row.keys:
            begins += f", which sees {row.keys} key{'s' * (row.keys != 1)}"
        texts.append(f"{begins}.")
    if row.cause is not None:
        cause = str(row.cause)
        texts.append(f"{cause[0].upper()}{cause[1:]}.")
    if also:
        changes = joined_words(map(_axis_and_change, also))
        texts.append(f"It differs along {changes} too.")
    return " ".join(texts)


def _axis_and_change(row: InvarianceRow) -> str:
    """Returns an axis, and in brackets how far the row changes along it: `batch
    (0.012×)`, a multiple of the floor's error (a dash where it is unknown), `batch
    (NaN)`, or `batch (the log-sum-exp)`."""
    if row.nonfinite:
        return f"{row.axis} (NaN)"
    if row.tensor == "lse":
        return f"{row.axis} (the log-sum-exp)"
    return f"{row.axis} ({ratio(row.floor_ratio)}×)"


def _judged_sentences(judgement: Judgement, report: InvarianceReport) -> Iterator[str]:
    """Yields a sentence on the limits by which was judged, where there is one on
    rounding; of several the largest. Then for each kernel in a format a sentence on the
    axes that have rows, but to which no limit was applicable, with the reasons."""
    bitwise = {t.rule for t in judgement.tests if t.judged}
    axes = joined_words(axis for axis in report.plan.axes if f"{axis} bitwise" in bitwise)
    limits = {
        t.bound for t in judgement.tests if t.rule.endswith(" rounding") and t.bound
    }
    if limits:
        yield (
            f"Limits: {axes and f'bit-identical along {axes}; '}differences at most "
            f"{three(max(limits))}× what roundings explain. `--require AXIS` makes any "
            "difference along it fail."
        )
    lacking = [
        t for t in judgement.tests if t.standing is Standing.NOT_APPLICABLE and t.unjudged
    ]
    by_kernel = grouped(
        (t for t in lacking if not t.runs), lambda t: (label(t), t.format)
    )
    for (name, fmt), of_kernel in by_kernel.items():
        reasons = grouped(of_kernel, lambda t: t.reasons[0].partition(": ")[2])
        parts = (
            f"{joined_words(t.rule for t in of)} ({why})" for why, of in reasons.items()
        )
        yield f"Not judged: {name} ({fmt}) along {'; '.join(parts)}."


def passing(report: InvarianceReport, tests: Sequence[Test]) -> Statement:
    """Returns what to say of a kernel that passed, or of the model's own output: along
    which axes it is bit-identical and along which it is not; in the details by how much.
    Axes that were not tried are left out. `tests`: those of one kernel in one format, or
    of the model, at least one."""
    name, fmt = label(tests[0]), tests[0].format
    if tests[0].kernel == MODEL:
        answers = [a for a in model_answers(report.models) if a.format == fmt]
        limits = {test.bound for test in tests if test.bound}
        judged = {a.axis: max(limits) for a in answers if limits}
    else:
        rows = [r for r in report.rows if (label(r), r.format) == (name, fmt)]
        answers = list(answers_of_rows(rows, ()))
        judged = {}
        for test in tests:
            axis, _, rule = test.rule.partition(" ")
            if rule == "rounding" and test.bound:
                judged[axis] = test.bound
    differs = "rounding only (allowed)"
    if any(a.answer == "differs" and a.axis not in judged for a in answers):
        differs = "differs (allowed)"
    required = report.request.get("require") or ()
    clause = answers_clause(answers, differing=differs, required=required)
    line = f"output {clause.text}" if tests[0].kernel == MODEL else clause.text
    limit = _rounding_sentence(answers, judged)
    return Statement(line, details_clause(answers, clause.named, limit))


def _rounding_sentence(answers: Sequence[AxisAnswer], judged: Mapping[str, float]) -> str:
    """Returns a sentence on the differences of a kernel that passed: that they are judged
    as rounding, and along which axes no limit is on them; of several limits it names the
    largest. Empty without a difference. `judged`: the limits by axis, as multiples of
    what roundings explain."""
    moved = [a.axis for a in answers if a.answer == "differs"]
    free = [axis for axis in moved if axis not in judged]
    if not moved or len(free) == len(moved):
        return "No limit is on them." if moved else ""
    but = f", but {joined_words(free)} (no limit)" if free else ""
    return f"Judged as rounding (limit {three(max(judged.values()))}×){but}."


def axis_answers(report: InvarianceReport) -> tuple[AxisAnswer, ...]:
    """Returns the answer of each kernel in each format along each planned axis, and each
    other along which it has rows, from the rows of a report and the rules that it was
    judged by (the default ones where it was not). It is `exceeds` where a limit is
    exceeded, `differs` where only bits are others, `same`, or `not tried`. A kernel
    without any row has no answer."""
    stored = report.rules
    rules = default_rules() if stored is None else Rules.model_validate(stored)
    failed = [t for t in tests(report, rules) if t.beyond and t.kernel != MODEL]
    exceeding = {(label(t), t.format or "", t.beyond[0].row.axis) for t in failed}
    return tuple(answers_of_rows(report.rows, exceeding, report.plan.axes))


def with_summary(report: InvarianceReport) -> InvarianceReport:
    """Returns a copy of the report whose answer is made from its rows."""
    summary = InvarianceSummary(
        answer=tuple(answer_sentences(report.rows, report.models))
    )
    return report.model_copy(update={"summary": summary})


def other_form_in_words(row: InvarianceRow) -> str:
    """Returns the other form of a call: `2 in place of 1`, or, where a part of it is
    compared, `8 in place of 1, kv head 0 alone`."""
    return row.variant + (f", {row.part}" if row.part else "")


def answer_sentences(
    rows: Sequence[InvarianceRow], models: Sequence[ModelRow] = ()
) -> Iterator[str]:
    """Yields for each kernel, format and axis that has the cause of a difference a
    sentence on that of the largest that has one. Then, for each format and axis along
    which the model's own output changes: by how much at most, beside its rounding error,
    and how much of that comes through attention."""
    causes = [row for row in rows if row.differ and row.cause and row.tensor != "lse"]
    by_axis = grouped(causes, lambda r: (label(r), r.format, r.axis))
    for (kernel, fmt, axis), along in by_axis.items():
        row = largest_change(along)
        where = f"{row.case}, {other_form_in_words(row)}"
        yield f"{kernel} ({fmt}) along {axis}: {row.cause} ({where})."
    ran = grouped((m for m in models if m.difference), lambda m: (m.format, m.axis))
    for (fmt, axis), outputs in ran.items():
        worst = max(outputs, key=lambda m: m.difference or 0.0)
        yield (
            f"model ({fmt}) along {axis}: output changes by up to {si(worst.difference)} "
            f"of its size, {ratio(worst.times_explained)}× its rounding error; "
            f"{_shares_clause(outputs)}."
        )


def _shares_clause(outputs: Sequence[ModelRow]) -> str:
    """Returns how much of the changes of the model's output comes through attention: `all
    of it comes through attention`, or `through attention 80 % with sdpa-flash`, with each
    kernel, of mean squares. `outputs`: at least one, all of them changed."""
    if all((m.share or 0.0) >= WHOLE for m in outputs):
        return "all of it comes through attention"
    shares = [f"{100 * (m.share or 0.0):.0f} % with {label(m)}" for m in outputs]
    return f"through attention {joined_words(shares)}"
