"""How far from the truth: the metrics, per head.

`measure` compares one output with a `Yardstick`: the fp64 reference of the same rounded inputs,
beside which stand the floor (the reference rounded once to the output's format), the baseline, and
the reference of the unrounded inputs. It knows nothing of kernels and chooses nothing; what the
numbers mean is set down in docs/method.md, and a verdict on them is the gate's business.

Three rules hold for every metric. Fully masked rows are left out. An element that is not finite is
counted (`nonfinite`), never averaged. A ratio whose denominator means nothing is None, with the
reason in `nulls`.

The sums and maxima that metrics are functions of come from `numdev.metrics.comparison`, for all heads at
once; the metrics themselves are computed on the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from numdev.formats import Format
from numdev.metrics.bias import bias
from numdev.metrics.comparison import (
    Along,
    Totals,
    compare,
    compare_plain,
    compare_precision,
    row_ratios,
    typical_row,
)
from numdev.metrics.intervals import intervals, of_sums
from numdev.metrics.lazy import Later
from numdev.metrics.yardstick import Yardstick, finite

__all__ = [
    "Measured",
    "Metrics",
    "Yardstick",
    "finite",
    "measure",
    "measure_plain",
    "measured",
    "measured_plain",
    "measured_precision",
    "row_ratios",
    "typical_row",
]

Column = np.ndarray[Any, np.dtype[Any]]
"""[H]: numbers or flags."""
COUNTS = {
    "precision_w1": "moved_count",
    "from_baseline_w1": "apart_count",
    "low_precision_w1": "cast_count",
    "lower_w1": "lower_count",
}
"""Wasserstein distances, and the count of the elements each is over."""
COUNTED = ("elements", "empty_rows", "nonfinite")
Metrics = dict[str, Any]
"""Metric name to value for one head; the names are the fields of `report.DeviationRow`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What an output came to: metrics to be made of it when they are wanted. Nobody waits for the
    device before they are."""

    arriving: Later[Totals]
    of: int | None
    """Where the rows are a sample, of how many they are."""
    format: Format | None = None
    """Of the yardstick; None where there was none, but distances alone."""
    lower: Format | None = None
    """The yardstick's next lower format, where its baseline was run in that."""

    @property
    def totals(self) -> Totals:
        """What came to the host. Waits for it."""
        return self.arriving.value

    def wait(self) -> None:
        """Until it is there."""
        _ = self.arriving.value

    @property
    def along(self) -> Along:
        """Some of the sums by bin of positions (`comparison.ALONG`), where there were bins."""
        return self.totals.along

    @functools.cached_property
    def metrics(self) -> list[Metrics]:
        """One dict per head."""
        found = self.totals
        with np.errstate(all="ignore"):  # a ratio that means nothing is told by what comes out
            columns = of_sums(found.sums) | _common(found)
            if self.format is not None:
                columns |= _beside(found, self.format)
        metrics = _per_head(columns)
        if self.format is not None:
            for head, own in zip(metrics, bias(*found.signed), strict=True):
                head.update(own)
                if self.lower is not None:
                    head["lower_format"] = self.lower.name
        return _finished(metrics, found, self.of)


def measure(
    output: Tensor, yardstick: Yardstick, expected: Tensor | None = None, *, of: int | None = None
) -> list[Metrics]:
    """All metrics of `output` [B, H, q_len, v_dim] against `yardstick`, one dict per head.

    `expected` is the output of the emulation the kernel claims to be, on the same inputs; without
    it there is no expected_ratio and no worst_row. `of`: where the rows are a sample, in order of
    position, of how many; then `interval` holds the intervals of some metrics.
    """
    return measured(output, yardstick, expected, of=of).metrics


def measured(
    output: Tensor,
    yardstick: Yardstick,
    expected: Tensor | None = None,
    *,
    of: int | None = None,
    bins: Tensor | None = None,
) -> Measured:
    """As `measure`, and by bin of positions: `bins` says which row is in which, fp64 [rows, bins]
    of 0 and 1."""
    return Measured(
        arriving=compare(output, yardstick, expected).on_host(bins),
        of=of,
        format=yardstick.format,
        lower=yardstick.lower,
    )


def measured_precision(yardstick: Yardstick, *, of: int | None = None) -> Measured:
    """What rounding the inputs costs: distances between the references of rounded and of unrounded
    ones. `of` as in `measure`."""
    return Measured(arriving=compare_precision(yardstick).on_host(), of=of)


