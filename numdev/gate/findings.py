"""From verdicts to findings: what is wrong with which kernel, where it is worst, what it
means.

What one fault brings about is one finding: heads that an earlier rule has named already
are not accused by a later one again, which is added to the sentence instead."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, assert_never

from numdev.gate.judgement import (
    MODEL,
    RATIOS,
    REPORT,
    RUNS,
    SOMETHING,
    JudgedRow,
    Judgement,
    Statement,
    Test,
)
from numdev.gate.row_groups import INFERRED, Rows
from numdev.gate.row_tests import NOTHING
from numdev.grouping import grouped
from numdev.metrics.metrics_by_name import Value, lse_error, value_of
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
from numdev.report.number_text import label, multiple, power, si, three
from numdev.tensor_properties import ATTENTION_WORDS, Words, tensor_spec

# What is wrong, by metric: how a sentence goes on that begins with the kernel. With
# kernel and format it has at most 20 words; MORE has what the details add. `{units}` is
# in how many heads, where there are words left for it; `{up_to}` and `{of_units}` say of
# which head the number is.
WRONG = {
    "nonfinite": "returns {nonfinite} elements of {tensor} that are {unlike}",
    "empty_nonfinite": "returns NaN or infinity in fully masked rows of {tensor}: "
    "{empty_nonfinite} elements in {empty_rows} rows",
    "suspicion": "is wrong{units}: {suspicion}",
    "expected_ratio": "is inaccurate{units}: error of {tensor} {up_to}{number}× "
    "expected{of_units} (limit {bound}×)",
    "rms_ratio": "is inaccurate{units}: rms error of {tensor} {up_to}{number}× "
    "expected{of_units} (limit {bound}×)",
    "baseline_ratio": "has {up_to}{number}× {plain}'s error in {tensor}{of_units} "
    "(limit {bound}×)",
    "narrow_sum": "sums {tensor} from tile to tile in 16 bits: share {number}{of_units} "
    "(limit {bound})",
    "worst_row": "has a{sampled} row of {tensor} with {number}× the expected error "
    "(limit {bound}×)",
    "bias_size": "is biased{units}: mean error of {tensor} {bias:+.3f} ulp, {direction} "
    "(limit {bound} ulp)",
    "noise_ratio": "is not reproducible{units}: {tensor} changes between runs by "
    "{number}× one rounding's error ({allowed})",
    "form": "does not return what the reference does: {tensor}: {form}",
    "mismatches": "returns other integers than the reference: {number} elements of "
    "{tensor} differ",
    "reference_ratio": "is inaccurate{units}: rms error of {tensor} {up_to}{number}× "
    "what the reference's rounding explains (limit {bound}×)",
    "slice_ratio": "is inaccurate in {slice_at} of {tensor}: rms error {number}× what "
    "the reference's rounding explains (limit {bound}×)",
    "element_ratio": "is inaccurate at {element_at} of {tensor}: error {number}× what "
    "the reference's rounding explains (limit {bound}×)",
    "slope": "scales {tensor}: its error follows the exact result by {number} unit "
    "roundoffs (limit {bound})",
    "shift": "shifts {tensor}: its mean error is {number} unit roundoffs of its size "
    "(limit {bound})",
    "lse_error": "returns a wrong log-sum-exp{units}: error {number} × (1 + "
    "|log-sum-exp|) (limit {bound})",
    "": "breaks the rule `{rule}` in {tensor}: expected {limit}, got {number}",
}
STAYS = "Such errors do not average out."
MORE = {
    "empty_nonfinite": "They should be 0; NaN there can spread to dk and dv.",
    "expected_ratio": "Expected: what {claim} predicts, beside the size of each row's "
    "terms.",
    "rms_ratio": "Expected: what {claim} predicts.",
    "narrow_sum": "Of the error that such a sum makes at least that share is in it.",
    "worst_row": "Expected: what {claim} predicts for that row.",
    "bias_size": "Bias of {bias_of} over {sequences} sequences, p {bias_p}. " + STAYS,
    "slope": STAYS,
    "shift": STAYS,
    "lse_error": "The backward pass uses it.",
}
WORDS = 20  # of a sentence
# How elements that count in `nonfinite` are unlike the exact result, which is counted as
# one number: where all are NaN or infinite, all are finite, or that is not known
NOT_FINITE = "NaN or infinite where the exact result is finite"
NOT_ALIKE = "finite where the exact result, rounded once, is not"
UNLIKE = "finite, infinite or NaN unlike the exact result"
REASONS = 3  # of a verdict that nothing could be judged: in its line, and below it
OF_SOURCE = ("reading", "finite weights")  # rules whose reasons no kernel's verdict has


def kernel_verdicts(
    judgement: Judgement,
    findings: Sequence[Finding],
    passing: Callable[[Sequence[Test]], Statement | None] = lambda tests: None,
) -> list[KernelVerdict]:
    """Returns a verdict for each kernel in each format that has a test of the rule
    `runs`, and for the model (kernel `MODEL`), the worst first. One is on the report
    itself where too little was read or weights are not finite, and where other tests,
    such as those of baselines, did not pass and no kernel's verdict has the judgement's
    outcome. `findings`: those of the judgement; `passing` returns what to say of a kernel
    that passed, by its tests, or None."""
    by_kernel = grouped(
        (
            t
            for t in judgement.tests
            if t.kernel is not None and t.role in (None, "kernel")
        ),
        lambda t: (label(t), t.format),
    )
    ran = {
        key: tests
        for key, tests in by_kernel.items()
        if any(test.runs or test.kernel == MODEL for test in tests)
    }
    verdicts = [_kernel_verdict(tests, findings, passing) for tests in ran.values()]
    covered = {id(test) for tests in ran.values() for test in tests}
    silent = (None, Outcome.PASSED)
    others = [
        t for t in judgement.tests if t.outcome not in silent and id(t) not in covered
    ]
    unsaid = judgement.outcome not in {verdict.outcome for verdict in verdicts}
    if any(test.rule in OF_SOURCE for test in others) or (others and unsaid):
        verdicts.append(_report_verdict(others))
    return sorted(verdicts, key=lambda verdict: list(Outcome).index(verdict.outcome))


def _report_verdict(others: Sequence[Test]) -> KernelVerdict:
    """Returns the verdict on what did not pass and is of no kernel under audit: too short
    a text, a required kernel that is absent, a rule without a row. It has the gravest
    outcome, and the first two reasons of it. `others`: these tests, at least one."""
    outcome = worst(test.outcome for test in others if test.outcome is not None)
    gravest = [test for test in others if test.outcome is outcome]
    reasons = dict.fromkeys(why for test in gravest for why in test.reasons)
    return KernelVerdict(
        kernel=REPORT, format="", outcome=outcome, rule=gravest[0].rule,
        reason="; ".join(list(reasons)[:2]) or f"rule `{gravest[0].rule}`",
    )  # fmt: skip


def _kernel_verdict(
    tests: Sequence[Test],
    findings: Sequence[Finding],
    passing: Callable[[Sequence[Test]], Statement | None],
) -> KernelVerdict:
    """Returns the verdict on one kernel in one format by its tests, at least one. Where
    it did not pass, it shows the finding on the kernel, else the test farthest beyond its
    limit or what could not be judged; for a pass the test nearest to its limit. A kernel
    to which no rule could be applied is NOT_JUDGED."""
    of, names = tests[0], ("rule", "tensor", "metric", "observed")
    outcomes = [test.outcome for test in tests if test.outcome is not None]
    applied = [
        t
        for t in tests
        if not t.runs and t.standing in (Standing.HELD, Standing.EXCEEDED)
    ]
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
            about |= {
                "limit": farthest.bound,
                "reason": f"breaks the rule `{farthest.rule}`",
            }
        case Outcome.NOT_JUDGED:
            lacking = [test for test in tests if test.outcome is outcome]
            about["reason"], about["details"] = _statement_of_reasons(lacking or tests)
            about["rule"] = lacking[0].rule if lacking else None
        case Outcome.PASSED:
            bound = [test for test in applied if test.bound is not None]
            nearest = max(bound, key=lambda test: test.nearness, default=None)
            if nearest is not None:
                about |= {name: getattr(nearest, name) for name in names}
                about["limit"] = nearest.bound
            if (statement := passing(tests)) is not None:
                about["reason"], about["details"] = statement
        case _:
            assert_never(outcome)
    return KernelVerdict(
        kernel=of.kernel or "", options=of.options, format=of.format or "", **about
    )


def _statement_of_reasons(tests: Sequence[Test]) -> Statement:
    """Returns the first reason of these tests, and as details up to REASONS - 1 others,
    joined by `; `. Where they have no reason the first is `no rule could be applied`."""
    reasons = dict.fromkeys(why for test in tests for why in test.reasons)
    first, *others = list(reasons)[:REASONS] or ["no rule could be applied"]
    return Statement(first, "; ".join(others))


def findings_in(
    judgement: Judgement, rows: Rows, words: Words = ATTENTION_WORDS
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Returns the findings of a judgement of rows, and sentences on what was tested, in
    the `words` of their operation."""
    findings = [
        *_limit_findings(judgement.tests, Places(rows, words), rows),
        *run_findings(judgement.tests, words),
    ]
    tested = [
        *_tested_sentence(judgement.tests, findings, words.unit),
        *remark_sentences(rows),
    ]
    if judgement.power:
        caught = "; ".join(map(str, judgement.power))
        tested.append(f"Of the faults planted in this run, these rules catch: {caught}.")
    return tuple(findings), tuple(tested)


