"""A file of thresholds fitted to a report: the default rules, each limit the worst of a
kernel in a format and tensor, times a margin, rounded up to two digits; never looser than
the default one unless the kernel is. The report must pass the file: what is wrong or not
measured is no standard.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Collection
from decimal import ROUND_CEILING, Context
from functools import partial

import yaml

from numdev.errors import MeasurementError, UsageError
from numdev.gate.judging import judge_report
from numdev.gate.row_groups import Groups, Measured, Rows, rows_to_judge
from numdev.gate.row_tests import threshold_tests
from numdev.gate.rules import Instead, Rules, Threshold, default_rules
from numdev.grouping import grouped
from numdev.metrics.metrics_by_name import ESTIMATED, MAXIMA, interval_of, value_of
from numdev.report import FunctionReport, Outcome, Report

# By metric, of one head or of a median, of what is fitted: the margin, and the least
# fitted to.
MARGINS = {
    ("expected_ratio", False): (1.1, 1.0),
    ("expected_ratio", True): (1.03, 1.0),
    ("rms_ratio", False): (1.1, 1.0),
    ("rms_ratio", True): (1.03, 1.0),
    ("worst_row", False): (1.5, 1.0),
    ("noise_ratio", False): (2.0, 0.0),
    ("lse_error", False): (3.0, 0.0),
}
# Beyond it a margin would overflow; a report with such numbers does not pass
LARGEST = 1e300
TWO_DIGITS = Context(prec=2, rounding=ROUND_CEILING)
HEADER = """\
# Thresholds for numdev gate, fitted to a report: the default rules; `instead` has the
# worst number measured there times a margin. What the keys mean: docs/gate.md.
"""


def fitted_thresholds(report: Report, name: str) -> str:
    """Returns the YAML text of thresholds fitted to a report. `name`: what errors call
    the report.

    Raises UsageError for a report of another kind than audits and sweeps;
    MeasurementError where no kernel was measured, or the report does not pass the fitted
    thresholds, and as `judge_report`."""
    if not isinstance(report, Measured) or isinstance(report, FunctionReport):
        what = (
            f"{name}: expected the report of an audit or a sweep, got one of "
            f"{report.kind}"
        )
        raise UsageError(what)
    groups = rows_to_judge(row for row in report.rows if row.role == "kernel")
    if not groups:
        what = f"{name}: no kernel under audit was measured, so nothing can be fitted"
        raise MeasurementError(what, hint="audit a kernel that runs here")
    rules = default_rules()
    tests = threshold_tests(report.rows, report.plan, rules)
    broken = [test for test in tests if test.outcome not in (None, Outcome.PASSED)]
    wider = {(test.rule, test.format, test.tensor, test.kernel) for test in broken}
    text = HEADER + _yaml_text(_scope_keys(report)) + "\nthresholds:\n"
    for threshold in rules.thresholds:
        fits = (threshold.metric, threshold.heads is not None) in MARGINS
        entry = _fit_threshold(threshold, groups, wider) if fits else threshold
        text += _yaml_text([entry.model_dump(mode="json", exclude_defaults=True)])
    judged = judge_report(report, Rules.model_validate(yaml.safe_load(text)))
    if judged.outcome is not Outcome.PASSED:
        wrong = (test for test in judged.tests if test.outcome is Outcome.EXCEEDED)
        why = [
            f"{v.kernel} breaks the rule {v.rule} in {v.tensor} ({v.format})"
            for v in wrong
        ]
        what = (
            f"{name}: cannot serve as a standard: "
            f"{[*why, 'something was not measured'][0]}"
        )
        raise MeasurementError(
            what, hint="see numdev gate on it; fix the kernel, or leave it out"
        )
    return text


def _scope_keys(report: Measured) -> dict[str, object]:
    """Returns the keys `holds_for` and `required` of the file: the GPU, else the CPU's
    instruction set; and the kernels that ran in every call, with the signs of patterns
    escaped. A key without a value is left out."""
    system = report.provenance.system
    key = next(
        (k for k in ("gpu", "cpu_capability") if isinstance(system.get(k), str)), None
    )
    scope: dict[str, object] = (
        {} if key is None else {"holds_for": {key: glob.escape(system[key])}}
    )
    rows = [row for row in report.rows if row.role == "kernel"]
    partly = {row.kernel for row in rows if row.status != "ok"}
    always = [
        glob.escape(k) for k in dict.fromkeys(r.kernel for r in rows) if k not in partly
    ]
    return scope | ({"required": always} if always else {})


def _fit_threshold(
    threshold: Threshold, groups: Groups, wider: Collection[object]
) -> Threshold:
    """Returns the rule with a limit for each format and tensor: the tightest of its
    kernels' (other kernels may come, or be planted), and before it a limit for each
    kernel whose own is larger. A kernel's limit is its number, at least the least one of
    MARGINS, times the margin, rounded up; the default one where that is tighter, or the
    kernel has no number. `wider`: what breaks the default rule (rule, format, tensor,
    kernel), and may have a looser limit. Raises KeyError for a rule without a margin."""
    margin, least = MARGINS[threshold.metric, threshold.heads is not None]
    limits: dict[tuple[str, str, str], float] = {}  # by format, tensor and kernel
    # By tensor, where it is another than the rule's
    scatters: dict[str, float | None] = {}
    for rows in filter(None, map(threshold.where.select, groups.values())):
        usual = threshold.for_row(rows[0])
        size, limit = _number_to_fit(rows, threshold), usual.at_most or 0.0
        group = (rows[0].format, rows[0].tensor, rows[0].kernel)
        scatters[rows[0].tensor] = (
            None if usual.scatter == threshold.scatter else usual.scatter
        )
        if size is not None:
            tight = rounded_up(min(max(size, least), LARGEST) * margin)
            limit = tight if (threshold.name, *group) in wider else min(tight, limit)
        limits[group] = max(limit, limits.get(group, 0.0))
    instead = []
    for (fmt, tensor), same in grouped(limits, lambda group: group[:2]).items():
        tightest = min(limits[group] for group in same)
        at_most = partial(
            Instead,
            format=(glob.escape(fmt),),
            tensor=(tensor,),
            scatter=scatters[tensor],
        )
        instead += [
            at_most(kernel=(glob.escape(group[2]),), at_most=limits[group])
            for group in same
            if limits[group] > tightest
        ]
        instead.append(at_most(at_most=tightest))
    return threshold.model_copy(update={"instead": (*instead, *threshold.instead)})


def _number_to_fit(rows: Rows, threshold: Threshold) -> float | None:
    """Returns the size of the number that the rule judges: the largest of the rows, or
    their median where the rule is on a median. Of sampled rows it is the upper end of the
    interval; their maxima do not count. None where no row, or too few, have a number."""
    metric, sizes = threshold.metric, []
    for row in rows:
        value = value_of(row, metric)[0]
        estimated = row.sampled and metric in MAXIMA | ESTIMATED
        interval = interval_of(row, metric) if estimated and metric in ESTIMATED else None
        if value is not None and (interval or not estimated):
            sizes.append(max((abs(float(value)), *(interval or ()))))
    if threshold.heads is None:
        return max(sizes, default=None)
    enough = len(sizes) >= (threshold.for_row(rows[0], len(rows)).heads or 0)
    return sorted(sizes, reverse=True)[len(sizes) // 2] if enough else None


def rounded_up(x: float) -> float:
    """Returns x rounded to two significant digits, towards +infinity; 0, NaN and
    infinities stay."""
    return float(TWO_DIGITS.create_decimal(repr(x)))


def _yaml_text(data: object) -> str:
    """Returns plain data as YAML on long lines; empty for empty data."""
    text = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=math.inf)
    return str(text) if data else ""
