"""What a function computes in place of its reference, named without knowing what that is.

Other functions are made from the exact result (`substituted_results`) and from the
reference: of other arguments, with other operations (`substituted_references`), with
another number in place of one that it computes with (`substituted_numbers`). One is
named where it leaves at most a tenth of the error, unrounded or rounded once as the
output is; of two that leave about as much, the one that comes first, which says less,
unless it may be the effect of the other in this call. Its place is that of the call's
first draw."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from numdev.errors import MeasurementError, one_line
from numdev.exact.rounded_results import values_format
from numdev.formats import Format, round_to
from numdev.operations.function.reference import FunctionReference
from numdev.operations.function.substituted_numbers import (
    PROMISING,
    NumberInUse,
    fitted,
    numbers_of,
)
from numdev.operations.function.substituted_references import (
    OtherReference,
    other_references,
    references_of_other_inputs,
    simplest_references,
)
from numdev.operations.function.substituted_results import other_results
from numdev.operations.function.trees import Values

TENFOLD = 10.0
# Of what was fitted to an output: a number takes most of another function's error too, so
# that only so much, or no more than LIKE times what rounding explains, may be left of it
FITTED = 100.0
LIKE = 5.0
CLEARLY = 1.1  # times less than the best so far must be left by what comes later
WORK = 1 << 26  # numbers of inputs, times how many other functions are tried
LEAST_TRIES = 8
SECONDS = 30.0  # of CPU, after which nothing more is tried for a call
LEAST_NUMBERS = 8  # of an output: fewer are explained by luck, or by one fitted number
LEAST_ERRING = 3.0  # numbers that err, in effect: another function errs in one by luck
LARGEST = 1e300  # a cut, so that JSON can hold it
OF_ROUNDING = 2.0  # times the error of one rounding: no function leaves clearly less
NEAR = 1.3  # times less of the error: from there on it is compared rounded too


@dataclass(frozen=True, kw_only=True)
class OtherFunction:
    """A function that explains an output better than its reference does."""

    words: str  # a clause: `the last 32 of 1024 places of axis 1 of x are left out`
    cut: float  # how many times less is left of the error, rounded as the output is
    share: float  # of the rms error, what goes


@dataclass(frozen=True, kw_only=True, eq=False)
class Wrong:
    """An output that errs: its values in fp64, the exact ones, and what it is rounded
    to."""

    values: Tensor
    truth: Tensor
    format: Format

    def left_by(self, other: Tensor | None) -> tuple[float, float]:
        """Returns two rms errors that an exact alternative leaves of the output, over
        elements that are finite in output and truth: as it is, and the lesser of that and
        of the alternative rounded once as the output is. The rounded one is tried only
        where the first is promising. Both are infinite for None, for another shape, and
        for an alternative that is not finite in one of these elements."""
        if other is None or other.shape != self.truth.shape:
            return math.inf, math.inf
        usable = self.truth.isfinite() & self.values.isfinite()
        if bool((usable & ~other.isfinite()).any()):
            return math.inf, math.inf
        count = max(1, int(usable.sum()))

        def rms(y: Tensor) -> float:
            """Returns the rms distance of `y` from the output."""
            error = torch.where(usable, self.values - y, 0.0).square().sum()
            return math.sqrt(float(error) / count)

        left, error = rms(other.double()), rms(self.truth)
        if left * NEAR > error:
            return left, left
        return left, min(left, rms(round_to(other.double(), self.format)))

    @property
    def effective(self) -> float:
        """Returns how many numbers the error is of, in effect: (sum e^2)^2 / sum e^4; 0
        without an error. Elements that are not finite do not count."""
        usable = self.truth.isfinite() & self.values.isfinite()
        square = torch.where(usable, self.values - self.truth, 0.0).square()
        fourth = float(square.square().sum())
        return float(square.sum()) ** 2 / fourth if fourth else 0.0

    def left_by_rounding(self) -> float:
        """Returns the rms error of the exact values rounded once, over elements that are
        finite in output, truth and the rounded values; 0 without any."""
        return self.rms_error_of(round_to(self.truth, self.format))

    def rms_error_of(self, other: Tensor) -> float:
        """Returns the rms error of other values of the same tensor, over elements that
        are finite in output, truth and these; 0 without any."""
        usable = self.truth.isfinite() & self.values.isfinite() & other.isfinite()
        error = (other - self.truth)[usable]
        return math.sqrt(float(error.square().sum()) / max(1, error.numel()))


class Search:
    """The search for what explains each output, and the best explanation so far. Outputs
    of integers or complex numbers, of another shape than the reference's, of fewer than
    LEAST_NUMBERS numbers, and in which fewer than LEAST_ERRING numbers err, are left
    out."""

    def __init__(
        self, reference: FunctionReference, outputs: Mapping[str, Tensor]
    ) -> None:
        self.reference = reference
        plain, truth = reference.plain.tensors, reference.truth
        self.wrong = {
            name: Wrong(
                values=x.double(),
                truth=truth[name],
                format=values_format(plain[name].dtype),
            )
            for name, x in outputs.items()
            if truth[name].is_floating_point()
            and x.shape == truth[name].shape
            and x.numel() >= LEAST_NUMBERS
        }
        self.wrong = {n: x for n, x in self.wrong.items() if x.effective >= LEAST_ERRING}
        self.errors = {
            name: wrong.left_by(wrong.truth)[0] for name, wrong in self.wrong.items()
        }
        self.floors = {
            name: wrong.left_by_rounding() for name, wrong in self.wrong.items()
        }
        self.best: dict[str, OtherFunction] = {}
        self.explained: set[str] = set()  # of which nothing more could be explained
        self.effects: set[str] = set()  # whose best may be the effect of another function
        size = sum(x.numel() for x in reference.arguments.leaves().values())
        self.raised: list[str] = []  # what could not be computed, and why
        self.tries = max(LEAST_TRIES, WORK // max(size, 1))
        self.until = time.process_time() + SECONDS

    @cached_property
    def like_rounding(self) -> dict[str, float]:
        """Returns for each output LIKE times the rms error that rounding explains. That
        is the larger of two: that of its exact values rounded once, and that of the
        reference rounded at every operation, to nearest, where that runs again."""
        try:
            rounded = self.reference.rounded[0]
        except Exception:  # the reference is foreign
            rounded = {}
        explained = dict(self.floors)
        for name, values in rounded.items():
            if name in explained:
                error = self.wrong[name].rms_error_of(values)
                explained[name] = max(explained[name], error)
        return {name: LIKE * error for name, error in explained.items()}

    @property
    def is_late(self) -> bool:
        """Whether SECONDS of CPU have passed since the search began."""
        return time.process_time() > self.until

    def spend(self) -> bool:
        """Counts one more run, and returns whether it may be made: runs are left, and
        SECONDS of CPU are not over."""
        self.tries -= 1
        return self.tries >= 0 and not self.is_late

    @property
    def is_over(self) -> bool:
        """Whether nothing better can come: no runs are left, SECONDS of CPU are over, or
        of each output an alternative has left no more error than OF_ROUNDING times its
        own rounding makes. True without outputs."""
        is_explained = len(self.explained) == len(self.wrong)
        return self.tries <= 0 or is_explained or self.is_late

    def consider(
        self,
        name: str,
        words: str,
        other: Tensor | None,
        *,
        is_effect: bool = False,
        is_fitted: bool = False,
    ) -> None:
        """Takes an alternative to the output `name`, which the search must have, as its
        best explanation where it leaves at most a tenth of the rms error, and CLEARLY
        less than the best so far. It leaves the lesser of two errors: its own, and that
        of itself rounded once. Where the best so far may be another function's effect
        (`is_effect`), an alternative that is none may leave a little more. One with a
        number that was fitted (`is_fitted`) may leave no more than LIKE times what
        rounding does, or a FITTED-th. An output without an error has no explanation. Sets
        `best`, `explained` and `effects`. None, another shape and an alternative that is
        not finite change nothing."""
        error = self.errors[name]
        left, rounded = self.wrong[name].left_by(other)
        if not error or not math.isfinite(left):
            return
        if left <= OF_ROUNDING * self.floors[name] or not rounded:
            self.explained.add(name)
        cut = LARGEST if not rounded else min(error / rounded, LARGEST)
        if is_fitted and cut < FITTED and rounded > self.like_rounding[name]:
            return
        before = self.best.get(name)
        wanted = 1 / CLEARLY if name in self.effects and not is_effect else CLEARLY
        if cut < TENFOLD or (before is not None and cut <= wanted * before.cut):
            return
        (self.effects.add if is_effect else self.effects.discard)(name)
        share = max(0.0, 1 - left / error)
        self.best[name] = OtherFunction(words=words, cut=cut, share=share)

    def consider_all(
        self, words: str, values: Values, *, is_fitted: bool = False
    ) -> None:
        """Takes the tensors of `values`, by name, as alternatives to the outputs; outputs
        that are not in `values` stay as they are."""
        for name in self.wrong:
            self.consider(name, words, values.get(name), is_fitted=is_fitted)

    def run(self, other: OtherReference) -> None:
        """Computes another function and takes its results as alternatives to the outputs.
        Where it raises an exception, nothing is taken, and `raised` notes which function
        and why."""
        try:
            results = other.results()
        except Exception as error:  # the reference is foreign, and this no run of its own
            self.raised.append(f"`{other.words}` ({one_line(error)})")
            return
        self.consider_all(other.words, results)

    def fit(self, number: NumberInUse) -> None:
        """Fits a number of the reference to each output. Where another number leaves
        PROMISING times less of an output's error, the results with it are taken as
        alternatives to all outputs. Where these are the best of that output and a term
        may only vanish with the number, `effects` notes the output."""
        for name, wrong in self.wrong.items():
            error = self.errors[name]

            def residual(values: Values, of: Wrong = wrong, name: str = name) -> float:
                """Returns what results leave of the output's error."""
                return of.left_by(values.get(name))[1]

            other, left = fitted(number, residual, error, self.spend)
            if left * PROMISING < error and other != number.value:
                words = number.words(other)
                self.consider_all(words, number.results(other), is_fitted=True)
                best = self.best.get(name)
                if best and best.words == words and number.may_vanish(other):
                    self.effects.add(name)
                    self.explained.discard(name)


