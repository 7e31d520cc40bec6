"""The parts of an audit side by side: the phases of a generation, the steps of a diffusion
pipeline, as tables, and how far from the truth a kernel is at each denoising step, as figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numdev.report import Axis, Curve, Figure, PartSummary, Point, Role, Tick
from numdev.report import document as doc
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


def blocks(parts: Parts) -> Iterator[doc.Node]:
    """For each format a table of the phases, or one of the steps for each kind of attention."""
    steps = sorted({p.step for p in parts if p.step is not None})
    if len(steps) > 1:
        yield doc.Heading("By denoising step", doc.PAGE)
        yield doc.Figures(_charts(parts, steps), doc.PAGE)
    for fmt in dict.fromkeys(p.format for p in parts):
        here = [p for p in parts if p.format == fmt]
        if any(p.phase for p in here):
            yield _phases(fmt, here)
            yield from doc.notes((LEGEND,), doc.PAGE)
        for kind in dict.fromkeys(p.attends for p in here) if steps else ():
            own = [p for p in here if p.attends == kind]
            yield _steps(f"{fmt}, {KINDS[kind]}: ×floor by denoising step", own, steps)
            yield from doc.notes((_ends(own),), doc.TERMINAL)


def _phases(fmt: str, parts: Parts) -> doc.Table:
    """Prefill beside decode, in whatever there is of both."""
    phases = [phase for phase in PHASES if any(p.phase == phase for p in parts)]
    rows = {}
    for key, own in _by_kernel(parts).items():
        cells = []
        for phase in phases:
            p = next((p for p in own if p.phase == phase), None)
            cells += [doc.floors(p.floor_ratio if p else None)]
            cells += [doc.floors(p.floor_ratio_worst if p else None)]
            cells += [doc.Cell(ratio(p.expected_ratio_worst if p else None))]
        rows[key] = tuple(cells)
    names = [f"{phase} {name}" for phase in phases for name in ("×floor", "worst", "×pred")]
    return _table(names, rows, title=f"{fmt}: prefill beside decode", kind="words")


def _steps(title: str, parts: Parts, steps: Sequence[int]) -> doc.Table:
    """Times the floor, a column for each step."""
    rows = {}
    for key, own in _by_kernel(parts).items():
        at = {p.step: p.floor_ratio for p in own}
        rows[key] = tuple(doc.floors(at.get(step)) for step in steps)
    return _table(list(map(str, steps)), rows, title=title, kind="series")


def _table(
    names: Sequence[str], rows: dict[tuple[str, Role], tuple[doc.Cell, ...]], title: str, kind: str
) -> doc.Table:
    """A row for each kernel, without PyTorch's default choice where another has its numbers."""
    shown = {k: own for k, own in rows.items() if not repeats(k[0], own, list(rows.values()))}
    return doc.table(
        ["kernel", *names],
        [(label, *own) for (label, _), own in shown.items()],
        [role != "kernel" for _, role in shown],
        title=title,
        kind=kind,
    )


def repeats(kernel: str, own: object, every: Sequence[object]) -> bool:
    """Whether this is PyTorch's default choice, and another line has its every number."""
    return kernel == DEFAULT and every.count(own) > 1


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


def _charts(parts: Parts, steps: Sequence[int]) -> tuple[doc.Chart, ...]:
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
    return doc.charts([f for f in figures if f.curves], axis, seeds="")


def _curves(parts: Parts) -> tuple[Curve, ...]:
    points = {
        key: tuple(
            Point(x=float(_step(p)), label=f"step {p.step}", mean=p.row_rel, low=None, high=None,
                  seeds=1)
            for p in own
            if p.row_rel is not None
        )
        for key, own in _by_kernel(parts).items()
    }  # fmt: skip
    return tuple(
        Curve(label=label, role=role, kernel=label, points=own)
        for (label, role), own in points.items()
        if own and not repeats(label, own, list(points.values()))
    )


def _step(part: PartSummary) -> int:
    return part.step or 0


def _by_kernel(parts: Parts) -> dict[tuple[str, Role], list[PartSummary]]:
    groups: dict[tuple[str, Role], list[PartSummary]] = {}
    for p in parts:
        groups.setdefault((doc.labelled(p.kernel, p.options), p.role), []).append(p)
    return groups
