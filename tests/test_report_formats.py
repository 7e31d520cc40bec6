"""`numdev report --format`: every kind of report in every form, and foreign text in each."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_html import audit

from numdev import report as reports
from numdev.cli.main import main
from numdev.errors import MeasurementError, UsageError
from numdev.report.renderers import markdown
from numdev.report.renderers.markdown import escaped

SAMPLES = sorted((Path(__file__).parent / "data" / "reports").glob("*.json"))
FORMATS = ("terminal", "html", "markdown", "csv", "json")


def sample(kind: str) -> Path:
    return next(p for p in SAMPLES if p.stem == kind)


def run(*arguments: str) -> int:
    try:
        main(list(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


# --- every kind, every form ----------------------------------------------------------------------


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.stem)
@pytest.mark.parametrize("form", FORMATS)
def test_every_kind_in_every_form(
    path: Path, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stdout, and the same in a file but for the terminal's width; the answer is in all forms
    that are to be read."""
    assert run("report", str(path), "--format", form) == 0
    shown = capsys.readouterr().out
    file = tmp_path / "out"
    assert run("report", str(path), "--format", form, "-o", str(file)) == 0
    assert capsys.readouterr().out == ""
    written = file.read_bytes().decode()
    if form != "terminal":
        assert written.rstrip("\n") == shown.rstrip("\n")
    if form in ("terminal", "html", "markdown"):
        found: Any = reports.read(path)
        head = found.summary.answer[0].partition(": ")[0].split()[0]
        assert escaped(head) in written or head in written


def test_csv_is_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """One line a row, in the report's order, numbers in full."""
    run("report", str(sample("audit")), "--format", "csv")
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    rows = json.loads(sample("audit").read_text())["rows"]
    assert [line["kernel"] for line in lines] == [row["kernel"] for row in rows]
    assert [line["rms"] for line in lines] == ["" if r["rms"] is None else repr(r["rms"])
                                               for r in rows]  # fmt: skip


