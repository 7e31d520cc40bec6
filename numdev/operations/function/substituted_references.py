"""Other functions made from a reference: of changed arguments and parameters, with other
operations, in other formats.

Each is an `OtherReference`: words, and what computes its exact results. Those that say
less and cost less come first, since only as many are tried as the inputs' size allows."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from numdev.exact.wide_tensors import UNROUNDED
from numdev.formats import FORMATS, Format, format_named
from numdev.operations.function.confusable_operations import (
    EpsOutside,
    to_base_two,
    twins,
)
from numdev.operations.function.planted_faults import NARROWER, faults_of_inputs
from numdev.operations.function.reference import FunctionReference
from numdev.operations.function.substituted_operations import (
    PRODUCTS,
    SUMS,
    Change,
    Notes,
    OfCall,
    OperatorCall,
    OtherOperations,
    divided_by_less,
    left_out,
    narrow_factors,
    rounded_result,
    shorter,
    summed_in_blocks,
    truncated,
)
from numdev.operations.function.trees import Arguments, Values

MAX_CALLS = 8  # of an operator, of which one alone is changed
BLOCKS = (16, 32, 64, 128, 256, 8, 4, 2, 1)  # terms of a sum, that are added at once
SHARES = (16, 8, 4, 2)
PARTIAL = (16, 32, 64, 128)
ADDED = (1.0, -1.0)  # to an argument: a weight that is stored less 1


class OtherReference(NamedTuple):
    """A function in words, and what computes its exact results by name. That raises what
    the reference raises as this function."""

    words: str
    results: Callable[[], Values]


def simplest_references(reference: FunctionReference) -> Iterator[OtherReference]:
    """Yields functions that only scale some results, and whose words say more than a
    scale: means by n - 1, logarithms to base 2. They are tried before any scale is."""
    words = "means divide by n - 1, or a sample variance by n"
    yield OtherReference(words, _with(reference, divided_by_less))
    yield OtherReference("logarithms are to the base 2", _with(reference, to_base_two))


def other_references(reference: FunctionReference) -> Iterator[OtherReference]:
    """Yields functions made from the reference, but for those of `simplest_references`
    and those with other numbers. Runs the reference once, on its own arguments, to learn
    its operators; where that raises, operators that it did not reach are left out."""
    calls = calls_of_operators(reference)
    yield from _of_other_sums(reference, calls)
    yield from references_of_other_inputs(reference)
    yield from _of_other_parameters(reference)
    yield from _of_other_options(reference)
    yield from _of_missing_operations(reference, calls)
    for words, change in twins(calls):
        yield OtherReference(words, _with(reference, change))
    words = "eps is added to the root, not under it"
    yield OtherReference(words, partial(changed, reference, EpsOutside))
    yield from _of_narrow_operations(reference, calls)
    yield from _of_other_calls(reference, calls)


def changed(reference: FunctionReference, make: Callable[[], Change]) -> Values:
    """Returns the exact results of the reference with other operations, by name. `make`:
    makes the change for this run. Raises what the reference raises with it."""
    return reference.computed(UNROUNDED, within=OtherOperations(make()))


def _with(reference: FunctionReference, change: Change) -> Callable[[], Values]:
    """Returns a function that computes the exact results of the reference with other
    operations, as `changed`. `change`: one that may be used in several runs."""
    return partial(changed, reference, lambda: change)


def calls_of_operators(reference: FunctionReference) -> Mapping[str, int]:
    """Returns how often the reference calls each operator that returns floating-point
    tensors and no view, by name. The reference is run once; where it raises, only what it
    called before is counted."""
    notes = Notes()
    with contextlib.suppress(Exception):  # the reference is foreign
        changed(reference, lambda: notes)
    return notes.calls


def exactly(reference: FunctionReference, arguments: Arguments) -> Values:
    """Returns the exact results of the reference on other arguments, by name. Raises what
    the reference raises on them."""
    return reference.computed(UNROUNDED, arguments)


# --- other arguments ------------------------------------------------------------------


def references_of_other_inputs(reference: FunctionReference) -> Iterator[OtherReference]:
    """Yields the reference on each wrong input of `faults_of_inputs`, and on those of
    `_without_strides` and `_other_values`; then with each two arguments of one shape and
    dtype exchanged."""
    arguments = reference.arguments
    for fault in faults_of_inputs(arguments):
        wrong = fault.applied(arguments)
        yield OtherReference(fault.words, partial(exactly, reference, wrong))
    leaves = arguments.leaves()
    for name, x in leaves.items():
        yield from _without_strides(reference, name, x)
        for words, other in _other_values(name, x):
            wrong = arguments.mapped(partial(_replaced, values={name: other}))
            yield OtherReference(words, partial(exactly, reference, wrong))
    names = list(leaves)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            x, y = leaves[first], leaves[second]
            if (x.shape, x.dtype) == (y.shape, y.dtype):
                swap = {first: y, second: x}
                wrong = arguments.mapped(partial(_replaced, values=swap))
                yield OtherReference(
                    f"{first} and {second} are exchanged",
                    partial(exactly, reference, wrong),
                )


def _without_strides(
    reference: FunctionReference, name: str, x: Tensor
) -> Iterator[OtherReference]:
    """Yields the reference on an argument whose memory is read in its order, as by code
    that takes the argument for contiguous; and the same where results of the argument's
    shape are also written in the argument's layout. Nothing for a contiguous argument, or
    one whose elements do not fill its memory."""
    extent = 1 + sum((n - 1) * k for n, k in zip(x.shape, x.stride(), strict=True))
    if x.is_contiguous() or x.numel() != extent:
        return
    memory = torch.as_strided(x, (x.numel(),), (1,)).reshape(x.shape)
    wrong = reference.arguments.mapped(partial(_replaced, values={name: memory}))

    def written() -> Values:
        """Returns the results by name, those of the argument's shape as if written in its
        layout."""
        return {
            n: torch.as_strided(y.contiguous(), y.shape, x.stride()).contiguous()
            if y.shape == x.shape
            else y
            for n, y in exactly(reference, wrong).items()
        }

    words = f"{name} is read as if it were contiguous"
    yield OtherReference(words, partial(exactly, reference, wrong))
    yield OtherReference(f"{words}, and the result is written so", written)


def _replaced(name: str, x: Tensor, values: Mapping[str, Tensor]) -> Tensor:
    """Returns the tensor `name` of `values`; `x` where `values` lacks it."""
    return values.get(name, x)


def _other_values(name: str, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields (words, tensor of the same shape and dtype) for what may be read in place of
    an argument: shifted, negated, exchanged or repeated numbers, or indices (int32,
    int64) moved by one, clamped to 0 and the largest. Nothing for other dtypes and empty
    tensors."""
    if x.is_floating_point() and x.numel():
        number = x.float() if x.itemsize == 1 else x  # nothing computes in 8 bits
        for added in ADDED:
            yield f"{added:+g} is added to {name}", (number + added).to(x.dtype)
        yield f"{name} is read with the other sign", (-number).to(x.dtype)
        sizes = x.shape[-2:]
        if len(sizes) == 2 and 1 not in sizes and sizes[0] != sizes[1]:
            words = f"{name} is read as if its last two axes were exchanged in memory"
            yield words, x.mT.reshape(x.shape)
        if x.ndim >= 2:
            for axis in range(x.ndim - 1):
                if x.shape[axis] > 1:
                    same = x.narrow(axis, 0, 1).expand_as(x)
                    yield f"place 0 of axis {axis} of {name} is read for all", same
    elif x.dtype in (torch.int32, torch.int64) and x.numel():
        largest = int(x.max())
        for step in (1, -1):
            yield f"{step:+d} is added to {name}", (x + step).clamp(0, largest)


