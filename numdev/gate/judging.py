"""What is decided: a report's rows held to the rules, and the exit code.

Reads rows alone: no torch, no GPU. It fails closed: what could not be judged is `unmeasured`, never
passed, unless a rule says that it may lack. Planted faults (`role: control`) are put through the
rules by themselves; from which dose on each is caught is the gate's power. Of sampled rows an
estimate passes or fails by its 95 % interval, and a maximum is a lower bound: it can only fail."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import islice, takewhile
from operator import attrgetter
from typing import Any, Literal

from numdev.errors import MeasurementError
from numdev.gate.rows import (
    FOUND,
    GRADIENTS,
    NOT_MEASURED,
    Groups,
    Measured,
    Rows,
    check_whole,
    grouped,
    measured,
    something,
    spelt,
)
from numdev.gate.rules import Limit, Rules, Selector, Threshold, default_rules, matches
from numdev.gate.verdict import Calls, Dose, Held, Judgement, Outcome, Power, Verdict
from numdev.metrics.of_rows import ERRORS, ESTIMATED, MAXIMA, interval_of, value_of
from numdev.metrics.statistics import holm
from numdev.report import NOT_PREDICTED, DeviationRow, Place, PlanRecord
from numdev.report.numbers import three

Lacking = tuple[DeviationRow, str]  # a row that is not judged, and why
PLACES = 3  # of offending rows that are named
NOTHING = "no row matches"
NOT_PLANTED = "no such planted fault in this report: audit with --control"
EMPTY = "no element of this tensor could be judged"


def judge_report(report: Measured, rules: Rules | None = None) -> Judgement:
    """A report's rows held to the rules (the default ones). Raises MeasurementError for a report
    from a system that the rules do not hold for, and for one that is not whole."""
    rules = rules or default_rules()
    for key, pattern in rules.holds_for.items():
        value = report.provenance.system.get(key)
        if value is None or not fnmatchcase(str(value), pattern):
            raise MeasurementError(
                f"the rules {rules.name} hold for {key} {pattern!r}, but this report has {value!r}",
                hint="calibrate rules for the report's system, or gate another one",
            )
    check_whole(report)
    return judge(report.rows, report.plan, rules)


def judge(rows: Rows, plan: PlanRecord, rules: Rules | None = None) -> Judgement:
    """Rows of a plan held to the rules (the default ones)."""
    rules = rules or default_rules()
    power = tuple(power_of(rows, plan, rules))
    calls = tuple(calls_of(rows, plan, rules))
    formats = dict.fromkeys(call.format for call in calls)
    verdicts = (*verdicts_of(rows, plan, rules), *_powerless(power, rules, formats))
    kernels = {call.kernel for call in calls}
    missing = tuple(p for p in rules.required if not any(fnmatchcase(k, p) for k in kernels))
    fa_rule = [r.fa_rule for r in rows if r.role == "kernel" and r.fa_rule is not None]
    return Judgement(
        rules=rules.name,
        outcome=_outcome(verdicts, calls, missing),
        verdicts=verdicts,
        calls=calls,
        missing=missing,
        power=power,
        fa_rule=(sum(fa_rule), len(fa_rule)) if fa_rule else None,
    )


def _outcome(
    verdicts: Sequence[Verdict], calls: Sequence[Calls], missing: Sequence[str]
) -> Literal["passed", "exceeded", "unmeasured"]:
    """Exceeded where anything is, since that is certain; passed only where something was judged,
    all that had to be was, and every required kernel ran."""
    outcomes = {v.outcome for v in verdicts}
    if "exceeded" in outcomes:
        return "exceeded"
    ran = any(c.ok for c in calls) and all(c.outcome != "unmeasured" for c in calls)
    whole = ran and not missing and "passed" in outcomes and "unmeasured" not in outcomes
    return "passed" if whole else "unmeasured"


def verdicts_of(rows: Rows, plan: PlanRecord, rules: Rules) -> Iterator[Verdict]:
    """Every rule on everything it selects, in the rules' order."""
    groups = measured(rows)
    for threshold in rules.thresholds:
        chosen = threshold.where.choose(groups)
        if not chosen:
            why = NOTHING + _unmatched(threshold.where, groups)
            outcome: Outcome = "unmeasured" if threshold.may_lack == "nothing" else "untested"
            yield Verdict(rule=threshold.name, outcome=outcome, reasons=(why,))
        for group in chosen.values():
            parts = grouped(group, lambda row: row.case).values() if threshold.by_case else (group,)
            yield from (_judge(threshold, part, plan) for part in parts)


