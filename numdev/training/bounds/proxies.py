"""The first sentences of `numdev bounds`: what was found in words, and what cannot be said.

The first three are the conclusion: flash over low precision before curves merge, flash beside
chance, and what is left after merging. All others follow, each number once.

Distances between weights are proxies, and called so. A ratio is quoted before curves merge and,
apart from that, after; never one without the other where both are there. W1 stands behind the
paired distance, and where the two disagree a sentence says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from numdev.training.bounds.report import BoundsVariant, Comparison, Saturation, Window
from numdev.training.bounds.roles import PAIRED, WHOLE, Found
from numdev.training.bounds.saturation import NULLS
from numdev.training.bounds.words import (
    at_least,
    chance,
    number,
    over,
    steps_later,
    times,
    times_less,
)
from numdev.training.report import VariantRole

FORMATS = ("low_precision", "attention_precision")
PAPER = "0.2 to 0.5"
"""Flash over low precision in the first paper, which says two to five times less."""
DISAGREE = 2.0
"""W1's ratio over that of the paired distance, or the inverse, from which on they disagree."""
TINY = 0.01
"""A ratio below this is told as its inverse."""
BESIDE_ORDER: tuple[VariantRole, ...] = (
    "low_precision", "null_rounding", "attention_precision", "null_ulp", "null_repeat", "other_seed"
)  # fmt: skip
"""What a distance is set beside, in the order of a sentence."""
VERDICTS: Mapping[str, str] = {
    "no larger": "no further from the golden run than",
    "not told apart": "not told apart from",
}
"""What is said of a distance that is not shown to be larger than a null's."""
NAMED: Mapping[Window, str] = {
    "given": "here", "early": "early", "saturated": "merged", "start": "gradient"
}  # fmt: skip
PROXIES = (
    "Proxies: distances between weights say how far runs part, as in the first paper (Golden et "
    "al. 2024), and not whether either trains well."
)
MISSING: Mapping[VariantRole, str] = {
    "flash": "no run with a flash kernel, so nothing is said of one",
    "low_precision": "no run in another format, so the first paper's ratio is not here",
    "attention_precision": "no run with attention alone in another format, so what a format does "
    "outside attention is not set apart",
    "other_seed": "no other seed, so the other end of the scale is not here",
    "null_repeat": "the golden run was not repeated, so whether it is deterministic is not known",
    "null_rounding": "no run with attention re-rounded at random, so what chance of that size does "
    "is not known",
}
DIFFERENCES: Mapping[VariantRole, str] = {
    "other_seed": "another seed",
    "null_repeat": "repeating the golden run",
    "null_ulp": "one ulp on every weight",
    "null_rounding": "re-rounding attention at random",
}
NO_NULL = "no null run, so neither where curves merge nor how far chance alone would lead is known"


def missing(found: Found, *, curves: bool) -> tuple[str, ...]:
    """What cannot be said, and for want of what. Of checkpoints a null run is just one."""
    there = {v.role for v in found.variants if v.runs}
    some_null = bool(there & set(NULLS))
    asked = [role for role in MISSING if role not in NULLS or (curves and some_null)]
    lacking = [MISSING[role] for role in asked if role not in there]
    return tuple(lacking if some_null else [*lacking, NO_NULL])


def answer(found: Found, seeds: Sequence[int], lacking: Sequence[str]) -> tuple[str, ...]:
    """Sentences, `WHERE: what was found`; the one that would void all others first."""
    return tuple(_sentences(found, seeds, lacking))


def _sentences(found: Found, seeds: Sequence[int], lacking: Sequence[str]) -> Iterator[str]:
    yield from _not_deterministic(found)
    yield from _not_finite(found, curves=bool(found.saturations))
    mark = found.saturation(WHOLE)
    window: Window = "given" if mark is None else "early"
    for flash in (v for v in found.variants if v.role == "flash"):
        yield from _ratio(
            found, flash, "These checkpoints" if mark is None else _early(mark), seeds
        )
    if mark is not None:
        yield _merged(found, mark)
    for flash in (v for v in found.variants if v.role == "flash"):
        yield from _gradient(found, flash)
        yield from _delayed(found, flash)
    yield from _precisions(found, window)
    yield from _disagreeing(found)
    yield from _nulls(found, mark)
    yield from (f"Not known: {words}." for words in lacking)
    yield PROXIES


def _not_deterministic(found: Found) -> Iterator[str]:
    if found.deterministic is not False:
        return
    off = [n for n in found.null_runs if n.role == "null_repeat" and n.largest > 0]
    whole = [n for n in off if (n.of, n.group, n.metric) == ("weights", WHOLE, "max_abs")]
    off = whole or off
    first, last = off[0], off[-1]
    when = "" if first.step is None else f" at step {first.step}"
    grown = f" and {number(last.largest)} at step {last.step}" if last.step != first.step else ""
    yield (
        f"NOT DETERMINISTIC: the golden run repeated is not the same bits (a weight is off by "
        f"{number(first.largest)}{when}{grown}), so every distance below holds that too."
    )


