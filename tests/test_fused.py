"""The fused fp64 reference without triton, and on a GPU; `fused_cases.py` has the
rest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fused_bounds import BACKWARD, FORWARD, bounds, shares
from interpreted import on_cuda
from oracles import FEATURES, heads_behind_rows, make_case, step, to_cuda
from torch.nn.functional import scaled_dot_product_attention

from numdev.cases import AttentionCase, CaseRef, key_limits, visible
from numdev.errors import Refused
from numdev.kernels import find, reference
from numdev.kernels.reference import blocked, fused
from numdev.kernels.reference.blocked import Gradients, Reference

nan, inf = math.nan, math.inf
GIB = 1 << 30


@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
def test_the_comparison_rejects(name: str) -> None:
    """Twice the bound in one element of any tensor, NaN, another dtype, and another
    shape."""
    case = step(q_len=6, kv_len=7, is_causal=True)
    exact = blocked.gradients(case)
    limits = bounds(case, exact)
    value = getattr(exact, name)
    assert max(shares(case, exact, exact, limits).values()) == 0.0
    moved, spoilt = value.clone(), value.clone()
    moved.view(-1)[3] += 2.0 * limits[name].expand_as(value).reshape(-1)[3]
    spoilt.view(-1)[3] = nan
    for wrong in (moved, spoilt, value.float(), value[:, :1]):
        changed: dict[str, Any] = {name: wrong}
        assert (
            shares(case, dataclasses.replace(exact, **changed), exact, limits)[name] > 1.0
        )


@pytest.mark.parametrize("fields", [
    {}, {"is_causal": True}, {"is_causal": True, "causal_offset": -4}, {"window": (2, 1)},
    {"window": (None, 3), "causal_offset": -2}, {"window": (1, None)}, {"window": (None, None)},
    {"window": (-2, 5), "is_causal": True, "causal_offset": 4},
    {"window": (3, -1), "is_causal": True}, {"window": (10**12, 0)},
    {"window": (10**12 - 3, 2), "causal_offset": 10**12},
    {"is_causal": True, "causal_offset": 10**12}, {"is_causal": True, "causal_offset": -(10**12)},
])  # fmt: skip
def test_positions_are_two_limits(fields: dict[str, Any]) -> None:
    """They show what `visible` shows, and their sum with any position is an int32."""
    case = make_case(q_len=6, kv_len=9, **fields)
    i, j = torch.arange(6)[:, None], torch.arange(9)[None, :]
    shown = torch.ones(6, 9, dtype=torch.bool)
    low, high = key_limits(case)
    if low is not None:
        shown &= j >= i + low
    if high is not None:
        shown &= j <= i + high
    expected = visible(case, slice(0, 6), slice(0, 9))
    assert torch.equal(shown, torch.ones_like(shown) if expected is None else expected)
    assert all(abs(x) + 2**30 < 2**31 for x in (low, high) if x is not None)


def shaped(heads: int = 2, width: int = 4, **fields: Any) -> AttentionCase:
    """A case of any shape that takes no memory."""
    x = torch.zeros(1, dtype=fields.pop("dtype", torch.bfloat16)).expand(
        1, heads, 3, width
    )
    return AttentionCase(
        ref=CaseRef(case="shaped"), q=x, k=x, v=x, **{"scale": 0.5, **fields}
    )


@pytest.mark.parametrize(("case", "words"), [
    (shaped(), None), (shaped(dtype=torch.float8_e5m2), None), (shaped(width=256), None),
    (shaped(width=257), "up to 256 wide, not 257"),
    (shaped(heads=65536), "up to 65535 heads of all batch entries, not 65536"),
    (shaped(dtype=torch.float64), "in float64"),
    (shaped(mask=torch.zeros(3, 3, dtype=torch.float64)), "in float64"),
    (shaped(sinks=torch.zeros(2, dtype=torch.float64)), "in float64"),
    (shaped(grad_out=torch.zeros(1, 2, 3, 4, dtype=torch.float64)), "in float64"),
    (shaped(heads=2**24, mask=torch.zeros(1).expand(1, 2**24, 3, 3)), "heads"),
])  # fmt: skip
def test_shapes_and_formats_it_cannot_take(
    case: AttentionCase, words: str | None
) -> None:
    """Each has its reason in words."""
    result = fused._unfit_reason(case)
    assert result is None if words is None else words in str(result)


def test_a_mask_too_large_for_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask is held in fp64, also a bool one, and may not take more than MASK_BYTES
    there."""
    monkeypatch.setattr(fused, "MASK_BYTES", 8 * 9)
    assert fused._unfit_reason(shaped(mask=torch.zeros(3, 3))) is None
    assert "18 elements" in str(
        fused._unfit_reason(shaped(mask=torch.zeros(2, 3, 3) == 0))
    )
    assert "18 elements" in str(fused._unfit_reason(shaped(mask=torch.zeros(2, 3, 3))))