def _unmatched(where: Selector, groups: Groups) -> str:
    """Which of a selector's patterns fit no row at all, beside what there is."""
    for name in ("kernel", "format", "tensor"):
        there = dict.fromkeys(getattr(rows[0], name) for rows in groups.values())
        patterns = getattr(where, name)
        if there and not any(matches(patterns, each) for each in there):
            return f"; {name} {', '.join(patterns)} is none of {', '.join(islice(there, 8))}"
    return ""


def _judge(threshold: Threshold, rows: Rows, plan: PlanRecord) -> Verdict:
    """One rule on the heads of one tensor of one kernel in one format."""
    first = rows[0]
    threshold = threshold.at(first).of(len(rows))
    held, lacking = _held(threshold, rows)
    held, unsure = _decided(threshold, held)
    offending = _offending(threshold, held)
    # Beside the limit stands the worst of what offends; a large bias that is not certain does not.
    shown = next(iter(offending or held), None)
    if threshold.heads is not None and held:
        shown = _median(held)
    outcome: Outcome = "passed" if held else "untested"
    strict = threshold.may_lack != "numbers"
    if unsure or any(strict or not _excused(threshold, *each, plan) for each in lacking):
        outcome = "unmeasured"
    if offending:
        outcome = "exceeded"
    lacking = [*unsure, *lacking]
    named = {"exceeded": [h.row for h in offending], "unmeasured": [row for row, _ in lacking]}
    limit, observed = (shown.limit, shown.value) if shown else (threshold, None)
    if isinstance(observed, float) and not math.isfinite(observed):
        observed = str(observed)  # JSON has no infinity
    return Verdict(
        rule=threshold.name,
        outcome=outcome,
        **first.who,
        tensor=first.tensor,
        observed=observed,
        metric=limit.metric,
        limit=str(limit),
        bound=limit.at_most,
        median=threshold.heads is not None,
        judged=len(held),
        offending=len(offending),
        places=tuple(map(Place.of, named.get(outcome, ())[:PLACES])),
        unjudged=len(lacking),
        reasons=tuple(dict.fromkeys(why for _, why in lacking)),
        beyond=tuple(offending),
    )


def _held(threshold: Threshold, rows: Rows) -> tuple[list[Held], list[Lacking]]:
    """Rows beside their limit, the worst first; and those without the number."""
    held: list[Held] = []
    lacking: list[Lacking] = []
    heads = 1 if threshold.heads is None else len(rows)
    for row in rows:
        result = _held_row(threshold.above_luck(row, heads), row)
        if isinstance(result, str):
            lacking.append((row, result))
        else:
            held.append(result)
    held.sort(key=lambda h: -h.excess)
    if threshold.heads is not None and held and len(held) < threshold.heads:
        few = f"needs {threshold.heads} heads, has {len(held)}"
        return [], [*lacking, *((h.row, few) for h in held)]
    return held, lacking


def _held_row(threshold: Threshold, row: DeviationRow) -> Held | str:
    """A row beside the first limit whose number it has; else why it has none.

    The next limit is for a number that means nothing, and says why, not for one not measured."""
    test = threshold.certain
    if test is not None:
        if (row.sequences or 0) < test.sequences:
            return f"needs {test.sequences} independent sequences, has {row.sequences or 0}"
        if row.bias_p is None:
            return row.nulls.get("bias_p", NOT_MEASURED)
    why: str | None = None
    limit: Limit
    for limit in (threshold, *threshold.otherwise):
        value, why = value_of(row, limit.metric)
        if value is not None or limit.absent:
            held = Held(row, limit, value, limit.excess(value))
            return _of_sample(held) if row.sampled else held
        if why is None:
            break
    return why or NOT_MEASURED


