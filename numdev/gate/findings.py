"""From verdicts to findings: what is wrong with which kernel, where it is worst, what it means.

What one fault brings about is one finding: heads that an earlier rule has named already are not
accused by a later one again, which is added to the sentence instead."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, assert_never

from numdev.gate.judgement import MODEL, REPORT, RUNS, SOMETHING, Held, Judgement, Test
from numdev.gate.rows import FOUND, GRADIENTS, OVERFLOWS, Rows
from numdev.gate.thresholds import NOTHING
from numdev.grouping import grouped
from numdev.report import (
    DeviationRow,
    Finding,
    KernelVerdict,
    Outcome,
    Place,
    Places,
    Standing,
    worst,
)
from numdev.report.numbers import labelled, power, three

# What is wrong, by metric, as the rest of a sentence that begins with the kernel.
WRONG = {
    "nonfinite": "returns {nonfinite} elements of {tensor} that are NaN or infinite where the "
    "exact result, rounded once, is finite{reverse}",
    "empty_nonfinite": "returns NaN or infinity in fully masked rows: {empty_nonfinite} elements "
    "in {empty_rows} rows of {tensor} that should be 0; NaN spreads from there to dk and dv",
    "suspicion": "does not compute the requested attention: {suspicion} (with this change the "
    "fp64 result is {cut}× closer to the kernel's)",
    "expected_ratio": "is inaccurate: the rms error of {tensor}{median} is {number}× what {claim} "
    "predicts (limit {bound}×)",
    "rms_ratio": "is inaccurate: the rms of {tensor}'s error{median} is {number}× that of what "
    "{claim} predicts (limit {bound}×)",
    "baseline_ratio": "has {number}× eager attention's error in {tensor} (limit {bound}×)",
    "worst_row": "has a{sampled} row of {tensor} with {number}× the error predicted for it (limit "
    "{bound}×)",
    "bias_size": "is biased: the mean error of {tensor} reaches {bias:+.3f} ulp ("
    "{bias_of}, {sequences} sequences; limit {bound} ulp); such errors do not average out",
    "noise_ratio": "is not reproducible: {tensor} changes between runs on the same inputs by up to "
    "{number}× the error of one rounding ({allowed})",
    "lse_error": "returns a wrong log-sum-exp: its error is {number} × (1 + |log-sum-exp|) (limit "
    "{bound}); the backward pass uses it",
    "": "breaks the rule `{rule}` in {tensor}: expected {limit}, got {number}",
}
OF_SOURCE = ("reading", "finite weights")  # rules whose reasons no kernel's verdict has
TENSORS = {"out": "the output", "lse": "the log-sum-exp", None: ""}


def kernel_verdicts(
    judgement: Judgement,
    findings: Sequence[Finding],
    passing: Callable[[Sequence[Test]], str | None] = lambda tests: None,
) -> list[KernelVerdict]:
    """One for each kernel in each format, the worst first. `findings` are the judgement's own;
    `passing` says in words what a kernel passed."""
    by_kernel = grouped(
        (t for t in judgement.tests if t.kernel is not None and t.role in (None, "kernel")),
        lambda t: (label(t), t.format),
    )
    ran = {key: tests for key, tests in by_kernel.items() if any(map(_counts, tests))}
    verdicts = [_of_kernel(tests, findings, passing) for tests in ran.values()]
    said = {id(test) for tests in ran.values() for test in tests}
    silent = (None, Outcome.PASSED)
    others = [t for t in judgement.tests if t.outcome not in silent and id(t) not in said]
    unsaid = judgement.outcome not in {verdict.outcome for verdict in verdicts}
    if any(test.rule in OF_SOURCE for test in others) or (others and unsaid):
        verdicts.append(_of_report(others))
    return sorted(verdicts, key=lambda verdict: list(Outcome).index(verdict.outcome))


def _counts(test: Test) -> bool:
    """Whether a verdict is due on what it is of: a kernel under audit, or the whole model."""
    return test.runs or test.kernel == MODEL


def _of_report(others: Sequence[Test]) -> KernelVerdict:
    """What did not pass and is of no kernel under audit: too short a text, what is required and
    absent, a rule without a row."""
    outcome = worst(test.outcome for test in others if test.outcome is not None)
    gravest = [test for test in others if test.outcome is outcome]
    reasons = dict.fromkeys(why for test in gravest for why in test.reasons)
    return KernelVerdict(
        kernel=REPORT, format="", outcome=outcome, rule=gravest[0].rule,
        reason="; ".join(list(reasons)[:2]) or f"rule `{gravest[0].rule}`",
    )  # fmt: skip


def _of_kernel(
    tests: Sequence[Test],
    findings: Sequence[Finding],
    passing: Callable[[Sequence[Test]], str | None],
) -> KernelVerdict:
    of, names = tests[0], ("rule", "tensor", "metric", "observed")
    outcomes = [test.outcome for test in tests if test.outcome is not None]
    applied = [t for t in tests if not t.runs and t.standing in (Standing.HELD, Standing.EXCEEDED)]
    outcome = worst(outcomes) if applied else Outcome.NOT_JUDGED
    if outcome is Outcome.NOT_JUDGED and Outcome.EXCEEDED in outcomes:
        outcome = Outcome.EXCEEDED
    about: dict[str, Any] = {"outcome": outcome}
    number = next(
        (
            at for at, finding in enumerate(findings)
            if finding.severity != "note" and label(finding) == label(of)
            and (of.format or "") in finding.formats
        ),
        None,
    )  # fmt: skip
    match outcome:
        case Outcome.EXCEEDED | Outcome.NOT_JUDGED if number is not None:
            finding = findings[number]
            about |= {name: getattr(finding, name) for name in (*names, "limit", "place")}
            about["finding"] = number
        case Outcome.EXCEEDED:
            beyond = (test for test in tests if test.outcome is Outcome.EXCEEDED)
            farthest = max(beyond, key=lambda test: test.nearness)
            about |= {name: getattr(farthest, name) for name in names}
            about |= {"limit": farthest.bound, "reason": f"breaks the rule `{farthest.rule}`"}
        case Outcome.NOT_JUDGED:
            lacking = [test for test in tests if test.outcome is Outcome.NOT_JUDGED]
            reasons = dict.fromkeys(why for test in lacking or tests for why in test.reasons)
            about["reason"] = "; ".join(list(reasons)[:2]) or "no rule could be applied"
            about["rule"] = lacking[0].rule if lacking else None
        case Outcome.PASSED:
            bound = [test for test in applied if test.bound is not None]
            nearest = max(bound, key=lambda test: test.nearness, default=None)
            if nearest is not None:
                about |= {name: getattr(nearest, name) for name in names}
                about["limit"] = nearest.bound
            about["reason"] = passing(tests)
        case _:
            assert_never(outcome)
    return KernelVerdict(
        kernel=of.kernel or "", options=of.options, format=of.format or "", **about
    )


def findings_in(judgement: Judgement, rows: Rows) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """What is wrong by a judgement of rows, and what was tested."""
    findings = [*_exceeded(judgement.tests, Places(rows)), *run_findings(judgement.tests)]
    tested = [*_tested(judgement.tests, findings), *remarks(rows)]
    if judgement.power:
        caught = "; ".join(map(str, judgement.power))
        tested.append(f"Of the faults planted in this run, these rules catch: {caught}.")
    return tuple(findings), tuple(tested)


def label(of: Any) -> str:
    """`mine[block=64]`, of whatever has a kernel and its options."""
    return labelled(of.kernel, of.options)


def listed(words: Iterable[str]) -> str:
    """`a, b and c`."""
    *most, last = list(words) or [""]
    return f"{', '.join(most)} and {last}" if most else last


def _exceeded(tests: Sequence[Test], named: Places) -> Iterator[Finding]:
    """A finding for each thing wrong, in the order of the rules."""
    findings: list[Finding] = []
    named_by: dict[int, int] = {}  # a row to the finding that names it first
    also: dict[int, dict[str, None]] = {}
    for fault in _faults(tests):
        rows = [held.row for _, held in fault]
        mine = None
        if any(id(row) not in named_by for row in rows):
            mine = len(findings)
            findings.append(_finding(fault, named))
        for row in rows:
            first = named_by.setdefault(id(row), len(findings) - 1)
            if first != mine:
                also.setdefault(first, {})[fault[0][0].rule] = None
    wrong = {(label(f), fmt) for f in findings if _is_function(f) for fmt in f.formats}
    inherits = [
        f.tensor in GRADIENTS and {(label(f), fmt) for fmt in f.formats} <= wrong for f in findings
    ]
    heirs = {label(f) for f, does in zip(findings, inherits, strict=True) if does}
    for at, finding in enumerate(findings):
        rules = listed(f"`{rule}`" for rule in also.get(at, ()))
        added = f" The same heads also fail {rules}." if rules else ""
        if _is_function(finding) and label(finding) in heirs:
            added += " Its gradients are wrong for the same reason."
        if not inherits[at]:
            yield finding.model_copy(update={"sentence": finding.sentence + added})


def _is_function(finding: Finding) -> bool:
    """Whether it says that the output is that of another function."""
    return finding.metric == "suspicion" and finding.tensor == "out"


Fault = list[tuple[Test, Held]]


def _faults(tests: Sequence[Test]) -> Iterable[Fault]:
    """Rows that offend, by test; of a different function by what it computes, in all formats."""
    faults: dict[Any, Fault] = {}
    for number, test in enumerate(tests):
        for held in test.beyond:
            function = (test.rule, label(test), held.row.suspicion)
            fault = function if test.metric == "suspicion" else number
            faults.setdefault(fault, []).append((test, held))
    return faults.values()


def _finding(fault: Fault, named: Places) -> Finding:
    tests = list({id(test): test for test, _ in fault}.values())
    verdict, rows = tests[0], [held.row for _, held in fault]
    formats = tuple(test.format or "" for test in tests)
    judged, place = sum(test.judged for test in tests), Place.of(rows[0])
    ranked = len(tests) == 1 and verdict.metric != "suspicion"
    which = "worst" if ranked else "for example"
    where = f"{len(rows)} of {judged} heads, {which} at {named(place)}"
    if rows[0].errs_in and verdict.metric != "suspicion":  # which says so itself
        where += f", in {rows[0].errs_in}"
    why = rows[0].nulls.get("suspicion", "")
    sentence = f"{label(verdict)} ({', '.join(formats)}) {_wrong(verdict, rows, where)}."
    return Finding(
        rule=verdict.rule,
        severity="exceeded",
        sentence=sentence + (why and f" Cause not identified: {why}."),
        kernel=verdict.kernel or "",
        options=verdict.options,
        formats=formats,
        tensor=verdict.tensor,
        metric=verdict.metric,
        observed=verdict.observed if isinstance(verdict.observed, float | int) else None,
        limit=verdict.bound,
        count=len(rows),
        judged=judged,
        place=place,
    )


def _wrong(verdict: Test, rows: Rows, where: str) -> str:
    """What is wrong in `rows`, the worst first, and `where`, to follow the kernel in a sentence."""
    worst, observed = rows[0], verdict.observed
    bound = "" if verdict.bound is None else power(f"{verdict.bound:g}")
    sums = {
        name: sum(getattr(row, name) or 0 for row in rows)
        for name in ("nonfinite", "empty_nonfinite", "empty_rows")
    }
    sentence = WRONG.get(verdict.metric or "", WRONG[""]).format(
        **sums,
        rule=verdict.rule,
        format=verdict.format,
        limit=verdict.limit,
        bound=bound,
        number=three(observed, verdict.bound) if isinstance(observed, float) else f"{observed}",
        tensor=TENSORS.get(verdict.tensor, verdict.tensor),
        reverse=", or finite where it is infinite" if verdict.format in OVERFLOWS else "",
        median=" (median over heads)" if verdict.median else "",
        sampled=" sampled" if worst.sampled else "",
        claim=_whose(rows),
        suspicion=worst.suspicion,
        cut=three(statistics.median(row.suspicion_cut or 0.0 for row in rows)),
        bias=worst.bias_size or 0.0,
        bias_of=worst.bias_of,
        sequences=worst.sequences,
        allowed=f"limit {bound}×" if verdict.bound else "expected: identical bits",
    )
    return f"{sentence[:-1]}; {where})" if sentence.endswith(")") else f"{sentence} ({where})"


def _whose(rows: Rows) -> str:
    """Whose roundings were expected: the emulation the kernel claims, or is taken, to be; or, as a
    clause, the way in which one that claims nothing was found to round."""
    claim = next((row.claim for row in rows if row.claim), None)
    if claim and claim.startswith(FOUND):
        return f"its inferred rounding model ({claim})"
    return f"the rounding model `{claim}`" if claim else "its rounding model"


def run_findings(tests: Sequence[Test]) -> Iterator[Finding]:
    """Calls in which a kernel failed, or that it had to run; then those that it declined, where it
    ran others."""
    runs = [test for test in tests if test.runs]
    for test in runs:
        if test.outcome is Outcome.NOT_JUDGED:
            words = f"{'is required' if test.required else 'was requested'}, but "
            words += "not run in" if test.unjudged else "gave no result in"
            yield _of_runs(test, RUNS, "failed in" if test.offending else words)
    for test in runs:
        if test.judged and test.standing is Standing.NOT_APPLICABLE:
            yield _of_runs(test, "refuses", "refuses")


def _of_runs(test: Test, rule: str, words: str) -> Finding:
    every = test.judged + test.unjudged + test.offending
    count = test.offending or test.unjudged or test.judged
    what = "backward passes" if test.tensor == "dq" else "calls"
    why = "; ".join(test.reasons[:3])
    return Finding(
        kernel=test.kernel or "",
        options=test.options,
        place=next(iter(test.places), None),
        rule=rule,
        severity="unmeasured" if rule == RUNS else "note",
        sentence=f"{label(test)} ({test.format}) {words} {count} of {every} {what}: {why}.",
        formats=(test.format or "",),
        tensor=test.tensor if test.offending else None,
        count=count,
        judged=every,
    )


def _tested(tests: Sequence[Test], findings: Sequence[Finding]) -> Iterator[str]:
    """Whom the rules cleared of what, and which rules could not be applied."""
    of_rows = [test for test in tests if test.metric not in (None, "calls") or not test.kernel]
    by_rule = grouped((t for t in of_rows if t.rule != SOMETHING), attrgetter("rule"))
    heads = {rule: sum(test.judged for test in own) for rule, own in by_rule.items()}
    applied = [rule for rule, count in heads.items() if count]
    if not applied:
        return
    kernels, formats = (
        listed(dict.fromkeys(getattr(test, name) for test in of_rows if test.judged))
        for name in ("kernel", "format")
    )
    start = "Checked" if any(f.severity != "note" for f in findings) else "All applied rules passed"
    what = f"{kernels} in {formats}, {max(heads.values())} results (one per head and tensor)"
    sentence = f"{start}: {what}; rules: {listed(applied)}."
    lacking = []
    for rule, own in by_rule.items():
        reasons = list(dict.fromkeys(why for test in own for why in test.reasons))
        why = f"{'partly: ' if heads[rule] else ''}{'; '.join(reasons[:2])}"
        if any(reason.startswith(NOTHING) for reason in reasons):
            why = "no result has the metric it needs"
        lacking += [f"{rule} ({why})"] if reasons else []
    yield sentence + (f" Rules not applied: {'; '.join(lacking)}." if lacking else "")


def remarks(rows: Iterable[DeviationRow]) -> Iterator[str]:
    """Which kernels return another format than was asked for, or something in the log-sum-exp's
    place; in which way each that declared no claim was found to round, if not as `fa2`; what
    exceeds a format on the way to a result that does not."""
    kernels = [
        r
        for r in rows
        if r.role == "kernel"
        and (r.nulls or r.claim or r.overflow or r.came_in or r.out_format != r.format)
    ]
    other = [r for r in kernels if (r.came_in or r.out_format) not in (None, r.format)]
    returned = grouped(other, attrgetter("kernel", "out_format", "came_in", "format"))
    for (kernel, instead, wide, fmt), own in returned.items():
        tensors = listed(dict.fromkeys(row.tensor for row in own))
        more = f"; all its values are representable in {fmt}, and judged as {fmt}" if wide else ""
        yield f"{kernel} returns {wide or instead} where {fmt} was requested ({tensors}){more}."
    other = [r for r in kernels if r.tensor == "out" and "lse_error" in r.nulls]
    for kernel, own in grouped(other, attrgetter("kernel")).items():
        yield f"{kernel}: log-sum-exp not judged: {own[0].nulls['lse_error']}."
    found = [r for r in kernels if (r.claim or "").startswith(FOUND)]
    for kernel, own in grouped(found, attrgetter("kernel")).items():
        claims = dict.fromkeys(str(r.claim) for r in own)
        ways = (x for x in claims if not any(other.startswith(f"{x},") for other in claims))
        yield (
            f"{kernel} declares no rounding model, and does not round as FlashAttention-2 (`fa2`) "
            f"does. Element by element it rounds {listed(ways)}, and is judged by that."
        )
    over = grouped((r for r in kernels if r.overflow), attrgetter("kernel", "format", "tensor"))
    for (kernel, fmt, tensor), own in over.items():
        yield (
            f"{tensor} of {kernel} overflows in {sum(r.overflow or 0 for r in own)} elements where "
            f"the exact result is finite; by its rounding model, intermediates overflow {fmt}."
        )
