"""The forward pass of `emulated`: tiled attention with a format at every rounding site.

It is computed in fp64, and each intermediate result is rounded, once and correctly, to
the format its *site* has in a recipe (`numdev.kernels.emulation.recipe`, docs/sites.md).
So a recipe is a hypothesis about a kernel: its output predicts the size of the kernel's
error, and where tiles and order are right too, the error itself. With every site exact it
is the reference.

What is modelled, what a tile changes, and how far fp32 may be from fp64 is in
docs/sites.md. As in real kernels, rows take part in a tile as whole blocks of block_q,
those of the whole call where a case holds some of its rows, and a tile that no row of a
block can see by its position is skipped.

Predictions and training take an `fa2` recipe in fp32 that rounds nothing between tiles
many tiles at once (`is_at_once`): some twenty small steps a tile are what it costs on a
GPU. P is rounded relative to the maximum met when its tile came. Where anything comes out
that is not finite, the tiles decide, one by one: 0 times infinity is not 0, and no tile
is skipped at once.

Legend: S scores, P probabilities, m row maximum, l row sum, O output, L log-sum-exp, a
rescales."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from numdev.cases import (
    AttentionCase,
    additive,
    key_limits,
    key_range,
    keys_from,
    position_span,
    visible,
)  # fmt: skip
from numdev.errors import Refused
from numdev.formats import FORMATS, all_finite, format_of
from numdev.kernels.emulation.recipe import Recipe
from numdev.kernels.emulation.rounding import Rounder, plain_arithmetic
from numdev.kernels.reference.blocked import nonzero

T = TypeVar("T")
# How large one tile of scores may be: on a CPU to stay in its cache. Speed only, but for
# stochastic rounding, whose random numbers are drawn in the order of the pieces.
BLOCK_BYTES = {"cpu": 1 << 22, "cuda": 1 << 28}
# The same of a block of many tiles at once. Three to six times as much is needed for it.
WIDE_BYTES = {"cpu": 1 << 23, "cuda": 1 << 28}
MIN_BLOCK_ROWS = 64  # below this a matrix product waits for K and V
CAUSAL_PARTS, CAUSAL_BYTES = 4, 1 << 24
"""Under causality rows are cut into so many blocks, which spares three eighths of the
scores, where each still holds as much: then it is not the launching of steps that takes
the time."""
LOG2_E = math.log2(math.e)
# FlashAttention-4's minimax cubic for 2^x in [0, 1): flash_attn/cute/utils.py,
# POLY_EX2[3].
CUBIC = (
    0.077119089663028717041015625,
    0.227564394474029541015625,
    0.695146143436431884765625,
    1.0,
)
LANES = {"fexp_u20x8": 8, "fexp_u20x16": 16}  # keys that the fast exp takes at once
GOLDEN = 2654435769  # 2^32 / phi
GUARD_BITS = 8
LN_SMALLEST_FP32 = -126 * math.log(2.0)


class State(NamedTuple):
    """m, l [B, H, rows] and O [B, H, rows, v_dim]. `product` is O as it was last before
    it was normalised: P-bar V in `fa2` and `fa1`, P V in `plain`; None where it is not
    kept."""

    m: Tensor
    l: Tensor
    O: Tensor
    product: Tensor | None = None


def attend(
    case: AttentionCase, recipe: Recipe, *, at_once: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns O [B, H, q_len, v_dim] and L [B, H, q_len] as the recipe has them, in its
    `compute` dtype, without autograd. With `at_once` many tiles are computed together,
    equal up to fp32 rounding, where the recipe allows it and the result is finite; that
    waits for the device once. Raises Refused where the case's format cannot do what the
    recipe asks."""
    r = Rounder(recipe, case)
    at_once = at_once and is_at_once(r)
    with torch.no_grad(), plain_arithmetic(case.q.device):
        _, *operands = operands_of(r)
        m, l, O, _ = forward(r, *operands, at_once=at_once)
        if not at_once or all_finite([O]):
            return r("out", O), r("lse", m + l.log())
    return attend(case, recipe)