def joined_words(words: Iterable[str]) -> str:
    """Returns words joined as in `a, b and c`; empty where there are none."""
    *most, last = list(words) or [""]
    return f"{', '.join(most)} and {last}" if most else last


def _limit_findings(
    tests: Sequence[Test], named: Places, every: Rows
) -> Iterator[Finding]:
    """Yields a finding for each fault, in the order of the rules: but a mistake that does
    not explain the head that errs most comes after the finding on that head. A fault has
    none whose heads other findings name, or whose imprecise step an earlier finding has:
    that finding says it. Gradients that are wrong because the output is have no finding:
    the output's says so. `every`: the rows of all kernels, the floor's too."""
    faults = _faults(tests)
    if not faults:
        return
    faults = _ordered_faults(faults)
    owner = _owning_faults(faults)
    findings: list[Finding] = []
    at_of: dict[int, int] = {}  # a fault to its finding
    more: dict[int, list[tuple[int, str]]] = {}  # other heads of the same cause
    for number, fault in enumerate(faults):
        named_first = [pair for pair in fault.rows if owner[id(pair[1].row)] == number]
        if not named_first:
            continue
        first_rows = [judged_row.row for _, judged_row in named_first]
        same = _finding_of_same_cause(findings, fault, first_rows)
        if same is not None:
            at_of[number] = same
            more.setdefault(same, []).append((len(named_first), named_first[0][0].rule))
        else:
            at_of[number] = len(findings)
            others = len(fault.rows) - len(named_first)
            findings.append(
                _finding_of_fault(fault._replace(rows=named_first), named, others, every)
            )
    also = _other_failed_rules(faults, owner, at_of)
    inherits = _inherited_flags(findings)
    heirs = {label(f) for f, does in zip(findings, inherits, strict=True) if does}
    words = named.words
    for at, finding in enumerate(findings):
        rules = joined_words(f"`{rule}`" for rule in also.get(at, ()))
        added = [f"The same {words.unit}s also fail {rules}."] if rules else []
        for count, rule in more.get(at, ()):
            units = f"{count} more {words.unit}{'s' * (count > 1)}"
            added.append(f"For that cause {units} fail{'s' * (count == 1)} `{rule}`.")
        if _is_of_function(finding) and label(finding) in heirs:
            added.append("Its gradients are wrong for the same reason.")
        if not inherits[at]:
            details = " ".join((finding.details, *added)).strip()
            yield finding.model_copy(update={"details": details})


