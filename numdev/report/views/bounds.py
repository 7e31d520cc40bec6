"""A bounds report, shown: every ratio before curves merge beside the one after and beside the
null's, then the curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
from numdev.training.bounds.report import BoundsReport, Comparison, Delay, Saturation, Window

WINDOWS: tuple[tuple[Window, str], ...] = (
    ("given", "checkpoints"),
    ("first", "step"),
    ("early", "early"),
    ("saturated", "merged"),
    ("start", "gradient"),
)
WHOLE = ("given", "early")
"""Where the terminal shows intervals."""
WITH_W1 = ("given", "early", "saturated")
METRICS = (("mean_abs", "mean |Δ|"), ("max_abs", "max |Δ|"), ("rel", "relative L2"), ("w1", "W1"))
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


@dataclass(frozen=True, kw_only=True)
class Line:
    """One pair of runs, with all its ratios in one group."""

    variant: str
    against: str
    ratios: dict[tuple[str, str], Comparison]
    delay: Delay | None

    def at(self, window: str, metric: str, *, whole: bool = True) -> str:
        """A ratio, and unless it is to be brief its interval."""
        c = self.ratios.get((window, metric))
        if c is None or c.ratio is None:
            return NONE
        known = whole and c.low is not None and c.high is not None
        ends = f" [{_short(c.low or 0.0)}, {_short(c.high or 0.0)}]" if known else ""
        return _short(c.ratio) + ends

    @property
    def delayed(self) -> str:
        d = self.delay
        return NONE if d is None or d.steps is None else f"{d.steps:.2g}"


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
    drawn = _charts(report)
    whole = tuple(c for c in drawn if c.figure.place.get("group") in ("all", None))
    yield Figures(whole, PAGE)
    for mark in report.saturations:
        if mark.group == "all":
            yield Paragraph(_merging(mark), "soft", PAGE)
    yield _terminal(report)
    if "all" in groups:
        yield _table(report, "all", METRICS, "Ratios, all weights", PAGE)
    brief = "Distance of one run over that of another, all weights: mean |difference|"
    yield _table(report, "all", METRICS[:1], brief, ("markdown",))
    yield from notes((_legend(report),), (*TERMINAL, *PAGE))
    others = [group for group in groups if group != "all"]
    if others:
        yield Heading("By kind of parameter", PAGE)
    for group in others:
        yield Fold(group, (_table(report, group, METRICS, "", PAGE),))
    rest = tuple(c for c in drawn if c not in whole)
    if rest:
        yield Fold("Curves by kind", (Figures(rest),))
    mean = tuple(c for c in whole if c.figure.metric == "mean_abs")
    yield Figures(tuple(c for c in mean if c.figure.place.get("group") == "all"), TERMINAL)
    yield words(
        ("run", "role", "kernel", "format", "attention", "runs"),
        (
            (v.label, v.role.replace("_", " "), v.kernel or NONE, v.format or NONE,
             v.attention_format or NONE, str(v.runs))
            for v in report.summary.variants
        ),
        title="What was set beside what",
        only=PAGE,
    )  # fmt: skip


def _merging(mark: Saturation) -> str:
    """Where the curves of all weights merge, and how large a perturbation was before."""
    merged = f"are merged from step {mark.saturated}" if mark.saturated else "do not merge"
    begin = f"begin to merge at step {mark.bends}" if mark.bends else "do not begin to merge"
    peak = (
        f"; the largest perturbation was at most {ratio(mark.peak)} times the smallest null "
        f"({mark.null})"
        if mark.peak is not None
        else ""
    )
    return f"Curves {begin} and {merged}{peak}{f': {mark.reason}' if mark.reason else ''}."


def _legend(report: BoundsReport) -> str:
    """What the columns that are there mean."""
    said = [MEANT[window] for window, _ in _windows(report) if window in MEANT]
    return LEGEND.format(windows="".join(f"{each}; " for each in said))


def _table(
    report: BoundsReport,
    group: str,
    metrics: Sequence[tuple[str, str]],
    title: str,
    only: tuple[Medium, ...],
) -> Table:
    """Every ratio of one group of parameters, with its interval."""
    windows = _windows(report)
    names = [f"{each} {_steps(report, window)}".strip() for window, each in windows]
    columns = (
        [f"{name}, {metric}" for name in names for _, metric in metrics]
        if len(metrics) > 1
        else names
    )

    def cells(each: Line) -> Iterator[str | Cell]:
        yield from (each.variant, each.against)
        for window, _ in windows:
            for metric, _ in metrics:
                style: Style = "strong" if metric == "mean_abs" else ""
                yield Cell(each.at(window, metric), style=style)
        yield each.delayed

    against = Column("over that of", align="left")
    titles: list[str | Column] = ["distance of", against, *columns, "steps later"]
    return table(titles, map(cells, lines(report, group)), title=title, only=only)


def _terminal(report: BoundsReport) -> Table:
    """The ratios of all weights, every window beside the others. Intervals of the paired mean
    alone; the page has all."""
    windows = _windows(report)
    columns = [Column("", align="left")]
    for window, name in windows:
        columns.append(Column(f"{name} {_steps(report, window)}".strip()))
        columns += [Column("W1")] * (window in WITH_W1)
    rows, last = [], None
    for each in lines(report, "all"):
        if each.variant != last:
            empty = (Cell(""),) * (len(columns) if report.delays else len(columns) - 1)
            rows.append(Row((Cell(each.variant, style="strong"), *empty)))
        last = each.variant
        cells = [Cell(f"  over {each.against}", style="soft")]
        for window, _ in windows:
            cells.append(Cell(each.at(window, "mean_abs", whole=window in WHOLE)))
            cells += [Cell(each.at(window, "w1", whole=False), style="soft")] * (window in WITH_W1)
        rows.append(Row((*cells, *([Cell(each.delayed)] if report.delays else []))))
    return Table(
        title="Distance of one run over that of another, all weights",
        columns=(*columns, *([Column("steps later")] if report.delays else [])),
        rows=tuple(rows),
        kind="words",
        only=TERMINAL,
    )


def lines(report: BoundsReport, group: str) -> list[Line]:
    """Every pair of runs of one group of parameters."""
    here = [c for c in report.comparisons if c.group == group]
    delays = {(d.variant, d.against): d for d in report.delays if _of_mean(d, group)}
    return [
        Line(
            variant=pair[0],
            against=pair[1],
            ratios={(c.window, c.metric): c for c in here if (c.variant, c.against) == pair},
            delay=delays.get(pair),
        )
        for pair in dict.fromkeys((c.variant, c.against) for c in here if c.ratio is not None)
    ]


def _of_mean(delay: Delay, group: str) -> bool:
    return delay.group == group and delay.metric == "mean_abs"


def _windows(report: BoundsReport) -> list[tuple[Window, str]]:
    there = {c.window for c in report.comparisons if c.ratio is not None}
    return [(window, name) for window, name in WINDOWS if window in there]


def _steps(report: BoundsReport, window: Window) -> str:
    """Which steps a window is, as briefly as can be."""
    steps: Sequence[int] = next(
        (c.steps for c in report.comparisons if c.window == window and c.group == "all"), ()
    )
    if window in ("given", "start", "first") or not steps:
        return "" if window != "first" else str(*steps)
    return f"{steps[0]}" if len(steps) == 1 else f"{steps[0]}–{steps[-1]}"


def _charts(report: BoundsReport) -> tuple[Chart, ...]:
    """Every figure; in those of distances it is marked where curves merge."""
    marks = {s.group: s for s in report.saturations}
    made = []
    for chart in charts(report.figures, report.summary.axis, "golden"):
        mark = marks.get(chart.figure.place.get("group", ""))
        steps = (
            (
                (mark.chance, "chance begins to decide"),
                (mark.bends, "curves begin to merge"),
                (mark.saturated, "merged"),
            )
            if mark
            else ()
        )
        places = tuple((float(step), name) for step, name in steps if step)
        made.append(replace(chart, marks=places))
    return tuple(made)


def _short(value: float) -> str:
    """A ratio in few characters."""
    if value == 0 or 0.1 <= value < 1000:
        return ratio(value)
    return f"{value:.0f}" if 1000 <= value < 1e5 else f"{value:.1e}".replace("e-0", "e-")
