"""The reference, block by block in PyTorch, on a CPU or CUDA: the check on the fused
path.

Query rows are processed in blocks, each against all the keys it can see, with an ordinary
two-pass softmax: no online rescaling and no approximation. Memory is O(rows * kv_len).
`gradients` takes every block on through the backward pass. The formulas stand in
`numdev.kernels.reference`.

Legend: X scaled products, S scores (X capped, biased, masked), P probabilities, m row
maximum, l row sum, O output, L log-sum-exp; dX, dP the gradients of X and P."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.cases import AttentionCase, Places, additive, key_range, visible
from numdev.formats import all_finite
from numdev.kernels.output import upstream

BLOCK_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}  # of one block of scores; speed only
# As many blocks as the backward pass holds at once, each so much smaller
BACKWARD_BLOCKS = 4
Weigh = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """The fp64 answer to a case: `out` [batch, heads, q_len, v_dim], `lse` [batch, heads,
    q_len] (-inf in an empty row without a sink), float64."""

    out: Tensor
    lse: Tensor
    # sum_j P_ij |V_jd|, [batch, heads, q_len, v_dim]; at least |out| everywhere
    term_scale: Tensor
    empty: Tensor  # bool [batch, heads, q_len]: rows that see no key
    by: str = "blocked"
    """Which path computed it; with a reason where it is not the fast one of the
    device."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Gradients(Reference):
    """The fp64 answer to a training step: what `attend` returns, and the gradients of
    sum(dO O), each in the shape of its input. float64 but for `empty` and `unseen`."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dq_terms: Tensor
    """|scale| sum_j P_ij (|dP_ij| + |delta_i|) |K_jd|, times a soft cap's slope; at least
    |dq|."""
    dk_terms: Tensor  # the same with |Q_id|, summed over rows i and query heads
    dv_terms: Tensor  # sum_i P_ij |dO_id|
    delta: Tensor  # rowsum(dO O), [batch, heads, q_len]; 0 in an empty row
    unseen: Tensor
    """bool [batch, kv_heads, kv_len]: keys that no query sees. Their dk and dv are
    exactly 0."""


def attend(case: AttentionCase, dtype: torch.dtype = torch.float64) -> Reference:
    """Returns the forward reference, computed in blocks of query rows, in `dtype`:
    outputs, log-sum-exp and term scales. The output of rows that see no key is 0. No
    gradients go through it."""
    q, k, v = (x.detach().to(dtype) for x in (case.q, case.k, case.v))
    reference = _empty_reference(q, v)
    # V and |V| side by side: output and term scale come from one product.
    values, weigh = torch.cat([v, v.abs()], dim=-1), _weigher(v)
    for rows in row_blocks(case):
        keys = key_range(case, rows)
        S = scores(case, _products(case, q, k, rows, keys), rows, keys)
        _fill_in_rows(reference, case, S, _largest(S), rows, values[:, :, keys], weigh)
    return reference


def gradients(case: AttentionCase, dtype: torch.dtype = torch.float64) -> Gradients:
    """Returns the forward reference and the gradients, with their term scales, computed
    in blocks of query rows, in `dtype`. Raises UsageError for a case without grad_out."""
    q, k, v, dO = (x.detach().to(dtype) for x in (case.q, case.k, case.v, upstream(case)))
    dq, dq_terms, dk, dk_terms, dv, dv_terms = (
        torch.zeros_like(x) for x in (q, q, k, k, v, v)
    )
    unseen = torch.ones(k.shape[:3], dtype=torch.bool, device=q.device)
    sums = Gradients(
        **vars(_empty_reference(q, v)), dq=dq, dk=dk, dv=dv, dq_terms=dq_terms,
        dk_terms=dk_terms, dv_terms=dv_terms, delta=q.new_empty(q.shape[:3]),
        unseen=unseen,
    )  # fmt: skip
    values, weigh = torch.cat([v, v.abs()], dim=-1), _weigher(q, k, v, dO)
    for rows in row_blocks(case, BACKWARD_BLOCKS):
        keys = key_range(case, rows)
        X = _products(case, q, k, rows, keys)
        slope = _slope(case, X)
        S = scores(case, X, rows, keys)
        sums.unseen[:, :, keys] &= _per_kv_head(case, S).amax(dim=2) == -math.inf
        m = _largest(S)
        # In a row of NaN exp(-inf - NaN) is NaN too, and yet what is hidden is hidden.
        hidden = None if all_finite([m]) else S.eq(-math.inf)
        P, l = _fill_in_rows(sums, case, S, m, rows, values[:, :, keys], weigh)
        P.div_(nonzero(l)[..., None])
        if hidden is not None:
            P.masked_fill_(hidden, 0.0)
        dO_O = dO[:, :, rows] * sums.out[:, :, rows]
        delta = dO_O.sum(dim=-1).masked_fill_(sums.empty[:, :, rows], 0.0)
        sums.delta[:, :, rows] = delta
        Q_i, dO_i, P_i = (
            _per_kv_head(case, x) for x in (q[:, :, rows], dO[:, :, rows], P)
        )
        K_j = k[:, :, keys]
        dX, terms = _score_gradient(case, P, dO_i, v[:, :, keys], delta, slope)

        sums.dq[:, :, rows] = weigh(dX, K_j, P_i).view_as(q[:, :, rows])
        sums.dq_terms[:, :, rows] = weigh(terms, K_j.abs(), P_i).view_as(q[:, :, rows])
        sums.dk[:, :, keys] += weigh(dX.mT, Q_i, P_i.mT)
        sums.dk_terms[:, :, keys] += weigh(terms.mT, Q_i.abs(), P_i.mT)
        sums.dv[:, :, keys] += weigh(P_i.mT, dO_i, P_i.mT)
        sums.dv_terms[:, :, keys] += weigh(P_i.mT, dO_i.abs(), P_i.mT)
    for x in (sums.dq, sums.dk):
        x.mul_(case.scale)
    for x in (sums.dq_terms, sums.dk_terms):
        x.mul_(abs(case.scale))
    return sums


def gradients_of_keys(
    case: AttentionCase, keys: Tensor, whole: Reference
) -> dict[str, Tensor]:
    """Returns `dk`, `dv`, `dk_terms`, `dv_terms` and `unseen` of the kv rows `keys`
    (int64 indices [n]) alone, [B, kv_heads, n, ...], in float64 but for `unseen`, bool.
    `whole` is the forward reference of all queries. Raises UsageError for a case without
    grad_out."""
    q, dO = (x.detach().double() for x in (case.q, upstream(case)))
    k, v = (x.detach()[:, :, keys].double() for x in (case.k, case.v))
    delta = (dO * whole.out).sum(dim=-1).masked_fill_(whole.empty, 0.0)
    dk, dk_terms, dv, dv_terms = (torch.zeros_like(x) for x in (k, k, v, v))
    unseen = torch.ones(k.shape[:3], dtype=torch.bool, device=k.device)
    weigh = _weigher(q, k, v, dO)
    for rows in row_blocks(case, BACKWARD_BLOCKS, len(keys)):
        X = _products(case, q, k, rows, slice(0, len(keys)))
        slope = _slope(case, X)
        S = scores(case, X, rows, keys)
        hidden = S.eq(-math.inf)
        unseen &= _per_kv_head(case, hidden).all(dim=2)
        P = S.sub_(whole.lse[:, :, rows, None]).exp_().masked_fill_(hidden, 0.0)
        Q_i, dO_i, P_i = (
            _per_kv_head(case, x) for x in (q[:, :, rows], dO[:, :, rows], P)
        )
        dX, terms = _score_gradient(case, P, dO_i, v, delta[:, :, rows], slope)
        dk.add_(weigh(dX.mT, Q_i, P_i.mT), alpha=case.scale)
        dk_terms.add_(weigh(terms.mT, Q_i.abs(), P_i.mT), alpha=abs(case.scale))
        dv.add_(weigh(P_i.mT, dO_i, P_i.mT))
        dv_terms.add_(weigh(P_i.mT, dO_i.abs(), P_i.mT))
    sums = {"dk": dk, "dv": dv, "dk_terms": dk_terms, "dv_terms": dv_terms}
    return {**sums, "unseen": unseen}


def _empty_reference(q: Tensor, v: Tensor) -> Reference:
    """Returns a Reference for q [B, H, q_len, head_dim] and v [B, kv_heads, kv_len,
    v_dim], in their dtype, to be filled in block by block: its tensors are not yet set,
    but for `empty`, which is False."""
    shape = q.shape[:3]
    out, term_scale = (q.new_empty(*shape, v.shape[-1]) for _ in range(2))
    empty = torch.zeros(shape, dtype=torch.bool, device=q.device)
    return Reference(out=out, lse=q.new_empty(shape), term_scale=term_scale, empty=empty)


def row_blocks(
    case: AttentionCase, share: int = 1, keys: int | None = None
) -> list[slice]:
    """Returns ranges of query rows that cover the case. A block's fp64 scores over `keys`
    keys (None: all of the case's) fit the device's budget divided by `share`, but a block
    has one row at least."""
    budget = BLOCK_BYTES[case.q.device.type] // share
    per_row = 8 * case.q.shape[0] * case.heads * (keys or case.kv_len)
    step = max(1, min(case.q_len, budget // per_row))
    return [slice(i, min(i + step, case.q_len)) for i in range(0, case.q_len, step)]


def _products(
    case: AttentionCase, q: Tensor, k: Tensor, rows: slice, keys: slice
) -> Tensor:
    """Returns X = scale Q Kᵀ [B, H, rows, keys] of these rows and keys, slices with both
    ends into `q` [B, H, q_len, head_dim] and `k` [B, kv_heads, kv_len, head_dim]."""
    X = _per_kv_head(case, q[:, :, rows]) @ k[:, :, keys].mT
    return X.view(*q.shape[:2], rows.stop - rows.start, keys.stop - keys.start).mul_(
        case.scale
    )


def _slope(case: AttentionCase, X: Tensor) -> Tensor | None:
    """Returns the soft cap's derivative 1 / cosh²(X / cap), in the shape of X; None
    without a soft cap. 1 - tanh² would be nothing but cancellation near the cap."""
    return (
        None
        if case.softcap is None
        else (X / case.softcap).cosh_().square_().reciprocal_()
    )


def scores(case: AttentionCase, X: Tensor, rows: Places, keys: Places) -> Tensor:
    """Returns the scores S [B, H, rows, keys] of the scaled products X: soft-capped, with
    the additive mask, and -inf where hidden. Overwrites X."""
    S = X if case.softcap is None else X.div_(case.softcap).tanh_().mul_(case.softcap)
    bias = additive(case, rows, keys)
    if bias is not None:
        S.add_(bias)
    shown = visible(case, rows, keys)
    return S if shown is None else S.masked_fill_(~shown, -math.inf)


def _largest(S: Tensor) -> Tensor:
    """Returns the largest score of each row, m [B, H, rows]; -inf in a row without keys,
    NaN in one with a NaN."""
    return S.amax(dim=-1) if S.shape[-1] else S.new_full(S.shape[:3], -math.inf)


def _fill_in_rows(
    reference: Reference,
    case: AttentionCase,
    S: Tensor,
    m: Tensor,
    rows: slice,
    values: Tensor,
    weigh: Weigh,
) -> tuple[Tensor, Tensor]:
    """Fills in these rows of `reference` (out, lse, term_scale, empty). `S` [B, H, rows,
    keys]: their scores, of which `m` [B, H, rows] are the largest; `values` [B, kv_heads,
    keys, 2 v_dim]: V and |V| of their keys, side by side. Returns exp(S - m), which
    overwrites S, and its row sum l [B, H, rows], with the sink in it. In both, m is at
    least the sink, if there is one, and 0 where it would be -inf."""
    reference.empty[:, :, rows] = m == -math.inf
    sink = None if case.sinks is None else case.sinks.to(S)[None, :, None].expand_as(m)
    if sink is not None:
        m = torch.maximum(m, sink)
    # An empty row has m = -inf; any finite shift then gives P = 0 instead of NaN.
    shift = torch.where(m == -math.inf, torch.zeros_like(m), m)
    P = S.sub_(shift[..., None]).exp_()
    l = P.sum(dim=-1)
    if sink is not None:
        l = l + (sink - shift).exp()
    reference.lse[:, :, rows], P_i = shift + l.log(), _per_kv_head(case, P)
    O = (
        weigh(P_i, values, P_i).view(*P.shape[:3], values.shape[-1])
        / nonzero(l)[..., None]
    )
    reference.out[:, :, rows], reference.term_scale[:, :, rows] = O.chunk(2, dim=-1)
    return P, l


def _score_gradient(
    case: AttentionCase,
    P: Tensor,
    dO_i: Tensor,
    V: Tensor,
    delta: Tensor,
    slope: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns, for P [B, H, rows, keys], `dO_i` [B, kv_heads, group * rows, v_dim], V [B,
    kv_heads, keys, v_dim] and `delta` [B, H, rows], dX = P (dP - delta), times the soft
    cap's slope, and the sum of its absolute terms, each [B, kv_heads, group * rows,
    keys]; 0 where P is 0. `slope` None: no soft cap."""
    dP = (dO_i @ V.mT).view_as(P)
    weight = P if slope is None else P * slope
    terms = dP.abs().add_(delta.abs()[..., None]).mul_(weight)
    dX = dP.sub_(delta[..., None]).mul_(weight)
    if not (P.numel() and bool(P.amin() > 0)):
        unweighted = P == 0
        for x in (dX, terms):
            x.masked_fill_(unweighted, 0.0)
    return _per_kv_head(case, dX), _per_kv_head(case, terms)


def _weigher(*inputs: Tensor) -> Weigh:
    """Returns a function (weights, values, P) -> weights @ values. Where all `inputs` are
    finite it ignores P; else a value whose P is 0 does not count, even if it is NaN or
    infinite."""
    if all_finite(inputs):
        return lambda weights, values, P: weights @ values
    return _weigh_what_is_seen


def _weigh_what_is_seen(weights: Tensor, values: Tensor, P: Tensor) -> Tensor:
    """Returns weights @ values [..., M, N], for weights and P [..., M, K] and values
    [..., K, N], where values of probability 0 (in P) do not count even if they are NaN or
    infinite: 0 * NaN would let a hidden key through, or not, depending on which block it
    falls into. `weights` are 0 there. Elsewhere NaN and infinity propagate."""
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


def nonzero(l: Tensor) -> Tensor:
    """Returns l with 1 in place of 0, to divide by: a numerator of 0 stays 0."""
    return torch.where(l == 0, 1.0, l)


def _per_kv_head(case: AttentionCase, x: Tensor) -> Tensor:
    """Returns x [B, H, R, X] as [B, kv_heads, group * R, X], so that a kv head meets all
    its query heads in one product."""
    b, h, rows, width = x.shape
    return x.reshape(b, case.kv_heads, (h // case.kv_heads) * rows, width)
