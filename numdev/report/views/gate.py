"""A judgement, shown: the outcome; what is beyond which limit; what passed; what could have been
caught. The terminal, JUnit and GitHub all take their sentences from here.

A judgement that did not pass has at least one problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from numdev.gate.rules import Rules
from numdev.gate.verdict import Decided, Dose, Held, Judged, Judgement, Outcome, Power, Verdict
from numdev.gate.words import label
from numdev.report import Finding, Place
from numdev.report.document import (
    Bullets,
    Document,
    Item,
    Node,
    Paragraph,
    Style,
    Table,
    notes,
    words,
)
from numdev.report.views import findings as listed

GRAVITY = ("exceeded", "unmeasured", "passed", "untested")
OUTCOMES: dict[str, tuple[str, Style]] = {
    "passed": ("PASSED", "good"),
    "exceeded": ("EXCEEDED", "bad"),
    "unmeasured": ("NOT MEASURED", "bad"),
}
SIGNS = {
    "passed": "✅ passed",
    "exceeded": "❌ exceeded",
    "unmeasured": "⚠️ not measured",
    "untested": "➖ not judged",
}
SHOWN = 12
"""Offending rows that are shown, the worst of all rules first."""
SENTENCES = 50
"""Problems in a summary: GitHub shows none that is longer than 1 MiB."""
NO_POWER = (
    "No planted faults in this report, so nobody knows what these limits would have caught on this "
    "data: audit with --control."
)


def document(
    decided: Decided,
    findings: Sequence[Finding],
    tested: Sequence[str],
    named: Callable[[Place], str],
) -> Document:
    """What `numdev gate` prints. `findings` are the exceeded verdicts in sentences, and `named`
    says what a place is called."""
    judgement = decided.judgement
    word, style = OUTCOMES[judgement.outcome]
    return Document(
        "numdev gate",
        (
            Paragraph(f"{word}, by the rules {judgement.rules}.", style),
            _offending(decided.judged, named),
            listed(tuple(_sourced(finding, judgement.verdicts) for finding in findings)),
            *(Paragraph(problem.sentence, "warn") for problem in unmeasured(judgement)),
            *_passed(judgement.verdicts),
            *notes((*tested, *beside(judgement))),
            _doses(judgement.power),
            *(() if judgement.power else notes((NO_POWER,))),
        ),
    )


def summary(judgement: Judgement, findings: Sequence[Finding], tested: Sequence[str]) -> Document:
    """The judgement for a step's summary: what is wrong, a table of rules, what was judged."""
    problems = list(problems_of(judgement, findings))
    wrong = [Item(f"{SIGNS[p.severity].split()[0]} {p.sentence}") for p in problems[:SENTENCES]]
    if len(problems) > SENTENCES:
        wrong.append(Item(f"and {len(problems) - SENTENCES} more"))
    said = [finding.sentence for finding in findings if finding.severity == "note"]
    by = f"By the rules {judgement.rules}."
    return Document(
        f"numdev gate: {SIGNS[judgement.outcome]}",
        (
            Bullets(tuple(wrong)),
            words(
                ("rule", "", "heads", "worst", "limit", "in"),
                (
                    (line.rule, SIGNS[line.outcome], line.heads, line.worst, line.limit, line.where)
                    for line in lines_of(judgement)
                ),
            ),
            Bullets(tuple(map(Item, (by, *said, *tested, *beside(judgement))))),
        ),
    )


# --- what is wrong -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One reason why a judgement did not pass."""

    severity: Literal["exceeded", "unmeasured"]
    title: str
    """The kernel, and what is judged."""
    sentence: str
    rule: str | None = None
    """The threshold that says so; None where none does."""


def problems_of(judgement: Judgement, findings: Sequence[Finding]) -> Iterator[Problem]:
    """All of them, the gravest first; none exactly where the judgement passed. `findings` are its
    own (`numdev.findings`); their notes are no problems."""
    for finding in findings:
        if finding.severity == "exceeded":
            title = f"{finding.kernel}: {finding.rule}"
            yield Problem(
                severity="exceeded", title=title, sentence=finding.sentence, rule=finding.rule
            )
    for finding in findings:
        if finding.severity == "unmeasured":
            title = f"{finding.kernel} did not run"
            yield Problem(severity="unmeasured", title=title, sentence=finding.sentence)
    yield from unmeasured(judgement)


