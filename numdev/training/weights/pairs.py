"""One tensor of two sets of weights, and many of them together: sums, and the numbers they make.

A tensor goes through `paired`, which knows all distances, and beside it through casts to lower
formats, the yardstick. What comes out is kept as sums, so that the numbers of a layer, or of a
whole model, are made in the same way as those of one tensor, without its values.

What is not finite in either tensor is counted and left out of both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from numdev.audit.records import WEIGHTS_AT_ONCE, weight_row
from numdev.errors import UsageError
from numdev.formats import FORMATS, format_of
from numdev.metrics.paired import paired

CASTS = ("bfloat16", "float16", "float8_e4m3fn")
METRICS = ("max_abs", "mean_abs", "rel", "cosine", "w1", "spread", "equal")
"""Of two tensors, whatever a cast would have changed."""
BEYOND = "is beyond what float64 holds"
Sums = Mapping[str, Any]
"""Of one tensor pair or several, what adds up over elements: counts, sums, sums of squares. All but
`largest`, a maximum. `w1` and `spread` are times the elements."""


def unfit(x: Tensor) -> str | None:
    """Why a tensor has no floating-point values to measure; None where it has."""
    if x.layout is not torch.strided or x.is_nested or x.is_quantized or x.is_meta:
        return "is not stored as a plain array"
    there = x.untyped_storage().nbytes() // x.itemsize
    if x.numel() > there:  # a few bytes can claim any shape, and would take forever
        return f"has {x.numel()} elements of which only {there} are stored"
    try:
        format_of(x.dtype)
    except UsageError:
        return f"is stored as {stored(x)}, which is not a floating-point format that numdev knows"
    return None


def stored(x: Tensor) -> str:
    """The name of a tensor's dtype."""
    return str(x.dtype).removeprefix("torch.")


def cast_costs(x: Tensor) -> dict[str, float]:
    """What a cast to each of CASTS changes in a tensor that is not `unfit`: sums over the elements
    that the format holds, and how many it does not."""
    sums: dict[str, float] = {}
    for name in CASTS:
        row = weight_row("", _readable(x), FORMATS[name])
        held = row.elements - row.nonfinite
        sums |= {f"{name}_elements": held, f"{name}_nonfinite": row.nonfinite}
        sums[f"{name}_change"] = (row.mean_abs or 0.0) * held
    return sums


def compare(of: Tensor, against: Tensor, casts: Mapping[str, float] | None = None) -> Sums:
    """Two tensors of one shape on one device, neither `unfit`; `casts` are those of `against`."""
    elements = against.numel()
    a, b = _readable(of).reshape(-1), _readable(against).reshape(-1)
    lost = [elements - int(x.isfinite().sum()) for x in (a, b)]
    if any(lost):
        both = a.isfinite() & b.isfinite()
        a, b = a[both], b[both]
    apart, n = paired(a, b), a.numel()
    size_a, size_b = _size(a), _size(b)

    def total(mean: float | None, times: int) -> float:
        """A mean is None only where it is beyond float64, or there is no element."""
        return times * (math.inf if mean is None else mean) if n else 0.0

    # What is relative to a tensor of zeros is None: the gap is then the other's size.
    gap = size_a if apart.rel is None else apart.rel * size_b
    return {
        "elements": elements,
        "nonfinite_of": lost[0],
        "nonfinite_against": lost[1],
        "compared": n,
        "largest": total(apart.max_abs, 1),
        "gap": total(apart.mean_abs, n),
        "gap_squares": gap**2,
        "of_squares": size_a**2,
        "against_squares": size_b**2,
        "products": (apart.cosine or 0.0) * size_a * size_b,
        "equal": n * (apart.equal or 0.0),
        "w1": total(apart.w1, n),
        "spread": total(apart.spread, n),
        **(casts or {}),
    }


def pooled(parts: Sequence[Sums]) -> Sums:
    """Several tensors as one. Raises ValueError for none."""
    if not parts:
        raise ValueError("nothing to pool")
    added = {name: sum(part[name] for part in parts) for name in parts[0]}
    return {**added, "largest": max(part["largest"] for part in parts)}


def numbers(sums: Sums) -> dict[str, Any]:
    """The fields of a row: metrics, those of W1 under `w1`, `spread`, `w1_rel`, and `nulls`."""
    n = sums["compared"]
    nothing = "holds no elements" if not sums["elements"] else "no element is finite in both"

    def over(value: float, by: float, otherwise: str) -> float | str:
        return value / by if by else otherwise

    root = {name: math.sqrt(sums[f"{name}_squares"]) for name in ("gap", "of", "against")}
    zero = "of or against is 0 everywhere"
    found: dict[str, float | str] = {
        "max_abs": sums["largest"] if n else nothing,
        "mean_abs": over(sums["gap"], n, nothing),
        "rel": over(root["gap"], root["against"], "against is 0 everywhere"),
        "cosine": over(sums["products"], root["of"] * root["against"], zero),
        "equal": over(sums["equal"], n, nothing),
        "w1": over(sums["w1"], n, nothing),
        "spread": over(sums["spread"], n, nothing),
        "w1_rel": over(sums["w1"], sums["spread"], "all elements of against are equal"),
    }
    casts = [name for name in CASTS if f"{name}_change" in sums]
    for name in casts:
        held = sums[f"{name}_elements"]
        change = over(sums[f"{name}_change"], held, f"{name} holds no element")
        found[f"{name}_mean_abs"] = found[f"{name}_w1"] = change
        found[f"{name}_times"] = (
            over(sums["gap"] / n, change, f"a cast to {name} changes nothing")
            if n and isinstance(change, float)
            else nothing
        )
    if not n:
        found |= dict.fromkeys(("rel", "cosine", "w1_rel"), nothing)
    known = {k: v for k, v in found.items() if isinstance(v, float) and math.isfinite(v)}
    nulls = {k: v if isinstance(v, str) else BEYOND for k, v in found.items() if k not in known}
    counted = ("elements", "nonfinite_of", "nonfinite_against", *(f"{c}_nonfinite" for c in casts))
    return {
        **{name: sums[name] for name in counted},
        **dict.fromkeys(found),
        **known,
        "nulls": nulls,
    }


def _readable(x: Tensor) -> Tensor:
    """In a format torch computes with: its 8-bit ones it only stores."""
    return x.float() if x.dtype.itemsize == 1 else x


def _size(x: Tensor) -> float:
    """The norm in fp64, block by block."""
    squares = [float(part.double().square().sum()) for part in x.split(WEIGHTS_AT_ONCE) if len(x)]
    return math.sqrt(sum(squares))
