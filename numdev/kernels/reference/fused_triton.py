"""The Triton kernels of the fused fp64 reference. Everything they compute is fp64, but
for term scales, which are sums of products of bfloat16 numbers in fp32.

- `forward` is FlashAttention-2's forward pass (arXiv 2307.08691, Algorithm 1) with one
  product more, P |V| for the term scale. Where scores are known to be small (BOUNDED) it
  subtracts no maximum and rescales nothing: bfloat16 holds 2^-80 to 2^80 as well as it
  holds 1.
- `score_gradients` makes S and dP, tile by tile, and writes P and dX = P (dP - delta) for
  a run of query rows; and in bfloat16 P once more and the terms P (|dP| + |delta|), which
  go to term scales. What is summed over keys or rows from there is a product of large
  matrices, in `numdev.kernels.reference.fused`.

Scores are in units of log 2, so that exp is 2^x. Tiles that causality or the window hides
are not computed. Imported only where it runs: this module needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def exp2(x, SMALL: tl.constexpr = False):
    """Returns 2^x in fp64 for x <= 1023, and 0 below -1021; relative error below 2^-52.
    SMALL promises |x| <= 1021.

    x = n + f with |f| <= 1/2: 2^f is a minimax polynomial of degree 11, good to 2^-55,
    and n is added to its exponent. Adding 1.5 * 2^52 rounds x to n, and leaves n in the
    lowest bits."""
    shifted = x + 6755399441055744.0
    f = x - (shifted - 6755399441055744.0)
    p = f * 4.4558179083360645e-10 + 7.074194297288521e-09
    p = p * f + 1.0178057087733941e-07
    p = p * f + 1.3215432535912375e-06
    p = p * f + 1.5252733841556773e-05
    p = p * f + 0.00015403530463724353
    p = p * f + 0.001333355814640647
    p = p * f + 0.009618129107587256
    p = p * f + 0.055504108664821625
    p = p * f + 0.24022650695910158
    p = p * f + 0.6931471805599453
    p = p * f + 1.0
    bits = p.to(tl.int64, bitcast=True) + (shifted.to(tl.int64, bitcast=True) << 52)
    power = bits.to(tl.float64, bitcast=True)
    if SMALL:
        return power
    return tl.where(x < -1021.0, 0.0, power)


@triton.jit
def products(
    A,
    B,
    C,
    E,
    rows,
    columns,
    rows_ok,
    columns_ok,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    AB: tl.constexpr,
    CE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Returns A B^T and C E^T [BLOCK_Q, BLOCK_KV] in fp64, for `rows` of A and C and
    `columns` (rows of B and E). A and B are AB wide, C and E are CE wide, multiples of
    BLOCK_D. Rows that are not `ok` count as 0."""
    x = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float64)
    y = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float64)
    # Of one width in one loop, which fills the pipeline once and not twice.
    for at in tl.range(0, AB, BLOCK_D, num_stages=STAGES):
        x = add_product(x, A, B, rows, columns, rows_ok, columns_ok, at, AB, BLOCK_D)
        if AB == CE:
            y = add_product(y, C, E, rows, columns, rows_ok, columns_ok, at, CE, BLOCK_D)
    if AB != CE:
        for at in tl.range(0, CE, BLOCK_D, num_stages=STAGES):
            y = add_product(y, C, E, rows, columns, rows_ok, columns_ok, at, CE, BLOCK_D)
    return x, y


@triton.jit
def add_product(x, A, B, rows, columns, rows_ok, columns_ok, at, WIDTH: tl.constexpr,
                BLOCK_D: tl.constexpr):  # fmt: skip
    """Returns x plus what columns `at` to `at` + BLOCK_D of A and B add to A B^T."""
    d = at + tl.arange(0, BLOCK_D)
    a = tl.load(A + rows[:, None] * WIDTH + d[None, :], mask=rows_ok[:, None], other=0.0)
    b = tl.load(
        B + columns[None, :] * WIDTH + d[:, None], mask=columns_ok[None, :], other=0.0
    )
    return tl.dot(a, b, x, out_dtype=tl.float64)