@pytest.mark.parametrize(("fields", "refused"), [
    ({"logits": 1e6}, False), ({"logits": 1e14}, True), ({"scale": -1e14}, True),
    ({"scale": 1e300}, True), ({"scale": 0.0, "logits": 1e14}, False),
])  # fmt: skip
def test_scores_beyond_fp64(fields: dict[str, Any], refused: bool) -> None:
    """Where scores may reach 2^44 the sums of the two passes differ by more than P can
    bear."""
    result = fused._out_of_range_reason(make_case(dtype=torch.float32, **fields))
    assert ("where fp64 has no digits left" in str(result)) is refused


def test_rows_that_a_mask_lifts_beyond_fp64() -> None:
    """L of scores near -1e30 says nothing of their differences; empty rows are none of
    these."""
    lowered = torch.zeros(4, 5)
    lowered[1], lowered[2] = -1e30, -inf
    for mask, refused in (
        (lowered, True),
        (lowered.masked_fill(lowered < 0, -inf), False),
    ):
        forward = vars(blocked.attend(make_case(dtype=torch.float32, mask=mask)))
        if refused:
            with pytest.raises(Refused, match="about 1e\\+30"):
                fused.refuse_large_scores(forward)
        else:
            fused.refuse_large_scores(forward)


def test_what_the_fast_path_refuses_the_plain_one_computes() -> None:
    """With the reason in the result, and nothing else changed; any other error is not
    hidden."""
    case = step(dtype=torch.float32)
    plain = blocked.gradients(case)

    refuse = Mock(side_effect=Refused("the mask is too large"))
    fail = Mock(side_effect=ValueError("broken"))
    result = reference._with_fallback(case, refuse, blocked.gradients)
    assert result.by == "blocked: the mask is too large"
    for field in dataclasses.fields(Gradients):
        if field.name != "by":
            assert torch.equal(getattr(result, field.name), getattr(plain, field.name))
    fast: Reference = reference._with_fallback(case, lambda case: plain, fail)
    assert fast is plain
    with pytest.raises(ValueError, match="broken"):
        reference._with_fallback(case, fail, blocked.gradients)


