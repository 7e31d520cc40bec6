"""A bounds report, shown: ratios before curves merge, after, and the null's; the curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from numdev.report import document as doc
from numdev.report.document import PAGE, TERMINAL, Column
from numdev.report.numbers import NONE, times
from numdev.training.bounds.report import BoundsReport, Comparison, Window

WINDOWS: Mapping[Window, str] = {
    "first": "step",
    "early": "early",
    "saturated": "merged",
    "start": "gradient",
}
LEGEND = (
    "Mean |difference| of weights from those of the golden run, which all others are held against, "
    "over another run's: the geometric mean over steps and seeds [95 %, from three seeds on]. "
    "early: before chance decides or curves begin to merge; merged: from where they have; "
    "gradient: of the first step's gradients instead of weights. All of these are proxies."
)


def blocks(report: BoundsReport) -> Iterator[doc.Node]:
    same = " The golden run repeated gives the same bits." if report.summary.deterministic else ""
    yield doc.Paragraph(
        "How far weights end up from those of the golden run of the same seed: flash beside low "
        f"precision, another seed and null runs. Seeds: {len(report.summary.seeds)}; bands are "
        f"95 % intervals over them, from three on.{same}",
        "soft",
        doc.TEXT,
    )
    if axis := report.summary.axis:
        yield doc.Figures(report.figures, axis, "golden", PAGE)
    yield _table([c for c in report.comparisons if c.metric == "mean_abs" and c.ratio is not None])
    yield from doc.notes((LEGEND,), (*TERMINAL, *PAGE))
    if axis:
        means = tuple(figure for figure in report.figures if figure.metric == "mean_abs")
        yield doc.Figures(means, axis, "golden", TERMINAL)


def _table(known: list[Comparison]) -> doc.Table:
    """Every ratio with its interval, a window beside the other."""
    cells = {(c.variant, c.against, c.window): c for c in known}
    spans = {c.window: c.steps for c in known}
    windows = [window for window in WINDOWS if window in spans]
    columns: list[str | Column] = ["distance of", Column("over that of", align="left")]
    for window in windows:
        steps = () if window == "start" else spans[window]
        ends = "–".join(str(step) for step in dict.fromkeys((*steps[:1], *steps[-1:])))
        columns.append(f"{WINDOWS[window]} {ends}".strip())
    rows = (
        (*pair, *(_ratio(cells.get((*pair, window))) for window in windows))
        for pair in dict.fromkeys((c.variant, c.against) for c in known)
    )
    return doc.table(columns, rows, title="Distance of one run over that of another, all weights")


def _ratio(c: Comparison | None) -> str:
    """A ratio and its interval, where it has one."""
    if c is None:
        return NONE
    known = c.low is not None and c.high is not None
    return times(c.ratio) + (f" [{times(c.low)}, {times(c.high)}]" if known else "")
