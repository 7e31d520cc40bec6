"""What is decided: a report's rows held to the rules, and the exit code.

Reads rows and nothing else, so it runs where there is no torch and no GPU. It fails closed: what
could not be judged is `unmeasured`, never passed, unless a rule says that it may lack.

Where rows were sampled, an estimate passes if the upper end of its 95 % interval is within the
limit and fails if the lower end is beyond; between them it is undecided, which is `unmeasured`. A
maximum over a sample is a lower bound: beyond its limit it fails, and else it says nothing.

Only kernels under audit are judged (a rule may ask for the baseline too); what choosing a format
costs, and the floor, are no kernel's fault. Planted faults (`role: control`) are put through the
same rules, each by itself, and what comes of that is the gate's power: from which dose on it
catches each fault on this data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import compress, takewhile
from typing import Any, Literal

from numdev.errors import MeasurementError
from numdev.report import NOT_PREDICTED, AuditReport, DeviationRow, Place, SweepReport
from numdev.rules import (
    ESTIMATED,
    MAXIMA,
    Limit,
    Rules,
    Threshold,
    Value,
    default_rules,
    holm,
    interval_of,
    value_of,
)
from numdev.verdict import Calls, Dose, Judgement, Outcome, Power, Verdict

PLACES = 3
"""So many places of offending rows are named."""
GRADIENTS = ("dq", "dk", "dv")
WORST = ("failed", "skipped", "ok")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A verdict and the rows behind it."""

    verdict: Verdict
    offending: tuple[DeviationRow, ...] = field(default=(), repr=False)
    """The worst first."""


@dataclass(frozen=True)
class _Held:
    """One row held to one limit."""

    row: DeviationRow
    limit: Limit
    value: Value
    excess: float
    interval: tuple[float, float] | None = None
    """Of an estimate from sampled rows."""

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the most that the excess may be."""
        if self.interval is None:
            return self.excess, self.excess
        low, high = (self.limit.excess(end) for end in self.interval)
        return low, high


def judge_report(report: AuditReport | SweepReport, rules: Rules | None = None) -> Judgement:
    """A report's rows held to the rules.

    Raises MeasurementError for a report from a system that the rules do not hold for.
    """
    rules = rules or default_rules()
    for key, pattern in rules.holds_for.items():
        found = str(report.provenance.system.get(key))
        if not fnmatchcase(found, pattern):
            raise MeasurementError(
                f"the rules {rules.name} hold for {key} {pattern!r}, and this report has {found!r}",
                hint="calibrate rules for that system, or gate a report from this one",
            )
    return judge(report.rows, rules)


def judge(rows: Sequence[DeviationRow], rules: Rules | None = None) -> Judgement:
    """Rows held to the rules (the default ones)."""
    rules = rules or default_rules()
    verdicts = tuple(each.verdict for each in verdicts_of(rows, rules))
    calls = tuple(calls_of(rows, rules))
    known = {call.kernel for call in calls}
    missing = tuple(p for p in rules.required if not any(fnmatchcase(k, p) for k in known))
    return Judgement(
        rules=rules.name,
        outcome=_outcome(verdicts, calls, missing),
        verdicts=verdicts,
        calls=calls,
        missing=missing,
        power=tuple(power_of(rows, rules)),
        fa_rule=_fa_rule(rows),
    )


def _outcome(
    verdicts: Iterable[Verdict], calls: Sequence[Calls], missing: Sequence[str]
) -> Literal["passed", "exceeded", "unmeasured"]:
    """Exceeded where anything is, since that is certain; passed only where something was judged,
    all that had to be was, and every required kernel ran."""
    outcomes = {v.outcome for v in verdicts}
    if "exceeded" in outcomes:
        return "exceeded"
    ran = any(c.ok for c in calls) and all(c.outcome != "unmeasured" for c in calls)
    whole = ran and not missing and "passed" in outcomes and "unmeasured" not in outcomes
    return "passed" if whole else "unmeasured"


def verdicts_of(rows: Sequence[DeviationRow], rules: Rules) -> Iterator[Judged]:
    """Every rule on everything it selects, in the rules' order."""
    roles = ("kernel", "baseline")
    measured = (r for r in rows if r.status == "ok" and r.role in roles and _says_something(r))
    groups = _grouped(measured, lambda r: (r.role, *_key(r), r.tensor))
    for threshold in rules.thresholds:
        chosen = [found for group in groups if (found := threshold.where.of(group))]
        if not chosen:
            outcome: Outcome = "unmeasured" if threshold.may_lack == "nothing" else "untested"
            reasons = ("no row matches",)
            yield Judged(verdict=Verdict(rule=threshold.name, outcome=outcome, reasons=reasons))
        for group in chosen:
            yield _judge(threshold.at(group[0]), group)


def _says_something(row: DeviationRow) -> bool:
    """Not so a head without a row that sees a key, or that overflows as it should: no element is
    left, and none is missing; unless there are more rows than those that were looked at."""
    return row.elements != 0 or bool(row.nonfinite) or row.sampled