def _owning_faults(faults: Sequence[Fault]) -> dict[int, int]:
    """Returns, by the id of a row, the index of the fault that names it: a fault with a
    cause goes before the others, then the first in order."""
    owner: dict[int, int] = {}
    for number, fault in sorted(enumerate(faults), key=lambda at: at[1].cause is None):
        for _, judged_row in fault.rows:
            owner.setdefault(id(judged_row.row), number)
    return owner


def _other_failed_rules(
    faults: Sequence[Fault], owner: dict[int, int], at_of: dict[int, int]
) -> dict[int, dict[str, None]]:
    """Returns, by index of a finding, the rules of other faults that its rows fail too,
    each once. `owner`: the fault that names a row, by the row's id; `at_of`: a fault's
    finding."""
    also: dict[int, dict[str, None]] = {}
    for number, fault in enumerate(faults):
        for test, judged_row in fault.rows:
            first = at_of[owner[id(judged_row.row)]]
            if first != at_of.get(number):
                also.setdefault(first, {})[test.rule] = None
    return also


def _inherited_flags(findings: Sequence[Finding]) -> list[bool]:
    """Returns for each finding, in order, whether it is of a gradient that is wrong
    because the output is. So it is where, in each of its formats, another finding says
    that the same kernel's output is that of another function."""
    wrong = set()
    for finding in findings:
        if _is_of_function(finding):
            wrong |= {(label(finding), fmt) for fmt in finding.formats}
    return [
        tensor_spec(f.tensor or "").is_gradient
        and {(label(f), fmt) for fmt in f.formats} <= wrong
        for f in findings
    ]


def _finding_of_same_cause(
    findings: Sequence[Finding], fault: Fault, rows: Rows
) -> int | None:
    """Returns the index of the finding, of the same kernel, tensor and format, whose
    cause is the imprecise step that all these rows of the fault name. None without one,
    where the rows name no step or several, and for a mistake."""
    causes = {row.imprecision for row in rows}
    if fault.cause is not None or len(causes) != 1 or causes == {None}:
        return None
    test = fault.rows[0][0]
    return next(
        (
            at for at, finding in enumerate(findings)
            if {finding.cause} == causes and finding.tensor == test.tensor
            and label(finding) == label(test) and finding.formats == (test.format,)
        ),
        None,
    )  # fmt: skip


def _is_of_function(finding: Finding) -> bool:
    """Whether a finding says that the output is that of another function than was
    requested."""
    of_output = finding.tensor is not None and tensor_spec(finding.tensor).is_output
    return finding.metric == "suspicion" and of_output


class Fault(NamedTuple):
    """Rows that offend, the worst first, each with the test that it fails."""

    rows: list[tuple[Test, JudgedRow]]
    causes: tuple[str, ...] = ()
    """Of a mistake: statements each of which explains all of these rows; the first is the
    one that is shown first."""

    @property
    def cause(self) -> str | None:
        """Returns the statements of the mistake joined by `, or `: any one of them
        explains the rows; None where the fault is no mistake."""
        return ", or ".join(self.causes) if self.causes else None

    @property
    def key(self) -> tuple[str, str | None]:
        """Returns the kernel with its options, and the format, of the fault's first
        row."""
        return label(self.rows[0][0]), self.rows[0][0].format


def _faults(tests: Sequence[Test]) -> list[Fault]:
    """Returns the offending rows of each test as a fault, in order. Tests of `suspicion`,
    that a kernel computes another function, give one fault for each of its mistakes, over
    all formats, at the first of these tests: the output's and the largest errors first.
    Tests without offending rows have none."""
    offending = [test for test in tests if test.beyond]
    by_mistake: dict[tuple[str, str], list[tuple[Test, JudgedRow]]] = {}
    for test in offending:
        if test.metric == "suspicion":
            rows = by_mistake.setdefault((test.rule, label(test)), [])
            rows += [(test, judged_row) for judged_row in test.beyond]
    faults: list[Fault] = []
    for test in offending:
        if test.metric != "suspicion":
            faults.append(Fault([(test, judged_row) for judged_row in test.beyond]))
            continue
        # Those of all formats, where the first one is
        mistakes = _faults_by_mistake(by_mistake.pop((test.rule, label(test)), []))
        faults += sorted(
            mistakes,  # an output's first: gradients inherit it
            key=lambda fault: (
                not fault.rows[0][0].is_of_output,
                -_largest_error(fault),
            ),
        )
    return faults


