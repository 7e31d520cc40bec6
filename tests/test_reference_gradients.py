"""The reference's gradients: 90 digits, exact finite differences, autograd, and known answers.

Bounds come from `gradient_oracle`, where they are derived. That oracle uses the same calculus, so
it is itself held to differences of `oracles.attention`, which knows of no derivative.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from gradient_oracle import NAMES, step
from gradient_oracle import gradients as exact_gradients
from oracles import DIGITS, FEATURES, U64, assert_within, attention
from recipes import autograd

from numdev.cases import AttentionCase
from numdev.errors import UsageError
from numdev.formats import FORMATS, round_to
from numdev.kernels import find
from numdev.kernels.reference import gradients
from numdev.kernels.reference.blocked import BLOCK_BYTES
from numdev.kernels.reference.results import Gradients

nan, inf = math.nan, math.inf
SATURATED = {"soft cap, saturated": {"softcap": 0.25, "logits": 16.0}}
LOWER = torch.ones(4, 5, dtype=torch.bool).tril()


def assert_is_exact(case: AttentionCase, answer: Gradients | None = None) -> None:
    """Gradients and their term scales are within the bounds of the oracle's."""
    answer, exact = answer or gradients(case), exact_gradients(case)
    for name in NAMES:
        assert_within(getattr(answer, name), getattr(exact, name), exact.bounds[name])
        assert_within(getattr(answer, f"{name}_terms"), exact.terms[name], exact.bounds[name])


def filled(case: AttentionCase, **tensors: float) -> AttentionCase:
    new: dict[str, Any] = {k: torch.full_like(getattr(case, k), x) for k, x in tensors.items()}
    return dataclasses.replace(case, **new)


def poisoned(case: AttentionCase, name: str, place: Any, value: float) -> AttentionCase:
    x = getattr(case, name).clone()
    x[place] = value
    changed: dict[str, Any] = {name: x}
    return dataclasses.replace(case, **changed)


