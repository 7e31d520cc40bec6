"""A document as Markdown, for a pull request, an issue or a step's summary."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from numdev.report import Report
from numdev.report import document as doc
from numdev.report.renderers.terminal import evenly_spread
from numdev.report.safe_text import plain
from numdev.report.views import document_of

LONGEST = 100  # rows of a table; the report has all
PLACES = 9  # columns of a series
_MARKUP = re.compile(r"[\\`*_\[\]<>|~&$]|(?<=[A-Za-z]):(?=//)|(?<=[Ww]{3})\.")
_FIRST = re.compile(r"^ *(\d*)(?=[-+=#.)](?:[-=# ]|$))")
"""What begins a list or a heading where it stands first."""
_LATER = re.compile(r"@|:(?=[\w+-]+:)")
"""What begins a mention or an emoji. GitHub looks for these in the finished page, where
backslashes are gone, but not across the place of a comment."""


def page(report: Report | doc.Document, level: int = 1) -> str:
    """Returns a report or a document as Markdown, its title a heading of this level; ends
    with a newline."""
    document = document_of(report)
    lines = [f"{'#' * level} {escaped(document.title)}"]
    for node in document.shown_in("markdown"):
        lines += ["", *_node_lines(node, f"{'#' * (level + 1)} ")]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Returns foreign text as itself within a line of Markdown, GitHub's own: no block,
    emphasis, code, link, HTML, formula, emoji or cell border begins in it, and nobody is
    mentioned."""
    safe = _MARKUP.sub(r"\\\g<0>", plain(text))
    first = _FIRST.sub(r"\1\\", safe).strip(" ")
    return _LATER.sub(r"\g<0><!-- -->", first)


def _node_lines(node: doc.Node, heading: str) -> Iterator[str]:
    """Yields the lines of a node; nothing for a node that Markdown does not have.
    `heading`: the marks before a heading."""
    match node:
        case doc.Heading():
            yield heading + escaped(node.text)
        case doc.Paragraph():
            yield escaped(node.text)
        case doc.Bullets():
            for item in node.items:
                lead = f"**{escaped(item.lead)}**" if item.lead else ""
                parts = [lead, escaped(item.text)]
                if item.detail:
                    parts[-1] = f"{parts[-1].removesuffix('.')}."
                    parts.append(escaped(item.detail))
                yield f"- {' '.join(filter(None, parts))}"
        case doc.Table():
            yield from _table_lines(node, heading)


def table_text(table: doc.Table) -> str:
    """Returns a table as Markdown, its title in bold; ends with a newline."""
    title = f"**{escaped(table.title)}**\n\n" if table.title else ""
    lines = _table_lines(replace(table, title=""), "")
    return f"{title}{chr(10).join(lines)}\n"


def _table_lines(node: doc.Table, heading: str) -> Iterator[str]:
    """Yields the lines of a table under its title: at most LONGEST rows, and how many
    more there are; of a table of a series at most PLACES columns, evenly spread."""
    shown = list(range(len(node.columns)))
    if node.kind == "series":
        shown = [0, *evenly_spread(shown[1:], PLACES - 1)]
    if node.title:
        yield from (heading + escaped(node.title), "")
    columns = [node.columns[i] for i in shown]
    yield _table_row(column.title for column in columns)
    right = [i > 0 and column.align == "right" for i, column in enumerate(columns)]
    yield f"|{'|'.join('---:' if at else '---' for at in right)}|"
    for row in node.rows[:LONGEST]:
        cells = [row.cells[i] for i in shown]
        yield _table_row(
            " ".join(filter(None, (cell.text, cell.after))) for cell in cells
        )
    if len(node.rows) > LONGEST:
        yield from ("", f"{len(node.rows) - LONGEST} more rows are in the report.")


def _table_row(cells: Iterable[str]) -> str:
    """Returns the cells as a line of a table in Markdown, each escaped."""
    return "| " + " | ".join(escaped(cell) if cell else " " for cell in cells) + " |"
