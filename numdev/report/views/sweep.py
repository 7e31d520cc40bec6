"""A sweep, shown: its sentences, its curves, who could not be measured."""

from __future__ import annotations

from collections.abc import Iterator

from numdev.report import SweepReport
from numdev.report import document as doc


def title(report: SweepReport) -> str:
    return report.request.get("title") or f"Sweep: {report.request.get('target')}"


def line(report: SweepReport) -> str:
    axis, seeds = report.summary.axis, len(report.summary.seeds)
    drawn = "bars" if axis.scale == "category" else "bands"
    intervals = f", {drawn} their 95 % intervals" if seeds > 1 else ""
    return (
        f"Deviation from the fp64 reference of the same rounded inputs, by {axis.title}. Seeds: "
        f"{seeds}; lines are means over seeds{intervals}. “floor” is the exact result rounded "
        "once: no kernel can be better everywhere. “input rounding” is what the format costs "
        "before any kernel errs."
    )


def blocks(report: SweepReport) -> Iterator[doc.Node]:
    summary = report.summary
    yield doc.Figures(doc.charts(report.figures, summary.axis, summary.baseline))
    means = f"Means over {len(summary.seeds)} seeds; intervals are in report.html."
    yield doc.Paragraph(means, "soft", doc.TERMINAL)
    if summary.notes:
        yield doc.Heading("Not measured", doc.TEXT)
        yield doc.bullets(summary.notes, doc.TEXT)
        yield from doc.notes(summary.notes, doc.TERMINAL)