def test_json_is_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` is short for it, and contradicts no other."""
    for options in (("--json",), ("--format", "json"), ("--json", "--format", "json")):
        assert run("report", str(sample("sweep")), *options) == 0
        out = capsys.readouterr().out
        assert reports.SweepReport.model_validate_json(out) == reports.read(sample("sweep"))
    assert run("report", str(sample("sweep")), "--json", "--format", "csv") == 2


@pytest.mark.parametrize("where", ["no/such/folder/x.html", "."])
def test_where_nothing_can_be_written(where: str, tmp_path: Path) -> None:
    """A directory, or a file in one that is not there: exit code 2, and nothing is left."""
    given = str(tmp_path / where)
    assert run("report", str(sample("audit")), "--format", "html", "-o", given) == 2
    assert list(tmp_path.iterdir()) == []


# --- Markdown ------------------------------------------------------------------------------------


def test_markdown_has_its_parts_in_order() -> None:
    """The answer, the findings, the ranking with floor and baseline, where it comes from."""
    text = markdown.page(reports.read(sample("audit")))
    parts = ("# Audit: demo", "errs 2.00 x the floor", "## Findings", "| kernel | ×floor |",
             "| floor ", "| baseline ", "## Where this comes from")  # fmt: skip
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_a_table_of_markdown_has_as_many_cells_in_each_line() -> None:
    """Pipes in names are escaped, so a table stays one."""
    found = audit(name="a|b")
    for block in re.findall(r"(?:^\|.*\n)+", markdown.page(found), re.MULTILINE):
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(counts) == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("# h", r"\# h"), ("- a", r"\- a"), ("1. a", r"1\. a"), ("12) a", r"12\) a"),
        ("--- ", r"\---"), ("[a](b)", r"\[a\](b)"), ("<b>", r"\<b\>"), ("a|b", r"a\|b"),
        ("`x`", r"\`x\`"), ("https://x", r"https\://x"), ("@me", "@<!-- -->me"), ("a\nb", r"a\\nb"),
        ("\x1b[31m", r"\\x1b\[31m"), ("&lt;", r"\&lt;"),
        # and what means nothing is left as it is
        ("0.59 x", "0.59 x"), ("+0.3 %", "+0.3 %"), ("-1.2", "-1.2"), ("a - b # c", "a - b # c"),
    ],
)  # fmt: skip
def test_markdown_of_foreign_text(text: str, shown: str) -> None:
    """What Markdown would act on is escaped; numbers stay readable."""
    assert escaped(text) == shown


# --- CSV -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_no_cell_is_a_formula(start: str, tmp_path: Path) -> None:
    """Text that a spreadsheet would compute has an apostrophe before it, beside report.json too;
    negative numbers stay numbers."""
    found = reports.read(sample("audit"))
    assert isinstance(found, reports.AuditReport)
    row = found.rows[0].model_copy(update={"kernel": f"{start}1+1", "bias": -0.5})
    reports.write(found.model_copy(update={"rows": (row,)}), tmp_path)
    with (tmp_path / "rows.csv").open(newline="") as file:
        (line,) = csv.DictReader(file)
    assert line["kernel"] == f"'{start}1+1"
    assert line["bias"] == "-0.5"


@pytest.mark.parametrize("form", FORMATS)
def test_no_form_commands_a_terminal(form: str, tmp_path: Path, capsys: Any) -> None:
    """Whatever is printed holds no control character and no mark of direction; JSON says the same
    in escapes."""
    hostile = "red\x1b[31m\x9b2J\u202eabc\u2066\x07"
    found = reports.read(sample("audit"))
    assert isinstance(found, reports.AuditReport)
    row = found.rows[0].model_copy(update={"kernel": hostile, "case": hostile})
    reports.write(found.model_copy(update={"rows": (row,)}), tmp_path)
    assert run("report", str(tmp_path), "--format", form) == 0
    shown = capsys.readouterr().out
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)
    if form == "json":
        assert json.loads(shown)["rows"][0]["kernel"] == hostile
    if form == "csv":
        assert "red\\x1b[31m\\x9b2J\\u202eabc" in shown


# --- other versions ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.stem)
def test_what_this_schema_wrote_is_read(path: Path) -> None:
    """These files stay: whoever changes a record learns here that it is another schema. What is
    read is what the file says, field by field."""
    found = reports.read(path)
    assert_holds(json.loads(found.model_dump_json()), json.loads(path.read_text()))


def assert_holds(read: Any, written: Any) -> None:
    """That everything written is read as it was; fields added since have their defaults."""
    if isinstance(written, dict):
        for key, value in written.items():
            assert_holds(read[key], value)
    elif isinstance(written, list):
        assert len(read) == len(written)
        for a, b in zip(read, written, strict=True):
            assert_holds(a, b)
    else:
        assert read == written


def test_what_is_not_held_is_noticed() -> None:
    """A changed, a missing and an added value."""
    for read in ({"a": [1, 2.0]}, {"a": [1]}, {"b": 1}):
        with pytest.raises((AssertionError, KeyError)):
            assert_holds(read, {"a": [1, 2.5]})


@pytest.mark.parametrize(
    ("version", "hint"),
    [(0, "measure again"), (1, "measure again"), (3, "update numdev"), (10**30, ""), ("1", ""),
     (1.0, ""), (True, ""), (None, ""), ("absent", "")],
)  # fmt: skip
@pytest.mark.parametrize("command", ["report", "gate", "bounds"])
def test_another_version_is_refused(
    version: Any, hint: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Older, newer, of another type, not said: exit code 3 and a line with what to do, never a
    pass, whatever the rest of the file is."""
    kind = "train" if command == "bounds" else "audit"
    content = json.loads(sample(kind).read_text())
    content["schema_version"] = version
    content["a field of the future"] = 1
    if version == "absent":
        del content["schema_version"]
    path = tmp_path / "report.json"
    path.write_text(json.dumps(content))
    if version == 1.0:
        del content["a field of the future"]
    options = ("-o", str(tmp_path / "out")) if command == "bounds" else ()
    assert run(command, str(path), *options) == 3
    error = capsys.readouterr().err
    assert "schema_version" in error or "a field of the future" in error
    assert hint in error


def test_a_newer_version_says_who_wrote_it(tmp_path: Path) -> None:
    """And a kind that is not known is no audit."""
    content = json.loads(sample("audit").read_text()) | {"schema_version": 3}
    content["provenance"]["numdev"] = "9.8.7"
    path = tmp_path / "report.json"
    path.write_text(json.dumps(content))
    with pytest.raises(MeasurementError, match=r"9\.8\.7"):
        reports.read(path)
    path.write_text(json.dumps(content | {"schema_version": 2, "kind": "horoscope"}))
    with pytest.raises(MeasurementError, match="no report of kind 'horoscope'"):
        reports.read(path)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("audit", lambda r: r["summary"]["map"].update(values=[[1.0]])),
        ("audit", lambda r: r["provenance"]["system"].update(packages="torch")),
        ("diagnose", lambda r: r["heads"].clear()),
        ("diagnose", lambda r: r["running"][0]["sums"].pop()),
        ("sweep", lambda r: r["summary"]["axis"].update(ticks=[])),
        ("bounds", lambda r: r["summary"]["axis"]["ticks"][0].update(x=-1)),
        ("weights", lambda r: r["sources"].clear()),
    ],
)
def test_a_report_that_contradicts_itself_is_refused(
    kind: str, change: Any, tmp_path: Path
) -> None:
    """Exit code 3, before anything is shown of it."""
    content = json.loads(sample(kind).read_text())
    change(content)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(content))
    with pytest.raises(MeasurementError, match="not a report this version understands"):
        reports.read(path)


# --- configurations without an end ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 50_000, "nested too deeply"),
        ("cases: [{name: a, heads: 1, seq_len: 8, head_dim: 8}]\nseeds: 4000000000",
         "1 to 100,000 seeds"),
        ("cases: [{name: a, heads: &x [1,2,3,4,5,6,7,8,9,10], seq_len: *x, head_dim: *x, "
         "batch: *x, kv_len: *x, v_dim: *x, window: *x, causal_offset: *x, softcap: *x}]",
         "more than 100,000 cells"),
        ("\n".join(("x0: &x0 [1]", *(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]"
                                     for i in range(1, 10)))), "more than 200,000 values"),
    ],
    ids=["deep", "seeds", "grid", "aliases"],
)  # fmt: skip
def test_a_configuration_that_would_not_end(text: str, said: str, tmp_path: Path) -> None:
    """Is refused at once: nesting, seeds, a grid."""
    from numdev.config import SweepConfig
    from numdev.yamlfile import read_yaml

    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        read_yaml(path, SweepConfig)
