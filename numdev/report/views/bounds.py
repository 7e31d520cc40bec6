"""A bounds report, shown: every ratio before curves merge beside the one after and beside the
null's, then the curves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from numdev.report.document import (
    PAGE,
    TERMINAL,
    Cell,
    Chart,
    Column,
    Figures,
    Fold,
    Heading,
    Medium,
    Node,
    Paragraph,
    Row,
    Style,
    Table,
    charts,
    notes,
    table,
    words,
)
from numdev.report.numbers import NONE, ratio
from numdev.training.bounds.report import (
    BoundsReport,
    BoundsVariant,
    Comparison,
    Saturation,
    Window,
)

WINDOWS: dict[Window, str] = {
    "given": "checkpoints",
    "first": "step",
    "early": "early",
    "saturated": "merged",
    "start": "gradient",
}
WITH_W1 = ("given", "early", "saturated")
"""Where the terminal shows W1."""
METRICS = {"mean_abs": "mean |Δ|", "max_abs": "max |Δ|", "rel": "relative L2", "w1": "W1"}
LEGEND = (
    "Mean |difference| of weights from those of the golden run, which all others are held against, "
    "over another run's: the geometric mean over steps and seeds [95 %]. {windows}steps later: how "
    "many steps after the other a run reaches the same distance. W1 does not know which weight "
    "moved. All of these are proxies."
)
MEANT: dict[Window, str] = {
    "early": "early: before chance decides or curves begin to merge",
    "saturated": "merged: from where they have",
    "start": "gradient: of the first step's gradients instead of weights",
}
MERGING = "Curves {begin} and {merge}{peak}{reason}."
MARKS = ("chance begins to decide", "curves begin to merge", "merged")
PEAK = "; the largest perturbation was at most {times} times the smallest null ({null})"


def title(report: BoundsReport) -> str:
    return f"Bounds: {report.request.get('target')}"


def line(report: BoundsReport) -> str:
    seeds = len(report.summary.seeds)
    bands = "; bands are 95 % intervals over seeds" if seeds > 1 else ""
    return (
        "How far weights end up from those of the golden run of the same seed: flash beside low "
        f"precision, another seed and null runs. Seeds: {seeds}{bands}. These distances are "
        "proxies."
    )


def blocks(report: BoundsReport) -> Iterator[Node]:
    kinds = [g for g in dict.fromkeys(c.group for c in report.comparisons) if g != "all"]
    drawn = _charts(report)
    whole = tuple(c for c in drawn if c.figure.place.get("group") in ("all", None))
    rest = tuple(c for c in drawn if c not in whole)
    brief = "Distance of one run over that of another, all weights"
    said = "".join(f"{MEANT[window]}; " for window in _windows(report) if window in MEANT)
    yield Figures(whole, PAGE)
    yield from (
        Paragraph(_merging(m), "soft", PAGE) for m in report.saturations if m.group == "all"
    )
    yield _terminal(report, brief)
    yield _table(report, "all", list(METRICS), "Ratios, all weights", PAGE)
    yield _table(report, "all", ["mean_abs"], f"{brief}: mean |difference|", ("markdown",))
    yield from notes((LEGEND.format(windows=said),), (*TERMINAL, *PAGE))
    if kinds:
        yield Heading("By kind of parameter", PAGE)
    yield from (Fold(kind, (_table(report, kind, list(METRICS), "", PAGE),)) for kind in kinds)
    if rest:
        yield Fold("Curves by kind", (Figures(rest),))
    yield Figures(tuple(c for c in whole if c.figure.metric == "mean_abs"), TERMINAL)
    yield words(
        ("run", "role", "kernel", "format", "attention", "runs"),
        (
            (v.label, v.role.replace("_", " "), *(x or NONE for x in _made(v)), str(v.runs))
            for v in report.summary.variants
        ),
        title="What was set beside what",
        only=PAGE,
    )


def _made(v: BoundsVariant) -> tuple[str | None, ...]:
    return v.kernel, v.format, v.attention_format


def _merging(mark: Saturation) -> str:
    """Where the curves of all weights merge, and how large a perturbation was before."""
    return MERGING.format(
        begin=f"begin to merge at step {mark.bends}" if mark.bends else "do not begin to merge",
        merge=f"are merged from step {mark.saturated}" if mark.saturated else "do not merge",
        peak="" if mark.peak is None else PEAK.format(times=ratio(mark.peak), null=mark.null),
        reason=f": {mark.reason}" if mark.reason else "",
    )


Line = dict[tuple[str, str], Comparison]
"""All ratios of one pair of runs, by window and metric."""


def _lines(report: BoundsReport, group: str) -> Iterator[tuple[tuple[str, str], Line, str]]:
    """Every pair of runs with a ratio in one group of parameters, and how many steps later."""
    here = [c for c in report.comparisons if c.group == group]
    delays = [d for d in report.delays if (d.group, d.metric) == (group, "mean_abs")]
    later = {(d.variant, d.against): d.steps for d in delays}
    for pair in dict.fromkeys((c.variant, c.against) for c in here if c.ratio is not None):
        steps = later.get(pair)
        known: Line = {(c.window, c.metric): c for c in here if (c.variant, c.against) == pair}
        yield pair, known, NONE if steps is None else f"{steps:.2g}"


def _ratio(each: Line, window: str, metric: str, *, whole: bool = True) -> str:
    """A ratio, and unless it is to be brief its interval."""
    c = each.get((window, metric))
    if c is None or c.ratio is None:
        return NONE
    ends = "" if c.low is None or c.high is None else f" [{_short(c.low)}, {_short(c.high)}]"
    return _short(c.ratio) + ends * whole


def _table(
    report: BoundsReport, group: str, metrics: Sequence[str], title: str, only: tuple[Medium, ...]
) -> Table:
    """Every ratio of one group of parameters, with its interval."""
    windows, several = _windows(report), len(metrics) > 1
    columns = [
        f"{name}, {METRICS[m]}" if several else name for name in windows.values() for m in metrics
    ]
    rows = []
    for pair, each, later in _lines(report, group):
        cells = [*map(Cell, pair)]
        for window, metric in itertools.product(windows, metrics):
            style: Style = "strong" if metric == "mean_abs" else ""
            cells.append(Cell(_ratio(each, window, metric), style=style))
        rows.append([*cells, Cell(later)])
    against = Column("over that of", align="left")
    return table(["distance of", against, *columns, "steps later"], rows, title=title, only=only)


def _terminal(report: BoundsReport, title: str) -> Table:
    """The ratios of all weights, every window beside the others. Intervals of the paired mean
    alone; the page has all."""
    columns = [Column("", align="left")]
    for window, name in _windows(report).items():
        columns += [Column(name), *([Column("W1")] * (window in WITH_W1))]
    columns += [Column("steps later")] * bool(report.delays)
    rows, last = [], None
    for (variant, against), each, later in _lines(report, "all"):
        if variant != last:
            empty = (Cell(""),) * (len(columns) - 1)
            rows.append(Row((Cell(variant, style="strong"), *empty)))
        last = variant
        cells = [Cell(f"  over {against}", style="soft")]
        for window in _windows(report):
            cells.append(Cell(_ratio(each, window, "mean_abs", whole=window in ("given", "early"))))
            w1 = Cell(_ratio(each, window, "w1", whole=False), style="soft")
            cells += [w1] * (window in WITH_W1)
        rows.append(Row((*cells, *([Cell(later)] * bool(report.delays)))))
    return Table(tuple(columns), tuple(rows), title, kind="words", only=TERMINAL)


def _windows(report: BoundsReport) -> dict[Window, str]:
    """The windows that have a ratio, and their names with the steps they are, briefly."""
    there = {c.window: c.steps for c in report.comparisons if c.ratio is not None}
    whole = {c.window: c.steps for c in reversed(report.comparisons) if c.group == "all"}
    named: dict[Window, str] = {}
    for window in (window for window in WINDOWS if window in there):
        steps = () if window in ("given", "start") else whole.get(window, ())
        ends = "–".join(str(step) for step in dict.fromkeys((*steps[:1], *steps[-1:])))
        named[window] = f"{WINDOWS[window]} {ends}".strip()
    return named


def _charts(report: BoundsReport) -> list[Chart]:
    """Every figure; in those of distances it is marked where curves merge."""
    marks = {s.group: (s.chance, s.bends, s.saturated) for s in report.saturations}
    found = []
    for chart in charts(report.figures, report.summary.axis, "golden"):
        steps = marks.get(chart.figure.place.get("group", ""), (None,) * 3)
        named = zip(steps, MARKS, strict=True)
        found.append(
            replace(chart, marks=tuple((float(step), name) for step, name in named if step))
        )
    return found


def _short(value: float) -> str:
    """A ratio in few characters."""
    if value == 0 or 0.1 <= value < 1000:
        return ratio(value)
    return f"{value:.0f}" if 1000 <= value < 1e5 else f"{value:.1e}".replace("e-0", "e-")
