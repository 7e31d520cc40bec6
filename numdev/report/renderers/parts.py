"""A report's parts, side by side: the phases of a generation, the steps of a diffusion pipeline.

Tables for the terminal, the page and Markdown, and the page's figures: how far from the truth a
kernel is at each denoising step. All numbers are the summary's (`report.PartSummary`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from numdev.report import Axis, Curve, Figure, PartSummary, Point, Role, Tick
from numdev.report.renderers import chart

PHASES = ("prefill", "decode")
OF_A_PHASE = ("×floor", "worst", "×pred")
DEFAULT = "sdpa-default"
KINDS = {
    "self": "self attention",
    "cross": "cross attention",
    "joint": "joint attention",
    None: "attention",
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One kernel; a cell is None where it was not measured."""

    label: str
    role: Role
    cells: tuple[float | None, ...]
    errors: tuple[float | None, ...] = ()
    """By step: relative to the size of a row's terms, median head."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    title: str
    steps: bool
    """Whether its columns are denoising steps, and not numbers of phases."""
    columns: tuple[str, ...]
    lines: tuple[Line, ...]


def grids(parts: Sequence[PartSummary]) -> tuple[Grid, ...]:
    """For each format a table of the phases, or one of the steps for each kind of attention."""
    found = []
    for fmt in dict.fromkeys(p.format for p in parts):
        here = [p for p in parts if p.format == fmt]
        found += [*_phases(fmt, here), *_steps(fmt, here)]
    return tuple(found)


def charts(parts: Sequence[PartSummary]) -> list[chart.Chart]:
    """Error by denoising step, for each format and kind of attention; none for a single step."""
    steps = _numbers(parts)
    if len(steps) < 2:
        return []
    axis = Axis(
        name="step",
        title="denoising step",
        scale="linear",
        ticks=tuple(Tick(x=float(step), label=str(step)) for step in steps),
    )
    figures = tuple(
        Figure(
            title=f"{fmt}, {KINDS[kind]}: error by denoising step",
            metric="row_rel",
            relative=False,
            y_title="error of a row over its terms, median head",
            y_scale="log",
            curves=tuple(_curves([p for p in parts if (p.format, p.attends) == (fmt, kind)])),
        )
        for fmt, kind in dict.fromkeys((p.format, p.attends) for p in parts)
    )
    return chart.charts([f for f in figures if f.curves], axis, "baseline")


def _phases(fmt: str, parts: Sequence[PartSummary]) -> Iterator[Grid]:
    """Prefill beside decode, in whatever there is of both."""
    phases = [phase for phase in PHASES if any(p.phase == phase for p in parts)]
    if not phases:
        return
    lines = []
    for (label, role), own in _by_kernel(parts).items():
        cells: list[float | None] = []
        for phase in phases:
            p = next((p for p in own if p.phase == phase), None)
            cells += (
                [p.floor_ratio, p.floor_ratio_worst, p.expected_ratio_worst] if p else [None] * 3
            )
        lines.append(Line(label=label, role=role, cells=tuple(cells)))
    yield Grid(
        title=f"{fmt}: prefill beside decode",
        steps=False,
        columns=tuple(f"{phase} {name}" for phase in phases for name in OF_A_PHASE),
        lines=_distinct(lines),
    )


def _three(p: PartSummary) -> list[float | None]:
    return [p.floor_ratio, p.floor_ratio_worst, p.expected_ratio_worst]


def _steps(fmt: str, parts: Sequence[PartSummary]) -> Iterator[Grid]:
    """Times the floor, a column for each step."""
    steps = _numbers(parts)
    if not steps:
        return
    for kind in dict.fromkeys(p.attends for p in parts):
        lines = []
        for (label, role), own in _by_kernel([p for p in parts if p.attends == kind]).items():
            at = {p.step: p.floor_ratio for p in own}
            errors = {p.step: p.row_rel for p in own}
            lines.append(
                Line(
                    label=label,
                    role=role,
                    cells=tuple(at.get(s) for s in steps),
                    errors=tuple(errors.get(s) for s in steps),
                )
            )
        yield Grid(
            title=f"{fmt}, {KINDS[kind]}: ×floor by denoising step",
            steps=True,
            columns=tuple(map(str, steps)),
            lines=_distinct(lines),
        )


def _curves(parts: Sequence[PartSummary]) -> Iterator[Curve]:
    kernels = _by_kernel(parts)
    points = {
        label: tuple(_point(p.step, p.row_rel) for p in own if p.row_rel is not None)
        for (label, _), own in kernels.items()
    }
    for (label, role), own in kernels.items():
        others = [points[o] for o in points if o != label]
        if points[label] and not (label == DEFAULT and points[label] in others):
            yield Curve(label=label, role=role, kernel=own[0].kernel, points=points[label])


def _point(step: int | None, error: float) -> Point:
    return Point(x=float(step or 0), label=f"step {step}", mean=error, low=None, high=None, seeds=1)


def _numbers(parts: Sequence[PartSummary]) -> list[int]:
    return sorted({p.step for p in parts if p.step is not None})


def _by_kernel(parts: Sequence[PartSummary]) -> dict[tuple[str, Role], list[PartSummary]]:
    found: dict[tuple[str, Role], list[PartSummary]] = {}
    for p in parts:
        options = ",".join(f"{k}={v}" for k, v in p.options.items() if v is not None)
        label = p.kernel + (f"[{options}]" if options else "")
        found.setdefault((label, p.role), []).append(p)
    return found


def _distinct(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Without PyTorch's default choice where another line has its every number."""
    return tuple(
        line
        for line in lines
        if line.label != DEFAULT
        or not any(o.cells == line.cells for o in lines if o.label != line.label)
    )
