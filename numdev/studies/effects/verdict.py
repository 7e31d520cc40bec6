"""Judges a model's output: a test for everything planned, findings on what exceeds its
limit, and the sentence on what passed. Needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from numdev.gate.findings import exceeded_finding, joined_words, run_findings
from numdev.gate.judgement import MODEL, RUNS, Judgement, Statement, Test, TestFields
from numdev.gate.row_tests import run_test
from numdev.gate.rules import AtMost, Rules
from numdev.grouping import grouped
from numdev.metrics.statistics import BIAS_FORMATS
from numdev.report import Finding, PlannedKernel, Standing, Who, kernel_fields
from numdev.report.number_text import label, multiple, percent, three
from numdev.studies.effects.report import (
    Check,
    EffectsPlan,
    EffectsReport,
    OutputRow,
    RunSummary,
    against_in_words,
)
from numdev.studies.effects.summary import (
    attention_alone,
    flips_in_words,
    recomputed_summary,
    with_summary,
)
from numdev.yamlfile import Strict

__all__ = ["EffectsLimits", "findings", "passing", "tests", "with_summary"]

UNSTEADY = "the model does not repeat itself"
SURELY = 10  # times a limit: exceeded in one sequence alone, or without an interval
FAILED = {  # by check: how a sentence goes on that begins with the model
    "repeat": "does not repeat itself",
    "eager": "has an eager attention that computes another function",
    "sdpa": "has a call of SDPA that computes another function",
    "causality": "is not causal",
    "cache": "computes another function when it decodes with a cache",
    "mask": "ignores the attention mask",
    "batch": "lets a sequence depend on the others in its batch",
    "compiled": "computes another function when compiled",
    "compiled eager": "computes another function when compiled with eager attention",
    "format": "computes in a narrower format at some sites",
}
WHOLE = ("whole", "attention")  # the kinds of runs with a kernel that are judged


class EffectsLimits(Strict):
    """The limits of `numdev effects`; configs/gate/default.yaml says what each key
    means."""

    kernel_over_predicted: AtMost
    kernel_over_baseline: AtMost
    model_over_sites: AtMost
    model_over_sites_float32: AtMost
    unexplained_flips: AtMost


class RatioRule(NamedTuple):
    """How one of the ratios of `RunSummary.over` is judged."""

    rule: str
    limit: str  # the name of its limit
    words: str  # what it is a multiple of; {} is the attention of the kernel `against`


RATIO_RULES = {
    "predicted": RatioRule("own share", "kernel_over_predicted", "expected"),
    "against": RatioRule("own share", "kernel_over_baseline", "{}"),
    "sites": RatioRule("model", "model_over_sites", "all sites together"),
}
NOTHING_BESIDE = {
    "predicted": "its rounding model's prediction",
    "against": "{} attention",
    "sites": "all rounding sites together",
}
# `cache` compares the exact model with itself
KERNELS_IN_DECODE = "kernels beside a cache (they run in `numdev audit --generate`)"
# As where a model reads the weights of its attention alone, or its output times 0
UNUSED = "attention alone has no error at the output, as where the model does not use it"


def tests(report: EffectsReport, rules: Rules) -> Iterator[Test]:
    """Yields the tests of a report that `check_consistency` passes. For the model: each
    check, and whether the exact output is finite. For each planned kernel in each format:
    whether it ran, and for each output the rules `finite`, `own share`, `model` and
    `flips`. A test that cannot be made has a reason, unless its rule is `finite`. Where
    the check `repeat` fails, tests of outputs that would be held or exceeded are
    undecided."""
    plan = report.plan
    limits: EffectsLimits = rules.limits_of("effects")
    runs = recomputed_summary(report).runs
    steady = not any(
        check.name == "repeat" and check.holds is False for check in report.checks
    )
    yield from _check_tests(report)
    lost = dict.fromkeys(row.reason or "" for row in report.rows if row.lost)
    yield Test(
        rule="exact output",
        standing=Standing.UNDECIDED if lost else Standing.HELD,
        kernel=MODEL,
        format=", ".join(plan.formats),
        reasons=tuple(lost),
    )
    for kernel, fmt in itertools.product(plan.kernels, plan.formats):
        who = kernel_fields(fmt, kernel.kernel, kernel.options)
        yield _test_of_runs(report, who, rules)
        for at in plan.outputs:
            whole = next(
                run for run in runs if _is_run_of_whole_model(run, kernel, fmt, at)
            )
            for fields in _output_tests(plan, whole, runs, limits):
                judged = fields["standing"] in (Standing.HELD, Standing.EXCEEDED)
                if judged and not steady:
                    fields |= {
                        "standing": Standing.UNDECIDED,
                        "reasons": (UNSTEADY,),
                        "beyond": (),
                    }
                yield Test(**who, tensor=at or "output", **fields)


def _is_run_of_whole_model(
    run: RunSummary, kernel: PlannedKernel, fmt: str, at: str
) -> bool:
    """Whether a run is that of the whole model with a kernel and its options, in a
    format, of the output `at`."""
    if (run.kind, run.format, run.at) != ("whole", fmt, at):
        return False
    return (run.kernel, str(run.options)) == (kernel.kernel, str(kernel.options))


def _check_tests(report: EffectsReport) -> Iterator[Test]:
    """Yields a test for every check of the model, in order: held or exceeded as it holds
    or not, undecided where it could not be tried, not applicable where the model need not
    have it or nobody asked for it."""
    formats = ", ".join(report.plan.formats)
    for check in report.checks:
        standing = Standing.HELD if check.holds else Standing.EXCEEDED
        if check.holds is None:
            standing = Standing.UNDECIDED if check.applies else Standing.NOT_APPLICABLE
        failing = standing is Standing.EXCEEDED
        limit = "" if check.limit is None else f"at most {three(check.limit)}"
        yield Test(
            rule=check.name,
            standing=standing,
            kernel=MODEL,
            format=check.format or formats,
            metric="difference",
            observed=check.difference,
            bound=check.limit,
            limit=limit,
            judged=int(check.holds is not None),
            offending=int(failing),
            reasons=(check.reason,) if check.holds is None else (),
            beyond=(check,) if failing else (),
        )


def _test_of_runs(report: EffectsReport, who: Who, rules: Rules) -> Test:
    """Returns the test of on how many sequences the model ran with a kernel, alone and as
    a whole. A run whose output has NaN or infinity counts as a run, since another rule
    judges that. Not applicable where the kernel has no row of a sequence whose exact
    output is finite."""
    rows = [
        row
        for row in report.rows
        if row.kind in WHOLE and row.layer is None and _is_row_of(row, who)
    ]
    states = [
        ("ok" if row.nonfinite else row.status, row.reason or "")
        for row in rows
        if not row.lost
    ]
    if not states:  # there is no exact output to hold anything against
        lost = tuple(dict.fromkeys(row.reason or "" for row in rows))
        return Test(
            **who, rule=RUNS, standing=Standing.NOT_APPLICABLE, tensor="out", reasons=lost
        )
    return run_test(who, rules, "out", states, asked=report.plan.named)


def _is_row_of(row: OutputRow, who: Who) -> bool:
    """Whether a row is of the kernel, options and format of `who`."""
    expected = (who["kernel"], str(who["options"]), who["format"])
    return (row.kernel, str(row.options), row.format) == expected


def _output_tests(
    plan: EffectsPlan,
    whole: RunSummary,
    runs: Sequence[RunSummary],
    limits: EffectsLimits,
) -> Iterator[TestFields]:
    """Yields the fields of the tests of one output of the model, with one kernel in one
    format, by the names of a Test's fields: the rules `finite`, `own share`, `model` and
    `flips`. The last three need the cost of `whole` and that of attention alone: they are
    not applicable where both lack it, and missing where one does, with a reason. `flips`
    is not applicable too for states, a model that chooses experts and a pipeline; it is
    missing where no number of unexplained flips is known."""
    attention = attention_alone(whole, runs)
    yield _finite_test(whole, attention, runs)
    if whole.cost is None or attention is None or attention.cost is None:
        lacking = [run for run in (whole, attention) if run and run.cost is None]
        reasons = tuple(run.reason for run in lacking if run.reason)
        reasons = reasons or ("it did not run",)
        # Where neither ran, the rule on runs says so; one without the other judges
        # nothing.
        neither = whole.cost is None and (attention is None or attention.cost is None)
        for rule in ("own share", "model", "flips"):
            yield {
                "rule": rule, "reasons": reasons,
                "standing": Standing.NOT_APPLICABLE if neither else Standing.MISSING,
            }  # fmt: skip
        return
    steady = bool(whole.growth) and not plan.routes
    yield _ratio_test(plan, attention, limits, steady=steady)
    yield _ratio_test(plan, whole, limits, steady=steady)
    if not plan.logits or plan.routes or whole.unexplained is None:
        lacks = plan.logits and not plan.routes and _has_rounding_sites(plan)
        yield {
            "rule": "flips", "reasons": (_unjudged_flips_reason(plan),),
            "standing": Standing.MISSING if lacks else Standing.NOT_APPLICABLE,
        }  # fmt: skip
        return
    most, flips = limits.unexplained_flips, whole.unexplained
    yield {
        "rule": "flips", "metric": "unexplained", "observed": float(flips), "bound": most,
        "limit": f"at most {three(most)}", "judged": whole.positions, "offending": flips,
        "standing": Standing.EXCEEDED if flips > most else Standing.HELD,
        "beyond": (whole,) if flips > most else (),
    }  # fmt: skip


def _unjudged_flips_reason(plan: EffectsPlan) -> str:
    """Returns why no flip can be called unexplained: by the plan the output is no
    distribution, or the model chooses experts; else that nothing tells flips from near
    ties."""
    if not plan.logits:
        return "its output is no distribution"
    if plan.routes:
        return "a choice of experts may move one token far"
    return "nothing tells flips from near ties"


def _has_rounding_sites(plan: EffectsPlan) -> bool:
    """Whether the plan has the run with all rounding sites, which a pipeline lacks."""
    return any(run.kind == "emulated" for run in plan.runs)


def _finite_test(
    whole: RunSummary, attention: RunSummary | None, runs: Sequence[RunSummary]
) -> TestFields:
    """Returns the fields of the test of a finite output. NaN and infinity, of the whole
    model or of attention alone, exceed the limit where the model is finite with another
    kernel in `runs`; they are undecided where it is with none. Without NaN or infinity
    the test is held, or not applicable where `whole` has no cost. `attention`: the run
    with attention alone; None: there is none."""
    bad = max(whole.nonfinite, attention.nonfinite if attention else 0)
    others = [
        run for run in runs
        if run.kind == "whole" and (run.format, run.at) == (whole.format, whole.at)
        and run is not whole and run.cost is not None and not run.nonfinite
    ]  # fmt: skip
    test: TestFields = {
        "rule": "finite",
        "standing": Standing.HELD if whole.cost else Standing.NOT_APPLICABLE,
        "metric": "nonfinite",
        "bound": 0.0,
        "limit": "at most 0",
        "observed": float(bad),
        "judged": 1,
        "offending": int(bad > 0),
    }
    if not bad:
        return test
    worst = whole if whole.nonfinite else attention
    why = (worst.reason or "") if worst else ""
    if others:
        return test | {"standing": Standing.EXCEEDED, "beyond": (worst,)}
    return test | {
        "standing": Standing.UNDECIDED,
        "reasons": (f"with every kernel: {why}",),
    }


def _ratio_test(
    plan: EffectsPlan, run: RunSummary, limits: EffectsLimits, *, steady: bool
) -> TestFields:
    """Returns the fields of the test of a ratio: a run's cost over that of the run it is
    compared with. Exceeded: the lower end of its interval is beyond the limit; or it has
    no interval and is more than SURELY times the limit; or, with `steady` (no router,
    many positions), the ratio in one sequence is. Held: it has an interval and is within
    the limit; or there is no ratio and the cost of the whole model is 0. Not applicable:
    for the kernel `against` beside itself, and in a pipeline for all sites. Undecided
    otherwise, also where a sequence has an error and the run beside it none, where
    attention alone has no error and none is expected, and for a ratio of 0 without an
    interval. `run`: one with a cost."""
    by, against = RATIO_RULES[run.beside or "sites"], against_in_words(plan.against)
    wide = by.rule == "model" and run.format not in BIAS_FORMATS
    limit = getattr(limits, f"{by.limit}_float32" if wide else by.limit)
    test: TestFields = {
        "rule": by.rule,
        "standing": Standing.HELD,
        "metric": "over",
        "bound": limit,
        "limit": f"at most {three(limit)}",
        "judged": run.positions,
    }
    if run.beside == "against" and run.kernel == plan.against:
        why = "where nothing is predicted it is what others are held against"
        return test | {"standing": Standing.NOT_APPLICABLE, "reasons": (why,)}
    if run.beside == "sites" and not _has_rounding_sites(plan):
        why = "single rounding sites are not placed in a pipeline"
        return test | {"standing": Standing.NOT_APPLICABLE, "reasons": (why,)}
    if run.over is None or run.unmatched:
        assert run.cost is not None
        if run.cost.mean == 0 and by.rule == "model":
            return test | {"standing": Standing.HELD, "observed": 0.0}
        if run.cost.mean == 0:
            return test | {"standing": Standing.UNDECIDED, "reasons": (UNUSED,)}
        beside = NOTHING_BESIDE[run.beside or "sites"].format(against)
        why = f"there is an error, and none in {beside}"
        return test | {"standing": Standing.UNDECIDED, "reasons": (why,)}
    ratio, low, worst = run.over.mean, run.over.low, run.over_worst or 0.0
    what = "model" if by.rule == "model" else "attention"
    over = f"{what} {multiple(ratio, limit)}× {by.words.format(against)}"
    test |= {"observed": ratio, "beyond": (run,), "offending": 1}
    if low is not None and run.over.high is not None:
        test["interval"] = (low, run.over.high)
    if (low is None and ratio > SURELY * limit) or (low is not None and low > limit):
        return test | {"standing": Standing.EXCEEDED}
    if steady and worst > SURELY * limit:
        return test | {"standing": Standing.EXCEEDED, "observed": worst, "interval": None}
    test |= {"beyond": (), "offending": 0}
    if low is None:
        why = f"{over}, without an interval: read 3 sequences or more"
    elif ratio > limit:
        ends = f"{three(low)} to {three(run.over.high)}"
        why = f"{over} ({ends}): more sequences would tell on which side of the limit"
    else:
        return test | {"standing": Standing.HELD}
    return test | {"standing": Standing.UNDECIDED, "reasons": (why,)}


def findings(
    judgement: Judgement, report: EffectsReport
) -> tuple[Sequence[Finding], Sequence[str]]:
    """Returns two sequences. Findings: one for each test with something `beyond` its
    limit, kernel by kernel and the farthest beyond first; then one for each kernel that
    failed or did not run though it had to; then a note on each that declined some calls.
    The second sequence, of notes, is always empty."""
    wrong = [test for test in judgement.tests if test.beyond]
    sentences: list[Finding] = []
    for of_kernel in grouped(wrong, lambda t: (label(t), t.format)).values():
        sentences += [
            exceeded_finding(test, _finding_statement(test, report.plan.against))
            for test in sorted(of_kernel, key=lambda test: -test.nearness)
        ]
    return (*sentences, *run_findings(judgement.tests)), ()


def _finding_statement(test: Test, against: str) -> Statement:
    """Returns what an exceeded test says, from its numbers, to follow the kernel's name;
    for a check the model's. `test`: one with a run or a check in `beyond`; `against`: the
    kernel that others are compared with."""
    subject: Any = test.beyond[0]
    if isinstance(subject, Check):
        return Statement(FAILED[subject.name], f"{subject.reason}.")
    if test.rule == "finite":
        line = "gives NaN or infinity where another kernel does not"
        return Statement(line, f"{subject.reason}." if subject.reason else "")
    if test.rule == "flips":
        return Statement(flips_in_words(subject))
    line = f"{_ratio_clause(test, subject, against)} (limit {three(test.bound)}×)"
    return Statement(line, _ratio_details(test, subject))


def _ratio_clause(test: Test, run: RunSummary, against: str) -> str:
    """Returns the clause on a ratio, `error of attention alone: 1.2× expected [1.1,
    1.3]`: what errs, and how much of what it is held against. The interval is missing
    where there is none or its ends are written alike. ` in one sequence` stands in its
    place where the test's ratio is not the run's mean, but that of its worst sequence.
    `against`: the kernel that others are compared with."""
    words = RATIO_RULES[run.beside or "sites"].words.format(against_in_words(against))
    ratio = test.observed if isinstance(test.observed, float) else None
    within = ""
    if test.interval:
        low, high = map(three, test.interval)
        within = "" if low == high else f" [{low}, {high}]"
    elif run.over and ratio != run.over.mean:
        within = " in one sequence"
    return f"{_what_errs(run)}: {multiple(ratio, test.bound)}× {words}{within}"


def _what_errs(run: RunSummary) -> str:
    """Returns what a run's error is of, `error of attention alone`; of a pipeline's
    output with its name: `error of the whole model in the image`."""
    is_whole = RATIO_RULES[run.beside or "sites"].rule == "model"
    place = "" if run.place == "output" else f" in the {run.place}"
    return f"error of {'the whole model' if is_whole else 'attention alone'}{place}"


def _ratio_details(test: Test, run: RunSummary) -> str:
    """Returns sentences on what a ratio is of (`Errors as KL; limit 1.5×.`), and of
    attention alone its share of the whole error, where that is known."""
    what = "Squared errors" if run.flips is None else "Errors as KL"  # what a cost is
    text = f"{what}; limit {three(test.bound)}×."
    if test.rule != "model" and run.share:
        share = percent(run.share.mean)
        text += f" Attention makes {share} of the model's {run.format} error."
    return text


def passing(report: EffectsReport, tests: Sequence[Test]) -> Statement | None:
    """Returns what to say of the passed `tests` of one kernel: the number nearest to its
    limit; None where no number was judged, or its run is not in the summary. Tests of the
    model (kernel MODEL) say which checks hold (`repeat and causality hold`), and which
    were not tested and why; where `cache` holds, that no kernel ran with one. `tests`: at
    least one."""
    if tests[0].kernel != MODEL:
        return _nearest_to_limit(report, tests)
    holding = [
        test.rule for test in tests if test.standing is Standing.HELD and test.metric
    ]
    by_reason = grouped(
        (t for t in tests if t.standing is Standing.NOT_APPLICABLE), lambda t: t.reasons
    )
    untested = [
        f"{joined_words(t.rule for t in of)} ({'; '.join(reasons)})"
        for reasons, of in by_reason.items()
    ]
    if "cache" in holding:
        untested.append(KERNELS_IN_DECODE)
    text = f"{joined_words(holding)} hold" + "s" * (len(holding) == 1)
    return Statement(text, f"Not tested: {'; '.join(untested)}." if untested else "")


def _nearest_to_limit(report: EffectsReport, tests: Sequence[Test]) -> Statement | None:
    """Returns the statement on the passed test whose number is nearest to its limit; None
    where no number was judged, or its run is not in the summary. It is the ratio of a
    test of one. Of other tests, and a run without a ratio, it is how often the top token
    changes; of an output that is no distribution that it is finite, or that its error is
    0."""
    passed = [test for test in tests if test.standing is Standing.HELD and test.metric]
    test = max(passed, key=lambda test: test.nearness, default=None)
    if test is None:
        return None
    who = (label(test), test.format, test.tensor)
    kind = "attention" if test.rule == "own share" else "whole"
    for run in report.summary.runs or recomputed_summary(report).runs:
        of_run = (label(run), run.format, run.at or "output")
        if run.kind == kind and run.layer is None and of_run == who:
            if test.rule in ("own share", "model") and run.over:
                line = _ratio_clause(test, run, report.plan.against)
                return Statement(line, _ratio_details(test, run))
            if run.flips is not None:
                return Statement(flips_in_words(run))
            if test.rule == "finite":
                return Statement("gives no NaN and no infinity")
            return Statement(f"{_what_errs(run)}: 0")
    return None
