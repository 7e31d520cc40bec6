"""From rows to what they mean: rules, verdicts, findings, sentences. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from numdev.errors import closest
from numdev.gate.findings import listed
from numdev.gate.rows import grouped
from numdev.gate.verdict import Calls, Judgement, Outcome, Verdict
from numdev.invariance.names import AXES
from numdev.invariance.report import Cause, InvarianceReport, InvarianceRow, ModelRow
from numdev.metrics.statistics import BIAS_FORMATS
from numdev.report import Finding, KernelVerdict
from numdev.report.numbers import si, three
from numdev.yamlfile import Strict, bundled, read_yaml

JUDGED = ("out", "dq", "dk", "dv")  # by size; the floor of lse is one of float32
TENSORS = {"out": "the output", "lse": "the log-sum-exp"}
# What a dependence along one axis brings about along others, which are then not accused too.
BRINGS: Mapping[str, Sequence[str]] = {
    "unwritten": tuple(AXES),
    "repeat": tuple(AXES),
    "beyond": ("paged", "strides"),
    "neighbours": ("batch", "lengths"),
    "hidden": ("padding", "lengths"),
    "rows": ("decode", "chunks"),
}


def known_axes(names: tuple[str, ...]) -> tuple[str, ...]:
    """Raises ValueError for a name that no axis has."""
    for name in names:
        if name not in AXES:
            raise ValueError(f"there is no axis {name!r}; {closest(name, AXES)}")
    return names


Limit = Annotated[float, Field(gt=0)]
Axes = Annotated[tuple[str, ...], AfterValidator(known_axes)]


class InvarianceRules(Strict):
    """configs/gate/invariance.yaml; what a file does not say is as it says there."""

    name: str = "invariance"
    bitwise: Axes = ("repeat", "beyond", "hidden", "unwritten")
    bitwise_tensors: tuple[Literal["out", "lse", "dq", "dk", "dv"], ...] = ("out", "lse")
    within_floor: Axes = ()
    beyond_roundings: Limit = 4.0
    beyond_roundings_float32: Limit = 64.0
    may_turn_nan: Axes = ("hidden-nan",)


def read_rules(path: Path | None) -> InvarianceRules:
    """A file of rules, by default numdev's own. Raises UsageError for a wrong one."""
    rules = read_yaml(path or bundled("gate/invariance.yaml"), InvarianceRules)
    if path is None or "name" in rules.model_fields_set:
        return rules
    return rules.model_copy(update={"name": path.name})


class Broken(NamedTuple):
    """A rule that a row is held to."""

    rule: str
    metric: str
    observed: float
    limit: float

    @property
    def excess(self) -> float:
        return self.observed / self.limit if self.limit else float(self.observed > 0) * 1e9


def held(row: InvarianceRow, rules: InvarianceRules) -> Iterator[Broken]:
    """Every rule for a row, with its number and its limit, the gravest first."""
    if row.axis not in rules.may_turn_nan:
        yield Broken("finite", "nonfinite", row.nonfinite, 0)
        if row.tensor in JUDGED and row.elements:
            limit = rules.beyond_roundings_float32
            if row.format in BIAS_FORMATS:
                limit = rules.beyond_roundings
            yield Broken("rounding", "excess", row.excess, limit)
    if row.axis in rules.bitwise and row.tensor in rules.bitwise_tensors:
        yield Broken("bitwise", "differ", row.differ, 0)
    if row.axis in rules.within_floor:
        yield Broken("floor", "floor_ratio", row.floor_ratio or 0.0, 1)


# --- sentences -----------------------------------------------------------------------------------


def in_words(cause: Cause) -> str:
    """`as 128 keys a tile in one split against 128 keys a tile in 4 splits`."""
    if cause.residual is None:
        return f"{_operator(cause.variant)} ran in place of {_operator(cause.base)}"
    one, two = _cut(cause.base), _cut(cause.variant)
    if one == two:
        return f"as {one} in both, which begin at other keys"
    return f"as {one} against {two}"


def _operator(did: Any) -> str:
    words = ", ".join(f"{name} {value}" for name, value in did.items())
    return str(did.get("operator", words))


def _cut(options: Any) -> str:
    tile, splits = options.get("block_kv"), options.get("splits") or 1
    text = f"{tile} keys a tile" if tile else "all keys at once"
    text += ", the last first," if options.get("kv_order") == "descending" else ""
    return f"{text} in {'one split' if splits == 1 else f'{splits} splits'}"


def where(row: InvarianceRow) -> str:
    """`sequence 0 head 1 row 17, which sees 18 keys`, of a row that differs."""
    assert row.first is not None
    sequence, head, place, _ = row.first
    text = (
        f"sequence {sequence} head {head} {'key' if row.tensor in ('dk', 'dv') else 'row'} {place}"
    )
    return text + (f", which sees {row.keys} key{'s' * (row.keys != 1)}" if row.keys else "")