@triton.jit
def tile_visibility(i, j, i_ok, j_ok, low, high, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Returns two flags for a tile. The first is False only where no row at positions i
    sees any of the keys j; it may be True there too, as where positions have gaps. The
    second says whether all see all. Position i sees keys i + low to i + high, where LOW
    and HIGH say that there is such a limit."""
    i_min, i_max = tl.min(tl.where(i_ok, i, 2147483647)), tl.max(tl.where(i_ok, i, 0))
    j_min, j_max = tl.min(tl.where(j_ok, j, 2147483647)), tl.max(tl.where(j_ok, j, 0))
    some = j_max >= j_min
    every = some
    if LOW:
        some &= j_max >= i_min + low
        every &= j_min >= i_max + low
    if HIGH:
        some &= j_min <= i_max + high
        every &= j_max <= i_min + high
    return some, every


@triton.jit
def apply_mask(x, i, j, seen, MASK, at, low, high, LOW: tl.constexpr, HIGH: tl.constexpr,
               MASKED: tl.constexpr):  # fmt: skip
    """Returns the scores x with the mask's entries at `at` added, and `seen` without what
    position or mask hides. Scores are in units of log 2, before and after. MASK holds
    natural units in fp64, -inf where it hides. Position i sees keys i + low to i + high,
    where LOW and HIGH say that there is such a limit. Scores of hidden keys are to be
    ignored."""
    if LOW:
        seen &= j[None, :] >= i[:, None] + low
    if HIGH:
        seen &= j[None, :] <= i[:, None] + high
    if MASKED:
        # In fp64 as it lies, a bool mask too: Triton may want it in the layout of an
        # operand, and then takes no narrower type.
        bias = tl.load(MASK + at, mask=seen, other=0.0)
        seen &= bias > float("-inf")
        x += bias * 1.4426950408889634
    return x, seen


@triton.jit
def from_upper(x, UPPER: tl.constexpr):
    """Returns fp64 numbers. With UPPER, x holds their upper 32 bits as int32, and the
    lower ones are 0."""
    if UPPER:
        x = (x.to(tl.int64) << 32).to(tl.float64, bitcast=True)
    return x


@triton.jit
def in_bfloat16(p):
    """Returns numbers p in [0, 2^127) in bfloat16, to nearest, ties away from 0; p below
    2^-126 becomes a smaller number, and 0 stays 0.

    Half of the last place is added to the bits, the exponent's bias made that of
    bfloat16, and the remaining bits dropped. A cast would take as long as the product it
    is for."""
    upper = (p.to(tl.int64, bitcast=True) >> 32).to(tl.int32)
    return (
        (tl.maximum(upper - 939520000, 0) >> 13)
        .to(tl.int16)
        .to(tl.bfloat16, bitcast=True)
    )


@triton.jit
def add_values(out, terms, p, p16, V, ABS, at, ok, UPPER: tl.constexpr):
    """Returns out + P V in fp64 and terms + P |V| in fp32, for the rows of V (and of its
    absolute values ABS) at `at`. `p16` is p in bfloat16."""
    v = tl.load(V + at, mask=ok[:, None], other=0)
    size = tl.load(ABS + at, mask=ok[:, None], other=0.0)
    terms = tl.dot(p16, size, terms)
    return tl.dot(p, from_upper(v, UPPER), out, out_dtype=tl.float64), terms


@triton.jit
def store_values(out, terms, factor, unit, OUT, TERMS, at, ok):
    """Writes out * factor and terms * factor / unit, by row, where `ok`."""
    tl.store(OUT + at, out * factor[:, None], mask=ok[:, None])
    tl.store(
        TERMS + at, terms.to(tl.float64) * (factor / unit)[:, None], mask=ok[:, None]
    )


@triton.jit(do_not_specialize=("heads",))
def forward(
    Q, K, V, ABS, UNIT, MASK, POSITIONS, CAP, SINKS, OUT, TERMS, LSE, EMPTY,
    heads, group, q_len, kv_len, span, low, high, mask_b, mask_h, mask_q, mask_k,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    STAGES: tl.constexpr, BOUNDED: tl.constexpr, SINK: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, MASKED: tl.constexpr, SOFTCAP: tl.constexpr,
    AT: tl.constexpr, UPPER: tl.constexpr, PART: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Writes O, its term scale, L and whether a row is empty, for BLOCK_Q rows of one
    head and the `span` keys of one part: [parts, BH, q_len, ..]. A sink counts as a key
    of the first part.

    Q [BH, q_len, D] comes times scale and, without a soft cap, log2(e); K [BH / group,
    kv_len, D], V [BH / group, kv_len, D_V], both UPPER as `from_upper` takes them; ABS is
    |V| times UNIT, in bfloat16; all contiguous. SINKS [heads] are in units of log 2. PART
    columns of V are taken at a time, D_V or half of it: Triton gives a warp rows of its
    own where a product is no wider than high, and P then stays in its registers. WHOLE,
    which needs BOUNDED and not MASKED, hides keys only in the tiles where some are
    hidden."""
    # The last rows see most keys under causality: begin with them.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    kv = bh // group
    r = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    r_ok = r < q_len
    i = r
    if AT:
        i = tl.load(POSITIONS + r, mask=r_ok, other=0)
    c, d, d_v = tl.arange(0, BLOCK_KV), tl.arange(0, D), tl.arange(0, PART)
    row = bh * q_len + r
    q = tl.load(Q + row[:, None] * D + d[None, :], mask=r_ok[:, None], other=0.0)

    # The keys that any row of the tile may see.
    i_min, i_max = tl.min(tl.where(r_ok, i, 2147483647)), tl.max(tl.where(r_ok, i, 0))
    first, last = 0, kv_len
    if HIGH:
        last = tl.minimum(last, i_max + high + 1)
    if LOW:
        first = tl.maximum(first, i_min + low)
    part = tl.program_id(2)
    first = tl.maximum(first // BLOCK_KV * BLOCK_KV, part * span)
    last = tl.minimum(last, (part + 1) * span)
    # From tiles that begin here nothing is hidden from any row.
    whole_from, whole_to = first, kv_len - BLOCK_KV + 1
    if HIGH:
        whole_to = tl.minimum(whole_to, i_min + high - BLOCK_KV + 2)
    if LOW:
        whole_from = tl.maximum(first, i_max + low)

    m = tl.full([BLOCK_Q], float("-inf"), tl.float64)
    l = tl.zeros([BLOCK_Q], tl.float64)
    out = tl.zeros([BLOCK_Q, PART], tl.float64)
    terms = tl.zeros([BLOCK_Q, PART], tl.float32)
    out_b, terms_b = out, terms
    mask_at = (
        (bh // heads) * mask_b + (bh % heads) * mask_h + r[:, None].to(tl.int64) * mask_q
    )
    cap = 1.0
    if SOFTCAP:
        cap = tl.load(CAP)
    for start in tl.range(first, last, BLOCK_KV, num_stages=STAGES):
        j = start + c
        c_ok = j < kv_len
        key = kv * kv_len + j
        k = tl.load(K + key[None, :] * D + d[:, None], mask=c_ok[None, :], other=0)
        x = tl.dot(q, from_upper(k, UPPER), out_dtype=tl.float64)
        if SOFTCAP:
            x = libdevice.tanh(x / cap) * (cap * 1.4426950408889634)
        at = mask_at + j[None, :].to(tl.int64) * mask_k
        x, seen = apply_mask(x, i, j, r_ok[:, None] & c_ok[None, :], MASK, at, low, high,
                             LOW, HIGH, MASKED)  # fmt: skip
        if WHOLE:
            p = exp2(x, True)
            if start < whole_from or start >= whole_to:
                p = tl.where(seen, p, 0.0)
        elif BOUNDED:
            p = tl.where(seen, exp2(x, True), 0.0)
        else:
            x = tl.where(seen, x, float("-inf"))
            above = tl.maximum(m, tl.max(x, 1))
            shift = tl.where(above == float("-inf"), 0.0, above)
            p = exp2(x - shift[:, None])
            fade = exp2(m - shift)
            m = above
            l *= fade
            out *= fade[:, None]
            terms *= fade[:, None].to(tl.float32)
            if PART < D_V:
                out_b *= fade[:, None]
                terms_b *= fade[:, None].to(tl.float32)
        l += tl.sum(p, 1)
        p16 = in_bfloat16(p)
        at = key[:, None] * D_V + d_v[None, :]
        out, terms = add_values(out, terms, p, p16, V, ABS, at, c_ok, UPPER)
        if PART < D_V:
            out_b, terms_b = add_values(
                out_b, terms_b, p, p16, V, ABS, at + PART, c_ok, UPPER
            )

    empty = l == 0.0
    if BOUNDED:
        m = tl.zeros([BLOCK_Q], tl.float64)
    fade = tl.full([BLOCK_Q], 1.0, tl.float64)
    if SINK:
        sink = tl.where(part == 0, tl.load(SINKS + bh % heads), float("-inf"))
        m = tl.where(empty, float("-inf"), m)
        above = tl.maximum(m, sink)
        above = tl.where(above == float("-inf"), 0.0, above)
        fade = exp2(m - above)
        l = l * fade + exp2(sink - above)
        m = above
    factor = fade / tl.where(l == 0.0, 1.0, l)
    unit = tl.load(UNIT)
    m = tl.where(m == float("-inf"), 0.0, m)
    row += part.to(tl.int64) * tl.num_programs(1) * q_len
    at = row[:, None] * D_V + d_v[None, :]
    store_values(out, terms, factor, unit, OUT, TERMS, at, r_ok)
    if PART < D_V:
        store_values(out_b, terms_b, factor, unit, OUT, TERMS, at + PART, r_ok)
    tl.store(LSE + row, m * 0.6931471805599453 + tl.log(l), mask=r_ok)
    tl.store(EMPTY + row, empty.to(tl.int8), mask=r_ok)


@triton.jit(do_not_specialize=("heads",))
def score_gradients(
    Q, K, V, DO, LSE, DELTA, MASK, POSITIONS, CAP, UNIT, P, DX, P16, TERMS, SEEN,
    heads, group, first_row, rows, q_len, first_key, keys, kv_len, low, high,
    mask_b, mask_h, mask_q, mask_k,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    BLOCK_D: tl.constexpr, STAGES: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, AT: tl.constexpr,
):  # fmt: skip
    """Writes P and dX = P (dP - delta) in fp64, and in bfloat16 P and the terms P (|dP| +
    |delta|) times UNIT. dX and its terms come times the slope of a soft cap; all are 0
    where hidden. LSE is in units of log 2. With a mask or positions it sets SEEN [B *
    kv_heads, kv_len] to 1 for the keys that a row sees."""
    bh = tl.program_id(2).to(tl.int64)
    kv = bh // group
    r = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    c = tl.program_id(0) * BLOCK_KV + tl.arange(0, BLOCK_KV)
    r_ok, c_ok = r < rows, c < keys
    i, j = first_row + r, first_key + c
    row, key = bh * q_len + i, kv * kv_len + j
    if AT:
        i = tl.load(POSITIONS + i, mask=r_ok, other=0)
    inside = r_ok[:, None] & c_ok[None, :]
    to = (bh * rows + r)[:, None] * keys + c[None, :]
    some, every = tile_visibility(i, j, r_ok, c_ok, low, high, LOW, HIGH)
    if some:
        x, dp = products(
            Q, K, DO, V, row, key, r_ok, c_ok, BLOCK_Q, BLOCK_KV, D, D_V, BLOCK_D, STAGES
        )
        if SOFTCAP:
            cap = tl.load(CAP)
            # 1 / cosh^2: 1 - tanh^2 would be nothing but cancellation near the cap.
            fade = exp2(-2.8853900817779268 * tl.abs(x / cap))
            slope = 4.0 * fade / ((1.0 + fade) * (1.0 + fade))
            x = libdevice.tanh(x / cap) * (cap * 1.4426950408889634)
        if MASKED or AT:
            at = (bh // heads) * mask_b + (bh % heads) * mask_h
            at = at + (first_row + r)[:, None].to(tl.int64) * mask_q
            at = at + j[None, :].to(tl.int64) * mask_k
            x, seen = apply_mask(x, i, j, inside, MASK, at, low, high, LOW, HIGH,
                                 MASKED)  # fmt: skip
            x = tl.where(seen, x, float("-inf"))
            tl.atomic_or(SEEN + key, tl.max(seen.to(tl.int32), 0), mask=c_ok)
        elif (LOW or HIGH) and not every:
            x, seen = apply_mask(x, i, j, inside, MASK, to, low, high, LOW, HIGH, False)
            x = tl.where(seen, x, float("-inf"))
        lse = tl.load(LSE + row, mask=r_ok, other=0.0)
        delta = tl.load(DELTA + row, mask=r_ok, other=0.0)
        p = exp2(x - lse[:, None])
        tl.store(P + to, p, mask=inside, cache_modifier=".cs")
        tl.store(
            P16 + to, p.to(tl.float32).to(tl.bfloat16), mask=inside, cache_modifier=".cs"
        )
        if SOFTCAP:
            p = p * slope
        tl.store(DX + to, p * (dp - delta[:, None]), mask=inside, cache_modifier=".cs")
        terms = p * (tl.abs(dp) + tl.abs(delta)[:, None]) * tl.load(UNIT)
        tl.store(TERMS + to, terms.to(tl.float32).to(tl.bfloat16), mask=inside,
                 cache_modifier=".cs")  # fmt: skip
    else:
        nothing = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float64)
        tl.store(P + to, nothing, mask=inside)
        tl.store(DX + to, nothing, mask=inside)
        tl.store(P16 + to, nothing.to(tl.bfloat16), mask=inside)
        tl.store(TERMS + to, nothing.to(tl.bfloat16), mask=inside)
