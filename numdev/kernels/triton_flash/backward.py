"""The backward pass of `triton-flash`: FlashAttention-2, Algorithm 2, in two kernels.

`of_queries` computes dQ of a block of rows, and before it delta, which it leaves for the
other: from the O that forward returned, or as rowsum(dP o P) in a pass of its own over
the keys. `of_keys` then computes dK and dV of a block of keys, from one query head; what
the query heads of a group have is summed by the caller. Both compute S again as forward
did, and P = exp(S - L). dS and P are rounded to the working format for their products,
which are summed in fp32 and scaled at the end.

Legend: as in `triton_flash.forward`; d: the gradient with respect to it; delta =
rowsum(dO o O)."""

from __future__ import annotations

import triton
import triton.language as tl

from numdev.kernels.triton_flash.forward import (
    LOG2_E,
    exponential,
    finite,
    gradient_of_p,
    head_address,
    load_block,
    load_rows,
    scores,
    store_rows,
    tile_range,
)


@triton.jit
def of_queries(
    Q, K, V, O, dO, L, delta, dQ, mask,
    q_strides, k_strides, v_strides, o_strides, do_strides, dq_strides, mask_strides,
    size, scale, scores_scale,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, PLAN: tl.constexpr,
):  # fmt: skip
    """Writes dQ and delta of a block of rows. `scores_scale` makes scores of Q Kᵀ in the
    plan's units; `scale` is the case's."""
    WIDE: tl.constexpr = PLAN.wide
    blocks = tl.cdiv(size.q_len, BLOCK_Q)
    start = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_Q
    batch, head = (
        tl.program_id(0) // blocks // size.heads,
        tl.program_id(0) // blocks % size.heads,
    )
    K = head_address(K, k_strides, batch, head // size.group)
    V = head_address(V, v_strides, batch, head // size.group)
    if mask is not None:
        mask = head_address(mask, mask_strides, batch, head)
    i = start + tl.arange(0, BLOCK_Q)
    q = load_block(
        Q, q_strides, batch, head, start, size.q_len, BLOCK_Q, PLAN.head_dim, PLAN.wide
    )
    do = load_block(
        dO, do_strides, batch, head, start, size.q_len, BLOCK_Q, PLAN.v_dim, PLAN.v_wide
    )
    lines = (batch.to(tl.int64) * size.heads + head) * size.q_len
    l = tl.load(L + lines + i, mask=i < size.q_len, other=0.0)
    l = finite(l * LOG2_E if PLAN.folded else l)
    begin, full, tail, end = tile_range(
        start,
        tl.minimum(start + BLOCK_Q, size.q_len),
        size.kv_len,
        size.first,
        size.last,
        BLOCK_KV,
        PLAN.left,
        PLAN.right,
    )
    common = (
        q,
        do,
        l,
        K,
        V,
        k_strides,
        v_strides,
        mask,
        mask_strides,
        i,
        size,
        scores_scale,
    )

    d = tl.zeros([BLOCK_Q], tl.float32)
    if PLAN.delta_of_p:
        zero = d
        if PLAN.left:
            d = add_over_keys(d, zero, common, begin, full, True, True, BLOCK_KV, PLAN)
        d = add_over_keys(d, zero, common, full, tail, True, False, BLOCK_KV, PLAN)
        d = add_over_keys(d, zero, common, tail, end, True, True, BLOCK_KV, PLAN)
    else:
        o = load_block(
            O, o_strides, batch, head, start, size.q_len, BLOCK_Q, PLAN.v_dim, PLAN.v_wide
        )
        d = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta + lines + i, d, mask=i < size.q_len)

    dq = tl.zeros([BLOCK_Q, WIDE], tl.float32)
    if PLAN.left:
        dq = add_over_keys(dq, d, common, begin, full, False, True, BLOCK_KV, PLAN)
    dq = add_over_keys(dq, d, common, full, tail, False, False, BLOCK_KV, PLAN)
    dq = add_over_keys(dq, d, common, tail, end, False, True, BLOCK_KV, PLAN)
    at = head_address(dQ, dq_strides, batch, head)
    store_rows(
        at, dq_strides, start, size.q_len, dq * scale, BLOCK_Q, PLAN.head_dim, PLAN.wide
    )


@triton.jit
def add_over_keys(
    total, delta, common, first, last,
    OF_P: tl.constexpr, PARTIAL: tl.constexpr, BLOCK: tl.constexpr, PLAN: tl.constexpr,
):  # fmt: skip
    """Returns `total` with what the tiles of keys [first, last) add to dQ / scale; with
    OF_P, to rowsum(dP o P). `common`: the call's other operands, in the order in which
    they are unpacked. PARTIAL: positions, or the end of the keys, may hide keys in these
    tiles."""
    q, do, l, K, V, k_strides, v_strides, mask, mask_strides, i, size, scale = common
    for n in range(0, tl.cdiv(tl.maximum(last - first, 0), BLOCK)):
        start = first + n * BLOCK
        j = start + tl.arange(0, BLOCK)
        k = load_rows(
            K, k_strides, start, size.kv_len, BLOCK, PLAN.head_dim, PLAN.wide, PARTIAL
        )
        v = load_rows(
            V, v_strides, start, size.kv_len, BLOCK, PLAN.v_dim, PLAN.v_wide, PARTIAL
        )
        S = scores(
            q, k, i[:, None], j[None, :], scale, mask, mask_strides, size, PARTIAL, PLAN
        )
        P = exponential(S - l[:, None], PLAN)
        dP = gradient_of_p(do, v, False, PLAN)
        if OF_P:
            total += tl.sum(dP * P, 1)
        else:
            dS = (P * (dP - delta[:, None])).to(k.dtype)
            total = tl.dot(dS, k, total, input_precision="ieee")
    return total


@triton.jit
def of_keys(
    Q, K, V, dO, L, delta, dK, dV, mask,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, mask_strides,
    size, scale, scores_scale,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, PLAN: tl.constexpr,
):  # fmt: skip
    """Writes what one query head adds to dK and dV of a block of keys; dK and dV have as
    many heads as Q."""
    WIDE: tl.constexpr = PLAN.wide
    V_WIDE: tl.constexpr = PLAN.v_wide
    blocks = tl.cdiv(size.kv_len, BLOCK_KV)
    # Under a causal mask the first keys are seen by the most rows.
    start = tl.program_id(0) % blocks * BLOCK_KV
    batch, head = (
        tl.program_id(0) // blocks // size.heads,
        tl.program_id(0) // blocks % size.heads,
    )
    Q = head_address(Q, q_strides, batch, head)
    dO = head_address(dO, do_strides, batch, head)
    if mask is not None:
        mask = head_address(mask, mask_strides, batch, head)
    j = start + tl.arange(0, BLOCK_KV)
    kv = head // size.group
    k = load_block(
        K, k_strides, batch, kv, start, size.kv_len, BLOCK_KV, PLAN.head_dim, PLAN.wide
    )
    v = load_block(
        V, v_strides, batch, kv, start, size.kv_len, BLOCK_KV, PLAN.v_dim, PLAN.v_wide
    )
    lines = (batch.to(tl.int64) * size.heads + head) * size.q_len
    # Row i sees keys i + first to i + last, so key j is seen by rows j - last to j -
    # first.
    begin, full, tail, end = tile_range(
        start,
        tl.minimum(start + BLOCK_KV, size.kv_len),
        size.q_len,
        -size.last,
        -size.first,
        BLOCK_Q,
        PLAN.right,
        PLAN.left,
    )
    common = (
        k,
        v,
        Q,
        dO,
        L + lines,
        delta + lines,
        q_strides,
        do_strides,
        mask,
        mask_strides,
        j,
        size,
        scores_scale,
    )
    dk = tl.zeros([BLOCK_KV, WIDE], tl.float32)
    dv = tl.zeros([BLOCK_KV, V_WIDE], tl.float32)
    if PLAN.right:
        dk, dv = add_over_rows(dk, dv, common, begin, full, True, BLOCK_Q, PLAN)
    dk, dv = add_over_rows(dk, dv, common, full, tail, False, BLOCK_Q, PLAN)
    dk, dv = add_over_rows(dk, dv, common, tail, end, True, BLOCK_Q, PLAN)
    at = head_address(dK, dk_strides, batch, head)
    store_rows(
        at, dk_strides, start, size.kv_len, dk * scale, BLOCK_KV, PLAN.head_dim, PLAN.wide
    )
    at = head_address(dV, dv_strides, batch, head)
    store_rows(at, dv_strides, start, size.kv_len, dv, BLOCK_KV, PLAN.v_dim, PLAN.v_wide)


@triton.jit
def add_over_rows(
    dk,
    dv,
    common,
    first,
    last,
    PARTIAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PLAN: tl.constexpr,
):
    """Returns dK / scale and dV with what the tiles of rows [first, last) add. Scores are
    transposed here, so that P and dS need not be for their products. A row beyond the
    last has dO = 0. `common`: the call's other operands, in the order in which they are
    unpacked. PARTIAL: positions may hide keys from rows of these tiles."""
    k, v, Q, dO, L, delta, q_strides, do_strides, mask, mask_strides, j, size, scale = (
        common
    )
    for n in range(0, tl.cdiv(tl.maximum(last - first, 0), BLOCK)):
        start = first + n * BLOCK
        i = start + tl.arange(0, BLOCK)
        q = load_rows(
            Q, q_strides, start, size.q_len, BLOCK, PLAN.head_dim, PLAN.wide, PARTIAL
        )
        do = load_rows(
            dO, do_strides, start, size.q_len, BLOCK, PLAN.v_dim, PLAN.v_wide, PARTIAL
        )
        l = tl.load(L + i, mask=i < size.q_len, other=0.0)
        l = finite(l * LOG2_E if PLAN.folded else l)
        d = tl.load(delta + i, mask=i < size.q_len, other=0.0)
        S = scores(
            k, q, i[None, :], j[:, None], scale, mask, mask_strides, size, PARTIAL, PLAN
        )
        P = exponential(S - l[None, :], PLAN)
        dv = tl.dot(P.to(do.dtype), do, dv, input_precision="ieee")
        dP = gradient_of_p(do, v, True, PLAN)
        dS = (P * (dP - d[None, :])).to(q.dtype)
        dk = tl.dot(dS, q, dk, input_precision="ieee")
    return dk, dv
