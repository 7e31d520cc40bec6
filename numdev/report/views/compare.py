"""A comparison of two audits, shown: what moved, head by head; every tensor of every kernel; what
is gone and new; what else differs between the two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numdev.gate.compare_report import CompareReport, Group, Past
from numdev.report import Axis, Curve, Figure, Places, Tick
from numdev.report import document as doc
from numdev.report.document import Cell, Column
from numdev.report.numbers import NONE, labelled, ratio, si

SHOWN = 12  # moves listed in the terminal; the page has ON_PAGE and moves.csv all
ON_PAGE = 500
LEGEND = (
    "A is the first report, B the second. heads: measured in both, one head of one call each; "
    "moved: beyond noise; same bits: equal outputs, by a checksum of them. "
    "A, B: medians, in multiples of the floor (lse: rms; where the inputs are not the same, in "
    "multiples of what is predicted); largest: the ratio B / A farthest from 1."
)


def blocks(report: CompareReport) -> Iterator[doc.Node]:
    where = [g.where for g in report.groups if g.where]
    where += [move.place for move in report.moves]
    place = Places([*where, *(presence.place for presence in report.presences)])
    yield _moves(report, place, SHOWN, doc.TERMINAL)
    yield _moves(report, place, ON_PAGE, doc.TEXT)
    several = len({group.format for group in report.groups}) > 1
    yield doc.table(
        (
            "kernel",
            Column("", align="left"),
            *("heads", "moved", "same bits"),
            Column("metric", align="left", width=120),
            *("A", "B", "largest"),
            Column("where", align="left", width=140),
        ),
        ((*_group(g, several), place(g.where) if g.where else "") for g in report.groups),
        [g.role != "kernel" for g in report.groups],
        title="Every tensor",
    )
    yield doc.words(
        ("", "kernel", "", "rows", "first at", "why"),
        (
            (
                Cell(p.what, style="strong" if p.what == "new" else "bad"),
                labelled(p.kernel, p.options),
                f"{', '.join(p.tensors)} {p.format}",
                str(p.rows),
                place(p.place),
                p.why,
            )
            for p in report.presences
        ),
        title="Gone, new and failed",
    )
    if report.summary.notes:
        yield doc.Heading("Notes", doc.TEXT)
        yield from doc.notes(report.summary.notes)
    yield doc.words(
        ("", "A", "B"),
        (
            *((Cell(f"{d.key} (allowed)", style="strong"), d.a, d.b) for d in report.allowed),
            *((d.key, d.a, d.b) for d in report.changes),
        ),
        title="What else is different",
    )
    yield from _history(report.history)
    yield from doc.notes((LEGEND,))
    yield doc.words(
        ("", "report", "made", "numdev", "command"),
        (
            (name.upper(), str(report.request.get(name)), side.created, side.numdev, side.command)
            for name, side in (("a", report.a), ("b", report.b))
        ),
        title="The two",
        only=doc.TEXT,
    )


def _history(past: Sequence[Past]) -> Iterator[doc.Node]:
    """Who made each report, and every kernel's error along them."""
    if not past:
        return
    made = ((p.created, p.numdev, p.torch, p.on, p.outcome) for p in past)
    yield doc.words(("made", "numdev", "torch", "on", "outcome"), made, title="History")
    ticks = tuple(Tick(x=i, label=p.created[:10]) for i, p in enumerate(past))
    curves: list[Curve] = []
    for kernel in dict.fromkeys(kernel for each in past for kernel in each.errors):
        errors = ((i, p.created[:10], p.errors.get(kernel)) for i, p in enumerate(past))
        known = {(i, day): [error] for i, day, error in errors if error is not None}
        curves += doc.curve(kernel, "kernel", known)
    figure = Figure(
        title="error / floor of the output, median head", metric="floor_ratio", relative=True,
        y_title="error / floor", y_scale="linear", curves=tuple(curves),
    )  # fmt: skip
    axis = Axis(name="made", title="made", scale="category", ticks=ticks)
    yield doc.Figures((figure,), axis)


def _moves(
    report: CompareReport, place: Places, limit: int, only: tuple[doc.Medium, ...]
) -> doc.Table:
    count = len(report.moves)
    limited = f": the first {limit} of {count}, all in moves.csv" if count > limit else ""
    return doc.words(
        ("kernel", "", "where", "what", "noise explains"),
        (
            (
                Cell(labelled(m.kernel, m.options), style="strong"),
                f"{m.tensor} {m.format}",
                place(m.place),
                m.words,
                NONE if m.noise is None else f"{m.noise:.2f}×",
            )
            for m in report.moves[:limit]
        ),
        title=f"What moved{limited}",
        only=only,
    )


def _group(g: Group, several: bool) -> tuple[str | Cell, ...]:
    """Its numbers; with its format where there are several, since the answer has a single one."""
    write = si if g.metric == "rms" else ratio
    return (
        Cell(labelled(g.kernel, g.options), style="strong" if g.moved else ""),
        f"{g.tensor} {g.format}" if several else g.tensor,
        str(g.pairs),
        Cell(str(g.moved), style="bad" if g.moved else ""),
        *(str(g.same_bits), g.metric or NONE),
        *(write(g.a), write(g.b), ratio(g.change)),
    )
