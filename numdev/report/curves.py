"""From the rows of a sweep to its curves: heads pooled, then seeds, then points along an axis.

Everything a sweep's report says beyond its rows is computed here, once. In each cell, for one
kernel in one format: heads are pooled within a seed (a max over heads, a root mean square over
elements, a median for ratios), and then the seeds give a mean and its 95 % interval from Student's
t-distribution. Heads of one seed are not counted as further observations. A ratio to the baseline
is taken seed by seed, on the same inputs, and the ratios' geometric mean is shown.

A curve runs along one axis; every other axis that has several values gets figures of its own, and
kernels with their options are the lines within a figure. The sentences are made in `sweep_words`.
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
from numdev.report import Axis, CellRow, Curve, DeviationRow, Figure, Point, Role, Tick
from numdev.report.statistics import factor, interval

SQUARED = ("rms", "precision_rms", "from_baseline_rms", "low_precision_rms", "lower_rms")
LARGEST = ("max_abs", "max_ulp", "worst_row")
MEDIAN = (
    *("row_rel", "rel", "floor_ratio", "baseline_ratio", "expected_ratio"),
    *("flash_vs_precision", "flash_vs_precision_w1", "flash_vs_low_precision"),
    *("flash_vs_low_precision_w1", "flash_vs_lower", "flash_vs_lower_w1"),
    *("w1", "from_baseline_w1", "precision_w1", "bias", "bias_sign", "noise"),
)
METRICS = (*LARGEST, "mean_abs", *SQUARED, *MEDIAN, "nonfinite")
"""What can be drawn, by how it is pooled over heads: the largest, the mean over elements, the root
mean square over elements, the median head, the sum."""
IN_CELLS = ("max_abs", "mean_abs", "rms", "row_rel", "w1", "floor_ratio", "nonfinite")
"""Metrics every report of a sweep gives for each cell, whatever is drawn."""
WORDS = {
    "max_abs": "max error",
    "mean_abs": "mean error",
    "rms": "rms error",
    "row_rel": "relative error of a row",
    "rel": "relative error",
    "max_ulp": "max error in ulps",
    "w1": "Wasserstein distance",
    "floor_ratio": "rms error over the floor's",
    "baseline_ratio": "rms error over the baseline's",
    "expected_ratio": "error over the expected",
    "nonfinite": "elements not finite",
}
AXIS_WORDS = {
    "seq_len": "sequence length",
    "kv_len": "keys",
    "head_dim": "head dimension",
    "format": "significant bits",
    "block_kv": "keys in a tile",
    "block_q": "queries in a tile",
    "memory": "on-chip elements",
    "kv_heads": "kv heads",
}
SHORT = {"bfloat16": "bf16", "float16": "fp16", "tf32": "tf32", "float32": "fp32"}
SHORT |= {"float64": "fp64", "float8_e4m3fn": "fp8 e4m3", "float8_e5m2": "fp8 e5m2"}
CELL = ["case", "role", "kernel", "chosen", "format"]
Place = tuple[tuple[str, str], ...]
"""Where a figure stands on the axes that no curve runs along."""


def words(metric: str) -> str:
    """A metric's name in words."""
    return WORDS.get(metric, metric.replace("_", " "))


def check_metrics(names: Iterable[str], where: str) -> None:
    """Raises UsageError for a metric that cannot be drawn, naming the closest."""
    for name in names:
        if name not in METRICS:
            raise UsageError(f"{where}: y is {name!r}, no metric", hint=closest(name, METRICS))


