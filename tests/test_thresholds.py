"""What thresholds can ask for, planted faults; and that what is not passed is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import run
from gate_rows import control, judge, report, row, rule_tests
from test_gate import rules

from numdev.errors import UsageError
from numdev.gate.judgement import Judgement
from numdev.gate.rules import default_rules, read_rules
from numdev.report import write
from numdev.yamlfile import bundled


def only(judgement: Judgement) -> Any:
    (found,) = rule_tests(judgement)
    return found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("metric: rsm, at_most: 1", "no metric 'rsm'; did you mean 'rms'"),
        ("metric: rms", "give one of"),
        ("metric: suspicion, at_most: 1, absent: true", "give one of"),
        ("metric: rms, below: 1", "unknown key"),
        ("metric: rms, at_most: .nan", "at_most"),
        ("metric: rms, at_most: -1", "at_most"),
        ("metric: rms, absent: true", "suspicion"),
        ("metric: rms, at_most: 1, where: {kernl: x}", "0.where.kernl'; did you mean 'kernel'"),
        ("metric: rms, at_most: 1}, {name: a, metric: rms, at_most: 2", "two thresholds are named"),
        ("metric: rms / rel, at_most: 1", "no metric 'rms / rel'"),
        ("metric: rms, at_most: 1, line: 3", "unknown key"),
        ("metric: rms, at_most: 1, where: {tensor: dQ}, may_lack: rows", "unknown name 'dQ'"),
        ("metric: rms, at_most: 1, where: {tensor: [out, '!d']}", "unknown name 'd'"),
        ("metric: rms, at_most: 1, where: {phase: decoding}", "did you mean 'decode'?"),
        ("metric: expected_ratio, at_most: 0.5, certain: {p: 1}", "certain.p"),
        ("metric: expected_ratio, at_most: 0.5, certain: {}", "expected a metric of bias"),
        ("metric: suspicion, absent: true, scatter: 4", "`scatter` need at_most"),
        ("metric: rms, at_most: 1, instead: [{tensor: o, at_most: 2}]", "unknown name 'o'"),
        ("metric: rms, at_most: 1, at_most: 5", "line 1: not valid YAML: the key 'at_most' is"),
    ],
)  # fmt: skip
def test_a_wrong_threshold_is_refused(tmp_path: Path, text: str, said: str) -> None:
    """Exit code 2, saying what is known."""
    (tmp_path / "t.yaml").write_text(f"thresholds: [{{name: a, {text}}}]")
    with pytest.raises(UsageError) as error:
        read_rules(tmp_path / "t.yaml")
    assert said in str(error.value)


def test_a_file_without_thresholds_has_the_default_ones(tmp_path: Path) -> None:
    """An empty list, which would pass whatever it is given, is refused, as a misspelt key is."""
    (tmp_path / "t.yaml").write_text("required: [mine]")
    found = read_rules(tmp_path / "t.yaml")
    assert (found.thresholds, found.required) == (default_rules().thresholds, ("mine",))
    for text in ("thresholds: []", "threshold: [{name: a, metric: rms, at_most: 1}]"):
        (tmp_path / "t.yaml").write_text(text)
        with pytest.raises(UsageError, match="thresholds"):
            read_rules(tmp_path / "t.yaml")


def test_a_key_may_stand_twice_where_it_is_merged(tmp_path: Path) -> None:
    """A mapping that takes another's keys may say its own."""
    (tmp_path / "t.yaml").write_text(
        "thresholds: [&a {name: a, metric: rms, at_most: 1},\n"
        "  {<<: *a, name: b}, {<<: [*a], name: c, at_most: 2}]\n"
    )
    found = read_rules(tmp_path / "t.yaml").thresholds
    assert [(t.name, t.at_most) for t in found] == [("a", 1), ("b", 1), ("c", 2)]


@pytest.mark.parametrize(("elements", "heads", "limit"), [
    (128, 1, 1.354), (64, 1, 1.5), (1600, 1, 1.1), (10**6, 1, 1.1), (128, 8, 1.157)])  # fmt: skip
