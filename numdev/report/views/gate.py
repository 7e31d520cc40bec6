"""A judgement, shown: the outcome, what is wrong, how near each rule came, which faults are caught.

One document for the terminal and for GitHub; annotations and JUnit take their sentences from here.
A judgement that did not pass has at least one problem."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Literal, NamedTuple

from numdev.gate.findings import kernel_verdicts, label
from numdev.gate.rows import grouped
from numdev.gate.verdict import Judgement, Power, Verdict
from numdev.report import VERDICTS, Finding, Place, Places
from numdev.report import document as doc
from numdev.report.numbers import three
from numdev.report.views import STYLES, verdicts

OUTCOMES = {**VERDICTS, "untested": "not applied"}
SHOWN = 12  # offending rows, the worst of all rules first
SENTENCES = 50  # problems: GitHub shows no summary that is longer than 1 MiB
NO_POWER = (
    "No faults were planted in this run, so what these limits would catch on this data is unknown: "
    "audit with --control."
)


class Problem(NamedTuple):
    """One reason why a judgement did not pass; the title names the kernel and what is judged."""

    severity: Literal["exceeded", "unmeasured"]
    title: str
    sentence: str


def document(
    judgement: Judgement,
    findings: Sequence[Finding],
    tested: Sequence[str],
    place: Places,
    *,
    plants: bool = True,
) -> doc.Document:
    """`findings` are the exceeded verdicts in sentences; `place` says what a place is called;
    `plants`: whether a report of this kind can have planted faults."""
    leading = kernel_verdicts(judgement, findings)[:SENTENCES]
    lines = verdicts(SimpleNamespace(verdicts=leading, findings=findings))
    shown = {findings[v.finding].sentence for v in leading if v.finding is not None}
    problems = [p for p in problems_of(judgement, findings) if p.sentence not in shown]
    room = SENTENCES - len(leading)
    items = [doc.Item(p.sentence, style=STYLES[p.severity]) for p in problems[:room]]
    if len(problems) > room:
        items.append(doc.Item(f"and {len(problems) - room} more"))
    declined = [finding.sentence for finding in findings if finding.severity == "note"]
    return doc.Document(
        "numdev gate",
        (
            doc.Paragraph(
                f"{VERDICTS[judgement.outcome]} by the {judgement.rules} rules.",
                STYLES[judgement.outcome],
            ),
            doc.Bullets(tuple(lines), "verdicts"),
            doc.Bullets(tuple(items)),
            _beyond(judgement.verdicts, place),
            doc.words(("rule", "outcome", "judged", "worst", "limit", "in"), _rules(judgement)),
            _doses(judgement.power),
            *doc.notes((*declined, *tested, *_beside(judgement))),
            *(() if judgement.power or not plants else doc.notes((NO_POWER,))),
        ),
    )


def problems_of(judgement: Judgement, findings: Sequence[Finding]) -> Iterator[Problem]:
    """All of them, the gravest first; none exactly where the judgement passed. `findings` are its
    own; their notes are no problems."""
    for f in findings:
        if f.severity == "exceeded":
            yield Problem("exceeded", f"{f.kernel}: {f.rule}", f.sentence)
    for f in findings:
        if f.severity == "unmeasured":
            title = f"{f.kernel} {'crashed' if f.tensor else 'did not run'}"
            yield Problem("unmeasured", title, f.sentence)
    for name in judgement.missing:
        sentence = f"{name} is required and not in this report."
        yield Problem("unmeasured", "a required kernel", sentence)
    if not any(call.ok for call in judgement.calls):
        yield Problem("unmeasured", "no kernel", "No kernel under audit was measured.")
    elif not any(v.outcome != "untested" for v in judgement.verdicts):
        yield Problem("unmeasured", "nothing judged", "No rule could be applied to any row.")
    lacking = (v for v in judgement.verdicts if v.outcome == "unmeasured")
    said = grouped(lacking, lambda v: (v.rule, v.limit, v.reasons))
    for (rule, limit, reasons), these in said.items():
        who = dict.fromkeys(f" of {v.kernel} ({v.tensor}, {v.format})" for v in these if v.kernel)
        where = f" in {sum(v.unjudged for v in these)} heads{','.join(who)}" if who else ""
        named = f"{rule} ({limit})" if limit else rule
        sentence = f"{named} could not be judged{where}: {'; '.join(reasons[:3])}."
        yield Problem("unmeasured", f"{rule} not judged", sentence)


def _beside(judgement: Judgement) -> Iterator[str]:
    """What is told, and not judged."""
    for call in judgement.calls:
        if not call.ok and call.outcome == "untested":
            what = " backward" if call.backward else ""
            yield f"{label(call)}{what} ({call.format}) was skipped: {'; '.join(call.reasons[:3])}"
    if rule := judgement.fa_rule:
        yield f"{rule[0]} of {rule[1]} heads pass flash-attention's own 2× rule, a looser one."


def _rules(judgement: Judgement) -> Iterator[tuple[str | doc.Cell, ...]]:
    """A line for each rule: where it came nearest to its limit, or went beyond."""
    gravity = list(STYLES)
    for rule, these in grouped(judgement.verdicts, attrgetter("rule")).items():
        worst = min(these, key=lambda v: (gravity.index(v.outcome), -_nearness(v)))
        judged, bad = sum(v.judged for v in these), sum(v.offending for v in these)
        yield (
            rule,
            doc.Cell(OUTCOMES[worst.outcome], style=STYLES[worst.outcome]),
            f"{bad}/{judged}" if bad else str(judged or "-"),
            number(worst.observed),
            worst.limit.removeprefix(f"{worst.metric} "),
            " ".join((worst.kernel or "-", worst.tensor or "", worst.format or "")),
        )


def _nearness(verdict: Verdict) -> float:
    if not isinstance(verdict.observed, float | int):
        return 0.0
    return abs(verdict.observed) / (verdict.bound or 1.0)


def number(observed: float | str | None) -> str:
    """What was observed, in three digits or in words; - where nothing was."""
    return three(observed) if isinstance(observed, float) else str(observed or "-")


def _beyond(verdicts: Iterable[Verdict], place: Places) -> doc.Table:
    """A line for each row that is beyond a limit, the one farthest beyond first."""
    beyond = [(held, verdict) for verdict in verdicts for held in verdict.beyond]
    beyond.sort(key=lambda pair: -pair[0].excess)
    rows = [
        (
            f"{three(held.excess)}×" if math.isfinite(held.excess) else "-",
            label(verdict),
            f"{verdict.tensor} {verdict.format}",
            place(Place.of(held.row)),
            number(held.row.suspicion if held.limit.absent else held.value),
            str(held.limit),
            verdict.rule,
        )
        for held, verdict in beyond[:SHOWN]
    ]
    more = f", the first {SHOWN} of {len(beyond)}" if len(beyond) > SHOWN else ""
    columns = ("over", "kernel", "in", "where", "number", "limit", "rule")
    return doc.words(columns, rows, title=f"Heads beyond a limit{more}")


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
    columns = ("planted fault", "format", "missed", "caught", "caught from", "by")
    return doc.words(columns, rows, title="What these rules catch")
