"""An output beside a yardstick, row by row: everything that metrics are made of, on the device.

`compare` reduces an output and what an emulation predicts for it to sums and maxima over rows, and
`Comparison.on_host` brings all of them to the host in one transfer, as `Totals`: sums in groups of
rows, which an interval needs (`numdev.intervals`), and of which any metric is a function
(`numdev.deviation`).

Where a GPU can, all of it comes of one pass over its memory (`numdev.rowwise`), and the device is
not waited for before somebody looks at the numbers. They also say whether everything was finite; if
not, all is done again step by step.

What is finite in every row that sees a key, as nearly every output is, is held to the yardstick's
standard part, of which all that depends on no output is known. Anything else gets a part of its
own. Elements that are not usable are 0 in every error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from numdev.arrival import Arrival
from numdev.formats import dtype_of
from numdev.lazy import Later
from numdev.rowwise import output_sums, plain_sums
from numdev.wasserstein import sorted_rows, w1_of_sorted, w1_rows
from numdev.yardstick import (
    SMALLEST_SCALE,
    Part,
    Sums,
    Yardstick,
    by_head,
    finite,
    row_max,
    row_norm,
)

GROUPS = 16
"""Row i is in group i mod GROUPS, so that each group is spread over positions as the rows are."""

ALONG = ("relative", "counted", "predicted", "least_row", "expected_count")
"""The sums, those of them there are, that are also made by bin of positions."""

Numbers = np.ndarray[Any, np.dtype[np.float64]]
Along = Mapping[str, Numbers]
"""Sums by name, [bins]: over batch, heads and the rows of each bin."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """What an output comes to, on the device."""

    elements: int
    """Of a head, usable or not."""
    sums: Sums
    largest: dict[str, Tensor]
    """[B, H, rows]: of which the maximum over rows counts."""
    transport: dict[str, Tensor]
    """[H]: Wasserstein distances over all elements, those that are not usable being 0."""
    signed: Signed | None = None
    otherwise: Callable[[], Comparison] | None = None
    """The same step by step, where it has to be if its sums are not finite."""

    def on_host(self, bins: Tensor | None = None) -> Later[Totals]:
        """All of it, in one transfer that has begun; with `bins`, fp64 [rows, bins] of 0 and 1, the
        sums by bin too."""
        grouped = dealt(torch.stack(list(self.sums.values())))
        largest = torch.stack(list(self.largest.values())).amax(dim=(1, 3))
        signed = () if self.signed is None else self.signed.tensors
        along = () if bins is None else (self._along(bins),)
        given = (grouped, largest, *self.transport.values(), *signed, *along)
        arrival = Arrival([x.double() for x in given])
        layout = Layout(
            rows=next(iter(self.sums.values())).shape[2],
            elements=self.elements,
            sums=tuple(self.sums),
            largest=tuple(self.largest),
            transport=tuple(self.transport),
            signed=len(signed),
            binned=tuple(self._binned) if along else (),
        )
        return Later(functools.partial(_arrived, arrival, layout, self.otherwise, bins))

    @property
    def _binned(self) -> list[str]:
        return [name for name in ALONG if name in self.sums]

    def _along(self, bins: Tensor) -> Tensor:
        """[sums, bins]."""
        rows = torch.stack([self.sums[name] for name in self._binned]).sum(dim=(1, 2))
        by_bin: Tensor = rows @ bins
        return by_bin


def _arrived(
    arrival: Arrival,
    layout: Layout,
    otherwise: Callable[[], Comparison] | None,
    bins: Tensor | None,
) -> Totals:
    found = layout.totals(arrival.arrays)
    if otherwise is None or found.finite:
        return found
    return otherwise().on_host(bins).value


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What arrives of a comparison, in which order."""

    rows: int
    elements: int
    sums: tuple[str, ...]
    largest: tuple[str, ...]
    transport: tuple[str, ...]
    signed: int
    """How many arrays of signed differences there are."""
    binned: tuple[str, ...]
    """The sums by bin, if there are any."""

    def totals(self, arrays: Sequence[Numbers]) -> Totals:
        groups, largest, *rest = arrays
        at = len(self.transport)
        end = at + self.signed
        return Totals(
            rows=self.rows,
            elements=self.elements,
            groups=dict(zip(self.sums, groups, strict=True)),
            largest=dict(zip(self.largest, largest, strict=True)),
            transport=dict(zip(self.transport, rest[:at], strict=True)),
            signed=tuple(rest[at:end]),
            along=dict(zip(self.binned, rest[end], strict=True)) if self.binned else {},
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Totals:
    """The same on the host."""

    rows: int
    elements: int
    """Of a head, usable or not."""
    groups: dict[str, Numbers]
    """[H, GROUPS]."""
    largest: dict[str, Numbers]
    transport: dict[str, Numbers]
    signed: tuple[Numbers, ...]
    along: Along
    """Nothing where no bins were given."""

    @cached_property
    def sums(self) -> dict[str, Numbers]:
        """[H]: over all rows."""
        together = np.array(list(self.groups.values())).sum(axis=-1)
        return dict(zip(self.groups, together, strict=True))

    @property
    def finite(self) -> bool:
        """Whether the errors are, and those predicted: their squares are where they are."""
        return all(
            bool(np.isfinite(self.groups[name]).all())
            for name in ("square", "predicted")
            if name in self.groups
        )


@dataclass(frozen=True, eq=False)
class Signed:
    """Signed differences from the floor, in ulps at the term scale, by sequence."""

    features: Tensor
    """[B, H, features]: summed over rows."""
    along: Tensor
    """[B, H]: summed over rows and features, each counted along the sign of the reference."""
    counts: Tensor
    """[B, H, features]: how many there are."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.features, self.along, self.counts

    @classmethod
    def of(cls, off: Tensor, part: Part, y: Yardstick) -> Signed:
        """Of differences `off` from the floor, over the elements of `part`."""
        ulps = part.kept(off / y.spacing)
        features = ulps.sum(dim=2)
        along = ulps.mul_(y.reference.sign()).sum(dim=(2, 3))
        return cls(features, along, part.feature_count)


@dataclass(frozen=True, eq=False)
class Errors:
    """Differences from the reference, 0 where they are not usable."""

    values: Tensor
    part: Part

    @classmethod
    def of(cls, x: Tensor, y: Yardstick, part: Part) -> Errors:
        return cls(part.kept(x - y.reference), part)

    @cached_property
    def size(self) -> Tensor:
        """[B, H, rows]."""
        return row_norm(self.values)

    def within(self, part: Part) -> Errors:
        """In a smaller part."""
        return self if part is self.part else Errors(part.kept(self.values), part)


def compare(output: Tensor, y: Yardstick, expected: Tensor | None = None) -> Comparison:
    """All of an output [B, H, q_len, v_dim] beside a yardstick, and beside the output `expected` of
    the emulation it should be, if there is one."""
    o, e = widened(output), None if expected is None else widened(expected)
    found = _at_once(o, e, y)
    if found is None:
        return _step_by_step(output, o, e, y)
    _transport(found, output, y.standard, y)
    if e is None and (output is y.floor or output is y.baseline):
        return found  # they are finite, and so are the squares: the yardstick has been asked
    return replace(found, otherwise=functools.partial(_step_by_step, output, o, e, y))


def _step_by_step(output: Tensor, o: Tensor, e: Tensor | None, y: Yardstick) -> Comparison:
    found, part = _in_passes(o, e, y)
    _transport(found, output, part, y)
    return found


def _at_once(o: Tensor, e: Tensor | None, y: Yardstick) -> Comparison | None:
    """By one pass over memory, over all elements; None where that cannot be. It holds if its
    squares are finite."""
    of_one_shape = all(x is None or x.shape == y.reference.shape for x in (o, e, y.baseline))
    if not of_one_shape or not y.regular:
        return None
    yardstick = {"reference": y.reference, "floor": y.floor, "spacing": y.spacing}
    rows = output_sums(o, yardstick, e, y.baseline)
    if rows is None:
        return None
    part, size = y.standard, rows.square.sqrt()
    found = Comparison(
        elements=o[:, 0].numel(),
        sums=y.sums | part.sums | _own_sums(rows.absolute, size, part),
        largest={"max_abs": rows.max_abs, "max_ulp": rows.max_ulp},
        transport={},
        signed=Signed(rows.features, rows.along, part.feature_count),
    )
    if rows.apart is not None and rows.from_floor is not None:
        _beside_baseline(found, rows.apart, part, part, rows.from_floor, y)
    if rows.predicted is not None:
        _beside_expected(found, size, rows.predicted.sqrt(), part)
    return found


def _in_passes(o: Tensor, e: Tensor | None, y: Yardstick) -> tuple[Comparison, Part]:
    """The same of any output, step by step."""
    error, predicted = _errors(o, e, y)
    part, off = error.part, o - y.floor
    absolute = torch.linalg.vector_norm(error.values, 1, dim=-1)
    found = Comparison(
        elements=o[:, 0].numel(),
        sums=y.sums | part.sums | _own_sums(absolute, error.size, part),
        largest={
            "max_abs": row_max(error.values),
            "max_ulp": row_max(part.kept(error.values / y.spacing)),
        },
        transport={},
        signed=Signed.of(off, _for_bias(part, y), y),
    )
    if part is not y.standard:
        differs = (finite(o) != y.floor_finite) & y.seen
        found.sums["nonfinite"] = differs.sum(dim=-1).double()
    if y.baseline is not None:
        both = y.beside(part, y.baseline)
        judged = y.beside(both, y.floor)
        apart = row_norm(both.kept(o.double() - y.baseline)).square()  # of one narrow dtype, maybe
        _beside_baseline(found, apart, both, judged, row_max(judged.kept(off)), y)
    if predicted is not None:
        same = error.within(predicted.part)
        _beside_expected(found, same.size, predicted.size, predicted.part)
    return found, part


def _own_sums(absolute: Tensor, size: Tensor, part: Part) -> Sums:
    return {
        "absolute": absolute,
        "square": size.square(),
        "relative": part.relative(size).square(),
    }


def _transport(found: Comparison, output: Tensor, part: Part, y: Yardstick) -> None:
    """Adds the Wasserstein distances; the output is sorted in the format it is in, and once where
    that will do."""
    ordered = _sorted(output, part, y)
    found.transport["w1"] = w1_of_sorted(part.sorted_reference, ordered)
    if y.unrounded is not None:
        found.transport["precision_w1"] = y.precision_w1
    if y.baseline is not None:
        if y.baseline_fp32 is not None:
            found.transport["low_precision_w1"] = y.low_precision_w1
        if y.baseline_lower is not None:
            found.transport["lower_w1"] = y.lower_w1
        both = y.beside(part, y.baseline)
        if both is not part:
            ordered = _sorted(output, both, y)
        found.transport["from_baseline_w1"] = w1_of_sorted(ordered, both.sorted_baseline)


def _sorted(output: Tensor, part: Part, y: Yardstick) -> Tensor:
    """An output's elements, in order; the yardstick's own floor and baseline are known in it."""
    if output is y.floor:
        return part.sorted_floor
    if output is y.baseline:
        return part.sorted_baseline
    return sorted_rows(by_head(part.kept(widened(output))))


def _beside_baseline(
    found: Comparison, apart: Tensor, both: Part, judged: Part, from_floor: Tensor, y: Yardstick
) -> None:
    """Adds what is apart from the baseline over `both`, and the parts of flash-attention's own rule
    over `judged`."""
    found.sums.update(apart=apart, apart_count=both.count)
    if dtype_of(y.format).itemsize > 1:  # PyTorch has no arithmetic in 8-bit formats
        plain, shifted = judged.allowed
        found.largest.update(from_floor=from_floor, plain_from_floor=plain, shifted=shifted)


def compare_precision(y: Yardstick) -> Comparison:
    """The distances of the reference from that of the unrounded inputs."""
    k = y.known
    if k is None or k.unrounded is None or k.moved is None:
        assert y.unrounded is not None
        return compare_plain(y.reference, y.unrounded, y.empty, y.precision_w1)
    assert k.moved_absolute is not None
    assert k.moved_most is not None
    return Comparison(
        elements=y.reference[:, 0].numel(),
        sums={
            "count": y.standard.count,
            "absolute": k.moved_absolute,
            "square": k.moved,
            "reference": k.unrounded,
            "empty_rows": y.empty.double(),
            "nonfinite": torch.zeros_like(k.moved),
        },
        largest={"max_abs": k.moved_most},
        transport={"w1": y.precision_w1},
    )


def compare_plain(
    output: Tensor, reference: Tensor, empty: Tensor, w1: Tensor | None = None
) -> Comparison:
    """Distances alone, of what has no floor; shapes as in `deviation.measure_plain`. `w1`: their
    Wasserstein distance, if it is known."""
    if output.ndim == 3:
        output, reference = output[..., None], reference[..., None]
    o, seen = widened(output), ~empty[..., None]
    rows = plain_sums(o, reference, empty)
    if rows is not None:
        names = ("count", "absolute", "square", "reference", "nonfinite")
        return Comparison(
            elements=o[:, 0].numel(),
            sums={name: getattr(rows, name) for name in names} | {"empty_rows": empty.double()},
            largest={"max_abs": rows.max_abs},
            transport={"w1": w1_rows(by_head(rows.o), by_head(rows.r)) if w1 is None else w1},
        )
    here, there = finite(o), finite(reference)
    usable = seen & here & there
    a, b = (torch.where(usable, x, 0.0) for x in (o, reference))
    error = a - b
    sums = {
        "count": usable.sum(dim=-1).double(),
        "absolute": torch.linalg.vector_norm(error, 1, dim=-1),
        "square": row_norm(error).square(),
        "reference": row_norm(b).square(),
        "empty_rows": empty.double(),
        "nonfinite": ((here != there) & seen).sum(dim=-1).double(),
    }
    return Comparison(
        elements=o[:, 0].numel(),
        sums=sums,
        largest={"max_abs": row_max(error)},
        transport={"w1": w1_rows(by_head(a), by_head(b)) if w1 is None else w1},
    )


def typical_row(predicted: Tensor, usable: Tensor, y: Yardstick) -> Tensor:
    """[H]: the predicted row_rel, or that of an error of u |r_i| / sqrt(12) if it is larger.
    `predicted` is 0 where it is not usable."""
    part = y.standard.where(usable)
    sizes = torch.stack([part.predicted(row_norm(predicted)), part.least])
    return _typical(part.relative(sizes).square(), part)


def row_ratios(
    error: Tensor, predicted: Tensor, typical: Tensor, usable: Tensor, y: Yardstick
) -> Tensor:
    """[B, H, rows]: |error_i| over what is predicted for the row; 0 in a row without an error.

    What is predicted is at least typical of the head (`typical_row` times |term scale_i|): that
    one row's roundings happen to cancel is no prediction. It is also at least u |r_i| / sqrt(12),
    and u SMALLEST_SCALE.
    `error` and `predicted` are 0 where they are not usable.
    """
    part = y.standard.where(usable)
    return _ratios(row_norm(error), part.predicted(row_norm(predicted)), typical, part)


def dealt(rows: Tensor) -> Tensor:
    """[..., B, H, rows], summed over the batch and by group of rows: [..., H, GROUPS]."""
    missing = -rows.shape[-1] % GROUPS
    padded = torch.nn.functional.pad(rows, (0, missing)) if missing else rows
    grouped: Tensor = padded.unflatten(-1, (-1, GROUPS)).sum(dim=(-4, -2))
    return grouped


def widened(x: Tensor) -> Tensor:
    """A tensor one can compute with, of the same values: PyTorch has no arithmetic in 8 bits."""
    return x.detach() if x.element_size() > 1 else x.detach().float()


def _errors(o: Tensor, expected: Tensor | None, y: Yardstick) -> tuple[Errors, Errors | None]:
    """The output's errors and those predicted, over all elements that are usable: for the second,
    in both. What is not finite shows in the rows' sizes, of which one is then not finite either."""
    error = Errors.of(o, y, y.standard)
    predicted = None if expected is None else Errors.of(expected, y, y.standard)
    sizes = (error.size, None if predicted is None else predicted.size)
    fine = _finite(*sizes) if y.settled else (False, False)
    if not fine[0]:
        error = Errors.of(o, y, y.standard.where(y.shown, finite(o)))
    if expected is not None and not all(fine):
        predicted = Errors.of(expected, y, error.part.where(finite(expected)))
    return error, predicted


def _finite(*rows: Tensor | None) -> tuple[bool, ...]:
    """Of the rows of each, whether all are."""
    sums = torch.stack([x.sum() for x in rows if x is not None])
    return tuple(math.isfinite(x) for x in sums.tolist())


def _for_bias(part: Part, y: Yardstick) -> Part:
    if part is y.standard:
        return y.distinct
    return part.where(y.floor_finite, ~y.repeated[..., None])


def _beside_expected(found: Comparison, size: Tensor, predicted: Tensor, part: Part) -> None:
    """Adds the sums of expected_ratio, and the rows' ratios to what is predicted for each, from the
    sizes of rows' errors and of those predicted."""
    predicted = part.predicted(predicted)
    squares = part.relative(torch.stack([size, predicted, part.least])).square()
    against, expected, least = squares
    found.sums.update(
        against=against,
        predicted=expected,
        least_row=least,
        expected_count=part.sums["counted"],
    )
    typical = _typical(squares[1:], part)
    found.largest["worst_row"] = _ratios(size, predicted, typical, part)


def _typical(squares: Tensor, part: Part) -> Tensor:
    """[H]: the rms over rows of what is predicted relative to the term scale, or of the least that
    may be if it is larger, from the squares of both, [2, B, H, rows]."""
    most = squares.sum(dim=(1, 3)).amax(dim=0)
    typical: Tensor = (most / part.judged_count).sqrt()
    return typical


def _ratios(size: Tensor, predicted: Tensor, typical: Tensor, part: Part) -> Tensor:
    """As `row_ratios`, of the rows' sizes."""
    allowed = torch.maximum(predicted, typical[None, :, None] * part.scale)
    allowed = torch.maximum(allowed, part.least)
    allowed = allowed.clamp_min(part.format.unit_roundoff * SMALLEST_SCALE)
    return torch.where(size > 0, size / allowed, 0.0)
