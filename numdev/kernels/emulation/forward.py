"""The forward pass of `emulated`: tiled attention with a format at every rounding site.

`attend` computes it in fp64 and rounds each intermediate result, once and correctly,
to the format its *site* has in a recipe (`numdev.kernels.emulation.recipe`, docs/sites.md). So a
recipe is a hypothesis about a kernel: its output predicts the size of the kernel's error, and where
tiles and order are right too, the error itself. With every site exact it is the reference.

What is modelled. A site is rounded after the exact result of its step. The sum inside a matrix
product or a row sum is therefore exact up to its one rounding: kernels accumulate such sums in at
least fp32, and that error is left out. So are approximate exp and reciprocal. The prediction is
good for the size of a 16-bit kernel's error; of its bias it is not, since with ties a relative
error of 1e-6 in l moves the output by 0.1 ulp.

What the tile changes. P is rounded relative to the running maximum, and the accumulators are
rounded once per tile, so `block_kv` and `kv_order` change the numbers. `block_q` does not, in
round-to-nearest: rows are independent, and to a row that sees no key of a tile the tile is P = 0,
a = 1, which changes nothing that is rounded already. (`fa1` multiplies O by l and divides by l
again; once O = round(X / l), round(round(O l) / l) is O. A test goes through all significands of
bf16.) Rounding toward zero, O shrinks at every such tile, so there the size of the block tells. As
in real kernels, rows take part in a tile as whole blocks of block_q, and a tile that no row of a
block can see by its position is skipped. (Where a case holds some of a call's rows, its blocks are
still the call's.) The outer loop changes nothing but the rounding at `state`; so one order is
computed, and rows are processed in as few pieces as memory allows.

`compute="float32"` does the same in fp32, TF32 and autocast off, and rounds at the same sites
(float32 sites are then free). How far apart the two modes may be, for `fa2`. Let u be the unit
roundoff of the working format, w = 2^-24, d the head_dim, n the length, t the number of tiles, and
A = |scale| sum |q||k|, the sum of absolute terms in a score.

- Two scores differ by at most (d + 4) w A: d for the product, 2 for the scale and its product, 2
  for the fp64 mode's own roundings to fp32. The maximum differs by as much, and S - m rounds once
  in each mode, 4 w A. With exp (4 w) and its rounding, P before `p` differs by a relative
  (2 d + 12) w A + 6 w. Every tile rescales once more, by a factor that differs by 4 w A + 8 w.
  In sum e = (2 d + 12 + 4 t) w A + (6 + 8 t) w. The sums in l and P V add (n + 4) w each.
- Rounding is monotone: where e carries a P over a boundary it lands one ulp away, 2 u relative
  (above the subnormals); elsewhere both modes get the same P. The cast at the end is monotone too.

With T the term scale, therefore, always |o32 - o64| <= (2 u + 2 e + (2 n + 8) w) T + ulp(o). That
is every P on the other side of its boundary, and in one direction. A P is carried over with a
probability of about its relative error / u, and the real error is far below e. Measured (lengths
256 and 1024, normal, wide and tied scores, all presets): 0.1 % of the outputs differ in bf16 and
up to 2 % in fp16, by a root mean square of at most 7 % and 18 % of the emulated error, whose own
rms agrees to 0.1 %.

Legend: S scores, P probabilities, m row maximum, l row sum, O output, L log-sum-exp; a = exp(m_old
- m) rescales what was summed before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from numdev.cases import AttentionCase, additive, keys_from, rows_within, span, visible
from numdev.formats import format_of
from numdev.kernels.emulation import guarded, stabilised
from numdev.kernels.emulation.recipe import Recipe
from numdev.kernels.emulation.rounding import Rounder, plain_arithmetic

BLOCK_BYTES = {"cpu": 1 << 22, "cuda": 1 << 28}
"""How large one tile of scores may be: on a CPU to stay in its cache. Speed only, but for
stochastic rounding, whose random numbers are drawn in the order of the pieces."""

LN_SMALLEST_FP32 = -126 * math.log(2.0)

State = tuple[Tensor, Tensor, Tensor]
"""m [B, H, rows], l [B, H, rows], O [B, H, rows, v_dim]."""


def attend(case: AttentionCase, made: Recipe) -> tuple[Tensor, Tensor]:
    """O [B, H, q_len, v_dim] and L [B, H, q_len] as the recipe has them, in its `compute` dtype.

    Differentiates nothing: it runs without autograd. Raises Refused as `emulated` does.
    """
    dtype = dtype_of(made)
    r = Rounder(made, case, dtype)
    with torch.no_grad(), plain_arithmetic(case.q.device):
        q, k, v = (x.to(dtype) for x in (case.q, case.k, case.v))
        m, l, O = forward(r, case, made, scaled_q(r, case, made, q), k, v)
        return r("out", O), r("lse", m + l.log())


def dtype_of(made: Recipe) -> torch.dtype:
    """The dtype in which a recipe is computed."""
    return torch.float64 if made.compute == "float64" else torch.float32


def scaled_q(r: Rounder, case: AttentionCase, made: Recipe, q: Tensor) -> Tensor:
    """Q as it meets K: with the scale in it where the recipe says so."""
    return r("q_scaled", q * case.scale) if made.scale_in == "q" else q


def forward(
    r: Rounder, case: AttentionCase, made: Recipe, q: Tensor, k: Tensor, v: Tensor
) -> State:
    """m, l and O after the last tile, O normalised and not yet cast. q is that of `scaled_q`.
    l is the sum of exp(S - m), whatever its P were multiplied with.

    Merged splits have neither m nor l of their own: they return L and 1, which give P as well.
    """
    parts = [_pass(r, case, made, q, k, v, split)[0] for split in splits(case, made)]
    return parts[0] if len(parts) == 1 else _merged(r, parts)


def forward_with_products(
    r: Rounder, case: AttentionCase, made: Recipe, q: Tensor, k: Tensor, v: Tensor
) -> tuple[State, Tensor | None]:
    """What `forward` returns, and beside it O as it was last before it was normalised: P-bar V in
    `fa2` and `fa1`, P V in `plain`. None where the keys are split, each part with one of its own.
    """
    parts = [_pass(r, case, made, q, k, v, split) for split in splits(case, made)]
    if len(parts) == 1:
        return parts[0]
    return _merged(r, [state for state, _ in parts]), None


def _pass(
    r: Rounder, case: AttentionCase, made: Recipe, q: Tensor, k: Tensor, v: Tensor, split: slice
) -> tuple[State, Tensor]:
    """m, l and O of the keys of one split, tile by tile, and O before it was normalised."""
    w = _weights(case, made, q.dtype)
    m, l, O = start(r, case, q, v, split)
    l = l if w is None else l * w
    products = torch.zeros_like(O) if made.algorithm == "fa1" else O
    for rows, keys in _tiles(case, made, split):
        S, _ = scores(r, case, made, q, k, rows, keys)
        before = (m[:, :, rows], l[:, :, rows], O[:, :, rows])
        step, w_rows = STEPS[made.algorithm], None if w is None else w[rows]
        m[:, :, rows], l[:, :, rows], new = step(r, case, made, S, v[:, :, keys], before, w_rows)
        if made.algorithm == "fa1":
            products[:, :, rows] = new
            new = r("normalised", new / nonzero(l[:, :, rows])[..., None])
        O[:, :, rows] = r("state", new) if made.loop_order == "kv" else new
    if made.algorithm == "fa2":
        O = r("normalised", O / nonzero(l)[..., None])
    if made.softmax == "stabilised":
        O = O.masked_fill(lost(m, l)[..., None], math.nan)
    return (m, l if w is None else l / w, O), products


def _weights(case: AttentionCase, made: Recipe, dtype: torch.dtype) -> Tensor | None:
    """By what the P of each row are multiplied, [q_len]; None where they are not."""
    if made.softmax != "guarded":
        return None
    guarded.check({site: made.format_at(site, case.format) for site in ("exp", "p")})
    return guarded.weights(case, dtype)


def _merged(r: Rounder, parts: list[State]) -> State:
    """The splits' results as one: O = sum_s exp(L_s - L) O_s."""
    L = torch.stack([m + l.log() for m, l, _ in parts]).logsumexp(dim=0)
    O = torch.zeros_like(parts[0][2])
    for m, l, O_s in parts:
        O += (m + l.log() - finite(L)).exp()[..., None] * r("merge", O_s)
    return L, torch.ones_like(L), r("merge", O)