def _excused(threshold: Threshold, row: DeviationRow, why: str, plan: PlanRecord) -> bool:
    """Whether a row itself bears out that it lacks what a rule needs. That its elements and
    sequences are all there is seen beside the floor (`check_whole`)."""
    metric = threshold.metric
    if row.elements == 0:
        return not row.sampled  # others of its rows may see a key
    if threshold.certain is not None:
        own = (row.claim or "").startswith(FOUND) and why != NOT_MEASURED  # its way is so biased
        return own or (row.sequences or 0) < threshold.certain.sequences
    if metric in ("noise", "noise_ratio"):
        return row.noise is None and plan.repeats < 2
    if metric == "empty_nonfinite":
        return not row.empty_rows
    if value_of(row, metric)[0] is not None:  # too few heads have it, or it is a sample's maximum
        return True
    if row.sampled and row.tensor in ("dk", "dv"):
        return why == NOT_PREDICTED
    unclaimed = row.claim is None and row.expected_ratio is None and metric in ERRORS
    return unclaimed and not threshold.otherwise and why != NOT_MEASURED


def _of_sample(held: Held) -> Held | str:
    """What is known of sampled rows alone, with its interval; or why that says nothing."""
    metric = held.limit.metric
    if metric in MAXIMA:
        # flash-attention's rule compares two maxima: beyond it, the other may be too small.
        proven = held.excess > 1 and metric != "fa_rule"
        return held if proven else "the maximum over sampled rows does not bound the other rows"
    if metric not in ESTIMATED:
        return held
    interval = interval_of(held.row, metric)
    if interval is None:
        return f"no confidence interval is known for {metric} of sampled rows"
    return held._replace(interval=interval)


def _decided(threshold: Threshold, held: list[Held]) -> tuple[list[Held], list[Lacking]]:
    """What is decided; and estimates whose interval contains the limit, which are not. For a median
    none is, if the median of the lower ends is within and that of the upper ends beyond."""
    if not any(h.interval for h in held):
        return held, []
    if threshold.heads is None:
        unsure = [h for h in held if h.ends[0] <= 1 < h.ends[1]]
        sure = [h for h in held if not h.ends[0] <= 1 < h.ends[1]]
        return sure, [(h.row, _contains(h, h)) for h in unsure]
    low, high = (_median(sorted(held, key=lambda h: -h.ends[end])) for end in (0, 1))
    if not low.ends[0] <= 1 < high.ends[1]:
        return held, []
    return [], [(h.row, _contains(low, high, "the median ")) for h in held]


def _contains(lower: Held, upper: Held, whose: str = "") -> str:
    low, high = (h.interval or (0.0, 0.0) for h in (lower, upper))
    what = f"the interval of {whose}{lower.limit.metric}, {three(low[0])} to {three(high[1])},"
    return f"{what} contains the limit {lower.limit.at_most:g}: audit more rows"


def _offending(threshold: Threshold, held: Sequence[Held]) -> list[Held]:
    """Rows beyond the limit: none as long as the median is within, where the limit is for that;
    those that are significantly so over all of them together, where certainty is asked for."""
    if threshold.heads is not None and held and _median(held).excess <= 1:
        return []
    sure = [True] * len(held)
    if threshold.certain:
        sure = holm([h.row.bias_p or 0.0 for h in held], threshold.certain.alpha)
    return [h for h, certain in zip(held, sure, strict=True) if certain and h.excess > 1]


