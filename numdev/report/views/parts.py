"""The parts of an audit side by side: the phases of a generation, the steps of a diffusion
pipeline, as tables, and how far from the truth a kernel is at each denoising step, as figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numdev.report import Axis, Curve, Figure, PartSummary, Point, Role, Tick
from numdev.report.document import (
    PAGE,
    TERMINAL,
    Cell,
    Chart,
    Column,
    Figures,
    Heading,
    Node,
    Row,
    Table,
    charts,
    floors,
    labelled,
    notes,
)
from numdev.report.numbers import ratio, si

PHASES = ("prefill", "decode")
DEFAULT = "sdpa-default"
KINDS = {
    "self": "self attention",
    "cross": "cross attention",
    "joint": "joint attention",
    None: "attention",
}
LEGEND = (
    "×floor: median head; worst: the worst head. ×pred: over what the roundings it claims to make "
    "predict, worst head."
)
Parts = Sequence[PartSummary]


def blocks(parts: Parts) -> Iterator[Node]:
    """For each format a table of the phases, or one of the steps for each kind of attention."""
    steps = sorted({p.step for p in parts if p.step is not None})
    if len(steps) > 1:
        yield Heading("By denoising step", PAGE)
        yield Figures(_charts(parts, steps), PAGE)
    for fmt in dict.fromkeys(p.format for p in parts):
        here = [p for p in parts if p.format == fmt]
        if any(p.phase for p in here):
            yield _phases(fmt, here)
            yield from notes((LEGEND,), PAGE)
        for kind in dict.fromkeys(p.attends for p in here) if steps else ():
            own = [p for p in here if p.attends == kind]
            yield _steps(f"{fmt}, {KINDS[kind]}", own, steps)
            yield from notes((_ends(own),), TERMINAL)


def _phases(fmt: str, parts: Parts) -> Table:
    """Prefill beside decode, in whatever there is of both."""
    phases = [phase for phase in PHASES if any(p.phase == phase for p in parts)]
    rows = []
    for (label, role), own in _by_kernel(parts).items():
        cells: list[Cell] = [Cell(label)]
        for phase in phases:
            p = next((p for p in own if p.phase == phase), None)
            cells.append(floors(p.floor_ratio if p else None))
            cells.append(floors(p.floor_ratio_worst if p else None))
            cells.append(Cell(ratio(p.expected_ratio_worst if p else None)))
        rows.append(Row(tuple(cells), standard=role != "kernel"))
    names = [f"{phase} {name}" for phase in phases for name in ("×floor", "worst", "×pred")]
    columns = (Column("kernel", align="left"), *map(Column, names))
    return Table(columns, _distinct(rows), f"{fmt}: prefill beside decode", kind="words")


def _steps(name: str, parts: Parts, steps: Sequence[int]) -> Table:
    """Times the floor, a column for each step."""
    rows = []
    for (label, role), own in _by_kernel(parts).items():
        at = {p.step: p.floor_ratio for p in own}
        cells = (Cell(label), *(floors(at.get(step)) for step in steps))
        rows.append(Row(cells, standard=role != "kernel"))
    return Table(
        title=f"{name}: ×floor by denoising step",
        columns=(Column("kernel", align="left"), *(Column(str(step)) for step in steps)),
        rows=_distinct(rows),
        kind="series",
    )


def _ends(parts: Parts) -> str:
    """How large errors are at the first step and at the last, since the floor moves too."""
    ends = []
    for (label, role), own in _by_kernel(parts).items():
        if role == "kernel" and len(own) > 1:
            first, last = min(own, key=_step), max(own, key=_step)
            ends.append(
                f"{label} {si(first.row_rel)} at step {first.step}, {si(last.row_rel)} at "
                f"{last.step}"
            )
    return f"Error over the size of a row's terms, median head: {'; '.join(ends)}." if ends else ""


def _charts(parts: Parts, steps: Sequence[int]) -> tuple[Chart, ...]:
    """Error by denoising step, for each format and kind of attention."""
    ticks = tuple(Tick(x=float(step), label=str(step)) for step in steps)
    axis = Axis(name="step", title="denoising step", scale="linear", ticks=ticks)
    figures = [
        Figure(
            title=f"{fmt}, {KINDS[kind]}: error by denoising step",
            metric="row_rel",
            relative=False,
            y_title="error of a row over its terms, median head",
            y_scale="log",
            curves=_curves([p for p in parts if (p.format, p.attends) == (fmt, kind)]),
        )
        for fmt, kind in dict.fromkeys((p.format, p.attends) for p in parts)
    ]
    return charts([f for f in figures if f.curves], axis, seeds="")


def _curves(parts: Parts) -> tuple[Curve, ...]:
    """Without PyTorch's default choice where another kernel has its every number."""
    points = {
        (label, role): tuple(
            Point(x=float(p.step or 0), label=f"step {p.step}", mean=p.row_rel, low=None, high=None,
                  seeds=1)
            for p in own
            if p.row_rel is not None
        )
        for (label, role), own in _by_kernel(parts).items()
    }  # fmt: skip
    return tuple(
        Curve(label=label, role=role, kernel=label, points=own)
        for (label, role), own in points.items()
        if own
        and not (label == DEFAULT and any(own == o for key, o in points.items() if key[0] != label))
    )


def _step(part: PartSummary) -> int:
    return part.step or 0


def _by_kernel(parts: Parts) -> dict[tuple[str, Role], list[PartSummary]]:
    groups: dict[tuple[str, Role], list[PartSummary]] = {}
    for p in parts:
        groups.setdefault((labelled(p.kernel, p.options), p.role), []).append(p)
    return groups


def _distinct(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Without PyTorch's default choice where another row has its every number."""
    return tuple(
        row
        for row in rows
        if row.cells[0].text != DEFAULT
        or not any(o is not row and o.cells[1:] == row.cells[1:] for o in rows)
    )