def measure_plain(
    output: Tensor, reference: Tensor, empty: Tensor, *, of: int | None = None
) -> list[Metrics]:
    """Distances alone, for what has no rounding floor of its own, as the log-sum-exp.

    Shapes [B, H, q_len] or [B, H, q_len, v_dim]; `empty` as in `Yardstick`, `of` as in `measure`.
    """
    return measured_plain(output, reference, empty, of=of).metrics


def measured_plain(
    output: Tensor, reference: Tensor, empty: Tensor, *, of: int | None = None
) -> Measured:
    """As `measure_plain`."""
    return Measured(arriving=compare_plain(output, reference, empty).on_host(), of=of)


def _common(found: Totals) -> dict[str, Column]:
    """What every tensor has. W1 is over `count` usable elements: the others are 0 in both, which
    only dilutes the distance, since adding the same points to both samples scales it by used /
    all."""
    sums = found.sums
    return {
        "elements": sums["count"],
        "empty_rows": sums["empty_rows"],
        "nonfinite": sums.get("nonfinite", np.zeros_like(sums["count"])),
        "max_abs": found.largest["max_abs"],
        "rel": np.sqrt(sums["square"]) / np.sqrt(sums["reference"]),
        "w1": found.transport["w1"] * (found.elements / sums["count"]),
    }


def _beside(found: Totals, fmt: Format) -> dict[str, Column]:
    """What needs the floor's format, the baseline, the precision deviation, or a prediction."""
    sums, largest, transport = found.sums, found.largest, found.transport
    u = fmt.unit_roundoff
    columns: dict[str, Column] = {
        "max_ulp": largest["max_ulp"],
        "lost": np.sqrt(sums["reference"]) <= u * np.sqrt(sums["terms"]),
    }
    for name, count in COUNTS.items():
        if name in transport:
            columns[name] = transport[name] * (found.elements / sums[count])
    for name in ("precision", "low_precision", "lower"):
        if columns.keys() >= {f"{name}_w1", "from_baseline_w1"}:
            ratio = columns["from_baseline_w1"] / columns[f"{name}_w1"]
            columns[f"flash_vs_{name}_w1"] = ratio
    if "from_floor" in largest:  # flash-attention's own test, see `Part.allowed`
        allowed = 2 * largest["plain_from_floor"] + 2 * largest["shifted"]
        columns["fa_rule"] = largest["from_floor"] <= allowed
    if "worst_row" in largest:
        columns["worst_row"] = largest["worst_row"]
    return columns


def _per_head(columns: Mapping[str, Column]) -> list[Metrics]:
    """Columns [H] as one dict per head: counts as integers."""
    numbers = [n for n, x in columns.items() if x.dtype == np.float64 and n not in COUNTED]
    lists = dict(zip(numbers, np.array([columns[n] for n in numbers]).tolist(), strict=True))
    for name, column in columns.items():
        if name not in lists:
            lists[name] = (column.astype(np.int64) if name in COUNTED else column).tolist()
    rows = zip(*(lists[name] for name in columns), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _finished(metrics: list[Metrics], found: Totals, of: int | None) -> list[Metrics]:
    done = [_with_reasons(head) for head in metrics]
    if of is None:
        return done
    own = intervals(found.groups, found.rows, of)
    return [{**head, "interval": ends} for head, ends in zip(done, own, strict=True)]


def _with_reasons(head: Metrics) -> Metrics:
    """None with a reason for every number that means nothing."""
    nulls: dict[str, str] = {}
    lost = head.pop("lost", False)
    if head["elements"] == 0:
        why = "no finite element in a row that sees a key"
        counts = (*COUNTED, "sequences")
        nulls |= {k: why for k, v in head.items() if v is not None and k not in counts}
    elif lost:
        nulls["rel"] = "the reference is lost in its term scale"
    if head.get("precision_rms") == 0:
        why = "rounding the inputs to this format changes nothing"
        nulls |= {"flash_vs_precision": why, "flash_vs_precision_w1": why}
    if head.get("sequences", 2) < 2:
        judged = ("bias_t", "bias_p", "bias_size", "bias_of")
        nulls |= dict.fromkeys(judged, "needs at least two sequences")
    for name in _without_meaning(head):
        nulls.setdefault(name, "0/0" if math.isnan(head[name]) else "the denominator is zero")
    head.update(dict.fromkeys(nulls))
    head["nulls"] = nulls
    return head


def _without_meaning(head: Metrics) -> list[str]:
    """Which numbers are NaN or infinite."""
    total = sum([v for v in head.values() if v.__class__ is float])
    if math.isfinite(total):
        return []
    return [name for name, v in head.items() if v.__class__ is float and not math.isfinite(v)]