def _median(held: Sequence[Held]) -> Held:
    """Of rows in order, the worst first; of two in the middle the one that is less bad."""
    return held[len(held) // 2]


def calls_of(rows: Rows, plan: PlanRecord, rules: Rules) -> Iterator[Calls]:
    """How many calls each kernel under audit ran, declined, or failed in. What was asked for by
    name, as gradients are, and ran in none is not measured."""
    call_of = attrgetter("case", "call", "seed")
    kernels = (row for row in rows if row.role == "kernel")
    passes = grouped(
        kernels, lambda r: (r.kernel, spelt(r.options), r.format, r.tensor in GRADIENTS)
    )
    for (kernel, _, fmt, backward), group in passes.items():
        bare = [row for row in group if row.status != "ok"]
        status = dict.fromkeys(map(call_of, group), "ok")
        for row in sorted(bare, key=lambda row: row.status, reverse=True):  # failed last: it counts
            status[call_of(row)] = row.status
        count = Counter(status.values())
        told = "failed" if count["failed"] else "skipped"  # why it failed is no reason to decline
        reasons = list(dict.fromkeys(row.reason or "" for row in bare if row.status == told))
        required = rules.skipped == "never" or any(fnmatchcase(kernel, p) for p in rules.required)
        asked = (plan.named or backward) and rules.skipped == "refused-only"
        outcome: Outcome = "passed" if count["ok"] == len(status) else "untested"
        if required and count["ok"] and not any(map(something, group)):
            outcome, reasons = "unmeasured", [*reasons, EMPTY]
        if count["failed"] or (count["skipped"] and (required or (asked and not count["ok"]))):
            outcome = "unmeasured"
        yield Calls(
            kernel=kernel,
            options=group[0].options,
            format=fmt,
            backward=backward,
            ok=count["ok"],
            skipped=count["skipped"],
            failed=count["failed"],
            required=required,
            reasons=tuple(reasons),
            place=next((Place.of(row) for row in bare if row.status == "failed"), None),
            outcome=outcome,
        )


def power_of(rows: Rows, plan: PlanRecord, rules: Rules) -> Iterator[Power]:
    """Every planted fault in every format, its doses put through the rules as kernels are."""
    controls = (row for row in rows if row.role == "control")
    for fault in grouped(controls, attrgetter("kernel", "format")).values():
        doses = sorted(grouped(fault, lambda r: spelt(r.options)).values(), key=_size)
        tried = [_dose(group, plan, rules) for group in doses]
        known = [d for d in reversed(tried) if d.outcome != "unmeasured"]
        caught = list(takewhile(lambda d: d.outcome == "caught", known))
        yield Power(
            fault=fault[0].kernel.removeprefix("control:"),
            format=fault[0].format,
            doses=tuple(tried),
            caught_from=caught[-1].dose if caught else None,
        )


def _size(rows: Rows) -> float:
    """The dose; one beyond 1e300 is none, since JSON has integers that no float holds."""
    dose = rows[0].options.get("dose")
    return float(dose) if isinstance(dose, int | float) and abs(dose) < 1e300 else 0.0


def _dose(rows: Rows, plan: PlanRecord, rules: Rules) -> Dose:
    """A fault that raises, or that no rule could judge, is not caught by that."""
    # A planted fault is put through the rules as if it were a kernel.
    planted = [row.model_copy(update={"role": "kernel"}) for row in rows]
    verdicts = list(verdicts_of(planted, plan, rules))
    by = tuple(dict.fromkeys(v.rule for v in verdicts if v.outcome == "exceeded"))
    known = any(v.outcome == "passed" for v in verdicts)
    outcome: Any = "caught" if by else "missed" if known else "unmeasured"
    return Dose(dose=_size(rows), outcome=outcome, by=by)


def _powerless(power: Sequence[Power], rules: Rules, formats: Iterable[str]) -> Iterator[Verdict]:
    """A verdict for each planted fault that the rules must catch, and did not show that they do in
    each format that kernels ran in."""
    for fault, dose in rules.catches.items():
        planted = [p for p in power if p.fault == fault]
        weak = [p for p in planted if p.caught_from is None or p.caught_from > dose]
        why = [f"caught: {p}" for p in weak] if planted else [NOT_PLANTED]
        absent = [fmt for fmt in formats if planted and fmt not in {p.format for p in planted}]
        why += [f"not planted in {fmt}" for fmt in absent]
        if why:
            yield Verdict(
                rule=f"catches {fault}",
                outcome="unmeasured",
                reasons=tuple(why),
                limit=f"caught from {dose:g}",
            )