def unmeasured(judgement: Judgement) -> Iterator[Problem]:
    """What could not be judged and had to be, but for kernels that failed, which are findings."""
    for name in judgement.missing:
        at = f" ({judgement.file}:{judgement.required_line})" if judgement.required_line else ""
        yield _unmeasured("a required kernel", f"{name} is required and not in this report{at}.")
    if not any(call.ok for call in judgement.calls):
        yield _unmeasured("no kernel", "No kernel under audit was measured.")
    elif not any(v.outcome != "untested" for v in judgement.verdicts):
        yield _unmeasured("nothing judged", "No rule could be applied to any row.")
    lacking: dict[tuple[str, str, tuple[str, ...]], list[Verdict]] = {}  # by what is said
    for v in judgement.verdicts:
        if v.outcome == "unmeasured":
            lacking.setdefault((sourced(v), v.limit, v.reasons), []).append(v)
    for (source, limit, reasons), these in lacking.items():
        rule = these[0].rule
        who = dict.fromkeys(f" of {v.kernel} ({v.tensor}, {v.format})" for v in these if v.kernel)
        heads = sum(v.unjudged for v in these)
        where = f" in {heads} heads{','.join(who)}" if who else ""
        limited = f" ({limit})" if limit else ""
        yield _unmeasured(
            f"{rule} not judged",
            f"{source}{limited} could not be judged{where}: {'; '.join(reasons[:3])}.",
            rule,
        )


def sourced(verdict: Verdict) -> str:
    """The rule and where it stands: `error (ci.yaml:12)`."""
    if verdict.file is None:
        return verdict.rule
    line = "" if verdict.line is None else f":{verdict.line}"
    return f"{verdict.rule} ({verdict.file}{line})"


def _unmeasured(title: str, sentence: str, rule: str | None = None) -> Problem:
    return Problem(severity="unmeasured", title=title, sentence=sentence, rule=rule)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One rule in a table: where it came nearest to its limit, or went beyond."""

    rule: str
    outcome: Outcome
    heads: str
    worst: str
    limit: str
    where: str


def lines_of(judgement: Judgement) -> Iterator[Line]:
    """A line for each rule, in the rules' order."""
    for rule in dict.fromkeys(v.rule for v in judgement.verdicts):
        these = [v for v in judgement.verdicts if v.rule == rule]
        worst = min(these, key=_rank)
        judged = sum(v.judged for v in these)
        bad = sum(v.offending for v in these)
        yield Line(
            rule=rule,
            outcome=worst.outcome,
            heads=f"{bad}/{judged}" if bad else str(judged or "-"),
            worst=number(worst),
            limit=worst.limit.removeprefix(f"{worst.metric} "),
            where=" ".join((worst.kernel or "-", worst.tensor or "", worst.format or "")),
        )


def _rank(verdict: Verdict) -> tuple[int, float]:
    """The gravest outcome first, then by how near to the limit."""
    return GRAVITY.index(verdict.outcome), -_nearness(verdict)


def number(verdict: Verdict) -> str:
    """What was observed, in three digits or in words; - where nothing was."""
    if isinstance(verdict.observed, float):
        return f"{verdict.observed:.3g}"
    return verdict.observed or "-"


def beside(judgement: Judgement) -> Iterator[str]:
    """What is told, and not judged."""
    if judgement.fa_rule is not None:
        passing, heads = judgement.fa_rule
        yield f"flash-attention's own 2 x rule, for comparison: {passing} of {heads} heads pass."
    for call in judgement.calls:
        if not call.ok and call.skipped and not call.required:
            what = " backward" if call.backward else ""
            yield f"{label(call)}{what} ({call.format}) was skipped: {'; '.join(call.reasons[:3])}"


# --- the table of rows, and of doses -------------------------------------------------------------


