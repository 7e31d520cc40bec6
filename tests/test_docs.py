"""The documentation says what is true: the generated pages are fresh, and links lead somewhere."""

import re
from pathlib import Path

import pytest
from loaded import load

from numdev.report import DeviationRow, read
from numdev.report.document import Table
from numdev.report.views import document_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("script", ["scripts/cli_reference.py", "scripts/sites_page.py"])
def test_generated_pages_are_what_their_scripts_write(script):
    """docs/cli.md by the commands, and docs/sites.md by the code."""
    module = load(script)
    assert module.PAGE.read_text() == module.render(), f"run python {script}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_relative_links_exist(page):
    """Every relative link of a page names a file of the repository."""
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_readme_commands_exist():
    """Every `numdev COMMAND` in README and docs is a command of the program."""
    from numdev.cli.main import COMMANDS

    for page in PAGES:
        for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for name in re.findall(r"^numdev ([a-z]+)", block, re.MULTILINE):
                assert name in COMMANDS, f"{page.name}: numdev {name}"


def test_the_glossary_has_every_column():
    """Every field of a row and every column of a table of the stored reports has its anchor."""
    anchors = set(re.findall(r'<a id="([^"]+)">', (DOCS / "glossary.md").read_text()))
    titles = {
        column.title
        for path in (ROOT / "tests" / "data" / "reports").glob("*.json")
        for block in document_of(read(path)).blocks
        if isinstance(block, Table)
        for column in block.columns
    }
    words = {title.lower() for title in titles if not title.isdigit()}
    slugs = {re.sub(r"\W+", "-", word).strip("-") for word in words} - {""}
    wanted = slugs | set(DeviationRow.model_fields)
    assert wanted <= anchors, f"docs/glossary.md lacks {sorted(wanted - anchors)}"
