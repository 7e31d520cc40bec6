"""What the terminal shows: no wider than it, nothing cut off, and foreign text as mere
text."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from commands import ran
from gate_rows import judge, row
from rich.cells import cell_len
from rich.console import Console
from test_github import NAMES
from test_html import audit, provenance
from test_shown import kernel, on_terminal

from numdev import report as reports
from numdev.cli.main import COMMANDS
from numdev.cli.session import say
from numdev.gate.findings import findings_in
from numdev.gate.rules import Rules
from numdev.report import AuditReport, Places, WeightRow, number_text
from numdev.report import document as doc
from numdev.report.renderers import terminal
from numdev.report.safe_text import plain
from numdev.report.views import document_of
from numdev.report.views.gate import document

WIDTHS = (80, 100, 120)
REPORTS = Path(__file__).parent / "data" / "reports"


def fits(text: str, width: int) -> bool:
    """No line is wider, none ends with blanks, and nothing is cut off."""
    lines = text.splitlines()
    return "…" not in text and all(
        cell_len(line) <= width and line == line.rstrip() for line in lines
    )


def test_the_check_of_widths_rejects() -> None:
    """A line one cell too long, wide characters, an ellipsis, and a blank at a line's end
    are noticed."""
    assert fits("x" * 80, 80)
    wrong = ("x" * 81, "長" * 41, "kern…", "x \ny")
    assert not any(fits(text, 80) for text in wrong)


@pytest.mark.parametrize("file", sorted(REPORTS.glob("*.json")), ids=lambda p: p.stem)
def test_a_report_is_as_wide_as_the_terminal(
    file: Path, capsys: Any, monkeypatch: Any
) -> None:
    """Of every kind, at three widths, and in a pipe, where a line has PIPE characters. No
    name of a kernel is broken in two."""
    finished = reports.read(file)
    for width in WIDTHS:
        assert fits(on_terminal(finished, width), width)
    monkeypatch.delenv("COLUMNS", raising=False)
    terminal.show(finished)
    shown = capsys.readouterr().out
    assert fits(shown, terminal.PIPE)
    for name in ("sdpa-flash", "sdpa-math"):
        for width in WIDTHS:
            text = on_terminal(finished, width)
            assert text.count(name[:-1]) == text.count(name)


@pytest.mark.parametrize("width", [*WIDTHS, None])
@pytest.mark.parametrize("line", [
    "kernels", "kernels -v", "--help", *(f"{name} --help" for name in COMMANDS),
    f"gate {REPORTS / 'audit.json'}", f"report {REPORTS / 'bounds.json'}",
])  # fmt: skip
def test_a_command_is_as_wide_as_the_terminal(
    line: str, width: int | None, capsys: Any, monkeypatch: Any
) -> None:
    """What needs no measurement, on both streams."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if width:
        monkeypatch.setenv("COLUMNS", str(width))
    _, out, err = ran(capsys, *line.split())
    assert out
    assert fits(out, width or terminal.PIPE)
    assert fits(err, width or terminal.PIPE)


def test_a_sentence_on_stderr_is_as_wide_as_the_terminal(
    capsys: Any, monkeypatch: Any
) -> None:
    """But for a path, which stays whole."""
    path = "a/" * 70
    for width in (*WIDTHS, None):
        monkeypatch.delenv("COLUMNS", raising=False)
        if width:
            monkeypatch.setenv("COLUMNS", str(width))
        say(f"{'twelve words ' * 20}{path}")
        *lines, last = capsys.readouterr().err.splitlines()
        assert last == path
        assert fits("\n".join(lines), width or terminal.PIPE)


