"""xFormers' memory-efficient attention as a kernel, on one of its operators alone.

xFormers says what it hides by objects (`xformers.ops.fmha.attn_bias`), one for each kind: a case is
given the object that means the same, or refused. An explicit mask becomes a tensor that is added to
the scores, and causality and windows beside it become part of that tensor. Tensors are [batch,
length, heads, head_dim], with grouped heads [batch, length, kv heads, group, head_dim].

An operator that does not take what it is given says why, and that is the refusal. Which operator
runs is not left to xFormers' choice. Gradients are autograd's, through the backward operator that
belongs to it; with grouped heads xFormers has none.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase, explicit_mask
from numdev.errors import UsageError, closest
from numdev.kernels import Output, Refused, Requirement, kernel
from numdev.kernels.flash_attn import lengths_first, misaligned, unpack_lse
from numdev.kernels.sdpa import efficient_attention
from numdev.system import System

OPERATORS = ("cutlass", "flash")
REFUSAL = "does not support inputs"
ALIGNMENT = 8
"""The rows of a tensor bias must begin at multiples of so many elements."""


def _unsupported(case: AttentionCase) -> str | None:
    if case.softcap is not None:
        return "xFormers has no soft cap"
    if case.sinks is not None:
        return "xFormers has no attention sinks"
    if case.q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return "xFormers takes float16, bfloat16 and float32"
    if case.mask is not None or _causal_from_the_top(case):
        return None
    return misaligned(case, "xFormers")


def _causal_from_the_top(case: AttentionCase) -> bool:
    return case.is_causal and case.window is None and case.causal_offset == 0


def _check(options: Mapping[str, Any]) -> None:
    if options["op"] not in OPERATORS:
        hint = closest(str(options["op"]), OPERATORS)
        raise UsageError(f"kernel xformers has no operator {options['op']!r}", hint=hint)


def _claims(case: AttentionCase, output: Output, system: System) -> Mapping[str, Any]:
    """Its cutlass operator is the one PyTorch calls efficient."""
    cutlass = (output.did or {}).get("op") == "cutlass"
    return efficient_attention(case, system) if cutlass else {"preset": "fa2"}


@kernel(
    "xformers",
    requires=Requirement(device="cuda", package="xformers"),
    supports=_unsupported,
    validate=_check,
    claims=_claims,
)
def xformers(case: AttentionCase, *, op: str = "cutlass", varlen: bool = False) -> Output:
    """xFormers' memory_efficient_attention, its operator cutlass or flash."""
    training = case.q.requires_grad
    if training and case.group > 1:
        raise Refused("xFormers has no backward for grouped heads")
    if varlen and case.mask is not None:
        raise Refused("xFormers takes no mask beside packed sequences")
    fmha = importlib.import_module("xformers.ops.fmha")
    operator = getattr(fmha, op)
    arguments = {"attn_bias": _bias(case, varlen), "scale": case.scale}
    q, k, v = (_given(case, x, varlen) for x in (case.q, case.k, case.v))
    lse = None
    try:
        if training:
            both = (operator.FwOp, operator.BwOp)
            out = fmha.memory_efficient_attention(q, k, v, op=both, **arguments)
        else:
            attend = fmha.memory_efficient_attention_forward_requires_grad
            out, lse = attend(q, k, v, op=operator.FwOp, **arguments)
    except ValueError as error:
        if REFUSAL not in str(error):
            raise
        raise Refused(_reasons(str(error))) from error
    found = None if lse is None else _lse(case, lse)
    ran, did = operator.FwOp.NAME, {"op": op}
    return Output(out=_returned(case, out, varlen), lse=found, ran=ran, did=did)


def _given(case: AttentionCase, x: Tensor, packed: bool) -> Tensor:
    """q, k or v as xFormers takes it; with grouped heads k and v are views that repeat them."""
    rows: Tensor = lengths_first(x)
    if packed:
        rows = rows.flatten(0, 1)[None]
    if case.group == 1:
        return rows
    if x is case.q:
        grouped: Tensor = rows.unflatten(2, (case.kv_heads, case.group))
        return grouped
    return rows.unsqueeze(3).expand(-1, -1, -1, case.group, -1)


