"""Steps that are coarser than they should be are named by what they are, and sound
kernels by nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from loaded import load
from planted import CATALOGUE
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.formats import FORMATS
from numdev.kernels import Output
from numdev.kernels.output import differentiate
from numdev.kernels.reference import attend, gradients
from numdev.operations.attention.explain import imprecise_steps
from numdev.sources.upstream_gradients import with_drawn_gradient

rates = load("benchmarks/suspicion_rates.py")
SHAPE = rates.Shape(batch=2, heads=2, kv_heads=2, q_len=150, kv_len=150)
BFLOAT16 = {
    "p-in-e4m3": "P is rounded to float8_e4m3fn before P V",
    "p-in-e5m2": "P is rounded to float8_e5m2 before P V",
    "p-truncated": "P is truncated to bfloat16, not rounded",
    "p-in-4-bits": "P is rounded to 4 significant bits before P V",
    "row-sum-rounded": "the row sum is kept in bfloat16 over tiles of 64 keys",
    "accumulator-rounded": "O is summed in bfloat16 over tiles of 64 keys",
    "scores-rounded": "S is rounded to bfloat16",
    "ds-truncated": "dS is truncated to bfloat16, not rounded",
    "dq-accumulator-rounded": "dQ is summed in bfloat16 over tiles of 64 keys",
}
OF_BACKWARD = {"ds-truncated": ("dq", "dk"), "dq-accumulator-rounded": ("dq",)}


def step_of(name: str, fmt: str) -> tuple[AttentionCase, Output]:
    case = with_drawn_gradient(rates.make(SHAPE, "normal", fmt, 0), 0)
    return case, differentiate(CATALOGUE[name].kernel.attend, case)


def named(case: AttentionCase, step: Output, wrong: tuple[str, ...]) -> set[str]:
    """What is said of the heads of these tensors."""
    exact = gradients(case)
    terms = {"out": exact.term_scale, "dq": exact.dq_terms, "dk": exact.dk_terms}
    terms["dv"] = exact.dv_terms
    returned = {n: getattr(step, n) for n in terms}
    result = imprecise_steps.imprecision(case, returned, exact, terms, wrong)
    assert all(share >= 1 - imprecise_steps.EXPLAINS for _, share in result.values())
    return {loss.words for loss, _ in result.values()}


@pytest.mark.parametrize("name", BFLOAT16)
def test_a_coarse_step_is_named(name: str) -> None:
    """Of `planted`, which shares no code with what is tried."""
    case, step = step_of(name, "bfloat16")
    assert named(case, step, OF_BACKWARD.get(name, ("out",))) == {BFLOAT16[name]}


def test_in_float16_bfloat16_is_coarse() -> None:
    """P that is rounded to it, whatever the tiles are."""
    case, step = step_of("p-in-bfloat16", "float16")
    assert named(case, step, ("out",)) == {"P is rounded to bfloat16 before P V"}


def test_products_in_tf32() -> None:
    """Of inputs in float32."""
    case, step = step_of("products-in-tf32", "float32")
    assert named(case, step, ("out",)) == {"the products are computed in TF32"}


@pytest.mark.parametrize("fmt", ["bfloat16", "float16", "float32"])
def test_a_sound_kernel_is_nothing_coarse(fmt: str) -> None:
    """Though all is tried."""
    case, step = step_of("sound", fmt)
    assert named(case, step, ("out",)) == set()
    assert named(case, step, ("dq", "dk", "dv")) == set()


def test_backward_steps_know_the_slope_of_a_soft_cap() -> None:
    """Without a coarse step the gradients are those of autograd in fp64, with a cap that
    bends most scores and a mask added behind it. They err by a few roundings of fp32,
    2^-24 each, in sums of 150 terms."""
    drawn = with_drawn_gradient(rates.make(SHAPE, "normal", "float32", 0), 0)
    mask = torch.randn(150, 150, generator=torch.Generator().manual_seed(1)).tril()
    case = dataclasses.replace(drawn, softcap=1.0, mask=mask, is_causal=True)
    assert case.grad_out is not None
    leaves = q, k, v = tuple(
        x.double().requires_grad_() for x in (case.q, case.k, case.v)
    )
    S = torch.tanh(q @ k.mT * case.scale) + mask
    S = S.masked_fill(torch.ones(150, 150).triu(1).bool(), -torch.inf)
    expected = torch.autograd.grad(S.softmax(-1) @ v, leaves, case.grad_out.double())
    exact = attend(case)
    scores = imprecise_steps.all_scores(case).float()
    none = imprecise_steps.Loss("out", FORMATS["float32"], "")
    step = imprecise_steps.Backward(case, scores, exact.lse.float(), exact.out.float())
    for x, y in zip(step.step(none).values(), expected, strict=True):
        assert float((x - y).norm() / y.norm()) < 150 * 2**-24


def test_what_is_left_of_an_error() -> None:
    """0 where an attempt makes all of it, 1 where none, more where another; infinite
    without an error; what is not finite is left out."""
    exact = torch.tensor(
        [[[[1.0, 2.0]], [[1.0, 2.0]], [[1.0, 2.0]], [[1.0, 2.0]]]]
    ).double()
    x = exact + torch.tensor([[[[0.1, 0.0]], [[0.1, 0.0]], [[0.1, 0.0]], [[0.0, 0.0]]]])
    tried: Tensor = exact.clone()
    tried[:, 0] = x[:, 0]
    tried[:, 2, :, 0] -= 0.1
    tried[:, 2, :, 1] = torch.nan
    left = imprecise_steps.residuals(x, exact, exact, tried)
    assert left.tolist() == pytest.approx([0.0, 1.0, 2.0, torch.inf])


def test_the_formats_that_are_tried_are_coarser_than_the_case() -> None:
    """No finer one, nor the working format where P has it anyway."""
    case = rates.make(SHAPE, "normal", "bfloat16", 0)
    of_p = {
        x.format.name
        for x in imprecise_steps.losses(case)
        if x.step == "p" and not x.toward_zero
    }
    assert {"float8_e4m3fn", "float8_e5m2"} <= of_p
    assert not of_p & {"bfloat16", "float16"}
    assert all(
        FORMATS["bfloat16"].precision >= x.format.precision
        for x in imprecise_steps.losses(case)
    )
