"""One tensor of two sets of weights, and many of them together: sums, and the numbers they make.

A tensor goes through `paired`, which knows all distances, and beside it through casts to lower
formats, the yardstick. What comes out is kept as sums, so that the numbers of a layer, or of a
whole model, are made in the same way as those of one tensor, without its values.

What is not finite in either tensor is counted and left out of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.audit.records import WEIGHTS_AT_ONCE, weight_row
from numdev.errors import UsageError
from numdev.formats import FORMATS, format_of
from numdev.metrics.paired import paired

CASTS = ("bfloat16", "float16", "float8_e4m3fn")


@dataclass(frozen=True, kw_only=True)
class CastSums:
    """What one cast changes, summed over the elements the format holds."""

    elements: int
    change: float
    nonfinite: int


@dataclass(frozen=True, kw_only=True)
class Sums:
    """One tensor pair, or several: everything that adds up over elements, and a maximum."""

    elements: int
    nonfinite_of: int
    nonfinite_against: int
    compared: int
    """Finite in both; all that follows is over these."""
    largest: float
    gap: float
    gap_squares: float
    of_squares: float
    against_squares: float
    products: float
    equal: float
    w1: float
    """Times the elements, and so is `spread`."""
    spread: float
    casts: Mapping[str, CastSums]


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


def cast_costs(x: Tensor) -> dict[str, CastSums]:
    """What a cast to each of CASTS changes in a tensor that is not `unfit`."""
    rows = {name: weight_row("", _readable(x), FORMATS[name]) for name in CASTS}
    return {
        name: CastSums(
            elements=row.elements - row.nonfinite,
            change=(row.mean_abs or 0.0) * (row.elements - row.nonfinite),
            nonfinite=row.nonfinite,
        )
        for name, row in rows.items()
    }


def compare(of: Tensor, against: Tensor, casts: Mapping[str, CastSums]) -> Sums:
    """Two tensors of one shape on one device, neither `unfit`; `casts` are those of `against`."""
    elements = against.numel()
    a, b = _readable(of).reshape(-1), _readable(against).reshape(-1)
    lost = [elements - int(x.isfinite().sum()) for x in (a, b)]
    if any(lost):
        both = a.isfinite() & b.isfinite()
        a, b = a[both], b[both]
    apart, n = paired(a, b), a.numel()
    size_a, size_b = _size(a), _size(b)
    # What is relative to a tensor of zeros is None: the gap is then the other's size.
    gap = size_a if apart.rel is None else apart.rel * size_b
    return Sums(
        elements=elements,
        nonfinite_of=lost[0],
        nonfinite_against=lost[1],
        compared=n,
        largest=_total(apart.max_abs, 1, n),
        gap=_total(apart.mean_abs, n, n),
        gap_squares=gap**2,
        of_squares=size_a**2,
        against_squares=size_b**2,
        products=(apart.cosine or 0.0) * size_a * size_b,
        equal=n * (apart.equal or 0.0),
        w1=_total(apart.w1, n, n),
        spread=_total(apart.spread, n, n),
        casts=casts,
    )


def _total(mean: float | None, times: int, elements: int) -> float:
    """A sum of what has no mean only where it is beyond float64, or there is no element."""
    if not elements:
        return 0.0
    return math.inf if mean is None else times * mean


def pooled(parts: Sequence[Sums]) -> Sums:
    """Several tensors as one. Raises ValueError for none."""
    if not parts:
        raise ValueError("nothing to pool")

    def total(name: str) -> Any:
        return sum(getattr(part, name) for part in parts)

    added = {name: total(name) for name in Sums.__dataclass_fields__ if name not in _OTHERWISE}
    casts = {name: _together(part.casts[name] for part in parts) for name in parts[0].casts}
    return Sums(largest=max(part.largest for part in parts), casts=casts, **added)


BEYOND = "is beyond what float64 holds"
_OTHERWISE = ("largest", "casts")
"""What does not simply add up."""


def _together(casts: Iterable[CastSums]) -> CastSums:
    these = list(casts)
    return CastSums(
        elements=sum(c.elements for c in these),
        change=sum(c.change for c in these),
        nonfinite=sum(c.nonfinite for c in these),
    )


def numbers(sums: Sums) -> dict[str, Any]:
    """The fields of a row: metrics, those of W1 under `w1`, `spread`, `w1_rel`, and `nulls`."""
    n = sums.compared
    nothing = "holds no elements" if not sums.elements else "no element is finite in both"
    found: dict[str, float | str] = {
        "max_abs": sums.largest if n else nothing,
        "mean_abs": _over(sums.gap, n, nothing),
        "rel": _over(
            math.sqrt(sums.gap_squares), math.sqrt(sums.against_squares), "against is 0 everywhere"
        ),
        "cosine": _over(
            sums.products,
            math.sqrt(sums.of_squares) * math.sqrt(sums.against_squares),
            "of or against is 0 everywhere",
        ),
        "equal": _over(sums.equal, n, nothing),
        "w1": _over(sums.w1, n, nothing),
        "spread": _over(sums.spread, n, nothing),
        "w1_rel": _over(sums.w1, sums.spread, "all elements of against are equal"),
    }
    for name, cast in sums.casts.items():
        change = _over(cast.change, cast.elements, f"{name} holds no element")
        found[f"{name}_mean_abs"] = found[f"{name}_w1"] = change
        found[f"{name}_times"] = (
            _over(sums.gap / n, change, f"a cast to {name} changes nothing")
            if n and isinstance(change, float)
            else nothing
        )
    if not n:
        found |= dict.fromkeys(("rel", "cosine", "w1_rel"), nothing)
    lost = {f"{name}_nonfinite": cast.nonfinite for name, cast in sums.casts.items()}
    return {
        "elements": sums.elements,
        "nonfinite_of": sums.nonfinite_of,
        "nonfinite_against": sums.nonfinite_against,
        **lost,
        **_split(found),
    }


def _over(value: float, by: float, otherwise: str) -> float | str:
    """A quotient, or why there is none."""
    return value / by if by else otherwise


def _split(found: Mapping[str, float | str]) -> dict[str, Any]:
    """Numbers as they are, reasons as nulls; what overflowed in fp64 is one too."""
    values: dict[str, float | None] = {}
    nulls: dict[str, str] = {}
    for name, value in found.items():
        known = isinstance(value, float) and math.isfinite(value)
        values[name] = float(value) if known else None
        if not known:
            nulls[name] = value if isinstance(value, str) else BEYOND
    return {**values, "nulls": nulls}


def _readable(x: Tensor) -> Tensor:
    """In a format torch computes with: its 8-bit ones it only stores."""
    return x.float() if x.dtype.itemsize == 1 else x


def _size(x: Tensor) -> float:
    """The norm in fp64, block by block."""
    squares = [float(part.double().square().sum()) for part in x.split(WEIGHTS_AT_ONCE) if len(x)]
    return math.sqrt(sum(squares))
