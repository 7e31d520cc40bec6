"""The Triton kernel of `numdev.rowwise`. Imported only where it runs: this module needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of(
    OUT, REFERENCE, FLOOR, SPACING, EXPECTED, BASELINE, ROWS, FEATURES, rows, width,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    PREDICTED: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Of CHUNK rows of a head, BLOCK at a time: a number for each row into ROWS [8, heads, rows],
    and one for each feature, summed over the rows, into FEATURES [heads, chunks, width].

    `heads` is batch entries times heads, the grid's first axis; chunks its second. All other
    tensors are [heads, rows, width], contiguous.
    """
    head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    every = tl.num_programs(0) * rows.to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    features = tl.zeros([BLOCK_D], tl.float64)
    for first in range(chunk * CHUNK, tl.minimum(rows, chunk * CHUNK + CHUNK), BLOCK):
        i = first + tl.arange(0, BLOCK)
        row = head * rows + i
        at = row[:, None] * width + d[None, :]
        ok = (i < rows)[:, None] & (d < width)[None, :]
        o = tl.load(OUT + at, mask=ok, other=0.0).to(tl.float64)
        r = tl.load(REFERENCE + at, mask=ok, other=0.0)
        off = o - tl.load(FLOOR + at, mask=ok, other=0.0)
        spacing = tl.load(SPACING + at, mask=ok, other=1.0)
        error = o - r
        ulps = off / spacing
        features += tl.sum(ulps, axis=0)
        sign = tl.where(r > 0, 1.0, tl.where(r < 0, -1.0, 0.0))
        here = i < rows
        tl.store(ROWS + row, tl.sum(tl.abs(error), axis=1), mask=here)
        tl.store(ROWS + every + row, tl.sum(error * error, axis=1), mask=here)
        tl.store(ROWS + 2 * every + row, tl.max(tl.abs(error), axis=1), mask=here)
        tl.store(ROWS + 3 * every + row, tl.max(tl.abs(error / spacing), axis=1), mask=here)
        tl.store(ROWS + 4 * every + row, tl.sum(ulps * sign, axis=1), mask=here)
        if PREDICTED:
            predicted = tl.load(EXPECTED + at, mask=ok, other=0.0).to(tl.float64) - r
            tl.store(ROWS + 5 * every + row, tl.sum(predicted * predicted, axis=1), mask=here)
        if BESIDE:
            apart = o - tl.load(BASELINE + at, mask=ok, other=0.0).to(tl.float64)
            tl.store(ROWS + 6 * every + row, tl.sum(apart * apart, axis=1), mask=here)
            tl.store(ROWS + 7 * every + row, tl.max(tl.abs(off), axis=1), mask=here)
    at = (head * tl.num_programs(1) + chunk) * width
    tl.store(FEATURES + at + d, features, mask=d < width)
