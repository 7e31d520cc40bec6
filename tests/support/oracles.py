"""Attention and its gradients from their definition, in 90 decimal digits, with error
bounds.

`attention` and `gradients` share no code with numdev: loops over mpmath numbers, with
their own reading of causality, window, mask, soft cap, sinks and grouped heads; delta is
sum_j P_ij dP_ij. `FEATURES` is the table of tiny cases that several test files go
through."""

from __future__ import annotations

import dataclasses
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
EXP_U20 = 40 * U32  # of PyTorch's exponential in float32: 20 ulp
GRADIENTS = ("dq", "dk", "dv")
Numbers = np.ndarray[Any, Any]
ZERO = mpmath.mpf(0)
# exp(-10^6) is 10^-434294: nothing, at 90 digits, beside the row's maximum, whose weight
# is 1.
NEGLIGIBLE = -1_000_000
# Below exp(-746) float64 has only zero, and a score's error no longer matters.
UNDERFLOW = -746

# Every feature by itself, and the combinations in which they could get into each other's
# way.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch": {"batch": 3},
    "one query": {"q_len": 1, "kv_len": 9},
    "one key": {"kv_len": 1},
    "grouped": {"heads": 4, "kv_heads": 2},
    "wider v": {"v_dim": 7},
    "causal": {"is_causal": True, "q_len": 6, "kv_len": 6},
    "causal, more keys, top-left": {"is_causal": True, "q_len": 3, "kv_len": 7},
    "causal, more keys, bottom-right":
        {"is_causal": True, "q_len": 3, "kv_len": 7, "causal_offset": 4},
    "causal, more queries, bottom-right":
        {"is_causal": True, "q_len": 7, "kv_len": 3, "causal_offset": -4},
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
    "soft cap, causal, additive mask":
        {"softcap": 2.0, "is_causal": True, "mask": ("holes", "bhqk")},
    "sinks": {"sinks": True},
    "sinks, nothing else to see": {"sinks": True, "is_causal": True, "causal_offset": -2},
    "negative scale": {"scale": -0.7},
    "scale 0": {"scale": 0.0},
    "wide logits": {"logits": 30.0},
    "everything": {
        "batch": 2, "heads": 4, "kv_heads": 2, "q_len": 5, "kv_len": 7, "v_dim": 3,
        "is_causal": True, "causal_offset": 2, "window": (3, None), "mask": ("holes", "b1qk"),
        "softcap": 1.5, "sinks": True, "scale": 0.3, "logits": 4.0,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Exact:
    """The exact answer: arrays of mpmath numbers, shapes as the reference's."""

    out: Numbers
    lse: Numbers
    term_scale: Numbers
    empty: Numbers
    """bool."""
    size: Numbers
    """float [B, H, q_len]: the largest sum of absolute terms in a score of the row that
    counts."""
    weights: dict[tuple[int, ...], dict[int, Any]]
    """P of the keys that a row sees."""


@dataclass(frozen=True, kw_only=True)
class ExactGradients:
    """Arrays of mpmath numbers; sums of absolute terms, and largest errors in unit
    roundoff u."""

    dq: Numbers
    dk: Numbers
    dv: Numbers
    terms: dict[str, Numbers]
    bounds: dict[str, Numbers]


# --- the oracle -----------------------------------------------------------------------


def attention(case: AttentionCase) -> Exact:
    """softmax(bias + softcap(scale * Q K^T)) V over the visible keys, by definition.

    Inputs must be finite, but for -inf in a mask. A row without visible keys is 0, with
    log-sum-exp -inf, or its sink."""
    shape = tuple(case.q.shape[:3])
    out, term_scale = _zeros(*shape, case.v.shape[-1]), _zeros(*shape, case.v.shape[-1])
    lse, size = np.full(shape, mpmath.ninf, dtype=object), np.zeros(shape)
    empty, weights = np.zeros(shape, dtype=bool), {}
    with mpmath.workdps(DIGITS):
        for at in np.ndindex(*shape):
            b, h, i = at
            keys = [j for j in range(case.kv_len) if sees(case, b, h, i, j)]
            scores = {j: _score(case, b, h, i, j) for j in keys}
            sinks = [] if case.sinks is None else list(_exact(case.sinks[h : h + 1]))
            empty[at], weights[at] = not keys, {}
            if not keys and not sinks:
                continue
            top = max([*(s for s, _ in scores.values()), *sinks])
            p = {j: _weight(s - top) for j, (s, _) in scores.items()}
            l = sum(p.values()) + sum(_weight(s - top) for s in sinks)
            weights[at] = {j: w / l for j, w in p.items()}
            for j, w in weights[at].items():
                v = _exact(case.v[b, _kv_head(case, h), j])
                out[at] += v * w
                term_scale[at] += abs(v) * w
            lse[at] = top + mpmath.log(l)
            counting = [a for s, a in scores.values() if s - top > UNDERFLOW]
            size[at] = max(map(float, [*counting, *map(abs, sinks)]))
    return Exact(
        out=out, lse=lse, term_scale=term_scale, empty=empty, size=size, weights=weights
    )


def gradients(case: AttentionCase, u: float = U64) -> ExactGradients:
    """dQ, dK and dV of sum(O dO), by definition; what `attention` asks of a case is asked
    here.

    How far gradients in unit roundoff u by the formulas of `numdev.kernels.reference` may
    be off, to first order, with n, d, A and p as in `error_bounds`, v_dim e, and m =
    q_len * group the terms in a sum over rows. Let D_ij = sum_c |dO_ic V_jc| and E_i =
    sum_j P_ij D_ij.
    - P, normalised, is off by a relative 2 p + (n + 2) u: its exponential, the sum, a quotient.
    - dP is a dot product: e u D_ij. delta sums e products with O, which is off by 2 p + (2 n + 4) u
      of its term scale: (2 p + (2 n + e + 4) u) E_i. Their difference rounds once.
    - The soft cap's slope 1 / cosh^2(y) changes by 2 |dy| relative, |dy| <= (d + 6) u A / cap, and
      rounds for cosh, square, quotient and product: 12 u more.
    - So dX is off by at most c_i P_ij slope_ij (D_ij + E_i), where
      c_i = 4 p + (3 n + 2 e + 12) u + 2 (d + 6) u A / cap + 12 u.
    - dQ and dK sum n and m such products with K or Q, scaled; dV sums m products P dO."""
    forward = attention(case)
    shapes = {"dq": case.q.shape, "dk": case.k.shape, "dv": case.v.shape}
    exact, terms, wide = (
        {x: _zeros(*shape) for x, shape in shapes.items()} for _ in range(3)
    )
    n, m, d, e = case.kv_len, case.q_len * case.group, case.q.shape[3], case.v.shape[3]
    with mpmath.workdps(DIGITS):
        for at, P in forward.weights.items():
            b, h, _ = at
            g, A = _kv_head(case, h), forward.size[at]
            dO, q = _exact(case.grad_out[at]), _exact(case.q[at])
            v, k = ({j: _exact(x[b, g, j]) for j in P} for x in (case.v, case.k))
            dP, D = (
                {j: (dO * v[j]).sum() for j in P},
                {j: abs(dO * v[j]).sum() for j in P},
            )
            delta, E = sum(P[j] * dP[j] for j in P), sum(P[j] * D[j] for j in P)
            p = (d + 12) * u * A + 4 * u
            c = 4 * p + (3 * n + 2 * e + 12) * u
            if case.softcap is not None:
                c += 2 * (d + 6) * u * A / case.softcap + 12 * u
            for j in P:
                weight = P[j] * case.scale
                if case.softcap is not None:
                    y = case.scale * (q * k[j]).sum() / case.softcap
                    weight *= mpmath.sech(y) ** 2
                dX, absolute = (
                    weight * (dP[j] - delta),
                    abs(weight) * (abs(dP[j]) + abs(delta)),
                )
                bound, of_dv = c * abs(weight) * (D[j] + E), (2 * p + (n + 2) * u) * P[j]
                for name, row, other, parts in (
                    ("dq", at, k[j], (dX, absolute, bound)),
                    ("dk", (b, g, j), q, (dX, absolute, bound)),
                    ("dv", (b, g, j), dO, (P[j], P[j], of_dv)),
                ):
                    exact[name][row] += other * parts[0]
                    terms[name][row] += abs(other) * parts[1]
                    wide[name][row] += abs(other) * parts[2]
        # The absolute terms with D and E are at most `wide` over u, since c is u or more.
        sums = {"dq": (n + 4) * wide["dq"], "dk": (2 * m + 4) * wide["dk"],
                "dv": (2 * m + 4) * u * terms["dv"]}  # fmt: skip
        bounds = {x: (wide[x] + sums[x]).astype(float) + 2.0**-960 for x in sums}
    return ExactGradients(**exact, terms=terms, bounds=bounds)


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
    terms = _exact(case.q[b, h, i]) * _exact(case.k[b, _kv_head(case, h), j])
    score, size = terms.sum() * case.scale, abs(terms).sum() * abs(case.scale)
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


def _exact(x: Tensor) -> Numbers:
    return np.array([mpmath.mpf(value) for value in x.double().tolist()], dtype=object)


def _zeros(*shape: int) -> Numbers:
    return np.full(shape, ZERO, dtype=object)


# --- how far a sound algorithm may be, and holding it to that -------------------------


def error_bounds(
    case: AttentionCase, exact: Exact, u: float = U64, *, exp_error: float = 0.0
) -> tuple[Numbers, Numbers]:
    """The largest errors of out and lse for two-pass softmax attention in unit roundoff
    u.

    To first order in u, with n keys, head_dim d, and A (`exact.size`) the sum of the
    absolute terms of a score:
    - A score is a dot product (d u A), scaled (twice, if scale is split between q and k; 4 u A with
      the root), capped (a division, tanh to 2 ulp, a product: 4 u A), and added to the bias (u A).
      Subtracting the row maximum rounds a number of at most 2 A. In sum (d + 12) u A.
    - That is an absolute error, so P is off by as much in relative terms, and by exp's own error
      (2 ulp: 4 u, plus `exp_error` for a deliberately coarse one). Call it p. The maximum is the
      same number in P and l; its own error cancels.
    - l and PV are sums of n terms: n u each. PV also multiplies, and the quotient rounds: 4 u.
    So |out error| <= term scale * (2 p + (2 n + 4) u). And lse = m + log l, which rounds
    three times more: |lse error| <= p + (n + 4) u + 2 u (|lse| + A). Underflow adds less
    than n times the smallest normal number of float64 or float32 (times |V| at most 2^10
    here)."""
    d, n = case.q.shape[3], case.k.shape[2]
    tiny = n * 2.0 ** (10 - (1022 if u == U64 else 126))
    p = (d + 12) * u * exact.size + 4 * u + exp_error
    out = exact.term_scale.astype(float) * (2 * p + (2 * n + 4) * u)[..., None] + tiny
    size = np.where(
        np.isinf(exact.lse.astype(float)), 0.0, np.abs(exact.lse.astype(float))
    )
    return out, p + (n + 4) * u + 2 * u * (size + exact.size)


def assert_within(actual: Tensor, exact: Any, bound: Any) -> None:
    """|actual - exact| <= bound in 90 digits, infinity where it is expected, NaN
    nowhere."""
    expected = (
        exact.double().numpy().astype(object) if isinstance(exact, Tensor) else exact
    )
    assert tuple(actual.shape) == expected.shape
    result, limit = (
        actual.detach().double().numpy(),
        np.broadcast_to(bound, expected.shape),
    )

    def is_near(a: float, e: Any, most: float) -> bool:
        if not math.isfinite(a) or not mpmath.isfinite(e):
            return bool(a == e)
        with mpmath.workdps(DIGITS):
            return bool(abs(mpmath.mpf(a) - e) <= most)

    each = (
        (at, float(result[at]), expected[at], limit[at])
        for at in np.ndindex(*expected.shape)
    )
    wrong = [x for x in each if not is_near(*x[1:])]
    assert not wrong, (
        f"{len(wrong)} of {result.size} are off; first place, value, exact, bound: "
        + (
            f"{wrong[0][0]}, {wrong[0][1]!r}, {mpmath.nstr(wrong[0][2], 20)}, "
            f"{wrong[0][3]:.3g}"
        )
    )


# --- small cases ----------------------------------------------------------------------


def make_case(
    *, batch: int = 1, heads: int = 2, kv_heads: int | None = None, q_len: int = 4, kv_len: int = 5,
    head_dim: int = 4, v_dim: int | None = None, dtype: torch.dtype = torch.float64,
    logits: float = 1.0, mask: tuple[str, str] | Tensor | None = None, sinks: bool | Tensor = False,
    seed: int = 0, **fields: Any,
) -> AttentionCase:  # fmt: skip
    """A case of N(0, 1) inputs in `dtype`; `fields` are the case's own.

    `mask` may be a tensor, or (kind, axes): kind `bool`, `float`, or `holes` (float with
    -inf here and there), and axes such as `b1qk`, one letter for each of its
    dimensions."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    kv_heads = kv_heads or heads
    q, k = (
        normal(batch, heads, q_len, head_dim),
        normal(batch, kv_heads, kv_len, head_dim),
    )
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
    return AttentionCase(
        q=(q * logits).to(dtype), k=k, v=v, mask=mask, sinks=sinks, **fields
    )


def normal(*shape: int, seed: int = 0) -> Tensor:
    """N(0, 1) numbers in fp64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def with_grad(case: AttentionCase, positive: bool = False) -> AttentionCase:
    """The case with dO ~ N(0, 1), or |N(0, 1)|, in its dtype."""
    shape = (*case.q.shape[:3], case.v.shape[-1])
    dO = torch.randn(
        shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    dO = (dO.abs() if positive else dO).to(case.q.dtype).to(case.q.device)
    return dataclasses.replace(case, grad_out=dO)


def step(**fields: Any) -> AttentionCase:
    """`make_case` with an upstream gradient."""
    return with_grad(make_case(**fields))


def replaced(case: AttentionCase, **tensors: Any) -> AttentionCase:
    """The case with some of its tensors replaced, or filled with a number."""
    new = {
        name: torch.full_like(getattr(case, name), x) if isinstance(x, float) else x
        for name, x in tensors.items()
    }
    return dataclasses.replace(case, **new)


def poisoned(case: AttentionCase, name: str, place: Any, value: float) -> AttentionCase:
    """The case with one place of a tensor overwritten."""
    x = getattr(case, name).clone()
    x[place] = value
    return dataclasses.replace(case, **{name: x})


def to_cuda(case: Any) -> Any:
    """The case, or another record, with all its tensors on a GPU."""
    tensors = {name: x.cuda() for name, x in vars(case).items() if isinstance(x, Tensor)}
    return dataclasses.replace(case, **tensors)


def heads_behind_rows(case: AttentionCase) -> AttentionCase:
    """The same numbers in views whose heads lie behind their rows, as models make
    them."""
    names = ("q", "k", "v", "grad_out")
    views = {
        x: getattr(case, x).transpose(1, 2).contiguous().transpose(1, 2) for x in names
    }
    return dataclasses.replace(case, **views)
