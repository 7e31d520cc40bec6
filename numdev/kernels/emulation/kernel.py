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
from numdev.kernels.emulation.recipe import SITES, Recipe, recipe
from numdev.kernels.emulation.rounding import stored

FIELDS = (
    "algorithm", "block_q", "block_kv", "memory", "loop_order", "kv_order", "splits", "q_splits",
    "l_from", "scale_in", "exponential", "softmax", "beta", "tie_tolerance", "p_from", "delta_from",
    "delta_sign", "ds_scale", "group_sum", "rounding", "seed", "compute",
)  # fmt: skip
OPTIONS: Mapping[str, Any] = {"preset": "fa2", **dict.fromkeys((*FIELDS, *SITES))}
"""The kernel's options: a preset, fields of `Recipe` and sites. None: as the preset says."""


def _recipe_of(options: Mapping[str, Any]) -> Recipe:
    """The recipe that the kernel's options describe; raises UsageError for a senseless one."""
    fields = {name: value for name, value in options.items() if name not in SITES}
    sites = {name: value for name, value in options.items() if name in SITES}
    return recipe(fields.pop("preset", "fa2"), sites=sites, **fields)


def gradients(case: AttentionCase, **options: Any) -> Output:
    """Both passes of a training step, under the options of `emulated` (those not given are its
    defaults): out, lse, dq, dk and dv, each in a dtype that holds its site's format.

    Raises UsageError for an option it does not have and for a senseless recipe, Refused where the
    case has no grad_out or its format cannot do what the recipe asks.
    """
    made = _recipe_of(options)
    O, L, *dQKV = backward.gradients(case, made)
    sites = zip(("out", "dq_out", "dk_out", "dv_out"), (O, *dQKV), strict=True)
    out, dq, dk, dv = (stored(x, made.format_at(n, case.format), case.q.dtype) for n, x in sites)
    lse = stored(L, made.format_at("lse", case.format), torch.float32)
    forward, back = (f(made, case) for f in (description, backward_description))
    return Output(out=out, lse=lse, dq=dq, dk=dk, dv=dv, ran=forward, ran_backward=back)


def trained(
    case: AttentionCase, *, generator: torch.Generator | None = None, **options: Any
) -> Tensor:
    """The output inside a network that learns, under the options of `emulated`. What is random is
    drawn from the generator, on from call to call."""
    return backward.attended(case, _recipe_of(options), generator)


@kernel(
    "emulated",
    options=OPTIONS,
    any_format=True,
    any_rows=True,
    validate=_recipe_of,
    claims=no_claim,
    backward=gradients,
    training=trained,
    draws=lambda options: _recipe_of(options).draws,
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
    made = _recipe_of(options)
    O, L = attend(case, made)
    return Output(
        out=stored(O, made.format_at("out", case.format), case.q.dtype),
        lse=stored(L, made.format_at("lse", case.format), torch.float32),
        ran=description(made, case),
    )


def description(made: Recipe, case: AttentionCase) -> str:
    """What ran, with everything that was left to the preset filled in."""
    block_q, block_kv = made.tile(case.q.shape[-1], case.kv_len)
    more = [f", {made.splits} splits"] if made.splits else []
    if made.softmax == "stabilised":
        more += [f", stabilised softmax (beta {made.beta}, ties within {made.tie_tolerance})"]
    if made.softmax == "guarded":
        more += [", guarded softmax"]
    return (
        f"{made.preset}: {made.algorithm}, tiles {block_q} x {block_kv} {made.kv_order}, "
        f"outer loop {made.loop_order}, l from {made.l_from} P, {made.compute}{''.join(more)}"
    )


def backward_description(made: Recipe, case: AttentionCase) -> str:
    """The same of the backward pass."""
    block_q, block_kv = made.tile(case.q.shape[-1], case.kv_len)
    kept = {"lse": "exp(S - L)", "m_and_l": "exp(S - m) / l"}[made.p_from]
    return (
        f"{made.preset}: P from {kept}, delta from {made.delta_from}"
        f"{', its error with random signs' if made.delta_sign == 'random' else ''}, dS scaled "
        f"{made.ds_scale} its products, tiles {block_q} x {block_kv}, {made.compute}"
        + (f", {made.q_splits} parts of the queries" if made.q_splits else "")
    )
