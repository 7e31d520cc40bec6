"""A file of thresholds fitted to a report: what its kernels keep, and a margin.

A rule takes the worst number of each kernel in each format and tensor, times a margin, rounded up
to two digits. The report must pass the file; one in which a kernel is wrong outright (not finite
where it should be, another function) gets none, since its limits would make that the standard.
"""

from __future__ import annotations

import glob
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import yaml

from numdev.errors import MeasurementError
from numdev.gate.judging import judge_report, power_of, verdicts_of
from numdev.gate.rows import Measured, by_tensor, measured
from numdev.gate.rules import ESTIMATED, MAXIMA, Rules, default_rules, interval_of, value_of
from numdev.report import DeviationRow

OUTRIGHT = ("finiteness", "function")  # default rules that have no margin
COPIED = (*OUTRIGHT, "bias")  # default rules that stand in the file as they are
LARGEST = 1e300  # beyond it a margin would overflow; a report with such numbers does not pass


class Family(NamedTuple):
    """A rule to be fitted, to no less than `least`."""

    name: str
    metric: str
    margin: float
    means: str
    least: float = 0.0
    tensors: tuple[str, ...] = ("out", "dq", "dk", "dv")
    heads: int | None = None


FAMILIES = (
    Family("error", "expected_ratio", 1.1, "A head's error over what its roundings predict.", 1.0),
    Family("typical head", "expected_ratio", 1.03, "The same of the median head.", 1.0, heads=8),
    Family("beside the baseline", "baseline_ratio", 1.25, "Over the error of plain attention."),
    Family("worst row", "worst_row", 1.5, "The row farthest beyond its prediction.", 1.0),
    Family("reproducibility", "noise_ratio", 2.0, "Repeated runs, over one rounding's change."),
    Family("log-sum-exp", "lse_error", 3.0, "rms over 1 + its own size.", tensors=("lse",)),
)
HEADER = (
    "Thresholds for numdev gate, fitted to {report}. A limit is the worst number measured there "
    "times its rule's margin; at_most is the tightest, and `instead` has the others. A report from "
    "another kind of machine is not judged (`holds_for`); `required` kernels must run in every "
    "call; the planted faults of `catches` must be caught from that dose on, in all formats (audit "
    "with --control), or the exit code is 3. What the keys mean: docs/gate.md."
)


def fitted(report: Measured, name: str) -> str:
    """The YAML file; `name` is what to call the report in it.

    Raises MeasurementError where nothing was measured, or a kernel is wrong outright.
    """
    groups = measured(by_tensor([row for row in report.rows if row.role == "kernel"]))
    if not groups:
        raise MeasurementError(
            f"{name}: no kernel under audit was measured, so nothing can be fitted",
            hint="audit a kernel that runs here",
        )
    copied = {t.name: t for t in default_rules().thresholds if t.name in COPIED}
    hard = Rules(thresholds=tuple(copied[rule] for rule in OUTRIGHT))
    for verdict in verdicts_of(report.rows, hard):
        if verdict.outcome == "exceeded":
            raise MeasurementError(
                f"{name}: {verdict.kernel} breaks the rule {verdict.rule} in {verdict.tensor} "
                f"({verdict.format}), and a limit fitted to that would allow it",
                hint="mend it, or audit without that kernel",
            )
    text = _comment(HEADER.format(report=name)) + "\n" + _dumped(_scope(report)) + "\nthresholds:\n"
    for threshold in copied.values():
        text += _dumped([threshold.model_dump(mode="json", exclude_defaults=True)])
    for family in FAMILIES:
        text += _rule(family, list(groups.values()))
    formats = {rows[0].format for rows in groups.values()}
    if doses := dict(_doses(report.rows, _parsed(text), formats)):
        text += "\n" + _dumped({"catches": doses})
    outcome = judge_report(report, _parsed(text)).outcome
    if outcome != "passed":
        raise MeasurementError(
            f"{name}: the report does not pass limits fitted to it ({outcome})",
            hint="see numdev gate on it: what failed or was not measured there is no standard",
        )
    return text


def _scope(report: Measured) -> dict[str, Any]:
    """What the file holds for, and who must be in a report."""
    system = report.provenance.system
    key = next((k for k in ("gpu", "cpu_capability") if isinstance(system.get(k), str)), None)
    scope: dict[str, Any] = {} if key is None else {"holds_for": {key: glob.escape(system[key])}}
    rows = [row for row in report.rows if row.role == "kernel"]
    partly = {row.kernel for row in rows if row.status != "ok"}
    always = [glob.escape(k) for k in dict.fromkeys(r.kernel for r in rows) if k not in partly]
    return scope | ({"required": always} if always else {})


