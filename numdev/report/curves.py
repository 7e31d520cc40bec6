"""From the rows of a sweep to its curves: heads pooled, then seeds, then points along an axis.

In each cell, for one kernel in one format, heads are pooled within a seed (POOLED says how), and
then the seeds give a mean and its 95 % interval from Student's t-distribution: heads of one seed
are no further observations. A ratio to the baseline is taken seed by seed, on the same inputs, and
the ratios' geometric mean is shown. Curves run along one axis; other axes make figures of their
own, kernels with their options are the lines within one. `sweep_words` makes the sentences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import pandas as pd

from numdev.config import CaseConfig, SweepRequest
from numdev.errors import UsageError, closest
from numdev.formats import format_named
from numdev.metrics.statistics import factor, interval
from numdev.report import Axis, CellRow, Curve, DeviationRow, Figure, Point, Tick

MEDIAN = (
    *("row_rel", "rel", "floor_ratio", "baseline_ratio", "expected_ratio"),
    *("flash_vs_precision", "flash_vs_low_precision", "bias", "bias_sign", "noise"),
)
POOLED = {
    **dict.fromkeys(("max_abs", "max_ulp", "worst_row"), "max"),
    "mean_abs": "mean",
    **dict.fromkeys(("rms", "precision_rms", "from_baseline_rms", "low_precision_rms"), "rms"),
    **dict.fromkeys(MEDIAN, "median"),
    "nonfinite": "sum",
}
"""What can be drawn, and how it is pooled over heads; a mean and an rms are over elements."""
IN_CELLS = ("max_abs", "mean_abs", "rms", "row_rel", "floor_ratio", "nonfinite")
"""Metrics every report of a sweep gives for each cell, whatever is drawn."""
WORDS = {
    "max_abs": "max error",
    "mean_abs": "mean error",
    "rms": "rms error",
    "row_rel": "relative error of a row",
    "rel": "relative error",
    "max_ulp": "max error in ulps",
    "floor_ratio": "rms error over the floor's",
    "baseline_ratio": "rms error over the baseline's",
    "expected_ratio": "error over the expected",
    "nonfinite": "elements not finite",
    "seq_len": "sequence length",
    "kv_len": "keys",
    "head_dim": "head dimension",
    "format": "significant bits",
    "block_kv": "keys in a tile",
    "block_q": "queries in a tile",
    "memory": "on-chip elements",
}
SHORT = {"bfloat16": "bf16", "float16": "fp16", "tf32": "tf32", "float32": "fp32",
         "float64": "fp64", "float8_e4m3fn": "fp8 e4m3", "float8_e5m2": "fp8 e5m2"}  # fmt: skip
CELL = ["case", "role", "kernel", "chosen", "format"]
Place = tuple[tuple[str, str], ...]
"""Where a figure stands on the axes that no curve runs along."""


def words(name: str) -> str:
    """What a metric or an axis is called in a sentence."""
    return WORDS.get(name, name.replace("_", " "))


def check_metrics(names: Iterable[str], where: str) -> None:
    """Raises UsageError for a metric that cannot be drawn, naming the closest."""
    for name in names:
        if name not in POOLED:
            raise UsageError(f"{where}: y is {name!r}, no metric", hint=closest(name, POOLED))


@dataclass(frozen=True)
class Grid:
    """A sweep's axes: which there are, which one curves run along, and where a cell stands."""

    request: SweepRequest
    kernels: Sequence[tuple[str, Mapping[str, Any]]]
    """Every kernel as planned, with all its options."""

    @cached_property
    def axes(self) -> dict[str, list[str]]:
        """Every axis with more than one value, and its values in order."""
        places: list[dict[str, Any]] = [case.axes for case in self.request.cases]
        places += [{"case": case.entry} for case in self.request.cases]
        places += [{"format": name} for name in self.request.formats]
        places += [self._chosen(kernel, options) for kernel, options in self.kernels]
        names = dict.fromkeys(name for place in places for name in place)
        values = {n: [str(place[n]) for place in places if n in place] for n in names}
        return {n: list(dict.fromkeys(own)) for n, own in values.items() if len({*own}) > 1}

    @cached_property
    def _named(self) -> dict[str, list[str]]:
        """Kernel to the options somebody gave it a value for: what its label must say."""
        named: dict[str, list[str]] = {}
        for choice in (*self.request.kernels, self.request.baseline):
            named.setdefault(choice.name, []).extend(choice.options)
        return named

    def _chosen(self, kernel: str, options: Mapping[str, Any]) -> dict[str, Any]:
        named = self._named.get(kernel, ())
        return {name: value for name in named if (value := options.get(name)) is not None}

    def _place(self, case: CaseConfig, fmt: str) -> dict[str, Any]:
        return {**case.axes, "case": case.entry, "format": fmt}

    @cached_property
    def x(self) -> str:
        """The axis of the curves: as asked, else the one with most values.

        Raises UsageError for a grid without an axis, and for one it does not have.
        """
        if not self.axes:
            raise UsageError(
                f"{self.request.target}: the grid has a single cell",
                hint="give some key a list of values, or use `numdev audit`",
            )
        if self.request.x is None:
            numeric = [name for name in self.axes if name == "format" or self._numbers(name)]
            return max(numeric or self.axes, key=lambda name: len(self.axes[name]))
        if self.request.x not in self.axes:
            raise UsageError(
                f"{self.request.target}: x is {self.request.x!r}, which is no axis of this grid",
                hint=closest(self.request.x, self.axes),
            )
        return self.request.x

    def _numbers(self, name: str) -> list[float] | None:
        """An axis' values as numbers; None where one is none, or not finite."""
        try:
            numbers = [float(value) for value in self.axes[name]]
        except ValueError:
            return None
        return numbers if all(map(math.isfinite, numbers)) else None

    @property
    def axis(self) -> Axis:
        """The axis of the curves; its ticks are the values in the order they are drawn."""
        return self._drawn[0]

    @cached_property
    def _drawn(self) -> tuple[Axis, dict[str, float]]:
        """The axis, and where each value stands on it. Formats stand at their significant bits; as
        categories, like what is no number, where two have as many."""
        values, numbers, title = self.axes[self.x], self._numbers(self.x), words(self.x)
        formats = {v: format_named(v) for v in values} if self.x == "format" else {}
        below = {v: SHORT.get(fmt.name, "") for v, fmt in formats.items()}
        if formats:
            numbers = [float(fmt.precision) for fmt in formats.values()]
        scale: Literal["linear", "log", "category"] = "linear"
        if numbers is None or len({*numbers}) < len(numbers):
            scale, title = "category", "format" if formats else title
            ticks = {v: Tick(x=float(i), label=below.get(v) or v) for i, v in enumerate(values)}
        else:
            placed = sorted(zip(numbers, values, strict=True))
            if not formats and placed[0][0] > 0 and placed[-1][0] / placed[0][0] >= 8:
                scale = "log"
            labels = {v: f"{x:g}" if formats else v for x, v in placed}
            ticks = {v: Tick(x=x, label=labels[v], below=below.get(v, "")) for x, v in placed}
        axis = Axis(name=self.x, title=title, scale=scale, ticks=tuple(ticks.values()))
        return axis, {value: tick.x for value, tick in ticks.items()}

    @cached_property
    def configs(self) -> dict[str, CaseConfig]:
        return {case.name: case for case in self.request.cases}

    def at(self, row: DeviationRow) -> tuple[float | None, str]:
        """A row's place on the axis (None where it does not move it), and what that is called."""
        case = self.configs[row.case]
        places = {**self._chosen(row.kernel, row.options), **self._place(case, row.format)}
        value = str(places.get(self.x, getattr(case, self.x, None)))
        x = self._drawn[1].get(value)
        return (None, "") if x is None else (x, value)

    def place(self, row: DeviationRow) -> Place:
        """Where a row stands on the other axes of cases and formats: which figure it is in."""
        values = self._place(self.configs[row.case], row.format)
        return tuple((n, str(values[n])) for n in self.axes if n != self.x and n in values)

    def label(self, kernel: str, options: Mapping[str, Any]) -> str:
        """A kernel with the options that tell it from others, but for the axis."""
        chosen = {n: v for n, v in self._chosen(kernel, options).items() if n != self.x}
        parts = (str(v) if n == "preset" else f"{n}={v}" for n, v in chosen.items())
        return " ".join([kernel, *parts])


