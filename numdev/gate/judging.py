"""What is decided: a report's rows held to the rules, and the exit code.

Reads rows and nothing else, so it runs where there is no torch and no GPU. It fails closed: what
could not be judged is `unmeasured`, never passed, unless a rule says that it may lack. How one rule
is applied to the heads of one tensor is `numdev.gate.holding`'s business.

Only kernels under audit are judged (a rule may ask for the baseline, the floor or the cost of the
format too). Planted faults (`role: control`) are put through the same rules, each by itself, and
what comes of that is the gate's power: from which dose on it catches each fault on this data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice, takewhile
from operator import attrgetter
from typing import Any, Literal

from numdev.errors import MeasurementError
from numdev.gate.cells import Around, Groups, Older, by_tensor, grouped, key_of, measured, something
from numdev.gate.change import GONE, NEW, refuse_other
from numdev.gate.held import Held, Lacking
from numdev.gate.holding import Holding, hold
from numdev.gate.rules import Rules, Threshold, Value, default_rules
from numdev.gate.selecting import Selector, matches
from numdev.gate.verdict import Calls, Dose, Judgement, Outcome, Power, Verdict
from numdev.gate.wholeness import check_whole
from numdev.report import NOT_PREDICTED, DeviationRow, Place

PLACES = 3
"""So many places of offending rows are named."""
GRADIENTS = ("dq", "dk", "dv")
NOTHING = "no row matches"
NOT_GIVEN = "it is about a change, and no older report was given (--against)"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A verdict and the rows behind it."""

    verdict: Verdict
    offending: tuple[DeviationRow, ...] = field(default=(), repr=False)
    """The worst first."""
    beyond: tuple[Held, ...] = field(default=(), repr=False)
    """The same, with the number and its limit."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A judgement, and the rows behind each of its verdicts."""

    judgement: Judgement
    judged: tuple[Judged, ...] = field(repr=False)


def judge_report(
    report: Older, rules: Rules | None = None, against: Older | None = None
) -> Judgement:
    """A report's rows held to the rules, and where rules ask for it to those of an older one.

    Raises MeasurementError for a report from a system that the rules do not hold for, for one that
    is not whole, and for an older one that is not about the same inputs.
    """
    return decide_report(report, rules or default_rules(), against).judgement


def decide_report(report: Older, rules: Rules, against: Older | None = None) -> Decided:
    """As `judge_report`, with the rows."""
    _refuse_elsewhere(report.provenance.system, rules)
    around = Around.of(report, against)
    check_whole(report, around.groups)
    if against is not None:
        refuse_other(report, against)
        check_whole(against, around.old_groups, "the older report")
    return decide(report.rows, rules, around)


def _refuse_elsewhere(system: Mapping[str, Any], rules: Rules) -> None:
    """A key that the report does not have is of no kind at all, whatever the pattern."""
    known = ", ".join(k for k, v in system.items() if isinstance(v, str))
    for key, pattern in rules.holds_for.items():
        found = system.get(key)
        if found is None:
            raise MeasurementError(
                f"the rules {rules.name} hold for {key} {pattern!r}, and this report's system has "
                f"no {key}",
                hint=f"what it has is under provenance.system in the report: {known or 'nothing'}",
            )
        if not fnmatchcase(str(found), pattern):
            raise MeasurementError(
                f"the rules {rules.name} hold for {key} {pattern!r}, and this report has "
                f"{str(found)!r}",
                hint="calibrate rules for that system, or gate a report from this one",
            )


def judge(
    rows: Sequence[DeviationRow], rules: Rules | None = None, around: Around | None = None
) -> Judgement:
    """Rows held to the rules (the default ones); `around` is what else is known of them."""
    return decide(rows, rules or default_rules(), around).judgement


def decide(rows: Sequence[DeviationRow], rules: Rules, around: Around | None = None) -> Decided:
    """As `judge`, with the rows."""
    around = around or Around(rows=rows)
    power = tuple(power_of(rows, rules, around))
    calls = tuple(calls_of(rows, rules, around))
    formats = dict.fromkeys(call.format for call in calls)
    judged = (*verdicts_of(rows, rules, around), *_powerless(power, rules, formats))
    verdicts = tuple(each.verdict for each in judged)
    known = {call.kernel for call in calls}
    missing = tuple(p for p in rules.required if not any(fnmatchcase(k, p) for k in known))
    judgement = Judgement(
        rules=rules.name,
        file=rules.file,
        outcome=_outcome(verdicts, calls, missing),
        verdicts=verdicts,
        calls=calls,
        missing=missing,
        required_line=rules.line("required"),
        power=power,
        fa_rule=_fa_rule(rows),
    )
    return Decided(judgement=judgement, judged=judged)


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