@pytest.mark.parametrize(("length", "small"), [(64, True), (65, False)])
def test_small_calls_are_not_compiled(
    length: int, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to so many scores of all sequences and heads together."""
    monkeypatch.setattr(reference, "SMALL", 2 * 3 * 64 * 64)
    assert (
        reference._is_small(make_case(batch=2, heads=3, q_len=64, kv_len=length)) is small
    )


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest call is taken for a large one."""
    monkeypatch.setattr(reference, "SMALL", 0)


def several_tiles(**fields: Any) -> AttentionCase:
    """4 query heads on 2 kv heads, in several tiles of which the last are not whole, on
    the GPU."""
    shape = {
        "batch": 2,
        "heads": 4,
        "kv_heads": 2,
        "q_len": 333,
        "kv_len": 471,
        "head_dim": 64,
    }
    return to_cuda(step(**{**shape, "dtype": torch.bfloat16, **fields}))


def assert_agree(case: AttentionCase) -> Gradients:
    """Both passes came by the fused path, and are the blocked path's to within their
    bounds."""
    result, forward = reference.gradients(case), reference.attend(case)
    assert (result.by, forward.by) == ("fused", "fused")
    exact = blocked.gradients(case)
    limits = bounds(case, exact)
    for answer in (result, forward):
        for name, share in shares(case, answer, exact, limits).items():
            assert share <= 1.0, (name, share)
    return result


@on_cuda
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_in_every_format(name: str) -> None:
    """Each feature by itself and combined, soft cap included, in bf16, fp16 and fp32."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert_agree(to_cuda(step(**FEATURES[name], dtype=dtype)))


LARGE: dict[str, dict[str, Any]] = {
    "full": {},
    "causal, bottom-right": {"is_causal": True, "causal_offset": 138},
    "additive mask": {"mask": ("holes", "1hqk"), "is_causal": True},
    "sinks": {"sinks": True, "window": (30, None)},
}


@on_cuda
@pytest.mark.usefixtures("compiled")
def test_views_are_read_where_they_lie() -> None:
    """Heads that lie behind their rows, rows behind features, a transposed mask,
    leaves."""
    created = several_tiles(mask=("bool", "qk"), sinks=True)
    names = ("q", "k", "v", "grad_out")
    views = {x: getattr(created, x).mT.contiguous().mT.requires_grad_() for x in names}
    mask = created.mask.mT.contiguous().mT
    assert not mask.is_contiguous()
    assert_agree(dataclasses.replace(created, mask=mask, **views))
    assert_agree(dataclasses.replace(heads_behind_rows(created), mask=mask))


@on_cuda
@pytest.mark.usefixtures("compiled")
def test_groups_of_heads_and_runs_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kv head at a time and 16 rows at a time: the same forward, gradients in
    bounds."""
    case = several_tiles(is_causal=True, sinks=True)
    whole = reference.attend(case)
    monkeypatch.setattr(fused, "OPERAND_BYTES", 1)
    monkeypatch.setattr(fused, "SCRATCH_BYTES", 1)
    assert len(list(fused._head_groups(case))) == 2
    assert len(fused._row_runs(case)) > 5
    result = assert_agree(case)
    for name in ("out", "lse", "term_scale", "empty"):
        assert torch.equal(getattr(result, name), getattr(whole, name)), name


@on_cuda
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", LARGE)
def test_runs_are_bitwise_reproducible(name: str) -> None:
    """No sum depends on which program comes first."""
    case = several_tiles(**LARGE[name])
    a, b = reference.gradients(case), reference.gradients(case)
    for field in dataclasses.fields(Gradients):
        if field.name != "by":
            assert torch.equal(getattr(a, field.name), getattr(b, field.name)), field.name


@on_cuda
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda case: {"v": case.v.clone().fill_(nan)}, "an input is not finite"),
        (lambda case: {"grad_out": case.grad_out * inf}, "an input is not finite"),
        (lambda case: {"mask": torch.full((333, 471), nan, device="cuda")}, "not finite"),
        (lambda case: {"q": case.q.float() * 1e20, "k": case.k.float(), "v": case.v.float()},
         "scores may reach"),
        (lambda case: {x: getattr(case, x).double() for x in "qkv"}, "in float64"),
    ],
)  # fmt: skip
def test_what_it_refuses_is_blocked(
    spoil: Callable[[AttentionCase], Any], words: str
) -> None:
    """The result says why, and is the blocked path's, NaN included."""
    case = several_tiles()
    case = dataclasses.replace(case, **spoil(case))
    result, exact = reference.gradients(case), blocked.gradients(case)
    assert result.by.startswith("blocked: ")
    assert words in result.by
    assert reference.attend(case).by == result.by
    assert find("reference").attend(case).ran == result.by
    for name in ("out", "dq", "dk", "dv"):
        a, b = (getattr(x, name).nan_to_num(7.0) for x in (result, exact))
        assert torch.equal(a, b)


def peak(call: Callable[[], Any]) -> int:
    """What a call takes of the GPU's memory at once, its result included, beyond what is
    held."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


@on_cuda
def test_memory_is_bounded() -> None:
    """attend: 1 GiB and a tenth of PyTorch's fp64; gradients: operands, results, some
    rows."""
    shape = {"batch": 1, "heads": 8, "kv_heads": 8, "q_len": 8192, "kv_len": 8192}
    case = several_tiles(**shape, head_dim=128)
    wide = [x.double() for x in (case.q, case.k, case.v)]
    plain = peak(lambda: scaled_dot_product_attention(*wide))
    mine = peak(lambda: fused.attend(case))
    assert mine < GIB
    assert 10 * mine < plain
    assert peak(lambda: fused.gradients(case)) < 6 * GIB
