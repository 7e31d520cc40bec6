"""An output beside a yardstick: sums and maxima over the elements of each row, on the
device.

`row_sums` is what every metric of an output is a function of; `to_host` deals rows to
groups, which intervals of sampled rows need (`numdev.metrics.intervals`), and brings
everything to the host in one transfer. Elements that are not usable are 0 in every error.
On CUDA one Triton kernel with the same results takes the place of the steps of PyTorch
(`numdev.metrics.row_sums_triton`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from numdev.formats import dtype_of
from numdev.metrics import yardstick
from numdev.metrics.sampling import Strata

HAS_TRITON = importlib.util.find_spec("triton") is not None
# Elements of an output up to which nothing is compiled: an estimate, not measured
SMALL = 1 << 24
GROUPS = 16  # row i is in group i mod GROUPS, so that each group is spread over positions
# Also summed by bin
ALONG = ("relative", "counted", "predicted", "least_row", "expected_count")
Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSums:
    sums: yardstick.Sums
    largest: dict[str, Tensor]  # [B, H, rows], of which the largest over rows counts
    signed: tuple[Tensor, ...] = ()
    """Signed differences from the floor in ulps at the term scale, by sequence: sums over
    rows [B, H, features]; along the reference's sign [B, H]; how many elements [B, H,
    features]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Totals:
    """The same on the host."""

    rows: int  # in the groups
    # [H, GROUPS], summed over the batch and the rows of a group
    groups: dict[str, Numbers]
    largest: dict[str, Numbers]  # [H]
    signed: tuple[Numbers, ...]
    along: Mapping[str, Numbers] = field(default_factory=dict)
    """[bins]: sums over batch, heads and the rows of each bin; empty without bins."""
    # [sums, H]: over rows that stood out, which are in no group
    certain: Numbers | None = None
    # [H]: over those drawn, beside them
    drawn: Mapping[str, Numbers] = field(default_factory=dict)
    # How many rows those in groups stand for, where they are a sample
    left: int | None = None

    @cached_property
    def sums(self) -> dict[str, Numbers]:
        """[H]: over all rows, or what is estimated of all of them."""
        together = np.array(list(self.groups.values())).sum(axis=-1)
        if self.certain is not None and self.left is not None:
            together = together * (self.left / max(self.rows, 1)) + self.certain
        return dict(zip(self.groups, together, strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class ElementSums:
    """What takes a pass over an output's elements. [B, H, rows] unless said otherwise."""

    absolute: Tensor  # sum of |o - r|
    size: Tensor  # sqrt of the sum of (o - r)^2
    max_abs: Tensor
    max_ulp: Tensor  # the largest |o - r| over the spacing at the term scale
    features: Tensor  # [B, H, features]: (o - floor) over the spacing, summed over rows
    along: Tensor  # [B, H]: the same along sign(r), summed over rows and features
    predicted: Tensor | None  # as `size`, of the expected output
    apart: Tensor | None  # sum of (o - baseline)^2
    from_floor: Tensor | None  # the largest |o - floor|


def row_sums(
    output: Tensor, y: yardstick.Yardstick, expected: Tensor | None = None
) -> RowSums:
    """An output [B, H, rows, features] beside a yardstick and, if any, the emulation
    `expected`."""
    o, e = (
        yardstick.widened(output),
        None if expected is None else yardstick.widened(expected),
    )
    fine = yardstick.finite(o)
    whole = bool((fine | ~y.seen).all())
    rows = y.rows if whole else y.rows_where(y.usable & fine)
    every = whole and y.regular  # elements of everything but perhaps the expected output
    beside = None if y.baseline is None else rows.usable
    if beside is not None and y.baseline_finite is not None and not every:
        beside = beside & y.baseline_finite
    compared = rows.usable if e is None else rows.usable & yardstick.finite(e)
    alike = e is None or bool((compared == rows.usable).all())
    compiled = o.is_cuda and HAS_TRITON and o.numel() > SMALL
    if compiled and every and alike:
        from numdev.metrics import row_sums_triton

        elements = row_sums_triton.element_sums(o, e, y)
    elif every and alike:
        elements = element_sums(o, e, y)
    else:
        elements = element_sums(o, e, y, rows.usable, beside, compared)
    sums = y.sums | rows.sums
    sums |= {
        "absolute": elements.absolute,
        "square": elements.size.square(),
        "relative": rows.relative(elements.size).square(),
        "nonfinite": (
            torch.zeros_like(rows.size)
            if every
            else ((fine != y.floor_finite) & y.seen).sum(dim=-1).double()
        ),
    }
    largest = {"max_abs": elements.max_abs, "max_ulp": elements.max_ulp}
    if (
        beside is not None
        and elements.apart is not None
        and elements.from_floor is not None
    ):
        sums |= {
            "apart": elements.apart,
            "apart_count": beside.sum(dim=-1, dtype=torch.float64),
        }
        if dtype_of(y.format).itemsize > 1:  # PyTorch has no arithmetic in 8 bits
            largest |= {"from_floor": elements.from_floor}
            largest |= y.allowance if every else y.fa_allowance(beside)
    if elements.predicted is not None:
        same, size = rows, elements.size
        if not alike:
            same, size = (
                y.rows_where(compared),
                yardstick.row_norm(yardstick.kept(o - y.reference, compared)),
            )
        predicted = same.predicted(elements.predicted)
        against, square, least = same.relative(
            torch.stack([size, predicted, same.least])
        ).square()
        sums |= {
            "against": against,
            "predicted": square,
            "least_row": least,
            "expected_count": same.judged.double(),
        } | _in_own_unit(size, predicted, same)
        largest["worst_row"] = _ratios(size, predicted, same)
    observed = y.observed if whole else y.observed_where(rows.usable)
    return RowSums(
        sums=sums, largest=largest, signed=(elements.features, elements.along, observed)
    )


def _in_own_unit(
    size: Tensor, predicted: Tensor, rows: yardstick.RowScales
) -> yardstick.Sums:
    """Rows' squared errors, what is predicted of them, the least that may be, and the
    larger of the two with its square, which tell how many rows there are in effect: in
    the unit of the tensor, where rows of large errors count for more."""
    squared, least = predicted.square(), rows.least.clamp_min(rows.least_allowed).square()
    weight = torch.maximum(squared, least)
    return {
        "own_against": size.square(),
        "own_predicted": squared,
        "own_least": least,
        "own_weight": weight,
        "own_weight_squared": weight.square(),
    }


def element_sums(
    o: Tensor,
    e: Tensor | None,
    y: yardstick.Yardstick,
    usable: Tensor | None = None,
    beside: Tensor | None = None,
    compared: Tensor | None = None,
) -> ElementSums:
    """By steps of PyTorch. `usable` elements count, `beside` those where the baseline
    does too, and `compared` those where the expected output does; without them all count,
    in every respect."""
    # In one layout, whatever the output's: the order of sums goes with the strides.
    error, off = (o - y.reference).contiguous(), (o - y.floor).contiguous()
    ulps = off / y.spacing
    # The baseline may be of the output's own narrow dtype.
    plain = None if y.baseline is None else o.double() - y.baseline
    expected = None if e is None else e - y.reference
    in_ulps = error / y.spacing
    if usable is not None:
        error, in_ulps = yardstick.kept(error, usable), yardstick.kept(in_ulps, usable)
        ulps = yardstick.kept(ulps, usable & y.floor_finite & ~y.repeated[..., None])
    if plain is not None and beside is not None:
        plain = yardstick.kept(plain, beside)
        off = yardstick.kept(off, beside & y.floor_finite)
    if expected is not None and compared is not None:
        expected = yardstick.kept(expected, compared)
    return ElementSums(
        absolute=torch.linalg.vector_norm(error, 1, dim=-1),
        size=yardstick.row_norm(error),
        max_abs=yardstick.row_max(error),
        max_ulp=yardstick.row_max(in_ulps),
        features=ulps.sum(dim=2),
        along=ulps.mul_(y.reference.sign()).sum(dim=(2, 3)),
        predicted=None if expected is None else yardstick.row_norm(expected),
        apart=None if plain is None else yardstick.row_norm(plain).square(),
        from_floor=None if plain is None else yardstick.row_max(off),
    )


def plain_sums(output: Tensor, reference: Tensor, empty: Tensor) -> RowSums:
    """Distances alone, of what has no floor: [B, H, rows(, features)]; `empty` [B, H,
    rows]."""
    if output.ndim == 3:
        output, reference = output[..., None], reference[..., None]
    o = yardstick.widened(output)
    here, there, seen = (
        yardstick.finite(o),
        yardstick.finite(reference),
        ~empty[..., None],
    )
    usable = seen & here & there
    a, b = yardstick.kept(o, usable), yardstick.kept(reference, usable)
    error = a - b
    sums = {
        "count": usable.sum(dim=-1).double(),
        "absolute": torch.linalg.vector_norm(error, 1, dim=-1),
        "square": yardstick.row_norm(error).square(),
        "reference": yardstick.row_norm(b).square(),
        "empty_rows": empty.double(),
        "nonfinite": ((here != there) & seen).sum(dim=-1).double(),
    }
    return RowSums(sums=sums, largest={"max_abs": yardstick.row_max(error)})


def to_host(
    x: RowSums, bins: Tensor | None = None, of: int | Strata | None = None
) -> Totals:
    """All of it in one transfer, arguments as of `deviation.measure`."""
    binned = tuple(name for name in ALONG if name in x.sums and bins is not None)
    sums = torch.stack(list(x.sums.values()))
    grouped = sums[..., ~of.suspects] if isinstance(of, Strata) else sums
    parts = [_dealt(grouped)]
    parts.append(torch.stack(list(x.largest.values())).amax(dim=(1, 3)))
    parts += x.signed
    if bins is not None:
        by_bin = torch.stack([x.sums[name] for name in binned]).sum(dim=(-3, -2)) @ bins
        parts.append(by_bin)
    apart = (of.suspects, of.drawn) if isinstance(of, Strata) else ()
    parts += [sums[..., rows].sum(dim=(1, 3)) for rows in apart]
    groups, largest, *rest = _copied(parts)
    end, rows = len(x.signed), grouped.shape[-1]
    return Totals(
        rows=rows,
        groups=dict(zip(x.sums, groups, strict=True)),
        largest=dict(zip(x.largest, largest, strict=True)),
        signed=tuple(rest[:end]),
        along=dict(zip(binned, rest[end], strict=True)) if bins is not None else {},
        certain=rest[-2] if apart else None,
        drawn=dict(zip(x.sums, rest[-1], strict=True)) if apart else {},
        left=of.of - (sums.shape[-1] - rows) if isinstance(of, Strata) else of,
    )


def row_ratios(
    error: Tensor, predicted: Tensor, usable: Tensor, y: yardstick.Yardstick
) -> Tensor:
    """[B, H, rows]: |error_i| over what is predicted for the row; 0 in a row without an
    error. `error` and `predicted` [B, H, rows, features] are 0 where they are not
    usable."""
    rows = y.rows_where(y.usable & usable)
    sizes = rows.predicted(yardstick.row_norm(predicted))
    return _ratios(yardstick.row_norm(error), sizes, rows)


def _ratios(size: Tensor, predicted: Tensor, rows: yardstick.RowScales) -> Tensor:
    """What is predicted for a row is at least typical of the head (the rms over rows of
    what is predicted relative to |term scale_i|): that one row's roundings happen to
    cancel is no prediction. It is also at least u |r_i| / sqrt(12), and u
    SMALLEST_SCALE."""
    squares = rows.relative(torch.stack([predicted, rows.least])).square()
    typical = (squares.sum(dim=(1, 3)).amax(dim=0) / rows.judged.sum(dim=(0, 2))).sqrt()
    allowed = torch.maximum(predicted, typical[None, :, None] * rows.scale)
    allowed = torch.maximum(allowed, rows.least).clamp_min(rows.least_allowed)
    return torch.where(size > 0, size / allowed, 0.0)


def _dealt(rows: Tensor) -> Tensor:
    """[names, B, H, rows], summed over the batch and by group of rows: [names, H,
    GROUPS]."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % GROUPS))
    grouped: Tensor = padded.unflatten(-1, (-1, GROUPS)).sum(dim=(-4, -2))
    return grouped


def _copied(tensors: Sequence[Tensor]) -> list[Numbers]:
    """Tensors as fp64 arrays on the host, by one transfer."""
    flat = torch.cat([x.double().flatten() for x in tensors]).cpu().numpy()
    ends = np.cumsum([x.numel() for x in tensors])[:-1]
    parts = zip(np.split(flat, ends), tensors, strict=True)
    return [part.reshape(x.shape) for part, x in parts]