def _of_other_parameters(reference: FunctionReference) -> Iterator[OtherReference]:
    """Yields the reference with each floating-point parameter and persistent buffer of a
    module filled with 0 and with 1, in a copy, where it is not that already; nothing
    where the reference is no module itself."""
    module = reference.function
    if not isinstance(module, nn.Module):
        return
    for name, x in module.state_dict().items():
        for value in (0.0, 1.0):
            if x.is_floating_point() and not bool((x == value).all()):
                other = copy.deepcopy(module)
                other.state_dict()[name].fill_(value)
                run = partial(_of_function, reference, other)
                yield OtherReference(f"{name} is taken for {value:g}", run)


def _of_function(reference: FunctionReference, other: Callable[..., object]) -> Values:
    """Returns the exact results of another function on the reference's call, by name.
    Raises what the other function raises."""
    return dataclasses.replace(reference, function=other).computed(UNROUNDED)


def _of_other_options(reference: FunctionReference) -> Iterator[OtherReference]:
    """Yields the reference with another value of each option that is a bool or an
    integer, one option at a time. Options are arguments, and parameters with a
    default."""
    for name, value in options_of(reference).items():
        for other in _other_options(value):
            words = f"{name} is {other} in place of {value}"
            wrong = with_option(reference.arguments, name, other)
            yield OtherReference(words, partial(exactly, reference, wrong))


