"""Means over seeds, and how well they are known: one observation per seed, Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95

Mean = tuple[float, float | None, float | None]
"""A mean and the ends of its 95 % interval; None for a single observation."""


def interval(values: Sequence[float]) -> Mean:
    """The mean of at least one value, and its 95 % interval; without one for a single value."""
    mean = float(np.mean(values))
    n = len(values)
    if n < 2:
        return mean, None, None
    half = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2) * np.std(values, ddof=1) / math.sqrt(n))
    return mean, mean - half, mean + half


def factor(ratios: Sequence[float]) -> Mean:
    """The geometric mean of ratios and its 95 % interval, from their logarithms: then a ratio and
    its inverse say the same. The ordinary mean where a ratio is zero."""
    if min(ratios) <= 0:
        return interval(ratios)
    mean, low, high = interval([math.log(ratio) for ratio in ratios])
    ends = [None if end is None else math.exp(end) for end in (low, high)]
    return math.exp(mean), ends[0], ends[1]