def start(r: Rounder, case: AttentionCase, q: Tensor, v: Tensor, split: slice) -> State:
    """Before any key: nothing, or the sink, a key with a logit and no value, in the first split."""
    shape = q.shape[:3]
    O = q.new_zeros(*shape, v.shape[-1])
    if case.sinks is None or split.start > 0:
        return q.new_full(shape, -math.inf), q.new_zeros(shape), O
    m = r("max", case.sinks.to(q.dtype))[None, :, None].expand(shape).clone()
    return m, torch.ones_like(m), O


def scores(
    r: Rounder, case: AttentionCase, made: Recipe, q: Tensor, k: Tensor, rows: slice, keys: slice
) -> tuple[Tensor, Tensor | None]:
    """S [B, H, rows, keys]: scaled, capped, biased, and -inf where hidden. Beside it, under a soft
    cap, the tanh, from which backward has its derivative."""
    S = r("scores", times(case, q[:, :, rows], k[:, :, keys].transpose(-1, -2)))
    if made.scale_in == "scores":
        S = r("scaled", S.mul_(case.scale))
    tanh = None
    if case.softcap is not None:
        S = r("softcap", S.div_(case.softcap))
        tanh = r("softcap", S.tanh_())
        S = r("softcap", tanh * case.softcap)
    added = additive(case, rows, keys)
    if added is not None:
        S = r("bias", S.add_(added.to(S.dtype)))
    shown = visible(case, rows, keys)
    return (S if shown is None else S.masked_fill_(~shown, -math.inf)), tanh


