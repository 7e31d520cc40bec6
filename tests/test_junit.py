"""JUnit XML: its shape, its counts, and that it fails exactly where the gate does."""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree

import pytest
from gate_rows import lse, row
from hypothesis import given, settings
from test_github import judged, rows

from numdev.report import DeviationRow
from numdev.report.renderers.ci import COUNTS, junit

COUNTED = {"name", "time", "tests", "failures", "errors", "skipped"}
SHAPE = {
    "testsuites": (COUNTED, {"testsuite"}),
    "testsuite": (COUNTED, {"testcase"}),
    "testcase": ({"name", "classname", "time"}, {"failure", "error", "skipped"}),
    **dict.fromkeys(("failure", "error", "skipped"), ({"message", "type"}, set())),
}
"""What the schemas of Jenkins, GitLab and pytest have in common: attributes and
children."""


def parsed(result: list[DeviationRow]) -> ElementTree.Element:
    judgement, findings, _ = judged(result)
    return ElementTree.fromstring(junit(judgement, findings))


def shape_is_wrong(root: ElementTree.Element) -> str | None:
    """The first thing that no reader of JUnit would expect; None where there is none."""
    for element in root.iter():
        attributes, children = SHAPE[element.tag]
        if (
            set(element.attrib) != attributes
            or not {child.tag for child in element} <= children
        ):
            return f"attributes or children of {element.tag}"
        if element.tag == "testcase" and len(element) > 1:
            return "two outcomes of one case"
        counts = Counter(child.tag for child in element.iter())
        if "tests" in attributes and any(
            int(element.attrib[name]) != counts[tag] for name, tag in COUNTS.items()
        ):
            return f"counts of {element.tag}"
    return None if root.tag == "testsuites" else f"the root is {root.tag}"


@pytest.mark.parametrize(
    ("tests", "inner"),
    [(1, ""), (0, "<a/>"), (0, "<testcase name='' classname='' time=''/>")],
)
def test_a_wrong_shape_is_seen(tests: int, inner: str) -> None:
    """The check on the shape rejects what is not JUnit, and counts that do not add up."""
    counts = "time='' failures='0' errors='0' skipped='0'"
    text = f"<testsuites name='' {counts} tests='{{}}'>{{}}</testsuites>"
    assert shape_is_wrong(ElementTree.fromstring(text.format(0, ""))) is None
    with pytest.raises((AssertionError, KeyError)):
        assert shape_is_wrong(ElementTree.fromstring(text.format(tests, inner))) is None


def test_a_sound_kernel_has_only_passed_cases() -> None:
    """A suite for the kernel, a case for each rule and tensor, and for its calls; a
    broken one is called the same: it keeps its history."""
    sound = [*(row(h) for h in range(8)), *(lse(h) for h in range(8))]
    root = parsed(sound)
    assert shape_is_wrong(root) is None
    assert [suite.get("name") for suite in root] == ["mine", "numdev gate"]
    names = [c.get("name") for c in root[0]]
    assert set(names) == {
        "finiteness (out, bfloat16)", "finiteness (lse, bfloat16)", ("function (out, bfloat16)"),
        "function (lse, bfloat16)",
        "error (out, bfloat16)", "typical head (out, bfloat16)", ("worst row (out, bfloat16)"),
        "rms (out, bfloat16)", "typical rms (out, bfloat16)",
        "bias (out, bfloat16)", "reproducibility (out, bfloat16)", ("log-sum-exp (lse, bfloat16)"),
        "runs (bfloat16)",
    }  # fmt: skip
    assert not [e for e in root.iter() if e.tag in ("failure", "error", "skipped")]
    assert [
        c.get("name") for c in parsed([row(8, expected_ratio=9.0), *sound])[0]
    ] == names


@given(rows())
@settings(max_examples=150, deadline=None)
def test_it_fails_exactly_where_the_gate_does(drawn_rows: list[DeviationRow]) -> None:
    """Well-formed, with the common shape and counts; failures where a limit is exceeded,
    failures or errors where the exit code is not 0, else none."""
    judgement, root = judged(drawn_rows)[0], parsed(drawn_rows)
    assert shape_is_wrong(root) is None
    assert bool(list(root.iter("failure"))) == (judgement.exit_code == 1)
    bad = [*root.iter("failure"), *root.iter("error")]
    assert bool(bad) == (judgement.exit_code != 0)


def test_a_failure_says_how_many_heads_of_how_many() -> None:
    """Beside the number and its limit."""
    root = parsed([row(h, expected_ratio=9.0 if h < 2 else 1.0) for h in range(8)])
    (failure,) = root.findall(".//testcase[@name='error (out, bfloat16)']/failure")
    assert (
        failure.get("message") == "expected expected_ratio ≤ 1.1, got 9 (2 of 8 judged)"
    )


def test_failures_and_errors_are_counted_as_what_they_are() -> None:
    """A limit exceeded is a failure, a number that lacks an error; calls are counted in
    all, those declined too; the backward pass is a case of its own."""
    bad = [
        row(0, expected_ratio=9.0),
        row(1),
        row(2, worst_row=None),
        row(3, nonfinite=None),
    ]
    root = parsed(bad)
    assert [root.get(name) for name in ("failures", "errors")] == ["1", "2"]
    assert [len(root.findall(f".//{tag}")) for tag in ("failure", "error")] == [1, 2]
    calls = [row(call=0), row(call=1), row(call=0, tensor="dq"),
             row(None, call=2, status="skipped", reason="no"),
             row(None, call=3, status="failed", reason="it raised")]  # fmt: skip
    suite = parsed(calls)[0]
    (error,) = suite.findall("./testcase[@name='runs (bfloat16)']/error")
    assert error.get("message") == "failed in 1 of 4 calls: it raised"
    assert suite.find("./testcase[@name='runs (backward, bfloat16)']") is not None
