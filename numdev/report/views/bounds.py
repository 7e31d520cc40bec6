"""A bounds report, shown: every ratio before curves merge beside the one after and beside the
null's, then the curves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from numdev.report import document as doc
from numdev.report.document import PAGE, TERMINAL, Column
from numdev.report.numbers import NONE, times
from numdev.training.bounds.report import BoundsReport, Comparison

WINDOWS = {
    "first": "step",
    "early": "early",
    "saturated": "merged",
    "start": "gradient",
}
METRICS = {"mean_abs": "mean |Δ|", "w1": "W1", "max_abs": "max |Δ|", "rel": "relative L2"}
LEGEND = (
    "Mean |difference| of weights from those of the golden run, which all others are held against, "
    "over another run's: the geometric mean over steps and seeds [95 %]. early: before chance "
    "decides or curves begin to merge; merged: from where they have; gradient: of the first step's "
    "gradients instead of weights. W1 does not know which weight moved. All of these are proxies."
)
MARKS = ("chance begins to decide", "curves begin to merge", "merged")


def title(report: BoundsReport) -> str:
    return f"Bounds: {report.request.get('target')}"


def line(report: BoundsReport) -> str:
    return (
        "How far weights end up from those of the golden run of the same seed: flash beside low "
        f"precision, another seed and null runs. Seeds: {len(report.summary.seeds)}; bands are "
        "95 % intervals over them. These distances are proxies."
    )


def blocks(report: BoundsReport) -> Iterator[doc.Node]:
    charts = doc.charts(report.figures, report.summary.axis, "golden")
    drawn = [_marked(chart, report) for chart in charts]
    whole = tuple(c for c in drawn if c.figure.place.get("group", "all") == "all")
    yield doc.Figures(whole, PAGE)
    yield _table(report, "all", "Distance of one run over that of another, all weights")
    yield from doc.notes((LEGEND,), (*TERMINAL, *PAGE))
    for kind in dict.fromkeys(c.group for c in report.comparisons if c.group != "all"):
        curves = tuple(c for c in drawn if c.figure.place.get("group") == kind)
        blocks = (_table(report, kind, ""), doc.Figures(curves))
        yield doc.Fold(f"Kind of parameter: {kind}", blocks)
    yield doc.Figures(tuple(c for c in whole if c.figure.metric == "mean_abs"), TERMINAL)
    yield doc.words(
        ("run", "role", "kernel", "format", "attention", "runs"),
        (
            (v.label, v.role.replace("_", " "), v.kernel or NONE, v.format or NONE,
             v.attention_format or NONE, str(v.runs))
            for v in report.summary.variants
        ),
        title="What was set beside what",
        only=PAGE,
    )  # fmt: skip


def _marked(chart: doc.Chart, report: BoundsReport) -> doc.Chart:
    """With upright lines where the curves of its group merge."""
    for s in report.saturations:
        if s.group == chart.figure.place.get("group"):
            steps = zip((s.chance, s.bends, s.saturated), MARKS, strict=True)
            marks = tuple((float(step), name) for step, name in steps if step)
            return replace(chart, marks=marks)
    return chart


def _table(report: BoundsReport, group: str, title: str) -> doc.Table:
    """Every ratio of one group of parameters with its interval, a window beside the other; a narrow
    terminal has room for mean and W1 alone."""
    known = [c for c in report.comparisons if c.ratio is not None and c.group == group]
    cells = {(c.variant, c.against, c.window, c.metric): c for c in known}
    spans: dict[str, tuple[int, ...]] = {c.window: c.steps for c in known if c.window != "start"}
    columns: list[str | Column] = ["distance of", Column("over that of", align="left")]
    windows = [window for window in WINDOWS if window in {c.window for c in known}]
    for window in windows:
        steps = spans.get(window, ())
        ends = "–".join(str(step) for step in dict.fromkeys((*steps[:1], *steps[-1:])))
        name = f"{WINDOWS[window]} {ends}".strip()
        for metric, words in METRICS.items():
            words = name if metric == "mean_abs" else f"{name}, {words}"
            columns.append(Column(words, width=0 if metric == "mean_abs" else 160))
    rows = (
        (*pair, *(_ratio(cells.get((*pair, window, m))) for window in windows for m in METRICS))
        for pair in dict.fromkeys((c.variant, c.against) for c in known)
    )
    return doc.table(columns, rows, title=title)


def _ratio(c: Comparison | None) -> str:
    """A ratio and its interval, where it has one."""
    if c is None:
        return NONE
    known = c.low is not None and c.high is not None
    return times(c.ratio) + (f" [{times(c.low)}, {times(c.high)}]" if known else "")
