"""Sets of weights compared, shown: all weights together, by kind of parameter, by layer, and the
tensors that moved most beside a cast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from numdev.report import document as doc
from numdev.report.document import TERMINAL, TEXT, Cell, Column
from numdev.report.numbers import NONE, si, times
from numdev.training.weights.report import GroupRow, TensorRow, WeightsReport

SHOWN = 8
"""Tensors of a pair in the terminal; rows.csv has all."""
ON_PAGE = 500
FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}
LEGEND = (
    "mean and max: of |difference|, element by element; rel: of the L2 norms. W1: between the bags "
    "of values, blind to which stands where; of several tensors the mean of theirs. ×bf16, ×fp16, "
    "×fp8: mean |difference| over what casting the same tensor of the first to bfloat16, float16, "
    f"float8_e4m3fn would have changed; {NONE} where that is nothing."
)


def blocks(report: WeightsReport) -> Iterator[doc.Node]:
    for pair in report.totals:
        groups = [g for g in report.groups if g.of == pair.of]
        kinds, layers = ([g for g in groups if (g.group == "layer") == x] for x in (False, True))
        tensors = leading(report, pair)
        first = f"tensor, most ×{FORMATS[pair.yardstick]} first" if pair.yardstick else "tensor"
        yield _table("kind of parameter", kinds, title=f"{pair.of} against {pair.against}")
        for name, rows in (("layer", layers), (first, tensors[:ON_PAGE])):
            if rows:
                yield doc.Fold(f"By {name}", (_table(name, rows),), open=True)
        moved = [row for row in tensors if row.equal != 1]
        yield _table(first, moved[:SHOWN], only=TERMINAL)
    yield doc.words(
        ("weights", "tensor", "", ""),
        ((r.source, r.tensor or NONE, r.what, r.words) for r in report.remarks[:ON_PAGE]),
        title="What could not be compared, or needs a word",
        only=TEXT,
    )
    yield from doc.notes((LEGEND,))
    yield from doc.notes(report.summary.notes, TERMINAL)
    yield doc.words(
        ("weights", "tensors", "elements", "files", "taken off all names", "SHA-256"),
        (
            (s.name, str(s.tensors), str(s.elements), str(len(s.files)), s.prefix_removed or NONE,
             s.sha256)
            for s in report.sources
        ),
        title="The sets",
        only=TEXT,
    )  # fmt: skip


def leading(report: WeightsReport, pair: GroupRow) -> list[TensorRow]:
    """A pair's tensors, first those that moved most: beside a cast to its yardstick, and where that
    says nothing by their mean difference."""

    def moved(row: TensorRow) -> tuple[float, float]:
        beside = row.times(pair.yardstick) if pair.yardstick else None
        return (-1.0 if beside is None else beside, row.mean_abs or 0.0)

    return sorted((r for r in report.rows if r.of == pair.of), key=moved, reverse=True)


def _table(first: str, rows: Sequence[GroupRow | TensorRow], **more: Any) -> doc.Table:
    """Rows of tensors or of groups; a narrow terminal has room for the first columns alone."""
    names = ["mean", "max", "rel", "W1", *(f"×{name}" for name in FORMATS.values())]
    beside = ["cosine", "equal", *(f"{name} cast" for name in FORMATS.values()), "NaN/inf"]
    columns = [Column(first, align="left"), *map(Column, names)]
    columns += [Column(name, width=140) for name in beside]
    return doc.table(columns, ([_name(row), *_numbers(row)] for row in rows), **more)


def _name(row: GroupRow | TensorRow) -> Cell:
    if isinstance(row, GroupRow):
        style: doc.Style = "strong" if row.group == "all" else ""
        return Cell(row.name, style=style, after=f"({row.tensors})")
    shape = " × ".join(map(str, row.shape))
    stored = " / ".join(dict.fromkeys((row.stored_of, row.stored_against)))
    return Cell(row.tensor, after=f"{shape} {stored}")


def _numbers(row: GroupRow | TensorRow) -> list[str]:
    w1 = si(row.mean_w1 if isinstance(row, GroupRow) else row.w1)
    return [
        *(si(x) for x in (row.mean_abs, row.max_abs, row.rel)),
        w1,
        *(times(row.times(name)) for name in FORMATS),
        NONE if row.cosine is None else f"{row.cosine:.6g}",
        NONE if row.equal is None else f"{100 * row.equal:.1f} %",
        *(si(getattr(row, f"{name}_mean_abs")) for name in FORMATS),
        str(row.nonfinite_of + row.nonfinite_against or ""),
    ]
