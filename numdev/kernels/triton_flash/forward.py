"""The forward pass of `triton-flash`: FlashAttention-2, Algorithm 1, with its roundings as options.

A program computes one block of rows of one query head, over the tiles of keys that the block can
see by position. Only those that some of its rows cannot wholly see check positions. In the order
`kv` of the loops O would be written to memory after every tile, in the working format, and read
back for the next; the number that comes back is O rounded, and rounding it here is all that is
done about it.

The stabilised softmax is Qiu & Yao's (arXiv 2510.04212): where several scores of a row and a tile
are its maximum r, P would be exactly 1 for each of them; the row is therefore shifted by beta r if
r > 0, by 0 if r <= 0. (Printed, the running maximum does not hear of it; here it does, as in their
code.) P is then at most exp(-(beta - 1) r). Their code keeps l above 1e-10, and so is wrong,
silently, from (beta - 1) r = 23 on. Here the row becomes NaN where its largest P would be below the
normal numbers of the format in which P meets V: (beta - 1) r > 9.7 in float16 and 87 elsewhere.

The guarded softmax is ours (`numdev.kernels.emulation.guarded`): m is the maximum, and P has a
weight of its row.

Legend: as in `numdev.kernels.triton_flash.tiles`; a = exp(m_old - m).
"""

from __future__ import annotations

import triton
import triton.language as tl

from numdev.kernels.triton_flash.tiles import (
    LN_2,
    LOG2_E,
    exponential,
    finite,
    head_of,
    rows_of,
    scores,
    store_rows,
    weight,
    within,
)


