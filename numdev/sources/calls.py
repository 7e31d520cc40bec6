"""A call of `scaled_dot_product_attention` (SDPA) as a case.

SDPA has no word for a soft cap, for sinks and for a window. Where a model passes these to its
attention function, they join the call's arguments here; a call that numdev could only misread is an
error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef, Window
from numdev.errors import MeasurementError, UsageError


@dataclass(frozen=True)
class Sdpa:
    """The arguments of `scaled_dot_product_attention`, in its order and with its defaults."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


@dataclass(frozen=True, kw_only=True)
class Passed:
    """What a model passed to its attention function that SDPA has no argument for."""

    query: Tensor
    softcap: float | None = None
    sinks: Tensor | None = None
    sliding_window: int | None = None


def as_case(ref: CaseRef, sdpa: Sdpa, passed: Passed | None) -> AttentionCase:
    """The call as a case; what the model passed beside the SDPA call joins it."""
    if sdpa.dropout_p > 0:
        raise MeasurementError(
            f"{ref.module}: attention with dropout {sdpa.dropout_p} has no one answer",
            hint="put the model in eval mode",
        )
    passed = passed or Passed(query=sdpa.query)
    q, mask = sdpa.query, sdpa.attn_mask
    if q.shape != passed.query.shape:
        # For a single query transformers lays the heads of a group out as rows of one head.
        q = passed.query
        if mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
            mask = mask.reshape(mask.shape[0], q.shape[1], 1, mask.shape[-1])
    offset = sdpa.key.shape[-2] - q.shape[-2]
    window = _window(ref, passed.sliding_window, mask, q, offset)
    try:
        return AttentionCase(
            ref=ref,
            q=q,
            k=sdpa.key,
            v=sdpa.value,
            scale=q.shape[-1] ** -0.5 if sdpa.scale is None else float(sdpa.scale),
            mask=mask,
            is_causal=sdpa.is_causal,
            causal_offset=0 if window is None else offset,
            window=window,
            softcap=passed.softcap,
            sinks=passed.sinks,
        )
    except UsageError as error:
        raise MeasurementError(error.message, hint="numdev cannot audit this call") from error


def _window(
    ref: CaseRef, size: int | None, mask: Tensor | None, q: Tensor, offset: int
) -> Window | None:
    """The window of `size` keys, the query's own included, as the mask has it; None without effect.

    SDPA takes a window by its mask alone, so the two must agree: what the window hides, the mask
    hides too. The right side is 0 where the mask hides all later keys, else as wide as the left.
    """
    q_len = q.shape[-2]
    if size is None or size >= q_len + offset:
        return None
    hint = "its SDPA and its flash attention would not compute the same"
    if mask is None:
        raise MeasurementError(f"{ref.module}: passes a window of {size} but no mask", hint=hint)
    open_ = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    i = torch.arange(q_len, device=mask.device)[:, None] + offset
    back = i - torch.arange(q_len + offset, device=mask.device)
    right = size - 1 if bool((open_ & (back < 0)).any()) else 0
    if bool((open_ & ((back >= size) | (back < -right))).any()):
        raise MeasurementError(
            f"{ref.module}: passes a window of {size} and a mask that reaches beyond it", hint=hint
        )
    return (size - 1, right)
