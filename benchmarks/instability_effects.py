"""Effects as contrasts within a seed, then over seeds.

A seed is one observation: all its runs began alike and saw the same data, so what a seed does to
all of them cancels. Three kinds of contrast:

- pairs: two runs whose attention differs in one format, or in the formula of delta, alone; and the
  mean over all such pairs.
- factorial: where all sixteen combinations (or the eight with S in fp32) are there, main effects
  and interactions. The effect of a set of factors is the mean response of the runs whose signs
  multiply to +, less that of the others: for one factor high less low, for two half of how much the
  one's effect depends on the other (Box, Hunter and Hunter, Statistics for Experimenters, ch. 5).
- passes: two kernels, each pass from either, as a factorial of two.

A response that only some runs have (the loss of those on the plateau) pairs those that have it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from instability_runs import Run
from instability_sites import Sites
from scipy.stats import binomtest

from numdev.report.statistics import Mean, interval

Cells = Mapping[tuple[bool, ...], Mapping[int, float]]
"""By levels, high or low, the response of each seed."""
Values = Mapping[Sites, Mapping[int, float]]
Observed = dict[int, float]
"""By seed."""

FACTORS = {
    "S": ("fp32", "bf16"), "O": ("fp32", "bf16"), "dP": ("fp32", "bf16"), "delta": ("dP*P", "dO*O"),
}  # fmt: skip
"""The columns, and their two levels."""
NAMES = {"S": "S in bf16", "O": "O in bf16", "dP": "dP in bf16", "delta": "delta from O"}
SPLIT = {"dP": "delta", "delta": "dP"}
"""Factors whose pairs are also averaged by the level of another one: delta from dP sees how dP was
rounded, and delta from O does not, so the two are expected to matter together."""
ON_PLATEAU = "loss, both on the plateau"
RESPONSES: Mapping[str, Callable[[Run], float]] = {
    "loss, nats": lambda run: run.ended,
    ON_PLATEAU: lambda run: run.ended if run.left is None else math.nan,
    "loss, both off it": lambda run: math.nan if run.left is None else run.ended,
    "left the plateau": lambda run: float(run.left is not None),
    "broke": lambda run: math.nan if run.golden else float(run.broke is not None),
    "rose": lambda run: float(run.rose is not None),
}
"""A response that is NaN or infinite leaves its run out. The golden run cannot break, since others
are judged by it: so in this response it is no one's pair."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One contrast of one response."""

    setting: str
    kind: str
    """pair, mean of pairs, factorial, passes."""
    factor: str
    name: str
    response: str
    by_seed: tuple[tuple[int, float], ...]
    lost: int
    """Seeds left out: a run of theirs is missing, or has no such response."""

    @property
    def mean(self) -> Mean:
        return interval([value for _, value in self.by_seed])

    @property
    def seeds(self) -> int:
        return len(self.by_seed)


@dataclass(frozen=True, kw_only=True)
class Signs:
    """Of a contrast, in how many seeds of all settings it was above zero."""

    name: str
    response: str
    above: int
    of: int
    """Seeds in which it was not exactly zero."""

    @property
    def p(self) -> float:
        """Two-sided."""
        return float(binomtest(self.above, self.of).pvalue)


def effects(runs: Sequence[Run]) -> list[Effect]:
    """Of every setting and response, all that there are."""
    found = []
    for setting in dict.fromkeys(run.setting for run in runs):
        ours = [run for run in runs if run.setting == setting]
        total = len({run.seed for run in ours})
        for name, response in RESPONSES.items():
            values = _values(ours, response)
            whole = [*_pairs(values), *_of_factorial(values), *_passes(ours, response)]
            found += [
                Effect(
                    setting=setting, kind=kind, factor=factor, name=what, response=name,
                    by_seed=tuple(sorted(observed.items())), lost=total - len(observed),
                )
                for kind, factor, what, observed in whole if observed
            ]  # fmt: skip
    return found


def signs(found: Iterable[Effect]) -> list[Signs]:
    """The sign test of each mean of pairs, over seeds and settings. Settings that share a seed
    share where they began, so its p is a little too small."""
    by: dict[tuple[str, str], list[float]] = {}
    for effect in found:
        if effect.kind == "mean of pairs":
            values = [value for _, value in effect.by_seed if value]
            by.setdefault((effect.factor, effect.response), []).extend(values)
    return [
        Signs(name=factor, response=response, above=sum(x > 0 for x in xs), of=len(xs))
        for (factor, response), xs in by.items()
        if xs
    ]


# --- pairs ---------------------------------------------------------------------------------------