@triton.jit
def forward(
    Q, K, V, O, L, sinks, mask,
    q_strides, k_strides, v_strides, o_strides, mask_strides, size, scale,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, PLAN: tl.constexpr,
):  # fmt: skip
    """O [rows of a block, v_dim] and L of a block of rows. `scale` makes scores of Q Kᵀ in the
    plan's units; L is natural."""
    V_WIDE: tl.constexpr = PLAN.v_wide
    blocks = tl.cdiv(size.q_len, BLOCK_Q)
    # Under a causal mask the last rows see the most keys: their programs had better begin.
    start = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_Q
    batch, head = tl.program_id(0) // blocks // size.heads, tl.program_id(0) // blocks % size.heads
    K = head_of(K, k_strides, batch, head // size.group)
    V = head_of(V, v_strides, batch, head // size.group)
    if mask is not None:
        mask = head_of(mask, mask_strides, batch, head)
    i = start + tl.arange(0, BLOCK_Q)
    q = rows_of(
        head_of(Q, q_strides, batch, head), q_strides, start, size.q_len,
        BLOCK_Q, PLAN.head_dim, PLAN.wide, True,
    )  # fmt: skip

    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    if PLAN.sinks:  # a key with a logit and no value
        sink = tl.load(sinks + head).to(tl.float32)
        m = tl.zeros([BLOCK_Q], tl.float32) + (sink * LOG2_E if PLAN.folded else sink)
        l = l + (weight(i, size) if PLAN.guarded else 1.0)
    o = tl.zeros([BLOCK_Q, V_WIDE], tl.float32)
    begin, full, rest, end = within(
        start, tl.minimum(start + BLOCK_Q, size.q_len), size.kv_len, size.first, size.last,
        BLOCK_KV, PLAN.left, PLAN.right,
    )  # fmt: skip
    common = (q, K, V, k_strides, v_strides, mask, mask_strides, i, size, scale)
    if PLAN.descending:
        m, l, o = sweep(m, l, o, common, rest, end, True, BLOCK_KV, PLAN)
        m, l, o = sweep(m, l, o, common, full, rest, False, BLOCK_KV, PLAN)
        if PLAN.left:
            m, l, o = sweep(m, l, o, common, begin, full, True, BLOCK_KV, PLAN)
    else:
        if PLAN.left:
            m, l, o = sweep(m, l, o, common, begin, full, True, BLOCK_KV, PLAN)
        m, l, o = sweep(m, l, o, common, full, rest, False, BLOCK_KV, PLAN)
        m, l, o = sweep(m, l, o, common, rest, end, True, BLOCK_KV, PLAN)

    # A row that saw no key is 0. One whose every P was lost is 0 / 0.
    o = o / tl.where(m == float("-inf"), 1.0, l)[:, None]
    if PLAN.guarded:
        l = l / weight(i, size)
    lse = (m + tl.log2(l)) * LN_2 if PLAN.folded else m + tl.log(l)
    at = head_of(O, o_strides, batch, head)
    store_rows(at, o_strides, start, size.q_len, o, BLOCK_Q, PLAN.v_dim, PLAN.v_wide)
    at = L + (batch.to(tl.int64) * size.heads + head) * size.q_len
    tl.store(at + i, lse, mask=i < size.q_len)


@triton.jit
def sweep(
    m, l, o, common, first, last,
    PARTIAL: tl.constexpr, BLOCK: tl.constexpr, PLAN: tl.constexpr,
):  # fmt: skip
    """m, l and O after the tiles of keys [first, last), in the plan's order."""
    q, K, V, k_strides, v_strides, mask, mask_strides, i, size, scale = common
    tiles = tl.cdiv(tl.maximum(last - first, 0), BLOCK)
    for n in range(0, tiles):
        start = first + ((tiles - 1 - n) if PLAN.descending else n) * BLOCK
        j = start + tl.arange(0, BLOCK)
        k = rows_of(K, k_strides, start, size.kv_len, BLOCK, PLAN.head_dim, PLAN.wide, PARTIAL)
        S = scores(q, k, i[:, None], j[None, :], scale, mask, mask_strides, size, PARTIAL, PLAN)
        m_old = m
        m = tl.maximum(m, row_maximum(S, PLAN), propagate_nan=tl.PropagateNan.ALL)
        a = exponential(m_old - finite(m), PLAN)
        P = exponential(S - finite(m)[:, None], PLAN)
        if PLAN.guarded:
            P = P * weight(i, size)[:, None]
        v = rows_of(V, v_strides, start, size.kv_len, BLOCK, PLAN.v_dim, PLAN.v_wide, PARTIAL)
        l = row_sum(l * a, P, v, PLAN)
        o = accumulate(o * a[:, None], P, v, PLAN)
    return m, l, o


@triton.jit
def row_maximum(S, PLAN: tl.constexpr):
    """By what a row of a tile wants to be shifted: its maximum, or what the stabilised softmax
    takes instead of one that is met more than once."""
    r = tl.max(S, 1)
    if PLAN.stabilised:
        near = (r - PLAN.tie_tolerance)[:, None] <= S
        tied = tl.sum(near.to(tl.int32), 1) > 1
        shift = tl.where(r > 0.0, PLAN.beta * r, 0.0)
        shift = tl.where((PLAN.beta - 1.0) * r > PLAN.largest_shift, float("nan"), shift)
        r = tl.where(tied & (r > float("-inf")), shift, r)
    return r


@triton.jit
def row_sum(l, P, v, PLAN: tl.constexpr):
    """l with a tile's P added."""
    if PLAN.sum_rounded_p and PLAN.round_p:
        P = P.to(v.dtype).to(tl.float32)
    l = l + tl.sum(P, 1)
    return l.to(v.dtype).to(tl.float32) if PLAN.round_row_sum else l


@triton.jit
def accumulate(o, P, v, PLAN: tl.constexpr):
    """O, rescaled already, with a tile's P V added."""
    P_V, values = (P.to(v.dtype), v) if PLAN.round_p else (P, v.to(tl.float32))
    if PLAN.round_accumulator:
        o = o.to(v.dtype).to(tl.float32) + tl.dot(P_V, values, input_precision="ieee")
        o = o.to(v.dtype).to(tl.float32)
    else:
        o = tl.dot(P_V, values, o, input_precision="ieee")
    if PLAN.round_state:
        o = o.to(v.dtype).to(tl.float32)
    return o
