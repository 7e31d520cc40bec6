"""What a reader meets first is short and plain: over all stored sample reports, and in
all docs and messages."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from loaded import ROOT
from rich.console import Console

from numdev.gate.findings import WORDS
from numdev.report import Report, read
from numdev.report.document import Bullets, Item
from numdev.report.renderers import terminal
from numdev.report.views import document_of

REPORTS = sorted((ROOT / "tests" / "data" / "reports").glob("*.json"))
WIDTH = 120  # of the terminal in which a verdict is one line
NO_VERDICT = ("bounds", "weights")  # of the two papers' studies

BANNED = (
    "as its rounding model predicts",
    "Axis to go along",
    "Cause not identified",
    "does not compute the requested",
    "drowns in",
    "keep their numbers",
    "Kernel to ask",
    "keeps its bits",
    "least possible in the median",
    "looked for in other calls",
    "making small",
    "no common sign",
    "rounding or a mistake",
    "with all else exact, errs",
    "with this change the fp64",
)
"""What was said before it was said better."""


def verdict_items(report: Report) -> Iterator[Item]:
    """Yields the items of a report that are verdicts; none of a study that judges
    nothing."""
    if report.kind in NO_VERDICT:
        return
    for node in document_of(report).blocks:
        if isinstance(node, Bullets) and node.kind == "verdicts":
            yield from node.items


def words_of(item: Item) -> list[str]:
    return f"{item.lead} {item.text}".split()


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_a_verdict_has_at_most_20_words(path: Path) -> None:
    """With outcome, kernel and format; a finding's sentence too."""
    report = read(path)
    items = list(verdict_items(report))
    assert bool(items) == (report.kind not in NO_VERDICT)
    assert not [words_of(item) for item in items if len(words_of(item)) > WORDS]
    findings = getattr(report, "findings", ())
    assert not [f.sentence for f in findings if len(f.sentence.split()) > WORDS]


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_a_verdict_is_one_line(path: Path) -> None:
    """Of a terminal with 120 columns, with the details below it and not in it."""
    console = Console(file=io.StringIO(), width=WIDTH)
    report = read(path)
    terminal.show(report, console)
    assert isinstance(console.file, io.StringIO)
    lines = [line.strip() for line in console.file.getvalue().splitlines()]
    for item in verdict_items(report):
        assert f"{item.lead} {item.text}".strip() in lines


def plain(text: str) -> str:
    """Returns text in one line, with strings that stand behind one another joined."""
    return re.sub(r"\s+", " ", re.sub(r'"\s+f?"', "", text))


def files() -> Iterator[Path]:
    """Yields docs, and all files of the package that hold messages."""
    yield ROOT / "README.md"
    yield from (path for path in ROOT.glob("docs/**/*.md") if path.name != "changelog.md")
    for ending in ("py", "j2", "yaml"):
        yield from ROOT.glob(f"numdev/**/*.{ending}")


def test_no_banned_phrase_is_left() -> None:
    """In any line or across two of docs, messages and templates."""
    uses = []
    for path in files():
        text = plain(path.read_text(encoding="utf-8"))
        uses += [f"{path.relative_to(ROOT)}: {x}" for x in BANNED if x in text]
    assert not uses


def test_a_banned_phrase_would_be_seen() -> None:
    """Each in a line of its own, also where a string is broken within it."""
    for phrase in BANNED:
        first, _, more = phrase.partition(" ")
        text = plain(f'"{first} "\n    "{more}"')
        assert phrase in text
