"""How much each input of a call decides, taken one by one.

An input is an argument, or a parameter or buffer of a module. It alone gets other
numbers; where the exact result then moves by little beside what rounding explains, a
function that reads that input wrong, or not at all, would pass. The same is asked of
numbers that the reference computes with, as an eps. Other numbers of an input are those
of other data, else its own elements in another order, else, of one number repeated,
itself times 1/2 to 3/2. Of an input that is all 0 or all 1 and has no other data nothing
is computed: code that leaves it out returns the same."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from numdev.metrics.bit_checksums import same
from numdev.operations.function.function_runs import module_of_function
from numdev.operations.function.inputs import TRIVIAL, reordered
from numdev.operations.function.judged_call import FunctionCall, distance, stacked
from numdev.operations.function.reference import FunctionReference
from numdev.operations.function.substituted_numbers import (
    LARGEST_EPS,
    NumberInUse,
    numbers_of,
)
from numdev.operations.function.trees import Values, looks_unwritten

WORK = 1 << 26  # numbers of inputs, times how many inputs are tried
LEAST_TRIED = 8
SEED = 1
LARGEST_INPUTS = 1 << 20  # numbers of the inputs, above which numbers are not tried
LARGEST_NUMBER = 1e4
INFINITE = 1e300  # JSON has no infinity
LEAST_MOVED = 3.0  # times what rounding explains, below which an input is not judged
NOT_TRIED = "not tried: the inputs are large, and many"
NO_OTHER = "no other value of it is at hand"
RAISES = "the reference raises for other values of it"


class Influence(NamedTuple):
    """How far an input of a call moves what the reference returns."""

    name: str
    moved: float | None  # times what rounding explains, of the tensor that moves most
    tensor: str | None = None
    changed: int | None = None  # integers of the results that become others
    why: str | None = None  # why `moved` is None, or what 0 of it means
    is_number: bool = False  # that the reference computes with


def influences_of(call: FunctionCall, names: Sequence[str] = ()) -> Iterator[Influence]:
    """Yields the influence of each input of a call, in their order. `names`: of these
    alone; empty: of all. An empty input, and memory for an output, are left out. Where
    inputs are large only the first are tried (LEAST_TRIED at least), and the others'
    `moved` is None. For an input that has no other numbers `moved` is None, or 0 where it
    is all 0 or all 1; it is None too where the reference raises for the other numbers.
    `why` says why `moved` is None. Where an input is tried, raises what the reference
    raises on the call's own arguments."""
    inputs = call.draws[0].inputs
    size = sum(x.numel() for x in inputs.values())
    tries = max(LEAST_TRIED, WORK // max(size, 1))
    for name, x in inputs.items():
        if not x.numel() or (names and name not in names) or looks_unwritten(x):
            continue
        changed = [_other_values(call, name, i) for i in range(len(call.draws))]
        others = [y for y in changed if y is not None]
        if len(others) < len(changed):
            trivial = _is_trivial(x)
            yield Influence(
                name, 0.0 if trivial else None, why=None if trivial else NO_OTHER
            )
        elif not tries:
            yield Influence(name, None, why=NOT_TRIED)
        else:
            tries -= 1
            yield _measured(call, name, others)


@dataclass(frozen=True, kw_only=True)
class NumberTried:
    """A number that the reference of a call computes with (an eps, a bound), and the one
    that is tried in its place: tenfold where it may be an eps, else doubled."""

    in_draws: tuple[NumberInUse, ...]  # one for each draw

    @property
    def other(self) -> float:
        """Returns the number that is tried."""
        value = self.in_draws[0].value
        return value * (10 if 0 < value <= LARGEST_EPS else 2)

    @property
    def name(self) -> str:
        """Returns the name, which has both numbers: `eps 1e-06 as 1e-05`."""
        number = self.in_draws[0]
        return f"{number.label} {number.value:.4g} as {self.other:.4g}"


def numbers_tried(call: FunctionCall, names: Sequence[str] = ()) -> list[NumberTried]:
    """Returns the numbers that the reference computes with, without any whose size is
    above LARGEST_NUMBER, which stands for infinity. `names`: of these names alone; empty:
    of all. Empty where inputs have more than LARGEST_INPUTS numbers, or the exact run of
    the reference raises."""
    if sum(x.numel() for x in call.draws[0].inputs.values()) > LARGEST_INPUTS:
        return []
    by_draw = [list(numbers_of(draw)) for draw in call.draws]
    every = [NumberTried(in_draws=each) for each in zip(*by_draw, strict=False)]
    return [
        x
        for x in every
        if abs(x.in_draws[0].value) <= LARGEST_NUMBER and (not names or x.name in names)
    ]


def influences_of_numbers(
    call: FunctionCall, numbers: Sequence[NumberTried]
) -> Iterator[Influence]:
    """Yields the influence of each number of `numbers_tried`. Raises what the rounded
    runs of the reference raise."""
    for number in numbers:
        results = [each.results(number.other) for each in number.in_draws]
        influence = _influence_on_most_moved(call, number.name, results)
        changes = bool(influence.moved or influence.changed)
        why = influence.why or (None if changes else "which changes nothing")
        yield influence._replace(why=why, is_number=True)


def _other_values(call: FunctionCall, name: str, draw: int) -> Tensor | None:
    """Returns other numbers for an input of a draw, of its shape and dtype: those of
    other data, else its elements in another order, else, of one real floating-point
    number repeated, itself times 1/2 to 3/2. None where it is all 0 or all 1, or one
    integer or complex number repeated, and other data have none."""
    x = call.draws[draw].inputs[name]
    if draw < len(call.others):
        other = call.others[draw].leaves().get(name)
        same_form = other is not None and (other.shape, other.dtype) == (x.shape, x.dtype)
        if other is not None and same_form and not same(other, x):
            return other
    shuffled = reordered(x, SEED)
    if not same(shuffled, x):
        return shuffled
    if _is_trivial(x) or not x.is_floating_point():
        return None
    generator = torch.Generator().manual_seed(SEED)
    factors = 0.5 + torch.rand(x.shape, generator=generator, dtype=torch.float64)
    return (x.double() * factors.to(x.device)).to(x.dtype)


def _is_trivial(x: Tensor) -> bool:
    """Whether a tensor is 0 everywhere, or 1 everywhere; True for an empty one."""
    return any(bool((x == value).all()) for value in TRIVIAL)


def _measured(call: FunctionCall, name: str, others: Sequence[Tensor]) -> Influence:
    """Returns the influence of an input. `others`: other numbers for it, one tensor for
    each draw. Gradients count only where outputs and written arguments move by less than
    LEAST_MOVED and no integer changes; the reference is run once more for them."""
    for backward in dict.fromkeys((False, call.draws[0].backward)):
        results = [
            _exact_with(draw, name, other, backward=backward)
            for draw, other in zip(call.draws, others, strict=True)
        ]
        influence = _influence_on_most_moved(call, name, results)
        if influence.moved is None or influence.changed:
            break
        if influence.moved >= LEAST_MOVED:
            break
    return influence


def _influence_on_most_moved(
    call: FunctionCall, name: str, results: Sequence[Values]
) -> Influence:
    """Returns the influence of an input on the tensor that moves most, from the exact
    results of all draws with other numbers in its place. `moved` is None where one of the
    results is empty, and 0 where no tensor of floats can be compared. Integers that
    differ are counted in `changed`. A tensor of another shape, or with an element that is
    not finite any more, moves by INFINITE. Raises what the reference raises on the call's
    own arguments."""
    judges = call.judges
    if not all(results):
        return Influence(name, None, why=RAISES)
    moved: dict[str, float] = {}
    changed = 0
    for tensor, judge in judges.items():
        if any(tensor not in values for values in results):
            continue
        other = stacked([values[tensor] for values in results])
        if judge.errors is None:
            differs = other.shape != judge.truth.shape or other != judge.truth
            changed += int(torch.as_tensor(differs).sum())
            continue
        same_shape = other.shape == judge.truth.shape
        lost = not same_shape or bool((judge.errors.usable & ~other.isfinite()).any())
        moved[tensor] = INFINITE if lost else distance(other, judge.errors)
    most = max(moved, key=lambda tensor: moved[tensor], default=None)
    return Influence(name, moved[most] if most else 0.0, most, changed)


def _exact_with(
    reference: FunctionReference, name: str, other: Tensor, *, backward: bool
) -> Values:
    """Returns the exact results, by name, with the numbers `other`, of its shape and
    dtype, in place of the input `name`: an argument, a parameter or a buffer. Empty where
    the reference raises. Without `backward` gradients are left out."""
    arguments = reference.arguments
    if name in arguments.leaves():
        arguments = arguments.mapped(lambda each, x: other if each == name else x)
    else:
        reference = dataclasses.replace(
            reference, function=_with_parameter(reference.function, name, other)
        )
    return reference.computed_exactly(arguments, backward=backward)


def _with_parameter(
    function: Callable[..., object], name: str, other: Tensor
) -> Callable[..., object]:
    """Returns a copy of a function that is a module or of one, with `other` in the
    parameter or buffer `name` of the module."""
    copied = copy.deepcopy(function)
    module = module_of_function(copied)
    assert module is not None
    with torch.no_grad():
        module.state_dict()[name].copy_(other)
    return copied
