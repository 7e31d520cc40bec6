"""The gradients of attention from their definition, in 90 decimal digits, with error bounds.

As `oracles.attention`, which it builds on, this shares no code with numdev: plain loops over mpmath
numbers, one score at a time. delta is taken as sum_j P_ij dP_ij, not as rowsum(dO O).

How far fp64 gradients by the formulas of `numdev.kernels.reference` may be off, to first order in
u, with n keys, head_dim d, v_dim e, A and p as in `oracles.error_bounds`, and m = q_len * group the
terms in a sum over rows. Let D_ij = sum_c |dO_ic V_jc| and E_i = sum_j P_ij D_ij.

- P, normalised, is off by a relative 2 p + (n + 2) u: its own exponential, the sum, a quotient.
- dP is a dot product: e u D_ij. delta sums e products with O, which is off by 2 p + (2 n + 4) u of
  its term scale: (2 p + (2 n + e + 4) u) E_i. Their difference rounds once.
- The soft cap's slope 1 / cosh^2(y) changes by 2 |dy| relative, |dy| <= (d + 6) u A / cap, and
  rounds for cosh, square, quotient and product: 12 u more.
- So dX is off by at most c_i P_ij slope_ij (D_ij + E_i), where
  c_i = 4 p + (3 n + 2 e + 12) u + 2 (d + 6) u A / cap + 12 u.
- dQ and dK sum n and m such products with K or Q, scaled; dV sums m products P dO.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
import torch
from oracles import DIGITS, U64, ZERO, Numbers, _exact, _kv_head, _score, attention, make_case, sees

from numdev.cases import AttentionCase

NAMES = ("dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True)
class ExactGradients:
    """Arrays of mpmath numbers, and of floats for the bounds; shapes as q, k and v."""

    dq: Numbers
    dk: Numbers
    dv: Numbers
    terms: dict[str, Numbers]
    """By gradient: the sums of absolute terms numdev returns beside it."""
    bounds: dict[str, Numbers]
    """By gradient: the largest error in unit roundoff u."""


def with_upstream(case: AttentionCase, seed: int = 5) -> AttentionCase:
    """The case with an upstream gradient of N(0, 1), rounded to its dtype."""
    shape = (*case.q.shape[:3], case.v.shape[-1])
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return dataclasses.replace(case, grad_out=drawn.to(case.q.dtype))


def step(**fields: Any) -> AttentionCase:
    """`oracles.make_case` with an upstream gradient."""
    return with_upstream(make_case(**fields))


def gradients(case: AttentionCase, u: float = U64) -> ExactGradients:
    """dQ, dK and dV of sum(O dO), by definition; what `attention` asks of a case is asked here."""
    forward = attention(case)
    shapes = {"dq": case.q.shape, "dk": case.k.shape, "dv": case.v.shape}
    with mpmath.workdps(DIGITS):
        exact, terms, wide = ({n: _zeros(s) for n, s in shapes.items()} for _ in range(3))
        for b, h, i in np.ndindex(*case.q.shape[:3]):
            _add_row(case, forward, (b, h, i), u, exact, terms, wide)
    n, m = case.kv_len, case.q_len * case.group
    tiny = 2.0**-960
    sums = {"dq": (n + 4) * u, "dk": (2 * m + 4) * u, "dv": (2 * m + 4) * u}
    bounds = {x: (wide[x] + sums[x] * _wider(terms, wide, x, u)).astype(float) + tiny for x in sums}
    return ExactGradients(**exact, terms=terms, bounds=bounds)


def _wider(terms: Any, wide: Any, name: str, u: float) -> Any:
    """A bound of the absolute terms with D_ij and E_i, from the bound `wide` that has c_i >= u."""
    return terms[name] if name == "dv" else wide[name] / u


def _zeros(shape: Any) -> Numbers:
    return np.full(tuple(shape), ZERO, dtype=object)


def _add_row(
    case: AttentionCase, forward: Any, at: tuple[int, int, int], u: float, *sums: Any
) -> None:
    """Add one row's part to the exact gradients, their terms, and their bounds."""
    exact, terms, wide = sums
    b, h, i = at
    g, scale = _kv_head(case, h), mpmath.mpf(case.scale)
    keys = [j for j in range(case.kv_len) if sees(case, b, h, i, j)]
    if not keys:
        return
    assert case.grad_out is not None
    dO, q = _exact(case.grad_out[at]), _exact(case.q[at])
    v, k = {j: _exact(case.v[b, g, j]) for j in keys}, {j: _exact(case.k[b, g, j]) for j in keys}
    P = {j: mpmath.exp(_score(case, b, h, i, j)[0] - forward.lse[at]) for j in keys}
    dP = {j: sum((x * y for x, y in zip(dO, v[j], strict=True)), ZERO) for j in keys}
    D = {j: sum((abs(x * y) for x, y in zip(dO, v[j], strict=True)), ZERO) for j in keys}
    delta, E = sum(P[j] * dP[j] for j in keys), sum(P[j] * D[j] for j in keys)
    n, d, e, A = case.kv_len, len(q), len(dO), forward.size[at]
    p = (d + 12) * u * A + 4 * u
    c = 4 * p + (3 * n + 2 * e + 12) * u
    if case.softcap is not None:
        c += 2 * (d + 6) * u * A / case.softcap + 12 * u
    for j in keys:
        slope = _slope(case, q, k[j])
        dX, size = scale * P[j] * slope * (dP[j] - delta), abs(scale) * P[j] * slope
        absolute, bound = size * (abs(dP[j]) + abs(delta)), c * size * (D[j] + E)
        for x in range(d):
            for name, row, other in (("dq", at, k[j][x]), ("dk", (b, g, j), q[x])):
                exact[name][(*row, x)] += dX * other
                terms[name][(*row, x)] += absolute * abs(other)
                wide[name][(*row, x)] += bound * abs(other)
        for x in range(e):
            exact["dv"][b, g, j, x] += P[j] * dO[x]
            terms["dv"][b, g, j, x] += P[j] * abs(dO[x])
            wide["dv"][b, g, j, x] += (2 * p + (n + 2) * u) * P[j] * abs(dO[x])


def _slope(case: AttentionCase, q: Any, k: Any) -> Any:
    if case.softcap is None:
        return mpmath.mpf(1)
    y = case.scale * sum(x * z for x, z in zip(q, k, strict=True)) / case.softcap
    return 1 - mpmath.tanh(y) ** 2
