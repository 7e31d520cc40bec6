"""How sets of weights compared are shown: in the terminal, and what the page's template gets.

The sentences first; then for each set all weights together, by kind of parameter, and the tensors
that moved most beside a cast. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from numdev.report.renderers.sheets import Sheet
from numdev.report.renderers.terminal import _answer, _last_lines, _ratio, _si, _text
from numdev.training.weights.report import GroupRow, PairSummary, TensorRow, WeightsReport

SHOWN = 8
"""Tensors listed for each set in the terminal; the page and rows.csv have all."""
ON_PAGE = 500
FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}


def show(report: WeightsReport, console: Console) -> None:
    """Print a comparison of weights."""
    _answer(report.summary.answer, console)
    for pair in report.summary.pairs:
        console.print(_text(f"{pair.of} against {pair.against}", "bold"))
        console.print(_table("kind", _kinds(report, pair), tuple(FORMATS)))
        moved = [row for row in leading(report, pair) if row.equal != 1]
        if moved:
            formats = (pair.yardstick,) if pair.yardstick else ()
            shown = SHOWN if len(report.summary.pairs) == 1 else 3
            console.print("", _table(_most(pair), moved[:shown], formats), sep="\n")
        console.print()
    for line in (*LEGEND, *report.summary.notes, *_last_lines(report)):
        console.print(_text(line, "dim"))


LEGEND = (
    "mean and max: of |difference|, element by element; rel: of the L2 norms. W1: between the bags "
    "of values, blind to which stands where; of several tensors the mean of theirs. ×bf16, ×fp16, "
    "×fp8: mean |difference| over what casting the same tensor of the first to bfloat16, float16, "
    "float8_e4m3fn would have changed; - where that is nothing.",
)


def seen(report: WeightsReport) -> dict[str, Any]:
    """What the template gets."""
    return {
        "summary": report.summary,
        "formats": FORMATS,
        "legend": LEGEND[0],
        "limit": ON_PAGE,
        "parts": [
            {
                "pair": pair,
                "kinds": _kinds(report, pair),
                "layers": [g for g in report.groups if g.of == pair.of and g.group == "layer"],
                "tensors": leading(report, pair)[:ON_PAGE],
                "most": _most(pair),
            }
            for pair in report.summary.pairs
        ],
    }


def sheets(report: WeightsReport) -> Iterator[Sheet]:
    """As tables of text: each set by kind of parameter."""
    columns = (
        "kind of parameter",
        "mean",
        "max",
        "rel",
        "W1",
        *(f"×{s}" for s in FORMATS.values()),
    )
    for pair in report.summary.pairs:
        yield Sheet(
            title=f"{pair.of} against {pair.against}",
            columns=columns,
            rows=tuple(
                (
                    f"{row.name} ({row.tensors})",
                    *(_si(x) for x in (row.mean_abs, row.max_abs, row.rel, row.mean_w1)),
                    *(_times(row.times(name)) for name in FORMATS),
                )
                for row in _kinds(report, pair)
            ),
        )


def leading(report: WeightsReport, pair: PairSummary) -> list[TensorRow]:
    """A set's tensors, first those that moved most: beside a cast to its yardstick, and where that
    says nothing by their mean difference."""

    def moved(row: TensorRow) -> tuple[float, float]:
        times = row.times(pair.yardstick) if pair.yardstick else None
        return (-1.0 if times is None else times, row.mean_abs or 0.0)

    return sorted((r for r in report.rows if r.of == pair.of), key=moved, reverse=True)


def _kinds(report: WeightsReport, pair: PairSummary) -> list[GroupRow]:
    return [g for g in report.groups if g.of == pair.of and g.group in ("all", "kind")]


def _most(pair: PairSummary) -> str:
    return f"tensor, most ×{FORMATS[pair.yardstick]} first" if pair.yardstick else "tensor"


def _times(value: float | None) -> str:
    """A multiple of a cast; what is far below one keeps its digits."""
    return _si(value) if value is not None and 0 < value < 0.01 else _ratio(value)


def _table(title: str, rows: Sequence[GroupRow | TensorRow], formats: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column(title, overflow="fold")
    for column in ("mean", "max", "rel", "W1", *(f"×{FORMATS[name]}" for name in formats)):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        w1 = row.mean_w1 if isinstance(row, GroupRow) else row.w1
        found = [_si(x) for x in (row.mean_abs, row.max_abs, row.rel, w1)]
        times = [_times(row.times(name)) for name in formats]
        name = row.name if isinstance(row, GroupRow) else row.tensor
        style = "bold" if name == "all" else ""
        table.add_row(_text(name, style), *(Text(cell) for cell in (*found, *times)))
    return table
