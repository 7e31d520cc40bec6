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
    """A change of one argument (by name), or of the outputs."""

    words: str  # a clause to follow the function's name
    change: Change
    of_input: str | None = None

    def applied(self, arguments: Arguments) -> Arguments:
        """The arguments that it computes with."""

        def change(name: str, x: Tensor) -> Tensor:
            return self.change(x) if name == self.of_input else x

        return arguments.mapped(change)


def faults_of_inputs(arguments: Arguments) -> Iterator[WrongFunction]:
    """Of each floating-point argument: left out, its last part left out along each axis,
    transposed, and read in a narrower format."""
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
    """A tensor rounded to a format, in its own dtype."""
    return round_to(x, fmt).to(x.dtype)


def faults_of_outputs() -> Iterator[WrongFunction]:
    """Of what comes out, whatever it is."""

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
    """How many of the last places of an axis code forgets: one, and those that fill no
    block."""
    cuts = {1, max(1, size // SHARE)}
    block = LARGEST_BLOCK
    while block > 1:
        cuts.add(size % block)
        block //= 2
    return sorted(cut for cut in cuts if 0 < cut < size)


def without_last(x: Tensor, axis: int, last: int) -> Tensor:
    """A tensor whose last places along an axis are 0."""
    changed = x.clone()
    changed.narrow(axis, x.shape[axis] - last, last).zero_()
    return changed


def without_last_block(x: Tensor) -> Tensor:
    if not x.ndim or x.shape[0] < 2:
        return torch.zeros_like(x)
    return without_last(x, 0, max(1, x.shape[0] // SHARE))


def transposed(x: Tensor) -> Tensor:
    """With its last two axes exchanged, laid out as before."""
    return x.mT.contiguous()


def mean_along_last(x: Tensor) -> Tensor:
    return x.mean(dim=-1, keepdim=True).expand_as(x).clone() if x.ndim else x * 0


def shifted_rows(x: Tensor) -> Tensor:
    return x.roll(1, 0) if x.ndim else x


def stale_last_row(x: Tensor) -> Tensor:
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
