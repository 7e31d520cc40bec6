"""A diagnosis, shown: the answer, the heads ranked, one picture, then cures and real kernels side
by side on the head that the answer is about, and the curves over training.

The picture is the running sum of delta's error over tokens for the first heads, by the
formula in use and by the other, beside the map of what the error does to every head's dW_Q.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from numdev.diagnose.guilt import leading, same_head
from numdev.diagnose.report import DiagnoseReport, RunningError
from numdev.report import Axis, Curve, Figure, Point, Tick
from numdev.report.renderers import chart
from numdev.report.renderers.sheets import Sheet
from numdev.report.renderers.terminal import _answer, _last_lines, _text
from numdev.report.views import diagnosecells as cells
from numdev.report.views.diagnosecells import Column, brief
from numdev.report.views.train import _some

SHOWN = 10
"""Heads in the ranked table; all are in the page."""
TITLE = 42
"""Characters that the name of a number over training may take."""
BARS = " ▁▂▃▄▅▆▇█"
MET = "meets"
"""The column that says how many links of the chain a head meets."""
STYLES = ("dim", "green", "yellow", "dark_orange", "bold red")


def show(report: DiagnoseReport, console: Console) -> None:
    """Print a diagnosis."""
    _answer(report.summary.answer, console)
    if report.summary.ranking:
        console.print(_ranking(report, console.width), "")
        for part in (_sums(report, console.width), _map(report, console.width)):
            console.print(*part, sep="\n")
        console.print(*_side_by_side(report, console.width), sep="\n")
        for line in _over_training(report, console.width):
            console.print(line)
        columns = _shown((cells.SCORE, *cells.head_columns()), console.width)
        console.print(_text(cells.legend(columns, MET), "dim"), "", sep="\n")
    what = f"Emulated: attention with {_attention(report)}, against fp64 on the same inputs."
    for said in (what, *report.summary.notes, *_last_lines(report)):
        console.print(_text(said, "dim"))


def seen(report: DiagnoseReport) -> dict[str, Any]:
    """What the page's template gets."""
    heads, scores = cells.score_map(report)
    ranked = cells.rows_of(report, report.summary.ranking)
    axis = report.summary.axis
    return {
        "summary": report.summary,
        "cells": cells,
        "ranked": ranked,
        "shown": SHOWN,
        "first": leading(report.summary.ranking) if ranked else None,
        "picture": _picture(report),
        "map_heads": heads,
        "map": scores,
        "cures": cells.of_first(report.cures, report),
        "kernels": cells.of_first(report.kernels, report),
        "charts": chart.charts(report.figures, axis, "") if axis and report.figures else [],
        "attention": _attention(report),
        "met": MET,
        "legend": cells.legend((cells.SCORE, *cells.head_columns()), MET),
    }


def _attention(report: DiagnoseReport) -> str:
    """What was diagnosed: `preset fa2, pv bfloat16 in bfloat16`."""
    options = ", ".join(f"{name} {value}" for name, value in report.attention.items())
    return f"{options} in {report.request['format']}"


def sheets(report: DiagnoseReport) -> Iterator[Sheet]:
    """As tables of text: the heads ranked, then cures and real kernels on the answer's head."""
    columns = cells.head_columns()
    ranked = cells.rows_of(report, report.summary.ranking)
    yield Sheet(
        title=f"Heads, by {cells.order(report.summary.ranking)}",
        columns=("head", cells.SCORE.title, *(c.title for c in columns), MET),
        rows=tuple(
            (brief(r), cells.SCORE.cell(r), *(c.cell(row) for c in columns), cells.met(r))
            for r, row in ranked
        ),
    )
    for what, rows, columns in (
        ("cure", cells.of_first(report.cures, report), cells.cure_columns()),
        ("kernel", cells.of_first(report.kernels, report), cells.kernel_columns()),
    ):
        yield Sheet(
            title=f"The first head: every {what} on the same inputs",
            columns=(what, *(c.title for c in columns)),
            rows=tuple((getattr(row, what), *(c.cell(row) for c in columns)) for row in rows),
        )


