"""A bounds report, shown: every ratio before curves merge beside the one after and beside the
null's, then the curves."""

from __future__ import annotations

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
    Table,
    charts,
    notes,
    table,
    words,
)
from numdev.report.numbers import NONE, ratio
from numdev.training.bounds.report import BoundsReport, Comparison, Saturation, Window

WINDOWS: dict[Window, str] = {
    "given": "checkpoints",
    "first": "step",
    "early": "early",
    "saturated": "merged",
    "start": "gradient",
}
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
    groups = list(dict.fromkeys(c.group for c in report.comparisons))
    drawn = [(chart, chart.figure.place.get("group")) for chart in _charts(report)]
    yield Figures(tuple(chart for chart, group in drawn if group in ("all", None)), PAGE)
    for mark in report.saturations:
        if mark.group == "all":
            yield Paragraph(_merging(mark), "soft", PAGE)
    yield _terminal(report)
    if "all" in groups:
        yield _table(report, "all", list(METRICS), "Ratios, all weights", PAGE)
    brief = "Distance of one run over that of another, all weights: mean |difference|"
    yield _table(report, "all", ["mean_abs"], brief, ("markdown",))
    said = "".join(f"{MEANT[window]}; " for window in _windows(report) if window in MEANT)
    yield from notes((LEGEND.format(windows=said),), (*TERMINAL, *PAGE))
    kinds = [group for group in groups if group != "all"]
    if kinds:
        yield Heading("By kind of parameter", PAGE)
    for group in kinds:
        yield Fold(group, (_table(report, group, list(METRICS), "", PAGE),))
    rest = tuple(chart for chart, group in drawn if group not in ("all", None))
    if rest:
        yield Fold("Curves by kind", (Figures(rest),))
    mean = (chart for chart, group in drawn if group == "all" and chart.figure.metric == "mean_abs")
    yield Figures(tuple(mean), TERMINAL)
    yield words(
        ("run", "role", "kernel", "format", "attention", "runs"),
        (
            (
                *(v.label, v.role.replace("_", " "), v.kernel or NONE, v.format or NONE),
                *(v.attention_format or NONE, str(v.runs)),
            )
            for v in report.summary.variants
        ),
        title="What was set beside what",
        only=PAGE,
    )


def _merging(mark: Saturation) -> str:
    """Where the curves of all weights merge, and how large a perturbation was before."""
    return MERGING.format(
        begin=f"begin to merge at step {mark.bends}" if mark.bends else "do not begin to merge",
        merge=f"are merged from step {mark.saturated}" if mark.saturated else "do not merge",
        peak="" if mark.peak is None else PEAK.format(times=ratio(mark.peak), null=mark.null),
        reason=f": {mark.reason}" if mark.reason else "",
    )


Line = dict[tuple[Window, str], Comparison]
"""All ratios of one pair of runs, by window and metric."""


def _lines(report: BoundsReport, group: str) -> dict[tuple[str, str], Line]:
    """Every pair of runs with a ratio in one group of parameters."""
    here = [c for c in report.comparisons if c.group == group]
    known: dict[tuple[str, str], Line] = {
        (c.variant, c.against): {} for c in here if c.ratio is not None
    }
    for c in here:
        known.get((c.variant, c.against), {})[c.window, c.metric] = c
    return known


def _ratio(each: Line, window: Window, metric: str, *, whole: bool = True) -> str:
    """A ratio, and unless it is to be brief its interval."""
    c = each.get((window, metric))
    if c is None or c.ratio is None:
        return NONE
    known = whole and c.low is not None and c.high is not None
    return _short(c.ratio) + (
        f" [{_short(c.low or 0.0)}, {_short(c.high or 0.0)}]" if known else ""
    )


def _delays(report: BoundsReport, group: str) -> dict[tuple[str, str], str]:
    """How many steps later, by pair of runs."""
    here = (d for d in report.delays if (d.group, d.metric) == (group, "mean_abs"))
    return {(d.variant, d.against): f"{d.steps:.2g}" for d in here if d.steps is not None}


def _table(
    report: BoundsReport, group: str, metrics: Sequence[str], title: str, only: tuple[Medium, ...]
) -> Table:
    """Every ratio of one group of parameters, with its interval."""
    delays = _delays(report, group)
    columns = [
        f"{name}, {METRICS[metric]}" if len(metrics) > 1 else name
        for name in _windows(report).values()
        for metric in metrics
    ]
    rows = (
        (
            *map(Cell, pair),
            *(
                Cell(_ratio(each, window, m), style="strong" if m == "mean_abs" else "")
                for window in _windows(report)
                for m in metrics
            ),
            Cell(delays.get(pair, NONE)),
        )
        for pair, each in _lines(report, group).items()
    )
    against = Column("over that of", align="left")
    return table(["distance of", against, *columns, "steps later"], rows, title=title, only=only)


def _terminal(report: BoundsReport) -> Table:
    """The ratios of all weights, every window beside the others. Intervals of the paired mean
    alone; the page has all."""
    delays, columns = _delays(report, "all"), [Column("", align="left")]
    for window, name in _windows(report).items():
        columns += [Column(name), *([Column("W1")] if window in _WITH_W1 else [])]
    columns += [Column("steps later")] * bool(report.delays)
    rows, last = [], None
    for (variant, against), each in _lines(report, "all").items():
        if variant != last:
            empty = (Cell(""),) * (len(columns) - 1)
            rows.append(Row((Cell(variant, style="strong"), *empty)))
        last = variant
        cells = [Cell(f"  over {against}", style="soft")]
        for window in _windows(report):
            cells.append(Cell(_ratio(each, window, "mean_abs", whole=window in ("given", "early"))))
            w1 = Cell(_ratio(each, window, "w1", whole=False), style="soft")
            cells += [w1] if window in _WITH_W1 else []
        cells += [Cell(delays.get((variant, against), NONE))] * bool(report.delays)
        rows.append(Row(tuple(cells)))
    title = "Distance of one run over that of another, all weights"
    return Table(tuple(columns), tuple(rows), title, kind="words", only=TERMINAL)


_WITH_W1 = ("given", "early", "saturated")
"""Where the terminal shows W1."""


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


def _charts(report: BoundsReport) -> Iterator[Chart]:
    """Every figure; in those of distances it is marked where curves merge."""
    marks = {s.group: s for s in report.saturations}
    for chart in charts(report.figures, report.summary.axis, "golden"):
        mark = marks.get(chart.figure.place.get("group", ""))
        steps = {
            "chance begins to decide": mark and mark.chance,
            "curves begin to merge": mark and mark.bends,
            "merged": mark and mark.saturated,
        }
        yield replace(
            chart, marks=tuple((float(step), name) for name, step in steps.items() if step)
        )


def _short(value: float) -> str:
    """A ratio in few characters."""
    if value == 0 or 0.1 <= value < 1000:
        return ratio(value)
    return f"{value:.0f}" if 1000 <= value < 1e5 else f"{value:.1e}".replace("e-0", "e-")