def causes_of(
    reference: FunctionReference, outputs: Mapping[str, Tensor], earlier: Values
) -> dict[str, OtherFunction]:
    """Returns the function that explains each output best, by the output's name. A
    function explains an output of which it leaves at most a tenth of the rms error.
    Outputs that none explains are left out, and so are those that `Search` leaves out.
    `outputs`: an implementation's, with names of the reference's; `earlier`: the exact
    results of a call before, which may be empty. Runs the reference many times, fewer for
    large inputs; after SECONDS of CPU it begins no other run. Raises MeasurementError
    where nothing explains any output and these seconds were over, or some functions could
    not be computed; and what the reference raises on the call's own arguments."""
    search = Search(reference, outputs)
    for other in simplest_references(reference):
        if not search.is_late:
            search.run(other)
    for name, wrong in search.wrong.items():
        floor = search.floors[name]
        for result in other_results(name, wrong.values, reference, earlier, floor):
            search.consider(
                name,
                result.words,
                result.values,
                is_effect=result.is_effect,
                is_fitted=result.is_fitted,
            )
    if search.effects:
        for other in references_of_other_inputs(reference):
            if search.spend():
                search.run(other)
    for number in numbers_of(reference):
        if not search.is_over:
            search.fit(number)
    for other in other_references(reference):
        if search.is_over or not search.spend():
            break
        search.run(other)
    if search.is_late and not search.best:
        raise MeasurementError(f"the search ended after {SECONDS:g} s of CPU")
    if search.raised and not search.best:
        raise MeasurementError(
            f"{len(search.raised)} of the functions that numdev tries could not be "
            f"computed here, the first {search.raised[0]}"
        )
    return search.best
