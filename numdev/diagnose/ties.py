"""Ties of the scores, and what P is where it meets V: where Qiu & Yao's chain (arXiv 2510.04212)
begins.

Ties are those of S as the recipe rounds it, over all keys that a row sees. P is as it is multiplied
with V (site `p`). A key counts as a one only where the maximum that P was taken under is the row's
largest of all: in a recipe whose every tile has a maximum of its own, each would have a one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from numdev.cases import key_range
from numdev.diagnose.passes import Truth, probabilities, row_blocks
from numdev.diagnose.statistics import Columns, mean
from numdev.kernels.emulation import forward as fwd
from numdev.kernels.emulation.backward import Kept
from numdev.kernels.emulation.rounding import Rounder

NEAR = 1e-3  # how far from its row's largest score another is nearly tied, as in the paper


def ties(r: Rounder, kept: Kept, truth: Truth) -> Columns:
    """Means of every head over the rows that count, or of `one_signed` over those nearly tied."""
    blocks = [_of_rows(r, kept, truth, rows) for rows in row_blocks(r.case)]
    tied, near, one_signed, ones, powers = (torch.cat(x, 2) for x in zip(*blocks, strict=True))
    rows = truth.rows
    return {
        "tied": mean((rows & (tied > 1)).double(), rows),
        "ones": mean((ones > 1).double(), rows),
        "powers": mean(powers, rows),
        "one_signed": mean(one_signed, rows & (near > 1)),
    }


def _of_rows(r: Rounder, kept: Kept, truth: Truth, rows: slice) -> tuple[Tensor, ...]:
    """Of each row of a block, [B, H, rows]: keys whose S is the largest, keys within NEAR of it,
    the share of V's features that have one sign over these, keys with P-bar exactly 1, and the
    probability of keys at which P is an exact power of two."""
    case, made = r.case, r.made
    width = made.tile(kept.q.shape[-1], case.kv_len)[1]
    seen = key_range(case, rows)
    keys = slice(seen.start - seen.start % width, seen.stop)  # whole tiles
    S, _ = fwd.scores(r, kept.q_s, kept.k, rows, keys)
    P, _, _ = probabilities(case, truth.exact, rows, keys)
    largest = S.amax(dim=-1, keepdim=True) if S.shape[-1] else S.new_zeros(*S.shape[:3], 1)
    shown = -math.inf < S
    tied, near = (((largest - off <= S) & shown).sum(dim=-1) for off in (0.0, NEAR))
    close = ((largest - NEAR <= S) & shown).float()
    signs = fwd.times(case, close, case.v[:, :, keys].double().sign().float())
    one_signed = (signs.abs() == near[..., None]).double().mean(dim=-1)
    # From here on tile by tile in the recipe's order: P-bar as it meets V. Overwrites S.
    best = S.new_full(S.shape[:3], -math.inf)
    ones, powers = torch.zeros_like(best), P.new_zeros(best.shape)
    for split in fwd.splits(r):
        m = fwd.start(r, kept.q[:, :, rows], kept.v, split).m
        starts = range(max(keys.start, split.start), min(keys.stop, split.stop), width)
        for first in fwd.in_order(r, starts):
            tile = slice(first - keys.start, min(first + width, keys.stop) - keys.start)
            own = fwd.maximum(r, S[..., tile])
            m = torch.maximum(m, own)
            under = own if made.algorithm == "fa1" else m
            weights = fwd.exponential(r, S[..., tile], under)
            if made.algorithm == "plain":
                weights = r("normalised", weights / fwd.nonzero(kept.l[:, :, rows, None]))
            weights = r("p", weights)
            count = (weights == 1.0).sum(dim=-1).to(best.dtype)
            ones = torch.where(under > best, count, ones + torch.where(under == best, count, 0.0))
            best = torch.maximum(best, under)
            powers += (P[..., tile] * (torch.frexp(weights).mantissa == 0.5)).sum(dim=-1)
    return tied, near, one_signed, ones, powers
