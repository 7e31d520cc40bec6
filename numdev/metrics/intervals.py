"""How well a sample of rows tells what all rows would: 95 % intervals of a head's
metrics.

A metric that is a function of sums over rows (a root mean square, a ratio of two) is
estimated by the same function of the sampled rows' sums. Its interval is a delete-a-group
jackknife's (Kott, "The delete-a-group jackknife", J. Off. Stat. 17, 2001): the rows are
dealt out to G = 16 groups in turn, so that each is spread over the positions as the
sample is; the metric is computed G times without one of them; and with t_g its logarithm

    variance = (1 - n / N) (G - 1) / G sum_g (t_g - mean t)^2
    interval = value exp(+- q sd)

q being the 97.5 % quantile of Student's t with G - 1 degrees of freedom, n of N rows
sampled. On the logarithmic scale, since a ratio and its inverse then say the same and no
interval holds a negative error. Rows that stood out are in each of the G sums, and N and
n are of the others; they keep a few rows from ruling what is estimated. How often
intervals hold: docs/derivations.md.

`rel` gets none: under a causal mask the first rows, which see few keys, rule |r|. Nor
does a maximum, which a sample bounds from below alone; nor what has fewer than two rows,
or is 0 without one of the groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from numdev.metrics.statistics import CONFIDENCE

Interval = tuple[float, float]
Numbers = NDArray[np.float64]
Sums = Mapping[str, Numbers]
"""What a metric is made of, by name: sums over all rows [H], or over groups of them [H,
groups]."""
RMS = {
    "rms": ("square", "count"),
    "row_rel": ("relative", "counted"),
    "precision_rms": ("moved", "moved_count"),
    "from_baseline_rms": ("from_baseline", "from_baseline_count"),
    "low_precision_rms": ("cast_apart", "cast_count"),
}
"""Root mean squares: the sum of squares, and of how many."""


def of_sums(sums: Sums) -> dict[str, Numbers]:
    """Returns metrics by name, computed from these sums, in their shape: mean_abs, those
    of RMS, and what follows from them beside the floor, the baseline and the prediction.
    A metric whose denominator is 0 is NaN or infinite. A metric whose sums are missing is
    left out. `absolute` and `count` must be there; beside `floor` or `plain` also
    `square`, and beside these and `against` the other sums that come with them. Raises
    KeyError without these."""
    metrics = {"mean_abs": sums["absolute"] / sums["count"]}
    for name, (squares, count) in RMS.items():
        if sums.keys() >= {squares, count}:
            metrics[name] = np.sqrt(sums[squares] / sums[count])
    if "floor" in sums:
        floor = np.maximum(sums["floor"], sums["least"]) / sums["floor_count"]
        metrics["floor_ratio"] = metrics["rms"] / np.sqrt(floor)
    if "plain" in sums:
        plain = np.sqrt(sums["plain"] / sums["plain_count"])
        metrics["baseline_ratio"] = metrics["rms"] / plain
    if "against" in sums:
        predicted = np.maximum(sums["predicted"], sums["least_row"])
        metrics["expected_ratio"] = np.sqrt(sums["against"] / predicted)
        metrics["error_rows"] = sums["against"] ** 2 / sums["against_squared"]
        predicted = np.maximum(sums["own_predicted"], sums["own_least"])
        metrics["rms_ratio"] = np.sqrt(sums["own_against"] / predicted)
        metrics["rms_rows"] = sums["own_weight"] ** 2 / sums["own_weight_squared"]
    for name in ("precision", "low_precision"):
        if metrics.keys() >= {"from_baseline_rms", f"{name}_rms"}:
            metrics[f"flash_vs_{name}"] = (
                metrics["from_baseline_rms"] / metrics[f"{name}_rms"]
            )
    return metrics


def intervals(
    groups: Sums, rows: int, of: int, certain: Numbers | None = None
) -> list[dict[str, Interval]]:
    """Returns for each head the 95 % intervals (low, high) of its metrics, those of
    `of_sums`, by name, from a sample of `rows` rows in order of position. `groups`: sums
    over the rows dealt to groups [H, GROUPS]; `of`: how many rows the sample stands for;
    `certain` [sums, H], in the order of `groups`: sums over further rows that are all
    measured.

    A metric without a finite interval is left out, and all are for fewer than two rows. A
    metric of exactly 0 has the interval (0, 0)."""
    from scipy.special import stdtrit

    heads, most = groups["count"].shape
    if rows < 2:
        return [{} for _ in range(heads)]
    count = min(rows, most)  # groups that are not empty
    quantile = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))
    # Over all groups, and without each over the others: not by subtraction, since where
    # one row has all little is left.
    chosen = np.concatenate([np.ones((count, 1)), 1 - np.eye(count)], axis=1)
    parts = np.array([x[:, :count] for x in groups.values()])  # [sums, H, groups]
    with np.errstate(all="ignore"):  # a metric that means nothing has no interval
        together = (parts.reshape(-1, count) @ chosen).reshape(*parts.shape[:2], -1)
        if certain is not None:
            without = np.array([0, *(len(range(g, rows, count)) for g in range(count))])
            together = together * (of / (rows - without)) + certain[..., None]
        values = of_sums(dict(zip(groups, together, strict=True)))
        every = np.array(list(values.values()))  # [metrics, H, 1 + groups]
        value, logarithm = every[..., 0], np.log(every[..., 1:])
        squares = (logarithm - logarithm.mean(axis=-1, keepdims=True)) ** 2
        variance = (1 - rows / of) * (count - 1) / count * squares.sum(axis=-1)
        width = np.exp(quantile * np.sqrt(variance))
        exact = value == 0  # no row errs at all: then none does without a group either
        ends = np.stack(
            [np.where(exact, value, x) for x in (value / width, value * width)]
        )
    return [
        {
            n: (low, high)
            for n, low, high in zip(values, *of_head, strict=True)
            if math.isfinite(high - low)
        }
        for of_head in ends.transpose(2, 0, 1).tolist()
    ]