def _offending(judged: Iterable[Judged], named: Callable[[Place], str]) -> Table:
    """A line for each row that is beyond a limit, the one farthest beyond first."""
    beyond = [(held, each.verdict) for each in judged for held in each.beyond]
    beyond.sort(key=lambda pair: -pair[0].excess)
    rows = [
        (
            f"{held.excess:.3g} x" if math.isfinite(held.excess) else "-",
            label(verdict),
            f"{verdict.tensor} {verdict.format}",
            named(Place.of(held.row)),
            _observed(held),
            str(held.limit),
            verdict.rule,
        )
        for held, verdict in beyond[:SHOWN]
    ]
    if len(beyond) > SHOWN:
        rows.append((f"and {len(beyond) - SHOWN} more", *[""] * 6))  # type: ignore[arg-type]
    return words(("over", "kernel", "in", "where", "number", "limit", "rule"), rows)


def _observed(held: Held) -> str:
    value = held.row.suspicion if held.limit.absent else held.value
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _sourced(finding: Finding, verdicts: Sequence[Verdict]) -> Finding:
    """A finding, with where its rule stands."""
    rule = next((v for v in verdicts if v.rule == finding.rule), None)
    if rule is None or rule.file is None:
        return finding
    return finding.model_copy(update={"sentence": f"{finding.sentence} Rule: {sourced(rule)}."})


def _passed(verdicts: Sequence[Verdict]) -> Iterator[Node]:
    """One line: the rules that passed, each where it came nearest to its limit."""
    rules = []
    for rule in dict.fromkeys(v.rule for v in verdicts):
        these = [v for v in verdicts if v.rule == rule]
        passed = [v for v in these if v.outcome == "passed"]
        if passed and all(v.outcome in ("passed", "untested") for v in these):
            rules.append(f"{rule}{_nearest(passed)}")
    if rules:
        yield Paragraph(f"Passed: {'; '.join(rules)}.", "good")


def _nearest(verdicts: Sequence[Verdict]) -> str:
    """The number nearest to its limit, in brackets, and what was excused."""
    worst = max(verdicts, key=_nearness)
    excused = sum(v.excused for v in verdicts)
    parts = []
    if isinstance(worst.observed, float | int):
        parts.append(f"{worst.observed:.3g}, {worst.limit.removeprefix(f'{worst.metric} ')}")
    if excused:
        parts.append(f"{excused} beyond it, within the old seeds' spread or noise")
    return f" ({'; '.join(parts)})" if parts else ""


def _nearness(verdict: Verdict) -> float:
    if not isinstance(verdict.observed, float | int):
        return 0.0
    return abs(verdict.observed) / (verdict.bound or 1.0)


def _doses(power: Sequence[Power]) -> Table:
    """A line for each planted fault in each format: its doses, and what caught them."""
    rows = []
    for each in power:
        by = dict.fromkeys(rule for dose in each.doses for rule in dose.by)
        known = any(dose.outcome != "unmeasured" for dose in each.doses)
        never = "at no dose" if known else "not measured"
        since = never if each.caught_from is None else f"{each.caught_from:g}"
        sizes = (_sizes(each.doses, outcome) for outcome in ("missed", "caught"))
        rows.append((each.fault, each.format, *sizes, since, ", ".join(by)))
    return words(("planted fault", "format", "missed", "caught", "caught from", "by"), rows)


def _sizes(tried: Iterable[Dose], outcome: str) -> str:
    return " ".join(f"{dose.dose:g}" for dose in tried if dose.outcome == outcome)


# --- where a rule stands -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A line of a rule file."""

    file: Path
    line: int | None
    """From 1 on."""

    def __str__(self) -> str:
        return f"{self.file}" if self.line is None else f"{self.file}:{self.line}"


def spots_of(rules: Rules, file: Path) -> dict[str, Spot]:
    """Where each threshold of `rules` begins, by its name. `file` is what they were read from, for
    thresholds that do not say it themselves."""
    return {t.name: Spot(file=Path(t.file or file), line=t.line) for t in rules.thresholds}
