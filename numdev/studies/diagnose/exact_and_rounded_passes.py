"""Computes one call twice: exactly, in fp64, and as a recipe of
`numdev.kernels.emulation` rounds it, with the values between input and output that a
diagnosis compares.

The effect of a site alone is the recipe's value less that of the same recipe with the
site exact. Under stochastic rounding every site draws from a generator of its own here,
so that the rest of the two is rounded alike; the numbers are then not bit for bit those
of the kernel `emulated`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from numdev.cases import AttentionCase, additive, key_range, visible
from numdev.kernels.emulation import backward as bwd
from numdev.kernels.emulation import forward as fwd
from numdev.kernels.emulation.backward import BackwardInputs, SavedForward
from numdev.kernels.emulation.recipe import EXACT, SITES, Recipe
from numdev.kernels.emulation.rounding import Rounder, plain_arithmetic, rounding
from numdev.kernels.output import upstream
from numdev.kernels.reference import blocked, gradients
from numdev.sources.query_projection import Projection
from numdev.studies.diagnose.head_error_means import norm_by_head, rms_by_head

BLOCKS_AT_ONCE = 8  # blocks of scores in memory at once, each so much smaller
PRODUCT = ("pv", "accumulator", "state")  # the sites of the product P V


@dataclass(frozen=True, kw_only=True, eq=False)
class Truth:
    """A call in fp64, with its gradients."""

    case: AttentionCase
    projection: Projection | None
    exact: blocked.Gradients
    rows: Tensor  # bool [B, H, q_len]: rows that see more than one key
    # [B, H, q_len, head_dim], 0 in rows that see none; P times a soft cap's slope
    PK: Tensor
    size: Tensor  # [H]: the rms over `rows` of rowsum|dO o O|, the unit of delta's errors

    def dw_q_from(self, dq: Tensor) -> Tensor:
        """Returns dW_Q [H, head_dim, width] in fp64 that follows from `dq`, a gradient at
        q [B, H, q_len, head_dim], summed over sequences; NaN [H, 1, 1] without a
        projection."""
        if self.projection is None:
            return torch.full_like(self.size, math.nan)[:, None, None]
        pulled = self.projection.pull(dq.double()).double()
        rows = pulled.flatten(0, 1).permute(1, 2, 0)  # [H, head_dim, B n]
        return rows @ self.projection.x.double().flatten(0, 1)

    @cached_property
    def dw_q(self) -> Tensor:
        """Returns the exact dW_Q, [H, head_dim, width] in fp64; NaN [H, 1, 1] without a
        projection. Computed once."""
        return self.dw_q_from(self.exact.dq)

    def dw_q_error(self, dq: Tensor) -> Tensor:
        """Returns the dW_Q of a computed dq less the exact dW_Q, [H, head_dim, width] in
        fp64; NaN [H, 1, 1] without a projection."""
        return self.dw_q_from(dq.detach().double() - self.exact.dq)

    def relative_size(self, dw_q_error: Tensor) -> Tensor:
        """Returns |error of dW_Q| / |dW_Q| of each head, [H], of Frobenius norms; NaN
        without a projection, NaN or infinite where the exact dW_Q is 0."""
        return norm_by_head(dw_q_error) / norm_by_head(self.dw_q)

    def delta_error(self, delta: Tensor, right: Tensor) -> Tensor:
        """Returns (`delta` - `right`) / `size`, [B, H, q_len] in fp64; 0 in rows that see
        no key, else NaN or infinite where `size` is NaN or 0. `delta`, `right`: two
        values of delta, [B, H, q_len]."""
        error = (delta.double() - right) / self.size[:, None]
        return error.masked_fill(self.exact.empty, 0.0)


def exact_passes(case: AttentionCase, projection: Projection | None) -> Truth:
    """Returns the call and its gradients in fp64. Raises UsageError for a case without
    grad_out. Memory: a few blocks of scores beyond tensors of the shapes of q, k, v and
    the output."""
    dO = upstream(case).double()
    exact = gradients(case)
    b, h, n, d = case.q.shape
    seen = torch.zeros(b, h, n, dtype=torch.bool, device=case.q.device)
    PK = exact.dq.new_zeros(b, h, n, d)
    for rows in blocked.row_blocks(case, BLOCKS_AT_ONCE):
        keys = key_range(case, rows)
        P, slope, shown = probabilities(case, exact, rows, keys)
        seen[:, :, rows] = shown.sum(dim=-1) > 1
        weights = P if slope is None else P * slope
        product = blocked._per_kv_head(case, weights) @ case.k[:, :, keys].double()
        PK[:, :, rows] = product.view(b, h, -1, d)
    size = rms_by_head((dO * exact.out).abs().sum(dim=-1), seen)
    return Truth(
        case=case, projection=projection, exact=exact, rows=seen, PK=PK, size=size
    )


def probabilities(
    case: AttentionCase, exact: blocked.Gradients, rows: slice, keys: slice
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns for a block of rows and keys: P [B, H, rows, keys] in fp64, 0 where a key
    is hidden; the soft cap's slope at each score, None without a cap; and which keys are
    shown, bool. `exact`: its log-sum-exp is used."""
    X = blocked._products(case, case.q.double(), case.k.double(), rows, keys)
    slope = blocked._slope(case, X)
    S = blocked.scores(case, X, rows, keys)
    hidden = S.eq(-math.inf)
    P = S.sub_(exact.lse[:, :, rows, None]).exp_().masked_fill_(hidden, 0.0)
    return P, slope, ~hidden


