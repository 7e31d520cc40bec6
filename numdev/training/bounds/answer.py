"""The first sentences of `numdev bounds`: what was found in words, and what cannot be said.

The first three are the conclusion: flash over low precision before curves merge, flash beside
chance, and what is left after merging. All others follow, each number once. Distances between
weights are proxies, and called so; W1 stands behind the paired distance, and where the two disagree
a sentence says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from numdev.training.bounds.report import Comparison, Delay, Saturation, Window
from numdev.training.bounds.roles import PAIRED, WHOLE, Found
from numdev.training.bounds.saturation import MERGED, NULLS
from numdev.training.report import VariantRole

FORMATS = ("low_precision", "attention_precision")
DISAGREE = 2.0
"""W1's ratio over that of the paired distance, or the inverse, from which on they disagree."""
BESIDE_ORDER: tuple[VariantRole, ...] = (
    "low_precision", "null_rounding", "attention_precision", "null_ulp", "null_repeat", "other_seed"
)  # fmt: skip
"""What a distance is set beside, in the order of a sentence."""
NAMED: Mapping[Window, str] = {
    "given": "here", "early": "early", "saturated": "merged", "start": "gradient"
}  # fmt: skip
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
NO_NULL = "no null run, so neither where curves merge nor how far chance alone would lead is known"
DIFFERENCES: Mapping[VariantRole, str] = {
    "other_seed": "another seed",
    "null_repeat": "repeating the golden run",
    "null_ulp": "one ulp on every weight",
    "null_rounding": "re-rounding attention at random",
}
NOT_DETERMINISTIC = (
    "NOT DETERMINISTIC: the golden run repeated is not the same bits (a weight is off by "
    "{first}{when}{grown}), so every distance below holds that too."
)
NOT_FINITE = (
    "NOT FINITE: {label} has no finite distance in {where}; what is said of it is of the other "
    "steps and seeds, if there are any."
)
RATIO = (
    "{where}: {flash} changes weights {times} as much as {other} does (mean |difference|; "
    "{metrics}){more}, where the first paper reports 0.2 to 0.5; {over}."
)
"""Flash over low precision; that paper says two to five times less."""
MERGE = (
    "From step {step} on: {flash}on average over seeds all curves have merged to within {widest} x "
    "of the null's, so a distance there says how chaotic training is, not how large flash's "
    "deviation was."
)
NO_MARK = "Merging: where curves merge is not known, since {reason}."
NOT_MERGED = "Merging: by step {step} the curves have not merged with the null's."
DELAY = "Delay: {flash} reaches the same distances, {delays}; a size which merging does not hide."
W1 = "W1 disagrees: {said}. W1 does not know which weight moved, so the paired number counts."
PROXIES = (
    "Proxies: distances between weights say how far runs part, as in the first paper (Golden et "
    "al. 2024), and not whether either trains well."
)


def missing(found: Found, *, curves: bool) -> tuple[str, ...]:
    """What cannot be said, and for want of what. Of checkpoints a null run is just one."""
    there = {v.role for v in found.variants if v.runs}
    some_null = bool(there & set(NULLS))
    asked = [role for role in MISSING if role not in NULLS or (curves and some_null)]
    lacking = [MISSING[role] for role in asked if role not in there]
    return tuple(lacking if some_null else [*lacking, NO_NULL])


def answer(found: Found, seeds: Sequence[int], lacking: Sequence[str]) -> tuple[str, ...]:
    """Sentences, `WHERE: what was found`; the one that would void all others first."""
    return (*_Answer(found, seeds).sentences(), *(f"Not known: {w}." for w in lacking), PROXIES)


