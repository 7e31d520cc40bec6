"""Judges what two programs recorded: tests of each side beside the truth and of both
sides together, from plan and rows. Needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from numdev.gate.findings import exceeded_finding, first_clauses, run_findings
from numdev.gate.judgement import Judgement, Statement, Test, TestFields
from numdev.gate.row_tests import run_test
from numdev.gate.rules import AtMost, Rules
from numdev.grouping import grouped
from numdev.report import Finding, Standing, Who, kernel_fields
from numdev.report.number_text import label, ratio, si, three
from numdev.studies.logprobs.causes import decide
from numdev.studies.logprobs.report import (
    PAIR,
    LogprobsReport,
    NamedCause,
    PlannedSide,
    SideSummary,
)
from numdev.studies.logprobs.summary import (
    causes_clause,
    named_causes,
    rms_ratio,
    side_rows,
    side_summary,
    with_summary,
)
from numdev.yamlfile import Strict

__all__ = ["LogprobsLimits", "findings", "passing", "tests", "with_summary"]

NOISE, FINITE, CAUSE = "noise", "finite", "cause"
SAME, COPY = "same tokens", "copy"
SURELY = 10  # times the limit: exceeded without an interval
CONFIDENCE = 0.99  # of the interval by which a side is accused
FEWEST = 32  # tokens that make two equal sides a copy
# Of what a side has one: how its records differ, and what there is one of
ONE = {
    "weights_version": ("are of", "versions of the weights", "the model is of one"),
    "step": ("are of", "steps of training", "the model is of one"),
    "dtype": ("are in", "formats", "noise is predicted in one"),
    "head": ("have heads in", "formats", "noise is predicted with one"),
}
MOST_NAMES = 4  # of versions or formats in a sentence
LONGEST_NAME = 40  # characters of one
NO_MODEL = "no model: which side is off is not told (--model)"


class LogprobsLimits(Strict):
    """The limits of `numdev logprobs`; configs/gate/default.yaml says what each key
    means."""

    rms_over_predicted: AtMost
    tokens: AtMost


def tests(report: LogprobsReport, rules: Rules) -> Iterator[Test]:
    """Yields the tests of a report. For each side: whether it was compared, its error
    beside what its format explains, whether its values are finite, and whether a cause is
    named; without a model the last three are one undecided test. For both together:
    whether they were compared, have the same tokens, are no copy of each other, and,
    without a model, whether a cause is named."""
    limits: LogprobsLimits = rules.limits_of("logprobs")
    for side in report.plan.sides:
        who = kernel_fields(side.format, side.name)
        yield _run_test(report, side, who, rules)
        for fields in _side_tests(report, side, limits):
            yield Test(**who, tensor="logprobs", **fields)
    if len(report.plan.sides) == 2:
        formats = dict.fromkeys(side.format for side in report.plan.sides)
        who = kernel_fields(", ".join(formats), PAIR)
        ran = [("ok", "") for row in report.pairs if row.tokens > 0]
        neither = [("failed", "no token of the two sides can be compared")]
        yield run_test(who, rules, "logprobs", ran or neither, asked=True)
        for fields in _pair_tests(report):
            yield Test(**who, tensor="logprobs", **fields)


def _run_test(report: LogprobsReport, side: PlannedSide, who: Who, rules: Rules) -> Test:
    """Returns the test of how many sequences of a side were compared: with the model, or,
    without a model, with the other side."""
    if report.plan.model is None:
        states = [("ok", "") for row in report.pairs if row.tokens]
    else:
        states = [
            ("ok" if row.status == "ok" else "skipped", row.reason or "")
            for row in report.rows
            if row.side == side.name
        ]
    return run_test(who, rules, "logprobs", states, asked=True)


def _side_tests(
    report: LogprobsReport, side: PlannedSide, limits: LogprobsLimits
) -> Iterator[TestFields]:
    """Yields three tests of a side: of its error, of whether its values are finite, and
    of its causes. Without a model it is one test, undecided."""
    if report.plan.model is None:
        yield {"rule": NOISE, "standing": Standing.UNDECIDED, "reasons": (NO_MODEL,)}
        return
    yield _noise_test(report, side, limits)
    yield _finite_test(report, side)
    named = tuple(named_causes(report.causes, side.name))
    searched = Standing.HELD if side.causes else Standing.NOT_APPLICABLE
    yield {
        "rule": CAUSE,
        "standing": Standing.EXCEEDED if named else searched,
        "metric": "causes",
        "observed": float(len(named)),
        "bound": 0.0,
        "limit": "none",
        "judged": len(side.causes),
        "offending": len(named),
        "beyond": named,
    }


def _noise_test(
    report: LogprobsReport, side: PlannedSide, limits: LogprobsLimits
) -> TestFields:
    """Returns the test of a side's rms error over the predicted one. It is missing
    without that number. It is undecided, whatever the number, where the records are of
    several versions or formats. It is exceeded where the lower end of its 99 % interval
    is above the limit, or, without an interval, where it is above SURELY times the limit.
    It is undecided with too few tokens or sequences, and where it alone is above the
    limit. Else it is held."""
    rows, limit = side_rows(report, side.name), limits.rms_over_predicted
    tokens = sum(row.tokens for row in rows)
    estimate = rms_ratio(rows, CONFIDENCE)
    test: TestFields = {
        "rule": NOISE,
        "standing": Standing.HELD,
        "metric": "rms_over_predicted",
        "bound": limit,
        "limit": f"at most {three(limit)}",
        "judged": tokens,
    }
    if estimate is None:
        why = "nothing is predicted of it" if rows else "no sequence has numbers"
        return test | {"standing": Standing.MISSING, "reasons": (why,)}
    test["observed"] = estimate.mean
    if estimate.low is not None and estimate.high is not None:
        test["interval"] = (estimate.low, estimate.high)
    mixed, why = _why_not_one(side), ""
    surely = estimate.low is None and estimate.mean > SURELY * limit
    is_beyond = surely or (estimate.low is not None and estimate.low > limit)
    if is_beyond and not mixed:
        return test | {"standing": Standing.EXCEEDED, "offending": tokens}
    if mixed:
        why = mixed
    elif tokens < limits.tokens:
        why = f"{tokens} tokens are too few: {three(limits.tokens)} or more would tell"
    elif estimate.low is None:
        why = "no interval: 3 sequences or more would tell"
    elif estimate.mean > limit:
        why = "more sequences would tell on which side of the limit it is"
    if why:
        why = f"{ratio(estimate.mean)}× what {side.recipe} explains; {why}"
        return test | {"standing": Standing.UNDECIDED, "reasons": (why,)}
    return test


def _why_not_one(side: PlannedSide) -> str:
    """Returns why a side cannot be held to one model and one prediction, as a clause;
    empty where it can."""
    for name in (name for name in ONE if name in side.several):
        verb, of, what = ONE[name]
        values = side.several[name]
        more = ", …" if len(values) > MOST_NAMES else ""
        listed = ", ".join(x[:LONGEST_NAME] for x in values[:MOST_NAMES]) + more
        return f"its records {verb} {len(values)} {of} ({listed}), and {what}"
    return ""


def _finite_test(report: LogprobsReport, side: PlannedSide) -> TestFields:
    """Returns the test that a side says minus infinity of no token that counts and is
    within its support in the exact model. Where it does under a filter, the test does not
    apply: two sound programs keep other tokens at the filter's edge."""
    rows = [row for row in report.rows if row.side == side.name]
    infinite = sum(row.infinite for row in rows)
    if infinite and any(name in side.support for name in ("top_p", "top_k", "min_p")):
        why = f"{infinite:,} tokens have minus infinity, at the edge of the filter"
        return {
            "rule": FINITE, "standing": Standing.NOT_APPLICABLE, "reasons": (why,),
        }  # fmt: skip
    return {
        "rule": FINITE,
        "standing": Standing.EXCEEDED if infinite else Standing.HELD,
        "metric": "infinite",
        "observed": float(infinite),
        "bound": 0.0,
        "limit": "none",
        "judged": infinite + sum(row.tokens for row in rows),
        "offending": infinite,
    }