def _fa2(
    r: Rounder,
    case: AttentionCase,
    made: Recipe,
    S: Tensor,
    V: Tensor,
    before: State,
    w: Tensor | None,
) -> State:
    """FlashAttention-2, Algorithm 1, lines 8 to 10: O is normalised after the last tile."""
    m_old, l_old, O_old = before
    m = torch.maximum(m_old, maximum(r, case, made, S))
    a = _factor(r, m_old, m)
    P = exponential(r, made, S, m, w)
    P_V = r("p", P)
    l = r("row_sum", r("rescale", a * l_old) + _tile_sum(r, made, P, P_V))
    O = r("accumulator", a[..., None] * O_old)
    return m, l, r("accumulator", O.add_(r("pv", times(case, P_V, V))))


def _fa1(
    r: Rounder,
    case: AttentionCase,
    made: Recipe,
    S: Tensor,
    V: Tensor,
    before: State,
    w: Tensor | None,
) -> State:
    """FlashAttention, Algorithm 1, lines 10 to 13: a tile has a maximum of its own, and O is
    normalised after every tile: here it is not yet."""
    m_old, l_old, O_old = before
    m_tile = maximum(r, case, made, S)
    m = torch.maximum(m_old, m_tile)
    a, b = _factor(r, m_old, m), _factor(r, m_tile, m)
    P = exponential(r, made, S, m_tile, w)
    P_V = r("p", P)
    al = r("rescale", a * l_old)
    l = r("row_sum", al + r("rescale", b * _tile_sum(r, made, P, P_V)))
    O = r("accumulator", al[..., None] * O_old)
    return (
        m,
        l,
        r("accumulator", O.add_(r("accumulator", b[..., None] * r("pv", times(case, P_V, V))))),
    )