@dataclass(frozen=True)
class Grid:
    """A sweep's axes: which there are, which one curves run along, and where a cell stands."""

    request: SweepRequest
    kernels: Sequence[tuple[str, Mapping[str, Any]]]
    """Every kernel as planned, with all its options."""

    @cached_property
    def axes(self) -> dict[str, list[str]]:
        """Every axis with more than one value, and its values in order."""
        pairs = [pair for case in self.request.cases for pair in case.axes.items()]
        pairs += [("case", case.entry) for case in self.request.cases]
        pairs += [("format", name) for name in self.request.formats]
        for kernel, options in self.kernels:
            given = {name: options.get(name) for name in self.shown.get(kernel, ())}
            pairs += [(name, value) for name, value in given.items() if value is not None]
        values: dict[str, dict[str, None]] = {}
        for name, value in pairs:
            values.setdefault(name, {})[str(value)] = None
        return {name: list(own) for name, own in values.items() if len(own) > 1}

    @cached_property
    def shown(self) -> dict[str, list[str]]:
        """Kernel to the options somebody gave it a value for: what its label must say."""
        given: dict[str, dict[str, None]] = {}
        for choice in (*self.request.kernels, self.request.baseline):
            given.setdefault(choice.name, {}).update(dict.fromkeys(choice.options))
        return {name: list(options) for name, options in given.items()}

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

    @cached_property
    def _ticks(self) -> dict[str, Tick]:
        """Each value of the axis and its tick, in the order they are drawn. Formats stand at their
        significant bits; as categories, like what is no number, where two have as many."""
        values = self.axes[self.x]
        if self.x == "format":
            formats = {name: format_named(name) for name in values}
            if len({fmt.precision for fmt in formats.values()}) == len(values):
                values = sorted(values, key=lambda n: (formats[n].precision, formats[n].emax))
                return {
                    name: Tick(x=float(formats[name].precision), label=str(formats[name].precision),
                               below=SHORT.get(formats[name].name, ""))
                    for name in values
                }  # fmt: skip
        elif (numbers := self._numbers(self.x)) is not None:
            placed = sorted(zip(numbers, values, strict=True))
            return {value: Tick(x=number, label=value) for number, value in placed}
        names = SHORT if self.x == "format" else {}
        return {v: Tick(x=float(i), label=names.get(v, v)) for i, v in enumerate(values)}

    @cached_property
    def axis(self) -> Axis:
        """The axis of the curves, with its ticks."""
        ticks = tuple(self._ticks.values())
        low, high = min(tick.x for tick in ticks), max(tick.x for tick in ticks)
        title = AXIS_WORDS.get(self.x, self.x.replace("_", " "))
        scale: Literal["linear", "log", "category"] = "category"
        if self.x == "format":
            numbered = ticks[0].label == str(format_named(next(iter(self._ticks))).precision)
            scale, title = ("linear", title) if numbered else ("category", "format")
        elif self._numbers(self.x) is not None:
            scale = "log" if low > 0 and high / low >= 8 else "linear"
        return Axis(name=self.x, title=title, scale=scale, ticks=ticks)

    @cached_property
    def configs(self) -> dict[str, CaseConfig]:
        return {case.name: case for case in self.request.cases}

    def at(self, row: DeviationRow) -> tuple[float | None, str]:
        """A row's place on the axis (None where it does not move it), and what that is called."""
        config = self.configs[row.case]
        value: Any = None
        if self.x == "format":
            value = row.format
        elif self.x == "case":
            value = config.entry
        elif any(self.x in case.axes for case in self.request.cases):
            value = config.axes.get(self.x, getattr(config, self.x, None))
        elif self.x in self.shown.get(row.kernel, ()):
            value = row.options.get(self.x)
        tick = self._ticks.get(str(value))
        return (None, "") if tick is None else (tick.x, str(value))

    def place(self, row: DeviationRow) -> Place:
        """Where a row stands on the other axes of cases and formats: which figure it is in."""
        config = self.configs[row.case]
        values = {**config.axes, "case": config.entry, "format": row.format}
        return tuple((n, str(values[n])) for n in self.axes if n != self.x and n in values)

    def label(self, kernel: str, options: Mapping[str, Any]) -> str:
        """A kernel with the options that tell it from others, but for the axis."""
        parts = [kernel]
        for name in self.shown.get(kernel, ()):
            value = options.get(name)
            if value is not None and name != self.x:
                parts.append(str(value) if name == "preset" else f"{name}={value}")
        return " ".join(parts)


def pooled(rows: Sequence[DeviationRow], metrics: Sequence[str]) -> pd.DataFrame:
    """One line for each cell, seed, kernel and format: the metrics pooled over heads."""
    ok = [row for row in rows if row.status == "ok" and row.tensor == "out"]
    names = ["case", "seed", "role", "kernel", "format"]
    table = pd.DataFrame([[getattr(row, name) for name in names] for row in ok], columns=names)
    table["chosen"] = [_chosen(row.options) for row in ok]
    table["limited"] = [row.reason == "reference-limited" for row in ok]
    elements = pd.Series([row.elements for row in ok], dtype=float)
    for metric in metrics:
        values = pd.Series([getattr(row, metric) for row in ok], dtype=float)
        table[metric] = values
        if metric in SQUARED or metric == "mean_abs":
            table[metric] = values ** (2 if metric in SQUARED else 1) * elements
            table[f"{metric} weight"] = elements.where(values.notna())
    groups = table.groupby([*CELL, "seed"], sort=False, dropna=False)
    means = groups["limited"].any().to_frame()
    for metric in metrics:
        of = groups[metric]
        if f"{metric} weight" in table:
            means[metric] = of.sum(min_count=1) / groups[f"{metric} weight"].sum()
            means[metric] **= 0.5 if metric in SQUARED else 1
        elif metric == "nonfinite":
            means[metric] = of.sum(min_count=1)
        else:
            means[metric] = of.max() if metric in LARGEST else of.median()
    return means.reset_index()


