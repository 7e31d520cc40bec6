"""What both passes of `triton-flash` do with a tile, in Triton: load, scores, exponential, store.

The functions here and in `numdev.kernels.triton_flash.forward` and `triton_flash_backward` run on
the device, one program for a block of rows or keys of one query head.
`numdev.kernels.triton_flash.kernel` launches them, with the constants and sizes of
`numdev.kernels.triton_flash.plan`. Importing this module needs triton.

Everything is computed in fp32. Where both operands of a product are in the working format their
product is exact and its sum is in fp32; fp32 operands are multiplied in fp32, never in TF32. Python
floats reach a kernel as fp32, the scale among them.

Places are 64-bit only where they may be large: the offset of a head, and of a tile's first row.

Legend: S scores, P probabilities, m row maximum, l row sum, O output, L log-sum-exp; i, j the
numbers of query rows and of keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
GOLDEN = tl.constexpr(2654435769)


@triton.jit
def head_of(X, strides, batch, head):
    """Where a head of X begins."""
    return X + batch.to(tl.int64) * strides.batch + head.to(tl.int64) * strides.head


@triton.jit
def rows_of(
    X, strides, start, rows,
    COUNT: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """[COUNT, WIDE] of a head from row `start` on, 0 outside of [rows, DIM]. Without CHECK all of
    these rows are there."""
    r, c = tl.arange(0, COUNT), tl.arange(0, WIDE)
    at = X + tl.cast(start, tl.int64) * strides.row
    at = at + r[:, None] * strides.row + c[None, :] * strides.column
    if CHECK:
        x = tl.load(at, mask=(start + r < rows)[:, None] & (c < DIM)[None, :], other=0.0)
    elif DIM != WIDE:
        x = tl.load(at, mask=(c < DIM)[None, :], other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def store_rows(
    X, strides, start, rows, x, COUNT: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr
):
    """The counterpart of `rows_of`; x is rounded to the format of X."""
    r, c = tl.arange(0, COUNT), tl.arange(0, WIDE)
    at = X + tl.cast(start, tl.int64) * strides.row
    at = at + r[:, None] * strides.row + c[None, :] * strides.column
    inside = (start + r < rows)[:, None] & (c < DIM)[None, :]
    tl.store(at, x.to(X.dtype.element_ty), mask=inside)


@triton.jit
def scores(x, y, i, j, scale, mask, mask_strides, size, PARTIAL: tl.constexpr, PLAN: tl.constexpr):
    """x yᵀ as scores: S if x is of queries, Sᵀ if it is of keys; -inf where row i may not see key
    j. i and j broadcast to its shape. Without PARTIAL no position hides a key."""
    S = tl.dot(x, tl.trans(y), input_precision="ieee")
    if PLAN.round_scores:
        S = S.to(x.dtype).to(tl.float32)
    S = S * scale
    if PLAN.mask != "none":
        at = mask + i.to(tl.int64) * mask_strides.row + j.to(tl.int64) * mask_strides.column
        given = tl.load(at, mask=(i < size.q_len) & (j < size.kv_len), other=0)
        if PLAN.mask == "bool":
            S = tl.where(given != 0, S, float("-inf"))
        else:
            added = given.to(tl.float32)
            S = tl.where(added == PLAN.hidden, float("-inf"), S + added)
    if PARTIAL:
        shown = j < size.kv_len
        if PLAN.left:
            shown = shown & (j >= i + size.first)
        if PLAN.right:
            shown = shown & (j <= i + size.last)
        S = tl.where(shown, S, float("-inf"))
    return S


@triton.jit
def exponential(x, PLAN: tl.constexpr):
    """exp of a difference of scores."""
    if PLAN.folded:
        y = tl.exp2(x)
    elif PLAN.binary:
        y = tl.exp2(x * LOG2_E)
    else:
        y = tl.exp(x)
    return y


@triton.jit
def weight(i, size):
    """What the guarded softmax multiplies P of row i with: as
    `numdev.kernels.emulation.guarded.weights`."""
    number = (i + size.kv_len).to(tl.uint32) * GOLDEN >> 26  # 32 bits, which wrap around
    return (2 * number + 129).to(tl.float32) * 0.00390625


@triton.jit
def gradient_of_p(do, v, TRANSPOSED: tl.constexpr, PLAN: tl.constexpr):
    """dP = dO Vᵀ of a tile, or its transpose."""
    if TRANSPOSED:
        dP = tl.dot(v, tl.trans(do), input_precision="ieee")
    else:
        dP = tl.dot(do, tl.trans(v), input_precision="ieee")
    return dP.to(v.dtype).to(tl.float32) if PLAN.round_dp else dP


@triton.jit
def finite(m):
    """m, with 0 for that of no key at all: any finite shift then gives P = 0, not NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def within(
    start, stop, total, first, last,
    BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """What lines [start, stop) of the score matrix have to do with the `total` of the other kind.

    Line x meets x + first to x + last. Returns the places (begin, full, rest, end): tiles of BLOCK
    from `begin` on meet some line; those in [full, rest) meet all, and so need no check; the last
    one that meets any ends at or after `end`. All but `end` are multiples of BLOCK.
    """
    begin, full, rest, end = 0, 0, total // BLOCK * BLOCK, total
    if LEFT:
        begin = tl.minimum(tl.maximum(start + first, 0), total) // BLOCK * BLOCK
        full = tl.cdiv(tl.minimum(tl.maximum(stop - 1 + first, 0), total), BLOCK) * BLOCK
    if RIGHT:
        rest = tl.minimum(tl.maximum(start + last + 1, 0), total) // BLOCK * BLOCK
        end = tl.minimum(tl.maximum(stop + last, 0), total)
    end = tl.maximum(end, begin)
    full = tl.minimum(full, tl.cdiv(end, BLOCK) * BLOCK)
    return begin, full, tl.maximum(rest, full), end