def test_a_table_that_is_too_wide_goes_on_below() -> None:
    """Words are whole as long as they fit; the first column stands before each part; each
    column is there once more only where it is the first."""
    columns = ["name", *(f"column{i}" for i in range(12))]
    rows = [["kernel-a", *(f"{i}.00" for i in range(12))]]
    text = on_terminal(doc.Document("d", (doc.table(columns, rows),)), 40)
    assert fits(text, 40)
    assert text.count("kernel-a") == text.count("name") > 1
    assert all(
        text.count(f"column{i}\n") + text.count(f"column{i} ") == 1 for i in range(12)
    )


@pytest.mark.parametrize(("least", "whole", "room", "widths"), [
    ((1, 1), (5, 9), 20, [5, 9]), ((1, 1), (5, 9), 10, [5, 5]), ((1, 7), (5, 9), 10, [3, 7]),
    ((8, 8), (9, 9), 10, [5, 5]), ((1,), (9,), 1, [1]),
])  # fmt: skip
def test_room_is_shared_by_what_columns_ask_for(
    least: Any, whole: Any, room: int, widths: list[int]
) -> None:
    """All that they ask for where there is room; else an equal bound, but never less than
    a word; where even words are too wide, the widest give way."""
    assert terminal.shared_widths(least, whole, room) == widths


@pytest.mark.parametrize(("value", "error", "multiple", "four"), [
    (1.8e-4, "1.8e-4", "1.8e-4", "0.00"), (0.034, "0.034", "0.034", "0.03"),
    (0.0999, "0.1", "0.10", "0.10"), (-0.05, "-0.05", "-0.050", "-0.05"),
    (1.83, "1.8", "1.83", "1.83"), (9.996, "10", "10.00", "10.0"), (99.96, "1.0e2", "99.96", "100"),
    (222.4, "2.2e2", "222", "222"), (999.6, "1.0e3", "1000", "1e3"),
    (8512.0, "8.5e3", "8510", "9e3"), (3.67e29, "3.7e29", "3.67e29", "4e29"), (None, "–", "–", "–"),
])  # fmt: skip
def test_numbers_in_cells(
    value: float | None, error: str, multiple: str, four: str
) -> None:
    """Digits as far as they read well, then powers without zeros in the exponent; in a
    map four characters, rounded and not cut."""
    assert (number_text.si(value), number_text.ratio(value)) == (error, multiple)
    if value:
        text = on_terminal(
            document_of(audit(rows=(row(floor_ratio=value, expected_ratio=None),)))
        )
        assert text[text.index("layer by head") :].splitlines()[2].split() == ["0", four]


def test_a_number_never_reads_as_its_limit() -> None:
    """It has one more digit where it would, and no more than three else."""
    assert [number_text.three(x, 1.05) for x in (1.0504, 1.05, 1.057)] == [
        "1.0504",
        "1.05",
        "1.06",
    ]


def everything(name: str) -> AuditReport:
    """A report with `name` wherever a name or message can stand."""
    cast = WeightRow(tensor=name, shape=(2,), stored=name, format=name, elements=2, nonfinite=1,
                     max_abs=1.0, mean_abs=1.0, rel=1.0)  # fmt: skip
    created, ran = audit(name), kernel(kernel="sdpa-default", ran=(name,))
    kernels = (*created.summary.kernels, ran)
    system = {"gpu": name, "cpu": name, "packages": {"torch": name}}
    changes = {
        "summary": created.summary.model_copy(update={"kernels": kernels}),
        "weights": (cast,),
        "provenance": provenance(
            system=system, source={"checkpoint": name, "prompt": name}
        ),
    }
    return created.model_copy(update=changes)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:20])
def test_hostile_text_is_printed_and_does_nothing(name: str) -> None:
    """Markup, escape sequences and control characters in any name or message come out as
    text: nothing is swallowed, no control character but the line's end gets out, no line
    is too long."""
    page = document_of(everything(name))
    for width in (80, 120, 2000):
        text = on_terminal(page, width)
        assert fits(text, width)
        assert [c for c in text if not c.isprintable() and c != "\n"] == []
    # answer (2), finding, tested, kernel and option (2), what ran (2), who is skipped and
    # why (2), map (2), weights (2), source
    assert (
        "".join(line.strip() for line in text.splitlines()).count(plain(name).strip())
        >= 15
    )