def _faults_by_mistake(rows: Sequence[tuple[Test, JudgedRow]]) -> Iterator[Fault]:
    """Yields a fault for each mistake, with the rows that it explains. Where several
    mistakes explain a head, it goes to the one that explains most heads. `rows`: those of
    a kernel that have a mistake."""
    unexplained = list(rows)
    while unexplained:
        votes: dict[str, list[int]] = {}
        for at, (test, judged_row) in enumerate(unexplained):
            for words in dict.fromkeys(_mistake_statements(judged_row.row)):
                votes.setdefault(f"{_tensor_prefix(test)}{words}", []).append(at)
        most = max(votes.values(), key=len)
        alike = [
            words.removeprefix(_tensor_prefix(unexplained[most[0]][0]))
            for words, voters in votes.items()
            if voters == most
        ]
        chosen = [unexplained[at] for at in most]
        yield Fault(chosen, tuple(_one_statement_each(alike, chosen[0][1].row)))
        explained = set(most)
        unexplained = [x for at, x in enumerate(unexplained) if at not in explained]


def _tensor_prefix(test: Test) -> str:
    """Returns `output ` or `other `: a prefix by which a mistake in the output and the
    same one in a gradient are counted as different faults."""
    return "output " if test.is_of_output else "other "


def _mistake_statements(row: DeviationRow) -> Iterator[str]:
    """Yields every statement that describes a row's mistake: of each alternative the one
    on this call, then what it is an instance of. Without alternatives it is the row's
    `suspicion`, empty where there is none."""
    if not row.suspicion_of:
        yield row.suspicion or ""
    for alternative in row.suspicion_of:
        yield from alternative


def _one_statement_each(words: Sequence[str], row: DeviationRow) -> Sequence[str]:
    """Returns one statement for each alternative that the row names (`suspicion_of`): the
    first of the alternative's that is among `words`, so that what a call itself shows
    goes before what it is an instance of. At most ALIKE. All of `words`, which explain
    the same heads, where the row names no alternative."""
    if not row.suspicion_of:
        return words
    firsts = (
        next((x for x in statements if x in words), None)
        for statements in row.suspicion_of
    )
    return [x for x in dict.fromkeys(firsts) if x is not None][:ALIKE]


ALIKE = 3  # statements that explain the same heads


def _ordered_faults(faults: Sequence[Fault]) -> list[Fault]:
    """Returns the faults in the order of the rules, with one exception. A mistake goes
    behind a fault without a mistake, of the same kernel and format, that has the tensor's
    worst row, where this row errs more than those of the mistake and names no mistake
    itself."""
    ordered = list(faults)
    for fault in [f for f in faults if f.cause is not None]:
        rows = {id(judged_row.row) for _, judged_row in fault.rows}
        others = [f for f in ordered if f.key == fault.key and f.cause is None]
        worst = _worst_of_tensor(others, fault.rows[0][1].row.tensor)
        if worst is None:
            continue
        of_worst, row = worst
        if (
            id(row) in rows
            or _relative_error(row) <= _largest_error(fault)
            or row.suspicion
        ):
            continue
        first = next(i for i, f in enumerate(ordered) if f is of_worst)
        at = next(i for i, f in enumerate(ordered) if f is fault)
        if at < first:
            ordered.insert(first, ordered.pop(at))
    return ordered


def _worst_of_tensor(
    faults: Sequence[Fault], tensor: str
) -> tuple[Fault, DeviationRow] | None:
    """Returns the row of a tensor that errs most, with its fault; None where no fault has
    a row of it."""
    candidates: list[tuple[Fault, DeviationRow]] = []
    for fault in faults:
        rows = (judged_row.row for _, judged_row in fault.rows)
        candidates += [(fault, row) for row in rows if row.tensor == tensor]
    return max(candidates, key=lambda pair: _relative_error(pair[1]), default=None)


def _largest_error(fault: Fault) -> float:
    """Returns the error, as `_relative_error`, of the head of a fault that errs most; 0
    without rows."""
    return max(
        (_relative_error(judged_row.row) for _, judged_row in fault.rows), default=0.0
    )


def _relative_error(row: DeviationRow) -> float:
    """Returns the error of a head over what is expected of it, else over the baseline's;
    of a log-sum-exp its `lse_error`. 0 where the row has no such number."""
    if not tensor_spec(row.tensor).has_floor:
        return lse_error(row) or 0.0
    ratio = row.expected_ratio if row.expected_ratio is not None else row.baseline_ratio
    return ratio or 0.0


def _finding_of_fault(fault: Fault, named: Places, others: int, every: Rows) -> Finding:
    """Returns the finding on a fault, with its sentence, place and cause. `named` puts
    places in words; `others`: how many more rows it has that other findings name;
    `every`: the rows of all kernels."""
    tests = list({id(test): test for test, _ in fault.rows}.values())
    verdict, rows = tests[0], [judged_row.row for _, judged_row in fault.rows]
    formats = tuple(dict.fromkeys(test.format or "" for test in tests))
    judged = sum(test.judged for test in tests)
    if fault.cause is not None:
        rows.sort(key=_relative_error, reverse=True)
    observed = _shown_number(verdict, rows)
    step = _common_imprecise_step(rows) if fault.cause is None else None
    fields = _test_fields(verdict, observed, named.words)
    fields |= _row_fields(rows)
    fields["suspicion"] = next(iter(fault.causes), "") + _of_several_tensors(rows)
    metric = verdict.metric or ""
    if metric == "nonfinite":
        fields["unlike"] = _unlike_the_exact(rows, every)
    start = f"{label(verdict)} ({', '.join(formats)}) "
    count = _Count(len(rows), judged, others, named.words.unit)
    sentence, is_counted = _counted_sentence(
        start, WRONG.get(metric, WRONG[""]), fields, count, median=verdict.median
    )
    details = [*_where_sentences(rows, count, named, is_counted=is_counted)]
    details += [MORE.get(metric, "").format(**fields)]
    details += _cause_sentences(fault.causes, step, rows, named.words.unit)
    number = observed if isinstance(observed, float | int) else None
    return Finding(
        rule=verdict.rule,
        severity="exceeded",
        sentence=sentence,
        details=" ".join(filter(None, details)),
        kernel=verdict.kernel or "",
        options=verdict.options,
        formats=formats,
        tensor=verdict.tensor,
        metric=verdict.metric,
        observed=number,
        limit=verdict.bound,
        count=len(rows),
        judged=judged,
        place=Place.of(rows[0]),
        cause=fault.cause or step,
    )