WRONG = {
    "finite": "{count} of {elements} elements of {tensor} are NaN or infinite in one form alone",
    "rounding": "{tensor} changes by {number}× the error of its better form (limit {limit}×), "
    "which no rounding explains",
    "bitwise": "{tensor} must keep its bits, and {count} of {elements} elements differ, by up to "
    "{ulps} ulp",
    "floor": "{tensor} changes by {number}× the floor's error (limit {limit}×)",
}


def _sentence(row: InvarianceRow, broken: Broken) -> str:
    count = {"finite": row.nonfinite, "bitwise": row.differ}.get(broken.rule, 0)
    wrong = WRONG[broken.rule].format(
        tensor=TENSORS.get(row.tensor, row.tensor),
        number=three(broken.observed, broken.limit),
        limit=three(broken.limit),
        count=f"{count:,}",
        elements=f"{row.elements:,}",
        ulps=three(row.ulps),
    )
    begins = f"; first at {where(row)}" if row.first is not None else ""
    cause = f"; {in_words(row.cause)}" if row.cause is not None else ""
    what = f"depends on {AXES[row.axis]}"
    if row.axis == "repeat":
        what = "gives another answer to the same call"
    along = f"along {row.axis} ({row.case}: {row.variant})"
    return f"{row.label} ({row.format}) {what}: {along} {wrong}{begins}{cause}."


# --- verdicts ------------------------------------------------------------------------------------


class Judged(NamedTuple):
    judgement: Judgement
    findings: tuple[Finding, ...]
    verdicts: tuple[KernelVerdict, ...]
    tested: tuple[str, ...]


def judged(rows: Sequence[InvarianceRow], rules: InvarianceRules, *, named: bool = False) -> Judged:
    """Rows held to the rules. `named`: whether kernels were asked for by name; then one that did
    not run is no pass."""
    verdicts: list[Verdict] = []
    findings: list[Finding] = []
    of_kernels: list[KernelVerdict] = []
    calls: list[Calls] = []
    for (_, fmt), own in grouped(rows, lambda r: (r.label, r.format)).items():
        about: dict[str, Any] = {"kernel": own[0].kernel, "options": own[0].options, "format": fmt}
        ok, first = [r for r in own if r.status == "ok"], len(findings)
        for (axis, tensor), here in grouped(ok, lambda r: (r.axis, r.tensor)).items():
            verdicts += _verdicts(axis, tensor, here, about, rules)
        findings += _findings(ok, rules)
        calls.append(_calls(own, about, named=named))
        of_kernels.append(_of_kernel(own, about, findings, first))
    outcomes = {v.outcome for v in verdicts} | {c.outcome for c in calls}
    outcome: Any = next((o for o in ("exceeded", "unmeasured") if o in outcomes), "passed")
    if not any(c.ok for c in calls):
        outcome = "unmeasured"
    judgement = Judgement(
        rules=rules.name, outcome=outcome, verdicts=tuple(verdicts), calls=tuple(calls)
    )
    return Judged(judgement, tuple(findings), tuple(of_kernels), tuple(_tested(rules)))


def _tested(rules: InvarianceRules) -> Iterator[str]:
    same = f"the same bits along {listed(rules.bitwise)}; " if rules.bitwise else ""
    yield (
        f"Judged: {same}along all axes no difference beyond {three(rules.beyond_roundings)}× the "
        "error of the better form. All else is reported, and judged where a rule says so."
    )


def _verdicts(
    axis: str, tensor: str, rows: Sequence[InvarianceRow], about: Any, rules: InvarianceRules
) -> Iterator[Verdict]:
    by_rule = grouped(((b, row) for row in rows for b in held(row, rules)), lambda x: x[0].rule)
    for rule, pairs in by_rule.items():
        beyond = [b for b, _ in pairs if b.observed > b.limit]
        worst = max((b for b, _ in pairs), key=lambda b: b.excess)
        yield Verdict(
            rule=f"{axis} {rule}", outcome="exceeded" if beyond else "passed", role="kernel",
            tensor=tensor, judged=len(pairs), offending=len(beyond),
            observed=float(worst.observed), metric=worst.metric, bound=worst.limit,
            limit=f"{worst.metric} ≤ {three(worst.limit)}", **about,
        )  # fmt: skip


def _worst(
    rows: Sequence[InvarianceRow], rules: InvarianceRules
) -> tuple[InvarianceRow, Broken] | None:
    """The row that breaks the gravest rule by most."""
    pairs = [(row, b) for row in rows for b in held(row, rules) if b.observed > b.limit]
    order = list(WRONG)

    def gravity(pair: tuple[InvarianceRow, Broken]) -> tuple[float, ...]:
        row, broken = pair
        return order.index(broken.rule), -broken.excess, -(row.floor_ratio or 0.0)

    return min(pairs, key=gravity, default=None)


