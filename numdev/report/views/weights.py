"""Sets of weights compared, shown: all weights together, by kind of parameter, by layer, and the
tensors that moved most beside a cast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numdev.report.document import (
    MEDIA,
    PAGE,
    TERMINAL,
    TEXT,
    Cell,
    Fold,
    Heading,
    Medium,
    Node,
    Table,
    bullets,
    notes,
    table,
    words,
)
from numdev.report.numbers import NONE, si, times
from numdev.training.weights.report import GroupRow, PairSummary, TensorRow, WeightsReport

SHOWN = 8
"""Tensors of a pair in the terminal, 3 where there are several pairs; rows.csv has all."""
ON_PAGE = 500
FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}
LEGEND = (
    "mean and max: of |difference|, element by element; rel: of the L2 norms. W1: between the bags "
    "of values, blind to which stands where; of several tensors the mean of theirs. ×bf16, ×fp16, "
    "×fp8: mean |difference| over what casting the same tensor of the first to bfloat16, float16, "
    f"float8_e4m3fn would have changed; {NONE} where that is nothing."
)


def title(report: WeightsReport) -> str:
    return f"Weights against {report.sources[0].name}"


def line(report: WeightsReport) -> str:
    return (
        f"Tensor by tensor, in fp64 arithmetic on the stored values. {LEGEND} “cast”: that change, "
        "as mean |x − cast x|, which is also its W1."
    )


def blocks(report: WeightsReport) -> Iterator[Node]:
    several = len(report.summary.pairs) > 1
    for pair in report.summary.pairs:
        kinds = [g for g in report.groups if g.of == pair.of and g.group in ("all", "kind")]
        layers = [g for g in report.groups if g.of == pair.of and g.group == "layer"]
        tensors = leading(report, pair)
        most = f"tensor, most ×{FORMATS[pair.yardstick]} first" if pair.yardstick else "tensor"
        heading = f"{pair.of} against {pair.against}"
        yield _table("kind", kinds, title=heading, only=("terminal", "markdown"))
        yield Heading(heading, PAGE)
        yield _table("kind of parameter", kinds, whole=True, only=PAGE)
        if layers:
            yield Fold("By layer", (_table("layer", layers, whole=True),), open=True)
        limited = f": the first {ON_PAGE} of {pair.tensors}, all in rows.csv"
        more = limited if pair.tensors > ON_PAGE else ""
        yield Fold(
            f"By {most}{more}", (_table("tensor", tensors[:ON_PAGE], whole=True),), open=True
        )
        moved = [row for row in tensors if row.equal != 1]
        yield _table(most, moved[: 3 if several else SHOWN], only=TERMINAL)
    yield words(
        ("weights", "tensor", "", ""),
        ((r.source, r.tensor or NONE, r.what, r.words) for r in report.remarks[:ON_PAGE]),
        title="What could not be compared, or needs a word",
        only=TEXT,
    )
    yield from notes((LEGEND, *report.summary.notes), TERMINAL)
    if report.summary.notes:
        yield Heading("Notes", TEXT)
        yield bullets(report.summary.notes, TEXT)
    yield words(
        ("weights", "tensors", "elements", "files", "SHA-256"),
        (
            (s.name, str(s.tensors), str(s.elements), str(len(s.files)), s.sha256)
            for s in report.sources
        ),
        title="The sets",
        only=TEXT,
    )


def leading(report: WeightsReport, pair: PairSummary) -> list[TensorRow]:
    """A pair's tensors, first those that moved most: beside a cast to its yardstick, and where that
    says nothing by their mean difference."""

    def moved(row: TensorRow) -> tuple[float, float]:
        beside = row.times(pair.yardstick) if pair.yardstick else None
        return (-1.0 if beside is None else beside, row.mean_abs or 0.0)

    return sorted((r for r in report.rows if r.of == pair.of), key=moved, reverse=True)


def _table(
    first: str,
    rows: Sequence[GroupRow | TensorRow],
    *,
    whole: bool = False,
    title: str = "",
    only: tuple[Medium, ...] = MEDIA,
) -> Table:
    """Rows of tensors or of groups; `whole` with the columns that only a page has room for."""
    ratios = [f"×{name}" for name in FORMATS.values()]
    names = ["mean", "max", "rel", "W1", *ratios]
    if whole:
        casts = [f"{name} cast" for name in FORMATS.values()]
        names = [
            "mean |Δ|",
            "max |Δ|",
            "rel L2",
            "cosine",
            "W1",
            "equal",
            *ratios,
            *casts,
            "NaN/inf",
        ]
    cells = ([_name(row), *map(Cell, _numbers(row, whole))] for row in rows)
    return table([first, *names], cells, title=title, only=only)


def _name(row: GroupRow | TensorRow) -> Cell:
    if isinstance(row, GroupRow):
        return Cell(
            row.name, style="strong" if row.group == "all" else "", after=f"({row.tensors})"
        )
    shape = " × ".join(map(str, row.shape))
    stored = " / ".join(dict.fromkeys((row.stored_of, row.stored_against)))
    return Cell(row.tensor, after=f"{shape} {stored}")


def _numbers(row: GroupRow | TensorRow, whole: bool) -> list[str]:
    w1 = si(row.mean_w1 if isinstance(row, GroupRow) else row.w1)
    sizes = [si(x) for x in (row.mean_abs, row.max_abs, row.rel)]
    ratios = [times(row.times(name)) for name in FORMATS]
    if not whole:
        return [*sizes, w1, *ratios]
    cosine = NONE if row.cosine is None else f"{row.cosine:.6g}"
    equal = NONE if row.equal is None else f"{100 * row.equal:.1f} %"
    casts = [si(getattr(row, f"{name}_mean_abs")) for name in FORMATS]
    lost = str(row.nonfinite_of + row.nonfinite_against or "")
    return [*sizes, cosine, w1, equal, *ratios, *casts, lost]
