"""Writes the first sentences of a training run's report. Distances are compared with a
re-rounding of one floor in the same seed and at the same steps, as long as these tell
causes apart; never at the last step, where they say how chaotic training is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import pandas as pd

from numdev.report.number_text import si, times
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
)

Number = Callable[[float], str]
LOST = (
    "NOT FINITE: {name}: its loss is not finite in {n} of {all} seeds, first at step "
    "{step} of seed {seed}."
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
SPIKES = "{name}: its loss spikes (step {row.step} of seed {row.seed}; {count} recorded)."


def answer_sentences(run: TrainReport) -> Iterator[str]:
    """Yields the sentences of the answer: runs whose loss is not finite, and attention
    that does more than round; runs with the golden run's weights; early ratios, paired by
    seed, with their range; spikes. No sentence is about stability, since a run is one
    run."""
    yield from _nonfinite_loss_sentences(run.variants, run.rows)
    yield from not_rounding_sentences(list(output_errors(run)))
    weights = [d for d in run.distances if d.of == "weights" and d.step > 0]
    labels: dict[str, list[str]] = {}
    for v in run.variants:
        if v.role != "golden":
            labels.setdefault(run_label(v), []).append(v.name)
    by_label = {
        label: [d for d in weights if d.variant in names]
        for label, names in labels.items()
    }
    same = {label for label, rows in by_label.items() if _are_equal(rows)}
    for label in same:
        yield SAME.format(label=label)
    distances = distance_table(run)
    paired = distances[(distances.of == "weights") & (distances.metric == PAIRED)]
    steps = merging_marks(paired).early if len(paired) else ()
    nulls = paired[(paired.role == "null_rounding") & (paired.times == PAIR[0])]
    base = next(iter(nulls.label), None)
    for label, rows in by_label.items():
        if label not in same and label != base:
            if base is not None and steps:
                yield from _distance_sentence(
                    label, base, distances_by_label(paired), steps
                )
            elif base is None:
                yield from _first_distance_sentence(label, rows)
    yield from _spike_sentences(run.variants, run.rows)


def _are_equal(rows: Sequence[DistanceRow]) -> bool:
    """Whether there are distances, and every element is equal in all of them."""
    return bool(rows) and all(row.equal == 1.0 for row in rows)


def _nonfinite_loss_sentences(
    variants: Sequence[VariantRecord], rows: Sequence[TrainRow]
) -> Iterator[str]:
    """Yields a sentence on each variant whose loss is not finite in some seed after step
    0, those with most seeds first."""
    lost: dict[str, dict[int, int]] = {}
    seeds: dict[str, set[int]] = {}
    for row in sorted(rows, key=lambda row: row.step):
        seeds.setdefault(row.variant, set()).add(row.seed)
        if row.loss is None and row.step > 0:
            lost.setdefault(row.variant, {}).setdefault(row.seed, row.step)
    names = [v.name for v in variants if v.name in lost]
    for name in sorted(names, key=lambda name: -len(lost[name])):
        seed, step = min(lost[name].items(), key=lambda at: at[1])
        every = len(seeds[name])
        yield LOST.format(name=name, n=len(lost[name]), all=every, step=step, seed=seed)


def _distance_sentence(
    label: str, base: str, table: pd.DataFrame, steps: Sequence[int]
) -> Iterator[str]:
    """Yields a sentence on how far a label's weights are from the golden run's, over how
    far re-rounding moves them, at these early steps; nothing where no seed has both.
    `base`: the label of the re-rounding; `table`: distances, with a column for each label
    and a line for each seed and step."""
    by_seed = ratios_by_seed(table[label], table[base], steps) if label in table else {}
    if by_seed:
        when = " to ".join(dict.fromkeys(map(str, (steps[0], steps[-1]))))
        when = f"at step{'s' * (len(steps) > 1)} {when}"
        yield BESIDE.format(label=label, when=when, **_mean_and_range(by_seed, times))


def _first_distance_sentence(label: str, rows: Sequence[DistanceRow]) -> Iterator[str]:
    """Yields a sentence on how far a label's weights are at the first step that has a
    distance; nothing without one."""
    step = min((d.step for d in rows if d.rel is not None), default=None)
    by_seed = {d.seed: d.rel for d in rows if d.step == step and d.rel is not None}
    if by_seed:
        yield ALONE.format(label=label, step=step, **_mean_and_range(by_seed, si))


def _mean_and_range(by_seed: Mapping[int, float], number: Number) -> dict[str, str]:
    """Returns `mean`, `least`, `most` and `seeds`, each in words, of a value by seed;
    numbers are written by `number`. `by_seed`: at least one."""
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
    """Yields a sentence on each variant whose loss spikes, with its first spike."""
    for name in (v.name for v in variants):
        spikes = [row for row in rows if row.variant == name and row.spike]
        if spikes:
            first = min(spikes, key=lambda row: row.step)
            yield SPIKES.format(name=name, row=first, count=len(spikes))