def verdicts_of(
    rows: Sequence[DeviationRow], rules: Rules, around: Around | None = None
) -> Iterator[Judged]:
    """Every rule on everything it selects, in the rules' order."""
    around = around or Around(rows=rows)
    groups = measured(
        around.by_tensor(rows), {role for t in rules.thresholds for role in t.where.role}
    )
    for threshold in rules.thresholds:
        yield from _apply(threshold, groups, around)


def _apply(threshold: Threshold, groups: Groups, around: Around) -> Iterator[Judged]:
    """One rule on everything it selects; one on a change also on what it would have selected."""
    where = threshold.where
    chosen = {key: rows for key, g in groups.items() if (rows := where.of(g, around.regimes))}
    older: Groups = {}
    if threshold.over == "before":
        if around.old is None:
            yield _nothing(threshold, NOT_GIVEN, "unmeasured")
            return
        older = around.older(where)
    keys = dict.fromkeys((*chosen, *older))
    if not keys:
        lenient = threshold.may_lack != "nothing"
        why = NOTHING + _unmatched(where, groups)
        yield _nothing(threshold, why, "untested" if lenient else "unmeasured")
    for key in keys:
        yield _judge(threshold, chosen.get(key, []), around, older.get(key, []))


def _unmatched(where: Selector, groups: Groups) -> str:
    """Which of a selector's patterns fit no row at all, beside what there is."""
    for name in ("kernel", "format", "tensor"):
        known = dict.fromkeys(getattr(rows[0], name) for rows in groups.values())
        patterns = getattr(where, name)
        if known and not any(matches(patterns, each) for each in known):
            return f"; {name} {', '.join(patterns)} is none of {', '.join(islice(known, 8))}"
    return ""


def _nothing(threshold: Threshold, why: str, outcome: Outcome) -> Judged:
    return Judged(verdict=Verdict(**_source(threshold), outcome=outcome, reasons=(why,)))


def _judge(
    threshold: Threshold,
    rows: Sequence[DeviationRow],
    around: Around,
    older: Sequence[DeviationRow] = (),
) -> Judged:
    """One rule on the heads of one tensor of one kernel in one format."""
    first = (rows or older)[0]
    threshold = threshold.at(first)
    found = hold(threshold, rows, around, older)
    outcome: Outcome = "passed" if found.judged else "untested"
    if found.unsure or any(not _may_lack(threshold, why) for _, why in found.lacking):
        outcome = "unmeasured"
    if found.offending:
        outcome = "exceeded"
    lacking = [*found.unsure, *found.lacking]
    shown = found.shown
    limit = shown.limit if shown else threshold
    verdict = Verdict(
        **_source(threshold),
        outcome=outcome,
        role=first.role,
        kernel=first.kernel,
        options=first.options,
        format=first.format,
        tensor=first.tensor,
        judged=found.judged,
        offending=len(found.offending),
        observed=_observed(shown.value) if shown else None,
        metric=limit.named,
        limit=str(limit),
        bound=limit.bound,
        median=threshold.heads is not None,
        places=tuple(Place.of(r) for r in _first(found, lacking, outcome)),
        unjudged=len(lacking),
        reasons=tuple(dict.fromkeys(why for _, why in lacking)),
        excused=found.excused,
    )
    beyond = tuple(found.offending)
    return Judged(verdict=verdict, offending=tuple(h.row for h in beyond), beyond=beyond)


