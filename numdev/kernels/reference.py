"""The reference: attention in fp64 from the inputs as they are, and the rounding floor.

Everything numdev says is a distance to this function, so it is written for plainness. Query rows
are processed in blocks, each against all the keys it can see, with an ordinary two-pass softmax;
there is no online rescaling and no approximation. Memory is O(rows * kv_len), never q_len * kv_len.

Beside the output it returns what the metrics need and only this pass can give: the log-sum-exp, the
*term scale* sum_j P_ij |V_jd| (the size of what is added up before anything cancels), and which
rows see no key at all. Such empty rows get out = 0 and lse = -inf (or the sink's logit); they are
a convention, not a number, and are left out of every metric.

`gradients` takes every block on through the backward pass, by the formulas of flash attention's
(Dao et al., arXiv 2205.14135, appendix B.2), P being the softmax of the block itself:

    dP = dO V^T,  delta = rowsum(dO O),  dX = P (dP - delta) / cosh^2(X / cap),
    dQ = scale dX K,  dK = scale dX^T Q,  dV = P^T dO,

without the cosh where there is no soft cap. Query heads that share a kv head are summed. A sink
takes its part of P and gets no gradient. A gradient's term scale is the same sum with all terms
positive, and |dP| + |delta| for their difference: there a backward pass loses its digits.

Legend: X scaled products, S scores (X capped, biased, masked), P probabilities, m row maximum,
l row sum, O output, L log-sum-exp; dX, dP the gradients of X and P.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase, additive, key_range, visible
from numdev.formats import Format, round_to
from numdev.kernels import Output, kernel, no_claim
from numdev.kernels.backward import upstream
from numdev.kernels.output import GRADIENTS

BLOCK_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
"""How large one block of scores may be; speed only, the result does not depend on it beyond fp64
rounding in the matrix products."""
BACKWARD_BLOCKS = 4
"""As many blocks as the backward pass holds at once, each so much smaller."""
Weigh = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """The fp64 answer to a case. Shapes as in `Output`; everything float64 but `empty`."""

    out: Tensor
    lse: Tensor
    term_scale: Tensor
    """sum_j P_ij |V_jd|, [batch, heads, q_len, v_dim]; at least |out| everywhere."""
    empty: Tensor
    """bool [batch, heads, q_len]: rows that see no key."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Gradients(Reference):
    """The fp64 answer to a training step: what `attend` returns, and the gradients of
    sum(dO O), each in the shape of its input. float64 but for `empty` and `unseen`."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dq_terms: Tensor
    """|scale| sum_j P_ij (|dP_ij| + |delta_i|) |K_jd|, times the soft cap's slope where there is
    one; at least |dq| everywhere."""
    dk_terms: Tensor
    """The same with |Q_id|, summed over rows i and query heads."""
    dv_terms: Tensor
    """sum_i P_ij |dO_id|."""
    delta: Tensor
    """rowsum(dO O), [batch, heads, q_len]; 0 in an empty row."""
    unseen: Tensor
    """bool [batch, kv_heads, kv_len]: keys that no query sees. Their dk and dv are exactly 0."""


def attend(case: AttentionCase) -> Reference:
    """O = softmax(S) V with S = bias + softcap(scale * Q K^T), all in fp64.

    NaN and infinity in the inputs propagate as the arithmetic has it, but a key of probability 0
    has no part in the sum, whatever its V holds: what is hidden cannot be seen. Inputs of any
    format are widened exactly; nothing is rounded on the way in or out.
    """
    q, k, v = (x.detach().double() for x in (case.q, case.k, case.v))
    found = _room(q, v)
    # V and |V| side by side: output and term scale come from one product.
    values, weigh = torch.cat([v, v.abs()], dim=-1), _weigher(v)
    for rows in _row_blocks(case):
        keys = key_range(case, rows)
        S = _scores(case, _products(case, q, k, rows, keys), rows, keys)
        found.empty[:, :, rows] = S.eq(-math.inf).all(dim=-1)
        P, l, found.lse[:, :, rows] = _exponentials(case, S)
        O = _output(case, P, l, values[:, :, keys], weigh)
        found.out[:, :, rows], found.term_scale[:, :, rows] = O.chunk(2, dim=-1)
    return found


def gradients(case: AttentionCase) -> Gradients:
    """The gradients of sum(dO O) with respect to q, k and v, and what `attend` returns, in fp64.

    Memory is that of inputs, results and a few blocks of rows. Where P is 0, query and key have no
    part in each other's gradients, whatever Q, K, V and dO hold there; elsewhere NaN and infinity
    propagate as the arithmetic has it. An empty row adds nothing to any gradient. Raises UsageError
    for a case without grad_out.
    """
    q, k, v, dO = (x.detach().double() for x in (case.q, case.k, case.v, upstream(case)))
    found = _room_for_gradients(q, k, v)
    values, weigh = torch.cat([v, v.abs()], dim=-1), _weigher(q, k, v, dO)
    for rows in _row_blocks(case, BACKWARD_BLOCKS):
        keys = key_range(case, rows)
        X = _products(case, q, k, rows, keys)
        slope = _slope(case, X)
        S = _scores(case, X, rows, keys)
        hidden = S.eq(-math.inf)
        found.empty[:, :, rows] = empty = hidden.all(dim=-1)
        found.unseen[:, :, keys] &= _per_kv_head(case, hidden).all(dim=2)
        P, l, found.lse[:, :, rows] = _exponentials(case, S)
        O = _output(case, P, l, values[:, :, keys], weigh)
        found.out[:, :, rows], found.term_scale[:, :, rows] = O.chunk(2, dim=-1)

        # In a row of NaN exp(-inf - NaN) is NaN too, and yet what is hidden is hidden.
        P = P.div_(_nonzero(l)[..., None]).masked_fill_(hidden, 0.0)
        dO_O = dO[:, :, rows] * found.out[:, :, rows]
        found.delta[:, :, rows] = delta = dO_O.sum(dim=-1).masked_fill_(empty, 0.0)
        Q_i, dO_i, P_i = (_per_kv_head(case, x) for x in (q[:, :, rows], dO[:, :, rows], P))
        K_j, V_j = k[:, :, keys], v[:, :, keys]
        dP = (dO_i @ V_j.mT).view_as(P)
        dX, terms = (_per_kv_head(case, x) for x in _score_gradient(P, dP, delta, slope))

        found.dq[:, :, rows] = weigh(dX, K_j, P_i).view_as(q[:, :, rows])
        found.dq_terms[:, :, rows] = weigh(terms, K_j.abs(), P_i).view_as(q[:, :, rows])
        found.dk[:, :, keys] += weigh(dX.mT, Q_i, P_i.mT)
        found.dk_terms[:, :, keys] += weigh(terms.mT, Q_i.abs(), P_i.mT)
        found.dv[:, :, keys] += weigh(P_i.mT, dO_i, P_i.mT)
        found.dv_terms[:, :, keys] += weigh(P_i.mT, dO_i.abs(), P_i.mT)
    for x in (found.dq, found.dk):
        x.mul_(case.scale)
    for x in (found.dq_terms, found.dk_terms):
        x.mul_(abs(case.scale))
    return found


def floor_of(reference: Reference, fmt: Format) -> Output:
    """The reference rounded once to `fmt`: no kernel that returns `fmt` can be better everywhere.

    So are the gradients, where the reference has them. The log-sum-exp is left out: kernels return
    it in a wider format than the output.
    """
    exact = {n: getattr(reference, n) for n in GRADIENTS if isinstance(reference, Gradients)}
    rounded: dict[str, Any] = {n: round_to(x, fmt) for n, x in exact.items()}
    return Output(out=round_to(reference.out, fmt), **rounded)


def _reference_step(case: AttentionCase) -> Output:
    g = gradients(case)
    return Output(out=g.out, lse=g.lse, dq=g.dq, dk=g.dk, dv=g.dv)


@kernel("reference", any_format=True, claims=no_claim, backward=_reference_step)
def reference(case: AttentionCase) -> Output:
    """fp64 from the same rounded inputs: the truth every deviation is measured against."""
    answer = attend(case)
    return Output(out=answer.out, lse=answer.lse)


def _floor_step(case: AttentionCase) -> Output:
    return floor_of(gradients(case), case.format)


@kernel("floor", any_format=True, claims=no_claim, backward=_floor_step)
def floor(case: AttentionCase) -> Output:
    """The reference rounded once to the output format: the smallest error a kernel can have."""
    return floor_of(attend(case), case.format)


def _room(q: Tensor, v: Tensor) -> Reference:
    shape = q.shape[:3]
    return Reference(
        out=q.new_empty(*shape, v.shape[-1]),
        lse=q.new_empty(shape),
        term_scale=q.new_empty(*shape, v.shape[-1]),
        empty=torch.zeros(shape, dtype=torch.bool, device=q.device),
    )


def _room_for_gradients(q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    return Gradients(
        **vars(_room(q, v)),
        dq=torch.zeros_like(q),
        dk=torch.zeros_like(k),
        dv=torch.zeros_like(v),
        dq_terms=torch.zeros_like(q),
        dk_terms=torch.zeros_like(k),
        dv_terms=torch.zeros_like(v),
        delta=q.new_empty(q.shape[:3]),
        unseen=torch.ones(k.shape[:3], dtype=torch.bool, device=q.device),
    )


def _row_blocks(case: AttentionCase, share: int = 1) -> list[slice]:
    budget = BLOCK_BYTES["cuda" if case.q.is_cuda else "cpu"] // share
    per_row = 8 * case.q.shape[0] * case.heads * case.kv_len
    step = max(1, min(case.q_len, budget // per_row))
    return [slice(i, min(i + step, case.q_len)) for i in range(0, case.q_len, step)]


def _products(case: AttentionCase, q: Tensor, k: Tensor, rows: slice, keys: slice) -> Tensor:
    """X [B, H, rows, keys]."""
    X = _per_kv_head(case, q[:, :, rows]) @ k[:, :, keys].mT
    return X.view(*q.shape[:2], rows.stop - rows.start, keys.stop - keys.start).mul_(case.scale)


def _slope(case: AttentionCase, X: Tensor) -> Tensor | None:
    """The soft cap's derivative. 1 - tanh^2 would be nothing but cancellation near the cap."""
    return None if case.softcap is None else (X / case.softcap).cosh_().square_().reciprocal_()


