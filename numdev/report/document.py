"""A document: what a view makes of a report, and what the terminal, HTML and Markdown
print.

Nodes are data. All text in them may be foreign (names of kernels, layers, files):
renderers make it harmless. A node that only some media show says so in `only`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from operator import attrgetter
from statistics import median
from typing import Literal, TypeVar

from numdev.grouping import grouped
from numdev.report import Axis, Curve, Figure, Point, Role
from numdev.report.number_text import ratio, shade, si
from numdev.report.safe_text import plain

Medium = Literal["terminal", "verbose", "html", "markdown"]
Style = Literal["", "strong", "soft", "good", "warn", "bad"]
TableKind = Literal["numbers", "words", "map", "series", "grid"]
MEDIA: tuple[Medium, ...] = ("terminal", "html", "markdown")
PAGE: tuple[Medium, ...] = ("html",)
TEXT: tuple[Medium, ...] = ("html", "markdown")
TERMINAL: tuple[Medium, ...] = ("terminal",)
ON_REQUEST: tuple[Medium, ...] = ("verbose", "html", "markdown")
"""Media of what a terminal shows with -v alone: what columns mean, and tables that few
need."""


@dataclass(frozen=True)
class Cell:
    """What stands in a table. `shade` 0 to 4 is its darkness on a heat map, `title` a
    tooltip."""

    text: str
    shade: int | None = None
    style: Style = ""
    title: str = ""
    after: str = ""  # soft text behind it
    heat: int | None = None  # 0 to 100: its colour on a map of a page
    id: str = ""  # what a finding links to


class _Titled:
    """What has a title. It is shown before all else and often laid out in lines, so that
    foreign text in it is made harmless here, and not by each renderer."""

    def __post_init__(self) -> None:
        """Replaces the control characters of `title` and `text`, whichever there are."""
        for name in ("title", "text"):
            if hasattr(self, name):
                object.__setattr__(self, name, plain(getattr(self, name)))


@dataclass(frozen=True)
class Column(_Titled):
    title: str
    align: Literal["left", "right"] = "right"
    width: int = 0  # columns that a terminal needs to have for this one to be shown


@dataclass(frozen=True)
class Row:
    cells: tuple[Cell, ...]
    # Only there for comparison (the floor, the baseline), and shown softly
    standard: bool = False
    # A heading of the rows below it: its first cell spans the table, the others are empty
    heading: bool = False


@dataclass(frozen=True)
class Heading(_Titled):
    text: str
    only: tuple[Medium, ...] = MEDIA


@dataclass(frozen=True)
class Paragraph:
    text: str
    style: Style = ""
    only: tuple[Medium, ...] = MEDIA


@dataclass(frozen=True)
class Item:
    """A line of a list; `lead` is what it is about, `detail` stands below it."""

    text: str
    _: KW_ONLY
    lead: str = ""
    detail: str = ""
    style: Style = ""
    script: tuple[str, str] | None = None  # path and text of the reproducer of a finding
    link: str = ""  # the id of a cell


@dataclass(frozen=True)
class Bullets:
    items: tuple[Item, ...]
    kind: Literal["verdicts", "answer", "findings", "plain"] = "plain"
    only: tuple[Medium, ...] = MEDIA


@dataclass(frozen=True)
class Table(_Titled):
    """The first cell of a row is its header. A `map` is a heat map in short numbers; a
    `grid` has cells coloured by their style; of a `series` a terminal shows as many
    columns as fit, evenly, of the others all."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    title: str = ""
    kind: TableKind = "numbers"
    only: tuple[Medium, ...] = MEDIA


@dataclass(frozen=True)
class Figures:
    """Figures along one axis, several of one metric as small panels; a table each where
    nothing can be drawn. Those of one metric share their range, and a kernel looks the
    same in all."""

    figures: tuple[Figure, ...]
    axis: Axis
    baseline: str = "baseline"
    only: tuple[Medium, ...] = MEDIA


@dataclass(frozen=True)
class TableChoice:
    """Tables of which a page shows the one that is chosen, by its title; other media the
    first."""

    tables: tuple[Table, ...]
    only: tuple[Medium, ...] = MEDIA


