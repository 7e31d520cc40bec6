"""A document in the terminal, with rich, and the progress of a study.

Results go to stdout, progress to stderr. Colour carries nothing that the text does not
say. Names and messages are foreign text: they go through `_rich_text`, never through
rich's markup. No line is wider than the terminal, or than PIPE in a file or a pipe, and
none ends with blanks. There progress is a line now and then."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich import box
from rich import table as rich_table
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.segment import Segment, Segments
from rich.table import Column
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
PIPE = 120  # characters of a line in a file or a pipe, where $COLUMNS says no other
WORD = re.compile(r"\S+(?: %)?")  # a number stays beside its sign
WIDE_BAR = 100  # characters of a line from which a bar takes what is left of it
FIRST = 5.0  # seconds from the line that a command begins with to the next
MORE = "What the columns mean, and more tables: -v"
INDENT = 4  # characters before what stands below a line
QUIET = 20.0  # seconds between two lines of progress


def show(
    report: Report | doc.Document,
    console: Console | None = None,
    *,
    verbose: bool = False,
) -> None:
    """Prints what a report or a document has for the terminal, to `console` or else
    (None) to stdout. On stdout lines have PIPE characters where it is no terminal and
    COLUMNS is not set. `verbose`: with what columns mean, and tables that few need; else
    a last line says where these are, if there are any."""
    out = console or Console()
    if not console and not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = PIPE
    document = document_of(report)
    shown = list(document.shown_in("verbose" if verbose else "terminal"))
    for i, node in enumerate(shown):
        match node:
            case doc.Heading():
                out.print()
                _print(_rich_text(node.text, "bold"), out)
            case doc.Paragraph():
                if i == 0:
                    out.print()
                _print(_rich_text(node.text, STYLES[node.style]), out)
            case doc.Bullets():
                indent = 2 if node.kind == "plain" else 0
                if not indent:
                    out.print()
                for item in node.items:
                    style = STYLES[item.style]
                    lead = style or ("bold cyan" if node.kind == "answer" else "bold")
                    gap = " " if item.lead and item.text else ""
                    line = _rich_text(item.lead, lead).append_text(
                        _rich_text(gap + item.text, style)
                    )
                    _print(Padding(line, (0, 0, 0, indent), expand=False), out)
                    if item.detail:
                        detail = _rich_text(item.detail, STYLES["soft"])
                        _print(Padding(detail, (0, 0, 0, INDENT), expand=False), out)
            case doc.Table():
                _print_table(node, out)
    if len(shown) < sum(1 for _ in document.shown_in("verbose")):
        _print(_rich_text(MORE, "dim"), out)


def _print(content: RenderableType, out: Console) -> None:
    """Prints text or a table without blanks at the ends of its lines, which a copy or a
    file would keep."""
    for line in out.render_lines(content, pad=False):
        while line and not line[-1].text.rstrip():
            line.pop()
        if line:
            line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
        out.print(Segments([*line, Segment.line()]), soft_wrap=True)


def _print_table(node: doc.Table, out: Console) -> None:
    """Prints a table under its title, in as many blocks of columns as the width asks for.
    A column whose `width` is more than the terminal's is left out, and of a series so are
    some in the middle where not all fit."""
    out.print()
    if node.title:
        _print(_rich_text(node.title, "bold"), out)
    chosen = [i for i, column in enumerate(node.columns) if column.width <= out.width]
    if node.kind == "series":
        longest = max((len(row.cells[0].text) for row in node.rows), default=0)
        room = out.width - 2 - min(longest, max(16, out.width // 3))
        chosen = [0, *evenly_spread(chosen[1:], max(2, room // NUMBER))]
    for columns, gap in _blocks(node, chosen, out.width):
        _print(_rich_table(node, columns, gap), out)


def evenly_spread(places: Sequence[int], fitting: int) -> list[int]:
    """Returns at most `fitting` (2 or more) of the places, evenly spread, the first and
    the last among them."""
    if len(places) <= fitting:
        return list(places)
    chosen = {round(i * (len(places) - 1) / (fitting - 1)) for i in range(fitting)}
    return [places[i] for i in sorted(chosen)]


@dataclass(frozen=True)
class _Fitted:
    """A column of a block: its index in the table, and its characters of a line."""

    at: int
    width: int


def _blocks(
    node: doc.Table, chosen: Sequence[int], total: int
) -> Iterator[tuple[list[_Fitted], int]]:
    """Yields the columns `chosen` (indices, at least one) of a table in blocks that fit a
    line of `total` characters, with the blanks between two columns. Numbers and names
    stay on one line where all columns fit so. Else words are whole, and lines broken
    between them. Where that is too wide, the first column stands before each part of the
    others."""
    gap = 1 if node.kind == "map" or len(chosen) > 9 else 2
    least, whole = [], []
    for at in chosen:
        lines = [_title(node, at).plain, *(_words(row.cells[at]) for row in node.rows)]
        longest = max(cell_len(part) for line in lines for part in line.split("\n"))
        words = (word for line in lines for word in WORD.findall(line))
        word = max(map(cell_len, words), default=0)
        short = MAP - 1 if node.kind == "map" and at else 1
        whole.append(max(short, longest))
        least.append(max(short, min(word, total // 3)))
    unbroken = [
        full if at == 0 or node.columns[at].align == "right" else word
        for at, word, full in zip(chosen, least, whole, strict=True)
    ]
    room = total - gap * (len(chosen) - 1)
    if node.kind != "words" and sum(unbroken) <= room:
        least = unbroken
    part: list[int] = []
    for place in range(1, len(chosen)):
        used = least[0] + sum(gap + least[i] for i in (*part, place))
        if part and used > total:
            yield _fitted(chosen, least, whole, [0, *part], total, gap)
            part = []
        part.append(place)
    yield _fitted(chosen, least, whole, [0, *part], total, gap)


def _fitted(
    chosen: Sequence[int],
    least: Sequence[int],
    whole: Sequence[int],
    part: Sequence[int],
    total: int,
    gap: int,
) -> tuple[list[_Fitted], int]:
    """Returns the columns of one block (`part`: places in the other sequences), each of
    at least `least` characters and of `whole` where there is room, fewer where even
    `least` does not fit; and the gap."""
    room = total - gap * (len(part) - 1)
    widths = shared_widths([least[i] for i in part], [whole[i] for i in part], room)
    columns = zip(part, widths, strict=True)
    return [_Fitted(chosen[i], width) for i, width in columns], gap


def shared_widths(least: Sequence[int], whole: Sequence[int], room: int) -> list[int]:
    """Returns a width for each column, at least one: what it asks for (`whole`) up to a
    common bound, the largest whole number under which they take no more than `room`
    together, and never less than `least`. Where even these are more than `room`, the
    widest give way, down to 1 each."""
    bound = 0
    while bound < max(whole) and room >= sum(
        max(low, min(full, bound + 1)) for low, full in zip(least, whole, strict=True)
    ):
        bound += 1
    widths = [max(low, min(full, bound)) for low, full in zip(least, whole, strict=True)]
    while sum(widths) > room and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    return widths


def _title(node: doc.Table, at: int) -> Text:
    """Returns the title of a column; above numbers one of several words has two lines."""
    title = node.columns[at].title
    lines = title.rsplit(" ", 1) if node.kind == "numbers" else [title]
    return Text("\n").join(_rich_text(line) for line in lines)


def _words(cell: doc.Cell) -> str:
    """Returns all text of a cell, as it is printed."""
    return plain(cell.text) + (f" {plain(cell.after)}" if cell.after else "")


def _rich_table(
    node: doc.Table, columns: Sequence[_Fitted], gap: int
) -> rich_table.Table:
    """Returns a block of a table's columns, laid out by rich. `gap`: blanks between two
    columns."""
    mapped = node.kind == "map"
    grid = rich_table.Table(
        box=None if mapped else box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1) if mapped else (0, gap - 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for i, column in enumerate(columns):
        grid.add_column(
            _title(node, column.at),
            overflow="fold",
            justify=node.columns[column.at].align if i else "left",
            width=column.width,
        )
    for row in node.rows:
        line = []
        for column in columns:
            cell = row.cells[column.at]
            style = STYLES[cell.style] or (
                "dim" if row.standard else "bold" if column.at == 0 else ""
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


@dataclass
class _Pace:
    """How fast a study gets on, since the first task that was reported of a total."""

    begun: tuple[float, int, int] = (0.0, 0, 0)  # time, tasks done by then, of how many

    def left(self, done: int, total: int, now: float) -> str:
        """Returns about how much time is left at that pace, as `, about 1:40 left`. Empty
        at the first task of a `total` and where `done` falls, which begin the pace anew,
        and where all are done. `now`: seconds of any clock."""
        then, before, of = self.begun
        if of != total or done < before:
            self.begun = now, done, total
            then, before = now, done
        if done <= before or done >= total:
            return ""
        seconds = (now - then) / (done - before) * (total - done)
        return f", about {_clock(seconds)} left"


def _clock(seconds: float) -> str:
    """Returns seconds, cut to whole ones, as 0:07, 12:34 or 1:02:03."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


