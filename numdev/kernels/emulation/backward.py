"""The backward pass of `emulated`: the gradients of attention with a format at every rounding site.

`gradients` runs the forward pass of the same recipe and then, as FlashAttention-2 (arXiv
2307.08691, Algorithm 2) does, computes S again, tile by tile, through the forward's own sites:
kernels do in backward what they did in forward. The site `s` may round the result once more, for a
backward pass that is coarser than its forward. Where autograd kept P (`p_from: m_and_l`) it is
exp(S - m) / l of the m and l that forward left, which is the same number.

What the tile changes. P is normalised from the start, so unlike in forward no step but a sum over
tiles depends on their size: dq (over keys), dk and dv (over rows), and delta where it is
rowsum(dP o P). Blocks of as many whole tiles as memory allows are therefore computed at once, and
only the sums go tile by tile, in the order of the recipe: rows ascending, keys by `kv_order`. Where
a sum is not rounded from tile to tile, not even they do. The outer loop has no say: whatever is
kept between tiles has its site (dq, dk, dv), and a kernel that keeps it in registers has a wide one
there. FlashAttention-2's CUDA kernels add up all three in fp32; PyTorch's CPU kernel adds every
tile to the gradient in the working format itself: dq, dk and dv `working`, with `block_kv: 512` and
a `block_q` of 256 from length 768 on, 64 from 192 on, else 32. In `plain` a sum over rows is one
product, however many pieces it is computed in. With grouped heads each query head has sums of its
own (dk_partial, dv_partial), or one goes on through the group (`group_sum: running`), as in
PyTorch's CPU kernel. Where queries are divided (`q_splits`) each part has a dK and dV of its own
too, and where keys are (`splits`) each split a dQ (dq_partial).

delta_o rounds O as it was before its cast at `out`; the two are separate, so that either can be
made exact alone. With stochastic rounding every step draws anew, so that S, P and dP are not those
of forward, nor, with delta from dP o P, those delta was made from.

`compute="float32"` against fp64, for `fa2`. With u, w, d, n, t and A as in
`numdev.kernels.emulation.forward` and v_dim = d: L differs by at most the S do, by
(4 d + 12 + 4 t) w A + (n + 10 + 8 t) w with what its sum adds, and by its own rounding, w |L| in
each mode, |L| <= A + log n. So P differs by a relative e = (6 d + 24 + 4 t) w A + (n + 20 + 8 t +
2 log n) w before it is rounded, dP by (d + 2) w D with D = sum |dO||V|, and delta by (d + 2) w E
with E = sum |dO||O|, and by 2 u E more where O fell on two sides of a boundary. A dS then lies 2 u
apart (rounding is monotone), an accumulator adds (n + 4 t) w. In sum, with X the sum over tiles of
scale P (D + E) |K| for dq (|Q| for dk), and of P |dO| for dv,

    |dq32 - dq64| <= (4 u + 3 e + (2 n + 4 d + 8 t + 16) w) X + ulp(dq),   the same for dk,
    |dv32 - dv64| <= (2 u + 2 e + (2 n + 8 t) w) X + ulp(dv),

which is every rounding on its other side, and all in one direction.

Legend: S scores, P probabilities, m row maximum, l row sum, O output, L log-sum-exp; d of any of
them the gradient with respect to it, delta = rowsum(dO o O), o elementwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from numdev.cases import AttentionCase, key_range
from numdev.formats import format_of
from numdev.kernels import Refused
from numdev.kernels.emulation import forward as fwd
from numdev.kernels.emulation.forward import finite, nonzero
from numdev.kernels.emulation.recipe import Recipe
from numdev.kernels.emulation.rounding import Rounder, plain_arithmetic

T = TypeVar("T")
Block = tuple[slice, slice]
"""Rows and keys."""


def gradients(case: AttentionCase, made: Recipe) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """O, L, dQ, dK and dV as the recipe has them, in its `compute` dtype.

    Shapes as q, k, v and the output have them: with grouped heads dK and dV are sums over the
    group. A row that sees no key gives and gets nothing. Memory is O(length * head_dim) beyond a
    block. Runs without autograd. Raises Refused for a case without grad_out, or with one that the
    `compute` dtype does not hold, and as `emulated` does.
    """
    r = rounder(case, made)
    with torch.no_grad(), plain_arithmetic(case.q.device):
        given, L = read(r, case, made, fwd.forward)
        found = backward(r, given)
        return r("out", given.O), L, *cast(r, *found)


def rounder(case: AttentionCase, made: Recipe) -> Rounder:
    """What rounds in both passes; raises Refused as `gradients` does."""
    dtype = fwd.dtype_of(made)
    r = Rounder(made, case, dtype)
    if case.grad_out is None:
        raise Refused("the case has no gradient with respect to its output (grad_out)")
    if not format_of(dtype).contains(format_of(case.grad_out.dtype)):
        raise Refused(f"computing in {made.compute} would round grad_out")
    return r


def cast(r: Rounder, dQ: Tensor, dK: Tensor, dV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients as returned."""
    return r("dq_out", dQ), r("dk_out", dK), r("dv_out", dV)


