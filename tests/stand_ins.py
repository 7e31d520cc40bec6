"""Stand-ins for packages that are not installed: their documented interfaces in plain torch.

Each computes in float64 and rounds once, so that a test sees layouts, alignment and conventions and
nothing else. Their arguments are those of flash-attn 2.8, flash_attn_interface (flash-attn-3),
flash_attn.cute (flash-attn-4, 4.0) and xformers 0.0.35; what these check of their inputs, the
stand-ins check too. `fault` makes one wrong on purpose: top-left, window, heads, lse or scale.
"""

from __future__ import annotations

import math
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor


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
    fault: str = "",
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence, q [n, heads, d], k and v [m, kv_heads, .], and the log-sum-exp
    [heads, n], with float32's precision as the packages have it."""
    group = q.shape[1] // k.shape[1]
    wide = [x.double().transpose(0, 1) for x in (q, k, v)]
    if fault == "heads":
        wide[1:] = [x.repeat(group, 1, 1) for x in wide[1:]]
    else:
        wide[1:] = [x.repeat_interleave(group, dim=0) for x in wide[1:]]
    S = wide[0] @ wide[1].mT * (scale * (1.01 if fault == "scale" else 1.0))
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
    return (P @ wide[2]).transpose(0, 1).to(q.dtype), L.float()


