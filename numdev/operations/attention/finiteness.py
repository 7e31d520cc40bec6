"""What is not finite: in a call's inputs, and in rows of an output that a sample leaves
out.

In the rows that are measured finiteness is held against the floor's, element by element.
For all others this needs no reference as long as the inputs are finite: then the exact
output is, being a mean of rows of V, and so is the log-sum-exp of a row that sees a key,
and a gradient is never NaN. A gradient may overflow a narrow format rightly; where a
bound on its size excludes that, an infinite element is wrong too, and elsewhere it stays
open."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from numdev.cases import AttentionCase, empty_rows
from numdev.formats import Format, all_finite, round_to
from numdev.metrics.finiteness import Outside, count_nonfinite
from numdev.metrics.yardstick import finite, widened
from numdev.tensor_properties import tensor_spec


def elsewhere(
    x: Tensor, tensor: str, case: AttentionCase, rows: Tensor | None, fmt: Format
) -> list[Outside]:
    """Returns for each head of a tensor `x` [B, H, rows, ...] an `Outside`: how many
    elements are not finite in all rows but `rows`, and why more is unknown, or None.
    Query rows that see no key do not count (out, lse, dq). Where the inputs are not
    finite, each head has the count 0 and that reason. An infinite element of a gradient
    is not counted where the exact gradient may overflow `fmt` too: the head's reason says
    how many there are.

    `rows`: indices that are not looked at; None: all rows are looked at. `case` has the
    heads of `x` and all its rows, and for a gradient a grad_out. `tensor` is out, lse,
    dq, dk or dv, `fmt` the format of `x`."""
    heads = x.shape[1]
    if not inputs_finite(case):
        return [Outside(0, "the inputs are not finite")] * heads
    bad = ~finite(x)
    if rows is not None:
        bad[:, :, rows] = False
    if not tensor_spec(tensor).sums_over_rows:
        empty = empty_rows(case)
        bad &= ~(empty if x.ndim == 3 else empty[..., None])
    open_ = torch.zeros_like(bad)
    if tensor_spec(tensor).is_gradient:
        reach = _gradient_bound(case, tensor) >= fmt.largest
        open_ = bad & x.isinf() & reach[None, :, None, None]
    both = torch.stack([bad & ~open_, open_]).transpose(1, 2).flatten(2).sum(dim=2)
    why = (
        "elements are infinite in rows that are not measured, where the exact "
        "gradient may"
    )
    return [
        Outside(wrong, f"{doubtful} {why} overflow {fmt.name} too" if doubtful else None)
        for wrong, doubtful in both.T.tolist()
    ]


def inputs_finite(case: AttentionCase) -> bool:
    """Whether q, k, v and, where the call has them, an additive mask, sinks and grad_out
    are finite; -inf in the mask hides a key and counts as finite."""
    return all_finite(_float_inputs(case).values())


def nonfinite_inputs(case: AttentionCase) -> dict[str, int]:
    """Returns by name of a call's input (q, k, v, mask, sinks, grad_out) how many of its
    elements are NaN or infinite; inputs that have none are left out. -inf in an additive
    mask hides a key and does not count."""
    inputs = _float_inputs(case)
    if all_finite(inputs.values()):
        return {}
    counts = {name: count_nonfinite(x) for name, x in inputs.items()}
    return {name: count for name, count in counts.items() if count}


def overflowing_inputs(case: AttentionCase, formats: Iterable[Format]) -> dict[str, int]:
    """Returns by the format's name how many finite elements of a call's inputs are
    infinite or NaN when they are rounded to it, of all inputs together. Formats in which
    none is are left out, and so are those whose largest number is that of the case's
    format or above it. A mask does not overflow: it saturates
    (`AttentionCase.rounded_to`)."""
    narrower = [fmt for fmt in formats if fmt.largest < case.format.largest]
    if not narrower:
        return {}
    inputs = [x for name, x in _float_inputs(case).items() if name != "mask"]
    # Of all at once: one wait for the device
    magnitudes = torch.stack([widened(x).abs().amax().double() for x in inputs])
    counts: dict[str, int] = {}
    for x, largest in zip(inputs, magnitudes.tolist(), strict=True):
        for fmt in narrower:
            if not largest <= fmt.largest:  # NaN too: it hides how large the others are
                wide = widened(x)
                lost = finite(wide) & ~finite(round_to(wide, fmt))
                counts[fmt.name] = counts.get(fmt.name, 0) + int(lost.sum())
    return {name: count for name, count in counts.items() if count}


def _float_inputs(case: AttentionCase) -> dict[str, Tensor]:
    """Returns the floating-point inputs of a call by name, those it has: q, k, v, mask,
    sinks, grad_out. A bool mask is left out; in an additive mask -inf is replaced by the
    lowest number of its dtype."""
    named = {n: getattr(case, n) for n in ("q", "k", "v", "mask", "sinks", "grad_out")}
    inputs = {n: x for n, x in named.items() if x is not None and x.dtype != torch.bool}
    if (mask := inputs.get("mask")) is not None:
        inputs["mask"] = mask.clamp_min(torch.finfo(mask.dtype).min)
    return inputs


def _gradient_bound(case: AttentionCase, tensor: str) -> Tensor:
    """Returns a bound on the size of the elements of a gradient: [H] for dq, [kv_heads]
    for dk and dv, over the batch. |dP - delta| <= 2 |dO_i| max |V_j| row by row, and a
    row of P sums to 1 at most (a soft cap's slope is at most 1). The case must have
    grad_out."""
    assert case.grad_out is not None
    q, k, v, dO = (x.double() for x in (case.q, case.k, case.v, case.grad_out))

    def by_kv_head(x: Tensor) -> Tensor:
        """Sums x [B, H, rows, features] over rows and over the query heads of a group.
        Returns the largest sum for each kv head, [H_kv]."""
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
