"""A document in the terminal, with rich, and the progress bar of a study.

Results go to stdout, progress to stderr. Colour carries nothing that the text does not
say. Names and messages are foreign text: they go through `_rich_text`, never through
rich's markup. In a file or a pipe lines are not broken (unless $COLUMNS says so), and
progress is a line now and then."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich import table as rich_table
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from numdev.report import Report
from numdev.report import document as doc
from numdev.report.safe_text import plain
from numdev.report.views import document_of

STYLES = {"": "", "strong": "bold", "soft": "dim", "good": "green", "warn": "yellow",
          "bad": "bold red"}  # fmt: skip
SHADES = ("green", "yellow", "dark_orange", "bold red", "bold red")
NUMBER = 9  # characters that a column of a series takes
MAP = 5  # characters that a column of a map takes at least
UNBROKEN = 100_000  # characters of a line where nothing breaks them
QUIET = 20.0  # seconds between two lines of progress


def show(report: Report | doc.Document, console: Console | None = None) -> None:
    """Prints what a report or a document has for the terminal, to `console` or else to
    stdout."""
    out = console or Console()
    if not console and not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = UNBROKEN
    for i, node in enumerate(document_of(report).shown_in("terminal")):
        match node:
            case doc.Heading():
                out.print()
                out.print(_rich_text(node.text, "bold"))
            case doc.Paragraph():
                if i == 0:
                    out.print()
                out.print(_rich_text(node.text, STYLES[node.style]))
            case doc.Bullets():
                indent = "  " if node.kind == "plain" else ""
                if not indent:
                    out.print()
                for item in node.items:
                    style = STYLES[item.style]
                    lead = style or ("bold cyan" if node.kind == "answer" else "bold")
                    line = Text(indent, overflow="fold").append_text(
                        _rich_text(item.lead, lead)
                    )
                    gap = " " if item.lead and item.text else ""
                    out.print(line.append_text(_rich_text(gap + item.text, style)))
            case doc.Table():
                _print_table(node, out)


def _print_table(node: doc.Table, out: Console) -> None:
    """Prints a table under its title; of a map as many blocks of columns as the width
    asks for."""
    out.print()
    if node.title:
        out.print(_rich_text(node.title, "bold"))
    chosen = [i for i, column in enumerate(node.columns) if column.width <= out.width]
    longest = max((len(row.cells[0].text) for row in node.rows), default=0)
    room, blocks = out.width - 2 - min(longest, max(16, out.width // 3)), [chosen]
    if node.kind == "map":
        widths = (1 + len(cell.text) for row in node.rows for cell in row.cells[1:])
        fitting = max(1, room // max(MAP, *widths))
        blocks = [[0, *chosen[i : i + fitting]] for i in range(1, len(chosen), fitting)]
    elif node.kind == "series":
        blocks = [[0, *evenly_spread(chosen[1:], max(2, room // NUMBER))]]
    for block in blocks:
        out.print(_rich_table(node, block, out.width))


def evenly_spread(places: Sequence[int], fitting: int) -> list[int]:
    """Returns at most `fitting` (2 or more) of the places, evenly spread, the first and
    the last among them."""
    if len(places) <= fitting:
        return list(places)
    chosen = {round(i * (len(places) - 1) / (fitting - 1)) for i in range(fitting)}
    return [places[i] for i in sorted(chosen)]


def _rich_table(node: doc.Table, chosen: Sequence[int], total: int) -> rich_table.Table:
    """Returns the columns `chosen` (indices) of a table, laid out by rich. `total`:
    characters of a line."""
    mapped, titles = node.kind == "map", [column.title for column in node.columns]
    if node.kind == "numbers":  # a title of several words has two lines
        titles = ["\n".join(title.rsplit(" ", 1)) for title in titles]
    heads = [max(title.split("\n"), key=len) for title in titles]
    lines = [heads, *([cell.text for cell in row.cells] for row in node.rows)]
    tight = not mapped and len(chosen) > 9  # one column more must still fit in 80
    widths = (max(len(line[at]) for line in lines) for at in chosen[1:])
    fits = sum(2 - tight + column for column in widths) + MAP < total
    grid = rich_table.Table(
        box=None if mapped else box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1) if mapped else (0, 0 if tight else 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for at in chosen:
        column = node.columns[at]
        grid.add_column(
            Text("\n").join(_rich_text(line) for line in titles[at].split("\n")),
            overflow="fold",
            justify=column.align if at else "left",
            no_wrap=fits
            and node.kind == "numbers"
            and (at == 0 or column.align == "right"),
            min_width=MAP - 1 if mapped and at else None,
        )
    for row in node.rows:
        line = []
        for at in chosen:
            cell = row.cells[at]
            style = STYLES[cell.style] or (
                "dim" if row.standard else "bold" if at == 0 else ""
            )
            content = _rich_text(
                cell.text, style if cell.shade is None else SHADES[cell.shade]
            )
            line.append(
                content.append(f" {plain(cell.after)}", "dim") if cell.after else content
            )
        grid.add_row(*line)
    return grid


def _rich_text(content: str, style: str = "") -> Text:
    """Returns foreign text as it is: no markup, no control characters, cut nowhere."""
    return Text(plain(content), style, overflow="fold")


@contextmanager
def progress(*, show: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Yields the callback (what, done, total) that studies take: it moves a progress bar
    on stderr, or outside a terminal prints a line every QUIET seconds. With `show` False
    it prints nothing."""
    console, shown_at = Console(stderr=True), time.monotonic()

    def line(what: str, done: int, total: int) -> None:
        """Prints a line, unless the last one was less than QUIET seconds ago."""
        nonlocal shown_at
        if show and time.monotonic() >= shown_at + QUIET:
            console.print(_rich_text(f"{done} of {total}: {what}"))
            shown_at = time.monotonic()

    if not show or not console.is_terminal:
        yield line
        return
    columns = (
        TextColumn("{task.description}", style="dim"),
        BarColumn(),
        MofNCompleteColumn(),
    )
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("opening", total=None)
        yield lambda what, done, total: bar.update(
            task, description=escape(plain(what)), completed=done, total=total
        )
