"""A document as one self-contained HTML page: readable offline, on paper, in light and dark.

No script and nothing loaded from elsewhere. All names and messages are foreign text; the template
escapes everything, and the drawings are built of elements."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from numdev.report import Report, replacing
from numdev.report import document as doc
from numdev.report.foreign import plain
from numdev.report.renderers import chart
from numdev.report.views import document_of

_CODE = re.compile(r"`([^`\s]+)`")


def write(report: Report, directory: Path) -> None:
    """Write report.html beside report.json and the reproducers, atomically."""
    with replacing(directory / "report.html") as file:
        file.write(page(report, directory))


def page(report: Report | doc.Document, directory: Path | None = None) -> str:
    """A report, whose reproducers are looked for under `directory`, or a document."""
    environment = Environment(
        loader=PackageLoader("numdev.report.renderers"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"svg": chart.svg, "numbers": doc.table_of, "prose": _prose}
    document = document_of(report, directory)
    return environment.get_template("page.html.j2").render(document=document)


def _visible(value: Any) -> Any:
    """Foreign text without marks that would turn the direction of what stands around it."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return plain(value, keep="\n\t")
    return value


def _prose(text: str) -> Markup:
    """A sentence, what stands in backticks set as code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(_visible(text)))))
