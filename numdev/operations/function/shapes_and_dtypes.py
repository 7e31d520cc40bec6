"""What a tensor of a function looks like beside its reference's: shape, dtype, device and
strides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.operations.function.function_runs import FunctionRun
from numdev.operations.function.trees import as_real

INTEGERS = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Form:
    """What a tensor of the reference looks like, of one draw."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"  # its type

    @property
    def is_one_number(self) -> bool:
        """Whether the tensor holds a single number, in whatever shape."""
        return math.prod(self.shape) == 1

    def has_shape(self, x: Tensor) -> bool:
        """Whether another tensor has this shape; where this one holds a single number,
        whether the other one does, in any shape."""
        return tuple(x.shape) == self.shape or (self.is_one_number and x.numel() == 1)

    def has_kind(self, x: Tensor) -> bool:
        """Whether another tensor holds numbers of this one's kind: real, complex, or
        integers."""
        kind = (self.dtype.is_floating_point, self.dtype.is_complex)
        return kind == (x.is_floating_point(), x.is_complex())

    def fitted(self, x: Tensor) -> Tensor:
        """Returns another tensor on this one's device, complex numbers as their parts; a
        single number in this shape."""
        x = x.to(self.device)
        return as_real(x.reshape(self.shape) if self.is_one_number else x)

    def difference(self, x: Tensor) -> str | None:
        """Returns in words how another tensor's shape differs from this, or where it does
        not its dtype: `it has the shape [2, 3], not [3, 2]`, `it is float32, not
        bfloat16`. None where neither does."""
        if not self.has_shape(x):
            return f"it has the shape {list(x.shape)}, not {list(self.shape)}"
        if x.dtype != self.dtype:
            return f"it is {short_name(x.dtype)}, not {short_name(self.dtype)}"
        return None

    def misplaced(
        self, name: str, runs: Sequence[FunctionRun], plain: Sequence[FunctionRun]
    ) -> str | None:
        """Returns in words that an output is on another device than the reference's, or
        not contiguous where that is, so that a `.view()` of it fails; None where neither
        holds in any run, or where the runs do not have the output's device and strides.
        `plain`: the reference's runs, one for each of `runs`."""
        for ran, like in zip(runs, plain, strict=True):
            device = ran.devices.get(name, self.device)
            if device != self.device:
                return f"it is on {device}, not on {self.device}"
            expected, strides = like.strides.get(name), ran.strides.get(name)
            if expected is None or strides is None or len(strides) != len(self.shape):
                continue
            if self._is_contiguous(expected) and not self._is_contiguous(strides):
                return (
                    f"its strides are {list(strides)}, not {list(expected)}: it is not "
                    "contiguous, and a .view() of it may fail"
                )
        return None

    def allowed_difference(
        self, name: str, ran: FunctionRun, plain: FunctionRun
    ) -> str | None:
        """Returns a clause on how a tensor of this shape differs harmlessly from the
        reference's. It is one number in another shape (`has the shape [1], not []: either
        is one number`), or has other strides where the reference's is not contiguous
        itself. Axes of one place do not count. None where neither holds. `ran` must have
        the tensor."""
        shape = list(ran.tensors[name].shape)
        if shape != list(self.shape):
            return f"has the shape {shape}, not {list(self.shape)}: either is one number"
        expected, strides = plain.strides.get(name), ran.strides.get(name, ())
        if expected is None or len(strides) != len(self.shape):
            return None
        pairs = zip(self.shape, expected, strides, strict=True)
        differs = any(a != b for size, a, b in pairs if size > 1)
        if not differs or self._is_contiguous(expected):
            return None
        return (
            f"has the strides {list(strides)}, not {list(expected)}: the reference's is "
            "not contiguous either"
        )

    def _is_contiguous(self, strides: Sequence[int]) -> bool:
        """Whether elements of these strides lie one after another, the last axis's first;
        axes of one place do not count, and a tensor without elements is contiguous."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(strides), strict=True):
            if size == 0:
                return True
            if size > 1 and stride != step:
                return False
            step *= size
        return True


def short_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")