def _plain(
    r: Rounder,
    case: AttentionCase,
    made: Recipe,
    S: Tensor,
    V: Tensor,
    before: State,
    w: Tensor | None,
) -> State:
    """Softmax over all keys, then P V. There is one tile, and at most a sink before it."""
    m_old, l_old, _ = before
    m = torch.maximum(m_old, maximum(r, case, made, S))
    a = _factor(r, m_old, m)
    P = exponential(r, made, S, m, w)
    l = r("row_sum", r("rescale", a * l_old) + _tile_sum(r, made, P, P))
    P_V = r("p", r("normalised", P / nonzero(l)[..., None]))
    return m, l, r("accumulator", r("pv", times(case, P_V, V)))


STEPS = {"fa2": _fa2, "fa1": _fa1, "plain": _plain}


def maximum(r: Rounder, case: AttentionCase, made: Recipe, S: Tensor) -> Tensor:
    """By what each row of a tile wants to be shifted, [B, H, rows]: its maximum, or what the
    stabilised softmax takes instead. P is not to fall below the normal numbers that `exp` and `p`
    have, or the arithmetic where they are exact."""
    if made.beta is None or made.tie_tolerance is None:
        return r("max", S.amax(dim=-1))
    smallest = smallest_weight(made, case, S.dtype)
    wanted = stabilised.shift(
        S, beta=made.beta, tie_tolerance=made.tie_tolerance, smallest=smallest
    )
    return r("max", wanted)


def smallest_weight(made: Recipe, case: AttentionCase, dtype: torch.dtype) -> float:
    """The smallest normal number that P may be on its way to V."""
    formats = [made.format_at(site, case.format) or format_of(dtype) for site in ("exp", "p")]
    return max(fmt.smallest_normal for fmt in formats)


def _factor(r: Rounder, m_old: Tensor, m: Tensor) -> Tensor:
    """exp(m_old - m), by which what was summed under m_old is rescaled; 0 if that was nothing."""
    return r("rescale", r("exponent", m_old - finite(m)).exp_())


def exponential(r: Rounder, made: Recipe, S: Tensor, m: Tensor, w: Tensor | None = None) -> Tensor:
    """exp(S - m), or w times that, for m without the last axis of S. Overwrites S."""
    x = r("exponent", S.sub_(finite(m)[..., None]))
    P = _fexp_u20(x) if made.exponential == "fexp_u20" else x.exp_()
    return r("exp", P if w is None else P.mul_(w[:, None]))


def _fexp_u20(x: Tensor) -> Tensor:
    """PyTorch's fast vectorised exp, for x <= 0: exp(x) = 2^y, and the fp32 number whose bits are
    (y + 127) * 2^23 is 2^y, but for its straight fraction, which a cubic in frac(y) makes up for
    (Malossi et al., Fast Exponential Computation on SIMD Architectures, 2015). The sum y + 127 has
    24 bits, which leaves the result about 17. Coefficients as in torch's vec512_float.h."""
    y = x.clamp(min=LN_SMALLEST_FP32).mul_(math.log2(math.e))
    f = y - y.floor()
    cubic = f.mul(-0.079204240219773236).add_(-0.22433836478672356)
    cubic = cubic.mul_(f).add_(0.30354260500649682).mul_(f).add_(0.00010703434948458272)
    bits = y.sub_(cubic).add_(127.0).to(torch.float32).mul_(2.0**23)
    power = bits.to(torch.int32).view(torch.float32).to(x.dtype)
    return power.masked_fill_(x < LN_SMALLEST_FP32, 0.0).masked_fill_(x.isnan(), math.nan)


def _tile_sum(r: Rounder, made: Recipe, P: Tensor, P_V: Tensor) -> Tensor:
    return r("tile_sum", (P_V if made.l_from == "rounded" else P).sum(dim=-1))


