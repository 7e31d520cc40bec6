"""The report on disk: what is written can be read back, and what cannot be read is refused."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from numdev import report
from numdev.errors import MeasurementError, NumdevError, UsageError
from numdev.report import AuditReport, AuditSummary, DeviationRow, Provenance, WeightRow

ROW: dict[str, Any] = {
    "case": "layers.0#0",
    "source": "demo",
    "module": "layers.0.attn, the “first”",
    "layer": 0,
    "call": 0,
    "seed": None,
    "head": 1,
    "role": "kernel",
    "kernel": "mine",
    "options": {"block": 64, "name": "a,b"},
    "format": "bfloat16",
    "tensor": "out",
    "status": "ok",
    "rms": 0.1 + 0.2,  # 0.30000000000000004: seventeen digits or it does not come back
    "max_abs": 5e-324,
    "fa_rule": True,
    "nulls": {"rel": "the reference is lost in its term scale"},
}


def make(**changes: Any) -> AuditReport:
    fields: dict[str, Any] = {
        "provenance": Provenance(
            numdev="0", command="numdev audit", created="2026-01-01", system={}, source={}
        ),
        "request": {"target": "demo", "kernels": [{"name": "mine"}], "seed": 0},
        "summary": AuditSummary(answer=("bfloat16: yes.",), kernels=()),
        "rows": (DeviationRow(**ROW), DeviationRow(**{**ROW, "head": None, "status": "skipped"})),
        "weights": (
            WeightRow(
                tensor="w",
                shape=(2, 3),
                stored="float32",
                format="bfloat16",
                elements=6,
                nonfinite=0,
                max_abs=1e-3,
                mean_abs=1e-4,
                rel=None,
                w1=1e-4,
            ),
        ),
    }
    return AuditReport(**{**fields, **changes})


@pytest.fixture
def written(tmp_path: Path) -> Path:
    report.write(make(), tmp_path)
    return tmp_path


def tampered(directory: Path, change: Callable[[Any], Any]) -> Path:
    path = directory / "report.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def refusal(path: Path) -> NumdevError:
    """The error of reading `path`: one line that names the file and has a hint."""
    with pytest.raises(NumdevError) as caught:
        report.read(path)
    assert str(path) in caught.value.message
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    return caught.value


# --- there and back ------------------------------------------------------------------------------


def test_what_is_written_is_read(written: Path) -> None:
    """A report read back equals the one written, to the last bit, from its directory or file."""
    assert report.read(written) == make()
    assert report.read(written / "report.json") == make()
    assert report.read(written).rows[0].rms == 0.1 + 0.2


def test_nothing_else_is_left_in_the_directory(written: Path) -> None:
    """Three files, readable by others, and no temporary one."""
    assert sorted(p.name for p in written.iterdir()) == ["report.json", "rows.csv", "weights.csv"]
    assert {p.stat().st_mode & 0o777 for p in written.iterdir()} == {0o644}


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda r: r.update(schema_version=1), "schema_version"),
        (lambda r: r.update(schema_version="1.5"), "schema_version"),
        (lambda r: r.update(kind="guess"), "kind"),
        (lambda r: r.update(extra=1), "extra"),
        (lambda r: r["rows"][0].update(rmse=1), "rows.0.rmse"),
        (lambda r: r["rows"][0].update(status="fine"), "rows.0.status"),
        (lambda r: r["rows"][0].update(rms="much"), "rows.0.rms"),
        (lambda r: r["rows"][0].update(rms=math.nan), "rows.0.rms"),
        (lambda r: r["rows"][0].update(rms=math.inf), "rows.0.rms"),
        (lambda r: r["rows"][0].pop("kernel"), "rows.0.kernel"),
        (lambda r: r["provenance"].pop("command"), "provenance.command"),
        (lambda r: r.pop("rows"), "rows"),
    ],
)
def test_a_report_that_is_not_understood_is_refused(
    written: Path, change: Callable[[Any], Any], named: str
) -> None:
    """Another version, an unknown or missing field, a number that is none: exit code 3, and the
    place is named."""
    error = refusal(tampered(written, change))
    assert isinstance(error, MeasurementError)
    assert f": {named}: " in error.message


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"report"', "\x00", "{}", "Report\n{"])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    """Garbage, empty files and other JSON are exit code 3, never a traceback."""
    path = tmp_path / "report.json"
    path.write_text(text)
    assert refusal(path).exit_code == 3


def test_a_report_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    """A missing file, and a directory without one, are exit code 2."""
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError, match=r"cannot read a report there \(No such file"):
            report.read(path)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_cannot_hold_never_gets_in(bad: float) -> None:
    """NaN and infinity are refused where a row is made, so none can be written."""
    for field in ("rms", "bias_p", "floor_ratio"):
        with pytest.raises(ValidationError, match="finite"):
            DeviationRow(**{**ROW, field: bad})


def test_json_text_is_strict(written: Path) -> None:
    """The file holds no NaN or Infinity, which JSON does not have."""

    def no_constant(name: str) -> None:
        raise AssertionError(name)

    json.loads((written / "report.json").read_text(), parse_constant=no_constant)


# --- atomic --------------------------------------------------------------------------------------


def test_a_failure_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    """Whatever happens while writing, the old content stays whole and no temporary file remains."""
    path = tmp_path / "report.json"
    path.write_text("old")

    def fail(error: BaseException) -> None:
        with report.replacing(path) as file:
            file.write("half of the ne")
            raise error

    for error in (OSError("disk full"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            fail(error)
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """Until it is complete, the new content does not have the name."""
    path = tmp_path / "report.json"
    with report.replacing(path) as file:
        file.write("new")
        file.flush()
        assert not path.exists()
    assert path.read_text() == "new"


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with report.replacing(pipe) as file:
            file.write("whole")
        assert os.read(reader, 100) == b"whole"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert len(list(tmp_path.iterdir())) == 1


def test_devices_and_open_files_are_written_to() -> None:
    """`--junit /dev/stdout`, where stdout is a pipe; as root a rename would replace the device."""
    code = (
        "from pathlib import Path; from numdev.report import replacing\n"
        "for name in ('/dev/stdout', '/proc/self/fd/1', '/dev/null'):\n"
        "    with replacing(Path(name)) as file: file.write('said ')"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "said said "
    assert Path("/dev/null").is_char_device()
    assert Path("/dev/stdout").is_symlink()


# --- CSV -----------------------------------------------------------------------------------------


def test_csv_holds_every_field_of_every_row(written: Path) -> None:
    """One line a row, one column a field; options as JSON, null as nothing, numbers in full."""
    with (written / "rows.csv").open(newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert list(first) == list(DeviationRow.model_fields)
    assert first["module"] == ROW["module"]
    assert json.loads(first["options"]) == ROW["options"]
    assert json.loads(first["nulls"]) == ROW["nulls"]
    assert float(first["rms"]) == 0.1 + 0.2
    assert float(first["max_abs"]) == 5e-324
    assert (first["rel"], first["fa_rule"]) == ("", "True")
    assert (second["head"], second["status"]) == ("", "skipped")


@pytest.mark.parametrize("model", [report.DeviationRow, report.WorstRow, report.AttributionRow])
def test_every_kind_of_row_says_of_which_task_it_is(model: type[report.Record]) -> None:
    """What identifies a task (`measuring.identity`) has a field in each: what cannot be measured
    is no result to `examine`, and a field that is missing would look like that."""
    from numdev.audit.plan import Task
    from numdev.audit.rows import identity
    from numdev.cases import CaseRef

    ref = CaseRef(case="a", source="b", module="c", layer=0, call=0, seed=None)
    task = Task(case=ref, role="kernel", kernel="k", options={}, format="bfloat16", heads=None)
    assert identity(task).keys() <= model.model_fields.keys()