def _chosen(options: Mapping[str, Any]) -> str:
    return repr(sorted(options.items()))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One metric of one kernel in one cell, over seeds; by seed, for what is taken in pairs."""

    row: DeviationRow
    """Any of its rows: what it is of."""
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
    table = pooled(rows, metrics)
    first: dict[tuple[Any, ...], DeviationRow] = {}
    for row in rows:
        first.setdefault((row.case, row.role, row.kernel, _chosen(row.options), row.format), row)
    name, options = baseline
    plain = table[(table["kernel"] == name) & (table["chosen"] == _chosen(options))]
    base = plain.drop_duplicates(["case", "format", "seed"], keep="last")
    base = base.set_index(["case", "format", "seed"])[list(metrics)]
    estimates = []
    for cell, group in table.groupby(CELL, sort=False):
        row, group = first[tuple(cell)], group.assign(seed=group["seed"].astype(int))
        for metric in metrics:
            mine = {s: v for s, v in zip(group["seed"], group[metric]) if math.isfinite(v)}  # noqa: B905
            theirs = {s: base[metric].get((row.case, row.format, s), 0.0) for s in mine}
            estimates.append(
                Estimate(
                    row=row,
                    metric=metric,
                    by_seed=mine,
                    ratios={s: v / theirs[s] for s, v in mine.items() if theirs[s] > 0},
                    limited=bool(group["limited"].any()),
                )
            )
    return estimates


@dataclass(frozen=True, kw_only=True)
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
        label = "input rounding" if row.role == "precision" else None
        key = (label or grid.label(row.kernel, row.options), estimate.metric, grid.place(row))
        collected.setdefault((*key, row.role, row.kernel), {})[x] = (called, estimate)
    order: dict[float | None, int] = {tick.x: i for i, tick in enumerate(grid.axis.ticks)}
    return [
        Line(
            label=label,
            metric=metric,
            place=place,
            at=dict(sorted(at.items(), key=lambda item: order.get(item[0], -1))),
        )
        for (label, metric, place, *_), at in collected.items()
    ]


def figures(curves: Sequence[Line], grid: Grid, baseline: str) -> tuple[Figure, ...]:
    """For every place and metric: the curves themselves, and their ratios to the baseline."""
    made = []
    for metric in dict.fromkeys(grid.request.y):
        for place in dict.fromkeys(line.place for line in curves):
            here = [line for line in curves if line.place == place and line.metric == metric]
            for relative in (False, True):
                drawn = [c for line in here if (c := _curve(line, relative, baseline)) is not None]
                if any(c.role == "kernel" or not relative for c in drawn):
                    made.append(_figure(drawn, grid, metric, dict(place), relative, baseline))
    return tuple(made)


def _figure(
    curves: list[Curve], grid: Grid, metric: str, place: dict[str, str], relative: bool,
    baseline: str,
) -> Figure:  # fmt: skip
    what = words(metric)
    where = ", ".join(placed(place))
    title = f"{what[0].upper()}{what[1:]}{f' over that of {baseline}' if relative else ''}"
    values = [p.mean for curve in curves for p in curve.points]
    positive = [v for v in values if v > 0]
    wide = positive and not min(values) < 0 and max(positive) / min(positive) >= 4
    return Figure(
        title=f"{title}, by {grid.axis.title}{f' ({where})' if where else ''}",
        metric=metric,
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
        v if k in plain else f"{switch[v]}{k}" if v in switch else f"{AXIS_WORDS.get(k, k)} {v}"
        for k, v in place.items()
    ]


def _curve(line: Line, relative: bool, baseline: str) -> Curve | None:
    """A line as the report holds it; None where it has no number, or is no ratio worth drawing."""
    role: Role = line.row.role
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