def _of_several_tensors(rows: Rows) -> str:
    """Returns in brackets the tensors of the rows of a function, ` (w_grad)`, where it
    has others too: its mistakes are said of "it". Empty where it has none, and for
    attention, whose mistakes name what they are of. `rows`: at least one."""
    if rows[0].beside_reference is None or len(rows[0].tensors) < 2:
        return ""
    return f" ({joined_words(dict.fromkeys(row.tensor for row in rows))})"


class _Count(NamedTuple):
    """In how many of the judged units (of attention, heads) a fault is."""

    offending: int
    judged: int
    others: int  # more of them, which other findings name
    unit: str  # what one is called

    @property
    def in_words(self) -> str:
        """Returns `in 3 of 16 heads`."""
        return f"in {self.offending} of {self.judged} {self.unit}s"


def _counted_sentence(
    start: str,
    template: str,
    fields: Mapping[str, object],
    count: _Count,
    *,
    median: bool,
) -> tuple[str, bool]:
    """Returns the sentence of a finding, `start` and the filled template, and whether it
    says in how many units the fault is. It does where the template has a place for that,
    it has at most WORDS words with it, several units were judged, and none is in other
    findings (`count.others`). With `median` it does not: its number is said to be the
    median unit's. Else `up to` stands before the number, if it has a place, where several
    units offend and none is in other findings."""
    some = not count.others and count.judged > 1
    up_to = "up to " if some and count.offending > 1 and not median else ""
    ways = [(f" {count.in_words}", ""), ("", "")] if some else [("", "")]
    if median:
        unit = f"median {count.unit}"
        ways = [("", f" in the {unit}")]
        if some:
            ways.insert(0, ("", f" in the median of {count.judged} {count.unit}s"))
    for units, of_units in ways:
        words = template.format(**fields, units=units, of_units=of_units, up_to=up_to)
        sentence = f"{start}{words}."
        if len(sentence.split()) <= WORDS:
            break
    return sentence, bool(units) and units in sentence


def _where_sentences(
    rows: Rows, count: _Count, named: Places, *, is_counted: bool
) -> Iterator[str]:
    """Yields `It errs in WHERE.`, if the rows tell where in their units; then `In 3 of 16
    heads, worst at layer 0 head 1.`, or `Worst at ...` alone where the finding's line has
    the count (`is_counted`). `rows`: the offending ones, at least one, the worst
    first."""
    if place := _place_in_units(rows, count.unit):
        yield f"It errs{place}."
    words = f"I{count.in_words[1:]}"
    if count.others:
        words += f", beside {count.others} of other findings"
    worst = f"orst at {named(rows[0])}."
    yield f"W{worst}" if is_counted else f"{words}, w{worst}"


def _cause_sentences(
    causes: Sequence[str], step: str | None, rows: Rows, unit: str
) -> Iterator[str]:
    """Yields sentences on why rows err. Of a mistake (`causes`): how much correcting it
    removes, then its other statements. Of an imprecise `step`: how much that explains.
    Else `Cause unknown: ...`, where the worst row says why, or nothing."""
    if causes:
        removed = _removal_clause(rows, unit)
        yield f"{removed[0].upper()}{removed[1:]}."
        if others := causes[1:]:
            yield f"Or: {'; or '.join(others)}."
        return
    if step is not None:
        alike = [row for row in rows if row.imprecision == step]
        share = statistics.median(row.imprecision_share or 0.0 for row in alike)
        text = f"Cause: {step}. That explains {share_in_words(share)} of the error in "
        text += f"{len(alike)} of these {unit}s"
        yield text + ("." if rows[0] in alike else ", not in the worst.")
        return
    why = rows[0].nulls.get("suspicion", "")
    if why and not (rows[0].errs_in and why.startswith("its cause")):
        yield f"Cause unknown: {why}."


def _common_imprecise_step(rows: Rows) -> str | None:
    """Returns the imprecise step that explains most of these heads; None where none
    explains more than half."""
    steps = Counter(row.imprecision for row in rows if row.imprecision)
    step, count = steps.most_common(1)[0] if steps else (None, 0)
    return step if 2 * count > len(rows) else None


def _shown_number(verdict: Test, rows: Rows) -> Value:
    """Returns the number that a finding shows: that of the first of these rows, the
    worst, since an earlier finding may show a larger one. Where the test is on a median,
    or observed no number, it is what the test observed."""
    if isinstance(verdict.observed, float) and not verdict.median and verdict.metric:
        return value_of(rows[0], verdict.metric)[0]
    return verdict.observed


