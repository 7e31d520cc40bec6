"""Shows a report of invariance: axes by kernels, what differs where and why, and the
model's own output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from numdev.grouping import grouped
from numdev.report import document as doc
from numdev.report.number_text import NONE, label, ratio, si, three
from numdev.request_models import AXES
from numdev.studies.invariance.answers import (
    GROUPS,
    Answer,
    AxisAnswer,
    AxisGroup,
    largest_change,
    untried_part_clause,
)
from numdev.studies.invariance.report import InvarianceReport, InvarianceRow, ModelRow
from numdev.studies.invariance.verdict import axis_answers, other_form_in_words
from numdev.tensor_properties import TENSORS

SAME = "same"
LEGEND = (
    "same: bit-identical in all calls and variants, or in those that it says were made. "
    "Otherwise the largest rms difference over the floor's error (of the exact result, "
    "rounded once), and in how many variants there is one. Red: beyond a limit. Limits "
    "are on the difference over what roundings explain, which is more where a kernel "
    "errs more. A dash: not tried, or no such tensor."
)
GRID_LEGEND = (
    "Green: the same bits in all calls and variants that were tried. Grey: others, by "
    "no more than rounding explains; the number is the largest rms difference over the "
    "floor's error (of the exact result, rounded once), beside it in how many variants "
    "there is a difference. Red: beyond a limit. A dash: not tried. All tensors "
    "together."
)
OUTPUT_LEGEND = (
    "The model's output is of all its layers and positions; of its calls some alone were "
    "tried above. One bit that attention changes anywhere changes most bits behind it. "
    "change / explained is judged: the change over the model's own rounding error. "
    "attention's share: what of the change is gone where attention is exact."
)
NOT_ON_PAGE: tuple[doc.Medium, ...] = ("terminal", "markdown")
SHOWN = 24  # rows of the table of differences in a terminal; rows.csv has all


def blocks(report: InvarianceReport) -> Iterator[doc.Node]:
    """Yields what is shown below the verdicts. On a page it is one grid of axes by
    kernels, with tables of tensors and differences to unfold. In a terminal and in
    Markdown it is a table for each format and group of axes, and (in the terminal only if
    verbose, SHOWN rows) the differences. Then the model's own output, and what did not
    run."""
    every = axis_answers(report)
    answers = {(a.kernel, a.format, a.axis): a.answer for a in every}
    yield _grid(every)
    yield from doc.notes((GRID_LEGEND,), doc.PAGE)
    tables = list(_group_tables(report.rows, answers))
    yield from (replace(table, only=NOT_ON_PAGE) for table in tables)
    yield from doc.notes((LEGEND,), ("verbose", "markdown"))
    moved = list(_difference_rows(report.rows))
    differences = _difference_table(moved, len(moved), only=("markdown",))
    yield _difference_table(moved[:SHOWN], len(moved), only=("verbose",))
    yield differences
    if moved:
        inside: tuple[doc.Node, ...] = (replace(differences, only=doc.PAGE), *tables)
        inside += doc.notes((LEGEND,))
        title = f"What differs, and why ({len(moved)})"
        yield doc.Details(title, inside, doc.PAGE)
    yield _output_table(report.models)
    if any(row.difference for row in report.models):
        yield doc.Paragraph(OUTPUT_LEGEND, "soft")
    lacking = (r for r in report.rows if r.status != "ok")
    reasons = grouped(lacking, lambda r: (label(r), r.axis, r.reason)).items()
    lines = (
        (kernel, axis, f"{len(rows)}: {why}") for (kernel, axis, why), rows in reasons
    )
    lacks = doc.text_table(
        ("kernel", "axis", "not run"), lines, title="Not run", only=doc.TEXT
    )
    yield doc.Details(f"Not run ({len(reasons)})", (lacks,) if reasons else (), doc.TEXT)


def _grid(answers: Sequence[AxisAnswer]) -> doc.Table:
    """Returns the grid of a page: a row for each axis under the question that its group
    asks, a column for each kernel in each format. Green: bit-identical; grey: differs as
    rounding does; red: beyond a limit."""
    columns = dict.fromkeys((a.kernel, a.format) for a in answers)
    several = len({fmt for _, fmt in columns}) > 1
    by_place = {(a.kernel, a.format, a.axis): a for a in answers}
    present = {a.axis for a in answers}
    rows = []
    for group in GROUPS:
        axes = [axis for axis in group.axes if axis in present]
        if axes:
            name = doc.Cell(group.title, after=group.sentence)
            empty = [doc.Cell("")] * len(columns)
            rows.append(doc.Row((name, *empty), heading=True))
        for axis in axes:
            cells = [_answer_cell(by_place.get((*column, axis))) for column in columns]
            rows.append(doc.Row((doc.Cell(axis, title=AXES[axis]), *cells)))
    heads = [doc.Column("axis", align="left")]
    heads += [
        doc.Column(f"{kernel} {fmt}" if several else kernel) for kernel, fmt in columns
    ]
    formats = ", ".join(dict.fromkeys(fmt for _, fmt in columns))
    title = f"Bit-identical along each axis? ({formats})"
    return doc.Table(tuple(heads), tuple(rows), title, kind="grid", only=doc.PAGE)


def _answer_cell(answer: AxisAnswer | None) -> doc.Cell:
    """Returns the cell of a grid: `same`, or how far the kernel changes, `FAIL` before it
    beyond a limit, and in how many calls. A dash, with the reason, where the axis was not
    tried; a dash alone for None."""
    if answer is None or answer.answer == "not tried":
        return doc.Cell(NONE, title="" if answer is None else answer.reason)
    if answer.answer == "same":
        return doc.Cell(SAME, style="good", after=answer.part)
    exceeds = answer.answer == "exceeds"
    style: doc.Style = "bad" if exceeds else "soft"
    text = f"{'FAIL ' * exceeds}{answer.change_in_words}".strip()
    count = f"{answer.moved}/{answer.calls}" + f" ({answer.part})" * bool(answer.part)
    return doc.Cell(text, style=style, after=count)


def _output_table(models: Sequence[ModelRow]) -> doc.Table:
    """Returns the table of how the model's own output changes, a row for each kernel,
    format and axis; rows without numbers are left out."""

    def cells(row: ModelRow) -> Iterator[str | doc.Cell]:
        """Yields the cells of a row, one for each column."""
        yield row.axis
        yield doc.Cell(row.kernel, after=row.format)
        yield _percent(row.differ / (row.elements or 1))
        yield si(row.difference)
        yield ratio(row.times_explained)
        yield si(row.other_difference)
        yield _percent(row.share)

    return doc.table(
        (
            *("axis", "with", "differ", "change", "change / explained"),
            *("without attention's", "attention's share"),
        ),
        map(cells, (row for row in models if row.reason is None)),
        title="The model's own output, over its size",
    )


def _percent(x: float | None) -> str:
    """Returns a share, 0 to 1, in per cent: `12.5 %`; a dash for None."""
    return NONE if x is None else f"{three(100 * x)} %"


def _group_tables(
    rows: Sequence[InvarianceRow], answers: Mapping[tuple[str, str, str], Answer]
) -> Iterator[doc.Table]:
    """Yields a table for each format and group of axes that has a row. `answers`: by
    kernel, format and axis of every row."""
    for fmt, of_format in grouped(rows, lambda r: r.format).items():
        for group in GROUPS:
            of_group = [r for r in of_format if r.axis in group.axes]
            if of_group:
                yield _group_table(group, fmt, of_group, answers)


def _group_table(
    group: AxisGroup,
    fmt: str,
    rows: Sequence[InvarianceRow],
    answers: Mapping[tuple[str, str, str], Answer],
) -> doc.Table:
    """Returns a table of a group of axes with a column for each kernel, and a row for
    each axis: one for all tensors where no kernel changes a tensor, else one for each
    tensor that a kernel changes. A cell is red where the answer is `exceeds`."""
    kernels = dict.fromkeys(label(r) for r in rows)
    table: list[tuple[doc.Cell, ...]] = []
    for axis, along in grouped(rows, lambda r: r.axis).items():
        differing = {r.tensor for r in along if r.status == "ok" and r.differ}
        moved = [name for name in TENSORS if name in differing]
        for number, tensor in enumerate(moved or ("all",)):
            of_tensor = [
                r for r in along if tensor in ("all", r.tensor) or r.status != "ok"
            ]
            by_kernel = grouped(of_tensor, label)
            name = doc.Cell("" if number else axis, title=AXES[axis])
            cells = [name, doc.Cell(tensor, style="soft")]
            for kernel in kernels:
                bad = answers[kernel, fmt, axis] == "exceeds"
                cells.append(_axis_cell(by_kernel.get(kernel, ()), bad=bad))
            table.append(tuple(cells))
    title = f"{group.title}, {fmt}. {group.sentence}"
    return doc.table(
        ("axis", doc.Column("tensor", align="left"), *kernels), table, title=title
    )


def _axis_cell(rows: Sequence[InvarianceRow], *, bad: bool) -> doc.Cell:
    """Returns how far a kernel changes along an axis (`NaN` where an element is not
    finite in one form alone), and in how many of its rows. It is `same` where no row
    changes, a dash with the first reason where no row has numbers. `bad`: whether a limit
    is exceeded."""
    ok = [r for r in rows if r.status == "ok"]
    if not ok:
        reason = next((r.reason or "" for r in rows), "")
        return doc.Cell(NONE, style="soft", title=reason)
    moved, less = [r for r in ok if not r.same], untried_part_clause(rows, ok[0].axis)
    if not moved:
        return doc.Cell(SAME, style="good", after=less)
    worst = largest_change(moved)
    text = "NaN" if worst.nonfinite else ratio(worst.floor_ratio)
    count = f"{len(moved)}/{len(ok)}" + f" ({less})" * bool(less)
    return doc.Cell(text, style="bad" if bad else "", after=count)


def _difference_rows(
    rows: Sequence[InvarianceRow],
) -> Iterator[tuple[str | doc.Cell, ...]]:
    """Yields the cells of each row of the table of differences. There is one for each
    kernel, format, axis, variant and tensor that differs: the call that changes most,
    with its cause, or the first cause of another call."""
    moved = (r for r in rows if r.status == "ok" and r.differ)
    by_variant = grouped(
        moved, lambda r: (label(r), r.format, r.axis, r.variant, r.tensor)
    )
    for of_variant in by_variant.values():
        r = largest_change(of_variant)
        cause = next((x.cause for x in (r, *of_variant) if x.cause is not None), None)
        begins = NONE
        if r.first is not None:
            sequence, head, row, _ = r.first
            keys = "" if r.keys is None else f" of {r.keys} keys"
            begins = f"{sequence}, {head}, {row}{keys}"
        why = str(cause or "")
        if not why and r.closest is not None:
            why = f"none of {r.tried} tilings and splits (residual {three(r.closest)})"
        yield (
            doc.Cell(label(r), style="strong"),
            r.axis,
            other_form_in_words(r),
            r.tensor,
            _percent(r.differ / r.elements),
            "NaN" if r.nonfinite else ratio(r.floor_ratio),
            three(r.ulps),
            begins,
            why,
        )


COLUMNS = (
    *("kernel", "axis", "variant", "tensor"),
    *("differ", "over floor", "ulps", "begins", "cause"),
)


def _difference_table(
    rows: Sequence[tuple[str | doc.Cell, ...]],
    count: int,
    only: tuple[doc.Medium, ...] = doc.MEDIA,
) -> doc.Table:
    """Returns the table of differences. `count`: how many there are, which the title says
    where `rows` are fewer. `only`: the media that show it."""
    part = f", the first {len(rows)} of {count}" if len(rows) < count else ""
    return doc.text_table(COLUMNS, rows, title=f"What differs{part}", only=only)
