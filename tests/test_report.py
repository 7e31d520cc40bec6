"""The report on disk and in every form: what is written can be read back, what cannot be
read is refused, by its place and with both versions named, and foreign text commands
nobody.

tests/data/reports holds one of every kind, and tests/data/older/audit-schema3.json one as
an early version wrote it: of the same schema, before checksums and more had fields. These
files stay: who changes a record learns it here."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import run
from test_html import SAMPLES, audit, sample

from numdev import report
from numdev.errors import MeasurementError, UsageError
from numdev.report import DeviationRow
from numdev.report.io import refuse_other_kind, with_digest
from numdev.report.renderers.markdown import escaped
from numdev.report_kinds import REGISTERED, judged_by, kind_of
from numdev.request_models import SweepConfig
from numdev.yamlfile import read_yaml

FORMATS = ("terminal", "html", "markdown", "csv", "json")
OLDER = Path(__file__).parent / "data" / "older" / "audit-schema3.json"


READ: Any = report.read(sample("audit"))
# 0.30000000000000004: seventeen digits or it does not come back.
CHANGES = {"rms": 0.1 + 0.2, "max_abs": 5e-324, "module": "the “first”", "options": {"a": "b,c"},
           "nulls": {"rel": "lost, in its terms"}}  # fmt: skip
WRITTEN = READ.model_copy(
    update={"rows": (READ.rows[0].model_copy(update=CHANGES), *READ.rows[1:])}
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """A report read back equals the one written, to the last bit, from its directory or
    file. Three files, readable by others, and no temporary one. In CSV one line a row,
    one column a field; options as JSON, null as nothing, numbers in full."""
    report.write(WRITTEN, written := tmp_path)
    assert report.read(written) == report.read(written / "report.json") == WRITTEN
    assert report.read(written).rows[0].rms == 0.1 + 0.2
    assert sorted(p.name for p in written.iterdir()) == [
        "report.json",
        "rows.csv",
        "weights.csv",
    ]
    assert {p.stat().st_mode & 0o777 for p in written.iterdir()} == {0o644}
    lines = list(
        csv.DictReader((written / "rows.csv").open(newline="", encoding="utf-8"))
    )
    assert list(lines[0]) == list(DeviationRow.model_fields)
    for line, row in zip(lines, WRITTEN.rows, strict=True):
        for name, value in row:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            assert line[name] == ("" if value is None else text)


def test_no_field_of_the_schema_is_lost() -> None:
    """Whoever removes or renames a field of a row writes another schema, and has to say
    so in SCHEMA_VERSION; one that every row must have is no field to add, either."""
    data = json.loads(OLDER.read_text(encoding="utf-8"))
    fields = DeviationRow.model_fields
    required = {name for name, field in fields.items() if field.is_required()}
    assert required <= set(data["rows"][0]) <= set(fields)


SENSELESS = ({"rmse": 1}, {"status": "fine"}, {"rms": "much"}, {"rms": math.nan}, {"rms": math.inf},
             {"nonfinite": "0"}, {"nonfinite": False}, {"head": 0.0})  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "named"), [
    *(("audit", lambda r, x=x: r["rows"][0].update(x), f"rows.0.{next(iter(x))}")
      for x in SENSELESS),
    ("audit", lambda r: r["rows"][0].pop("kernel"), "rows.0.kernel"),
    ("audit", lambda r: r.pop("schema_version"), "schema_version"),
    ("audit", lambda r: r.update(kind="guess"), "kind"),
    ("audit", lambda r: r.update(extra=1), "extra"),
    ("audit", lambda r: r["provenance"].pop("command"), "provenance.command"),
    ("audit", lambda r: r.pop("rows"), "rows"),
    ("sweep", lambda r: r["summary"]["axis"].update(ticks=[]), "summary.axis.ticks"),
])  # fmt: skip
def test_what_is_unknown_is_refused(
    tmp_path: Path, kind: str, change: Any, named: str
) -> None:
    """Another version, an unknown or missing field, a number that is none: exit code 3,
    in one line with the file, the place and a hint."""
    content = json.loads(sample(kind).read_text())
    del content["digest"]
    change(content)
    path = tmp_path / "report.json"
    path.write_bytes(with_digest(json.dumps(content).encode()))
    with pytest.raises(MeasurementError) as caught:
        report.read(path)
    assert str(path) in caught.value.message
    assert f": {named}: " in caught.value.message
    assert caught.value.hint
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", [0, 1, 2, 4, 10**30, "3", 3.0, True, None])
@pytest.mark.parametrize("command", ["report", "gate"])
def test_a_newer_report_is_refused(
    tmp_path: Path, command: str, version: Any, capsys: Any
) -> None:
    """By its number, of whatever type: exit code 3, and who wrote it."""
    data = json.loads(OLDER.read_text(encoding="utf-8")) | {"schema_version": version}
    data["provenance"]["numdev"] = "9.8.7"
    (tmp_path / "report.json").write_text(json.dumps(data))
    assert run(command, str(tmp_path)) == 3
    error = capsys.readouterr().err
    assert "numdev 9.8.7 wrote it" in error
    assert "schema_version" in error


@pytest.mark.parametrize("edit", [
    lambda text: text.replace(b'"bfloat16"', b'"float16"', 1),  # a word
    lambda text: text.replace(b"[", b"[ ", 1),  # white space
    lambda text: text[:-80] + b"}",  # the digest itself
    lambda text: text[:5000], lambda text: text + text,
    lambda text: json.dumps(json.loads(text), indent=1).encode(),
])  # fmt: skip
def test_a_report_that_was_changed_by_hand_is_refused(tmp_path: Path, edit: Any) -> None:
    """Cut off, edited, put together of two, printed by another program: in one line."""
    path = tmp_path / "report.json"
    path.write_bytes(edit(OLDER.read_bytes()))
    with pytest.raises(
        MeasurementError, match=" the file was truncated or edited; measure"
    ):
        report.read(path)


@pytest.mark.parametrize("head", [
    *(f'"kind":{x},"schema_version":3' for x in ('["audit"]', '{"a":1}', "5", "null", "true", '"audit')),
    *(f'"kind":"audit","schema_version":{x}' for x in ("[3]", "{}", '"3"', "null", "true", "3.0")),
    *(f'"kind":"audit","schema_version":3,"provenance":{x}' for x in ("5", "[]", "null", '{"numdev":[1]}')),
])  # fmt: skip
def test_a_head_of_another_json_type_is_refused(tmp_path: Path, head: str) -> None:
    """By whoever reads a head, in a sentence that names no version which is not there."""
    path = tmp_path / "report.json"
    path.write_text("{" + head + "}")
    with pytest.raises(MeasurementError) as caught:
        report.read(path)
    assert "not a report this numdev can read: " in str(caught.value)
    assert "None wrote" not in str(caught.value)
    if head.startswith('"kind":"audit","'):  # whatever else it says
        with pytest.raises(
            UsageError, match="holds the report of a different numdev audit"
        ):
            refuse_other_kind(tmp_path, "sweep")
    else:
        refuse_other_kind(tmp_path, "sweep")


@pytest.mark.parametrize("text", ["[]", "null", "5", '"audit"', "", "[" * 9999])
def test_what_is_no_json_object_is_no_report(tmp_path: Path, text: str) -> None:
    """In one line; and it forbids no command to write there."""
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(MeasurementError, match="that numdev wrote"):
        report.read(tmp_path)
    refuse_other_kind(tmp_path, "sweep")


@pytest.mark.parametrize("error", [None, OSError("disk full"), KeyboardInterrupt()])
def test_a_reader_never_sees_half_a_file(
    tmp_path: Path, error: BaseException | None
) -> None:
    """Until it is complete, the new content does not have the name. Whatever happens
    while writing, the old content stays whole and no temporary file remains."""
    path = tmp_path / "report.json"
    path.write_text("old")
    with contextlib.suppress(OSError, KeyboardInterrupt), report.replacing(path) as file:
        file.write("new")
        file.flush()
        assert path.read_text() == "old"
        if error:
            raise error
    assert path.read_text() == ("old" if error else "new")
    assert list(tmp_path.iterdir()) == [path]


def test_devices_and_open_files_are_written_to(tmp_path: Path) -> None:
    """`--junit /dev/stdout`, where stdout is a pipe; as root not renamed. A pipe stays
    one."""
    code = (
        "from pathlib import Path; from numdev.report import replacing\n"
        "for name in ('/dev/stdout', '/proc/self/fd/1', '/dev/null'):\n"
        "    with replacing(Path(name)) as file: file.write('said ')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "said said "
    assert Path("/dev/null").is_char_device()
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with report.replacing(pipe) as file:
        file.write("whole")
    assert os.read(reader, 100) == b"whole"
    os.close(reader)
    assert [path.is_fifo() for path in tmp_path.iterdir()] == [True]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.stem)
@pytest.mark.parametrize("form", FORMATS)
def test_every_kind_in_every_form(path: Path, form: str, capsys: Any) -> None:
    """The answer is in every form that is read by people."""
    assert run("report", str(path), "--format", form) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("\n")
    if form in ("terminal", "html", "markdown"):
        summary: Any = getattr(report.read(path), "summary")  # noqa: B009
        head = summary.answer[0].partition(": ")[0].split()[0]
        assert escaped(head) in shown or head in shown


def test_csv_and_json_are_the_report(tmp_path: Path, capsys: Any) -> None:
    """All rows in the report's order; and the whole report as JSON."""
    run("report", str(sample("audit")), "--format", "csv")
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    rows = json.loads(sample("audit").read_text())["rows"]
    assert [line["rms"] for line in lines] == ["" if r["rms"] is None else repr(r["rms"])
                                               for r in rows]  # fmt: skip
    assert run("report", str(sample("sweep")), "--format", "json") == 0
    (tmp_path / "report.json").write_text(capsys.readouterr().out)
    assert report.read(tmp_path) == report.read(sample("sweep"))
    assert run("report", str(sample("sweep")), "--format", "pdf") == 2


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_no_cell_is_a_formula(start: str, tmp_path: Path) -> None:
    """Text that a spreadsheet would compute gets an apostrophe; negative numbers stay
    numbers."""
    row = WRITTEN.rows[0].model_copy(update={"kernel": f"{start}1+1", "bias": -0.5})
    report.write(WRITTEN.model_copy(update={"rows": (row,)}), tmp_path)
    with (tmp_path / "rows.csv").open(newline="") as file:
        (line,) = csv.DictReader(file)
    assert (line["kernel"], line["bias"]) == (f"'{start}1+1", "-0.5")


