"""The numbers that a reference computes with (an eps, a scale, a slope), and which other
one explains an output: looked for among those that people write, then fitted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch._ops import OpOverload

from numdev.exact.rounded_results import Unrounded
from numdev.operations.function.reference import FunctionReference
from numdev.operations.function.substituted_operations import (
    Notes,
    OtherOperations,
    with_argument,
)
from numdev.operations.function.substituted_references import changed, options_of
from numdev.operations.function.trees import Values

TIMES = (0.0, 2.0, 0.5, 10.0, 0.1, -1.0)  # of a number that the reference computes with
LARGEST_EPS = 1e-2  # of a number that may be an eps, for which there are others
DECADES = [10.0**-k for k in (5, 6, 8, 3, 4, 12, 7, 10, 2, 1)]
STEP = 1e-3  # of a number: how far it is moved for a slope
ITERATIONS = 8
LARGEST_STEP = 3.0  # in factors of e, or of itself
SHARES = (1.0, 0.3)  # of the way to the lowest point
LARGEST = 100.0  # times a number, that its reciprocal may bring it to
PROMISING = 1.3  # times less of the error: from there on a number is fitted
AS_GOOD = 1.05  # times the error that the best number leaves
# What an operation does with its number, in words
CLAUSES = {
    "mul": "it multiplies by {other} in place of {value}",
    "div": "it divides by {other} in place of {value}",
    "add": "it adds {other} in place of {value}",
    "sub": "it subtracts {other} in place of {value}",
    "rsub": "it subtracts from {other} in place of {value}",
    "pow": "the exponent is {other} in place of {value}",
    "masked_fill": "masked places are {other} in place of {value}",
}
UNNAMED = frozenset(("other", "self", "alpha", "value", "exponent", "min", "max"))
COMPARISONS = frozenset(("lt", "le", "gt", "ge", "eq", "ne", "threshold"))
HALVINGS = 9  # of a factor of 2, by which a threshold is moved
GENERAL = "it computes with {other} in place of {value}"
Residual = Callable[[Values], float]
"""Returns the rms error that results leave of an output; infinite where they lack it."""


class OtherNumber(Unrounded):
    """Rounds nothing; puts `other` in place of the number `value` wherever an operator
    reads it; None: nothing is replaced. `met` has, by the numbers that were read, in
    their order, the operator that read each first."""

    def __init__(self, value: float | None = None, other: float = 0.0) -> None:
        self.value, self.other = value, other
        self.met: dict[float, OpOverload] = {}

    def number(
        self, func: OpOverload, value: float, dtype: torch.dtype, device: torch.device
    ) -> float:
        """Returns `self.other` where `value` is `self.value`, else `value` as it is;
        notes in `met` which operator, `func`, read the number first."""
        self.met.setdefault(value, func)
        return self.other if value == self.value else value


@dataclass(frozen=True, kw_only=True, eq=False)
class NumberInUse:
    """A number that a reference computes with. `default_of`: the operator and the name of
    its argument whose default the number is; None: it is written in the reference."""

    reference: FunctionReference
    value: float
    template: str
    default_of: tuple[str, str] | None = None
    is_threshold: bool = False  # results may jump where it moves, and have no slope

    def words(self, other: float) -> str:
        """Returns a clause that says that another number stands in its place: `eps is
        1e-05 in place of 1e-06`, `it adds 2 in place of 1`."""
        return self.template.format(other=f"{other:.4g}", value=f"{self.value:.4g}")

    @property
    def label(self) -> str:
        """Returns the number's name, as `eps`; `number` where it has none."""
        name, _, after = self.template.partition(" is ")
        return name if after and name.isidentifier() else "number"

    def may_vanish(self, other: float) -> bool:
        """Whether another number may fit since a term vanishes with it: an exponent of
        the other sign."""
        return self.template == CLAUSES["pow"] and other * self.value < 0

    def results(self, other: float) -> Values:
        """Returns the exact results with `other` in the number's place, by name; empty
        where the reference raises, since some numbers are none for it."""
        try:
            if self.default_of is not None:
                operator, name = self.default_of
                change = partial(with_argument, operator=operator, name=name, value=other)
                return changed(self.reference, lambda: change)
            return self.reference.computed(OtherNumber(self.value, other))
        except Exception:  # the reference is foreign, and this is no run of its own
            return {}

    def others(self) -> list[float]:
        """Returns the numbers that may stand in its place, each once, finite and other
        than itself: multiples by TIMES, and powers of ten (DECADES) for one above 0 and
        at most LARGEST_EPS."""
        others = [self.value * times for times in TIMES]
        if 0 < self.value <= LARGEST_EPS:
            others += DECADES
        different = [other for other in dict.fromkeys(others) if other != self.value]
        return [other for other in different if math.isfinite(other)]


