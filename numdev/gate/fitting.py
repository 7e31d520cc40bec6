"""A file of thresholds fitted to a report: what its kernels keep, and a margin.

Each rule takes the worst number of a kernel in a format and tensor, multiplies it by its family's
margin and rounds up to two digits. What would have been caught by it is found by putting the
report's planted faults through it. The file is judged before it is given out: the report passes it.

A report in which a kernel is wrong outright (not finite where it should be, another function) gets
none, since its limits would make that the standard.
"""

from __future__ import annotations

import glob
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import yaml

from numdev.errors import MeasurementError
from numdev.gate.comparable import Measured
from numdev.gate.judging import judge_report, power_of, verdicts_of
from numdev.gate.rows import Around, Groups, by_tensor, measured
from numdev.gate.rules import ESTIMATED, MAXIMA, Rules, default_rules, interval_of, value_of
from numdev.gate.verdict import Power
from numdev.report import DeviationRow

OUTRIGHT = ("finiteness", "function")
"""Default rules that have no margin."""
ERRORS_OF = ("out", "dq", "dk", "dv")
Group = tuple[str, str, str]
"""Kernel, format and tensor."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A rule to be fitted."""

    name: str
    metric: str
    margin: float
    means: str
    tensors: tuple[str, ...] = ERRORS_OF
    least: float = 0.0
    """A limit is fitted to no less than this."""
    heads: int | None = None


FAMILIES = (
    Family(
        name="error",
        metric="expected_ratio",
        margin=1.1,
        least=1.0,
        means="A head's error over what the kernel's own roundings predict on these inputs.",
    ),
    Family(
        name="typical head",
        metric="expected_ratio",
        margin=1.03,
        least=1.0,
        heads=8,
        means="The same in the median over a tensor's heads, where single heads' luck is gone.",
    ),
    Family(
        name="beside the baseline",
        metric="baseline_ratio",
        margin=1.25,
        means="A head's error over that of plain attention in the same format.",
    ),
    Family(
        name="worst row",
        metric="worst_row",
        margin=1.5,
        least=1.0,
        means="The row that is farthest beyond what is predicted for it: an extreme value.",
    ),
    Family(
        name="reproducibility",
        metric="noise_ratio",
        margin=2.0,
        means="What repeated runs differ by, over what one rounding changes; 0 is bitwise equal.",
    ),
    Family(
        name="log-sum-exp",
        metric="lse_error",
        margin=3.0,
        tensors=("lse",),
        means="rms of the log-sum-exp over 1 + its own size.",
    ),
)
LARGEST = 1e300
"""Beyond it a margin would overflow; a report with such numbers does not pass, and gets no file."""
HEADER = """\
# Thresholds for numdev gate, fitted to {report}.
#
# A limit is the worst number measured there, times the margin that its rule states, rounded up to
# two digits; at_most is the tightest of them, and `instead` has the others. Which planted faults a
# rule would have caught was found on the same data. What the keys mean: docs/gate.md.
"""
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
    _refuse_outright(report, name)
    around = Around.of(report)
    rules = [rule for family in FAMILIES if (rule := _rule(family, groups))]
    text = [HEADER.format(report=_plain(name)), *_scope(report), FIXED]
    text += [_written(family, rule, report.rows, around) for family, rule in rules]
    whole = "\n".join(text)
    power = list(power_of(report.rows, _parsed(whole), around))
    whole += _catches(power, {rows[0].format for rows in groups.values()})
    outcome = judge_report(report, _parsed(whole)).outcome
    if outcome != "passed":
        raise MeasurementError(
            f"{name}: the report does not pass limits fitted to it ({outcome})",
            hint="see numdev gate on it: what failed or was not measured there is no standard",
        )
    return whole


def _parsed(text: str) -> Rules:
    return Rules.model_validate(yaml.safe_load(text))


def _refuse_outright(report: Measured, name: str) -> None:
    rules = default_rules()
    hard = tuple(t for t in rules.thresholds if t.name in OUTRIGHT)
    strict = rules.model_copy(update={"thresholds": hard})
    for each in verdicts_of(report.rows, strict):
        verdict = each.verdict
        if verdict.outcome == "exceeded":
            raise MeasurementError(
                f"{name}: {verdict.kernel} breaks the rule {verdict.rule} in {verdict.tensor} "
                f"({verdict.format}), and a limit fitted to that would allow it",
                hint="mend it, or audit without that kernel",
            )


def _scope(report: Measured) -> Iterator[str]:
    """What the file holds for, and who must be in a report."""
    system = report.provenance.system
    for key in ("gpu", "cpu_capability"):
        if isinstance(system.get(key), str):
            yield (
                "# Rounding differs between machines: a report from another kind is not judged.\n"
                f"holds_for: {{{key}: {_pattern(system[key])}}}"
            )
            break
    status: dict[str, set[str]] = {}
    for row in report.rows:
        if row.role == "kernel":
            status.setdefault(row.kernel, set()).add(row.status)
    always = [kernel for kernel, found in status.items() if found == {"ok"}]
    if always:
        names = _list([glob.escape(kernel) for kernel in always])
        yield f"# Kernels that ran in every call, and must again.\nrequired: {names}\n"


