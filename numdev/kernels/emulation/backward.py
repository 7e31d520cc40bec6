"""The backward pass of `emulated`: the gradients of attention with a format at every
rounding site.

`gradients` runs the forward pass of the same recipe and then, as FlashAttention-2 (arXiv
2307.08691, Algorithm 2) does, computes S again, tile by tile, through the forward's own
sites: kernels do in backward what they did in forward. The site `s` may round the result
once more, for a backward pass that is coarser than its forward. Where autograd kept P
(`p_from: m_and_l`) it is exp(S - m) / l of the m and l that forward left, which is the
same number.

Blocks of as many whole tiles as memory allows are computed at once, since P is
normalised, and only sums that are rounded between tiles go tile by tile. In `plain` a sum
over rows is one product.

delta_o rounds O as it was before its cast at `out`; the two are separate, so that either
can be made exact alone. With stochastic rounding every step draws anew, so that S, P and
dP are not those of forward, nor, with delta from dP o P, those delta was made from.

Legend: S scores, P probabilities, m row maximum, l row sum, O output, L log-sum-exp; d of
any of them the gradient with respect to it, delta = rowsum(dO o O), o elementwise."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from numdev.cases import AttentionCase, key_range
from numdev.errors import Refused
from numdev.formats import all_finite, format_of
from numdev.kernels.emulation import forward as fwd
from numdev.kernels.emulation.forward import finite, in_order
from numdev.kernels.emulation.recipe import Recipe
from numdev.kernels.emulation.rounding import Rounder, plain_arithmetic
from numdev.kernels.output import upstream
from numdev.kernels.reference.blocked import nonzero

Block = tuple[slice, Any]  # rows and keys: a range, or int64 indices
Gradients = tuple[Tensor, Tensor, Tensor]
CASTS = ("dq_out", "dk_out", "dv_out")
WIDE_BYTES = {"cpu": 1 << 22, "cuda": 1 << 27}
"""How large a block at once may be, of scores in fp32. About six times as much is needed
for it."""


def gradients(
    case: AttentionCase, recipe: Recipe, *, at_once: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns O, L, dQ, dK and dV as the recipe has them, in its `compute` dtype, without
    autograd. A row that sees no key has gradients of 0 and adds nothing to dK and dV.
    Memory is O(length * head_dim) beyond a block. With `at_once`, many tiles are computed
    together where the recipe allows it and all results are finite; they are equal up to
    fp32 rounding, and that waits for the device once. Raises Refused where the case has
    no grad_out, its format cannot do what the recipe asks, or the `compute` dtype does
    not hold grad_out."""
    r = rounder(case, recipe)
    at_once = at_once and (fwd.is_at_once(r) or is_at_once(r))
    with torch.no_grad(), plain_arithmetic(case.q.device):
        saved = run_forward(r, at_once=at_once)
        sums = backward(saved.with_upstream(upstream(case)), at_once=at_once)
        if not at_once or all_finite([saved.O, *sums]):
            return r("out", saved.O), saved.L, *cast(r, *sums)
    return gradients(case, recipe)


def of_keys(
    case: AttentionCase, recipe: Recipe, keys: Tensor, O: Tensor, L: Tensor
) -> Gradients:
    """Returns dQ, dK and dV as the recipe has them for a forward pass that rounded
    nowhere and gave O [B, H, q_len, v_dim] and L [B, H, q_len]. dK and dV [B, kv_heads,
    n, ...] are those of the keys `keys` (int64 indices [n]) alone, in this order; dQ is
    0. Costs O(q_len keys). The recipe's `delta_from` and `delta_sign` are not used.
    Raises Refused where the case has no grad_out, its format cannot do what the recipe
    asks, or the `compute` dtype does not hold grad_out."""
    r = rounder(case, dataclasses.replace(recipe, delta_from="dO*O", delta_sign="own"))
    return from_forward(r, O, r("lse", L.to(r.dtype)), keys)


