"""The first sentences of `numdev bounds`: flash beside low precision, another seed and chance while
curves have not merged. What voids that comes first, what cannot be said last. Distances between
weights are proxies, and called so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from numdev.report.numbers import si, times
from numdev.training.bounds.report import BoundsReport, BoundsVariant, Comparison, Saturation
from numdev.training.bounds.saturation import MERGED, NULLS
from numdev.training.report import VariantRole

PAIRED = "mean_abs"
WHOLE = "all"
ORDER: tuple[VariantRole, ...] = (
    *("low_precision", "null_rounding", "attention_precision", "null_ulp", "null_repeat"),
    "other_seed",
)
"""What a distance is set beside, in the order of a sentence."""
MISSING: Mapping[VariantRole, str] = {
    "flash": "what flash does: no run has a flash kernel",
    "low_precision": "the first paper's ratio: no run is in another format",
    "attention_precision": "what a format does outside attention: no run has it in attention alone",
    "other_seed": "the other end of the scale: no run has another seed",
    "null_repeat": "whether the golden run is deterministic: it was not repeated",
    "null_rounding": "what chance of its size does: no run re-rounds attention at random",
}
NO_NULL = "where curves merge, and how far chance alone would lead: there is no null run"
NOT_DETERMINISTIC = (
    "NOT DETERMINISTIC: the golden run repeated is off by up to {off}, and every distance below "
    "holds that too."
)
NOT_FINITE = "NOT FINITE: {label} has no finite distance in {where}, and counts in no ratio there."
RATIO = "{lead}: {label} changes weights {beside}."
PAPER = ", where the first paper reports 0.2 to 0.5"
MERGED_FROM = (
    "From step {step} on curves have merged: a distance there says how chaotic training is, not "
    "how large flash's deviation was."
)
NOT_MERGED = "Merging: by step {step} the curves have not merged with the null's."
NO_MARK = "Merging: where curves merge is not known, since {reason}."
REPEATED = "Null: the golden run repeated gives the same bits."
PROXIES = (
    "Proxies: distances between weights say how far runs part, as in the first paper (Golden et "
    "al. 2024), and not whether either trains well. W1 does not know which weight moved."
)


def missing(variants: Sequence[BoundsVariant]) -> tuple[str, ...]:
    """What cannot be said, and for want of which run."""
    roles = {v.role for v in variants if v.runs}
    some_null = bool(roles & set(NULLS))
    asked = [role for role in MISSING if role not in NULLS or some_null]
    lacking = [MISSING[role] for role in asked if role not in roles]
    return tuple(lacking if some_null else [*lacking, NO_NULL])


def answer(
    report: BoundsReport, lost: Mapping[str, Mapping[int, int]], off: float
) -> Iterator[str]:
    """Sentences, `WHERE: what was found`. `lost`: of a kind of run, the seeds in which it was not
    finite, and from which step on. `off`: the largest distance of a repeat, in any metric."""
    mark = next(s for s in report.saturations if s.group == WHOLE)
    if report.summary.deterministic is False:
        yield NOT_DETERMINISTIC.format(off=si(off))
    for label, seeds in lost.items():
        where = [f"seed {seed} from step {step} on" for seed, step in sorted(seeds.items())]
        yield NOT_FINITE.format(label=label, where=", ".join(where))
    for label in (v.label for v in report.summary.variants if v.role == "flash"):
        here = _of(report, "early", label)
        if beside := "; ".join(_beside(report, c) for c in here if c.ratio is not None):
            yield RATIO.format(lead=_early(mark), label=label, beside=beside)
        elif here:
            yield f"Early: nothing can be said, since {here[0].nulls['ratio']}."
    if mark.reason is not None:
        yield NO_MARK.format(reason=mark.reason)
    elif mark.saturated is None:
        yield NOT_MERGED.format(step=mark.steps[-1])
    else:
        yield MERGED_FROM.format(step=mark.saturated)
    if report.summary.deterministic:
        yield REPEATED
    yield from (f"Not known: {words}." for words in report.summary.missing)
    yield PROXIES


def _of(report: BoundsReport, window: str, label: str, metric: str = PAIRED) -> list[Comparison]:
    """The comparisons of all weights of one kind of run in a window."""
    where = (WHOLE, window, label, metric)
    chosen = [c for c in report.comparisons if (c.group, c.window, c.variant, c.metric) == where]
    return sorted(chosen, key=lambda c: ORDER.index(c.against_role))


def _beside(report: BoundsReport, c: Comparison) -> str:
    """`0.97 x [0.93 to 1.00] as much as null: re-rounded, no larger (W1 0.95 x)`. An interval that
    reaches far above a null shows as little that a distance is not larger."""
    ends = "" if c.low is None or c.high is None else f" [{times(c.low)} to {times(c.high)}]"
    words = f"{times(c.ratio)} x{ends} as much as {c.against}"
    if c.against_role in NULLS and ((c.ratio or 0.0) if c.low is None else c.low) <= 1:
        words += ", no larger" if c.high is None or c.high <= MERGED else ", not told apart"
    same = _of(report, c.window, c.variant, "w1")
    w1 = next((o.ratio for o in same if o.against == c.against), None)
    return f"{words} (W1 {times(w1)} x){PAPER if c.against_role == 'low_precision' else ''}"


def _early(mark: Saturation) -> str:
    """Which steps the first window is."""
    if mark.reason is not None:
        return f"At step {mark.steps[0]}"
    if mark.chance is not None and (mark.bends is None or mark.chance < mark.bends):
        return f"Before step {mark.chance}, where chance begins to decide"
    if mark.bends is None:
        return f"Up to step {mark.steps[-1]}, with no sign that curves merge"
    return f"Before step {mark.bends}, where curves begin to merge"