@dataclass(frozen=True)
class Estimate:
    """One metric of one kernel in one cell, over seeds; by seed, for what is taken in pairs."""

    row: DeviationRow  # any of its rows: what it is of
    metric: str
    by_seed: Mapping[int, float]
    ratios: Mapping[int, float]
    limited: bool

    def cell(self, axes: Mapping[str, Any]) -> CellRow:
        mean = interval(list(self.by_seed.values())) if self.by_seed else (None, None, None)
        ratio = factor(list(self.ratios.values())) if self.ratios else (None, None, None)
        names = ("mean", "low", "high", "ratio", "ratio_low", "ratio_high")
        return CellRow(
            axes=dict(axes),
            **{n: getattr(self.row, n) for n in ("case", "role", "kernel", "options", "format")},
            metric=self.metric,
            seeds=len(self.by_seed),
            **dict(zip(names, (*mean, *ratio), strict=True)),
        )


def estimates(
    rows: Sequence[DeviationRow], metrics: Sequence[str], baseline: tuple[str, Mapping[str, Any]]
) -> list[Estimate]:
    """Every metric of every kernel in every cell and format, in the order of the rows."""
    table = _pooled([r for r in rows if r.status == "ok" and r.tensor == "out"], metrics)
    plain = table[(table["kernel"] == baseline[0]) & (table["chosen"] == _chosen(baseline[1]))]
    base = plain.drop_duplicates(["case", "format", "seed"], keep="last")
    base = base.set_index(["case", "format", "seed"])
    estimates = []
    for _, group in table.groupby(CELL, sort=False):
        row, limited = group["row"].iloc[0], bool(group["limited"].any())
        for metric in metrics:
            values = zip(group["seed"].astype(int), group[metric], strict=True)
            mine = {seed: value for seed, value in values if math.isfinite(value)}
            theirs = {s: base[metric].get((row.case, row.format, s), 0.0) for s in mine}
            ratios = {s: v / theirs[s] for s, v in mine.items() if theirs[s] > 0}
            estimates.append(Estimate(row, metric, mine, ratios, limited))
    return estimates


