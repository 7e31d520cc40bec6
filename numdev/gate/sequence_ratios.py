"""When a number moved from report A to report B that both have for every sequence.

The logarithm of its ratio scatters about 0 where only chance changed it. It moved where
Student's t says otherwise, at 1 % over all numbers of a comparison (Holm), or where every
sequence says so by more than SURELY. A number that is 0 in one report alone moved,
whatever chance does."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from numdev.gate.compare_report import About, Group, Move
from numdev.gate.noise_model import FAR, log_ratio, ratio_of_log
from numdev.metrics.statistics import holm
from numdev.report import Place
from numdev.report.number_text import three

K = TypeVar("K", bound=Hashable)
ALPHA = 0.01
LEAST = 3  # sequences, below which chance is unknown
SURELY = 10.0  # a factor in every sequence that is no chance, however few they are


@dataclass(frozen=True, kw_only=True)
class SequenceRatios:
    """A number in A and in B, for every sequence that has both."""

    both: list[tuple[float, float]]

    @cached_property
    def logs(self) -> list[float]:
        """Returns ln(B / A) for each sequence in which both are above 0."""
        logs = (log_ratio(a, b) for a, b in self.both)
        return [log for log in logs if log is not None]

    @property
    def is_chance_known(self) -> bool:
        """Whether there are as many ratios as chance needs to be known."""
        return len(self.logs) >= LEAST

    @property
    def is_zero_in_one(self) -> bool:
        """Whether the number is 0 in one report alone, in any sequence."""
        return any((a == 0) != (b == 0) for a, b in self.both)

    @property
    def moved_surely(self) -> bool:
        """Whether every sequence that has a ratio is beyond SURELY, all in one direction;
        False where none has."""
        least, most = min(self.logs, default=0.0), max(self.logs, default=0.0)
        return least > math.log(SURELY) or most < -math.log(SURELY)

    @property
    def p_value(self) -> float:
        """Returns the two-sided p of Student's t that the mean of the logarithms is 0; 1
        where all are 0, and 0 where all are the same other number. Needs two ratios."""
        from scipy.special import stdtr  # for which a gate need not wait

        count = len(self.logs)
        spread = statistics.stdev(self.logs) / math.sqrt(count)
        if spread == 0:
            return 0.0 if any(self.logs) else 1.0
        return float(2 * stdtr(count - 1, -abs(statistics.mean(self.logs)) / spread))

    @property
    def medians(self) -> tuple[float | None, float | None]:
        """Returns the median in A and in B; None without sequences."""
        if not self.both:
            return None, None
        a, b = (statistics.median(side) for side in zip(*self.both, strict=True))
        return a, b

    @property
    def change(self) -> float | None:
        """Returns the geometric mean of B / A; None without a ratio, and where it is too
        large or small for float64."""
        return ratio_of_log(statistics.mean(self.logs)) if self.logs else None

    @property
    def excess(self) -> float:
        """Returns how far beyond chance a number is that moved: 1 + the mean logarithm's
        size, at most FAR; FAR without a logarithm, or where it `is_zero_in_one`."""
        if self.is_zero_in_one or not self.logs:
            return FAR
        return min(FAR, 1 + abs(statistics.mean(self.logs)))

    def move(self, about: About, place: Place, metric: str, what: str) -> Move:
        """Returns the move of a number that moved: `what`, from its median in A to that
        in B. `about`, `place`: whose it is, and where."""
        a, b = self.medians
        return Move(
            **about,
            place=place,
            metric=metric,
            a=a,
            b=b,
            change=self.change,
            excess=self.excess,
            words=f"{what} from {three(a)} to {three(b)}",
        )

    def group(self, about: About, metric: str, *, pairs: int, is_moved: bool) -> Group:
        """Returns the group of a number: its medians and their ratio, and how many of the
        `pairs` of rows are equal, moved or not judged. It is judged where all are equal,
        where it moved, and where chance is known."""
        a, b = self.medians
        same = sum(first == second for first, second in self.both)
        judged = is_moved or same == pairs or self.is_chance_known
        return Group(
            **about,
            metric=metric,
            a=a,
            b=b,
            change=self.change,
            pairs=pairs,
            same_bits=same,
            moved=pairs if is_moved else 0,
            unjudged=0 if judged else pairs,
        )


def moved_numbers(numbers: Mapping[K, SequenceRatios]) -> set[K]:
    """Returns the keys of the numbers that moved: beyond chance (Holm's method over those
    whose chance is known, at ALPHA), `is_zero_in_one`, or `moved_surely`."""
    tested = [key for key, number in numbers.items() if number.is_chance_known]
    certain = holm([numbers[key].p_value for key in tested], ALPHA)
    moved = {key for key, sure in zip(tested, certain, strict=True) if sure}
    for key, number in numbers.items():
        if number.is_zero_in_one or number.moved_surely:
            moved.add(key)
    return moved
