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

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
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
    "inputs": "inputs",
}
SHORT = {"bfloat16": "bf16", "float16": "fp16", "tf32": "tf32", "float32": "fp32"}
SHORT |= {"float64": "fp64", "float8_e4m3fn": "fp8 e4m3", "float8_e5m2": "fp8 e5m2"}
KEY = ["case", "seed", "role", "kernel", "chosen", "format"]
CELL = ["case", "role", "kernel", "chosen", "format"]


def words(metric: str) -> str:
    """A metric's name in words."""
    return WORDS.get(metric, metric.replace("_", " "))


@dataclasses.dataclass(frozen=True)
class Grid:
    """A sweep's axes: which there are, which one curves run along, and where a cell stands."""

    request: SweepRequest
    kernels: Sequence[tuple[str, Mapping[str, Any]]]
    """Every kernel as planned, with all its options."""

    @cached_property
    def axes(self) -> dict[str, list[str]]:
        """Every axis with more than one value, and its values in order."""
        found: dict[str, dict[str, None]] = {}
        for case in self.request.cases:
            for name, value in case.axes.items():
                found.setdefault(name, {})[str(value)] = None
        if len({case.entry for case in self.request.cases}) > 1:
            found["case"] = dict.fromkeys(case.entry for case in self.request.cases)
        found["format"] = dict.fromkeys(self.request.formats)
        for name, options in self.kernels:
            for option in self.shown.get(name, ()):
                if options.get(option) is not None:
                    found.setdefault(option, {})[str(options[option])] = None
        return {name: list(values) for name, values in found.items() if len(values) > 1}

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

    @cached_property
    def axis(self) -> Axis:
        """The axis of the curves, with its ticks."""
        values = self.axes[self.x]
        if self.x == "format":
            return _format_axis(values)
        title = AXIS_WORDS.get(self.x, self.x.replace("_", " "))
        numbers = self._numbers(self.x)
        if numbers is None:
            ticks = tuple(Tick(x=float(i), label=v) for i, v in enumerate(values))
            return Axis(name=self.x, title=title, scale="category", ticks=ticks)
        wide = min(numbers) > 0 and max(numbers) / min(numbers) >= 8
        places = zip(numbers, values, strict=True)
        ticks = tuple(Tick(x=n, label=v) for n, v in sorted(places))
        return Axis(name=self.x, title=title, scale="log" if wide else "linear", ticks=ticks)

    def _numbers(self, name: str) -> list[float] | None:
        try:
            found = [float(value) for value in self.axes[name]]
        except ValueError:
            return None
        return found if all(map(math.isfinite, found)) else None

    @cached_property
    def configs(self) -> dict[str, CaseConfig]:
        return {case.name: case for case in self.request.cases}

    def at(self, row: Any) -> tuple[float | None, str]:
        """A row's place on the axis (None where it does not move it), and what that is called."""
        if self.x == "format":
            value: Any = row.format
        elif self.x == "case":
            value = self.configs[row.case].entry
        elif any(self.x in case.axes for case in self.request.cases):
            config = self.configs[row.case]
            value = config.axes.get(self.x, getattr(config, self.x, None))
        else:
            value = row.options.get(self.x) if self.x in self.shown.get(row.kernel, ()) else None
        tick = self._ticks.get(str(value))
        return (None, "") if tick is None else (tick.x, str(value))

    @cached_property
    def _ticks(self) -> dict[str, Tick]:
        return dict(zip(self._in_order, self.axis.ticks, strict=True))

    @cached_property
    def _in_order(self) -> list[str]:
        """The axis' values in the order of its ticks."""
        values = self.axes[self.x]
        if self.x == "format":
            return sorted(values, key=_by_precision) if _distinct(values) else values
        numbers = self._numbers(self.x)
        if numbers is None:
            return values
        return [value for _, value in sorted(zip(numbers, values, strict=True))]

    def place(self, row: Any) -> tuple[tuple[str, str], ...]:
        """Where a row stands on the other axes of cases and formats: which figure it is in."""
        config, found = self.configs[row.case], {}
        for name in self.axes:
            if name == self.x:
                continue
            if name == "case":
                found[name] = config.entry
            elif name == "format":
                found[name] = row.format
            elif name in config.axes:
                found[name] = str(config.axes[name])
        return tuple(found.items())

    def label(self, kernel: str, options: Mapping[str, Any]) -> str:
        """A kernel with the options that tell it from others, but for the axis."""
        parts = [kernel]
        for name in self.shown.get(kernel, ()):
            value = options.get(name)
            if value is not None and name != self.x:
                parts.append(str(value) if name == "preset" else f"{name}={value}")
        return " ".join(parts)