def _rule(family: Family, groups: Sequence[Sequence[DeviationRow]]) -> str:
    """One entry of `thresholds`, with its comment; empty where no group has all its numbers."""
    sizes: dict[tuple[str, str, str], float] = {}  # by kernel, format and tensor
    lacking = set()
    for rows in (rows for rows in groups if rows[0].tensor in family.tensors):
        group = (rows[0].kernel, rows[0].format, rows[0].tensor)
        size = _worst(rows, family)
        if size is None:
            lacking.add(group)
        else:
            sizes[group] = max(size, sizes.get(group, 0.0))
    sizes = {group: size for group, size in sizes.items() if group not in lacking}
    if not sizes:
        return ""
    limits = {
        group: rounded_up(min(max(size, family.least), LARGEST) * family.margin)
        for group, size in sizes.items()
    }
    kernels, formats, tensors = (list(dict.fromkeys(g[i] for g in limits)) for i in range(3))
    # Not these kernels, but all except those without the number: another may come, or be planted.
    never = [f"!{glob.escape(k)}" for k in sorted({k for k, _, _ in lacking} - set(kernels))]
    where = {"kernel": never, "format": list(map(glob.escape, formats)), "tensor": tensors}
    entry: dict[str, Any] = {
        "name": family.name,
        "where": {key: names for key, names in where.items() if names},
        "metric": family.metric,
        **({} if family.heads is None else {"heads": family.heads}),
        "at_most": (tightest := min(limits.values())),
    }
    others = [
        {"kernel": glob.escape(kernel), "format": glob.escape(fmt), "tensor": t, "at_most": limit}
        for (kernel, fmt, t), limit in limits.items()
        if limit > tightest
    ]
    entry |= {"instead": others} if others else {}
    if any(k in kernels and f in formats and t in tensors for k, f, t in lacking):
        entry["may_lack"] = "numbers"
    worst = max(sizes, key=lambda group: sizes[group])
    comment = (
        f"{family.means} Measured: at most {sizes[worst]:.4g} ({worst[0]} {worst[2]} {worst[1]}). "
        f"Margin: {family.margin:g} x."
    )
    return f"\n{_comment(comment)}\n{_dumped([entry])}"


def _worst(rows: Sequence[DeviationRow], family: Family) -> float | None:
    """The number that a rule of this family judges of so many heads; of sampled rows the upper end
    of the interval, and None of a maximum."""
    sizes: list[float] = []
    for row in rows:
        value = value_of(row, family.metric)[0]
        ends: tuple[float, ...] | None = None if value is None else (float(value),)
        if row.sampled and family.metric in MAXIMA | ESTIMATED and ends is not None:
            ends = None if family.metric in MAXIMA else interval_of(row, family.metric)
        if ends is None:
            return None
        sizes.append(max(map(abs, ends)))
    if family.heads is None:
        return max(sizes)
    return sorted(sizes, reverse=True)[len(sizes) // 2] if len(sizes) >= family.heads else None


def rounded_up(x: float) -> float:
    """To two significant digits, and never down; 0 stays 0."""
    nearest = float(f"{x:.1e}")
    if nearest >= x:
        return nearest
    step = math.floor(math.log10(x)) - 1
    return float(f"{nearest + 10.0**step:.1e}")


def _doses(
    rows: Sequence[DeviationRow], rules: Rules, formats: set[str]
) -> Iterator[tuple[str, float]]:
    """What these rules must go on catching: faults that they catch in every format."""
    power = list(power_of(rows, rules))
    for fault in dict.fromkeys(p.fault for p in power):
        caught = {p.format: p.caught_from for p in power if p.fault == fault}
        if None not in caught.values() and caught.keys() >= formats:
            yield fault, max(dose or 0.0 for dose in caught.values())


def _parsed(text: str) -> Rules:
    return Rules.model_validate(yaml.safe_load(text))


def _dumped(data: Any) -> str:
    text = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=math.inf)
    return str(text) if data else ""


def _comment(text: str) -> str:
    """In lines; names from elsewhere may hold anything."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return textwrap.fill(plain, 92, initial_indent="# ", subsequent_indent="# ")