@contextmanager
def progress(*, show: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Yields the callback (what, done, total) that studies take. In a terminal it moves a
    progress bar on stderr. Elsewhere a call prints a line at the earliest after FIRST
    seconds, then QUIET seconds after the last, with the time elapsed and about how much
    is left. With `show` False it prints nothing."""
    console, pace, started = Console(stderr=True), _Pace(), time.monotonic()
    due = started + FIRST

    def line(what: str, done: int, total: int) -> None:
        """Prints a line, if it is to be shown and the time for the next one has come."""
        nonlocal due
        now = time.monotonic()
        left = pace.left(done, total, now)
        if show and now >= due:
            elapsed = f"{_clock(now - started)} elapsed{left}"
            _print(_rich_text(f"{done} of {total}, {elapsed}: {what}"), console)
            due = now + QUIET

    if not show or not console.is_terminal:
        if "COLUMNS" not in os.environ:
            console.width = PIPE
        yield line
        return
    short = Column(no_wrap=True, overflow="ellipsis", max_width=max(12, WIDE_BAR // 3))
    columns = (
        TextColumn("{task.description}", style="dim", table_column=short),
        BarColumn(None if console.width >= WIDE_BAR else 10),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("opening", total=None, left="")

        def move(what: str, done: int, total: int) -> None:
            """Moves the bar."""
            left = pace.left(done, total, time.monotonic()).removeprefix(", ")
            words = escape(plain(what))
            bar.update(task, description=words, completed=done, total=total, left=left)

        yield move
