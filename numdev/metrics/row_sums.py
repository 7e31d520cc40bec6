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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from numdev.formats import dtype_of, each_finite
from numdev.metrics import yardstick
from numdev.metrics.row_samples import Strata

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
    sums: dict[str, Numbers]
    """[H], over all rows that were measured; or with strata estimates of those over all
    rows of the call: the sums over the groups, scaled to the rows they stand for, plus
    those of `certain`."""
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

    rows: yardstick.RowScales  # over the elements where the reference is finite too
    beside: Tensor | None  # where the baseline is finite too; None without one
    compared: Tensor  # where the expected output, if there is one, is finite too
    nonfinite: Tensor
    """fp64 [B, H, rows]: in how many elements the output is not finite where the floor
    is, or the reverse."""
    is_finite: bool  # the output, in every row that sees a key
    is_regular: bool  # everything but perhaps the expected output counts everywhere
    is_alike: bool  # `compared` is all that counts

    @classmethod
    def of(cls, o: Tensor, e: Tensor | None, y: yardstick.Yardstick) -> Counted:
        """Returns which elements count of an output `o` [B, H, rows, features], for a
        yardstick `y`, and of an expected output `e` of its shape (None: there is none).
        Both are in dtypes that PyTorch computes in, so of no 8-bit format."""
        # One wait for the device
        is_finite, *of_expected = each_finite([o] if e is None else [o, e])
        rows = y.rows
        nonfinite = torch.zeros_like(rows.size)
        if not (is_finite and y.regular):
            fine, seen = yardstick.finite(o), ~y.empty[..., None]
            is_finite = is_finite or bool((fine | ~seen).all())
            rows = y.rows if is_finite else y.rows_where(y.usable & fine)
            nonfinite = yardstick.count_of((fine != y.floor_finite) & seen, dim=-1)
        is_regular = is_finite and y.regular
        beside = None if y.baseline is None else rows.usable
        if beside is not None and not is_regular and y.baseline_finite is not None:
            beside = beside & y.baseline_finite
        compared, is_alike = rows.usable, all(of_expected)
        if e is not None and not is_alike:
            compared = rows.usable & yardstick.finite(e)
            is_alike = compared.equal(rows.usable)
        return cls(
            rows=rows,
            beside=beside,
            compared=compared,
            nonfinite=nonfinite,
            is_finite=is_finite,
            is_regular=is_regular,
            is_alike=is_alike,
        )


def row_sums(
    output: Tensor, y: yardstick.Yardstick, expected: Tensor | None = None
) -> RowSums:
    """Returns the sums over each row of an output [B, H, rows, features], measured
    against a yardstick and the emulation's output `expected` of the same shape; None:
    nothing is compared with a prediction. What is summed of the output is over the
    elements of rows that see a key where output and reference are finite. Beside the
    baseline or `expected`, that must be finite there too. The signed sums also leave out
    elements whose floor is not finite, and rows that repeat others. Sums of the yardstick
    alone (floor, baseline) do not depend on the output. `nonfinite` counts elements that
    are finite in the output and not in the floor, or the reverse, in rows that see a
    key."""
    o = yardstick.widened(output)
    e = None if expected is None else yardstick.widened(expected)
    counted = Counted.of(o, e, y)
    rows = counted.rows
    elements = _fastest_element_sums(o, e, y, counted, is_floor=output is y.floor)
    sums = y.sums | rows.sums
    sums |= {
        "absolute": elements.absolute,
        "square": elements.size.square(),
        "relative": (elements.size / rows.unit).square(),
        "nonfinite": counted.nonfinite,
    }
    largest = {"max_abs": elements.max_abs, "max_ulp": elements.max_ulp}
    beside = counted.beside
    if beside is not None and elements.from_baseline is not None:
        sums["from_baseline"] = elements.from_baseline
        sums["from_baseline_count"] = (
            rows.count if beside is rows.usable else yardstick.count_of(beside, dim=-1)
        )
        # PyTorch has no arithmetic in 8 bits
        if elements.from_floor is not None and dtype_of(y.format).itemsize > 1:
            largest["from_floor"] = elements.from_floor
            largest |= y.allowance if counted.is_regular else y.fa_allowance(beside)
    if elements.predicted is not None:
        scales, size = rows, elements.size
        if not counted.is_alike:
            error = torch.where(counted.compared, o - y.reference, 0.0)
            scales, size = y.rows_where(counted.compared), yardstick.row_norm(error)
        predicted = scales.predicted(elements.predicted)
        relative = (torch.stack([predicted, scales.least, size]) / scales.unit).square()
        sums |= _prediction_sums(size, predicted, relative, scales)
        largest["worst_row"] = _ratios_to_prediction(
            size, predicted, relative[:2], scales
        )
    signed = elements.features, elements.along, rows.observed
    return RowSums(sums=sums, largest=largest, signed=signed)


