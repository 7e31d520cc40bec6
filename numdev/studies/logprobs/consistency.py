"""Checks that a report of log-probabilities has the rows that its plan says, and that its
numbers do not contradict each other."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator

from numdev.gate.row_groups import HUGE, refuse_contradictions
from numdev.studies.logprobs.causes import KINDS
from numdev.studies.logprobs.report import (
    PAIR,
    CauseRow,
    LogprobsReport,
    PairRow,
    SideRow,
)
from numdev.studies.logprobs.training_costs import FIXES, UNDONE

SLACK = 1e-9  # by which sums over tokens may contradict each other


def check_consistency(report: LogprobsReport) -> None:
    """Raises MeasurementError, with the first contradiction, for rows that were not
    planned, rows that are missing, and numbers that contradict each other or the request.
    A missing row would exceed no limit."""
    refuse_contradictions(
        _plan_contradictions(report),
        _row_contradictions(report),
        _pair_contradictions(report),
        _cause_contradictions(report),
        _cost_contradictions(report),
    )


def _plan_contradictions(report: LogprobsReport) -> Iterator[str]:
    """Yields a sentence where the plan has no side, more than two, two of one name or one
    named PAIR; one each where it has another model or another clip band than the request,
    and pairs without two sides; with a model, one for each side that does not say of each
    cause either that it was looked for or why not."""
    plan, request = report.plan, report.request
    names = [side.name for side in plan.sides]
    if not 1 <= len(names) <= 2 or len(set(names)) < len(names) or PAIR in names:
        yield "the plan has no side, more than two, or two of one name"
    if plan.model != request.get("model"):
        yield "the plan has another model than the request"
    if plan.clip != (request.get("clip_low"), request.get("clip_high")):
        yield "the plan has another clip band than the request"
    if plan.pairs and len(names) != 2:
        yield "the plan has pairs of sequences of one side"
    for side in plan.sides:
        both = set(side.causes) & side.untested.keys()
        lacking = KINDS.keys() - set(side.causes) - side.untested.keys()
        if plan.model is not None and (both or lacking):
            yield f"the plan of {side.name} does not say which causes were looked for"


def _row_contradictions(report: LogprobsReport) -> Iterator[str]:
    """Yields a sentence for each planned row of a side that is missing or there twice,
    for the first that was not planned, and for each row that contradicts itself. Without
    a model no row is planned."""
    count = Counter((row.side, row.sequence) for row in report.rows)
    for side in report.plan.sides if report.plan.model is not None else ():
        for sequence in range(side.sequences):
            if count.pop((side.name, sequence), 0) != 1:
                yield f"sequence {sequence} of {side.name} has no row, or several"
    if count:
        name, sequence = next(iter(count))
        yield f"sequence {sequence} of {name} was not planned"
    for row in report.rows:
        if wrong := _row_contradiction(row):
            yield f"sequence {row.sequence} of {row.side} {wrong}"


def _row_contradiction(row: SideRow) -> str:
    """Returns the first contradiction between fields of a row, as a clause; empty without
    one."""
    sums = (row.error, row.square, row.largest, row.predicted, row.predicted_square)
    numbers = [x for x in (*sums, row.product) if x is not None]
    if row.status != "ok":
        return "has numbers, or no reason" if numbers or not row.reason else ""
    if len(numbers) != 6 or row.tokens < 1:
        return "has no numbers, and was measured"
    if not all(math.isfinite(x) and abs(x) <= HUGE for x in numbers):
        return "has a number that cannot be"
    for sum_of, square in (
        (row.error, row.square), (row.predicted, row.predicted_square),
    ):  # fmt: skip
        assert sum_of is not None
        assert square is not None
        if square < 0 or sum_of**2 > square * row.tokens * (1 + SLACK):
            return "has a sum of squares below what its sum needs"
    assert row.square is not None
    assert row.largest is not None
    if not row.largest**2 <= row.square * (1 + SLACK):
        return "has an error larger than all of its errors together"
    if row.square > row.largest**2 * row.tokens * (1 + SLACK):
        return "has errors that are larger than its largest"
    within = 0 <= row.clipped <= row.tokens and 0 <= row.predicted_clipped <= row.tokens
    return "" if within else "has more tokens outside the clip band than tokens"


def _pair_contradictions(report: LogprobsReport) -> Iterator[str]:
    """Yields a sentence where the pairs are not those that were planned, in their order,
    and one for each pair that contradicts itself."""
    planned, rows = list(range(report.plan.pairs)), report.pairs
    if [row.sequence for row in rows] != planned:
        yield "its pairs of sequences are not those that were planned"
    for row in rows:
        if wrong := _pair_contradiction(row):
            yield f"pair {row.sequence} {wrong}"


def _pair_contradiction(row: PairRow) -> str:
    """Returns the first contradiction between the counts and sums of a pair, as a clause;
    empty without one."""
    counts = (row.tokens, row.missing, row.unshared, row.mask, row.equal)
    if min(counts) < 0 or row.equal > row.tokens:
        return "has more equal tokens than tokens"
    if bool(row.sums) != bool(row.tokens):
        return "has sums without tokens, or none"
    if row.sums and row.sums.get("tokens") != row.tokens:
        return "has sums of another number of tokens"
    if row.sums and row.sums["d"] ** 2 > row.sums["square"] * row.tokens * (1 + SLACK):
        return "has a sum of squares below what its sum needs"
    return ""


def _cause_contradictions(report: LogprobsReport) -> Iterator[str]:
    """Yields one sentence where rows of causes are not those that were planned (every
    cause that was looked for has a row of each sequence that has numbers), and one for
    each row that contradicts itself."""
    wanted: set[tuple[str, str, int]] = set()
    for side in report.plan.sides:
        measured = [
            row.sequence
            for row in report.rows
            if row.side == side.name and row.status == "ok"
        ]
        wanted |= set(itertools.product([side.name], side.causes, measured))
    pairs = [row.sequence for row in report.pairs if row.tokens]
    wanted |= set(itertools.product([PAIR], report.plan.pair_causes, pairs))
    count = Counter((row.side, row.cause, row.sequence) for row in report.causes)
    if count != Counter(wanted):
        of, cause, sequence = min((count - Counter(wanted)) or (Counter(wanted) - count))
        yield f"{cause} of {of}, sequence {sequence}, has no row, several, or no plan"
    for each in report.causes:
        if wrong := _cause_contradiction(each):
            yield f"{each.cause} of {each.side}, sequence {each.sequence}, {wrong}"


def _cause_contradiction(row: CauseRow) -> str:
    """Returns the first contradiction between fields of a row of a cause, as a clause;
    empty without one."""
    if row.cause not in KINDS:
        return "is no cause"
    sums = (row.before, row.after, row.effect, row.noise, row.noise_left)
    if not all(math.isfinite(x) and x >= 0 for x in sums) or row.tokens < 0:
        return "has a number that cannot be"
    if row.product**2 > row.before * row.effect * (1 + SLACK):
        return "has a product larger than its factors"
    expected = row.before - 2 * row.product + row.effect
    close = math.isclose(row.after, expected, rel_tol=1e-6, abs_tol=1e-6 * row.before)
    if not KINDS[row.cause].is_size and not close:
        return "leaves another error than its effect does"
    return ""


def _cost_contradictions(report: LogprobsReport) -> Iterator[str]:
    """Yields a sentence for each cost that was not planned or stands there twice, for
    each side that has planned fixes without a row (it names the first by name), and for
    each row that contradicts itself."""
    fixes = {side.name: {*side.fixes, UNDONE} for side in report.plan.sides}
    fixes[PAIR] = set(FIXES) if len(report.plan.sides) == 2 else set()
    count = Counter((row.side, row.fix, row.sequence) for row in report.costs)
    for (side, fix, sequence), times in count.items():
        if times > 1 or fix not in fixes.get(side, ()):
            yield f"{fix} of {side}, sequence {sequence}, was not planned, or is twice"
    present = {(row.side, row.fix) for row in report.costs}
    for planned in report.plan.sides:
        if lacking := {(planned.name, fix) for fix in planned.fixes} - present:
            yield f"the cost of {planned.name} with {min(lacking)[1]} has no row"
    for row in report.costs:
        sums = row.tokens >= row.clipped >= 0 and row.lost >= 0
        if not sums or not 0 <= row.square < math.inf:
            yield f"{row.fix} of {row.side}, sequence {row.sequence}, cannot be"