def operands_of(r: Rounder) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns q, q as it meets K (with the scale in it where the recipe says so), k and
    v, in the compute dtype."""
    case = r.case
    q, k, v = (x.to(r.dtype) for x in (case.q, case.k, case.v))
    if r.recipe.scale_in == "scores":
        return q, q, k, v
    by = case.scale * (LOG2_E if r.recipe.scale_in == "q_log2" else 1.0)
    return q, r("q_scaled", q * by), k, v


def in_any_order(r: Rounder) -> bool:
    """Whether a prediction does not depend on the order in which fp32 sums are added up
    and random numbers drawn. So it is where the recipe computes in float32 and rounds to
    nearest, and the case's format does not contain float32. For inputs in float32, such
    sums are all that there is to predict."""
    in_fp32 = r.recipe.compute == "float32" and not r.case.format.contains(
        FORMATS["float32"]
    )
    return in_fp32 and r.recipe.rounding == "nearest"


def is_at_once(r: Rounder) -> bool:
    """Whether computing many tiles at once gives what the recipe says, up to fp32
    rounding. So it is for the algorithm `fa2` with a plain softmax, where nothing is
    rounded between tiles and the order does not matter (`in_any_order`: the recipe
    computes in float32 and rounds to nearest, and the case's format does not contain
    float32). With `exponent` rounded a product of factors is not a factor; rounding
    toward zero makes a whole ulp of a last bit wherever the exact output is a number of
    the format."""
    between = ["exponent", "rescale", "tile_sum", "row_sum", "pv", "accumulator"]
    if r.recipe.loop_order == "kv":
        between.append("state")
    plainly = r.recipe.algorithm == "fa2" and r.recipe.softmax == "plain"
    return plainly and in_any_order(r) and not r.rounds(*between)


def forward(
    r: Rounder, q: Tensor, k: Tensor, v: Tensor, *, at_once: bool = False
) -> State:
    """Returns the State after the last tile: O is normalised and not yet cast, l is the
    sum of exp(S - m), whatever its P were multiplied with. `q` is as it meets K
    (`operands_of`). `at_once`: many tiles together, where the recipe allows it. Where
    splits were merged, m is L and l is 1, which give the same P."""
    if at_once and is_at_once(r):
        return _forward_at_once(r, q, k, v)
    states = [_pass(r, q, k, v, split) for split in splits(r)]
    if len(states) == 1:
        return states[0]
    L = torch.stack([m + l.log() for m, l, *_ in states]).logsumexp(dim=0)
    O = torch.zeros_like(states[0].O)
    for m, l, O_s, _ in states:  # O = sum_s exp(L_s - L) O_s
        O += (m + l.log() - finite(L)).exp()[..., None] * r("merge", O_s)
    return State(L, torch.ones_like(L), r("merge", O))


# --- tile by tile ---------------------------------------------------------------------


def _pass(r: Rounder, q: Tensor, k: Tensor, v: Tensor, split: slice) -> State:
    """Returns the State of the keys of one split, computed tile by tile; O is normalised.
    `q` is as it meets K (`operands_of`)."""
    recipe = r.recipe
    w = _guard(r) if recipe.softmax == "guarded" else None
    m, l, O, _ = start(r, q, v, split)
    l = l if w is None else l * w
    product = torch.zeros_like(O) if recipe.algorithm == "fa1" else O
    for rows, keys in tiles(r, split):
        S, _ = scores(r, q, k, rows, keys)
        before = State(m[:, :, rows], l[:, :, rows], O[:, :, rows])
        w_rows = None if w is None else w[rows]
        m[:, :, rows], l[:, :, rows], new, _ = _step(r, S, v[:, :, keys], before, w_rows)
        if recipe.algorithm == "fa1":
            product[:, :, rows] = new
            new = r("normalised", new / nonzero(l[:, :, rows])[..., None])
        O[:, :, rows] = r("state", new) if recipe.loop_order == "kv" else new
    if recipe.algorithm == "fa2":
        O = r("normalised", O / nonzero(l)[..., None])
    if recipe.softmax == "stabilised":
        O = O.masked_fill(lost(m, l)[..., None], math.nan)
    return State(m, l if w is None else l / w, O, product)


def start(r: Rounder, q: Tensor, v: Tensor, split: slice) -> State:
    """Returns the State before any key: m is -inf, l and O are 0. In the first split of a
    case with sinks a sink was already met, a key with a logit and no value: m is its
    logit, l is 1."""
    shape, sinks = q.shape[:3], r.case.sinks
    O = q.new_zeros(*shape, v.shape[-1])
    if sinks is None or split.start > 0:
        return State(q.new_full(shape, -math.inf), q.new_zeros(shape), O)
    m = r("max", sinks.to(q.dtype))[None, :, None].expand(shape).clone()
    return State(m, torch.ones_like(m), O)


def scores(
    r: Rounder,
    q: Tensor,
    k: Tensor,
    rows: slice,
    keys: slice,
    scale_in: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns S [B, H, rows, keys]: scaled, capped, biased, and -inf where hidden; and,
    under a soft cap, the tanh, from which backward has its derivative, else None.
    `scale_in`: `scores`, S is multiplied by the scale; `q`, it is not, as q has it; any
    other, S is divided by log2(e), as q or k has the scale times that. None: as the
    recipe says."""
    case, scale_in = r.case, scale_in or r.recipe.scale_in
    S = r("scores", times(case, q[:, :, rows], k[:, :, keys].transpose(-1, -2)))
    if scale_in != "q":
        S = r("scaled", S.mul_(case.scale if scale_in == "scores" else 1 / LOG2_E))
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


