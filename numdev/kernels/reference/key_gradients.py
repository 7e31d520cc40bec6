"""The exact gradients of some keys: rows of dk and dv, in fp64.

A row of dk or dv is a sum over all queries, so that sampling queries does not give it. But a key's
probabilities need no other key once the log-sum-exp is known: P_ij = exp(S_ij - L_i), and its
gradients need delta = rowsum(dO O) besides. Both come from one forward reference of all queries,
which is the cost of this: O(q_len kv_len), where the rows of the output cost O(rows kv_len). The
rest is O(q_len keys). Formulas and legend are those of `numdev.kernels.reference`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.kernels.output import upstream
from numdev.kernels.reference import attend, blocked
from numdev.kernels.reference.blocked import BACKWARD_BLOCKS, _per_kv_head


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyGradients:
    """Of n keys of a call, float64 [batch, kv_heads, n, ...]; names as in `reference.Gradients`,
    `unseen` bool, and `lse` [batch, heads, q_len] of all queries."""

    dk: Tensor
    dv: Tensor
    dk_terms: Tensor
    dv_terms: Tensor
    unseen: Tensor
    lse: Tensor


def key_gradients(case: AttentionCase, keys: Tensor) -> KeyGradients:
    """The gradients of sum(dO O) with respect to the rows `keys` of k and v, int64 indices.

    `case` has all its queries, and grad_out (else UsageError). NaN and infinity propagate as in
    `reference.gradients`, whose rows these are but for fp64 rounding.
    """
    keys = keys.to(case.q.device)
    whole = attend(case)
    q, dO = (x.detach().double() for x in (case.q, upstream(case)))
    k, v = (x.detach()[:, :, keys].double() for x in (case.k, case.v))
    delta = (dO * whole.out).sum(dim=-1).masked_fill_(whole.empty, 0.0)
    dk, dk_terms, dv, dv_terms = (torch.zeros_like(x) for x in (k, k, v, v))
    unseen = torch.ones(k.shape[:3], dtype=torch.bool, device=k.device)
    weigh = blocked._weigher(q, k, v, dO)
    for rows in blocked._row_blocks(case, BACKWARD_BLOCKS, len(keys)):
        X = blocked._products(case, q, k, rows, slice(0, len(keys)))
        slope = blocked._slope(case, X)
        S = blocked._scores(case, X, rows, keys)
        hidden = S.eq(-math.inf)
        unseen &= _per_kv_head(case, hidden).all(dim=2)
        P = S.sub_(whole.lse[:, :, rows, None]).exp_().masked_fill_(hidden, 0.0)
        Q_i, dO_i, P_i = (_per_kv_head(case, x) for x in (q[:, :, rows], dO[:, :, rows], P))
        dX, terms = blocked._score_gradient(case, P, dO_i, v, delta[:, :, rows], slope)
        dk.add_(weigh(dX.mT, Q_i, P_i.mT), alpha=case.scale)
        dk_terms.add_(weigh(terms.mT, Q_i.abs(), P_i.mT), alpha=abs(case.scale))
        dv.add_(weigh(P_i.mT, dO_i, P_i.mT))
        dv_terms.add_(weigh(P_i.mT, dO_i.abs(), P_i.mT))
    return KeyGradients(
        dk=dk, dv=dv, dk_terms=dk_terms, dv_terms=dv_terms, unseen=unseen, lse=whole.lse
    )
