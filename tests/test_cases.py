"""Attention cases: what they refuse, which keys a query sees, rounding, and choosing heads.

The oracle for visibility is `oracles.sees`, one query and one key at a time.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import FEATURES, make_case, sees

from numdev.cases import AttentionCase, CaseRef, additive, explicit_mask, key_range, visible
from numdev.errors import UsageError
from numdev.formats import FORMATS, format_named
from numdev.kernels.reference import attend

BF16, FP16, FP32, FP64 = (FORMATS[n] for n in ("bfloat16", "float16", "float32", "float64"))
zeros = torch.zeros


# --- what fits together --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": zeros(2, 4, 4)}, r"q has shape \[2, 4, 4\]; expected \[batch, heads, length, head"),
        ({"q": zeros(1, 2, 0, 4)}, r"q has shape \[1, 2, 0, 4\]: an axis is empty"),
        ({"v": zeros(1, 2, 5, 0)}, "v has shape .* an axis is empty"),
        ({"q": zeros(1, 2, 4, 4, dtype=torch.float64)}, "differ in format: torch.float64, torch.f"),
        ({"q": zeros(3, 2, 4, 4)}, "do not fit together"),
        ({"v": zeros(1, 2, 6, 4)}, "do not fit together"),
        ({"v": zeros(1, 1, 5, 4)}, "do not fit together"),
        ({"q": zeros(1, 2, 4, 8)}, "q and k differ in head_dim: 8 and 4"),
        ({"q": zeros(1, 3, 4, 4)}, "3 query heads are no multiple of 2 kv heads"),
        ({"q": zeros(1, 1, 4, 4)}, "1 query heads are no multiple of 2 kv heads"),
        ({"scale": math.nan}, "scale is nan"),
        ({"scale": math.inf}, "scale is inf"),
        ({"softcap": 0.0}, "softcap is 0.0; expected a positive number"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"softcap": math.inf}, "softcap is inf"),
        ({"sinks": zeros(3)}, r"sinks have shape \[3\]; expected \[2\], one per head"),
        ({"sinks": zeros(2, 1)}, "sinks have shape"),
        ({"grad_out": zeros(1, 2, 4, 3)}, r"grad_out has shape \[1, 2, 4, 3\]"),
        ({"mask": zeros(4, 4)}, r"mask has shape \[4, 4\], which does not broadcast to \[1, 2"),
        ({"mask": zeros(1, 1, 1, 4, 5)}, "does not broadcast"),
        ({"mask": torch.tensor(True)}, "does not broadcast"),
        ({"mask": zeros(4, 5, dtype=torch.int64)}, "mask is torch.int64; expected bool or"),
    ],
)
def test_parts_that_do_not_fit_are_named(change: dict[str, Any], says: str) -> None:
    """A case that makes no sense is refused with its name and what is wrong with it."""
    case = make_case(dtype=torch.float32)
    with pytest.raises(UsageError, match=says) as caught:
        dataclasses.replace(case, **change)
    assert "attention case 'test': " in caught.value.message


# --- which keys a query sees ---------------------------------------------------------------------


def brute_force(case: AttentionCase, rows: slice, keys: slice) -> torch.Tensor:
    """Visibility by causality, window and a bool mask, one pair at a time."""
    b, h, _, _ = case.q.shape
    r, c = range(rows.start, rows.stop), range(keys.start, keys.stop)
    if case.mask is not None and case.mask.dtype != torch.bool:
        case = dataclasses.replace(case, mask=None)
    seen = [[[[sees(case, x, y, i, j) for j in c] for i in r] for y in range(h)] for x in range(b)]
    return torch.tensor(seen, dtype=torch.bool).reshape(b, h, len(r), len(c))


@pytest.mark.parametrize("name", FEATURES)
def test_visible_is_what_the_definition_says(name: str) -> None:
    """Whole and in blocks, `visible` agrees with the definition; None means everything."""
    case = make_case(**FEATURES[name])
    n, m = case.q_len, case.kv_len
    for rows, keys in [
        (slice(0, n), slice(0, m)),
        (slice(n - 1, n), slice(m // 2, m)),
        (slice(0, 1), slice(1, 1)),
    ]:
        expected, shown = brute_force(case, rows, keys), visible(case, rows, keys)
        if shown is None:
            assert expected.all()
        else:
            assert torch.equal(shown.expand_as(expected), expected)


@pytest.mark.parametrize("name", FEATURES)
def test_rows_and_keys_may_be_indices(name: str) -> None:
    """What they see, and what is added to their scores, is what the whole call has there."""
    case = make_case(**FEATURES[name])
    n, m = case.q_len, case.kv_len
    rows, keys = torch.tensor([n - 1, 0, n - 1]), torch.arange(m - 1, -1, -2)
    for function in (visible, additive):
        whole = function(case, slice(0, n), slice(0, m))
        for i, j in ((rows, slice(0, m)), (slice(0, n), keys), (rows, keys)):
            part = function(case, i, j)
            if whole is None or part is None:
                assert whole is part
                continue
            expanded = whole.expand(*case.q.shape[:2], n, m)
            expected = expanded[:, :, i][..., j]
            assert torch.equal(part.expand_as(expected), expected)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    q_len=st.integers(1, 7),
    kv_len=st.integers(1, 7),
    is_causal=st.booleans(),
    causal_offset=st.integers(-8, 8),
    window=st.none() | st.tuples(st.none() | st.integers(-1, 8), st.none() | st.integers(-1, 8)),
    data=st.data(),
)
def test_key_range_holds_what_is_visible_and_no_more(
    q_len: int, kv_len: int, is_causal: bool, causal_offset: int, window: Any, data: Any
) -> None:
    """For any block of rows: no visible key lies outside; the ends, if any is visible, are."""
    case = make_case(
        heads=1,
        q_len=q_len,
        kv_len=kv_len,
        is_causal=is_causal,
        causal_offset=causal_offset,
        window=window,
    )
    start = data.draw(st.integers(0, q_len - 1))
    rows = slice(start, data.draw(st.integers(start + 1, q_len)))
    keys = key_range(case, rows)
    assert 0 <= keys.start <= keys.stop <= kv_len
    seen = brute_force(case, rows, slice(0, kv_len))[0, 0].any(dim=0)
    assert not seen[: keys.start].any()
    assert not seen[keys.stop :].any()
    if seen.any():
        assert seen[keys.start]
        assert seen[keys.stop - 1]


@pytest.mark.parametrize("name", FEATURES)
def test_one_mask_for_all_restrictions(name: str) -> None:
    """`explicit_mask` alone, on an otherwise unrestricted case, means the same attention."""
    case = make_case(**FEATURES[name])
    mask = explicit_mask(case)
    same = dataclasses.replace(case, mask=mask, is_causal=False, window=None)
    before, after = attend(case), attend(same)
    assert torch.equal(before.empty, after.empty)
    torch.testing.assert_close(after.out, before.out, rtol=1e-13, atol=1e-15)
    if case.mask is None and not case.restricts_positions:
        assert mask is None


def test_additive_blocks() -> None:
    """The additive mask's block keeps its broadcasting axes; a bool mask has none."""
    case = make_case(mask=("float", "h1k"))
    block = additive(case, slice(1, 3), slice(2, 4))
    assert block is not None
    assert torch.equal(block, case.mask[:, :, 2:4])
    assert additive(make_case(mask=("bool", "qk")), slice(0, 1), slice(0, 1)) is None