def _pooled(rows: Sequence[DeviationRow], metrics: Sequence[str]) -> pd.DataFrame:
    """One line for each cell, seed, kernel and format: the metrics pooled over heads."""
    table = pd.DataFrame(list(map(vars, rows)), columns=list(DeviationRow.model_fields)).assign(
        chosen=[_chosen(row.options) for row in rows],
        limited=[row.reason == "reference-limited" for row in rows],
        row=pd.Series(rows, dtype=object),
    )
    elements = table["elements"].astype(float)
    for metric in metrics:
        values = table[metric].astype(float)
        power = {"mean": 1, "rms": 2}.get(POOLED[metric])
        table[metric] = values if power is None else values**power * elements
        table[f"{metric} weight"] = elements.where(values.notna())
    groups = table.groupby([*CELL, "seed"], sort=False, dropna=False)
    means = groups.agg(limited=("limited", "any"), row=("row", "first"))
    for metric in metrics:
        how, of = POOLED[metric], groups[metric]
        if how in ("mean", "rms"):
            over = of.sum(min_count=1) / groups[f"{metric} weight"].sum()
            means[metric] = over if how == "mean" else over**0.5
        else:
            means[metric] = of.sum(min_count=1) if how == "sum" else of.agg(how)
    return means.reset_index()


def _chosen(options: Mapping[str, Any]) -> str:
    return repr(sorted(options.items()))


