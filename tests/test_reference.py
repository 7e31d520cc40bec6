"""The reference and its gradients: 90-digit arithmetic, known answers, what is hidden,
and NaN.

Bounds come from `oracles`, where they are derived; that is held to account in
`test_oracle.py`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import gfloat
import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import (
    FEATURES,
    GRADIENTS,
    U64,
    assert_within,
    make_case,
    poisoned,
    replaced,
    step,
)
from recipes import autograd
from test_formats import GFLOAT

from numdev.cases import AttentionCase
from numdev.errors import UsageError
from numdev.formats import FORMATS
from numdev.kernels import find
from numdev.kernels.reference import attend, gradients
from numdev.kernels.reference.blocked import BLOCK_BYTES, Gradients

nan, inf = math.nan, math.inf
ALL = (0, slice(None))
LOWER = torch.ones(4, 5, dtype=torch.bool).tril()


def assert_is_exact(case: AttentionCase, answer: Gradients | None = None) -> None:
    """Every part of a training step is within its bound; that of a forward pass is the
    same."""
    result, exact, g = (
        answer or gradients(case),
        oracles.attention(case),
        oracles.gradients(case),
    )
    out_bound, lse_bound = oracles.error_bounds(case, exact)
    assert_within(result.out, exact.out, out_bound)
    assert_within(result.term_scale, exact.term_scale, out_bound)
    assert_within(result.lse, exact.lse, lse_bound)
    assert result.empty.tolist() == exact.empty.tolist()
    for name in GRADIENTS:
        assert_within(getattr(result, name), getattr(g, name), g.bounds[name])
        assert_within(getattr(result, f"{name}_terms"), g.terms[name], g.bounds[name])
    tensors = [x for x in vars(result).values() if isinstance(x, torch.Tensor)]
    assert {x.dtype for x in tensors} == {torch.float64, torch.bool}
    forward = attend(case)
    for name in ("out", "term_scale", "lse", "empty"):
        assert torch.equal(getattr(forward, name), getattr(result, name)), name


def assert_same(a: Gradients, b: Gradients, *names: str) -> None:
    for name in names or (
        *GRADIENTS,
        *(f"{n}_terms" for n in GRADIENTS),
        "delta",
        "unseen",
    ):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


FAR: dict[str, dict[str, Any]] = {
    "soft cap, saturated": {"softcap": 0.25, "logits": 16.0},
    "sinks, far": {"sinks": torch.tensor([2000.0, -2000.0], dtype=torch.float64)},
    "sinks, farther": {"sinks": torch.tensor([1e30, -1e30], dtype=torch.float64)},
}
"""Where 1 - tanh^2 would round the slope away; and where a sink takes all or nothing."""


@pytest.mark.parametrize("name", [*FEATURES, *FAR])
def test_equals_the_oracle(name: str) -> None:
    """Every feature, alone and together with others."""
    assert_is_exact(step(**{**FEATURES, **FAR}[name]))


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
masks = st.sampled_from([None, "bool", "float", "holes"])
axes = st.sampled_from(
    ["k", "qk", "1qk", "hqk", "11k", "b11k", "b1qk", "1h1k", "bhq1", "bhqk"]
)
most = {"batch": 2, "kv_heads": 2, "q_len": 5, "kv_len": 6, "head_dim": 4, "v_dim": 3}
SIZES: dict[str, Any] = {
    **{name: st.integers(1, size) for name, size in most.items()},
    "seed": st.integers(0, 99),
    "logits": st.sampled_from([0.25, 1.0, 8.0, 100.0]),
    "dtype": st.sampled_from(DTYPES),
}
FIELDS: dict[str, Any] = {
    "is_causal": st.booleans(),
    "causal_offset": st.integers(-4, 5),
    "window": st.tuples(st.none() | st.integers(0, 4), st.none() | st.integers(0, 4)),
    "softcap": st.sampled_from([0.5, 5.0, 50.0]),
    "sinks": st.booleans(),
    "scale": st.sampled_from([0.1, 1.0, -2.0]),
}


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(
    st.fixed_dictionaries(SIZES, optional=FIELDS),
    st.integers(1, 3),
    st.tuples(masks, axes),
)
def test_equals_the_oracle_in_any_combination(fields: Any, group: int, mask: Any) -> None:
    """Features in combinations nobody thought of, in every input format."""
    kind = mask if mask[0] else None
    assert_is_exact(step(**fields, heads=fields["kv_heads"] * group, mask=kind))


@pytest.mark.parametrize("spoil", [1 + 1e-12, 0.0])
@pytest.mark.parametrize("name", ["out", "lse", *GRADIENTS])
def test_the_comparison_rejects(name: str, spoil: float) -> None:
    """A relative error of 1e-12 in any one tensor is beyond its bound."""
    case = step()
    answer = gradients(case)
    wrong = replaced(answer, **{name: getattr(answer, name) * spoil})  # type: ignore[type-var]
    with pytest.raises(AssertionError):
        assert_is_exact(case, wrong)


@pytest.mark.parametrize("fields", [
    {}, {"is_causal": True, "causal_offset": 16, "kv_heads": 2},
    {"is_causal": True, "causal_offset": -9}, {"window": (7, None), "softcap": 2.0, "sinks": True},
    {"mask": ("bool", "bhqk"), "kv_heads": 1, "v_dim": 5},
])  # fmt: skip
def test_equals_autograd(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger cases, in several blocks, against autograd of dense attention in fp64. Both
    are off by less than 500 u of the sums of absolute terms (some 50 keys and 16
    features), cancellation inside dP included, which makes these a few times larger than
    the term scales."""
    monkeypatch.setitem(BLOCK_BYTES, "cpu", 1 << 16)
    case = step(
        **{"batch": 2, "heads": 4, "q_len": 37, "kv_len": 53, "head_dim": 16, **fields}
    )
    result, expected = gradients(case), autograd(case)
    for name in GRADIENTS:
        g = expected[name]
        allowed = 4 * 500 * U64 * getattr(result, f"{name}_terms").max()
        assert (getattr(result, name) - g).abs().max() <= allowed, name
        assert g.abs().max() > 1e6 * allowed


