"""Recipes that draw random numbers, stochastic rounding and random signs of delta's error: alone,
and inside a network that learns, where the numbers go on from call to call. That they go on with a
run's state is in `test_train.py`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from recipes import drawn
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.kernels import find
from numdev.kernels.emulation import backward as bwd
from numdev.kernels.emulation.recipe import recipe
from numdev.kernels.training import attended

KERNEL = find("emulated")


def case(n: int = 64, kv_heads: int = 4) -> AttentionCase:
    """V and dO of one sign each: the error of delta has one too."""
    return drawn(n, heads=4, kv_heads=kv_heads, head_dim=16, one_sign=True, is_causal=True)


def learned(
    options: dict[str, Any], generator: torch.Generator | None, given: AttentionCase
) -> list[Tensor]:
    """The output and the gradients of q, k and v inside a network."""
    q, k, v = (x.clone().requires_grad_() for x in (given.q, given.k, given.v))
    inside = dataclasses.replace(given, q=q, k=k, v=v, grad_out=None)
    out = attended(KERNEL, inside, KERNEL.with_options(options), generator)
    assert given.grad_out is not None
    out.backward(given.grad_out.to(out.dtype))
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def deltas(**options: Any) -> tuple[Tensor, Tensor]:
    """delta of a recipe with dP in bf16, and that which makes each row of dS sum to zero, [heads *
    rows]. V is -2 at most keys and the number below at some, so O rounds to -2."""
    given = case(n=512)
    below = torch.rand(given.v.shape, generator=torch.Generator().manual_seed(1)) < 0.2
    given = dataclasses.replace(given, v=torch.where(below, -2.0 - 2.0**-6, -2.0).bfloat16())
    r = bwd.rounder(given, recipe(dp="working", **options))
    assert given.grad_out is not None
    read = bwd.kept(r).with_upstream(given.grad_out)
    blocks = [(slice(0, given.q_len), slice(0, given.kv_len))]
    other = bwd.rounder(given, recipe(dp="working", delta_from="dP*P"))
    even = bwd.delta_of(dataclasses.replace(read, r=other), blocks)
    return bwd.delta_of(read, blocks).flatten(), even.flatten()


def test_a_sham_error_is_as_large_and_has_no_sign() -> None:
    """Row by row the error of delta is as large as without it, to fp32's last bits; without it the
    mean is most of its rms, with it none but chance's."""
    own, even = deltas()
    sham, again = deltas(delta_sign="random")
    assert torch.equal(even, again)
    error, drawn = own - even, sham - even
    assert ((drawn.abs() - error.abs()).abs() <= 4 * 2.0**-24 * (own.abs() + error.abs())).all()
    rms = error.square().mean().sqrt()
    assert error.mean().abs() > 0.5 * rms
    assert drawn.mean().abs() < 4 * rms / len(error) ** 0.5
    assert 0.4 < ((error * drawn) < 0).float().mean() < 0.6


def test_nothing_is_drawn_where_nothing_is_random() -> None:
    """A generator stays as it is under any other recipe, and under kernels that know of none."""
    made = torch.Generator().manual_seed(3)
    before = made.get_state()
    learned({"compute": "float32"}, made, case())
    attended(find("baseline"), case(), {}, made)
    assert torch.equal(made.get_state(), before)