def test_progress_is_drawn_on_a_terminal_alone(capsys: Any, monkeypatch: Any) -> None:
    """Into a pipe or a file nothing is drawn, on neither stream. On a terminal the bar is
    on stderr, and a name cannot break out of it."""
    for show in (True, False):
        with terminal.progress(show=show) as progress:
            progress("[red]case", 1, 2)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with terminal.progress(show=True) as progress:
        for name in NAMES:
            progress(name, 1, 2)
    out, err = capsys.readouterr()
    assert (out, bool(err)) == ("", True)
    assert not any(command in err for command in ("\x1b]0;title", "\x1b[2J"))


def test_progress_says_what_has_passed_and_what_is_left(
    capsys: Any, monkeypatch: Any
) -> None:
    """Outside a terminal: a line after FIRST seconds, then every QUIET seconds; what is
    left at the pace since the first task of the same total; nothing is claimed before
    that, or at the end; no line is too wide."""
    seconds = iter((0.0, 4.9, 10.0, 29.9, 30.0, 60.0, 3700.0))
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(seconds))
    monkeypatch.delenv("COLUMNS", raising=False)
    steps = [("a", 10, 100), ("b", 11, 100), ("c", 20, 100), ("d", 20, 100), ("e", 0, 7)]
    with terminal.progress(show=True) as progress:
        for step in (*steps, ("long " * 60, 7, 7)):
            progress(*step)
    out, err = capsys.readouterr()
    assert out == ""
    assert fits(err, terminal.PIPE)
    assert err.splitlines()[:4] == [
        "11 of 100, 0:10 elapsed, about 7:33 left: b",
        "20 of 100, 0:30 elapsed, about 3:20 left: d",
        "0 of 7, 1:00 elapsed: e",
        "7 of 7, 1:01:40 elapsed: " + " ".join(["long"] * 19),
    ]


def test_a_gate_that_judged_nothing_says_so() -> None:
    """Where every rule met nothing the exit code is 3, and the terminal says why as JUnit
    does."""
    nothing = {"name": "none", "metric": "rms", "at_most": 1.0, "may_lack": "rows",
               "where": {"kernel": "nobody"}}  # fmt: skip
    rows = [row()]
    judgement = judge(rows, Rules.model_validate({"thresholds": [nothing]}))
    page = document(judgement, *findings_in(judgement, rows), Places(rows))
    text = " ".join(on_terminal(page).split())
    assert judgement.exit_code == 3
    assert "NOT JUDGED" in text
    assert "No rule could be applied to any row" in text


HOSTILE = "up\r\nPASS\x1b[2J\u202eend"


@pytest.mark.parametrize("kind", ["numbers", "words", "map", "series"])
def test_a_title_has_one_line_and_no_control_characters(kind: Any) -> None:
    """Of a document, a heading, a table and a column, whoever chose it: it is spelled
    out."""
    columns = [doc.Column(HOSTILE), doc.Column(f"{HOSTILE} {HOSTILE}")]
    table = doc.table(columns, [("a", "1")], title=HOSTILE, kind=kind)
    document = doc.Document(HOSTILE, (doc.Heading(HOSTILE), table))
    titles = [document.title, document.blocks[0].text, table.title]  # type: ignore[union-attr]
    assert all(t.isprintable() for t in (*titles, *(c.title for c in table.columns)))
    out = io.StringIO()
    terminal.show(document, Console(file=out, width=400))
    assert not any(line.startswith("PASS") for line in out.getvalue().splitlines())
    assert all(c.isprintable() or c == "\n" for c in out.getvalue())
    assert out.getvalue().count(r"up\r\nPASS\x1b[2J\u202eend") == 5
