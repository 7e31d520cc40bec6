"""Limits on a change against an older report: what counts, what is excused, what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gate_rows import report, row

from numdev.cli.main import main
from numdev.errors import UsageError
from numdev.gate.judging import judge_report
from numdev.gate.rules import Rules, Threshold
from numdev.gate.verdict import Judgement, Verdict
from numdev.report import DeviationRow, write

GREW = Rules(thresholds=(Threshold(name="grew", metric="rms", over="before", at_most=1.2),))


def rules(**threshold: Any) -> Rules:
    given = {"name": "grew", "metric": "rms", "over": "before", "at_most": 1.2, **threshold}
    return Rules(thresholds=(Threshold(**given),))


def judged(
    new: list[DeviationRow], old: list[DeviationRow] | None, book: Rules = GREW
) -> Judgement:
    return judge_report(report(*new), book, None if old is None else report(*old))


def only(judgement: Judgement) -> Verdict:
    (found,) = judgement.verdicts
    return found


def test_a_new_report_does_not_excuse_itself() -> None:
    """Its own noise does not count; and of three seeds one that went wrong is enough."""
    assert judged([row(rms=5.0, noise=50.0)], [row(rms=1.0)]).exit_code == 1
    old = [row(seed=seed, rms=1.0) for seed in range(3)]
    assert judged([*old[:2], row(seed=2, rms=100.0)], old).exit_code == 1


@pytest.mark.parametrize(("noise", "code"), [(0.2, 0), (0.1, 1), (0.0, 1), (None, 1)])
def test_a_change_within_the_old_noise_does_not_count(noise: float | None, code: int) -> None:
    """Repeated runs differ by a fifth of the error, in either report: then 1.4 is no change."""
    assert judged([row(rms=1.39)], [row(rms=1.0, noise=noise)]).exit_code == code
    share = [row(row_rel=1.39)], [row(row_rel=1.0, rms=5.0, noise=noise and 5 * noise)]
    assert judged(*share, rules(metric="row_rel")).exit_code == code
    count = [row(nonfinite=2)], [row(nonfinite=1, noise=noise)]
    assert judged(*count, rules(metric="nonfinite")).exit_code == 1, "a count is no error"


def test_noise_excuses_no_more_than_three_times() -> None:
    """However noisy the old report was."""
    assert judged([row(rms=3.1)], [row(rms=1.0, noise=1e9)]).exit_code == 1


def test_what_was_exact_and_is_not_any_more_counts() -> None:
    """There is no ratio to 0; it is said in words. 0 after 0 is no change."""
    found = judged([row(rms=1e-9)], [row(rms=0.0)])
    assert (found.exit_code, only(found).observed) == (1, "1e-09, from 0")
    assert judged([row(rms=0.0)], [row(rms=0.0)]).exit_code == 0
    assert judged([row(rms=0.0)], [row(rms=1.0)]).exit_code == 0


@pytest.mark.parametrize("lenient", ["nothing", "rows", "numbers"])
def test_what_is_in_one_report_alone_is_never_a_pass(lenient: str) -> None:
    """A head, or a kernel, in the new report or in the old one alone: named, whatever may lack."""
    book = rules(may_lack=lenient)
    for new, old, why in (
        ([row(0), row(1)], [row(0)], "not measured in the old report"),
        ([row(0)], [row(0), row(1)], "measured in the old report, and not in this one"),
        ([row(), row(kernel="b")], [row()], "not measured in the old report"),
        ([row()], [row(), row(kernel="b")], "measured in the old report, and not in this one"),
    ):
        found = judged(new, old, book)
        assert found.exit_code == 3
        (lacking,) = (v for v in found.verdicts if v.outcome == "unmeasured")
        assert (lacking.reasons, len(lacking.places)) == ((why,), 1)
        assert lacking.unjudged == 1


def test_an_old_number_that_is_null_is_no_pass() -> None:
    """Whose it is, is said."""
    found = judged([row()], [row(rms=None)])
    assert (found.exit_code, only(found).reasons) == (3, ("in the old report: not measured",))
    assert judged([row(rms=None)], [row()]).exit_code == 3
    skipped = row(None, status="skipped", reason="needs CUDA")
    assert judged([row()], [skipped]).exit_code == 3


def test_without_an_old_report_a_change_is_not_judged() -> None:
    """Even by a rule that may lack everything."""
    found = judged([row()], None, rules(may_lack="numbers"))
    assert found.exit_code == 3
    assert "--against" in only(found).reasons[0]


def test_sampled_rows_have_no_interval_of_a_change() -> None:
    """So they do not pass; what is counted in all rows does."""
    sampled = [row(sampled=True)]
    assert judged(sampled, sampled).exit_code == 3
    assert judged(sampled, sampled, rules(metric="nonfinite")).exit_code == 0


def test_reports_about_something_else_are_refused() -> None:
    """Other inputs under the same names would be a change of those."""
    new, old = report(row()), report(row())
    other = old.model_copy(update={"request": {"length": 512}})
    with pytest.raises(UsageError, match="differ in length"):
        judge_report(new, GREW, other)
    source = old.provenance.model_copy(update={"source": {"sha256": "0"}})
    with pytest.raises(UsageError, match="differ in checkpoint"):
        judge_report(new, GREW, old.model_copy(update={"provenance": source}))


def gate(*arguments: str) -> int:
    try:
        main(["gate", *arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_the_default_rules_beside_an_old_report(tmp_path: Path, capsys: Any) -> None:
    """The same report passes; one of twice the error in dq does not, nor one without an old head;
    a file without a rule on changes is refused, since --against would be ignored."""
    heads = [row(h, row_rel=1e-3) for h in range(8)]
    worse = [row(h, row_rel=2e-3) for h in range(8)]
    for name, rows in (("old", heads), ("worse", worse), ("fewer", heads[:7])):
        (tmp_path / name).mkdir()
        write(report(*rows), tmp_path / name)
    old = str(tmp_path / "old")
    assert gate(old, "--against", old) == 0
    assert "error grew passed 8 1 ≤ 1.25" in " ".join(capsys.readouterr().out.split())
    assert gate(str(tmp_path / "worse"), "--against", old) == 1
    assert "row_rel over before ≤ 1.25" in " ".join(capsys.readouterr().out.split())
    assert gate(str(tmp_path / "fewer"), "--against", old) == 3
    assert "error grew (row_rel over before" in " ".join(capsys.readouterr().out.split())
    plain = tmp_path / "plain.yaml"
    plain.write_text("thresholds: [{name: a, metric: rms, at_most: 1}]")
    assert gate(old, "--against", old, "--thresholds", str(plain)) == 2
    assert gate(old, "--against", str(tmp_path / "none")) == 2
