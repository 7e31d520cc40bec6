"""A comparison of two audits, shown: what moved, head by head; every tensor of every
kernel; what is gone and new; what else differs between the two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numdev.gate.compare_report import CompareReport, Group, Move, Past, Presence
from numdev.report import Axis, Curve, Figure, Places, Tick
from numdev.report import document as doc
from numdev.report.document import Cell, Column
from numdev.report.number_text import NONE, label, ratio, si
from numdev.tensor_properties import ATTENTION, ATTENTION_WORDS, Words

SHOWN = 12  # moves listed in the terminal; the page has ON_PAGE and moves.csv all
ON_PAGE = 500
LEGEND = (
    "{unit}s: measured in both, one {unit} of one call each; moved: beyond noise; same "
    "bits: equal "
    "outputs, by a checksum of them. A, B: the median {unit}'s error before and "
    "after, in the unit "
    "beside them. One {unit}'s B/A: of the {unit} named beside it, the farthest from 1 "
    "of all {unit}s."
)
UNITS = {
    "floor_ratio": "× the floor",
    "expected_ratio": "× what is predicted",
    "rms": "rms",
}


def _group_columns(unit: str) -> tuple[str | Column, ...]:
    """Returns the columns of the table of every tensor. `unit`: what a pair of rows is
    of, in words."""
    return (
        "kernel",
        Column("tensor", align="left"),
        *(f"{unit}s", "moved", "same bits", "A", "B"),
        Column("unit", align="left"),
        f"one {unit}'s B/A",
        Column(f"which {unit}", align="left", width=100),
    )


def styles(report: CompareReport) -> tuple[doc.Style]:
    """Returns the style of the verdict, which is the first sentence, as a tuple of one:
    `bad` where something moved, is gone or failed, `warn` where something, or all, could
    not be judged, else `good`."""
    bad = report.moved or report.failed
    return ("bad" if bad else "warn" if report.exit_code else "good",)


def blocks(report: CompareReport) -> Iterator[doc.Node]:
    """Yields what is shown below the verdict: the history, what moved, every tensor, what
    is gone, new or failed, notes, and what differs between the two reports."""
    where = [m.place for m in report.moves] + [p.place for p in report.presences]
    of_attention = [spec.name for spec in ATTENTION]
    is_attention = all(group.tensor in of_attention for group in report.groups)
    words = ATTENTION_WORDS if is_attention else Words()
    place = Places([*(g.where for g in report.groups if g.where), *where], words)
    yield from _history_nodes(report.history, words.unit)
    yield _moves_table(report, place, SHOWN, doc.TERMINAL)
    yield _moves_table(report, place, ON_PAGE, doc.TEXT)
    yield doc.table(
        _group_columns(words.unit),
        ((*_group_row(g), place(g.where) if g.where else "") for g in report.groups),
        [g.role != "kernel" for g in report.groups],
        title="Every tensor: the error in A and in B",
    )
    yield from doc.notes((LEGEND.format(unit=words.unit),), doc.ON_REQUEST)
    yield doc.text_table(
        ("", "kernel", "tensor", "rows", "first at", "why"),
        (_presence_row(presence, place) for presence in report.presences),
        title="Gone, new and failed",
    )
    yield from doc.notes(report.summary.notes)
    yield doc.text_table(
        ("", "A", "B"),
        _report_rows(report),
        title="The two reports, and what else differs",
    )


def _presence_row(presence: Presence, place: Places) -> tuple[str | Cell, ...]:
    """Returns a table's row on what one report alone has, or what failed: gone, new or
    failed, kernel, tensors with format, number of rows, first place, reason."""
    why = presence.why
    if presence.lacks:
        why = f"{why}: {', '.join(presence.lacks)}"
    return (
        Cell(presence.what, style="strong" if presence.what == "new" else "bad"),
        label(presence),
        f"{', '.join(presence.tensors)} {presence.format}",
        str(presence.rows),
        place(presence.place),
        why,
    )


def _report_rows(report: CompareReport) -> Iterator[tuple[str | Cell, ...]]:
    """Yields a table's rows (key, value of A, value of B) on what the two reports are and
    in which keys they differ, the allowed differences first."""
    yield ("report", *(str(report.request.get(side)) for side in "ab"))
    yield "made", report.a.created, report.b.created
    yield "command", report.a.command, report.b.command
    for d in report.allowed:
        yield Cell(f"{d.key} (allowed)", style="strong"), d.a, d.b
    for d in report.changes:
        yield d.key, d.a, d.b


def _history_nodes(past: Sequence[Past], unit: str) -> Iterator[doc.Node]:
    """Yields a table of when and on what each report was made, and a figure of every
    kernel's error along them; nothing without a history. `unit`: what an error is of, in
    words."""
    if not past:
        return
    rows = ((p.created, p.numdev, p.torch, p.on, p.outcome) for p in past)
    yield doc.text_table(
        ("made", "numdev", "torch", "on", "outcome"), rows, title="History"
    )
    ticks = tuple(Tick(x=i, label=p.created[:10]) for i, p in enumerate(past))
    curves: list[Curve] = []
    for kernel in dict.fromkeys(kernel for each in past for kernel in each.errors):
        errors = ((i, p.created[:10], p.errors.get(kernel)) for i, p in enumerate(past))
        measured = {(i, day): [error] for i, day, error in errors if error is not None}
        curves += doc.curve(kernel, "kernel", measured)
    figure = Figure(
        title=f"error / floor of the output, median {unit}",
        metric="floor_ratio",
        relative=True,
        y_title="error / floor",
        y_scale="linear",
        curves=tuple(curves),
    )
    axis = Axis(name="made", title="made", scale="category", ticks=ticks)
    yield doc.Figures((figure,), axis)


def _moves_table(
    report: CompareReport, place: Places, limit: int, only: tuple[doc.Medium, ...]
) -> doc.Table:
    """Returns the table of the first `limit` moves for the media `only`; where there are
    more, its title says how many."""
    count = len(report.moves)
    limited = f" ({limit} of {count}, all in moves.csv)" if count > limit else ""
    return doc.text_table(
        ("kernel", "tensor", "where", "before and after", "factor", "noise explains"),
        (_move_row(move, place) for move in report.moves[:limit]),
        title=f"What moved, the farthest beyond noise first{limited}",
        only=only,
    )


def _move_row(m: Move, place: Places) -> tuple[str | Cell, ...]:
    """Returns a table's row on a move: kernel, tensor and format, place, before and after
    in words, factor, and the factor that noise explains, each a dash where there is
    none."""
    return (
        Cell(label(m), style="strong"),
        f"{m.tensor} {m.format}",
        place(m.place),
        m.words,
        NONE if m.change is None else f"{ratio(m.change)}×",
        NONE if m.noise is None else f"{m.noise:.2f}×",
    )


def _group_row(g: Group) -> tuple[str | Cell, ...]:
    """Returns a table's row on one tensor of a kernel, but for its last cell (which
    head); the count of what moved is coloured where it is not 0."""
    write = si if g.metric in ("rms", "cost") else ratio
    unit = UNITS.get(g.metric or "", g.metric or NONE)
    kernel = Cell(label(g), style="strong" if g.moved else "")
    moved = Cell(str(g.moved), style="bad" if g.moved else "")
    return (
        *(kernel, f"{g.tensor} {g.format}"),
        *(str(g.pairs), moved, str(g.same_bits)),
        *(write(g.a), write(g.b), unit, ratio(g.change)),
    )
