"""A judgement, shown: the outcome, what is wrong, how near each rule came, which faults
are caught.

One document for the terminal and for GitHub; annotations and JUnit take their sentences
from here. A judgement that did not pass has at least one problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from numdev.gate.findings import kernel_verdicts
from numdev.gate.judgement import (
    RATIOS,
    REQUIRED,
    SOMETHING,
    JudgedRow,
    Judgement,
    Power,
    Statement,
    Test,
)
from numdev.grouping import grouped
from numdev.report import Finding, Outcome, Place, Places, Report, Standing
from numdev.report import document as doc
from numdev.report.number_text import label, multiple, three
from numdev.report.views import Verdicts, style_of, verdicts
from numdev.report_kinds import judged_by
from numdev.tensor_properties import ATTENTION_WORDS

SHOWN = 12  # offending rows, the worst of all rules first
SENTENCES = 50  # problems: GitHub shows no summary that is longer than 1 MiB
NO_POWER = (
    "No faults were planted in this run, so what these limits would catch on this "
    "data is unknown: "
    "audit with --control."
)


class Problem(NamedTuple):
    """One reason why a judgement did not pass; the title names the kernel and what is
    judged."""

    outcome: Outcome
    title: str
    sentence: str
    details: str = ""

    @property
    def whole(self) -> str:
        """Returns the sentence with its details."""
        return f"{self.sentence} {self.details}".rstrip()


def page_of(judgement: Judgement, report: Report) -> doc.Document:
    """Returns the judgement of a report as a document. Raises UsageError for a kind of
    report that is not judged."""
    study = judged_by(report.kind)
    findings, tested = study.findings(judgement, report)
    placed = any(test.places for test in judgement.tests) or any(
        f.place for f in findings
    )
    rows = getattr(report, "rows", ()) if placed else ()
    words = getattr(report, "words", ATTENTION_WORDS)
    return document(
        judgement, findings, tested, Places(rows, words),
        plants="control" in report.request, passing=partial(study.passing, report),
    )  # fmt: skip


def document(
    judgement: Judgement,
    findings: Sequence[Finding],
    tested: Sequence[str],
    place: Places,
    *,
    plants: bool = True,
    passing: Callable[[Sequence[Test]], Statement | None] = lambda tests: None,
) -> doc.Document:
    """Returns a judgement as a document. `findings`: those of the judgement; `tested`:
    sentences on what was tested; `place` puts a place in words; `plants`: whether faults
    could have been planted in such a run; `passing`: returns what is said of a kernel
    that passed, by its tests, or None."""
    leading = kernel_verdicts(judgement, findings, passing)[:SENTENCES]
    lines = verdicts(Verdicts(verdicts=leading, findings=findings))
    shown = {findings[v.finding].sentence for v in leading if v.finding is not None}
    problems = [p for p in problems_of(judgement, findings) if p.sentence not in shown]
    room = SENTENCES - len(leading)
    items = [
        doc.Item(p.sentence, style=style_of(p.outcome), detail=p.details)
        for p in problems[:room]
    ]
    if len(problems) > room:
        items.append(doc.Item(f"and {len(problems) - room} more"))
    declined = [finding.sentence for finding in findings if finding.severity == "note"]
    verdict = f"{judgement.outcome.word} by the {judgement.rules} rules."
    columns = ("rule", "outcome", "judged", "worst", "limit", "in")
    notes = [*declined, *tested, *_unjudged_sentences(judgement)]
    if plants and not judgement.power:
        notes.append(NO_POWER)
    blocks: tuple[doc.Node, ...] = (
        doc.Paragraph(verdict, style_of(judgement.outcome)),
        doc.Bullets(tuple(lines), "verdicts"),
        doc.Bullets(tuple(items)),
        doc.text_table(columns, _rule_rows(judgement)),
        _beyond_table(judgement.tests, place),
        _doses_table(judgement.power),
        *doc.notes(notes, doc.ON_REQUEST),
    )
    return doc.Document("numdev gate", blocks)


def problems_of(judgement: Judgement, findings: Sequence[Finding]) -> Iterator[Problem]:
    """Yields every reason why the judgement did not pass, the gravest first; none exactly
    where it passed. `findings` are its own; their notes are no problems."""
    for f in findings:
        if f.severity == "exceeded":
            title = f"{f.kernel}: {f.rule}"
            yield Problem(Outcome.EXCEEDED, title, f.sentence, f.details)
    for f in findings:
        if f.severity == "unmeasured":
            title = f"{f.kernel} {'crashed' if f.tensor else 'did not run'}"
            yield Problem(Outcome.NOT_JUDGED, title, f.sentence, f.details)
    lacking = [t for t in judgement.tests if t.decides_nothing and not t.runs]
    for test in lacking:
        if test.rule == SOMETHING or test.rule.startswith(f"{REQUIRED} "):
            yield Problem(Outcome.NOT_JUDGED, test.rule, f"{test.reasons[0]}.")
    rules = (
        t
        for t in lacking
        if t.rule != SOMETHING and not t.rule.startswith(f"{REQUIRED} ")
    )
    for (rule, limit, reasons), tests in grouped(
        rules, lambda t: (t.rule, t.limit, t.reasons)
    ).items():
        who = dict.fromkeys(f" of {_subject(test)}" for test in tests if test.kernel)
        rows = sum(test.unjudged for test in tests)
        where = f"{f' in {rows} results' if rows else ''}{','.join(who)}"
        named = f"{rule} ({limit})" if limit else rule
        sentence = f"{named} could not be judged{where}: {'; '.join(reasons[:3])}."
        yield Problem(Outcome.NOT_JUDGED, f"{rule} not judged", sentence)


def _subject(test: Test) -> str:
    """Returns of which kernel, tensor and format a test is, as in `mine (out,
    bfloat16)`."""
    return f"{test.kernel} ({', '.join(filter(None, (test.tensor, test.format)))})"


def _unjudged_sentences(judgement: Judgement) -> Iterator[str]:
    """Yields a sentence for each kernel, or its backward pass, that declined all calls
    without being asked for. Then one on how many heads pass flash-attention's own rule,
    where that was counted."""
    for test in judgement.tests:
        if test.runs and not test.judged and test.standing is Standing.NOT_APPLICABLE:
            what = " backward" if test.is_backward else ""
            yield (
                f"{label(test)}{what} ({test.format}) was skipped: "
                f"{'; '.join(test.reasons[:3])}"
            )
    if rule := judgement.fa_rule:
        yield (
            f"{rule[0]} of {rule[1]} heads pass flash-attention's own 2× rule, a "
            "looser one."
        )


def _rule_rows(judgement: Judgement) -> Iterator[tuple[str | doc.Cell, ...]]:
    """Yields a table's line for each rule but RUNS and SOMETHING, in order: the test with
    the gravest outcome, of these the one nearest to its limit or farthest beyond, and how
    many results of the rule offend, of those judged."""
    order = [*Outcome, None]
    of_rules = (
        test for test in judgement.tests if not test.runs and test.rule != SOMETHING
    )
    for rule, tests in grouped(of_rules, attrgetter("rule")).items():
        nearest = min(tests, key=lambda t: (order.index(t.outcome), -t.nearness))
        where = (nearest.kernel or "-", nearest.tensor or "", nearest.format or "")
        judged, bad = (
            sum(test.judged for test in tests),
            sum(test.offending for test in tests),
        )
        yield (
            rule,
            doc.Cell(nearest.standing.word, style=style_of(nearest.outcome)),
            f"{bad}/{judged}" if bad else str(judged or "-"),
            observed_text(nearest.observed, nearest.metric),
            nearest.limit.removeprefix(f"{nearest.metric} "),
            " ".join(where),
        )


def observed_text(observed: float | str | None, metric: str | None = None) -> str:
    """Returns what was observed: a float in three digits, text as it is, `-` for None and
    for empty text. Of a ratio, by its `metric`, 2 is 2.00."""
    if not isinstance(observed, float):
        return str(observed or "-")
    return multiple(observed) if metric in RATIOS else three(observed)


def _beyond_table(tests: Iterable[Test], place: Places) -> doc.Table:
    """Returns a table with a line for each row that is beyond a limit, the one farthest
    beyond first, at most SHOWN. Offenders that are no rows with a limit are left out."""
    every = ((offender, test) for test in tests for offender in test.beyond)
    beyond = [
        (offender, test) for offender, test in every if isinstance(offender, JudgedRow)
    ]
    beyond.sort(key=lambda pair: -pair[0].excess)
    rows = [
        (
            f"{three(offender.excess)}×" if math.isfinite(offender.excess) else "-",
            label(test),
            f"{test.tensor} {test.format}",
            place(Place.of(offender.row)),
            observed_text(
                offender.row.suspicion if offender.limit.absent else offender.value
            ),
            str(offender.limit),
            test.rule,
        )
        for offender, test in beyond[:SHOWN]
    ]
    more = f", the first {SHOWN} of {len(beyond)}" if len(beyond) > SHOWN else ""
    columns = ("over", "kernel", "in", "where", "number", "limit", "rule")
    title = f"Beyond a limit{more}"
    return doc.text_table(columns, rows, title=title, only=doc.ON_REQUEST)


def _doses_table(power: Sequence[Power]) -> doc.Table:
    """Returns a table with a line for each planted fault in each format: its doses, and
    what caught them."""
    rows = []
    for each in power:
        by = dict.fromkeys(rule for dose in each.doses for rule in dose.by)
        is_measured = any(dose.outcome != "unmeasured" for dose in each.doses)
        never = "at no dose" if is_measured else "not measured"
        since = never if each.caught_from is None else f"{each.caught_from:g}"
        sizes = (
            " ".join(f"{dose.dose:g}" for dose in each.doses if dose.outcome == outcome)
            for outcome in ("missed", "caught")
        )
        rows.append((each.fault, each.format, *sizes, since, ", ".join(by)))
    columns = ("planted fault", "format", "missed", "caught", "caught from", "by")
    return doc.text_table(columns, rows, title="What these rules catch")
