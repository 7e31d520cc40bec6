"""Stand-ins for packages that are not installed: their documented interfaces in plain torch.

Each computes in float64 and rounds once, so that a test sees layouts, alignment and conventions and
nothing else. Their signatures are those of flash-attn 2.8, flash_attn_interface (flash-attn-3),
flash_attn.cute (flash-attn-4, 4.0) and xformers 0.0.35; what these check of their inputs, the
stand-ins check too. `fault` makes one wrong on purpose, so that a test can show that it would see
it.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

FAULTS = ("top-left", "window", "heads", "lse", "scale")


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


def _sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    window: Any,
    fault: str,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.shape[-1] <= 256
    left, right = (-1 if side is None else side for side in window)
    hidden = beyond(q.shape[0], k.shape[0], left, 0 if causal else right, fault)
    return plain(q, k, v, hidden, scale, fault=fault, **more)


def _batched(q: Tensor, k: Tensor, v: Tensor, fault: str, **more: Any) -> tuple[Tensor, Tensor]:
    """[batch, length, heads, head_dim], and the log-sum-exp [batch, heads, length]."""
    assert q.ndim == k.ndim == v.ndim == 4
    parts = [_sequence(*x, fault=fault, **more) for x in zip(q, k, v, strict=True)]
    lse = torch.stack([x[1] for x in parts])
    return torch.stack([x[0] for x in parts]), lse.flip(1) if fault == "lse" else lse


def _packed(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, most: Any, fault: str, **more: Any
) -> tuple[Tensor, Tensor]:
    """[total, heads, head_dim], and the log-sum-exp [heads, total]."""
    assert q.ndim == k.ndim == v.ndim == 3
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (cu_q[0], cu_q[-1], cu_k[-1]) == (0, q.shape[0], k.shape[0])
    assert most == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    pieces = zip(
        q.split(cu_q.diff().tolist()),
        k.split(cu_k.diff().tolist()),
        v.split(cu_k.diff().tolist()),
        strict=True,
    )
    parts = [_sequence(*x, fault=fault, **more) for x in pieces]
    lse = torch.cat([x[1] for x in parts], dim=1)
    return torch.cat([x[0] for x in parts]), lse.flip(0) if fault == "lse" else lse


def flash_attn_2(fault: str, calls: list[dict[str, Any]]) -> types.ModuleType:
    """The module `flash_attn`."""
    module = types.ModuleType("flash_attn")

    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
        softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        assert v.shape[-1] == q.shape[-1]
        calls.append({"deterministic": deterministic})
        out, lse = _batched(
            q, k, v, fault, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap
        )
        return (out, lse, None) if return_attn_probs else out

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        calls.append({"deterministic": deterministic})
        most = (max_seqlen_q, max_seqlen_k)
        out, lse = _packed(
            q, k, v, cu_seqlens_q, cu_seqlens_k, most, fault,
            scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
        )  # fmt: skip
        return (out, lse, None) if return_attn_probs else out

    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    return module


def flash_attn_3(fault: str, calls: list[dict[str, Any]]) -> types.ModuleType:
    """The module `flash_attn_interface`."""
    module = types.ModuleType("flash_attn_interface")

    def flash_attn_func(
        q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
        v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
        pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        calls.append(
            {"num_splits": num_splits, "pack_gqa": pack_gqa, "deterministic": deterministic}
        )
        out, lse = _batched(
            q, k, v, fault, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap
        )
        return (out, lse) if return_attn_probs else out

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
        seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
        v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
        pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        calls.append(
            {"num_splits": num_splits, "pack_gqa": pack_gqa, "deterministic": deterministic}
        )
        most = (max_seqlen_q, max_seqlen_k)
        out, lse = _packed(
            q, k, v, cu_seqlens_q, cu_seqlens_k, most, fault,
            scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
        )  # fmt: skip
        return (out, lse) if return_attn_probs else out

    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    return module


def flash_attn_4(fault: str, calls: list[dict[str, Any]]) -> types.ModuleType:
    """The module `flash_attn.cute`, which writes None for a side without a limit."""
    module = types.ModuleType("flash_attn.cute")

    def checked(window: Any, sink: Tensor | None) -> None:
        assert all(side is None or side >= 0 for side in window)
        assert sink is None or sink.dtype == torch.bfloat16

    def flash_attn_func(
        q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False,
        window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
        deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None,
        aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None,
        return_lse=False,
    ):  # fmt: skip
        checked(window_size, learnable_sink)
        calls.append(
            {"num_splits": num_splits, "pack_gqa": pack_gqa, "deterministic": deterministic}
        )
        out, lse = _batched(
            q, k, v, fault, scale=softmax_scale, causal=causal, window=window_size,
            softcap=softcap, sinks=learnable_sink,
        )  # fmt: skip
        return out, lse if return_lse else None

    def flash_attn_varlen_func(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
        max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None,
        gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
        window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
        deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None,
        block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False,
    ):  # fmt: skip
        checked(window_size, learnable_sink)
        calls.append(
            {"num_splits": num_splits, "pack_gqa": pack_gqa, "deterministic": deterministic}
        )
        most = (max_seqlen_q, max_seqlen_k)
        out, lse = _packed(
            q, k, v, cu_seqlens_q, cu_seqlens_k, most, fault, scale=softmax_scale, causal=causal,
            window=window_size, softcap=softcap, sinks=learnable_sink,
        )  # fmt: skip
        return out, lse if return_lse else None

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


@dataclass
class BlockDiagonalMask:
    """Packed sequences; `inner` says what is hidden within each."""

    q_lengths: list[int]
    kv_lengths: list[int]
    inner: Any = None

    @classmethod
    def from_seqlens(cls, q_seqlen: list[int], kv_seqlen: list[int]) -> BlockDiagonalMask:
        return cls(q_seqlen, kv_seqlen)

    def to(self, device: torch.device) -> BlockDiagonalMask:
        return self

    def _with(self, inner: Any) -> BlockDiagonalMask:
        return BlockDiagonalMask(self.q_lengths, self.kv_lengths, inner)

    def make_causal(self) -> BlockDiagonalMask:
        return self._with(LowerTriangularMask())

    def make_causal_from_bottomright(self) -> BlockDiagonalMask:
        return self._with(LowerTriangularFromBottomRightMask())

    def make_local_attention_from_bottomright(self, window_size: int) -> BlockDiagonalMask:
        return self._with(LowerTriangularFromBottomRightLocalAttentionMask(window_size))


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


def xformers(fault: str, calls: list[dict[str, Any]]) -> dict[str, types.ModuleType]:
    """The modules `xformers.ops.fmha` and `xformers.ops.fmha.attn_bias`."""
    fmha, kinds = (types.ModuleType(f"xformers.ops.fmha{x}") for x in ("", ".attn_bias"))
    for kind in (
        LowerTriangularMask,
        LowerTriangularFromBottomRightMask,
        LowerTriangularFromBottomRightLocalAttentionMask,
        LocalAttentionFromBottomRightMask,
        BlockDiagonalMask,
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
        lengths = ([q.shape[1]], [k.shape[1]])
        if isinstance(bias, BlockDiagonalMask):
            lengths, inner = (bias.q_lengths, bias.kv_lengths), bias.inner
        else:
            inner = bias
        outs, sums = [], []
        for batch in range(q.shape[0]):
            rows = [x[batch].split(lengths[min(at, 1)]) for at, x in enumerate(flat)]
            for one_q, one_k, one_v in zip(*rows, strict=True):
                added, hidden = None, None
                if isinstance(inner, Tensor):
                    added = inner[batch].flatten(0, 1) if grouped else inner[batch]
                elif inner is not None:
                    hidden = inner.hidden(one_q.shape[0], one_k.shape[0], fault)
                out, lse = plain(one_q, one_k, one_v, hidden, scale, added=added, fault=fault)
                outs.append(out)
                sums.append(lse.flip(0) if fault == "lse" else lse)
        out = torch.cat(outs).unflatten(0, q.shape[:2])
        lse = torch.stack(sums)  # [sequences, heads, length]
        if op.pads:
            room = -(-lse.shape[-1] // 32) * 32
            lse = torch.nn.functional.pad(lse, (0, room - lse.shape[-1]), value=math.inf)
        elif isinstance(bias, BlockDiagonalMask):
            lse = lse.transpose(0, 1).flatten(1)[None]  # packed as the sequences are
        if grouped:
            out, lse = out.unflatten(2, grouped), lse.unflatten(1, grouped)
        return out, lse

    def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op):
        calls.append({"op": op})
        assert query.ndim == 4, "grouped heads have no backward"
        return attend(query, key, value, attn_bias, scale, op[0])[0]

    def forward_requires_grad(query, key, value, attn_bias=None, p=0.0, scale=None, *, op):
        calls.append({"op": op})
        return attend(query, key, value, attn_bias, scale, op)

    fmha.memory_efficient_attention = memory_efficient_attention
    fmha.memory_efficient_attention_forward_requires_grad = forward_requires_grad
    fmha.attn_bias = kinds
    return {fmha.__name__: fmha, kinds.__name__: kinds}


def install(monkeypatch: pytest.MonkeyPatch, fault: str = "") -> list[dict[str, Any]]:
    """Put all stand-ins where imports find them, for one test. Returns what they will be asked for
    beside tensors, call by call."""
    calls: list[dict[str, Any]] = []
    make: tuple[Callable[..., types.ModuleType], ...] = (flash_attn_2, flash_attn_3, flash_attn_4)
    found = {module.__name__: module for module in (f(fault, calls) for f in make)}
    found.update(xformers(fault, calls))
    for parent in ("xformers", "xformers.ops"):
        found[parent] = types.ModuleType(parent)
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls
