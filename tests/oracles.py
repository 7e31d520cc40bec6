"""Attention from its definition, in 90 decimal digits, and what floating point may miss it by.

`attention` shares no code with numdev: plain loops over Python's mpmath numbers, one score at a
time, and its own reading of causality, window, mask, soft cap, sinks and grouped heads. It is slow,
so cases are tiny. `error_bounds` derives how far a sound algorithm of a given unit roundoff may be
from it, and `assert_within` holds an output to that. `make_case` draws small cases with any
combination of features; `FEATURES` is a table of them that several test files go through.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
import torch
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef

DIGITS = 90
U64, U32 = 2.0**-53, 2.0**-24
Numbers = np.ndarray[Any, Any]
ZERO = mpmath.mpf(0)
# exp(-10^6) is 10^-434294: nothing, at 90 digits, beside the row's maximum, whose weight is 1.
NEGLIGIBLE = -1_000_000
# Below exp(-746) float64 has only zero, and a score's error no longer matters.
UNDERFLOW = -746

# Every feature by itself, and the combinations in which they could get into each other's way.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch": {"batch": 3},
    "one query": {"q_len": 1, "kv_len": 9},
    "one key": {"kv_len": 1},
    "grouped": {"heads": 4, "kv_heads": 2},
    "wider v": {"v_dim": 7},
    "causal": {"is_causal": True, "q_len": 6, "kv_len": 6},
    "causal, more keys, top-left": {"is_causal": True, "q_len": 3, "kv_len": 7},
    "causal, more keys, bottom-right": {
        "is_causal": True,
        "q_len": 3,
        "kv_len": 7,
        "causal_offset": 4,
    },
    "causal, more queries, bottom-right": {
        "is_causal": True,
        "q_len": 7,
        "kv_len": 3,
        "causal_offset": -4,
    },
    "causal, no key at all": {"is_causal": True, "q_len": 3, "kv_len": 3, "causal_offset": -5},
    "window": {"window": (2, 1), "q_len": 6, "kv_len": 6},
    "window, left only": {"window": (1, None), "q_len": 6, "kv_len": 6},
    "window, no key at all": {"window": (0, 0), "q_len": 6, "kv_len": 3},
    "sliding window": {"is_causal": True, "window": (2, 0), "q_len": 7, "kv_len": 7},
    "bool mask": {"batch": 2, "mask": ("bool", "bhqk")},
    "bool mask per key": {"batch": 2, "mask": ("bool", "b11k")},
    "bool mask per query": {"mask": ("bool", "q1")},
    "additive mask": {"batch": 2, "mask": ("float", "bhqk")},
    "additive mask per head": {"mask": ("float", "1hqk")},
    "additive mask with -inf": {"mask": ("holes", "bhqk"), "batch": 2},
    "bool mask and causal": {"mask": ("bool", "b1qk"), "is_causal": True},
    "additive mask and window": {"mask": ("holes", "11qk"), "window": (1, 2)},
    "soft cap": {"softcap": 0.75, "logits": 3.0},
    "soft cap, causal, additive mask": {
        "softcap": 2.0,
        "is_causal": True,
        "mask": ("holes", "bhqk"),
    },
    "sinks": {"sinks": True},
    "sinks, nothing else to see": {"sinks": True, "is_causal": True, "causal_offset": -2},
    "negative scale": {"scale": -0.7},
    "scale 0": {"scale": 0.0},
    "wide logits": {"logits": 30.0},
    "everything": {
        "batch": 2,
        "heads": 4,
        "kv_heads": 2,
        "q_len": 5,
        "kv_len": 7,
        "v_dim": 3,
        "is_causal": True,
        "causal_offset": 2,
        "window": (3, None),
        "mask": ("holes", "b1qk"),
        "softcap": 1.5,
        "sinks": True,
        "scale": 0.3,
        "logits": 4.0,
    },
}


@dataclass(frozen=True, kw_only=True)
class Exact:
    """The exact answer: arrays of mpmath numbers, shapes as the reference's."""

    out: Numbers
    lse: Numbers
    term_scale: Numbers
    empty: Numbers
    """bool."""
    size: Numbers
    """float [B, H, q_len]: the largest sum of absolute terms in a score of the row that counts."""


# --- the oracle ----------------------------------------------------------------------------------


