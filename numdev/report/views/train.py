"""A training run, shown: the answer, then losses and distances by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from numdev.audit.timing import words
from numdev.report import Figure
from numdev.report.foreign import plain
from numdev.report.renderers import chart
from numdev.report.renderers.sentences import headed
from numdev.report.renderers.sheets import Sheet, of_figure
from numdev.training.report import TrainReport

COLUMN = 9
"""Characters that a number takes."""


def show(report: TrainReport, console: Console) -> None:
    """Print it: the sentences, then the loss and the distance of each variant at some steps."""
    console.print()
    for sentence in report.summary.answer:
        head, rest = headed(sentence)
        start = Text(overflow="fold").append(plain(head), "bold cyan")
        console.print(start.append(f" {plain(rest)}" if rest else ""))
    console.print()
    for figure in report.figures:
        if figure.metric in ("loss", "rel"):
            console.print(plain(figure.title), style="bold", markup=False)
            console.print(_table(figure, console.width))
    for line in (_about(report), words(report.timings)):
        console.print(Text(plain(line), "dim", overflow="fold"))


def seen(report: TrainReport) -> dict[str, Any]:
    """What the page of a training run shows."""
    golden = next((v.name for v in report.variants if v.role == "golden"), "")
    axis = report.summary.axis
    drawn = chart.charts(report.figures, axis, golden) if axis and report.figures else []
    return {
        "summary": report.summary,
        "charts": drawn,
        "spikes": [r for r in report.rows if r.spike],
    }


def sheets(report: TrainReport) -> Iterator[Sheet]:
    """As tables of text: every figure, by step."""
    axis = report.summary.axis
    yield from (of_figure(figure, axis) for figure in report.figures if axis is not None)


def _table(figure: Figure, width: int) -> Table:
    """A row for each curve, a column for each of as many steps as fit."""
    steps = sorted({p.x for curve in figure.curves for p in curve.points if p.x is not None})
    longest = max((len(curve.label) for curve in figure.curves), default=0)
    names = min(longest, max(16, width // 3))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("step", width=names, overflow="fold")
    chosen = _some(steps, max(2, (width - names - 2) // COLUMN))
    for step in chosen:
        table.add_column(f"{step:g}", justify="right")
    for curve in figure.curves:
        at = {
            p.x: f"{p.mean:.3f}" if figure.metric == "loss" else f"{p.mean:.1e}"
            for p in curve.points
        }
        style = "dim" if curve.role == "baseline" else "bold"
        table.add_row(Text(plain(curve.label), style), *(at.get(step, "-") for step in chosen))
    return table


def _some(steps: Sequence[float], fitting: int) -> list[float]:
    """At most so many of them, evenly, with the first and the last."""
    if len(steps) <= fitting:
        return list(steps)
    places = {round(i * (len(steps) - 1) / (fitting - 1)) for i in range(fitting)}
    return [steps[i] for i in sorted(places)]


def _about(report: TrainReport) -> str:
    summary, system = report.summary, report.provenance.system
    where = system.get("gpu") or f"{system.get('cpu')} ({system.get('cpu_capability')})"
    torch = system.get("packages", {}).get("torch", "?")
    several = len(summary.seeds) > 1
    seeds = f"seed{'s' if several else ''} {', '.join(map(str, summary.seeds))}"
    return (
        f"{summary.model} of {summary.parameters:,} parameters, {summary.data}; {summary.steps} "
        f"steps, {seeds}{': means over seeds' if several else ''}. torch {torch} on "
        f"{where}. numdev {report.provenance.numdev}."
    )