def _rule(family: Family, groups: Groups) -> tuple[Family, dict[str, Any]] | None:
    """The rule's data; None where no group has all its numbers."""
    limits: dict[Group, float] = {}
    lacking: set[Group] = set()
    worst = (0.0, "")
    for rows in groups.values():
        group = (rows[0].kernel, rows[0].format, rows[0].tensor)
        if group[2] not in family.tensors:
            continue
        sizes = [_size(row, family.metric) for row in rows]
        size = None if None in sizes else _fit([s for s in sizes if s is not None], family)
        if size is None:
            lacking.add(group)
            continue
        limit = rounded_up(min(max(size, family.least), LARGEST) * family.margin)
        limits[group] = max(limit, limits.get(group, 0.0))
        worst = max(worst, (size, " ".join((group[0], group[2], group[1]))))
    whole = {group: limit for group, limit in limits.items() if group not in lacking}
    if not whole:
        return None
    kernels, formats, tensors = (tuple(dict.fromkeys(g[i] for g in whole)) for i in range(3))
    within = any(k in kernels and f in formats and t in tensors for k, f, t in lacking)
    # Not these kernels, but all except those without the number: another may come, or be planted.
    never = dict.fromkeys(k for k, _, _ in lacking if k not in kernels)
    where = {
        "kernel": [f"!{glob.escape(kernel)}" for kernel in never],
        "format": list(map(glob.escape, formats)),
        "tensor": list(tensors),
    }
    data = {
        "where": where,
        "limits": whole,
        "lenient": within,
        "worst": worst,
    }
    return family, data


def _fit(sizes: Sequence[float], family: Family) -> float | None:
    """The number that a rule of this family judges of so many heads."""
    if family.heads is None:
        return max(sizes)
    return sorted(sizes, reverse=True)[len(sizes) // 2] if len(sizes) >= family.heads else None


def _size(row: DeviationRow, metric: str) -> float | None:
    """A row's number; of sampled rows the upper end of its interval, and None of a maximum."""
    value = value_of(row, metric)[0]
    if value is None or isinstance(value, str):
        return None
    if not row.sampled or metric not in MAXIMA | ESTIMATED:
        return abs(float(value))
    ends = None if metric in MAXIMA else interval_of(row, metric)
    return None if ends is None else max(map(abs, ends))


def rounded_up(x: float) -> float:
    """To two significant digits, and never down; 0 stays 0."""
    if x == 0:
        return 0.0
    nearest = float(f"{x:.1e}")
    if nearest >= x:
        return nearest
    step = math.floor(math.log10(x)) - 1
    return float(f"{nearest + 10.0**step:.1e}")


def _written(
    family: Family, data: dict[str, Any], rows: Sequence[DeviationRow], around: Around
) -> str:
    """One entry of `thresholds`, with its comment."""
    entry = "\n".join(_entry(family, data))
    alone = _parsed(f"thresholds:\n{entry}\n")
    power = [p for p in power_of(rows, alone, around) if p.caught_from is not None]
    caught = [f"{p.fault} from {p.caught_from:g} ({p.format})" for p in power]
    size, where = data["worst"]
    comment = [
        family.means,
        f"Measured: at most {size:.4g} ({where}). Margin: {family.margin:g} x.",
        f"Would have caught: {', '.join(caught) or 'none of the planted faults in the report'}.",
    ]
    lines = [part for line in comment for part in textwrap.wrap(_plain(line), 92)]
    return "\n".join([*(f"  # {line}" for line in lines), entry, ""])


def _entry(family: Family, data: dict[str, Any]) -> Iterator[str]:
    limits: dict[Group, float] = data["limits"]
    tightest = min(limits.values())
    where = ", ".join(f"{key}: {_list(names)}" for key, names in data["where"].items() if names)
    yield f"  - name: {family.name}"
    yield f"    where: {{{where}}}"
    yield f"    metric: {family.metric}"
    if family.heads is not None:
        yield f"    heads: {family.heads}"
    yield f"    at_most: {_number(tightest)}"
    others = {group: limit for group, limit in limits.items() if limit > tightest}
    if others:
        yield "    instead:"
    for (kernel, fmt, tensor), limit in others.items():
        place = f"kernel: {_pattern(kernel)}, format: {_pattern(fmt)}, tensor: {tensor}"
        yield f"      - {{{place}, at_most: {_number(limit)}}}"
    if data["lenient"]:
        yield "    may_lack: numbers"


def _catches(power: Sequence[Power], formats: AbstractSet[str]) -> str:
    """What these rules must go on catching: faults that they catch in every format."""
    doses: dict[str, float] = {}
    for fault in dict.fromkeys(p.fault for p in power):
        these = [p for p in power if p.fault == fault]
        caught = [p.caught_from for p in these if p.caught_from is not None]
        if len(caught) == len(these) and {p.format for p in these} >= formats:
            doses[fault] = max(caught)
    if not doses:
        return ""
    lines = [f"  {_quoted(fault)}: {_number(dose)}" for fault, dose in doses.items()]
    return "\n".join([
        "",
        "# Planted faults that the rules catch together from this dose on, in all formats. For",
        "# a report without that (audit with --control) the exit code is 3. The key is optional.",
        "catches:",
        *lines,
        "",
    ])  # fmt: skip


def _list(names: Sequence[str]) -> str:
    """Of patterns."""
    return f"[{', '.join(map(_quoted, names))}]"


def _pattern(name: str) -> str:
    """A name as a pattern that fits it alone."""
    return _quoted(glob.escape(name))


def _quoted(text: str) -> str:
    """As a YAML string on one line, bare where it is a plain word."""
    if re.fullmatch(r"[A-Za-z][\w-]*", text) and text.lower() not in WORDS:
        return text
    return str(yaml.safe_dump(text, default_style='"', width=math.inf)).strip()


WORDS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
"""What YAML takes for something else."""


def _number(x: float) -> str:
    """As YAML reads a float: 1e-05 is text to it, 1.0e-05 is not."""
    text = repr(x)
    return text if "e" not in text or "." in text else text.replace("e", ".0e")


def _plain(text: str) -> str:
    """On one line."""
    return "".join(c if c.isprintable() else " " for c in text)
