"""A judgement where CI shows it: as JUnit XML, and as annotations of a step on GitHub.

JUnit has no standard; this is the shape that Jenkins, GitLab and GitHub's reporters share. A suite
is a kernel, a case one rule on one tensor in one format; names hold no numbers, so that a case
keeps its history. Something fails or is in error exactly where the exit code is not 0. Names come
from elsewhere: they cannot end a line, an element or a command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from xml.etree import ElementTree

from numdev.gate.findings import label
from numdev.gate.verdict import Judgement, Outcome, Verdict
from numdev.report import Finding, Place
from numdev.report.foreign import plain
from numdev.report.views.gate import number, problems_of

GATE = "numdev gate"
TAGS: Mapping[Outcome, str] = {"exceeded": "failure", "unmeasured": "error", "untested": "skipped"}
COUNTS = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
ERRORS = 10  # error annotations of a step that GitHub shows; of warnings as many

_Case = tuple[str, str, Outcome, list[str]]  # suite, name, outcome, lines that say why


def junit(judgement: Judgement, findings: Sequence[Finding]) -> str:
    """The whole file; `findings` are the judgement's. What XML 1.0 cannot hold is spelled out."""
    # A finished report is judged in no time worth telling, and readers want the attribute.
    root = ElementTree.Element("testsuites", name=GATE, time="0")
    suites: dict[str, ElementTree.Element] = {}
    for kernel, name, outcome, why in _cases(judgement, findings):
        suite = plain(kernel)
        names = {"name": plain(name), "classname": suite, "time": "0"}
        if suite not in suites:
            suites[suite] = ElementTree.SubElement(root, "testsuite", name=suite, time="0")
        test = ElementTree.SubElement(suites[suite], "testcase", names)
        if outcome in TAGS:
            problem = {"message": plain(why[0]), "type": outcome}
            ElementTree.SubElement(test, TAGS[outcome], problem).text = "\n".join(map(plain, why))
    for element in (*root, root):
        for attribute, tag in COUNTS.items():
            element.set(attribute, str(len(list(element.iter(tag)))))
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _cases(judgement: Judgement, findings: Sequence[Finding]) -> Iterator[_Case]:
    for verdict in judgement.verdicts:
        yield _verdict(verdict, findings)
    for calls in judgement.calls:
        word, count = ("failed", calls.failed) if calls.failed else ("skipped", calls.skipped)
        every = calls.ok + calls.skipped + calls.failed
        name = f"runs ({'backward, ' if calls.backward else ''}{calls.format})"
        why = [f"{word} in {count} of {every} calls: {'; '.join(calls.reasons[:3])}"]
        why += [_place(calls.place)] if calls.place else []
        yield label(calls), name, calls.outcome, why
    for kernel in judgement.missing:
        yield kernel, "runs", "unmeasured", ["required, but not in this report"]
    # A report of nothing passes no other case's test.
    ran = any(calls.ok for calls in judgement.calls)
    judged = any(v.outcome in ("passed", "exceeded") for v in judgement.verdicts)
    message = "no rule could be applied to any row" if ran else "no kernel under audit was measured"
    yield GATE, "something was judged", "passed" if ran and judged else "unmeasured", [message]


def _verdict(verdict: Verdict, findings: Sequence[Finding]) -> _Case:
    suite, name = GATE, verdict.rule
    if verdict.kernel is not None:
        suite = label(verdict) + (" (baseline)" if verdict.role == "baseline" else "")
        name = f"{verdict.rule} ({', '.join(filter(None, (verdict.tensor, verdict.format)))})"
    message = "; ".join(verdict.reasons[:3])
    if verdict.outcome == "exceeded":
        what = f"expected {verdict.limit}, got {number(verdict.observed)}"
        if verdict.metric == "suspicion":
            what = f"does not compute the requested attention: {verdict.observed}"
        message = f"{what} ({verdict.offending} of {verdict.judged} judged)"
    of = (verdict.rule, verdict.kernel, verdict.options, verdict.tensor)
    sentences = [
        f.sentence
        for f in findings
        if f.severity == "exceeded"
        and verdict.format in f.formats
        and (f.rule, f.kernel, f.options, f.tensor) == of
    ]
    return suite, name, verdict.outcome, [message, *sentences, *map(_place, verdict.places)]


def _place(place: Place) -> str:
    fields = place.model_dump(exclude_none=True)
    return "at " + ", ".join(f"{key} {value}" for key, value in fields.items())


def commands(judgement: Judgement, findings: Sequence[Finding]) -> Iterator[str]:
    """A workflow command for each problem, at most ten; then a warning that says how many more
    there are, since of errors GitHub would not show it."""
    problems = [("error", p.title, p.sentence) for p in problems_of(judgement, findings)]
    more = len(problems) - ERRORS
    if more > 0:
        text = f"{more} more, in the log of this step: GitHub shows {ERRORS} errors of one."
        problems[ERRORS:] = [("warning", GATE, text)]
    for kind, title, message in problems:
        # As actions/toolkit, packages/core/src/command.ts; `plain` leaves no line break.
        head = _data(title).replace(":", "%3A").replace(",", "%2C")
        yield f"::{kind} title={head}::{_data(message)}"


def _data(text: str) -> str:
    return plain(text).replace("%", "%25")
