"""The documentation says what is true: the generated pages are fresh, and links lead
somewhere."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from commands import ran, refused
from loaded import load

import numdev
from numdev.cli.file_kinds import BY_SUFFIX
from numdev.kernels import all_kernels
from numdev.report import DeviationRow, read
from numdev.report import document as doc
from numdev.report.document import Details, Table
from numdev.report.views import document_of
from numdev.sources.containers import SUFFIXES
from numdev.sources.unsupported_files import FILES
from numdev.studies.training.weights.weight_sets import ACCEPTED

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SKILL = DOCS / "skills" / "numdev" / "SKILL.md"
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OFF_SITE = [  # for contributors
    *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "tests/facts.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]


@pytest.mark.parametrize(
    "script",
    ["scripts/cli_reference.py", "scripts/known_results.py", "scripts/sites_page.py"],
)
def test_generated_pages_are_what_their_scripts_write(script):
    """docs/cli.md by the commands, docs/known-results.md by the files of benchmarks/known,
    and docs/sites.md by the code."""
    module = load(script)
    assert module.PAGE.read_text() == module.render(), f"run python {script}"


@pytest.mark.parametrize(
    "page", [*PAGES, *OFF_SITE], ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_relative_links_exist(page):
    """Every relative link of a page names a file of the repository."""
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", [*PAGES, SKILL], ids=lambda p: p.name)
def test_command_lines_are_accepted(page):
    """Every line of `numdev` in a block without a language, or in the skill, parses."""
    fences = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    blocks = [block for language, block in fences if not language]
    quoted = re.findall(r"`(numdev \w[^`]*)`", page.read_text()) if page == SKILL else []
    for line in [line for block in blocks for line in block.splitlines()] + quoted:
        if re.match(r"numdev [a-z]+ ", line):
            assert refused(shlex.split(line, comments=True)[1:]) is None, line


def test_a_release_has_one_version():
    """The package, the citation, the changelog and the Action's example name the same."""
    version = numdev.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changelog = (DOCS / "changelog.md").read_text()
    assert citation["version"] == version
    assert re.search(r"^## (\S+)", changelog, re.M)[1] == version
    assert set(re.findall(r"OWNER/numdev@v(\S+)", (DOCS / "ci.md").read_text())) == {
        version
    }


@pytest.mark.slow
def test_the_readme_shows_what_check_prints(tmp_path):
    """Its first line, of each `numdev check` in the terminal before the fold."""
    samples = load("scripts/samples.py")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shown = re.findall(r"^\$ numdev (check .*)\n(.*)$", README, re.M)
    assert len(shown) == 2
    for arguments, line in shown:
        printed = samples.output_of("numdev", arguments, tmp_path / "examples", 1)
        assert printed[0] == line, "run python scripts/samples.py"


@pytest.mark.slow
def test_samples_are_of_this_kind(tmp_path, monkeypatch, capsys):
    """The kernel of docs/guide-kernel.md fails as the pages say, with the keys that they
    show; the columns of docs/guide-backend.md are those of a report."""
    guide, agents = (
        (DOCS / f"{name}.md").read_text() for name in ("guide-kernel", "agents")
    )
    (tmp_path / "mine.py").write_text(
        re.search(r"```python\n(from torch.*?)```", guide, re.S)[1]
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "mine", None)
    del sys.modules["mine"]  # another test's now, and this one's afterwards
    code, out, _ = ran(capsys, "check", "mine.py:attend", "--case", "full", "--json")
    data = json.loads(out)
    shown = json.loads(re.search(r"```json\n(.*?)```", agents, re.S)[1])
    assert (code, data["verdict"]) == (1, shown["verdict"])
    assert [*data] == [*shown, "report"]
    assert data["findings"][0].keys() == shown["findings"][0].keys()
    cause = data["findings"][0]["cause"]
    for page in (README, guide):
        assert cause in " ".join(page.split()), page
    problem = ROOT / "examples" / "problem"
    command = [
        str(problem / "wrong_solution.py"),
        "--problem",
        str(problem / "problem.py"),
    ]
    code, out, _ = ran(capsys, "check", *command, "--json")
    data = json.loads(out)
    assert (code, [*data]) == (1, [*shown, "report"])
    [finding], [expected] = data["findings"], shown["findings"]
    begins, _, _ = expected.pop("details").partition(" (...)")
    assert finding.pop("details").startswith(begins)
    assert finding == expected
    keys = set(re.findall(r"^\| `(\w+)", SKILL.read_text(), re.M))
    assert {"verdict", "findings", "not_tested", "notes", "reproducer"} <= keys
    stored = read(ROOT / "tests" / "data" / "reports" / "audit.json")
    tables = [b for b in document_of(stored).blocks if isinstance(b, Table)]
    columns = {column.title for table in tables for column in table.columns}
    for column in (
        "error / floor",
        "worst head",
        "error / expected",
        "error / eager",
        "max error",
    ):
        assert column in columns
        assert f"`{column}`" in (DOCS / "guide-backend.md").read_text()


