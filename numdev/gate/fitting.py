"""A file of thresholds fitted to a report: what its kernels keep, and a margin.

Each rule takes the worst number of a kernel in a format and tensor, multiplies it by its family's
margin and rounds up to two digits. The file is judged before it is given out: the report passes it.
A report in which a kernel is wrong outright (not finite where it should be, another function) gets
none, since its limits would make that the standard.
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
from numdev.gate.rows import Around, Groups, Measured, by_tensor, measured
from numdev.gate.rules import ESTIMATED, MAXIMA, Rules, default_rules, interval_of, value_of
from numdev.gate.verdict import Power
from numdev.report import DeviationRow

OUTRIGHT = ("finiteness", "function")  # default rules that have no margin
LARGEST = 1e300  # beyond it a margin would overflow; a report with such numbers does not pass
Group = tuple[str, str, str]  # kernel, format and tensor


class Family(NamedTuple):
    """A rule to be fitted."""

    name: str
    metric: str
    margin: float
    means: str
    least: float = 0.0
    """A limit is fitted to no less than this."""
    tensors: tuple[str, ...] = ("out", "dq", "dk", "dv")
    heads: int | None = None


FAMILIES = (
    Family(
        "error", "expected_ratio", 1.1,
        "A head's error over what the kernel's own roundings predict on these inputs.", 1.0,
    ),
    Family(
        "typical head", "expected_ratio", 1.03,
        "The same in the median over a tensor's heads, where single heads' luck is gone.", 1.0,
        heads=8,
    ),
    Family(
        "beside the baseline", "baseline_ratio", 1.25,
        "A head's error over that of plain attention in the same format.",
    ),
    Family(
        "worst row", "worst_row", 1.5,
        "The row that is farthest beyond what is predicted for it: an extreme value.", 1.0,
    ),
    Family(
        "reproducibility", "noise_ratio", 2.0,
        "What repeated runs differ by, over what one rounding changes; 0 is bitwise equal.",
    ),
    Family(
        "log-sum-exp", "lse_error", 3.0,
        "rms of the log-sum-exp over 1 + its own size.", tensors=("lse",),
    ),
)  # fmt: skip
HEADER = (
    "Thresholds for numdev gate, fitted to {report}. A limit is the worst number measured there, "
    "times the margin that its rule states, rounded up to two digits; at_most is the tightest of "
    "them, and `instead` has the others. `holds_for`: rounding differs between machines, and a "
    "report from another kind is not judged. `required`: kernels that ran in every call, and must "
    "again. `catches`: planted faults that the rules catch together from this dose on, in all "
    "formats; for a report without that (audit with --control) the exit code is 3. "
    "What the keys mean: docs/gate.md."
)
FIXED = """\
thresholds:
  # NaN or infinity where the exact result, rounded once, has none, or the reverse. No margin.
  - name: finiteness
    metric: nonfinite
    equals: 0

  # A named other function (a wrong scale, mask or head) explains the output ten times better.
  - name: function
    where: {tensor: out}
    metric: suspicion
    absent: true

  # To one side of correct rounding by 0.05 ulp, and certainly, in 8 sequences or more. No margin.
  - name: bias
    where: {tensor: out, out_format: [bfloat16, float16]}
    metric: bias_size
    below: 0.05
    certain: {p: bias_p, alpha: 0.01, sequences: 8}
    may_lack: numbers
