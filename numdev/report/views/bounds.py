"""How a bounds report is shown: the sentences, then every ratio before curves merge beside the one
after and beside the null's, then the curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from numdev.report.renderers import chart
from numdev.report.renderers.sheets import Sheet
from numdev.report.renderers.terminal import _answer, _figure, _last_lines, _ratio, _text
from numdev.training.bounds.report import BoundsReport, Comparison, Delay, Window

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
            return "-"
        known = whole and c.low is not None and c.high is not None
        ends = f" [{_short(c.low or 0.0)}, {_short(c.high or 0.0)}]" if known else ""
        return _short(c.ratio) + ends

    @property
    def delayed(self) -> str:
        d = self.delay
        return "-" if d is None or d.steps is None else f"{d.steps:.2g}"


def show(report: BoundsReport, console: Console) -> None:
    """Print a bounds report."""
    _answer(report.summary.answer, console)
    console.print(_table(report, console.width))
    console.print("", _text(_legend(report), "dim"), "", sep="\n")
    axis = report.summary.axis
    for figure in report.figures if axis else ():
        if figure.place.get("group") == "all" and figure.metric == "mean_abs" and axis:
            console.print(_figure(figure, axis, console.width))
    for line in _last_lines(report):
        console.print(_text(line, "dim"))


def seen(report: BoundsReport) -> dict[str, Any]:
    """What the page's template gets."""
    groups = list(dict.fromkeys(c.group for c in report.comparisons))
    drawn = _charts(report)
    return {
        "summary": report.summary,
        "groups": [(group, lines(report, group)) for group in groups],
        "windows": [(w, f"{words} {_steps(report, w)}".strip()) for w, words in _windows(report)],
        "metrics": METRICS,
        "legend": _legend(report),
        "charts": [c for group, c in drawn if group in ("all", None)],
        "more_charts": [c for group, c in drawn if group not in ("all", None)],
    }


def _legend(report: BoundsReport) -> str:
    """What the columns that are there mean."""
    said = [MEANT[window] for window, _ in _windows(report) if window in MEANT]
    return LEGEND.format(windows="".join(f"{words}; " for words in said))


def sheets(report: BoundsReport) -> Iterator[Sheet]:
    """As a table of text: the ratios of all weights, by mean |difference|."""
    windows = _windows(report)
    yield Sheet(
        title="Distance of one run over that of another, all weights: mean |difference|",
        columns=(
            *("distance of", "over that of"),
            *(f"{words} {_steps(report, window)}".strip() for window, words in windows),
            "steps later",
        ),
        rows=tuple(
            (
                *(line.variant, line.against),
                *(line.at(window, "mean_abs") for window, _ in windows),
                line.delayed,
            )
            for line in lines(report, "all")
        ),
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
    return [(window, words) for window, words in WINDOWS if window in there]


def _table(report: BoundsReport, width: int) -> Table:
    """The ratios of all weights, every window beside the others. Intervals of the paired mean
    alone; the page has all."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=_text("Distance of one run over that of another, all weights", "bold"),
        title_justify="left",
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    pairs, windows = lines(report, "all"), _windows(report)
    longest = max((len(name) for line in pairs for name in (line.variant, line.against)), default=0)
    table.add_column("", overflow="fold", min_width=min(longest + 7, max(14, width // 4 - 6)))
    for window, words in windows:
        table.add_column(_text(f"{words} {_steps(report, window)}".strip()), justify="right")
        if window in WITH_W1:
            table.add_column("W1", justify="right", no_wrap=True)
    if report.delays:
        table.add_column("steps later", justify="right")
    last = None
    for line in pairs:
        if line.variant != last:
            table.add_row(_text(line.variant, "bold"))
        last = line.variant
        table.add_row(_text(f"  over {line.against}"), *_cells(line, windows, report))
    return table


def _cells(
    line: Line, windows: Sequence[tuple[Window, str]], report: BoundsReport
) -> Iterator[Text]:
    for window, _ in windows:
        yield Text(line.at(window, "mean_abs", whole=window in WHOLE))
        if window in WITH_W1:
            yield Text(line.at(window, "w1", whole=False), "dim")
    if report.delays:
        yield Text(line.delayed)


def _steps(report: BoundsReport, window: Window) -> str:
    """Which steps a window is, as briefly as can be."""
    steps: Sequence[int] = next(
        (c.steps for c in report.comparisons if c.window == window and c.group == "all"), ()
    )
    if window in ("given", "start", "first") or not steps:
        return "" if window != "first" else str(*steps)
    return f"{steps[0]}" if len(steps) == 1 else f"{steps[0]}–{steps[-1]}"


def _charts(report: BoundsReport) -> list[tuple[str | None, chart.Chart]]:
    """Every figure with its group; in those of distances it is marked where curves merge."""
    axis = report.summary.axis
    if axis is None:
        return []
    marks = {s.group: s for s in report.saturations}
    drawn = []
    for figure, made in zip(
        report.figures, chart.charts(report.figures, axis, "golden"), strict=True
    ):
        group = figure.place.get("group")
        mark = marks.get(group) if group else None
        places = [
            (float(step), words)
            for step, words in (
                (mark and mark.chance, "chance begins to decide"),
                (mark and mark.bends, "curves begin to merge"),
                (mark and mark.saturated, "merged"),
            )
            if step
        ]
        drawn.append((group, chart.marked(made, axis, places)))
    return drawn


def _short(value: float) -> str:
    """A ratio in few characters."""
    if value == 0 or 0.1 <= value < 1000:
        return _ratio(value)
    return f"{value:.0f}" if 1000 <= value < 1e5 else f"{value:.1e}".replace("e-0", "e-")
