"""Sums over the elements of rows, by one pass over a GPU's memory.

What `numdev.metrics.comparison` and `numdev.metrics.yardstick` sum takes some hundred passes over tensors in fp64,
one for each step, where PyTorch is to take them. Here a Triton kernel takes all steps of an element
at once, and reads each tensor once. Every element counts unless something else is said: whether
that is right, and whether what comes out is finite, is for the caller to ask. A second kernel makes
of the rows all that a head comes to. Results are those of the steps but for the order in which fp64
numbers are added, and the same from run to run.

None is returned where there is no kernel: elsewhere than on an NVIDIA GPU, without Triton, or for
shapes and formats that it does not take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from numdev.formats import FORMATS, Format
from numdev.metrics.gpucode import if_possible, launch

__all__ = [
    "GROUPS",
    "PLAIN",
    "OutputHeads",
    "Scales",
    "YardstickSums",
    "gap_sums",
    "output_heads",
    "plain_heads",
    "yardstick_sums",
]

T = TypeVar("T")

WIDEST = 1024
"""Features that a program holds."""
ELEMENTS, BLOCKS, WARPS = 2048, 8, 4
"""That a program takes at a time, how many times, and with how many warps."""
CHUNKS = 4096
"""Of sorted rows, at most."""
ROWS = 512
"""That a program takes at a time which takes all of a head's."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scales:
    """What rows' errors are held to: [B, H, rows], in fp64, as `yardstick.Part` has them."""

    scale: Tensor
    least: Tensor
    arithmetic: Tensor | None
    """What fp32 arithmetic may err."""
    smallest: float
    """Rows of a smaller scale have no relative error."""
    unit_roundoff: float
    """Of the format; this times `smallest` is what any row may err. Both are powers of two that
    fp32 has, in which a kernel gets its numbers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OutputHeads:
    """Of an output o, the reference r and its floor f, by head; each row counts, and each element.
    Where there is nothing expected, or no baseline, what is beside it is not there."""

    sums: Tensor
    """[names, H, GROUPS]: sums over rows, row i being in group i mod GROUPS, of those in `SUMS`."""
    largest: Tensor
    """[names, H]: the largest of all rows, of those in `LARGEST`."""
    by_row: Tensor
    """[names, B, H, rows]: those in `BY_ROW`."""
    features: Tensor
    """[B, H, features]: (o - f) over the spacing at the term scale, summed over rows."""
    along: Tensor
    """[B, H]: the same along sign(r), summed over rows and features."""
    w1: Tensor
    """[1 or 2, H]: W1 of o and r, and of o and b, the baseline's output."""


SUMS = ("absolute", "square", "relative", "predicted", "apart")
"""The sum of |o - r|, that of (o - r)^2, the same over the squared scale; what is expected of that;
and the sum of (o - b)^2."""
LARGEST = ("max_abs", "max_ulp", "from_floor", "worst_row")
"""|o - r|, the same over the spacing at the term scale, |o - f|, and a row's error over what is
predicted for it."""
BY_ROW = ("relative", "predicted")
GROUPS = 16
"""Row i is in group i mod GROUPS, so that each group is spread over positions as the rows are."""


PLAIN = ("count", "absolute", "square", "reference", "nonfinite", "empty_rows")
"""Of the elements that count: how many there are, the sums of |o - r|, (o - r)^2 and r^2; how many
are finite in one of the two alone; and how many rows are empty."""


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


def output_heads(
    o: Tensor,
    yardstick: Mapping[str, Tensor],
    scales: Scales,
    ordered: Callable[[], Sequence[Tensor]],
    *,
    expected: Tensor | None = None,
    baseline: Tensor | None = None,
) -> OutputHeads | None:
    """Of an output [B, H, rows, features] of a dtype with arithmetic, beside a yardstick's
    `reference`, `floor` and `spacing`, and what is expected of it. `ordered` makes
    the elements of o, of r, and where there is one of the baseline, by head in ascending order,
    [H, elements]."""
    beside = (expected, baseline)
    return _if_possible(o, lambda: compute_output(o, yardstick, scales, ordered, *beside))


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


def plain_heads(
    o: Tensor, reference: Tensor, empty: Tensor, ordered: Callable[[Tensor], Tensor] | None
) -> Tensor | None:
    """Of an output [B, H, rows, features] of a dtype with arithmetic and an fp64 reference,
    [names + 2, H, GROUPS]: by head and group of rows (as in `OutputHeads.sums`) the sums of those
    in `PLAIN`, the largest |o - r|, and what over all groups adds up to their W1, for which
    `ordered` puts the numbers of each row of [n, m] in ascending order; None: 0 is there instead.
    Rows where `empty` [B, H, rows] count for nothing, nor do elements where either is not finite:
    for W1 they are 0."""
    return _if_possible(o, lambda: compute_plain(o, reference, empty, ordered))


