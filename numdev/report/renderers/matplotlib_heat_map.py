"""Rows as a figure of matplotlib, which need not be installed: what `report.plot()`
draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas

from numdev.argument_checks import checked
from numdev.errors import UsageError, closest
from numdev.report import DeviationRow, Places, Report
from numdev.report.number_text import label

ROLES = ("baseline", "kernel", "control")


@checked
def draw(
    report: Report,
    metric: str = "floor_ratio",
    *,
    tensor: str = "out",
    format: str | None = None,
) -> Any:
    """Draws a heat map of magnitudes for each kernel, layers down and heads across, and
    returns the axes, one for each. Of several rows of a head (calls, seeds) it shows the
    largest, but no 0. `format`: None: the report's first. Raises UsageError without
    matplotlib, for an unknown metric, and where no row has the number, other than 0."""
    if metric not in DeviationRow.model_fields:
        hint = closest(metric, DeviationRow.model_fields)
        raise UsageError(f"plot: no metric {metric!r}", hint=hint)
    rows: Sequence[object] = getattr(report, "rows", ())  # of each kind its own
    every = [row for row in rows if isinstance(row, DeviationRow)]
    format, places = format or next((r.format for r in every), ""), Places(every)
    records = [
        (label(row), places.layer(row), row.head or 0, abs(value))
        for row in every
        if (row.tensor, row.format) == (tensor, format) and row.role in ROLES
        if isinstance(value := getattr(row, metric), int | float) and value
    ]
    if not records:
        where = f"{tensor} in {format or 'any format'}"
        raise UsageError(f"plot: no row of {where} has {metric}")
    try:
        from matplotlib import pyplot
    except ImportError:
        what = "plot needs matplotlib, which is not installed"
        raise UsageError(what, hint="pip install matplotlib") from None
    table = pandas.DataFrame(records, columns=["kernel", "layer", "head", "size"])
    largest = table.groupby(["kernel", "layer", "head"], sort=False)["size"].max()
    layers, heads = table["layer"].unique(), sorted(table["head"].unique())
    least, most = table["size"].min(), table["size"].max()
    scale = {
        "norm": "log" if most > 10 * least else "linear",
        "vmin": least,
        "vmax": most,
    }
    kernels = table["kernel"].unique()
    size = (2 + 2.4 * len(kernels), 1.5 + 0.25 * len(layers))
    figure, (axes,) = pyplot.subplots(
        1,
        len(kernels),
        sharey=True,
        squeeze=False,
        figsize=size,
        layout="constrained",
    )
    ticks = range(0, len(heads), 1 + len(heads) // 17)
    for each, name in zip(axes, kernels, strict=True):
        cells = largest[name].unstack().reindex(index=layers, columns=heads)
        image = each.imshow(cells, aspect="auto", **scale)
        each.set(
            title=name, xlabel="head", xticks=ticks, xticklabels=[heads[i] for i in ticks]
        )
    axes[0].set(yticks=range(len(layers)), yticklabels=layers)
    figure.colorbar(image, ax=list(axes), label=f"{metric}, {tensor}, {format}")
    return axes
