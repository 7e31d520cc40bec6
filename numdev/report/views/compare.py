"""How a comparison of two audits is shown: in the terminal, and what the page's template gets.

The sentences first; then what moved, head by head; every tensor of every kernel; what is gone and
new; what else differs between the two. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from numdev.gate.comparable import Difference
from numdev.gate.compare_report import CompareReport, Group, Move, Presence
from numdev.report import Place
from numdev.report.renderers.numbers import ratio, si
from numdev.report.renderers.sheets import Sheet
from numdev.report.renderers.terminal import (
    FINDINGS,
    _answer,
    _options,
    _ratio,
    _si,
    _source_line,
    _text,
)

SHOWN = 12
"""Moves listed in the terminal; the page has ON_PAGE and moves.csv all."""
ON_PAGE = 500
LEGEND = (
    "A is the first report, B the second. heads: measured in both, one head of one call each; "
    "moved: beyond noise; same bits: equal outputs, by a checksum of them; equal: in every number. "
    "A, B: medians, in multiples of the floor (lse: rms; where the inputs are not the same, in "
    "multiples of what is predicted); largest: the ratio B / A farthest from 1."
)


def show(report: CompareReport, console: Console) -> None:
    """Print a comparison."""
    _answer(report.summary.answer, console)
    if report.moves:
        console.print(_moves(report.moves[:SHOWN]))
        if len(report.moves) > SHOWN:
            console.print(_text(f"and {len(report.moves) - SHOWN} more, in moves.csv", "dim"))
        console.print()
    console.print(_groups(report.groups))
    if report.presences:
        console.print("", _presences(report.presences), sep="\n")
    for news in report.news:
        near = "" if news.moved else " (its number did not move beyond noise)"
        style = FINDINGS[news.finding.severity] if news.what == "new" else "dim"
        console.print(_text(f"{news.what} finding{near}: {news.finding.sentence}", style))
    if report.changes:
        console.print("", _changes(report.changes), sep="\n")
    console.print()
    for line in (*report.summary.notes, report.summary.threshold, LEGEND):
        console.print(_text(line, "dim"))
    console.print(_text(f"B: {_source_line(report)}", "dim"))


def seen(report: CompareReport) -> dict[str, Any]:
    """What the template gets."""
    return {
        "summary": report.summary,
        "legend": LEGEND,
        "limit": ON_PAGE,
        "groups": [(g, label(g), place(g.where) if g.where else "") for g in report.groups],
        "moves": [(m, label(m), place(m.place)) for m in report.moves[:ON_PAGE]],
        "presences": [(p, label(p), place(p.place)) for p in report.presences],
    }


def sheets(report: CompareReport) -> Iterator[Sheet]:
    """As tables of text: what moved, every tensor, what is gone and new, what else differs."""
    yield Sheet(
        title="What moved",
        columns=("kernel", "", "where", "what", "noise explains"),
        rows=tuple(
            (label(m), f"{m.tensor} {m.format}", place(m.place), m.words, ratio(m.noise))
            for m in report.moves[:ON_PAGE]
        ),
    )
    yield Sheet(
        title="Every tensor",
        columns=("kernel", "", "heads", "moved", "same bits", "equal", "A", "B", "largest"),
        rows=tuple(_group(g) for g in report.groups),
    )
    yield Sheet(
        title="Gone and new",
        columns=("", "kernel", "", "rows", "why"),
        rows=tuple(
            (p.what, label(p), f"{', '.join(p.tensors)} {p.format}", str(p.rows), p.why)
            for p in report.presences
        ),
    )
    yield Sheet(
        title="What else is different",
        columns=("", "A", "B"),
        rows=tuple((d.key, d.a, d.b) for d in (*report.allowed, *report.changes)),
    )


def _group(g: Group) -> tuple[str, ...]:
    write = si if g.metric == "rms" else ratio
    counts = (g.pairs, g.moved, g.same_bits, g.same_numbers)
    numbers = (write(g.a), write(g.b), ratio(g.change))
    return (label(g), f"{g.tensor} {g.format}", *map(str, counts), *numbers)


def label(of: Group | Move | Presence) -> str:
    """A kernel with its options."""
    options: Mapping[str, Any] = of.options
    return of.kernel + _options(options)


def place(where: Place) -> str:
    """Where something is, in a table: the module, and the case where it was drawn."""
    words = where.case if where.layer is None else where.module
    words += f" {where.phase}" if where.phase else ""
    words += f" step {where.step}" if where.step is not None else ""
    words += f" call {where.call}" if where.call and where.call != where.step else ""
    return words + (f" head {where.head}" if where.head is not None else "")


def _grid(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(
            column, overflow="fold", justify="right" if column in right else "left",
            no_wrap=column in right,
        )  # fmt: skip
    return table


def _moves(moves: Sequence[Move]) -> Table:
    table = _grid("moved", "", "where", "what", "noise", right=("noise",))
    for move in moves:
        noise = f"x{move.noise:.2f}" if move.noise is not None else "-"
        table.add_row(
            _text(label(move), "bold"), _text(f"{move.tensor} {move.format}"),
            _text(place(move.place)), _text(move.words), Text(noise, "dim"),
        )  # fmt: skip
    return table


def _groups(groups: Sequence[Group]) -> Table:
    numbers = ("heads", "moved", "same bits", "equal", "A", "B", "largest")
    table = _grid("kernel", "", *numbers, right=numbers)
    several = len({group.format for group in groups}) > 1  # else the answer has it
    for group in groups:
        value = _si if group.metric == "rms" else _ratio
        style = "bold" if group.role == "kernel" else "dim"
        table.add_row(
            _text(label(group), style),
            _text(group.tensor + f" {group.format}" * several), str(group.pairs),
            Text(str(group.moved), "bold red" if group.moved else "dim"), str(group.same_bits),
            str(group.same_numbers), value(group.a), value(group.b), _ratio(group.change),
        )  # fmt: skip
    return table


def _presences(presences: Sequence[Presence]) -> Table:
    table = _grid("", "kernel", "", "rows", "why", right=("rows",))
    for p in presences:
        style = "bold red" if p.what == "gone" else "bold"
        tensors = f"{', '.join(p.tensors)} {p.format}"
        cells = (label(p), tensors, str(p.rows), p.why)
        table.add_row(Text(p.what, style), *(_text(cell) for cell in cells))
    return table


def _changes(changes: Sequence[Difference]) -> Table:
    table = _grid("different", "A", "B")
    for change in changes:
        table.add_row(*(_text(cell) for cell in (change.key, change.a, change.b)))
    return table
