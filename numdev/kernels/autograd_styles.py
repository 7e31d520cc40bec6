"""Attention as people write it in PyTorch, with autograd's gradients: how such code rounds.

A function of q, k and v that is made of tensor operations rounds wherever it casts, in forward and
again where autograd comes back through the cast. Some of it no recipe of `emulated` describes: P
that is cast before it is normalised has a gradient that is rounded before it is, and a maximum
that is not detached gets what rounding left of the sum of a row of dS. So such ways are written out
here, each as its author would, to be run on the same inputs and laid beside a kernel's errors
(`numdev.audit.undeclared`).

All are sound: sums are in fp32, and nothing is rounded on its way but what a cast or a product of
16-bit tensors rounds once. Memory is O(q_len * kv_len). A row that sees no key is 0.

Legend: S scores, P probabilities before or after their division by l, m row maximum, l row sum, O
output.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from numdev.cases import AttentionCase, empty_rows, explicit_mask

Way = Callable[[AttentionCase], Tensor]
"""The output [B, H, q_len, v_dim] in the case's dtype, connected to q, k and v."""
Maximum = Literal["constant", "amax", "max"]
HIDDEN = -1e30
"""The score of a hidden key: exp of it is 0 beside any other, and no row is without a number."""


def _plainly(case: AttentionCase, *, scores: bool, softmax: bool, product: bool) -> Tensor:
    """Plain attention, in fp32 where said: the product Q Kᵀ, the softmax, the product P V."""
    dtype = case.q.dtype
    k, v = _repeated(case)
    q, k = (case.q.float(), k.float()) if scores else (case.q, k)
    S = _shown(case, _capped(case, q @ k.mT * case.scale))
    P = (S.float() if softmax else S).softmax(dim=-1)
    return ((P @ v.float()) if product else (P.to(dtype) @ v)).to(dtype)


def _online(case: AttentionCase, *, tile: int | None, maximum: Maximum) -> Tensor:
    """The online softmax, in tiles of keys (None: one): P cast for its product, O / l at the end.
    `maximum`: whether it is detached, or differentiated as torch.amax or torch.max is."""
    k, v = _repeated(case)
    S = _shown(case, _capped(case, case.q.float() @ k.float().mT * case.scale))
    m = S.new_full((*S.shape[:3], 1), HIDDEN)
    l, O = torch.zeros_like(m), S.new_zeros(*S.shape[:3], v.shape[-1])
    width = tile or case.kv_len
    for part, values in zip(S.split(width, dim=-1), v.split(width, dim=2), strict=True):
        m_old, m = m, torch.maximum(m, _largest(part, maximum))
        a, P = (m_old - m).exp(), (part - m).exp()
        l = a * l + P.sum(dim=-1, keepdim=True)
        O = a * O + P.to(case.q.dtype).float() @ values.float()
    return (O / l).to(case.q.dtype)


def _largest(S: Tensor, maximum: Maximum) -> Tensor:
    if maximum == "max":
        return S.max(dim=-1, keepdim=True).values
    return (S if maximum == "amax" else S.detach()).amax(dim=-1, keepdim=True)


def _repeated(case: AttentionCase) -> tuple[Tensor, Tensor]:
    """k and v with as many heads as q."""
    if case.group == 1:
        return case.k, case.v
    return (
        case.k.repeat_interleave(case.group, dim=1),
        case.v.repeat_interleave(case.group, dim=1),
    )


def _capped(case: AttentionCase, S: Tensor) -> Tensor:
    return S if case.softcap is None else case.softcap * (S / case.softcap).tanh()


def _shown(case: AttentionCase, S: Tensor) -> Tensor:
    """S with the mask: an additive one added, what it hides far below everything else."""
    mask = explicit_mask(case)
    if mask is None:
        return S
    if mask.dtype != torch.bool:
        S, mask = S + mask, mask > -math.inf
    return S.masked_fill(~mask, max(HIDDEN, torch.finfo(S.dtype).min))


def _ways() -> Mapping[str, Way]:
    plain: Mapping[str, tuple[bool, bool, bool]] = {
        "all in fp32": (True, True, True),
        "a softmax in fp32, cast before P V": (True, True, False),
        "a softmax in the working format": (False, False, False),
        "S in the working format and the rest in fp32": (False, True, True),
    }
    through: Mapping[Maximum, str] = {
        "amax": "the maximum's gradient included",
        "max": "the gradient of the first maximum included",
        "constant": "the maximum detached",
    }
    ways: dict[str, Way] = {
        words: functools.partial(_plainly, scores=scores, softmax=softmax, product=product)
        for words, (scores, softmax, product) in plain.items()
    }
    for tile in (None, 64, 128, 32):
        tiled = "" if tile is None else f" in tiles of {tile} keys"
        for maximum, said in through.items():
            words = f"exp(S - m), cast before P V{tiled}, {said}"
            ways[words] = functools.partial(_online, tile=tile, maximum=maximum)
    return {f"as autograd rounds {words}": _of_seen_rows(way) for words, way in ways.items()}


def _of_seen_rows(way: Way) -> Way:
    """The way, whose rows that see no key are 0 and have no gradient."""
    return lambda case: way(case).masked_fill(empty_rows(case)[..., None], 0.0)


WAYS: Mapping[str, Way] = _ways()
"""By what is said of a kernel that rounds so."""
