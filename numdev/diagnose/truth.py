"""The truth of a diagnosis: what a call computes in fp64, and what of it recipes are held against.

Beside the reference's output and gradients that is which rows count, where attention goes, P K, the
size of delta, and dW_Q. It is computed once for all recipes, in blocks of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.cases import AttentionCase, key_range
from numdev.diagnose.statistics import Columns, rms
from numdev.diagnose.weights import weight_gradient
from numdev.kernels.backward import upstream
from numdev.kernels.reference import gradients
from numdev.kernels.reference.blocked import _per_kv_head, _products, _row_blocks, _scores, _slope
from numdev.kernels.reference.results import Gradients
from numdev.sources.projection import Projection

SHARE = 8
"""As many blocks of scores as are held at once, each so much smaller."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Truth:
    """A call in fp64."""

    case: AttentionCase
    projection: Projection | None
    exact: Gradients
    rows: Tensor
    """bool [B, H, q_len]: rows that see more than one key."""
    PK: Tensor
    """P K [B, H, q_len, head_dim], 0 in rows that see none; under a soft cap P times its slope."""
    received: Tensor
    """[B, H, kv_len]: the sum over `rows` of the probability that each key gets."""
    seen_by: Tensor
    """[B, H, kv_len]: how many of `rows` see each key."""
    size: Tensor
    """[H]: the rms over `rows` of rowsum|dO o O|, the unit of delta's errors."""
    dw_q: Tensor | None
    """[H, head_dim, width]; None where the projection is not known."""

    def weights(self, dq: Tensor) -> Tensor | None:
        """dW_Q of a gradient at q."""
        return None if self.projection is None else weight_gradient(self.projection, dq)


def truth_of(case: AttentionCase, projection: Projection | None) -> Truth:
    """Raises UsageError for a case without grad_out."""
    dO = upstream(case).double()
    exact = gradients(case)
    b, h, n, d = case.q.shape
    rows = torch.zeros(b, h, n, dtype=torch.bool, device=case.q.device)
    PK = exact.dq.new_zeros(b, h, n, d)
    received = exact.dq.new_zeros(b, h, case.kv_len)
    seen_by = torch.zeros_like(received)
    for part, keys, P, slope, shown in _probabilities(case, exact):
        rows[:, :, part] = several = shown.sum(dim=-1) > 1
        weights = P if slope is None else P * slope
        found = _per_kv_head(case, weights) @ case.k[:, :, keys].double()
        PK[:, :, part] = found.view(b, h, -1, d)
        received[:, :, keys] += torch.where(several[..., None], P, 0.0).sum(dim=2)
        seen_by[:, :, keys] += (shown & several[..., None]).sum(dim=2)
    return Truth(
        case=case,
        projection=projection,
        exact=exact,
        rows=rows,
        PK=PK,
        received=received,
        seen_by=seen_by,
        size=rms((dO * exact.out).abs().sum(dim=-1), rows),
        dw_q=None if projection is None else weight_gradient(projection, exact.dq),
    )


def probabilities(case: AttentionCase, exact: Gradients, rows: slice, keys: slice) -> Tensor:
    """P [B, H, rows, keys] in fp64; 0 where hidden."""
    return _block(case, exact, rows, keys)[0]


def _probabilities(
    case: AttentionCase, exact: Gradients
) -> Iterator[tuple[slice, slice, Tensor, Tensor | None, Tensor]]:
    """Blocks of rows with the keys they can see: rows, keys, P, the soft cap's slope, and which
    keys are shown."""
    for rows in row_blocks(case):
        keys = key_range(case, rows)
        yield rows, keys, *_block(case, exact, rows, keys)


def row_blocks(case: AttentionCase) -> list[slice]:
    """Rows that are taken at once."""
    return _row_blocks(case, SHARE)


def _block(
    case: AttentionCase, exact: Gradients, rows: slice, keys: slice
) -> tuple[Tensor, Tensor | None, Tensor]:
    X = _products(case, case.q.double(), case.k.double(), rows, keys)
    slope = _slope(case, X)
    S = _scores(case, X, rows, keys)
    hidden = S.eq(-math.inf)
    P = S.sub_(exact.lse[:, :, rows, None]).exp_().masked_fill_(hidden, 0.0)
    return P, slope, ~hidden


def sink(truth: Truth) -> Columns:
    """The key that receives most probability, its share of the rows that see it, and its |V| over
    the median of the keys that anybody sees, mean over sequences; [H] each."""
    case, everywhere = truth.case, truth.received.sum(dim=0)  # [H, kv_len]
    key = everywhere.argmax(dim=-1)
    at = key[:, None]
    mass = everywhere.gather(-1, at) / truth.seen_by.sum(dim=0).gather(-1, at)
    sizes = torch.linalg.vector_norm(case.v.double(), dim=-1)
    sizes = sizes.masked_fill(truth.exact.unseen, math.nan).repeat_interleave(case.group, dim=1)
    there = sizes.gather(-1, key[None, :, None].expand(len(sizes), -1, 1))[..., 0]
    ratio = there / sizes.nanmedian(dim=-1).values  # [B, H]
    return {
        "sink_key": key.double().masked_fill(mass[:, 0].isnan(), math.nan),
        "sink_mass": mass[:, 0],
        "sink_v": ratio.nanmean(dim=0),
    }