def options_of(reference: FunctionReference) -> dict[str, object]:
    """Returns the numbers and bools among the arguments, and among the defaults of
    parameters that are not passed, by name; empty where the signature cannot be read."""
    called = reference.function
    called = called.forward if isinstance(called, nn.Module) else called
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return {}
    arguments = reference.arguments
    options: dict[str, object] = {
        p.name: p.default for p in parameters if p.default is not p.empty
    }
    options |= dict(zip(arguments.names, arguments.positional, strict=False))
    options |= arguments.named
    return {n: x for n, x in options.items() if isinstance(x, bool | int | float)}


def _other_options(value: object) -> list[object]:
    """Returns what an option may be mistaken for: for a bool its negation, for an integer
    one more and one less; nothing for any other value."""
    if isinstance(value, bool):
        return [not value]
    return [value + 1, value - 1] if isinstance(value, int) else []


def with_option(arguments: Arguments, name: str, value: object) -> Arguments:
    """Returns the arguments with another value of the option `name`: in its place where
    it is passed by place, else by name."""
    if name in arguments.names[: len(arguments.positional)]:
        i = arguments.names.index(name)
        positional = list(arguments.positional)
        positional[i] = value
        return dataclasses.replace(arguments, positional=tuple(positional))
    return dataclasses.replace(arguments, named={**arguments.named, name: value})


# --- other operations -----------------------------------------------------------------


def cuts() -> Iterator[tuple[str, Callable[[int], int]]]:
    """Yields pairs of what a sum leaves out, in words (`their last term`), and a function
    of its number of terms n, which returns how many go: above 0 the last ones, below 0
    the first ones."""
    yield "their last term", lambda n: 1
    yield "their first term", lambda n: -1
    for share in SHARES:
        yield f"the last 1/{share} of their terms", partial(_share, of=share)
    for block in PARTIAL:
        words = f"what fills no block of {block} terms"
        yield words, partial(_partial_block, of=block)


def _share(n: int, of: int) -> int:
    """Returns the `of`-th part of n, rounded down."""
    return n // of


def _partial_block(n: int, of: int) -> int:
    """Returns how many of n terms fill no block of `of`: n modulo `of`."""
    return n % of


def _of_other_sums(
    reference: FunctionReference, calls: Mapping[str, int]
) -> Iterator[OtherReference]:
    """Yields the reference with sums without some of their terms, for each of `cuts`: all
    sums at once (a mean may divide by all terms or by those that stay), then, where it
    calls several operators of SUMS, each one's alone. Nothing where the reference calls
    none of these."""
    if not SUMS & calls.keys():
        return

    for what, cut in cuts():
        words = f"sums leave out {what}"
        yield OtherReference(words, _with(reference, partial(shorter, cut=cut)))
        if "mean" in calls:
            whole = partial(shorter, cut=cut, counts=False)
            words += ", and means count them"
            yield OtherReference(words, _with(reference, whole))
    names = [name for name in calls if name in SUMS]
    for name in names if len(names) > 1 else ():
        for what, cut in cuts():
            words = f"{name} leaves out {what.replace('their', 'the')}"
            change = partial(of_operator, name=name, change=partial(shorter, cut=cut))
            yield OtherReference(words, _with(reference, change))


def of_operator(operation: OperatorCall, name: str, change: Change) -> object:
    """Returns what `change` returns for a call of the operator `name`; NotImplemented for
    any other operator."""
    return change(operation) if operation.name == name else NotImplemented