@dataclass(frozen=True, kw_only=True, eq=False)
class Given:
    """What backward reads."""

    case: AttentionCase
    made: Recipe
    q: Tensor
    q_s: Tensor
    """Q as it met K in forward."""
    k: Tensor
    v: Tensor
    dO: Tensor
    O: Tensor
    """Before its cast."""
    shift: Tensor
    """What is taken from S: L, or m."""
    l: Tensor | None
    """By what exp is divided; None where the shift was L."""

    def of_group(self, place: int) -> Given:
        """The query heads at one place of their groups: one for every kv head."""
        heads = slice(place, None, self.case.group)
        changes = {
            name: x[:, heads]
            for name in ("q", "q_s", "dO", "O", "shift", "l")
            if (x := getattr(self, name)) is not None
        }
        return dataclasses.replace(self, case=self.case.one_of_each_group(place), **changes)

    @property
    def tile(self) -> tuple[int, int]:
        return self.made.tile(self.q.shape[-1], self.case.kv_len)


@dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """What forward leaves for backward; the fields are those of `Given`."""

    case: AttentionCase
    made: Recipe
    q: Tensor
    q_s: Tensor
    k: Tensor
    v: Tensor
    O: Tensor
    L: Tensor
    """As it is returned."""
    m: Tensor
    l: Tensor

    def with_upstream(self, r: Rounder, dO: Tensor) -> Given:
        """What backward reads, once the gradient of the output is there."""
        by_lse = self.made.p_from == "lse"
        return Given(
            case=self.case, made=self.made, q=self.q, q_s=self.q_s, k=self.k, v=self.v,
            dO=dO.to(self.q.dtype), O=self.O, shift=r("lse_read", self.L if by_lse else self.m),
            l=None if by_lse else r("lse_read", self.l),
        )  # fmt: skip


def kept(r: Rounder, case: AttentionCase, made: Recipe, forward: Callable[..., fwd.State]) -> Kept:
    """A forward pass (`emulated_forward.forward`, or one like it), with what backward needs."""
    q, k, v = (x.to(fwd.dtype_of(made)) for x in (case.q, case.k, case.v))
    q_s = fwd.scaled_q(r, case, made, q)
    m, l, O = forward(r, case, made, q_s, k, v)
    L = r("lse", m + l.log())
    if made.softmax == "stabilised":
        l = l.masked_fill(fwd.lost(m, l), math.nan)
    return Kept(case=case, made=made, q=q, q_s=q_s, k=k, v=v, O=O, L=L, m=m, l=l)


def read(
    r: Rounder, case: AttentionCase, made: Recipe, forward: Callable[..., fwd.State]
) -> tuple[Given, Tensor]:
    """What backward reads, from a forward pass, and L as it is returned."""
    assert case.grad_out is not None
    found = kept(r, case, made, forward)
    return found.with_upstream(r, case.grad_out), found.L


