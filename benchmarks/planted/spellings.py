"""Sound attention as people spell it who write it by hand: every product in fp32 or more,
one rounding to the working format, gradients by autograd."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from planted.record import planted


def _scores(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Returns the masked scores [B, H, q_len, kv_len] of tensors of one dtype, -inf where
    a key is hidden; keys are repeated for query heads that share them."""
    S = (q @ _repeated(k, q).mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = torch.ones(S.shape[-2:], dtype=torch.bool, device=S.device).triu(1)
        S = S.masked_fill(hidden, -math.inf)
    if attn_mask is None:
        return S
    if attn_mask.dtype == torch.bool:
        return S.masked_fill(~attn_mask, -math.inf)
    return S + attn_mask.to(S.dtype)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


@planted("sound", "exp(S - logsumexp(S)) in fp32, never divided.")
def by_log_softmax(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    S = _scores(q.float(), k.float(), attn_mask, is_causal, scale)
    empty = S.isneginf().all(dim=-1, keepdim=True)
    L = S.masked_fill(empty, 0.0).logsumexp(dim=-1, keepdim=True)
    P = (S - L).exp()
    return (P @ _repeated(v, q).float()).to(q.dtype)


@planted("sound", "All in fp64, rounded once.")
def all_in_fp64(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    S = _scores(q.double(), k.double(), attn_mask, is_causal, scale)
    empty = S.isneginf().all(dim=-1, keepdim=True)
    P = S.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)
    return (P @ _repeated(v, q).double()).to(q.dtype)


def _part(S: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the maximum, the row sum and the product with V of some keys' scores."""
    m = S.amax(dim=-1, keepdim=True).detach()
    P = (S - m.masked_fill(m == -math.inf, 0.0)).exp()
    return m, P.sum(dim=-1, keepdim=True), P @ v


def _merged(
    a: tuple[Tensor, Tensor, Tensor], b: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the maximum, row sum and product of the keys of both parts."""
    m = torch.maximum(a[0], b[0])
    finite = m.masked_fill(m == -math.inf, 0.0)
    x, y = (a[0] - finite).exp(), (b[0] - finite).exp()
    return m, x * a[1] + y * b[1], x * a[2] + y * b[2]


def _in_parts(S: Tensor, v: Tensor, size: int) -> Tensor:
    """Returns softmax(S) v, with a running maximum over parts of so many keys; 0 in rows
    without keys."""
    keys = zip(S.split(size, dim=-1), v.split(size, dim=-2), strict=True)
    parts = [_part(*each) for each in keys]
    total = parts[0]
    for part in parts[1:]:
        total = _merged(total, part)
    return total[2] / total[1].masked_fill(total[1] == 0, 1.0)


@planted("sound", "In fp32 with a running maximum over tiles of 48 keys.")
def online_in_fp32(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    S = _scores(q.float(), k.float(), attn_mask, is_causal, scale)
    return _in_parts(S, _repeated(v, q).float(), 48).to(q.dtype)


@planted("sound", "In fp32 in two halves of the keys, merged by their sums.")
def two_halves_in_fp32(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    S = _scores(q.float(), k.float(), attn_mask, is_causal, scale)
    half = -(-S.shape[-1] // 2)
    return _in_parts(S, _repeated(v, q).float(), half).to(q.dtype)
