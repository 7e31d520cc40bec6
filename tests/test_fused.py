"""The fused fp64 reference, on a CPU: in Triton's interpreter against the blocked one, and what of
it needs no triton.

The interpreter runs once, in a process of its own (`fused_cases.py`; `fused_bounds.py` derives how
far two paths may be apart). What the device does is in `test_fused_gpu.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from fused_bounds import BACKWARD, FORWARD, bounds, shares
from interpreted import results_of
from oracles import FEATURES, make_case, step

from numdev.cases import AttentionCase, CaseRef, visible
from numdev.errors import Refused
from numdev.kernels import reference
from numdev.kernels.output import key_limits
from numdev.kernels.reference import blocked, fused
from numdev.kernels.reference.results import Gradients, Reference

nan, inf = math.nan, math.inf
VALUES = ("out", "lse", "dq", "dk", "dv")


# --- in the interpreter --------------------------------------------------------------------------


@pytest.fixture(scope="session")
def interpreted() -> dict[str, list[dict[str, Any]]]:
    """What `fused_cases.py` found."""
    return results_of("fused_cases.py")


@pytest.mark.slow
def test_both_paths_agree(interpreted: dict[str, Any]) -> None:
    """Output, log-sum-exp, gradients and all their terms are those of the blocked path to within
    the bound of fp64, and the same rows and keys are empty and unseen: every feature, in fp32 and
    fp16, and larger cases of windows, positions, masks, sinks, shapes and sizes of scores."""
    assert len(interpreted["accuracy"]) > 2 * len(FEATURES) + 30
    for found in interpreted["accuracy"]:
        assert found["by"] == "fused"
        assert set(found["shares"]) == {*FORWARD, *BACKWARD, "empty", "unseen"}
        for tensor, share in found["shares"].items():
            assert share <= 1.0, (found["case"], tensor, share)


@pytest.mark.slow
def test_both_ways_to_a_softmax_were_taken(interpreted: dict[str, Any]) -> None:
    """Some cases were bounded and subtracted no maximum, others went online; rows without keys came
    with both, and are 0."""
    for bounded in (True, False):
        met = [found for found in interpreted["accuracy"] if found["bounded"] is bounded]
        assert len(met) > 10
        assert any(found["empty"] for found in met)
    assert all(found["in empty rows"] == 0.0 for found in interpreted["accuracy"])


@pytest.mark.slow
def test_the_bounds_reject_planted_mistakes(interpreted: dict[str, Any]) -> None:
    """A scale off by 1e-9 or rounded to fp32, and one key more than causality lets, are beyond the
    bound of some tensor wherever a row sees anything; in usual cases beyond that of every one."""
    unseen = ("causal, no key at all", "large: causal, nothing seen",
              "large: additive mask, nothing seen")  # fmt: skip
    usual = {f"large: {x}" for x in ("causal", "window", "grouped", "additive mask", "float16")}
    count = 0
    for found in interpreted["accuracy"]:
        for mistake, there in found["planted"].items():
            count += 1
            if not found["case"].startswith(unseen):
                assert max(there.values()) > 1.0, (found["case"], mistake)
            if found["case"] in usual:
                assert min(there[x] for x in VALUES) > 100.0, (found["case"], mistake, there)
    assert count > 150


@pytest.mark.slow
def test_divided_keys_agree(interpreted: dict[str, Any]) -> None:
    """Where there are few programs each takes some keys, and what they return is merged; a sink
    counts once, and a row may see nothing in a part, or in any."""
    assert all(found["parts"] > 1 for found in interpreted["divided"])
    for found in interpreted["divided"]:
        assert max(found["shares"].values()) <= 1.0, found


@pytest.mark.slow
def test_exp2_is_as_good_as_it_says(interpreted: dict[str, Any]) -> None:
    """Against mpmath its relative error is below 2^-52 from -1021 to 1021, at whole numbers it is
    exact, and below -1021 it is 0."""
    for found in interpreted["exponentials"]:
        assert 1.0 < found["worst"] < 2.0
        below, known = found["values"][:3], found["values"][3:]
        assert known == [2.0**-1021, 2.0**1021, 1.0]
        assert found["small"] or below == [0.0, 0.0, 0.0]


# --- the comparison ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
def test_the_comparison_rejects(name: str) -> None:
    """Twice the bound in one element of any tensor, NaN, another dtype, and another shape."""
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
        assert shares(case, dataclasses.replace(exact, **changed), exact, limits)[name] > 1.0


# --- who sees whom -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "causal_offset": -4},
        {"window": (2, 1)},
        {"window": (None, 3), "causal_offset": -2},
        {"window": (1, None)},
        {"window": (None, None)},
        {"window": (-2, 5), "is_causal": True, "causal_offset": 4},
        {"window": (3, -1), "is_causal": True},
        {"window": (10**12, 0)},
        {"window": (10**12 - 3, 2), "causal_offset": 10**12},
        {"is_causal": True, "causal_offset": 10**12},
        {"is_causal": True, "causal_offset": -(10**12)},
    ],
)
def test_positions_are_two_limits(fields: dict[str, Any]) -> None:
    """Causality, offset and window together are two limits, which show what `visible` shows, and
    whose sum with any position is an int32."""
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


# --- what it refuses -----------------------------------------------------------------------------


def shaped(heads: int = 2, width: int = 4, **fields: Any) -> AttentionCase:
    """A case of any shape that takes no memory."""
    x = torch.zeros(1, dtype=fields.pop("dtype", torch.bfloat16)).expand(1, heads, 3, width)
    return AttentionCase(ref=CaseRef(case="shaped"), q=x, k=x, v=x, **{"scale": 0.5, **fields})


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (shaped(), None),
        (shaped(dtype=torch.float8_e5m2), None),
        (shaped(width=256), None),
        (shaped(width=257), "up to 256 wide, not 257"),
        (shaped(heads=65536), "up to 65535 heads of all batch entries, not 65536"),
        (shaped(dtype=torch.float64), "in float64"),
        (shaped(mask=torch.zeros(3, 3, dtype=torch.float64)), "in float64"),
        (shaped(sinks=torch.zeros(2, dtype=torch.float64)), "in float64"),
        (shaped(grad_out=torch.zeros(1, 2, 3, 4, dtype=torch.float64)), "in float64"),
        (shaped(heads=2**24, mask=torch.zeros(1).expand(1, 2**24, 3, 3)), "heads"),
    ],
)
def test_shapes_and_formats_it_cannot_take(case: AttentionCase, words: str | None) -> None:
    """Each has its reason in words."""
    found = fused._unfit(case)
    assert found is None if words is None else words in str(found)


def test_a_mask_too_large_for_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask is held in fp64, also a bool one, and may not take more than MASK_BYTES there."""
    monkeypatch.setattr(fused, "MASK_BYTES", 8 * 9)
    assert fused._unfit(shaped(mask=torch.zeros(3, 3))) is None
    assert "18 elements" in str(fused._unfit(shaped(mask=torch.zeros(2, 3, 3) == 0)))
    assert "18 elements" in str(fused._unfit(shaped(mask=torch.zeros(2, 3, 3))))


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"logits": 1e6}, False),
        ({"logits": 1e14}, True),
        ({"scale": -1e14}, True),
        ({"scale": 1e300}, True),
        ({"scale": 0.0, "logits": 1e14}, False),
    ],
)
def test_scores_beyond_fp64(fields: dict[str, Any], refused: bool) -> None:
    """Where scores may reach 2^44 the sums of the two passes differ by more than P can bear."""
    found = fused._out_of_range(make_case(dtype=torch.float32, **fields))
    assert ("where fp64 has no digits left" in str(found)) is refused


