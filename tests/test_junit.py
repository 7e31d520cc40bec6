"""JUnit XML: its shape, its counts, and that it fails exactly where the gate does."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from gate_rows import lse, row
from hostile import NAMES, judged, rows
from hypothesis import given, settings

from numdev.report import DeviationRow
from numdev.report.foreign import plain
from numdev.report.renderers.junit import junit
from numdev.report.views.gate import Spot

CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"testcase"},
    "testcase": {"failure", "error", "skipped"},
    "failure": set(),
    "error": set(),
    "skipped": set(),
}
ATTRIBUTES = {
    "testsuites": {"name", "time", "tests", "failures", "errors", "skipped"},
    "testsuite": {"name", "time", "tests", "failures", "errors", "skipped"},
    "testcase": {"name", "classname", "time"},
    "failure": {"message", "type"},
    "error": {"message", "type"},
    "skipped": {"message", "type"},
}
"""What the schemas of Jenkins, GitLab and pytest have in common."""


def parsed(found: list[DeviationRow], spots: dict[str, Spot] | None = None) -> ElementTree.Element:
    judgement, findings, _ = judged(found)
    return ElementTree.fromstring(junit(judgement, findings, spots))


def shape_is_wrong(root: ElementTree.Element) -> str | None:
    """The first thing that no reader of JUnit would expect; None where there is none."""
    if root.tag != "testsuites":
        return f"the root is {root.tag}"
    for element in root.iter():
        if set(element.attrib) != ATTRIBUTES.get(element.tag):
            return f"attributes of {element.tag}"
        if not {child.tag for child in element} <= CHILDREN[element.tag]:
            return f"children of {element.tag}"
        if element.tag == "testcase" and len(element) > 1:
            return "two outcomes of one case"
        if element.tag in ("testsuites", "testsuite"):
            counts = {"tests": "testcase", "failures": "failure", "errors": "error"}
            for name, tag in {**counts, "skipped": "skipped"}.items():
                if int(element.attrib[name]) != sum(1 for _ in element.iter(tag)):
                    return f"{name} of {element.tag}"
    return None


def one(root: ElementTree.Element, classname: str, name: str) -> ElementTree.Element:
    (found,) = (
        c for c in root.iter("testcase") if (c.get("classname"), c.get("name")) == (classname, name)
    )
    return found


@pytest.mark.parametrize(
    ("attributes", "inner"),
    [
        ("tests='1'", ""),
        ("tests='0' x=''", ""),
        ("tests='0'", "<a/>"),
        ("tests='0'", "<testcase name='' classname='' time=''/>"),
    ],
)
def test_a_wrong_shape_is_seen(attributes: str, inner: str) -> None:
    """The check on the shape rejects what is not JUnit, and counts that do not add up."""

    def suites(attributes: str, inner: str) -> str:
        counts = f"{attributes} failures='0' errors='0' skipped='0'"
        return f"<testsuites name='' time='' {counts}>{inner}</testsuites>"

    assert shape_is_wrong(ElementTree.fromstring(suites("tests='0'", ""))) is None
    assert shape_is_wrong(ElementTree.fromstring(suites(attributes, inner))) is not None
    assert shape_is_wrong(ElementTree.fromstring("<testsuite/>")) is not None


def test_a_sound_kernel_has_only_passed_cases() -> None:
    """A suite for the kernel, a case for each rule and tensor, and for its calls."""
    root = parsed([*(row(h) for h in range(8)), *(lse(h) for h in range(8))])
    assert shape_is_wrong(root) is None
    assert [suite.get("name") for suite in root] == ["mine", "numdev gate"]
    assert {c.get("name") for c in root[0]} == {
        "finiteness (out, bfloat16)", "finiteness (lse, bfloat16)", "function (out, bfloat16)",
        "error (out, bfloat16)", "typical head (out, bfloat16)", "worst row (out, bfloat16)",
        "bias (out, bfloat16)", "reproducibility (out, bfloat16)", "log-sum-exp (lse, bfloat16)",
        "runs (bfloat16)",
    }  # fmt: skip
    assert not [e for e in root.iter() if e.tag in ("failure", "error", "skipped")]


def test_a_failure_says_what_and_where() -> None:
    """The number beside its limit as the message; below it the sentence, the place, the rule."""
    spots = {"error": Spot(file=Path("rules.yaml"), line=33)}
    root = parsed([row(0), row(5, layer=2, module="model.2", expected_ratio=1.31)], spots)
    failure = one(root, "mine", "error (out, bfloat16)").find("failure")
    assert failure is not None
    assert failure.get("message") == "1.31, and the limit is expected_ratio ≤ 1.1 (1 of 2 heads)"
    text = failure.text or ""
    assert "mine errs beyond what bfloat16 explains" in text
    assert "layer 2" in text
    assert "module model.2" in text
    assert "head 5" in text
    assert text.endswith("rule: error, rules.yaml:33")


def test_each_outcome_has_its_element() -> None:
    """Exceeded is a failure, not measured an error, and what may lack is skipped."""
    unsure = row(0, bias_p=None, nulls={"bias_p": "one sequence"})
    root = parsed([unsure, row(1, layer=1, kernel="gone", status="failed", reason="it raised")])
    skipped = one(root, "mine", "bias (out, bfloat16)").find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "one sequence"
    error = one(root, "gone", "runs (bfloat16)").find("error")
    assert error is not None
    assert error.get("message") == "failed in 1 of 1 calls: it raised"
    assert one(root, "mine", "runs (bfloat16)").find("error") is None


def test_names_hold_no_numbers_that_change() -> None:
    """Whether a rule is kept or broken, its case is called the same: it keeps its history."""
    good, bad = parsed([row(0)]), parsed([row(0, expected_ratio=9.0)])
    assert [c.get("name") for c in good.iter("testcase")] == [
        c.get("name") for c in bad.iter("testcase")
    ]


def test_nothing_measured_is_an_error() -> None:
    """An empty report, and one in which a rule could be applied to nothing."""
    for found in ([], [row(status="skipped", reason="needs CUDA")]):
        root = parsed(found)
        whole = one(root, "numdev gate", "something was judged").find("error")
        assert whole is not None
        assert whole.get("message") == "no kernel under audit was measured"


@pytest.mark.parametrize("name", NAMES)
def test_a_name_stays_a_name(name: str) -> None:
    """Whatever a kernel is called, it is read back from the attribute as it is spelled out."""
    root = parsed([row(kernel=name, expected_ratio=9.0)])
    assert shape_is_wrong(root) is None
    assert root[0].get("name") == plain(name)
    assert len(root) == 2


@given(rows())
@settings(max_examples=150, deadline=None)
def test_it_fails_exactly_where_the_gate_does(found: list[DeviationRow]) -> None:
    """Well-formed, with the common shape and counts; failures where a limit is exceeded, failures
    or errors where the exit code is not 0, else none."""
    judgement, findings, _ = judged(found)
    root = ElementTree.fromstring(junit(judgement, findings))
    assert shape_is_wrong(root) is None
    assert bool(list(root.iter("failure"))) == (judgement.exit_code == 1)
    bad = list(root.iter("failure")) + list(root.iter("error"))
    assert bool(bad) == (judgement.exit_code != 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sdpa-flash é \U0001f600", "sdpa-flash é \U0001f600"),
        ("", ""),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x00\x1b\x7f", r"\x00\x1b\x7f"),
        ("\ud800\ufffe\uffff", r"\ud800\ufffe\uffff"),
        ("\u202e\u2028\xa0", r"\u202e\u2028\xa0"),
    ],
)
def test_plain(text: str, expected: str) -> None:
    """What does not print is spelled out, and the rest left alone; the result can be encoded."""
    assert plain(text) == expected
    plain(text).encode()
