"""A judgement where CI shows it: as JUnit XML, and as annotations of a step on GitHub.

JUnit has no standard; this is the shape that Jenkins, GitLab and GitHub's reporters
share. A suite is a kernel, a case one rule on one tensor in one format; names hold no
numbers, so that a case keeps its history. Something fails or is in error exactly where
the exit code is not 0. Names come from elsewhere: they cannot end a line, an element or a
command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import assert_never
from xml.etree import ElementTree

from numdev.gate.judgement import Judgement, Test
from numdev.report import Finding, Outcome, Place
from numdev.report.number_text import label
from numdev.report.safe_text import plain
from numdev.report.views.gate import observed_text, problems_of

GATE = "numdev gate"
COUNTS = {
    "tests": "testcase",
    "failures": "failure",
    "errors": "error",
    "skipped": "skipped",
}
ERRORS = 10  # error annotations of a step that GitHub shows; of warnings as many


def tag_of(outcome: Outcome | None) -> str:
    """Returns the XML element that JUnit has for an outcome: `failure`, `error`, or
    `skipped` for None; empty for a pass."""
    match outcome:
        case Outcome.EXCEEDED:
            return "failure"
        case Outcome.NOT_JUDGED:
            return "error"
        case Outcome.PASSED:
            return ""
        case None:
            return "skipped"
        case _:
            assert_never(outcome)


def junit(judgement: Judgement, findings: Sequence[Finding], seconds: float = 0.0) -> str:
    """Returns the whole JUnit file; `findings` are the judgement's. What XML 1.0 cannot
    hold is spelled out. `seconds`: how long the report was measured, which is the time of
    the file; a report has no times of single tests, which readers want as an
    attribute."""
    root = ElementTree.Element("testsuites", name=GATE, time=f"{seconds:.3f}")
    suites: dict[str, ElementTree.Element] = {}
    for test in judgement.tests:
        suite, name = plain(_suite_name(test)), plain(_case_name(test))
        names = {"name": name, "classname": suite, "time": "0"}
        if suite not in suites:
            suites[suite] = ElementTree.SubElement(
                root, "testsuite", name=suite, time="0"
            )
        case = ElementTree.SubElement(suites[suite], "testcase", names)
        if tag := tag_of(test.outcome):
            why = [plain(line) for line in _reason_lines(test, findings)]
            problem = {"message": why[0], "type": test.standing.value}
            ElementTree.SubElement(case, tag, problem).text = "\n".join(why)
    for element in (*root, root):
        for attribute, tag in COUNTS.items():
            element.set(attribute, str(len(list(element.iter(tag)))))
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _suite_name(test: Test) -> str:
    """Returns the name of a test's suite: the kernel with its options, followed by `
    (baseline)` for the role of the baseline, or GATE without a kernel."""
    if test.kernel is None:
        return GATE
    return label(test) + (" (baseline)" if test.role == "baseline" else "")


def _case_name(test: Test) -> str:
    """Returns the name of a test's case: the rule, and of what, as `median (out,
    bfloat16)` or `runs (backward, float16)`. It holds no number of the test."""
    if test.runs:
        return f"{test.rule} ({'backward, ' if test.is_backward else ''}{test.format})"
    of = ", ".join(filter(None, (test.tensor, test.format)))
    return f"{test.rule} ({of})" if test.kernel is not None and of else test.rule


def _reason_lines(test: Test, findings: Sequence[Finding]) -> list[str]:
    """Returns lines that say why a test is no pass, at least one. First comes its number,
    or up to three reasons joined by `; `; then the findings on it, then its places."""
    if test.runs:
        word, count = "failed", test.offending
        if not count:
            word, count = "skipped", test.unjudged
        every = test.judged + test.unjudged + test.offending
        lines = [f"{word} in {count} of {every} calls: {'; '.join(test.reasons[:3])}"]
        return lines + list(map(_place_line, test.places))
    message = "; ".join(test.reasons[:3])
    if test.outcome is Outcome.EXCEEDED:
        what = f"expected {test.limit}, got {observed_text(test.observed)}"
        if test.metric == "suspicion":
            what = f"computes something else than was requested: {test.observed}"
        message = f"{what} ({test.offending} of {test.judged} judged)"
    of = (test.rule, test.kernel, test.options, test.tensor)
    sentences = [
        f.whole
        for f in findings
        if f.severity == "exceeded"
        and test.format in f.formats
        and (f.rule, f.kernel, f.options, f.tensor) == of
    ]
    return [message, *sentences, *map(_place_line, test.places)]


def _place_line(place: Place) -> str:
    """Returns a place as `at case X, head 3`: every field that it has."""
    fields = place.model_dump(exclude_none=True)
    return "at " + ", ".join(f"{key} {value}" for key, value in fields.items())


def commands(judgement: Judgement, findings: Sequence[Finding]) -> Iterator[str]:
    """Yields a GitHub workflow command, `::error title=...::...`, for each problem, at
    most ten; then a warning that says how many more there are, since of errors GitHub
    would not show it. Nothing for a judgement that passed."""
    problems = [("error", p.title, p.whole) for p in problems_of(judgement, findings)]
    more = len(problems) - ERRORS
    if more > 0:
        text = (
            f"{more} more, in the log of this step: GitHub shows {ERRORS} errors of one."
        )
        problems[ERRORS:] = [("warning", GATE, text)]
    for kind, title, message in problems:
        # As actions/toolkit, packages/core/src/command.ts; `plain` leaves no line break.
        head = _escaped(title).replace(":", "%3A").replace(",", "%2C")
        yield f"::{kind} title={head}::{_escaped(message)}"


def _escaped(text: str) -> str:
    """Returns text as a workflow command can hold it: each character that is not
    printable (line breaks, odd blanks) spelled out as Python escapes it, and % as %25."""
    return plain(text).replace("%", "%25")