def share_in_words(share: float) -> str:
    """Returns a share of an error as a percentage, with as many digits as tell it from
    all of it: `14 %`, `99.98 %`, and `all` where less than 1e-8 is left."""
    percent_left = 100 * (1 - share)
    if percent_left < 1e-6:
        return "all"
    if percent_left >= 1:
        return f"{100 * share:.0f} %"
    places = min(6, 1 - math.floor(math.log10(percent_left)))
    shown = math.floor((100 * share + 1e-9) * 10**places) / 10**places
    return f"{shown:.{places}f}".rstrip("0").rstrip(".") + " %"


def _removal_clause(rows: Rows, unit: str) -> str:
    """Returns `correcting it removes 99.7 % of the rms error of the median head`: the
    share in each format that was judged, or without any the share by the median
    `suspicion_cut`. The share in the finer format in which the mistake was identified is
    added, where that is another and a share is below CLEAR. `rows`: at least one; `unit`:
    what each is of, in words."""
    by_format = grouped(
        (r for r in rows if r.suspicion_share is not None), lambda r: r.format
    )
    shares = {
        fmt: share_in_words(_median_share(of_format))
        for fmt, of_format in by_format.items()
    }
    cut = statistics.median(row.suspicion_cut or 1.0 for row in rows)
    finer = next((row.suspicion_format for row in rows if row.suspicion_format), None)
    median = f" of the median {unit}" if len(rows) > 1 else ""
    if not shares:
        return f"correcting it removes {share_in_words(1 - 1 / cut)} of the error{median}"
    first, *others = shares.items()
    clause = f"correcting it removes {first[1]} of the rms error{median}"
    clause += f" in {first[0]}" if others else ""
    clause += "".join(f", {share} in {fmt}" for fmt, share in others)
    least = min(map(_median_share, by_format.values()))
    if finer and finer != rows[0].format and least < CLEAR:
        share = share_in_words(_least_removed_share(cut))
        clause += f", and at least {share} where the inputs are in {finer}"
    return clause


def _median_share(rows: Rows) -> float:
    """Returns the share of the error that correcting the mistake removes, of the median
    row; rows without a share count as 0."""
    return statistics.median(row.suspicion_share or 0.0 for row in rows)


# Of the error: a cause that explains as much needs no finer format to be believed
CLEAR = 0.9


def _least_removed_share(cut: float) -> float:
    """Returns the least share of a head's error that correcting a mistake removes in all
    of its rows. In the rows that were searched it makes the error `cut` times smaller; of
    the other rows' error twice as much may be left. Rounded down to nines (0.99, 0.999)
    from 0.9 on; 0 where `cut` is 2 or less."""
    left = 2 / max(cut, 2.0)
    return 1 - (left if left > 0.1 else 10.0 ** math.ceil(math.log10(left) - 1e-9))


def _test_fields(
    verdict: Test, observed: float | str | None, words: Words
) -> dict[str, object]:
    """Returns the fields of the templates of `WRONG` that a test fills, by name.
    `observed`: the number that the finding shows, or words; `words`: of the operation.
    Without a bound `bound` is empty."""
    spec = tensor_spec(verdict.tensor or "")
    bound = "" if verdict.bound is None else power(f"{verdict.bound:g}")
    shown = f"{observed}"
    if isinstance(observed, float):
        write = multiple if verdict.metric in RATIOS else three
        shown = write(observed, verdict.bound)
    return {
        "rule": verdict.rule,
        "format": verdict.format,
        "limit": verdict.limit,
        "bound": bound,
        "number": shown,
        "tensor": spec.in_words,
        "operation": words.operation,
        "plain": words.plain,
        "allowed": f"limit {bound}×" if verdict.bound else "expected: identical bits",
    }


def _row_fields(rows: Rows) -> dict[str, object]:
    """Returns the fields of the templates of `WRONG` that rows fill, by name: counts are
    sums over rows, all else is the worst row's or in words. `rows`: the worst first, at
    least one."""
    worst = rows[0]
    fields: dict[str, object] = {
        name: sum(getattr(row, name) or 0 for row in rows)
        for name in ("nonfinite", "empty_nonfinite", "empty_rows")
    }
    return fields | {
        "sampled": " sampled" if worst.sampled else "",
        "claim": _rounding_model_in_words(rows),
        "bias": worst.bias_size or 0.0,
        "direction": _bias_direction(worst),
        "bias_p": si(worst.bias_p),
        "bias_of": worst.bias_of,
        "sequences": worst.sequences,
        **_reference_fields(worst),
    }


def _unlike_the_exact(rows: Rows, every: Rows) -> str:
    """Returns in words how the elements that count in `nonfinite` of these rows, at least
    one, are unlike the exact result: NOT_FINITE or NOT_ALIKE where the floor's rows among
    `every` show it of all of them, else UNLIKE. The floor has as many elements as the
    exact result, rounded once, has finite ones."""
    keys = {_result_key(row) for row in rows}
    floors = {
        key: row.elements
        for row in every
        if row.role == "floor" and (key := _result_key(row)) in keys
    }
    ways = {_unlike_of_row(row, floors.get(_result_key(row))) for row in rows}
    return ways.pop() if len(ways) == 1 else UNLIKE


def _result_key(row: DeviationRow) -> tuple[object, ...]:
    """Returns the key of a tensor of a unit, in a call and in the format it is returned
    in: what one floor is of."""
    return *_call_key(row), row.out_format, row.tensor, row.head


