"""Writes the first sentences of a training run's report, of which the first is its
conclusion. Distances are compared with a
re-rounding of one floor in the same seed and at the same steps, as long as these tell
causes apart; never at the last step, where they say how chaotic training is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from numdev.gate.findings import joined_words
from numdev.report.number_text import ratio, si
from numdev.studies.training import figures
from numdev.studies.training.bounds.answer_sentences import not_rounding_sentences
from numdev.studies.training.bounds.report import PAIR, PAIRED
from numdev.studies.training.bounds.rounding_doses import merging_marks
from numdev.studies.training.bounds.study import (
    distance_table,
    distances_by_label,
    output_errors,
    ratios_by_seed,
    run_label,
)
from numdev.studies.training.report import (
    DistanceRow,
    TrainReport,
    TrainRow,
    VariantRecord,
    VariantRole,
)

Number = Callable[[float], str]
LOST = (
    "NOT FINITE: {x.name}: its loss is not finite in {x.lost} of {x.every} seeds, first "
    "at step {x.step} of seed {x.seed}."
)
SAME = "{label}: its weights are the golden run's, bit for bit, at every recorded step."
BESIDE = (
    "{label}: its weights are {mean} times ({least} to {most}, {seeds}) as far from the "
    "golden run's as re-rounding attention at one floor, {when}."
)
ALONE = (
    "{label}: its weights are {mean} ({least} to {most}, {seeds}) of their size off the "
    "golden run's at step {step}; with no re-rounding beside it nothing is said of later "
    "ones."
)
LEADING: tuple[VariantRole, ...] = (
    *("flash", "variant", "attention_precision", "low_precision"),
)
"""Roles of the runs that the conclusion can be on, in this order."""
NAMED = 3  # runs of a sentence that are named
NO_RUN = "No run diverged in {steps} steps"
SPIKES = "{name}: its loss spikes (step {row.step} of seed {row.seed}; {count} recorded)."


def answer_sentences(run: TrainReport) -> Iterator[str]:
    """Yields the sentences of the answer, in this order. First the conclusion, where a
    step after 0 was recorded. Then each run whose loss is not finite after step 0, where
    there are several such runs; then attention that does more than round. Then how far
    the weights of each label, but the re-rounding's, are from the golden run's, where
    that is known: equal bit for bit, as a multiple of the re-rounding at early steps
    (paired by seed, with the range), or at the first step. Last, each variant whose loss
    spikes. No sentence is about stability, since a run is one run."""
    lost = _nonfinite_losses(run)
    more_than_rounds = list(not_rounding_sentences(list(output_errors(run))))
    far = list(_distances(run))
    if any(row.step > 0 for row in run.rows):
        yield _conclusion(run, lost, far, rounds=not more_than_rounds)
    if len(lost) > 1:
        yield from (LOST.format(x=x) for x in lost)
    yield from more_than_rounds
    yield from (distance.sentence for distance in far)
    yield from _spike_sentences(run.variants, run.rows)


class RunDistance(NamedTuple):
    """How far the weights of a label's runs are from the golden run's, in words. A label
    is the common name of the variants of one curve (`run_label`)."""

    label: str
    sentence: str
    short: str  # as a clause of the conclusion


def _distances(run: TrainReport) -> Iterator[RunDistance]:
    """Yields for each label how far its weights are from the golden run's. Labels with
    equal weights come first, both in the order of the variants. For the others, where
    runs are re-rounded at a dose of PAIR[0], it is the ratio to the re-rounding at early
    steps. Where no run is re-rounded so, it is the distance at the first step that has
    one. Nothing for the golden run, nor for a label without such numbers; nor for the
    re-rounding itself, unless its weights are equal."""
    weights = [d for d in run.distances if d.of == "weights" and d.step > 0]
    labels: dict[str, list[str]] = {}
    for v in run.variants:
        if v.role != "golden":
            labels.setdefault(run_label(v), []).append(v.name)
    by_label = {
        label: [d for d in weights if d.variant in names]
        for label, names in labels.items()
    }
    same = [label for label, rows in by_label.items() if _are_equal(rows)]
    for label in same:
        short = f"{label} has the golden run's weights, bit for bit"
        yield RunDistance(label, SAME.format(label=label), short)
    distances = distance_table(run)
    paired = distances[(distances.of == "weights") & (distances.metric == PAIRED)]
    steps = merging_marks(paired).early if len(paired) else ()
    nulls = paired[(paired.role == "null_rounding") & (paired.times == PAIR[0])]
    base = next(iter(nulls.label), None)
    for label, rows in by_label.items():
        if label not in same and label != base:
            if base is not None and steps:
                table = distances_by_label(paired)
                yield from _distance_beside_null(label, base, table, steps)
            elif base is None:
                yield from _first_distance(label, rows)


def _conclusion(
    run: TrainReport,
    lost: Sequence[NonfiniteLoss],
    far: Sequence[RunDistance],
    *,
    rounds: bool,
) -> str:
    """Returns the one sentence that a reader needs. It says which runs diverged (their
    loss is not finite), at which step first, and which did not. Where none diverged it
    says so, and then the first of these that holds: the attention of a run does more than
    round, a loss spikes, or how far the kernel under test is from the golden run (`far`),
    if that is known. `lost`: the runs that diverged, those with most seeds first;
    `rounds`: whether no attention does more than round."""
    if lost:
        return _divergence_sentence(run, lost, rounds=rounds)
    none = NO_RUN.format(steps=run.summary.steps)
    if not rounds:
        return f"{none}, but the attention of a run does more than round at its output."
    spikes = {row.variant: row for row in reversed(run.rows) if row.spike}
    if spikes:
        names, step = joined_words(spikes), min(row.step for row in spikes.values())
        return f"{none}, but the loss of {names} spikes, first at step {step}."
    tested = [v for v in run.variants if v.role in LEADING]
    tested.sort(key=lambda v: LEADING.index(v.role))
    clauses = {distance.label: distance.short for distance in far}
    clause = next((clauses[run_label(v)] for v in tested if run_label(v) in clauses), "")
    return f"{none}{'; ' * bool(clause)}{clause}."


def _divergence_sentence(
    run: TrainReport, lost: Sequence[NonfiniteLoss], *, rounds: bool
) -> str:
    """Returns a sentence on the runs that diverged: all their names, then where the first
    of `lost` did, and which runs stay finite, at most NAMED names of these. `lost`: at
    least one, those with most seeds first. `rounds`: as in `_conclusion`."""
    first, gone = lost[0], [x.name for x in lost]
    where = f"{f'{first.name} ' * (len(lost) > 1)}at step {first.step}"
    if first.every > 1:
        where += f" in {first.lost} of {first.every} seeds"
    if not rounds:
        where += ", with attention that does more than round"
    finite = [v.name for v in run.variants if v.name not in gone]
    shown = finite if len(finite) <= NAMED else finite[: NAMED - 1]
    more = [f"{len(finite) - len(shown)} more"] if len(shown) < len(finite) else []
    stay = f"{joined_words([*shown, *more])} stay{'s' * (len(finite) == 1)} finite"
    others = stay if finite else "none stays finite"
    return f"{joined_words(gone)} diverged: loss not finite, {where}; {others}."


def _are_equal(rows: Sequence[DistanceRow]) -> bool:
    """Whether there is a distance, and in every distance all elements are equal."""
    return bool(rows) and all(row.equal == 1.0 for row in rows)


class NonfiniteLoss(NamedTuple):
    """A run whose loss is not finite in some seed after step 0."""

    name: str
    lost: int  # seeds in which it is not
    every: int  # seeds
    step: int  # the first
    seed: int


def _nonfinite_losses(run: TrainReport) -> list[NonfiniteLoss]:
    """Returns the runs whose loss is not finite in some seed after step 0, each with its
    first such step and the seed of that. Runs with most such seeds come first, equal ones
    in the order of the variants."""
    first: dict[str, dict[int, int]] = {}
    seeds: dict[str, set[int]] = {}
    for row in sorted(run.rows, key=lambda row: row.step):
        seeds.setdefault(row.variant, set()).add(row.seed)
        if row.loss is None and row.step > 0:
            first.setdefault(row.variant, {}).setdefault(row.seed, row.step)
    lost = []
    for name in (v.name for v in run.variants if v.name in first):
        seed, step = min(first[name].items(), key=lambda at: at[1])
        every = len(seeds[name])
        lost.append(NonfiniteLoss(name, len(first[name]), every, step, seed))
    return sorted(lost, key=lambda x: -x.lost)


def _distance_beside_null(
    label: str, base: str, table: pd.DataFrame, steps: Sequence[int]
) -> Iterator[RunDistance]:
    """Yields how far a label's weights are from the golden run's, over how far
    re-rounding moves them, at the early steps `steps` (at least one). Nothing where no
    seed has both, or `table` has no such label. `base`: the label of the re-rounding;
    `table`: distances, with a column for each label and a line for each seed and step."""
    by_seed = ratios_by_seed(table[label], table[base], steps) if label in table else {}
    if by_seed:
        when = " to ".join(dict.fromkeys(map(str, (steps[0], steps[-1]))))
        when = f"at step{'s' * (len(steps) > 1)} {when}"
        words = _mean_and_range(by_seed, ratio)
        short = f"{label} is {words['mean']}× as far from the golden run as re-rounding"
        yield RunDistance(label, BESIDE.format(label=label, when=when, **words), short)


def _first_distance(label: str, rows: Sequence[DistanceRow]) -> Iterator[RunDistance]:
    """Yields how far a label's weights are from the golden run's at the first step that
    has a distance, over all seeds that have one there. Nothing where no row has a
    distance."""
    step = min((d.step for d in rows if d.rel is not None), default=None)
    by_seed = {d.seed: d.rel for d in rows if d.step == step and d.rel is not None}
    if by_seed:
        words = _mean_and_range(by_seed, si)
        short = f"whether {label} does more than chance is open: no run is re-rounded"
        yield RunDistance(label, ALONE.format(label=label, step=step, **words), short)


def _mean_and_range(by_seed: Mapping[int, float], number: Number) -> dict[str, str]:
    """Returns texts by name: `mean` (geometric, arithmetic where a value is 0 or less),
    `least`, `most`, and `seeds` (`3 seeds`), of a value by seed. `number` writes the
    first three. `by_seed`: at least one."""
    values = list(by_seed.values())
    seeds = f"{len(values)} seed{'s' * (len(values) > 1)}"
    mean, least, most = figures.geometric_or_plain_mean(values), min(values), max(values)
    return {
        "mean": number(mean),
        "least": number(least),
        "most": number(most),
        "seeds": seeds,
    }


def _spike_sentences(
    variants: Sequence[VariantRecord], rows: Sequence[TrainRow]
) -> Iterator[str]:
    """Yields a sentence on each variant whose loss spikes: its first spike, and how many
    are recorded in all seeds."""
    for name in (v.name for v in variants):
        spikes = [row for row in rows if row.variant == name and row.spike]
        if spikes:
            first = min(spikes, key=lambda row: row.step)
            yield SPIKES.format(name=name, row=first, count=len(spikes))