def _tables_within(nodes):
    """All tables of nodes, also those in details."""
    for node in nodes:
        if isinstance(node, Details):
            yield from _tables_within(node.blocks)
        elif isinstance(node, Table):
            yield node


def test_every_row_of_a_table_has_a_cell_for_each_column():
    """A column whose cell is forgotten would give others its numbers."""
    for path in (ROOT / "tests" / "data" / "reports").glob("*.json"):
        for table in _tables_within(document_of(read(path)).blocks):
            sizes = {len(row.cells) for row in table.rows}
            assert sizes <= {len(table.columns)}, (path.stem, table.title)


def test_no_row_of_a_table_is_left_out():
    with pytest.raises(ValueError, match="shorter"):
        doc.table(["kernel"], [["a"], ["b"]], [True])


def test_every_kernel_has_its_line():
    """In the table of docs/kernels.md; `emulated` has a page of its own."""
    page = (DOCS / "kernels.md").read_text()
    ours = [
        n for n, k in all_kernels().items() if "numdev." in str(k.function.__module__)
    ]
    missing = [name for name in ours if f"| `{name}` |" not in page]
    assert missing == ["emulated"]


def test_every_container_has_its_line():
    """In the tables of what is read, in help and in messages; and what is read is not
    among the files that are not."""
    for suffix in SUFFIXES:
        places = {
            "docs/inputs.md": f"`{suffix}`" in (DOCS / "inputs.md").read_text(),
            "docs/weights.md": f"`{suffix}`" in (DOCS / "weights.md").read_text(),
            "the help of commands": f"{suffix}, " in (DOCS / "cli.md").read_text(),
            "weight_sets.ACCEPTED": suffix in ACCEPTED,
            "file_kinds.BY_SUFFIX": suffix in BY_SUFFIX,
            "unsupported_files.FILES, which must lack it": suffix not in FILES,
        }
        assert [place for place, is_right in places.items() if not is_right] == [], suffix


def test_the_glossary_has_every_column():
    """Every field of a row and every column of a table of the stored reports has its
    anchor."""
    glossary = (DOCS / "glossary.md").read_text()
    headings = re.findall("^## .*", glossary, re.M)
    assert len(headings) == len(set(headings))
    anchors = set(re.findall(r'<a id="([^"]+)">', glossary))
    titles = {
        column.title
        for path in (ROOT / "tests" / "data" / "reports").glob("*.json")
        for block in _tables_within(document_of(read(path)).blocks)
        for column in block.columns
    }
    words = {title.lower() for title in titles if not title.isdigit()}
    words = {word.partition(", step")[0] for word in words}  # which step is no word
    slugs = {re.sub(r"\W+", "-", word).strip("-") for word in words} - {""}
    wanted = slugs | set(DeviationRow.model_fields)
    assert wanted <= anchors, f"docs/glossary.md lacks {sorted(wanted - anchors)}"
