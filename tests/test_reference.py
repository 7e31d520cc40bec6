"""The reference against 90-digit arithmetic, known answers, conventions, and planted faults.

Bounds come from `oracles.error_bounds`, where they are derived. The oracle and the comparison are
tested first: the one by hand, the other by what it must reject.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import gfloat
import mpmath
import numpy as np
import pytest
import torch
from gfloat import formats as gformats
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import FEATURES, assert_within, attention, error_bounds, make_case

from numdev.cases import AttentionCase
from numdev.formats import FORMATS
from numdev.kernels import find
from numdev.kernels.reference import attend
from numdev.kernels.reference.blocked import BLOCK_BYTES
from numdev.kernels.reference.results import Reference

GFLOAT = {
    "float32": gformats.format_info_binary32,
    "bfloat16": gformats.format_info_bfloat16,
    "float16": gformats.format_info_binary16,
}
nan, inf = math.nan, math.inf


def filled(case: AttentionCase, **tensors: Any) -> AttentionCase:
    """The case with some of its tensors filled with a number, or replaced."""
    new = {
        k: torch.full_like(getattr(case, k), x) if isinstance(x, float) else x
        for k, x in tensors.items()
    }
    return dataclasses.replace(case, **new)


def assert_is_exact(case: AttentionCase, answer: Reference | None = None) -> None:
    """Every part of the reference's answer is within its bound of the oracle's."""
    answer, exact = answer or attend(case), attention(case)
    out_bound, lse_bound = error_bounds(case, exact)
    assert_within(answer.out, exact.out, out_bound)
    assert_within(answer.term_scale, exact.term_scale, out_bound)
    assert_within(answer.lse, exact.lse, lse_bound)
    assert answer.empty.tolist() == exact.empty.tolist()
    assert all(x.dtype == torch.float64 for x in (answer.out, answer.term_scale, answer.lse))


# --- the oracle, and the proof that the comparison rejects ---------------------------------------


def test_oracle_by_hand() -> None:
    """Two keys with scores log 3 and 0 get weights 3/4 and 1/4; a sink of log 4 halves them."""
    case = make_case(heads=1, q_len=1, kv_len=2, head_dim=1, scale=1.0)
    log3 = torch.tensor([math.log(3.0), 0.0], dtype=torch.float64).view(1, 1, 2, 1)
    v = torch.tensor([8.0, -16.0], dtype=torch.float64).view(1, 1, 2, 1)
    case = filled(case, q=1.0, k=log3, v=v)
    exact = attention(case)
    assert float(exact.out[0, 0, 0, 0]) == pytest.approx(2.0, rel=1e-15)
    assert float(exact.term_scale[0, 0, 0, 0]) == pytest.approx(10.0, rel=1e-15)
    assert float(exact.lse[0, 0, 0]) == pytest.approx(math.log(4.0), rel=1e-15)
    sink = torch.tensor([math.log(4.0)], dtype=torch.float64)
    halved = attention(dataclasses.replace(case, sinks=sink))
    assert float(halved.out[0, 0, 0, 0]) == pytest.approx(1.0, rel=1e-15)
    assert float(halved.lse[0, 0, 0]) == pytest.approx(math.log(8.0), rel=1e-15)


@pytest.mark.parametrize("name", FEATURES)
def test_oracle_heeds_every_feature(name: str) -> None:
    """Taking a feature away changes the oracle's answer, so that agreeing with it means something
    (causality under a window that ends at the query aside)."""
    neutral = {"is_causal": False, "window": None, "mask": None, "softcap": None, "sinks": None}
    case = make_case(**FEATURES[name])
    before = attention(case).out
    for field in neutral.keys() & FEATURES[name].keys():
        idle = field == "is_causal" and case.window == (2, 0)
        changed = dataclasses.replace(case, **{field: neutral[field]})
        assert idle or (attention(changed).out != before).any(), field


@pytest.mark.parametrize(
    ("actual", "accepted"),
    [
        ([1.0, -2.0], True),
        ([1.0 + 2.0**-50, -2.0], True),
        ([1.0 + 2.0**-49, -2.0], False),
        ([1.0, 2.0], False),
        ([nan, -2.0], False),
        ([inf, -2.0], False),
        ([1.0], False),
        ([[1.0, -2.0]], False),
    ],
)
def test_comparing_rejects(actual: Any, accepted: bool) -> None:
    """`assert_within` lets pass what is within the bound, and nothing else."""
    expected = np.array([mpmath.mpf(1), mpmath.mpf(-2)], dtype=object)
    found = torch.tensor(actual, dtype=torch.float64)
    if accepted:
        assert_within(found, expected, 2.0**-50)
    else:
        with pytest.raises(AssertionError):
            assert_within(found, expected, 2.0**-50)


# --- exactness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEATURES)
def test_equals_the_oracle(name: str) -> None:
    """Every feature, alone and together with others."""
    assert_is_exact(make_case(**FEATURES[name]))


masks = st.sampled_from([None, "bool", "float", "holes"])
axes = st.sampled_from(["k", "qk", "1qk", "hqk", "11k", "b11k", "b1qk", "1h1k", "bhq1", "bhqk"])


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(
    sizes=st.fixed_dictionaries(
        {
            "batch": st.integers(1, 2),
            "kv_heads": st.integers(1, 2),
            "q_len": st.integers(1, 5),
            "kv_len": st.integers(1, 6),
            "head_dim": st.integers(1, 4),
            "v_dim": st.integers(1, 3),
            "seed": st.integers(0, 99),
            "logits": st.sampled_from([0.25, 1.0, 8.0, 100.0]),
        }
    ),
    group=st.integers(1, 3),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "is_causal": st.booleans(),
            "causal_offset": st.integers(-4, 5),
            "window": st.tuples(st.none() | st.integers(0, 4), st.none() | st.integers(0, 4)),
            "softcap": st.sampled_from([0.5, 5.0, 50.0]),
            "sinks": st.booleans(),
            "scale": st.sampled_from([0.1, 1.0, -2.0]),
        },
    ),
    mask=st.tuples(masks, axes),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_equals_the_oracle_in_any_combination(
    sizes: dict[str, Any], group: int, fields: dict[str, Any], mask: Any, dtype: torch.dtype
) -> None:
    """Features in combinations nobody thought of, in every input format."""
    kind = mask if mask[0] else None
    heads = sizes["kv_heads"] * group
    assert_is_exact(make_case(**sizes, **fields, heads=heads, mask=kind, dtype=dtype))


# --- known answers -------------------------------------------------------------------------------


@pytest.mark.parametrize("sink", [2000.0, -2000.0, 1e30])
def test_sinks_far_from_the_scores(sink: float) -> None:
    """A sink that dominates takes all probability, one far below none; lse includes it."""
    case = make_case(sinks=torch.full((2,), sink, dtype=torch.float64))
    answer = attend(case)
    plain = attend(dataclasses.replace(case, sinks=None))
    assert torch.equal(answer.out, plain.out if sink < 0 else torch.zeros_like(plain.out))
    assert torch.equal(answer.lse, plain.lse if sink < 0 else torch.full_like(plain.lse, sink))
    assert not answer.empty.any()
    assert_is_exact(case, answer)


def test_grouped_heads_read_their_own_kv_head() -> None:
    """Query head h reads kv head h // group: heads 0 to 2 the first, 3 to 5 the second."""
    case = make_case(heads=6, kv_heads=2)
    v = torch.tensor([1.0, 2.0]).double().view(1, 2, 1, 1).expand(1, 2, 5, 4)
    out = attend(filled(case, v=v)).out
    assert out.mean(dim=(0, 2, 3)).tolist() == pytest.approx([1, 1, 1, 2, 2, 2], abs=1e-14)