def attention(case: AttentionCase) -> Exact:
    """softmax(bias + softcap(scale * Q K^T)) V over the visible keys, by definition.

    Inputs must be finite, but for -inf in an additive mask, which hides. A row without visible keys
    is 0, with log-sum-exp -inf, or its sink.
    """
    shape = tuple(case.q.shape[:3])
    wide = (*shape, case.v.shape[-1])
    out, term_scale = np.ndarray(wide, dtype=object), np.ndarray(wide, dtype=object)
    lse, size = np.ndarray(shape, dtype=object), np.zeros(shape)
    empty = np.zeros(shape, dtype=bool)
    with mpmath.workdps(DIGITS):
        for b, h, i in np.ndindex(*shape):
            keys = [j for j in range(case.k.shape[2]) if sees(case, b, h, i, j)]
            at = (b, h, i)
            scores = [_score(case, b, h, i, j) for j in keys]
            values = [_exact(case.v[b, _kv_head(case, h), j]) for j in keys]
            sinks = [] if case.sinks is None else _exact(case.sinks[h : h + 1])
            empty[at] = not keys
            if not keys and not sinks:
                out[at], term_scale[at], lse[at] = mpmath.mpf(0), mpmath.mpf(0), mpmath.ninf
                continue
            top = max([*(s for s, _ in scores), *sinks])
            p = [_weight(s - top) for s, _ in scores]
            l = sum(p) + sum(_weight(s - top) for s in sinks)
            for d in range(wide[-1]):
                out[*at, d] = sum((w * v[d] for w, v in zip(p, values, strict=True)), ZERO) / l
                absolute = (w * abs(v[d]) for w, v in zip(p, values, strict=True))
                term_scale[*at, d] = sum(absolute, ZERO) / l
            lse[at] = top + mpmath.log(l)
            counting = [a for s, a in scores if s - top > UNDERFLOW]
            size[at] = max(float(a) for a in [*counting, *map(abs, sinks)])
    return Exact(out=out, lse=lse, term_scale=term_scale, empty=empty, size=size)


def sees(case: AttentionCase, b: int, h: int, i: int, j: int) -> bool:
    """Whether query i of head h may attend to key j."""
    center = i + case.causal_offset
    left, right = case.window or (None, None)
    if case.is_causal and j > center:
        return False
    if left is not None and j < center - left:
        return False
    if right is not None and j > center + right:
        return False
    mask = _mask_at(case, b, h, i, j)
    return mask if isinstance(mask, bool) else mask != -math.inf


def _mask_at(case: AttentionCase, b: int, h: int, i: int, j: int) -> bool | float:
    """The mask's entry; True without a mask."""
    if case.mask is None:
        return True
    return case.mask.expand(*case.q.shape[:3], case.k.shape[2])[b, h, i, j].item()


def _score(case: AttentionCase, b: int, h: int, i: int, j: int) -> tuple[Any, Any]:
    """The score of query i and key j, and the sum of the absolute terms it is made of."""
    pairs = zip(_exact(case.q[b, h, i]), _exact(case.k[b, _kv_head(case, h), j]), strict=True)
    terms = [x * y for x, y in pairs]
    score, size = case.scale * sum(terms), abs(case.scale) * sum(map(abs, terms))
    if case.softcap is not None:
        score = case.softcap * mpmath.tanh(score / case.softcap)
    bias = _mask_at(case, b, h, i, j)
    if isinstance(bias, bool):
        return score, size
    return score + mpmath.mpf(bias), size + abs(mpmath.mpf(bias))


def _weight(s: Any) -> Any:
    return mpmath.exp(s) if s > NEGLIGIBLE else ZERO


def _kv_head(case: AttentionCase, h: int) -> int:
    return h * case.k.shape[1] // case.q.shape[1]


def _exact(x: Tensor) -> list[Any]:
    return [mpmath.mpf(value) for value in x.double().tolist()]


# --- how far a sound algorithm may be, and holding it to that ------------------------------------


