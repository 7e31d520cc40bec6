"""A kernel that one call shows to fail is told of at once, once, and never one that
passes."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest
from commands import ran
from gate_rows import row
from loaded import ROOT

from numdev.gate.rules import Rules
from numdev.report import AuditReport, read
from numdev.studies.audit.early_failure_messages import EarlyFailures

NEAR = {"expected_ratio": 1.09}  # within the limit for one head, beyond that of a median


def early_sentences(*tasks: list[object], rules: Rules | None = None) -> list[str]:
    """What is told of rows that come task by task."""
    sentences: list[str] = []
    early = EarlyFailures(rules, sentences.append)
    for rows in tasks:
        early(rows)  # type: ignore[arg-type]
    return sentences


def test_a_failure_is_told_once() -> None:
    """In each format, with the call that shows it; not of a yardstick, nor by looser
    rules, nor without rows."""
    wrong = [row(h, expected_ratio=2.0 + h) for h in range(2)]
    other = [row(format="float16", nonfinite=3)]
    assert early_sentences([], wrong, wrong, other) == [
        "FAIL, by m alone: mine (bfloat16) is inaccurate in 2 of 2 heads: error of the output "
        "up to 3.00× expected (limit 1.1×).",
        "FAIL, by m alone: mine (float16) returns 3 elements of the output that are finite, "
        "infinite or NaN unlike the exact result.",
    ]  # fmt: skip
    assert early_sentences([row(role="baseline", expected_ratio=9.0)]) == []


def test_what_other_calls_may_change_waits() -> None:
    """The median over heads, and a bias, whose certainty depends on how many heads are
    tested."""
    typical = [row(h, **NEAR) for h in range(16)]
    biased = [row(h, bias_size=0.5, bias_p=1e-30, sequences=64) for h in range(4)]
    assert early_sentences(typical, biased) == []


def test_nothing_is_told_that_the_verdict_contradicts() -> None:
    """Of a stored audit: who is told of fails in the end."""
    report = read(ROOT / "tests" / "data" / "reports" / "audit.json")
    assert isinstance(report, AuditReport)
    tasks = groupby(report.rows, lambda r: (r.case, r.role, r.kernel, r.format))
    sentences = early_sentences(*(list(rows) for _, rows in tasks))
    failing = {v.kernel for v in report.verdicts if v.outcome == "exceeded"}
    assert {s.partition("alone: ")[2].split()[0] for s in sentences} == failing


@pytest.mark.slow
def test_the_command_tells_before_the_end(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On stderr, while calls are still to be measured; not with --quiet."""
    command = ("audit", "demo", "--length", "48", "--kernel", "planted:scale_twice")
    sentence = "(bfloat16) is wrong in 4 of 4 heads: the scale is applied twice."
    code, out, err = ran(capsys, *command, "-o", tmp_path / "a")
    shown = " ".join(err.split())
    assert (code, shown.count("FAIL, by "), sentence in shown) == (0, 1, True)
    assert "FAIL, by " not in out
    _, _, quiet = ran(capsys, *command, "-q", "-o", tmp_path / "b")
    assert "FAIL" not in quiet
