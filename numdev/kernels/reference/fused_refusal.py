"""What the fused reference cannot take, and why in words.

Shapes and formats first, which cost nothing; then the numbers, which are read on the device in one
go. What is refused here the blocked path computes, so that a refusal costs time and no digit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import Refused

LARGEST = 2.0**44
"""No score may reach this. Sums of so large terms are off by about 1, since fp64 has 2^53; and P
would be any number where the two passes, which sum in another order, disagree by that."""
TOO_LARGE = "where fp64 has no digits left"
WIDEST = 256
MOST_HEADS = 65535
"""Of all batch entries: the most that CUDA takes along a grid's second and third axis."""
MASK_BYTES = 1 << 30
"""What a mask may take in fp64."""


def accept(case: AttentionCase) -> None:
    """Raises Refused with the reason of `refusal`, where there is one."""
    reason = refusal(case)
    if reason is not None:
        raise Refused(reason)


def accept_scores(forward: Mapping[str, Tensor]) -> None:
    """Raises Refused where P is not to be had from L for a backward pass. An additive mask can lift
    every score of a row beyond LARGEST: L then says nothing of the differences between them, and
    only a softmax that subtracts their maximum, as the blocked path's, still does."""
    size = forward["lse"].abs().masked_fill(forward["empty"], 0.0).amax().item()
    if size > LARGEST:
        raise Refused(f"a row's scores are all about {size:.1g}, {TOO_LARGE}")


def refusal(case: AttentionCase) -> str | None:
    """Why this path cannot take the case, as a sentence; None when it can. Reads the inputs, and
    waits for the device."""
    if not case.q.is_cuda:
        return "the fused one runs on CUDA"
    return _unfit(case) or _missing() or _out_of_range(case)


def is_additive(case: AttentionCase) -> bool:
    return case.mask is not None and case.mask.dtype != torch.bool


@cache
def _missing() -> str | None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    return None


def _unfit(case: AttentionCase) -> str | None:
    """Why shapes and formats do not suit it."""
    tensors = [x for x in (*_factors(case), case.mask) if x is not None]
    widest = max(case.q.shape[-1], case.v.shape[-1])
    heads = case.q.shape[0] * case.heads
    masked = 0 if case.mask is None else case.mask.numel()
    if any(x.dtype == torch.float64 for x in tensors):
        return "in float64 sums may leave the range the fused one counts on"
    if widest > WIDEST:
        return f"the fused one takes operands up to {WIDEST} wide, not {widest}"
    if heads > MOST_HEADS:
        return f"the fused one takes up to {MOST_HEADS} heads of all batch entries, not {heads}"
    if 8 * masked > MASK_BYTES:
        return f"the mask has {masked:.2g} elements, too many to hold in float64"
    return None


def _out_of_range(case: AttentionCase) -> str | None:
    """Why the numbers in the inputs do not suit it."""
    largest = [_wide(x).abs().amax().double() for x in _factors(case)]
    if case.mask is not None and is_additive(case):  # -inf hides; NaN and +inf spoil
        largest.append(_wide(case.mask).clamp_min(0.0).amax().double())
    q, k, *others = torch.stack(largest).tolist()
    if not all(map(math.isfinite, (q, k, *others))):
        return "an input is not finite"
    # At least 1 each: nor may Q times scale leave the range where K is nothing.
    size = abs(case.scale) * case.q.shape[-1] * max(q, 1.0) * max(k, 1.0)
    return f"scores may reach {size:.1g}, {TOO_LARGE}" if size > LARGEST else None


def _factors(case: AttentionCase) -> list[Tensor]:
    """q and k first."""
    found = (case.q, case.k, case.v, case.sinks, case.grad_out)
    return [x for x in found if x is not None]


def _wide(x: Tensor) -> Tensor:
    """In a format that torch computes in: it does not in those of 8 bits."""
    return x.detach().float() if x.element_size() == 1 else x.detach()
