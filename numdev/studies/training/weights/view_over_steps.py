"""Shows runs compared over the steps of a training: by layer and kind at each step beside
chance, all three distances by step, and quantiles where a distance stands out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from numdev.grouping import grouped
from numdev.report import document as doc
from numdev.report.document import PAGE, Cell, Column
from numdev.report.number_text import NONE, percent, ratio, si
from numdev.studies.training.bounds.report import FEWEST_SEEDS
from numdev.studies.training.weights.chance_comparison import (
    FEWEST_NULLS,
    LIMITS,
    Metric,
    place_in_words,
)
from numdev.studies.training.weights.report import (
    ALL,
    ChanceComparison,
    Layer,
    QuantileRow,
    WeightsReport,
)

ON_PAGE = 40  # tables of a run at a step
SHORT: Mapping[Metric, str] = {
    "mean_abs": "mean",
    "mean_w1": "mean W1",
    "max_abs": "largest",
}
LEGEND = (
    "Distances: of a run's weights from the first run's of the same seed at the same "
    "step, the geometric mean over seeds. mean and largest: of |difference|, element by "
    "element; mean W1: the mean of the tensors' Wasserstein distances, by elements, each "
    "blind to which value stands where (not W1 of all weights pooled, which `numdev "
    "train` and `numdev bounds` have).",
    "Chance: what rounding alone makes of the same tensors: the nulls re-rounded at one "
    "floor (without any, all of at most one floor, or those named as nulls), in each "
    "seed their geometric mean. ×: a run's distance over chance's (on a page with the "
    "ends over seeds). Nulls of other strengths stand in the figures.",
    f"Stands out (!): in every seed a distance is more than {LIMITS['mean_abs']:g} times "
    f"(mean), {LIMITS['mean_w1']:g} times (mean W1) or {LIMITS['max_abs']:g} times "
    "(largest) that of the farthest null of at most one floor (re-rounded, or moved by "
    "an ulp). Judged of each place, the tensors of one kind in one layer, beside "
    f"{FEWEST_NULLS} nulls or more in each of {FEWEST_SEEDS} seeds or more.",
    "Quantiles: of the tensor with the largest W1 of what stands out; nulls: from the "
    "least to the most of the seed's null runs.",
)


def blocks(report: WeightsReport) -> Iterator[doc.Node]:
    """Yields what is shown below the answer: for each run the first ON_PAGE tables by
    step, then quantiles, a legend, and, on the page alone and where the summary has an
    axis, the figures."""
    for of_run in grouped(report.standings, lambda s: s.variant).values():
        yield doc.TableChoice(tuple(_tables_by_step(of_run, report.early))[:ON_PAGE])
    yield from _quantile_tables(report)
    yield doc.Bullets(tuple(map(doc.item_with_lead, LEGEND)))
    if axis := report.summary.axis:
        first = report.runs[0].name
        yield doc.Heading("By step", PAGE)
        yield doc.Figures(report.figures, axis, first, PAGE)


def _tables_by_step(
    of_run: Sequence[ChanceComparison], early: Sequence[int]
) -> Iterator[doc.Table]:
    """Yields a table for each step of one run, early steps first. The rows are all
    weights, then layers, then kinds, then layers and kinds. `of_run`: at least one, all
    of one run."""
    steps = grouped(of_run, lambda s: s.step)
    for step in sorted(steps, key=lambda step: (step not in early, step)):
        places = grouped(steps[step], lambda s: (s.layer, s.kind))
        rows = [
            _place_cells(place, {s.metric: s for s in places[place]})
            for place in sorted(places, key=lambda place: _place_order(*place))
        ]
        columns: list[str | Column] = ["layer, kind"]
        for name in SHORT.values():
            columns += [Column(name), Column("chance", width=110), Column("×")]
        when = "" if step in early else ", when chance or chaos decides"
        title = f"{of_run[0].variant}, step {step}{when}"
        yield doc.table(columns, rows, title=title)


def _place_order(layer: Layer, kind: str) -> tuple[int, int, str]:
    """Returns a sort key: all weights first, then layers, then kinds, then layers with
    kinds; `none` before the first layer."""
    groups = {(True, True): 0, (False, True): 1, (True, False): 2}
    group = groups.get((layer == ALL, kind == ALL), 3)
    return group, layer if isinstance(layer, int) else -1, "" if kind == ALL else kind


def _place_cells(
    place: tuple[Layer, str], by_metric: Mapping[str, ChanceComparison]
) -> Iterator[Cell]:
    """Yields the cells of a layer and kind: its name, then for each metric the distance,
    chance's, and their ratio, with `!` where it stands out. Dashes for a metric that is
    missing."""
    yield Cell(place_in_words(*place))
    for metric in SHORT:
        s = by_metric.get(metric)
        if s is None:
            yield from (Cell(NONE),) * 3
            continue
        ends = "" if s.least is None else f"{ratio(s.least)} to {ratio(s.most)}"
        yield Cell(si(s.value))
        yield Cell(si(s.null))
        mark = "!" if s.stands_out else ""
        yield Cell(ratio(s.ratio) + mark, style="warn" if mark else "", title=ends)


def _quantile_tables(report: WeightsReport) -> Iterator[doc.Node]:
    """Yields a table of the quantiles of each tensor that has some."""
    tensors = grouped(report.quantiles, lambda q: (q.variant, q.step, q.seed, q.tensor))
    for (variant, step, seed, tensor), rows in tensors.items():
        title = f"Quantiles of {tensor}, {variant} at step {step}, seed {seed}"
        columns = ["quantile", report.runs[0].name, "shift", "of nulls"]
        yield doc.table(columns, map(_quantile_cells, rows), title=title)


def _quantile_cells(row: QuantileRow) -> Iterator[str]:
    """Yields the cells of a quantile: which it is, the first run's value, the shift, and
    the range of the nulls' shifts, a dash without nulls."""
    yield percent(row.quantile)
    yield si(row.against)
    yield si(row.shift)
    has_nulls = row.null_least is not None
    yield f"{si(row.null_least)} to {si(row.null_most)}" if has_nulls else NONE
