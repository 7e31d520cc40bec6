"""What is not finite in the rows of an output that a sample leaves out.

In the rows that are measured finiteness is held against the floor's, element by element. For all
others this needs no reference as long as the inputs are finite: then the exact output is, being a
mean of rows of V, and so is the log-sum-exp of a row that sees a key, and a gradient is never NaN.
A gradient may overflow a narrow format rightly; where a bound on its size excludes that, an
infinite element is wrong too, and elsewhere it stays open."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.cases import AttentionCase, empty_rows
from numdev.formats import Format
from numdev.metrics.yardstick import finite, widened


@dataclass(frozen=True)
class Elsewhere:
    """One head, in the rows that are not measured."""

    nonfinite: int  # elements that are not finite, and should be
    unknown: str | None = None  # why more cannot be said, as a clause


def elsewhere(
    x: Tensor, tensor: str, case: AttentionCase, rows: Tensor | None, fmt: Format
) -> list[Elsewhere]:
    """Of each head of a tensor `x` [B, H, rows, ...] of `case`, in all rows but `rows`.

    `case` has the heads of `x` and all its rows; `tensor` is out, lse, dq, dk or dv, `fmt` the
    format of `x`. Left out are query rows that see no key."""
    heads = x.shape[1]
    if not inputs_finite(case):
        return [Elsewhere(0, "the inputs are not finite")] * heads
    bad = ~finite(x)
    if rows is not None:
        bad[:, :, rows] = False
    if tensor not in ("dk", "dv"):
        empty = empty_rows(case)
        bad &= ~(empty if x.ndim == 3 else empty[..., None])
    open_ = torch.zeros_like(bad)
    if tensor in ("dq", "dk", "dv"):
        reach = _largest(case, tensor) >= fmt.largest
        open_ = bad & x.isinf() & reach[None, :, None, None]
    both = torch.stack([bad & ~open_, open_]).transpose(1, 2).flatten(2).sum(dim=2)
    why = "elements are infinite in rows that are not measured, where the exact gradient may"
    return [
        Elsewhere(wrong, f"{doubtful} {why} overflow {fmt.name} too" if doubtful else None)
        for wrong, doubtful in both.T.tolist()
    ]


def inputs_finite(case: AttentionCase) -> bool:
    """Whether all inputs are. An additive mask may hold -inf, which hides."""
    inputs = [x for x in (case.q, case.k, case.v, case.sinks, case.grad_out) if x is not None]
    if case.mask is not None and case.mask.dtype != torch.bool:
        inputs.append(case.mask.clamp_min(torch.finfo(case.mask.dtype).min))
    return all_finite(inputs)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all elements of all these are, by one wait for the device: of a tensor with an
    infinity or NaN the largest magnitude is one."""
    largest = [torch.linalg.vector_norm(widened(x), math.inf).double() for x in tensors]
    return all(math.isfinite(x) for x in torch.stack(largest).tolist())


def _largest(case: AttentionCase, tensor: str) -> Tensor:
    """[H]: a bound on a gradient's elements. |dP - delta| <= 2 |dO_i| max |V_j| row by row, and
    a row of P sums to 1 at most (a soft cap's slope is at most 1)."""
    assert case.grad_out is not None
    q, k, v, dO = (x.double() for x in (case.q, case.k, case.v, case.grad_out))

    def by_kv_head(x: Tensor) -> Tensor:
        """[B, H, rows, features] summed over rows and the heads of a group, the largest: [H_kv]."""
        sums = x.sum(dim=2).reshape(len(x), case.kv_heads, case.group, -1).sum(dim=2)
        return sums.amax(dim=(0, 2))

    if tensor == "dv":
        return by_kv_head(dO.abs())
    longest_v = v.norm(dim=-1).amax(dim=-1).repeat_interleave(case.group, dim=1)
    dX = 2 * abs(case.scale) * dO.norm(dim=-1) * longest_v[..., None]  # [B, H, q_len]
    if tensor == "dk":
        return by_kv_head(dX[..., None] * q.abs())
    largest_k = k.abs().amax(dim=(2, 3)).repeat_interleave(case.group, dim=1)
    bound: Tensor = (dX.amax(dim=-1) * largest_k).amax(dim=0)
    return bound
