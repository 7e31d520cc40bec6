"""The adapters for external packages, each against a stand-in of its documented interface.

The stand-ins compute in float64 and round once, so an adapter that says everything right returns
the reference, rounded once. Their arguments are those of flash-attn 2.8, flash_attn_interface
(flash-attn-3), flash_attn.cute (flash-attn-4, 4.0) and xformers 0.0.35; what these check of their
inputs, the stand-ins check too.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from typing import Any

import pytest
import torch
from oracles import make_case
from torch import Tensor

from numdev.cases import AttentionCase, empty_rows
from numdev.kernels import Output, Refused, find
from numdev.kernels.reference import attend, gradients
from numdev.kernels.sdpa import efficient_attention, flash_attention_2
from numdev.system import System


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor | None,
    scale: float,
    *,
    added: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence, q [n, heads, d], k and v [m, kv_heads, .], and the log-sum-exp
    [heads, n], with float32's precision as the packages have it."""
    group = q.shape[1] // k.shape[1]
    wide_q, *wide = (x.double().transpose(0, 1) for x in (q, k, v))
    wide_k, wide_v = (x.repeat_interleave(group, dim=0) for x in wide)
    S = wide_q @ wide_k.mT * scale
    if softcap:
        S = softcap * torch.tanh(S / softcap)
    if added is not None:
        S = S + added.double()
    if hidden is not None:
        S = S.masked_fill(hidden, -math.inf)
    if sinks is not None:
        S = torch.cat([S, sinks.double()[:, None, None].expand(*S.shape[:2], 1)], dim=-1)
    L = torch.logsumexp(S, dim=-1)
    empty = torch.isneginf(L)
    P = torch.exp(S - L.masked_fill(empty, 0.0)[..., None])[..., : k.shape[0]]
    return (P @ wide_v).transpose(0, 1).to(q.dtype), L.float()


def beyond(n: int, m: int, left: int, right: int, offset: int) -> Tensor | None:
    """True where a window hides a key: query i is at key i + offset. A side below 0 has no
    limit."""
    if left < 0 and right < 0:
        return None
    distance = torch.arange(m)[None, :] - torch.arange(n)[:, None] - offset
    hidden = torch.zeros(n, m, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    return hidden


# --- flash-attention -----------------------------------------------------------------------------

PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
COMMON = ("softmax_scale", "causal", "window_size", "softcap", "deterministic")
SPLIT = ("num_splits", "pack_gqa")
# By module: what it takes, a side of a window without a limit, and what asks for the log-sum-exp.
MODULES: dict[str, tuple[tuple[str, ...], int | None, str]] = {
    "flash_attn": (COMMON, -1, "return_attn_probs"),
    "flash_attn_interface": ((*COMMON, *SPLIT), -1, "return_attn_probs"),
    "flash_attn.cute": ((*COMMON, *SPLIT, "learnable_sink"), None, "return_lse"),
}


def flash(name: str) -> types.ModuleType:
    """One of the modules of MODULES."""
    known, unlimited, asks = MODULES[name]

    def sequence(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        assert q.dtype == k.dtype == v.dtype
        assert q.dtype in (torch.float16, torch.bfloat16)
        assert q.shape[-1] <= 256
        assert name != "flash_attn" or v.shape[-1] == q.shape[-1]
        sink = given.get("learnable_sink")
        assert sink is None or sink.dtype == torch.bfloat16
        assert all(side == unlimited or side >= 0 for side in given["window_size"])
        left, right = (-1 if side is None else side for side in given["window_size"])
        n, m = q.shape[0], k.shape[0]
        hidden = beyond(n, m, left, 0 if given["causal"] else right, m - n)
        return plain(q, k, v, hidden, given["softmax_scale"], softcap=given["softcap"], sinks=sink)

    def checked(given: dict[str, Any], *more: str) -> dict[str, Any]:
        assert given.pop(asks)
        assert given.keys() <= {*known, *more}
        return given

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, ...]:
        """[batch, length, heads, head_dim], and the log-sum-exp [batch, heads, length]."""
        given = checked(given)
        parts = [sequence(*x, given) for x in zip(q, k, v, strict=True)]
        return torch.stack([x[0] for x in parts]), torch.stack([x[1] for x in parts])

    def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, ...]:
        """[total, heads, head_dim], and the log-sum-exp [heads, total]."""
        given = checked(given, *PACKED)
        cu_q, cu_k, *most = (given[n] for n in PACKED)
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert (cu_q[0], cu_q[-1], cu_k[-1]) == (0, q.shape[0], k.shape[0])
        assert most == [int(cu_q.diff().max()), int(cu_k.diff().max())]
        lengths = (cu_q.diff().tolist(), cu_k.diff().tolist(), cu_k.diff().tolist())
        pieces = (x.split(at) for x, at in zip((q, k, v), lengths, strict=True))
        parts = [sequence(*x, given) for x in zip(*pieces, strict=True)]
        return torch.cat([x[0] for x in parts]), torch.cat([x[1] for x in parts], dim=1)

    module = types.ModuleType(name)
    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    return module


# --- xformers ------------------------------------------------------------------------------------

