"""What a run rounds: which results, to nearest or at random, and how it reads Python
numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        """Returns the values of a tensor under `dtype` as an operation reads them.
        `is_weight`: whether it is a stored parameter, which may not be rounded yet."""

    def number(
        self, func: OpOverload, value: float, dtype: torch.dtype, device: torch.device
    ) -> float:
        """Returns a Python number as the operation `func` on tensors of `dtype` reads it
        on this device."""

    def arguments(
        self, func: OpOverload, args: tuple[object, ...], written: Sequence[Tensor]
    ) -> tuple[object, ...]:
        """Returns the positional arguments as `result` is to get them, before the
        operation writes into those tensors whose fp64 values are `written`, and so may
        change others too. What `result` reads of these has to be copied here."""

    def result(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        values: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Returns the values that the operation `func` returns, or writes, rounded to
        `dtype` or not. `args`: what `arguments` returned. It is never asked about a
        view."""


class Unrounded:
    """Nothing is rounded: the truth."""

    def read(self, values: Tensor, dtype: torch.dtype, *, is_weight: bool) -> Tensor:
        """Returns `values` as they are."""
        return values

    def number(
        self, func: OpOverload, value: float, dtype: torch.dtype, device: torch.device
    ) -> float:
        """Returns `value` as it is."""
        return value

    def arguments(
        self, func: OpOverload, args: tuple[object, ...], written: Sequence[Tensor]
    ) -> tuple[object, ...]:
        """Returns `args` as they are."""
        return args

    def result(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        values: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Returns `values` as they are."""
        return values


class EveryOperation:
    """Every result is rounded to the format that it says: what plain code errs.

    To nearest; or with a `seed` up or down at random, so that the mean is the exact
    result. Python numbers are rounded, to nearest, as PyTorch's kernels round them: see
    `IN_FORMAT`. `chosen` picks the operations that round; by default all do. With
    `as_kernels` what PyTorch computes otherwise than by its formula (attention in one
    kernel) takes the kernel's steps; the names of these operators are in `kernels_taken`
    afterwards."""

    def __init__(
        self, *, seed: int | None = None,
        chosen: Callable[[OpOverload, tuple[object, ...]], bool] | None = None,
        as_kernels: bool = True,
    ) -> None:  # fmt: skip
        self.seed, self.chosen, self.as_kernels = seed, chosen, as_kernels
        self.kernels_taken: dict[str, None] = {}
        self.generators: dict[torch.device, torch.Generator] = {}

    def read(self, values: Tensor, dtype: torch.dtype, *, is_weight: bool) -> Tensor:
        """Returns `values` as they are: only results are rounded."""
        return values

    def number(
        self, func: OpOverload, value: float, dtype: torch.dtype, device: torch.device
    ) -> float:
        """Returns the number rounded to nearest in the format of `dtype`, where that is
        float32 or wider, or PyTorch's kernel of `func` rounds it so (`IN_FORMAT`, on a
        CPU also sums). Returns it unchanged otherwise. Raises UsageError for a dtype
        without a format."""
        fmt = values_format(dtype)
        in_format = IN_FORMAT_ON_CPU if device.type == "cpu" else IN_FORMAT
        if fmt.contains(FLOAT32) or func.overloadpacket.__name__.rstrip("_") in in_format:
            return round_number(value, fmt)
        # A kernel for 16 bits computes with it in float32 and rounds the product to
        # float32 first, which turns decimal ties (1.25 x 0.7) back into ties. Unrounded
        # it does the same here.
        return value

    def arguments(
        self, func: OpOverload, args: tuple[object, ...], written: Sequence[Tensor]
    ) -> tuple[object, ...]:
        """Returns `args` as they are: `result` reads no values of theirs."""
        return args

    def result(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        values: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Returns `values` rounded to the format of `dtype`, to nearest or, with a seed,
        up or down at random, where `chosen` picks the operation; else unchanged. Random
        numbers continue one stream per device. Raises UsageError for a dtype without a
        format."""
        if self.chosen is not None and not self.chosen(func, args):
            return values
        if self.seed is None:
            return round_values(values, values_format(dtype))
        if values.device not in self.generators:
            generator = torch.Generator(values.device).manual_seed(self.seed)
            self.generators[values.device] = generator
        return round_values(values, values_format(dtype), self.generators[values.device])


def values_format(dtype: torch.dtype) -> Format:
    """Returns the format of a dtype's values; of a complex dtype, that of its real and
    imaginary part. Raises UsageError for a dtype that numdev has no format for."""
    return format_named(PARTS[dtype]) if dtype in PARTS else format_of(dtype)


def round_values(
    values: Tensor, fmt: Format, generator: torch.Generator | None = None
) -> Tensor:
    """Returns fp64 (or complex128) values rounded once to a format, complex ones part by
    part: to nearest, or stochastically with a `generator`, which goes on. The values
    themselves are returned where the format is float64. NaN, infinity and overflow are as
    in `round_to`."""
    if fmt.precision == FORMATS["float64"].precision:
        return values
    parts = torch.view_as_real(values) if values.is_complex() else values
    if generator is None:
        parts = round_to(parts, fmt)
    else:
        parts = round_to(parts, fmt, mode="stochastic", generator=generator)
    return torch.view_as_complex(parts) if values.is_complex() else parts


def round_number(value: float, fmt: Format) -> float:
    """Returns a Python number rounded to nearest in a format."""
    return float(round_to(torch.tensor(value, dtype=torch.float64), fmt))
