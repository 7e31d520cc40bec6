"""Ties of the scores, and what P is where it meets V: the first links of Qiu & Yao's chain (arXiv
2510.04212).

Ties are those of S as the recipe rounds it, over all keys that a row sees. P is as it is multiplied
with V (site `p`): relative to the maximum its tile came under, or normalised where the recipe does
that first. A key counts as a one only where that maximum is the row's largest of all: in a recipe
whose every tile has a maximum of its own, each would have a one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.cases import key_range
from numdev.diagnose.statistics import Columns, mean
from numdev.diagnose.truth import Truth, probabilities, row_blocks
from numdev.kernels.emulation import forward as fwd
from numdev.kernels.emulation.backward import Kept
from numdev.kernels.emulation.rounding import Rounder

NEAR = 1e-3
"""How far from its row's largest score another is nearly tied: as in the paper's later runs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ties:
    """Of every row, [B, H, n] each."""

    at_maximum: Tensor
    """Keys whose S is the row's largest."""
    near: Tensor
    """Keys whose S is within NEAR of it."""
    one_signed: Tensor
    """The share of V's features that have one sign over those keys."""
    ones: Tensor
    """Keys with P-bar exactly 1."""
    powers: Tensor
    """The probability of keys at which P is an exact power of two."""


def ties_of(r: Rounder, kept: Kept, truth: Truth) -> Ties:
    """What a recipe's forward pass, of which `kept` is left, meets V with."""
    parts = [_of_rows(r, kept, truth, rows) for rows in row_blocks(kept.case)]
    fields = vars(parts[0])
    return Ties(**{name: torch.cat([getattr(p, name) for p in parts], dim=2) for name in fields})


def columns(ties: Ties, rows: Tensor) -> Columns:
    """The numbers of every head, [H] each: means over the rows that count, or that have ties."""
    tied, nearly = rows & (ties.at_maximum > 1), rows & (ties.near > 1)
    return {
        "tied": mean(tied.double(), rows),
        "nearly_tied": mean(nearly.double(), rows),
        "tied_keys": mean(ties.at_maximum, tied),
        "ones": mean((ties.ones > 1).double(), rows),
        "powers": mean(ties.powers, rows),
        "one_signed": mean(ties.one_signed, nearly),
    }


def _of_rows(r: Rounder, kept: Kept, truth: Truth, rows: slice) -> Ties:
    case, made = kept.case, kept.made
    seen, width = key_range(case, rows), _width(kept)
    keys = slice(seen.start - seen.start % width, seen.stop)  # whole tiles
    S, _ = fwd.scores(r, case, made, kept.q_s, kept.k, rows, keys)
    P = probabilities(case, truth.exact, rows, keys)
    largest = S.amax(dim=-1, keepdim=True) if S.shape[-1] else S.new_zeros(*S.shape[:3], 1)
    near = (largest - NEAR <= S) & (-math.inf < S)
    tied = (largest == S) & (-math.inf < S)
    signs = fwd.times(case, near.float(), case.v[:, :, keys].double().sign().float())
    ones, powers = _as_they_meet_v(r, kept, S, P, rows, keys)
    return Ties(
        at_maximum=tied.sum(dim=-1).double(),
        near=near.sum(dim=-1).double(),
        one_signed=(signs.abs() == near.sum(dim=-1, keepdim=True)).double().mean(dim=-1),
        ones=ones,
        powers=powers,
    )


def _as_they_meet_v(
    r: Rounder, kept: Kept, S: Tensor, P: Tensor, rows: slice, keys: slice
) -> tuple[Tensor, Tensor]:
    """`ones` and `powers` of a block, tile by tile in the recipe's order. Overwrites S."""
    case, made, width = kept.case, kept.made, _width(kept)
    best = S.new_full(S.shape[:3], -math.inf)
    ones, powers = torch.zeros_like(best), P.new_zeros(best.shape)
    for split in fwd.splits(case, made):
        m = fwd.start(r, case, kept.q[:, :, rows], kept.v, split)[0]
        starts = range(max(keys.start, split.start), min(keys.stop, split.stop), width)
        for first in reversed(starts) if made.kv_order == "descending" else starts:
            tile = slice(first - keys.start, min(first + width, keys.stop) - keys.start)
            m, under, weights = _weights(r, kept, S[..., tile], m, rows)
            count = (weights == 1.0).sum(dim=-1).to(best.dtype)
            ones = torch.where(under > best, count, ones + torch.where(under == best, count, 0.0))
            best = torch.maximum(best, under)
            powers += (P[..., tile] * is_power_of_two(weights)).sum(dim=-1)
    return ones.double(), powers


def _weights(
    r: Rounder, kept: Kept, S: Tensor, m_old: Tensor, rows: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one tile: the running maximum after it, that under which it came, and P as it is
    multiplied with V. Overwrites S."""
    made = kept.made
    own = fwd.maximum(r, kept.case, made, S)
    m = torch.maximum(m_old, own)
    under = own if made.algorithm == "fa1" else m
    P = fwd.exponential(r, made, S, under)
    if made.algorithm == "plain":
        P = r("normalised", P / fwd.nonzero(kept.l[:, :, rows, None]))
    return m, under, r("p", P)


def _width(kept: Kept) -> int:
    """Keys in a tile."""
    return kept.made.tile(kept.q.shape[-1], kept.case.kv_len)[1]


def is_power_of_two(x: Tensor) -> Tensor:
    """Whether each number is 2^n for some integer n."""
    return torch.frexp(x).mantissa == 0.5
