"""The reference: attention in fp64 from the inputs as they are, and the rounding floor.

Everything numdev says is a distance to this function, so it is written for plainness. Query rows
are processed in blocks, each against all the keys it can see, with an ordinary two-pass softmax;
there is no online rescaling and no approximation. Memory is O(rows * kv_len), never q_len * kv_len.

Beside the output it returns what the metrics need and only this pass can give: the log-sum-exp, the
*term scale* sum_j P_ij |V_jd| (the size of what is added up before anything cancels), and which
rows see no key at all. Such empty rows get out = 0 and lse = -inf (or the sink's logit); they are
a convention, not a number, and are left out of every metric.

Legend: S scores, P probabilities, m row maximum, l row sum, O output, L log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.cases import AttentionCase, additive, key_range, visible
from numdev.formats import Format, round_to
from numdev.kernels import Output, kernel

BLOCK_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
"""How large one block of scores may be; speed only, the result does not depend on it beyond fp64
rounding in the matrix products."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """The fp64 answer to a case. Shapes as in `Output`; everything float64 but `empty`."""

    out: Tensor
    lse: Tensor
    term_scale: Tensor
    """sum_j P_ij |V_jd|, [batch, heads, q_len, v_dim]; at least |out| everywhere."""
    empty: Tensor
    """bool [batch, heads, q_len]: rows that see no key."""


def attend(case: AttentionCase) -> Reference:
    """O = softmax(S) V with S = bias + softcap(scale * Q K^T), all in fp64.

    NaN and infinity in the inputs propagate as the arithmetic has it, but a key of probability 0
    has no part in the sum, whatever its V holds: what is hidden cannot be seen. Inputs of any
    format are widened exactly; nothing is rounded on the way in or out.
    """
    q, k, v = (x.detach().double() for x in (case.q, case.k, case.v))
    b, h, n, _ = q.shape
    out = q.new_empty(b, h, n, v.shape[-1])
    term_scale, lse = torch.empty_like(out), q.new_empty(b, h, n)
    empty = torch.zeros(b, h, n, dtype=torch.bool, device=q.device)
    # V and |V| side by side: output and term scale come from one product.
    values = torch.cat([v, v.abs()], dim=-1)
    weigh = torch.matmul if bool(v.isfinite().all()) else _weigh_what_is_seen
    for rows in _row_blocks(case):
        keys = key_range(case, rows)
        S, hidden = _scores(case, q, k, rows, keys)
        O, L = _softmax_times(case, S, values[:, :, keys], weigh)
        out[:, :, rows], term_scale[:, :, rows] = O.chunk(2, dim=-1)
        lse[:, :, rows] = L
        empty[:, :, rows] = hidden
    return Reference(out=out, lse=lse, term_scale=term_scale, empty=empty)


def floor_of(reference: Reference, fmt: Format) -> Output:
    """The reference rounded once to `fmt`: no kernel that returns `fmt` can be better everywhere.

    The log-sum-exp is left in fp64: kernels return it in a wider format than the output.
    """
    return Output(out=round_to(reference.out, fmt), lse=None)


@kernel("reference", any_format=True)
def reference(case: AttentionCase) -> Output:
    """fp64 from the same rounded inputs: the truth every deviation is measured against."""
    answer = attend(case)
    return Output(out=answer.out, lse=answer.lse)


@kernel("floor", any_format=True)
def floor(case: AttentionCase) -> Output:
    """The reference rounded once to the output format: the smallest error a kernel can have."""
    return floor_of(attend(case), case.format)


def _row_blocks(case: AttentionCase) -> list[slice]:
    budget = BLOCK_BYTES["cuda" if case.q.is_cuda else "cpu"]
    per_row = 8 * case.q.shape[0] * case.heads * case.kv_len
    step = max(1, min(case.q_len, budget // per_row))
    return [slice(i, min(i + step, case.q_len)) for i in range(0, case.q_len, step)]


def _scores(
    case: AttentionCase, q: Tensor, k: Tensor, rows: slice, keys: slice
) -> tuple[Tensor, Tensor]:
    """Masked scores [B, H, rows, keys], and which rows see no key [B, H, rows]."""
    S = _per_kv_head(case, q[:, :, rows]) @ k[:, :, keys].transpose(-1, -2)
    S = S.view(*q.shape[:2], rows.stop - rows.start, keys.stop - keys.start).mul_(case.scale)
    if case.softcap is not None:
        S.div_(case.softcap).tanh_().mul_(case.softcap)
    bias = additive(case, rows, keys)
    if bias is not None:
        S.add_(bias.double())
    shown = visible(case, rows, keys)
    if shown is not None:
        S.masked_fill_(~shown, -math.inf)
    if S.shape[-1] == 0:
        return S, torch.ones(S.shape[:3], dtype=torch.bool, device=S.device)
    return S, S.eq(-math.inf).all(dim=-1)


def _softmax_times(
    case: AttentionCase, S: Tensor, values: Tensor, weigh: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """softmax(S) @ values [B, H, rows, 2 * v_dim], and the log-sum-exp [B, H, rows]."""
    m = S.amax(dim=-1) if S.shape[-1] else S.new_full(S.shape[:3], -math.inf)
    sink = None if case.sinks is None else case.sinks.double()[None, :, None].expand_as(m)
    if sink is not None:
        m = torch.maximum(m, sink)
    # An empty row has m = -inf; any finite shift then gives P = 0 instead of NaN.
    shift = torch.where(m == -math.inf, torch.zeros_like(m), m)
    P = S.sub_(shift[..., None]).exp_()
    l = P.sum(dim=-1)
    if sink is not None:
        l = l + (sink - shift).exp()
    O = weigh(_per_kv_head(case, P), values)
    O = O.view(*S.shape[:3], values.shape[-1]) / torch.where(l == 0, 1.0, l)[..., None]
    return O, shift + l.log()


def _weigh_what_is_seen(P: Tensor, values: Tensor) -> Tensor:
    """P @ values, where values of probability 0 count for nothing even if NaN or infinite.

    0 * NaN would let a hidden key through, or not, depending on which block it falls into.
    """
    O = P @ torch.where(values.isfinite(), values, 0.0)
    seen = (P != 0).double()
    for poison in (math.inf, -math.inf):
        O = torch.where(seen @ (values == poison).double() > 0, O + poison, O)
    return torch.where(seen @ values.isnan().double() > 0, math.nan, O)


def _per_kv_head(case: AttentionCase, x: Tensor) -> Tensor:
    """[B, H, R, X] as [B, kv_heads, group * R, X]: each kv head meets its query heads at once."""
    b, h, rows, width = x.shape
    return x.reshape(b, case.kv_heads, (h // case.kv_heads) * rows, width)
