"""A report as Markdown, for a pull request, an issue or a step summary: the answer, the tables, the
findings, where the numbers come from. All names and messages are escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numdev.report import Report
from numdev.report.foreign import markdown as text
from numdev.report.renderers.html import facts
from numdev.report.renderers.sentences import headed
from numdev.report.renderers.sheets import Sheet, sheets

SEVERITY = {"exceeded": "exceeded", "unmeasured": "not measured", "note": "note"}
LONGEST = 100
"""Rows of a table; the report has all."""


def page(report: Report) -> str:
    """The whole text, ending in a newline."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    target = report.request.get("target")
    yield f"# numdev {text(report.kind)}{': ' + text(str(target)) if target else ''}"
    yield ""
    for finding in report.findings:
        if finding.metric == "suspicion":
            yield f"- **{text(finding.sentence)}**"
    for sentence in getattr(report, "summary").answer:  # noqa: B009 - every kind has one
        head, rest = headed(sentence)
        yield f"- **{text(head)}**{' ' + text(rest) if rest else ''}"
    for sheet in sheets(report):
        yield from ("", f"## {text(sheet.title)}", "", *_table(sheet))
    if report.findings:
        yield from ("", "## Findings", "")
    for finding in report.findings:
        yield f"- {SEVERITY[finding.severity]} ({text(finding.rule)}): {text(finding.sentence)}"
    for line in getattr(report, "tested", ()):
        yield from ("", text(line))
    yield from ("", "## Where this comes from", "")
    yield from (f"- {name}: {text(value)}" for name, value in facts(report))


def _table(sheet: Sheet) -> Iterator[str]:
    yield _row(sheet.columns)
    yield "|" + "|".join("---" if i == 0 else "---:" for i in range(len(sheet.columns))) + "|"
    for row in sheet.rows[:LONGEST]:
        yield _row(row)
    if len(sheet.rows) > LONGEST:
        yield from ("", f"{len(sheet.rows) - LONGEST} more rows are in the report.")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(text(cell) if cell else " " for cell in cells) + " |"
