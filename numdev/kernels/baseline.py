"""The baseline: plain attention, the score matrix materialised, in the working format.

It rounds where the eager attention of model code does: the product QK^T is rounded, scaled and
rounded again, the softmax runs in at least fp32, and P is rounded before it meets V. It is the
yardstick "what plain code costs", not the floor: production flash kernels on GPUs come closer.

Its gradients are autograd's, in the working format: the backward of the softmax runs in at least
fp32, dP, dS and the gradients of every product are rounded, and query heads that share a kv head
are added up after that.
"""

from __future__ import annotations

import math

import torch

from numdev.cases import AttentionCase, additive, visible
from numdev.kernels import Output, kernel


@kernel("baseline", any_rows=True, claims=lambda case, output, system: {"preset": "eager"})
def baseline(case: AttentionCase) -> Output:
    """Plain attention as eager model code does it, every product in the working format."""
    dtype = case.q.dtype
    rows, keys = slice(0, case.q_len), slice(0, case.kv_len)
    k, v = (
        x.repeat_interleave(case.group, dim=1) if case.group > 1 else x for x in (case.k, case.v)
    )
    S = torch.matmul(case.q, k.transpose(-1, -2)) * case.scale
    if case.softcap is not None:
        S = torch.tanh(S / case.softcap) * case.softcap
    bias = additive(case, rows, keys)
    if bias is not None:
        S = S + bias
    shown = visible(case, rows, keys)
    if shown is not None:
        S = S.masked_fill(~shown, -math.inf)
    if case.sinks is not None:
        sink = case.sinks.to(dtype)[None, :, None, None].expand(*S.shape[:3], 1)
        S = torch.cat([S, sink], dim=-1)
    P = torch.softmax(S, dim=-1, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
    P = P[..., : case.kv_len]
    if shown is not None:
        P = P.masked_fill(~shown, 0.0)  # a row that sees no key is 0, not NaN
    return Output(out=torch.matmul(P, v))
