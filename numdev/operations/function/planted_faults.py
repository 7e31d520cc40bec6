"""Functions that are wrong on purpose, made from a reference without knowing what it
computes.

Each is a change of what goes in, or of what comes out. They run as the reference runs:
exactly, to be named as what a function computes instead (`causes`), and in the format, to
ask a tolerance whether it sees them (`power`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from numdev.formats import Format, format_named, round_to
from numdev.operations.function.trees import Arguments

Change = Callable[[Tensor], Tensor]
NARROWER = {
    "float64": "float32",
    "float32": "tf32",
    "bfloat16": "e8m4",
    "float16": "e5m7",
}
LARGEST_BLOCK = 64
SHARE = 16  # of an axis, that is cut


@dataclass(frozen=True)
class WrongFunction:
    """A change of the argument named `of_input`; None: of the outputs."""

    words: str  # a clause to follow the function's name
    change: Change
    of_input: str | None = None

    def applied(self, arguments: Arguments) -> Arguments:
        """Returns the arguments with the one named `of_input` changed, and the others as
        they are. Nothing changes where `of_input` is None or names no argument."""

        def change(name: str, x: Tensor) -> Tensor:
            """Returns the changed tensor where it is the one named, else `x` itself."""
            return self.change(x) if name == self.of_input else x

        return arguments.mapped(change)


def faults_of_inputs(arguments: Arguments) -> Iterator[WrongFunction]:
    """Yields the changes of each real floating-point argument that is not empty. It is
    filled with 0 and with 1 (unless it is that already); its last places along each axis
    are set to 0, for each count of `cuts_of`; it is transposed, where its last two axes
    are of one size above 1; it is rounded to a coarser format, if its dtype has one."""
    for name, x in arguments.leaves().items():
        if not x.is_floating_point() or not x.numel():
            continue
        for value in (0.0, 1.0):
            if not bool((x == value).all()):
                filled = partial(torch.full_like, fill_value=value)
                yield WrongFunction(f"{name} is taken for {value:g}", filled, name)
        for axis, size in enumerate(x.shape):
            for last in cuts_of(size):
                where = f"the last {last} of {size} places of axis {axis} of {name}"
                cut = partial(without_last, axis=axis, last=last)
                yield WrongFunction(f"{where} are left out", cut, name)
        if x.ndim >= 2 and x.shape[-1] == x.shape[-2] > 1:
            yield WrongFunction(f"{name} is read transposed", transposed, name)
        narrow = narrower(x.dtype)
        if narrow is not None:
            read = partial(read_in, fmt=narrow)
            yield WrongFunction(f"{name} is read in {narrow.name}", read, name)


def read_in(x: Tensor, fmt: Format) -> Tensor:
    """Returns a tensor rounded to a format, in its own dtype."""
    return round_to(x, fmt).to(x.dtype)


def faults_of_outputs() -> Iterator[WrongFunction]:
    """Yields eight changes of a floating-point output of any shape: 0, a half, times
    1.01, negated, averaged, the last row stale, rows shifted, the last block 0. Each has
    a function that returns a new tensor of the same shape; of a scalar the shifted one is
    the scalar itself."""

    yield WrongFunction("it is 0", torch.zeros_like)
    yield WrongFunction("it is one half of it", lambda x: x / 2)
    yield WrongFunction("it is scaled by 1.01", lambda x: x * 1.01)
    yield WrongFunction("it is its negative", lambda x: -x)
    yield WrongFunction("it is the mean along its last axis", mean_along_last)
    yield WrongFunction("its last row is the one before", stale_last_row)
    yield WrongFunction(
        "its rows are shifted by one", lambda x: x.roll(1, 0) if x.ndim else x
    )
    yield WrongFunction("its last block is 0", without_last_block)


def cuts_of(size: int) -> list[int]:
    """Returns how many of the last places of an axis of `size` code may forget,
    ascending: one, a sixteenth, and those that fill no block of 2, 4, 8, ... 64. Each is
    at least 1 and less than `size`; none where that is below 2."""
    cuts = {1, max(1, size // SHARE)}
    block = LARGEST_BLOCK
    while block > 1:
        cuts.add(size % block)
        block //= 2
    return sorted(cut for cut in cuts if 0 < cut < size)


def without_last(x: Tensor, axis: int, last: int) -> Tensor:
    """Returns a copy whose `last` last places along an axis are 0. `last`: at most the
    axis's size; `x`: no scalar."""
    changed = x.clone()
    changed.narrow(axis, x.shape[axis] - last, last).zero_()
    return changed


def without_last_block(x: Tensor) -> Tensor:
    """Returns a copy whose last sixteenth along axis 0, at least one row, is 0; all of
    it for a scalar and fewer than two rows."""
    if not x.ndim or x.shape[0] < 2:
        return torch.zeros_like(x)
    return without_last(x, 0, max(1, x.shape[0] // SHARE))


def transposed(x: Tensor) -> Tensor:
    """Returns a tensor with its last two axes exchanged, contiguous."""
    return x.mT.contiguous()


def mean_along_last(x: Tensor) -> Tensor:
    """Returns a tensor of the same shape with the mean along the last axis in place of
    each element; of a scalar 0 (NaN where it is not finite). Raises RuntimeError for
    integers of one axis or more."""
    return x.mean(dim=-1, keepdim=True).expand_as(x).clone() if x.ndim else x * 0


def stale_last_row(x: Tensor) -> Tensor:
    """Returns a copy whose last row along axis 0 is the one before it; 0 everywhere for
    a scalar and for fewer than two rows."""
    if not x.ndim or x.shape[0] < 2:
        return torch.zeros_like(x)
    changed = x.clone()
    changed[-1] = changed[-2]
    return changed


def narrower(dtype: torch.dtype) -> Format | None:
    """Returns a format coarser than a dtype's: three significant bits fewer for bfloat16
    and float16, TF32 for float32, float32 for float64; None for any other dtype."""
    name = str(dtype).removeprefix("torch.")
    return format_named(NARROWER[name]) if name in NARROWER else None
