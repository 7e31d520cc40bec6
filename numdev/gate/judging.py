"""What is decided: a report of any kind held to rules, and what that comes to.

A study says what it planned as a list of tests (`numdev.report_kinds`); here are the
rules that are the same for all, and the one way from tests to an outcome. Judging reads
records alone: no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TypeVar

from pydantic import ValidationError

from numdev.errors import MeasurementError
from numdev.gate.findings import kernel_verdicts
from numdev.gate.judgement import REQUIRED, SOMETHING, Judgement, Power, Test
from numdev.gate.row_groups import CUT, options_text
from numdev.gate.rules import Rules, default_rules, rules_as_data
from numdev.report import Report, Standing, worst
from numdev.report_kinds import judged_by
from numdev.request_models import DEFAULT_KERNELS

R = TypeVar("R", bound=Report)
NAMED = 3  # weights
CONCLUSIONS = ("outcome", "verdicts", "findings", "tested", "summary", "cells", "figures")
NOT_PLANTED = "no such planted fault in this report: audit with --control"


def judge_report(report: Report, rules: Rules | None = None) -> Judgement:
    """Returns the judgement of a finished report by the rules (the default ones if None),
    from its plan and rows. Raises MeasurementError for a report from a system that the
    rules do not hold for, and for one that was not judged when it was made. Raises it too
    for one that contradicts its plan or itself: where its conclusions do not follow from
    its rows. Raises UsageError for a kind of report that is not judged."""
    rules = rules or default_rules()
    check_system(report.provenance.system, rules)
    _check_request(report)
    judged_by(report.kind).check(report)
    if report.rules is None:
        raise MeasurementError(
            f"the report of {report.kind} was not judged when it was made"
        )
    try:
        first = Rules.model_validate(report.rules)
    except ValidationError as error:
        raise MeasurementError(
            "inconsistent report: its rules are none", hint=CUT
        ) from error
    if rules_as_data(first) != report.rules:
        raise MeasurementError("inconsistent report: its rules are not whole", hint=CUT)
    judgement = judgement_of(report, first)
    again = with_conclusions(report, judgement)
    for name in CONCLUSIONS:
        if getattr(again, name, None) != getattr(report, name, None):
            what = f"inconsistent report: its {name} does not follow from its rows"
            raise MeasurementError(what, hint=CUT)
    return judgement if first == rules else judgement_of(report, rules)


def _check_request(report: Report) -> None:
    """Raises MeasurementError where a report's request or source contradicts itself or
    the plan. A kernel of its request has no name; or the request names kernels other than
    the default ones, and the plan says that it does not. Or its source has only one of
    how much of a text was asked for and read, or does not say which weights are not
    finite, though it has parameters."""
    request, source, plan = (
        report.request,
        report.provenance.source,
        getattr(report, "plan", None),
    )
    wrong = ""
    for name in ("sequences", "tokens"):
        if (f"{name}_asked" in source) != (f"{name}_read" in source):
            wrong = (
                f"its source does not say how many {name} were asked for, or "
                "how many were read"
            )
    if "parameters" in source and "nonfinite_weights" not in source:
        wrong = "its source does not say which weights are not finite"
    chosen = request.get("kernels") or ()
    names = [kernel.get("name") for kernel in chosen]
    if None in names:
        wrong = "a kernel of its request has no name"
    named = chosen and names != [kernel.name for kernel in DEFAULT_KERNELS]
    if named and plan is not None and not getattr(plan, "named", True):
        wrong = "its kernels were named in the request, and by the plan were not"
    if wrong:
        raise MeasurementError(f"inconsistent report: {wrong}", hint=CUT)


def judged(report: R, rules: Rules | None = None) -> R:
    """Returns a new report with the outcome, verdicts, findings and summary that follow
    from its plan and rows by the rules (the default ones if None), and with the rules
    themselves. The plan and rows are not checked. Raises UsageError for a kind of report
    that is not judged."""
    rules = rules or default_rules()
    report = report.model_copy(update={"rules": rules_as_data(rules)})
    return with_conclusions(report, judgement_of(report, rules))


def judgement_of(report: Report, rules: Rules) -> Judgement:
    """Returns the judgement of the report's plan and rows by the rules. The plan and rows
    are not checked. Raises UsageError for a kind that is not judged."""
    study = judged_by(report.kind)
    beside = study.beside(report, rules)
    return judge(
        study.tests(report, rules), rules, reading=reading_tests(report), **beside
    )


def reading_tests(report: Report) -> Iterator[Test]:
    """Yields a test of whether as much of a text was read as was asked for (the rule
    `reading`), and one of whether stored weights are finite (`finite weights`). Each is
    held or undecided, and left out where the report's source does not have the
    numbers."""
    source = report.provenance.source
    counts = [
        [source.get(f"{name}_{state}") for name in ("sequences", "tokens")]
        for state in ("asked", "read")
    ]
    (asked, tokens_asked), (read, tokens_read) = counts
    if asked is not None and read is not None:
        less = read < asked or (tokens_asked or 0) > (tokens_read or 0)
        words = [
            f"{n} x {tokens} tokens" if tokens else f"{n} sequences"
            for n, tokens in counts
        ]
        why = f"{words[1]} were read where {words[0]} were asked for"
        yield Test(
            rule="reading",
            standing=Standing.UNDECIDED if less else Standing.HELD,
            reasons=(why,) if less else (),
        )
    weights = source.get("nonfinite_weights")
    if isinstance(weights, dict):
        why = ", ".join(
            f"{name} ({count})" for name, count in list(weights.items())[:NAMED]
        )
        yield Test(
            rule="finite weights",
            standing=Standing.UNDECIDED if weights else Standing.HELD,
            reasons=(f"stored weights are NaN or infinite: {why}",) if weights else (),
        )


def with_conclusions(report: R, judgement: Judgement) -> R:
    """Returns a new report with the outcome, verdicts, findings, sentences on what was
    tested, and summary that follow from a judgement of it. Raises UsageError for a kind
    of report that is not judged."""
    study = judged_by(report.kind)
    findings, tested = study.findings(judgement, report)
    if text := report.provenance.source.get("not_audited"):
        tested = (*tested, f"Not audited: {text}.")
    whole = report.model_copy(
        update={
            "outcome": judgement.outcome,
            "verdicts": tuple(
                kernel_verdicts(judgement, findings, partial(study.passing, report))
            ),
            "findings": tuple(findings),
            "tested": tuple(tested),
        }
    )
    summarised: R = study.summarised(whole)
    return summarised


def check_system(system: dict[str, object], rules: Rules) -> None:
    """Raises MeasurementError for a system that the rules do not hold for: one that lacks
    a key of `holds_for`, or whose value its pattern does not match."""
    for key, pattern in rules.holds_for.items():
        value = system.get(key)
        if value is None or not fnmatchcase(str(value), pattern):
            raise MeasurementError(
                (
                    f"the rules {rules.name} hold for {key} {pattern!r}, but this "
                    f"report has {value!r}"
                ),
                hint="calibrate rules for the report's system, or gate another one",
            )


def judge(
    tests: Iterable[Test],
    rules: Rules,
    *,
    reading: Iterable[Test] = (),
    power: Sequence[Power] = (),
    fa_rule: tuple[int, int] | None = None,
) -> Judgement:
    """Returns the judgement of tests: exceeded where any is, since that is certain;
    passed only where some rule was applied, nothing that was planned or required is
    missing, and nothing is undecided. Adds tests of required kernels and of faults that
    must be caught. `reading`: tests of what was read; `fa_rule`: heads that pass
    flash-attention's own rule, of all."""
    every = [*tests, *reading]
    ran = [test for test in every if test.runs]
    every += catching_tests(
        power, rules, dict.fromkeys(test.format or "" for test in ran)
    )
    every += required_tests(every, rules)
    every.append(_anything_judged_test(every))
    return Judgement(
        rules=rules.name,
        outcome=worst(test.outcome for test in every if test.outcome is not None),
        tests=tuple(every),
        power=tuple(power),
        fa_rule=fa_rule,
    )


