"""What a run rounds: which results, to nearest or at random, and how it reads Python
numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload

from numdev.formats import FORMATS, Format, format_named, format_of, round_to

FLOAT32 = FORMATS["float32"]
# Operators whose kernels read a Python number in the format of the values: on every
# device, and (as PyTorch casts both sides of a sum) on a CPU. Others compute with it in
# float32 at least.
IN_FORMAT = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "pow", "fmod", "remainder"))
IN_FORMAT_ON_CPU = IN_FORMAT | {"add", "sub", "rsub"}
# The format of either part of a complex number.
PARTS = {
    torch.complex32: "float16",
    torch.complex64: "float32",
    torch.complex128: "float64",
}


class Rounding(Protocol):
    """What a run does to numbers. All values are fp64, or complex128."""

    def read(self, values: Tensor, dtype: torch.dtype, *, is_weight: bool) -> Tensor:
        """The values of a tensor that says `dtype`, as an operation reads them."""

    def number(
        self, func: OpOverload, value: float, dtype: torch.dtype, device: torch.device
    ) -> float:
        """A Python number as an operation on tensors of `dtype` reads it."""

    def result(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        values: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """What an operation gives, or has written, and says is of `dtype`. Never of a
        view."""


class Unrounded:
    """Nothing is rounded: the truth."""

    def read(self, values: Tensor, dtype: torch.dtype, *, is_weight: bool) -> Tensor:
        return values

    def number(
        self, func: OpOverload, value: float, dtype: torch.dtype, device: torch.device
    ) -> float:
        return value

    def result(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        values: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        return values


class EveryOperation:
    """Every result is rounded to the format that it says: what plain code errs.

    To nearest; or with a `seed` up or down at random, so that the mean is the exact
    result. Python numbers are rounded, to nearest, as PyTorch's kernels round them: see
    `IN_FORMAT`. `chosen` picks the operations that round; by default all do."""

    def __init__(
        self, *, seed: int | None = None,
        chosen: Callable[[OpOverload, tuple[object, ...]], bool] | None = None,
    ) -> None:  # fmt: skip
        self.seed, self.chosen = seed, chosen
        self.generators: dict[torch.device, torch.Generator] = {}

    def read(self, values: Tensor, dtype: torch.dtype, *, is_weight: bool) -> Tensor:
        return values

    def number(
        self, func: OpOverload, value: float, dtype: torch.dtype, device: torch.device
    ) -> float:
        fmt = values_format(dtype)
        in_format = IN_FORMAT_ON_CPU if device.type == "cpu" else IN_FORMAT
        if fmt.contains(FLOAT32) or func.overloadpacket.__name__.rstrip("_") in in_format:
            return rounded_number(value, fmt)
        # A kernel for 16 bits computes with it in float32 and rounds the product to
        # float32 first, which turns decimal ties (1.25 x 0.7) back into ties. Unrounded
        # it does the same here.
        return value

    def result(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        values: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        if self.chosen is not None and not self.chosen(func, args):
            return values
        if self.seed is None:
            return rounded(values, values_format(dtype))
        if values.device not in self.generators:
            generator = torch.Generator(values.device).manual_seed(self.seed)
            self.generators[values.device] = generator
        return rounded(values, values_format(dtype), self.generators[values.device])


def values_format(dtype: torch.dtype) -> Format:
    """The format of a dtype's values, or of either part of a complex one. Raises
    UsageError for a dtype that numdev has no format for."""
    return format_named(PARTS[dtype]) if dtype in PARTS else format_of(dtype)


def rounded(
    values: Tensor, fmt: Format, generator: torch.Generator | None = None
) -> Tensor:
    """fp64 values rounded once to a format, complex ones part by part: to nearest, or
    stochastically with a generator. NaN, infinity and overflow as in `round_to`."""
    if fmt.precision == FORMATS["float64"].precision:
        return values
    parts = torch.view_as_real(values) if values.is_complex() else values
    if generator is None:
        parts = round_to(parts, fmt)
    else:
        parts = round_to(parts, fmt, mode="stochastic", generator=generator)
    return torch.view_as_complex(parts) if values.is_complex() else parts


def rounded_number(value: float, fmt: Format) -> float:
    """A Python number rounded to nearest."""
    return float(round_to(torch.tensor(value, dtype=torch.float64), fmt))