def _unlike_of_row(row: DeviationRow, finite: int | None) -> str:
    """Returns how the elements that count in a row's `nonfinite` are unlike the exact
    result, as `_unlike_the_exact`. `finite`: elements of the floor's row; None: there is
    none.

    Elements of the row are those that are finite, and of the exact result too. Each other
    that the floor has is lost to NaN or infinity. Each that it does not have (it rounded
    to infinity) is in the row's alone, and makes the difference less than the count."""
    if finite is None or row.elements is None:
        return UNLIKE
    if finite - row.elements == (row.nonfinite or 0) + (row.overflow or 0):
        return NOT_FINITE
    # Beside a reference infinity in place of NaN counts too, and of rows that a sample
    # leaves out the floor has none
    if finite == 0 and row.beside_reference is None and not row.sampled:
        return NOT_ALIKE
    return UNLIKE


def _reference_fields(row: DeviationRow) -> dict[str, object]:
    """Returns the fields of the templates of `WRONG` that a row's numbers beside a
    reference fill, by name; empty where the row has none."""
    beside = row.beside_reference
    if beside is None:
        return {}
    at = ", ".join(map(str, beside.element_at))
    return {"form": beside.form, "slice_at": beside.slice_at, "element_at": f"[{at}]"}


def _place_in_units(rows: Rows, unit: str) -> str:
    """Returns ` in WHERE` in the words, of the rows' `errs_in_of`, that hold in more than
    half of the rows; with ` (3 of 4 heads)` where not in all. Else where the worst row
    errs, as ` in WHERE of the worst head`; empty where no place is known, as where it
    errs all over. `rows`: the worst first; `unit`: what each is of, in words."""
    places = Counter(words for row in rows for words in dict.fromkeys(row.errs_in_of))
    words, count = places.most_common(1)[0] if places else ("", 0)
    if 2 * count > len(rows):
        return f" in {words}" + (
            f" ({count} of {len(rows)} {unit}s)" if count < len(rows) else ""
        )
    if not rows[0].errs_in:
        return ""
    return f" in {rows[0].errs_in}" + (f" of the worst {unit}" if len(rows) > 1 else "")


def _bias_direction(row: DeviationRow) -> str:
    """Returns the direction of a row's bias: `away from zero` or `toward zero` where it
    is along the sign, else `upward` or `downward`. A bias of 0 or None is downward."""
    up = (row.bias_size or 0.0) > 0
    if row.bias_of == "sign":
        return "away from zero" if up else "toward zero"
    return "upward" if up else "downward"


def _rounding_model_in_words(rows: Rows) -> str:
    """Returns in words the rounding model that predicted the error: the emulation that
    the kernel claims or is taken to be, or the one inferred for a kernel without a claim;
    `its rounding model` where no row names one."""
    claim = next((row.claim for row in rows if row.claim), None)
    if claim and claim.startswith(INFERRED):
        return f"its inferred rounding model ({claim})"
    return f"the rounding model `{claim}`" if claim else "its rounding model"


def exceeded_finding(
    test: Test, statement: Statement, cause: str | None = None
) -> Finding:
    """Returns the finding of an exceeded test, with the sentence `KERNEL (FORMAT) LINE.`
    of the statement's line, and its details. `cause`: what explains it, None where that
    is unknown. The finding has no place, and no number where the test observed words."""
    observed = test.observed if isinstance(test.observed, float) else None
    return Finding(
        rule=test.rule,
        severity="exceeded",
        sentence=f"{label(test)} ({test.format}) {statement.line}.",
        details=statement.details,
        kernel=test.kernel or "",
        options=test.options,
        formats=(test.format or "",),
        tensor=test.tensor,
        metric=test.metric,
        observed=observed,
        limit=test.bound,
        count=test.offending,
        judged=test.judged,
        cause=cause,
    )


def run_findings(tests: Sequence[Test], of: Words = ATTENTION_WORDS) -> Iterator[Finding]:
    """Yields findings on calls in which a kernel failed, or did not run although it had
    to; then notes on calls that it declined while it ran others. `of`: the operation's
    words."""
    runs = [test for test in tests if test.runs]
    for test in runs:
        if test.outcome not in (None, Outcome.PASSED):
            words = f"{'is required' if test.required else 'was requested'}, but "
            words += f"{of.skipped} in" if test.unjudged else "gave no result in"
            yield _run_finding(test, RUNS, "failed in" if test.offending else words)
    for test in runs:
        if test.judged and test.standing is Standing.NOT_APPLICABLE:
            yield _run_finding(test, "refuses", "refuses")


def _run_finding(test: Test, rule: str, words: str) -> Finding:
    """Returns the finding on a kernel's calls. `rule`: `runs`, or `refuses` for a note;
    `words`: what the kernel did, before the count of calls, as in `failed in`."""
    every = test.judged + test.unjudged + test.offending
    count = test.offending or test.unjudged or test.judged
    what = "backward passes" if test.is_backward else "calls"
    sentence = f"{label(test)} ({test.format}) {words} {count} of {every} {what}"
    reasons = test.reasons[:REASONS]
    sentence, details = first_clauses(sentence, reasons, more="Reason: ")
    return Finding(
        kernel=test.kernel or "",
        options=test.options,
        place=next(iter(test.places), None),
        rule=rule,
        severity="unmeasured" if rule == RUNS else "note",
        sentence=sentence,
        details=details,
        formats=(test.format or "",),
        tensor=test.tensor if test.offending else None,
        count=count,
        judged=every,
    )


