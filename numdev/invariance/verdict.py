"""From rows to what they mean: rules, tests, sentences. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from numdev.config import AXES
from numdev.gate.findings import TENSORS, label, listed
from numdev.gate.rows import grouped
from numdev.gate.rules import InvarianceLimits, default_rules
from numdev.gate.tests import Test
from numdev.invariance.report import InvarianceRow, ModelRow
from numdev.report.numbers import si, three

# What a dependence along one axis brings about along others, which are then not accused too.
BRINGS: Mapping[str, Sequence[str]] = {
    "unwritten": tuple(AXES),
    "repeat": tuple(AXES),
    "beyond": ("paged", "strides"),
    "neighbours": ("batch", "lengths", "order"),
    "hidden": ("padding", "lengths"),
    "mask": ("padding", "lengths"),
    "rows": ("decode", "chunks"),
}
ALIKE = 2  # times its cause's excess, up to which a dependence is brought about, or noise
WRONG = {  # by rule, the gravest first
    "finite": "{row.nonfinite:,} of {row.elements:,} elements of {tensor} are NaN or infinite in "
    "one form alone",
    "rounding": "{tensor} changes by {number}× what roundings explain (limit {limit}×): {row.case} "
    "as it is errs by {base}× the floor's error, {row.variant} by {other}×",
    "row": "a row of {tensor} changes by {number}× what roundings explain (limit {limit}×)",
    "log-sum-exp": "{tensor} changes by {number} × (1 + |log-sum-exp|) (limit {limit})",
    "bitwise": "{tensor} must keep its bits, and {row.differ:,} of {row.elements:,} elements "
    "differ, by up to {ulps} ulp",
    "floor": "{tensor} changes by {number}× the floor's error (limit {limit}×)",
}


class Held(NamedTuple):
    """A number of a row beside its limit."""

    row: InvarianceRow
    rule: str
    metric: str
    observed: float
    limit: float

    @property
    def fails(self) -> bool:
        return self.observed > self.limit


def worst_of(several: Iterable[Held]) -> Held:
    """By its rule the gravest, of these the largest."""
    rules = list(WRONG)
    return max(several, key=lambda h: (-rules.index(h.rule), h.observed, h.row.excess or 0.0))


def held(row: InvarianceRow, limits: InvarianceLimits) -> Iterator[Held]:
    """Every rule for a row."""
    if row.axis not in limits.may_turn_nan:
        yield Held(row, "finite", "nonfinite", row.nonfinite, 0)
        rule, limit = "rounding", limits.beyond_roundings
        if row.tensor == "lse":
            rule, limit = "log-sum-exp", limits.log_sum_exp
        yield Held(row, rule, "excess", row.excess or 0.0, limit)
        if limit_of_a_row := limits.beyond_roundings_of_a_row.get(row.tensor):
            yield Held(row, "row", "excess_of_a_row", row.excess_of_a_row or 0.0, limit_of_a_row)
    if row.axis in limits.bitwise and row.tensor in limits.bitwise_tensors:
        yield Held(row, "bitwise", "differ", row.differ, 0)
    if row.axis in limits.within_floor and row.tensor != "lse":
        yield Held(row, "floor", "floor_ratio", row.floor_ratio or 0.0, 1)


def tests_of(rows: Iterable[InvarianceRow], limits: InvarianceLimits) -> Iterator[Test]:
    """Every rule on every tensor of every kernel in every format along every axis."""
    own_rules = limits == default_rules().invariance
    for (_, fmt), own in grouped(rows, lambda r: (label(r), r.format)).items():
        about = {"kernel": own[0].kernel, "options": own[0].options, "format": fmt}
        ok = [row for row in own if row.status == "ok"]
        for row in [r for r in own if r.status == "failed"][:1]:
            why = f"along {row.axis} ({row.case}: {row.variant}): {row.reason}"
            yield Test(about, "runs", False, why, must=True)
        if not ok:
            reasons = dict.fromkeys(row.reason or "" for row in own)
            yield Test(about, "runs", False, "; ".join(list(reasons)[:2]))
        # Rules that somebody wrote are for axes that the report has to have; numdev's own are for
        # whatever axes were asked for.
        asked = {*limits.bitwise, *limits.within_floor} if ok and not own_rules else set()
        for axis in sorted(asked - {row.axis for row in ok}):
            why = next((r.reason or "" for r in own if r.axis == axis), "no call was made so")
            yield Test(about, axis, False, f"{axis} is not judged: {why}", must=True)
        every = [each for row in ok for each in held(row, limits)]
        failing = grouped((h for h in every if h.fails), lambda h: h.row.axis)
        gravest = {axis: worst_of(its) for axis, its in failing.items()}
        follows, said = _follows(gravest), summary_of(ok)
        by_rule = grouped(every, lambda h: (h.row.axis, h.rule, h.row.tensor))
        for (axis, rule, tensor), these in by_rule.items():
            worst = worst_of(these)
            text = said
            if accused := gravest.get(axis) is worst and axis not in follows:
                text = _sentence(worst, [a for a, by in follows.items() if by == axis])
            yield Test(
                about, f"{axis} {rule}", worst.fails, text, float(worst.observed), worst.limit,
                tensor=tensor, metric=worst.metric, failing=sum(h.fails for h in these),
                judged=len(these), accused=accused,
            )  # fmt: skip


def _follows(gravest: Mapping[str, Held]) -> dict[str, str]:
    """Axes along which a kernel fails because it does along another, no less gravely."""
    follows: dict[str, str] = {}
    for first in (axis for axis in BRINGS if axis in gravest):
        cause = gravest[first]
        for axis in BRINGS[first]:
            if axis in (first, *follows) or axis not in gravest or first in follows:
                continue
            other = gravest[axis]
            alike = (other.row.excess or 0.0) <= ALIKE * max(cause.row.excess or 0.0, 1.0)
            # Where one call does not repeat another, nothing else is known of it.
            if cause.rule == "finite" or (other.rule != "finite" and alike):
                follows[axis] = first
    # Where it is the call itself that errs, one finding says so.
    wrong = [a for a, h in gravest.items() if a not in follows and h.row.base_errs]
    return follows | dict.fromkeys(wrong[1:], *wrong[:1]) if wrong else follows


def _sentence(worst: Held, also: Sequence[str]) -> str:
    """What is wrong, to follow the kernel's name."""
    row = worst.row
    wrong = WRONG[worst.rule].format(
        row=row, tensor=TENSORS.get(row.tensor, row.tensor), ulps=three(row.ulps),
        number=three(worst.observed, worst.limit), limit=three(worst.limit),
        base=three(row.error_base), other=three(row.error_variant),
    )  # fmt: skip
    begins = ""
    if row.first is not None:
        sequence, head, place, _ = row.first
        what = "key" if row.tensor in ("dk", "dv") else "row"
        begins = f"; first at sequence {sequence} head {head} {what} {place}"
        begins += f", which sees {row.keys} key{'s' * (row.keys != 1)}" if row.keys else ""
    cause = f"; {row.cause}" if row.cause is not None else ""
    what = f"depends on {AXES[row.axis]}"
    if row.axis == "repeat":
        what = "gives another answer to the same call"
    too = f". What differs along {listed(also)} has the same cause" if also else ""
    return f"{what}: along {row.axis} ({row.case}: {row.variant}) {wrong}{begins}{cause}{too}"