@dataclass(frozen=True)
class StackedBars:
    """Wholes as bars of their parts, one below the other, with one legend. A page alone
    shows them; a table beside them has the numbers."""

    bars: tuple[tuple[str, Mapping[str, float]], ...]
    """For each bar its label, and by name the shares of its parts (1: the whole)."""
    title: str
    only: tuple[Medium, ...] = PAGE

    @property
    def names(self) -> list[str]:
        """Returns the names of all parts, each once, sorted by a part's largest share in
        any bar, the largest first."""
        largest: dict[str, float] = {}
        for _, parts in self.bars:
            for name, share in parts.items():
                largest[name] = max(share, largest.get(name, 0.0))
        return sorted(largest, key=lambda name: -largest[name])

    @property
    def longest(self) -> float:
        """Returns which share the longest bar, as wide as the page, stands for: the
        largest sum of a bar's parts, 1 at least and where there is no bar."""
        return max([1.0, *(sum(parts.values()) for _, parts in self.bars)])


@dataclass(frozen=True)
class Details(_Titled):
    """What a page shows when a reader opens it by its title; other media show the blocks
    as if they stood in the document themselves."""

    title: str
    blocks: tuple[Node, ...]
    only: tuple[Medium, ...] = MEDIA


Node = (
    Heading | Paragraph | Bullets | Table | Figures | TableChoice | StackedBars | Details
)


@dataclass(frozen=True)
class Document(_Titled):
    """A title and the nodes below it, in the order in which they are shown."""

    title: str
    blocks: tuple[Node, ...] = ()

    def shown_in(self, medium: Medium) -> Iterator[Node]:
        """Yields the nodes that a medium shows; `verbose` is a terminal that shows all it
        can. Figures, a choice of tables and details are nodes of a page alone: elsewhere
        they become tables, the first table, and what is in them. Tables without a row and
        lists without an item are left out, but not the tables of figures or of a
        choice."""
        yield from _shown_in(self.blocks, medium)


PARTS = {
    Table: "rows",
    Bullets: "items",
    Figures: "figures",
    TableChoice: "tables",
    StackedBars: "bars",
    Details: "blocks",
}
"""What a node is empty without, by its class; others are never empty."""


def _shown_in(nodes: Iterable[Node], medium: Medium) -> Iterator[Node]:
    """Yields those of the nodes that a medium shows, without empty ones. Outside of html
    the content of a `Details` stands by itself, figures become tables, and of a choice of
    tables the first is taken, even an empty one."""
    media = {medium, "terminal"} if medium == "verbose" else {medium}
    for node in nodes:
        is_empty = not getattr(node, PARTS.get(type(node), "only"))
        if is_empty or not media & set(node.only):
            continue
        if isinstance(node, Details):
            inside = tuple(_shown_in(node.blocks, medium))
            if medium != "html":
                yield from inside
            elif inside:
                yield replace(node, blocks=inside)
        elif medium != "html" and isinstance(node, Figures):
            yield from tables_of(node)
        elif medium != "html" and isinstance(node, TableChoice):
            yield from node.tables[:1]
        else:
            yield node


def item_with_lead(sentence: str) -> Item:
    """Returns a sentence as an item: all up to the first `: `, with the colon, is its
    lead, and what follows its text. Without one, all is lead and the text is empty."""
    lead, colon, text = sentence.partition(": ")
    return Item(text, lead=lead + colon.strip())


def notes(
    sentences: Iterable[str], only: tuple[Medium, ...] = MEDIA
) -> tuple[Paragraph, ...]:
    """Returns a paragraph in the style `soft` for each sentence that is not empty, shown
    in the media `only`."""
    return tuple(Paragraph(sentence, "soft", only) for sentence in sentences if sentence)


def table(
    columns: Sequence[str | Column],
    rows: Iterable[Iterable[str | Cell]],
    standard: Sequence[bool] = (),
    *,
    title: str = "",
    kind: TableKind = "numbers",
    only: tuple[Medium, ...] = MEDIA,
) -> Table:
    """Returns a table of text and cells. A column that is only named is aligned left
    where it is the first of the table, else right. `standard`: for each row, in order,
    whether it is only there for comparison; empty: none is. Raises ValueError where it is
    neither empty nor as long as the rows."""
    heads = tuple(
        Column(c, align="right" if i else "left") if isinstance(c, str) else c
        for i, c in enumerate(columns)
    )
    cells = [tuple(c if isinstance(c, Cell) else Cell(c) for c in row) for row in rows]
    is_standard = standard or [False] * len(cells)
    lines = tuple(Row(*each) for each in zip(cells, is_standard, strict=True))
    return Table(heads, lines, title=title, kind=kind, only=only)


