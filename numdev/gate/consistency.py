"""Whether the rows of a report contradict themselves: numbers that no measurement gives, numbers of
what was not measured, and rows that are there twice. What was planned is for `gate.rows`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from numdev.errors import MeasurementError
from numdev.gate.findings import label
from numdev.gate.rows import CUT, ROUNDING, spelt
from numdev.metrics.of_rows import FIELDS
from numdev.report import DeviationRow, Report

DEVIATIONS = tuple(sorted(FIELDS - {"layer", "seed", "head", "step"}))
"""The numbers of a row of an audit or a sweep."""
COSTS = (
    *("cost", "cost_p999", "cost_max", "log_prob", "log_prob_p999", "log_prob_max"),
    *("log_perplexity", "error", "angle", "apart", "flips", "unexplained"),
)
"""Those of a run of effects, but for `first_flip`, which is null where nothing flips."""
DIFFERENCES = (
    *("difference", "floor_ratio", "error_base", "error_variant", "excess", "excess_of_a_row"),
    "ulps",
)
"""Those of a row of invariance, beside its counts."""
OF_MODELS = ("difference", "rest", "share")
"""Those of the model's own output, beside its counts."""
SIGNED = ("bias", "bias_sign", "bias_feature", "bias_t", "bias_size", "log_perplexity")
SHARES = ("bias_p", "share")  # between 0 and 1
LARGEST = 1e39  # an error in a format no wider than float32, whose largest number is 3.4e38
HUGE = 1e300  # what numdev writes in place of a larger multiple
NEARLY = 1e-6  # of the model's share, which follows from two other numbers


def check_consistent(report: Report) -> None:
    """Raises MeasurementError for the first row that contradicts itself."""
    for row, wrong in _contradictions(report):
        if wrong:
            raise MeasurementError(f"inconsistent report: {_name(row)} {wrong}", hint=CUT)


def _name(row: Any) -> str:
    """What a row, a check or an output of the model is called."""
    if hasattr(row, "holds"):
        return f"check {row.name}"
    kernel = label(row) if hasattr(row, "options") else row.kernel
    return f"{kernel or 'the model'} ({row.format})"


def _contradictions(report: Any) -> Iterator[tuple[Any, str | None]]:
    """Every row, check and output of the model, and what of it cannot be."""
    match report.kind:
        case "effects":
            yield from ((row, _of_run(row)) for row in report.rows)
            yield from ((check, _of_check(check)) for check in report.checks)
            yield from repeated(report.rows, lambda row: (row.run, row.sequence))
            yield from repeated(report.checks, name_of_check)
        case "invariance":
            yield from ((row, _of_difference(row)) for row in report.rows)
            yield from ((row, _of_output(row)) for row in report.models)
            yield from repeated(report.rows, _place_of_difference)
        case _:
            yield from ((row, _of_deviation(row)) for row in report.rows)
            bare = [row for row in report.rows if row.status != "ok"]
            yield from repeated(bare, _place_of_deviation)


def repeated(rows: Iterable[Any], key: Any) -> Iterator[tuple[Any, str]]:
    """Rows of a key that another row has already."""
    counts: Counter[Any] = Counter()
    for row in rows:
        counts[key(row)] += 1
        if counts[key(row)] > 1:
            yield row, "is there twice"


def name_of_check(check: Any) -> tuple[str, str, str]:
    """What tells checks of effects apart: of `format` there is one for each site."""
    return check.name, check.format, check.reason if check.name == "format" else ""


def _place_of_difference(row: Any) -> tuple[Any, ...]:
    return (row.kernel, spelt(row.options), row.format, row.case, row.axis, row.variant, row.tensor)


def _place_of_deviation(row: DeviationRow) -> tuple[Any, ...]:
    of = (row.role, row.kernel, spelt(row.options), row.format)
    return (*of, row.case, row.seed, row.tensor, row.head)


