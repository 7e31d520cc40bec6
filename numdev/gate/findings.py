"""From verdicts to sentences: what is wrong with which kernel, where it is worst, what it means.

The rules are the gate's, so a finding is a verdict in words and there is one rule book. What one
fault brings about is one finding: heads that an earlier rule has named already are not accused by a
later one again, which is added to the sentence instead; and the default dispatch joins the kernel
that it ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from operator import attrgetter

from numdev.gate.judging import NOTHING, Decided, Judged, decide
from numdev.gate.rules import Rules, default_rules
from numdev.gate.verdict import Calls, Power, Verdict
from numdev.gate.wording import found_to_round, label, listed, wrong
from numdev.report import DeviationRow, Finding, Place


def findings_of(
    rows: Sequence[DeviationRow], rules: Rules | None = None
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """What is wrong, the gravest first; and sentences on what was tested and what could not be.

    Calls that a kernel declined are notes at the end, unless it declined them all: then it is not
    under test here.
    """
    decided = decide(rows, rules or default_rules())
    findings, tested = findings_in(decided, rows)
    return findings, (*tested, *_power(decided.judgement.power))


def findings_in(
    decided: Decided, rows: Sequence[DeviationRow]
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """The same of what is decided of these rows already, without what planted faults showed."""
    judged, judgement = decided.judged, decided.judgement
    found = [*_exceeded(judged, named_in(rows)), *_not_run(judgement.calls)]
    return tuple(_merged(found)), (*_tested(judged, found), *found_to_round(rows))


def named_in(rows: Sequence[DeviationRow]) -> Callable[[Place], str]:
    """What to call a place in a report of these rows."""
    return Places(rows)


class Places:
    """What to call where something is."""

    def __init__(self, rows: Sequence[DeviationRow]) -> None:
        self._rows = rows

    @cached_property
    def _told(self) -> tuple[set[int | None], bool, bool]:
        """Layers whose number several modules share; whether there are several seeds, and calls.
        Found out when the first place is named: a report that passes names none."""
        known = set(map(attrgetter("layer", "module"), self._rows))
        layers = Counter(layer for layer, _ in known)
        several = [len(set(map(attrgetter(x), self._rows))) > 1 for x in ("seed", "call")]
        return {layer for layer, count in layers.items() if count > 1}, several[0], several[1]

    def __call__(self, place: Place) -> str:
        """`layer 3 head 2`; the module where layers share a number, the case where it was drawn."""
        shared, seeds, calls = self._told
        if place.layer is None:
            words = place.case
        else:
            words = place.module if place.layer in shared else f"layer {place.layer}"
        words += f" {place.phase}" if place.phase else ""
        words += f" step {place.step}" if place.step is not None else ""
        words += f" call {place.call}" if calls and place.call != place.step else ""
        words += f" head {place.head}" if place.head is not None else ""
        return words + (f", seed {place.seed}" if seeds else "")


def _exceeded(judged: Sequence[Judged], named: Callable[[Place], str]) -> Iterator[Finding]:
    """A finding for each thing wrong, in the order of the rules."""
    found: list[Finding] = []
    named_by: dict[int, int] = {}  # a row to the finding that names it first
    also: dict[int, list[str]] = {}
    for group in _by_fault(judged):
        offending = [r for each in group for r in each.offending]
        mine = None
        if any(id(r) not in named_by for r in offending):
            mine = len(found)
            found.append(_finding(group, named))
        for row in offending:
            first = named_by.setdefault(id(row), len(found) - 1)
            if first != mine:
                also.setdefault(first, []).append(group[0].verdict.rule)
    for at, finding in enumerate(found):
        more = dict.fromkeys(also.get(at, ()))
        added = f" These heads fail {listed(more)} too." if more else ""
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
            for cause in dict.fromkeys(r.suspicion or "" for r in each.offending):
                rows = tuple(r for r in each.offending if r.suspicion == cause)
                key = f"{label(each.verdict)} {cause}"
                causes.setdefault(key, []).append(Judged(verdict=each.verdict, offending=rows))
        yield from sorted(causes.values(), key=lambda c: -sum(len(j.offending) for j in c))


def _finding(group: Sequence[Judged], named: Callable[[Place], str]) -> Finding:
    verdict = group[0].verdict
    worst = group[0].offending[0]
    formats = tuple(each.verdict.format or "" for each in group)
    count = sum(len(each.offending) for each in group)
    judged = sum(each.verdict.judged for each in group)
    place = Place.of(worst)
    if verdict.metric == "suspicion":
        said = f"{count} of {judged} heads, {', '.join(formats)}; first at {named(place)}"
        rows = [r for each in group for r in each.offending]
    else:
        said = f"{', '.join(formats)}; {count} of {judged} heads, worst at {named(place)}"
        rows = list(group[0].offending)
    sentence = f"{label(verdict)} {wrong(verdict, rows, said)}."
    return Finding(
        rule=verdict.rule,
        severity="exceeded",
        sentence=sentence,
        kernel=verdict.kernel or "",
        options=verdict.options,
        formats=formats,
        tensor=verdict.tensor,
        metric=verdict.metric,
        observed=verdict.observed if isinstance(verdict.observed, float | int) else None,
        limit=verdict.bound,
        count=count,
        judged=judged,
        place=place,
    )


def _not_run(calls: Sequence[Calls]) -> Iterator[Finding]:
    """Calls in which a kernel failed; then those that it declined, where it ran others."""
    for call in calls:
        if call.outcome == "unmeasured":
            words = "failed in" if call.failed else "is required, and skipped"
            empty = "is required, and has nothing to judge in"
            yield _call(call, "runs", words if call.failed or call.skipped else empty)
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


def _merged(found: Iterable[Finding]) -> Iterator[Finding]:
    """Findings of several kernels that differ in the name alone become one, said of the first."""
    kept: dict[str, Finding] = {}
    for finding in found:
        bare = finding.model_copy(update={"kernel": "", "also": ()})
        key = bare.model_copy(
            update={"sentence": finding.sentence.removeprefix(finding.kernel)}
        ).model_dump_json()
        if key not in kept:
            kept[key] = finding
            continue
        first = kept[key]
        also = (*first.also, finding.kernel)
        rest = finding.sentence.removeprefix(finding.kernel)
        sentence = f"{first.kernel} (and {listed(also)}, with the same numbers){rest}"
        kept[key] = first.model_copy(update={"also": also, "sentence": sentence})
    yield from kept.values()


def _tested(judged: Sequence[Judged], found: Sequence[Finding]) -> Iterator[str]:
    """Whom the rules cleared of what, and which rules could not be applied."""
    verdicts = [each.verdict for each in judged]
    kernels = dict.fromkeys(v.kernel or "" for v in verdicts if v.judged)
    formats = dict.fromkeys(v.format or "" for v in verdicts if v.judged)
    rules = dict.fromkeys(v.rule for v in verdicts)
    applied = [rule for rule in rules if any(v.judged for v in verdicts if v.rule == rule)]
    lacking = [words for rule in rules if (words := _lacking(rule, verdicts))]
    wrong = any(f.severity != "note" for f in found)
    if applied:
        heads = max(sum(v.judged for v in verdicts if v.rule == rule) for rule in applied)
        start = "Judged" if wrong else "No finding"
        yield (
            f"{start}: {listed(kernels)} in {listed(formats)}, {heads} rows, by {listed(applied)}."
            + (f" Not judged: {'; '.join(lacking)}." if lacking else "")
        )


def _power(power: Iterable[Power]) -> Iterator[str]:
    """Which planted faults the rules catch."""
    caught = [_caught(each) for each in power]
    if caught:
        yield f"Of faults planted here, these rules catch: {'; '.join(caught)}."


def _lacking(rule: str, verdicts: Sequence[Verdict]) -> str:
    """`bias (independent sequences: 4, and it takes 8)`; empty where every row was judged."""
    these = [v for v in verdicts if v.rule == rule]
    reasons = dict.fromkeys(chain.from_iterable(v.reasons for v in these))
    if not reasons:
        return ""
    if any(why.startswith(NOTHING) for why in reasons):
        return f"{rule} (nothing here to apply it to)"
    partly = "in part: " if any(v.judged for v in these) else ""
    return f"{rule} ({partly}{'; '.join(list(reasons)[:2])})"


def _caught(power: Power) -> str:
    measured = [dose.dose for dose in power.doses if dose.outcome != "unmeasured"]
    what = f"{power.fault} ({power.format})"
    if not measured:
        return f"{what} could not be measured"
    if power.caught_from is None:
        return f"{what} at no dose up to {max(measured):g}"
    return f"{what} from {power.caught_from:g}"
