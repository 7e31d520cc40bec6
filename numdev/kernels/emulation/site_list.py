"""The rounding sites by name: every step of attention at which a kernel rounds, as data.

What a preset puts there is `numdev.kernels.emulation.recipe`; what is computed between them is
`numdev.kernels.emulation.forward` and `numdev.kernels.emulation.backward`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Site:
    """A step at which a kernel rounds."""

    name: str
    rounds: str
    """What is rounded there, in the papers' letters."""
    may_hide: bool = False
    """Whether it must be able to hold -inf: a hidden score, or the maximum of a row without keys.
    A format without infinity cannot stand there."""


# In the order of the pass. A row of steps that round alike in all code we know is one site.
_FORWARD = (
    Site(name="q_scaled", rounds="scale · Q, where the scale is folded into Q"),
    Site(name="scores", rounds="S = Q Kᵀ, the finished sum"),
    Site(name="scaled", rounds="scale · S"),
    Site(name="softcap", rounds="S / cap, its tanh, and cap times that: each of the three"),
    Site(name="bias", rounds="S + additive mask", may_hide=True),
    Site(name="max", rounds="row maximum of a tile, and so the running m", may_hide=True),
    Site(name="exponent", rounds="S − m, and m_old − m", may_hide=True),
    Site(name="exp", rounds="exp(S − m)"),
    Site(name="p", rounds="P as it is multiplied with V"),
    Site(name="tile_sum", rounds="sum of a row of P within a tile"),
    Site(name="rescale", rounds="exp(m_old − m), and its product with l"),
    Site(name="row_sum", rounds="running l, after a tile is added"),
    Site(name="pv", rounds="P V of one tile, the finished sum"),
    Site(name="accumulator", rounds="running O, after it is rescaled and after P V is added"),
    Site(name="normalised", rounds="O / l (in `plain`, P / l)"),
    Site(name="state", rounds="O as stored after a tile, where kv is the outer loop"),
    Site(name="merge", rounds="O of one split of the keys as stored, and the merged O"),
    Site(name="lse", rounds="m + log l, as returned", may_hide=True),
    Site(name="out", rounds="O as returned"),
)
_BACKWARD = (
    Site(name="s", rounds="S as recomputed, through the forward's own sites", may_hide=True),
    Site(name="lse_read", rounds="L as backward reads it (or m and l)", may_hide=True),
    Site(
        name="p_backward",
        rounds="S − L and its exp, P (or S − m, its exp, and P = exp / l): each",
        may_hide=True,
    ),
    Site(name="p_for_dv", rounds="P as it is multiplied with dO"),
    Site(name="dv_product", rounds="Pᵀ dO of one tile, the finished sum"),
    Site(name="dv", rounds="running dV, after a tile is added"),
    Site(name="dp", rounds="dP = dO Vᵀ, the finished sum"),
    Site(name="delta_o", rounds="O as it is multiplied with dO, from before its cast"),
    Site(name="delta_product", rounds="dO ∘ O, or dP ∘ P"),
    Site(name="delta", rounds="δ, the finished sum of a row (with dP ∘ P, after every tile)"),
    Site(name="dp_minus_delta", rounds="dP − δ"),
    Site(name="p_for_ds", rounds="P as it is multiplied with dP − δ"),
    Site(name="ds_softmax", rounds="dS = P ∘ (dP − δ)"),
    Site(name="ds_softcap", rounds="cap · dS, its product with 1 − tanh², and / cap: each"),
    Site(name="ds_scaled", rounds="scale · dS, where it is scaled before the products"),
    Site(name="ds", rounds="dS as it is multiplied with K and Q"),
    Site(name="dq_product", rounds="(scale ·) dS K of one tile, the finished sum"),
    Site(name="dq", rounds="running dQ, after a tile is added"),
    Site(name="dq_partial", rounds="dQ from a split of the keys, before the splits' are summed"),
    Site(name="dk_product", rounds="(scale ·) dSᵀ Q of one tile, the finished sum"),
    Site(name="dk", rounds="running dK, after a tile is added"),
    Site(
        name="dk_partial",
        rounds="dK of a query head or a part of the queries, before a sum",
    ),
    Site(
        name="dv_partial",
        rounds="dV of a query head or a part of the queries, before a sum",
    ),
    Site(name="dq_out", rounds="dQ as returned"),
    Site(name="dk_out", rounds="dK as returned"),
    Site(name="dv_out", rounds="dV as returned"),
)
FORWARD = tuple(site.name for site in _FORWARD)
BACKWARD = tuple(site.name for site in _BACKWARD)
SITES: Mapping[str, Site] = {site.name: site for site in (*_FORWARD, *_BACKWARD)}
