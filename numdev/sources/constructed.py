"""Inputs with every link of the biased-rounding chain set by hand (Qiu & Yao, arXiv 2510.04212).

The links: tied keys that P meets with exactly 1, V of one sign there, a small tail of the other
keys, dO of one sign, and layer inputs X[T] that look alike, so that the rank-1 terms
(P K)[T]^T X[T] of the error of W_Q's gradient add up. Each is a parameter, so that a head can be
given all of them, or all but one.

Every number is exact in bfloat16 and in float16: both formats meet the same inputs, and rounding to
them changes nothing. (Sums of two such values are then exact in float16 too; `v_bits` 11 gives it
values that fill it, which bfloat16 rounds.) Scores depend on one feature and on noise: feature 0 of
q is about sqrt(head_dim), that of a key its score, so levels and the tail's mass hold at the
default scale. They are met exactly where sqrt(head_dim) and the level have 8 bits, as with head_dim
64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from numdev.formats import format_named, round_to
from numdev.sources.draws import Draws
from numdev.sources.regime_registry import Inputs, Shapes, regime

SMALLEST = 2.0**-16
"""What is smaller in size becomes 0: from here on a number of 8 bits is one of float16."""
UNSEEN = -1024.0
"""A score so far below the maximum that exp of it is 0 in fp64."""
NOISE = 0.5
"""Standard deviation of the features of q and of the other keys that decide no level."""


@regime(
    stresses="P = 1 exactly at tied keys, sums of same-signed V that drop one bit, a tail that "
    "breaks their ties, and a delta that all of it enters with one sign",
    origin="Qiu & Yao, arXiv 2510.04212",
)
def biased_rounding(
    shapes: Shapes,
    draws: Draws,
    *,
    count: int = 2,
    level: float = 8.0,
    tail: float = 1e-3,
    share: float = 1.0,
    value: float = 1.0,
    v_sign: int = 1,
    tail_sign: int = 1,
    grad_sign: int = 1,
    v_bits: int = 8,
) -> Inputs:
    """The first `count` keys (at most all) are one key. A `share` of the rows, chosen at random,
    scores `level` there; the other keys weigh `tail` together, where a tied one weighs 1 (0:
    exactly nothing). To the other rows all keys score about 0. |V| is uniform over the significands
    of `v_bits` bits (8: bf16's, 11: float16's) in [1, 2), at tied keys `value` times that. V is
    negative at tied keys with `v_sign` 1, of random sign with 0, positive with -1; so it is
    elsewhere by `tail_sign`, and dO by `grad_sign`. With `count` 1 nothing ties."""
    if count < 1 or tail < 0 or value <= 0 or not 0 <= share <= 1:
        raise ValueError(
            "count must be at least 1, tail not negative, value positive, share a part"
        )
    tied = min(count, shapes.kv_len)
    q = draws.normal("q", shapes.q) * NOISE
    k = draws.normal("k", shapes.k) * NOISE
    chance = draws.uniform("share", shapes.q[:3])
    q[..., 0] = torch.where(chance < share, math.sqrt(shapes.head_dim), 0.0).float()
    k[..., 0] = level + _apart(tail, shapes.kv_len - tied, shapes.head_dim)
    k[:, :, :tied] = 0.0
    k[:, :, :tied, 0] = level
    v = _significands("v", shapes.v, v_bits, draws)
    v[:, :, :tied] *= value * _signs(
        "tied v sign", (*shapes.v[:2], tied, shapes.v_dim), v_sign, draws
    )
    others = (*shapes.v[:2], shapes.kv_len - tied, shapes.v_dim)
    v[:, :, tied:] *= _signs("tail v sign", others, tail_sign, draws)
    grad_out = _significands("grad_out", shapes.out, 8, draws)
    grad_out *= _signs("grad_out sign", shapes.out, grad_sign, draws)
    return Inputs(q=_exact(q), k=_exact(k), v=_exact(v, v_bits), grad_out=grad_out)


def layer_input(q: Tensor, draws: Draws, *, alike: bool) -> tuple[Tensor, Tensor]:
    """X [batch, q_len, 2 heads head_dim] and W_Q [heads head_dim, 2 heads head_dim], in fp32, with
    q = X W_Q^T exactly, for q [batch, heads, q_len, head_dim].

    X is a token's q of all heads side by side, then as many features that W_Q ignores (its gradient
    does not). These are 8 times N(0, 1) each: one vector for all tokens of a sequence where they
    are to look `alike`, else one of its own for every token."""
    batch, heads, length, head_dim = q.shape
    width = heads * head_dim
    seen = q.float().transpose(1, 2).reshape(batch, length, width)
    drawn = 8.0 * draws.normal("layer input", (batch, 1, 1 if alike else length, width))
    unseen = _exact(drawn[:, 0]).expand(batch, length, width)
    weight = torch.eye(width, 2 * width, dtype=torch.float32, device=q.device)
    return torch.cat([seen, unseen.to(q.device)], dim=2), weight


def _apart(tail: float, keys: int, head_dim: int) -> float:
    """How far from the tied keys' score so many others are to be, so that they weigh `tail`
    together. Noise in the scores raises the mean of their exp."""
    if tail == 0 or keys == 0:
        return UNSEEN
    variance = NOISE**4 * (head_dim - 1) / head_dim
    return math.log(tail / keys) - variance / 2


def _significands(name: str, shape: tuple[int, ...], bits: int, draws: Draws) -> Tensor:
    """Uniform over the numbers of so many significant bits in [1, 2)."""
    first = 1 << (bits - 1)
    return draws.integers(name, shape, first, 2 * first).float() / first


def _signs(name: str, shape: tuple[int, ...], sign: int, draws: Draws) -> Tensor:
    """-1 everywhere for `sign` 1, 1 for -1, either at random for 0."""
    if sign not in (-1, 0, 1):
        raise ValueError("a sign is 1, 0 or -1")
    if sign:
        return torch.full(shape, -float(sign), dtype=torch.float32, device="cpu")
    return draws.integers(name, shape, 0, 2).float() * 2.0 - 1.0


def _exact(x: Tensor, bits: int = 8) -> Tensor:
    """x in so many significant bits; with 8, numbers that are bf16's and float16's."""
    rounded = round_to(x, format_named(f"e8m{bits - 1}"))
    return rounded.masked_fill(rounded.abs() < SMALLEST, 0.0)
