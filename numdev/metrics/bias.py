"""Bias: whether an output errs to one side, with an honest statistic.

What is judged is the signed error relative to the floor's, in ulps at the term scale. The
unit of observation is a sequence (a batch entry), since the rows of one sequence share
their keys and values; rows that repeat an earlier sequence's are no observation. Within a
head the family is: the plain mean, the mean along sign(r) (shrinkage), and the mean of
every feature.

The sums come from `numdev.metrics.row_sums`; docs/derivations.md has how they were
calibrated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from numdev.metrics.statistics import BIAS_ULP

UNJUDGED: Mapping[str, object] = {
    "bias_t": None,
    "bias_p": None,
    "bias_size": None,
    "bias_of": None,
}
"""The judgement of a head of which there are fewer than two sequences."""

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]


def bias(features: Numbers, along: Numbers, counts: Numbers) -> list[dict[str, object]]:
    """Returns the bias metrics of each head, by name. `sequences` is how many were
    observed. Means over sequences: `bias`, `bias_sign` (along the reference's sign) and
    `bias_feature` (of the feature whose mean is the largest in magnitude). Of the most
    certain mean: `bias_t`, `bias_p`, `bias_size` and `bias_of` (`mean`, `sign` or
    `feature 3`).

    Summed over rows of each sequence: signed differences from the floor in ulps,
    `features` [sequences, H, features], at least one feature, and `along` the reference's
    sign [sequences, H]; `counts` [sequences, H, features]: of how many elements.

    A sequence without a usable element is no observation; means without an observation
    are 0. For a head with fewer than two sequences the last four fields are None.
    `bias_p` is corrected for the family (Bonferroni with weights, so that the 64 or 128
    features do not drown the two overall means: these get a quarter of the error rate
    each, the features share the other half). The correction over heads is made where
    heads are seen together. Members of at least BIAS_ULP in magnitude are preferred, so
    that a tiny but certain bias does not hide a large one."""
    overall, whole = features.sum(axis=-1), counts.sum(axis=-1)
    sums = np.concatenate([np.stack([overall, along], axis=-1), features], axis=-1)
    sizes = np.concatenate([np.stack([whole, whole], axis=-1), counts], axis=-1)
    seen = sizes > 0  # [sequences, H, 2 + features]
    n = seen.sum(axis=0)
    means = np.divide(sums, sizes, out=np.zeros_like(sums), where=seen)
    mean = means.sum(axis=0) / np.maximum(n, 1)
    judged: Sequence[Mapping[str, object]] = [UNJUDGED] * len(n)
    if n[:, 0].max(initial=0) > 1:
        judged = _most_certain_means(means, mean, sizes, seen)
    largest = 2 + np.abs(mean[:, 2:]).argmax(axis=-1)
    return [
        {
            "sequences": sequences,
            "bias": means_of_head[0],
            "bias_sign": means_of_head[1],
            "bias_feature": means_of_head[feature],
            **(verdict if sequences > 1 else UNJUDGED),
        }
        for sequences, means_of_head, feature, verdict in zip(
            n[:, 0].tolist(), mean.tolist(), largest.tolist(), judged, strict=True
        )
    ]


def _most_certain_means(
    means: Numbers, mean: Numbers, counts: Numbers, seen: Flags
) -> list[dict[str, object]]:
    """Returns for each head `bias_t`, `bias_p`, `bias_size` and `bias_of` of its most
    certain mean, preferring means of at least BIAS_ULP in magnitude. `bias_p` is
    corrected for the family, and at most 1. `means`, `counts` (elements) and `seen`
    [sequences, H, 2 + features] are by sequence, `mean` [H, 2 + features] is over
    sequences; the first two columns are the plain mean and the mean along the sign."""
    from scipy.special import stdtr

    features, degrees = mean.shape[-1] - 2, seen.sum(axis=0) - 1
    # By how much each p is multiplied; the reciprocals sum to 1: the error rate of the
    # family.
    corrections = np.array([4.0, 4.0, *[2.0 * features] * features])
    t = mean / _standard_error(means, mean, counts, seen)
    p = np.where(degrees < 1, 1.0, 2 * stdtr(np.maximum(degrees, 1), -np.abs(t)))
    p = np.minimum(1.0, p * corrections)
    large = np.abs(mean) >= BIAS_ULP
    # The smallest p; among equal ones, as many that are 1, the largest t.
    picks = np.lexsort((-np.abs(t), p, ~large))[:, 0]
    return [
        {
            "bias_t": float(t[head, pick]),
            "bias_p": float(p[head, pick]),
            "bias_size": float(mean[head, pick]),
            "bias_of": ("mean", "sign")[pick] if pick < 2 else f"feature {pick - 2}",
        }
        for head, pick in enumerate(picks.tolist())
    ]


def _standard_error(
    means: Numbers, mean: Numbers, counts: Numbers, seen: Flags
) -> Numbers:
    """Returns the standard error [H, 2 + features] of the mean over sequences, from their
    spread; 1 where fewer than two sequences were seen. `means`, `counts` (elements) and
    `seen` are by sequence [sequences, H, 2 + features], `mean` is over sequences.

    Outputs lie on a grid of about one ulp, so the mean of k elements moves in steps of
    1/k ulp. A spread below half a step is not measured but missed, and does not count as
    smaller: eight sequences of one row that all round a feature up are no certainty."""
    n = seen.sum(axis=0)
    spread = np.sqrt(
        np.where(seen, (means - mean) ** 2, 0.0).sum(axis=0) / np.maximum(n - 1, 1)
    )
    half_step = 0.5 * n / np.maximum(counts.sum(axis=0), 1)
    return np.where(n < 2, 1.0, np.maximum(spread, half_step) / np.sqrt(np.maximum(n, 1)))
