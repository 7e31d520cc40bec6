"""A sweep, shown: its sentences, its curves, who could not be measured."""

from __future__ import annotations

from collections.abc import Iterator

from numdev.report import SweepReport
from numdev.report import document as doc


def blocks(report: SweepReport) -> Iterator[doc.Node]:
    """Yields what is shown of a sweep: what the curves are, the curves, and what was not
    measured."""
    summary = report.summary
    yield doc.Paragraph(
        "Deviation from the fp64 reference of the same rounded inputs, by "
        f"{summary.axis.title}: means over {len(summary.seeds)} seeds, with 95 % "
        "intervals for "
        "two or more. “floor” is the exact result rounded once: no kernel is better "
        "everywhere. "
        "“input rounding” is what the format costs before any kernel runs.",
        "soft",
    )
    yield doc.Figures(report.figures, summary.axis, summary.baseline)
    if summary.notes:
        yield doc.Heading("Not measured")
        yield from doc.notes(summary.notes)
