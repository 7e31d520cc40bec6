"""Sums over the elements of rows, by one pass over a GPU's memory.

What `numdev.comparison` and `numdev.yardstick` sum takes some hundred passes over tensors in fp64,
one for each step, where PyTorch is to take them. Here a Triton kernel takes all steps of an element
at once, and reads each tensor once. Every element counts: whether that is right, and whether what
comes out is finite, is for the caller to ask. Results are those of the steps but for the order in
which fp64 numbers are added, and the same from run to run.

None is returned where there is no kernel: elsewhere than on an NVIDIA GPU, without Triton, or for
shapes and formats that it does not take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from numdev.formats import FORMATS, Format
from numdev.gpucode import if_possible, launch

__all__ = [
    "OutputSums",
    "PlainSums",
    "YardstickSums",
    "gap_sums",
    "output_sums",
    "plain_sums",
    "yardstick_sums",
]

T = TypeVar("T")

WIDEST = 1024
"""Features that a program holds."""
ELEMENTS, BLOCKS, WARPS = 2048, 8, 4
"""That a program takes at a time, how many times, and with how many warps."""
CHUNKS = 4096
"""Of sorted rows, at most."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OutputSums:
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


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainSums:
    """Of an output o and a reference r, [B, H, rows] but for the first two."""

    o: Tensor
    """The output, 0 where an element does not count."""
    r: Tensor
    """The reference, likewise."""
    count: Tensor
    """How many elements count."""
    absolute: Tensor
    square: Tensor
    reference: Tensor
    """The sum of r^2."""
    nonfinite: Tensor
    """How many elements are finite in one of the two alone."""
    max_abs: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class YardstickSums:
    """Of a reference r, its term scale t, and what stands beside them: two tensors of their shape,
    and [B, H, rows] of sums of squares unless said otherwise."""

    floor: Tensor
    """r rounded to the format, in fp64."""
    spacing: Tensor
    """One ulp of the format at t; NaN where that is not finite."""
    reference: Tensor
    terms: Tensor
    off: Tensor
    """floor - r."""
    unrounded: Tensor | None = None
    moved: Tensor | None = None
    """r - unrounded."""
    moved_absolute: Tensor | None = None
    """The sum of its magnitudes."""
    moved_most: Tensor | None = None
    """The largest."""
    plain: Tensor | None = None
    """baseline - r."""
    plain_from_floor: Tensor | None = None
    """The largest |baseline - floor|."""
    cast: Tensor | None = None
    """baseline - the same in fp32."""
    lower: Tensor | None = None
    """baseline - the same in the next lower format."""


def output_sums(
    o: Tensor,
    yardstick: Mapping[str, Tensor],
    expected: Tensor | None = None,
    baseline: Tensor | None = None,
) -> OutputSums | None:
    """Of an output [B, H, rows, features] of a dtype with arithmetic, beside a yardstick's
    `reference`, `floor` and `spacing`, and what is expected of it."""
    return _if_possible(o, lambda: compute_output(o, yardstick, expected, baseline))


def yardstick_sums(
    reference: Tensor,
    terms: Tensor,
    fmt: Format,
    *,
    unrounded: Tensor | None = None,
    baseline: Tensor | None = None,
    fp32: Tensor | None = None,
    lower: Tensor | None = None,
) -> YardstickSums | None:
    """Of a yardstick's tensors [B, H, rows, features], in a format that fp32 contains."""
    if not FORMATS["float32"].contains(fmt):
        return None
    beside = (unrounded, baseline, fp32, lower)
    return _if_possible(reference, lambda: compute_yardstick(reference, terms, fmt, *beside))


def plain_sums(o: Tensor, reference: Tensor, empty: Tensor) -> PlainSums | None:
    """Of an output [B, H, rows, features] of a dtype with arithmetic and an fp64 reference; rows
    where `empty` [B, H, rows] count for nothing, nor do elements where either is not finite."""
    return _if_possible(o, lambda: compute_plain(o, reference, empty))


def gap_sums(a: Tensor, b: Tensor) -> Tensor | None:
    """The sum of |a - b| in fp64 over each row of [n, m] and [n, m], of any dtypes: [n]."""
    return if_possible(a.device, lambda: compute_gaps(a, b)) if a.numel() else None


