"""The adapters for external packages, each against a stand-in of its documented interface.

The stand-ins (stand_ins.py) compute in float64 and round once, so an adapter that says everything
right returns the reference, rounded once; each of their faults is one that an adapter could have.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import stand_ins
import torch
from oracles import make_case
from torch import Tensor

from numdev.cases import AttentionCase, empty_rows
from numdev.kernels import Output, Refused, find
from numdev.kernels.reference import attend, gradients
from numdev.kernels.sdpa import efficient_attention, flash_attention_2
from numdev.system import System

FLASH = ("flash-attn-2", "flash-attn-3", "flash-attn-4")
ALL = (*FLASH, "xformers")
H200 = System(device="cuda", gpu="NVIDIA H200", capability=(9, 0), processors=132)
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {"varlen": varlen}) for name in FLASH for varlen in (False, True)),
    *(("xformers", {"op": op}) for op in ("cutlass", "flash")),
)
# Shapes that no layout can be taken for another in; head dimensions that all of them take.
SHAPE: dict[str, Any] = {"batch": 3, "heads": 4, "kv_heads": 2, "head_dim": 8}
LONG: dict[str, Any] = {"q_len": 5, "kv_len": 9, "causal_offset": 4}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one head each": {"heads": 3, "kv_heads": 3},
    "one query": {"q_len": 1, "kv_len": 9},
    "causal": {"q_len": 6, "kv_len": 6, "is_causal": True},
    "causal, more keys": {**LONG, "is_causal": True},
    "causal, more queries": {"q_len": 9, "kv_len": 5, "causal_offset": -4, "is_causal": True},
    "sliding window": {**LONG, "is_causal": True, "window": (2, 0)},
    "sliding window, open to the right": {**LONG, "is_causal": True, "window": (2, None)},
    "causal with a window that hides nothing": {**LONG, "is_causal": True, "window": (None, None)},
    "another scale": {"scale": 0.9},
    "window": {**LONG, "window": (2, 1)},
    "window, left only": {**LONG, "window": (1, None)},
    "window, right only": {**LONG, "window": (None, 2)},
    "window, own key": {**LONG, "window": (0, 0)},
}


def case_of(fields: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> AttentionCase:
    return make_case(**{**SHAPE, **fields}, dtype=dtype)


def assert_rounded(found: Tensor, exact: Tensor, empty: Tensor) -> None:
    """`found` is the exact answer rounded once to its format, with 1 % for the float64 that both
    were computed in; rows that see nothing are 0."""
    u = 2.0**-8 if found.dtype == torch.bfloat16 else 2.0**-11
    expected = exact.masked_fill(empty[..., None], 0.0)
    # Below the smallest normal number of float16 the spacing is 2^-24.
    assert ((found.double() - expected).abs() <= 1.01 * u * expected.abs() + 2.0**-24).all()


def assert_right(case: AttentionCase, found: Output) -> None:
    """Output and log-sum-exp are the reference's, the latter to float32."""
    exact, empty = attend(case), empty_rows(case)
    assert_rounded(found.out, exact.out, empty)
    assert found.lse is not None
    off = (found.lse.double() - exact.lse).masked_fill(empty & (case.sinks is None), 0.0).abs()
    assert (off <= 2.0**-23 * (1 + exact.lse.masked_fill(empty, 0.0).abs())).all()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.install(monkeypatch)


# --- layouts, alignment, windows, the log-sum-exp ------------------------------------------------


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@pytest.mark.parametrize("feature", CASES)
def test_adapters_say_everything_right(
    installed: None, name: str, options: dict[str, Any], feature: str
) -> None:
    """Through every interface, batched or packed, a case's output and log-sum-exp are the fp64
    reference's, rounded once. A window without causality is not for xFormers' cutlass operator."""
    for dtype in (torch.bfloat16, torch.float16):
        case = case_of(CASES[feature], dtype)
        if options.get("op") == "cutlass" and feature.startswith("window"):
            with pytest.raises(Refused, match=r"^attn_bias type is LocalAttentionFromBottom"):
                find(name).attend(case, **options)
        else:
            assert_right(case, find(name).attend(case, **options))