def _by_precision(name: str) -> tuple[int, int]:
    fmt = format_named(name)
    return fmt.precision, fmt.emax


def _distinct(names: Sequence[str]) -> bool:
    return len({format_named(name).precision for name in names}) == len(names)


def _format_axis(names: Sequence[str]) -> Axis:
    """Formats by their significant bits; as categories where two have as many."""
    if not _distinct(names):
        ticks = tuple(Tick(x=float(i), label=SHORT.get(n, n)) for i, n in enumerate(names))
        return Axis(name="format", title="format", scale="category", ticks=ticks)
    ordered = [format_named(name) for name in sorted(names, key=_by_precision)]
    ticks = tuple(
        Tick(x=float(f.precision), label=str(f.precision), below=SHORT.get(f.name, ""))
        for f in ordered
    )
    return Axis(name="format", title="significant bits", scale="linear", ticks=ticks)


def check_metrics(names: Iterable[str], where: str) -> None:
    """Raises UsageError for a metric that cannot be drawn, naming the closest."""
    for name in names:
        if name not in METRICS:
            raise UsageError(f"{where}: y is {name!r}, no metric", hint=closest(name, METRICS))


def pooled(rows: Sequence[DeviationRow], metrics: Sequence[str]) -> pd.DataFrame:
    """One line for each cell, seed, kernel and format: the metrics pooled over heads."""
    wanted = {"case", "seed", "role", "kernel", "format", "elements", "reason", *metrics}
    ok = [row for row in rows if row.status == "ok" and row.tensor == "out"]
    table = pd.DataFrame([row.model_dump(include=wanted) for row in ok], columns=sorted(wanted))
    table["chosen"] = [_frozen(row.options) for row in ok]
    numbers = table[[*metrics, "elements"]].astype(float)
    work = table[KEY].copy()
    for metric in metrics:
        values = numbers[metric]
        power = 2 if metric in SQUARED else 1
        weighted = metric in SQUARED or metric == "mean_abs"
        work[metric] = values**power * numbers["elements"] if weighted else values
        work[f"{metric} weight"] = numbers["elements"].where(values.notna())
    work["limited"] = table["reason"].eq("reference-limited")
    groups = work.groupby(KEY, sort=False, dropna=False)
    found = pd.DataFrame({"limited": groups["limited"].any()})
    for metric in metrics:
        if metric in SQUARED or metric == "mean_abs":
            mean = groups[metric].sum(min_count=1) / groups[f"{metric} weight"].sum()
            found[metric] = mean**0.5 if metric in SQUARED else mean
        elif metric in LARGEST:
            found[metric] = groups[metric].max()
        elif metric == "nonfinite":
            found[metric] = groups[metric].sum(min_count=1)
        else:
            found[metric] = groups[metric].median()
    return found.reset_index()


def _frozen(options: Mapping[str, Any]) -> str:
    return repr(sorted(options.items()))


@dataclasses.dataclass(frozen=True, kw_only=True)
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
        return CellRow(
            case=self.row.case,
            axes=dict(axes),
            role=self.row.role,
            kernel=self.row.kernel,
            options=self.row.options,
            format=self.row.format,
            metric=self.metric,
            seeds=len(self.by_seed),
            mean=mean[0],
            low=mean[1],
            high=mean[2],
            ratio=ratio[0],
            ratio_low=ratio[1],
            ratio_high=ratio[2],
        )


