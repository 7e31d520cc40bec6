"""`numdev weights` over the steps of a training: compares every run's weights with the
first run's of the same seed and step, by layer and by kind of tensor, as the first
paper's figure 7 has them.

At a seed and step sets are compared as any others
(`numdev.studies.training.weights.study`); the sums of each tensor stay until its layer
and kind are added up. Where a distance is far beyond chance's the tensors are read again,
for quantiles of their values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from numdev.errors import MeasurementError
from numdev.grouping import grouped
from numdev.metrics.statistics import Mean
from numdev.metrics.yardstick import widened
from numdev.report import Figure
from numdev.report.io import claim_directory
from numdev.studies.audit.run import Progress, provenance
from numdev.studies.audit.section_timing import Stopwatch
from numdev.studies.training import figures
from numdev.studies.training.report import VariantRole
from numdev.studies.training.weights import report as records
from numdev.studies.training.weights.chance_comparison import (
    NAMES,
    answer_sentences,
    chance_comparisons,
    early_marks,
    is_chance,
    place_in_words,
    single_places,
)
from numdev.studies.training.weights.report import ALL, Layer
from numdev.studies.training.weights.run_checkpoints import (
    Place,
    RunCheckpoints,
    find_runs,
)
from numdev.studies.training.weights.study import (
    Measured,
    WeightComparison,
    group_fields,
    nothing_compared_error,
    remark_sentences,
    source_record,
)
from numdev.studies.training.weights.weight_sets import open_weights
from numdev.system import System

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
MAX_SHIFTED = 6  # layers and kinds of which quantiles are shown
KINDS_OF_NULL: Mapping[VariantRole, str] = {
    "null_rounding": "null: re-rounded",
    "null_ulp": "null: one ulp",
}
# By run, seed, step, layer and kind the tensor whose W1 is largest
Tensors = dict[tuple[str, int, int, Layer, str], str]


def weights_over_steps(
    targets: Sequence[str],
    directory: Path,
    *,
    nulls: Sequence[str] = (),
    device: str = "auto",
    overwrite: bool = False,
    command: str = "",
    progress: Progress = lambda what, done, total: None,
) -> records.WeightsReport:
    """Compares runs with the first at every step that has weights and returns the report,
    which the caller writes to `directory`, made here. `targets` and `nulls`: as in
    `find_runs`. Raises UsageError, before anything is read, where there is nothing to
    compare, and where the directory has the report of another command, or (unless
    `overwrite`) of another request. Raises UsageError too for a path that is not one set
    of weights, when its turn comes. Raises MeasurementError where no tensor could be
    compared, and where the directory's old report cannot be read. Tensors that cannot be
    compared are remarks in the report."""
    runs = find_runs(targets, nulls)
    request = {"targets": list(targets), "nulls": list(nulls), "device": device}
    system = System.probe(device)
    claim_directory(directory, "weights", request, overwrite=overwrite)
    watch = Stopwatch(system.device)
    with watch("weights"):
        results = _compare_runs(runs, system.device, progress)
        if not results.cells:
            raise nothing_compared_error(results.remarks)
        judged = tuple(chance_comparisons(runs.runs, results.cells))
        quantiles = tuple(_quantile_rows(runs, judged, results.tensors))
    mark = early_marks(runs.runs, results.cells)
    steps = sorted({cell.step for cell in results.cells})
    axis = figures.step_axis(steps, all_named=True) if any(steps[1:]) else None
    remarks = tuple(results.remarks)
    sentences = (
        *answer_sentences(runs.runs, results.cells, judged, mark.early),
        *remark_sentences(remarks),
    )
    drawn = tuple(_figures(runs.runs, results.cells)) if axis else ()
    return records.WeightsReport(
        provenance=provenance(system, {"checkpoint": ", ".join(targets)}, command),
        request=request,
        summary=records.WeightsSummary(answer=sentences, axis=axis),
        sources=tuple(results.sources),
        runs=runs.runs,
        cells=tuple(results.cells),
        standings=judged,
        quantiles=quantiles,
        early=mark.early,
        figures=drawn,
        remarks=remarks,
        timings=watch.seconds(),
    )


@dataclass
class _Results:
    """What is collected over all seeds and steps, in place."""

    cells: list[records.WeightsCell] = field(default_factory=list)
    remarks: dict[records.Remark, None] = field(default_factory=dict)
    sources: list[records.SourceRecord] = field(default_factory=list)
    tensors: Tensors = field(default_factory=dict)


def _compare_runs(runs: RunCheckpoints, device: str, progress: Progress) -> _Results:
    """Returns the cells, remarks, sources and farthest tensors of every run compared with
    the first, at every seed and step of `runs.places`. What a seed and step lacks is a
    remark."""
    results = _Results()
    for done, (place, paths) in enumerate(runs.places.items()):
        progress(f"step {place[1]}, seed {place[0]}", done, len(runs.places))
        order = [run.name for run in runs.runs if run.name in paths]
        opened = [open_weights(paths[name]) for name in order]
        names = dict(zip((x.name for x in opened), order, strict=True))
        comparison = WeightComparison(opened, device)
        measured = list(comparison.compare_tensors())
        results.cells += _cells(measured, names, place)
        results.tensors |= _farthest_tensors(measured, names, place)
        results.remarks |= comparison.remarks
        results.sources += map(source_record, opened)
    for words in runs.missing:
        remark = records.Remark(
            source=runs.name, tensor=None, what="missing", words=words
        )
        results.remarks[remark] = None
    return results


def layer_by_name(name: str) -> Layer:
    """Returns the layer of a tensor by its dotted name: the first part that is a number,
    as an int; the string `none` for a name without a number."""
    return next((int(part) for part in name.split(".") if part.isdigit()), "none")


def _cells(
    measured: Sequence[Measured], names: Mapping[str, str], place: Place
) -> Iterator[records.WeightsCell]:
    """Yields the cells of each run at a seed and step: all tensors together, those of
    each layer, of each kind, and of each layer and kind. `names`: the run's name by the
    name of its set of weights; `place`: (seed, step)."""
    seed, step = place
    for of, of_set in grouped(measured, lambda pair: pair[0].of).items():
        groups: dict[tuple[Layer, str], list[Measured]] = {}
        for row, sums in of_set:
            layers: tuple[Layer, ...] = (ALL, layer_by_name(row.tensor))
            for group in itertools.product(layers, (ALL, row.kind)):
                groups.setdefault(group, []).append((row, sums))
        for (layer, kind), of_group in groups.items():
            fields = group_fields(of_group)
            fields |= {"of": names[of], "against": names[fields["against"]]}
            yield records.WeightsCell(
                **fields, seed=seed, step=step, layer=layer, kind=kind
            )


def _farthest_tensors(
    measured: Iterable[Measured], names: Mapping[str, str], place: Place
) -> Tensors:
    """Returns the name of the tensor with the largest W1 in each layer and kind of each
    run, by (run, seed, step, layer, kind); of equal ones the last."""
    largest: dict[tuple[str, int, int, Layer, str], float] = {}
    tensors: Tensors = {}
    for row, _ in measured:
        at = (names[row.of], *place, layer_by_name(row.tensor), row.kind)
        if (row.w1 or 0.0) >= largest.get(at, 0.0):
            largest[at], tensors[at] = row.w1 or 0.0, row.tensor
    return tensors


# --- quantiles ------------------------------------------------------------------------


def _quantile_rows(
    runs: RunCheckpoints, judged: Sequence[records.ChanceComparison], tensors: Tensors
) -> Iterator[records.QuantileRow]:
    """Yields QUANTILES of one tensor, and their shift from the first run's, in each of at
    most MAX_SHIFTED layers and kinds: those that are farthest beyond chance, at the step
    where they are so. The tensor is that with the largest W1, in the first seed whose run
    has one there at that step. One that cannot be read again is left out. Reads the
    weights again."""
    out = [s for s in single_places(judged) if s.stands_out]
    out.sort(key=lambda s: -(s.margin or 0.0))
    chosen = {(s.variant, s.layer, s.kind): s for s in reversed(out)}
    farthest = sorted(chosen.values(), key=lambda s: -(s.margin or 0.0))[:MAX_SHIFTED]
    chance = {run.name for run in runs.runs if is_chance(run)}
    first = runs.runs[0].name
    for s in farthest:
        seed, name = next(
            (seed, name)
            for seed, step in runs.places
            if step == s.step
            and (name := tensors.get((s.variant, seed, step, s.layer, s.kind)))
        )
        paths = runs.places[seed, s.step]
        shown = {first, s.variant, *chance}
        levels = {}
        for run, path in paths.items():
            values = _finite_values(path, name) if run in shown else None
            if values is not None:
                levels[run] = np.quantile(values, QUANTILES)
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


def _finite_values(target: str, name: str) -> NDArray[np.float64] | None:
    """Returns the finite values of a tensor, float64 [elements]. None where the set lacks
    the tensor, where it cannot be read, and where no value is finite. `target`: a set of
    weights. Raises what `open_weights` raises."""
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
    runs: Sequence[records.RunRecord], cells: Sequence[records.WeightsCell]
) -> Iterator[Figure]:
    """Yields a figure of distances by step for each metric, of all weights together and
    of every kind; one without a curve is left out. Curves of nulls are soft."""

    def middle(values: Sequence[float]) -> Mean:
        """Returns the geometric mean of the values at a step, the least and the largest;
        for a single value the latter two are None. Values are above 0."""
        ends = (min(values), max(values)) if len(values) > 1 else (None, None)
        return geometric_mean(values), *ends

    labels = {run.name: curve_name(run) for run in runs[1:]}
    nulls = [run for run in runs[1:] if run.null or run.role.startswith("null")]
    soft = {labels[run.name] for run in nulls}
    whole = [c for c in cells if c.layer == ALL]
    for kind, of_kind in grouped(whole, lambda c: c.kind).items():
        for metric, name in NAMES.items():
            rows = [
                (labels[c.of], c.step, x)
                for c in of_kind
                if (x := getattr(c, metric)) and c.step > 0
            ]
            title = f"{place_in_words(ALL, kind)}: {name}".capitalize()
            place = {"weights": place_in_words(ALL, kind)}
            figure = figures.figure_by_step(
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


def curve_name(run: records.RunRecord) -> str:
    """Returns the name of a run's curve: `null: NAME` where the user declares it a null;
    `null: re-rounded at 4 floors` or `null: one ulp` for a run in a role of
    KINDS_OF_NULL, which those of one role and strength share; else the run's name."""
    if run.null:
        return f"null: {run.name}"
    dose = "" if (run.times or 1.0) == 1.0 else f" at {run.times:g} floors"
    return KINDS_OF_NULL[run.role] + dose if run.role in KINDS_OF_NULL else run.name