def backward(r: Rounder, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, and of every kv head dK and dV, from its query heads one after the other."""
    parts, deltas = query_parts(given), dict[int, Tensor]()
    dQ, dK, dV = (torch.zeros_like(x) for x in (given.q, given.k, given.v))
    for rows in parts:
        with _apart(r, dK, dV, len(parts) > 1) as (dK_p, dV_p):
            for place in range(given.case.group):
                head = given.of_group(place)
                if place not in deltas:
                    deltas[place] = delta_of(r, head, blocks(head))
                separate = given.case.group > 1 and given.made.group_sum == "separate"
                with _apart(r, dK_p, dV_p, separate) as own:
                    found = _add_gradients(r, head, deltas[place], rows, *own)
                    dQ[:, place :: given.case.group, rows] = found
    return dQ, dK, dV


@contextlib.contextmanager
def _apart(r: Rounder, dK: Tensor, dV: Tensor, apart: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Where to add gradients up: sums of their own, rounded before they join the others, or the
    others themselves."""
    if not apart:
        yield dK, dV
        return
    own = torch.zeros_like(dK), torch.zeros_like(dV)
    yield own
    dK += r("dk_partial", own[0])
    dV += r("dv_partial", own[1])


def query_parts(given: Given) -> list[slice]:
    """The rows whose dK and dV are summed apart: all of them, where queries are not divided."""
    width = -(-given.case.q_len // (given.made.q_splits or 1))
    ends = range(0, given.case.q_len, width)
    return [slice(first, min(first + width, given.case.q_len)) for first in ends]


def _add_gradients(
    r: Rounder, given: Given, delta: Tensor, of_rows: slice, dK: Tensor, dV: Tensor
) -> Tensor:
    """dQ of some rows; adds to dK and dV. As many query heads as kv heads."""
    made, q, k, dO = given.made, given.q, given.k, given.dO
    scale_q, scale_k, q_k = scales(given)
    totals = [torch.zeros_like(q[:, :, of_rows]) for _ in range(_dq_parts(r, given))]
    for rows, keys in blocks(given, of_rows):
        here = slice(rows.start - of_rows.start, rows.stop - of_rows.start)
        P, dP, tanh = again(r, given, rows, keys)
        dS = of_products(r, given, P, dP.sub_(delta[:, :, rows, None]), tanh)
        _add_over_rows(r, given, "dv", dV[:, :, keys], r("p_for_dv", P), dO[:, :, rows])
        _add_over_rows(r, given, "dk", dK[:, :, keys], dS, q_k[:, :, rows], scale_k)
        _add_over_keys(r, given, [x[:, :, here] for x in totals], dS, k, keys, scale_q)
    if made.algorithm == "plain":
        dK.copy_(r("dk", r("dk_product", dK)))
        dV.copy_(r("dv", r("dv_product", dV)))
    if len(totals) == 1:
        return totals[0]
    return torch.stack([r("dq_partial", x) for x in totals]).sum(dim=0)


def _dq_parts(r: Rounder, given: Given) -> int:
    """How many sums dQ is made of: one for each split of the keys, where that rounds anything."""
    if given.made.splits is None or not r.rounds("dq", "dq_product", "dq_partial"):
        return 1
    return -(-given.case.kv_len // fwd.split_width(given.case, given.made))


def again(
    r: Rounder, given: Given, rows: slice, keys: slice
) -> tuple[Tensor, Tensor, Tensor | None]:
    """P and dP of a block, and under a soft cap its tanh."""
    S, tanh = fwd.scores(r, given.case, given.made, given.q_s, given.k, rows, keys)
    P = r("p_backward", r("s", S).sub_(finite(given.shift[:, :, rows, None])))
    P = r("p_backward", P.exp_())
    if given.l is not None:
        P = r("p_backward", P.div_(nonzero(given.l[:, :, rows, None])))
    dP = fwd.times(given.case, given.dO[:, :, rows], given.v[:, :, keys].transpose(-1, -2))
    return P, r("dp", dP), tanh


def delta_of(r: Rounder, given: Given, blocks: Iterable[Block]) -> Tensor:
    """delta [B, H, rows]; where it is made of P, in blocks of whole tiles as `blocks` has them."""
    if given.made.delta_from == "dP*P":
        return _delta_of_P(r, given, blocks)
    delta = r("delta", r("delta_product", given.dO * r("delta_o", given.O)).sum(dim=-1))
    if given.made.delta_sign == "own":
        return delta
    even = _even_delta(r, given, blocks)
    return r("delta", even + r.signs(delta) * (delta - even))


def scales(given: Given) -> tuple[float, float, Tensor]:
    """By what the products for dQ and for dK are multiplied, and the Q of the latter. Where dS has
    the scale they need it no more; and neither does dK where Q has it."""
    made, scale = given.made, given.case.scale
    if made.ds_scale == "before":
        return 1.0, 1.0, given.q
    return (scale, scale, given.q) if made.scale_in == "scores" else (scale, 1.0, given.q_s)


def _delta_of_P(r: Rounder, given: Given, blocks: Iterable[Block]) -> Tensor:
    """delta as rowsum(dP o P), which takes a pass of its own before that of the gradients."""
    delta = given.q.new_zeros(given.q.shape[:3])
    width = given.tile[1] if r.rounds("delta") else given.case.kv_len
    for rows, keys in blocks:
        P, dP, _ = again(r, given, rows, keys)
        for tile in _in_order(given, r("delta_product", dP.mul_(P)).split(width, dim=-1)):
            delta[:, :, rows] = r("delta", delta[:, :, rows] + tile.sum(dim=-1))
    return delta


def _even_delta(r: Rounder, given: Given, blocks: Iterable[Block]) -> Tensor:
    """rowsum(dP o P) of the P and dP that backward has, not rounded: with it each row of dS sums to
    zero."""
    delta = given.q.new_zeros(given.q.shape[:3])
    for rows, keys in blocks:
        P, dP, _ = again(r, given, rows, keys)
        delta[:, :, rows] += dP.mul_(P).sum(dim=-1)
    return delta


def of_products(r: Rounder, given: Given, P: Tensor, less: Tensor, tanh: Tensor | None) -> Tensor:
    """dS, as it is multiplied with K and Q: from P o (dP - delta), the gradient of the capped
    scores, to that of Q Kᵀ."""
    less = r("dp_minus_delta", less)
    dS = r("ds_softmax", r("p_for_ds", P) * less)
    cap = given.case.softcap
    if cap is not None and tanh is not None:
        dS = r("ds_softcap", dS * cap)
        dS = r("ds_softcap", dS * (1.0 - tanh**2))
        dS = r("ds_softcap", dS / cap)
    if given.made.ds_scale == "before":
        dS = r("ds_scaled", dS * given.case.scale)
    return r("ds", dS)


def _add_over_rows(
    r: Rounder,
    given: Given,
    name: str,
    total: Tensor,
    left: Tensor,
    right: Tensor,
    scale: float = 1.0,
) -> None:
    """total [B, H, keys, X] += scale leftᵀ right, one tile of rows after the other. In `plain` the
    sum over all rows is one product, and is rounded when the last one is in it."""
    exact = given.made.algorithm == "plain" or not r.rounds(name, f"{name}_product")
    width = left.shape[2] if exact else given.tile[0]
    for weights, x in zip(left.split(width, dim=2), right.split(width, dim=2), strict=True):
        part = (weights.transpose(-1, -2) @ x).mul_(scale)
        total.copy_(total + part if exact else r(name, total + r(f"{name}_product", part)))


def _add_over_keys(
    r: Rounder,
    given: Given,
    totals: Sequence[Tensor],
    dS: Tensor,
    k: Tensor,
    keys: slice,
    scale: float,
) -> None:
    """Add (scale) dS K to the total [B, H, rows, d] of the split that the keys are of, one tile of
    keys after the other."""
    split = fwd.split_width(given.case, given.made) if len(totals) > 1 else given.case.kv_len
    width = given.tile[1] if r.rounds("dq", "dq_product") else split
    for piece in _in_order(given, _cut(keys, width)):
        here = slice(piece.start - keys.start, piece.stop - keys.start)
        dQ = totals[piece.start // split]
        product = (dS[..., here] @ k[:, :, piece]).mul_(scale)
        dQ.copy_(r("dq", dQ + r("dq_product", product)))


def _cut(keys: slice, width: int) -> list[slice]:
    """The keys in pieces that end at multiples of a width."""
    starts = [keys.start, *range(keys.start - keys.start % width + width, keys.stop, width)]
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], keys.stop], strict=True)]


def blocks(given: Given, of_rows: slice | None = None) -> Iterator[Block]:
    """(rows, keys) that hold every pair visible by position once, of some rows or of all: whole
    tiles, and as many of them as memory allows, rows ascending and keys in the recipe's order."""
    case, (block_q, block_kv) = given.case, given.tile
    of_rows = of_rows or slice(0, case.q_len)
    budget = fwd.BLOCK_BYTES["cuda" if case.q.is_cuda else "cpu"]
    cells = budget // (8 * case.q.shape[0] * case.heads)
    wide = min(block_kv * max(1, math.isqrt(cells) // block_kv), case.kv_len)
    high = block_q * max(1, cells // (wide * block_q))
    for first in range(of_rows.start, of_rows.stop, high):
        rows = slice(first, min(first + high, of_rows.stop))
        seen = key_range(case, rows)
        starts = range(seen.start - seen.start % wide, seen.stop, wide)
        for start in _in_order(given, starts):
            yield rows, slice(start, min(start + wide, case.kv_len))


def _in_order(given: Given, tiles: Sequence[T]) -> Sequence[T]:
    """Tiles of keys, in the order in which a row meets them."""
    return tiles[::-1] if given.made.kv_order == "descending" else tiles
