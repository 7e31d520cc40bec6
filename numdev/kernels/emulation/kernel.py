"""Attention with a format at every rounding site: what a kernel's choices cost, made explicit.

`emulated` is the kernel: its options are a recipe (`numdev.kernels.emulation.recipe`,
docs/sites.md), and what it computes from it is `numdev.kernels.emulation.forward` and
`numdev.kernels.emulation.backward`. So a recipe is a hypothesis about a kernel: its results predict
the size of the kernel's errors, and where tiles and order are right too, the errors themselves.
With every site exact it is the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.kernels import Output, kernel, no_claim
from numdev.kernels.emulation import backward
from numdev.kernels.emulation import training as emulated_training
from numdev.kernels.emulation.forward import attend
from numdev.kernels.emulation.recipe import SITES, Recipe, recipe
from numdev.kernels.emulation.rounding import stored


def _recipe_of(options: Mapping[str, Any]) -> Recipe:
    """The recipe that the kernel's options describe; raises UsageError for a senseless one."""
    fields = {name: value for name, value in options.items() if name not in SITES}
    sites = {name: value for name, value in options.items() if name in SITES}
    return recipe(fields.pop("preset"), sites=sites, **fields)


def gradients(case: AttentionCase, **options: Any) -> Output:
    """Both passes of a training step, under the options of `emulated` (those not given are its
    defaults): out, lse, dq, dk and dv, each in a dtype that holds its site's format.

    Raises UsageError for an option it does not have and for a senseless recipe, Refused where the
    case has no grad_out or its format cannot do what the recipe asks.
    """
    made = _recipe_of({"preset": "fa2", **options})
    O, L, *dQKV = backward.gradients(case, made)
    sites = zip(("out", "dq_out", "dk_out", "dv_out"), (O, *dQKV), strict=True)
    out, dq, dk, dv = (stored(x, made.format_at(n, case.format), case.q.dtype) for n, x in sites)
    return Output(
        out=out,
        lse=stored(L, made.format_at("lse", case.format), torch.float32),
        dq=dq,
        dk=dk,
        dv=dv,
        ran=description(made, case),
        ran_backward=backward_description(made, case),
    )


def trained(
    case: AttentionCase, *, generator: torch.Generator | None = None, **options: Any
) -> Tensor:
    """The output inside a network that learns, under the options of `emulated`. What is random is
    drawn from the generator, on from call to call."""
    return emulated_training.attend(case, _recipe_of({"preset": "fa2", **options}), generator)


def draws(options: Mapping[str, Any]) -> bool:
    """Whether anything is random under the kernel's options."""
    return _recipe_of(options).draws


@kernel(
    "emulated",
    any_format=True,
    any_rows=True,
    validate=_recipe_of,
    claims=no_claim,
    backward=gradients,
    training=trained,
    draws=draws,
)
def emulated(
    case: AttentionCase,
    *,
    preset: str = "fa2",
    algorithm: str | None = None,
    block_q: int | None = None,
    block_kv: int | None = None,
    memory: int | None = None,
    loop_order: str | None = None,
    kv_order: str | None = None,
    splits: int | None = None,
    q_splits: int | None = None,
    l_from: str | None = None,
    scale_in: str | None = None,
    exponential: str | None = None,
    softmax: str | None = None,
    beta: float | None = None,
    tie_tolerance: float | None = None,
    p_from: str | None = None,
    delta_from: str | None = None,
    delta_sign: str | None = None,
    ds_scale: str | None = None,
    group_sum: str | None = None,
    rounding: str | None = None,
    seed: int | None = None,
    compute: str | None = None,
    q_scaled: str | None = None,
    scores: str | None = None,
    scaled: str | None = None,
    softcap: str | None = None,
    bias: str | None = None,
    max: str | None = None,
    exponent: str | None = None,
    exp: str | None = None,
    p: str | None = None,
    tile_sum: str | None = None,
    rescale: str | None = None,
    row_sum: str | None = None,
    pv: str | None = None,
    accumulator: str | None = None,
    normalised: str | None = None,
    state: str | None = None,
    merge: str | None = None,
    lse: str | None = None,
    out: str | None = None,
    s: str | None = None,
    lse_read: str | None = None,
    p_backward: str | None = None,
    p_for_dv: str | None = None,
    dv_product: str | None = None,
    dv: str | None = None,
    dp: str | None = None,
    delta_o: str | None = None,
    delta_product: str | None = None,
    delta: str | None = None,
    dp_minus_delta: str | None = None,
    p_for_ds: str | None = None,
    ds_softmax: str | None = None,
    ds_softcap: str | None = None,
    ds_scaled: str | None = None,
    ds: str | None = None,
    dq_product: str | None = None,
    dq: str | None = None,
    dq_partial: str | None = None,
    dk_product: str | None = None,
    dk: str | None = None,
    dk_partial: str | None = None,
    dv_partial: str | None = None,
    dq_out: str | None = None,
    dk_out: str | None = None,
    dv_out: str | None = None,
) -> Output:
    """Attention with a format at every rounding site, as a preset or site by site.

    None means: as the preset says. A site's value is `working`, `wide`, `exact` or a
    format's name. `out`
    comes in the case's dtype if that holds its site's format, and in that of `compute` where the
    site is exact, so `out="exact"` gives the value before the last cast; `lse` comes in float32 or
    wider. Rows that see no key are 0, with lse -inf or the sink. NaN and infinity propagate as the
    arithmetic has it; a format without infinity overflows to NaN. Raises UsageError for an unknown
    name, Refused where the case's format cannot do what the recipe asks.
    """
    given = locals()  # the arguments and nothing else: keep this the first line
    made = _recipe_of({name: value for name, value in given.items() if name != "case"})
    O, L = attend(case, made)
    return Output(
        out=stored(O, made.format_at("out", case.format), case.q.dtype),
        lse=stored(L, made.format_at("lse", case.format), torch.float32),
        ran=description(made, case),
    )


def description(made: Recipe, case: AttentionCase) -> str:
    """What ran, with everything that was left to the preset filled in."""
    block_q, block_kv = made.tile(case.q.shape[-1], case.kv_len)
    return (
        f"{made.preset}: {made.algorithm}, tiles {block_q} x {block_kv} {made.kv_order}, "
        f"outer loop {made.loop_order}, l from {made.l_from} P, {made.compute}"
        + (f", {made.splits} splits" if made.splits else "")
        + (
            f", stabilised softmax (beta {made.beta}, ties within {made.tie_tolerance})"
            if made.softmax == "stabilised"
            else ""
        )
        + (", guarded softmax" if made.softmax == "guarded" else "")
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
