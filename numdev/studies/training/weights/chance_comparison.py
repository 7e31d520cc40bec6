"""Compares a run's distance from the first run, by layer and kind, with the distance that
chance makes in the same tensors, seed and step, and says where it stands out: where it is
far beyond chance's.

Chance is null runs of at most one floor: attention's output re-rounded, or every weight
moved by an ulp. The rule is about the farthest of them, in every seed: it needs two in
each of three seeds. Judged are places, the tensors of one kind in one layer; whole layers
and kinds are shown."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

import pandas as pd

from numdev.grouping import grouped
from numdev.report.number_text import ratio, si
from numdev.sources.tensor_files import some
from numdev.studies.training.bounds.report import FEWEST_SEEDS, Saturation
from numdev.studies.training.bounds.rounding_doses import merging_marks
from numdev.studies.training.report import VariantRole
from numdev.studies.training.weights.report import (
    ALL,
    ChanceComparison,
    Layer,
    RunRecord,
    WeightsCell,
)

Metric = Literal["mean_abs", "mean_w1", "max_abs"]
# A distance stands out where it is beyond this many times that of the farthest null, in
# every seed. Of nulls re-rounded at one floor, each compared with the others, 0 of 168
# sets of three seeds stood out anywhere; of single seeds 20 of 24 did (benchmarks/log,
# 2026-11-27).
LIMITS: Mapping[Metric, float] = {"mean_abs": 1.5, "mean_w1": 1.5, "max_abs": 3.0}
NAMES: Mapping[Metric, str] = {
    "mean_abs": "mean |difference|",
    "mean_w1": "mean W1 (of tensors)",
    "max_abs": "largest |difference|",
}
IN: Mapping[Metric, str] = {
    "mean_abs": "in the mean",
    "mean_w1": "in mean W1",
    "max_abs": "in the largest",
}
FEWEST_NULLS = 2
SHOWN_BESIDE = ("flash", "attention_precision", "low_precision", "variant", "other_seed")
JUDGED = SHOWN_BESIDE[:-1]
ANOTHER = "another initialisation, which is no small difference"
WHOLE = "a whole, whose parts are judged"
FEW_SEEDS = "{n} seed{s}, and the rule needs {least}"
FEW = (
    "{n} null run{s} of at most one floor {move} it in a seed, and the rule needs {least}"
)
SAME_THERE = "no seed has a distance above 0"


def is_chance(run: RunRecord) -> bool:
    """Whether a run is a null: re-rounded at one floor or less, moved by an ulp, or
    declared a null by the user."""
    small = run.role == "null_rounding" and (run.times or 1.0) <= 1.0
    return small or run.null or run.role == "null_ulp"


def early_marks(runs: Sequence[RunRecord], cells: Iterable[WeightsCell]) -> Saturation:
    """Returns where curves bend, merge and are decided by chance, and which steps are
    early, by the rule of `numdev bounds`: `merging_marks`, from the mean |difference| of
    all weights together."""
    by_name = {run.name: run for run in runs}
    lines = []
    for c in cells:
        if c.layer == ALL and c.kind == ALL and c.mean_abs is not None:
            run = by_name[c.of]
            lines.append((run.role, run.times or 1.0, c.seed, c.step, c.mean_abs))
    columns = ["role", "times", "seed", "step", "value"]
    return merging_marks(pd.DataFrame(lines, columns=columns))


def chance_comparisons(
    runs: Sequence[RunRecord], cells: Sequence[WeightsCell]
) -> Iterator[ChanceComparison]:
    """Yields the comparison with chance of each run in a role of SHOWN_BESIDE that the
    user declares no null, in every layer and kind, at every step and in every metric,
    where the run has a cell. `cells`: the distances of all runs."""
    chance = {run.name for run in runs if is_chance(run)}
    at_one_floor = {
        run.name
        for run in runs
        if run.role == "null_rounding" and (run.times or 1.0) == 1.0
    }
    places = grouped(cells, lambda c: (c.step, c.layer, c.kind))
    for run in (run for run in runs if run.role in SHOWN_BESIDE and not run.null):
        for (step, layer, kind), at_place in places.items():
            of_run = {c.seed: c for c in at_place if c.of == run.name}
            nulls = grouped((c for c in at_place if c.of in chance), lambda c: c.seed)
            for metric in LIMITS if of_run else ():
                yield _chance_comparison(
                    of_run,
                    nulls,
                    at_one_floor or chance,
                    metric,
                    variant=run.name,
                    role=run.role,
                    step=step,
                    layer=layer,
                    kind=kind,
                )


def _chance_comparison(
    cells: Mapping[int, WeightsCell],
    nulls: Mapping[int, Sequence[WeightsCell]],
    usual: Collection[str],
    metric: Metric,
    *,
    variant: str,
    role: VariantRole,
    step: int,
    layer: Layer,
    kind: str,
) -> ChanceComparison:
    """Returns the comparison of a run's distance with chance's at one place, from its
    cells by seed and the cells of the nulls by seed. `ratio` is over the geometric mean
    of the nulls named in `usual`. `margin` is over the farthest of all nulls, in the seed
    where this is least; None where in some seed no null moves the place. A distance of 0
    has no ratio, and is never beyond chance. `cells`: at least one."""
    values = {seed: x for seed, c in cells.items() if (x := getattr(c, metric))}
    distances: dict[int, list[float]] = {}
    null_means: dict[int, float] = {}
    for seed in cells:
        moved = [(c.of, x) for c in nulls.get(seed, ()) if (x := getattr(c, metric))]
        distances[seed] = [x for _, x in moved]
        base = [x for name, x in moved if name in usual]
        if base and seed in values:
            null_means[seed] = statistics.geometric_mean(base)
    ratios = [values[seed] / mean for seed, mean in null_means.items()]
    fewest = min(map(len, distances.values()))
    margin = None
    if fewest:
        margin = min(values.get(seed, 0.0) / max(x) for seed, x in distances.items())
    why = _not_judged_reason(
        role, fewest, len(cells), is_whole=ALL in (layer, kind), moves=bool(values)
    )
    judged = why is None and margin is not None
    return ChanceComparison(
        variant=variant,
        role=role,
        step=step,
        layer=layer,
        kind=kind,
        metric=metric,
        value=_geometric_mean(values.values()),
        null=_geometric_mean(null_means.values()),
        ratio=_geometric_mean(ratios),
        least=min(ratios, default=None),
        most=max(ratios, default=None),
        margin=margin,
        stands_out=(margin or 0.0) > LIMITS[metric] if judged else None,
        why=why,
    )


def _geometric_mean(values: Collection[float]) -> float | None:
    """Returns the geometric mean; None without a value. Values are above 0."""
    return statistics.geometric_mean(values) if values else None


def _not_judged_reason(
    role: VariantRole, nulls: int, seeds: int, *, is_whole: bool, moves: bool
) -> str | None:
    """Returns why a run is not judged at a place; None where it is. `nulls`: of the null
    runs that move the place, the number in the seed that has fewest; `seeds`: how many
    seeds the run has; `is_whole`: whether the place is all layers or all kinds; `moves`:
    whether the run moves the place in any seed."""
    if role not in JUDGED:
        return ANOTHER
    if is_whole:
        return WHOLE
    if nulls < FEWEST_NULLS:
        few = {"s": "", "move": "moves"} if nulls == 1 else {"s": "s", "move": "move"}
        return FEW.format(n=nulls, **few, least=FEWEST_NULLS) if moves else SAME_THERE
    if seeds < FEWEST_SEEDS:
        return FEW_SEEDS.format(n=seeds, s="s" * (seeds > 1), least=FEWEST_SEEDS)
    return None


# --- words ----------------------------------------------------------------------------

STANDS = (
    "{name} stands out in {where}: at step {step} it is at least {margin} times as far "
    "from {first} as the farthest null there, {metric}, in every seed; {n} of {all} "
    "places (the tensors of one kind in one layer) stand out, at {steps}."
)
NONE_STANDS = (
    "{name} stands out nowhere: in none of {all} places (the tensors of one kind in one "
    "layer) is it farther from {first} than chance by the rule, at {steps}."
)
NOT_JUDGED = "{name}: where it stands out is not judged: {why}."
UNMOVED = (
    "{name} moves {where} by at most {most}, where fewer than {least} nulls do: not "
    "judged there."
)
BY_CHANCE = (
    "{name} beside chance, {when}: {ranges} times as far, over places (geometric means "
    "over the seeds and steps at which both moved)."
)
OVER = "{name} over {other}, {when}: {ranges}, over places, where both moved ({seeds})."
SAME = (
    "{name} has {first}'s weights at every step: every element of the tensors that are "
    "not 0 in both{zeros}."
)


def answer_sentences(
    runs: Sequence[RunRecord],
    cells: Sequence[WeightsCell],
    compared: Sequence[ChanceComparison],
    early: Sequence[int],
) -> Iterator[str]:
    """Yields sentences on each run in a role of JUDGED, flash first: where it is beyond
    chance, then which places too few nulls move, then how far it is over early steps,
    compared with chance. Then the ratio of each flash run to each run of low precision,
    over early steps. Last, runs that equal the first. `runs`: all runs; the others are
    compared with the first. `compared`: the comparisons of `cells` with chance; `early`:
    the early steps."""
    first = runs[0].name
    order = sorted(runs[1:], key=lambda run: _role_order(run))
    same = [run for run in order if _equals_first_run(run, cells)]
    judged = [run for run in order if run.role in JUDGED and run not in same]
    for run in judged:
        yield _standing_out_sentence(
            run, first, [s for s in compared if s.variant == run.name]
        )
    for run in judged:
        yield from _too_few_nulls_sentence(run, compared)
    for run in judged:
        yield from _chance_ratio_sentence(run, compared, early)
    for run in (run for run in judged if run.role == "flash"):
        for other in (other for other in judged if other.role == "low_precision"):
            yield from _run_ratio_sentence(run, other, cells, early)
    for run in same:
        zeros = max(c.zeros for c in cells if c.of == run.name)
        words = f" ({zeros} are)" if zeros else ""
        yield SAME.format(name=run.name, first=first, zeros=words)


def _role_order(run: RunRecord) -> int:
    """Returns a sort key: the role's index in SHOWN_BESIDE, where flash is first; their
    number for any other role."""
    return SHOWN_BESIDE.index(run.role) if run.role in SHOWN_BESIDE else len(SHOWN_BESIDE)


def _equals_first_run(run: RunRecord, cells: Iterable[WeightsCell]) -> bool:
    """Whether, at every step and seed, the elements of a run and of the first run are
    finite and equal. False without a cell, and where all weights are 0 in both."""
    of_run = [c for c in cells if c.of == run.name and c.layer == ALL and c.kind == ALL]
    return bool(of_run) and all(c.is_equal for c in of_run)


T = TypeVar("T", WeightsCell, ChanceComparison)


def single_places(rows: Iterable[T]) -> list[T]:
    """Returns the rows whose layer and kind are each a single one, `none` (outside
    layers) being one, in their order."""
    return [x for x in rows if ALL not in (x.layer, x.kind)]


def place_in_words(layer: Layer, kind: str) -> str:
    """Returns a layer and kind in words: `layer 2 attention`, `embedding outside layers`,
    `weights outside layers`, `attention`, `layer 2`, `all weights`."""
    if layer == ALL:
        return "all weights" if kind == ALL else kind
    if layer == "none":
        return f"{'weights' if kind == ALL else kind} outside layers"
    return f"layer {layer}" + ("" if kind == ALL else f" {kind}")


def _standing_out_sentence(
    run: RunRecord, first: str, compared: Sequence[ChanceComparison]
) -> str:
    """Returns the sentence on where a run is beyond chance (stands out), that it is
    beyond chance nowhere, or why that is not judged. `compared`: the run's comparisons;
    `first`: the name of the first run."""
    tested = single_places(compared)
    judged = [s for s in tested if s.stands_out is not None]
    if not judged:
        why = next((s.why for s in tested if s.why), "it was kept at no step")
        return NOT_JUDGED.format(name=run.name, why=why)
    places = dict.fromkeys((s.layer, s.kind) for s in judged)
    out = [s for s in judged if s.stands_out]
    steps = _steps_in_words({s.step for s in out or judged})
    if not out:
        return NONE_STANDS.format(
            name=run.name, first=first, all=len(places), steps=steps
        )
    worst = max(out, key=lambda s: (s.margin or 0.0) / LIMITS[s.metric])
    n = len(dict.fromkeys((s.layer, s.kind) for s in out))
    return STANDS.format(
        name=run.name,
        first=first,
        where=place_in_words(worst.layer, worst.kind),
        step=worst.step,
        metric=IN[worst.metric],
        margin=ratio(worst.margin),
        n=n,
        all=len(places),
        steps=steps,
    )


def _too_few_nulls_sentence(
    run: RunRecord, compared: Sequence[ChanceComparison]
) -> Iterator[str]:
    """Yields a sentence on the places that a run moves and that are not judged, such as
    those that fewer than FEWEST_NULLS nulls move. Nothing where it moves no such place,
    and where no place of the run is judged at all."""
    of_run = [
        s
        for s in single_places(compared)
        if s.variant == run.name and s.metric == "max_abs"
    ]
    alone = [s for s in of_run if s.stands_out is None and s.value is not None]
    if alone and any(s.stands_out is not None for s in of_run):
        where = some(list(dict.fromkeys(place_in_words(s.layer, s.kind) for s in alone)))
        most = si(max(s.value or 0.0 for s in alone))
        yield UNMOVED.format(name=run.name, where=where, most=most, least=FEWEST_NULLS)


def _steps_in_words(steps: Iterable[int]) -> str:
    """Returns the first and the last step in words, whatever lies between: `step 1`,
    `steps 1 to 100`. `steps`: at least one."""
    ends = sorted(steps)
    span = " to ".join(dict.fromkeys(map(str, (ends[0], ends[-1]))))
    return f"step{'s' * (ends[0] != ends[-1])} {span}"


def _ranges_in_words(values: Mapping[Metric, Sequence[float]]) -> str:
    """Returns the smallest and the largest ratio of each metric in words: `0.9 to 1.1 in
    the mean`; one number where both are written alike. Each metric has at least one."""
    parts = []
    for metric, ratios in values.items():
        ends = dict.fromkeys((ratio(min(ratios)), ratio(max(ratios))))
        parts.append(f"{' to '.join(ends)} {IN[metric]}")
    return ", ".join(parts)


def _chance_ratio_sentence(
    run: RunRecord, compared: Sequence[ChanceComparison], early: Sequence[int]
) -> Iterator[str]:
    """Yields a sentence on a run's early ratios to chance in each metric: the least and
    the largest over places, of each place's geometric mean over steps. Nothing where no
    place has a ratio."""
    values: dict[Metric, list[float]] = {}
    steps: set[int] = set()
    of_run = single_places(
        s for s in compared if s.variant == run.name and s.step in early
    )
    places = grouped(of_run, lambda s: (s.metric, s.layer, s.kind))
    for (metric, _, _), at_place in places.items():
        ratios = {s.step: s.ratio for s in at_place if s.ratio is not None}
        if ratios:
            mean = statistics.geometric_mean(ratios.values())
            values.setdefault(metric, []).append(mean)
            steps |= set(ratios)
    if values:
        when = f"at {_steps_in_words(steps)}"
        yield BY_CHANCE.format(name=run.name, when=when, ranges=_ranges_in_words(values))


def _run_ratio_sentence(
    run: RunRecord, other: RunRecord, cells: Sequence[WeightsCell], early: Sequence[int]
) -> Iterator[str]:
    """Yields one sentence on one run's early distances over another's of the same seed,
    step, layer and kind: for each metric the least and the largest over places of each
    place's geometric mean over seeds and steps. Distances of 0 are left out. Yields
    nothing where no place has both runs."""
    values: dict[Metric, list[float]] = {}
    steps: set[int] = set()
    seeds: set[int] = set()
    places = grouped(single_places(cells), lambda c: (c.layer, c.kind))
    for metric in LIMITS:
        for at_place in places.values():
            cells_early = [c for c in at_place if c.step in early]
            ours = _positive_distances(cells_early, run.name, metric)
            theirs = _positive_distances(cells_early, other.name, metric)
            shared = ours.keys() & theirs.keys()
            if shared:
                ratios = (ours[at] / theirs[at] for at in sorted(shared))
                values.setdefault(metric, []).append(statistics.geometric_mean(ratios))
                seeds |= {seed for seed, _ in shared}
                steps |= {step for _, step in shared}
    if values:
        count = f"{len(seeds)} seed{'s' * (len(seeds) > 1)}"
        yield OVER.format(
            name=run.name,
            other=other.name,
            when=f"at {_steps_in_words(steps)}",
            ranges=_ranges_in_words(values),
            seeds=count,
        )


def _positive_distances(
    cells: Iterable[WeightsCell], name: str, metric: Metric
) -> dict[tuple[int, int], float]:
    """Returns a run's distances in a metric by (seed, step), without those that are 0 or
    None."""
    of_run = [c for c in cells if c.of == name]
    return {(c.seed, c.step): x for c in of_run if (x := getattr(c, metric))}