def _findings(rows: Sequence[InvarianceRow], rules: InvarianceRules) -> Iterator[Finding]:
    """Of one kernel, a finding for each axis along which it breaks a rule, but for those that
    follow from another."""
    by_axis = grouped(rows, lambda r: r.axis)
    worst = {axis: w for axis, own in by_axis.items() if (w := _worst(own, rules))}
    follows: dict[str, str] = {}
    causes = [axis for axis in BRINGS if axis in worst]
    if {"unwritten", "repeat"} <= {*causes} and worst["unwritten"][1].rule != "finite":
        causes.remove("unwritten")  # its NaN came nowhere: one call does not repeat the other
    for first in causes:
        for axis in BRINGS[first]:
            if axis in worst and axis != first and axis not in follows and first not in follows:
                follows[axis] = first
    for axis, (row, broken) in worst.items():
        if axis in follows:
            continue
        also = [other for other, by in follows.items() if by == axis]
        text = f" It therefore differs along {listed(also)} too." if also else ""
        own = by_axis[axis]
        count = sum(any(b.observed > b.limit for b in held(r, rules)) for r in own)
        sentence = _sentence(row, broken) + text
        yield Finding(
            rule=f"{axis} {broken.rule}", severity="exceeded", sentence=sentence,
            kernel=row.kernel, options=row.options, formats=(row.format,), tensor=row.tensor,
            metric=broken.metric, observed=float(broken.observed), limit=broken.limit,
            count=count, judged=len(own),
        )  # fmt: skip


def _calls(rows: Sequence[InvarianceRow], about: Any, *, named: bool) -> Calls:
    """In how many variants a kernel ran. One that declines some is no failure: what it declines,
    a user cannot do with it."""
    status = [r.status for r in rows if r.tensor == "out"]
    ok, skipped, failed = (status.count(s) for s in ("ok", "skipped", "failed"))
    outcome: Outcome = "passed"
    if failed or (named and not ok):
        outcome = "unmeasured"
    elif not ok:
        outcome = "untested"
    reasons = tuple(dict.fromkeys(r.reason for r in rows if r.reason))
    return Calls(
        backward=False, ok=ok, skipped=skipped, failed=failed, required=False,
        reasons=reasons[:8], outcome=outcome, **about,
    )  # fmt: skip


def _of_kernel(
    rows: Sequence[InvarianceRow], about: Any, findings: Sequence[Finding], first: int
) -> KernelVerdict:
    failed = next((r for r in rows if r.status == "failed"), None)
    if len(findings) > first:
        gravest = findings[first]
        names = ("rule", "tensor", "metric", "observed", "limit")
        own = {name: getattr(gravest, name) for name in names}
        return KernelVerdict(**about, **own, outcome="exceeded", finding=first)
    if failed is not None or not any(r.status == "ok" for r in rows):
        reason = next((r.reason for r in (failed, *rows) if r is not None and r.reason), None)
        return KernelVerdict(**about, outcome="unmeasured", reason=reason)
    return KernelVerdict(**about, outcome="passed", reason=summary_of(rows))


def summary_of(rows: Iterable[InvarianceRow]) -> str:
    """Along which axes a kernel does not keep its bits, and by how much."""
    by_axis = grouped((r for r in rows if r.status == "ok"), lambda r: r.axis)
    parts = []
    for axis, own in by_axis.items():
        moved = [r for r in own if r.differ]
        large = [r for r in moved if r.tensor in JUDGED]
        if any(r.nonfinite for r in moved):
            parts.append(f"{axis} (NaN)")
        elif large:
            worst = max(r.floor_ratio or 0.0 for r in large)
            parts.append(f"{axis} ({si(worst)}×)")
        elif moved:
            parts.append(f"{axis} (the log-sum-exp alone)")
    same = len(by_axis) - len(parts)
    if not parts:
        return f"keeps its bits along {listed(by_axis) if same < 4 else f'all {same} axes'}"
    rest = f"; keeps its bits along the other {same}" if same else ""
    return f"differs along {listed(parts)}{rest} (× floor's error)"


def answer(rows: Sequence[InvarianceRow], models: Sequence[ModelRow] = ()) -> Iterator[str]:
    """What explains a difference, kernel by kernel and axis by axis; then what becomes of it in the
    model's own output."""
    causes = grouped((r for r in rows if r.cause is not None), lambda r: (r.label, r.axis))
    for (label, axis), own in causes.items():
        row: Any = max(own, key=lambda r: r.floor_ratio or 0.0)
        size = f"{three(100 * row.differ / row.elements)} % of elements differ"
        by = f"by {three(row.floor_ratio)}× the floor's error (rms)"
        yield f"{label} along {axis} ({row.variant}): {in_words(row.cause)}; {size}, {by}."
    ran = grouped((m for m in models if m.reason is None), lambda m: (m.format, m.axis))
    for (fmt, axis), of in ran.items():
        shares = [f"{100 * (m.share or 0.0):.0f} % with {m.kernel}" for m in of if m.difference]
        text = f"keeps its bits along {axis}"
        if shares:
            worst = si(max(m.difference or 0.0 for m in of))
            text = f"moves by up to {worst} of its size along {axis}; attention's share: "
        yield f"The model's output in {fmt} {text}{listed(shares) if shares else ''}."


def rejudged(report: InvarianceReport, rules: InvarianceRules) -> Judged:
    """A finished report by other rules."""
    return judged(report.rows, rules, named=report.named)
