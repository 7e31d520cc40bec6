"""Curves of distances over training: their ratios, where they merge, how many steps they are apart.

Training is chaotic: two runs that differ by anything part from each other, and however small the
difference was, their distance grows to the same size. While it is small, distances keep the
proportion of what caused them; a larger one is the first to stop growing, the others catch up, and
past that the distance says how chaotic training is. So a ratio means something only before the
largest curve bends, and to see that takes a null: a run that differs by much less.

Let s be the largest perturbation over the smallest null, at a step, of geometric means over seeds.
In proportion, s stays; as curves merge, it falls to 1. Two marks follow, with no model of growth:

- curves **bend** at the first recorded step after the peak of s from which on s is at most half of
  that peak;
- they are **saturated** from the first recorded step from which on s is at most 2.

Another seed's runs are no perturbation: they start apart. Proportion is lost earlier in single
seeds: a run meets an instability some steps before another whose cause was as large, and is then
far ahead. Null runs of one kind show that, since their causes are equal. **Chance decides** from
the first recorded step at which in some seed the largest of them over the smallest is more than
twice what it was at first. The nulls alone say so: a window that ended where the ratio asked about
begins to scatter would be chosen for its answer.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from numdev.training.bounds.report import Saturation
from numdev.training.report import VariantRole

PERTURBED: tuple[VariantRole, ...] = ("flash", "low_precision", "attention_precision")
"""Runs that start where the golden one does and compute otherwise."""
NULLS: tuple[VariantRole, ...] = ("null_repeat", "null_ulp", "null_rounding")
MERGED = 2.0  # the largest perturbation over the smallest null where curves have merged
PARTED = 2.0  # how much farther apart than at first equal nulls are where chance decides
Series = Mapping[int, float]
"""Step to value."""


@dataclass(frozen=True, kw_only=True)
class Track:
    """One metric of one kind of run over training, by seed."""

    label: str
    role: VariantRole
    of: str
    group: str
    metric: str
    members: Mapping[int, Mapping[int, Sequence[float]]]
    """Seed to step to the values of all runs of this kind: finite, and not negative."""

    @cached_property
    def by_seed(self) -> Mapping[int, Series]:
        """The mean over runs."""
        return {
            seed: {step: statistics.fmean(values) for step, values in sorted(steps.items())}
            for seed, steps in self.members.items()
        }

    @cached_property
    def steps(self) -> tuple[int, ...]:
        return tuple(sorted({step for series in self.by_seed.values() for step in series}))

    def middle(self, step: int) -> float | None:
        """The geometric mean over the seeds where there is a distance; None where there is none."""
        values = [v for s in self.by_seed.values() if (v := s.get(step, 0.0)) > 0]
        return statistics.geometric_mean(values) if values else None


def saturation(group: str, tracks: Sequence[Track]) -> Saturation:
    """The marks of the curves of one metric of one group's weights."""
    steps = tuple(sorted({step for t in tracks for step in t.steps if step > 0}))
    above: dict[int, float] = {}  # the largest perturbation over the smallest null
    nulls: dict[int, str] = {}
    for step in steps:
        large = [v for t in tracks if t.role in PERTURBED and (v := t.middle(step))]
        small = [(v, t.label) for t in tracks if t.role in NULLS and (v := t.middle(step))]
        if large and small:
            least, nulls[step] = min(small)
            above[step] = max(large) / least
    if not above:
        roles = {t.role for t in tracks}
        reason = "every null run is bitwise the golden one"
        if not roles & set(NULLS):
            reason = "there is no null run"
        if not roles & set(PERTURBED):
            reason = "no run with another kernel or format has a distance"
        return Saturation(group=group, steps=steps, early=steps[:1], reason=reason)
    chance = _chance_decides(tracks)
    top = max(above, key=lambda step: above[step])
    merged = _from_then_on(above, lambda s: s <= MERGED)
    after = {step: s for step, s in above.items() if step > top}
    halved = _from_then_on(after, lambda s: s <= above[top] / 2)
    bends = min((step for step in (halved, merged) if step is not None), default=None)
    return Saturation(
        group=group,
        steps=steps,
        bends=bends,
        saturated=merged,
        peak=above[top],
        null=nulls[top],
        chance=chance,
        early=tuple(s for s in steps if all(m is None or s < m for m in (bends, chance))),
        late=tuple(s for s in steps if merged is not None and s >= merged),
    )


def _chance_decides(tracks: Sequence[Track]) -> int | None:
    """None where nulls do not part, or no seed has two of one kind."""
    found = []
    for seed in (s for t in tracks if t.role in NULLS for s in t.members.values()):
        several = [(step, v) for step, v in sorted(seed.items()) if len(v) > 1 and min(v) > 0]
        apart = [(step, max(v) / min(v)) for step, v in several]
        found += [step for step, a in apart if a > PARTED * apart[0][1]][:1]
    return min(found, default=None)


def _from_then_on(values: Series, holds: Callable[[float], bool]) -> int | None:
    """The first step from which on it holds at every step; None if it does not at the last."""
    last = list(itertools.takewhile(lambda s: holds(values[s]), sorted(values, reverse=True)))
    return last[-1] if last else None


def ratios(a: Track, b: Track, steps: Sequence[int]) -> dict[int, float]:
    """a over b in each seed that has both: the geometric mean over these steps, of those where
    neither is zero; 0 where a is zero at all of them and b is not."""
    found = {}
    for seed in sorted(a.by_seed.keys() & b.by_seed.keys()):
        pairs = [(a.by_seed[seed].get(s), b.by_seed[seed].get(s)) for s in steps]
        usable = [x / y for x, y in pairs if x is not None and y]
        positive = [ratio for ratio in usable if ratio > 0]
        if usable:
            found[seed] = statistics.geometric_mean(positive) if positive else 0.0
    return found