def from_forward(
    r: Rounder, O: Tensor, L: Tensor, keys: Tensor | None = None
) -> Gradients:
    """Returns dQ, dK and dV for an O [B, H, q_len, v_dim] and an L [B, H, q_len] that
    another kernel computed, rounded as they are returned. `keys` (int64 indices [n]): dK
    and dV of these keys alone, and dQ of 0. None: of all keys. Raises UsageError for a
    case without grad_out."""
    with torch.no_grad(), plain_arithmetic(r.case.q.device):
        q, q_s, k, v = fwd.operands_of(r)
        O, L = O.to(r.dtype), L.to(r.dtype)
        saved = SavedForward(
            r=r, q=q, q_s=q_s, k=k, v=v, O=O, L=L, m=L, l=torch.ones_like(L)
        )
        inputs = dataclasses.replace(saved.with_upstream(upstream(r.case)), some=keys)
        return cast(r, *backward(inputs))


def is_at_once(r: Rounder) -> bool:
    """Whether computing large blocks at once gives what the recipe says of backward, up
    to fp32 rounding: no running sum is rounded."""
    sums = [site for x in ("dq", "dk", "dv") for site in (x, f"{x}_product")]
    if r.recipe.splits not in (None, 1):
        sums.append("dq_partial")
    if r.recipe.q_splits not in (None, 1):
        sums += ["dk_partial", "dv_partial"]
    return fwd.in_any_order(r) and not r.rounds(*sums)


def rounder(case: AttentionCase, recipe: Recipe) -> Rounder:
    """Returns the Rounder of both passes. Raises Refused where the case has no grad_out,
    its format cannot do what the recipe asks, or the `compute` dtype does not hold
    grad_out or the format of a site."""
    r = Rounder(recipe, case)
    if case.grad_out is None:
        raise Refused("the case has no gradient with respect to its output (grad_out)")
    if not format_of(r.dtype).contains(format_of(case.grad_out.dtype)):
        raise Refused(f"computing in {recipe.compute} would round grad_out")
    return r


