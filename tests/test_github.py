"""What GitHub is told: annotations, as its runner reads them, and the Markdown of a
summary."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest
from commands import ran
from gate_rows import findings_of, judge, report, row
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from numdev.gate.judgement import Judgement
from numdev.gate.rules import default_rules
from numdev.report import DeviationRow, Finding, Places, write
from numdev.report.renderers.ci import commands
from numdev.report.renderers.markdown import page
from numdev.report.safe_text import plain
from numdev.report.views.gate import document, problems_of

NAMES = (
    "<script>alert(1)</script>",
    "]]></failure><testcase/>&amp;&#0;",
    '" onclick="x',
    "a | b | c",
    "`code` **bold** [text](http://evil.example) ![x](y)",
    "http://evil.example www.evil.example me@evil.example @octocat :tada: $x^2$",
    *(
        "# heading",
        "1. list",
        "- [ ] task",
        "---",
        "| a |\n|---|\n| b |",
        "\\",
        "<!-- ",
        "~~~",
    ),
    *("x\n::error::planted\n::add-mask::secret", "x\r\n##[error]planted"),
    *("::stop-commands::x", "a,line=7,title=b::c", "100%0A::error::planted"),
    "\x1b[31mred\x1b[0m\x00\x07\x7f\x9b\ufffe\u202e\u2028",
    "emoji \U0001f600 and é",
    "</title></svg><img src=x onerror=alert(1)>",
    "' autofocus onfocus='alert(1)",
    "{{ 7 * 7 }}{% include 'x' %} &lt;b&gt;",
    "[red]kernel[/red] [link=file:///etc/passwd]x[/link]",
    "\x1b]0;title\x07\x1b[2J",
    ":boom: back\\slash[bold] new\b\bline",
    *("x" * 300, "長" * 100),
)
"""XML, HTML, Markdown, workflow commands, terminals."""
names = st.one_of(st.sampled_from(NAMES), st.text(max_size=30))
STATES = {
    "sound": {},
    "exceeded": {"expected_ratio": 9.0},
    "suspected": {"suspicion": "the mask is ignored", "suspicion_cut": 20.0},
    "lacking": {"nonfinite": None, "nulls": {"nonfinite": "not counted"}},
    "failed": {"status": "failed", "reason": "it raised"},
    "skipped": {"status": "skipped", "reason": "needs CUDA"},
}


@st.composite
def rows(draw: st.DrawFn) -> list[DeviationRow]:
    """Up to four heads of up to four kernels, in any state, with hostile names."""
    result = []
    for head in range(draw(st.integers(0, 4))):
        changes = dict(STATES[draw(st.sampled_from(sorted(STATES)))])
        for name in changes.keys() & {"suspicion", "reason"}:
            changes[name] = draw(names)
        changes |= {name: draw(names) for name in ("kernel", "case", "module")}
        options = draw(st.dictionaries(names, names, max_size=1))
        layer = draw(st.sampled_from([None, 3]))
        result.append(row(head, layer=layer, options=options, **changes))
    return result


def judged(
    result: list[DeviationRow],
) -> tuple[Judgement, tuple[Finding, ...], tuple[str, ...]]:
    """What the gate makes of rows."""
    return judge(result, default_rules()), *findings_of(result, default_rules())


class Command(NamedTuple):
    name: str
    properties: dict[str, str]
    data: str


def runner(lines: Iterable[str]) -> list[Command]:
    """The commands that GitHub's runner obeys in a log: `::name k=v,k=v::data` at the
    start of a line, or `##[name k=v;k=v]data` anywhere in it, unless commands are
    stopped. After actions/runner, Runner.Common/ActionCommand.cs and
    Runner.Worker/ActionCommandManager.cs."""
    commands: list[Command] = []
    stopped = None
    for line in lines:
        second = re.match(r"\s*::([^ :]*) ?(.*?)::(.*)", line)
        match = second or re.search(r"##\[([^ \]]*) ?(.*?)\](.*)", line)
        if match is None:
            continue
        name, pairs, data = match.groups()
        if stopped is not None:
            stopped = None if name == stopped else stopped
        elif name == "stop-commands":
            stopped = data
        else:
            given_env = dict(
                pair.split("=", 1) for pair in pairs.split(",") if "=" in pair
            )
            commands.append(
                Command(
                    name, {k: unquote(v) for k, v in given_env.items()}, unquote(data)
                )
            )
    assert stopped is None, "commands are still stopped at the end"
    return commands


def lines_of(result: list[DeviationRow]) -> list[str]:
    return list(commands(*judged(result)[:2]))


@pytest.mark.parametrize("count", [9, 10, 11, 25])
def test_ten_errors_and_how_many_more(count: int) -> None:
    """GitHub shows ten errors of a step; a warning, of which it shows ten too, says the
    rest."""
    kernels = (row(kernel=f"k{k}", expected_ratio=2.0 + k) for k in range(count))
    result = runner(lines_of(list(kernels)))
    warned = [c.data.split(",")[0] for c in result if c.name == "warning"]
    assert [c.name for c in result[:10]] == ["error"] * min(count, 10)
    assert warned == ([f"{count - 10} more"] if count > 10 else [])
    assert len(result) == min(count, 11)


def test_what_could_not_be_measured_is_an_error_too() -> None:
    """Since the step fails: a kernel that failed, a required one that is not there, no
    number."""
    (failed,) = runner(
        lines_of([row(), row(kernel="gone", status="failed", reason="it raised")])
    )
    assert failed.name == "error"
    assert failed.properties["title"] == "gone crashed"
    assert "it raised" in failed.data
    (lacking,) = runner(
        lines_of([row(nonfinite=None, nulls={"nonfinite": "not counted"})])
    )
    assert lacking.data.startswith("finiteness (nonfinite ≤ 0) could not be judged")
    book = default_rules().model_copy(update={"required": ("theirs",)})
    (missing,) = problems_of(judge([row()], book), ())
    assert missing.sentence == "theirs is required and not in this report."


@pytest.mark.parametrize("name", NAMES)
def test_a_name_commands_nothing(name: str) -> None:
    """Whatever a kernel is called: one error, its finding's sentence, under its name and
    rule."""
    (command,) = runner(lines_of([row(kernel=name, expected_ratio=9.0)]))
    assert (command.name, command.properties) == (
        "error",
        {"title": f"{plain(name)}: error"},
    )
    assert command.data.startswith(f"{plain(name)} (bfloat16) is inaccurate: error of")


PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
SETTINGS = {
    *("heading", "paragraph", "bullet_list", "list_item", "strong"),
    *("table", "thead", "tbody", "tr", "th", "td", "inline", "text", "text_special"),
}
LINKED = re.compile(r"[A-Za-z]://|www\.|@\w|:\w+:|(?<!\\)\$", re.IGNORECASE)
"""What GitHub's Markdown turns into a link, a mention, an emoji or a formula by
itself."""


def summary(result: list[DeviationRow]) -> str:
    return page(document(*judged(result), Places(result)), level=3)


def test_a_summary_is_never_too_long() -> None:
    """Fifty sentences and the number of the rest, since GitHub shows none beyond 1
    MiB."""
    text = summary([row(kernel=f"k{k}", expected_ratio=2.0 + k) for k in range(70)])
    assert text.count("\n- **FAIL  k") == 50
    assert "- and 20 more" in text


@given(rows())
@settings(max_examples=100, deadline=None)
def test_names_begin_no_markup(accused: list[DeviationRow]) -> None:
    """A summary has its own two headings, a row for each rule, and flat lists."""
    text = summary(accused)
    blocks = PARSER.parse(text)
    tokens = [token for block in blocks for token in (block, *(block.children or ()))]
    kinds = {t.type.removesuffix("_open").removesuffix("_close") for t in tokens
             if (t.type, t.content) != ("html_inline", "<!-- -->")}  # fmt: skip
    assert kinds <= SETTINGS
    headings = [
        tokens[i + 1].content for i, t in enumerate(tokens) if t.type == "heading_open"
    ]
    assert headings[0] == "numdev gate"
    assert all("beyond a limit" in heading.lower() for heading in headings[1:])
    assert all(t.level == 0 for t in tokens if t.type == "bullet_list_open")
    assert LINKED.search(text) is None
    line = "\t".join(
        t.type for t in tokens if t.type in ("tr_open", "th_open", "td_open")
    )
    widths = [len(cells.split()) for cells in line.split("tr_open")[1:]]
    assert set(widths) <= {6, 7}
    # One rule is of gradients alone, and says nothing where none were planned.
    assert len(default_rules().thresholds) - (widths.count(6) - 1) in (0, 1)


@pytest.fixture
def gate(tmp_path: Path, capsys: Any, monkeypatch: Any) -> Any:
    """Run `numdev gate` in an empty repository on a report of these rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))

    def gate(result: list[DeviationRow], *arguments: str) -> tuple[int, str, str]:
        write(report(*result), tmp_path)
        return ran(capsys, "gate", ".", *arguments)

    return gate


