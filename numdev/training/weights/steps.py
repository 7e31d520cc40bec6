"""`numdev weights` over the steps of a training: every run's weights beside the first
run's of the same seed and step, by layer and by kind of tensor, as the first paper's
figure 7 has them.

At a seed and step sets are compared as anywhere (`numdev.training.weights.study`); of
each tensor sums stay until its layer and kind are added up. Where a distance stands out
(`numdev.training.weights.standing`) the tensors are read again, for quantiles of their
values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
from torch import Tensor

from numdev.audit.run import Progress, provenance
from numdev.audit.timing import Stopwatch
from numdev.errors import MeasurementError
from numdev.grouping import grouped
from numdev.metrics.statistics import Mean
from numdev.metrics.yardstick import widened
from numdev.report import Figure
from numdev.report.io import claim
from numdev.sources.files import some
from numdev.system import System
from numdev.training import figures
from numdev.training.report import VariantRole
from numdev.training.weights import pairs
from numdev.training.weights import report as records
from numdev.training.weights.files import open_weights
from numdev.training.weights.report import ALL, Layer
from numdev.training.weights.runs import Kept, Place, kept
from numdev.training.weights.standing import (
    NAMES,
    answer,
    finest,
    is_chance,
    label_of,
    marks,
    standings,
)
from numdev.training.weights.study import Comparison, matters, record_of, together

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
MOST_SHIFTED = 6  # layers and kinds of which quantiles are shown
KINDS_OF_NULL: Mapping[VariantRole, str] = {
    "null_rounding": "null: re-rounded",
    "null_ulp": "null: one ulp",
}
Measured = tuple[records.TensorRow, pairs.Sums]
Tensors = dict[tuple[str, int, int, Layer, str], str]
"""By run, seed, step, layer and kind the tensor whose W1 is largest."""


def over_steps(
    targets: Sequence[str],
    directory: Path,
    *,
    nulls: Sequence[str] = (),
    device: str = "auto",
    overwrite: bool = False,
    command: str = "",
    progress: Progress = lambda what, done, total: None,
) -> records.WeightsReport:
    """Compare runs with the first at every step that was kept, for a report in
    `directory`, which the caller writes. Raises UsageError, before anything is read,
    where there is nothing to compare or the directory is taken, and MeasurementError
    where no tensor could be compared."""
    runs = kept(targets, nulls)
    request = {"targets": list(targets), "nulls": list(nulls), "device": device}
    system = System.probe(device)
    claim(directory, "weights", request, overwrite=overwrite)
    watch = Stopwatch(system.device)
    cells: list[records.CellRow] = []
    remarks: dict[records.Remark, None] = {}
    sources: list[records.SourceRecord] = []
    tensors: Tensors = {}
    with watch("weights"):
        for done, (place, named) in enumerate(runs.places.items()):
            progress(f"step {place[1]}, seed {place[0]}", done, len(runs.places))
            order = [run.name for run in runs.runs if run.name in named]
            opened = [open_weights(named[name]) for name in order]
            names = dict(zip((x.name for x in opened), order, strict=True))
            both = Comparison(opened, system.device)
            measured = list(both.measured())
            cells += _cells(measured, names, place)
            tensors |= _farthest(measured, names, place)
            remarks |= both.remarks
            sources += map(record_of, opened)
        for lacking in runs.missing:
            remark = records.Remark(
                source=runs.name, tensor=None, what="missing", words=lacking
            )
            remarks[remark] = None
        if not cells:
            words = [f"{r.source}: {r.tensor or ''} {r.words}" for r in remarks]
            raise MeasurementError(f"no tensor could be compared: {some(words)}")
        judged = tuple(standings(runs.runs, cells))
        quantiles = tuple(_quantiles(runs, judged, tensors))
    mark = marks(runs.runs, cells)
    steps = sorted({c.step for c in cells})
    axis = figures.axis_of(steps, all_named=True) if any(steps[1:]) else None
    return records.WeightsReport(
        provenance=provenance(system, {"checkpoint": ", ".join(targets)}, command),
        request=request,
        summary=records.WeightsSummary(
            answer=(
                *answer(runs.runs, cells, judged, mark.early),
                *matters(tuple(remarks)),
            ),
            axis=axis,
        ),
        sources=tuple(sources),
        runs=runs.runs,
        cells=tuple(cells),
        standings=judged,
        quantiles=quantiles,
        early=mark.early,
        figures=tuple(_figures(runs.runs, cells)) if axis else (),
        remarks=tuple(remarks),
        timings=watch.seconds(),
    )


def layer_of(name: str) -> Layer:
    """The first number among the parts of a tensor's name, which counts layers wherever
    models have them."""
    return next((int(part) for part in name.split(".") if part.isdigit()), "none")


def _cells(
    measured: Sequence[Measured], names: Mapping[str, str], place: Place
) -> Iterator[records.CellRow]:
    """All tensors together, by layer, by kind, and by both, of each run."""
    seed, step = place
    for of, own in grouped(measured, lambda at: at[0].of).items():
        wholes: dict[tuple[Layer, str], list[Measured]] = {}
        for row, sums in own:
            layers: tuple[Layer, ...] = (ALL, layer_of(row.tensor))
            for at in itertools.product(layers, (ALL, row.kind)):
                wholes.setdefault(at, []).append((row, sums))
        for (layer, kind), these in wholes.items():
            fields = together([row for row, _ in these], [sums for _, sums in these])
            named = {"of": names[of], "against": names[fields["against"]]}
            where: dict[str, Any] = {
                "seed": seed,
                "step": step,
                "layer": layer,
                "kind": kind,
            }
            yield records.CellRow(**{**fields, **named, **where})


def _farthest(
    measured: Iterable[Measured], names: Mapping[str, str], place: Place
) -> Tensors:
    largest: dict[Any, float] = {}
    tensors: Tensors = {}
    for row, _ in measured:
        at = (names[row.of], *place, layer_of(row.tensor), row.kind)
        if (row.w1 or 0.0) >= largest.get(at, 0.0):
            largest[at], tensors[at] = row.w1 or 0.0, row.tensor
    return tensors


# --- quantiles ------------------------------------------------------------------------


def _quantiles(
    runs: Kept, judged: Sequence[records.Standing], tensors: Tensors
) -> Iterator[records.QuantileRow]:
    """Of the layers and kinds that stand out farthest, each at its farthest step in its
    first seed: how the quantiles of the tensor of the largest W1 differ from the first
    run's."""
    out = [s for s in finest(judged) if s.stands_out]
    out.sort(key=lambda s: -(s.margin or 0.0))
    chosen = {(s.variant, s.layer, s.kind): s for s in reversed(out)}
    farthest = sorted(chosen.values(), key=lambda s: -(s.margin or 0.0))[:MOST_SHIFTED]
    chance = {run.name for run in runs.runs if is_chance(run)}
    first = runs.runs[0].name
    for s in farthest:
        seed = next(
            at
            for at, step in runs.places
            if step == s.step and s.variant in runs.places[at, step]
        )
        named = runs.places[seed, s.step]
        name = tensors[s.variant, seed, s.step, s.layer, s.kind]
        values = {
            run: _values(named[run], name)
            for run in named
            if run in {first, s.variant, *chance}
        }
        levels = {
            run: np.quantile(x, QUANTILES) for run, x in values.items() if x is not None
        }
        if first in levels and s.variant in levels:
            base = levels[first]
            shift = levels[s.variant] - base
            nulls = [levels[run] - base for run in levels if run in chance]
            for i, quantile in enumerate(QUANTILES):
                at = [float(x[i]) for x in nulls]
                yield records.QuantileRow(
                    variant=s.variant,
                    seed=seed,
                    step=s.step,
                    tensor=name,
                    quantile=quantile,
                    against=float(base[i]),
                    shift=float(shift[i]),
                    null_least=min(at, default=None),
                    null_most=max(at, default=None),
                )