# --- rounding ------------------------------------------------------------------------------------


def test_rounding_rounds_every_tensor_once() -> None:
    """q, k, v, an additive mask, sinks and grad_out are rounded, correctly; a bool mask is kept."""
    twice = 1 + 2.0**-8 + 2.0**-40  # through float32 this becomes a tie, and then 1.0
    grad_out = torch.full((1, 2, 4, 4), twice, dtype=torch.float64)
    case = make_case(mask=("float", "qk"), sinks=True, grad_out=grad_out)
    case = dataclasses.replace(
        case,
        **{
            name: torch.full_like(getattr(case, name), twice)
            for name in ("q", "k", "v", "mask", "sinks")
        },
    )
    rounded = case.rounded_to(BF16)
    for name in ("q", "k", "v", "mask", "sinks", "grad_out"):
        x = getattr(rounded, name)
        assert x.dtype == torch.bfloat16
        assert (x == 1.0078125).all()
    shown = make_case(mask=("bool", "qk"))
    assert shown.rounded_to(BF16).mask is shown.mask
    assert (rounded.scale, rounded.ref) == (case.scale, case.ref)


@pytest.mark.parametrize("fmt", [BF16, FP16, FP32])
@pytest.mark.parametrize("wide", [torch.float64, torch.float32])
def test_the_lowest_number_in_a_mask_stays_finite(fmt: Any, wide: torch.dtype) -> None:
    """The way models write "hidden" must not become -inf, and -inf must not become finite."""
    row = torch.tensor([torch.finfo(wide).min, -math.inf, 0.0, 0.0, 0.0], dtype=wide)
    rounded = make_case(mask=row, dtype=wide).rounded_to(fmt).mask
    assert rounded is not None
    assert rounded.tolist() == [-fmt.largest, -math.inf, 0.0, 0.0, 0.0]


