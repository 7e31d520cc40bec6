"""Rows as a figure of matplotlib, which need not be installed: what `report.plot()` draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from numdev.errors import UsageError, closest
from numdev.report import DeviationRow, Places, Report
from numdev.report.numbers import labelled

LABELS = {
    "floor_ratio": "error / floor",
    "expected_ratio": "error / expected",
    "baseline_ratio": "error / eager",
}
ROLES = ("baseline", "kernel", "control")


def draw(
    report: Report, metric: str = "floor_ratio", *, tensor: str = "out", format: str | None = None
) -> Any:
    """A heat map for each kernel, layers down and heads across, all on one scale; where a head has
    several rows (calls, seeds) the largest. `format`: None: the report's first. Returns the axes,
    one for each kernel. Raises UsageError without matplotlib, and where no row has the number."""
    every: Sequence[DeviationRow] = getattr(report, "rows", ())
    format = format or next((r.format for r in every), "")
    if metric not in DeviationRow.model_fields:
        raise UsageError(
            f"plot: no metric {metric!r}", hint=closest(metric, DeviationRow.model_fields)
        )
    told = [
        (row, abs(value))
        for row in every
        if (row.tensor, row.format) == (tensor, format) and row.role in ROLES
        if isinstance(value := getattr(row, metric), int | float) and value
    ]
    if not told:
        raise UsageError(f"plot: no row of {tensor} in {format or 'any format'} has {metric}")
    try:
        from matplotlib import pyplot
    except ImportError:
        what = "plot needs matplotlib, which is not installed"
        raise UsageError(what, hint="pip install matplotlib") from None
    layer = Places([row for row, _ in told]).layer
    layers = list(dict.fromkeys(layer(row) for row, _ in told))
    heads = sorted({row.head or 0 for row, _ in told})
    maps: dict[str, Any] = {}
    for row, value in told:
        name = labelled(row.kernel, row.options)
        cells = maps.setdefault(name, numpy.full((len(layers), len(heads)), numpy.nan))
        at = layers.index(layer(row)), heads.index(row.head or 0)
        cells[at] = numpy.fmax(cells[at], value)
    least, most = (f(value for _, value in told) for f in (min, max))
    scale = {"norm": "log" if most > 10 * least else "linear", "vmin": least, "vmax": most}
    size = (2 + 2.4 * len(maps), 1.5 + 0.25 * len(layers))
    how: Any = {"sharey": True, "squeeze": False, "figsize": size, "layout": "constrained"}
    figure, (axes,) = pyplot.subplots(1, len(maps), **how)
    ticks = range(0, len(heads), 1 + len(heads) // 17)
    for each, (name, cells) in zip(axes, maps.items(), strict=True):
        image = each.imshow(cells, aspect="auto", **scale)
        each.set(title=name, xlabel="head", xticks=ticks, xticklabels=[heads[i] for i in ticks])
    axes[0].set(yticks=range(len(layers)), yticklabels=layers)
    words = f"{LABELS.get(metric, metric)}, {tensor}, {format}"
    figure.colorbar(image, ax=list(axes), label=words)
    return axes
