"""Statistics of rows: means over seeds, Holm's procedure, noise over the floor, what a
bias is."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numdev.report.records.measurements import DeviationRow

BIAS_ALPHA = 0.01
"""Family-wise error rate, over the heads of one kernel in one format, of calling any
biased."""
BIAS_SEQUENCES = 8  # fewer independent ones say nothing about a kernel in general
BIAS_ULP = 0.05  # at the term scale; a smaller bias is not worth an accusation
BIAS_FORMATS = ("bfloat16", "float16")
"""Where a kernel's one rounding of its output outweighs its arithmetic. In fp32 exp, sums
and division err by as much as the last rounding, often to one side, in sound kernels too:
0.05 ulp of fp32 is 3e-9 of the value, and no accusation."""
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
CONFIDENCE = 0.95
UNDEFINED = "0/0"  # why a ratio is null that was computed and is NaN

Mean = tuple[float, float | None, float | None]
"""A mean and the ends of its 95 % interval; None for both where they are no numbers, as
of a single observation."""


def interval(values: Sequence[float], least: float = -math.inf) -> Mean:
    """Returns the mean of at least one value and the ends of its 95 % interval (Student's
    t). Both ends are None of a single value, where a value is not finite, and where the
    spread or an end is beyond float64. Of a quantity that is never below `least` no
    interval begins below it: what is impossible is left out, which changes no coverage
    (Mandelkern, "Setting confidence intervals for bounded parameters", Statist. Sci. 17,
    2002). NaN and infinity propagate to the mean."""
    # With scipy a third of a second that `numdev gate` need not wait for
    import numpy as np
    from scipy.special import stdtrit

    n = len(values)
    with np.errstate(all="ignore"):  # what is not finite has no interval
        mean = float(np.mean(values))
        if n < 2:
            return mean, None, None
        spread = np.std(values, ddof=1)
    half = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2) * spread / math.sqrt(n))
    if not math.isfinite(abs(mean) + half):
        return mean, None, None
    return mean, max(least, mean - half), mean + half


def factor(ratios: Sequence[float]) -> Mean:
    """Returns the geometric mean of at least one ratio and its 95 % interval, from
    logarithms: a ratio and its inverse say the same. Where a ratio is not positive it is
    the ordinary mean with its interval, which begins at 0 or above where no ratio is
    negative. Both ends are None of a single ratio, where a ratio is not finite, and where
    an end is beyond float64. NaN and infinity propagate to the mean."""
    if not min(ratios) > 0:  # NaN too, which may hide a 0
        return interval(ratios, least=0.0 if min(ratios) == 0 else -math.inf)
    mean, low, high = interval([math.log(ratio) for ratio in ratios])
    if low is None or high is None or high > math.log(sys.float_info.max):
        return math.exp(mean), None, None
    return math.exp(mean), math.exp(low), math.exp(high)


def noise_ratio(row: DeviationRow) -> float | None:
    """Returns the rms difference between repeated runs over what rounding the result once
    changes. That is the rms of the floor (rms / floor_ratio), or u / sqrt(12) of the
    terms (about rms / row_rel) where this is more. The latter is only for formats of
    UNIT_ROUNDOFF. 0 where runs agree; None where the noise is missing, or rms or
    floor_ratio is missing or 0."""
    if row.noise is None or row.noise == 0:
        return row.noise
    if not row.rms or not row.floor_ratio:
        return None
    u = UNIT_ROUNDOFF.get(row.out_format or row.format, 0.0)
    terms = u * row.rms / row.row_rel / math.sqrt(12) if row.row_rel else 0.0
    return row.noise / max(row.rms / row.floor_ratio, terms)


def holm(p: Sequence[float], alpha: float) -> list[bool]:
    """Returns which hypotheses Holm's step-down procedure rejects at family-wise error
    rate `alpha`, in the order of their p-values `p`; empty for none. A hypothesis whose p
    is NaN counts as one of the family, and is not rejected.

    S. Holm, "A simple sequentially rejective multiple test procedure" (1979)."""
    # NaN last: it compares with nothing, and would leave the others unsorted
    order = sorted(range(len(p)), key=lambda at: (math.isnan(p[at]), p[at]))
    rejected = [False] * len(p)
    for step, at in enumerate(order):
        if not p[at] <= alpha / (len(p) - step):
            break
        rejected[at] = True
    return rejected