def error_bounds(
    case: AttentionCase, exact: Exact, u: float = U64, *, exp_error: float = 0.0
) -> tuple[Numbers, Numbers]:
    """The largest errors of out and lse for two-pass softmax attention in unit roundoff u.

    To first order in u, with n keys, head_dim d, and A (`regimes.exact.size`) the sum of the
    absolute terms of a score:
    - A score is a dot product (d u A), scaled (twice, if scale is split between q and k; 4 u A with
      the root), capped (a division, tanh to 2 ulp, a product: 4 u A), and added to the bias (u A).
      Subtracting the row maximum rounds a number of at most 2 A. In sum (d + 12) u A.
    - That is an absolute error, so P is off by as much in relative terms, and by exp's own error
      (2 ulp: 4 u, plus `exp_error` for a deliberately coarse one). Call it p. The maximum is the
      same number in P and l; its own error cancels.
    - l and PV are sums of n terms: n u each. PV also multiplies, and the quotient rounds: 4 u.
    So |out error| <= term scale * (2 p + (2 n + 4) u). And lse = m + log l, which rounds three
    times more: |lse error| <= p + (n + 4) u + 2 u (|lse| + A). Underflow adds less than n times the
    smallest normal number of float64 or float32 (times |V| at most 2^10 here).
    """
    d, n = case.q.shape[3], case.k.shape[2]
    tiny = n * 2.0 ** (10 - (1022 if u == U64 else 126))
    p = (d + 12) * u * exact.size + 4 * u + exp_error
    out = exact.term_scale.astype(float) * (2 * p + (2 * n + 4) * u)[..., None] + tiny
    size = np.where(np.isinf(exact.lse.astype(float)), 0.0, np.abs(exact.lse.astype(float)))
    return out, p + (n + 4) * u + 2 * u * (size + exact.size)


def assert_within(actual: Tensor, exact: Any, bound: Any) -> None:
    """|actual - exact| <= bound in every element, compared in 90 digits; the same shape, NaN
    nowhere, and infinity exactly where it is expected. `exact` may also be a tensor."""
    expected = exact.double().numpy().astype(object) if isinstance(exact, Tensor) else exact
    assert tuple(actual.shape) == expected.shape
    found, limit = actual.detach().double().numpy(), np.broadcast_to(bound, expected.shape)
    wrong = [at for at in np.ndindex(*expected.shape) if not _near(found, expected, limit, at)]
    assert not wrong, (
        f"{len(wrong)} of {found.size} are off, first at {wrong[0]}: {found[wrong[0]]!r}, "
        f"expected {mpmath.nstr(expected[wrong[0]], 20)} within {limit[wrong[0]]:.3g}"
    )


def _near(found: Numbers, expected: Numbers, limit: Numbers, at: tuple[int, ...]) -> bool:
    a, e = float(found[at]), expected[at]
    if not math.isfinite(a) or not mpmath.isfinite(e):
        return a == e
    with mpmath.workdps(DIGITS):
        return bool(abs(mpmath.mpf(a) - e) <= limit[at])


# --- small cases ---------------------------------------------------------------------------------


def make_case(
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int | None = None,
    q_len: int = 4,
    kv_len: int = 5,
    head_dim: int = 4,
    v_dim: int | None = None,
    dtype: torch.dtype = torch.float64,
    logits: float = 1.0,
    mask: tuple[str, str] | Tensor | None = None,
    sinks: bool | Tensor = False,
    seed: int = 0,
    **fields: Any,
) -> AttentionCase:
    """A case of N(0, 1) inputs in `dtype`; `fields` are the case's own.

    `mask` may be a tensor, or (kind, axes): kind `bool`, `float`, or `holes` (float with -inf here
    and there), and axes such as `b1qk`, one letter for each of its dimensions.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    kv_heads = kv_heads or heads
    q, k = normal(batch, heads, q_len, head_dim), normal(batch, kv_heads, kv_len, head_dim)
    v = normal(batch, kv_heads, kv_len, v_dim or head_dim)
    if isinstance(mask, tuple):
        kind, axes = mask
        lengths = {"b": batch, "h": heads, "q": q_len, "k": kv_len, "1": 1}
        shape = [lengths[axis] for axis in axes]
        shown = torch.rand(shape, generator=generator) < 0.6
        bias = normal(*shape)
        holes = bias.masked_fill(~shown, -math.inf)
        mask = {"bool": shown, "float": bias, "holes": holes}[kind]
    if isinstance(sinks, bool):
        sinks = normal(heads) if sinks else None
    fields = {"ref": CaseRef(case="test"), "scale": head_dim**-0.5, **fields}
    return AttentionCase(q=(q * logits).to(dtype), k=k, v=v, mask=mask, sinks=sinks, **fields)