@dataclass(frozen=True, kw_only=True, eq=False)
class Computed:
    """Values of a recipe, in its `compute` dtype, shaped as q, k, v and the output are.
    Sums are over the keys that a row sees, [B, H, q_len] in fp64."""

    recipe: Recipe
    saved: SavedForward
    out: Tensor
    # P-bar V, or P V where P is normalised first; None of split keys
    product: Tensor | None
    product_exact: Tensor | None  # the same with no rounding at PRODUCT
    delta: Tensor  # [B, H, q_len], by the recipe's formula
    dq: Tensor
    dk: Tensor
    dv: Tensor
    ds: Tensor  # sum of dS, as it meets K and Q
    ds_size: Tensor  # sum of |dS|
    # The delta with which the sum of dS before it is rounded is zero: rowsum(dP o P) /
    # rowsum(P), of the dP and P that dS is made of; a sink is among P, with a dP of 0.
    # NaN where P is 0.
    even: Tensor


def rounder_by_site(case: AttentionCase, recipe: Recipe) -> Rounder:
    """Returns the rounding at every site of the recipe, under stochastic rounding each
    with a generator of its own, at its beginning. Raises Refused for a case that the
    recipe's `compute` dtype cannot represent."""
    r = bwd.rounder(case, recipe)
    if recipe.rounding == "stochastic":
        for i, site in enumerate(SITES):
            seed = recipe.seed * len(SITES) + i
            generator = torch.Generator(case.q.device).manual_seed(seed)
            fmt = recipe.format_at(site, case.format)
            r.steps[site] = rounding(fmt, r.dtype, recipe.rounding, generator)
    return r


def rounded_passes(case: AttentionCase, recipe: Recipe) -> Computed:
    """Returns both passes of the recipe, without autograd. Raises Refused for a case that
    the recipe's `compute` dtype cannot represent, UsageError for a case without
    grad_out."""
    with torch.no_grad(), plain_arithmetic(case.q.device):
        saved = bwd.run_forward(rounder_by_site(case, recipe))
        r, product = saved.r, saved.product
        inputs = saved.with_upstream(upstream(case))
        dq, dk, dv = bwd.cast(r, *bwd.backward(inputs))
        without = dataclasses.replace(
            recipe, sites={**recipe.sites, **dict.fromkeys(PRODUCT, EXACT)}
        )
        exact = (
            None
            if product is None
            else bwd.run_forward(rounder_by_site(case, without)).product
        )
        # Generators that start again draw for delta what the backward pass drew
        with_fresh_draws = dataclasses.replace(inputs, r=rounder_by_site(case, recipe))
        delta = bwd.delta_of(with_fresh_draws, bwd.blocks(with_fresh_draws))
        ds, ds_size, weighed, weights = _row_sums(inputs, delta)
        return Computed(
            recipe=recipe, saved=saved, out=r("out", saved.O), product=product,
            product_exact=exact, delta=delta, dq=dq, dk=dk, dv=dv, ds=ds, ds_size=ds_size,
            even=weighed / weights,
        )  # fmt: skip


def _row_sums(inputs: BackwardInputs, delta: Tensor) -> Tensor:
    """Returns the sums of dS, |dS|, dP o P and P over the keys that a row sees, [4, B, H,
    q_len] in fp64; a sink is in the last. `delta`: [B, H, q_len]."""
    case = inputs.r.case
    sums = torch.zeros(4, *delta.shape, dtype=torch.float64, device=case.q.device)
    if case.sinks is not None:
        logits = case.sinks.double()[None, :, None]
        P = (logits - fwd.finite(inputs.shift).double()).exp()
        sums[3] = P if inputs.over is None else P / blocked.nonzero(inputs.over).double()
    inputs = dataclasses.replace(inputs, r=rounder_by_site(case, inputs.r.recipe))
    for rows, keys in bwd.blocks(inputs):
        P, dP, tanh = bwd.recompute_p_and_dp(inputs, rows, keys)
        P = inputs.r("p_for_ds", P)
        weights, weighed = P.double(), P.double() * dP.double()
        less = dP.sub_(delta[:, :, rows, None])
        dS = bwd.score_gradient(inputs, P, less, tanh).double()
        shown, added = visible(case, rows, keys), additive(case, rows, keys)
        seen = (
            torch.ones((), dtype=torch.bool, device=case.q.device)
            if shown is None
            else shown
        )
        seen = seen if added is None else seen & (added > -math.inf)
        for total, term in zip(sums, (dS, dS.abs(), weighed, weights), strict=True):
            total[:, :, rows] += torch.where(seen, term, 0.0).sum(dim=-1)
    return sums