def _step(r: Rounder, S: Tensor, V: Tensor, before: State, w: Tensor | None) -> State:
    """Returns the State with one tile added, S [B, H, rows, keys] and V [B, kv_heads,
    keys, v_dim]; overwrites S. `w`: the guarded softmax's weights of these rows, [rows],
    or None. `fa2`: FlashAttention-2, Algorithm 1, lines 8 to 10. `fa1`: FlashAttention,
    Algorithm 1, lines 10 to 13, where P has the tile's own maximum and O is not yet
    normalised here. `plain`: softmax over all keys, then P V; at most a sink came
    before."""
    case, recipe = r.case, r.recipe
    m_old, l_old, O_old, _ = before
    tile_max = maximum(r, S)
    if (lag := recipe.max_lag) is None:
        m = torch.maximum(m_old, tile_max)
    else:  # in log2; a NaN in the tile is passed over
        m = torch.where((tile_max - m_old) * LOG2_E > lag, tile_max, m_old)
    a = _factor(r, m_old, m)
    b = _factor(r, tile_max, m) if recipe.algorithm == "fa1" else None
    P = exponential(r, S, m if b is None else tile_max, w)
    if recipe.algorithm == "plain":
        l = r("row_sum", r("rescale", a * l_old) + r("tile_sum", P.sum(dim=-1)))
        P_V = r("p", r("normalised", P / nonzero(l)[..., None]))
        return State(m, l, r("accumulator", r("pv", times(case, P_V, V))))
    P_V = r("p", P)
    al = r("rescale", a * l_old)
    tile_sum = r("tile_sum", (P_V if recipe.l_from == "rounded" else P).sum(dim=-1))
    if b is None:
        l = r("row_sum", al + tile_sum)
        O = r("accumulator", a[..., None] * O_old)
        return State(m, l, r("accumulator", O.add_(r("pv", times(case, P_V, V)))))
    l = r("row_sum", al + r("rescale", b * tile_sum))
    O = r("accumulator", al[..., None] * O_old)
    new = r("accumulator", b[..., None] * r("pv", times(case, P_V, V)))
    return State(m, l, r("accumulator", O.add_(new)))