def _values(target: str, name: str) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """The finite values of a tensor, in float64; None where it cannot be read or has
    none."""
    stored = open_weights(target).find(name)
    if stored is None:
        return None
    try:
        tensor: Tensor = stored.read()
    except MeasurementError:
        return None
    x = widened(tensor.detach()).double().reshape(-1)
    x = x[x.isfinite()]
    return x.numpy() if x.numel() else None


# --- figures --------------------------------------------------------------------------


def _figures(
    runs: Sequence[records.RunRecord], cells: Sequence[records.CellRow]
) -> Iterator[Figure]:
    """Distances by step in all three metrics: of all weights, and of every kind; those of
    nulls stand behind."""

    def middle(values: Sequence[float]) -> Mean:
        ends = (min(values), max(values)) if len(values) > 1 else (None, None)
        return geometric_mean(values), *ends

    labels = {run.name: curve_of(run) for run in runs[1:]}
    soft = {
        labels[run.name] for run in runs[1:] if run.null or run.role.startswith("null")
    }
    whole = [c for c in cells if c.layer == ALL]
    for kind, here in grouped(whole, lambda c: c.kind).items():
        for metric, name in NAMES.items():
            rows = [
                (labels[c.of], c.step, x)
                for c in here
                if (x := getattr(c, metric)) and c.step > 0
            ]
            title = f"{label_of(ALL, kind)}: {name}".capitalize()
            place = {"weights": label_of(ALL, kind)}
            figure = figures.figure(
                title,
                metric,
                name,
                dict.fromkeys(labels.values()),
                rows,
                middle,
                soft=soft,
                place=place,
            )
            if figure.curves:
                yield figure


def curve_of(run: records.RunRecord) -> str:
    """What a run is called in curves: nulls of one kind and strength are one."""
    if run.null:
        return f"null: {run.name}"
    dose = "" if (run.times or 1.0) == 1.0 else f" at {run.times:g} floors"
    return KINDS_OF_NULL[run.role] + dose if run.role in KINDS_OF_NULL else run.name