def _pair_tests(report: LogprobsReport) -> Iterator[TestFields]:
    """Yields the tests of both sides together. First whether their tokens are the same:
    MISSING without a pair; a pair that is cut does not count against it. Then whether one
    is a copy of the other: undecided where FEWEST tokens or more are all equal, else as
    measured; no such test without a comparable token. Last, without a model, whether a
    cause is named; no such test where none was looked for. The report has two sides."""
    other = [row for row in report.pairs if row.unshared and not row.cut]
    yield {
        "rule": SAME,
        "standing": (Standing.EXCEEDED if other else Standing.HELD)
        if report.pairs
        else Standing.MISSING,
        "metric": "unequal",
        "observed": float(len(other)),
        "bound": 0.0,
        "limit": "none",
        "judged": len(report.pairs),
        "offending": len(other),
        "reasons": () if report.pairs else ("no sequence is on both sides",),
        "beyond": tuple(other),
    }
    tokens, equal = (
        sum(getattr(r, n) for r in report.pairs) for n in ("tokens", "equal")
    )
    if tokens >= FEWEST and tokens == equal:
        why = (
            f"all {tokens:,} values are equal bit by bit: one is a copy of the other, or "
            "of the same engine"
        )
        yield {"rule": COPY, "standing": Standing.UNDECIDED, "reasons": (why,)}
    elif tokens:
        yield {"rule": COPY, "standing": Standing.HELD, "judged": tokens}
    if report.plan.model is None:
        yield from _pair_cause_tests(report)


def _pair_cause_tests(report: LogprobsReport) -> Iterator[TestFields]:
    """Yields one test, of the causes of the pair: what one side is beside the other.
    Nothing where that was not looked for."""
    by_cause = grouped(
        (row for row in report.causes if row.side == PAIR), lambda row: row.cause
    )
    named = [rows for rows in by_cause.values() if decide(rows).named]
    if by_cause:
        yield {
            "rule": CAUSE,
            "standing": Standing.EXCEEDED if named else Standing.HELD,
            "metric": "causes",
            "observed": float(len(named)),
            "bound": 0.0,
            "limit": "none",
            "judged": len(by_cause),
            "offending": len(named),
            "beyond": tuple(named_causes(report.causes, PAIR)),
        }


