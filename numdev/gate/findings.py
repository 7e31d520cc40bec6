"""From verdicts to findings: what is wrong with which kernel, where it is worst, what it means.

What one fault brings about is one finding: heads that an earlier rule has named already are not
accused by a later one again, which is added to the sentence instead; and the default dispatch joins
the kernel that it ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from operator import attrgetter

from numdev.gate.judging import NOTHING, decide
from numdev.gate.rules import Rules, default_rules
from numdev.gate.verdict import Calls, Decided, Judged, Power, Verdict
from numdev.gate.words import found_to_round, label, listed, wrong
from numdev.report import DeviationRow, Finding, Place

Named = Callable[[Place], str]


def findings_of(
    rows: Sequence[DeviationRow], rules: Rules | None = None
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """What is wrong, the gravest first; and sentences on what was tested and what could not be.

    Calls that a kernel declined are notes at the end, unless it declined them all: then it is not
    under test here.
    """
    decided = decide(rows, rules or default_rules())
    findings, tested = findings_in(decided, rows)
    caught = [_caught(each) for each in decided.judgement.power]
    if not caught:
        return findings, tested
    return findings, (*tested, f"Of faults planted here, these rules catch: {'; '.join(caught)}.")


def findings_in(
    decided: Decided, rows: Sequence[DeviationRow]
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """The same of what is decided of these rows already, without what planted faults showed."""
    judged, calls = decided.judged, decided.judgement.calls
    findings = [*_exceeded(judged, Places(rows)), *_not_run(calls)]
    return tuple(_merged(findings)), (*_tested(judged, findings), *found_to_round(rows))


class Places:
    """What to call a place in a report of these rows."""

    def __init__(self, rows: Sequence[DeviationRow]) -> None:
        self._rows = rows

    @cached_property
    def _ambiguous(self) -> tuple[set[int | None], bool, bool]:
        """Layers whose number several modules share; whether there are several seeds, and calls."""
        modules = set(map(attrgetter("layer", "module"), self._rows))
        layers = Counter(layer for layer, _ in modules)
        several = [len(set(map(attrgetter(x), self._rows))) > 1 for x in ("seed", "call")]
        return {layer for layer, count in layers.items() if count > 1}, several[0], several[1]

    def __call__(self, place: Place) -> str:
        """`layer 3 head 2`; the module where layers share a number, the case where it was drawn."""
        shared, seeds, calls = self._ambiguous
        if place.layer is None:
            words = place.case
        else:
            words = place.module if place.layer in shared else f"layer {place.layer}"
        words += f" {place.phase}" if place.phase else ""
        words += f" step {place.step}" if place.step is not None else ""
        words += f" call {place.call}" if calls and place.call != place.step else ""
        words += f" head {place.head}" if place.head is not None else ""
        return words + (f", seed {place.seed}" if seeds else "")


# --- what exceeds a limit ------------------------------------------------------------------------


def _exceeded(judged: Sequence[Judged], named: Named) -> Iterator[Finding]:
    """A finding for each thing wrong, in the order of the rules."""
    findings: list[Finding] = []
    named_by: dict[int, int] = {}  # a row to the finding that names it first
    also: dict[int, dict[str, None]] = {}
    for group in _by_fault(judged):
        offending = [row for each in group for row in each.offending]
        mine = None
        if any(id(row) not in named_by for row in offending):
            mine = len(findings)
            findings.append(_finding(group, named))
        for row in offending:
            first = named_by.setdefault(id(row), len(findings) - 1)
            if first != mine:
                also.setdefault(first, {})[group[0].verdict.rule] = None
    for at, finding in enumerate(findings):
        added = f" These heads fail {listed(also[at])} too." if at in also else ""
        yield finding.model_copy(update={"sentence": finding.sentence + added})


def _by_fault(judged: Sequence[Judged]) -> Iterator[list[Judged]]:
    """Verdicts that exceed, each by itself; but a different function is one fault in all formats
    (and each cause is a fault of its own), the most frequent first."""
    exceeded = [each for each in judged if each.verdict.outcome == "exceeded"]
    for rule in dict.fromkeys(each.verdict.rule for each in exceeded):
        same = [each for each in exceeded if each.verdict.rule == rule]
        if same[0].verdict.metric != "suspicion":
            yield from ([each] for each in same)
            continue
        causes: dict[str, list[Judged]] = {}
        for each in same:
            for cause in dict.fromkeys(h.row.suspicion or "" for h in each.beyond):
                beyond = tuple(h for h in each.beyond if h.row.suspicion == cause)
                key = f"{label(each.verdict)} {cause}"
                causes.setdefault(key, []).append(Judged(verdict=each.verdict, beyond=beyond))
        yield from sorted(causes.values(), key=lambda c: -sum(len(j.beyond) for j in c))


def _finding(group: Sequence[Judged], named: Named) -> Finding:
    verdict = group[0].verdict
    rows = [row for each in group for row in each.offending]
    formats = tuple(each.verdict.format or "" for each in group)
    judged = sum(each.verdict.judged for each in group)
    place = Place.of(rows[0])
    heads, kinds = f"{len(rows)} of {judged} heads", ", ".join(formats)
    where = f"{kinds}; {heads}, worst at {named(place)}"
    if verdict.metric == "suspicion":
        where = f"{heads}, {kinds}; first at {named(place)}"
    return Finding(
        rule=verdict.rule,
        severity="exceeded",
        sentence=f"{label(verdict)} {wrong(verdict, rows, where)}.",
        kernel=verdict.kernel or "",
        options=verdict.options,
        formats=formats,
        tensor=verdict.tensor,
        metric=verdict.metric,
        observed=verdict.observed if isinstance(verdict.observed, float | int) else None,
        limit=verdict.bound,
        count=len(rows),
        judged=judged,
        place=place,
    )


def _merged(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Findings of several kernels that differ in the name alone become one, of the first."""
    merged: dict[str, Finding] = {}
    for finding in findings:
        rest = finding.sentence.removeprefix(finding.kernel)
        bare = {"kernel": "", "also": (), "sentence": rest}
        first = merged.setdefault(finding.model_copy(update=bare).model_dump_json(), finding)
        if first is not finding:
            also = (*first.also, finding.kernel)
            sentence = f"{first.kernel} (and {listed(also)}, with the same numbers){rest}"
            key = first.model_copy(update=bare).model_dump_json()
            merged[key] = first.model_copy(update={"also": also, "sentence": sentence})
    yield from merged.values()