def _returned(case: AttentionCase, out: Tensor, packed: bool) -> Tensor:
    """xFormers' output as [batch, heads, q_len, v_dim]."""
    rows = out.flatten(2, 3) if case.group > 1 else out
    if packed:
        rows = rows[0].unflatten(0, (case.q.shape[0], case.q_len))
    return lengths_first(rows)


def _lse(case: AttentionCase, lse: Tensor) -> Tensor:
    """xFormers' log-sum-exp as [batch, heads, q_len]. The flash operator packs it as it packs the
    sequences; the cutlass operator pads the length to a multiple of 32 in either case."""
    batch = case.q.shape[0]
    rows = lse.flatten(1, 2) if case.group > 1 else lse
    if rows.shape[0] != batch:
        return unpack_lse(rows[0], batch)
    return rows[..., : case.q_len]


def _bias(case: AttentionCase, packed: bool) -> Any:
    """What says which keys are seen, and what is added to their scores; None where all are."""
    kinds = importlib.import_module("xformers.ops.fmha.attn_bias")
    if case.mask is not None:
        return _tensor_bias(case)
    if packed:
        return _packed_bias(kinds, case)
    if case.is_causal and (case.window is None or case.window[0] is None):
        top = _causal_from_the_top(case) and case.q_len != case.kv_len
        return kinds.LowerTriangularMask() if top else kinds.LowerTriangularFromBottomRightMask()
    if case.window is None:
        return None
    left, right = (case.q_len + case.kv_len if side is None else side for side in case.window)
    if case.is_causal:  # a window of 1 is the query's own key alone
        return kinds.LowerTriangularFromBottomRightLocalAttentionMask(left + 1)
    return kinds.LocalAttentionFromBottomRightMask(window_left=left, window_right=right)


def _packed_bias(kinds: Any, case: AttentionCase) -> Any:
    """The same for packed sequences, none of which sees another."""
    batch = case.q.shape[0]
    blocks = kinds.BlockDiagonalMask.from_seqlens([case.q_len] * batch, [case.kv_len] * batch)
    blocks = blocks.to(case.q.device)
    if not case.is_causal:
        if case.window is not None:
            raise Refused("xFormers takes no window beside packed sequences without causality")
        return blocks
    if case.window is not None and case.window[0] is not None:
        return blocks.make_local_attention_from_bottomright(case.window[0] + 1)
    top = _causal_from_the_top(case) and case.q_len != case.kv_len
    return blocks.make_causal() if top else blocks.make_causal_from_bottomright()


def _tensor_bias(case: AttentionCase) -> Tensor:
    """Mask, causality and window as a tensor to add, [batch, heads, q_len, kv_len] in q's format,
    with its heads grouped as q's are and its rows where xFormers wants them in memory."""
    mask = explicit_mask(case)
    assert mask is not None
    if mask.dtype == torch.bool:
        nothing = torch.zeros(mask.shape, dtype=case.q.dtype, device=mask.device)
        mask = nothing.masked_fill(~mask, -math.inf)
    shape = (*case.q.shape[:3], case.kv_len)
    room = -(-case.kv_len // ALIGNMENT) * ALIGNMENT
    bias = torch.zeros((*shape[:3], room), dtype=case.q.dtype, device=case.q.device)
    bias[..., : case.kv_len] = mask.expand(shape)
    bias = bias[..., : case.kv_len]
    return bias.unflatten(1, (case.kv_heads, case.group)) if case.group > 1 else bias


def _reasons(text: str) -> str:
    """The operator's own reasons, in one line."""
    said = text.partition("is not supported because:")[2] or text
    return "; ".join(line.strip() for line in said.splitlines() if line.strip())