def _not_finite(found: Found, *, curves: bool) -> Iterator[str]:
    for label, seeds in found.lost.items():
        where = ", ".join(
            f"seed {seed}" + (f" from step {step} on" if curves else "")
            for seed, step in sorted(seeds.items())
        )
        yield (
            f"NOT FINITE: {label} has no finite distance in {where}; what is said of it is of the "
            "other steps and seeds, if there are any."
        )


def _early(mark: Saturation) -> str:
    if mark.reason is not None:
        return f"At step {mark.steps[0]}" if mark.steps else "Early"
    if mark.chance is not None and (mark.bends is None or mark.chance < mark.bends):
        return f"Before step {mark.chance}, where chance begins to decide"
    if mark.bends is None:
        return f"Up to step {mark.steps[-1]}, with no sign that curves merge"
    return f"Before step {mark.bends}, where curves begin to merge"


def _ratio(found: Found, flash: BoundsVariant, where: str, seeds: Sequence[int]) -> Iterator[str]:
    """Flash beside low precision, then beside chance and attention alone, in the early window or in
    checkpoints; why there is nothing where it is empty."""
    window: Window = "given" if found.saturation(WHOLE) is None else "early"
    here = [c for c in _chosen(found, window, PAIRED) if c.variant == flash.label]
    known = [c for c in here if c.ratio is not None]
    if window == "early" and here and not known:
        yield f"Early: nothing can be said, since {here[0].nulls['ratio']}."
    end = f"; {over(known, seeds)}." if known else ""
    for c in known:
        if c.against_role == "low_precision":
            yield f"{where}: {flash.label} changes weights {_beside_low_precision(found, c)}{end}"
    others = [c for c in known if c.against_role != "low_precision"]
    if len(others) < len(known):
        where, end = "Beside chance", "."
    if others:
        yield f"{where}: {flash.label} is {_far(found, others)}{end}"


def _far(found: Found, comparisons: Sequence[Comparison]) -> str:
    """`no further from the golden run than A (0.97 x [..]) or B (..), 1.1 x [..] as far as C`."""
    chances = [c for c in _ordered(comparisons) if c.against_role in NULLS and at_least(c) <= 1]
    said = []
    for verdict, words in VERDICTS.items():
        these = [
            f"{_called(found, c.against)} ({times(c)})" for c in chances if chance(c) == verdict
        ]
        if these:
            said.append(f"{words} {' or '.join(these)}")
    for c in (c for c in _ordered(comparisons) if c not in chances):
        tiny = c.ratio is not None and 0 < c.ratio < TINY
        said.append(
            f"{times_less(c)} nearer than {_called(found, c.against)}"
            if tiny
            else f"{times(c)} as far as {_called(found, c.against)}"
        )
    return "; ".join(said)


def _beside_low_precision(found: Found, c: Comparison) -> str:
    others = [f"mean |difference|; {_other_metrics(found, c)}"]
    first = _twin(found, c, PAIRED, "first")
    if c.window == "early" and len(c.steps) > 1 and first and first.ratio is not None:
        others.append(f"at step {first.steps[0]} alone {number(first.ratio)} x")
    more = c.ratio is not None and (c.ratio if c.low is None else c.low) > 1
    return (
        f"{times(c)} as much as {_called(found, c.against)} does ({'; '.join(others)})"
        f"{', more and not less' if more else ''}, where the first paper reports {PAPER}"
    )


def _list(found: Found, comparisons: Sequence[Comparison]) -> str:
    """`0.97 x [..] as much as one null, no larger; 1.2 x [..] as much as attention alone`: nulls
    first, since they are what decides whether the others mean anything."""
    return "; ".join(_beside(found, c) for c in _ordered(comparisons))


def _ordered(comparisons: Sequence[Comparison]) -> list[Comparison]:
    return sorted(comparisons, key=lambda c: BESIDE_ORDER.index(c.against_role))


def _beside(found: Found, c: Comparison) -> str:
    if c.ratio is not None and 0 < c.ratio < TINY:  # a fraction that nobody reads is turned over
        return f"{_called(found, c.against)} does {times_less(c)} as much"
    said = f"{times(c)} as much as {_called(found, c.against)}"
    return f"{said}, {chance(c)}" if c.against_role in NULLS and at_least(c) <= 1 else said


def _other_metrics(found: Found, c: Comparison) -> str:
    others = {m: _twin(found, c, m, c.window) for m in ("w1", "max_abs")}
    names = {"w1": "W1", "max_abs": "max"}
    return ", ".join(
        f"{names[m]} {number(o.ratio)} x" if o and o.ratio is not None else f"no {names[m]}"
        for m, o in others.items()
    )