def _judge(threshold: Threshold, rows: Sequence[DeviationRow]) -> Judged:
    """One rule on the heads of one tensor of one kernel in one format."""
    held: list[_Held] = []
    lacking: list[tuple[DeviationRow, str]] = []
    for row in rows:
        found = _held(threshold, row)
        if isinstance(found, _Held):
            held.append(found)
        else:
            lacking.append((row, found))
    held.sort(key=lambda h: -h.excess)
    if threshold.heads is not None and held and len(held) < threshold.heads:
        few = f"heads: {len(held)}, and it takes {threshold.heads}"
        lacking, held = [*lacking, *((h.row, few) for h in held)], []
    held, unsure = _by_interval(threshold, held)
    beyond = _beyond(threshold, held)
    offending = [h for h, is_beyond in zip(held, beyond, strict=True) if is_beyond]
    # Beside the limit stands the worst of what offends; a large bias that is not certain does not.
    worst = next(iter(offending or held), None)
    if threshold.heads is not None and held:
        worst = _median(held)
    outcome: Outcome = "passed" if held else "untested"
    if unsure or any(not _may_lack(threshold, why) for _, why in lacking):
        outcome = "unmeasured"
    lacking = [*unsure, *lacking]
    if offending:
        outcome = "exceeded"
    first = rows[0]
    verdict = Verdict(
        rule=threshold.name,
        outcome=outcome,
        role=first.role,
        kernel=first.kernel,
        options=first.options,
        format=first.format,
        tensor=first.tensor,
        judged=len(held),
        offending=len(offending),
        observed=worst.value if worst else None,
        metric=worst.limit.metric if worst else threshold.metric,
        limit=str(worst.limit if worst else threshold),
        bound=_bound(worst.limit if worst else threshold),
        median=threshold.heads is not None,
        places=tuple(Place.of(r) for r in _first(offending, lacking, outcome)),
        unjudged=len(lacking),
        reasons=tuple(dict.fromkeys(why for _, why in lacking)),
    )
    return Judged(verdict=verdict, offending=tuple(h.row for h in offending))


def _may_lack(threshold: Threshold, why: str) -> bool:
    """Whether a row need not have the number, for this reason."""
    lenient = threshold.may_lack
    return lenient == "numbers" or (lenient == "sampled" and why == NOT_PREDICTED)


def _by_interval(
    threshold: Threshold, held: Sequence[_Held]
) -> tuple[list[_Held], list[tuple[DeviationRow, str]]]:
    """What is decided, and what is not, with the reason: estimates whose interval contains the
    limit. For a median all of them, if the median of the lower ends is within and that of the upper
    ends beyond."""
    if threshold.heads is None or not held:
        unsure = [h.ends[0] <= 1 < h.ends[1] for h in held]
        open_ = [(h.row, _contains(h, h)) for h in compress(held, unsure)]
        return [h for h, u in zip(held, unsure, strict=True) if not u], open_
    lowest, highest = (_median(sorted(held, key=lambda h: -h.ends[end])) for end in (0, 1))
    if not lowest.ends[0] <= 1 < highest.ends[1]:
        return list(held), []
    return [], [(h.row, _contains(lowest, highest, "the median ")) for h in held]


def _contains(lower: _Held, upper: _Held, whose: str = "") -> str:
    low, high = (h.interval or (0.0, 0.0) for h in (lower, upper))
    what = f"the interval of {whose}{lower.limit.metric}, {low[0]:.3g} to {high[1]:.3g},"
    return f"{what} contains the limit {_bound(lower.limit):g}: audit more rows"


def _first(
    offending: Sequence[_Held], lacking: Sequence[tuple[DeviationRow, str]], outcome: Outcome
) -> list[DeviationRow]:
    if outcome == "exceeded":
        return [h.row for h in offending[:PLACES]]
    return [row for row, _ in lacking[:PLACES]] if outcome == "unmeasured" else []


def _bound(limit: Limit) -> float | None:
    return next((x for x in (limit.at_most, limit.below, limit.equals) if x is not None), None)


def _held(threshold: Threshold, row: DeviationRow) -> _Held | str:
    """A row held to the first limit whose number it has; else why it has none.

    The next limit is for a number that means nothing, and says why; one that was not measured at
    all is not excused by it.
    """
    test = threshold.certain
    if test is not None:
        if (row.sequences or 0) < test.sequences:
            return f"independent sequences: {row.sequences or 0}, and it takes {test.sequences}"
        if value_of(row, test.p)[0] is None:
            return row.nulls.get(test.p, "not measured")
    why = "not measured"
    for limit in threshold.limits:
        value, reason = value_of(row, limit.metric)
        if value is not None or limit.absent:
            held = _Held(row, limit, value, limit.excess(value))
            return _of_sample(held) if row.sampled else held
        why = reason or "not measured"
        if reason is None:
            break
    return why


