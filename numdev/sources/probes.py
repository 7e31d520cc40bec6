"""Probes: regimes whose right answer is known without a reference.

An answer is the exact output of a drawn case, rounded since, whatever its causality, window or bool
mask; None where it is no longer known. Rows that see no key are 0. Memory is q_len * kv_len.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from numdev.cases import AttentionCase, additive, visible
from numdev.sources.draws import QKV, Draws, Shapes, plain, regime

KNOWN = "a known answer"


def _shown(case: AttentionCase) -> Tensor:
    """bool [batch, heads, q_len, kv_len]: which keys each row sees."""
    rows, keys = slice(0, case.q_len), slice(0, case.kv_len)
    full = (*case.q.shape[:3], case.kv_len)
    shown = torch.ones(full, dtype=torch.bool, device=case.q.device)
    for part in (visible(case, rows, keys), additive(case, rows, keys)):
        if part is not None:
            shown = shown & (part if part.dtype == torch.bool else part != -math.inf)
    return shown


def _biased(case: AttentionCase) -> bool:
    """Whether an additive mask changes scores that it does not hide."""
    rows, keys = slice(0, case.q_len), slice(0, case.kv_len)
    bias = additive(case, rows, keys)
    return bias is not None and bool((bias.masked_fill(~_shown(case), 0.0) != 0).any())


def _per_head(case: AttentionCase, x: Tensor) -> Tensor:
    """k or v in fp64, a copy for every query head."""
    return x.double().repeat_interleave(case.group, dim=1)


def _mean_of(case: AttentionCase, chosen: Tensor) -> Tensor:
    """The mean of V over the chosen keys [B, H, q_len, kv_len] of each row; 0 where there are
    none."""
    count = chosen.sum(dim=-1, keepdim=True).clamp_min(1)
    return chosen.double() @ _per_head(case, case.v) / count


def _in_seen_rows(case: AttentionCase, row: Tensor) -> Tensor:
    """`row` [B, H, 1, v_dim] in every row that sees a key."""
    return torch.where(_shown(case).any(dim=-1, keepdim=True), row, 0.0)


def _all_ones(case: AttentionCase) -> Tensor:
    return _in_seen_rows(case, torch.ones_like(_per_head(case, case.v)[:, :, :1]))


def _that_key(case: AttentionCase) -> Tensor:
    return _in_seen_rows(case, _per_head(case, case.v)[:, :, :1])


def _mean_of_shown(case: AttentionCase) -> Tensor | None:
    return None if _biased(case) else _mean_of(case, _shown(case))


def _mean_of_matching(case: AttentionCase) -> Tensor | None:
    """Scores are whole multiples of one step, which is large: the keys that match a query in most
    signs, among those it sees, share all the weight."""
    usual = math.isclose(case.scale, case.q.shape[-1] ** -0.5, rel_tol=1e-12)
    if _biased(case) or case.softcap is not None or not usual:
        return None
    matches = case.q.double().sign() @ _per_head(case, case.k).sign().transpose(-1, -2)
    shown = _shown(case)
    matches = matches.masked_fill(~shown, -math.inf)
    return _mean_of(case, shown & (matches == matches.amax(dim=-1, keepdim=True)))


@regime(
    stresses="out is exactly 1 and dQ, dK exactly 0: whatever is not shows that the row sum and "
    "the probabilities that meet V are not the same numbers",
    origin="flash-attention PR #2721 (row sum from fp32 P, PV from bf16 P)",
    answer=_all_ones,
)
def ones(shapes: Shapes, draws: Draws) -> QKV:
    """N(0, 1) but for V = 1: every output is 1."""
    q, k, v = plain(shapes, draws)
    return q, k, torch.ones_like(v)


@regime(
    stresses="as V = 1, with numbers that rounding can move; with kv_len 1 the shortest loop there "
    "is",
    origin=KNOWN,
    answer=_that_key,
)
def one_key(shapes: Shapes, draws: Draws) -> QKV:
    """One key and its value, kv_len times over: every output is that value."""
    q, k, v = plain(shapes, draws)
    return q, k[:, :, :1].expand_as(k).clone(), v[:, :, :1].expand_as(v).clone()


@regime(
    stresses="every key counts alike, so a dropped, doubled or padded one shows; all row maxima "
    "are tied, and dQ is exactly 0",
    origin=KNOWN,
    answer=_mean_of_shown,
)
def uniform(shapes: Shapes, draws: Draws) -> QKV:
    """All keys are the same, so that the scores of a row are: out is the mean of V."""
    q, k, v = plain(shapes, draws)
    return q, k[:, :, :1].expand_as(k).clone(), v


@regime(
    stresses="out is one row of V, another for every query: a key, a head or a row mixed up shows; "
    "the other probabilities underflow",
    origin=KNOWN,
    answer=_mean_of_matching,
)
def one_hot(shapes: Shapes, draws: Draws, *, margin: float = 80.0) -> QKV:
    """Every query has one key whose score is above all others by at least `margin`, chosen at
    random among keys 0 to i + max(0, kv_len - q_len): out is that key's V. (Where it is hidden, the
    mean of V over those that then score highest.)"""
    return _coded(shapes, draws, 1, margin)


@regime(
    stresses="P is 1/2 or, before it is normalised, 1 at two keys in different tiles",
    origin=f"{KNOWN}; ties are those of Qiu & Yao, arXiv 2510.04212",
    answer=_mean_of_matching,
)
def two_hot(shapes: Shapes, draws: Draws, *, margin: float = 80.0) -> QKV:
    """As `one_hot`, with every key there twice, half the length apart, and above all others by at
    least `margin`: out is the mean of two rows of V."""
    return _coded(shapes, draws, 2, margin)


def _coded(shapes: Shapes, draws: Draws, copies: int, margin: float) -> QKV:
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
    queries = patterns[target] * flips
    half = size // 2
    return (
        queries * math.ldexp(1.0, size - half),
        keys * math.ldexp(1.0, half),
        draws.normal("v", shapes.v),
    )
