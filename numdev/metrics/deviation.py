"""How far from the truth: the metrics, per head.

`measure` compares one output with a `Yardstick`: the fp64 reference of the same rounded
inputs, beside which stand the floor (the reference rounded once to the output's format),
the baseline, and the reference of the unrounded inputs. It knows nothing of kernels and
chooses nothing; what the numbers mean is set down in docs/method.md, and a verdict on
them is the gate's business.

Three rules hold for every metric. Fully masked rows are left out. An element that is not
finite is counted (`nonfinite`), never averaged. A ratio whose denominator means nothing
is None, with the reason in `nulls`.

Sums and maxima come from `row_sums`, for all heads at once. All else is computed on the
host: means, root mean squares and ratios in `intervals.of_sums`, bias in `bias`, the rest
here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from numdev.formats import Format
from numdev.metrics.bias import UNJUDGED, bias
from numdev.metrics.intervals import intervals, of_sums
from numdev.metrics.row_samples import Strata
from numdev.metrics.row_sums import Numbers, Totals, plain_sums, row_sums, to_host
from numdev.metrics.statistics import UNDEFINED
from numdev.metrics.yardstick import Yardstick

Column = NDArray[np.generic]  # [H]: numbers or flags
INTEGERS = ("elements", "empty_rows", "nonfinite")
Metrics = dict[str, Any]
"""Metric name to value for one head; the names are the fields of
`report.DeviationRow`."""


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """The metrics of an output measured against a yardstick, on the host."""

    heads: list[Metrics]  # one dict per head
    along: Mapping[str, Numbers] = field(default_factory=dict)
    """Sums by bin of positions (`row_sums.ALONG`), [bins], where bins were given."""
    ratios: Tensor | None = None
    """[B, H, rows]: beside what is predicted for the row; infinite where it is not
    finite."""
    compared: tuple[Tensor, Yardstick, Tensor | None] | None = None
    """The output, its yardstick and the expected output, where bins were given."""


def measure(
    output: Tensor,
    yardstick: Yardstick,
    expected: Tensor | None = None,
    *,
    of: int | Strata | None = None,
    bins: Tensor | None = None,
) -> Deviation:
    """Returns the metrics of `output` [B, H, q_len, v_dim] against `yardstick`, head by
    head. Rows that see no key are left out, and elements that are not finite; `nonfinite`
    counts elements where just one of output and floor is finite. A number that means
    nothing is None, with its reason in `nulls`.

    `expected` is the output of the emulation the kernel claims to be, on the same inputs;
    without it there is no expected_ratio, rms_ratio or worst_row, and `ratios` is None.
    `of`: where the rows are a sample, ordered by position, how many rows the call has, or
    the strata they come from; then `interval` holds the intervals of some metrics. None:
    all rows are measured. `bins`: which row is in which bin of positions, fp64 [rows,
    bins] of 0 and 1; with it the result has sums by bin, and in `compared` the first
    three arguments."""
    by_row = row_sums(output, yardstick, expected)
    totals = to_host(by_row, bins, of)
    # A ratio that means nothing is told by what comes out
    with np.errstate(all="ignore"):
        columns = (
            of_sums(totals.sums)
            | _common_metrics(totals)
            | _format_metrics(totals, yardstick.format)
        )
    heads = _split_by_head(columns)
    for head, biases in zip(heads, bias(*totals.signed), strict=True):
        head.update(biases)
    ratios = by_row.largest.get("worst_row")
    if ratios is not None:
        ratios = ratios.masked_fill(by_row.sums["nonfinite"] > 0, math.inf)
    return Deviation(
        heads=_with_nulls_and_intervals(heads, totals),
        along=totals.along,
        ratios=ratios,
        compared=None if bins is None else (output, yardstick, expected),
    )


def measure_plain(
    output: Tensor, reference: Tensor, empty: Tensor, *, of: int | Strata | None = None
) -> Deviation:
    """Returns the distances alone of a tensor without a floor, such as the log-sum-exp:
    mean_abs, rms, max_abs and rel, beside the counts elements, empty_rows and nonfinite.
    An element that is not finite in either tensor is left out; `nonfinite` counts those
    that are finite in exactly one.

    Shapes [B, H, q_len] or [B, H, q_len, v_dim]; `empty`: bool [B, H, q_len], rows that
    see no key and are left out; `of`: where the rows are a sample, how many rows the call
    has, or the strata they come from."""
    totals = to_host(plain_sums(output, reference, empty), of=of)
    with np.errstate(all="ignore"):
        heads = _split_by_head(of_sums(totals.sums) | _common_metrics(totals))
    return Deviation(heads=_with_nulls_and_intervals(heads, totals))


def _common_metrics(totals: Totals) -> dict[str, Column]:
    """Returns the metrics that every tensor has: elements, empty_rows, nonfinite, max_abs
    and rel, each [H]. Where rows that stood out are measured beside a sample, the three
    counts are of the sampled rows alone, as the floor's are."""
    sums, counts = totals.sums, totals.drawn or totals.sums
    return {
        "elements": counts["count"],
        "empty_rows": counts["empty_rows"],
        "nonfinite": counts["nonfinite"],
        "max_abs": totals.largest["max_abs"],
        "rel": np.sqrt(sums["square"]) / np.sqrt(sums["reference"]),
    }


