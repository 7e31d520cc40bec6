"""Gradients through a kernel: differentiated, computed by itself, or refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from gradient_oracle import NAMES, step
from gradient_oracle import gradients as exact_gradients
from oracles import FEATURES, U32, U64, assert_within
from torch import Tensor

from numdev import kernels
from numdev.cases import AttentionCase
from numdev.errors import MeasurementError
from numdev.kernels import Kernel, Output, find
from numdev.kernels.reference import gradients


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    find("baseline")
    monkeypatch.setattr(kernels, "_registry", dict(kernels._registry))


def plain(case: AttentionCase, **_: Any) -> Tensor:
    """Attention without any feature, that autograd can follow."""
    return torch.softmax(case.q @ case.k.mT * case.scale, dim=-1) @ case.v


def whole(case: AttentionCase, **changes: Any) -> Output:
    """A backward of its own, right but for the changes."""
    g = gradients(case)
    return dataclasses.replace(Output(out=g.out, dq=g.dq, dk=g.dk, dv=g.dv), **changes)


# --- by autograd ---------------------------------------------------------------------------------


def test_an_input_without_influence_has_gradient_zero() -> None:
    """The mean of V depends on V alone."""
    case = step()
    mean = Kernel(name="x", function=lambda c: c.v.mean(2, keepdim=True).expand_as(c.q).clone())
    found = mean.gradients(case)
    assert torch.equal(found.dq, torch.zeros_like(case.q))
    assert torch.equal(found.dk, torch.zeros_like(case.k))
    expected = (case.grad_out.sum(dim=2, keepdim=True) / 5).expand_as(case.v)
    torch.testing.assert_close(found.dv, expected, rtol=4 * U64, atol=4 * U64)


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16])
def test_the_upstream_gradient_comes_in_the_outputs_dtype(narrow: torch.dtype) -> None:
    """Where the output is narrower than the case, dO is rounded to it, once."""
    case = step(kv_len=4)
    value = 1 + 2.0**-8 + 2.0**-40
    case = dataclasses.replace(case, grad_out=torch.full_like(case.grad_out, value))
    found = Kernel(name="x", function=lambda c: c.v.to(narrow)).gradients(case)
    expected = 1.0078125 if narrow == torch.bfloat16 else 1 + 2.0**-8
    assert (found.dv == expected).all()
    assert found.dv.dtype == torch.float64
    wide = Kernel(name="x", function=lambda c: c.v.double()).gradients(step(dtype=narrow, kv_len=4))
    assert wide.dv.dtype == narrow


# --- by a function of its own, or not at all -----------------------------------------------------


SHORT = torch.zeros(1, 2, 4, 4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dk": None}, "its backward returned no dk"),
        ({"dq": None, "dv": None}, "its backward returned no dq and no dv"),
        ({"dq": SHORT}, r"it returned shape \[1, 2, 4, 4\] as dq; expected .*\[1, 4, 4, 4\]"),
        ({"dk": SHORT}, r"it returned shape \[1, 2, 4, 4\] as dk; expected .*\[1, 2, 5, 4\]"),
        ({"dv": SHORT}, r"it returned shape \[1, 2, 4, 4\] as dv; expected .*\[1, 2, 5, 7\]"),
        ({"dv": 3}, "it returned int as dv"),
        ({"out": SHORT}, "as out"),
    ],
)
def test_gradients_that_are_none_of_the_case(changes: dict[str, Any], says: str) -> None:
    """Missing or misshapen gradients are an error with what they were."""
    case = step(heads=4, kv_heads=2, v_dim=7)
    wrong = Kernel(name="x", function=plain, backward=lambda case: whole(case, **changes))
    with pytest.raises(MeasurementError, match=says):
        wrong.gradients(case)


# --- the baseline --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_baseline_equals_the_oracle(name: str, dtype: torch.dtype) -> None:
    """Autograd through the baseline gives every feature's gradients within the bounds of the
    format, doubled since its softmax differentiates by P (dP - rowsum(P dP)), whose sum has more
    terms. An additive -inf over a whole row is NaN forward and backward, as in model code."""
    case = step(dtype=dtype, **FEATURES[name])
    exact = exact_gradients(case, *(() if dtype == torch.float64 else (U32,)))
    found = find("baseline").gradients(case)
    if found.out.isnan().any():
        assert gradients(case).empty.any()
        assert found.dk.isnan().any()
        return
    for x in NAMES:
        assert_within(getattr(found, x), getattr(exact, x), 2 * exact.bounds[x])


def test_the_baselines_empty_rows_give_no_nan() -> None:
    """The softmax of a row that sees nothing is NaN, and neither it nor its gradient gets out."""
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[1] = False
    case = step(mask=mask, dtype=torch.bfloat16)
    found = find("baseline").gradients(case)
    assert all(getattr(found, x).isfinite().all() for x in NAMES)
    assert (found.dq[:, :, 1] == 0).all()
