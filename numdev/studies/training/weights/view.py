"""Shows sets of weights compared: by kind of parameter, and what moved most beside a
cast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import starmap

from numdev.grouping import grouped
from numdev.report import document as doc
from numdev.report.document import TEXT, Cell, Column
from numdev.report.number_text import NONE, ratio, si
from numdev.studies.training.weights import view_over_steps
from numdev.studies.training.weights.report import ALL, GroupRow, TensorRow, WeightsReport

SHOWN = 8  # tensors of a pair; rows.csv has all
ON_PAGE = 500
FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}
LEGEND = (
    "mean and max: of |difference|, element by element; rel: of the L2 norms. W1: "
    "between the bags of a tensor's values, blind to which stands where; mean W1: of "
    "several tensors, the mean of theirs by elements, never below W1 of all their values "
    "pooled. ×bf16, ×fp16, ×fp8: mean |difference| over what casting the same tensor of "
    f"the first to bfloat16, float16, float8_e4m3fn would have changed; {NONE} where "
    "that is nothing."
)


def blocks(report: WeightsReport) -> Iterator[doc.Node]:
    """Yields what is shown below the answer: for runs over steps their tables, else for
    each set a table of kinds and one of the SHOWN tensors that moved most; then the first
    ON_PAGE remarks, and a legend."""
    if report.runs:
        yield from view_over_steps.blocks(report)
    by_set = grouped(report.groups, lambda g: g.of)
    for pair in report.totals:
        groups = [(Cell(g.name, after=_count(g)), g) for g in by_set[pair.of]]
        yield _numbers_table("kind", groups, f"{pair.of} against {pair.against}")
        first = "tensor"
        if pair.yardstick:
            first += f", most ×{FORMATS[pair.yardstick]} first"
        moved = [
            (_tensor_cell(row), row)
            for row in most_moved_first(report, pair)
            if row.max_abs != 0
        ]
        yield _numbers_table(first, moved[:SHOWN], "")
    yield doc.text_table(
        ("weights", "tensor", "", ""),
        ((r.source, r.tensor or NONE, r.what, r.words) for r in report.remarks[:ON_PAGE]),
        title="What could not be compared, or needs a word",
        only=TEXT,
    )
    if report.groups:
        yield from doc.notes((LEGEND,))


def _count(group: GroupRow) -> str:
    """Returns how many tensors a group has: `(12)`, or `(148 tensors)` for the group of
    all."""
    return f"({group.tensors}{' tensors' * (group.name == ALL)})"


def most_moved_first(report: WeightsReport, pair: GroupRow) -> list[TensorRow]:
    """Returns the tensors of a set that a row of all its tensors (`pair`) is about, those
    that moved most first. The order is by their multiple of a cast to the row's
    yardstick. Tensors without that number come last, by their mean difference."""

    def moved(row: TensorRow) -> tuple[float, float]:
        """Returns the sort key of a tensor: its multiple of the cast, or -1, and its mean
        difference, or 0."""
        beside = row.multiple_of_cast(pair.yardstick) if pair.yardstick else None
        return (-1.0 if beside is None else beside, row.mean_abs or 0.0)

    return sorted((r for r in report.rows if r.of == pair.of), key=moved, reverse=True)


def _tensor_cell(row: TensorRow) -> Cell:
    """Returns a tensor's name as a cell, with its shape and stored formats behind it:
    `768 × 3072 bfloat16 / float32`, one format where both sets have the same."""
    stored = " / ".join(dict.fromkeys((row.stored_of, row.stored_against)))
    return Cell(row.tensor, after=f"{' × '.join(map(str, row.shape))} {stored}")


def _w1(row: GroupRow | TensorRow) -> float | None:
    """Returns W1 of a tensor's row, or the mean W1 of a group's; None where that is
    unknown."""
    return row.mean_w1 if isinstance(row, GroupRow) else row.w1


def _numbers_table(
    first: str, rows: Sequence[tuple[Cell, GroupRow | TensorRow]], title: str
) -> doc.Table:
    """Returns the table of the numbers of tensors or kinds, one in a row. `first`: the
    title of the first column. A narrow terminal shows the first of the casts alone."""
    casts = [f"×{name}" for name in FORMATS.values()]
    w1 = "mean W1" if first == "kind" else "W1"
    columns = [
        Column(first, align="left"),
        *map(Column, ("mean", "max", "rel", w1, casts[0])),
    ]
    columns += [Column(name, width=110) for name in (*casts[1:], "NaN/inf")]

    def cells(name: Cell, row: GroupRow | TensorRow) -> Iterator[str | Cell]:
        """Yields the cells of a row, one for each column."""
        yield name
        yield from map(si, (row.mean_abs, row.max_abs, row.rel, _w1(row)))
        yield from (ratio(row.multiple_of_cast(fmt)) for fmt in FORMATS)
        yield str(row.nonfinite_of + row.nonfinite_against or "")

    return doc.table(columns, starmap(cells, rows), title=title)