def _scores(case: AttentionCase, X: Tensor, rows: slice, keys: slice) -> Tensor:
    """S from X, which it overwrites."""
    S = X if case.softcap is None else X.div_(case.softcap).tanh_().mul_(case.softcap)
    bias = additive(case, rows, keys)
    if bias is not None:
        S.add_(bias.double())
    shown = visible(case, rows, keys)
    return S if shown is None else S.masked_fill_(~shown, -math.inf)


def _exponentials(case: AttentionCase, S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(S - m), which overwrites S, its row sum, and the log-sum-exp [B, H, rows]."""
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
    return P, l, shift + l.log()


def _output(case: AttentionCase, P: Tensor, l: Tensor, values: Tensor, weigh: Weigh) -> Tensor:
    """P @ values / l, [B, H, rows, 2 * v_dim]."""
    P_i = _per_kv_head(case, P)
    O = weigh(P_i, values, P_i).view(*P.shape[:3], values.shape[-1])
    return O / _nonzero(l)[..., None]


def _score_gradient(
    P: Tensor, dP: Tensor, delta: Tensor, slope: Tensor | None
) -> tuple[Tensor, Tensor]:
    """dX, and the sum of its absolute terms; 0 where P is. Overwrites dP."""
    apart = P == 0
    weight = P if slope is None else P * slope
    terms = dP.abs().add_(delta.abs()[..., None]).mul_(weight)
    dX = dP.sub_(delta[..., None]).mul_(weight)
    return dX.masked_fill_(apart, 0.0), terms.masked_fill_(apart, 0.0)


def _weigher(*inputs: Tensor) -> Weigh:
    """weights @ values; the third argument, P, matters only where an input is not finite."""
    if all(bool(x.isfinite().all()) for x in inputs):
        return lambda weights, values, P: weights @ values
    return _weigh_what_is_seen


def _weigh_what_is_seen(weights: Tensor, values: Tensor, P: Tensor) -> Tensor:
    """weights @ values, where values of probability 0 count for nothing even if NaN or infinite.

    0 * NaN would let a hidden key through, or not, depending on which block it falls into.
    """
    O = weights @ torch.where(values.isfinite(), values, 0.0)
    infinite = values.isinf().double()
    positive, negative = (values == math.inf).double(), (values == -math.inf).double()
    rising, falling = (weights > 0).double(), (weights < 0).double()
    O = torch.where(rising @ positive + falling @ negative > 0, O + math.inf, O)
    O = torch.where(rising @ negative + falling @ positive > 0, O - math.inf, O)
    seen = P != 0
    undefined = seen.double() @ values.isnan().double()
    undefined += (seen & (weights == 0)).double() @ infinite
    return torch.where(undefined > 0, math.nan, O)


def _nonzero(l: Tensor) -> Tensor:
    """l, with 1 where nothing was summed: what it divides is 0 there and stays so."""
    return torch.where(l == 0, 1.0, l)


def _per_kv_head(case: AttentionCase, x: Tensor) -> Tensor:
    """[B, H, R, X] as [B, kv_heads, group * R, X]: each kv head meets its query heads at once."""
    b, h, rows, width = x.shape
    return x.reshape(b, case.kv_heads, (h // case.kv_heads) * rows, width)
