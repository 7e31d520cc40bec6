"""Writes the first sentences of a bounds report: what voids the rest, the first paper's
question, doses, and chance. Each is made from the numbers it reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from numdev.report.number_text import percent, ratio, si
from numdev.studies.training.bounds.report import (
    FEWEST_SEEDS,
    PAIRED,
    PAPER,
    Answer,
    AtOutput,
    Comparison,
    DoseReading,
)
from numdev.studies.training.bounds.rounding_doses import strength_in_words
from numdev.studies.training.report import TrainReport, VariantRole

NOT_DETERMINISTIC = (
    "NOT REPRODUCIBLE from step {first:.0f} on: the golden run's weights differ by up to "
    "{off} when it is repeated. Only earlier steps are judged."
)
NOT_FINITE = (
    "NOT FINITE: {label} has no finite distance in {where}, and counts in no ratio there."
)
NOT_ROUNDING = "NOT ROUNDING ALONE: at its output {label} {what}, before any update."
UNSURE = "Not reproducible, so not judged beside"
SCALED = 1 / 512  # the slope of an error on the truth: sound kernels have 3.4e-4 and less
BIASED = 0.1  # ulp, beyond the golden run's own
LARGE = 4.0  # times the golden run's error
# Times the golden run's where scores are large: eager errs 2 to 4 floors, fused 1.1
SHARPER = 2.0
IN = {"w1": "in pooled W1", PAIRED: "in the mean", "max_abs": "in the largest"}
# Runs without flash whose distance is compared with that of the same low precision
CONTROLS: Mapping[VariantRole, str] = {
    "null_ulp": "an ulp on every weight",
    "attention_precision": "attention alone in {format}",
}
# Runs that flash is compared with in the answer: their name, and how they differ
WORDS: Mapping[VariantRole, tuple[str, str]] = {
    "null_rounding": ("random rounding", "re-rounding attention's output at random"),
    "null_ulp": ("chance", "one ulp in every weight"),
    "other_seed": ("another seed", "another initialisation"),
}


# --- what voids the rest --------------------------------------------------------------


def warning_sentences(
    run: TrainReport, off: float, step: float, outputs: Sequence[AtOutput]
) -> Iterator[str]:
    """Yields sentences on what makes other sentences void. First, that the golden run is
    not reproducible, where a repeat of it is `off` from `step` on. Then one on each
    variant with a distance of weights that is not finite, with the seeds and the first
    such step of each. Last, attention that does more than round. `off`: the largest
    difference between the golden run and its repeat, 0 for none, NaN where no repeat was
    run."""
    if off > 0:
        yield NOT_DETERMINISTIC.format(off=si(off), first=step)
    seeds: dict[str, dict[int, int]] = {}
    for d in sorted(run.distances, key=lambda d: d.step):
        if d.of == "weights" and d.elements and d.mean_abs is None:
            seeds.setdefault(d.variant, {}).setdefault(d.seed, d.step)
    for label, first in seeds.items():
        where = [
            f"seed {seed} from step {step} on" for seed, step in sorted(first.items())
        ]
        yield NOT_FINITE.format(label=label, where=", ".join(where))
    yield from not_rounding_sentences(outputs)


def not_rounding_sentences(outputs: Sequence[AtOutput]) -> Iterator[str]:
    """Yields a sentence for each way in which the attention of a variant in the role
    `flash` or `variant` does more than round; other roles are passed over."""
    golden = next((o for o in outputs if o.role == "golden"), None)
    for output in outputs:
        if output.role in ("flash", "variant"):
            for what in _not_rounding_clauses(output, golden):
                yield NOT_ROUNDING.format(label=output.variant, what=what)


def _not_rounding_clauses(output: AtOutput, golden: AtOutput | None) -> Iterator[str]:
    """Yields what an attention does more than round, each as a clause: elements that are
    not finite, a scale, a bias, a large error, or a large error where scores are large.
    Nothing for one that only rounds; a number that is None gives no clause. `golden`: the
    errors of the golden run, with which it is compared; None where these are unknown."""
    if output.nonfinite:
        yield f"has {output.nonfinite:,} elements that are not finite"
    if output.slope is not None and abs(output.slope) >= SCALED:
        share = percent(output.slope, sign=True)
        yield f"is off by a scale of {share} (sound kernels: below {percent(SCALED)})"
    usual = (golden and golden.bias) or 0.0
    if output.bias is not None and abs(output.bias) >= BIASED + abs(usual):
        yield (
            f"is biased by {output.bias:+.2f} ulp along its sign (the golden run's: "
            f"{usual:+.2f})"
        )
    least = (golden and golden.floors) or 1.0
    if output.floors is not None and output.floors >= LARGE * least:
        yield f"errs {ratio(output.floors)} floors (the golden run's: {ratio(least)})"
    sharp = (golden and golden.sharp) or 1.0
    if output.sharp is not None and output.sharp >= SHARPER * sharp:
        yield (
            f"errs {ratio(output.sharp)} floors where q is scaled until scores reach 8 "
            f"(the golden run's: {ratio(sharp)}), as with a wrong scale"
        )


# --- the paper's question -------------------------------------------------------------


def paper_answers(compared: Sequence[Comparison]) -> Iterator[Answer]:
    """Yields the answer to the paper's question for each pair of a flash run and one of
    low precision, from the interval of their ratio in W1 over early steps: `reproduced`
    where it lies within PAPER, `not reproduced` where it lies outside, else
    `undecided`."""
    for c in compared:
        question = (c.role, c.against_role, c.metric, c.window)
        if question == ("flash", "low_precision", "w1", "early"):
            yield _paper_answer(c)


def _paper_answer(c: Comparison) -> Answer:
    """Returns the answer that one comparison gives. It is `reproduced` where the interval
    lies within PAPER, `not reproduced` where it lies outside. It is `undecided`, with the
    reason, where there is no ratio, no interval, or one that reaches across an end of
    PAPER."""
    low, high = PAPER
    pair = {"variant": c.variant, "against": c.against}
    if c.ratio is None:
        return Answer(**pair, verdict="undecided", why=c.nulls["ratio"])
    if c.low is None or c.high is None:
        count = f"{len(c.by_seed)} seed{'s' * (len(c.by_seed) != 1)}"
        why = f"{count}, and a verdict needs {FEWEST_SEEDS}"
        return Answer(**pair, verdict="undecided", why=why)
    if low <= c.low and c.high <= high:
        return Answer(**pair, verdict="reproduced")
    if c.high < low or c.low > high:
        return Answer(**pair, verdict="not reproduced")
    why = "its interval reaches across an end"
    return Answer(**pair, verdict="undecided", why=why)


def paper_sentences(
    answers: Sequence[Answer],
    compared: Sequence[Comparison],
    attention: Mapping[str, str],
    off: float,
) -> Iterator[str]:
    """Yields for each answer its verdict with the ratios in all three metrics, or why
    there is no ratio. A sentence on the controls that explain it follows a ratio, if
    there are any. `compared`: has the early ratios of every answer. `attention`: the
    format of a run's attention, by its label. `off`: the first step at which a repeat of
    the golden run differs (NaN: at none). An answer whose steps reach it is called
    undecided."""
    early = {(c.variant, c.against, c.metric): c for c in compared if c.window == "early"}
    low, high = PAPER
    for answer in answers:
        ratios = [early[answer.variant, answer.against, metric] for metric in IN]
        first = ratios[0]
        verdict = answer.verdict.capitalize()
        if any(step >= off for step in first.steps):
            verdict = "Not reproducible, so undecided"
        if first.ratio is None:
            yield (
                f"{verdict}: the paper's {low:g} to {high:g} (pooled W1): nothing can be "
                f"said of {answer.variant} over {answer.against}, since {answer.why}."
            )
            continue
        why = f" ({answer.why})" if answer.why else ""
        listed = ", ".join(f"{ratio_in_words(c)} {IN[c.metric]}" for c in ratios)
        yield (
            f"{verdict} in this run{why}: the paper's {low:g} to {high:g} (pooled W1). "
            f"{answer.variant} over {answer.against} is {listed}, "
            f"{steps_in_words(first.steps)}."
        )
        controls = []
        for c in compared:
            control = CONTROLS.get(c.role or "variant")
            place = (c.against, c.metric, c.window)
            if (
                place == (answer.against, PAIRED, "early")
                and control
                and c.ratio is not None
            ):
                name = control.format(format=attention[c.variant])
                controls.append(f"{name} {ratio(c.ratio)}")
        if controls:
            mean = early[answer.variant, answer.against, PAIRED]
            yield (
                f"Controls, of the distance of {answer.against} in the mean: "
                f"{', '.join(controls)}; {answer.variant} {ratio(mean.ratio)}."
            )


def ratio_in_words(c: Comparison) -> str:
    """Returns a ratio with its interval, if it has one: `0.75 [0.73, 0.78]`, `0.75`; a
    dash where there is no ratio."""
    interval = "" if c.low is None else f" [{ratio(c.low)}, {ratio(c.high)}]"
    return f"{ratio(c.ratio)}{interval}"


def steps_in_words(steps: Sequence[int]) -> str:
    """Returns the first and the last step in words, whatever lies between: `at step 1`,
    `at steps 1 to 18`. `steps`: ascending, at least one."""
    when = " to ".join(dict.fromkeys(str(step) for step in (*steps[:1], *steps[-1:])))
    return f"at step{'s' * (len(steps) > 1)} {when}"


# --- doses ----------------------------------------------------------------------------


def dose_sentences(
    doses: Sequence[DoseReading], outputs: Sequence[AtOutput]
) -> Iterator[str]:
    """Yields a sentence on the early dose of each flash run, or on why it is undecided.
    The error of its attention's output follows, if that was measured. Other roles and
    windows are passed over."""
    by_variant = {output.variant: output for output in outputs}
    for dose in doses:
        if (dose.role, dose.window) != ("flash", "early"):
            continue
        cause = ""
        output = by_variant.get(dose.variant)
        if output is not None and output.from_golden is not None:
            cause = (
                f" At its output it lies {ratio(output.from_golden)} floors from the "
                f"golden run's, and errs {ratio(output.floors)}."
            )
        if dose.why is not None:
            yield f"Dose undecided: of {dose.variant}, since {dose.why}.{cause}"
        else:
            yield (
                f"Dose: {dose.variant} moves the weights as far as re-rounding "
                f"attention's output at {dose_in_words(dose)}, "
                f"{steps_in_words(dose.steps)}.{cause}"
            )


def dose_in_words(dose: DoseReading) -> str:
    """Returns a dose in words: `1.1 floors (0.6 to 2.3)`, with its 95 % interval over
    seeds if it has one. It is `below 1/16 floors` or `above 64 floors`, with the dose as
    the number, where more than half of the readings are beyond that end of the ladder;
    `–` for a dose that is None."""
    if dose.dose is None:
        return "–"
    for word, share in (("below", dose.below), ("above", dose.above)):
        if share > 0.5:
            return f"{word} {strength_in_words(dose.dose)} floors"
    ends = "" if dose.low is None else f" ({dose.low:.2g} to {dose.high:.2g})"
    return f"{dose.dose:.2g} floors{ends}"


# --- chance ---------------------------------------------------------------------------


def chance_comparisons(compared: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Returns early comparisons of each flash run by the mean |difference|, those with a
    ratio first. One is with a null (runs re-rounded at random, or moved by an ulp), one
    with another seed, where `compared` has such. Of several of one kind it is the first
    that has a ratio; without one, the first."""
    chosen: dict[tuple[str, str], Comparison] = {}
    for c in sorted(compared, key=lambda c: c.ratio is None):
        question = (c.role, c.metric, c.window)
        if question == ("flash", PAIRED, "early") and c.against_role in WORDS:
            chosen.setdefault((c.variant, c.against_role.partition("_")[0]), c)
    return tuple(chosen.values())


