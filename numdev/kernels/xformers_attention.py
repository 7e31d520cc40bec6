"""xFormers' memory-efficient attention as a kernel, on one of its operators alone.

A case is given the object (`xformers.ops.fmha.attn_bias`) that hides the same, or refused; an
explicit mask becomes a tensor that is added to the scores, with causality and windows in it.
Tensors are [batch, length, heads, head_dim], with grouped heads [batch, length, kv heads, group,
head_dim]. What an operator does not take it says itself, and that is the refusal.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase, explicit_mask
from numdev.kernels import Output, Refused, Requirement, kernel
from numdev.kernels.flash_attn import lengths_first, misaligned
from numdev.kernels.output import why_not, without
from numdev.kernels.sdpa import efficient_attention
from numdev.system import System

ALIGNMENT = 8  # elements: the rows of a tensor bias must begin at multiples of it


def _unsupported(case: AttentionCase) -> str | None:
    float64 = (case.q.dtype == torch.float64, "xFormers takes float16, bfloat16 and float32")
    reason = without(case, "xFormers") or why_not(float64)
    by_mask = case.mask is not None or _causal_from_the_top(case)
    return reason if reason or by_mask else misaligned(case, "xFormers")


def _causal_from_the_top(case: AttentionCase) -> bool:
    return case.is_causal and case.window is None and case.causal_offset == 0


def _claims(case: AttentionCase, output: Output, system: System) -> Mapping[str, Any]:
    """Its cutlass operator is the one PyTorch calls efficient."""
    cutlass = (output.did or {}).get("op") == "cutlass"
    return efficient_attention(case) if cutlass else {"preset": "fa2"}


@kernel(
    "xformers",
    requires=Requirement(device="cuda", package="xformers"),
    supports=_unsupported,
    values={"op": ("cutlass", "flash")},
    claims=_claims,
)
def xformers(case: AttentionCase, *, op: str = "cutlass") -> Output:
    """xFormers' memory_efficient_attention, its operator cutlass or flash."""
    training = case.q.requires_grad
    if training and case.group > 1:
        raise Refused("xFormers has no backward for grouped heads")
    fmha = importlib.import_module("xformers.ops.fmha")
    operator = getattr(fmha, op)
    arguments = {"attn_bias": _bias(case), "scale": case.scale}
    q, k, v = (_laid_out(case, x) for x in (case.q, case.k, case.v))
    lse = None
    try:
        if training:
            both = (operator.FwOp, operator.BwOp)
            out = fmha.memory_efficient_attention(q, k, v, op=both, **arguments)
        else:
            attend = fmha.memory_efficient_attention_forward_requires_grad
            out, lse = attend(q, k, v, op=operator.FwOp, **arguments)
    except ValueError as error:
        if "does not support inputs" not in str(error):
            raise
        own = str(error).partition("is not supported because:")[2] or str(error)
        raise Refused("; ".join(x.strip() for x in own.splitlines() if x.strip())) from error
    out = out.flatten(2, 3) if case.group > 1 else out
    if lse is not None:  # cutlass pads the length to a multiple of 32
        lse = (lse.flatten(1, 2) if case.group > 1 else lse)[..., : case.q_len]
    return Output(out=lengths_first(out), lse=lse, ran=operator.FwOp.NAME, did={"op": op})


def _laid_out(case: AttentionCase, x: Tensor) -> Tensor:
    """q, k or v as xFormers takes it; with grouped heads k and v are views that repeat them."""
    rows: Tensor = lengths_first(x)
    if case.group == 1:
        return rows
    if x is case.q:
        grouped: Tensor = rows.unflatten(2, (case.kv_heads, case.group))
        return grouped
    return rows.unsqueeze(3).expand(-1, -1, -1, case.group, -1)


def _bias(case: AttentionCase) -> Any:
    """What says which keys are seen, and what is added to their scores; None where all are."""
    kinds = importlib.import_module("xformers.ops.fmha.attn_bias")
    if case.mask is not None:
        return _tensor_bias(case)
    left, right = case.window or (None, None)
    top = _causal_from_the_top(case) and case.q_len != case.kv_len
    if case.is_causal:
        if left is not None:  # a window of 1 is the query's own key alone
            return kinds.LowerTriangularFromBottomRightLocalAttentionMask(left + 1)
        return kinds.LowerTriangularMask() if top else kinds.LowerTriangularFromBottomRightMask()
    if case.window is None:
        return None
    left, right = (case.q_len + case.kv_len if side is None else side for side in case.window)
    return kinds.LocalAttentionFromBottomRightMask(window_left=left, window_right=right)


def _tensor_bias(case: AttentionCase) -> Tensor:
    """Mask, causality and window as a tensor to add, [batch, heads, q_len, kv_len] in q's format,
    with its heads grouped as q's are and its rows where xFormers wants them in memory."""
    mask = explicit_mask(case)
    assert mask is not None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=case.q.dtype).masked_fill(~mask, -math.inf)
    room = -(-case.kv_len // ALIGNMENT) * ALIGNMENT
    bias = case.q.new_zeros(*case.q.shape[:3], room)[..., : case.kv_len]
    bias.copy_(mask.expand(bias.shape))
    return bias.unflatten(1, (case.kv_heads, case.group)) if case.group > 1 else bias
