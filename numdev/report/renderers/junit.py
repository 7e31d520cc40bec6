"""A judgement as JUnit XML: what CI systems show as tests.

There is no standard; this is the shape that Jenkins, GitLab and GitHub's reporters share:
testsuites, testsuite, testcase, and in a case failure, error or skipped, each with a message. A
suite is a kernel, a case one rule on one tensor in one format. Exceeded is a failure, not measured
an error, not judged and allowed not to be is skipped. Names hold no numbers, so that a case keeps
its history.

Something fails or is in error exactly where the exit code is not 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from numdev.gate.verdict import Calls, Judgement, Outcome, Verdict
from numdev.gate.words import label
from numdev.report import Finding, Place
from numdev.report.foreign import plain
from numdev.report.views.gate import Spot, number

GATE = "numdev gate"
TAGS: Mapping[Outcome, str] = {
    "exceeded": "failure",
    "unmeasured": "error",
    "untested": "skipped",
}
COUNTS = {"failures": "failure", "errors": "error", "skipped": "skipped"}


@dataclass(frozen=True, kw_only=True)
class _Case:
    suite: str
    name: str
    outcome: Outcome
    message: str = ""
    more: tuple[str, ...] = ()
    """Lines below the message."""


def junit(
    judgement: Judgement, findings: Sequence[Finding], spots: Mapping[str, Spot] | None = None
) -> str:
    """The whole file. `findings` are the judgement's, `spots` where its rules stand. What XML 1.0
    cannot hold in a name is spelled out."""
    cases = list(_cases(judgement, findings, spots or {}))
    root = ElementTree.Element("testsuites", name=GATE, time="0")
    for suite in dict.fromkeys(case.suite for case in cases):
        # A finished report is judged in no time worth telling, and readers want the attribute.
        element = ElementTree.SubElement(root, "testsuite", name=plain(suite), time="0")
        for case in cases:
            if case.suite == suite:
                _add(element, case)
        _count(element)
    _count(root)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{_text(root)}\n'


def _text(root: ElementTree.Element) -> str:
    return ElementTree.tostring(root, encoding="unicode")


def _add(suite: ElementTree.Element, case: _Case) -> None:
    name, of = plain(case.name), plain(case.suite)
    element = ElementTree.SubElement(suite, "testcase", name=name, classname=of, time="0")
    tag = TAGS.get(case.outcome)
    if tag is None:
        return
    said = ElementTree.SubElement(element, tag, message=plain(case.message), type=case.outcome)
    said.text = "\n".join(map(plain, (case.message, *case.more)))


def _count(element: ElementTree.Element) -> None:
    element.set("tests", str(len(list(element.iter("testcase")))))
    for attribute, tag in COUNTS.items():
        element.set(attribute, str(len(list(element.iter(tag)))))


# --- cases ---------------------------------------------------------------------------------------


def _cases(
    judgement: Judgement, findings: Sequence[Finding], spots: Mapping[str, Spot]
) -> Iterator[_Case]:
    for verdict in judgement.verdicts:
        yield _verdict(verdict, findings, spots.get(verdict.rule))
    yield from map(_calls, judgement.calls)
    for name in judgement.missing:
        message = "required, and not in this report"
        yield _Case(suite=name, name="runs", outcome="unmeasured", message=message)
    yield _whole(judgement)


def _verdict(verdict: Verdict, findings: Sequence[Finding], spot: Spot | None) -> _Case:
    if verdict.kernel is None:
        suite, name = GATE, verdict.rule
    else:
        suite = label(verdict) + (" (baseline)" if verdict.role == "baseline" else "")
        name = f"{verdict.rule} ({verdict.tensor}, {verdict.format})"
    said = [finding.sentence for finding in findings if _is_of(finding, verdict)]
    rule = [f"rule: {verdict.rule}" + (f", {spot}" if spot else "")]
    return _Case(
        suite=suite,
        name=name,
        outcome=verdict.outcome,
        message=_message(verdict),
        more=(*said, *map(_place, verdict.places), *rule),
    )


def _is_of(finding: Finding, verdict: Verdict) -> bool:
    """Whether the finding says in words what the verdict does in numbers."""
    return (
        finding.severity == "exceeded"
        and finding.rule == verdict.rule
        and verdict.kernel in (finding.kernel, *finding.also)
        and finding.options == verdict.options
        and finding.tensor == verdict.tensor
        and verdict.format in finding.formats
    )


def _message(verdict: Verdict) -> str:
    if verdict.outcome != "exceeded":
        return "; ".join(verdict.reasons[:3])
    what = f"{number(verdict)}, and the limit is {verdict.limit}"
    if verdict.metric == "suspicion":
        what = f"computes a different function: {verdict.observed}"
    return f"{what} ({verdict.offending} of {verdict.judged} heads)"


def _place(place: Place) -> str:
    fields = place.model_dump(exclude_none=True)
    return "at " + ", ".join(f"{key} {value}" for key, value in fields.items())


def _calls(calls: Calls) -> _Case:
    every = calls.ok + calls.skipped + calls.failed
    word, count = ("failed", calls.failed) if calls.failed else ("skipped", calls.skipped)
    if not count:
        word, count = "nothing to judge", calls.ok
    name = f"runs ({'backward, ' if calls.backward else ''}{calls.format})"
    message = f"{word} in {count} of {every} calls: {'; '.join(calls.reasons[:3])}"
    more = (_place(calls.place),) if calls.place else ()
    return _Case(suite=label(calls), name=name, outcome=calls.outcome, message=message, more=more)


def _whole(judgement: Judgement) -> _Case:
    """That anything was judged at all: a report of nothing passes no other case's test."""
    ran = any(calls.ok for calls in judgement.calls)
    judged = any(v.outcome in ("passed", "exceeded") for v in judgement.verdicts)
    message = "no rule could be applied to any row" if ran else "no kernel under audit was measured"
    outcome: Outcome = "passed" if ran and judged else "unmeasured"
    return _Case(suite=GATE, name="something was judged", outcome=outcome, message=message)
