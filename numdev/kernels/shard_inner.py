"""The kernels that compute one shard, in both passes, for `numdev.kernels.sharded`.

Forward they are registered kernels as they are, which hand over O and the log-sum-exp L. Backward
they are given both, of all keys: with P = exp(S - L) and delta = rowsum(dO o O) of the whole row,
a shard's gradients are those of the whole call that come through its keys, and need only be added
up. PyTorch's operators take O and L as arguments, the emulation in place of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from numdev.cases import AttentionCase, empty_rows
from numdev.errors import MeasurementError, Refused
from numdev.kernels import find
from numdev.kernels.emulation import backward as emulation
from numdev.kernels.emulation.forward import dtype_of, scaled_q
from numdev.kernels.emulation.recipe import Recipe, recipe
from numdev.kernels.emulation.rounding import plain_arithmetic, stored
from numdev.kernels.merging import State
from numdev.kernels.sdpa import mask_arguments

Gradients = tuple[Tensor, Tensor, Tensor]
CASTS = ("out", "dq_out", "dk_out", "dv_out")
HEAD_DIMS, LSE_ROWS = 8, 32
"""Of PyTorch's operators on CUDA: flash takes multiples of so many features and is given others
padded; the efficient one keeps L for a multiple of so many rows."""
EMULATED = "emulated"
INNER = ("sdpa-flash", "sdpa-efficient", "sdpa-cudnn", EMULATED)


def forward(inner: str, case: AttentionCase, options: Mapping[str, Any]) -> tuple[State, str]:
    """O and L of one shard, -inf where it shows a row no key, and what ran."""
    found = find(inner).attend(case, **options)
    if found.lse is None:
        raise MeasurementError(f"{inner} gave no log-sum-exp, which a merge needs")
    empty = empty_rows(case)
    L = found.lse.masked_fill(empty, -math.inf)
    return (found.out.masked_fill(empty[..., None], 0.0), L), found.ran or inner


def backward(
    inner: str, case: AttentionCase, O: Tensor, L: Tensor, options: Mapping[str, Any]
) -> Gradients:
    """dq, dk and dv that come through the keys of one shard, for O and L of all keys."""
    # What has no key anywhere has scores of -inf: any finite L then gives P = 0, and not NaN.
    L = L.masked_fill(torch.isneginf(L), 0.0)
    if inner == EMULATED:
        return _emulated(case, O, L, recipe("fa2", sites=options))
    operators: Mapping[tuple[str, bool], Callable[..., Gradients]] = {
        ("sdpa-flash", False): _flash_on_cpu,
        ("sdpa-flash", True): _flash,
        ("sdpa-efficient", True): _efficient,
    }
    step = operators.get((inner, case.q.is_cuda))
    if step is None:
        raise Refused(f"{inner} has no backward over shards")
    return step(case, O, L)


def options_of(inner: str, partial_format: str) -> dict[str, Any]:
    """The options under which a kernel hands over its partial results in a format."""
    wide = inner == EMULATED and partial_format == "float32"
    return dict.fromkeys(CASTS, "float32") if wide else {}


def _emulated(case: AttentionCase, O: Tensor, L: Tensor, made: Recipe) -> Gradients:
    r, dtype = emulation.rounder(case, made), dtype_of(made)
    with torch.no_grad(), plain_arithmetic(case.q.device):
        q, k, v, O, L = (x.to(dtype) for x in (case.q, case.k, case.v, O, L))
        kept = emulation.Kept(
            case=case, made=made, q=q, q_s=scaled_q(r, case, made, q), k=k, v=v, O=O, L=L, m=L,
            l=torch.ones_like(L),
        )  # fmt: skip
        found = emulation.backward(r, kept.with_upstream(r, _upstream(case)))
        dq, dk, dv = (
            stored(x, made.format_at(site, case.format), case.q.dtype)
            for site, x in zip(CASTS[1:], emulation.cast(r, *found), strict=True)
        )
    return dq, dk, dv


def _flash_on_cpu(case: AttentionCase, O: Tensor, L: Tensor) -> Gradients:
    mask, by_flag = mask_arguments(case)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=case.q.dtype).masked_fill_(~mask, -math.inf)
    found: Gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _upstream(case), case.q, case.k, case.v, O, L.float(), 0.0, by_flag,
        attn_mask=mask, scale=case.scale,
    )  # fmt: skip
    return found


def _flash(case: AttentionCase, O: Tensor, L: Tensor) -> Gradients:
    if case.q.shape[-1] % HEAD_DIMS or case.v.shape[-1] != case.q.shape[-1]:
        raise Refused(f"its backward over shards takes head dimensions divisible by {HEAD_DIMS}")
    seed = torch.zeros(2, dtype=torch.uint64, device=case.q.device)  # of a dropout that is off
    found: Gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        _upstream(case), case.q, case.k, case.v, O, L.float().contiguous(), None, None, case.q_len,
        case.kv_len, 0.0, _by_flag(case), seed, seed[0], scale=case.scale,
    )  # fmt: skip
    return found


def _efficient(case: AttentionCase, O: Tensor, L: Tensor) -> Gradients:
    seed = torch.zeros((), dtype=torch.int64)
    L = pad(L.float(), (0, -L.shape[-1] % LSE_ROWS))
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        _upstream(case), case.q, case.k, case.v, None, O, L, seed, seed, 0.0,
        [True, True, True, False], _by_flag(case), scale=case.scale,
    )  # fmt: skip
    return dq, dk, dv


def _by_flag(case: AttentionCase) -> bool:
    """Whether causality is said by a flag, where a mask cannot be said. Raises Refused."""
    mask, by_flag = mask_arguments(case)
    if mask is not None:
        raise Refused("its backward over shards takes no mask on CUDA")
    return by_flag


def _upstream(case: AttentionCase) -> Tensor:
    if case.grad_out is None:
        raise Refused("the case has no gradient with respect to its output (grad_out)")
    return case.grad_out