def _fastest_element_sums(
    o: Tensor,
    e: Tensor | None,
    y: yardstick.Yardstick,
    counted: Counted,
    *,
    is_floor: bool,
) -> ElementSums:
    """Returns the sums over elements by the fastest way. That is the Triton kernel where
    Triton is installed and the output is on a GPU, has more than SMALL elements of 16
    bits or more, and all of them count, beside `e` too; else steps of PyTorch. `e`: the
    expected output or None."""
    if not (counted.is_regular and counted.is_alike):
        masks = counted.rows.usable, counted.beside, counted.compared
        return element_sums(o, e, y, *masks, is_floor=is_floor)
    if o.is_cuda and HAS_TRITON and o.numel() > SMALL and o.itemsize > 1:
        from numdev.metrics import row_sums_triton

        return row_sums_triton.element_sums(o, e, y)
    return element_sums(o, e, y, is_floor=is_floor)


def _prediction_sums(
    size: Tensor, predicted: Tensor, relative: Tensor, rows: yardstick.RowScales
) -> yardstick.Sums:
    """Returns squares by name, [B, H, rows] each: of rows' errors `size`, of the errors
    `predicted` for the rows, and of the least that may be predicted. As `against`,
    `predicted` and `least_row` they are relative to the row's terms, and 0 in rows
    without a relative error; `expected_count` is 1 in the other rows. As `own_against`,
    `own_predicted` and `own_least` they are in the unit of the tensor, and `own_weight`
    is the larger of the last two. From `against_squared` and `own_weight_squared`,
    squares of squares, follows how many rows there are in effect. `relative` [3, B, H,
    rows]: the squares, relative, of what is predicted, of the least that may be, and of
    the errors."""
    square, least, against = relative
    sums = {
        "against": against,
        "against_squared": against.square(),
        "predicted": square,
        "least_row": least,
        "expected_count": rows.judged.double(),
    }
    # In the unit of the tensor, where rows of large errors count for more
    squared = predicted.square()
    least = rows.least.clamp_min(rows.least_allowed).square()
    weight = torch.maximum(squared, least)
    return sums | {
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
    *,
    is_floor: bool = False,
) -> ElementSums:
    """Returns the sums over the elements of an output `o` [B, H, rows, features] by steps
    of PyTorch, in a dtype that it computes in. `e`: the expected output; None:
    `predicted` is None. Without a baseline in `y`, `from_baseline` and `from_floor` are
    None. Masks, bool of o's shape: elements of `usable` count, those of `beside` in
    `from_baseline` and `from_floor`, those of `compared` in `predicted`; None: all count.
    With a mask, elements whose floor is not finite are left out beside the floor, and
    rows that repeat others in `features` and `along`. `is_floor`: whether `o` is the
    floor itself, which is at no distance from itself."""
    # In one layout, whatever the output's: the order of sums goes with the strides.
    error = (o - y.reference).contiguous()
    # The baseline may be of the output's own narrow dtype.
    plain = None if y.baseline is None else o.double() - y.baseline
    expected = None if e is None else e - y.reference
    if usable is not None:
        error = torch.where(usable, error, 0.0)
    if plain is not None and beside is not None:
        plain = torch.where(beside, plain, 0.0)
    if expected is not None and compared is not None:
        expected = torch.where(compared, expected, 0.0)
    largest = error.abs()
    in_ulps = largest / y.spacing
    if usable is not None:  # the spacing may be NaN elsewhere
        in_ulps = torch.where(usable, in_ulps, 0.0)
    if is_floor:
        features, along = torch.zeros_like(error[:, :, 0]), error.new_zeros(o.shape[:2])
        from_floor = error.new_zeros(o.shape[:3])
    else:
        features, along, from_floor = _beside_floor(o, y, usable, beside)
    from_baseline = None if plain is None else yardstick.row_norm(plain).square()
    return ElementSums(
        absolute=torch.linalg.vector_norm(error, 1, dim=-1),
        size=yardstick.row_norm(error),
        max_abs=largest.amax(dim=-1),
        max_ulp=in_ulps.amax(dim=-1),
        features=features,
        along=along,
        predicted=None if expected is None else yardstick.row_norm(expected),
        from_baseline=from_baseline,
        from_floor=None if plain is None else from_floor,
    )