def catching_tests(
    power: Sequence[Power], rules: Rules, formats: Collection[str]
) -> Iterator[Test]:
    """Yields a test for each planted fault that the rules must catch, in the order of the
    rules; nothing where they name none. It is held where the fault was planted in all
    these `formats`, and is caught in each from the rules' dose on; else missing."""
    for fault, dose in rules.catches.items():
        planted = [p for p in power if p.fault == fault]
        weak = [p for p in planted if p.caught_from is None or p.caught_from > dose]
        why = [f"caught: {p}" for p in weak] if planted else [NOT_PLANTED]
        absent = [
            fmt for fmt in formats if planted and fmt not in {p.format for p in planted}
        ]
        why += [f"not planted in {fmt}" for fmt in absent]
        yield Test(
            rule=f"catches {fault}",
            standing=Standing.MISSING if why else Standing.HELD,
            reasons=tuple(why),
            limit=f"caught from {dose:g}",
        )


def required_tests(tests: Iterable[Test], rules: Rules) -> Iterator[Test]:
    """Yields a test for each pattern of kernels that the rules require: held where a
    kernel of the report fits it, and some rule was applied to each that does and ran, in
    every format; else missing. `tests`: of the report, those that count calls too."""
    ran, applied = Counter[tuple[str, str, str]](), set[tuple[str, str, str]]()
    for test in tests:
        unit = test.kernel or "", options_text(test.options), test.format or ""
        if test.runs:
            ran[unit] += test.judged
        elif test.outcome is not None:
            applied.add(unit)
    for pattern in rules.required:
        fitting = [unit for unit in ran if fnmatchcase(unit[0], pattern)]
        why = [
            f"{name} ({fmt}) is required, and no rule could be applied to it"
            for name, options, fmt in fitting
            if ran[name, options, fmt] and (name, options, fmt) not in applied
        ]
        if not fitting:
            why = [f"{pattern} is required and not in this report"]
        yield Test(
            rule=f"{REQUIRED} {pattern}",
            standing=Standing.MISSING if why else Standing.HELD,
            reasons=tuple(dict.fromkeys(why)),
        )


def _anything_judged_test(tests: Sequence[Test]) -> Test:
    """Returns the test that some kernel ran and some rule was applied to what was
    observed: without it a report of nothing would pass."""
    applied = (Standing.HELD, Standing.EXCEEDED)
    why = ""
    if not any(test.runs and test.judged for test in tests):
        why = "No kernel under audit was measured"
    elif not any(
        test.standing in applied and test.observed is not None for test in tests
    ):
        why = "No rule could be applied to any row"
    standing = Standing.MISSING if why else Standing.HELD
    return Test(rule=SOMETHING, standing=standing, reasons=(why,) if why else ())
