"""Thresholds on rows: an audit's, or a sweep's, rows held to the rules, one test at a
time.

Reads rows alone: no torch, no GPU. It fails closed: what could not be judged is no pass,
unless a rule says that it may lack. Planted faults (`role: control`) are put through the
rules by themselves; from which dose on each is caught is the gate's power. Of sampled
rows an estimate passes or fails by its 95 % interval, and a maximum is a lower bound: it
can only fail."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import islice, takewhile
from operator import attrgetter
from typing import Literal

from numdev.gate.judgement import RUNS, JudgedRow, PlantedDose, Power, Test
from numdev.gate.row_groups import (
    INFERRED,
    NOT_MEASURED,
    Groups,
    Measured,
    Rows,
    has_something_to_judge,
    options_text,
    rows_to_judge,
)
from numdev.gate.rules import Limit, Rules, Selector, Threshold, matches_patterns
from numdev.grouping import grouped
from numdev.metrics.metrics_by_name import (
    BESIDE_REFERENCE,
    ERRORS,
    ESTIMATED,
    MAXIMA,
    TESTED,
    WHOLE,
    Value,
    interval_of,
    value_of,
)
from numdev.metrics.statistics import holm
from numdev.report import (
    NOT_PREDICTED,
    CallRecord,
    DeviationRow,
    Place,
    Places,
    PlanRecord,
    Standing,
    Who,
)
from numdev.report.number_text import three
from numdev.tensor_properties import TENSORS, tensor_spec

Lacking = tuple[DeviationRow, str]  # a row that is not judged, and why
REASONS = 5  # calls whose inputs are not finite
PLACES = 3  # of offending rows that are named
TOO_LITTLE = {
    "moved": "another seed's data move the result by only {number}× what rounding "
    "explains (needed: {least:g}×): inputs of larger spread would judge",
    "compared": "a share of only {number} of its elements is compared: in the others the "
    "reference overflows in this format, where the exact result does not",
    "yardstick": "the reference itself errs by more than its operations explain, as "
    "PyTorch runs it here, and this by less than ten times as much: a reference with "
    "wider sums would judge",
}
NOTHING = "no row matches"
EMPTY = "no element of this tensor could be judged"


def tests_of_rows(report: Measured, rules: Rules) -> Iterator[Test]:
    """Yields a test for every rule on every tensor of every kernel in every format that
    it selects, in the rules' order; for which calls ran; and for whether their inputs are
    finite, if there are any cases."""
    yield from threshold_tests(report.rows, report.plan, rules)
    yield from run_tests(report.rows, report.plan, rules)
    if report.cases:
        yield _finite_inputs_test(report.rows, report.cases)


def _finite_inputs_test(rows: Rows, cases: Sequence[CallRecord]) -> Test:
    """Returns the test of whether inputs are finite, also once rounded to the format.
    Elements that depend on one that is not are left out of every rule: what is left out
    is not judged. Undecided where some are not in a call that a kernel ran, with at most
    REASONS reasons; else held."""
    affected = {case.case: case for case in cases if case.nonfinite or case.overflows}
    reasons: dict[str, None] = {}
    named = Places(rows) if affected else None
    for row in rows:
        case = affected.get(row.case)
        if case is None or named is None or row.role != "kernel" or row.status != "ok":
            continue
        where = named.layer(row)
        for tensor, count in case.nonfinite.items():
            reasons[
                f"{where}: {tensor} holds {count} elements that are NaN or infinite"
            ] = None
        if row.format in case.overflows:
            lost = case.overflows[row.format]
            reasons[f"{where}: {lost} elements of the inputs overflow {row.format}"] = (
                None
            )
    standing = Standing.UNDECIDED if reasons else Standing.HELD
    return Test(rule="finite inputs", standing=standing, reasons=tuple(reasons)[:REASONS])


def threshold_tests(rows: Rows, plan: PlanRecord, rules: Rules) -> Iterator[Test]:
    """Yields a test for every rule on each tensor of each kernel in each format that it
    selects, with `by_case` one for each case of these, in the rules' order. A rule that
    selects no row has a test too, which is missing unless the rule may lack rows; but one
    that may lack them, and is on gradients alone, has none where no gradients were
    planned."""
    groups = rows_to_judge(rows)
    for threshold in rules.thresholds:
        chosen = [*filter(None, map(threshold.where.select, groups.values()))]
        needed = threshold.may_lack == "nothing"
        if not (chosen or needed or plan.backward) and _is_of_gradients(threshold.where):
            continue  # none were planned
        if not chosen:
            why = NOTHING + _unmatched_pattern(threshold.where, groups)
            standing = Standing.MISSING if needed else Standing.NOT_APPLICABLE
            yield Test(rule=threshold.name, standing=standing, reasons=(why,))
        for group in chosen:
            parts = (
                grouped(group, lambda row: row.case).values()
                if threshold.by_case
                else (group,)
            )
            yield from (_rule_test(threshold, part, plan) for part in parts)


def _is_of_gradients(where: Selector) -> bool:
    """Whether a selector fits gradients alone, of the tensors of attention (TENSORS)."""
    specs = [
        spec for spec in TENSORS.values() if matches_patterns(where.tensor, spec.name)
    ]
    return bool(specs) and all(spec.is_gradient for spec in specs)


def _unmatched_pattern(where: Selector, groups: Groups) -> str:
    """Returns a clause on the first of a selector's fields `kernel`, `format` and
    `tensor` whose patterns fit no row, with up to 8 names that rows have: `; kernel mine
    is none of a, b`. Empty where there is none, and without rows."""
    for name in ("kernel", "format", "tensor"):
        present = dict.fromkeys(getattr(rows[0], name) for rows in groups.values())
        patterns = getattr(where, name)
        if present and not any(matches_patterns(patterns, each) for each in present):
            some = ", ".join(islice(present, 8))
            return f"; {name} {', '.join(patterns)} is none of {some}"
    return ""


def _rule_test(threshold: Threshold, rows: Rows, plan: PlanRecord) -> Test:
    """Returns the test of one rule on the heads of one tensor of one kernel in one
    format. `rows`: at least one. It is exceeded where any row is; else missing where a
    number is lacking without an excuse; else undecided, held, or not applicable without a
    number."""
    first = rows[0]
    threshold = threshold.for_row(first, len(rows))
    judged, unsure, lacking = _rows_with_limits(threshold, rows)
    offending = _rows_beyond_limit(threshold, judged)
    # Beside the limit stands the worst of what offends; a large bias that is not certain
    # does not.
    shown = next(iter(offending or judged), None)
    if threshold.heads is not None and judged:
        shown = _median(judged)
    strict = threshold.may_lack != "numbers"
    standing = Standing.HELD if judged else Standing.NOT_APPLICABLE
    if any(strict or not _is_excused(threshold, *each, plan) for each in lacking):
        standing = Standing.MISSING
    elif unsure:
        standing = Standing.UNDECIDED
    if offending:
        standing = Standing.EXCEEDED
    if standing is Standing.UNDECIDED:
        shown = _median(unsure) if threshold.heads is not None else unsure[0]
    lacking = [*((h.row, h.unsure) for h in unsure), *lacking]
    named = [h.row for h in offending] if offending else [row for row, _ in lacking]
    limit, observed = (shown.limit, shown.value) if shown else (threshold, None)
    interval = shown.interval if shown else None
    if isinstance(observed, float) and not math.isfinite(observed):
        observed = str(observed)  # JSON has no infinity
    places = tuple(map(Place.of, named[:PLACES]))
    reasons = tuple(dict.fromkeys(why for _, why in lacking))
    return Test(
        rule=threshold.name,
        standing=standing,
        **first.who,
        tensor=first.tensor,
        observed=observed,
        interval=interval,
        metric=limit.metric,
        limit=str(limit),
        bound=limit.at_most,
        median=threshold.heads is not None,
        judged=len(judged),
        offending=len(offending),
        places=places,
        unjudged=len(lacking),
        reasons=reasons,
        beyond=tuple(offending),
    )


def _rows_with_limits(
    threshold: Threshold, rows: Rows
) -> tuple[list[JudgedRow], list[JudgedRow], list[Lacking]]:
    """Returns rows with their limit, the worst first; estimates that decide nothing; and
    rows without the number, each with the reason. Of a rule on a median (`heads`) all
    estimates decide or none: fewer rows than it needs, or a median that is not known,
    leave the first list empty."""
    judged: list[JudgedRow] = []
    lacking: list[Lacking] = []
    heads = 1 if threshold.heads is None else len(rows)
    for row in rows:
        widened = threshold.raised_by_luck(row).widened_for_sample_size(row, heads)
        result = _row_with_limit(widened, row)
        if isinstance(result, str):
            lacking.append((row, result))
        else:
            judged.append(result)
    judged.sort(key=_worst_first)
    unsure = [h for h in judged if h.unsure]
    if threshold.heads is None or not unsure:
        judged = [h for h in judged if not h.unsure]
    if threshold.heads is not None and judged and len(judged) < threshold.heads:
        few = f"needs {threshold.heads} results, has {len(judged)}"
        return [], unsure, [*lacking, *((h.row, few) for h in judged)]
    if threshold.heads is not None and unsure:
        return [], unsure, lacking  # a median of what is not known
    if any(h.interval for h in judged):
        judged, straddling = _split_undecided(threshold, judged)
        unsure += straddling
    return judged, unsure, lacking


def _worst_first(judged: JudgedRow) -> tuple[float, float]:
    """Returns a key that sorts the worst first: by the multiple of the limit, and where
    that is infinite, beside a limit of 0, by the number; NaN before all."""
    value = judged.value
    size = abs(float(value)) if isinstance(value, float | int) else 0.0
    return -judged.excess, -(math.inf if math.isnan(size) else size)


def _row_with_limit(threshold: Threshold, row: DeviationRow) -> JudgedRow | str:
    """Returns a row with the first limit whose number it has (`absent` needs none); else
    the reason why it has none, or too few sequences for a rule that asks for certainty.

    The next limit (`otherwise`) is for a number that means nothing, and says why, not for
    one not measured."""
    test = threshold.certain
    if test is not None:
        if (row.sequences or 0) < test.sequences:
            return (
                f"needs {test.sequences} independent sequences, has {row.sequences or 0}"
            )
        if row.bias_p is None:
            return row.nulls.get("bias_p", NOT_MEASURED)
    why: str | None = None
    limit: Limit
    for limit in (threshold, *threshold.otherwise):
        value, why = value_of(row, limit.metric)
        if value is not None or limit.absent:
            beside = JudgedRow(row, limit, value, limit.excess(value))
            if limit.at_least is not None and float(value or 0.0) < limit.at_least:
                return beside._replace(unsure=_too_little_reason(limit, value))
            return _with_interval(beside) if row.sampled else beside
        if why is None:
            break
    return why or NOT_MEASURED


def _too_little_reason(limit: Limit, value: Value) -> str:
    """Returns the reason why a row tells nothing whose number is below the limit's
    `at_least`."""
    number = three(float(value or 0.0), limit.at_least)
    return TOO_LITTLE.get(
        limit.metric, "{metric} is {number} (needed: {least:g})"
    ).format(metric=limit.metric, number=number, least=limit.at_least)


def _is_excused(
    threshold: Threshold, row: DeviationRow, why: str, plan: PlanRecord
) -> bool:
    """Whether a row itself shows why it lacks what a rule needs; `why`: the reason it
    has. It does where no element of it counts, unless it is sampled. Of a rule on
    certainty it does with too few sequences, or an inferred rounding model; of noise
    where nothing was to run twice; of `empty_nonfinite` without an empty row; of numbers
    beside a reference where it has some. Of other metrics it does with a number that too
    few heads have, and by its reason where nothing predicts its errors. That its elements
    and sequences are all there are is checked against the floor (`check_whole`)."""
    metric = threshold.metric
    if row.elements == 0:
        return not row.sampled  # others of its rows may see a key
    if threshold.certain is not None:
        # The inferred rounding model is biased itself
        inferred = (row.claim or "").startswith(INFERRED) and why != NOT_MEASURED
        return inferred or (row.sequences or 0) < threshold.certain.sequences
    if metric in ("noise", "noise_ratio"):
        return row.noise is None and plan.repeats < 2
    if metric == "empty_nonfinite":
        return not row.empty_rows
    if metric in BESIDE_REFERENCE:
        return row.beside_reference is not None
    if metric == "narrow_sum":
        return why != NOT_MEASURED  # a reason that `check_whole` has held beside the call
    # Too few heads have it, or it is a sample's maximum
    if value_of(row, metric)[0] is not None:
        return True
    if row.sampled and tensor_spec(row.tensor).sums_over_rows:
        return why == NOT_PREDICTED
    unclaimed = row.claim is None and row.expected_ratio is None and metric in ERRORS
    return unclaimed and not threshold.otherwise and why != NOT_MEASURED


def _with_interval(estimate: JudgedRow) -> JudgedRow | str:
    """Returns a number of sampled rows beside its limit. It stays as it is where it is of
    all rows or has a test of its own (WHOLE, TESTED), and as a maximum beyond its limit.
    An estimate gets its interval; without one it says in `unsure` that it decides
    nothing. For another maximum, and for `fa_rule`, returns the reason why it says
    nothing of all rows."""
    metric = estimate.limit.metric
    if metric in WHOLE | TESTED:
        return estimate
    if metric in MAXIMA:
        # flash-attention's rule compares two maxima: beyond it, the other may be too
        # small.
        proven = estimate.excess > 1 and metric != "fa_rule"
        if proven:
            return estimate
        return "the maximum over sampled rows does not bound the other rows"
    interval = interval_of(estimate.row, metric) if metric in ESTIMATED else None
    if interval is None:
        why = (
            f"no interval is known for {metric} of {estimate.row.rows_measured} "
            "sampled rows: "
        )
        return estimate._replace(unsure=why + "audit more rows")
    return estimate._replace(interval=interval)


def _split_undecided(
    threshold: Threshold, judged: list[JudgedRow]
) -> tuple[list[JudgedRow], list[JudgedRow]]:
    """Returns estimates that decide, and those whose interval contains the limit, with
    the reason in `unsure`. For a median none decides, if the median of the lower ends is
    within and that of the upper ends beyond. At least one has an interval."""
    if threshold.heads is None:
        unsure = [h for h in judged if h.ends[0] <= 1 < h.ends[1]]
        sure = [h for h in judged if not h.ends[0] <= 1 < h.ends[1]]
        return sure, [h._replace(unsure=_undecided_reason(h, h)) for h in unsure]
    low, high = (_median(sorted(judged, key=lambda h: -h.ends[end])) for end in (0, 1))
    if not low.ends[0] <= 1 < high.ends[1]:
        return judged, []
    return [], [
        h._replace(unsure=_undecided_reason(low, high, "the median ")) for h in judged
    ]


def _undecided_reason(lower: JudgedRow, upper: JudgedRow, whose: str = "") -> str:
    """Returns why an estimate decides nothing: the interval from `lower`'s low end to
    `upper`'s high end contains the limit. `whose` precedes the metric."""
    low, high = (h.interval or (0.0, 0.0) for h in (lower, upper))
    what = (
        f"the interval of {whose}{lower.limit.metric}, {three(low[0])} to "
        f"{three(high[1])},"
    )
    return f"{what} contains the limit {lower.limit.at_most:g}: audit more rows"


