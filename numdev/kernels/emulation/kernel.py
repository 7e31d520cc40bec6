"""Attention with a format at every rounding site: what a kernel's choices cost, made explicit.

`emulated` is the kernel: its options are a recipe (`numdev.kernels.emulation.recipe`,
docs/sites.md), computed by `forward` and `backward` beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.kernels import Output, kernel, no_claim
from numdev.kernels.emulation import backward
from numdev.kernels.emulation.forward import attend
from numdev.kernels.emulation.recipe import FIELDS, SITES, recipe
from numdev.kernels.emulation.rounding import Rounder

OPTIONS: Mapping[str, Any] = {"preset": "fa2", **dict.fromkeys((*FIELDS, *SITES))}
"""The kernel's options: a preset, fields of `Recipe` and sites. None: as the preset says."""


def gradients(case: AttentionCase, **options: Any) -> Output:
    """Both passes of a training step, under the options of `emulated` (those not given are its
    defaults): out, lse, dq, dk and dv, each in a dtype that holds its site's format.

    Raises UsageError for an option it does not have and for a senseless recipe, Refused where the
    case has no grad_out or its format cannot do what the recipe asks.
    """
    made = recipe(**options)
    O, L, *dQKV = backward.gradients(case, made)
    r = Rounder(made, case)
    sites = zip(("out", *backward.CASTS), (O, *dQKV), strict=True)
    out, dq, dk, dv = (r.stored(site, x, case.q.dtype) for site, x in sites)
    lse = r.stored("lse", L, torch.float32)
    return Output(out=out, lse=lse, dq=dq, dk=dk, dv=dv, ran=_forward(r), ran_backward=_backward(r))


def trained(
    case: AttentionCase, *, generator: torch.Generator | None = None, **options: Any
) -> Tensor:
    """The output inside a network that learns, under the options of `emulated`. What is random is
    drawn from the generator, on from call to call."""
    return backward.attended(case, recipe(**options), generator)


@kernel(
    "emulated",
    options=OPTIONS,
    any_format=True,
    any_rows=True,
    validate=lambda options: recipe(**options),
    claims=no_claim,
    backward=gradients,
    training=trained,
    draws=lambda options: recipe(**options).draws,
)
def emulated(case: AttentionCase, **options: Any) -> Output:
    """Attention with a format at every rounding site, as a preset or site by site.

    A site's value is `working`, `wide`, `exact` or a format's name. `out`
    comes in the case's dtype if that holds its site's format, and in that of `compute` where the
    site is exact, so `out="exact"` gives the value before the last cast; `lse` comes in float32 or
    wider. Rows that see no key are 0, with lse -inf or the sink. NaN and infinity propagate as the
    arithmetic has it; a format without infinity overflows to NaN. Raises UsageError for an unknown
    name, Refused where the case's format cannot do what the recipe asks.
    """
    made = recipe(**options)
    O, L = attend(case, made)
    r = Rounder(made, case)
    return Output(
        out=r.stored("out", O, case.q.dtype),
        lse=r.stored("lse", L, torch.float32),
        ran=_forward(r),
    )


def _forward(r: Rounder) -> str:
    """What ran, with everything that was left to the preset filled in."""
    made, (block_q, block_kv) = r.made, r.tile
    said = (
        f"{made.preset}: {made.algorithm}, tiles {block_q} x {block_kv} {made.kv_order}, "
        f"outer loop {made.loop_order}, l from {made.l_from} P, {made.compute}"
    )
    said += f", {made.splits} splits" if made.splits else ""
    if made.softmax == "stabilised":
        said += f", stabilised softmax (beta {made.beta}, ties within {made.tie_tolerance})"
    return said + (", guarded softmax" if made.softmax == "guarded" else "")


def _backward(r: Rounder) -> str:
    """The same of the backward pass."""
    made, (block_q, block_kv) = r.made, r.tile
    P = {"lse": "exp(S - L)", "m_and_l": "exp(S - m) / l"}[made.p_from]
    signs = ", its error with random signs" if made.delta_sign == "random" else ""
    parts = f", {made.q_splits} parts of the queries" if made.q_splits else ""
    return (
        f"{made.preset}: P from {P}, delta from {made.delta_from}{signs}, dS scaled "
        f"{made.ds_scale} its products, tiles {block_q} x {block_kv}, {made.compute}{parts}"
    )