def _values(runs: Iterable[Run], response: Callable[[Run], float]) -> dict[Sites, Observed]:
    """Of runs with one kernel whose sites are known. Of variants that round the same the first."""
    found: dict[Sites, Observed] = {}
    seen = set()
    for run in runs:
        if run.sites is None or run.crossed or (run.sites, run.seed) in seen:
            continue
        seen.add((run.sites, run.seed))
        if math.isfinite(value := response(run)):
            found.setdefault(run.sites, {})[run.seed] = value
    return found


Contrast = tuple[str, str, str, Observed]
"""Kind, factor, name, values."""


def _pairs(values: Values) -> Iterator[Contrast]:
    """By factor: high less low with everything else the same, each pair and the means of them."""
    for factor, (low, high) in FACTORS.items():
        means: dict[str, list[Observed]] = {}
        for sites, above in values.items():
            if getattr(sites, factor) != high:
                continue
            below = values.get(dataclasses.replace(sites, **{factor: low}), {})
            both = {seed: above[seed] - below[seed] for seed in above if seed in below}
            if both:
                yield "pair", factor, f"{NAMES[factor]}, with {_others(sites, factor)}", both
                means.setdefault(NAMES[factor], []).append(both)
                if other := SPLIT.get(factor):
                    name = f"{NAMES[factor]} where {other} is {getattr(sites, other)}"
                    means.setdefault(name, []).append(both)
        for name, pairs in means.items():
            yield "mean of pairs", name, f"{name}, mean of {len(pairs)} pairs", _mean(pairs)


def _mean(pairs: Sequence[Observed]) -> Observed:
    """Of each seed over the pairs that it has."""
    seeds = dict.fromkeys(seed for pair in pairs for seed in pair)
    each = {seed: [pair[seed] for pair in pairs if seed in pair] for seed in seeds}
    return {seed: sum(found) / len(found) for seed, found in each.items()}


def _others(sites: Sites, factor: str) -> str:
    formats = [f"{c} {getattr(sites, c)}" for c in ("S", "O", "dP") if c != factor]
    return ", ".join([*formats, *([] if factor == "delta" else [sites.delta]), sites.kernel])


# --- factorials ----------------------------------------------------------------------------------


def factorial(cells: Cells, names: Sequence[str]) -> dict[str, Observed]:
    """By set of factors, as `a x b`, its effect for each seed that all cells have. Raises
    ValueError where cells are missing."""
    levels = list(itertools.product((False, True), repeat=len(names)))
    if set(cells) != set(levels):
        raise ValueError("the factorial is not full")
    seeds = [seed for seed in cells[levels[0]] if all(seed in cells[c] for c in levels)]
    found = {}
    for size in range(1, len(names) + 1):
        for chosen in itertools.combinations(range(len(names)), size):
            sign = {c: math.prod(1 if c[i] else -1 for i in chosen) for c in levels}
            found[" x ".join(names[i] for i in chosen)] = {
                seed: sum(sign[c] * cells[c][seed] for c in levels) * 2 / len(levels)
                for seed in seeds
            }
    return found


def _of_factorial(values: Values) -> Iterator[Contrast]:
    """Of all four factors where that is full, else of those but S."""
    for kernel, rest in dict.fromkeys((sites.kernel, sites.rest) for sites in values):
        for names in (tuple(FACTORS), tuple(FACTORS)[1:]):
            cells: dict[tuple[bool, ...], Mapping[int, float]] = {}
            for level in itertools.product((False, True), repeat=len(names)):
                told = {name: FACTORS[name][high] for name, high in zip(names, level, strict=True)}
                sites = Sites(**{"S": "fp32", **told, "kernel": kernel, "rest": rest})
                if sites in values:
                    cells[level] = values[sites]
            if len(cells) == 2 ** len(names):
                for what, observed in factorial(cells, [NAMES[n] for n in names]).items():
                    yield "factorial", what, f"{what}, {kernel}, of {len(names)}", observed
                break


def _passes(runs: Sequence[Run], response: Callable[[Run], float]) -> Iterator[Contrast]:
    """Of any two kernels that have been crossed both ways."""
    values: dict[tuple[str, str], Observed] = {}
    names: dict[str, str] = {}
    for run in runs:
        if not run.crossed:
            names.setdefault(run.kernels[0], run.variant)
        if math.isfinite(value := response(run)):
            values.setdefault(run.kernels, {}).setdefault(run.seed, value)
    for low, high in itertools.combinations(names, 2):
        pair = (low, high)
        cells = {
            level: values[key]
            for level in itertools.product((False, True), repeat=2)
            if (key := (pair[level[0]], pair[level[1]])) in values
        }
        if len(cells) == 4:
            words = f"of {names[high]!r} instead of {names[low]!r}"
            for what, observed in factorial(cells, ("forward", "backward")).items():
                yield "passes", what, f"{what} {words}", observed
