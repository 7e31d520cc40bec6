"""Compares two tensors of one name, and adds up many such pairs: sums, and the numbers
they make.

A pair is reduced to sums over the elements that are finite in both, so that the numbers
of a layer or a model are made as those of one tensor, without its values. Beside them are
those of casting the tensor to lower formats, the yardstick."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from numdev.errors import UsageError
from numdev.formats import FORMATS, format_of
from numdev.metrics.tensor_distances import paired
from numdev.metrics.weight_casts import WEIGHTS_AT_ONCE, weight_row
from numdev.metrics.yardstick import widened
from numdev.sources.tensor_files import is_plain
from numdev.studies.training.report import Fields

CASTS = ("bfloat16", "float16", "float8_e4m3fn")
BEYOND = "is beyond what float64 holds"
ZERO = "0 in both"
# Sums over elements: counts, differences, squares, `w1` times elements; and `largest`, a
# maximum. `comparable` counts the elements that show how equal two sets are: those of a
# tensor that is 0 in both do not
Sums = Mapping[str, float]


def unfit_reason(x: Tensor) -> str | None:
    """Returns, as a clause, why a tensor has no floating-point values to measure: it is
    no plain strided array, claims more elements than it stores, or has another dtype than
    the formats of numdev. None for one that has such values, and for one without elements
    in such a dtype."""
    if not is_plain(x):
        return "is not stored as a plain array"
    stored = x.untyped_storage().nbytes() // x.itemsize
    if x.numel() > stored:  # a few bytes can claim any shape, and would take forever
        return f"has {x.numel()} elements of which only {stored} are stored"
    try:
        format_of(x.dtype)
    except UsageError:
        return f"is stored as {dtype_name(x)}, no floating-point format that numdev knows"
    return None


def dtype_name(x: Tensor) -> str:
    """Returns the name of a tensor's dtype, without `torch.`."""
    return str(x.dtype).removeprefix("torch.")


def cast_costs(x: Tensor) -> dict[str, float]:
    """Returns the change that a cast to each format NAME of CASTS makes in a tensor of
    floating-point values. `NAME_change` is the sum of |change| over the elements that the
    format can represent, `NAME_elements` their number."""
    sums: dict[str, float] = {}
    for name in CASTS:
        row = weight_row("", widened(x), FORMATS[name])
        elements = sums[f"{name}_elements"] = row.elements - row.nonfinite
        sums[f"{name}_change"] = (row.mean_abs or 0.0) * elements
    return sums


def compare_pair(of: Tensor, against: Tensor, casts: Mapping[str, float]) -> Sums:
    """Returns the sums that compare two tensors of one shape on one device, of
    floating-point values, in fp64. `casts`: the `cast_costs` of `against`, which become
    part of the result. Elements that are NaN or infinite in either are counted, and left
    out of all other sums. A sum beyond float64 is infinite; all are 0 without
    elements."""
    elements = against.numel()
    a, b = widened(of).reshape(-1), widened(against).reshape(-1)
    lost = [elements - int(x.isfinite().sum()) for x in (a, b)]
    if any(lost):
        both = a.isfinite() & b.isfinite()
        a, b = a[both], b[both]
    difference, n = paired(a, b), a.numel()
    size_b = _l2_norm(b)
    comparable = n if bool(a.any()) or bool(b.any()) else 0

    def total(mean: float | None, times: int) -> float:
        """Returns `times` times a mean, the sum that it is of. A mean that is None is
        beyond float64, so that its sum is infinite; without elements the sum is 0."""
        return times * (math.inf if mean is None else mean) if n else 0.0

    # A difference relative to a tensor of zeros is None: it is then the other's norm
    gap = _l2_norm(a) if difference.rel is None else difference.rel * size_b
    return {
        "elements": elements,
        "nonfinite_of": lost[0],
        "nonfinite_against": lost[1],
        "compared": n,
        "largest": total(difference.max_abs, 1),
        "gap": total(difference.mean_abs, n),
        "gap_squares": gap**2,
        "against_squares": size_b**2,
        "comparable": comparable,
        "equal": comparable * (difference.equal or 0.0),
        "w1": total(difference.w1, n),
        **casts,
    }


def pool_sums(parts: Sequence[Sums]) -> Sums:
    """Returns the sums of several pairs of tensors together: each added up, but
    `largest`, of which it is the maximum. `parts`: at least one."""
    added = {name: sum(part[name] for part in parts) for name in parts[0]}
    return {**added, "largest": max(part["largest"] for part in parts)}


def row_numbers(sums: Sums, w1: str = "w1") -> Fields:
    """Returns the fields of a row, by name, in which W1 has the name `w1`. `nulls` has
    the reason of each number that is None: no element, a zero to divide by, or a value
    beyond float64."""
    n = sums["compared"]
    against = math.sqrt(sums["against_squares"])
    parts = {  # numerator, denominator, and why the latter may be 0
        "max_abs": (sums["largest"], 1, ""),
        "mean_abs": (sums["gap"], n, ""),
        "rel": (math.sqrt(sums["gap_squares"]), against, "against is 0 everywhere"),
        "equal": (sums["equal"], sums["comparable"], ZERO),
        w1: (sums["w1"], n, ""),
    }
    for name in CASTS:
        elements, change = sums[f"{name}_elements"], sums[f"{name}_change"]
        mean_change = elements and change / elements
        same = f"a cast to {name} changes nothing"
        parts[f"{name}_times"] = (sums["gap"] / max(n, 1), mean_change, same)
    empty = "no element is finite in both" if sums["elements"] else "holds no elements"
    values: dict[str, float | None] = {}
    nulls = {}
    for name, (x, by, zero) in parts.items():
        values[name] = x / by if n and by and math.isfinite(x / by) else None
        if values[name] is None:
            nulls[name] = empty if not n else BEYOND if by else zero
    counts = ("elements", "nonfinite_of", "nonfinite_against")
    return {**{name: sums[name] for name in counts}, **values, "nulls": nulls}


def _l2_norm(x: Tensor) -> float:
    """Returns the L2 norm of a vector in fp64, block by block; 0 for an empty one."""
    squares = [
        float(part.double().square().sum()) for part in x.split(WEIGHTS_AT_ONCE) if len(x)
    ]
    return math.sqrt(sum(squares))