def text_table(
    columns: Sequence[str],
    rows: Iterable[Iterable[str | Cell]],
    *,
    title: str = "",
    only: tuple[Medium, ...] = MEDIA,
) -> Table:
    """Returns a table whose columns are text, aligned left, shown in the media `only`.
    `columns`: their titles."""
    heads = [Column(name, align="left") for name in columns]
    return table(heads, rows, title=title, kind="words", only=only)


def heat_map(
    title: str,
    heads: Sequence[int | None],
    layers: Mapping[str, Sequence[Cell]],
    *,
    only: tuple[Medium, ...] = MEDIA,
) -> Table:
    """Returns a table of one number for each layer (down) and head (across), in a few
    characters. `layers`: by a layer's name its cells, one for each of `heads`. The head
    None stands for the whole layer, and its column is called `all`."""
    names = ("all" if head is None else str(head) for head in heads)
    rows = ([Cell(name, style="soft"), *cells] for name, cells in layers.items())
    return table(["layer", *names], rows, title=title, kind="map", only=only)


def cell_id(kernel: str, fmt: str, tensor: str, layer: str, head: int | None) -> str:
    """Returns the id of a head's cell on a map of a page, as
    `flex-bfloat16-out-layer-3-7`; the head is `None` for a whole layer. Each run of
    characters other than letters, digits, `_`, `.` and `-` becomes one `-`."""
    return re.sub(r"[^\w.-]+", "-", f"{kernel}-{fmt}-{tensor}-{layer}-{head}")


def floor_cell(value: float | None, title: str = "") -> Cell:
    """Returns a cell with a multiple of the floor, shaded by its size; a dash for
    None."""
    return Cell(ratio(value), shade=shade(value), title=title)


X = TypeVar("X", int, float, float | None)


def curve(
    label: str, role: Role, numbers: Mapping[tuple[X, str], Sequence[float]]
) -> Iterator[Curve]:
    """Yields one curve of the medians at each place, or nothing where none is other than
    0, which a logarithmic axis does not have. `numbers`: by (x, name of the place) the
    values there; a place without one, or of median 0, has no point."""
    points = tuple(
        Point(x=x, label=name, mean=median(values), low=None, high=None)
        for (x, name), values in numbers.items()
        if values and median(values)
    )
    if points:
        yield Curve(label=label, role=role, points=points)


def tables_of(of: Figures) -> Iterator[Table]:
    """Yields figures as numbers, those of one metric and title of its axis in one table:
    a row for each curve, a column for each tick of the axis. A curve that the axis does
    not move has the same number in each. Ratios are written as `ratio` writes them, a
    loss with three decimals, others as `si` does."""

    def cell(figure: Figure, curve: Curve, x: float) -> str:
        """Returns a curve's number at x with its note; a dash where it has no point
        there."""
        point = next((p for p in curve.points if p.x in (None, x)), None)
        value = None if point is None else point.mean
        note = f" ({point.note})" if point is not None and point.note else ""
        if figure.metric == "loss" and value is not None:
            return f"{value:.3f}{note}"
        return (ratio(value) if figure.relative else si(value)) + note

    columns = [of.axis.title, *(tick.label for tick in of.axis.ticks)]
    for (_, what), figures in grouped(
        of.figures, attrgetter("metric", "y_title")
    ).items():
        rows, standard, several = [], [], len(figures) > 1
        for figure in figures:
            where = (
                f"{', '.join(figure.place.values()) or figure.title}: " if several else ""
            )
            for curve in figure.curves:
                values = (cell(figure, curve, tick.x) for tick in of.axis.ticks)
                rows.append([where + curve.label, *values])
                standard.append(curve.role != "kernel")
        title = f"{what}, by {of.axis.title}" if several else figures[0].title
        yield table(columns, rows, standard, title=title, kind="series")