# --- the terminal --------------------------------------------------------------------------------


def _table(title: str, columns: Sequence[Column], width: int, name: str) -> tuple[Table, Any]:
    """An empty table with as many of the columns as the width is meant for."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=_text(title, "bold"),
        title_justify="left",
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    shown = _shown(columns, width)
    table.add_column(name, overflow="fold")
    for column in shown:
        table.add_column(column.title, justify="right")
    return table, shown


def _shown(columns: Sequence[Column], width: int) -> list[Column]:
    return [column for column in columns if column.width <= width]


def _ranking(report: DiagnoseReport, width: int) -> Table:
    count = len(report.summary.ranking)
    first = f", the first {SHOWN}" if count > SHOWN else ""
    heads = "1 head" if count == 1 else f"{count} heads"
    title = f"{heads}{first}, by {cells.order(report.summary.ranking)}"
    table, columns = _table(title, (cells.SCORE, *cells.head_columns()), width, "head")
    table.add_column(MET, justify="right")
    for ranked, row in cells.rows_of(report, report.summary.ranking[:SHOWN]):
        style = STYLES[cells.shade(ranked.score)]
        values = [Text(column.cell(row)) for column in columns[1:]]
        values.insert(0, Text(cells.SCORE.cell(ranked), style))
        meets = Text(cells.met(ranked), "dim" if not ranked.conditions else "")
        table.add_row(_text(brief(ranked), "bold"), *values, meets)
    return table


def _sums(report: DiagnoseReport, width: int) -> Iterator[Text | str]:
    """The running sums as bars of one scale, each with its end."""
    rows = [row for row in report.running if row.sums]
    if not rows:
        return
    room = max(16, min(80, width - 28))
    largest = max(abs(s) for row in rows for s in row.sums) or 1.0
    yield _text("|Running sum of delta's error| over tokens, worst sequence, and its end", "bold")
    for row in rows:
        ends = f"{row.sums[-1]:+.2g}".replace("-", "−")
        name = _text(f"{brief(row):<10} {_formula(row):<5} ", "bold" if _used(row, report) else "")
        yield name.append(_bars(row.sums, room, largest)).append(f" {ends}")
    yield ""


def _bars(sums: Sequence[float], room: int, largest: float) -> str:
    """One character for each stretch of tokens: the size of the sum at its end."""
    places = [round((i + 1) * len(sums) / room) - 1 for i in range(min(room, len(sums)))]
    if len(sums) < room:
        places = list(range(len(sums)))
    return "".join(BARS[round(8 * (abs(sums[max(place, 0)]) / largest))] for place in places)


def _map(report: DiagnoseReport, width: int) -> Iterator[Text | Table | str]:
    """What every head scores, in per cent, in as many blocks of heads as there have to be."""
    heads, scores = cells.score_map(report)
    margin = max(5, *(min(len(name), width // 3) for name in scores))
    fitting = max(1, (width - margin) // 6)
    shown = cells.mapped(report.summary.ranking)
    yield _text(f"{shown}: layer (down) by head (across)", "bold")
    for start in range(0, len(heads), fitting):
        chosen = range(start, min(start + fitting, len(heads)))
        table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False)
        table.add_column("layer", header_style="dim", style="dim", width=margin, overflow="fold")
        for i in chosen:
            table.add_column(str(heads[i]), justify="right", header_style="dim", width=5)
        for name, values in scores.items():
            table.add_row(_text(name), *(_scored(values[i]) for i in chosen))
        yield table
    yield ""


def _scored(score: float | None) -> Text:
    return Text(cells.compact(score), "dim" if score is None else STYLES[cells.shade(score)])


def _side_by_side(report: DiagnoseReport, width: int) -> Iterator[Table | str]:
    """Cures, then real kernels, on the head that the answer is about."""
    head = brief(leading(report.summary.ranking))
    cures = cells.of_first(report.cures, report)
    if cures:
        title = f"{head}: the same inputs with one thing changed"
        table, columns = _table(title, cells.cure_columns(), width, "cure")
        for row in cures:
            style = "dim" if row.cure == "none" else "bold"
            name = _text(row.cure, style).append(" not with this" * cells.refused(row), "dim")
            table.add_row(name, *(column.cell(row) for column in columns))
        yield table
        yield ""
    kernels = cells.of_first(report.kernels, report)
    if kernels:
        title = f"{head}: real kernels on the same inputs"
        table, columns = _table(title, cells.kernel_columns(), width, "kernel")
        for row in kernels:
            name = _text(row.kernel, "bold").append(f" {row.reason or ''}", "dim")
            table.add_row(name, *(column.cell(row) for column in columns))
        yield table
        yield ""


def _over_training(report: DiagnoseReport, width: int) -> Iterator[Table | str]:
    """Each number by step, of the answer's head, and under it the median head's."""
    if not report.summary.axis or not report.figures:
        return
    steps = _some([t.x for t in report.summary.axis.ticks], max(2, (width - TITLE) // 8))
    table, _ = _table(f"Over training: {brief(leading(report.summary.ranking))}", (), width, "step")
    for step in steps:
        table.add_column(f"{step:g}", justify="right")
    for figure in report.figures:
        for curve in (*figure.curves[:1], *figure.curves[-1:]):
            first = curve is figure.curves[0]
            at = {point.x: f"{point.mean:.3g}" for point in curve.points}
            values = [Text(at.get(step, cells.NONE), "" if first else "dim") for step in steps]
            name = _text(figure.title, "bold") if first else _text("  median head", "dim")
            table.add_row(name, *values)
    yield table
    yield ""


# --- the page ------------------------------------------------------------------------------------


def _picture(report: DiagnoseReport) -> chart.Chart | None:
    """The running sums as lines: a colour for each head, dashed by the formula it does not use."""
    rows = [row for row in report.running if len(row.sums) > 1]
    if not rows:
        return None
    end = max(token for row in rows for token in row.tokens)
    axis = Axis(name="token", title="token", scale="linear", ticks=_ticks(end))
    figure = Figure(
        title="Running sum of delta's error, worst sequence",
        metric="running",
        relative=False,
        y_title="sum of errors / √rows",
        y_scale="linear",
        curves=tuple(_curve(row) for row in rows),
    )
    (made,) = chart.charts([figure], axis, "")
    styles = [_style(row, report) for row in rows]
    return dataclasses.replace(
        made,
        drawn=tuple(
            dataclasses.replace(drawn, style=style, dots=())
            for drawn, style in zip(made.drawn, styles, strict=True)
        ),
    )


def _curve(row: RunningError) -> Curve:
    points = tuple(
        Point(x=float(token), label=f"token {token}", mean=s, low=None, high=None, seeds=1)
        for token, s in zip(row.tokens, row.sums, strict=True)
    )
    return Curve(label=f"{brief(row)}, {_formula(row)}", role="kernel", kernel="", points=points)


def _ticks(end: int) -> tuple[Tick, ...]:
    step = max(1, round(end / 4))
    places = sorted({*range(0, end, step), end} if end % step else {*range(0, end + 1, step)})
    return tuple(Tick(x=float(place), label=str(place)) for place in places)


def _style(row: RunningError, report: DiagnoseReport) -> str:
    heads = list(dict.fromkeys((r.case, r.head) for r in report.running))
    at = heads.index((row.case, row.head))
    return f"c{at % chart.COLOURS}" + ("" if _used(row, report) else " dashed")


def _used(row: RunningError, report: DiagnoseReport) -> bool:
    """Whether this is the formula that the attention uses."""
    head = next((h for h in report.heads if same_head(h, row)), None)
    return head is None or not head.delta or head.delta[0].formula == row.formula


def _formula(row: RunningError) -> str:
    return row.formula.replace("*", "∘")
