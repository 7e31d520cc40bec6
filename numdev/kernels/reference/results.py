"""What the fp64 reference returns: the answer to a case, and to a training step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """The fp64 answer to a case. Shapes as in `Output`; everything float64 but `empty`."""

    out: Tensor
    lse: Tensor
    term_scale: Tensor
    """sum_j P_ij |V_jd|, [batch, heads, q_len, v_dim]; at least |out| everywhere."""
    empty: Tensor
    """bool [batch, heads, q_len]: rows that see no key."""
    by: str = "blocked"
    """Which path computed it; with a reason where it is not the fast one of the device."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Gradients(Reference):
    """The fp64 answer to a training step: what `attend` returns, and the gradients of
    sum(dO O), each in the shape of its input. float64 but for `empty` and `unseen`."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dq_terms: Tensor
    """|scale| sum_j P_ij (|dP_ij| + |delta_i|) |K_jd|, times the soft cap's slope where there is
    one; at least |dq| everywhere."""
    dk_terms: Tensor
    """The same with |Q_id|, summed over rows i and query heads."""
    dv_terms: Tensor
    """sum_i P_ij |dO_id|."""
    delta: Tensor
    """rowsum(dO O), [batch, heads, q_len]; 0 in an empty row."""
    unseen: Tensor
    """bool [batch, kv_heads, kv_len]: keys that no query sees. Their dk and dv are exactly 0."""