class _Answer:
    """The sentences on one set of distances."""

    def __init__(self, found: Found, seeds: Sequence[int]) -> None:
        self.found, self.seeds, self.mark = found, seeds, found.mark
        self.window: Window = "given" if self.mark is None else "early"

    def sentences(self) -> Iterator[str]:
        yield from self.voids()
        flash = [v.label for v in self.found.variants if v.role == "flash"]
        for label in flash:
            yield from self.ratio(label)
        if self.mark is not None:
            yield self.merged(self.mark)
        for label in flash:
            start = self.of(label, "start")
            if start:
                yield f"First gradient: {label} changes the gradient {self.beside(start)}."
            delays = [
                f"those of {self.called(d.against)} {steps_later(d)}"
                for d in self.found.delays
                if (d.group, d.metric, d.variant) == (WHOLE, PAIRED, label)
                and d.steps is not None
                and d.against_role in FORMATS
            ]
            if delays:
                yield DELAY.format(flash=label, delays="; ".join(delays))
        heads = {"low_precision": "Low precision", "attention_precision": "Through attention"}
        for v in (v for v in self.found.variants if v.role in heads):
            here = [c for c in self.of(v.label, self.window) if c.ratio]
            if here:
                what = self.called(v.label)
                yield f"{heads[v.role]}: {what} changes weights {self.beside(here)}."
        yield from self.disagreeing()
        yield from self.nulls()

    def voids(self) -> Iterator[str]:
        """What would void the rest: a golden run that is not deterministic, runs that were lost."""
        if self.found.deterministic is False:
            off = [n for n in self.found.null_runs if n.role == "null_repeat" and n.largest > 0]
            whole = [n for n in off if (n.of, n.group, n.metric) == ("weights", WHOLE, "max_abs")]
            first, last = (whole or off)[0], (whole or off)[-1]
            more = last.step != first.step
            yield NOT_DETERMINISTIC.format(
                first=number(first.largest),
                when="" if first.step is None else f" at step {first.step}",
                grown=f" and {number(last.largest)} at step {last.step}" if more else "",
            )
        for label, seeds in self.found.lost.items():
            since = " from step {} on" if self.found.saturations else ""
            where = [f"seed {seed}{since.format(step)}" for seed, step in sorted(seeds.items())]
            yield NOT_FINITE.format(label=label, where=", ".join(where))

    def ratio(self, flash: str) -> Iterator[str]:
        """Flash beside low precision, then beside chance and attention alone, in the early window
        or in checkpoints; why there is nothing where it is empty."""
        here = [c for c in self.chosen(self.window) if c.variant == flash]
        known = [c for c in here if c.ratio is not None]
        if self.window == "early" and here and not known:
            yield f"Early: nothing can be said, since {here[0].nulls['ratio']}."
        if not known:
            return
        where, intervals = early(self.mark), over(known, self.seeds)
        low = [c for c in known if c.against_role == "low_precision"]
        for c in low:
            twins = {"W1": self.twin(c, "w1", c.window), "max": self.twin(c, "max_abs", c.window)}
            metrics = ", ".join(
                f"{name} {number(o.ratio)} x" if o and o.ratio is not None else f"no {name}"
                for name, o in twins.items()
            )
            first = self.twin(c, PAIRED, "first")
            if c.window == "early" and len(c.steps) > 1 and first and first.ratio is not None:
                metrics += f"; at step {first.steps[0]} alone {number(first.ratio)} x"
            yield RATIO.format(
                where=where, flash=flash, times=times(c), other=self.called(c.against),
                metrics=metrics, more=", more and not less" if at_least(c) > 1 else "",
                over=intervals,
            )  # fmt: skip
        others = [c for c in known if c not in low]
        if others:
            head, end = ("Beside chance", "") if low else (where, f"; {intervals}")
            yield f"{head}: {flash} changes weights {self.beside(others)}{end}."

    def beside(self, comparisons: Sequence[Comparison]) -> str:
        """`0.97 x [..] as much as one null, no larger; 1.2 x [..] as much as attention alone`. An
        interval that reaches far above a null shows as little that a distance is not larger."""
        said = []
        for c in sorted(comparisons, key=lambda c: BESIDE_ORDER.index(c.against_role)):
            chance = ""
            if c.against_role in NULLS and at_least(c) <= 1:
                small = c.high is None or c.high <= MERGED
                chance = ", no larger" if small else ", not told apart"
            said.append(f"{times(c)} as much as {self.called(c.against)}{chance}")
        return "; ".join(said)

    def merged(self, mark: Saturation) -> str:
        if mark.reason is not None:
            return NO_MARK.format(reason=mark.reason)
        if mark.saturated is None:
            return NOT_MERGED.format(step=mark.steps[-1])
        here = [c for c in self.chosen("saturated") if c.ratio]
        of_nulls = [c.ratio for c in here if c.ratio and c.against_role in NULLS]
        flash = [
            f"{c.variant} changes weights {times(c)} as much as {self.called(c.against)}; "
            for c in here
            if c.role == "flash" and c.against_role == "low_precision"
        ]
        widest = number(max((max(ratio, 1 / ratio) for ratio in of_nulls), default=1.0))
        return MERGE.format(step=mark.saturated, flash="".join(flash), widest=widest)

    def disagreeing(self) -> Iterator[str]:
        """Where W1 says another thing than the paired distance of flash, in any window."""
        said = []
        for window, name in NAMED.items():
            for c in (c for c in self.chosen(window) if c.role == "flash" and c.ratio):
                other = self.twin(c, "w1", window)
                ratio = other.ratio if other is not None else None
                if ratio and not 1 / DISAGREE < ratio / (c.ratio or 1.0) < DISAGREE:
                    said.append(
                        f"{c.variant} over {c.against} is {number(ratio)} x in W1 and "
                        f"{number(c.ratio)} x in mean |difference| ({name})"
                    )
        if said:
            yield W1.format(said="; ".join(said))

    def nulls(self) -> Iterator[str]:
        """Determinism, and how far null runs go: at the last early step, or in the checkpoints."""
        said = []
        if self.found.deterministic:
            said.append("the golden run repeated gives the same bits")
        step = self.mark.early[-1] if self.mark is not None and self.mark.early else None
        where = ("weights", WHOLE, PAIRED, step)
        for n in self.found.null_runs if self.mark is None or step is not None else ():
            if (n.of, n.group, n.metric, n.step) == where and n.role != "null_repeat":
                when = "" if step is None else f" by step {step}"
                ends = f" [{number(n.smallest)} to {number(n.largest)}]" if n.runs > 1 else ""
                zero = "" if n.largest else ", the same bits, which is no measure of chance"
                runs = "1 run" if n.runs == 1 else f"mean and range of {n.runs} runs"
                kind = n.label.removeprefix("null: ")
                said.append(f"{kind} moves weights by {number(n.mean)}{ends}{when} ({runs}){zero}")
        if said:
            yield f"Null: {'; '.join(said)}."

    def chosen(self, window: Window, metric: str = PAIRED) -> list[Comparison]:
        where = (WHOLE, window, metric)
        return [c for c in self.found.comparisons if (c.group, c.window, c.metric) == where]

    def of(self, label: str, window: Window) -> list[Comparison]:
        """What is known of one run, but for beside another seed."""
        here = (c for c in self.chosen(window) if c.variant == label and c.ratio is not None)
        return [c for c in here if c.against_role != "other_seed"]

    def twin(self, c: Comparison, metric: str, window: Window) -> Comparison | None:
        """The same two runs, in another metric or window."""
        pair = (c.variant, c.of, c.against)
        same = (o for o in self.chosen(window, metric) if (o.variant, o.of, o.against) == pair)
        return next(same, None)

    def called(self, label: str) -> str:
        """What a run does differently, in words."""
        v = next(v for v in self.found.variants if v.label == label)
        if v.role not in FORMATS:
            return DIFFERENCES.get(v.role, label)
        said = f"the whole network in {v.format}" if v.format else "low precision"
        if v.role == "attention_precision":
            said = f"attention alone in {v.attention_format or 'another format'}"
        kinds = [(o.role, o.format, o.attention_format) for o in self.found.variants]
        alone = kinds.count((v.role, v.format, v.attention_format)) == 1
        return said if alone else f"{said} ({label})"


