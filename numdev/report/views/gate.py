"""A judgement, shown: the outcome; what is beyond which limit; what passed; what could have been
caught. The terminal, JUnit and GitHub all take their sentences from here.

A judgement that did not pass has at least one problem.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from numdev.gate.findings import Places, label
from numdev.gate.verdict import Held, Judgement, Power, Verdict
from numdev.report import Finding, Place
from numdev.report import document as doc
from numdev.report.views import findings as listed

GRAVITY = ("exceeded", "unmeasured", "passed", "untested")
OUTCOMES: dict[str, tuple[str, doc.Style]] = {
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
    judgement: Judgement, findings: Sequence[Finding], tested: Sequence[str], named: Places
) -> doc.Document:
    """What `numdev gate` prints. `findings` are the exceeded verdicts in sentences, and `named`
    says what a place is called."""
    word, style = OUTCOMES[judgement.outcome]
    return doc.Document(
        "numdev gate",
        (
            doc.Paragraph(f"{word}, by the rules {judgement.rules}.", style),
            _offending(judgement.verdicts, named),
            listed(tuple(_sourced(finding, judgement.verdicts) for finding in findings)),
            *(doc.Paragraph(problem.sentence, "warn") for problem in unmeasured(judgement)),
            *_passed(judgement.verdicts),
            *doc.notes((*tested, *beside(judgement))),
            _doses(judgement.power),
            *(() if judgement.power else doc.notes((NO_POWER,))),
        ),
    )


def summary(
    judgement: Judgement, findings: Sequence[Finding], tested: Sequence[str]
) -> doc.Document:
    """The judgement for a step's summary: what is wrong, a table of rules, what was judged."""
    problems = list(problems_of(judgement, findings))
    wrong = [f"{SIGNS[p.severity].split()[0]} {p.sentence}" for p in problems[:SENTENCES]]
    if len(problems) > SENTENCES:
        wrong.append(f"and {len(problems) - SENTENCES} more")
    notes = [finding.sentence for finding in findings if finding.severity == "note"]
    by = f"By the rules {judgement.rules}."
    return doc.Document(
        f"numdev gate: {SIGNS[judgement.outcome]}",
        (
            doc.bullets(wrong),
            doc.words(("rule", "", "heads", "worst", "limit", "in"), _lines(judgement)),
            doc.bullets((by, *notes, *tested, *beside(judgement))),
        ),
    )