def _beside_floor(
    o: Tensor, y: yardstick.Yardstick, usable: Tensor | None, beside: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `features`, `along` and `from_floor` of `ElementSums` for an output `o` [B,
    H, rows, features]. Bool of its shape: `usable` says which elements count in the first
    two, `beside` which in the last; None: all. With a mask, elements whose floor is not
    finite do not count either, nor, in the first two, do rows that repeat others."""
    off = (o - y.floor).contiguous()
    ulps = off / y.spacing
    if usable is not None:
        observed = usable & y.floor_finite & ~y.repeated[..., None]
        ulps = torch.where(observed, ulps, 0.0)
    if beside is not None:
        off = torch.where(beside & y.floor_finite, off, 0.0)
    features = ulps.sum(dim=2)
    along = ulps.mul_(y.reference.sign()).sum(dim=(2, 3))  # in place: `ulps` is done with
    return features, along, yardstick.row_max(off)


def plain_sums(output: Tensor, reference: Tensor, empty: Tensor) -> RowSums:
    """Returns the sums over each row for the distances alone of a tensor without a floor,
    [B, H, rows] or [B, H, rows, features]: count, absolute, square, reference (the sum of
    its squares), empty_rows and nonfinite, and max_abs among the largest. `empty`: bool
    [B, H, rows], rows that are left out of all but empty_rows. Elements that are not
    finite in one tensor or in both are left out; `nonfinite` counts those that are finite
    in exactly one."""
    if output.ndim == 3:
        output, reference = output[..., None], reference[..., None]
    o = yardstick.widened(output)
    o_finite, reference_finite = yardstick.finite(o), yardstick.finite(reference)
    seen = ~empty[..., None]
    usable = seen & o_finite & reference_finite
    exact = torch.where(usable, reference, 0.0)
    error = torch.where(usable, o, 0.0) - exact
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
    `bins`: which row is in which bin of positions, fp64 [rows, bins] of 0 and 1, for the
    sums of `row_sums`; None: no sums by bin. `of`: where rows are a sample, how many rows
    the call has, or the strata they come from; None: all rows are there. With a number
    `sums` are those of the sampled rows, not scaled up. With strata they are estimates
    for the call; rows that stood out are in no group, and `certain` has their sums."""
    binned = tuple(name for name in ALONG if name in x.sums and bins is not None)
    sums = torch.stack(list(x.sums.values()))
    in_groups = sums[..., ~of.suspects] if isinstance(of, Strata) else sums
    parts = [_sum_by_group(in_groups)]
    parts.append(torch.stack(list(x.largest.values())).amax(dim=(1, 3)))
    parts += x.signed
    if bins is not None:
        by_bin = torch.stack([x.sums[name] for name in binned]).sum(dim=(-3, -2)) @ bins
        parts.append(by_bin)
    if isinstance(of, Strata):
        parts += [sums[..., rows].sum(dim=(1, 3)) for rows in (of.suspects, of.drawn)]
    groups, largest, *others = _copy_to_host(parts)
    signed = tuple(others.pop(0) for _ in x.signed)
    along = dict(zip(binned, others.pop(0), strict=True)) if bins is not None else {}
    rows = in_groups.shape[-1]
    certain: Numbers | None = None
    drawn: dict[str, Numbers] = {}
    left = None if isinstance(of, Strata) else of
    with np.errstate(all="ignore"):  # as of the metrics of these sums
        together = groups.sum(axis=-1)
        if isinstance(of, Strata):
            certain, sums_drawn = others
            drawn = dict(zip(x.sums, sums_drawn, strict=True))
            left = of.of - (sums.shape[-1] - rows)
            together = together * (left / max(rows, 1)) + certain
    return Totals(
        rows=rows,
        groups=dict(zip(x.sums, groups, strict=True)),
        sums=dict(zip(x.sums, together, strict=True)),
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
    without an error. What is predicted is joined with what fp32 arithmetic may err, and
    counts as at least what is typical of the head (`_ratios_to_prediction`), u |r_i| /
    sqrt(12) and u SMALLEST_SCALE. `error` and `predicted`, both minus the reference, [B,
    H, rows, features], are 0 where `usable` (bool, same shape) is False."""
    rows = y.rows_where(y.usable & usable)
    sizes = rows.predicted(yardstick.row_norm(predicted))
    squares = (torch.stack([sizes, rows.least]) / rows.unit).square()
    return _ratios_to_prediction(yardstick.row_norm(error), sizes, squares, rows)


def _ratios_to_prediction(
    size: Tensor, predicted: Tensor, squares: Tensor, rows: yardstick.RowScales
) -> Tensor:
    """Returns rows' errors `size` over what is `predicted`, all [B, H, rows]; 0 where
    `size` is 0. What is predicted counts as at least u |r_i| / sqrt(12) and u
    SMALLEST_SCALE. It also counts as at least what is typical of the head, since that one
    row's roundings happen to cancel is no prediction. Typical is a root mean square over
    the judged rows of all sequences, relative to |term scale_i|: of what is predicted, or
    of the least that may be where this is larger. It is 0 in a head without a judged row.
    `squares` [2, B, H, rows]: of what is predicted and of the least that may be,
    relative."""
    of_head = squares.sum(dim=(1, 3)).amax(dim=0)
    typical = (of_head / rows.judged_count.clamp_min(1)).sqrt()
    allowed = torch.maximum(predicted, typical[None, :, None] * rows.scale)
    allowed = torch.maximum(allowed, rows.least).clamp_min(rows.least_allowed)
    return torch.where(size > 0, size / allowed, 0.0)


def _sum_by_group(rows: Tensor) -> Tensor:
    """Returns [names, B, H, rows] summed over the batch and over the rows of each group:
    [names, H, GROUPS]. Row i is in group i mod GROUPS."""
    if missing := -rows.shape[-1] % GROUPS:
        rows = torch.nn.functional.pad(rows, (0, missing))
    grouped: Tensor = rows.unflatten(-1, (-1, GROUPS)).sum(dim=(-4, -2))
    return grouped


def _copy_to_host(tensors: Sequence[Tensor]) -> list[Numbers]:
    """Returns tensors (at least one) as fp64 arrays of their shapes on the host, by one
    transfer."""
    flat = torch.cat([x.double().flatten() for x in tensors]).cpu().numpy()
    parts, end = [], 0
    for x in tensors:
        start, end = end, end + x.numel()
        parts.append(flat[start:end].reshape(x.shape))
    return parts
