"""`numdev logprobs` and `numdev.logprobs` from files to report, page, gate and compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import numdev
from numdev.errors import MeasurementError, UsageError
from numdev.gate.judging import judge_report
from numdev.report.io import read
from numdev.studies.logprobs.report import LogprobsReport
from tests.support.commands import ran

STORED = Path(__file__).parent / "data" / "reports" / "logprobs.json"


def write_files(folder: Path, *, base: float = 1.0) -> tuple[str, str]:
    """Two files of 4 sequences of 12 random tokens with random values, the rollout's in
    another base."""
    rng = np.random.default_rng(0)
    for name, scale, noise in (("rollout", base, 0.0), ("trainer", 1.0, 0.02)):
        lines = []
        values = np.random.default_rng(1)
        for uid in range(4):
            ids = np.random.default_rng(uid).integers(3, 2048, 12).tolist()
            logprobs = -np.abs(values.normal(size=12)) * 4 - 0.01
            logprobs = logprobs * scale + noise * rng.normal(size=12)
            lines.append(
                {"uid": str(uid), "token_ids": ids, "mask": [1] * 12,
                 "logprobs": [None, *logprobs[1:].tolist()]}
            )  # fmt: skip
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    return str(folder / "rollout.jsonl"), str(folder / "trainer.jsonl")


def test_two_files_without_a_model(tmp_path: Path, capsys: Any) -> None:
    """Sides are not judged, which with --gate is exit code 3; the numbers of dashboards
    are there, and no file of results has a token's text."""
    files = write_files(tmp_path)
    out = tmp_path / "out"
    code, text, _ = ran(capsys, "logprobs", *files, "--gate", "-o", out)
    assert code == 3
    assert "no model: which side is off is not told" in text
    report = read(out)
    assert isinstance(report, LogprobsReport)
    assert report.plan.pairs == 4
    numbers = {s.name: s.value for s in report.summary.statistics}
    assert numbers["mean |d|"] is not None
    assert 0.01 < numbers["mean |d|"].mean < 0.03
    assert {p.name for p in out.iterdir()} == {
        "report.json", "report.html", "rows.csv", "pairs.csv", "causes.csv", "worst.csv",
    }  # fmt: skip
    assert all(token.text is None for token in report.worst)
    code, again, _ = ran(capsys, "gate", out)
    assert code == 3
    assert "NOT JUDGED" in again


def test_another_base_of_one_file(tmp_path: Path, capsys: Any) -> None:
    """The pair fails with the cause: exit code 1 with --gate."""
    files = write_files(tmp_path, base=1 / np.log(2))
    code, text, _ = ran(capsys, "logprobs", *files, "--gate", "-o", tmp_path / "out")
    assert code == 1
    assert "the other side's to the base 2" in " ".join(text.split())


def test_in_python(tmp_path: Path) -> None:
    """The same from Python, kept nowhere unless asked; one side alone needs a model."""
    files = write_files(tmp_path)
    report = numdev.logprobs(*files, clip_low=0.5, clip_high=2.0)
    assert report.plan.clip == (0.5, 2.0)
    assert report.request["files"] == list(files)
    with pytest.raises(UsageError, match="of one program alone"):
        numdev.logprobs(files[0])
    with pytest.raises(UsageError, match="expected one file or two, got 3"):
        numdev.logprobs(*files, files[0])
    numdev.logprobs(*files, output=tmp_path / "out")
    with pytest.raises(UsageError, match="of a different numdev logprobs"):
        numdev.logprobs(*files, output=tmp_path / "out", clip_low=0.5)


def test_a_comparison_tells_what_moved(tmp_path: Path, capsys: Any) -> None:
    """A report with itself moved nowhere; one whose rollout errs thirty times as much
    did, and one held to another support is refused."""
    report = read(STORED)
    assert isinstance(report, LogprobsReport)
    comparison = numdev.compare(report, report)
    assert not comparison.moved
    assert comparison.measured
    worse = [
        row.model_copy(
            update={
                "square": row.square * 900, "largest": row.largest * 30,
                "error": row.error * 30, "product": row.product * 30,
            }
        )
        if row.square is not None and row.largest is not None
        and row.error is not None and row.product is not None
        else row
        for row in report.rows
    ]  # fmt: skip
    moved = numdev.compare(report, report.model_copy(update={"rows": tuple(worse)}))
    assert moved.moved
    assert {move.kernel for move in moved.moves} == {"rollout", "trainer"}
    sides = tuple(
        side.model_copy(update={"support": "temperature 0.5, all tokens"})
        for side in report.plan.sides
    )
    other = report.model_copy(
        update={"plan": report.plan.model_copy(update={"sides": sides})}
    )
    with pytest.raises(UsageError, match=r"rollout: held to temperature 1"):
        numdev.compare(report, other)


def altered(report: LogprobsReport, table: str, **fields: object) -> LogprobsReport:
    """The report with other fields in the first row of a table."""
    first, *others = getattr(report, table)
    row = first.model_copy(update=fields)
    return report.model_copy(update={table: (row, *others)})


@pytest.mark.parametrize(("table", "fields", "words"), [
    ("rows", {"square": 1e-9}, "sum of squares below what its sum needs"),
    ("rows", {"square": 1e9}, "errors that are larger than its largest"),
    ("rows", {"tokens": 0}, "has no numbers, and was measured"),
    ("rows", {"sequence": 7}, "has no row, or several"),
    ("rows", {"infinite": 5}, "does not follow from its rows"),
    ("pairs", {"tokens": 3}, "sums of another number of tokens"),
    ("pairs", {"unshared": 2}, "does not follow from its rows"),
    ("causes", {"after": 0.0}, "leaves another error than its effect does"),
    ("causes", {"cause": "mischief"}, "no row, several, or no plan"),
], ids=lambda value: str(value)[:24])  # fmt: skip
def test_an_altered_report_contradicts_itself(
    table: str, fields: dict[str, object], words: str
) -> None:
    """Whatever row is changed, the gate says so, and does not pass."""
    report = read(STORED)
    assert isinstance(report, LogprobsReport)
    judge_report(report)
    with pytest.raises(MeasurementError, match=words):
        judge_report(altered(report, table, **fields))


def test_a_row_less_is_no_pass() -> None:
    """A report that lacks a row of a side, of the pair or of a cause is inconsistent."""
    report = read(STORED)
    assert isinstance(report, LogprobsReport)
    for table in ("rows", "pairs", "causes"):
        fewer = report.model_copy(update={table: getattr(report, table)[1:]})
        with pytest.raises(MeasurementError, match="inconsistent report"):
            judge_report(fewer)