def _impossible(numbers: Mapping[str, float | None]) -> str | None:
    """The first number that is below 0, beyond 1, or larger than any."""
    for name, number in numbers.items():
        if number is None:
            continue
        if number < 0 and name not in SIGNED:
            return f"has a negative {name}"
        if number > 1 and name in SHARES:
            return f"has a {name} above 1"
        if abs(number) > HUGE:
            return f"has a {name} beyond any that could be measured"
    return None


def _numbers(row: Any, names: Sequence[str]) -> dict[str, float | None]:
    return {name: getattr(row, name) for name in names}


def _unmeasured(status: str, numbers: Mapping[str, Any]) -> str | None:
    """The number that a row has nevertheless which was skipped, or failed."""
    named = next((name for name, number in numbers.items() if number is not None), None)
    return None if named is None else f"was {status}, and has {named}"


def _of_deviation(row: DeviationRow) -> str | None:
    numbers = _numbers(row, DEVIATIONS)
    if row.status != "ok":
        return _unmeasured(row.status, {**numbers, **({"bits": row.bits} if row.bits else {})})
    if wrong := _impossible(numbers):
        return wrong
    sizes = [size for size in (row.rms, row.mean_abs, row.max_abs) if size is not None]
    if row.format != "float64" and row.out_format != "float64" and max(sizes, default=0) > LARGEST:
        return f"errs by more than {row.format} can"
    low = min((low for name, (low, _) in row.interval.items() if name not in SIGNED), default=0.0)
    return "has an interval below 0" if low < 0 else None


def _of_run(row: Any) -> str | None:
    """Of one run of effects on one sequence."""
    numbers = {**_numbers(row, COSTS), "growth": min(row.growth, default=None)}
    if row.status != "ok":
        return _unmeasured(row.status, numbers)
    if wrong := _impossible({**numbers, "positions": row.positions}):
        return wrong
    if row.cost is None:
        return "has no cost"
    for mean, largest in ((row.cost, row.cost_max), (row.log_prob, row.log_prob_max)):
        if mean is not None and largest is not None and mean > largest * ROUNDING:
            return "has a mean above the largest"
    flips = row.positions if row.flips is None else row.flips
    if flips > row.positions or (row.unexplained is not None and row.unexplained > flips):
        return "has more flips than positions"
    return None


def _of_check(check: Any) -> str | None:
    if wrong := _impossible({"difference": check.difference, "limit": check.limit}):
        return wrong
    if check.holds is None or (check.difference is None and check.holds is False):
        return None
    if check.difference is None or check.limit is None:
        return "holds, and has no difference"
    if check.holds != (check.difference <= check.limit):
        return "does not say what its difference and its limit do"
    return None


def _of_difference(row: Any) -> str | None:
    """Of one tensor along one axis."""
    numbers = _numbers(row, DIFFERENCES)
    counts = {"elements": row.elements, "differ": row.differ, "nonfinite": row.nonfinite}
    if row.status != "ok":
        return _unmeasured(row.status, {**numbers, **{n: x for n, x in counts.items() if x}})
    if wrong := _impossible(counts | numbers) or _counts(row):
        return wrong
    if row.nonfinite > row.differ:
        return "has more elements that are not finite than elements that differ"
    return None


def _of_output(row: Any) -> str | None:
    """Of the model's own output along one axis."""
    numbers = _numbers(row, OF_MODELS)
    if row.reason is not None:
        return _unmeasured("skipped", numbers)
    if wrong := _impossible({"elements": row.elements, "differ": row.differ} | numbers):
        return wrong
    if wrong := _counts(row):
        return wrong
    if row.difference and row.rest is not None and row.share is not None:
        share = max(0.0, 1 - (row.rest / row.difference) ** 2)
        if not math.isclose(row.share, share, abs_tol=NEARLY):
            return "has a share that its differences do not give"
    return None


def _counts(row: Any) -> str | None:
    if row.differ > row.elements:
        return "has more elements that differ than elements"
    if row.difference and not row.differ:
        return "has a difference where no element differs"
    return None