def findings(
    judgement: Judgement, report: LogprobsReport
) -> tuple[Sequence[Finding], Sequence[str]]:
    """Returns the findings and notes. There is a finding for each side, and for the pair,
    that exceeds a limit or has a cause; then one for each of which nothing could be
    compared. Notes say what was not looked for."""
    wrong = [test for test in judgement.tests if test.standing is Standing.EXCEEDED]
    sentences = []
    for of_side in grouped(wrong, lambda test: test.kernel).values():
        test = of_side[0]
        clauses = list(_finding_clauses(report, of_side))
        name = f"{label(test)} ({test.format})"
        sentence, details = first_clauses(
            name, clauses, between=" ", more="Also: ", least=1
        )
        named = ", ".join(cause.cause for cause in _causes_in(of_side))
        finding = exceeded_finding(test, Statement("", details), named or None)
        sentences.append(finding.model_copy(update={"sentence": sentence}))
    return (*sentences, *run_findings(judgement.tests)), tuple(_not_tested(report))


def _causes_in(tests_of_side: Sequence[Test]) -> list[NamedCause]:
    """Returns the causes that the tests of the rule `cause` name; empty for none."""
    naming = (test.beyond for test in tests_of_side if test.rule == CAUSE)
    return list(itertools.chain.from_iterable(naming))


def _finding_clauses(
    report: LogprobsReport, tests_of_side: Sequence[Test]
) -> Iterator[str]:
    """Yields what the exceeded tests of one side say, as clauses that follow its name:
    `errs 6.12× what bfloat16 explains (limit 1.5×)`. Where its error has no named cause,
    the last clause says so."""
    for test in tests_of_side:
        if test.rule == NOISE:
            low, high = test.interval or (None, None)
            ends = f"{three(low)} to {three(high)}; " if test.interval else ""
            number = test.observed if isinstance(test.observed, float) else None
            recipes = (s.recipe for s in report.plan.sides if s.name == test.kernel)
            yield (
                f"errs {ratio(number)}× what {next(recipes, test.format)} explains "
                f"({ends}limit {three(test.bound)}×)"
            )
        elif test.rule == FINITE:
            count = f"{test.offending:,} tokens"
            yield f"says minus infinity of {count} that the model can say"
        elif test.rule == SAME:
            yield f"has other tokens in {test.offending} of {test.judged} sequences"
        else:
            words = causes_clause(_causes_in(tests_of_side), with_side=False)
            yield words[0].lower() + words[1:].rstrip(".")
    if not _causes_in(tests_of_side) and any(t.rule == NOISE for t in tests_of_side):
        yield "the cause is none of those that were looked for"


def _not_tested(report: LogprobsReport) -> Iterator[str]:
    """Yields a sentence for each reason why causes were not looked for, with the causes;
    it names the sides where the reason is not that of all: `Not looked for: packing
    (rollout): REASON.`"""
    sides = report.plan.sides
    pairs = (item for side in sides for item in side.untested.items())
    by_reason: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for cause, reason in dict.fromkeys(pairs):
        names = tuple(s.name for s in sides if s.untested.get(cause) == reason)
        by_reason.setdefault((reason, names), []).append(cause)
    for (reason, names), causes in by_reason.items():
        of = f" ({', '.join(names)})" if len(names) < len(sides) else ""
        yield f"Not looked for: {', '.join(causes)}{of}: {reason}."


def passing(report: LogprobsReport, tests_of_side: Sequence[Test]) -> Statement:
    """Returns what to say of a side that passed: its ratio and tokens; for the pair, that
    the tokens are the same. `tests_of_side`: those of one side or the pair, at least
    one."""
    name = tests_of_side[0].kernel
    planned = next((side for side in report.plan.sides if side.name == name), None)
    if planned is None:
        tokens = sum(row.tokens for row in report.pairs)
        return Statement(f"the same tokens on both sides ({tokens:,} compared)")
    return side_statement(side_summary(report, planned))


def side_statement(side: SideSummary) -> Statement:
    """Returns what is said of a side that passed: `1.02× what bfloat16 explains (0.97 to
    1.07), 9,120 tokens; no cause named`, without brackets where it has no interval; and
    in the details its mean beside the expected one. The side has a ratio; whether a cause
    is named is not looked at."""
    assert side.ratio is not None
    ends = ""
    if side.ratio.low is not None and side.ratio.high is not None:
        ends = f" ({ratio(side.ratio.low)} to {ratio(side.ratio.high)})"
    mean = side.mean.mean if side.mean is not None else None
    return Statement(
        f"{ratio(side.ratio.mean)}× what {side.format} explains{ends}, {side.tokens:,} "
        "tokens; no cause named",
        f"Mean {si(mean)} nats, expected {si(side.expected_mean)}.",
    )