def _observed(value: Value) -> Value:
    """JSON has no infinity."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _source(threshold: Threshold) -> dict[str, Any]:
    return {"rule": threshold.name, "file": threshold.file, "line": threshold.line}


def _may_lack(threshold: Threshold, why: str) -> bool:
    """Whether a row need not have the number, for this reason."""
    lenient = threshold.may_lack
    if why in (NEW, GONE):  # what is in one of two reports alone is never let pass
        return False
    return lenient == "numbers" or (lenient == "sampled" and why == NOT_PREDICTED)


def _first(found: Holding, lacking: Sequence[Lacking], outcome: Outcome) -> list[DeviationRow]:
    if outcome == "exceeded":
        return [h.row for h in found.offending[:PLACES]]
    return [row for row, _ in lacking[:PLACES]] if outcome == "unmeasured" else []


def calls_of(
    rows: Sequence[DeviationRow], rules: Rules, around: Around | None = None
) -> Iterator[Calls]:
    """How many calls each kernel under audit ran, declined, or failed in."""
    around = around or Around(rows=rows)
    passes: Groups = {}
    for (role, *key, tensor), group in around.by_tensor(rows).items():
        if role == "kernel":
            passes.setdefault((*key, tensor in GRADIENTS), []).extend(group)
    for (kernel, _, fmt, backward), group in passes.items():
        first = group[0]
        whole = set(map(_STATUS, group)) == {"ok"}
        bare = [] if whole else [row for row in group if row.status != "ok"]
        status = dict.fromkeys(map(_CALL, group), "ok")
        for worst in ("skipped", "failed"):  # the worst of a call's rows last
            status |= {_CALL(row): worst for row in bare if row.status == worst}
        count = Counter(status.values())
        said = "failed" if count["failed"] else "skipped"  # why it failed is no reason to decline
        reasons = list(dict.fromkeys(row.reason or "" for row in bare if row.status == said))
        required = any(fnmatchcase(kernel, p) for p in rules.required)
        outcome: Outcome = "passed" if count["ok"] == len(status) else "untested"
        if required and count["ok"] and not any(map(something, group)):
            outcome, reasons = "unmeasured", [*reasons, EMPTY]
        if count["failed"] or (required and count["skipped"]):
            outcome = "unmeasured"
        yield Calls(
            kernel=kernel,
            options=first.options,
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


_CALL = attrgetter("case", "call", "seed")
_STATUS = attrgetter("status")
_OF_A_KERNEL = attrgetter("role", "fa_rule")
EMPTY = "no element of it could be judged"


def power_of(
    rows: Sequence[DeviationRow], rules: Rules, around: Around | None = None
) -> Iterator[Power]:
    """Every planted fault in every format, its doses put through the rules as kernels are. Not
    through those on a change: what a fault would have been before, no report has."""
    around = around or Around(rows=rows)
    planted = any(key[0] == "control" for key in around.by_tensor(rows))
    controls = [r for r in rows if r.role == "control"] if planted else []
    absolute = [t for t in rules.thresholds if t.over != "before"]
    for fault in grouped(controls, lambda r: key_of(r, but="dose")).values():
        doses = sorted(grouped(fault, key_of).values(), key=lambda group: _size(group[0]))
        tried = [_dose(group, absolute, around) for group in doses]
        known = [d for d in reversed(tried) if d.outcome != "unmeasured"]
        caught = list(takewhile(lambda d: d.outcome == "caught", known))
        first = fault[0]
        yield Power(
            fault=first.kernel.removeprefix("control:"),
            options={k: v for k, v in first.options.items() if k != "dose"},
            format=first.format,
            doses=tuple(tried),
            caught_from=caught[-1].dose if caught else None,
        )


def _powerless(power: Sequence[Power], rules: Rules, formats: Iterable[str]) -> Iterator[Judged]:
    """A verdict for each planted fault that the rules must catch, and did not show that they do in
    each format that kernels ran in."""
    for at, (fault, dose) in enumerate(rules.catches.items()):
        found = [p for p in power if p.fault == fault]
        weak = [p for p in found if p.caught_from is None or p.caught_from > dose]
        why = [_missed(p, dose) for p in weak] if found else [NOT_PLANTED]
        planted = {p.format for p in found}
        why += [f"not planted in {fmt}" for fmt in formats if found and fmt not in planted]
        if why:
            verdict = Verdict(
                rule=f"catches {fault}",
                outcome="unmeasured",
                reasons=tuple(why),
                limit=f"caught from {dose:g}",
                file=rules.file,
                line=rules.line("catches", at),
            )
            yield Judged(verdict=verdict)


NOT_PLANTED = "no such planted fault in this report: audit with --control"


def _missed(power: Power, dose: float) -> str:
    if all(d.outcome == "unmeasured" for d in power.doses):
        return f"no dose of it could be measured ({power.format})"
    caught = "at no dose" if power.caught_from is None else f"from {power.caught_from:g} only"
    return f"caught {caught} ({power.format})"


def _dose(rows: Sequence[DeviationRow], thresholds: Sequence[Threshold], around: Around) -> Dose:
    """A fault that raises, or that no rule could judge, is not caught by that."""
    groups = measured(by_tensor(rows), {"control"})
    judged = [
        (threshold.name, _judge(threshold, chosen, around).verdict.outcome)
        for threshold in thresholds
        for group in groups.values()
        if (chosen := threshold.where.of(group, around.regimes, role="kernel"))
    ]
    by = tuple(dict.fromkeys(name for name, outcome in judged if outcome == "exceeded"))
    known = any(outcome == "passed" for _, outcome in judged)
    return Dose(
        dose=_size(rows[0]),
        outcome="caught" if by else "missed" if known else "unmeasured",
        by=by,
    )


def _size(row: DeviationRow) -> float:
    dose = row.options.get("dose")
    return float(dose) if isinstance(dose, int | float) and abs(dose) < LARGEST else 0.0


LARGEST = 1e300
"""A dose beyond it is none: JSON has integers that no float holds."""


def _fa_rule(rows: Iterable[DeviationRow]) -> tuple[int, int] | None:
    told = [
        holds for role, holds in map(_OF_A_KERNEL, rows) if role == "kernel" and holds is not None
    ]
    return (sum(told), len(told)) if told else None