def gap_sums(a: Tensor, b: Tensor) -> Tensor | None:
    """The sum of |a - b| in fp64 over each row of [n, m] and [n, m], of any dtypes: [n]."""
    return if_possible(a.device, lambda: compute_gaps(a, b)[0].sum(dim=1)) if a.numel() else None


def compute_output(
    o: Tensor,
    yardstick: Mapping[str, Tensor],
    scales: Scales,
    ordered: Callable[[], Sequence[Tensor]],
    expected: Tensor | None,
    baseline: Tensor | None,
) -> OutputHeads:
    """What the kernels compute. Raises Refused where Triton cannot build them."""
    from numdev.metrics.row_sums_triton import compare_rows

    grid, shape = _grid(o)
    shape |= {"PREDICTED": expected is not None, "BESIDE": baseline is not None}
    table = _table(o, 8)
    features = o.new_empty(*grid, o.shape[-1], dtype=torch.float64)
    given = [o, *(yardstick[name] for name in ("reference", "floor", "spacing"))]
    given += [o if x is None else x for x in (expected, baseline)]
    tensors = (*(x.contiguous() for x in given), table, features)
    launch(compare_rows, grid, *tensors, *o.shape[2:], **shape)
    del given, tensors  # copies may be among them, and sorting takes memory
    return _heads(o, table, features, scales, compute_gaps(*ordered()), shape)


def _heads(
    o: Tensor,
    table: Tensor,
    features: Tensor,
    scales: Scales,
    gaps: Tensor,
    shape: Mapping[str, Any],
) -> OutputHeads:
    """Of what was put into a table, and the sums of gaps."""
    from numdev.metrics.row_sums_triton import output_heads

    batch, heads, rows, width = o.shape
    found = OutputHeads(
        sums=table.new_empty(len(SUMS), heads, GROUPS),
        largest=table.new_empty(len(LARGEST), heads),
        by_row=table.new_empty(len(BY_ROW), batch, heads, rows),
        features=table.new_empty(batch, heads, width),
        along=table.new_empty(batch, heads),
        w1=table.new_empty(len(gaps), heads),
    )
    s = scales
    held_to = (s.scale, s.least, s.scale if s.arithmetic is None else s.arithmetic)
    given = (table, features, *(x.contiguous() for x in held_to), gaps)
    to = (found.sums, found.largest, found.by_row, found.features, found.along, found.w1)
    counts = (batch, rows, width, features.shape[1], gaps.shape[-1], o[:, 0].numel())
    has = map(int, (shape["PREDICTED"], s.arithmetic is not None, shape["BESIDE"]))
    launch(
        *(output_heads, (heads,), *given, *to, *counts, s.smallest, s.unit_roundoff, *has),
        GROUPS=GROUPS,
        BLOCK=ROWS,
        BLOCK_D=shape["BLOCK_D"],
        BLOCK_C=max(1, ELEMENTS // shape["BLOCK_D"]),
        num_warps=WARPS,
    )
    return found


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
    from numdev.metrics.row_sums_triton import yardstick_rows

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


def compute_plain(
    o: Tensor, reference: Tensor, empty: Tensor, ordered: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """What the kernels compute. Raises Refused where Triton cannot build them."""
    from numdev.metrics.row_sums_triton import plain_heads, plain_rows

    grid, shape = _grid(o)
    batch, heads, rows, width = o.shape
    o, reference, empty = (x.contiguous() for x in (o, reference, empty))
    table = _table(o, len(PLAIN) + 1)
    both = gaps = table
    if ordered is not None:
        both = table.new_empty(2 * heads, batch * rows * width)
    given = (o, reference, empty.view(torch.uint8), both, table)
    launch(plain_rows, grid, *given, rows, width, heads, KEEP=ordered is not None, **shape)
    if ordered is not None:
        both = ordered(both)
        gaps = compute_gaps(both[:heads], both[heads:])
    found = table.new_empty(len(PLAIN) + 2, heads, GROUPS)
    counts = (batch, rows, gaps.shape[-1], batch * rows * width, int(ordered is not None))
    launch(
        *(plain_heads, (heads, len(found)), table, gaps, found, *counts),
        LARGEST=len(PLAIN),
        GROUPS=GROUPS,
        BLOCK=ROWS,
        num_warps=WARPS,
    )
    return found


def compute_gaps(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    """The sums of |a - b|, and with c of |a - c|, over parts of each row: [1 or 2, n, parts].
    Raises Refused where Triton cannot build the kernel."""
    from numdev.metrics.row_sums_triton import gaps

    rows, length = a.shape
    blocks = max(BLOCKS, -(-length // (ELEMENTS * CHUNKS)))
    grid = (rows, -(-length // (ELEMENTS * blocks)))
    sums = a.new_empty(1 if c is None else 2, *grid, dtype=torch.float64)
    parts = (x.contiguous() for x in (a, b, b if c is None else c))
    shape = {"CHUNK": ELEMENTS * blocks, "BLOCK": ELEMENTS}
    launch(gaps, grid, *parts, sums, length, BOTH=c is not None, **shape)
    return sums


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