def chance_sentences(compared: Sequence[Comparison], off: float) -> Iterator[str]:
    """Yields a sentence on how far each flash run moves the weights over early steps,
    compared with chance and with another seed; or on why nothing can be said. Only an
    interval gives a verdict. `off`: the first step at which a repeat of the golden run
    differs (NaN: at none). There is no verdict where the steps reach it."""
    for c in chance_comparisons(compared):
        name, what = WORDS[c.against_role]
        over = f"{len(c.by_seed)} seed{'s' * (len(c.by_seed) != 1)}"
        over += f", and a verdict needs {FEWEST_SEEDS}" * (len(c.by_seed) < FEWEST_SEEDS)
        if c.low is not None:
            over = f"95 % interval over {over} {ratio(c.low)} to {ratio(c.high)}"
        distance = (
            f"{c.variant} moves the weights {ratio(c.ratio)} times as far as {what}"
        )
        distance += f", {steps_in_words(c.steps)}" if c.steps else ""
        distance += f" ({c.against}; {over})"
        if c.ratio is None:
            distance = f"nothing can be said of {c.variant}, since {c.nulls['ratio']}"
        unsure = any(step >= off for step in c.steps) and c.low is not None
        yield f"{UNSURE if unsure else c.standing} {name}: {distance}."
