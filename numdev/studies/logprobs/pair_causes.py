"""What one side is beside the other where no model is known: a temperature, and a
support, from the alternatives that both recorded.

At a position, log-probabilities of two programs differ by a factor, the temperature's,
and by a constant, the normalisation's: y = beta x + c. Both are taken from the
alternatives; the chosen token's difference is what they must explain. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from numdev.studies.logprobs.records import NO_TOKEN, SequencePair

ONE_SIGN = 0.02  # of the squared constants, what those of the rarer sign may come to


class Alternatives(NamedTuple):
    """Of each of n tokens the alternatives that both sides recorded, but the token
    itself, float64 [n, k] each; NaN where a side has none."""

    x: np.ndarray  # log-probabilities by the first side, which is the reference
    y: np.ndarray  # by the second


def shared_alternatives(pair: SequencePair) -> Alternatives | None:
    """Returns the alternatives of the shared tokens of a pair, [m, k], as the second side
    has them. None where a side recorded none: it has no such field, or no position has
    room for one (k of 0). NaN where an alternative is the token itself, is not among the
    first side's, or has no finite value on both."""
    a, b = pair.a, pair.b
    if a.top_ids is None or a.top_logprobs is None:
        return None
    if b.top_ids is None or b.top_logprobs is None:
        return None
    if not (a.top_ids.shape[1] and b.top_ids.shape[1]):
        return None
    ids_a, ids_b = a.top_ids[pair.at_a], b.top_ids[pair.at_b]
    same = (ids_b[:, :, None] == ids_a[:, None, :]) & (ids_b != NO_TOKEN)[:, :, None]
    same &= (ids_b != b.token_ids[pair.at_b][:, None])[:, :, None]
    x = np.take_along_axis(a.top_logprobs[pair.at_a], same.argmax(axis=2), axis=1)
    y = b.top_logprobs[pair.at_b]
    valid = same.any(axis=2) & np.isfinite(x) & np.isfinite(y)
    return Alternatives(np.where(valid, x, np.nan), np.where(valid, y, np.nan))


def slope_sums(
    alternatives: Alternatives, chosen: tuple[np.ndarray, np.ndarray]
) -> tuple[float, float, float]:
    """Returns the sums of x times y, of x squared and of y squared over alternatives and
    chosen tokens, each less its mean over those of its position. What is not finite on
    one side is left out. `chosen`: x and y of the tokens, float64 [n] each."""
    tokens = [np.where(np.isfinite(sum(chosen)), c, np.nan)[:, None] for c in chosen]
    x = np.concatenate([alternatives.x, tokens[0]], axis=1)
    y = np.concatenate([alternatives.y, tokens[1]], axis=1)
    valid = np.isfinite(x) & np.isfinite(y)
    count = np.maximum(1, valid.sum(axis=1, keepdims=True))
    x, y = (np.where(valid, z, 0.0) for z in (x, y))
    x, y = (z - z.sum(axis=1, keepdims=True) / count for z in (x, y))
    return (
        float((x * y)[valid].sum()),
        float((x * x)[valid].sum()),
        float((y * y)[valid].sum()),
    )


def constants(alternatives: Alternatives, slope: float) -> np.ndarray:
    """Returns by token the mean of y - slope x over its alternatives, float64 [n]; NaN
    without any."""
    differences = alternatives.y - slope * alternatives.x
    valid = np.isfinite(differences)
    sums = np.where(valid, differences, 0.0).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(sums / valid.sum(axis=1))


def sign_of(parts: Sequence[np.ndarray]) -> int:
    """Returns the sign, 1 or -1, of constants, an array for each sequence: the one that
    has all of their squares but a share of at most ONE_SIGN. 0 where neither has, and
    where all are 0 or there are none. What is not finite is left out."""
    squares = []
    for sign in (1, -1):
        of_sign = (x[np.isfinite(x) & (sign * x > 0)] ** 2 for x in parts)
        squares.append(math.fsum(chain.from_iterable(of_sign)))
    if min(squares) > ONE_SIGN * sum(squares) or not sum(squares):
        return 0
    return 1 if squares[0] > squares[1] else -1
