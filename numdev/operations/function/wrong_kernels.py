"""Fourteen kernels that are wrong on purpose, made from a reference without knowing it:
what a tolerance lets through is told by which of them it passes.

Eight change what the reference returns, six what goes into it. Each returns what the
reference returns as PyTorch runs it here, in the format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from numdev.operations.function.planted_faults import (
    SHARE,
    faults_of_outputs,
    narrower,
    read_in,
    without_last,
)
from numdev.operations.function.reference import FunctionReference
from numdev.operations.function.trees import Arguments, Values

COUNT = 14


@dataclass(frozen=True, kw_only=True)
class WrongKernel:
    """A wrong kernel in words, and what it returns on a call: by name; None where the
    reference does not run on its arguments."""

    words: str
    outputs: Callable[[FunctionReference, Arguments], Values | None]


def wrong_kernels(arguments: Arguments) -> list[WrongKernel]:
    """Returns COUNT wrong kernels for calls of these arguments; eight, those that change
    outputs, where no argument is real floating-point and not empty. A kernel's `outputs`
    takes a call and other data of the same shapes."""
    kernels = [
        WrongKernel(words=fault.words, outputs=partial(_of_outputs, change=fault.change))
        for fault in faults_of_outputs()
    ]
    floats = {n: x for n, x in arguments.leaves().items() if _has_numbers(x)}
    if not floats:
        return kernels
    by_size = sorted(floats, key=lambda name: -floats[name].numel())
    for words, change in _changes_of_inputs(by_size, floats):
        kernels.append(
            WrongKernel(words=words, outputs=partial(_of_inputs, change=change))
        )
    kernels.append(WrongKernel(words="it is other data's result", outputs=_of_others))
    return kernels


def _has_numbers(x: Tensor) -> bool:
    """Whether a tensor is real floating-point, and not empty."""
    return x.is_floating_point() and x.numel() > 0


Named = Callable[[str, Tensor], Tensor]


def _changes_of_inputs(
    names: Sequence[str], floats: Values
) -> Iterator[tuple[str, Named]]:
    """Yields five changes of arguments, in words and as a function of a tensor's name and
    itself. Three are of the largest argument (the first of `names`), two of the smallest
    (the last). `names`: at least one."""
    largest, smallest = names[0], names[-1]
    x = floats[largest]
    axis = x.ndim - 1
    size = x.shape[axis] if x.ndim else 1
    many = max(1, size // SHARE)
    cut = partial(_cut, name=largest, axis=axis, last=many)
    yield (
        f"the last {many} of {size} places of axis {axis} of {largest} are left out",
        cut,
    )
    one = partial(_cut, name=largest, axis=axis, last=1)
    yield f"the last place of axis {axis} of {largest} is left out", one
    yield f"{smallest} is taken for 0", partial(_filled, name=smallest, value=0.0)
    yield f"{smallest} is taken for 1", partial(_filled, name=smallest, value=1.0)
    fmt = narrower(x.dtype)
    words = f"{largest} is read in {fmt.name if fmt else 'no format'}"
    yield words, partial(_narrowed, name=largest)


def _cut(name_of: str, x: Tensor, name: str, axis: int, last: int) -> Tensor:
    """Returns x with 0 in its last places along an axis, as a copy, where `name_of` is
    `name`; any other tensor as it is. `last`: how many; a scalar is 0 then."""
    if name_of != name:
        return x
    return without_last(x, axis, min(last, x.shape[axis])) if x.ndim else x * 0


def _filled(name_of: str, x: Tensor, name: str, value: float) -> Tensor:
    """Returns the tensor `name` filled with a number, any other as it is."""
    return torch.full_like(x, value) if name_of == name else x


def _narrowed(name_of: str, x: Tensor, name: str) -> Tensor:
    """Returns the tensor `name` rounded to a coarser format, in its own dtype, if there
    is such a format; any other tensor as it is."""
    fmt = narrower(x.dtype)
    return x if name_of != name or fmt is None else read_in(x, fmt)


def _of_outputs(
    call: FunctionReference, others: Arguments, change: Callable[[Tensor], Tensor]
) -> Values:
    """Returns the reference's outputs by name as PyTorch runs it, each real
    floating-point one changed, in its dtype. `others` is not used. Raises what the
    reference raises."""
    return {
        name: change(x).to(x.dtype) if x.is_floating_point() else x
        for name, x in call.plain.outputs.items()
    }


def _of_inputs(
    call: FunctionReference, others: Arguments, change: Named
) -> Values | None:
    """Returns what the reference returns of changed arguments; None where it raises.
    `others` is not used."""
    return _run(call, call.arguments.mapped(change))


def _of_others(call: FunctionReference, others: Arguments) -> Values | None:
    """Returns what the reference returns of other data; None where it raises."""
    return _run(call, others)


def _run(call: FunctionReference, arguments: Arguments) -> Values | None:
    """Returns what the reference returns of these arguments as PyTorch runs it here; None
    where it raises."""
    try:
        return call.as_pytorch(arguments).outputs
    except Exception:  # the reference is foreign, and these are not its data
        return None