def _format_metrics(totals: Totals, fmt: Format) -> dict[str, Column]:
    """Returns the metrics, [H], that need the floor's format `fmt`, the baseline or a
    prediction: max_ulp, fa_rule (left out without a baseline, and in formats below 16
    bits) and worst_row (left out without a prediction). Also `lost`: whether the
    reference is at or below the format's rounding of its terms, so that `rel` means
    nothing."""
    sums, largest = totals.sums, totals.largest
    columns: dict[str, Column] = {
        "max_ulp": largest["max_ulp"],
        "lost": np.sqrt(sums["reference"]) <= fmt.unit_roundoff * np.sqrt(sums["terms"]),
    }
    if "from_floor" in largest:  # flash-attention's own test, see `row_sums`
        allowed = 2 * largest["plain_from_floor"] + 2 * largest["shifted"]
        columns["fa_rule"] = largest["from_floor"] <= allowed
    if "worst_row" in largest:
        columns["worst_row"] = largest["worst_row"]
    return columns


def _split_by_head(columns: Mapping[str, Column]) -> list[Metrics]:
    """Returns columns [H] as one dict per head, with the counts of INTEGERS as
    integers."""
    lists = [
        (x.astype(np.int64) if n in INTEGERS else x).tolist() for n, x in columns.items()
    ]
    return [dict(zip(columns, head, strict=True)) for head in zip(*lists, strict=True)]


def _with_nulls_and_intervals(heads: list[Metrics], totals: Totals) -> list[Metrics]:
    """Sets every number of each head that means nothing to None, in place, with its
    reason in `nulls`. Returns copies of the heads after that, with `interval` where rows
    are sampled."""
    of, certain = totals.left, totals.certain
    ends_by_head = (
        [] if of is None else intervals(totals.groups, totals.rows, of, certain)
    )
    return [
        _with_nulls(head) | ({"interval": ends} if ends is not None else {})
        for head, ends in itertools.zip_longest(heads, ends_by_head)
    ]


def nullify(unit: Metrics, names: Sequence[str], why: str) -> None:
    """Sets the metrics `names` of one unit (a head) to None, in place, with the reason
    `why` in `nulls`, and removes their intervals. A name that was not there is added, and
    so is an empty `interval`. `unit` must have `nulls` already."""
    intervals = unit.get("interval", {})
    unit.update(dict.fromkeys(names))
    unit["interval"] = {name: x for name, x in intervals.items() if name not in names}
    unit["nulls"] = {**unit["nulls"], **dict.fromkeys(names, why)}


def _with_nulls(head: Metrics) -> Metrics:
    """Sets every number of a head that means nothing to None, in place, with its reason
    in `nulls`, removes the flag `lost`, and returns the head. Numbers that mean nothing
    are: NaN and infinity; all but the counts of a head without elements; `rel` where the
    reference is lost in its terms; `flash_vs_precision` where the format changes nothing;
    and the fields of UNJUDGED with fewer than two sequences. `elements` must be there."""
    nulls: dict[str, str] = {}
    lost = head.pop("lost", False)
    if head["elements"] == 0:
        why = "no finite element in a row that sees a key"
        counts = (*INTEGERS, "sequences")
        nulls |= {k: why for k, v in head.items() if v is not None and k not in counts}
    elif lost:
        nulls["rel"] = "the reference is lost in its term scale"
    if head.get("precision_rms") == 0:
        nulls["flash_vs_precision"] = "rounding the inputs to this format changes nothing"
    if head.get("sequences", 2) < 2:
        nulls |= dict.fromkeys(UNJUDGED, "needs at least two sequences")
    for name, x in head.items():
        if x.__class__ is float and not math.isfinite(x):
            why = UNDEFINED if math.isnan(x) else "the denominator is zero"
            nulls.setdefault(name, why)
    head.update(dict.fromkeys(nulls))
    head["nulls"] = nulls
    return head
