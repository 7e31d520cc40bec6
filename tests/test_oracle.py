"""Every kernel that runs on a CPU is attention: each feature, held to 90 digits.

Bounds come from `oracles`, where they are derived. The oracle and the comparison are
tested first: the one by hand and by differences, the other by what it must reject.

Merging shards costs a few roundings more than attention itself. In one merge L is a sum
of two, a weight is the logistic function of a difference of two L, and O a difference, a
product and a difference: each L adds at most its own error to the weight, and everything
else less than 12 u of what is merged. With n shards in unit roundoff u that is (12 u + 2
e) n max|V|, for an error e of L."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import mpmath
import numpy as np
import oracles
import pytest
import torch
from oracles import (
    FEATURES,
    U32,
    U64,
    assert_within,
    attention,
    gradients,
    make_case,
    step,
)

from numdev.cases import AttentionCase
from numdev.errors import Refused
from numdev.kernels import Kernel, find
from numdev.kernels.plain_functions import adapt

nan, inf = math.nan, math.inf


def test_oracle_by_hand() -> None:
    """Two keys with scores log 3 and 0 get weights 3/4 and 1/4; a sink of log 4 halves
    them."""
    case = make_case(heads=1, q_len=1, kv_len=2, head_dim=1, scale=1.0)
    log3 = torch.tensor([math.log(3.0), 0.0], dtype=torch.float64).view(1, 1, 2, 1)
    v = torch.tensor([8.0, -16.0], dtype=torch.float64).view(1, 1, 2, 1)
    case = oracles.replaced(case, q=1.0, k=log3, v=v)
    sink = torch.tensor([math.log(4.0)], dtype=torch.float64)
    for sinks, out, total in ((None, 2.0, 4.0), (sink, 1.0, 8.0)):
        exact = attention(dataclasses.replace(case, sinks=sinks))
        result = [float(x.item()) for x in (exact.out, exact.term_scale, exact.lse)]
        assert result == pytest.approx([out, 5 * out, math.log(total)], rel=1e-15)


@pytest.mark.parametrize("name", FEATURES)
def test_oracle_heeds_every_feature(name: str) -> None:
    """Taking a feature away changes the oracle's answer, so that agreeing with it means
    something (causality under a window that ends at the query aside)."""
    neutral = {
        "is_causal": False,
        "window": None,
        "mask": None,
        "softcap": None,
        "sinks": None,
    }
    case = make_case(**FEATURES[name])
    before = attention(case).out
    for field in neutral.keys() & FEATURES[name].keys():
        idle = field == "is_causal" and case.window == (2, 0)
        changed = dataclasses.replace(case, **{field: neutral[field]})
        assert idle or (attention(changed).out != before).any(), field


@pytest.mark.parametrize("feature", [FEATURES["everything"], {"softcap": 0.5}])
def test_the_oracle_is_the_slope_of_the_output(feature: dict[str, Any]) -> None:
    """Central differences of the 90-digit output, over steps of 2^-24, are the oracle's
    gradients. They are off by h^2 / 6 = 6e-16 times third derivatives, which stay below
    1e3 here."""
    small = {"batch": 1, "heads": 2, "q_len": 2, "kv_len": 3, "head_dim": 2, "v_dim": 2}
    case = step(**{**feature, "kv_heads": 1, **small, "dtype": torch.bfloat16})
    wide = {n: getattr(case, n).double() for n in ("q", "k", "v", "grad_out")}
    case = oracles.replaced(case, **wide)
    exact, h = gradients(case), 2.0**-24
    dO = case.grad_out.numpy().astype(object)
    for name in ("q", "k", "v"):
        for at in np.ndindex(*getattr(case, name).shape):
            value = getattr(case, name)[at].item()
            up, down = (
                attention(oracles.poisoned(case, name, at, value + x)).out
                for x in (h, -h)
            )
            with mpmath.workdps(oracles.DIGITS):
                slope = (dO * (up - down)).sum() / (2 * h)
                assert abs(slope - getattr(exact, f"d{name}")[at]) < 1e-12


@pytest.mark.parametrize(("actual", "accepted"), [
    ([1.0, -2.0], True), ([1.0 + 2.0**-50, -2.0], True), ([1.0 + 2.0**-49, -2.0], False),
    ([1.0, 2.0], False), ([nan, -2.0], False), ([inf, -2.0], False), ([1.0], False),
    ([[1.0, -2.0]], False),
])  # fmt: skip
def test_comparing_rejects(actual: Any, accepted: bool) -> None:
    """`assert_within` lets pass what is within the bound, and nothing else."""
    expected = np.array([mpmath.mpf(1), mpmath.mpf(-2)], dtype=object)
    result = torch.tensor(actual, dtype=torch.float64)
    if accepted:
        assert_within(result, expected, 2.0**-50)
    else:
        with pytest.raises(AssertionError):
            assert_within(result, expected, 2.0**-50)


@functools.cache
def exact_step(feature: str, dtype: torch.dtype) -> Any:
    case = step(dtype=dtype, **FEATURES[feature])
    return case, attention(case), gradients(case, U64 if dtype == torch.float64 else U32)


def by_torch(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):  # type: ignore[no-untyped-def]
    how = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask, **how)


SHARDS = {"shards": 3, "inner": "emulated", "merge_format": "float64"}
ORDERS = ("ring", "sequential", "tree", "simultaneous")
NOT_IN_SDPA = frozenset({"softcap", "sinks"})
KERNELS: dict[str, tuple[Kernel, dict[str, Any], frozenset[str]]] = {
    "baseline": (find("baseline"), {}, frozenset()),
    "sdpa-math": (find("sdpa-math"), {}, NOT_IN_SDPA),
    "sdpa-flash": (find("sdpa-flash"), {}, NOT_IN_SDPA | {"v_dim"}),
    "sdpa-default": (find("sdpa-default"), {}, NOT_IN_SDPA),
    "function": (adapt("function", by_torch), {}, NOT_IN_SDPA),
    "flex": (find("flex"), {"compiled": False}, frozenset({"sinks"})),
    **{
        order: (find("sharded"), {**SHARDS, "order": order}, frozenset())
        for order in ORDERS
    },
}
"""By name: the kernel, its options, and the features that it refuses."""
SDPA = ("sdpa-math", "sdpa-flash", "sdpa-default")


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.one_in(3)
def test_equals_the_oracle(name: str, feature: str) -> None:
    """In float64 and float32 every feature is within the bounds of the format, forward
    and backward, or refused. Rows that see nothing are a convention (NaN under an
    additive mask of -inf in model code). Gradients are held to twice the reference's
    bound: softmax's own derivative P (dP - rowsum(P dP)) has more terms; one that
    rebuilds P has the lse's error."""
    kernel, options, refused = KERNELS[name]
    for dtype in (torch.float64, torch.float32)[: 1 + (name in ("baseline", *SDPA))]:
        case, exact, g = exact_step(feature, dtype)
        if refused & FEATURES[feature].keys():
            with pytest.raises(Refused):
                kernel.attend(case, **kernel.with_options(options))
            return
        u, exp_error = (U64, 0.0) if dtype == torch.float64 else (U32, oracles.EXP_U20)
        result = kernel.attend(case, **kernel.with_options(options))
        exp_error = 0.0 if name == "baseline" else exp_error
        out, lse = oracles.error_bounds(case, exact, u, exp_error=exp_error)
        size = np.where(exact.empty, 0.0, exact.lse).astype(float)
        if name in ORDERS:
            out = out + (3 * (12 * u + 2 * lse) * float(case.v.abs().max()))[..., None]
            lse = lse + 12 * u * (1 + abs(size))
        # Turns its log-sum-exp to the base 2 and back: two roundings of it
        if name == "flex":
            lse = lse + 2 * u * abs(size)
        empty = torch.tensor(exact.empty)
        is_additive = case.mask is not None and case.mask.is_floating_point()
        O, L, expected = result.out, result.lse, exact.lse
        if name in (*SDPA, "function") or (name == "baseline" and is_additive):
            O = O.masked_fill(empty[..., None], 0.0)
            L, expected = None if L is None else L.masked_fill(empty, 0.0), size
        assert_within(O, exact.out, out)
        if L is not None:
            assert_within(L, expected, lse)
        if name == "baseline" or (name in SDPA and dtype == torch.float64):
            result = kernel.gradients(case, **kernel.with_options(options))
            if name == "baseline" and result.out.isnan().any():
                assert exact.empty.any()
                assert result.dk.isnan().any()
                continue
            for x in oracles.GRADIENTS:
                assert_within(getattr(result, x), getattr(g, x), 2 * g.bounds[x])


def test_every_property_of_a_case_is_a_feature() -> None:
    """What a kernel could ignore without a word is compared with the oracle in every
    kernel, or refused by it."""
    fields = dataclasses.fields(AttentionCase)
    optional = {f.name for f in fields if f.default is not dataclasses.MISSING}
    featured = set().union(*FEATURES.values())
    assert optional - featured == {"grad_out", "grad_out_from", "working", "positions"}