def maximum(r: Rounder, S: Tensor) -> Tensor:
    """Returns what a tile adds to m, [B, H, rows]: its maximum, or the stabilised
    softmax's shift, rounded at the site `max`."""
    if r.recipe.beta is None or r.recipe.tie_tolerance is None:
        return r("max", S.amax(dim=-1))
    # The smallest normal number that P may be on its way to V.
    formats = [
        r.recipe.format_at(site, r.case.format) or format_of(r.dtype)
        for site in ("exp", "p")
    ]
    smallest = max(fmt.smallest_normal for fmt in formats)
    return r("max", stabilised_shift(S, r.recipe.beta, r.recipe.tie_tolerance, smallest))


def stabilised_shift(
    S: Tensor, beta: float, tie_tolerance: float, smallest: float
) -> Tensor:
    """Returns the shift of each row of a tile in the stabilised softmax (Qiu & Yao, arXiv
    2510.04212): [...] of scores [..., keys]. It is the row's maximum r, unless several
    scores lie within the tolerance of r and r is not -inf. Then it is beta r for a
    positive r, and 0 for another.

    The online softmax goes on with the shift, as the authors' code does. (As printed, the
    running maximum is of unadjusted ones, which undoes it.) The authors keep l above
    1e-10: wrong, silently, from (beta - 1) r = 23 on. Here such a row's shift is NaN, and
    with it the row, where P at the maximum would be below `smallest`; where r < 0 and l
    is 0, `lost` finds the row. docs/sites.md has the details."""
    r = S.amax(dim=-1)
    tied = ((r - tie_tolerance)[..., None] <= S).sum(dim=-1) > 1
    shifted = torch.where(r > 0, beta * r, 0.0)
    shifted = shifted.masked_fill_((beta - 1.0) * r > -math.log(smallest), math.nan)
    return torch.where(tied & (r > -math.inf), shifted, r)


def guarded_weights(case: AttentionCase, dtype: torch.dtype) -> Tensor:
    """Returns the factor of P of each row in the guarded softmax, [q_len]:

        P = w exp(S - m),  l = rowsum P,  O = P V / l,  L = m + log(l / w),

    with m the true maximum and w one of the 64 odd numbers 129, 131 ... 255 over 256: 8
    significant bits, so that P at the maximum is not rounded, and odd, so that a product
    with V fills low bits that were zero (docs/derivations.md). Which w: number frac(place
    / phi) of 64 (Fibonacci hashing), place = position + kv_len: all 64 evenly in any
    stretch of rows, in every second or 64th, and in decoding, where kv_len grows. Rows of
    one position share w over batches and heads. Backward has P normalised, as in plain
    softmax. `triton_flash.forward.guarded_weight` is the same."""
    at = case.positions
    at = torch.arange(case.q_len, device=case.q.device) if at is None else at
    number = ((at + case.kv_len) * GOLDEN & 0xFFFFFFFF) >> 26
    return (2 * number + 129).to(dtype) / 256


def _guard(r: Rounder) -> Tensor:
    """Returns the guarded softmax's weights [q_len]. Raises Refused where a format of P
    would round them."""
    for site in ("exp", "p"):
        fmt = r.recipe.format_at(site, r.case.format)
        if fmt is not None and fmt.precision < GUARD_BITS:
            raise Refused(
                f"the guarded softmax needs {GUARD_BITS} bits, and {site} is in "
                f"{fmt.name}"
            )
    return guarded_weights(r.case, r.dtype)


def _factor(r: Rounder, m_old: Tensor, m: Tensor) -> Tensor:
    """Returns exp(m_old - m), in the shape of m, rounded, by which what was summed under
    m_old is rescaled; 0 where m_old is -inf."""
    return r("rescale", r("exponent", m_old - finite(m)).exp_())


