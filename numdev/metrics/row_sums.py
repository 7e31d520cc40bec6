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

import numpy as np
import torch
from numpy.typing import NDArray
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
Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSums:
    """Sums and maxima over the elements of each row of an output, on the device, by name:
    what every metric is computed from."""

    sums: yardstick.Sums
    largest: dict[str, Tensor]  # [B, H, rows], of which the largest over rows counts
    signed: tuple[Tensor, ...] = ()
    """Signed differences from the floor in ulps at the term scale, by sequence: sums over
    rows [B, H, features]; along the reference's sign [B, H]; how many elements [B, H,
    features]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Totals:
    """Row sums on the host, dealt to groups."""

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
        """Returns the sums over all rows [H], or estimates of these from a sample: the
        sums over the groups, scaled to the rows they stand for, plus those of
        `certain`."""
        together = np.array(list(self.groups.values())).sum(axis=-1)
        if self.certain is not None and self.left is not None:
            together = together * (self.left / max(self.rows, 1)) + self.certain
        return dict(zip(self.groups, together, strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class ElementSums:
    """The sums and maxima that take a pass over an output's elements. [B, H, rows] unless
    said otherwise."""

    absolute: Tensor  # sum of |o - r|
    size: Tensor  # sqrt of the sum of (o - r)^2
    max_abs: Tensor
    max_ulp: Tensor  # the largest |o - r| over the spacing at the term scale
    features: Tensor  # [B, H, features]: (o - floor) over the spacing, summed over rows
    along: Tensor  # [B, H]: the same along sign(r), summed over rows and features
    predicted: Tensor | None  # as `size`, of the expected output
    from_baseline: Tensor | None  # sum of (o - baseline)^2
    from_floor: Tensor | None  # the largest |o - floor|


@dataclass(frozen=True, kw_only=True, eq=False)
class Counted:
    """Which elements of an output count, and for what. bool [B, H, rows, features] unless
    said otherwise."""

    output: Tensor  # where the output is finite
    rows: yardstick.RowScales  # over the elements where the reference is finite too
    beside: Tensor | None  # where the baseline is finite too; None without one
    compared: Tensor  # where the expected output, if there is one, is finite too
    is_finite: bool  # the output, in every row that sees a key
    is_regular: bool  # everything but perhaps the expected output counts everywhere
    is_alike: bool  # `compared` is all that counts

    @classmethod
    def of(cls, o: Tensor, e: Tensor | None, y: yardstick.Yardstick) -> Counted:
        """Returns which elements count of an output `o`, for a yardstick `y`, and of an
        expected output `e` (None: there is none), both in dtypes that PyTorch computes
        in. `o` [B, H, rows, features]."""
        fine = yardstick.finite(o)
        is_finite = bool((fine | ~y.seen).all())
        rows = y.rows if is_finite else y.rows_where(y.usable & fine)
        is_regular = is_finite and y.regular
        beside = None if y.baseline is None else rows.usable
        if beside is not None and y.baseline_finite is not None and not is_regular:
            beside = beside & y.baseline_finite
        compared = rows.usable if e is None else rows.usable & yardstick.finite(e)
        return cls(
            output=fine,
            rows=rows,
            beside=beside,
            compared=compared,
            is_finite=is_finite,
            is_regular=is_regular,
            is_alike=e is None or bool((compared == rows.usable).all()),
        )

    def nonfinite(self, y: yardstick.Yardstick) -> Tensor:
        """Returns how many elements of each row are not finite where the floor is, or the
        reverse: fp64 [B, H, rows]; rows that see no key have 0."""
        if self.is_regular:
            return torch.zeros_like(self.rows.size)
        fine = self.output
        return ((fine != y.floor_finite) & y.seen).sum(dim=-1).double()


def row_sums(
    output: Tensor, y: yardstick.Yardstick, expected: Tensor | None = None
) -> RowSums:
    """Returns the sums over each row of an output [B, H, rows, features], measured
    against a yardstick and, where it is given, the emulation's output `expected` of the
    same shape."""
    o = yardstick.widened(output)
    e = None if expected is None else yardstick.widened(expected)
    counted = Counted.of(o, e, y)
    rows = counted.rows
    elements = _sums_of_elements(o, e, y, counted)
    sums = y.sums | rows.sums
    sums |= {
        "absolute": elements.absolute,
        "square": elements.size.square(),
        "relative": rows.relative(elements.size).square(),
        "nonfinite": counted.nonfinite(y),
    }
    largest = {"max_abs": elements.max_abs, "max_ulp": elements.max_ulp}
    beside = counted.beside
    if beside is not None and elements.from_baseline is not None:
        sums["from_baseline"] = elements.from_baseline
        sums["from_baseline_count"] = beside.sum(dim=-1, dtype=torch.float64)
        # PyTorch has no arithmetic in 8 bits
        if elements.from_floor is not None and dtype_of(y.format).itemsize > 1:
            largest["from_floor"] = elements.from_floor
            largest |= y.allowance if counted.is_regular else y.fa_allowance(beside)
    if elements.predicted is not None:
        scales, size = rows, elements.size
        if not counted.is_alike:
            error = yardstick.zeroed_outside(o - y.reference, counted.compared)
            scales, size = y.rows_where(counted.compared), yardstick.row_norm(error)
        predicted = scales.predicted(elements.predicted)
        sums |= _beside_prediction(size, predicted, scales)
        largest["worst_row"] = _ratios(size, predicted, scales)
    observed = y.observed if counted.is_finite else y.observed_where(rows.usable)
    return RowSums(
        sums=sums, largest=largest, signed=(elements.features, elements.along, observed)
    )


def _sums_of_elements(
    o: Tensor, e: Tensor | None, y: yardstick.Yardstick, counted: Counted
) -> ElementSums:
    """Returns the sums over elements by the fastest way: by the Triton kernel for an
    output on a GPU of more than SMALL elements of which everything counts, if Triton is
    installed; else by steps of PyTorch. `e`: the expected output or None."""
    if not (counted.is_regular and counted.is_alike):
        usable = counted.rows.usable
        return element_sums(o, e, y, usable, counted.beside, counted.compared)
    if o.is_cuda and HAS_TRITON and o.numel() > SMALL:
        from numdev.metrics import row_sums_triton

        return row_sums_triton.element_sums(o, e, y)
    return element_sums(o, e, y)


def _beside_prediction(
    size: Tensor, predicted: Tensor, rows: yardstick.RowScales
) -> yardstick.Sums:
    """Returns by name the squares of rows' errors `size` and of the errors `predicted`
    for them, relative to the row's terms and in the unit of the tensor; rows without a
    relative error have 0 in the former. [B, H, rows] each."""
    against, square, least = rows.relative(
        torch.stack([size, predicted, rows.least])
    ).square()
    relative = {
        "against": against,
        "predicted": square,
        "least_row": least,
        "expected_count": rows.judged.double(),
    }
    return relative | _in_own_unit(size, predicted, rows)


def _in_own_unit(
    size: Tensor, predicted: Tensor, rows: yardstick.RowScales
) -> yardstick.Sums:
    """Returns by name the squares of rows' errors, of what is predicted for them, of the
    least that may be predicted, and the larger of these two with its square, from which
    follows how many rows there are in effect. In the unit of the tensor, where rows of
    large errors count for more; [B, H, rows] each."""
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
    """Returns the sums over the elements of an output `o` [B, H, rows, features] by steps
    of PyTorch. `e`: the expected output or None. Masks, bool of o's shape: elements of
    `usable` count, those of `beside` in comparisons with the baseline, those of
    `compared` in `predicted`; None: all count."""
    # In one layout, whatever the output's: the order of sums goes with the strides.
    error, off = (o - y.reference).contiguous(), (o - y.floor).contiguous()
    ulps = off / y.spacing
    # The baseline may be of the output's own narrow dtype.
    plain = None if y.baseline is None else o.double() - y.baseline
    expected = None if e is None else e - y.reference
    in_ulps = error / y.spacing
    if usable is not None:
        error = yardstick.zeroed_outside(error, usable)
        in_ulps = yardstick.zeroed_outside(in_ulps, usable)
        observed = usable & y.floor_finite & ~y.repeated[..., None]
        ulps = yardstick.zeroed_outside(ulps, observed)
    if plain is not None and beside is not None:
        plain = yardstick.zeroed_outside(plain, beside)
        off = yardstick.zeroed_outside(off, beside & y.floor_finite)
    if expected is not None and compared is not None:
        expected = yardstick.zeroed_outside(expected, compared)
    features = ulps.sum(dim=2)
    along = ulps.mul_(y.reference.sign()).sum(dim=(2, 3))  # in place: `ulps` is done with
    from_baseline = from_floor = None
    if plain is not None:
        from_baseline = yardstick.row_norm(plain).square()
        from_floor = yardstick.row_max(off)
    return ElementSums(
        absolute=torch.linalg.vector_norm(error, 1, dim=-1),
        size=yardstick.row_norm(error),
        max_abs=yardstick.row_max(error),
        max_ulp=yardstick.row_max(in_ulps),
        features=features,
        along=along,
        predicted=None if expected is None else yardstick.row_norm(expected),
        from_baseline=from_baseline,
        from_floor=from_floor,
    )


def plain_sums(output: Tensor, reference: Tensor, empty: Tensor) -> RowSums:
    """Returns the sums over each row for the distances alone of a tensor without a floor:
    [B, H, rows] or [B, H, rows, features]; `empty` bool [B, H, rows], rows that are left
    out. Elements that are not finite in either are left out and, where only one is,
    counted in `nonfinite`."""
    if output.ndim == 3:
        output, reference = output[..., None], reference[..., None]
    o = yardstick.widened(output)
    o_finite, reference_finite = yardstick.finite(o), yardstick.finite(reference)
    seen = ~empty[..., None]
    usable = seen & o_finite & reference_finite
    exact = yardstick.zeroed_outside(reference, usable)
    error = yardstick.zeroed_outside(o, usable) - exact
    sums = {
        "count": usable.sum(dim=-1).double(),
        "absolute": torch.linalg.vector_norm(error, 1, dim=-1),
        "square": yardstick.row_norm(error).square(),
        "reference": yardstick.row_norm(exact).square(),
        "empty_rows": empty.double(),
        "nonfinite": ((o_finite != reference_finite) & seen).sum(dim=-1).double(),
    }
    return RowSums(sums=sums, largest={"max_abs": yardstick.row_max(error)})


def to_host(
    x: RowSums, bins: Tensor | None = None, of: int | Strata | None = None
) -> Totals:
    """Deals rows to groups and returns all sums on the host, copied in one transfer.
    `bins`: which row is in which bin of positions, fp64 [rows, bins] of 0 and 1; None: no
    sums by bin. `of`: where rows are a sample, how many rows the call has, or the strata
    they come from; None: all rows are there."""
    binned = tuple(name for name in ALONG if name in x.sums and bins is not None)
    sums = torch.stack(list(x.sums.values()))
    in_groups = sums[..., ~of.suspects] if isinstance(of, Strata) else sums
    parts = [_dealt(in_groups)]
    parts.append(torch.stack(list(x.largest.values())).amax(dim=(1, 3)))
    parts += x.signed
    if bins is not None:
        by_bin = torch.stack([x.sums[name] for name in binned]).sum(dim=(-3, -2)) @ bins
        parts.append(by_bin)
    if isinstance(of, Strata):
        parts += [sums[..., rows].sum(dim=(1, 3)) for rows in (of.suspects, of.drawn)]
    groups, largest, *others = _copied(parts)
    signed = tuple(others.pop(0) for _ in x.signed)
    along = dict(zip(binned, others.pop(0), strict=True)) if bins is not None else {}
    rows = in_groups.shape[-1]
    certain: Numbers | None = None
    drawn: dict[str, Numbers] = {}
    if isinstance(of, Strata):
        certain, sums_drawn = others
        drawn = dict(zip(x.sums, sums_drawn, strict=True))
        left: int | None = of.of - (sums.shape[-1] - rows)
    else:
        left = of
    return Totals(
        rows=rows,
        groups=dict(zip(x.sums, groups, strict=True)),
        largest=dict(zip(x.largest, largest, strict=True)),
        signed=signed,
        along=along,
        certain=certain,
        drawn=drawn,
        left=left,
    )


def row_ratios(
    error: Tensor, predicted: Tensor, usable: Tensor, y: yardstick.Yardstick
) -> Tensor:
    """Returns |error_i| over what is predicted for the row, [B, H, rows]; 0 in a row
    without an error. `error` and `predicted`, both minus the reference, [B, H, rows,
    features], are 0 where `usable` (bool, same shape) is False."""
    rows = y.rows_where(y.usable & usable)
    sizes = rows.predicted(yardstick.row_norm(predicted))
    return _ratios(yardstick.row_norm(error), sizes, rows)


def _ratios(size: Tensor, predicted: Tensor, rows: yardstick.RowScales) -> Tensor:
    """Returns rows' errors `size` over what is `predicted`, all [B, H, rows]; 0 where
    `size` is 0. What is predicted counts as at least what is typical of the head (the rms
    over rows of what is predicted relative to |term scale_i|), since that one row's
    roundings happen to cancel is no prediction; and as at least u |r_i| / sqrt(12) and u
    SMALLEST_SCALE."""
    squares = rows.relative(torch.stack([predicted, rows.least])).square()
    typical = (squares.sum(dim=(1, 3)).amax(dim=0) / rows.judged.sum(dim=(0, 2))).sqrt()
    allowed = torch.maximum(predicted, typical[None, :, None] * rows.scale)
    allowed = torch.maximum(allowed, rows.least).clamp_min(rows.least_allowed)
    return torch.where(size > 0, size / allowed, 0.0)


def _dealt(rows: Tensor) -> Tensor:
    """Returns [names, B, H, rows] summed over the batch and over the rows of each group:
    [names, H, GROUPS]. Row i is in group i mod GROUPS."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % GROUPS))
    grouped: Tensor = padded.unflatten(-1, (-1, GROUPS)).sum(dim=(-4, -2))
    return grouped


def _copied(tensors: Sequence[Tensor]) -> list[Numbers]:
    """Returns tensors (at least one) as fp64 arrays of their shapes on the host, by one
    transfer."""
    flat = torch.cat([x.double().flatten() for x in tensors]).cpu().numpy()
    ends = np.cumsum([x.numel() for x in tensors])[:-1]
    parts = zip(np.split(flat, ends), tensors, strict=True)
    return [part.reshape(x.shape) for part, x in parts]
