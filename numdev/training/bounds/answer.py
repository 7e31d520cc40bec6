"""The first sentences of `numdev bounds`: flash beside low precision, another seed and chance, the
first gradient, delays. What voids them all comes first, what cannot be said last. Distances between
weights are proxies, and called so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from numdev.report.numbers import si, times
from numdev.training.bounds.comparisons import PAIRED, WHOLE
from numdev.training.bounds.report import BoundsReport, BoundsVariant, Comparison, Saturation
from numdev.training.bounds.saturation import MERGED, NULLS
from numdev.training.report import VariantRole

DISAGREE = 2.0
"""W1's ratio over that of the paired distance, or the inverse, from which on they disagree."""
LEADS: Mapping[VariantRole, str] = {
    "flash": "{early}",
    "low_precision": "Low precision",
    "attention_precision": "Through attention",
}
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
PAPER = " (W1 {w1} x, max {max} x; the first paper reports 0.2 to 0.5 for low precision)"
GRADIENT = "First gradient: {label} changes the gradient {beside}."
MERGE = (
    "From step {step} on: {flash}curves have merged, so a distance there says how chaotic training "
    "is, not how large flash's deviation was."
)
DELAY = (
    "Delay: {d.variant} reaches the distances of {d.against} {d.steps:+.2g} steps later, a size "
    "which merging does not hide."
)
W1 = (
    "W1 disagrees: {c.variant} over {c.against} is {w1} x in W1 and {paired} x in mean "
    "|difference| ({c.window}). W1 does not know which weight moved, so the paired number counts."
)
REPEATED = "Null: the golden run repeated gives the same bits."
PROXIES = (
    "Proxies: distances between weights say how far runs part, as in the first paper (Golden et "
    "al. 2024), and not whether either trains well."
)


def missing(variants: Sequence[BoundsVariant], *, curves: bool) -> tuple[str, ...]:
    """What cannot be said, and for want of what. Of checkpoints a null run is just one."""
    roles = {v.role for v in variants if v.runs}
    some_null = bool(roles & set(NULLS))
    asked = [role for role in MISSING if role not in NULLS or (curves and some_null)]
    lacking = [MISSING[role] for role in asked if role not in roles]
    return tuple(lacking if some_null else [*lacking, NO_NULL])


def answer(report: BoundsReport, lost: Mapping[str, Mapping[int, int]]) -> Iterator[str]:
    """Sentences, `WHERE: what was found`. `lost`: of a kind of run, the seeds in which it was not
    finite, and from which step on."""
    mark = next((s for s in report.saturations if s.group == WHOLE), None)
    window = "given" if mark is None else "early"
    if report.summary.deterministic is False:
        off = max(n.largest for n in report.null_runs if n.role == "null_repeat")
        yield NOT_DETERMINISTIC.format(off=si(off))
    for label, seeds in lost.items():
        where = [f"seed {seed} from step {step} on" for seed, step in sorted(seeds.items())]
        yield NOT_FINITE.format(label=label, where=", ".join(where))
    for role, words in LEADS.items():
        for v in (v for v in report.summary.variants if v.role == role):
            lead, here = words.format(early=_early(mark)), _of(report, window, v.label)
            if beside := _beside(report, here):
                yield RATIO.format(lead=lead, label=v.label, beside=beside)
            elif here and role == "flash":
                yield f"Early: nothing can be said, since {here[0].nulls['ratio']}."
    if mark is not None:
        yield _merged(report, mark)
    for v in (v for v in report.summary.variants if v.role == "flash"):
        if beside := _beside(report, _of(report, "start", v.label)):
            yield GRADIENT.format(label=v.label, beside=beside)
    for d in report.delays:
        place, roles = (d.group, d.metric), (d.role, d.against_role)
        known = place == (WHOLE, PAIRED) and d.steps is not None
        if known and roles == ("flash", "low_precision"):
            yield DELAY.format(d=d)
    for c in (c for window in ("given", "early", "start") for c in _of(report, window)):
        w1 = _twin(report, c, "w1")
        if c.role == "flash" and c.ratio and w1 and not 0.5 < w1 / c.ratio < DISAGREE:
            yield W1.format(c=c, w1=times(w1), paired=times(c.ratio))
    if report.summary.deterministic:
        yield REPEATED
    yield from (f"Not known: {words}." for words in report.summary.missing)
    yield PROXIES


def _of(
    report: BoundsReport, window: str, label: str | None = None, metric: str = PAIRED
) -> list[Comparison]:
    """The comparisons of all weights in a window."""
    where = (WHOLE, window, metric)
    found = [c for c in report.comparisons if (c.group, c.window, c.metric) == where]
    chosen = [c for c in found if label in (None, c.variant)]
    return sorted(chosen, key=lambda c: ORDER.index(c.against_role))


def _twin(report: BoundsReport, c: Comparison, metric: str) -> float | None:
    """The ratio of the same two runs in another metric."""
    same = _of(report, c.window, c.variant, metric)
    return next((o.ratio for o in same if o.against == c.against), None)


def _beside(report: BoundsReport, comparisons: Sequence[Comparison]) -> str:
    """`0.97 x [0.93 to 1.00] as much as null: re-rounded, no larger; ...`. An interval that reaches
    far above a null shows as little that a distance is not larger."""
    said = []
    for c in (c for c in comparisons if c.ratio is not None):
        words = f"{_times(c)} as much as {c.against}"
        if c.against_role in NULLS and ((c.ratio or 0.0) if c.low is None else c.low) <= 1:
            small = c.high is None or c.high <= MERGED
            words += ", no larger" if small else ", not told apart"
        if (c.role, c.against_role, c.of) == ("flash", "low_precision", "weights"):
            w1, largest = (times(_twin(report, c, metric)) for metric in ("w1", "max_abs"))
            words += PAPER.format(w1=w1, max=largest)
        said.append(words)
    return "; ".join(said)


def _times(c: Comparison) -> str:
    ends = "" if c.low is None or c.high is None else f" [{times(c.low)} to {times(c.high)}]"
    return f"{times(c.ratio)} x{ends}"


def _early(mark: Saturation | None) -> str:
    """Which steps the first window is."""
    if mark is None:
        return "These checkpoints"
    if mark.reason is not None:
        return f"At step {mark.steps[0]}"
    if mark.chance is not None and (mark.bends is None or mark.chance < mark.bends):
        return f"Before step {mark.chance}, where chance begins to decide"
    if mark.bends is None:
        return f"Up to step {mark.steps[-1]}, with no sign that curves merge"
    return f"Before step {mark.bends}, where curves begin to merge"


def _merged(report: BoundsReport, mark: Saturation) -> str:
    if mark.reason is not None:
        return f"Merging: where curves merge is not known, since {mark.reason}."
    if mark.saturated is None:
        return f"Merging: by step {mark.steps[-1]} the curves have not merged with the null's."
    flash = "".join(
        f"{c.variant} changes weights {_times(c)} as much as {c.against}; "
        for c in _of(report, "saturated")
        if (c.role, c.against_role) == ("flash", "low_precision") and c.ratio
    )
    return MERGE.format(step=mark.saturated, flash=flash)