def test_the_files_are_written_whatever_the_outcome(gate: Any, tmp_path: Path) -> None:
    """In directories that need not be there; and nothing of GitHub's without --github."""
    for ratio, code in ((1.0, 0), (2.0, 1)):
        result = gate(
            [row(expected_ratio=ratio)], "--junit", "out/j.xml", "--summary", "out/s.md"
        )
        assert result[0] == code
        assert "::" not in result[1]
        assert ("<failure" in (tmp_path / "out" / "j.xml").read_text()) == bool(code)
        assert (tmp_path / "out" / "s.md").read_text().startswith("### numdev gate")
        assert not (tmp_path / "step.md").exists()


@pytest.mark.parametrize("option", ["--junit", "--summary", "--github"])
def test_an_unwritable_file_hides_no_verdict(
    gate: Any, tmp_path: Path, option: str, monkeypatch: Any
) -> None:
    """Exit code 2, which names the file, after what was found. With --github that file is
    the step's summary, and annotations come before it."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("")
    for place in (folder, folder / "file" / "x"):
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(place))
        names = [] if option == "--github" else [str(place)]
        code, out, err = gate([row(expected_ratio=2.0)], option, *names)
        assert (code, "FAIL" in out) == (2, True)
        assert ("::error" in out) == (option == "--github")
        assert f"{place}: cannot be written" in err


def test_github_gets_lines_and_a_summary(gate: Any, tmp_path: Path) -> None:
    """The summary is added to what the step has written already."""
    (tmp_path / "rules.yaml").write_text(
        "thresholds: [{name: small, metric: rms, at_most: 1.0}]"
    )
    (tmp_path / "step.md").write_text("before\n")
    code, out, err = gate(
        [row(rms=2.0, max_abs=2.0)], "--thresholds", "rules.yaml", "--github"
    )
    (command,) = runner(out.splitlines())
    assert (code, err) == (1, "")
    assert command.properties == {"title": "mine: small"}
    assert (
        (tmp_path / "step.md").read_text().startswith("before\n### numdev gate\n\nFAIL")
    )


def test_what_is_printed_commands_nothing(gate: Any) -> None:
    """Names in the terminal's lines, wrapped or not, are not obeyed: only what is meant
    to be."""
    result = [row(kernel=f"{'x' * k} ::add-mask::secret ##[error]x", expected_ratio=2.0 + k)
             for k in range(70, 82)]  # fmt: skip
    code, out, _ = gate(result, "--github")
    assert code == 1
    assert {c.name for c in runner(out.splitlines())} <= {"error", "warning"}
    assert any(
        "add-mask" in line for line in out.splitlines() if not line.startswith("::")
    )


def test_json_stays_json(gate: Any) -> None:
    """Its stream is its own, and annotations go to the other, which GitHub reads too."""
    code, out, err = gate([row(expected_ratio=9.0)], "--json", "--github")
    assert json.loads(out)["exit_code"] == code == 1
    assert [c.name for c in runner(err.splitlines())] == ["error"]