def test_values_out_of_range_overflow() -> None:
    """Inputs are not clamped: what the format cannot hold becomes infinite, as in a model."""
    case = make_case()
    case.q[..., 0] = 1e6
    assert case.rounded_to(FP16).q[..., 0].isinf().all()


@pytest.mark.parametrize("fmt", [BF16, FP16, FP32, FP64])
def test_rounding_keeps_the_memory_layout(fmt: Any) -> None:
    """A transposed view stays one: the layout of a call decides which backends run it."""
    case = make_case(dtype=torch.float32)
    q = torch.randn(1, 4, 2, 4).transpose(1, 2)
    rounded = dataclasses.replace(case, q=q).rounded_to(fmt)
    assert rounded.q.stride() == q.stride()


def test_what_is_in_a_format_needs_no_rounding() -> None:
    """A case is in a format if all its tensors are stored so and nothing hangs in a graph."""
    case = make_case(dtype=torch.bfloat16)
    assert case.is_in(BF16)
    assert not case.is_in(FP32)
    assert not case.is_in(format_named("e8m10"))
    assert case.rounded_to(format_named("e8m10")).is_in(format_named("e8m10"))
    assert not case.rounded_to(format_named("e8m10")).is_in(FP32)
    wide = torch.zeros(case.q_len, case.kv_len)
    assert not dataclasses.replace(case, mask=wide).is_in(BF16)
    assert dataclasses.replace(case, mask=wide.bool()).is_in(BF16)
    assert not dataclasses.replace(case, q=case.q.clone().requires_grad_()).is_in(BF16)


# --- choosing heads ------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [[0], [3], [2, 1], [0, 1, 2, 3]])
@pytest.mark.parametrize("axes", ["k", "qk", "1qk", "hqk", "h1k", "b1qk", "bhqk", "1h11"])
@pytest.mark.parametrize("kind", ["bool", "holes"])
def test_choosing_heads_changes_nothing_for_them(heads: list[int], axes: str, kind: str) -> None:
    """A chosen head computes what it did among the others: its kv head, mask, sink and gradient."""
    case = make_case(batch=2, heads=4, kv_heads=2, mask=(kind, axes), sinks=True, is_causal=True)
    case = dataclasses.replace(case, grad_out=torch.randn_like(case.q))
    chosen = case.select_heads(heads)
    whole, part = attend(case), attend(chosen)
    assert torch.equal(part.empty, whole.empty[:, heads])
    torch.testing.assert_close(part.out, whole.out[:, heads], rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(part.lse, whole.lse[:, heads], rtol=1e-13, atol=1e-15)
    assert torch.equal(chosen.grad_out, case.grad_out[:, heads])


def test_one_of_each_group_is_a_selection_of_heads() -> None:
    """The query heads at one place of their groups read every kv head once; masks, sinks and
    gradients go with them, as where the same heads are selected by number."""
    n = torch.Generator().manual_seed(0)
    q, k, v, dO = (torch.randn(2, h, 5, 4, generator=n) for h in (6, 3, 3, 6))
    case = AttentionCase(
        ref=CaseRef(case="x"), q=q, k=k, v=v, scale=0.5, grad_out=dO,
        mask=torch.randn(2, 6, 5, 5, generator=n), sinks=torch.randn(6, generator=n),
    )  # fmt: skip
    for place in (0, 1):
        found, wanted = (
            case.one_of_each_group(place),
            case.select_heads([place, 2 + place, 4 + place]),
        )
        for name in ("q", "k", "v", "mask", "sinks", "grad_out"):
            assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert not torch.equal(case.one_of_each_group(0).q, case.one_of_each_group(1).q)
