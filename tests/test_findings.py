"""Findings: each fault once, in a sentence whose every number is a row's, and calm otherwise."""

from __future__ import annotations

import pytest
from gate_rows import control, findings_of, judge, row

from numdev.gate import findings as gate_findings
from numdev.gate.rules import Rules
from numdev.report import DeviationRow, Finding


def found(*rows: DeviationRow) -> tuple[Finding, ...]:
    return findings_of(rows)[0]


def test_what_would_have_been_caught() -> None:
    """The smallest dose of each planted fault; and those that nothing catches."""
    doses = {("scale", 0.01): 1.0, ("scale", 0.03): 4.0, ("tail", 1): 1.0, ("tail", 64): 1.0}
    rows = [row(), *(control(*dose, ratio) for dose, ratio in doses.items())]
    findings, tested = findings_of(rows)
    assert findings == ()
    assert tested[1] == (
        "Of the faults planted in this run, these rules catch: scale (bfloat16) from dose 0.03 on; "
        "tail (bfloat16) at no dose up to 64."
    )


def test_a_finding_stands_where_it_is_worst() -> None:
    """Not where it was met first or last."""
    (finding,) = found(*(row(h, expected_ratio=x) for h, x in enumerate((2.0, 9.0, 3.0))))
    assert (finding.place.head, finding.observed, finding.count) == (1, 9.0, 3)
    assert "head 1" in finding.sentence


def test_a_kernel_that_no_rule_applies_to_is_not_judged() -> None:
    """In its own line: where no row sees a key there is nothing that could pass."""
    for elements, outcome in ((10_000, "passed"), (0, "unmeasured")):
        rows = [row(elements=elements)]
        judgement = judge(rows)
        (verdict,) = gate_findings.kernel_verdicts(judgement, findings_of(rows)[0])
        assert verdict.outcome == outcome


def test_gradients_inherit_a_wrong_output() -> None:
    """They are no findings beside it, but are where the output is right."""
    wrong = row(suspicion="the scale is 1", suspicion_cut=50.0, expected_ratio=9.0)
    (finding,) = found(wrong, row(tensor="dq", expected_ratio=9.0))
    assert finding.sentence.endswith("Its gradients are wrong for the same reason.")
    assert [f.tensor for f in found(row(), row(tensor="dq", expected_ratio=9.0))] == ["dq"]


@pytest.mark.parametrize(("metric", "at_most", "words"), [
    ("baseline_ratio", 2, "has 3× eager attention's error in the output (limit 2×;"),
    ("expected_ratio", 0.5, "is inaccurate: the rms error of the output is 1× what its"),
    ("worst_row", 1.1, "has a row of the output with 1.2× the error predicted for it (limit"),
    ("mean_abs", 3e-5, "breaks the rule `mine` in the output: expected mean_abs ≤ 3e-5, got 9e-5"),
])  # fmt: skip
def test_words_follow_the_metric_of_the_rule(metric: str, at_most: float, words: str) -> None:
    """Number and limit, in the words of the metric."""
    limit = {"name": "mine", "metric": metric, "at_most": at_most}
    sized = row(baseline_ratio=3.0, expected_ratio=1.0, worst_row=1.2, mean_abs=9e-5)
    ((finding,), _) = findings_of([sized], Rules.model_validate({"thresholds": [limit]}))
    assert finding.sentence.startswith(f"mine (bfloat16) {words}")