def test_rows_that_a_mask_lifts_beyond_fp64() -> None:
    """A row whose every score is about -1e30 has an L that says nothing of their differences: no
    gradient is made from it. Empty rows, whose L is -inf, are none of these."""
    lowered = torch.zeros(4, 5)
    lowered[1], lowered[2] = -1e30, -inf
    for mask, refused in ((lowered, True), (lowered.masked_fill(lowered < 0, -inf), False)):
        forward = vars(blocked.attend(make_case(dtype=torch.float32, mask=mask)))
        if refused:
            with pytest.raises(Refused, match="about 1e\\+30"):
                fused.accept_scores(forward)
        else:
            fused.accept_scores(forward)


# --- which path a result came by -----------------------------------------------------------------


def test_what_the_fast_path_refuses_the_plain_one_computes() -> None:
    """With the reason in the result, and nothing else changed; what it takes is taken from it, and
    any other error is not hidden."""
    case = step(dtype=torch.float32)
    plain = blocked.gradients(case)

    def refuse(case: AttentionCase) -> Gradients:
        raise Refused("the mask is too large")

    def fail(case: AttentionCase) -> Gradients:
        raise ValueError("broken")

    found = reference._fast_or_plain(case, refuse, blocked.gradients)
    assert found.by == "blocked: the mask is too large"
    for field in dataclasses.fields(Gradients):
        if field.name != "by":
            assert torch.equal(getattr(found, field.name), getattr(plain, field.name))
    fast: Reference = reference._fast_or_plain(case, lambda case: plain, fail)
    assert fast is plain
    with pytest.raises(ValueError, match="broken"):
        reference._fast_or_plain(case, fail, blocked.gradients)
