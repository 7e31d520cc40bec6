"""The textbook's attention under torch.compile, in the spellings that public code has.

The compiler recognises some of them and puts SDPA in their place, fuses others, and
computes some as they are written: one function in other words can have other numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from numdev.cases import AttentionCase, explicit_mask
from numdev.kernels import Output, kernel, no_claim
from numdev.kernels.baseline import repeat_kv
from numdev.kernels.flex import NO_LIMITS
from numdev.kernels.output import why_not


def _matmul(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Returns attention [B, H, q_len, v_dim] as transformers' eager attention writes it,
    without its cast: scores times scale, all in the inputs' dtype. `mask`: bool (True:
    seen), additive, or None."""
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale
    return torch.matmul(torch.softmax(_masked(scores, mask), dim=-1), v)


def _divided(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Returns attention [B, H, q_len, v_dim] as Vaswani et al. and nanoGPT write it:
    scores divided by 1 / scale, which is sqrt(d). `mask`: bool (True: seen), additive, or
    None. Raises ZeroDivisionError for a scale of 0."""
    scores = (q @ k.transpose(-2, -1)) / (1.0 / scale)
    return torch.softmax(_masked(scores, mask), dim=-1) @ v


def _scaled_q(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Returns attention [B, H, q_len, v_dim] as BART and CLIP write it: q is multiplied
    by the scale before the product. `mask`: bool (True: seen), additive, or None."""
    return torch.softmax(_masked((q * scale) @ k.transpose(-2, -1), mask), dim=-1) @ v


def _float32(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Returns attention [B, H, q_len, v_dim] as Llama writes it: the softmax in float32,
    then a cast to the inputs' dtype. `mask`: bool (True: seen), additive, or None."""
    scores = _masked(torch.matmul(q, k.transpose(2, 3)) * scale, mask)
    p = torch.nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(p, v)


def _einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Returns attention [B, H, q_len, v_dim] as lucidrains' code and JAX ports write it,
    with einsum. `mask`: bool (True: seen), additive, or None."""
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    return torch.einsum("bhij,bhjd->bhid", _masked(scores, mask).softmax(dim=-1), v)


def _by_hand(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Returns attention [B, H, q_len, v_dim] with the softmax by hand: exp of scores in
    float32 less their maximum, cast for the product with v, divided by the sum at the
    end. `mask`: bool (True: seen), additive, or None."""
    scores = _masked((q @ k.mT).float() * scale, mask)
    p = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    return ((p.to(v.dtype) @ v) / p.sum(dim=-1, keepdim=True)).to(q.dtype)


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the scores with a bool mask's hidden keys at -inf, or an additive mask
    added; unchanged without a mask. A row of -inf alone becomes NaN in the softmax."""
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -math.inf)
    return scores + mask


SPELLINGS: Mapping[str, Callable[..., Tensor]] = {
    "matmul": _matmul, "divided": _divided, "scaled-q": _scaled_q, "float32": _float32,
    "einsum": _einsum, "by-hand": _by_hand,
}  # fmt: skip


@kernel(
    "inductor",
    options={"spelling": "matmul"},
    values={"spelling": tuple(SPELLINGS)},
    supports=lambda case: why_not(
        (case.softcap is not None, "the textbook has no soft cap"),
        (case.sinks is not None, "the textbook has no attention sinks"),
    ),
    claims=no_claim,
)
def inductor(case: AttentionCase, *, spelling: str) -> Output:
    """The textbook's attention, compiled, in one of its public spellings.

    `spelling`: `matmul`, `divided`, `scaled-q`, `float32`, `einsum` or `by-hand`. Returns
    out alone; rows that see no key may be NaN. Every shape is compiled for itself, which
    takes seconds. Raises what the compiler raises."""
    from torch._dynamo import config

    mask = explicit_mask(case)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(case.q.dtype)
    with config.patch(NO_LIMITS):  # every shape is compiled for itself, as by `flex`
        out = _compiled(spelling)(case.q, *repeat_kv(case), mask, case.scale)
    return Output(out=out, ran=f"torch.compile of the spelling {spelling}")


@functools.cache
def _compiled(spelling: str) -> Callable[..., Tensor]:
    """Returns the function of this spelling, a key of SPELLINGS, compiled; the same one
    in every call of a process. Raises KeyError for another name."""
    return torch.compile(SPELLINGS[spelling], fullgraph=True, dynamic=False)
