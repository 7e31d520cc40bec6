"""The table of `numdev kernels`, and what its check of one kernel says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numdev.report import ConformanceReport
from numdev.report.document import Cell, Document, Paragraph, Style, words

VERDICTS: dict[str, tuple[str, Style]] = {
    "right": ("right", "good"),
    "partly": ("right where it runs", "good"),
    "refuses": ("refuses", "warn"),
    "raises": ("raises", "bad"),
    "wrong": ("WRONG", "bad"),
}


def table(kernels: Sequence[Mapping[str, Any]], machine: str) -> Document:
    """Every kernel: whether it runs on this machine, and what it is."""
    title = f"Kernels on {machine}"
    rows = []
    for kernel in kernels:
        missing = kernel["missing"]
        here = Cell(f"no: {missing}", style="warn") if missing else Cell("available", style="good")
        options = f" Options: {', '.join(kernel['options'])}." if kernel["options"] else ""
        name = Cell(kernel["name"], style="strong")
        rows.append((name, here, Cell(kernel["summary"] + options)))
    return Document(title, (words(("kernel", "here", "what it is"), rows, title=title),))


def conformance(report: ConformanceReport) -> Document:
    """The verdict first, then feature by feature."""
    features = words(
        ("feature", "", "checks", "why"),
        (
            (
                Cell(f.feature),
                Cell(VERDICTS[f.verdict][0], style=VERDICTS[f.verdict][1]),
                Cell(f"{f.right}/{f.checks}", style="soft"),
                Cell(f.words),
            )
            for f in report.features
        ),
    )
    verdict = Paragraph(report.sentence, "good" if report.conforms else "bad")
    return Document(f"Check of {report.kernel}", (verdict, features))