@pytest.mark.parametrize("form", FORMATS)
def test_no_form_commands_a_terminal(form: str, tmp_path: Path, capsys: Any) -> None:
    """Whatever is printed holds no control character and no mark of direction; JSON
    escapes."""
    hostile = "red\x1b[31m\x9b2J\u202eabc\u2066\x07"
    row = WRITTEN.rows[0].model_copy(update={"kernel": hostile, "case": hostile})
    report.write(audit(name=hostile, rows=(row,)), tmp_path)
    assert run("report", str(tmp_path), "--format", form) == 0
    shown = capsys.readouterr().out
    assert not re.search(
        "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown
    )
    if form == "json":
        assert json.loads(shown)["rows"][0]["kernel"] == hostile
    else:
        assert "\\x1b" in shown


@pytest.mark.parametrize(("text", "words"), [
    ("[" * 50_000, "cannot be read"),
    (("cases: [{name: a, heads: 1, seq_len: 8, head_dim: 8}]\nseeds: 4000000000"), "1 to 100,000 "),
    ("cases: [{name: a, heads: &x [1,2,3,4,5,6,7,8,9,10], seq_len: *x, head_dim: *x, "
     "batch: *x, kv_len: *x, v_dim: *x}]", "at most 100,000 cells"),
], ids=["deep", "seeds", "grid"])  # fmt: skip
def test_a_configuration_that_would_not_end(
    text: str, words: str, tmp_path: Path
) -> None:
    """Is refused at once: nesting, seeds, a grid."""
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_yaml(path, SweepConfig)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.stem)
def test_every_kind_has_tables_and_something_to_show(path: Path) -> None:
    """Tables are written as CSV; blocks stand below the verdicts."""
    stored = report.read(path)
    assert any(stored.tables().values())
    assert [*kind_of(stored.kind).blocks(stored)]


JUDGED = [path for path in SAMPLES if kind_of(path.stem).judged]


@pytest.mark.parametrize("path", JUDGED, ids=lambda p: p.stem)
def test_a_row_less_or_twice_contradicts_the_plan_of_every_kind(path: Path) -> None:
    """What is planned and has no row would exceed no limit."""
    stored: Any = report.read(path)
    check = judged_by(stored.kind).check
    check(stored)
    for i, row in enumerate(stored.rows):
        less = (*stored.rows[:i], *stored.rows[i + 1 :])
        for rows in (less, (*stored.rows, row)):
            with pytest.raises(MeasurementError):
                check(stored.model_copy(update={"rows": rows}))


def test_one_report_of_every_kind_is_stored() -> None:
    """By these, tests go through all kinds."""
    assert {path.stem for path in SAMPLES} == REGISTERED.keys()