# By bias: from its arguments the sides of a window; one is aligned top-left.
TOP_LEFT_BIAS = "LowerTriangularMask"
BIASES: dict[str, Any] = {
    TOP_LEFT_BIAS: lambda: (-1, 0),
    "LowerTriangularFromBottomRightMask": lambda: (-1, 0),
    "LowerTriangularFromBottomRightLocalAttentionMask": lambda size: (size - 1, 0),
    "LocalAttentionFromBottomRightMask": lambda window_left, window_right: (
        window_left, window_right
    ),
}  # fmt: skip


class Bias:
    """What hides keys; a kind of it is made of its name in BIASES."""

    def __init__(self, *given: int, **named: int) -> None:
        self.left, self.right = BIASES[type(self).__name__](*given, **named)
        assert self.left >= 0 or self.right == 0

    def hidden(self, n: int, m: int) -> Tensor | None:
        offset = 0 if type(self).__name__ == TOP_LEFT_BIAS else m - n
        return beyond(n, m, self.left, self.right, offset)


def reasons(operator: str, q: Tensor, bias: Any) -> list[str]:
    """Why an operator does not take a call."""
    is_flash, is_tensor = operator == "flash", isinstance(bias, Tensor)
    kind = type(bias).__name__
    found = {
        "attn_bias type is <class 'torch.Tensor'>": is_flash and is_tensor,
        f"attn_bias type is {kind}": not is_flash and kind == "LocalAttentionFromBottomRightMask",
        "dtype=torch.float32 (supported: float16, bfloat16)": is_flash and q.dtype == torch.float32,
        "attn_bias.stride(-2) % 8 != 0": is_tensor
        and any(bias.stride(d) % 8 for d in range(bias.ndim - 1)),
    }
    return [reason for reason, holds in found.items() if holds]


def xformers() -> dict[str, types.ModuleType]:
    """The modules `xformers.ops.fmha` and `xformers.ops.fmha.attn_bias`."""
    fmha, kinds = (types.ModuleType(f"xformers.ops.fmha{x}") for x in ("", ".attn_bias"))
    for name in BIASES:
        setattr(kinds, name, type(name, (Bias,), {}))
    for name, operator in (("cutlass", "cutlassF-pt"), ("flash", "fa2F@2.8.3-pt")):
        forward = types.SimpleNamespace(NAME=operator, kind=name)
        setattr(fmha, name, types.SimpleNamespace(FwOp=forward, BwOp=f"{name} backward"))

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Any, scale: float, op: Any) -> Any:
        if refused := reasons(op.kind, q, bias):
            raise ValueError(
                "Operator `memory_efficient_attention` does not support inputs:\n"
                f"     query       : shape={tuple(q.shape)} ({q.dtype})\n"
                f"`{op.NAME}` is not supported because:\n    " + "\n    ".join(refused)
            )
        grouped = q.shape[2:4] if q.ndim == 5 else None
        flat = [x.flatten(2, 3) if grouped else x for x in (q, k, v)]
        parts = []
        for batch, (one_q, one_k, one_v) in enumerate(zip(*flat, strict=True)):
            added, hidden = None, None
            if isinstance(bias, Tensor):
                added = bias[batch].flatten(0, 1) if grouped else bias[batch]
            elif bias is not None:
                hidden = bias.hidden(one_q.shape[0], one_k.shape[0])
            parts.append(plain(one_q, one_k, one_v, hidden, scale, added=added))
        out, lse = (torch.stack(x) for x in zip(*parts, strict=True))
        if op.kind == "cutlass":  # pads the length to a multiple of 32
            lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
        if grouped:
            out, lse = out.unflatten(2, grouped), lse.unflatten(1, grouped)
        return out, lse

    def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op):
        assert query.ndim == 4, "grouped heads have no backward"
        return attend(query, key, value, attn_bias, scale, op[0])[0]

    def forward_requires_grad(query, key, value, attn_bias=None, p=0.0, scale=None, *, op):
        return attend(query, key, value, attn_bias, scale, op)

    fmha.memory_efficient_attention = memory_efficient_attention
    fmha.memory_efficient_attention_forward_requires_grad = forward_requires_grad
    fmha.attn_bias = kinds
    return {fmha.__name__: fmha, kinds.__name__: kinds}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All stand-ins where imports find them, for one test."""
    modules = {name: flash(name) for name in MODULES} | xformers()
    modules |= {name: types.ModuleType(name) for name in ("xformers", "xformers.ops")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


# --- the cases -----------------------------------------------------------------------------------

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


def test_the_comparison_rejects() -> None:
    """Another alignment, a window wider by one, another order of heads, a scale off by 1 %, and the
    log-sum-exp of other heads."""
    case = case_of(CASES["sliding window"])
    changes = ({}, {"causal_offset": 0}, {"window": (3, 0)}, {"scale": 1.01 * case.scale},
               {"k": case.k.flip(1), "v": case.v.flip(1)})  # fmt: skip
    cases = (dataclasses.replace(case, **x) for x in changes)
    right, *wrong = (attend(x) for x in cases)
    assert_right(case, Output(out=right.out.to(case.q.dtype), lse=right.lse))
    for out, lse in ((right.out, right.lse.flip(1)), *((x.out, x.lse) for x in wrong)):
        with pytest.raises(AssertionError):
            assert_right(case, Output(out=out.to(case.q.dtype), lse=lse))


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