"""


def fitted(report: Measured, name: str) -> str:
    """The YAML file; `name` is what to call the report in it.

    Raises MeasurementError where nothing was measured, or a kernel is wrong outright.
    """
    groups = measured(by_tensor(report.rows), {"kernel"})
    if not groups:
        raise MeasurementError(
            f"{name}: no kernel under audit was measured, so nothing can be fitted",
            hint="audit a kernel that runs here",
        )
    hard = tuple(t for t in default_rules().thresholds if t.name in OUTRIGHT)
    for verdict in verdicts_of(report.rows, Rules(thresholds=hard)):
        if verdict.outcome == "exceeded":
            raise MeasurementError(
                f"{name}: {verdict.kernel} breaks the rule {verdict.rule} in {verdict.tensor} "
                f"({verdict.format}), and a limit fitted to that would allow it",
                hint="mend it, or audit without that kernel",
            )
    around = Around.of(report)
    text = "\n".join((_comment(HEADER.format(report=name)), _dumped(_scope(report)), FIXED))
    for family in FAMILIES:
        text += _rule(family, groups, report.rows, around)
    power = list(power_of(report.rows, _parsed(text), around))
    doses = dict(_doses(power, {rows[0].format for rows in groups.values()}))
    text += "\n" + _dumped({"catches": doses} if doses else {})
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


def _rule(family: Family, groups: Groups, rows: Sequence[DeviationRow], around: Around) -> str:
    """One entry of `thresholds`, with its comment; empty where no group has all its numbers."""
    limits: dict[Group, float] = {}
    lacking: dict[Group, None] = {}
    worst = (0.0, "")
    for heads in groups.values():
        group = (heads[0].kernel, heads[0].format, heads[0].tensor)
        if group[2] not in family.tensors:
            continue
        size = _worst(heads, family)
        if size is None:
            lacking[group] = None
            continue
        limit = rounded_up(min(max(size, family.least), LARGEST) * family.margin)
        limits[group] = max(limit, limits.get(group, 0.0))
        worst = max(worst, (size, " ".join((group[0], group[2], group[1]))))
    limits = {group: limit for group, limit in limits.items() if group not in lacking}
    if not limits:
        return ""
    entry = _entry(family, limits, lacking)
    alone = power_of(rows, Rules.model_validate({"thresholds": [entry]}), around)
    caught = [
        f"{p.fault} from {p.caught_from:g} ({p.format})" for p in alone if p.caught_from is not None
    ]
    comment = (
        f"{family.means} Measured: at most {worst[0]:.4g} ({worst[1]}). Margin: "
        f"{family.margin:g} x. Would have caught: {', '.join(caught) or 'no planted fault'}."
    )
    return "\n" + textwrap.indent(f"{_comment(comment)}\n{_dumped([entry])}", "  ")


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


def _entry(family: Family, limits: dict[Group, float], lacking: dict[Group, None]) -> Any:
    kernels, formats, tensors = (list(dict.fromkeys(g[i] for g in limits)) for i in range(3))
    # Not these kernels, but all except those without the number: another may come, or be planted.
    never = dict.fromkeys(f"!{glob.escape(k)}" for k, _, _ in lacking if k not in kernels)
    where = {"kernel": list(never), "format": list(map(glob.escape, formats)), "tensor": tensors}
    tightest = min(limits.values())
    entry: dict[str, Any] = {
        "name": family.name,
        "where": {key: names for key, names in where.items() if names},
        "metric": family.metric,
        **({} if family.heads is None else {"heads": family.heads}),
        "at_most": tightest,
    }
    others = [
        {"kernel": glob.escape(kernel), "format": glob.escape(fmt), "tensor": t, "at_most": limit}
        for (kernel, fmt, t), limit in limits.items()
        if limit > tightest
    ]
    if others:
        entry["instead"] = others
    if any(k in kernels and f in formats and t in tensors for k, f, t in lacking):
        entry["may_lack"] = "numbers"
    return entry


def _doses(power: Sequence[Power], formats: set[str]) -> Iterator[tuple[str, float]]:
    """What these rules must go on catching: faults that they catch in every format."""
    for fault in dict.fromkeys(p.fault for p in power):
        doses = {p.format: p.caught_from for p in power if p.fault == fault}
        caught = [p.caught_from for p in power if p.fault == fault]
        if None not in caught and doses.keys() >= formats:
            yield fault, max(dose or 0.0 for dose in caught)


def _parsed(text: str) -> Rules:
    return Rules.model_validate(yaml.safe_load(text))


def _dumped(data: Any) -> str:
    text = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=math.inf)
    return str(text) if data else ""


def _comment(text: str) -> str:
    """In lines; names from elsewhere may hold anything."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return textwrap.fill(plain, 92, initial_indent="# ", subsequent_indent="# ")
