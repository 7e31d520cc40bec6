"""From the rows of a sweep to its cells, curves and sentences.

In each cell, for one kernel in one format, heads are pooled within a seed (METRICS says
how), and then the seeds give a mean and its 95 % interval from Student's t-distribution:
heads of one seed are no further observations. A ratio to the baseline is taken seed by
seed, on the same inputs, and the ratios' geometric mean is shown. Curves run along one
axis; other axes make figures of their own, kernels with their options are the lines
within one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from numdev.errors import UsageError, closest
from numdev.formats import format_named
from numdev.metrics.statistics import Mean, factor, interval
from numdev.report import Axis, CellRow, Curve, DeviationRow, Figure, Point, Tick
from numdev.report.number_text import MOST, ratio, si
from numdev.request_models import SweepRequest
from numdev.tensor_properties import tensor_spec

_ERRORS = {
    "max_abs": ("max", "max error"),
    "max_ulp": ("max", "max error in ulps"),
    "worst_row": ("max", "error of the worst row"),
    "mean_abs": ("mean", "mean error"),
    "rms": ("rms", "rms error"),
    "precision_rms": ("rms", "rms of input rounding"),
    "from_baseline_rms": ("rms", "rms from the baseline"),
    "low_precision_rms": ("rms", "rms of the baseline from float32"),
    "row_rel": ("median", "relative error of a row"),
    "rel": ("median", "relative error"),
}
_RATIOS = {
    "floor_ratio": ("median", "rms error over the floor's"),
    "baseline_ratio": ("median", "rms error over the baseline's"),
    "expected_ratio": ("median", "error over the expected"),
    "flash_vs_precision": ("median", "flash_vs_precision"),
    "flash_vs_low_precision": ("median", "flash_vs_low_precision"),
}
_OTHERS = {
    "bias": ("median", "bias"),
    "bias_sign": ("median", "bias_sign"),
    "noise": ("median", "noise"),
    "nonfinite": ("sum", "elements not finite"),
}
METRICS = {**_ERRORS, **_RATIOS, **_OTHERS}
"""What can be drawn, how it is pooled over heads (a mean and an rms over elements), in
words."""
SIGNED = frozenset({"bias", "bias_sign"})  # metrics that may be negative
IN_CELLS = ("max_abs", "mean_abs", "rms", "row_rel", "floor_ratio", "nonfinite")
"""Metrics every report of a sweep gives for each cell, whatever is drawn."""
SENTENCES = 12  # more are not read; the other curves are in the figures
# How many times its least mean a curve reaches that is said to move
MOVED = 1.25
SURELY_MOVED = 2.0  # even where the intervals of the two meet
CELL = ["case", "role", "kernel", "chosen", "format"]
# Where a figure stands on the axes that no curve runs along
Place = tuple[tuple[str, str], ...]
Lines = dict[tuple[str, Place, str], dict[str | None, CellRow]]
"""Metric, place and label of every curve; its cells by their value on the axis, in order.
None is the value of a cell that the axis does not move."""


def cells(
    rows: Sequence[DeviationRow],
    metrics: Sequence[str],
    baseline: tuple[str, Mapping[str, object]],
    axes: Mapping[str, Mapping[str, object]],
) -> tuple[CellRow, ...]:
    """Returns one row for each metric of each kernel in each cell and format, in the
    rows' order: heads pooled within a seed, then the mean over seeds, its 95 % interval
    and the ratio to the baseline. Gradients, and rows that are not ok, are left out.
    `metrics`: names of METRICS; `baseline`: the kernel and all its options; `axes`: by
    case, its value on every axis (none for a case that is missing)."""
    pooled = _pooled_over_heads(
        [r for r in rows if r.status == "ok" and tensor_spec(r.tensor).is_output], metrics
    )
    keys = ["case", "format", "seed"]
    of = (pooled["kernel"] == baseline[0]) & (
        pooled["chosen"] == _options_text(baseline[1])
    )
    base = pooled[of][[*keys, *metrics]]
    against = pooled[keys].merge(base, on=keys, how="left")[list(metrics)]
    over = pooled[list(metrics)] / against.where(against > 0)
    # Plain arrays: pandas takes a millisecond for each of ten thousand small groups.
    values = {metric: pooled[metric].to_numpy() for metric in metrics}
    ratios = {metric: over[metric].to_numpy() for metric in metrics}
    lines = pooled[[*CELL, "options", "limited"]].to_dict("records")
    places: dict[tuple[str, ...], list[int]] = {}
    for place, line in enumerate(lines):
        places.setdefault(tuple(line[name] for name in CELL), []).append(place)
    cell_rows = []
    for seeds in places.values():
        first = lines[seeds[0]]
        limited = any(lines[seed]["limited"] for seed in seeds)
        for metric in metrics:
            count = int(np.isfinite(values[metric][seeds]).sum())
            least = -math.inf if metric in SIGNED else 0.0
            how = partial(interval, least=least)
            mean, low, high = _finite_interval(how, values[metric][seeds])
            ratio, ratio_low, ratio_high = _finite_interval(factor, ratios[metric][seeds])
            row = CellRow(
                case=first["case"],
                role=first["role"],
                kernel=first["kernel"],
                options=first["options"],
                format=first["format"],
                axes=dict(axes.get(first["case"], {})),
                metric=metric,
                seeds=count,
                limited=limited,
                mean=mean,
                low=low,
                high=high,
                ratio=ratio,
                ratio_low=ratio_low,
                ratio_high=ratio_high,
            )
            cell_rows.append(row)
    return tuple(cell_rows)


def _finite_interval(
    how: Callable[[Sequence[float]], Mean], values: NDArray[np.float64]
) -> Mean | tuple[None, None, None]:
    """Returns the mean of the finite values and its 95 % interval (low, high), as
    computed by `how`; three None where no value is finite."""
    finite = values[np.isfinite(values)].tolist()
    return how(finite) if finite else (None, None, None)


def _pooled_over_heads(
    rows: Sequence[DeviationRow], metrics: Sequence[str]
) -> pd.DataFrame:
    """Returns a table with one line for each cell, seed, kernel and format: the metrics
    pooled over heads, whether the reference limits any of these heads, and the kernel's
    options. A metric is of the heads that have a number, NaN without one; a sum is also
    NaN where it is 0 and a head has no number."""
    table = pd.DataFrame(list(map(vars, rows)), columns=list(DeviationRow.model_fields))
    table["chosen"] = table["options"].map(_options_text)
    table["limited"] = table["reason"] == "reference-limited"
    keys = [table[name] for name in (*CELL, "seed")]
    groups = table.groupby(keys, sort=False, dropna=False)
    pooled = groups.agg(limited=("limited", "any"), options=("options", "first"))
    for metric in metrics:
        how, values = METRICS[metric][0], table[metric].astype(float)
        if how in ("mean", "rms"):
            power, elements = 1 if how == "mean" else 2, table["elements"].astype(float)
            weights = elements.where(values.notna())
            sums = [x.groupby(keys, sort=False, dropna=False).sum(min_count=1)
                    for x in (values**power * elements, weights)]  # fmt: skip
            pooled[metric] = (sums[0] / sums[1]) ** (1 / power)
        else:
            of = values.groupby(keys, sort=False, dropna=False)
            pooled[metric] = of.agg(how)
            if how == "sum":  # 0 of some heads says nothing of the others
                pooled[metric] = pooled[metric].where(
                    (pooled[metric] > 0) | (of.count() == of.size())
                )
    return pooled.reset_index()


def _options_text(options: Mapping[str, object]) -> str:
    """Returns options as text, the same for the same options in another order."""
    return repr(sorted(options.items()))


@dataclass(frozen=True)
class Grid:
    """A sweep's axes: which there are, which one curves run along, and where a cell
    stands."""

    request: SweepRequest
    kernels: Sequence[tuple[str, Mapping[str, object]]]
    """Every kernel as planned, with all its options."""

    @cached_property
    def axes(self) -> dict[str, list[str]]:
        """Returns every axis with more than one value, and its values as text, in order.
        Axes are those of the cases, `case`, `format`, and the options that the request
        names for kernels."""
        places: list[Mapping[str, object]] = [case.axes for case in self.request.cases]
        places += [{"case": case.entry} for case in self.request.cases]
        places += [{"format": name} for name in self.request.formats]
        places += [
            self._requested_options(kernel, options) for kernel, options in self.kernels
        ]
        values: dict[str, dict[str, None]] = {}
        for name, value in (item for place in places for item in place.items()):
            values.setdefault(name, {})[str(value)] = None
        several = {name: x for name, x in values.items() if len(x) > 1}
        return {name: list(distinct) for name, distinct in several.items()}

    def _requested_options(
        self, kernel: str, options: Mapping[str, object]
    ) -> dict[str, object]:
        """Returns those of `options` that the request names for this kernel, in any of
        its entries, and that are not None."""
        choices = (*self.request.kernels, self.request.baseline)
        of_kernel = (choice.options for choice in choices if choice.name == kernel)
        named = itertools.chain.from_iterable(of_kernel)
        return {n: options[n] for n in named if options.get(n) is not None}

    @cached_property
    def x(self) -> str:
        """Returns the axis of the curves: the one that the request names, else the one
        with most values, of the axes of numbers and formats if there are any.

        Raises UsageError for a grid of a single cell, for an `x` that is no axis, and for
        a metric that cannot be drawn."""
        asked, target = self.request.x, self.request.target
        for name in self.request.y:
            if name not in METRICS:
                raise UsageError(
                    f"{target}: y is {name!r}, no metric", hint=closest(name, METRICS)
                )
        if not self.axes:
            what = f"{target}: the grid has a single cell"
            raise UsageError(
                what, hint="give some key a list of values, or use `numdev audit`"
            )
        if asked is not None and asked not in self.axes:
            what = f"{target}: x is {asked!r}, which is not an axis of this grid"
            raise UsageError(what, hint=closest(asked, self.axes))
        numeric = [
            n for n, values in self.axes.items() if n == "format" or _as_numbers(values)
        ]
        return asked or max(numeric or self.axes, key=lambda name: len(self.axes[name]))

    @cached_property
    def axis(self) -> Axis:
        """Returns the axis of the curves with its ticks in ascending order: logarithmic
        where its numbers are positive and span a factor of at least 8. Formats stand by
        significant bits at equal distances; other values that are not numbers stand in
        the order of the file. Raises UsageError as `x`."""
        values, numbers = self.axes[self.x], _as_numbers(self.axes[self.x])
        scale: Literal["linear", "log", "category"] = "linear" if numbers else "category"
        if self.x == "format":
            values, scale = (
                sorted(values, key=lambda n: format_named(n).precision),
                "linear",
            )
        places = sorted(
            zip(numbers or map(float, range(len(values))), values, strict=True)
        )
        if numbers and places[0][0] > 0 and places[-1][0] / places[0][0] >= 8:
            scale = "log"
        ticks = tuple(Tick(x=x, label=value) for x, value in places)
        return Axis(name=self.x, title=self.x, scale=scale, ticks=ticks)

    @property
    def axis_values(self) -> list[str]:
        """Returns the values on the axis of the curves, in the order of its ticks. Raises
        UsageError as `x`."""
        return [tick.label for tick in self.axis.ticks]

    def label(self, kernel: str, options: Mapping[str, object]) -> str:
        """Returns a kernel with the options that the request names for it, without the
        axis of the curves: `emulated fa2 block_kv=64`."""
        named = {
            n: v
            for n, v in self._requested_options(kernel, options).items()
            if n != self.x
        }
        parts = (str(v) if n == "preset" else f"{n}={v}" for n, v in named.items())
        return " ".join([kernel, *parts])

    def lines(self, cells: Iterable[CellRow]) -> Lines:
        """Returns the cells as curves along the axis, in the order they came: by (metric,
        place on the other axes, label) the cells by their value on the axis, None for a
        cell that the axis does not move. The label of the role `precision` is `input
        rounding`. Where the axis moves some cells of a curve, the others are left out.
        `cells`: of cases of the request. Raises UsageError as `x`."""
        values = [None, *self.axis_values]
        cases = {case.name: case for case in self.request.cases}
        lines: Lines = {}
        for cell in cells:
            case, options = (
                cases[cell.case],
                self._requested_options(cell.kernel, cell.options),
            )
            coordinates = {**case.axes, "case": case.entry, "format": cell.format}
            others = (n for n in self.axes if n != self.x and n in coordinates)
            place = tuple((name, str(coordinates[name])) for name in others)
            label = self.label(cell.kernel, cell.options)
            key = (
                cell.metric,
                place,
                "input rounding" if cell.role == "precision" else label,
            )
            value = str({**vars(case), **options, **coordinates}.get(self.x))
            lines.setdefault(key, {})[value if value in values else None] = cell
        for key, at in lines.items():
            # Where the axis moves some cells of a line, the others have no place on it.
            shown = [v for v in values if v in at and (v is not None or len(at) == 1)]
            lines[key] = {v: at[v] for v in shown}
        return lines


def _as_numbers(values: Iterable[str]) -> list[float] | None:
    """Returns values as numbers; empty for none; None where one is no number, or not
    finite."""
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return None
    return numbers if all(map(math.isfinite, numbers)) else None


# --- figures and sentences ------------------------------------------------------------


def figures(lines: Lines, grid: Grid, baseline: str) -> Iterator[Figure]:
    """Yields a figure for every metric that is drawn and every place on the other axes,
    where a curve has a number, in the order of the request's metrics; logarithmic where
    no mean is below 0, and those above it span a factor of at least 4. `baseline`: the
    label of its curve."""
    places: dict[str | None, float] = {tick.label: tick.x for tick in grid.axis.ticks}
    drawn: dict[tuple[str, Place], list[Curve]] = {}
    for (metric, place, label), cells in lines.items():
        points = tuple(
            Point(x=places.get(value), label=value or "", mean=cell.mean, low=cell.low,
                  high=cell.high, limited=cell.limited)
            for value, cell in cells.items() if cell.mean is not None
        )  # fmt: skip
        if points and metric in grid.request.y:
            role = "baseline" if label == baseline else next(iter(cells.values())).role
            curve = Curve(label=label, role=role, points=points)
            drawn.setdefault((metric, place), []).append(curve)
    order = sorted(drawn, key=lambda key: grid.request.y.index(key[0]))
    for metric, place in order:
        curves, what = drawn[metric, place], METRICS[metric][1]
        means = [p.mean for curve in curves for p in curve.points]
        positive = [mean for mean in means if mean > 0]
        wide = positive and min(means) >= 0 and max(positive) / min(positive) >= 4
        name, where = f"{what[0].upper()}{what[1:]}", _place_in_words(place)
        yield Figure(
            title=f"{name}, by {grid.axis.title}{where}",
            metric=metric,
            place=dict(place),
            y_title=what,
            y_scale="log" if wide else "linear",
            curves=tuple(curves),
        )


def _place_in_words(place: Place) -> str:
    """Returns a place in parentheses, as in ` (bfloat16, window 64)`; empty where no
    other axis has several values."""
    plain = ("format", "inputs", "case")
    parts = ", ".join(
        value if name in plain else f"{name} {value}" for name, value in place
    )
    return f" ({parts})" if parts else ""


def sentences(lines: Lines, grid: Grid, baseline: str) -> tuple[str, ...]:
    """Returns `LABEL (PLACE): METRIC 1.2e-4 at 64 to 3.4e-4 at 4096; over BASELINE 0.31×
    [0.30 to 0.32]` for each curve of the first metric that moves along the axis, the
    baseline last, and `METRIC not measured` for one without a number: at most SENTENCES,
    and how many more. Then comes one sentence on the curves that do not move, each with
    its number at the last end: at most SENTENCES of them, and how many more. Of roles
    other than `kernel` only the baseline is told. The ratio is of the last point; where
    the axis has no order, the ends are the least and the largest mean in magnitude. A
    peak more than twice as high as both ends stands between them."""
    moving, still = [], []
    for (metric, place, label), cells in sorted(
        lines.items(), key=lambda x: x[0][2] == baseline
    ):
        role = next(iter(cells.values())).role
        if metric != grid.request.y[0] or (role != "kernel" and label != baseline):
            continue
        name, what = f"{label}{_place_in_words(place)}", METRICS[metric][1]
        ends = _end_points(cells, by_size=grid.axis.scale == "category")
        if not ends:
            moving.append(f"{name}: {what} not measured.")
        elif _moves(cells):
            points = " to ".join(
                si(mean) + (f" at {value}" if value else "") for mean, value, _ in ends
            )
            over = "" if label == baseline else _ratio_clause(ends[-1][2], baseline)
            moving.append(f"{name}: {what} {points}{over}.")
        else:
            still.append(f"{name} {si(ends[-1][0])}")
    more = len(moving) - SENTENCES
    last = [f"and {more} curves more: see the figures."] if more > 0 else []
    if still:
        shown, count = still[:SENTENCES], len(still) - SENTENCES
        others = f" and {count} more" if count > 0 else ""
        metric = METRICS[grid.request.y[0]][1]
        what = f"{metric} moves little along {grid.axis.title}"
        last.append(f"{what}: {', '.join(shown)}{others}.")
    return (*moving[:SENTENCES], *last)


def _moves(cells: Mapping[str | None, CellRow]) -> bool:
    """Whether a curve moves along the axis. Its largest mean is more than MOVED times its
    least, both in magnitude, and their intervals do not meet, or one has none; or it is
    more than SURELY_MOVED times its least, since two seeds give intervals that meet
    whatever happens; or there are means below 0 and above it, and their intervals do not
    meet. Means below 0 are judged by their mirror images. False for a curve of one point,
    or of zeros. `cells`: at least one with a mean."""
    spans = [
        (cell.mean, cell.low, cell.high)
        for cell in cells.values()
        if cell.mean is not None
    ]
    (lowest, _, up_to), (highest, down_to, _) = (
        end(spans, key=itemgetter(0)) for end in (min, max)
    )
    if (
        lowest < 0 < highest
        and up_to is not None
        and down_to is not None
        and up_to < down_to
    ):
        return True
    sizes = [_magnitude(*span) for span in spans]
    (least, _, high), (most, low, _) = (
        end(sizes, key=itemgetter(0)) for end in (min, max)
    )
    is_apart = low is None or high is None or low > high
    return most > (MOVED if is_apart else SURELY_MOVED) * least


def _magnitude(
    mean: float, low: float | None, high: float | None
) -> tuple[float, float | None, float | None]:
    """Returns a mean and the ends of its interval, mirrored where the mean is below 0."""
    if mean >= 0:
        return mean, low, high
    return -mean, None if high is None else -high, None if low is None else -low


def _end_points(
    cells: Mapping[str | None, CellRow], *, by_size: bool
) -> list[tuple[float, str | None, CellRow]]:
    """Returns mean, value on the axis and cell of a curve's first and last point, or with
    `by_size` of those whose mean is least and largest in magnitude; between them the one
    with the largest magnitude, where that is more than twice each of theirs. One point
    alone where no other has a mean, empty where none has."""
    ends = [
        (cell.mean, value, cell) for value, cell in cells.items() if cell.mean is not None
    ]
    if by_size:
        ends.sort(key=lambda end: abs(end[0]))
    most = max(ends, key=lambda end: abs(end[0]), default=None)
    ends = [*ends[:1], *ends[1:][-1:]]
    if most and abs(most[0]) > 2 * max(abs(end[0]) for end in ends):
        ends.insert(1, most)
    return ends


def _ratio_clause(cell: CellRow, baseline: str) -> str:
    """Returns `; over BASELINE 0.31× [0.30 to 0.32]`; empty where there is no ratio, or
    it is too large or small to mean anything."""
    if cell.ratio is None or not 1 / MOST < cell.ratio < MOST:
        return ""
    words = f"; over {baseline} {ratio(cell.ratio)}×"
    if cell.ratio_low is not None:
        words += f" [{ratio(cell.ratio_low)} to {ratio(cell.ratio_high)}]"
    return words


def notes(rows: Sequence[DeviationRow]) -> Iterator[str]:
    """Yields sentences on what a sample of rows means for the numbers, and on which
    kernels could not be measured, in which formats and why, each reason once."""
    if sampled := max((row.rows_measured or 0 for row in rows if row.sampled), default=0):
        yield (
            f"At most {sampled} random query rows of each head for each seed, and a "
            "kernel's most "
            "suspicious: maxima are lower bounds, and intervals over seeds include "
            "this scatter."
        )
    formats: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.status != "ok":
            # A reason that names the format is the same reason in all of them.
            reason = (row.reason or "no reason given").replace(f" {row.format}", " it")
            sentence = f"{row.kernel} {row.status} in {{}}: {reason}"
            formats.setdefault(sentence, {})[row.format] = None
    for sentence, affected in formats.items():
        yield sentence.replace("{}", ", ".join(affected), 1)
