"""The tables of a report as text: titles, columns, cells. What Markdown is made of.

An audit's and a sweep's are made here; other kinds have a function `sheets` in the module of their
kind.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from numdev.report import AuditReport, Axis, Curve, Figure, KernelSummary, Report, SweepReport, Tick
from numdev.report.renderers import parts
from numdev.report.renderers.numbers import NONE, ratio, si
from numdev.report.views import along

PLACES = 8
"""Columns of a figure's table; an axis with more places shows so many of them, evenly."""
STANDARD = {"floor": "the exact result, rounded once", "baseline": "plain attention"}
COLUMNS = (
    *("kernel", "×floor", "worst head", "×baseline", "×predicted", "mean error", "max error"),
    *("×format", "biased heads", "not finite"),
)


@dataclass(frozen=True, kw_only=True)
class Sheet:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def sheets(report: Report) -> tuple[Sheet, ...]:
    """The tables of any report, those without a row left out."""
    if isinstance(report, AuditReport):
        found = _audit(report)
    elif isinstance(report, SweepReport):
        found = (of_figure(figure, report.summary.axis) for figure in report.figures)
    else:
        found = importlib.import_module(f"numdev.report.views.{report.kind}").sheets(report)
    return tuple(sheet for sheet in found if sheet.rows)


def of_figure(figure: Figure, axis: Axis) -> Sheet:
    """A row for each curve, a column for each of some places on the axis."""
    ticks = _some(axis.ticks)
    write = ratio if figure.relative else si
    return Sheet(
        title=figure.title,
        columns=(axis.title, *(tick.below or tick.label for tick in ticks)),
        rows=tuple(
            (curve.label, *(write(_at(curve, tick.x)) for tick in ticks)) for curve in figure.curves
        ),
    )


def _some(ticks: Sequence[Tick]) -> tuple[Tick, ...]:
    if len(ticks) <= PLACES:
        return tuple(ticks)
    chosen = sorted({round(i * (len(ticks) - 1) / (PLACES - 1)) for i in range(PLACES)})
    return tuple(ticks[i] for i in chosen)


def _at(curve: Curve, x: float) -> float | None:
    """A curve's mean at a place; one that the axis does not move has the same everywhere."""
    return next((p.mean for p in curve.points if curve.constant or p.x == x), None)


def _audit(report: AuditReport) -> Iterator[Sheet]:
    """A ranking for each format, then the layer by head map of the worst kernel."""
    kernels = report.summary.kernels
    for name in dict.fromkeys(k.format for k in kernels):
        measured = [k for k in kernels if k.format == name and k.ok and k.role != "precision"]
        yield Sheet(
            title=f"{name}: kernels, the closest to the truth first",
            columns=COLUMNS,
            rows=tuple(_ranked(k) for k in measured),
        )
    for grid in parts.grids(report.summary.parts):
        yield Sheet(
            title=grid.title,
            columns=("kernel", *grid.columns),
            rows=tuple((line.label, *map(ratio, line.cells)) for line in grid.lines),
        )
    for line in along.figures(report.summary.profiles):
        yield of_figure(line.figure, line.axis)
    found = report.summary.map
    if found is not None:
        yield Sheet(
            title=f"{found.kernel} in {found.format}: times the floor, layer by head",
            columns=("layer", *map(str, found.heads)),
            rows=tuple(
                (layer, *map(ratio, values))
                for layer, values in zip(found.layers, found.values, strict=False)
            ),
        )


def _ranked(k: KernelSummary) -> tuple[str, ...]:
    options = "".join(f" {n}={v}" for n, v in k.options.items() if v is not None)
    standard = f" ({STANDARD[k.role]})" if k.role in STANDARD else ""
    judged = k.bias_testable and k.role != "floor"
    return (
        f"{k.kernel}{options}{standard}",
        *map(ratio, (k.floor_ratio, k.floor_ratio_worst, k.baseline_ratio)),
        ratio(k.expected_ratio_worst),
        si(k.mean_abs),
        ("≥" if k.rows_measured else "") + si(k.max_abs),
        ratio(k.flash_vs_precision if k.role == "kernel" else None),
        f"{k.biased_heads}/{k.ok}" if judged else NONE,
        str(k.nonfinite),
    )