def finite(m: Tensor) -> Tensor:
    """m, with the lowest number as the maximum of no key at all: any finite shift then gives P = 0,
    not NaN."""
    return m.clamp(min=torch.finfo(m.dtype).min)


def lost(m: Tensor, l: Tensor) -> Tensor:
    """Rows that saw keys and lost every P of theirs, as they may under the stabilised softmax."""
    return (l == 0) & (m > -math.inf)


def nonzero(l: Tensor) -> Tensor:
    """l, with 1 where nothing was summed: O is 0 there and stays so."""
    return torch.where(l == 0, 1.0, l)


def splits(case: AttentionCase, made: Recipe) -> Iterator[slice]:
    """The keys of each split: whole tiles, the same number for each but the last."""
    step = split_width(case, made)
    for start in range(0, case.kv_len, step):
        yield slice(start, min(start + step, case.kv_len))


def split_width(case: AttentionCase, made: Recipe) -> int:
    """The keys of a split, of which the last may have fewer."""
    _, block_kv = made.tile(case.q.shape[-1], case.kv_len)
    tiles = -(-case.kv_len // block_kv)
    return -(-tiles // (made.splits or 1)) * block_kv


def _tiles(case: AttentionCase, made: Recipe, split: slice) -> Iterator[tuple[slice, slice]]:
    """Every tile of a split that somebody can see by position, as (rows, keys), in the order each
    row meets them.

    Tiles begin at multiples of block_kv; rows are whole blocks of block_q, as many as fit.
    """
    block_q, block_kv = made.tile(case.q.shape[-1], case.kv_len)
    row_bytes = 8 * case.q.shape[0] * case.heads * block_kv
    budget = BLOCK_BYTES["cuda" if case.q.is_cuda else "cpu"]
    step = block_q * max(1, budget // (row_bytes * block_q))
    for first in range(0, case.q_len, step):
        piece = slice(first, min(first + step, case.q_len))
        keys = keys_from(case, _blocks_of(case, piece, block_q))
        first_key = max(keys.start - keys.start % block_kv, split.start)
        starts = range(first_key, min(keys.stop, split.stop), block_kv)
        for start in reversed(starts) if made.kv_order == "descending" else starts:
            tile = slice(start, min(start + block_kv, case.kv_len))
            rows = _row_range(case, tile, piece, block_q)
            if rows.start < rows.stop:
                yield rows, tile


def _row_range(case: AttentionCase, keys: slice, piece: slice, block_q: int) -> slice:
    """The rows of `piece` whose block can see any of `keys` by position."""
    blocks = _blocks_of(case, piece, block_q)
    first, last = blocks.start, blocks.stop
    if case.is_causal:
        first = max(first, keys.start - case.causal_offset)
    if case.window is not None:
        left, right = case.window
        if right is not None:
            first = max(first, keys.start - case.causal_offset - right)
        if left is not None:
            last = min(last, keys.stop - case.causal_offset + left)
    if first >= last:
        return slice(piece.start, piece.start)
    rows = rows_within(case, slice(first - first % block_q, last + -last % block_q))
    return slice(max(rows.start, piece.start), min(rows.stop, piece.stop))


def _blocks_of(case: AttentionCase, piece: slice, block_q: int) -> slice:
    """The positions of the blocks that a piece's rows are of. A piece of a whole call is made of
    blocks, of which the last may be a part."""
    at = span(case, piece)
    if case.positions is None:
        return at
    return slice(at.start - at.start % block_q, at.stop + -at.stop % block_q)


def times(case: AttentionCase, x: Tensor, of_kv_heads: Tensor) -> Tensor:
    """x @ of_kv_heads [B, H, R, Y], for x [B, H, R, X] and [B, kv_heads, X, Y]: each kv head meets
    its query heads at once."""
    b, h, rows, width = x.shape
    product = x.reshape(b, case.kv_heads, case.group * rows, width) @ of_kv_heads
    return product.view(b, h, rows, -1)
