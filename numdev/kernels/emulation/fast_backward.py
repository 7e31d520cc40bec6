"""A training step of `emulated` in large blocks, for predictions: both passes, all heads at once.

The same recipe at the same sites as `numdev.kernels.emulation.backward`, whose steps it is made of.
There query heads of a group come one after the other and sums go tile by tile; here a block holds
all heads, and as many rows and keys as memory allows. That is for recipes whose dq, dk and dv are
not rounded from tile to tile (`keeps_sums`), of any algorithm. Forward is that of
`numdev.kernels.emulation.fast_forward` where the recipe allows it, each pass by itself; `gradients`
leaves what neither can do to `emulated_backward`, and so too what is not finite.

What may differ is fp32 rounding: in the sums over rows and keys, over a group, and in O, l and L.
A P or dS differs relatively by as much as L does, near 1e-7, and now and then falls on the other
side of its boundary; the bound is that of `emulated_backward` between its two modes. Measured on a
CPU in bf16: 2e-4 of the elements differ, by a root mean square of 0.6 % of the error and at most
5 %, whose own rms agrees to 0.1 %; in ties, where all of a dk may hang on the rounding of one O,
by 8 % and to 1 %.

Legend: S scores, P probabilities, O output, L log-sum-exp; d of any of them the gradient with
respect to it, delta = rowsum(dO o O).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.kernels.emulation import backward as bwd
from numdev.kernels.emulation import fast_forward as fast
from numdev.kernels.emulation import forward as fwd
from numdev.kernels.emulation.backward import Block, Given
from numdev.kernels.emulation.recipe import Recipe
from numdev.kernels.emulation.rounding import Rounder, plain_arithmetic

BLOCK_BYTES = {"cpu": 1 << 22, "cuda": 1 << 27}
"""How large one block of scores may be. About six times as much is needed for it."""
Step = tuple[Tensor, Tensor, Tensor, Tensor]
"""O, dQ, dK and dV."""


def gradients(case: AttentionCase, made: Recipe) -> Step:
    """O, dQ, dK and dV as the recipe has them, in its `compute` dtype, to fp32 rounding.

    Shapes and what is raised are those of `emulated_backward.gradients`. Memory is O(length *
    head_dim) for every query head beyond a block.
    """
    r = bwd.rounder(case, made)
    passes = (fast.keeps_sums(r, case, made), keeps_sums(r, case, made))
    if any(passes):
        with torch.no_grad(), plain_arithmetic(case.q.device):
            given, _ = bwd.read(r, case, made, fast.forward if passes[0] else fwd.forward)
            found = backward(r, given) if passes[1] else bwd.backward(r, given)
            if fast.all_finite(given.O, *found):
                return r("out", given.O), *bwd.cast(r, *found)
    O, _, dQ, dK, dV = bwd.gradients(case, made)
    return O, dQ, dK, dV


def keeps_sums(r: Rounder, case: AttentionCase, made: Recipe) -> bool:
    """Whether `gradients` computes what a recipe says of backward, as far as that is more than fp32
    rounding."""
    sums = [site for x in ("dq", "dk", "dv") for site in (x, f"{x}_product")]
    if made.splits not in (None, 1):
        sums.append("dq_partial")
    if made.q_splits not in (None, 1):
        sums += ["dk_partial", "dv_partial"]
    return fast.in_any_order(case, made) and not r.rounds(*sums)


def backward(r: Rounder, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV before their casts, for a recipe that `keeps_sums`."""
    case, q, k, v, dO = given.case, given.q, given.k, given.v, given.dO
    delta = bwd.delta_of(r, given, _blocks(given))
    scale_q, scale_k, q_k = bwd.scales(given)
    heads = case.heads if given.made.group_sum == "separate" else case.kv_heads
    dQ = torch.zeros_like(q)
    dK, dV = (x.new_zeros(x.shape[0], heads, *x.shape[2:]) for x in (k, v))
    for rows, keys in _blocks(given):
        P, dP, tanh = bwd.again(r, given, rows, keys)
        dV[:, :, keys].add_(_over_rows(r("p_for_dv", P), dO[:, :, rows], heads))
        dS = bwd.of_products(r, given, P, dP.sub_(delta[:, :, rows, None]), tanh)
        dK[:, :, keys].add_(_over_rows(dS, q_k[:, :, rows], heads))
        dQ[:, :, rows].add_(fwd.times(case, dS, k[:, :, keys]))
    dQ, dK = dQ.mul_(scale_q), dK.mul_(scale_k)
    if heads > case.kv_heads:
        dK, dV = _of_groups(case, r("dk_partial", dK)), _of_groups(case, r("dv_partial", dV))
    return dQ, dK, dV


def _over_rows(left: Tensor, right: Tensor, heads: int) -> Tensor:
    """leftᵀ right [B, heads, X, Y], for [B, H, rows, X] and [B, H, rows, Y]: with fewer heads than
    H, a sum over those of a group too."""
    x, y = (t.reshape(t.shape[0], heads, -1, t.shape[-1]) for t in (left, right))
    return x.transpose(-1, -2) @ y


def _of_groups(case: AttentionCase, x: Tensor) -> Tensor:
    """The sum over the query heads of every kv head."""
    groups: Tensor = x.unflatten(1, (case.kv_heads, case.group))
    return groups.sum(dim=2)


def _blocks(given: Given) -> Iterator[Block]:
    """(rows, keys) that hold every pair visible by position once."""
    for rows, keys in fast.blocks(given.case, given.made, BLOCK_BYTES):
        for block in keys:
            yield rows, block
