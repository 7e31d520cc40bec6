"""`emulated` inside a network that learns: forward keeps what its backward reads.

The same recipe at the same sites as the kernel, in large blocks where the recipe allows
(`emulated_fast`, `emulated_fast_backward`, whose bounds hold), tile by tile where it does not.
Backward recomputes S, as the recipes have it, and nothing else of forward. Nothing here waits for
the device: whether anything is infinite or NaN is not asked, as it is in predictions, so where V
holds such values a row may meet them through keys that it does not see. A loss that has met them
is lost anyway.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.kernels.emulation import backward as bwd
from numdev.kernels.emulation import fast_backward as fast_bwd
from numdev.kernels.emulation import fast_forward as fast
from numdev.kernels.emulation import forward as fwd
from numdev.kernels.emulation.recipe import Recipe
from numdev.kernels.emulation.rounding import Rounder, plain_arithmetic, stored


def attend(case: AttentionCase, made: Recipe, generator: torch.Generator | None = None) -> Tensor:
    """O [B, H, q_len, v_dim] in a dtype that holds its site's format, connected to q, k and v,
    whose gradients come in their own dtypes. What is random is drawn from the generator, on in both
    passes; without one every call draws the same numbers, from the recipe's seed. Raises Refused as
    `emulated` does."""
    given = (case.q, case.k, case.v, case, made, generator)
    out: Tensor = _Attend.apply(*given)  # type: ignore[no-untyped-call]
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        case: AttentionCase,
        made: Recipe,
        generator: torch.Generator | None,
    ) -> Tensor:
        r = Rounder(made, case, fwd.dtype_of(made), generator)
        case = dataclasses.replace(case, q=q.detach(), k=k.detach(), v=v.detach())
        with plain_arithmetic(q.device):
            wide = fast.forward if fast.keeps_sums(r, case, made) else fwd.forward
            kept = bwd.kept(r, case, made, wide)
            out = stored(r("out", kept.O), made.format_at("out", case.format), q.dtype)
            # What is returned gets a place in the graph, which must not hold itself.
            out = out.clone() if out is kept.O else out
        ctx.rounder, ctx.kept = r, kept
        return out

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        (dO,) = given
        r, kept = ctx.rounder, ctx.kept
        case, made = kept.case, kept.made
        with torch.no_grad(), plain_arithmetic(dO.device):
            read = kept.with_upstream(r, dO)
            many = fast_bwd.keeps_sums(r, case, made)
            found = (fast_bwd.backward if many else bwd.backward)(r, read)
            cast = bwd.cast(r, *found)
        names = ("dq_out", "dk_out", "dv_out")
        tensors = zip(names, cast, (case.q, case.k, case.v), strict=True)
        made_of = (
            stored(x, made.format_at(name, case.format), like.dtype).to(like.dtype)
            for name, x, like in tensors
        )
        return *made_of, None, None, None