def cast(r: Rounder, *sums: Tensor) -> Gradients:
    """Returns the sums dQ, dK and dV rounded as they are returned."""
    dQ, dK, dV = (r(site, x) for site, x in zip(CASTS, sums, strict=True))
    return dQ, dK, dV


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedForward:
    """The tensors that forward leaves for backward. All are in the recipe's `compute`
    dtype."""

    r: Rounder
    q: Tensor
    q_s: Tensor  # Q as it met K in forward
    k: Tensor
    v: Tensor
    O: Tensor  # before its cast
    L: Tensor  # as it is returned
    m: Tensor
    l: Tensor
    product: Tensor | None = None  # O before it was normalised (`forward.State`)

    def with_upstream(self, dO: Tensor) -> BackwardInputs:
        """Returns what backward reads: these tensors, `dO` (the gradient of the output)
        in the compute dtype, and what is derived from L or from m and l."""
        r, by_lse, again = (
            self.r,
            self.r.recipe.p_from == "lse",
            self.r.recipe.scale_again,
        )
        shift = r("lse_read", self.L if by_lse else self.m)
        over = None if by_lse else r("lse_read", self.l)
        fields = {**vars(self), "q_s": self.q_s if again == "same" else self.q}
        k_s = (
            r("k_scaled", self.k * (r.case.scale * fwd.LOG2_E))
            if again == "k_log2"
            else self.k
        )
        scale_in, dO = (
            r.recipe.scale_in if again == "same" else again,
            dO.to(self.q.dtype),
        )
        return BackwardInputs(
            **fields, k_s=k_s, scale_in=scale_in, dO=dO, shift=shift, over=over
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class BackwardInputs(SavedForward):
    """The tensors that backward reads. Of those that forward saved it reads Q, K, V and
    O; L, or m and l, it reads only as `shift` and `over`."""

    k_s: Tensor  # K as it meets Q again
    scale_in: str  # where the scale is in backward
    dO: Tensor
    shift: Tensor  # what is taken from S: L, or m
    over: Tensor | None  # by what exp is divided, l; None where the shift was L
    # The keys that dK and dV are of, where not of all; dQ is 0 then
    some: Tensor | None = None

    def of_group(self, place: int) -> BackwardInputs:
        """Returns the inputs of the query heads at one place of their groups: one for
        every kv head."""
        r, heads = copy.copy(self.r), slice(place, None, self.r.case.group)
        r.case = r.case.restrict(heads=heads)
        names = ("q", "q_s", "dO", "O", "shift", "over")
        some = {n: x[:, heads] for n in names if (x := getattr(self, n)) is not None}
        return dataclasses.replace(self, r=r, **some)


def run_forward(r: Rounder, *, at_once: bool = False) -> SavedForward:
    """Runs a forward pass and returns what backward needs of it. `at_once`: many tiles
    together, where the recipe allows it: equal up to fp32 rounding, and perhaps not
    finite where tile by tile it is."""
    q, q_s, k, v = fwd.operands_of(r)
    m, l, O, product = fwd.forward(r, q_s, k, v, at_once=at_once)
    L = r("lse", m + l.log())
    if r.recipe.softmax == "stabilised":
        l = l.masked_fill(fwd.lost(m, l), math.nan)
    return SavedForward(r=r, q=q, q_s=q_s, k=k, v=v, O=O, L=L, m=m, l=l, product=product)


def backward(inputs: BackwardInputs, *, at_once: bool = False) -> Gradients:
    """Returns dQ [B, H, q_len, head_dim], dK and dV [B, kv_heads, keys, ...], not yet
    cast. dK and dV are summed over the query heads of a kv head, one after the other;
    with `at_once` over all of them together, where the recipe `is_at_once`. With
    `inputs.some` they are of these keys alone, tile by tile, and dQ is 0; delta is of all
    keys."""
    r, recipe, case = inputs.r, inputs.r.recipe, inputs.r.case
    q_len, group = case.q_len, case.group
    if at_once and inputs.some is None and is_at_once(r):
        return _backward_at_once(inputs)
    width = -(-q_len // (recipe.q_splits or 1))
    parts = [slice(first, min(first + width, q_len)) for first in range(0, q_len, width)]
    deltas = dict[int, Tensor]()
    of = slice(None) if inputs.some is None else inputs.some
    dQ, dK, dV = map(torch.zeros_like, (inputs.q, inputs.k[:, :, of], inputs.v[:, :, of]))
    for rows in parts:
        with _partial_sums(r, dK, dV, len(parts) > 1) as (dK_p, dV_p):
            for place in range(group):
                head = inputs.of_group(place)
                if place not in deltas:
                    whole = dataclasses.replace(head, some=None)
                    deltas[place] = delta_of(whole, blocks(whole))
                separate = group > 1 and recipe.group_sum == "separate"
                with _partial_sums(r, dK_p, dV_p, separate) as sums:
                    dQ[:, place::group, rows] = _add_gradients(
                        head, deltas[place], rows, *sums
                    )
    return dQ, dK, dV


def _backward_at_once(inputs: BackwardInputs) -> Gradients:
    """Returns dQ, and dK and dV of every kv head, in the compute dtype and not yet cast,
    computed in large blocks: up to fp32 rounding what the tiles give, and perhaps not
    finite where that is. For a recipe that this module's `is_at_once` allows, and inputs
    without `some`, which is not read."""
    r, case, q, k, v, dO = (
        inputs.r,
        inputs.r.case,
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.dO,
    )

    def blocks() -> Iterator[Block]:
        """Yields (rows, keys) of all blocks that some row can see by position."""
        for rows, pieces in fwd.wide_blocks(r, WIDE_BYTES):
            yield from ((rows, keys) for keys in pieces)

    delta = delta_of(inputs, blocks())
    scale_q, scale_k, q_k, k_q = _scales(inputs)
    heads = case.heads if r.recipe.group_sum == "separate" else case.kv_heads

    def over_rows(left: Tensor, right: Tensor) -> Tensor:
        """Returns leftᵀ right [B, heads, X, Y]: with kv heads, a sum over the heads of a
        group too."""
        x, y = (t.reshape(t.shape[0], heads, -1, t.shape[-1]) for t in (left, right))
        return x.transpose(-1, -2) @ y

    dQ = torch.zeros_like(q)
    dK, dV = (x.new_zeros(x.shape[0], heads, *x.shape[2:]) for x in (k, v))
    for rows, keys in blocks():
        P, dP, tanh = recompute_p_and_dp(inputs, rows, keys)
        dV[:, :, keys].add_(over_rows(r("p_for_dv", P), dO[:, :, rows]))
        dS = score_gradient(inputs, P, dP.sub_(delta[:, :, rows, None]), tanh)
        dK[:, :, keys].add_(over_rows(dS, q_k[:, :, rows]))
        dQ[:, :, rows].add_(fwd.times(case, dS, k_q[:, :, keys]))
    dQ, dK = dQ.mul_(scale_q), dK.mul_(scale_k)
    if heads > case.kv_heads:
        groups = (case.kv_heads, case.group)
        dK, dV = r("dk_partial", dK), r("dv_partial", dV)
        dK, dV = (x.unflatten(1, groups).sum(dim=2) for x in (dK, dV))
    return dQ, dK, dV


@contextlib.contextmanager
def _partial_sums(
    r: Rounder, dK: Tensor, dV: Tensor, separate: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Enters a context that yields the sums to add gradients to: dK and dV themselves, or
    where they are `separate` zeros that are rounded and added to dK and dV at the end."""
    if not separate:
        yield dK, dV
        return
    partial = torch.zeros_like(dK), torch.zeros_like(dV)
    yield partial
    dK += r("dk_partial", partial[0])
    dV += r("dv_partial", partial[1])


def _add_gradients(
    inputs: BackwardInputs, delta: Tensor, of_rows: slice, dK: Tensor, dV: Tensor
) -> Tensor:
    """Returns dQ [B, H, rows, head_dim] of the rows `of_rows`, and adds what these
    contribute to dK and dV, [B, H, keys, ...], in place. `delta` [B, H, q_len] is of all
    rows. Where dK and dV are of some keys alone (`inputs.some`), dQ is 0. `inputs` has as
    many query heads as kv heads (`of_group`)."""
    r, q, dO = inputs.r, inputs.q, inputs.dO
    scale_q, scale_k, q_k, k_q = _scales(inputs)
    is_split = r.recipe.splits is not None and r.rounds("dq", "dq_product", "dq_partial")
    split = fwd.split_width(r) if is_split else r.case.kv_len
    totals = [torch.zeros_like(q[:, :, of_rows]) for _ in range(0, r.case.kv_len, split)]
    for rows, keys in blocks(inputs, of_rows):
        at = keys if inputs.some is None else slice(None)
        within = slice(rows.start - of_rows.start, rows.stop - of_rows.start)
        P, dP, tanh = recompute_p_and_dp(inputs, rows, keys)
        dS = score_gradient(inputs, P, dP.sub_(delta[:, :, rows, None]), tanh)
        _add_over_rows(r, "dv", dV[:, :, at], r("p_for_dv", P), dO[:, :, rows])
        _add_over_rows(r, "dk", dK[:, :, at], dS, q_k[:, :, rows], scale_k)
        if inputs.some is not None:
            continue
        # dS K, one tile of keys after the other, each to the total of its split.
        width = r.tile[1] if r.rounds("dq", "dq_product") else split
        for tile in in_order(r, _cut(keys, width)):
            dQ = totals[tile.start // split][:, :, within]
            of_tile = dS[..., tile.start - keys.start : tile.stop - keys.start]
            product = (of_tile @ k_q[:, :, tile]).mul_(scale_q)
            dQ.copy_(r("dq", dQ + r("dq_product", product)))
    if r.recipe.algorithm == "plain":
        dK.copy_(r("dk", r("dk_product", dK)))
        dV.copy_(r("dv", r("dv_product", dV)))
    if len(totals) == 1:
        return totals[0]
    return torch.stack([r("dq_partial", x) for x in totals]).sum(dim=0)


def _cut(keys: slice, width: int) -> list[slice]:
    """Returns ranges that cover `keys`, cut at the multiples of `width`. `keys`: not
    empty, with a start and a stop."""
    starts = [
        keys.start,
        *range(keys.start - keys.start % width + width, keys.stop, width),
    ]
    return [slice(*ends) for ends in zip(starts, [*starts[1:], keys.stop], strict=True)]


def recompute_p_and_dp(
    inputs: BackwardInputs, rows: slice, keys: slice
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns P and dP [B, H, rows, keys] of a block, computed again as backward does;
    and under a soft cap the tanh of its scores, else None."""
    r = inputs.r
    S, tanh = fwd.scores(r, inputs.q_s, inputs.k_s, rows, keys, inputs.scale_in)
    P = r("p_backward", r("s", S).sub_(finite(inputs.shift[:, :, rows, None])))
    P = r("p_backward", P.exp_())
    if inputs.over is not None:
        P = r("p_backward", P.div_(nonzero(inputs.over[:, :, rows, None])))
    dP = fwd.times(r.case, inputs.dO[:, :, rows], inputs.v[:, :, keys].transpose(-1, -2))
    return P, r("dp", dP), tanh


def delta_of(inputs: BackwardInputs, blocks: Iterable[Block]) -> Tensor:
    """Returns delta [B, H, q_len], by the recipe's `delta_from`. `blocks`: (rows, keys)
    of whole tiles that cover the case, read only where delta is made of P or its error
    gets a random sign."""
    r, delta_P = inputs.r, inputs.q.new_zeros(inputs.q.shape[:3])
    if r.recipe.delta_from == "dP*P":  # a pass of its own before that of the gradients
        width = r.tile[1] if r.rounds("delta") else r.case.kv_len
        for rows, keys in blocks:
            P, dP, _ = recompute_p_and_dp(inputs, rows, keys)
            for tile in in_order(r, r("delta_product", dP.mul_(P)).split(width, dim=-1)):
                delta_P[:, :, rows] = r("delta", delta_P[:, :, rows] + tile.sum(dim=-1))
        return delta_P
    delta = r("delta", r("delta_product", inputs.dO * r("delta_o", inputs.O)).sum(dim=-1))
    if r.recipe.delta_sign == "own":
        return delta
    # rowsum(dP o P) of the P and dP that backward has: with it each row of dS sums to
    # zero.
    for rows, keys in blocks:
        P, dP, _ = recompute_p_and_dp(inputs, rows, keys)
        delta_P[:, :, rows] += dP.mul_(P).sum(dim=-1)
    return r("delta", delta_P + r.signs(delta) * (delta - delta_P))


def _scales(inputs: BackwardInputs) -> tuple[float, float, Tensor, Tensor]:
    """Returns (scale_q, scale_k, Q, K): scale_q is the factor of dS K in dQ, scale_k that
    of dSᵀ Q in dK, and Q and K are the tensors in these two products. A factor is 1 where
    dS, Q or K has the scale already."""
    scale, q, k = inputs.r.case.scale, inputs.q, inputs.k
    if inputs.r.recipe.ds_scale == "before":
        return 1.0, 1.0, q, k
    return {
        "scores": (scale, scale, q, k),
        "q": (scale, 1.0, inputs.q_s, k),
        "q_log2": (scale, 1 / fwd.LOG2_E, inputs.q_s, k),
        "k_log2": (1 / fwd.LOG2_E, scale, q, inputs.k_s),
    }[inputs.scale_in]


def score_gradient(
    inputs: BackwardInputs, P: Tensor, less: Tensor, tanh: Tensor | None
) -> Tensor:
    """Returns dS [B, H, rows, keys] of a block, as it is multiplied with K and Q. `P`,
    `less` (dP - delta) and `tanh` (of the soft cap, None without one) are of the same
    shape."""
    r = inputs.r
    less = r("dp_minus_delta", less)
    dS = r("ds_softmax", r("p_for_ds", P) * less)
    cap = r.case.softcap
    if cap is not None and tanh is not None:
        dS = r("ds_softcap", dS * cap)
        dS = r("ds_softcap", dS * (1.0 - tanh**2))
        dS = r("ds_softcap", dS / cap)
    if r.recipe.ds_scale == "before":
        dS = r("ds_scaled", dS * r.case.scale)
    return r("ds", dS)


def _add_over_rows(
    r: Rounder, name: str, total: Tensor, left: Tensor, right: Tensor, scale: float = 1.0
) -> None:
    """Adds scale leftᵀ right, of `left` [B, H, rows, keys] and `right` [B, H, rows, X],
    to `total` [B, H, keys, X] in place, one tile of rows after the other, rounded at the
    sites `name` and `name_product`. In `plain` the sum over all rows is one product, and
    is rounded by the caller when the last one is in it."""
    exact = r.recipe.algorithm == "plain" or not r.rounds(name, f"{name}_product")
    width = left.shape[2] if exact else r.tile[0]
    for weights, x in zip(
        left.split(width, dim=2), right.split(width, dim=2), strict=True
    ):
        part = (weights.transpose(-1, -2) @ x).mul_(scale)
        total.copy_(
            total + part if exact else r(name, total + r(f"{name}_product", part))
        )


def blocks(inputs: BackwardInputs, of_rows: slice | None = None) -> Iterator[Block]:
    """Yields (rows, keys) that cover every pair visible by position once, for the rows
    `of_rows`; None: all. Both are whole tiles, as many as memory allows, rows counted
    from the first of them; rows ascend, and keys are in the recipe's order. With
    `inputs.some`, `keys` are those indices, in every item."""
    r, case, (block_q, block_kv) = inputs.r, inputs.r.case, inputs.r.tile
    of_rows = of_rows or slice(0, case.q_len)
    cells = fwd.BLOCK_BYTES[case.q.device.type] // (8 * case.q.shape[0] * case.heads)
    wide = min(block_kv * max(1, math.isqrt(cells) // block_kv), case.kv_len)
    high = block_q * max(1, cells // (wide * block_q))
    for first in range(of_rows.start, of_rows.stop, high):
        rows = slice(first, min(first + high, of_rows.stop))
        if inputs.some is not None:
            yield rows, inputs.some
            continue
        seen = key_range(case, rows)
        for start in in_order(r, range(seen.start - seen.start % wide, seen.stop, wide)):
            yield rows, slice(start, min(start + wide, case.kv_len))


def attended(
    case: AttentionCase, recipe: Recipe, generator: torch.Generator | None = None
) -> Tensor:
    """Returns O [B, H, q_len, v_dim] inside a network that learns, in a dtype that holds
    its site's format, connected to q, k and v, whose gradients come in their dtypes.
    Large blocks are computed at once where the recipe allows it. What is random is drawn
    from `generator` in both passes; None: every call draws the same numbers, from the
    recipe's seed. Nothing waits for the device. So where V holds infinity or NaN, a row
    may meet them through keys that it does not see. Raises Refused where the case's
    format cannot do what the recipe asks."""
    arguments = (case.q, case.k, case.v, case, recipe, generator)
    out: Tensor = _Attend.apply(*arguments)  # type: ignore[no-untyped-call]
    return out


class _AttendContext(Protocol):
    """What autograd stores of a call between its two passes."""

    saved: SavedForward


class _Attend(torch.autograd.Function):
    """One operation of autograd's graph: the emulated forward and backward pass."""

    @staticmethod
    def forward(
        ctx: _AttendContext,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        case: AttentionCase,
        recipe: Recipe,
        generator: torch.Generator | None,
    ) -> Tensor:
        """Returns O in a dtype that holds its site's format, and stores what backward
        needs in `ctx`."""
        case = dataclasses.replace(case, q=q.detach(), k=k.detach(), v=v.detach())
        r = Rounder(recipe, case, generator)
        with plain_arithmetic(q.device):
            ctx.saved = run_forward(r, at_once=True)
            out = r.stored("out", r("out", ctx.saved.O), q.dtype)
        # What is returned gets a place in the graph, which must not hold itself.
        return out.clone() if out is ctx.saved.O else out

    @staticmethod
    def backward(ctx: _AttendContext, *upstreams: Tensor) -> object:
        """Returns dq, dk and dv in the dtypes of q, k and v, and None for the other three
        arguments."""
        r, of = ctx.saved.r, (ctx.saved.r.case.q, ctx.saved.r.case.k, ctx.saved.r.case.v)
        with torch.no_grad(), plain_arithmetic(upstreams[0].device):
            done = cast(r, *backward(ctx.saved.with_upstream(upstreams[0]), at_once=True))
        results = zip(CASTS, done, of, strict=True)
        return (
            *(r.stored(site, x, y.dtype).to(y.dtype) for site, x, y in results),
            None,
            None,
            None,
        )