def tested(rows: Iterable[InvarianceRow], limits: InvarianceLimits) -> Iterator[str]:
    """What was judged, in a sentence."""
    ran = {row.axis for row in rows if row.status == "ok"}
    same = listed(axis for axis in limits.bitwise if axis in ran)
    if ran:
        yield (
            f"Judged: {same and f'the same bits along {same}; '}along all axes no difference "
            f"beyond {three(limits.beyond_roundings)}× what roundings explain. All else is "
            "reported, and judged where a rule says so."
        )


def summary_of(rows: Iterable[InvarianceRow]) -> str:
    """Along which axes a kernel does not keep its bits, and by how much."""
    by_axis = grouped((r for r in rows if r.status == "ok"), lambda r: r.axis)
    parts: list[str] = []
    for axis, own in by_axis.items():
        moved = [r for r in own if r.differ]
        if sizes := [r.floor_ratio or 0.0 for r in moved if r.tensor != "lse"]:
            unit = "" if any("×" in part for part in parts) else " the floor's error"
            size = f"{si(max(sizes))}×{unit}"
        else:
            size = "the log-sum-exp alone"
        if moved:
            parts.append(f"{axis} ({'NaN' if any(r.nonfinite for r in moved) else size})")
    same = len(by_axis) - len(parts)
    if not parts:
        return f"keeps its bits along {listed(by_axis) if same < 4 else f'all {same} axes'}"
    rest = f"; keeps its bits along the other {same}" if same else ""
    return f"differs along {listed(parts)}{rest}"


def answer(rows: Sequence[InvarianceRow], models: Sequence[ModelRow] = ()) -> Iterator[str]:
    """What explains a difference, kernel by kernel and axis by axis; then what becomes of it in the
    model's own output."""
    causes = grouped((r for r in rows if r.cause is not None), lambda r: (label(r), r.axis))
    for (kernel, axis), own in causes.items():
        row: Any = max(own, key=lambda r: r.floor_ratio or 0.0)
        size = f"{three(100 * row.differ / row.elements)} % of elements differ"
        by = f"by {three(row.floor_ratio)}× the floor's error (rms)"
        yield f"{kernel} along {axis} ({row.variant}): {row.cause}; {size}, {by}."
    ran = grouped((m for m in models if m.reason is None), lambda m: (m.format, m.axis))
    for (fmt, axis), of in ran.items():
        shares = [f"{100 * (m.share or 0.0):.0f} % with {m.kernel}" for m in of if m.difference]
        text = f"keeps its bits along {axis}"
        if shares:
            worst = si(max(m.difference or 0.0 for m in of))
            text = f"moves by up to {worst} of its size along {axis}; attention's share: "
        yield f"The model's output in {fmt} {text}{listed(shares) if shares else ''}."
