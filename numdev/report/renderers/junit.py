"""A judgement as JUnit XML: what CI systems show as tests.

There is no standard; this is the shape that Jenkins, GitLab and GitHub's reporters share:
testsuites, testsuite, testcase, and in a case failure, error or skipped, each with a message. A
suite is a kernel, a case one rule on one tensor in one format. Exceeded is a failure, not measured
an error, not judged and allowed not to be is skipped. Names hold no numbers, so that a case keeps
its history. Something fails or is in error exactly where the exit code is not 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from xml.etree import ElementTree

from numdev.gate.findings import label
from numdev.gate.verdict import Calls, Judgement, Outcome, Verdict
from numdev.report import Finding, Place
from numdev.report.foreign import plain
from numdev.report.views.gate import number

GATE = "numdev gate"
TAGS: Mapping[Outcome, str] = {"exceeded": "failure", "unmeasured": "error", "untested": "skipped"}
COUNTS = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}


class _Case(NamedTuple):
    suite: str
    name: str
    outcome: Outcome
    message: str = ""
    more: tuple[str, ...] = ()  # lines below the message


def junit(judgement: Judgement, findings: Sequence[Finding]) -> str:
    """The whole file; `findings` are the judgement's. What XML 1.0 cannot hold in a name is spelled
    out."""
    # A finished report is judged in no time worth telling, and readers want the attribute.
    root = ElementTree.Element("testsuites", name=GATE, time="0")
    suites: dict[str, ElementTree.Element] = {}
    for case in _cases(judgement, findings):
        name = plain(case.suite)
        if name not in suites:
            suites[name] = ElementTree.SubElement(root, "testsuite", name=name, time="0")
        test = ElementTree.SubElement(suites[name], "testcase", name=plain(case.name),
                                      classname=name, time="0")  # fmt: skip
        if case.outcome in TAGS:
            problem = {"message": plain(case.message), "type": case.outcome}
            told = ElementTree.SubElement(test, TAGS[case.outcome], problem)
            told.text = "\n".join(map(plain, (case.message, *case.more)))
    for element in (*root, root):
        for attribute, tag in COUNTS.items():
            element.set(attribute, str(len(list(element.iter(tag)))))
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _cases(judgement: Judgement, findings: Sequence[Finding]) -> Iterator[_Case]:
    for verdict in judgement.verdicts:
        yield _verdict(verdict, findings)
    yield from map(_calls, judgement.calls)
    for name in judgement.missing:
        yield _Case(name, "runs", "unmeasured", "required, and not in this report")
    # A report of nothing passes no other case's test.
    ran = any(calls.ok for calls in judgement.calls)
    judged = any(v.outcome in ("passed", "exceeded") for v in judgement.verdicts)
    message = "no rule could be applied to any row" if ran else "no kernel under audit was measured"
    yield _Case(GATE, "something was judged", "passed" if ran and judged else "unmeasured", message)


def _verdict(verdict: Verdict, findings: Sequence[Finding]) -> _Case:
    suite, name = GATE, verdict.rule
    if verdict.kernel is not None:
        suite = label(verdict) + (" (baseline)" if verdict.role == "baseline" else "")
        name = f"{verdict.rule} ({verdict.tensor}, {verdict.format})"
    message = "; ".join(verdict.reasons[:3])
    if verdict.outcome == "exceeded":
        what = f"{number(verdict)}, and the limit is {verdict.limit}"
        if verdict.metric == "suspicion":
            what = f"computes a different function: {verdict.observed}"
        message = f"{what} ({verdict.offending} of {verdict.judged} heads)"
    sentences = [
        f.sentence
        for f in findings
        if f.severity == "exceeded"
        and verdict.kernel == f.kernel
        and verdict.format in f.formats
        and (f.rule, f.options, f.tensor) == (verdict.rule, verdict.options, verdict.tensor)
    ]
    more = (*sentences, *map(_place, verdict.places))
    return _Case(suite, name, verdict.outcome, message, more)


def _place(place: Place) -> str:
    fields = place.model_dump(exclude_none=True)
    return "at " + ", ".join(f"{key} {value}" for key, value in fields.items())


def _calls(calls: Calls) -> _Case:
    word, count = ("failed", calls.failed) if calls.failed else ("skipped", calls.skipped)
    every = calls.ok + calls.skipped + calls.failed
    name = f"runs ({'backward, ' if calls.backward else ''}{calls.format})"
    message = f"{word} in {count} of {every} calls: {'; '.join(calls.reasons[:3])}"
    more = (_place(calls.place),) if calls.place else ()
    return _Case(label(calls), name, calls.outcome, message, more)
