"""How far the fused fp64 reference may be from the blocked one, and holding it to that.

The bounds and their derivation are in docs/derivations.md, "The reference, and its two
paths"; what they leave out: sums of a term scale in fp32 are taken to lose 2^-22 a term
and a tile, and what underflows is counted. |V| is scaled to at most 1, so a product below
2^-126 may be lost, n 2^-125 of the largest |V| where a maximum is subtracted, and 2^-45
of it where P goes down to 2^-80 and l as far. Terms of the gradients' term scales are
scaled to at most 2 and operands to at most 1, and what is below 2^-133 is lost: n 2^-130
of the largest terms there could be, |dO| |V| of the longest rows times the largest of the
other operand. Everything else is at most `TINY`, for inputs below 2^20. The blocked path
has less of all of it (`oracles`): two paths differ by twice this."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from numdev.cases import AttentionCase, additive, visible
from numdev.kernels.reference.blocked import Gradients, Reference

U = 2.0**-53
TINY = 2.0**-900
LEAST_TILE = 16
"""Keys in a tile, at least: what t goes by."""
FORWARD = ("out", "term_scale", "lse")
BACKWARD = ("delta", "dq", "dk", "dv", "dq_terms", "dk_terms", "dv_terms")
EXACT = ("empty", "unseen")


def bounds(case: AttentionCase, exact: Gradients) -> dict[str, Tensor]:
    """By tensor: the largest difference of the two paths. Holds several [B, H, q_len,
    kv_len]."""
    n, d, e, m = case.kv_len, case.q.shape[3], case.v.shape[3], case.q_len * case.group
    q, dO, k, v = operands(case)
    P, A = weights(case, exact, q, k)
    L = exact.lse.abs().masked_fill(exact.empty, 0.0)
    p = (d + 16) * U * A + (3 * math.ceil(n / LEAST_TILE) + 7) * U
    out = 2 * p + (2 * n + 4) * U
    size = v.abs().amax() * (n * 2.0**-125 + 2.0**-45)
    E = (dO.abs() * exact.term_scale).sum(-1)
    w = 2 * p + 2 * U * A + 8 * U * L + (n + 8) * U
    c = 4 * p + 8 * U * (L + A) + (3 * n + 2 * e + 20) * U
    slope = torch.ones_like(P)
    if case.softcap is not None:
        c = c + (2 * (d + 6) * A / case.softcap + 12) * U
        slope = (case.scale * q @ k.mT / case.softcap).cosh().square().reciprocal()
    W = abs(case.scale) * slope * P * (dO.abs() @ v.abs().mT + E[..., None])
    dq = (c[..., None] + (n + 6) * U) * (W @ k.abs())
    dk = of_group(case, ((c[..., None] + (2 * m + 10) * U) * W).mT @ q.abs())
    dv = of_group(case, ((w[..., None] + (2 * m + 4) * U) * P).mT @ dO.abs())
    one_path = {
        "out": out[..., None] * exact.term_scale,
        "term_scale": (out[..., None] + _in_bfloat16(case)) * exact.term_scale + size,
        "lse": p + (n + 4) * U + 5 * U * (L + A),
        "delta": (out + (e + 1) * U) * E,
        **{"dq": dq, "dk": dk, "dv": dv, **_terms(case, exact)},
    }
    return {name: 2 * x + TINY for name, x in one_path.items()}


def _in_bfloat16(case: AttentionCase) -> float:
    """What the term scale of O is off by, as a part of itself, for being summed from
    bfloat16."""
    exact = case.v.dtype == torch.bfloat16 or case.v.element_size() == 1
    n = case.kv_len
    return (
        2.0**-8 + (0.0 if exact else 2.0**-8) + (n + -(-n // LEAST_TILE) + 8) * 2.0**-22
    )


def _terms(case: AttentionCase, exact: Gradients) -> dict[str, Tensor]:
    """Those of the gradients' term scales."""
    q, dO, k, v = operands(case)
    n, m = case.kv_len, case.q_len * case.group
    largest = dO.norm(dim=-1).max() * v.norm(dim=-1).max()
    result = {}
    for name, count, size in (
        ("dq_terms", n, abs(case.scale) * largest * k.abs().max()),
        ("dk_terms", m, abs(case.scale) * largest * q.abs().max()),
        ("dv_terms", m, dO.abs().max()),
    ):
        rounded = (2.0**-7 + (count + 8) * 2.0**-22) * getattr(exact, name)
        result[name] = rounded + count * 2.0**-130 * size
    return result


def shares(
    case: AttentionCase, actual: Reference, exact: Gradients, limits: dict[str, Tensor]
) -> dict[str, float]:
    """The largest difference of each tensor as a share of its bound; infinite where a
    shape, a bool or a number that is not finite differs. `found` may be the answer of a
    forward pass alone."""
    names = (*FORWARD, *BACKWARD) if isinstance(actual, Gradients) else FORWARD
    flags = [name for name in EXACT if hasattr(actual, name)]
    result = {x: _share(getattr(actual, x), getattr(exact, x), limits[x]) for x in names}
    for name in flags:
        same = torch.equal(getattr(actual, name), getattr(exact, name))
        result[name] = 0.0 if same else math.inf
    return result


def _share(result: Tensor, exact: Tensor, limit: Tensor) -> float:
    if result.shape != exact.shape or result.dtype != torch.float64:
        return math.inf
    share = torch.where(result == exact, 0.0, (result - exact).abs() / limit)
    return float(share.nan_to_num(nan=math.inf).max())


def operands(case: AttentionCase) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, dO, and k and v repeated for every query head: fp64."""
    q, dO = (x.detach().double() for x in (case.q, case.grad_out))
    k, v = (
        x.detach().double().repeat_interleave(case.group, 1) for x in (case.k, case.v)
    )
    return q, dO, k, v


def weights(
    case: AttentionCase, exact: Gradients, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    """P, and A [B, H, q_len]."""
    rows, keys = slice(0, case.q_len), slice(0, case.kv_len)
    S, size = case.scale * q @ k.mT, abs(case.scale) * q.abs() @ k.abs().mT
    if case.softcap is not None:
        S = case.softcap * (S / case.softcap).tanh()
    added, shown = additive(case, rows, keys), visible(case, rows, keys)
    if added is not None:
        S, size = S + added.double(), size + added.double().abs()
    if shown is not None:
        S = S.masked_fill(~shown, -math.inf)
    P = (S - exact.lse.masked_fill(exact.empty, 0.0)[..., None]).exp()
    A = torch.where(P > 0, size, 0.0).amax(-1)
    if case.sinks is not None:
        A = torch.maximum(A, case.sinks.detach().double().abs()[:, None])
    return P, A


def of_group(case: AttentionCase, x: Tensor) -> Tensor:
    return x.unflatten(1, (case.kv_heads, case.group)).sum(2)
