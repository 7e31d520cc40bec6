"""A report of a sweep as a document: its cells in one table, its curves, and what could
not be measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from numdev.errors import MeasurementError
from numdev.report import CellRow, DeviationRow, SweepReport
from numdev.report import document as doc
from numdev.report.document import Cell, Column
from numdev.report.number_text import NONE, label, ratio, shade, si
from numdev.studies.audit.number_colouring import FailedNumbers

CROWDED = 24  # places on an axis from which on curves are behind the table, not below it
FIRST = {"kernel": 0, "control": 1, "baseline": 2, "floor": 3, "precision": 4}
Where = tuple[tuple[str, str], ...]  # a row of the table: names and values on the axes


def blocks(report: SweepReport) -> Iterator[doc.Node]:
    """Yields the blocks of a sweep's report, below its answer: the table of cells, what
    the curves are, the curves, and what was not measured."""
    summary = report.summary
    yield from _cell_blocks(report)
    about = doc.Paragraph(
        "Deviation from the fp64 reference of the same rounded inputs, by "
        f"{summary.axis.title}: means over {len(summary.seeds)} seeds, with 95 % "
        "intervals for "
        "two or more. “floor” is the exact result rounded once: no kernel is better "
        "everywhere. "
        "“input rounding” is what the format costs before any kernel runs.",
        "soft",
        doc.ON_REQUEST,
    )
    yield about
    # A terminal has the table of cells in their place, where there are cells
    only = doc.ON_REQUEST if report.cells else doc.MEDIA
    figures = doc.Figures(report.figures, summary.axis, summary.baseline, only)
    if len(summary.axis.ticks) >= CROWDED and report.cells:
        yield doc.Details("As curves", (figures,))
    else:
        yield figures
    if summary.notes:
        yield doc.Heading("Not measured")
        yield from doc.notes(summary.notes)


@dataclass
class CellTable:
    """The cells of one metric as a table: a row for each place on the axes, a column for
    each kernel in each format."""

    cells: dict[tuple[Where, str, str], CellRow] = field(default_factory=dict)
    """By row, label of the kernel, and format."""
    rows: dict[Where, None] = field(default_factory=dict)
    columns: dict[tuple[str, str], str] = field(default_factory=dict)
    """The role of each (label, format)."""

    def add(self, where: Where, kernel: str, cell: CellRow) -> None:
        """Puts a cell into its row `where` and the column of `kernel` (its name with
        options) and the cell's format; replaces one that is there."""
        self.cells[where, kernel, cell.format] = cell
        self.rows.setdefault(where)
        self.columns.setdefault((kernel, cell.format), cell.role)

    @property
    def ordered(self) -> list[tuple[str, str]]:
        """Returns the columns as (kernel, format), kernel by kernel: those under audit
        first, then what they are compared with. A column without a number is left out,
        unless it is under audit."""
        labels = list(dict.fromkeys(kernel for kernel, _ in self.columns))
        sized = {
            (kernel, fmt)
            for (_, kernel, fmt), cell in self.cells.items()
            if cell.mean is not None or cell.role == "kernel"
        }

        def rank(column: tuple[str, str]) -> tuple[int, int, int]:
            """Returns the sort key of a column: its role, its kernel, its place."""
            at = list(self.columns).index(column)
            return FIRST[self.columns[column]], labels.index(column[0]), at

        return sorted(sized, key=rank)


def _cell_blocks(report: SweepReport) -> Iterator[doc.Node]:
    """Yields the table of the request's first metric; nothing for a report without cells
    of that metric, or whose cells do not fit its request."""
    if not report.cells:
        return
    # It needs pandas, as no other report does
    from numdev.report.sweep_statistics import METRICS
    from numdev.studies.audit.sweep_summary import grid_of

    try:
        grid = grid_of(report)
        lines = grid.lines(report.cells)
    except (MeasurementError, KeyError):
        return
    metric, table = grid.request.y[0], CellTable()
    for (of_metric, place, kernel), cells in lines.items():
        beside = tuple((name, value) for name, value in place if name != "format")
        for value, cell in cells.items():
            # A cell that the axis does not move holds at all its places.
            places = [value] if value is not None else grid.axis_values
            for each in places if of_metric == metric else ():
                table.add(((grid.x, each), *beside), kernel, cell)
    if table.rows:
        name = METRICS[metric][1]
        title = f"{name[0].upper()}{name[1:]}, cell by cell"
        yield _table_node(table, report, title, metric)


def _table_node(
    table: CellTable, report: SweepReport, title: str, metric: str
) -> doc.Table:
    """Returns the table as a node. Ratios to the floor are shaded; a cell is red where a
    rule refuses the call; where the kernel did not run it has the status in words.
    `table`: of at least one cell."""
    failed, columns = FailedNumbers(report), table.ordered
    several = len({fmt for _, fmt in columns}) > 1
    status = _reasons(report)
    heads = [Column(name, "left") for name, _ in next(iter(table.rows))]
    for kernel, fmt in columns:
        heads.append(Column(f"{kernel} {fmt}" if several else kernel))

    def cells(where: Where) -> Iterator[Cell]:
        """Yields the cells of a row, one for each column."""
        yield from (Cell(value) for _, value in where)
        for kernel, fmt in columns:
            cell = table.cells.get((where, kernel, fmt))
            yield Cell(NONE) if cell is None else _cell(cell, metric, failed, status)

    return doc.table(heads, map(cells, table.rows), title=title)


def _cell(
    cell: CellRow,
    metric: str,
    failed: FailedNumbers,
    status: Mapping[tuple[str, str, str], DeviationRow],
) -> Cell:
    """Returns the node of a cell: its mean, with the interval and the rules that refuse
    it as tooltip. Without a mean it is the status of the row in which the kernel did not
    run, with the reason as tooltip; a dash where there is no such row. `status`: as of
    `_reasons`."""
    key = label(cell), cell.format, cell.case
    if cell.mean is None:
        row = status.get(key)
        if row is None:
            return Cell(NONE)
        style: doc.Style = "bad" if row.status == "failed" else "soft"
        return Cell(row.status, style=style, title=row.reason or "")
    ends = "" if cell.low is None else f"{si(cell.low)} to {si(cell.high)} (95 %)"
    rules = failed.rules_of_case(*key)
    about = "; ".join(filter(None, (ends, "fails: " * bool(rules) + ", ".join(rules))))
    style = "bad" if rules else "" if cell.role == "kernel" else "soft"
    if metric.endswith("_ratio"):
        darkness = shade(cell.mean) if metric == "floor_ratio" else None
        return Cell(ratio(cell.mean), darkness, style, about)
    return Cell(si(cell.mean), style=style, title=about)


def _reasons(report: SweepReport) -> dict[tuple[str, str, str], DeviationRow]:
    """Returns a row of each kernel that did not run, by (kernel with its options, format,
    case); of several rows the last."""
    rows = (row for row in report.rows if row.status != "ok")
    return {(label(r), r.format, r.case): r for r in rows}
