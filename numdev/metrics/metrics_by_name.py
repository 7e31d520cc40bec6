"""The metrics of a report's row, by name: its fields, and what is derived from them. What
sampled rows tell of each."""

from __future__ import annotations

from collections.abc import Callable

from numdev.metrics.statistics import UNDEFINED, noise_ratio
from numdev.report.records.measurements import BesideReference, Count, DeviationRow

Value = float | str | None


def lse_error(row: DeviationRow) -> float | None:
    """Returns the rms error of a row on the log-sum-exp over 1 + the root mean square of
    the exact values (which is rms / rel): relative where these are large, absolute where
    they are near 0. The rms alone where `rel` is missing or 0; None where the row has no
    rms."""
    if not row.rms:
        return row.rms
    return row.rms / (1 + (row.rms / row.rel if row.rel else 0.0))


def _beside_reference(name: str) -> Callable[[DeviationRow], Value]:
    """Returns the function that takes the number `name`, a field of `BesideReference`,
    out of a row; it returns None for a row that has no numbers beside a reference."""

    def number(row: DeviationRow) -> Value:
        """Returns the number of the row; None where it has none."""
        numbers = row.beside_reference
        value: Value = None if numbers is None else vars(numbers)[name]
        return value

    return number


# Numbers beside the reference of a function
NO_METRICS = {"slice_at", "element_at", "layout"}  # in words
BESIDE_REFERENCE = frozenset(BesideReference.model_fields) - NO_METRICS
DERIVED: dict[str, Callable[[DeviationRow], Value]] = {
    "noise_ratio": noise_ratio,
    "lse_error": lse_error,
    **{name: _beside_reference(name) for name in sorted(BESIDE_REFERENCE)},
}
# Every metric is in one of the next four: what sampled rows tell of all of them. One that
# is in none is not judged where rows are sampled.
WHOLE = frozenset(
    # Counted in all rows
    {"nonfinite", "empty_nonfinite", "empty_rows", "overflow", "noise"}
    | {"elements", "sequences", "rows_measured", "suspects"}  # said of the sample itself
    | BESIDE_REFERENCE  # of functions, whose rows are all measured
)
# Extreme values: over sampled rows they are lower bounds, and so never pass.
MAXIMA = frozenset({"max_abs", "max_ulp", "worst_row", "fa_rule"})
# What sampled rows give an estimate of, to be judged by its interval.
ESTIMATED = frozenset(
    {
        "mean_abs",
        "rms",
        "rel",
        "row_rel",
        "floor_ratio",
        "baseline_ratio",
        "expected_ratio",
    }
    | {
        "precision_rms",
        "from_baseline_rms",
        "flash_vs_precision",
        "lse_error",
        "noise_ratio",
    }
    | {"low_precision_rms", "flash_vs_low_precision", "rms_ratio", "rms_rows"}
    | {"error_rows"}
)
# What has a test of its own, with its certainty beside it.
TESTED = frozenset(
    {"bias", "bias_sign", "bias_feature", "bias_size", "bias_t", "bias_p"}
    | {"suspicion", "suspicion_cut", "suspicion_share", "imprecision_share"}
    | {"narrow_sum"}
)
# Multiples of an error: of none they are 0, also where what it is a multiple of is 0.
ERRORS = frozenset(
    {"expected_ratio", "rms_ratio", "worst_row", "floor_ratio", "baseline_ratio"}
)
_NUMBERS = (float | None, int | None, Count | None, bool | None)
FIELDS = frozenset(
    n for n, f in DeviationRow.model_fields.items() if f.annotation in _NUMBERS
)
METRICS = (FIELDS - {"layer", "seed", "head", "step"}) | {"suspicion", *DERIVED}


def value_of(row: DeviationRow, metric: str) -> tuple[Value, str | None]:
    """Returns a metric of a row by name, one of METRICS, and None; or None with the
    reason in the row's `nulls`, which is None where it gives none. A metric of ERRORS
    that was computed and is 0/0 is 0 where the row's rms is 0."""
    value: Value = DERIVED[metric](row) if metric in DERIVED else getattr(row, metric)
    if value is not None:
        return value, None
    why = row.nulls.get(metric)
    if metric in ERRORS and row.rms == 0 and why == UNDEFINED:
        return 0.0, None
    return None, why


def interval_of(row: DeviationRow, metric: str) -> tuple[float, float] | None:
    """Returns the 95 % interval of a metric of ESTIMATED; None where the row has none, or
    not the metric itself (`value_of`), and for any other metric. Where the row's rms is
    0, `lse_error` and a ratio of ERRORS have the interval of the rms. Elsewhere
    `lse_error` gets its own from that of the rms in proportion, `noise_ratio` inversely;
    None where that begins at 0. A `noise_ratio` of 0 has the interval (0, 0), since noise
    is of all rows."""
    value, _ = value_of(row, metric)
    if metric not in ESTIMATED or not isinstance(value, float):
        return None
    of_rms = row.interval.get("rms")
    if row.rms == 0 and metric in ERRORS | {"lse_error"}:
        return of_rms
    if metric not in DERIVED:
        return row.interval.get(metric)
    if value == 0:
        return 0.0, 0.0
    if of_rms is None or not row.rms or not of_rms[0]:
        return None
    low, high = (end / row.rms for end in of_rms)
    # The log-sum-exp's error goes with the rms; noise is divided by one that is as
    # uncertain.
    return (
        (value * low, value * high)
        if metric == "lse_error"
        else (value / high, value / low)
    )


ULPS = (-5, 6)
"""A histogram's first bin holds errors below 2^-5 ulp, its last those from 2^6 ulp on."""
