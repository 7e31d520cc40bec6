"""Curves of distances over training: their ratios, where they merge, how many steps they are apart.

Training is chaotic: two runs that differ by anything part from each other, and however small the
difference was, their distance grows to the same size. While it is small, distances keep the
proportion of what caused them; a larger one is the first to stop growing, the others catch up, and
past that the distance says how chaotic training is. So a ratio means something only before the
largest curve bends, and to see that takes a null: a run that differs by much less.

Let s be the largest perturbation over the smallest null, at a step, of geometric means over seeds.
In proportion, s stays; as curves merge, it falls to 1. Two marks follow, with no model of growth:

- curves **bend** at the first recorded step after the peak of s from which on s is at most half of
  that peak;
- they are **saturated** from the first recorded step from which on s is at most 2.

Another seed's runs are no perturbation: they start apart. Proportion is lost earlier in single
seeds: a run meets an instability some steps before another whose cause was as large, and is then
far ahead. Null runs of one kind show that, since their causes are equal. **Chance decides** from
the first recorded step at which in some seed the largest of them over the smallest is more than
twice what it was at first. The nulls alone say so: a window that ended where the ratio asked about
begins to scatter would be chosen for its answer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from numdev.training.bounds.report import Saturation
from numdev.training.report import TrainReport, VariantRecord, VariantRole

METRICS = ("mean_abs", "max_abs", "rel", "w1")
PERTURBED: tuple[VariantRole, ...] = ("flash", "low_precision", "attention_precision")
"""Runs that start where the golden one does and compute otherwise."""
NULLS: Mapping[VariantRole, str] = {
    "null_repeat": "null: repeat",
    "null_ulp": "null: one ulp",
    "null_rounding": "null: re-rounded",
}
"""The label that all null runs of one kind share."""
COLUMNS = ("of", "group", "metric", "role", "label", "seed", "step", "value")
MERGED = 2.0  # the largest perturbation over the smallest null where curves have merged
PARTED = 2.0  # how much farther apart than at first equal nulls are where chance decides


def label_of(v: VariantRecord) -> str:
    return NULLS.get(v.role, v.name)


def distances_of(run: TrainReport) -> pd.DataFrame:
    """Every finite distance from the golden run, one a line, with the columns of COLUMNS."""
    others = {v.name: (v.role, label_of(v)) for v in run.variants if v.role != "golden"}
    lines = [
        (d.of, d.group, metric, *others[d.variant], d.seed, d.step, value)
        for d in run.distances
        if d.variant in others
        for metric in METRICS
        if (value := getattr(d, metric)) is not None
    ]
    return pd.DataFrame(lines, columns=list(COLUMNS))


def curves(distances: pd.DataFrame) -> pd.DataFrame:
    """One metric of one group: a line for each seed and step, a column for each label, the mean
    over runs of one kind in it; NaN where there is none."""
    return distances.pivot_table(index=["seed", "step"], columns="label", values="value")


def saturation(group: str, distances: pd.DataFrame) -> Saturation:
    """The marks of one metric of one group's weights."""
    steps = tuple(sorted({int(step) for step in distances.step if step > 0}))
    roles = dict(zip(distances.label, distances.role, strict=True))
    values = curves(distances[distances.step > 0])
    middle = values.where(values > 0).groupby("step").agg(_geometric)
    here = {label: role for label, role in roles.items() if label in middle}  # beyond step 0
    large = middle[[label for label, role in here.items() if role in PERTURBED]]
    small = middle[[label for label, role in here.items() if role in NULLS]]
    above = (large.max(axis=1) / small.min(axis=1)).dropna()
    if above.empty:
        reason = "every null run is bitwise the golden one"
        if not NULLS.keys() & roles.values():
            reason = "there is no null run"
        if not set(PERTURBED) & set(roles.values()):
            reason = "no run with another kernel or format has a distance"
        return Saturation(group=group, steps=steps, early=steps[:1], reason=reason)
    chance = _chance_decides(distances[distances.role.isin(NULLS)])
    top: Any = above.idxmax()
    merged = _from_then_on(above <= MERGED)
    halved = _from_then_on(above[above.index > top] <= above[top] / 2)
    bends = min((step for step in (halved, merged) if step is not None), default=None)
    return Saturation(
        group=group,
        steps=steps,
        bends=bends,
        saturated=merged,
        peak=above[top],
        null=small.loc[top].idxmin(),
        chance=chance,
        early=tuple(s for s in steps if all(m is None or s < m for m in (bends, chance))),
        late=tuple(s for s in steps if merged is not None and s >= merged),
    )


def _chance_decides(nulls: pd.DataFrame) -> int | None:
    """None where nulls do not part, or no seed has two of one kind."""
    ends = nulls.groupby(["label", "seed", "step"]).value.agg(["min", "max", "count"])
    ends = ends[(ends["count"] > 1) & (ends["min"] > 0)]
    apart = ends["max"] / ends["min"]
    first = apart.groupby(["label", "seed"]).transform("first")
    steps = apart[apart > PARTED * first].index.get_level_values("step")
    return None if steps.empty else int(steps.min())


def _from_then_on(holds: pd.Series[bool]) -> int | None:
    """The first step from which on it holds at every step; None if it does not at the last."""
    lasting = holds[holds[::-1].cummin()[::-1]]
    return None if lasting.empty else int(lasting.index.min())


def ratios(a: pd.Series[float], b: pd.Series[float], steps: Sequence[int]) -> dict[int, float]:
    """Two of `curves`, a over b, in each seed that has both: the geometric mean over these steps,
    of those where neither is zero; 0 where a is zero at all of them and b is not."""
    ratio = (a / b)[(b > 0) & b.index.isin(steps, level="step")].dropna()
    seeds = ratio.where(ratio > 0).groupby("seed").agg(_geometric).fillna(0.0)
    return {int(seed): mean for seed, mean in zip(seeds.index, seeds, strict=True)}


def _geometric(values: pd.Series[float]) -> float:
    """Of those that are there; NaN where none is."""
    known = values.dropna()
    return statistics.geometric_mean(known) if len(known) else math.nan
