"""`numdev.metrics.row_sums.element_sums` by one Triton kernel, which reads each tensor
once.

PyTorch takes some thirty passes over tensors in fp64 for the same sums. Results are the
same but for the order of sums, and the same from run to run. Needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from numdev.metrics.row_sums import ElementSums
from numdev.metrics.yardstick import Yardstick

ELEMENTS = 2048  # that a program takes at a time
BLOCKS = 8  # how many times


def element_sums(o: Tensor, e: Tensor | None, y: Yardstick) -> ElementSums:
    """Returns the row sums of an output `o` [B, H, rows, features] on CUDA, of 16 bits or
    more, of which every element counts: no row is empty or repeats another, nothing is
    not finite. `e`: the expected output; None: `predicted` is None. Without a baseline in
    `y`, `from_baseline` and `from_floor` are None."""
    batch, heads, rows, width = o.shape
    block_d = 1 << (width - 1).bit_length()
    block = max(1, ELEMENTS // block_d)
    grid = (batch * heads, -(-rows // (BLOCKS * block)))
    table = o.new_empty(8, batch, heads, rows, dtype=torch.float64)
    features = o.new_empty(batch, heads, grid[1], width, dtype=torch.float64)
    operands = (
        *(o, y.reference, y.floor, y.spacing),
        o if e is None else e,
        o if y.baseline is None else y.baseline,
    )
    tensors = [x.contiguous() for x in operands]
    shape = {
        "CHUNK": BLOCKS * block,
        "BLOCK": block,
        "BLOCK_D": block_d,
        "PREDICTED": e is not None,
        "BESIDE": y.baseline is not None,
        "num_warps": 4,
    }
    with torch.cuda.device_of(o):
        compare_rows[grid](*tensors, table, features, rows, width, **shape)
    absolute, square, max_abs, max_ulp, along, predicted, from_baseline, from_floor = (
        table
    )
    return ElementSums(
        absolute=absolute,
        size=square.sqrt(),
        max_abs=max_abs,
        max_ulp=max_ulp,
        features=features.sum(dim=2),
        along=along.sum(dim=2),
        predicted=None if e is None else predicted.sqrt(),
        from_baseline=None if y.baseline is None else from_baseline,
        from_floor=None if y.baseline is None else from_floor,
    )


@triton.jit
def compare_rows(
    OUT, REFERENCE, FLOOR, SPACING, EXPECTED, BASELINE, TABLE, FEATURES, rows, width,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    PREDICTED: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Writes an output's sums and maxima for each row into TABLE [8, heads, rows], and
    its sums for each feature, over the rows of a chunk, into FEATURES [heads, chunks,
    width].

    Tensors are [heads, rows, width], contiguous, heads being batch entries times heads
    and the grid's first axis. A program takes CHUNK rows of a head, the grid's second
    axis, BLOCK of them at a time. EXPECTED is read, and column 5 of TABLE written, with
    PREDICTED only; BASELINE, and columns 6 and 7, with BESIDE."""
    head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, features = tl.arange(0, BLOCK_D), tl.zeros([BLOCK_D], tl.float64)
    for first in range(chunk * CHUNK, tl.minimum(rows, chunk * CHUNK + CHUNK), BLOCK):
        i = first + tl.arange(0, BLOCK)
        row, in_head = head * rows + i, i < rows
        at, ok = (
            row[:, None] * width + d[None, :],
            in_head[:, None] & (d < width)[None, :],
        )
        o = tl.load(OUT + at, mask=ok, other=0.0).to(tl.float64)
        r = tl.load(REFERENCE + at, mask=ok, other=0.0)
        off = o - tl.load(FLOOR + at, mask=ok, other=0.0)
        per_ulp = 1.0 / tl.load(SPACING + at, mask=ok, other=1.0)  # exact: a power of two
        error = o - r
        ulps = off * per_ulp
        features += tl.sum(ulps, axis=0)
        sign = tl.where(r > 0, 1.0, tl.where(r < 0, -1.0, 0.0))
        put(TABLE, 0, row, in_head, rows, tl.sum(tl.abs(error), axis=1))
        put(TABLE, 1, row, in_head, rows, tl.sum(error * error, axis=1))
        put(TABLE, 2, row, in_head, rows, tl.max(tl.abs(error), axis=1))
        put(TABLE, 3, row, in_head, rows, tl.max(tl.abs(error * per_ulp), axis=1))
        put(TABLE, 4, row, in_head, rows, tl.sum(ulps * sign, axis=1))
        if PREDICTED:
            predicted = tl.load(EXPECTED + at, mask=ok, other=0.0).to(tl.float64) - r
            put(TABLE, 5, row, in_head, rows, tl.sum(predicted * predicted, axis=1))
        if BESIDE:
            gap = o - tl.load(BASELINE + at, mask=ok, other=0.0).to(tl.float64)
            put(TABLE, 6, row, in_head, rows, tl.sum(gap * gap, axis=1))
            put(TABLE, 7, row, in_head, rows, tl.max(tl.abs(off), axis=1))
    at = (head * tl.num_programs(1) + chunk) * width
    tl.store(FEATURES + at + d, features, mask=d < width)


@triton.jit
def put(TABLE, column, row, in_head, rows, values):
    """Writes the values of a block of rows into a column of TABLE [columns, heads, rows].
    `row`: places over all heads; those outside the head (`in_head` False) are skipped."""
    tl.store(
        TABLE + column * tl.num_programs(0).to(tl.int64) * rows + row,
        values,
        mask=in_head,
    )