def compute_output(
    o: Tensor, yardstick: Mapping[str, Tensor], expected: Tensor | None, baseline: Tensor | None
) -> OutputSums:
    """What the kernel computes. Raises Refused where Triton cannot build it."""
    from numdev.rowwise_tiles import compare_rows

    grid, shape = _grid(o)
    batch, heads, rows, width = o.shape
    table = _table(o, 8)
    features = o.new_empty(*grid, width, dtype=torch.float64)
    given = [o, *(yardstick[name] for name in ("reference", "floor", "spacing"))]
    given += [o if x is None else x for x in (expected, baseline)]
    launch(
        *(compare_rows, grid, *(x.contiguous() for x in given), table, features, rows, width),
        PREDICTED=expected is not None,
        BESIDE=baseline is not None,
        **shape,
    )
    absolute, square, max_abs, max_ulp, along, predicted, apart, from_floor = table
    return OutputSums(
        absolute=absolute,
        square=square,
        max_abs=max_abs,
        max_ulp=max_ulp,
        features=features.sum(dim=1).view(batch, heads, width),
        along=along.sum(dim=-1),
        predicted=None if expected is None else predicted,
        apart=None if baseline is None else apart,
        from_floor=None if baseline is None else from_floor,
    )


def compute_yardstick(
    reference: Tensor,
    terms: Tensor,
    fmt: Format,
    unrounded: Tensor | None,
    baseline: Tensor | None,
    fp32: Tensor | None,
    lower: Tensor | None,
) -> YardstickSums:
    """What the kernel computes. Raises Refused where Triton cannot build it."""
    from numdev.rowwise_tiles import yardstick_rows

    grid, shape = _grid(reference)
    rows, width = reference.shape[2:]
    floor, spacing = (torch.empty_like(reference).contiguous() for _ in range(2))
    table = _table(reference, 11)
    given = [reference, terms, *(reference if x is None else x for x in (unrounded, baseline))]
    given += [reference if x is None else x for x in (fp32, lower)]
    unit = math.ldexp(1.0, fmt.precision - 1)
    beyond = math.inf if fmt.has_infinity else math.nan
    binades = (math.ldexp(1.0, fmt.emin), math.ldexp(1.0, fmt.emax))
    launch(
        *(yardstick_rows, grid, *(x.contiguous() for x in given), floor, spacing, table),
        *(rows, width, fmt.largest, beyond, beyond, unit, 1 / unit, *binades),
        MOVED=unrounded is not None,
        PLAIN=baseline is not None,
        IN_FP32=fp32 is not None,
        IN_LOWER=lower is not None,
        **shape,
    )
    names = {"reference": 0, "terms": 1, "off": 2}
    if unrounded is not None:
        names |= {"unrounded": 3, "moved": 4, "moved_absolute": 5, "moved_most": 6}
    if baseline is not None:
        names |= {"plain": 7, "plain_from_floor": 8}
        names |= {} if fp32 is None else {"cast": 9}
        names |= {} if lower is None else {"lower": 10}
    sums = {name: table[column] for name, column in names.items()}
    return YardstickSums(floor=floor, spacing=spacing, **sums)


def compute_plain(o: Tensor, reference: Tensor, empty: Tensor) -> PlainSums:
    """What the kernel computes. Raises Refused where Triton cannot build it."""
    from numdev.rowwise_tiles import plain_rows

    grid, shape = _grid(o)
    o, reference, empty = (x.contiguous() for x in (o, reference, empty))
    kept = (torch.empty_like(o), torch.empty_like(reference))
    table = _table(o, 6)
    given = (o, reference, empty.view(torch.uint8), *kept, table)
    launch(plain_rows, grid, *given, *o.shape[2:], **shape)
    names = ("count", "absolute", "square", "reference", "nonfinite", "max_abs")
    return PlainSums(o=kept[0], r=kept[1], **dict(zip(names, table, strict=True)))


def compute_gaps(a: Tensor, b: Tensor) -> Tensor:
    """What the kernel computes. Raises Refused where Triton cannot build it."""
    from numdev.rowwise_tiles import gaps

    rows, length = a.shape
    blocks = max(BLOCKS, -(-length // (ELEMENTS * CHUNKS)))
    grid = (rows, -(-length // (ELEMENTS * blocks)))
    sums = a.new_empty(grid, dtype=torch.float64)
    parts = (x.contiguous() for x in (a, b))
    launch(gaps, grid, *parts, sums, length, CHUNK=ELEMENTS * blocks, BLOCK=ELEMENTS)
    return sums.sum(dim=1)


def _if_possible(x: Tensor, compute: Callable[[], T]) -> T | None:
    if x.shape[-1] > WIDEST or not x.numel():
        return None
    return if_possible(x.device, compute)


def _grid(x: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid for [B, H, rows, features], and the shape of a program."""
    batch, heads, rows, width = x.shape
    block_d = 1 << (width - 1).bit_length()
    block = max(1, ELEMENTS // block_d)
    shape = {"CHUNK": BLOCKS * block, "BLOCK": block, "BLOCK_D": block_d, "num_warps": WARPS}
    return (batch * heads, -(-rows // (BLOCKS * block))), shape


def _table(x: Tensor, columns: int) -> Tensor:
    return x.new_empty(columns, *x.shape[:3], dtype=torch.float64)