def exponential(
    r: Rounder, S: Tensor, m: Tensor, w: Tensor | None = None, *, missing: int = 0
) -> Tensor:
    """Returns P = exp(S - m), or w times that, by the recipe's `exponential`, rounded at
    its sites. m has the axes of S but the last; w is [rows] or None. `missing`: the keys
    at the end of the last tile that only fill it. Overwrites S."""
    x = r("exponent", S.sub_(finite(m)[..., None]))
    exp = {"exact": Tensor.exp_, "cubic": _cubic, "fa4": _fa4}
    P = exp.get(r.recipe.exponential, _fexp_u20)(x)
    if LANES.get(r.recipe.exponential):
        _make_last_exact(r, P, x, missing)
    return r("exp", P if w is None else P.mul_(w[:, None]))


def _make_last_exact(r: Rounder, P: Tensor, x: Tensor, missing: int) -> None:
    """Writes the exact exp(x) into P, in place, for the keys that are left over where the
    last tile is taken LANES at a time. x: [B, H, rows, keys] of one tile, or [..., tiles,
    block_kv] of several. Other tiles are taken to be full, of a multiple of LANES."""
    last, present = (x, P) if x.ndim == 4 else (x[..., -1, :], P[..., -1, :])
    keys = x.shape[-1] - missing
    left = slice(keys - keys % LANES[r.recipe.exponential], keys)
    present[..., left] = last[..., left].exp()


def _cubic(x: Tensor) -> Tensor:
    """Returns exp(x) for x <= 0 as FlashAttention-4 has 2^(x log2 e) on units that
    multiply and add (arXiv 2603.05451, section 3.1.3; `ex2_emulation`): an exponent, and
    a cubic for the fraction; 0 from 2^-127 down. NaN stays NaN."""
    y = x.mul(LOG2_E).clamp_(min=-127.0)
    whole = y.floor()
    fraction, power = y - whole, torch.zeros_like(y)
    for c in CUBIC:
        power.mul_(fraction).add_(c)
    return torch.ldexp(power, whole).masked_fill_(y <= -127.0, 0.0)


def _fa4(x: Tensor) -> Tensor:
    """Returns exp(x) with the cubic in those columns of a tile where FlashAttention-4
    takes it (`apply_exp2_convert`, by its defaults), and the exact one in the others."""
    i = torch.arange(x.shape[-1], device=x.device)
    some = (i % 16 >= 12) & (i % 128 >= 32) & (i % 128 < 96)
    return torch.where(some, _cubic(x), x.exp())


def _fexp_u20(x: Tensor) -> Tensor:
    """Returns PyTorch's fast vectorised exp, for x <= 0: exp(x) = 2^y, and the fp32
    number whose bits are (y + 127) * 2^23 is 2^y, but for its straight fraction, which a
    cubic in frac(y) makes up for (Malossi et al., Fast Exponential Computation on SIMD
    Architectures, 2015). The sum y + 127 has 24 bits, which leaves the result about 17.
    NaN stays NaN. Coefficients as in torch's vec512_float.h."""
    y = x.clamp(min=LN_SMALLEST_FP32).mul_(math.log2(math.e))
    f = y - y.floor()
    cubic = f.mul(-0.079204240219773236).add_(-0.22433836478672356)
    cubic = cubic.mul_(f).add_(0.30354260500649682).mul_(f).add_(0.00010703434948458272)
    bits = y.sub_(cubic).add_(127.0).to(torch.float32).mul_(2.0**23)
    power = bits.to(torch.int32).view(torch.float32).to(x.dtype)
    return power.masked_fill_(x < LN_SMALLEST_FP32, 0.0).masked_fill_(x.isnan(), math.nan)


def finite(m: Tensor) -> Tensor:
    """Returns m with the lowest number for -inf: any finite shift then gives P = 0, not
    NaN. +inf and NaN stay."""
    return m.clamp(min=torch.finfo(m.dtype).min)