def test_a_limit_knows_how_many_numbers_it_holds(elements: int, heads: int, limit: float) -> None:
    """4/√n above 1 where that is more than the limit; 1.25/√N of it for a median of N heads. Two
    rows of dq, which share the errors of their deltas, are 16 numbers."""
    of = {"heads": heads} if heads > 1 else {}
    book = rules(metric="expected_ratio", at_most=1.1, scatter=4, **of)
    for excess, outcome in ((-0.001, "passed"), (0.001, "exceeded")):
        found = dict(expected_ratio=limit + excess, elements=elements)
        assert only(judge([row(head, **found) for head in range(heads)], book)).outcome == outcome
    of_dq = dict(tensor="dq", elements=elements, rows_measured=2, expected_ratio=1.99)
    single = rules(metric="expected_ratio", at_most=1.1, scatter=4)
    assert only(judge([row(**of_dq)], single)).outcome == "passed"


@pytest.mark.parametrize(("doses", "why"), [
    ({0.001: 1.0, 0.01: 9.0}, ()),
    ({0.001: 1.0, 0.01: 1.0, 0.03: 9.0}, ("caught: scale (bfloat16) from dose 0.03 on",)),
    ({0.01: 1.0}, ("caught: scale (bfloat16) at no dose up to 0.01",)),
    ({}, ("no such planted fault in this report: audit with --control",)),
])  # fmt: skip
def test_a_gate_can_be_asked_to_prove_what_it_catches(doses: Any, why: Any) -> None:
    """A fault that is not there, or only caught when it is larger, is no pass."""
    book = default_rules().model_copy(update={"catches": {"scale": 0.01}})
    judged = judge([row(), *(control("scale", d, r) for d, r in doses.items())], book)
    assert judged.exit_code == (3 if why else 0)
    proofs = [v for v in judged.tests if v.rule == "catches scale"]
    assert [reason for v in proofs for reason in v.reasons] == [*why]


def test_the_ci_file_is_the_default_rules_and_asks_for_proof() -> None:
    """The thresholds are the same, word for word."""
    ci, faults = read_rules(bundled("gate/ci.yaml")), "scale p-bits l-rounded truncated"
    assert ci.thresholds == default_rules().thresholds
    assert ci.required == ("sdpa-flash",)
    assert set(ci.catches) == {*faults.split(), "keys-dropped", "one-head"}


FILE = """\
required: [mine]
catches: {scale: 0.01}
thresholds:
  - {name: first, metric: nonfinite, at_most: 0}
  - {name: second, where: {head: 0}, metric: row_rel, at_most: 1.0}
"""


@pytest.mark.parametrize(("rows", "said"), [
    ([row(nonfinite=None)], "first (nonfinite ≤ 0) could not be judged"),
    ([row(1)], "second could not be judged: no row matches"),
    ([row(row_rel=None)], "second (row_rel ≤ 1) could not be judged"),
    ([row(kernel="b")], "mine is required and not in this report"),
    ([row(kernel="b", status="skipped", reason="x", head=None)], "no row matches"),
    ([], "No kernel under audit was measured."),
    ([row()], "catches scale (caught from 0.01) could not be judged"),
    ([row(nonfinite=7)], "returns 7 elements of the output that are NaN or infinite"),
])  # fmt: skip
def test_what_is_not_passed_is_said(tmp_path: Path, capsys: Any, rows: Any, said: str) -> None:
    """In the terminal, with an exit code of its own."""
    (tmp_path / "t.yaml").write_text(FILE)
    write(report(*rows), tmp_path)
    code = run("gate", tmp_path, "--thresholds", tmp_path / "t.yaml")
    assert code == (1 if any(r.nonfinite for r in rows) else 3)
    assert "".join(said.split()) in "".join(capsys.readouterr().out.split())


def test_a_number_that_is_none_never_passes() -> None:
    """NaN that came in past validation is beyond every limit; what is infinite is said in words."""
    for value in (float("nan"), float("inf")):
        rows = [row(h).model_copy(update={"rms": value if h == 1 else 1.0}) for h in range(3)]
        found = judge(rows, rules(metric="rms", at_most=2))
        assert (found.exit_code, only(found).observed) == (1, str(value))


def test_the_example_in_the_documentation_is_a_threshold_file(tmp_path: Path) -> None:
    """As docs/gate.md has it."""
    page, path = Path(__file__).parents[1] / "docs" / "gate.md", tmp_path / "example.yaml"
    path.write_text(page.read_text().split("```yaml\n")[1].split("```")[0])
    assert len(read_rules(path).thresholds) >= 3