# --- what is hidden -------------------------------------------------------------------

HIDDEN: dict[str, dict[str, Any]] = {
    "bool mask": {
        "mask": torch.tensor([[True] * 5, [False] * 5, [True] * 5, [False] * 5])
    },
    "additive mask": {"mask": torch.tensor([[0.0] * 5, [-inf] * 5] * 2).double()},
    "window": {"window": (None, -1), "mask": torch.tensor([[True] * 5, [False] * 5] * 2)},
    "two halves": {
        "is_causal": True,
        "mask": torch.tensor([[True] * 5, [False, False, True, True, True]] * 2),
    },
}


@pytest.mark.parametrize("rows", [None, 1, 3])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", HIDDEN)
def test_rows_that_see_nothing(
    name: str, sinks: bool, rows: int | None, monkeypatch: Any
) -> None:
    """They are 0 with lse -inf (or their sink), marked empty, and leave the others alone;
    their dq and delta are 0, and their dO goes nowhere, whatever they hold."""
    if rows is not None:
        monkeypatch.setitem(BLOCK_BYTES, "cpu", rows * 8 * 2 * 5)
    case = step(sinks=sinks, **HIDDEN[name])
    answer = gradients(case)
    assert_is_exact(case, answer)
    empty = answer.empty
    assert empty.any()
    for x in (answer.out, answer.term_scale, answer.dq, answer.delta):
        assert (x[empty] == 0).all()
    sink = (
        -inf if case.sinks is None else case.sinks[None, :, None].expand(1, 2, 4)[empty]
    )
    assert (answer.lse[empty] == sink).all()
    if name == "additive mask":  # -inf + NaN is NaN: that is how the arithmetic has it
        return
    for spoilt, value in (("q", nan), ("q", inf), ("grad_out", nan), ("grad_out", inf)):
        assert_same(gradients(poisoned(case, spoilt, empty, value)), answer)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_lowest_number_means_hidden(dtype: torch.dtype) -> None:
    """In an additive mask finfo.min hides a key as -inf does, and a row of nothing else
    is empty: in float16 -65504 would swallow no score, and the row's value would depend
    on the format."""
    lowest = torch.zeros(4, 5, dtype=dtype)
    lowest[:, 3:] = torch.finfo(dtype).min
    lowest[2] = torch.finfo(dtype).min
    answer = attend(make_case(dtype=dtype, mask=lowest, is_causal=True))
    hidden = lowest.masked_fill(lowest < 0, -torch.inf)
    same = attend(make_case(dtype=dtype, mask=hidden, is_causal=True))
    assert torch.equal(answer.out, same.out)
    assert answer.empty[:, :, 2].all()
    assert not answer.empty[:, :, [0, 1, 3]].any()