def assert_same(a: Gradients, b: Gradients, *names: str) -> None:
    for name in names or (*NAMES, *(f"{n}_terms" for n in NAMES), "delta", "unseen", "empty"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


# --- the right gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("feature", [FEATURES["everything"], {"softcap": 0.5, "kv_heads": 1}])
def test_the_oracle_is_the_slope_of_the_output(feature: dict[str, Any]) -> None:
    """Central differences of the 90-digit output, over steps of 2^-24, are the oracle's gradients.
    They are off by h^2 / 6 = 6e-16 times third derivatives, which stay below 1e3 here."""
    small = {"batch": 1, "heads": 2, "q_len": 2, "kv_len": 3, "head_dim": 2, "v_dim": 2}
    case = step(**{**feature, "kv_heads": 1, **small, "dtype": torch.bfloat16})
    widened = {n: getattr(case, n).double() for n in ("q", "k", "v", "grad_out")}
    case = dataclasses.replace(case, **widened)
    exact, h = exact_gradients(case), 2.0**-24
    dO = case.grad_out.numpy().astype(object)
    for name in ("q", "k", "v"):
        for at in np.ndindex(*getattr(case, name).shape):
            there = [
                attention(poisoned(case, name, at, getattr(case, name)[at].item() + x)).out
                for x in (h, -h)
            ]
            with mpmath.workdps(DIGITS):
                slope = (dO * (there[0] - there[1])).sum() / (2 * h)
                assert abs(slope - getattr(exact, f"d{name}")[at]) < 1e-12


@pytest.mark.parametrize("name", [*FEATURES, *SATURATED])
def test_equals_the_oracle(name: str) -> None:
    """Every feature, within the bound of fp64; also where a soft cap leaves almost no slope, which
    1 - tanh^2 would round away."""
    assert_is_exact(step(**{**FEATURES, **SATURATED}[name]))


@pytest.mark.parametrize("spoil", [1 + 1e-12, 0.0])
@pytest.mark.parametrize("name", NAMES)
def test_the_comparison_rejects(name: str, spoil: float) -> None:
    """A relative error of 1e-12 in any one gradient is beyond its bound."""
    case = step()
    answer = gradients(case)
    changed: dict[str, Any] = {name: getattr(answer, name) * spoil}
    with pytest.raises(AssertionError):
        assert_is_exact(case, dataclasses.replace(answer, **changed))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"is_causal": True, "causal_offset": 16, "kv_heads": 2},
        {"is_causal": True, "causal_offset": -9},
        {"window": (7, None), "softcap": 2.0, "sinks": True},
        {"mask": ("bool", "bhqk"), "kv_heads": 1, "v_dim": 5},
    ],
)
def test_equals_autograd(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger cases, in several blocks, against autograd of dense attention in fp64. Both are off by
    less than 500 u of the sums of absolute terms (some 50 keys and 16 features), cancellation
    inside dP included, which makes these a few times larger than the term scales."""
    monkeypatch.setitem(BLOCK_BYTES, "cpu", 1 << 16)
    case = step(**{"batch": 2, "heads": 4, "q_len": 37, "kv_len": 53, "head_dim": 16, **fields})
    found, expected = gradients(case), autograd(case)
    for name in NAMES:
        g = expected[name]
        allowed = 4 * 500 * U64 * getattr(found, f"{name}_terms").max()
        assert (getattr(found, name) - g).abs().max() <= allowed, name
        assert g.abs().max() > 1e6 * allowed


# --- what is hidden ------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 1 << 26])
@pytest.mark.parametrize("value", [nan, inf, -inf, 1e300])
@pytest.mark.parametrize("name", ["k", "v"])
def test_keys_nobody_sees_have_no_part(
    name: str, value: float, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a hidden key holds: its own gradients are exactly 0, it is marked, and all others
    are what they were. One that a single head of the group sees is not marked."""
    monkeypatch.setitem(BLOCK_BYTES, "cpu", budget)
    mask = torch.ones(1, 4, 4, 5, dtype=torch.bool)
    mask[..., 3:] = False
    mask[:, 0, 2, 3] = True
    case = step(heads=4, kv_heads=2, mask=mask)
    found = gradients(poisoned(case, name, (0, slice(None), 4), value))
    assert_same(found, gradients(case))
    assert found.unseen.tolist() == [[[False] * 4 + [True], [False] * 3 + [True] * 2]]
    assert (found.dk[found.unseen] == 0).all()
    assert (found.dv[found.unseen] == 0).all()
    assert (found.dv[~found.unseen] != 0).all()


@pytest.mark.parametrize("value", [nan, inf])
@pytest.mark.parametrize("name", ["q", "grad_out"])
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing_add_nothing(name: str, value: float, sinks: bool) -> None:
    """An empty row's dq is 0 and its dO goes nowhere, whatever either holds."""
    mask = LOWER.clone()
    mask[2] = False
    case = step(mask=mask, sinks=sinks)
    found = gradients(poisoned(case, name, (0, slice(None), 2), value))
    assert_same(found, gradients(case))
    assert found.empty[:, :, 2].all()
    assert (found.dq[:, :, 2] == 0).all()
    assert (found.delta[:, :, 2] == 0).all()
    assert_is_exact(case)


def test_a_key_of_probability_zero_has_no_part() -> None:
    """A seen key whose probability underflows neither gives a gradient nor gets one, even if its
    value is NaN, and it is not called unseen."""
    case = poisoned(step(), "k", (0, slice(None), 1), 0.0)
    bias = torch.zeros(4, 5, dtype=torch.float64)
    bias[:, 1] = -2000.0
    found = gradients(poisoned(dataclasses.replace(case, mask=bias), "v", (0, slice(None), 1), nan))
    same = gradients(dataclasses.replace(case, mask=bias == 0))
    assert_same(found, same, "dq", "dk", "dv", "empty")
    assert not found.unseen.any()
    assert same.unseen[:, :, 1].all()


# --- NaN and infinity that are seen --------------------------------------------------------------


def test_a_row_of_nan_cannot_reach_what_is_hidden_from_it() -> None:
    """exp(-inf - NaN) is NaN, and still the keys a NaN query does not see keep their gradients."""
    case = step(is_causal=True)
    spoilt, sound = gradients(poisoned(case, "q", (0, 0, 1, 0), nan)), gradients(case)
    assert spoilt.dv[0, 0].isnan().any(dim=-1).tolist() == [True, True, False, False, False]
    for name in ("dk", "dv"):
        here, there = getattr(spoilt, name)[0, 0, 2:], getattr(sound, name)[0, 0, 2:]
        assert torch.equal(here, there), name


# --- as kernels ----------------------------------------------------------------------------------


def test_the_floor_rounds_each_gradient_once() -> None:
    """One key, and rows of dO that add up to 1 + 2^-8 + 2^-40: through fp32 that would be 1.0."""
    case = filled(step(q_len=3, kv_len=1, dtype=torch.bfloat16), q=0.0)
    parts = torch.tensor([1.0, 2.0**-8, 2.0**-40]).bfloat16()[:, None].expand(case.q.shape)
    case = dataclasses.replace(case, grad_out=parts)
    assert (gradients(case).dv == 1 + 2.0**-8 + 2.0**-40).all()
    assert (find("floor").gradients(case).dv == 1.0078125).all()
    case = step(**FEATURES["everything"], dtype=torch.bfloat16)
    floor, found = find("floor").gradients(case), gradients(case)
    for name in ("out", *NAMES):
        rounded = round_to(getattr(found, name), FORMATS["bfloat16"])
        assert torch.equal(getattr(floor, name), rounded), name


def test_no_upstream_no_gradient() -> None:
    """A case without grad_out is asked for it, by name."""
    case = dataclasses.replace(step(), grad_out=None)
    with pytest.raises(UsageError, match="attention case 'test' has no grad_out"):
        gradients(case)
    with pytest.raises(UsageError, match="no grad_out"):
        find("reference").gradients(case)