def first_clauses(
    name: str,
    clauses: Sequence[str],
    *,
    between: str = ": ",
    more: str = "",
    least: int = 0,
) -> Statement:
    """Returns a sentence of `name` and as many of the first clauses as make at most WORDS
    words, but at least `least` of them, and the others as a sentence of the details. Of
    fewer clauses than `least` all are in the line. `between`: what stands behind the
    name; `more`: how the details begin. A full stop of PyTorch's behind a clause goes."""
    clauses = [clause.removesuffix(".") for clause in clauses]
    for count in range(len(clauses), min(least, len(clauses)) - 1, -1):
        line = f"{name}{between if count else ''}{'; '.join(clauses[:count])}."
        if len(line.split()) <= WORDS:
            break
    others = "; ".join(clauses[count:])
    return Statement(line, f"{more}{others}." if others else "")


def _tested_sentence(
    tests: Sequence[Test], findings: Sequence[Finding], unit: str
) -> Iterator[str]:
    """Yields one sentence on what the rules were applied to, and on rules that were not
    applied and why: `All applied rules passed: ...`, or `Checked: ...` where a finding is
    more than a note. Nothing where no rule was applied. `unit`: what a result is of, in
    words."""
    of_rows = [
        test for test in tests if test.metric not in (None, "calls") or not test.kernel
    ]
    by_rule = grouped((t for t in of_rows if t.rule != SOMETHING), attrgetter("rule"))
    judged = {rule: sum(t.judged for t in of_rule) for rule, of_rule in by_rule.items()}
    applied = [rule for rule, count in judged.items() if count]
    if not applied:
        return
    kernels, formats = (
        joined_words(
            dict.fromkeys(getattr(test, name) for test in of_rows if test.judged)
        )
        for name in ("kernel", "format")
    )
    start = (
        "Checked"
        if any(f.severity != "note" for f in findings)
        else "All applied rules passed"
    )
    results = f"{max(judged.values())} results (one per {unit} and tensor)"
    what = f"{kernels} in {formats}, {results}"
    sentence = f"{start}: {what}; rules: {joined_words(applied)}."
    lacking: dict[str, list[str]] = {}  # rules by what they lack
    for rule, of_rule in by_rule.items():
        reasons = list(dict.fromkeys(why for test in of_rule for why in test.reasons))
        why = f"{'partly: ' if judged[rule] else ''}{'; '.join(reasons[:2])}"
        if any(reason.startswith(NOTHING) for reason in reasons):
            why = "no result has the metric it needs"
        if reasons:
            lacking.setdefault(why, []).append(rule)
    parts = [f"{joined_words(rules)} ({why})" for why, rules in lacking.items()]
    yield sentence + (f" Rules not applied: {'; '.join(parts)}." if parts else "")


def _inferred_model_sentences(kernels: Sequence[DeviationRow]) -> Iterator[str]:
    """Yields a sentence for each kernel without a declared rounding model that was judged
    by an inferred one: which models judged which of its tensors in how many calls.
    `kernels`: rows of kernels."""
    for kernel, rows in grouped(kernels, attrgetter("kernel")).items():
        judged = [row for row in rows if row.claim]
        ways = grouped(
            (r for r in judged if str(r.claim).startswith(INFERRED)), lambda r: r.claim
        )
        if not ways:
            continue
        every = len({_call_key(row) for row in judged})
        parts = []
        for claim, alike in sorted(ways.items(), key=lambda item: -len(item[1])):
            tensors = joined_words(dict.fromkeys(row.tensor for row in alike))
            parts.append(
                f"{claim} ({tensors} in {len({_call_key(row) for row in alike})})"
            )
        least = (
            "; the rest as `fa2`" if len(judged) > sum(map(len, ways.values())) else ""
        )
        yield (
            f"{kernel} declares no rounding model. Of its {every} calls these are judged "
            f"{joined_words(parts)}{least}."
        )


def _call_key(row: DeviationRow) -> tuple[object, ...]:
    """Returns the key of the row's call in its format: case, call, seed, format."""
    return row.case, row.call, row.seed, row.format


def remark_sentences(rows: Iterable[DeviationRow]) -> Iterator[str]:
    """Yields sentences on kernels that return another format than requested, or whose
    log-sum-exp is not judged; on the rounding models inferred for kernels that declare
    none; and on intermediate overflows that the rounding model predicts."""
    kernels = [
        r
        for r in rows
        if r.role == "kernel"
        and (r.nulls or r.claim or r.overflow or r.came_in or r.out_format != r.format)
    ]
    # A function's dtypes are its reference's, by the rule `form`
    attention = [r for r in kernels if r.beside_reference is None]
    other = [r for r in attention if (r.came_in or r.out_format) not in (None, r.format)]
    returned = grouped(other, attrgetter("kernel", "out_format", "came_in", "format"))
    for (kernel, instead, wide, fmt), rows_of_format in returned.items():
        tensors = joined_words(dict.fromkeys(row.tensor for row in rows_of_format))
        more = (
            f"; all its values are representable in {fmt}, and judged as {fmt}"
            if wide
            else ""
        )
        yield (
            f"{kernel} returns {wide or instead} where {fmt} was requested "
            f"({tensors}){more}."
        )
    other = [r for r in kernels if "lse_error" in r.nulls]
    for kernel, unjudged in grouped(other, attrgetter("kernel")).items():
        yield f"{kernel}: log-sum-exp not judged: {unjudged[0].nulls['lse_error']}."
    yield from _inferred_model_sentences(kernels)
    over = grouped(
        (r for r in kernels if r.overflow), attrgetter("kernel", "format", "tensor")
    )
    for (kernel, fmt, tensor), overflowing in over.items():
        count = sum(row.overflow or 0 for row in overflowing)
        yield (
            f"{tensor} of {kernel} overflows in {count} "
            "elements where "
            "the exact result is finite; by its rounding model, intermediates "
            f"overflow {fmt}."
        )