@pytest.mark.parametrize("budget", [1, 1 << 26])
@pytest.mark.parametrize("value", [nan, inf, -inf, 1e300])
@pytest.mark.parametrize("name", ["k", "v"])
def test_unseen_keys_have_no_part(
    name: str, value: float, budget: int, monkeypatch: Any
) -> None:
    """Whatever a hidden key holds: its own gradients are exactly 0, it is marked, and all
    others are what they were. One that a single head of the group sees is not marked."""
    monkeypatch.setitem(BLOCK_BYTES, "cpu", budget)
    mask = torch.ones(1, 4, 4, 5, dtype=torch.bool)
    mask[..., 3:] = False
    mask[:, 0, 2, 3] = True
    case = step(heads=4, kv_heads=2, mask=mask)
    result = gradients(poisoned(case, name, (*ALL, 4), value))
    assert_same(result, gradients(case))
    assert result.unseen.tolist() == [[[False] * 4 + [True], [False] * 3 + [True] * 2]]
    assert not any(x[result.unseen].any() for x in (result.dk, result.dv))
    assert result.dv[~result.unseen].all()


def test_a_key_of_probability_zero_has_no_part() -> None:
    """A seen key whose probability underflows neither gives a gradient nor gets one, even
    if its value is NaN, and it is not called unseen."""
    bias = torch.zeros(4, 5, dtype=torch.float64)
    bias[:, 1] = -2000.0
    case = poisoned(step(mask=bias), "k", (*ALL, 1), 0.0)
    result = gradients(poisoned(case, "v", (*ALL, 1), nan))
    same = gradients(dataclasses.replace(case, mask=bias == 0))
    assert_same(result, same, *GRADIENTS, "empty")
    assert not result.unseen.any()
    assert same.unseen[:, :, 1].all()


@pytest.mark.parametrize("budget", [1, 1 << 26])
@pytest.mark.parametrize("kind", ["causal", "bool mask", "additive mask"])
@pytest.mark.parametrize("name", ["k", "v"])
def test_nan_reaches_those_who_see_it(
    name: str, kind: str, budget: int, monkeypatch: Any
) -> None:
    """A NaN in one key (or value) spoils the rows that see the key; hidden, it does
    nothing. Which block a row was in does not show."""
    monkeypatch.setitem(BLOCK_BYTES, "cpu", budget)
    fields: dict[str, Any] = {
        "causal": {"is_causal": True},
        "bool mask": {"mask": LOWER},
        "additive mask": {"mask": torch.zeros(4, 5).masked_fill(~LOWER, -inf).double()},
    }[kind]
    out = attend(poisoned(make_case(**fields), name, (0, 1, 2, 0), nan)).out[0]
    # An additive mask adds, and NaN - inf is NaN in k.
    first = 0 if (name, kind) == ("k", "additive mask") else 2
    assert out.isnan().any(dim=-1).nonzero().tolist() == [[1, i] for i in range(first, 4)]


def test_a_row_of_nan_cannot_reach_what_is_hidden_from_it() -> None:
    """exp(-inf - NaN) is NaN, and still the keys a NaN query does not see keep their
    gradients."""
    case = step(is_causal=True)
    spoilt, sound = gradients(poisoned(case, "q", (0, 0, 1, 0), nan)), gradients(case)
    assert spoilt.dv[0, 0].isnan().any(dim=-1).tolist() == [
        True,
        True,
        False,
        False,
        False,
    ]
    for name in ("dk", "dv"):
        a, b = getattr(spoilt, name)[0, 0, 2:], getattr(sound, name)[0, 0, 2:]
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_floor_is_the_reference_rounded_once(name: str) -> None:
    """The floor's values are the reference's, rounded by other code, and so are its
    gradients."""
    case = make_case(heads=2, q_len=32, kv_len=32, dtype=torch.float32, logits=2.0)
    case = oracles.with_grad(case.rounded_to(FORMATS[name]))
    floor, result = find("floor").gradients(case), gradients(case)
    for x in ("out", *GRADIENTS):
        expected = gfloat.round_ndarray(GFLOAT[name], getattr(result, x).numpy())
        assert np.array_equal(getattr(floor, x).double().numpy(), expected), x
        assert getattr(floor, x).dtype == torch.float64


def test_the_floor_rounds_each_gradient_once() -> None:
    """One key, and rows of dO that add up to 1 + 2^-8 + 2^-40: through fp32 that would be
    1.0."""
    case = replaced(step(q_len=3, kv_len=1, dtype=torch.bfloat16), q=0.0)
    parts = (
        torch.tensor([1.0, 2.0**-8, 2.0**-40]).bfloat16()[:, None].expand(case.q.shape)
    )
    case = dataclasses.replace(case, grad_out=parts)
    assert (gradients(case).dv == 1 + 2.0**-8 + 2.0**-40).all()
    assert (find("floor").gradients(case).dv == 1.0078125).all()


def test_no_upstream_no_gradient() -> None:
    """A case without grad_out is asked for it, by name."""
    with pytest.raises(
        UsageError, match="attention case 'test': gradients need a grad_out"
    ):
        gradients(make_case())
    with pytest.raises(UsageError, match="need a grad_out"):
        find("reference").gradients(make_case())