def estimates(
    rows: Sequence[DeviationRow], metrics: Sequence[str], baseline: tuple[str, Mapping[str, Any]]
) -> list[Estimate]:
    """Every metric of every kernel in every cell and format, in the order of the rows."""
    table = pooled(rows, metrics)
    first: dict[tuple[Any, ...], DeviationRow] = {}
    for row in rows:
        key = (row.case, row.role, row.kernel, _frozen(row.options), row.format)
        first.setdefault(key, row)
    name, options = baseline
    plain = table[(table["kernel"] == name) & (table["chosen"] == _frozen(options))]
    base: dict[tuple[Any, ...], float] = collections.defaultdict(float)
    for at in plain.to_dict("records"):
        for metric in metrics:
            base[at["case"], at["seed"], at["format"], metric] = at[metric]
    found = []
    for cell, group in table.groupby(CELL, sort=False):
        row = first[tuple(cell)]
        seeds = group["seed"].astype(int)
        for metric in metrics:
            mine = dict(zip(seeds, group[metric].astype(float), strict=True))
            mine = {seed: value for seed, value in mine.items() if math.isfinite(value)}
            theirs = {s: base[row.case, s, row.format, metric] for s in mine}
            ratios = {s: v / theirs[s] for s, v in mine.items() if theirs[s] > 0}
            limited = bool(group["limited"].any())
            found.append(
                Estimate(row=row, metric=metric, by_seed=mine, ratios=ratios, limited=limited)
            )
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One curve before it is drawn: its estimates by place on the axis."""

    label: str
    metric: str
    place: tuple[tuple[str, str], ...]
    at: Mapping[float | None, tuple[str, Estimate]]

    @property
    def row(self) -> DeviationRow:
        return next(iter(self.at.values()))[1].row

    @property
    def constant(self) -> bool:
        return None in self.at and len(self.at) == 1


def lines(found: Sequence[Estimate], grid: Grid) -> list[Line]:
    """The estimates as curves along the grid's axis, in the order they came."""
    collected: dict[tuple[Any, ...], dict[float | None, tuple[str, Estimate]]] = {}
    for estimate in found:
        row = estimate.row
        x, called = grid.at(row)
        label = grid.label(row.kernel, row.options)
        key = (label, row.role, estimate.metric, grid.place(row))
        collected.setdefault(key, {})[x] = (called, estimate)
    order = {tick.x: i for i, tick in enumerate(grid.axis.ticks)}
    return [
        Line(
            label="input rounding" if role == "precision" else label,
            metric=metric,
            place=place,
            at=dict(sorted(at.items(), key=lambda item: -1 if item[0] is None else order[item[0]])),
        )
        for (label, role, metric, place), at in collected.items()
    ]


def figures(curves: Sequence[Line], grid: Grid, baseline: str) -> tuple[Figure, ...]:
    """For every place and metric: the curves themselves, and their ratios to the baseline."""
    made = []
    for metric in dict.fromkeys(grid.request.y):
        for place in dict.fromkeys(line.place for line in curves):
            here = [line for line in curves if line.place == place and line.metric == metric]
            for relative in (False, True):
                drawn = [c for line in here if (c := _curve(line, relative, baseline)) is not None]
                worth = any(c.role == "kernel" for c in drawn) if relative else bool(drawn)
                if worth:
                    made.append(_figure(drawn, grid, metric, dict(place), relative, baseline))
    return tuple(made)


def _figure(
    curves: list[Curve],
    grid: Grid,
    metric: str,
    place: dict[str, str],
    relative: bool,
    baseline: str,
) -> Figure:
    what = words(metric)
    where = ", ".join(placed(place))
    title = f"{what[0].upper()}{what[1:]}{f' over that of {baseline}' if relative else ''}"
    return Figure(
        title=f"{title}, by {grid.axis.title}{f' ({where})' if where else ''}",
        metric=metric,
        relative=relative,
        place=place,
        y_title=f"{what}, times {baseline}'s" if relative else f"{what} against fp64",
        y_scale=_scale([p.mean for curve in curves for p in curve.points]),
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


def _scale(values: Sequence[float]) -> Literal["linear", "log"]:
    positive = [v for v in values if v > 0]
    if not positive or len(positive) < len([v for v in values if v]):
        return "linear"
    return "log" if max(positive) / min(positive) >= 4 else "linear"


def _curve(line: Line, relative: bool, baseline: str) -> Curve | None:
    """A line as the report holds it; None where it has no number, or is no ratio worth drawing."""
    role: Role = line.row.role
    if relative and (role == "precision" or line.label == baseline):
        return None
    points = []
    for x, (called, estimate) in line.at.items():
        values = estimate.ratios if relative else estimate.by_seed
        if values and (x is not None or line.constant):
            mean, low, high = (factor if relative else interval)(list(values.values()))
            limited, seeds = estimate.limited, len(values)
            points.append(
                Point(
                    x=x, label=called, mean=mean, low=low, high=high, seeds=seeds, limited=limited
                )
            )
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
