"""Whether a gradient is summed from tile to tile in the format of the inputs, where its
error is hardly larger for it.

A sum that is stored in 16 bits between tiles errs by what these roundings come to, and
that is known to the element: P and dS follow from the exact log-sum-exp and the output
that the kernel returned, as FlashAttention-2's backward has them. With s the gradient
summed in fp32, s' the same rounded between tiles, and x what a kernel returned, the share

    sum w n d / sum w d^2,    n = x - s,  d = s' - s,

is 1 where the kernel sums so, and 0 where it does not: then n is other roundings, of
which the elements of d are independent, so that the share's variance is
sum (w n d)^2 / (sum w d^2)^2. w is one over the mean square of n in a row. What is
rounded last is no part of d, since every kernel makes that cast.

Legend: Q, K, V, O, dO as in attention; X scaled products, S scores."""

# ruff: noqa: E741

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.formats import dtype_of
from numdev.kernels.output import upstream
from numdev.kernels.reference.blocked import scores
from numdev.metrics.narrow_sum_search_scope import TILES

CERTAIN = 6.0  # standard deviations that a share is lessened by
MOST_SHARE = 1.5  # what has more of it errs otherwise: all of a gradient may cancel
ROWS = 128  # of a gradient, in which it is looked for
MOST_ROWS = 2048  # of all query heads and sequences