def beyond(n: int, m: int, left: int, right: int, fault: str = "") -> Tensor | None:
    """True where a window hides a key, aligned bottom-right: query i is at key i + m - n. A side
    below 0 has no limit."""
    if left < 0 and right < 0:
        return None
    offset = 0 if fault == "top-left" else m - n
    distance = torch.arange(m)[None, :] - torch.arange(n)[:, None] - offset
    hidden = torch.zeros(n, m, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left - (1 if fault == "window" else 0)
    if right >= 0:
        hidden |= distance > right
    return hidden


# --- flash-attention -----------------------------------------------------------------------------

PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
COMMON = ("softmax_scale", "causal", "window_size", "softcap", "deterministic")
SPLIT = ("num_splits", "pack_gqa")
# By module: what it takes, a side of a window without a limit, and what asks for the log-sum-exp.
FLASH: dict[str, tuple[tuple[str, ...], int | None, str]] = {
    "flash_attn": (COMMON, -1, "return_attn_probs"),
    "flash_attn_interface": ((*COMMON, *SPLIT), -1, "return_attn_probs"),
    "flash_attn.cute": ((*COMMON, *SPLIT, "learnable_sink"), None, "return_lse"),
}


def flash(name: str, fault: str) -> types.ModuleType:
    """One of the modules of FLASH."""
    known, unlimited, asks = FLASH[name]

    def sequence(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        assert q.dtype == k.dtype == v.dtype
        assert q.dtype in (torch.float16, torch.bfloat16)
        assert q.shape[-1] <= 256
        assert name != "flash_attn" or v.shape[-1] == q.shape[-1]
        sink = given.get("learnable_sink")
        assert sink is None or sink.dtype == torch.bfloat16
        assert all(side == unlimited or side >= 0 for side in given["window_size"])
        left, right = (-1 if side is None else side for side in given["window_size"])
        hidden = beyond(q.shape[0], k.shape[0], left, 0 if given["causal"] else right, fault)
        scale, softcap = given["softmax_scale"], given["softcap"]
        return plain(q, k, v, hidden, scale, softcap=softcap, sinks=sink, fault=fault)

    def checked(given: dict[str, Any], *more: str) -> dict[str, Any]:
        assert given.pop(asks)
        assert given.keys() <= {*known, *more}
        return given

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, ...]:
        """[batch, length, heads, head_dim], and the log-sum-exp [batch, heads, length]."""
        given = checked(given)
        parts = [sequence(*x, given) for x in zip(q, k, v, strict=True)]
        lse = torch.stack([x[1] for x in parts])
        return torch.stack([x[0] for x in parts]), lse.flip(1) if fault == "lse" else lse

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
        lse = torch.cat([x[1] for x in parts], dim=1)
        return torch.cat([x[0] for x in parts]), lse.flip(0) if fault == "lse" else lse

    module = types.ModuleType(name)
    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    return module


# --- xformers ------------------------------------------------------------------------------------


class LowerTriangularMask:
    """Causality, top-left."""

    def hidden(self, n: int, m: int, fault: str) -> Tensor | None:
        return beyond(n, n, -1, 0) if n == m else torch.ones(n, m).triu(1).bool()


class LowerTriangularFromBottomRightMask:
    """Causality, bottom-right."""

    def hidden(self, n: int, m: int, fault: str) -> Tensor | None:
        return beyond(n, m, -1, 0, fault)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask:
    """Causality, bottom-right, and so many keys up to the query's own."""

    _window_size: int

    def hidden(self, n: int, m: int, fault: str) -> Tensor | None:
        assert self._window_size > 0
        return beyond(n, m, self._window_size - 1, 0, fault)


@dataclass
class LocalAttentionFromBottomRightMask:
    """A window, bottom-right, both sides limited."""

    window_left: int
    window_right: int

    def hidden(self, n: int, m: int, fault: str) -> Tensor | None:
        assert self.window_left >= 0
        assert self.window_right >= 0
        return beyond(n, m, self.window_left, self.window_right, fault)


class Operator:
    """A forward operator: its name, and how it returns the log-sum-exp."""

    def __init__(self, name: str, pads: bool) -> None:
        self.NAME, self.pads = name, pads

    def reasons(self, q: Tensor, bias: Any) -> list[str]:
        found = []
        if not self.pads and isinstance(bias, Tensor):
            found.append("attn_bias type is <class 'torch.Tensor'>")
        if self.pads and isinstance(bias, LocalAttentionFromBottomRightMask):
            found.append("attn_bias type is LocalAttentionFromBottomRightMask")
        if not self.pads and q.dtype == torch.float32:
            found.append("dtype=torch.float32 (supported: float16, bfloat16)")
        if isinstance(bias, Tensor) and any(bias.stride(d) % 8 for d in range(bias.ndim - 1)):
            found.append("attn_bias.stride(-2) % 8 != 0")
        return found


def xformers(fault: str) -> dict[str, types.ModuleType]:
    """The modules `xformers.ops.fmha` and `xformers.ops.fmha.attn_bias`."""
    fmha, kinds = (types.ModuleType(f"xformers.ops.fmha{x}") for x in ("", ".attn_bias"))
    for kind in (
        LowerTriangularMask,
        LowerTriangularFromBottomRightMask,
        LowerTriangularFromBottomRightLocalAttentionMask,
        LocalAttentionFromBottomRightMask,
    ):
        setattr(kinds, kind.__name__, kind)
    for name, operator in (("cutlass", "cutlassF-pt"), ("flash", "fa2F@2.8.3-pt")):
        pads = name == "cutlass"
        made = types.SimpleNamespace(FwOp=Operator(operator, pads), BwOp=f"{name} backward")
        setattr(fmha, name, made)

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Any, scale: float, op: Operator) -> Any:
        reasons = op.reasons(q, bias)
        if reasons:
            raise ValueError(
                "Operator `memory_efficient_attention` does not support inputs:\n"
                f"     query       : shape={tuple(q.shape)} ({q.dtype})\n"
                f"`{op.NAME}` is not supported because:\n    " + "\n    ".join(reasons)
            )
        grouped = q.shape[2:4] if q.ndim == 5 else None
        flat = [x.flatten(2, 3) if grouped else x for x in (q, k, v)]
        if grouped and fault == "heads":
            flat[1:] = [x.transpose(2, 3).flatten(2, 3) for x in (k, v)]
        outs, sums = [], []
        for batch, (one_q, one_k, one_v) in enumerate(zip(*flat, strict=True)):
            added, hidden = None, None
            if isinstance(bias, Tensor):
                added = bias[batch].flatten(0, 1) if grouped else bias[batch]
            elif bias is not None:
                hidden = bias.hidden(one_q.shape[0], one_k.shape[0], fault)
            out, lse = plain(one_q, one_k, one_v, hidden, scale, added=added, fault=fault)
            outs.append(out)
            sums.append(lse.flip(0) if fault == "lse" else lse)
        out, lse = torch.stack(outs), torch.stack(sums)
        if op.pads:
            room = -(-lse.shape[-1] // 32) * 32
            lse = torch.nn.functional.pad(lse, (0, room - lse.shape[-1]), value=math.inf)
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


def install(monkeypatch: pytest.MonkeyPatch, fault: str = "") -> None:
    """Put all stand-ins where imports find them, for one test."""
    modules = {name: flash(name, fault) for name in FLASH} | xformers(fault)
    modules |= {name: types.ModuleType(name) for name in ("xformers", "xformers.ops")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