MASKS: dict[str, dict[str, Any]] = {
    "bool": {"mask": ("bool", "bhqk")},
    "additive": {"mask": ("float", "bhqk")},
    "additive, one for all": {"mask": ("holes", "qk")},
    "per key and causal": {"mask": ("float", "b11k"), "is_causal": True},
    "per head and window": {"mask": ("bool", "1hqk"), "window": (1, 2)},
}


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("feature", MASKS)
def test_masks_of_xformers(installed: None, feature: str, kv_heads: int) -> None:
    """A mask of any shape becomes a tensor added to the scores, with causality and windows in it,
    of the alignment that xFormers asks for."""
    case = case_of({**MASKS[feature], "kv_heads": kv_heads, "kv_len": 9})
    assert_right(case, find("xformers").attend(case))


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@pytest.mark.parametrize(
    ("fault", "feature"),
    [
        ("top-left", "causal, more keys"),
        ("top-left", "sliding window"),
        ("window", "sliding window"),
        ("heads", "plain"),
        ("lse", "plain"),
        ("scale", "plain"),
    ],
)
def test_comparing_rejects_what_an_adapter_could_get_wrong(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], fault: str, feature: str
) -> None:
    """A wrong alignment, a window wider by one, another order of heads, a log-sum-exp of other
    heads, and a scale off by 1 % all fail the comparison above."""
    stand_ins.install(monkeypatch, fault)
    case = case_of(CASES[feature])
    with pytest.raises(AssertionError):
        assert_right(case, find(name).attend(case, **options))


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@pytest.mark.parametrize("feature", ["causal, more keys", "sliding window", "one head each"])
def test_gradients_come_back_through_the_layouts(
    installed: None, name: str, options: dict[str, Any], feature: str
) -> None:
    """Autograd's dq, dk and dv are the reference's, rounded once, in the case's own layout."""
    case = case_of(CASES[feature])
    dO = torch.randn(case.q.shape, generator=torch.Generator().manual_seed(1)).to(case.q)
    case = dataclasses.replace(case, grad_out=dO)
    if name == "xformers" and case.group > 1:
        with pytest.raises(Refused, match="no backward for grouped heads"):
            find(name).gradients(case, **options)
        return
    found, exact = find(name).gradients(case, **options), gradients(case)
    for tensor in ("dq", "dk", "dv"):
        g = getattr(exact, tensor)
        assert_rounded(getattr(found, tensor), g, torch.zeros(g.shape[:-1], dtype=torch.bool))


# --- refusing ------------------------------------------------------------------------------------


TOP_LEFT: dict[str, Any] = {"is_causal": True, "q_len": 3, "kv_len": 7}


@pytest.mark.parametrize(
    ("names", "fields", "says"),
    [
        (FLASH, {"dtype": torch.float32}, "takes float16 and bfloat16"),
        (FLASH, {"mask": ("bool", "qk")}, "takes no mask"),
        (FLASH, {"head_dim": 264}, "head dimensions up to 256"),
        (FLASH, TOP_LEFT, "bottom-right, an offset of 4, not 0"),
        (ALL, {**TOP_LEFT, "causal_offset": 3}, "an offset of 4, not 3"),
        (ALL, {"window": (1, 1)}, "an offset of 1, not 0"),
        (ALL, {"window": (-1, 2), "kv_len": 4}, "a window below 0"),
        (("flash-attn-2", "flash-attn-3", "xformers"), {"sinks": True}, "no attention sinks"),
        (("flash-attn-4",), {"sinks": True, "dtype": torch.float16}, "sinks in bfloat16 only"),
        (("flash-attn-2",), {"v_dim": 16}, "V of the head dimension of Q"),
        (("flash-attn-3", "flash-attn-4"), {"head_dim": 12}, "multiples of 8"),
        (("flash-attn-4",), {"v_dim": 12}, "multiples of 8"),
        (("xformers",), {"softcap": 2.0}, "no soft cap"),
        (("xformers",), {"dtype": torch.float64}, "takes float16, bfloat16 and float32"),
    ],
)
def test_what_they_cannot_do(names: tuple[str, ...], fields: dict[str, Any], says: str) -> None:
    """What a package, or one version, does not take is refused in a sentence, without it."""
    case = make_case(**{"dtype": torch.bfloat16, "head_dim": 8, **fields})
    for name in names:
        with pytest.raises(Refused, match=says):
            find(name).attend(case)


def test_an_operators_own_reasons(installed: None) -> None:
    """What an xFormers operator declines is a refusal, in the operator's own words alone."""
    for fields, says in (
        ({"mask": ("bool", "qk")}, "^attn_bias type is <class 'torch.Tensor'>$"),
        ({"dtype": torch.float32}, "dtype=torch.float32"),
    ):
        case = make_case(**{**SHAPE, "dtype": torch.bfloat16, **fields})
        with pytest.raises(Refused, match=says):
            find("xformers").attend(case, op="flash")


# --- claims --------------------------------------------------------------------------------------


def ran(**did: Any) -> Output:
    return Output(out=torch.zeros(1), did=did)


def test_claims() -> None:
    """Version 2 rounds as PyTorch's copy, packed without splits but in decoding; xFormers' cutlass
    operator as PyTorch's efficient one; where tiles are not documented there are none; and no
    emulation stands for an approximate tanh."""
    case = case_of({"kv_len": 4000})
    two = find("flash-attn-2").claims
    claim = flash_attention_2(case, H200)
    assert claim["splits"] > 1
    assert two(case, ran(packed=False), H200) == claim
    packed = ran(packed=True)
    assert two(case, packed, H200) == {**claim, "splits": 1}
    decoding = case_of({"q_len": 1, "kv_len": 4000})
    assert two(decoding, packed, H200) == flash_attention_2(decoding, H200)
    for name in ("flash-attn-3", "flash-attn-4"):
        assert find(name).claims(case, ran(), H200) == {"preset": "fa2"}
    capped = case_of({"softcap": 2.0})
    assert all(find(name).claims(capped, ran(), H200) is None for name in FLASH)
    own = find("xformers").claims
    assert own(case, ran(op="cutlass"), H200) == efficient_attention(case)
    assert own(case, ran(op="flash"), H200) == {"preset": "fa2"}