def _of_missing_operations(
    reference: FunctionReference, calls: Mapping[str, int]
) -> Iterator[OtherReference]:
    """Yields the reference with all calls of an operator left out, for each operator of
    at most MAX_CALLS calls."""
    for name, count in calls.items():
        if count <= MAX_CALLS:
            change = partial(of_operator, name=name, change=left_out)
            run = _with(reference, change)
            yield OtherReference(f"{name} is left out", run)


def narrow_formats(dtype: torch.dtype) -> list[Format]:
    """Returns the formats that code in a dtype may compute in by mistake: for float32
    TF32, bfloat16 and float16; for others bfloat16 and float16 (also where that is the
    dtype's own), and the coarser one of NARROWER, if there is one."""
    names = ["bfloat16", "float16"]
    if dtype == torch.float32:
        names = ["tf32", *names]
    elif str(dtype).removeprefix("torch.") in NARROWER:
        names.append(NARROWER[str(dtype).removeprefix("torch.")])
    return [format_named(name) for name in names]


def _of_narrow_operations(
    reference: FunctionReference, calls: Mapping[str, int]
) -> Iterator[OtherReference]:
    """Yields the reference with factors of products in other formats; with sums that are
    rounded to 16 bits block by block; with all operations rounded to another format, then
    each operator alone. The formats are `narrow_formats` of the first real floating-point
    argument's dtype, of float32 without one."""
    dtypes = [x.dtype for x in reference.arguments.leaves().values()]
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    dtype = floats[0] if floats else torch.float32
    formats = narrow_formats(dtype)

    if PRODUCTS & calls.keys() or "convolution" in calls:
        for fmt in formats:
            for what, which in (("", (0, 1)), ("left ", (0,)), ("right ", (1,))):
                words = f"the {what}factors of products are in {fmt.name}"
                change = partial(narrow_factors, fmt=fmt, which=which)
                yield OtherReference(words, _with(reference, change))
                if dtype == torch.float32 and fmt.emax == FORMATS["float32"].emax:
                    change = partial(change, narrowed=truncated)
                    words = f"the {what}factors of products are cut to {fmt.name}"
                    yield OtherReference(words, _with(reference, change))
    if (PRODUCTS | {"sum", "mean"}) & calls.keys():
        for name in ("bfloat16", "float16"):
            for block in BLOCKS:
                words = f"sums are accumulated in {name}, {block} terms at a time"
                summed = partial(summed_in_blocks, fmt=FORMATS[name], block=block)
                yield OtherReference(words, _with(reference, summed))
    for fmt in formats:
        words = f"every operation is rounded to {fmt.name}"
        yield OtherReference(words, _with(reference, partial(rounded_result, fmt=fmt)))
    for operator in calls:
        for fmt in formats:
            words = f"{operator} is rounded to {fmt.name}"
            rounding = partial(rounded_result, fmt=fmt)
            change = partial(of_operator, name=operator, change=rounding)
            yield OtherReference(words, _with(reference, change))


def _of_other_calls(
    reference: FunctionReference, calls: Mapping[str, int]
) -> Iterator[OtherReference]:
    """Yields the reference with a single call of an operator left out, or with fewer
    terms in its sum, for operators of 2 to MAX_CALLS calls. Then it yields the reference
    with the second argument of an addition, subtraction, multiplication or division taken
    for its result, for each of the first MAX_CALLS calls."""
    for name, count in calls.items():
        for i in range(count if 1 < count <= MAX_CALLS else 0):
            which = f"call {i + 1} of {count} of {name}"
            ways: list[tuple[str, Change]] = [(f"{which} is left out", left_out)]
            if name in SUMS:
                ways += [
                    (f"{which} leaves out {what.replace('their', 'the')}",
                     partial(shorter, cut=cut)) for what, cut in cuts()
                ]  # fmt: skip
            for words, change in ways:
                make = partial(OfCall, name, i, change)
                yield OtherReference(words, partial(changed, reference, make))
    for name in ("add", "sub", "mul", "div"):
        for i in range(min(calls.get(name, 0), MAX_CALLS)):
            make = partial(OfCall, name, i, partial(left_out, argument=1))
            words = f"the first argument of call {i + 1} of {name} is left out"
            yield OtherReference(words, partial(changed, reference, make))