def _of_sample(held: _Held) -> _Held | str:
    """What is known of sampled rows alone, with its interval; or why that says nothing."""
    metric = held.limit.metric
    if metric in MAXIMA:
        # flash-attention's rule compares two maxima: beyond it, the other may be too small.
        proven = held.excess > 1 and metric != "fa_rule"
        return held if proven else "a maximum over sampled rows bounds nothing"
    if metric not in ESTIMATED:
        return held
    interval = interval_of(held.row, metric)
    if interval is None:
        return f"{metric} of sampled rows has no interval"
    return replace(held, interval=interval)


def _beyond(threshold: Threshold, held: Sequence[_Held]) -> list[bool]:
    """Which rows offend; where the limit is for the median, none does as long as that is within."""
    if threshold.certain:
        return _certain(threshold, held)
    within = threshold.heads is not None and bool(held) and _median(held).excess <= 1
    return [h.excess > 1 and not within for h in held]


def _median(held: Sequence[_Held]) -> _Held:
    """Of rows in order, the worst first; of two in the middle the one that is less bad."""
    return held[len(held) // 2]


def _certain(threshold: Threshold, held: Sequence[_Held]) -> list[bool]:
    """Which rows are beyond the limit and significantly so, over all of them together."""
    assert threshold.certain is not None
    p = [float(value_of(h.row, threshold.certain.p)[0] or 0.0) for h in held]
    rejected = holm(p, threshold.certain.alpha)
    return [h.excess > 1 and sure for h, sure in zip(held, rejected, strict=True)]


def calls_of(rows: Sequence[DeviationRow], rules: Rules) -> Iterator[Calls]:
    """How many calls each kernel under audit ran, declined, or failed in."""
    kernels = [r for r in rows if r.role == "kernel"]
    for group in _grouped(kernels, lambda r: (_key(r), r.tensor in GRADIENTS)):
        first = group[0]
        calls = _grouped(group, lambda r: (r.case, r.call, r.seed))
        count = Counter(min((r.status for r in call), key=WORST.index) for call in calls)
        required = any(fnmatchcase(first.kernel, p) for p in rules.required)
        outcome: Outcome = "passed" if count["ok"] == len(calls) else "untested"
        if count["failed"] or (required and count["skipped"]):
            outcome = "unmeasured"
        yield Calls(
            kernel=first.kernel,
            options=first.options,
            format=first.format,
            backward=first.tensor in GRADIENTS,
            ok=count["ok"],
            skipped=count["skipped"],
            failed=count["failed"],
            required=required,
            reasons=tuple(dict.fromkeys(r.reason or "" for r in group if r.status != "ok")),
            place=next((Place.of(r) for r in group if r.status == "failed"), None),
            outcome=outcome,
        )


def power_of(rows: Sequence[DeviationRow], rules: Rules) -> Iterator[Power]:
    """Every planted fault in every format, its doses put through the rules as kernels are."""
    controls = [r for r in rows if r.role == "control"]
    for fault in _grouped(controls, lambda r: (r.kernel, _key(r, but="dose"))):
        doses = sorted(_grouped(fault, _key), key=lambda group: _size(group[0]))
        tried = [_dose(group, rules) for group in doses]
        measured = [d for d in reversed(tried) if d.outcome != "unmeasured"]
        caught = list(takewhile(lambda d: d.outcome == "caught", measured))
        first = fault[0]
        yield Power(
            fault=first.kernel.removeprefix("control:"),
            options={k: v for k, v in first.options.items() if k != "dose"},
            format=first.format,
            doses=tuple(tried),
            caught_from=caught[-1].dose if caught else None,
        )


def _dose(rows: Sequence[DeviationRow], rules: Rules) -> Dose:
    """A fault that raises, or that no rule could judge, is not caught by that."""
    as_kernel = [r.model_copy(update={"role": "kernel"}) for r in rows]
    judged = [each.verdict for each in verdicts_of(as_kernel, rules)]
    by = tuple(dict.fromkeys(v.rule for v in judged if v.outcome == "exceeded"))
    measured = any(v.outcome == "passed" for v in judged)
    return Dose(
        dose=_size(rows[0]),
        outcome="caught" if by else "missed" if measured else "unmeasured",
        by=by,
    )


def _size(row: DeviationRow) -> float:
    dose = row.options.get("dose")
    return float(dose) if isinstance(dose, int | float) else 0.0


def _fa_rule(rows: Iterable[DeviationRow]) -> tuple[int, int] | None:
    told = [r.fa_rule for r in rows if r.role == "kernel" and r.fa_rule is not None]
    return (sum(told), len(told)) if told else None


def _key(row: DeviationRow, *, but: str = "") -> tuple[Any, ...]:
    options = {k: v for k, v in sorted(row.options.items()) if k != but} if row.options else ""
    return (row.kernel, str(options), row.format)


def _grouped(rows: Iterable[DeviationRow], key: Any) -> list[list[DeviationRow]]:
    """Rows of equal keys, in the order they first came."""
    groups: dict[Any, list[DeviationRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())