# --- what is wrong -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One reason why a judgement did not pass: the kernel and what is judged, in words, and the
    threshold that says so, if one does."""

    severity: Literal["exceeded", "unmeasured"] = "unmeasured"
    title: str
    sentence: str
    rule: str | None = None


def problems_of(judgement: Judgement, findings: Sequence[Finding]) -> Iterator[Problem]:
    """All of them, the gravest first; none exactly where the judgement passed. `findings` are its
    own (`numdev.findings`); their notes are no problems."""
    for f in findings:
        if f.severity == "exceeded":
            yield Problem(severity=f.severity, title=f"{f.kernel}: {f.rule}", sentence=f.sentence,
                          rule=f.rule)  # fmt: skip
    for f in findings:
        if f.severity == "unmeasured":
            yield Problem(title=f"{f.kernel} did not run", sentence=f.sentence)
    yield from unmeasured(judgement)


def unmeasured(judgement: Judgement) -> Iterator[Problem]:
    """What could not be judged and had to be, but for kernels that failed, which are findings."""
    for name in judgement.missing:
        at = f" ({judgement.file}:{judgement.required_line})" if judgement.required_line else ""
        sentence = f"{name} is required and not in this report{at}."
        yield Problem(title="a required kernel", sentence=sentence)
    if not any(call.ok for call in judgement.calls):
        yield Problem(title="no kernel", sentence="No kernel under audit was measured.")
    elif not any(v.outcome != "untested" for v in judgement.verdicts):
        yield Problem(title="nothing judged", sentence="No rule could be applied to any row.")
    lacking: dict[tuple[str, str, tuple[str, ...]], list[Verdict]] = {}  # by what is said
    for v in judgement.verdicts:
        if v.outcome == "unmeasured":
            lacking.setdefault((sourced(v), v.limit, v.reasons), []).append(v)
    for (source, limit, reasons), these in lacking.items():
        rule = these[0].rule
        who = dict.fromkeys(f" of {v.kernel} ({v.tensor}, {v.format})" for v in these if v.kernel)
        where = f" in {sum(v.unjudged for v in these)} heads{','.join(who)}" if who else ""
        limited = f" ({limit})" if limit else ""
        sentence = f"{source}{limited} could not be judged{where}: {'; '.join(reasons[:3])}."
        yield Problem(title=f"{rule} not judged", sentence=sentence, rule=rule)


def sourced(verdict: Verdict) -> str:
    """The rule and where it stands: `error (ci.yaml:12)`."""
    if verdict.file is None:
        return verdict.rule
    line = "" if verdict.line is None else f":{verdict.line}"
    return f"{verdict.rule} ({verdict.file}{line})"


def _by_rule(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    rules: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        rules.setdefault(verdict.rule, []).append(verdict)
    return rules


def _lines(judgement: Judgement) -> Iterator[tuple[str, ...]]:
    """A line for each rule: where it came nearest to its limit, or went beyond."""
    for rule, these in _by_rule(judgement.verdicts).items():
        # The gravest outcome first, then the nearest to the limit.
        worst = min(these, key=lambda v: (GRAVITY.index(v.outcome), -_nearness(v)))
        judged, bad = sum(v.judged for v in these), sum(v.offending for v in these)
        yield (
            rule,
            SIGNS[worst.outcome],
            f"{bad}/{judged}" if bad else str(judged or "-"),
            number(worst),
            worst.limit.removeprefix(f"{worst.metric} "),
            " ".join((worst.kernel or "-", worst.tensor or "", worst.format or "")),
        )


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


def _offending(verdicts: Iterable[Verdict], named: Places) -> doc.Table:
    """A line for each row that is beyond a limit, the one farthest beyond first."""
    beyond = [(held, verdict) for verdict in verdicts for held in verdict.beyond]
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
    return doc.words(("over", "kernel", "in", "where", "number", "limit", "rule"), rows)


def _observed(held: Held) -> str:
    value = held.row.suspicion if held.limit.absent else held.value
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _sourced(finding: Finding, verdicts: Sequence[Verdict]) -> Finding:
    """A finding, with where its rule stands."""
    rule = next((v for v in verdicts if v.rule == finding.rule), None)
    if rule is None or rule.file is None:
        return finding
    return finding.model_copy(update={"sentence": f"{finding.sentence} Rule: {sourced(rule)}."})


def _passed(verdicts: Sequence[Verdict]) -> Iterator[doc.Node]:
    """One line: the rules that passed, each where it came nearest to its limit, and how many rows
    were excused."""
    rules = []
    for rule, these in _by_rule(verdicts).items():
        passed = [v for v in these if v.outcome == "passed"]
        if not passed or any(v.outcome not in ("passed", "untested") for v in these):
            continue
        worst, excused = max(passed, key=_nearness), sum(v.excused for v in passed)
        parts = []
        if isinstance(worst.observed, float | int):
            parts.append(f"{worst.observed:.3g}, {worst.limit.removeprefix(f'{worst.metric} ')}")
        if excused:
            parts.append(f"{excused} beyond it, within the old seeds' spread or noise")
        rules.append(rule + (f" ({'; '.join(parts)})" if parts else ""))
    if rules:
        yield doc.Paragraph(f"Passed: {'; '.join(rules)}.", "good")


def _nearness(verdict: Verdict) -> float:
    if not isinstance(verdict.observed, float | int):
        return 0.0
    return abs(verdict.observed) / (verdict.bound or 1.0)


def _doses(power: Sequence[Power]) -> doc.Table:
    """A line for each planted fault in each format: its doses, and what caught them."""
    rows = []
    for each in power:
        by = dict.fromkeys(rule for dose in each.doses for rule in dose.by)
        known = any(dose.outcome != "unmeasured" for dose in each.doses)
        never = "at no dose" if known else "not measured"
        since = never if each.caught_from is None else f"{each.caught_from:g}"
        sizes = (
            " ".join(f"{dose.dose:g}" for dose in each.doses if dose.outcome == outcome)
            for outcome in ("missed", "caught")
        )
        rows.append((each.fault, each.format, *sizes, since, ", ".join(by)))
    return doc.words(("planted fault", "format", "missed", "caught", "caught from", "by"), rows)


# --- where a rule stands -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A line of a rule file, counted from 1."""

    file: Path
    line: int | None

    def __str__(self) -> str:
        return f"{self.file}" if self.line is None else f"{self.file}:{self.line}"


def spots_of(judgement: Judgement) -> dict[str, Spot]:
    """Where each rule of a file begins, by its name."""
    return {v.rule: Spot(file=Path(v.file), line=v.line) for v in judgement.verdicts if v.file}