def looked_at(case: AttentionCase, tensor: str) -> tuple[range, range, range]:
    """Returns the ranges of sequences, queries and keys of a call in which sums in 16
    bits are looked for: of dq the last ROWS queries with all keys, of dk and dv the first
    ROWS keys with all queries. The range of sequences may be longer than the call's
    batch. `tensor`: dq, dk or dv."""
    batch = range(max(1, MOST_ROWS // (ROWS * case.group)))
    if tensor == "dq":
        return batch, range(max(0, case.q_len - ROWS), case.q_len), range(case.kv_len)
    return batch, range(case.q_len), range(min(ROWS, case.kv_len))


@dataclass(frozen=True, kw_only=True, eq=False)
class Sums:
    """A gradient summed in fp32, and how far it is off where the running sum is rounded
    to 16 bits, for each tile size and order of tiles."""

    s: Tensor  # [B, heads, rows, features]
    d: Tensor  # [tilings, B, heads, rows, features]: how far each is off before the cast

    @classmethod
    def of(cls, case: AttentionCase, tensor: str, out: Tensor, lse: Tensor) -> Sums:
        """Returns the sums of a gradient (`tensor`: dq, dk or dv) of a call, by
        FlashAttention-2's backward pass from the output `out` [B, H, q_len, v_dim] that a
        kernel returned; `lse`: the exact log-sum-exp [B, H, q_len]. Running sums are
        rounded to the case's format. Over a group of query heads dk and dv are summed in
        fp32. Raises ValueError where the terms (keys of dq, queries of dk and dv) are not
        more than the least tile of TILES; UsageError for a case without grad_out, or of a
        format that torch has no dtype for."""
        Q, dO, O = (x.float() for x in (case.q, upstream(case), out))
        K, V = (x.float().repeat_interleave(case.group, dim=1) for x in (case.k, case.v))
        X = Q @ K.mT * case.scale
        slope = None
        if case.softcap is not None:
            slope = (X / case.softcap).cosh().square().reciprocal()
        S = scores(case, X, slice(0, case.q_len), slice(0, case.kv_len))
        weights = (S - lse.float()[..., None]).exp().nan_to_num(0.0)  # an empty row is 0
        if tensor != "dv":
            delta = (dO * O).sum(dim=-1, keepdim=True)
            weights = weights * (dO @ V.mT - delta)
            weights = weights if slope is None else weights * slope
        weights = _round_to_format(case, weights)
        if tensor == "dq":
            tiles = _tile_products(weights, case.scale * K)
        else:
            tiles = _tile_products(weights.mT, case.scale * Q if tensor == "dk" else dO)
        s = tiles.sum(dim=0)
        d = torch.cat(
            [_round_running_sum(case, each) - s for each in _ordered_tilings(tiles)]
        )
        if tensor != "dq" and case.group > 1:
            s, d = (x.unflatten(-3, (-1, case.group)).sum(dim=-3) for x in (s, d))
        return cls(s=s, d=d)

    def narrow(self, x: Tensor, expected: Tensor) -> list[float]:
        """Returns for each head at least how much of the error of a running sum in 16
        bits a gradient x [B, heads, rows, features] has, as a share from 0 to MOST_SHARE.
        What its rounding model `expected`, of the same shape, has of it is subtracted;
        the largest over tilings is returned, and 0 where none rounds anything."""
        share = self.shares(x)[1].nan_to_num(0.0)
        if bool((share > 0).any()):  # of few: most kernels have none of it
            share = share - self.shares(expected)[0].nan_to_num(0.0).clamp_min(0.0)
        largest: list[float] = share.clamp_min(0.0).amax(dim=0).tolist()
        return largest

    def shares(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns two tensors [tilings, heads]: the share of `d` that is seen in x, and a
        lower bound of it. The bound is CERTAIN standard deviations less, and at most 0
        for a share above MOST_SHARE. NaN where d is 0 throughout; elements that are not
        finite count for nothing."""
        n = x.float() - self.s
        usable = n.isfinite() & self.is_finite
        n, d = torch.where(usable, n, 0.0), torch.where(usable, self.d, 0.0)
        square = n.square().mean(dim=-1, keepdim=True)
        weighed = d * torch.where(square > 0, square.reciprocal(), 0.0)
        products, of_head = weighed * n, (1, 3, 4)
        error = products.square().sum(dim=of_head).sqrt()
        size = (weighed * d).sum(dim=of_head)
        share: Tensor = products.sum(dim=of_head) / size
        least = share - CERTAIN * error / size
        return share, torch.where(share <= MOST_SHARE, least, least.clamp_max(0.0))

    @cached_property
    def is_finite(self) -> Tensor:
        """Returns where `d` is finite in all tilings, bool [B, heads, rows, features]."""
        return self.d.isfinite().all(dim=0)


def _tile_products(weights: Tensor, values: Tensor) -> Tensor:
    """Returns weights [B, H, rows, terms] @ values [B, H, terms, features] of each least
    tile of terms, [tiles, B, H, rows, features]; the last tile is padded with zeros."""
    size = TILES[0]
    more = -weights.shape[-1] % size
    weights = torch.nn.functional.pad(weights, (0, more)).unflatten(-1, (-1, size))
    values = torch.nn.functional.pad(values, (0, 0, 0, more)).unflatten(-2, (-1, size))
    products: Tensor = torch.einsum("bhrtk,bhtkd->tbhrd", weights, values)
    return products.contiguous()


def _ordered_tilings(products: Tensor) -> Iterator[Tensor]:
    """Yields for each tile size of TILES that makes several tiles the terms summed within
    a tile, [tiles, 2, ...]. The axis of 2 is the order of the tiles: the first tile
    first, and the last one first."""
    for size in TILES:
        parts = products.split(size // TILES[0])
        if len(parts) > 1:
            tiles = torch.stack([part.sum(dim=0) for part in parts])
            yield torch.stack([tiles, tiles.flip(0)], dim=1)


def _round_running_sum(case: AttentionCase, tiles: Tensor) -> Tensor:
    """Returns the running sum of tiles [tiles, ...], which is rounded to the case's
    format before each tile is added. An element is not rounded where all that is still to
    come is at most one unit in its last place: then it is rounded as the cast rounds."""
    fmt = case.format
    ulp, least = 2 * fmt.unit_roundoff, 2.0 ** (fmt.emin - fmt.precision + 1)
    total, to_come = tiles[0], tiles[1:].sum(dim=0)
    for tile in tiles[1:]:
        rounds = to_come.abs() > (ulp * total.abs()).clamp_min(least)
        total = total + (_round_to_format(case, total) - total) * rounds + tile
        to_come = to_come - tile
    return total


def _round_to_format(case: AttentionCase, x: Tensor) -> Tensor:
    """Returns x rounded to the case's format, in float32. Raises UsageError for a format
    that torch has no dtype for."""
    return x.to(dtype_of(case.format)).float()
