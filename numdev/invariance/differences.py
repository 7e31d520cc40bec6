"""Two outputs beside each other, bit by bit, and how large their difference is beside rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase, visible
from numdev.formats import FORMATS, Format, format_of, round_to, ulp
from numdev.invariance.axes import Call
from numdev.kernels import Output
from numdev.kernels.output import GRADIENTS
from numdev.kernels.reference.blocked import Reference

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
TERMS = {"out": "term_scale", "dq": "dq_terms", "dk": "dk_terms", "dv": "dv_terms"}
TENSORS = ("out", "lse", *GRADIENTS)
EXACT = 1e-10  # of the terms of a sum: what fp64 in another order may change


def differs(a: Tensor, b: Tensor) -> Tensor:
    """Which elements have other bits; of two dtypes, other values."""
    if a.dtype != b.dtype:
        a, b = a.double(), b.double()
    bits = BITS[a.element_size()]
    return a.detach().view(bits) != b.detach().view(bits)


def exact_change(call: Call, base: Reference, variant: Reference) -> float:
    """How far the exact answer of the call's rows is from the base's, over the size of what is
    added up: beyond EXACT it is another answer."""
    counted: Any = call.there.of("out", ~base.empty)
    if not counted.equal(call.here.of("out", ~variant.empty)):
        return math.inf
    worst = 0.0
    for tensor in TENSORS:
        a, b = (getattr(x, tensor, None) for x in (base, variant))
        a, b = (
            None if x is None else p.of(tensor, x) for x, p in ((a, call.there), (b, call.here))
        )
        if a is None or b is None:
            continue
        terms: Any = a.abs() + 1
        if tensor in TERMS:
            terms = call.there.of(tensor, getattr(base, TERMS[tensor]))
        apart = torch.where(a == b, 0.0, (a - b).abs() / terms.clamp_min(1e-300))  # -inf is -inf
        apart = apart if tensor in ("dk", "dv") else apart[counted]
        worst = max(worst, float(apart.nan_to_num(nan=math.inf).amax()) if apart.numel() else 0.0)
    return worst


def compared(
    calls: Sequence[Call], exact: Reference, base: Output, variants: Sequence[Output], fmt: Format
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The fields of a row, tensor by tensor that both forms have. `exact` is the base's reference;
    rows that see no key are left out."""
    for tensor in TENSORS:
        truth = getattr(exact, tensor, None)
        if truth is None or getattr(base, tensor) is None:
            continue
        parts = []
        for call, output in zip(calls, variants, strict=True):
            one, other = getattr(base, tensor), getattr(output, tensor)
            if other is not None and (a := call.there.of(tensor, one)) is not None:
                b, counted = call.here.of(tensor, other), None
                if tensor not in ("dk", "dv"):
                    counted = ~call.there.of("out", exact.empty)  # type: ignore[operator]
                parts.append(_part(call, tensor, a, b, call.there.of(tensor, truth), counted, fmt))
        if parts and len(parts) == len(calls):
            yield tensor, _row(parts)


def _part(
    call: Call, tensor: str, a: Tensor, b: Any, truth: Any, counted: Tensor | None, fmt: Format
) -> dict[str, Any]:
    other = differs(a, b)
    if counted is None:
        counted = torch.ones(other.shape[:3], dtype=torch.bool, device=other.device)
    shown = counted if tensor == "lse" else counted[..., None].expand_as(other)
    other = other & shown
    own = format_of(a.dtype)
    if tensor == "lse":  # which has a format of its own
        fmt = own if own.contains(FORMATS["float32"]) else FORMATS["float32"]
    finite = a.isfinite() & b.isfinite() & truth.isfinite() & shown
    sums: dict[str, Any] = {
        "elements": int(shown.sum()),
        "differ": int(other.sum()),
        "nonfinite": int(((a.isfinite() != b.isfinite()) & shown).sum()),
        "finite": int(finite.sum()),
    }
    wide_a, wide_b = (torch.where(finite, x.double(), 0.0) for x in (a, b))
    truth = torch.where(finite, truth, 0.0)
    squares = {
        "difference": wide_a - wide_b,
        "floor": round_to(truth, fmt) - truth,
        "error_base": wide_a - truth,
        "error_variant": wide_b - truth,
    }
    sums |= {name: float(x.square().sum()) for name, x in squares.items()}
    sums["ulps"], sums["first"] = 0.0, None
    if sums["differ"]:
        spacing = ulp(torch.maximum(wide_a.abs(), wide_b.abs()), own)
        sums["ulps"] = float(((wide_a - wide_b).abs() / spacing).amax())
        sums["first"] = _first(call, tensor, other)
    return sums


def _first(call: Call, tensor: str, other: Tensor) -> tuple[int, int, int, int]:
    """Where the first row that differs stands in the base: sequence, head, row, feature."""
    other = other[..., None] if tensor == "lse" else other
    row = int(other.any(dim=3).any(dim=0).any(dim=0).nonzero()[0])
    sequence, head, feature = other[:, :, row].nonzero()[0].tolist()
    there = call.there
    of = (there.kv_head, there.key) if tensor in ("dk", "dv") else (there.head, there.row)
    before = [x.start or 0 if x else 0 for x in (there.batch, *of)]
    return sequence + before[0], head + before[1], row + before[2], feature


def _row(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    total = {n: sum(p[n] for p in parts) for n in parts[0] if n not in ("first", "ulps")}
    count = max(1, total.pop("finite"))
    floor = math.sqrt(total.pop("floor") / count)
    rms = {
        n: math.sqrt(total.pop(n) / count) for n in ("difference", "error_base", "error_variant")
    }
    firsts = [p["first"] for p in parts if p["first"] is not None]
    row = {**total, "difference": rms["difference"], "ulps": max(p["ulps"] for p in parts)}
    if floor:
        row["floor_ratio"] = rms["difference"] / floor
        row |= {n: rms[n] / floor for n in ("error_base", "error_variant")}
    row["first"] = min(firsts, key=lambda at: (at[2], at[0], at[1])) if firsts else None
    return row


def keys_seen(case: AttentionCase, first: tuple[int, int, int, int]) -> int:
    """How many keys a row of a case sees."""
    sequence, head, row, _ = first
    shown = visible(case, slice(row, row + 1), slice(0, case.kv_len))
    if shown is None:
        return case.kv_len
    shown = shown.expand(*case.q.shape[:2], 1, case.kv_len)
    return int(shown[sequence, head].sum())