def _merged(found: Found, mark: Saturation) -> str:
    if mark.reason is not None:
        return f"Merging: where curves merge is not known, since {mark.reason}."
    if mark.saturated is None:
        return f"Merging: by step {mark.steps[-1]} the curves have not merged with the null's."
    here = [c for c in _chosen(found, "saturated", PAIRED) if c.ratio]
    widest = max((max(c.ratio, 1 / c.ratio) for c in here if c.ratio and c.against_role in NULLS),
                 default=1.0)  # fmt: skip
    said = [
        f"{c.variant} changes weights {times(c)} as much as {_called(found, c.against)}; "
        for c in here
        if c.role == "flash" and c.against_role == "low_precision"
    ]
    return (
        f"From step {mark.saturated} on: {''.join(said)}on average over seeds all curves have "
        f"merged to within {number(widest)} x of the null's, so a distance there says how chaotic "
        "training is, not how large flash's deviation was."
    )


def _gradient(found: Found, flash: BoundsVariant) -> Iterator[str]:
    """Before any update, where nothing has been amplified."""
    here = [c for c in _chosen(found, "start", PAIRED) if c.variant == flash.label]
    known = [c for c in here if c.ratio is not None and c.against_role != "other_seed"]
    if known:
        yield f"First gradient: {flash.label} changes the gradient {_list(found, known)}."


def _disagreeing(found: Found) -> Iterator[str]:
    """Where W1 says another thing than the paired distance of flash, in any window."""
    said = []
    for window in ("given", "early", "saturated", "start"):
        for c in _chosen(found, window, PAIRED):
            other = _twin(found, c, "w1", window)
            if c.role != "flash" or not c.ratio or other is None or not other.ratio:
                continue
            if not 1 / DISAGREE < other.ratio / c.ratio < DISAGREE:
                said.append(
                    f"{c.variant} over {c.against} is {number(other.ratio)} x in W1 and "
                    f"{number(c.ratio)} x in mean |difference| ({NAMED[window]})"
                )
    if said:
        yield (
            f"W1 disagrees: {'; '.join(said)}. W1 does not know which weight moved, so the paired "
            "number counts."
        )


def _delayed(found: Found, flash: BoundsVariant) -> Iterator[str]:
    said = [
        f"those of {_called(found, d.against)} {steps_later(d)}"
        for d in found.delays
        if (d.group, d.metric, d.variant) == (WHOLE, PAIRED, flash.label)
        and d.steps is not None
        and d.against_role in FORMATS
    ]
    if said:
        yield (
            f"Delay: {flash.label} reaches the same distances, {'; '.join(said)}; a size which "
            "merging does not hide."
        )


def _precisions(found: Found, window: Window) -> Iterator[str]:
    """How much of what a format does comes from attention; and what is no larger than chance."""
    for variant in (v for v in found.variants if v.role in FORMATS):
        here = [
            c
            for c in _chosen(found, window, PAIRED)
            if c.variant == variant.label and c.ratio and c.against_role != "other_seed"
        ]
        if here:
            head = "Low precision" if variant.role == "low_precision" else "Through attention"
            what = _called(found, variant.label)
            yield f"{head}: {what} changes weights {_list(found, here)}."


def _nulls(found: Found, mark: Saturation | None) -> Iterator[str]:
    """Determinism, and how far null runs go: at the last early step, or in the checkpoints."""
    said = ["the golden run repeated gives the same bits"] if found.deterministic else []
    step = mark.early[-1] if mark is not None and mark.early else None
    at = [
        n
        for n in found.null_runs
        if (n.of, n.group, n.metric, n.step) == ("weights", WHOLE, PAIRED, step)
        and n.role != "null_repeat"
    ]
    for n in at if mark is None or step is not None else ():
        when = "" if step is None else f" by step {step}"
        ends = f" [{number(n.smallest)} to {number(n.largest)}]" if n.runs > 1 else ""
        zero = "" if n.largest else ", the same bits, which is no measure of chance"
        runs = "1 run" if n.runs == 1 else f"mean and range of {n.runs} runs"
        kind = n.label.removeprefix("null: ")
        said.append(f"{kind} moves weights by {number(n.mean)}{ends}{when} ({runs}){zero}")
    if said:
        yield f"Null: {'; '.join(said)}."


def _chosen(found: Found, window: Window, metric: str) -> list[Comparison]:
    where = (WHOLE, window, metric)
    return [c for c in found.comparisons if (c.group, c.window, c.metric) == where]


def _twin(found: Found, c: Comparison, metric: str, window: Window) -> Comparison | None:
    """The same two runs, in another metric or window."""
    same = [o for o in _chosen(found, window, metric) if (o.variant, o.of) == (c.variant, c.of)]
    return next((o for o in same if o.against == c.against), None)


def _called(found: Found, label: str) -> str:
    """What a run does differently, in words."""
    v = next(v for v in found.variants if v.label == label)
    if v.role in DIFFERENCES:
        return DIFFERENCES[v.role]
    if v.role not in FORMATS:
        return label
    said = f"the whole network in {v.format}" if v.format else "low precision"
    if v.role == "attention_precision":
        said = f"attention alone in {v.attention_format or 'another format'}"
    alike = [o for o in found.variants if (o.role, o.format, o.attention_format) == _formats(v)]
    return f"{said} ({label})" if len(alike) > 1 else said


def _formats(v: BoundsVariant) -> tuple[VariantRole, str | None, str | None]:
    return v.role, v.format, v.attention_format