@pytest.mark.parametrize(("offset", "seen"), [(0, [1, 2, 3]), (2, [3, 4, 5]), (-1, [0, 1, 2])])
def test_causal_alignment(offset: int, seen: list[int]) -> None:
    """Query i sees i + 1 + offset keys: top-left at 0, bottom-right at kv_len - q_len. With equal
    scores lse is the logarithm of their number."""
    case = make_case(q_len=3, kv_len=5, is_causal=True, causal_offset=offset)
    lse = attend(filled(case, q=0.0)).lse[0, 0]
    assert lse.exp().tolist() == pytest.approx(seen, rel=1e-15)


# --- rows that see nothing -----------------------------------------------------------------------

HIDDEN = {
    "bool mask": {"mask": torch.tensor([[True] * 5, [False] * 5, [True] * 5, [False] * 5])},
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
    name: str, sinks: bool, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are 0 with lse -inf (or their sink), marked empty, and leave the others alone."""
    if rows is not None:
        monkeypatch.setitem(BLOCK_BYTES, "cpu", rows * 8 * 2 * 5)
    case = make_case(sinks=sinks, **HIDDEN[name])
    answer = attend(case)
    assert answer.empty.any()
    assert (answer.out[answer.empty] == 0).all()
    assert (answer.term_scale[answer.empty] == 0).all()
    sink = -inf if case.sinks is None else case.sinks[None, :, None].expand(1, 2, 4)[answer.empty]
    assert (answer.lse[answer.empty] == sink).all()
    assert answer.out.isfinite().all()
    assert_is_exact(case, answer)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_lowest_number_means_hidden(dtype: torch.dtype) -> None:
    """In an additive mask finfo.min hides a key as -inf does, and a row of nothing else is empty:
    in float16 -65504 would swallow no score, and the row's value would depend on the format."""
    lowest = torch.zeros(4, 5, dtype=dtype)
    lowest[:, 3:] = torch.finfo(dtype).min
    lowest[2] = torch.finfo(dtype).min
    answer = attend(make_case(dtype=dtype, mask=lowest, is_causal=True))
    hidden = lowest.masked_fill(lowest < 0, -torch.inf)
    same = attend(make_case(dtype=dtype, mask=hidden, is_causal=True))
    assert torch.equal(answer.out, same.out)
    assert answer.empty[:, :, 2].all()
    assert not answer.empty[:, :, [0, 1, 3]].any()


# --- NaN and infinity ----------------------------------------------------------------------------


def poisoned(case: AttentionCase, name: str, place: tuple[int, ...], value: float) -> AttentionCase:
    x = getattr(case, name).clone()
    x[place] = value
    return dataclasses.replace(case, **{name: x})


def rows_of_nan(case: AttentionCase) -> list[tuple[int, ...]]:
    """The rows [head, query] with a NaN, of a case with batch 1."""
    return [tuple(at) for at in attend(case).out[0].isnan().any(dim=-1).nonzero().tolist()]


@pytest.mark.parametrize("budget", [1, 1 << 26])
@pytest.mark.parametrize("kind", ["causal", "bool mask", "additive mask"])
@pytest.mark.parametrize("name", ["k", "v"])
def test_nan_reaches_those_who_see_it_and_no_others(
    name: str, kind: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN in one key (or value) spoils the rows that see the key; hidden, it does nothing. Which
    block a row was in does not show."""
    monkeypatch.setitem(BLOCK_BYTES, "cpu", budget)
    lower = torch.ones(4, 5, dtype=torch.bool).tril()
    fields: dict[str, Any] = {
        "causal": {"is_causal": True},
        "bool mask": {"mask": lower},
        "additive mask": {"mask": torch.zeros(4, 5).masked_fill(~lower, -inf).double()},
    }[kind]
    case = poisoned(make_case(**fields), name, (0, 1, 2, 0), nan)
    # An additive mask adds: NaN - inf is NaN in k. That is how the arithmetic has it.
    first = 0 if (name, kind) == ("k", "additive mask") else 2
    assert rows_of_nan(case) == [(1, i) for i in range(first, 4)]


# --- the floor -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GFLOAT)
def test_floor_is_the_reference_rounded_once(name: str) -> None:
    """The floor's values are the reference's, rounded by an independent implementation."""
    case = make_case(heads=2, q_len=32, kv_len=32, dtype=torch.float32, logits=2.0)
    case = case.rounded_to(FORMATS[name])
    out = find("floor").attend(case).out
    expected = gfloat.round_ndarray(GFLOAT[name], attend(case).out.numpy())
    assert np.array_equal(out.double().numpy(), expected)
    assert out.dtype == torch.float64