@dataclass(frozen=True)
class Line:
    """One curve before it is drawn: its estimates by place on the axis."""

    label: str
    metric: str
    place: Place
    at: Mapping[float | None, tuple[str, Estimate]]

    @property
    def row(self) -> DeviationRow:
        return next(iter(self.at.values()))[1].row

    @property
    def constant(self) -> bool:
        return None in self.at and len(self.at) == 1


def lines(estimates: Sequence[Estimate], grid: Grid) -> list[Line]:
    """The estimates as curves along the grid's axis, in the order they came."""
    collected: dict[tuple[Any, ...], dict[float | None, tuple[str, Estimate]]] = {}
    for estimate in estimates:
        row = estimate.row
        x, called = grid.at(row)
        label = "input rounding" if row.role == "precision" else grid.label(row.kernel, row.options)
        key = (label, estimate.metric, grid.place(row), row.role, row.kernel)
        collected.setdefault(key, {})[x] = (called, estimate)
    order = {None: -1} | {tick.x: i for i, tick in enumerate(grid.axis.ticks)}
    return [
        Line(label, metric, place, dict(sorted(at.items(), key=lambda point: order[point[0]])))
        for (label, metric, place, *_), at in collected.items()
    ]


def figures(curves: Sequence[Line], grid: Grid, baseline: str) -> tuple[Figure, ...]:
    """For every place and metric: the curves themselves, and their ratios to the baseline."""
    drawn = [
        _figure([line for line in curves if (line.place, line.metric) == (place, metric)],
                grid, relative, baseline)
        for metric in dict.fromkeys(grid.request.y)
        for place in dict.fromkeys(line.place for line in curves)
        for relative in (False, True)
    ]  # fmt: skip
    return tuple(figure for figure in drawn if figure is not None)


def _figure(lines: Sequence[Line], grid: Grid, relative: bool, baseline: str) -> Figure | None:
    """None where there is nothing to draw, or no kernel's ratio."""
    curves = [c for line in lines if (c := _curve(line, relative, baseline)) is not None]
    if not lines or (relative and not any(c.role == "kernel" for c in curves)):
        return None
    place, what = dict(lines[0].place), words(lines[0].metric)
    where = f" ({', '.join(placed(place))})" if place else ""
    over = f" over that of {baseline}" if relative else ""
    values = [p.mean for curve in curves for p in curve.points]
    positive = [v for v in values if v > 0]
    wide = positive and not min(values) < 0 and max(positive) / min(positive) >= 4
    return Figure(
        title=f"{what[0].upper()}{what[1:]}{over}, by {grid.axis.title}{where}",
        metric=lines[0].metric,
        relative=relative,
        place=place,
        y_title=f"{what}, times {baseline}'s" if relative else f"{what} against fp64",
        y_scale="log" if wide else "linear",
        curves=tuple(curves),
    )


def placed(place: Mapping[str, str]) -> list[str]:
    """A place on the other axes in words."""
    plain = ("format", "inputs", "case")
    switch = {"True": "", "False": "not "}
    return [
        v if k in plain else f"{switch[v]}{k}" if v in switch else f"{words(k)} {v}"
        for k, v in place.items()
    ]


def _curve(line: Line, relative: bool, baseline: str) -> Curve | None:
    """A line as the report holds it; None where it has no number, or is no ratio worth drawing."""
    role = line.row.role
    if relative and (role == "precision" or line.label == baseline):
        return None
    points = []
    for x, (called, estimate) in line.at.items():
        values = list((estimate.ratios if relative else estimate.by_seed).values())
        if values and (x is not None or line.constant):
            mean, low, high = (factor if relative else interval)(values)
            points.append(Point(x=x, label=called, mean=mean, low=low, high=high, seeds=len(values),
                                limited=estimate.limited))  # fmt: skip
    if not points:
        return None
    return Curve(
        label=line.label,
        role="baseline" if line.label == baseline else role,
        kernel=line.row.kernel,
        options=line.row.options if line.constant else {},
        constant=line.constant,
        points=tuple(points),
    )