# --- calls that did not run ----------------------------------------------------------------------


def _not_run(calls: Sequence[Calls]) -> Iterator[Finding]:
    """Calls in which a kernel failed; then those that it declined, where it ran others."""
    for call in calls:
        if call.outcome == "unmeasured":
            words = "is required, and has nothing to judge in"
            if call.failed or call.skipped:
                words = "failed in" if call.failed else "is required, and skipped"
            yield _call(call, "runs", words)
    for call in calls:
        if call.ok and call.skipped and not (call.failed or call.required):
            yield _call(call, "refuses", "refuses")


def _call(call: Calls, rule: str, words: str) -> Finding:
    every = call.ok + call.skipped + call.failed
    count = call.failed or call.skipped or call.ok
    what = "backward passes" if call.backward else "calls"
    why = "; ".join(call.reasons[:3])
    if len(call.reasons) > 3:
        why += f"; and {len(call.reasons) - 3} other reasons"
    return Finding(
        rule=rule,
        severity="unmeasured" if rule == "runs" else "note",
        sentence=f"{label(call)} {words} {count} of {every} {what} ({call.format}): {why}.",
        kernel=call.kernel,
        options=call.options,
        formats=(call.format,),
        tensor=("dq" if call.backward else "out") if call.failed else None,
        count=count,
        judged=every,
        place=call.place,
    )


# --- what was tested -----------------------------------------------------------------------------


def _tested(judged: Sequence[Judged], findings: Sequence[Finding]) -> Iterator[str]:
    """Whom the rules cleared of what, and which rules could not be applied."""
    verdicts = [each.verdict for each in judged]
    by_rule: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_rule.setdefault(verdict.rule, []).append(verdict)
    heads = {rule: sum(v.judged for v in these) for rule, these in by_rule.items()}
    applied = [rule for rule, count in heads.items() if count]
    if not applied:
        return
    kernels = dict.fromkeys(v.kernel or "" for v in verdicts if v.judged)
    formats = dict.fromkeys(v.format or "" for v in verdicts if v.judged)
    lacking = [words for rule, these in by_rule.items() if (words := _lacking(rule, these))]
    start = "Judged" if any(f.severity != "note" for f in findings) else "No finding"
    yield (
        f"{start}: {listed(kernels)} in {listed(formats)}, {max(heads.values())} rows, by "
        f"{listed(applied)}." + (f" Not judged: {'; '.join(lacking)}." if lacking else "")
    )


def _lacking(rule: str, verdicts: Sequence[Verdict]) -> str:
    """`bias (independent sequences: 4, and it takes 8)`; empty where every row was judged."""
    reasons = dict.fromkeys(chain.from_iterable(v.reasons for v in verdicts))
    if not reasons:
        return ""
    if any(why.startswith(NOTHING) for why in reasons):
        return f"{rule} (nothing here to apply it to)"
    partly = "in part: " if any(v.judged for v in verdicts) else ""
    return f"{rule} ({partly}{'; '.join(list(reasons)[:2])})"


def _caught(power: Power) -> str:
    """From which dose on the rules catch a planted fault."""
    measured = [dose.dose for dose in power.doses if dose.outcome != "unmeasured"]
    what = f"{power.fault} ({power.format})"
    if not measured:
        return f"{what} could not be measured"
    if power.caught_from is None:
        return f"{what} at no dose up to {max(measured):g}"
    return f"{what} from {power.caught_from:g}"