def _rows_beyond_limit(
    threshold: Threshold, judged: Sequence[JudgedRow]
) -> list[JudgedRow]:
    """Returns rows beyond the limit. Where the limit is for a median there are none as
    long as that is within. Where certainty is asked for, only rows count that are
    significant over all of them together; else, with `only_where`, only rows whose
    numbers are large enough."""
    if not judged or (threshold.heads is not None and _median(judged).excess <= 1):
        return []
    if threshold.certain:
        sure = holm([h.row.bias_p or 0.0 for h in judged], threshold.certain.alpha)
        judged = [h for h, is_sure in zip(judged, sure, strict=True) if is_sure]
    elif threshold.only_where:
        judged = [h for h in judged if threshold.is_certain(h.row)]
    return [h for h in judged if h.excess > 1]


def _median(judged: Sequence[JudgedRow]) -> JudgedRow:
    """Returns the median of rows that are ordered from the worst, at least one; of two in
    the middle the one that is less bad."""
    return judged[len(judged) // 2]


def run_tests(rows: Rows, plan: PlanRecord, rules: Rules) -> Iterator[Test]:
    """Yields a test for each kernel under audit, with its options and format, of in how
    many calls it ran, declined or failed; forward and backward separately. A kernel
    without rows has none."""
    call_of = attrgetter("case", "call", "seed")
    kernels = (row for row in rows if row.role == "kernel")
    passes = grouped(
        kernels,
        lambda r: (
            r.kernel,
            options_text(r.options),
            r.format,
            tensor_spec(r.tensor).is_gradient,
        ),
    )
    for (_, _, _, backward), group in passes.items():
        bare = [row for row in group if row.status != "ok"]
        states = dict.fromkeys(map(call_of, group), ("ok", ""))
        # Failed last: it counts
        for row in sorted(bare, key=lambda row: row.status, reverse=True):
            states[call_of(row)] = row.status, row.reason or ""
        yield run_test(
            group[0].who, rules, group[0].tensor, [*states.values()],
            asked=plan.named or backward,
            empty=not any(map(has_something_to_judge, group)),
            place=next((Place.of(row) for row in bare if row.status == "failed"), None),
        )  # fmt: skip


def run_test(
    who: Who,
    rules: Rules,
    tensor: str,
    states: Sequence[tuple[str, str]],
    *,
    asked: bool,
    empty: bool = False,
    place: Place | None = None,
) -> Test:
    """Returns the test of whether a kernel ran. `states`: of each call `ok`, `skipped` or
    `failed`, and why; `asked`: whether it was asked for by name; `empty`: whether no
    element that it returned could be judged; `place`: of the first failure.

    It is missing where the kernel failed in a call; where it declined one, and the rules
    require the kernel; where it was asked for by name (as gradients are) and ran in none,
    unless the rules allow that; and where it is required and `empty`. Else it is not
    applicable where a call was declined, and held."""
    kernel = who["kernel"]
    required = rules.skipped == "never" or any(
        fnmatchcase(kernel, p) for p in rules.required
    )
    asked = asked and rules.skipped == "refused-only"
    count = Counter(state for state, _ in states)
    failed, skipped, ok = (count[name] for name in ("failed", "skipped", "ok"))
    # Why it failed is no reason to decline
    reasons = [
        why for state, why in states if state == ("failed" if failed else "skipped")
    ]
    standing = Standing.NOT_APPLICABLE if skipped else Standing.HELD
    if failed or (skipped and (required or (asked and not ok))):
        standing = Standing.MISSING
    elif required and empty:
        standing, reasons = Standing.MISSING, [*reasons, EMPTY]
    return Test(
        **who,
        rule=RUNS,
        standing=standing,
        tensor=tensor,
        required=required,
        judged=ok,
        unjudged=skipped,
        offending=failed,
        metric="calls",
        limit="every call",
        places=(place,) if place else (),
        reasons=tuple(dict.fromkeys(reasons)),
    )


def power_of(rows: Rows, plan: PlanRecord, rules: Rules) -> Iterator[Power]:
    """Yields the power of every planted fault in every format: its doses, the smallest
    first, are judged by the rules as kernels are. It is caught from the smallest dose
    from which on all larger ones that were measured are."""
    controls = (row for row in rows if row.role == "control")
    for fault in grouped(controls, attrgetter("kernel", "format")).values():
        doses = sorted(
            grouped(fault, lambda r: options_text(r.options)).values(), key=_dose_size
        )
        tried = [_planted_dose(group, plan, rules) for group in doses]
        from_largest = [d for d in reversed(tried) if d.outcome != "unmeasured"]
        caught = list(takewhile(lambda d: d.outcome == "caught", from_largest))
        yield Power(
            fault=fault[0].kernel.removeprefix("control:"),
            format=fault[0].format,
            doses=tuple(tried),
            caught_from=caught[-1].dose if caught else None,
        )


def _dose_size(rows: Rows) -> float:
    """Returns the dose of a planted fault; 0 for one that is no number, or beyond 1e300,
    since JSON has integers that no float can hold. `rows`: at least one."""
    dose = rows[0].options.get("dose")
    return float(dose) if isinstance(dose, int | float) and abs(dose) < 1e300 else 0.0


def _planted_dose(rows: Rows, plan: PlanRecord, rules: Rules) -> PlantedDose:
    """Returns whether the rules catch one dose of a fault, and which. One that raises, or
    that no rule could judge, is not caught by that: it is `unmeasured`."""
    # A planted fault is put through the rules as if it were a kernel.
    planted = [row.model_copy(update={"role": "kernel"}) for row in rows]
    tests = list(threshold_tests(planted, plan, rules))
    by = tuple(dict.fromkeys(t.rule for t in tests if t.standing is Standing.EXCEEDED))
    outcome: Literal["caught", "missed", "unmeasured"] = "unmeasured"
    if by:
        outcome = "caught"
    elif any(t.standing is Standing.HELD for t in tests):
        outcome = "missed"
    return PlantedDose(dose=_dose_size(rows), outcome=outcome, by=by)