def numbers_of(reference: FunctionReference) -> Iterator[NumberInUse]:
    """Yields the numbers that the reference computes with. First come those that its
    operators read, each value once, in the order in which they are read; those that are
    not finite are left out. Then come the defaults of its operators' arguments, each
    argument once, but for arguments named in UNNAMED. 0 is left out. Yields nothing where
    the reference raises. It is run once for this, and once more for `reference.plain`
    where that was not read before."""
    read, notes = OtherNumber(), Notes()
    try:
        reference.computed(read, within=OtherOperations(notes))
    except Exception:  # the reference is foreign, and may not run twice
        return
    options = options_of(reference)
    for value, func in read.met.items():
        if value and math.isfinite(value):
            names = notes.numbers.get(value, set())
            template = _template(value, func, options, names)
            yield NumberInUse(
                reference=reference,
                value=value,
                template=template,
                is_threshold=func.overloadpacket.__name__.rstrip("_") in COMPARISONS,
            )
    for (operator, name), value in notes.defaults.items():
        if value and name not in UNNAMED:
            yield NumberInUse(
                reference=reference,
                value=value,
                template=f"{name} is {{other}} in place of {{value}}",
                default_of=(operator, name),
            )


def _template(
    value: float, func: OpOverload, options: Mapping[str, object], names: set[str]
) -> str:
    """Returns the template, with `{other}` and `{value}`, of a clause on another number:
    `eps is {other} in place of {value}` by the name of the reference's only float option
    of that value, else by the only name of the operators' arguments that it comes as
    (`names`), if that is not in UNNAMED, else by what the operator does."""
    of_reference = [n for n, x in options.items() if isinstance(x, float) and x == value]
    if len(of_reference) == 1:
        return f"{of_reference[0]} is {{other}} in place of {{value}}"
    if len(names) == 1 and not names & UNNAMED:
        return f"{min(names)} is {{other}} in place of {{value}}"
    return CLAUSES.get(func.overloadpacket.__name__.rstrip("_"), GENERAL)


def fitted(
    number: NumberInUse, residual: Residual, error: float, spend: Callable[[], bool]
) -> tuple[float, float]:
    """Returns the number that leaves least of an output's error, in as few digits as
    leave as little, and the rms error that it leaves; the number itself and `error` where
    none leaves less. `error`: what the number itself leaves; `spend`: called before each
    run, returns whether the run may be made."""
    best, least = number.value, error

    def tried(other: float) -> float:
        """Returns what another number leaves, and takes it where that is the least."""
        nonlocal best, least
        if not spend():
            return math.inf
        left = residual(number.results(other))
        if left < least:
            best, least = other, left
        return left

    for other in number.others():
        tried(other)
    _refine(tried, lambda: (best, least))
    if number.is_threshold:
        for k in range(HALVINGS):
            for sign in (1, -1):
                tried(best * 2.0 ** (sign * 0.5**k))
    if least < error:
        best, least = _in_few_digits(best, least, tried)
    return best, least


def _refine(
    tried: Callable[[float], float], best: Callable[[], tuple[float, float]]
) -> None:
    """Moves a number towards the lowest error: the number, its logarithm and its
    reciprocal in turn, each to the lowest point of a parabola through three points of the
    squared error, or part of the way. It ends where a round gains less than a hundredth,
    or after ITERATIONS. `tried`: returns what a number leaves, and notes the best;
    `best`: returns the best number so far, and what it leaves."""
    for _ in range(ITERATIONS):
        before = best()[1]
        for move in (_moved, _moved_logarithm, _moved_reciprocal):
            at, left = best()
            if at and left:
                go = _to_lowest(at, left, move, tried)
                go = max(-LARGEST_STEP, min(LARGEST_STEP, go))
                for share in SHARES:
                    if tried(move(at, share * go)) < left:
                        break
        if not best()[1] < 0.99 * before:
            return


def _to_lowest(
    at: float,
    left: float,
    move: Callable[[float, float], float],
    tried: Callable[[float], float],
) -> float:
    """Returns how far, in the units of `move`, the lowest point of the parabola is from
    the number `at`, which leaves `left`; 0 where the parabola has none, or a point is not
    finite."""
    up, down = (tried(move(at, sign * STEP)) for sign in (1, -1))
    if not math.isfinite(up + down):
        return 0.0
    slope = (up**2 - down**2) / 2
    bend = up**2 + down**2 - 2 * left**2
    return -slope / bend * STEP if bend > 0 else 0.0


def _moved(value: float, by: float) -> float:
    """Returns a number moved by `by` times itself."""
    return value * (1 + by)


def _moved_logarithm(value: float, by: float) -> float:
    """Returns a number times e to the power of `by`."""
    return value * math.exp(by)


def _moved_reciprocal(value: float, by: float) -> float:
    """Returns a number whose reciprocal is moved by `by` times itself; at most LARGEST
    times the number."""
    return value / max(1 + by, 1 / LARGEST)


def _in_few_digits(
    value: float, least: float, tried: Callable[[float], float]
) -> tuple[float, float]:
    """Returns the shortest decimal of one to four digits near a number that leaves at
    most AS_GOOD times as much as the number, and what it leaves; (value, least) where
    none does."""
    for digits in range(4):
        short = float(f"{value:.{digits}e}")
        left = least if short == value else tried(short)
        if left <= AS_GOOD * least:
            return short, left
    return value, least
