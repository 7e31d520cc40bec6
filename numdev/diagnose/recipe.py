"""What a recipe of `emulated` computes of a call, with what a diagnosis asks of it beside O and the
gradients: P-bar V with and without the roundings of the product, delta by either formula, dP and
the row sums of dS.

The steps are those of `numdev.kernels.emulation.forward` and `emulated_backward`. What a site alone
does is the recipe's value less that of the same recipe with the site exact. Under stochastic
rounding every site draws from a generator of its own here, so that the rest of the two is rounded
alike; the numbers are then not bit for bit those of the kernel `emulated`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.cases import AttentionCase, additive, visible
from numdev.kernels.emulation import backward as bwd
from numdev.kernels.emulation import forward as fwd
from numdev.kernels.emulation.backward import Given, Kept
from numdev.kernels.emulation.recipe import EXACT, SITES, DeltaFrom, Recipe
from numdev.kernels.emulation.rounding import Rounder, plain_arithmetic, rounding

PRODUCT = ("pv", "accumulator", "state")
"""The sites of the product P V."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Computed:
    """What a recipe computes, in its `compute` dtype, shaped as q, k, v and the output are."""

    made: Recipe
    kept: Kept
    given: Given
    out: Tensor
    product: Tensor | None
    """P-bar V, or P V where P is normalised before it; None where the keys are split."""
    product_exact: Tensor | None
    """The same with no rounding at PRODUCT."""
    delta: Tensor
    """[B, H, q_len], by the recipe's formula."""
    dq: Tensor
    dk: Tensor
    dv: Tensor


def rounder(case: AttentionCase, made: Recipe) -> Rounder:
    """What rounds; raises Refused as `emulated_backward.gradients` does."""
    r = bwd.rounder(case, made)
    if made.rounding == "stochastic":
        for i, site in enumerate(SITES):
            own = torch.Generator(case.q.device).manual_seed(made.seed * len(SITES) + i)
            fmt = made.format_at(site, case.format)
            r.steps[site] = rounding(fmt, fwd.dtype_of(made), made.rounding, own)
    return r


def computed(case: AttentionCase, made: Recipe) -> Computed:
    """Both passes of the recipe. Runs without autograd. Raises Refused for a case that the recipe's
    `compute` dtype does not hold, and for one without grad_out."""
    assert case.grad_out is not None
    with torch.no_grad(), plain_arithmetic(case.q.device):
        r = rounder(case, made)
        kept, product = _forward(r, case, made)
        given = kept.with_upstream(r, case.grad_out)
        dq, dk, dv = bwd.cast(r, *bwd.backward(r, given))
        return Computed(
            made=made,
            kept=kept,
            given=given,
            out=r("out", kept.O),
            product=product,
            product_exact=None if product is None else _exact_product(case, made),
            delta=delta_by(case, given, made.delta_from),
            dq=dq,
            dk=dk,
            dv=dv,
        )


def delta_by(case: AttentionCase, given: Given, formula: DeltaFrom) -> Tensor:
    """delta [B, H, q_len] by a formula, all else as the recipe has it."""
    made = dataclasses.replace(given.made, delta_from=formula)
    with torch.no_grad(), plain_arithmetic(case.q.device):
        asked = dataclasses.replace(given, made=made)
        return bwd.delta_of(rounder(case, made), asked, bwd.blocks(asked))


@dataclass(frozen=True, kw_only=True, eq=False)
class Products:
    """Sums over the keys that a row sees, [B, H, q_len] in fp64."""

    dp_error: Tensor
    """Of (dP - dP exact)^2."""
    dp: Tensor
    """Of (dP exact)^2."""
    ds: Tensor
    """Of dS, as it meets K and Q."""
    ds_size: Tensor
    """Of |dS|."""
    even: Tensor
    """The delta with which the sum of dS before it is rounded is zero: rowsum(dP o P) / rowsum(P),
    of the dP and P that dS is made of; a sink is among P, with a dP of 0. NaN where P is 0."""


def products_of(found: Computed) -> Products:
    """dP and dS of a recipe, in the blocks of its backward pass. Of query heads that share a kv
    head all at once."""
    given, case = found.given, found.given.case
    sums = torch.zeros(6, *found.delta.shape, dtype=torch.float64, device=case.q.device)
    sums[5] = _of_sink(given)
    with torch.no_grad(), plain_arithmetic(case.q.device):
        r = rounder(case, found.made)
        dO, v = given.dO.double(), given.v.double()
        for rows, keys in bwd.blocks(given):
            P, dP, tanh = bwd.again(r, given, rows, keys)
            shown = _shown(case, rows, keys)
            exact = fwd.times(case, dO[:, :, rows], v[:, :, keys].mT)
            error = dP.double() - exact
            P = r("p_for_ds", P)
            weights, weighed = P.double(), P.double() * dP.double()
            dS = bwd.of_products(r, given, P, dP.sub_(found.delta[:, :, rows, None]), tanh).double()
            terms = (error.square_(), exact.square_(), dS, dS.abs(), weighed, weights)
            for total, term in zip(sums, terms, strict=True):
                total[:, :, rows] += torch.where(shown, term, 0.0).sum(dim=-1)
    dp_error, dp, ds, ds_size, weighed, weights = sums
    return Products(dp_error=dp_error, dp=dp, ds=ds, ds_size=ds_size, even=weighed / weights)


def _of_sink(given: Given) -> Tensor | float:
    """P of the sink, [B, H, q_len]; 0 where there is none."""
    if given.case.sinks is None:
        return 0.0
    logits = given.case.sinks.double()[None, :, None]
    P = (logits - fwd.finite(given.shift).double()).exp()
    return P if given.l is None else P / fwd.nonzero(given.l).double()


def _forward(r: Rounder, case: AttentionCase, made: Recipe) -> tuple[Kept, Tensor | None]:
    """A forward pass with what backward needs, and O before it was normalised."""
    products: list[Tensor | None] = []

    def forward(*arguments: object) -> fwd.State:
        state, product = fwd.forward_with_products(*arguments)  # type: ignore[arg-type]
        products.append(product)
        return state

    return bwd.kept(r, case, made, forward), products[0]


def _exact_product(case: AttentionCase, made: Recipe) -> Tensor | None:
    without = dataclasses.replace(made, sites={**made.sites, **dict.fromkeys(PRODUCT, EXACT)})
    return _forward(rounder(case, without), case, without)[1]


def _shown(case: AttentionCase, rows: slice, keys: slice) -> Tensor:
    """Which keys each row sees; broadcasts to [B, H, rows, keys]."""
    shown, added = visible(case, rows, keys), additive(case, rows, keys)
    everything = torch.ones((), dtype=torch.bool, device=case.q.device)
    open_ = everything if added is None else added > -math.inf
    return open_ if shown is None else open_ & shown
