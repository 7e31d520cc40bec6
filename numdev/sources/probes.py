"""Probes: regimes whose right answer is known without a reference.

An answer is the exact output of a drawn case, rounded since, whatever its causality, window or bool
mask; None where it is no longer known. Rows that see no key are 0. Memory is q_len * kv_len.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from numdev.cases import AttentionCase, additive, visible
from numdev.sources.draws import Draws, Inputs, Shapes, plain

# --- what is drawn --------------------------------------------------------------------------------


def ones(shapes: Shapes, draws: Draws) -> Inputs:
    """N(0, 1) but for V = 1: every output is 1."""
    q, k, v = plain(shapes, draws)
    return Inputs(q, k, torch.ones_like(v))


def one_key(shapes: Shapes, draws: Draws) -> Inputs:
    """One key and its value, kv_len times over: every output is that value."""
    q, k, v = plain(shapes, draws)
    return Inputs(q, k[:, :, :1].expand_as(k).clone(), v[:, :, :1].expand_as(v).clone())


def uniform(shapes: Shapes, draws: Draws) -> Inputs:
    """All keys are the same, so that the scores of a row are: out is the mean of V."""
    q, k, v = plain(shapes, draws)
    return Inputs(q, k[:, :, :1].expand_as(k).clone(), v)


def one_hot(shapes: Shapes, draws: Draws, *, margin: float = 80.0) -> Inputs:
    """Every query has one key whose score is above all others by at least `margin`, chosen at
    random among keys 0 to i + max(0, kv_len - q_len): out is that key's V."""
    return _coded(shapes, draws, 1, margin)


def two_hot(shapes: Shapes, draws: Draws, *, margin: float = 80.0) -> Inputs:
    """As `one_hot`, with every key there twice, half the length apart: out is a mean of two."""
    return _coded(shapes, draws, 2, margin)


def _coded(shapes: Shapes, draws: Draws, copies: int, margin: float) -> Inputs:
    """Keys are sign patterns of their own, and a query is the pattern of its key.

    A pattern is the key's number in binary, each bit repeated in as many features as there are, so
    that two keys' scores differ by a multiple of 2 * repeats * (size of the entries) / sqrt(d). The
    entries are powers of two: exact in every format. Where head_dim has too few features for the
    patterns, the keys that get none are 0.
    """
    if not margin > 0:
        raise ValueError("margin must be positive")
    distinct = -(-shapes.kv_len // copies)
    bits = min(shapes.head_dim, max(1, (distinct - 1).bit_length()))
    repeats = shapes.head_dim // bits
    size = math.ceil(math.log2(margin * math.sqrt(shapes.head_dim) / (2 * repeats)))
    known = min(distinct, 2**bits)

    code = draws.permutation("code", known)
    sign = (((code[:, None] >> torch.arange(bits)) & 1) * 2 - 1).float()  # [known, bits]
    patterns = torch.zeros((distinct, shapes.head_dim), dtype=torch.float32, device="cpu")
    patterns[:known, : bits * repeats] = sign.repeat(1, repeats)
    flips = draws.normal("flips", (*shapes.k[:2], 1, shapes.head_dim)).sign()
    keys = patterns[torch.arange(shapes.kv_len) % distinct] * flips

    last = torch.arange(shapes.q_len) + max(0, shapes.kv_len - shapes.q_len)
    choice = draws.uniform("target", shapes.q[:3])
    target = (choice * (last.clamp_max(shapes.kv_len - 1) + 1)).long() % distinct % known
    flips = flips.repeat_interleave(shapes.heads // shapes.kv_heads, dim=1)
    half = size // 2
    return Inputs(
        patterns[target] * flips * math.ldexp(1.0, size - half),
        keys * math.ldexp(1.0, half),
        draws.normal("v", shapes.v),
    )


# --- their answers --------------------------------------------------------------------------------


def first_value(case: AttentionCase) -> Tensor:
    """V of the first key, in every row that sees a key: all keys' values are alike."""
    shown, _ = _masked(case)
    return torch.where(shown.any(dim=-1, keepdim=True), _per_head(case, case.v)[:, :, :1], 0.0)


def mean_of_seen(case: AttentionCase) -> Tensor | None:
    """The mean of V over the keys that a row sees; None under a bias on the scores."""
    shown, biased = _masked(case)
    return None if biased else _mean_of(case, shown)


def mean_of_matching(case: AttentionCase) -> Tensor | None:
    """Scores are whole multiples of one step, which is large: the keys that match a query in most
    signs, among those it sees, share all the weight. None under a bias, soft cap or scale."""
    shown, biased = _masked(case)
    usual = math.isclose(case.scale, case.q.shape[-1] ** -0.5, rel_tol=1e-12)
    if biased or case.softcap is not None or not usual:
        return None
    matches = case.q.double().sign() @ _per_head(case, case.k).sign().transpose(-1, -2)
    matches = matches.masked_fill(~shown, -math.inf)
    return _mean_of(case, shown & (matches == matches.amax(dim=-1, keepdim=True)))


def _masked(case: AttentionCase) -> tuple[Tensor, bool]:
    """bool [batch, heads, q_len, kv_len]: which keys each row sees; and whether an additive mask
    changes their scores."""
    rows, keys = slice(0, case.q_len), slice(0, case.kv_len)
    shown = torch.ones((*case.q.shape[:3], case.kv_len), dtype=torch.bool, device=case.q.device)
    if (seen := visible(case, rows, keys)) is not None:
        shown = shown & seen
    bias = additive(case, rows, keys)
    if bias is None:
        return shown, False
    shown = shown & (bias != -math.inf)
    return shown, bool((bias.masked_fill(~shown, 0.0) != 0).any())


def _per_head(case: AttentionCase, x: Tensor) -> Tensor:
    """k or v in fp64, a copy for every query head."""
    return x.double().repeat_interleave(case.group, dim=1)


def _mean_of(case: AttentionCase, chosen: Tensor) -> Tensor:
    """The mean of V over each row's chosen keys [batch, heads, q_len, kv_len]; 0 without any."""
    count = chosen.sum(dim=-1, keepdim=True).clamp_min(1)
    return chosen.double() @ _per_head(case, case.v) / count


ANSWERS: dict[Callable[..., Inputs], Callable[[AttentionCase], Tensor | None]] = {
    ones: first_value,
    one_key: first_value,
    uniform: mean_of_seen,
    one_hot: mean_of_matching,
    two_hot: mean_of_matching,
}
