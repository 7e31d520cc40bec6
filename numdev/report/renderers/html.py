"""A document as one self-contained HTML page: readable offline, on paper, in light and
dark.

Nothing is loaded from elsewhere, and one small script may run: the policy names its hash.
Names and messages are foreign text; the template escapes everything, drawings are built
of elements."""

from __future__ import annotations

import base64
import functools
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from numdev.report import Report, replacing
from numdev.report import document as doc
from numdev.report.number_text import percent
from numdev.report.renderers import markdown, svg_chart
from numdev.report.safe_text import plain
from numdev.report.views import document_of

MAP_COLUMNS = 32  # that fit the page's width with numbers that can be read
_CODE = re.compile(r"`([^`]+)`")
_VALUE = r"[-+±]?\d[\d.,]*(?:e-?\d+)?(?: ?[%×°])?"
# A date, or a number with its unit or what follows ±, that has a place where a line could
# be broken; not the digits of an entity
_UNBROKEN = re.compile(
    rf"(?<![\w.#;-])(?:\d{{4}}-\d\d-\d\d|{_VALUE}(?: ± {_VALUE})?"
    r"(?: (?:nats|ulps?|ms|s|min|GB|MB)\b)?)(?!\w)"
)


def write(report: Report, directory: Path) -> None:
    """Writes report.html into the directory of report.json and the reproducers,
    atomically, in place of an older one. Raises OSError where it cannot be written."""
    with replacing(directory / "report.html") as file:
        file.write(page(report, directory))


def frame(report: Report) -> Markup:
    """Returns the report in one line, and its page in a frame, whose styles reach nothing
    around it."""
    style = "width: 100%; height: 40em; border: 1px solid #8888"
    title = Markup("<p>{}</p>").format(_printable(repr(report)))
    return title + Markup('<iframe style="{}" srcdoc="{}"></iframe>').format(
        style, page(report)
    )


def page(report: Report | doc.Document, directory: Path | None = None) -> str:
    """Returns the HTML page of a report or of a document. A report's reproducers are
    looked for under `directory`; None: nowhere."""
    text = (files("numdev.report.renderers") / "templates/page.js").read_text(
        encoding="utf-8"
    )
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    document = document_of(report, directory)
    blocks = tuple(document.shown_in("html"))
    about = {
        "document": document,
        "blocks": blocks,
        "main": _main_table(blocks),
        "script": Markup(text),
        "digest": digest,
    }
    return _environment().get_template("page.html.j2").render(about)


@functools.cache
def _environment() -> Environment:
    """Returns the environment by which jinja reads and fills in templates, with all text
    escaped; the same one at every call, since compiling them takes as long as a small
    page."""
    environment = Environment(
        loader=PackageLoader("numdev.report.renderers"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "panels": svg_chart.panels_of,
        "numbers": doc.tables_of,
        "parts": _map_parts,
        "percent": percent,
        "prose": _with_code,
    }
    return environment


class MainTable(NamedTuple):
    """The table that a reader may copy, and its text as Markdown."""

    table: doc.Table | None
    markdown: str


def _main_table(blocks: Sequence[doc.Node]) -> MainTable:
    """Returns the first of these blocks that is a table, and no map and no series, since
    the answer comes first; its text is Markdown. None, and no text, where there is
    none."""
    tables = (node for node in blocks if isinstance(node, doc.Table))
    first = next((t for t in tables if t.kind not in ("map", "series")), None)
    text = "" if first is None else markdown.table_text(first)
    return MainTable(first, text)


def _map_parts(table: doc.Table) -> Iterator[doc.Table]:
    """Yields a table as it is laid out: a map of more than MAP_COLUMNS columns in parts
    of one width, the last perhaps narrower, each with the names of its rows, so that its
    cells can be read; any other table as it is."""
    count = len(table.columns) - 1
    if table.kind != "map" or count <= MAP_COLUMNS:
        yield table
        return
    width = math.ceil(count / math.ceil(count / MAP_COLUMNS))
    for start in range(1, count + 1, width):
        columns = (table.columns[0], *table.columns[start : start + width])
        rows = (
            replace(row, cells=(row.cells[0], *row.cells[start : start + width]))
            for row in table.rows
        )
        yield replace(table, columns=columns, rows=tuple(rows))


def _printable(value: object) -> object:
    """Returns a value as the template shows it: in text, characters that are not
    printable but newlines and tabs, such as those that would turn the direction of what
    stands around them, are spelled out; markup and all else as it is."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return plain(value, keep="\n\t")
    return value


def _with_code(text: str) -> Markup:
    """Returns a sentence as HTML, escaped, with what stands in backticks set as code. No
    line ends within a date, a number and its unit (one of those in `_UNBROKEN`: %, ulp,
    ms, MB and others), or a number ± another. Characters that are not printable are
    spelled out."""
    whole = _UNBROKEN.sub(_as_one, str(escape(_printable(text))))
    return Markup(_CODE.sub(r"<code>\1</code>", whole))


def _as_one(number: re.Match[str]) -> str:
    """Returns the text of a match of _UNBROKEN as HTML that stays on one line: in a
    `span` where it has a blank or a hyphen, at which it could be broken; else as it
    is."""
    text = number[0]
    if re.search(r".[- ]", text) is None:
        return text
    return f'<span class="one">{text}</span>'
