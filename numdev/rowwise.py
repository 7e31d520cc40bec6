"""An output beside a yardstick, element by element, in one pass over the GPU's memory.

What `numdev.comparison` sums over the elements of a row takes some thirty passes over tensors in
fp64, one for each step, where PyTorch is to take them. Here a Triton kernel takes all steps of an
element at once, and reads each tensor once. That is for what nearly every output is: on an NVIDIA
GPU, and held to a `regular` yardstick, of which every element counts. What comes out is the same
but for the order in which fp64 numbers are added; whether it is finite is for the caller to ask.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.errors import Refused
from numdev.kernels.launching import launch
from numdev.nvrtc import on_nvidia
from numdev.yardstick import Yardstick

__all__ = ["RowSums", "row_sums"]

WIDEST = 1024
"""Features that a program holds."""
ELEMENTS = 2048
"""That a program takes at a time."""
BLOCKS = 8
"""That it takes one after the other."""
_REFUSED: list[str] = []
"""Why Triton does not build the kernel here."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSums:
    """Of an output o, the reference r and its floor f: [B, H, rows] unless said otherwise."""

    absolute: Tensor
    """The sum of |o - r|."""
    square: Tensor
    """The sum of (o - r)^2."""
    max_abs: Tensor
    max_ulp: Tensor
    """The largest |o - r| over the spacing at the term scale."""
    features: Tensor
    """[B, H, features]: (o - f) over that spacing, summed over rows."""
    along: Tensor
    """[B, H]: the same along sign(r), summed over rows and features."""
    predicted: Tensor | None
    """The sum of (e - r)^2, e being what an emulation returns."""
    apart: Tensor | None
    """The sum of (o - b)^2, b being the baseline's output."""
    from_floor: Tensor | None
    """The largest |o - f|, where there is a baseline."""


def row_sums(o: Tensor, y: Yardstick, expected: Tensor | None) -> RowSums | None:
    """Of an output [B, H, rows, features] of a dtype with arithmetic, and of what is expected of
    it. None where there is no kernel for it."""
    there = on_nvidia(o.device) and _with_triton() and not _REFUSED
    if not there or o.shape[-1] > WIDEST or not o.numel():
        return None
    try:
        return computed(o, y, expected)
    except Refused as error:
        _REFUSED.append(str(error))  # once is enough
        return None


def computed(o: Tensor, y: Yardstick, expected: Tensor | None) -> RowSums:
    """What the kernel computes. Raises Refused where Triton cannot build it."""
    from numdev.rowwise_tiles import rows_of

    batch, heads, rows, width = o.shape
    block_d = 1 << (width - 1).bit_length()
    block = max(1, ELEMENTS // block_d)
    chunk = BLOCKS * block
    grid = (batch * heads, -(-rows // chunk))
    by_row = o.new_zeros(8, batch, heads, rows, dtype=torch.float64)
    by_feature = o.new_empty(*grid, width, dtype=torch.float64)
    given = [o, y.reference, y.floor, y.spacing]
    given += [o if x is None else x for x in (expected, y.baseline)]
    launch(
        *(rows_of, grid, *(x.contiguous() for x in given), by_row, by_feature, rows, width),
        CHUNK=chunk,
        BLOCK=block,
        BLOCK_D=block_d,
        PREDICTED=expected is not None,
        BESIDE=y.baseline is not None,
    )
    absolute, square, max_abs, max_ulp, along, predicted, apart, from_floor = by_row
    return RowSums(
        absolute=absolute,
        square=square,
        max_abs=max_abs,
        max_ulp=max_ulp,
        features=by_feature.sum(dim=1).view(batch, heads, width),
        along=along.sum(dim=-1),
        predicted=None if expected is None else predicted,
        apart=None if y.baseline is None else apart,
        from_floor=None if y.baseline is None else from_floor,
    )


@functools.cache
def _with_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
