"""The forward pass of `triton-flash`: FlashAttention-2, Algorithm 1, with its roundings
as options.

A program computes one block of rows of one query head, over the tiles of keys that the
block can see by position. Only those that some of its rows cannot wholly see check
positions. In the order `kv` of the loops O would be written to memory after every tile,
in the working format, and read back: rounding it here is all that is done about it.

The stabilised softmax (Qiu & Yao, arXiv 2510.04212) and the guarded one are those of
`emulation.forward.stabilised_shift` and `guarded_weights`. With the former a row becomes
NaN where its largest P, exp(-(beta - 1) r), would be below the normal numbers of the
format in which P meets V: (beta - 1) r > 9.7 in float16 and 87 elsewhere.

Everything is computed in fp32; fp32 operands are multiplied in fp32, never in TF32.
Python floats reach a kernel as fp32, the scale among them. Places are 64-bit only where
they may be large: the offset of a head, and of a tile's first row.

Legend: S scores, P probabilities, m row maximum, l row sum, O output, L log-sum-exp; i, j
the numbers of query rows and of keys; a = exp(m_old - m)."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
GOLDEN = tl.constexpr(2654435769)


@triton.jit
def head_address(X, strides, batch, head):
    """Returns the address at which a head of X begins. `strides`: the four strides of X
    in elements (`host.Strides`)."""
    return X + batch.to(tl.int64) * strides.batch + head.to(tl.int64) * strides.head


@triton.jit
def load_rows(
    X, strides, start, rows,
    COUNT: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Returns [COUNT, WIDE] elements of a head from row `start` on, both powers of two.
    X: the head's address; `strides`: those of its tensor in elements (`host.Strides`), of
    which `row` and `column` count; `rows`, DIM: how many rows and columns the head has,
    DIM at most WIDE. With CHECK, 0 outside of these; without, all rows must exist, and
    columns beyond DIM are 0."""
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
def load_block(
    X,
    strides,
    batch,
    head,
    start,
    rows,
    COUNT: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Returns [COUNT, WIDE] elements of one head of X from row `start` on, 0 outside of
    [rows, DIM]."""
    return load_rows(
        head_address(X, strides, batch, head),
        strides,
        start,
        rows,
        COUNT,
        DIM,
        WIDE,
        True,
    )


@triton.jit
def store_rows(
    X, strides, start, rows, x, COUNT: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr
):
    """Writes the part of x [COUNT, WIDE] inside of [rows, DIM] to a head from row `start`
    on, rounded to the format of X."""
    r, c = tl.arange(0, COUNT), tl.arange(0, WIDE)
    at = X + tl.cast(start, tl.int64) * strides.row
    at = at + r[:, None] * strides.row + c[None, :] * strides.column
    inside = (start + r < rows)[:, None] & (c < DIM)[None, :]
    tl.store(at, x.to(X.dtype.element_ty), mask=inside)


@triton.jit
def scores(
    x, y, i, j, scale, mask, mask_strides, size, PARTIAL: tl.constexpr, PLAN: tl.constexpr
):
    """Returns x yᵀ as scores in fp32: S if x is of queries, Sᵀ if it is of keys; -inf
    where row i may not see key j. i and j broadcast to its shape. `scale`: the factor of
    the product, in the plan's units; `size`: a `host.Size`. Without PARTIAL no position
    hides a key; the mask does in any case."""
    S = tl.dot(x, tl.trans(y), input_precision="ieee")
    if PLAN.round_scores:
        S = S.to(x.dtype).to(tl.float32)
    S = S * scale
    if PLAN.mask != "none":
        at = (
            mask
            + i.to(tl.int64) * mask_strides.row
            + j.to(tl.int64) * mask_strides.column
        )
        loaded = tl.load(at, mask=(i < size.q_len) & (j < size.kv_len), other=0)
        if PLAN.mask == "bool":
            S = tl.where(loaded != 0, S, float("-inf"))
        else:
            added = loaded.to(tl.float32)
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
    """Returns exp(x) of a difference of scores x, which is in units of ln 2 where the
    plan has folded log2 e into the scale."""
    if PLAN.folded:
        y = tl.exp2(x)
    elif PLAN.binary:
        y = tl.exp2(x * LOG2_E)
    else:
        y = tl.exp(x)
    return y


@triton.jit
def guarded_weight(i, size):
    """Returns the factor of P of row i in the guarded softmax, one of 64 odd numbers over
    256, as `emulation.forward.guarded_weights` has it."""
    number = (i + size.kv_len).to(tl.uint32) * GOLDEN >> 26  # 32 bits, which wrap around
    return (2 * number + 129).to(tl.float32) * 0.00390625


@triton.jit
def gradient_of_p(do, v, TRANSPOSED: tl.constexpr, PLAN: tl.constexpr):
    """Returns dP = dO Vᵀ of a tile, or its transpose if TRANSPOSED, rounded if the plan
    says so."""
    if TRANSPOSED:
        dP = tl.dot(v, tl.trans(do), input_precision="ieee")
    else:
        dP = tl.dot(do, tl.trans(v), input_precision="ieee")
    return dP.to(v.dtype).to(tl.float32) if PLAN.round_dp else dP


@triton.jit
def finite(m):
    """Returns m with 0 in place of -inf (no key at all): any finite shift then gives P =
    0, not NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def tile_range(
    start, stop, total, first, last,
    BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Returns (begin, full, tail, end): which tiles of keys a block of rows meets, or of
    rows a block of keys. [start, stop) is the block; `total` is the number of lines of
    the other kind, of which line x meets x + first to x + last.

    Tiles of BLOCK from `begin` on meet some line of the block. Those in [full, tail) meet
    all of its lines, and so need no check. The last one that meets a line ends at or
    after `end`. All but `end` are multiples of BLOCK."""
    begin, full, tail, end = 0, 0, total // BLOCK * BLOCK, total
    if LEFT:
        begin = tl.minimum(tl.maximum(start + first, 0), total) // BLOCK * BLOCK
        full = tl.cdiv(tl.minimum(tl.maximum(stop - 1 + first, 0), total), BLOCK) * BLOCK
    if RIGHT:
        tail = tl.minimum(tl.maximum(start + last + 1, 0), total) // BLOCK * BLOCK
        end = tl.minimum(tl.maximum(stop + last, 0), total)
    end = tl.maximum(end, begin)
    full = tl.minimum(full, tl.cdiv(end, BLOCK) * BLOCK)
    return begin, full, tl.maximum(tail, full), end


@triton.jit
def forward(
    Q, K, V, O, L, sinks, mask,
    q_strides, k_strides, v_strides, o_strides, mask_strides, size, scale,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, PLAN: tl.constexpr,
):  # fmt: skip
    """Writes O [rows of a block, v_dim] and L of a block of rows. `scale`: the factor of
    Q Kᵀ, in the plan's units. A row that sees no key is 0, with an L of -inf, or of the
    sink."""
    V_WIDE: tl.constexpr = PLAN.v_wide
    blocks = tl.cdiv(size.q_len, BLOCK_Q)
    # Under a causal mask the last rows see the most keys: their programs had better
    # begin.
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

    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    if PLAN.sinks:  # a key with a logit and no value
        sink = tl.load(sinks + head).to(tl.float32)
        m = tl.zeros([BLOCK_Q], tl.float32) + (sink * LOG2_E if PLAN.folded else sink)
        l = l + (guarded_weight(i, size) if PLAN.guarded else 1.0)
    o = tl.zeros([BLOCK_Q, V_WIDE], tl.float32)
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
    common = (q, K, V, k_strides, v_strides, mask, mask_strides, i, size, scale)
    if PLAN.descending:
        m, l, o = add_key_tiles(m, l, o, common, tail, end, True, BLOCK_KV, PLAN)
        m, l, o = add_key_tiles(m, l, o, common, full, tail, False, BLOCK_KV, PLAN)
        if PLAN.left:
            m, l, o = add_key_tiles(m, l, o, common, begin, full, True, BLOCK_KV, PLAN)
    else:
        if PLAN.left:
            m, l, o = add_key_tiles(m, l, o, common, begin, full, True, BLOCK_KV, PLAN)
        m, l, o = add_key_tiles(m, l, o, common, full, tail, False, BLOCK_KV, PLAN)
        m, l, o = add_key_tiles(m, l, o, common, tail, end, True, BLOCK_KV, PLAN)

    # A row that saw no key is 0. One whose every P was lost is 0 / 0.
    o = o / tl.where(m == float("-inf"), 1.0, l)[:, None]
    if PLAN.guarded:
        l = l / guarded_weight(i, size)
    lse = (m + tl.log2(l)) * LN_2 if PLAN.folded else m + tl.log(l)
    at = head_address(O, o_strides, batch, head)
    store_rows(at, o_strides, start, size.q_len, o, BLOCK_Q, PLAN.v_dim, PLAN.v_wide)
    at = L + (batch.to(tl.int64) * size.heads + head) * size.q_len
    tl.store(at + i, lse, mask=i < size.q_len)


@triton.jit
def add_key_tiles(
    m, l, o, common, first, last,
    PARTIAL: tl.constexpr, BLOCK: tl.constexpr, PLAN: tl.constexpr,
):  # fmt: skip
    """Returns m, l and O of a block of rows after the tiles of keys [first, last), in the
    plan's order. `common`: the call's other operands, in the order in which they are
    unpacked. PARTIAL: positions, or the end of the keys, may hide keys in these tiles."""
    q, K, V, k_strides, v_strides, mask, mask_strides, i, size, scale = common
    tiles = tl.cdiv(tl.maximum(last - first, 0), BLOCK)
    for n in range(0, tiles):
        start = first + ((tiles - 1 - n) if PLAN.descending else n) * BLOCK
        j = start + tl.arange(0, BLOCK)
        k = load_rows(
            K, k_strides, start, size.kv_len, BLOCK, PLAN.head_dim, PLAN.wide, PARTIAL
        )
        S = scores(
            q, k, i[:, None], j[None, :], scale, mask, mask_strides, size, PARTIAL, PLAN
        )
        m_old = m
        m = tl.maximum(m, row_maximum(S, PLAN), propagate_nan=tl.PropagateNan.ALL)
        a = exponential(m_old - finite(m), PLAN)
        P = exponential(S - finite(m)[:, None], PLAN)
        if PLAN.guarded:
            P = P * guarded_weight(i, size)[:, None]
        v = load_rows(
            V, v_strides, start, size.kv_len, BLOCK, PLAN.v_dim, PLAN.v_wide, PARTIAL
        )
        l = row_sum(l * a, P, v, PLAN)
        o = accumulate(o * a[:, None], P, v, PLAN)
    return m, l, o


@triton.jit
def row_maximum(S, PLAN: tl.constexpr):
    """Returns the shift of each row of a tile, [rows]: its maximum. In the stabilised
    softmax a maximum that several scores come near, within the tolerance, is replaced, as
    `emulation.forward.stabilised_shift` does (NaN where P would underflow)."""
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
    """Returns l with the sum of a tile's P added. P is rounded to v's dtype first, and
    the new l after, where the plan says so."""
    if PLAN.sum_rounded_p and PLAN.round_p:
        P = P.to(v.dtype).to(tl.float32)
    l = l + tl.sum(P, 1)
    return l.to(v.dtype).to(tl.float32) if PLAN.round_row_sum else l


@triton.jit
def accumulate(o, P, v, PLAN: tl.constexpr):
    """Returns O, which is rescaled already, with a tile's P V added, rounded as the plan
    says. v is not changed."""
    P_V, values = (P.to(v.dtype), v) if PLAN.round_p else (P, v.to(tl.float32))
    if PLAN.round_accumulator:
        o = o.to(v.dtype).to(tl.float32) + tl.dot(P_V, values, input_precision="ieee")
        o = o.to(v.dtype).to(tl.float32)
    else:
        o = tl.dot(P_V, values, o, input_precision="ieee")
    if PLAN.round_state:
        o = o.to(v.dtype).to(tl.float32)
    return o