def early(mark: Saturation | None) -> str:
    """Which steps the first window is."""
    if mark is None:
        return "These checkpoints"
    if mark.reason is not None:
        return f"At step {mark.steps[0]}" if mark.steps else "Early"
    if mark.chance is not None and (mark.bends is None or mark.chance < mark.bends):
        return f"Before step {mark.chance}, where chance begins to decide"
    if mark.bends is None:
        return f"Up to step {mark.steps[-1]}, with no sign that curves merge"
    return f"Before step {mark.bends}, where curves begin to merge"


def at_least(c: Comparison) -> float:
    """The lower end of its interval, or the ratio itself where there is none."""
    return (c.ratio or 0.0) if c.low is None else c.low


def steps_later(d: Delay) -> str:
    """`+12 [+9 to +15] steps later`."""
    known = d.low is not None and d.high is not None
    return f"{d.steps:+.2g}{f' [{d.low:+.2g} to {d.high:+.2g}]' if known else ''} steps later"


def times(c: Comparison) -> str:
    """`0.31 x [0.22 to 0.44]`."""
    ends = "" if c.low is None or c.high is None else f" [{number(c.low)} to {number(c.high)}]"
    return f"{number(c.ratio)} x{ends}"


def over(known: Sequence[Comparison], seeds: Sequence[int]) -> str:
    """What the intervals are; over fewer seeds where some have no number."""
    counts = [len(c.by_seed) for c in known]
    if max(counts) == 1:
        return "one seed, so no interval"
    of = f" of {len(seeds)}" if max(counts) < len(seeds) else ""
    fewer = f", {min(counts)} for some" if min(counts) < max(counts) else ""
    return f"95 % over {max(counts)}{of} seeds{fewer}"


def number(value: float | None) -> str:
    """Two digits, thousands in groups; in powers of ten what is below 0.001 or from 1e9 on."""
    if value is None or value == 0:
        return "unknown" if value is None else "0"
    if 1e-3 <= abs(value) < 99.5:
        return f"{value:#.2g}".rstrip(".")
    return f"{float(f'{value:.2g}'):,.0f}" if 99.5 <= abs(value) < 1e9 else f"{value:.1e}"
