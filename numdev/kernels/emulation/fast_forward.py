"""The forward pass of `emulated` with the tiles of many keys at once, for predictions.

The same recipe at the same sites as `numdev.kernels.emulation.forward`, in a few large steps
instead of some twenty small ones a tile, which is what a prediction costs on a GPU. It is for
recipes of `fa2` in fp32 whose sums over tiles are not rounded below fp32 (`keeps_sums`), as those
of nearly all kernels are; `output` leaves all others to `emulated_forward`. The kernel `emulated`
does not use it, so its numbers do not depend on it; inside a network that learns
(`numdev.kernels.emulation.training`) it is used.

What is the same. P is rounded relative to the maximum that had been met when its tile came. That
is a cumulative maximum over the tiles in their order, so each P is what it is tile by tile, with
S - m, exp and the rounding at `p`. A sum over tiles has no rounding to model: the tiles are scaled
to the last maximum, P exp(m_tile - m_last), which is the product of all factors a, and summed at
once. Splits of the keys are one more axis, and merged as there.

What may differ is fp32 rounding, which no site models: one factor instead of a product of t, and
sums in another order, relative to the term scale (2 n + 8 t) 2^-24 at most and about 1e-7 usually.
S is a matrix product of another shape, in which a library may add in another order too; then a P
now and then falls on the other side of its boundary. The bound of `emulated_forward` between its
two modes holds here as well. Measured on a CPU (tests/test_emulated_fast.py): before the last cast
the two lie apart by a root mean square of at most 0.3 % of the error in bf16 and 2 % in fp16; the
cast takes at most 0.05 % and 0.2 % of the outputs to the neighbouring number, and the rms of the
errors agrees to 0.1 %.

A tile that a row cannot see is not skipped: there P is 0, and nothing of it is rounded. But 0 times
infinity is not 0, so where anything comes out that is not finite, the tiles decide, one by one.

Legend: S scores, P probabilities, m row maximum, l row sum, O output, L log-sum-exp; a =
exp(m_old - m) rescales what was summed before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from numdev.cases import AttentionCase, key_range
from numdev.formats import FORMATS
from numdev.kernels.emulation import forward as fwd
from numdev.kernels.emulation.forward import State, finite, nonzero
from numdev.kernels.emulation.recipe import Recipe
from numdev.kernels.emulation.rounding import Rounder, plain_arithmetic

BLOCK_BYTES = {"cpu": 1 << 23, "cuda": 1 << 28}
"""How large one block of scores may be. Three to six times as much is needed for it. Speed and
memory only."""
FEWEST_ROWS = 64
"""Of a block, where there are as many: with fewer a matrix product waits for K and V."""
CAUSAL_PARTS, CAUSAL_BYTES = 4, 1 << 24
"""Under causality rows are cut into so many blocks, which spares three eighths of the scores, where
each still holds as much: then it is not the launching of steps that takes the time."""


def output(case: AttentionCase, made: Recipe) -> Tensor:
    """O [B, H, q_len, v_dim] as the recipe has it, in its `compute` dtype, to fp32 rounding.

    Runs without autograd. Raises Refused as `emulated` does.
    """
    r = Rounder(made, case, fwd.dtype_of(made))
    if keeps_sums(r, case, made):
        with torch.no_grad(), plain_arithmetic(case.q.device):
            q, k, v = (x.float() for x in (case.q, case.k, case.v))
            _, _, O = forward(r, case, made, fwd.scaled_q(r, case, made, q), k, v)
            if all_finite(O):
                return r("out", O)
    return fwd.attend(case, made)[0]


def keeps_sums(r: Rounder, case: AttentionCase, made: Recipe) -> bool:
    """Whether `forward` computes what a recipe says, as far as that is more than fp32 rounding.

    With `exponent` rounded a product of factors is not a factor. Rounding toward zero makes a whole
    ulp of a last bit wherever the exact output is a number of the format. The stabilised softmax is
    not written here.
    """
    between = ["exponent", "rescale", "tile_sum", "row_sum", "pv", "accumulator"]
    if made.loop_order == "kv":
        between.append("state")
    plainly = made.algorithm == "fa2" and made.softmax == "plain"
    return plainly and in_any_order(case, made) and not r.rounds(*between)


def in_any_order(case: AttentionCase, made: Recipe) -> bool:
    """Whether it is no matter to a prediction in which order fp32 sums are added up, and random
    numbers drawn. Where inputs are in float32, such sums are all that there is to predict."""
    in_fp32 = made.compute == "float32" and not case.format.contains(FORMATS["float32"])
    return in_fp32 and made.rounding == "nearest"


def all_finite(*tensors: Tensor) -> bool:
    """Whether nothing in the tensors is infinite or NaN. Waits for the device, once."""
    largest = torch.stack([torch.linalg.vector_norm(x, math.inf) for x in tensors])
    return all(math.isfinite(x) for x in largest.tolist())


def forward(
    r: Rounder, case: AttentionCase, made: Recipe, q: Tensor, k: Tensor, v: Tensor
) -> State:
    """m, l and O as `emulated_forward.forward` has them, for a recipe that `keeps_sums`."""
    done = []
    for rows, pieces in _blocks(case, made):
        before = _start(r, case, made, q, v, rows)
        for keys in pieces:
            before = _add(r, case, made, q, k, v, rows, keys, before)
        m, l, O = before
        done.append(_merged(r, m, l, r("normalised", O / nonzero(l)[..., None])))
    if len(done) == 1:
        return done[0]
    m, l, O = (torch.cat(x, dim=2) for x in zip(*done, strict=True))
    return m, l, O


def _start(
    r: Rounder, case: AttentionCase, made: Recipe, q: Tensor, v: Tensor, rows: slice
) -> State:
    """m and l [B, H, rows, splits] and O [B, H, rows, splits, v_dim] before any key: nothing, or
    the sink in the first split."""
    shape = (*q.shape[:2], rows.stop - rows.start, _splits(case, made))
    m, l = q.new_full(shape, -math.inf), q.new_zeros(shape)
    if case.sinks is not None:
        m[..., 0] = r("max", case.sinks.to(q.dtype))[None, :, None]
        l[..., 0] = 1.0
    return m, l, q.new_zeros(*shape, v.shape[-1])


def _add(
    r: Rounder,
    case: AttentionCase,
    made: Recipe,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: slice,
    keys: slice,
    before: State,
) -> State:
    """m, l and O with a block of keys added: whole tiles, and of all splits where there are some.

    Here P and S are [B, H, rows, splits, tiles, block_kv], the maximum each tile met and the factor
    by which it is scaled to the last one [B, H, rows, splits, tiles].
    """
    m_old, l_old, O_old = before
    S, V = _in_tiles(case, made, fwd.scores(r, case, made, q, k, rows, keys)[0], v[:, :, keys])
    met = _running_maximum(made, r("max", S.amax(dim=-1)), m_old)
    m = met[..., 0 if made.kv_order == "descending" else -1]
    P = fwd.exponential(r, made, S, met)
    P_V = r("p", P)
    sums = (P_V if made.l_from == "rounded" else P).sum(dim=-1)
    last = finite(m)
    factor, a = (met - last[..., None]).exp_(), (m_old - last).exp_()
    l = (a * l_old).add_(sums.mul_(factor).sum(dim=-1))
    weights = P_V.mul_(factor[..., None]).flatten(-2)
    return m, l, _times(case, weights, V).addcmul_(a[..., None], O_old)


def _in_tiles(case: AttentionCase, made: Recipe, S: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """S [B, H, rows, keys] as [B, H, rows, splits, tiles, block_kv], and V [B, kv_heads, keys,
    v_dim] as [B, kv_heads, splits, tiles * block_kv, v_dim]; where a tile or a split is not full,
    with keys that are hidden."""
    splits, (_, block_kv) = _splits(case, made), made.tile(case.q.shape[-1], case.kv_len)
    each = fwd.split_width(case, made) if splits > 1 else S.shape[-1] + -S.shape[-1] % block_kv
    missing = splits * each - S.shape[-1]
    if missing:
        S, V = pad(S, (0, missing), value=-math.inf), pad(V, (0, 0, 0, missing))
    tiles = S.unflatten(-1, (splits, each // block_kv, block_kv))
    return tiles, V.unflatten(2, (splits, each))


def _running_maximum(made: Recipe, own: Tensor, m_old: Tensor) -> Tensor:
    """The maximum under which each tile came, [..., tiles], from its own and that before them."""
    descending = made.kv_order == "descending"
    own = own.flip(-1) if descending else own
    met = torch.cat([m_old[..., None], own], dim=-1).cummax(dim=-1).values[..., 1:]
    return met.flip(-1) if descending else met


def _times(case: AttentionCase, weights: Tensor, V: Tensor) -> Tensor:
    """weights [B, H, rows, splits, n] @ V [B, kv_heads, splits, n, v_dim], split by split."""
    b, h, rows, splits, n = weights.shape
    grouped = weights.view(b, case.kv_heads, case.group * rows, splits, n).transpose(2, 3)
    return (grouped @ V).transpose(2, 3).reshape(b, h, rows, splits, -1)


def _merged(r: Rounder, m: Tensor, l: Tensor, O: Tensor) -> State:
    """Without the axis of splits: O = sum_s exp(L_s - L) O_s, and L and 1 for m and l."""
    if m.shape[-1] == 1:
        return m[..., 0], l[..., 0], O[..., 0, :]
    L_s = m + l.log()
    L = L_s.logsumexp(dim=-1)
    weights = (L_s - finite(L)[..., None]).exp_()
    merged = (weights[..., None] * r("merge", O)).sum(dim=-2)
    return L, torch.ones_like(L), r("merge", merged)


def _splits(case: AttentionCase, made: Recipe) -> int:
    """Into how many parts the keys are divided: the last ones of a recipe may have none."""
    return -(-case.kv_len // fwd.split_width(case, made))


def _blocks(case: AttentionCase, made: Recipe) -> Iterator[tuple[slice, Iterable[slice]]]:
    """Rows that take part at once, each with the keys they meet. Splits of the keys, which are made
    where rows are few, are taken whole."""
    if _splits(case, made) == 1:
        yield from blocks(case, made, BLOCK_BYTES)
        return
    for rows in _row_blocks(case, BLOCK_BYTES, fewest=1):
        yield rows, [slice(0, case.kv_len)]


def blocks(
    case: AttentionCase, made: Recipe, bytes_of: Mapping[str, int]
) -> Iterator[tuple[slice, Iterable[slice]]]:
    """Rows, each with blocks of the keys that they can see by position: whole tiles, in the order
    they meet them, and no larger than so many bytes, by device, of scores in fp32."""
    for rows in _row_blocks(case, bytes_of, FEWEST_ROWS):
        yield rows, _key_blocks(case, made, rows, bytes_of)


def _row_blocks(case: AttentionCase, bytes_of: Mapping[str, int], fewest: int) -> Iterator[slice]:
    step = min(max(_cells(case, bytes_of) // case.kv_len, fewest), case.q_len)
    part = -(-case.q_len // CAUSAL_PARTS)
    size = 4 * case.q.shape[0] * case.heads * part * case.kv_len
    if case.is_causal and case.places is None and part < step and size >= CAUSAL_BYTES:
        step = part
    for first in range(0, case.q_len, step):
        yield slice(first, min(first + step, case.q_len))


def _key_blocks(
    case: AttentionCase, made: Recipe, rows: slice, bytes_of: Mapping[str, int]
) -> Iterator[slice]:
    _, block_kv = made.tile(case.q.shape[-1], case.kv_len)
    seen = key_range(case, rows)
    stop = min(seen.stop + -seen.stop % block_kv, case.kv_len)
    tiles = _cells(case, bytes_of) // (rows.stop - rows.start) // block_kv
    wide = max(tiles, 1) * block_kv
    starts = range(seen.start - seen.start % block_kv, stop, wide)
    for start in reversed(starts) if made.kv_order == "descending" else starts:
        yield slice(start, min(start + wide, stop))


def _cells(case: AttentionCase, bytes_of: Mapping[str, int]) -> int:
    """How many scores of every head a block may hold."""
    return bytes_of["cuda" if case.q.is_cuda else "cpu"] // (4 * case.q.shape[0] * case.heads)
