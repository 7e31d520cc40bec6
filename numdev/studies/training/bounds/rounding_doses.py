"""Reads distances of weights as doses, on a ladder of null runs that re-round at several
strengths, and marks the steps at which curves merge.

Under autocast a distance does not keep the proportion of its cause: a perturbation far
below the floor flips later roundings, each a whole unit in the last place. So a distance
is not divided by another to learn how large its cause was: it is read as a *dose*, the
strength of re-rounding that moves the weights as far in the same seed at the same step.
Strengths are in floors, the rms error of rounding attention's output once.

Between rungs, the strengths that were run, the logarithm of the distance is a monotone
cubic of that of the dose (Fritsch and Carlson 1980). Rungs in the wrong order by chance
are pooled first (pool adjacent violators, Ayer et al. 1955)."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import pandas as pd

from numdev.grouping import grouped
from numdev.metrics.statistics import Mean, factor
from numdev.studies.training.bounds.report import (
    FEWEST_SEEDS,
    MERGED,
    PAIR,
    DoseReading,
    Rung,
    Saturation,
    Window,
)
from numdev.studies.training.report import VariantRole

EQUAL = 2  # runs of one strength in a seed that marks are made from
# Chance decides where equal nulls are this many times as far from each other as at first
PARTED = 2.0
FLAT = (
    1.25  # a ladder tells no dose if its highest rung is at most so far over its lowest
)
WIDEST = (
    8.0  # the largest factor between the ends of an interval with which a dose is read
)
NO_PAIR = "there is no null run re-rounded at {0:g} floor{1} beside one at {2:g}"
NO_LADDER = "there are no null runs of two strengths"
NO_STEP = "no step is early: two doses lie together from the first recorded one on"
IS_FLAT = (
    "the ladder is flat there: {high} floors move the weights {lead:.2f} times as far as "
    "{low}"
)
IS_WIDE = (
    "its interval over seeds, {low:.2g} to {high:.2g} floors, spans a factor above "
    "{most:g}"
)
# The factor by which a dose between rungs four times apart may be off: planted ones were
# by up to 4 % over 20 seeds (benchmarks/dose.py). An interval over seeds does not contain
# that error, and is widened by it.
BETWEEN = 1.06
End = Literal["within", "below", "above"]
Windows = Mapping[Window, tuple[int, ...]]  # the steps of each window
Place = tuple[int, int]  # a seed and a step


class _Line(NamedTuple):
    """The distance of one run at one place, with its strength of re-rounding in floors
    (NaN for a run that does not re-round)."""

    place: Place
    times: float
    value: float


# --- marks ----------------------------------------------------------------------------


def merging_marks(distances: pd.DataFrame) -> Saturation:
    """Returns the steps at which curves bend, merge, and are decided by chance, of one
    metric of weights. `distances`: a table with the columns role, times, seed, step and
    value; step 0 is ignored.

    They are made from null runs alone: of each strength of PAIR the first EQUAL lines of
    each seed and step, and for `chance` perhaps runs moved by an ulp. So no other run
    moves a mark, and no later step. Where no seed has both strengths, `reason` says so,
    all marks are None, and only the first step is early."""
    steps = tuple(sorted({int(step) for step in distances.step if step > 0}))
    chance = first_step_of_chance(distances)
    lead = lead_by_step(distances)
    if lead.empty:
        low, high = PAIR
        reason = NO_PAIR.format(low, "" if low == 1 else "s", high)
        return Saturation(early=steps[:1], reason=reason)
    peak = lead.cummax()
    bends = _first_step(lead[lead <= peak.pow(0.5).clip(lower=MERGED)])
    merged = _first_step(lead[lead <= MERGED])
    ends = [mark for mark in (bends, chance) if mark is not None]
    return Saturation(
        bends=bends,
        saturated=merged,
        chance=chance,
        early=tuple(s for s in steps if all(s < end for end in ends)),
        late=tuple(s for s in steps if merged is not None and s >= merged),
    )


def lead_by_step(distances: pd.DataFrame) -> pd.Series[float]:
    """Returns the distance of the larger dose of PAIR over that of the smaller, a series
    indexed by step, ascending: the geometric mean over seeds. Empty where no seed has
    both at one step. Distances of 0, and step 0, are left out."""
    nulls = distances[(distances.role == "null_rounding") & (distances.value > 0)]
    nulls = nulls[nulls.step > 0]
    low, high = (
        _mean_by_seed_and_step(_first_runs(nulls[nulls.times == times])) for times in PAIR
    )
    ratio = (high / low).dropna()
    return ratio.groupby("step").agg(statistics.geometric_mean)


def first_step_of_chance(distances: pd.DataFrame) -> int | None:
    """Returns the first step at which, in any seed, the largest distance of equal nulls
    over the smallest is more than PARTED times what it was at their first step. Equal
    nulls are runs re-rounded at one floor, or, where no seed has two of these, runs moved
    by an ulp. None where no step is so, and where no seed has two of either."""
    moved = distances[(distances.value > 0) & (distances.step > 0)]
    rounding = moved[(moved.role == "null_rounding") & (moved.times == PAIR[0])]
    for equal in (rounding, moved[moved.role == "null_ulp"]):
        ends = (
            _first_runs(equal)
            .groupby(["seed", "step"])
            .value.agg(["min", "max", "count"])
        )
        ends = ends[ends["count"] > 1]
        if not ends.empty:
            spread = ends["max"] / ends["min"]
            first = spread.groupby("seed").transform("first")
            return _first_step(spread[spread > PARTED * first])
    return None


def _first_runs(lines: pd.DataFrame) -> pd.DataFrame:
    """Returns the first EQUAL lines of each seed and step, so that further runs move no
    mark."""
    return lines.groupby(["seed", "step"], as_index=False).head(EQUAL)


def _mean_by_seed_and_step(lines: pd.DataFrame) -> pd.Series[float]:
    """Returns the geometric mean of `value` over the lines of each seed and step, a
    series indexed by both."""
    return lines.groupby(["seed", "step"]).value.agg(statistics.geometric_mean)


def _first_step(marked: pd.Series[float]) -> int | None:
    """Returns the smallest step of a series that is indexed by step, or by seed and step;
    None for an empty one."""
    return None if marked.empty else int(marked.index.get_level_values("step").min())


# --- doses ----------------------------------------------------------------------------


def ladder_rungs(distances: pd.DataFrame, windows: Windows) -> Iterator[Rung]:
    """Yields a rung for every strength of re-rounding in every window: its distance over
    that of one floor. In each seed it is the geometric mean over steps, then that over
    seeds with an interval; None where no seed has both. Distances of 0 are left out.
    `distances`: of one metric, a table of `study.COLUMNS`."""
    nulls = distances[(distances.role == "null_rounding") & (distances.value > 0)]
    strengths = sorted({float(times) for times in nulls.times})
    for window, steps in windows.items():
        in_window = nulls[
            (nulls.of == tensors_of_window(window)) & nulls.step.isin(steps)
        ]
        one = _mean_by_seed_and_step(in_window[in_window.times == PAIR[0]])
        for times in strengths:
            lines = in_window[in_window.times == times]
            ratios = (_mean_by_seed_and_step(lines) / one).dropna()
            by_seed = list(ratios.groupby("seed").agg(statistics.geometric_mean))
            mean, low, high = mean_over_seeds(by_seed) if by_seed else (None, None, None)
            runs = Counter(zip(lines.seed, lines.step, strict=True)).values()
            yield Rung(
                times=times,
                runs=max(runs, default=0),
                window=window,
                steps=steps,
                ratio=mean,
                low=low,
                high=high,
            )


def dose_readings(
    distances: pd.DataFrame, roles: Mapping[str, VariantRole], windows: Windows
) -> Iterator[DoseReading]:
    """Yields the dose of every label (of `roles`), window by window. Labels of the golden
    run, of nulls that re-round or repeat, and of other seeds are passed over.
    `distances`: of one metric, a table of `study.COLUMNS`, in which distances of 0 are
    ignored."""
    for window, steps in windows.items():
        moved = distances[
            (distances.of == tensors_of_window(window)) & (distances.value > 0)
        ]
        in_window = moved[moved.step.isin(steps)]
        ladders = _ladder_by_place(in_window[in_window.role == "null_rounding"])
        for label, role in roles.items():
            if role in ("null_rounding", "null_repeat", "other_seed", "golden"):
                continue
            of_label = _lines(in_window[in_window.label == label])
            distance = {
                place: statistics.geometric_mean(line.value for line in lines)
                for place, lines in grouped(of_label, lambda line: line.place).items()
            }
            yield _read_dose(
                distance, ladders, variant=label, role=role, window=window, steps=steps
            )


def _lines(distances: pd.DataFrame) -> Iterator[_Line]:
    """Yields the distances of a table with the columns seed, step, times and value, each
    with its seed and step and its strength of re-rounding."""
    columns = (distances[name] for name in ("seed", "step", "times", "value"))
    for seed, step, times, value in zip(*columns, strict=True):
        yield _Line((int(seed), int(step)), float(times), float(value))


def _ladder_by_place(nulls: pd.DataFrame) -> Mapping[Place, Mapping[float, float]]:
    """Returns the distance by strength, the geometric mean over runs of one strength, for
    each seed and step that has two strengths or more."""
    ladders = {}
    for place, lines in grouped(_lines(nulls), lambda line: line.place).items():
        by_strength = grouped(lines, lambda line: line.times)
        if len(by_strength) > 1:
            ladders[place] = {
                times: statistics.geometric_mean(line.value for line in equal)
                for times, equal in by_strength.items()
            }
    return ladders


def _read_dose(
    distance: Mapping[Place, float],
    ladders: Mapping[Place, Mapping[float, float]],
    *,
    variant: str,
    role: VariantRole,
    window: Window,
    steps: tuple[int, ...],
) -> DoseReading:
    """Returns the dose of one label in one window. It is read in each seed at each step;
    then the geometric mean over steps is taken, and that over seeds. None, with a reason,
    where no seed and step has both a ladder and a distance. `why` is also set where the
    dose is undecided: the ladder is flat, the interval is missing or wide. `distance`: by
    seed and step; `ladders`: distance by strength, by seed and step."""
    reading = partial(DoseReading, variant=variant, role=role, window=window, steps=steps)
    readings = {
        at: dose_of_distance(x, ladders[at])
        for at, x in distance.items()
        if at in ladders
    }
    if not readings:
        missing = "no seed has a distance beside a ladder" if ladders else NO_LADDER
        missing = missing if steps else NO_STEP
        return reading(dose=None, low=None, high=None, why=missing)
    seeds = grouped(readings, lambda at: at[0])
    by_seed = {
        seed: statistics.geometric_mean(readings[at][0] for at in places)
        for seed, places in seeds.items()
    }
    ends = [end for _, end in readings.values()]
    lowest, highest = _lowest_and_highest(ladders.values())
    mean, low, high = mean_over_seeds(list(by_seed.values()))
    if low is not None and high is not None:
        low, high = max(low / BETWEEN, lowest), min(high * BETWEEN, highest)
    lead = statistics.geometric_mean(
        ladders[at][max(ladders[at])] / ladders[at][min(ladders[at])] for at in readings
    )
    why: str | None = None
    if lead <= FLAT:
        why = IS_FLAT.format(
            high=strength_in_words(highest), low=strength_in_words(lowest), lead=lead
        )
    elif low is None or high is None:
        seeds_in_words = f"{len(by_seed)} seed{'s' * (len(by_seed) > 1)}"
        why = f"{seeds_in_words}, and an interval needs {FEWEST_SEEDS}"
    elif high > WIDEST * low:
        why = IS_WIDE.format(low=low, high=high, most=WIDEST)
    return reading(
        dose=mean,
        low=low,
        high=high,
        below=ends.count("below") / len(ends),
        above=ends.count("above") / len(ends),
        by_seed=by_seed,
        why=why,
    )


def _lowest_and_highest(ladders: Iterable[Mapping[float, float]]) -> tuple[float, float]:
    """Returns the lowest and the highest strength of any ladder. `ladders`: at least
    one."""
    every = [times for ladder in ladders for times in ladder]
    return min(every), max(every)


def dose_of_distance(distance: float, ladder: Mapping[float, float]) -> tuple[float, End]:
    """Returns the strength at which a ladder has this distance, and where that lies:
    `within` the ladder, or `below` or `above` it. There it is the strength of the lowest
    or highest rung, after rungs in the wrong order were merged (`in_order`); so it is of
    the only rung, where all merge into one. `ladder`: distance by strength, one strength
    or more; all numbers above 0."""
    strengths, distances = in_order(ladder)
    if distance < distances[0] or distance > distances[-1]:
        below = distance < distances[0]
        return (strengths[0], "below") if below else (strengths[-1], "above")
    if len(strengths) == 1:
        return strengths[0], "within"
    # Half a second that others need not wait for
    from scipy.interpolate import PchipInterpolator

    knots = [math.log(x) for x in strengths]
    levels = [math.log(x) for x in distances]
    roots = PchipInterpolator(knots, levels).solve(math.log(distance), extrapolate=False)
    if len(roots):
        return math.exp(float(roots[0])), "within"
    # At an end of the ladder rounding may leave the root beyond it.
    nearest = min(range(len(levels)), key=lambda i: abs(levels[i] - math.log(distance)))
    return strengths[nearest], "within"


def in_order(ladder: Mapping[float, float]) -> tuple[list[float], list[float]]:
    """Returns the strengths and the distances of a ladder, both ascending. Neighbouring
    rungs whose distances are equal or in the wrong order are merged into one, at their
    geometric means. `ladder`: distance by strength."""
    blocks: list[tuple[list[float], list[float]]] = []
    for times, distance in sorted(ladder.items()):
        blocks.append(([times], [distance]))
        while len(blocks) > 1 and _block_distance(blocks[-2]) >= _block_distance(
            blocks[-1]
        ):
            strengths, distances = blocks.pop()
            blocks[-1][0].extend(strengths)
            blocks[-1][1].extend(distances)
    means = statistics.geometric_mean
    return [means(strengths) for strengths, _ in blocks], [means(d) for _, d in blocks]


def _block_distance(block: tuple[list[float], list[float]]) -> float:
    """Returns the geometric mean of the distances of a block of merged rungs, (strengths,
    distances): at least one, all above 0."""
    return statistics.geometric_mean(block[1])


def mean_over_seeds(ratios: Sequence[float]) -> Mean:
    """Returns the geometric mean over seeds (the arithmetic one where a ratio is 0), and
    the two ends of its 95 % interval; both ends are None for fewer than FEWEST_SEEDS.
    `ratios`: at least one, none below 0."""
    mean, low, high = factor(ratios)
    return (mean, low, high) if len(ratios) >= FEWEST_SEEDS else (mean, None, None)


def tensors_of_window(window: Window) -> str:
    """Returns the tensors whose distance is taken in a window, as in the column `of`:
    `gradient` (of the first batch) for `start`, else `weights`."""
    return "gradient" if window == "start" else "weights"


def strength_in_words(times: float) -> str:
    """Returns a strength in words: `1/16`, `1/4` (parts of a whole number), `1`, `16`,
    `0.3`. `times`: above 0."""
    inverse = 1 / times
    is_part = times < 1 and abs(inverse - round(inverse)) < 1e-9
    return f"1/{round(inverse)}" if is_part else f"{times:.3g}"