def lost(m: Tensor, l: Tensor) -> Tensor:
    """Returns a bool mask, in the shape of m and l, of the rows that saw keys and whose
    every P became 0, as may happen under the stabilised softmax."""
    return (l == 0) & (m > -math.inf)


def times(case: AttentionCase, x: Tensor, of_kv_heads: Tensor) -> Tensor:
    """Returns x @ of_kv_heads [B, H, R, Y], for x [B, H, R, X] and `of_kv_heads` [B,
    kv_heads, X, Y], each of which meets its group of query heads."""
    b, h, rows, width = x.shape
    product = x.reshape(b, case.kv_heads, case.group * rows, width) @ of_kv_heads
    return product.view(b, h, rows, -1)


# --- which tiles ----------------------------------------------------------------------


def splits(r: Rounder) -> list[slice]:
    """Returns the range of keys of each split, ascending."""
    width, n = split_width(r), r.case.kv_len
    return [slice(first, min(first + width, n)) for first in range(0, n, width)]


def split_width(r: Rounder) -> int:
    """Returns the number of keys of a split: whole tiles, the same number for each but
    the last."""
    block_kv = r.tile[1]
    tiles = -(-r.case.kv_len // block_kv)
    return -(-tiles // (r.recipe.splits or 1)) * block_kv


def in_order(r: Rounder, tiles: Sequence[T]) -> Sequence[T]:
    """Returns tiles of keys, given ascending, in the order in which a row meets them."""
    return tiles[::-1] if r.recipe.kv_order == "descending" else tiles


def tiles(r: Rounder, split: slice) -> Iterator[tuple[slice, slice]]:
    """Yields the tiles of a split, as (rows, keys), in the order each row meets them.
    Keys begin at a multiple of block_kv. Rows are whole blocks of block_q, of which some
    position can see one of the keys, as many blocks as memory allows. Of a case with some
    rows of a call they are those of its rows that stand in these blocks."""
    case, (block_q, block_kv) = r.case, r.tile
    row_bytes = 8 * case.q.shape[0] * case.heads * block_kv
    step = block_q * max(1, BLOCK_BYTES[case.q.device.type] // (row_bytes * block_q))
    for first in range(0, case.q_len, step):
        piece = slice(first, min(first + step, case.q_len))
        # The positions of the blocks that the rows are of: some rows of a call are in its
        # blocks.
        blocks = position_span(case, piece)
        if case.positions is not None:
            blocks = slice(
                blocks.start - blocks.start % block_q,
                blocks.stop + -blocks.stop % block_q,
            )
        seen = keys_from(case, blocks)
        first_key = max(seen.start - seen.start % block_kv, split.start)
        starts = range(first_key, min(seen.stop, split.stop), block_kv)
        for at in in_order(r, starts):
            keys = slice(at, min(at + block_kv, case.kv_len))
            rows = _rows_that_see(case, keys, piece, blocks, block_q)
            if rows.start < rows.stop:
                yield rows, keys


def _rows_that_see(
    case: AttentionCase, keys: slice, piece: slice, blocks: slice, block_q: int
) -> slice:
    """Returns the rows of `piece` whose block of block_q can see any of `keys` by
    position; an empty slice for none. `blocks`: the positions of the piece, in whole
    blocks."""
    low, high = key_limits(case)
    first = blocks.start if high is None else max(blocks.start, keys.start - high)
    last = blocks.stop if low is None else min(blocks.stop, keys.stop - low)
    if first >= last:
        return slice(0, 0)
    first, last = first - first % block_q, last + -last % block_q
    if case.places is not None:
        first, last = (bisect_left(case.places, at) for at in (first, last))
    return slice(max(first, piece.start), min(last, piece.stop))


# --- many tiles at once ---------------------------------------------------------------


def _forward_at_once(r: Rounder, q: Tensor, k: Tensor, v: Tensor) -> State:
    """Returns the State after all keys, many tiles at a time, for a recipe that
    `is_at_once`: m and l [B, H, rows], O [B, H, rows, v_dim], normalised. After a merge
    of splits m is L and l is 1. Until then an axis of splits follows the rows."""
    case, done = r.case, []
    parts = -(-case.kv_len // split_width(r))
    if parts == 1:
        pieces = wide_blocks(r, WIDE_BYTES)
    else:  # splits, which are made where rows are few, are taken whole
        every = [slice(0, case.kv_len)]
        pieces = ((rows, every) for rows in _row_blocks(case, WIDE_BYTES, fewest=1))
    for rows, blocks in pieces:
        shape = (*q.shape[:2], rows.stop - rows.start, parts)
        m, l = q.new_full(shape, -math.inf), q.new_zeros(shape)
        O = q.new_zeros(*shape, v.shape[-1])
        if case.sinks is not None:
            m[..., 0] = r("max", case.sinks.to(q.dtype))[None, :, None]
            l[..., 0] = 1.0
        for keys in blocks:
            S, _ = scores(r, q, k, rows, keys)
            m, l, O = _add_tiles(r, S, v[:, :, keys], m, l, O)
        O = r("normalised", O / nonzero(l)[..., None])
        if parts == 1:
            done.append((m[..., 0], l[..., 0], O[..., 0, :]))
            continue
        L_s = m + l.log()
        L = L_s.logsumexp(dim=-1)
        weights = (L_s - finite(L)[..., None]).exp_()
        merged = (weights[..., None] * r("merge", O)).sum(dim=-2)
        done.append((L, torch.ones_like(L), r("merge", merged)))
    if len(done) == 1:
        return State(*done[0])
    m, l, O = (torch.cat(x, dim=2) for x in zip(*done, strict=True))
    return State(m, l, O)


def _add_tiles(
    r: Rounder, S: Tensor, V: Tensor, m_old: Tensor, l_old: Tensor, O_old: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns m, l and O with a block of keys added: whole tiles of one split, or all
    keys where there are several splits. `S` [B, H, rows, keys] may be overwritten; `V` is
    [B, kv_heads, keys, v_dim]. m and l are [B, H, rows, splits]; O, [B, H, rows, splits,
    v_dim], is not divided by l yet.

    Inside, P and S are [B, H, rows, splits, tiles, block_kv]. The running maximum at each
    tile (`met`), and the `factor` that brings the tile's sums from it to the last
    maximum, are [B, H, rows, splits, tiles]."""
    case, parts, block_kv = r.case, m_old.shape[-1], r.tile[1]
    each = split_width(r) if parts > 1 else S.shape[-1] + -S.shape[-1] % block_kv
    missing = parts * each - S.shape[-1]
    if missing:  # keys that are hidden, where a tile or a split is not full
        S, V = pad(S, (0, missing), value=-math.inf), pad(V, (0, 0, 0, missing))
    S = S.unflatten(-1, (parts, each // block_kv, block_kv))
    m, met = _maxima_met(r, m_old, r("max", S.amax(dim=-1)))
    P = exponential(r, S, met, missing=missing)
    P_V = r("p", P)
    sums = (P_V if r.recipe.l_from == "rounded" else P).sum(dim=-1)
    last = finite(m)
    factor, a = (met - last[..., None]).exp_(), (m_old - last).exp_()
    l = (a * l_old).add_(sums.mul_(factor).sum(dim=-1))
    weights = P_V.mul_(factor[..., None]).flatten(-2)
    b, h, rows = weights.shape[:3]
    grouped = weights.view(b, case.kv_heads, case.group * rows, parts, each).transpose(
        2, 3
    )
    product = (grouped @ V.unflatten(2, (parts, each))).transpose(2, 3)
    return m, l, product.reshape(b, h, rows, parts, -1).addcmul_(a[..., None], O_old)


def _maxima_met(r: Rounder, m_old: Tensor, tile_maxima: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the running maximum after all tiles, [B, H, rows, splits], and after each
    tile, [B, H, rows, splits, tiles]; with the recipe's `max_lag` it may lie that far, in
    log2, below the largest score. `m_old`: the one before the first tile, [B, H, rows,
    splits]; `tile_maxima`: the maximum of each tile alone, as the second result. Tiles
    are ascending in both, and are met in the recipe's order."""
    descends, lag = r.recipe.kv_order == "descending", r.recipe.max_lag
    ordered = tile_maxima.flip(-1) if descends else tile_maxima
    if lag is None:  # a maximum of maxima is exact, in whatever order
        met = torch.maximum(ordered.cummax(dim=-1).values, m_old[..., None])
    else:
        met = _lagging_maxima(m_old[..., None], ordered, lag)
    return met[..., -1].contiguous(), met.flip(-1) if descends else met


def _lagging_maxima(m_old: Tensor, tile_maxima: Tensor, lag: float) -> Tensor:
    """Returns the running maximum after each tile, [..., tiles]. It moves to a tile's
    maximum where that is above it by more than `lag`, in log2, and else stays. `m_old`
    [..., 1] is the maximum before the first tile. Each step of its loop finds the next
    tile at which the maximum moves, which are few."""
    met = m_old.expand_as(tile_maxima).contiguous()
    places = torch.arange(tile_maxima.shape[-1], device=met.device)
    while bool((moves := (tile_maxima - met) * LOG2_E > lag).any()):
        first = moves.int().argmax(dim=-1, keepdim=True)
        is_moved = moves.any(dim=-1, keepdim=True) & (places >= first)
        met = torch.where(is_moved, tile_maxima.gather(-1, first), met)
    return met


def wide_blocks(
    r: Rounder, bytes_of: Mapping[str, int]
) -> Iterator[tuple[slice, Iterable[slice]]]:
    """Yields (rows, blocks of keys) for all rows. The blocks are whole tiles that have
    the keys which these rows can see by position, in the order the rows meet them.
    `bytes_of`: by device type, how many bytes of fp32 scores one block may have; it has
    one tile of keys at least, of MIN_BLOCK_ROWS rows where there are as many."""
    case, block_kv = r.case, r.tile[1]
    for rows in _row_blocks(case, bytes_of, MIN_BLOCK_ROWS):
        seen = key_range(case, rows)
        stop = min(seen.stop + -seen.stop % block_kv, case.kv_len)
        tiles = _cells(case, bytes_of) // (rows.stop - rows.start) // block_kv
        wide = max(tiles, 1) * block_kv
        starts = range(seen.start - seen.start % block_kv, stop, wide)
        yield rows, [slice(at, min(at + wide, stop)) for at in in_order(r, starts)]


def _row_blocks(
    case: AttentionCase, bytes_of: Mapping[str, int], fewest: int
) -> Iterator[slice]:
    """Yields ranges of rows that cover the case, each with scores of all keys within
    `bytes_of`, but `fewest` rows at least. A whole call under causality whose scores are
    many (CAUSAL_BYTES) is divided into CAUSAL_PARTS or more, whatever `fewest`. The last
    range may have fewer rows."""
    step = min(max(_cells(case, bytes_of) // case.kv_len, fewest), case.q_len)
    part = -(-case.q_len // CAUSAL_PARTS)
    size = 4 * case.q.shape[0] * case.heads * part * case.kv_len
    if case.is_causal and case.places is None and part < step and size >= CAUSAL_BYTES:
        step = part
    for first in range(0, case.q_len, step):
        yield slice(first, min(first + step, case.q_len))


def _cells(case: AttentionCase, bytes_of: Mapping[str, int]) -> int:
    """Returns how many fp32 scores of each head of each sequence a block may hold, by the
    entry of `bytes_of` for the case's device; 0 where that is too small for one."""
    return bytes_of[case.q.device.type] // (4 * case.q.shape[0] * case.heads)
