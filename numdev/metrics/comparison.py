"""An output beside a yardstick, row by row: everything that metrics are made of, on the device.

`compare` reduces an output and what an emulation predicts for it to sums and maxima over rows, and
`Comparison.on_host` brings all of them to the host in one transfer, as `Totals`: sums in groups of
rows, which an interval needs (`numdev.metrics.intervals`), and of which any metric is a function
(`numdev.metrics.deviation`).

Where a GPU can, all of it comes of one pass over its memory (`numdev.metrics.rowwise`), and the device is
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
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from numdev.formats import dtype_of
from numdev.metrics.arrival import Arrival
from numdev.metrics.lazy import Later
from numdev.metrics.rowwise import (
    BY_ROW,
    GROUPS,
    LARGEST,
    PLAIN,
    SUMS,
    OutputHeads,
    output_heads,
    plain_heads,
)
from numdev.metrics.wasserstein import sorted_rows, w1_of_sorted, w1_rows
from numdev.metrics.yardstick import Part, Sums, Yardstick, by_head, finite, row_max, row_norm

ALONG = ("relative", "counted", "predicted", "least_row", "expected_count")
"""The sums, those of them there are, that are also made by bin of positions."""

TRANSPORT = ("w1", "from_baseline_w1")
"""The Wasserstein distances of an output."""

Numbers = np.ndarray[Any, np.dtype[np.float64]]
Along = Mapping[str, Numbers]
"""Sums by name, [bins]: over batch, heads and the rows of each bin."""


class Comparison(Protocol):
    """What an output comes to, on the device."""

    def on_host(self, bins: Tensor | None = None) -> Later[Totals]:
        """All of it, in one transfer that has begun; with `bins`, fp64 [rows, bins] of 0 and 1, the
        sums by bin too."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ByRow:
    """Row by row."""

    elements: int
    """Of a head, usable or not."""
    sums: Sums
    largest: dict[str, Tensor]
    """[B, H, rows]: of which the maximum over rows counts."""
    transport: dict[str, Tensor]
    """[H]: Wasserstein distances over all elements, those that are not usable being 0."""
    signed: Signed | None = None

    def on_host(self, bins: Tensor | None = None) -> Later[Totals]:
        grouped = dealt(torch.stack(list(self.sums.values())))
        largest = list(self.largest.values())
        most = [torch.stack(largest).amax(dim=(1, 3))] if largest else []
        binned = tuple(name for name in ALONG if name in self.sums and bins is not None)
        signed = () if self.signed is None else self.signed.tensors
        given = [grouped, *most, *self.transport.values(), *signed]
        if bins is not None:
            given.append(by_bin(torch.stack([self.sums[name] for name in binned]), bins))
        layout = Layout(
            rows=next(iter(self.sums.values())).shape[2],
            elements=self.elements,
            sums=tuple(self.sums),
            largest=tuple(self.largest),
            transport=tuple(self.transport),
            signed=len(signed),
            binned=binned,
        )
        arrival = Arrival([x.double() for x in given])
        return Later(lambda: layout.totals(arrival.arrays))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What arrives of a comparison row by row, in which order."""

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
        groups, *rest = arrays
        largest = rest.pop(0) if self.largest else ()
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
class ByHead:
    """By head already: a GPU took all rows of an output, of a regular yardstick."""

    heads: OutputHeads
    yardstick: Yardstick
    elements: int
    lacking: frozenset[str]
    """What is not to be had of this output, of all that is made."""
    otherwise: Callable[[], ByRow]
    """The same row by row, where it has to be if something was not finite."""

    def on_host(self, bins: Tensor | None = None) -> Later[Totals]:
        x, beside = self.heads, _yardsticks_own(self.yardstick, bins)
        along = [] if bins is None else [by_bin(x.by_row, bins)]
        arrival = Arrival([x.sums, x.largest, x.w1, x.features, x.along, *along])
        return Later(functools.partial(self._totals, arrival, beside, bins))

    def _totals(self, arrival: Arrival, beside: Later[Totals], bins: Tensor | None) -> Totals:
        sums, largest, w1, features, signs, *along = arrival.arrays
        own = beside.value
        groups = dict(zip(SUMS, sums, strict=True))
        groups["against"] = groups["relative"]
        binned = dict(zip(BY_ROW, along[0], strict=True)) if along else {}
        found = Totals(
            rows=own.rows,
            elements=self.elements,
            groups=self._had(own.groups | groups),
            largest=self._had(own.largest | dict(zip(LARGEST, largest, strict=True))),
            transport=own.transport | dict(zip(TRANSPORT, w1, strict=False)),
            signed=(features, signs, np.full_like(features, own.rows)),
            along=self._had({**own.along, **binned}),
        )
        return found if found.finite else self.otherwise().on_host(bins).value

    def _had(self, made: Mapping[str, Numbers]) -> dict[str, Numbers]:
        return {name: x for name, x in made.items() if name not in self.lacking}


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainByHead:
    """Distances alone, by head already."""

    table: Tensor
    """As `rowwise.plain_heads` has it."""
    rows: int
    elements: int
    w1: Tensor | None
    """[H], where it was known and is not in the table."""

    def on_host(self, bins: Tensor | None = None) -> Later[Totals]:
        """There is nothing by bin."""
        arrival = Arrival([self.table] if self.w1 is None else [self.table, self.w1])
        return Later(functools.partial(self._totals, arrival))

    def _totals(self, arrival: Arrival) -> Totals:
        (*groups, most, transport), *known = arrival.arrays
        return Totals(
            rows=self.rows,
            elements=self.elements,
            groups=dict(zip(PLAIN, groups, strict=True)),
            largest={"max_abs": most.max(axis=1)},
            transport={"w1": known[0] if known else transport.sum(axis=1)},
            signed=(),
            along={},
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Totals:
    """All of it on the host."""

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
        """Whether the errors are, those predicted (their squares are where they are), and what they
        come to in ulps."""
        errors = [self.groups[name] for name in ("square", "predicted") if name in self.groups]
        in_ulps = [self.largest[name] for name in ("max_ulp",) if name in self.largest]
        return all(bool(np.isfinite(x).all()) for x in (*errors, *in_ulps, *self.signed))


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
    return _at_once(output, o, e, y) or _step_by_step(output, o, e, y)


def _step_by_step(output: Tensor, o: Tensor, e: Tensor | None, y: Yardstick) -> ByRow:
    found, part = _in_passes(o, e, y)
    _transport(found, output, part, y)
    return found


def _at_once(output: Tensor, o: Tensor, e: Tensor | None, y: Yardstick) -> ByHead | None:
    """By one pass over memory, over all elements; None where that cannot be."""
    of_one_shape = all(x is None or x.shape == y.reference.shape for x in (o, e, y.baseline))
    if not of_one_shape or not y.regular:
        return None
    part = y.standard

    def ordered() -> list[Tensor]:
        beside = [] if y.baseline is None else [part.sorted_baseline]
        return [_sorted(output, part, y), part.sorted_reference, *beside]

    yardstick = {"reference": y.reference, "floor": y.floor, "spacing": y.spacing}
    heads = output_heads(o, yardstick, part.scales, ordered, expected=e, baseline=y.baseline)
    if heads is None:
        return None
    return ByHead(
        heads=heads,
        yardstick=y,
        elements=o[:, 0].numel(),
        lacking=_lacking(e, y),
        otherwise=functools.partial(_step_by_step, output, o, e, y),
    )


def _lacking(e: Tensor | None, y: Yardstick) -> frozenset[str]:
    lacking: set[str] = set()
    if e is None:
        lacking |= {"against", "predicted", "least_row", "expected_count", "worst_row"}
    if y.baseline is None:
        lacking |= {"apart"}
    if y.baseline is None or not _has_rule(y):
        lacking |= {"from_floor"}
    return frozenset(lacking)


def _yardsticks_own(y: Yardstick, bins: Tensor | None) -> Later[Totals]:
    """What a regular yardstick has for every output, in every name that may be asked for; brought
    to the host once."""
    for given, found in y.brought:
        if given is bins:
            own: Later[Totals] = found
            return own
    part = y.standard
    transport, largest = {}, {}
    if y.unrounded is not None:
        transport["precision_w1"] = y.precision_w1
    sums = {
        **y.sums,
        **part.sums,
        "least_row": part.relative(part.least).square(),
        "expected_count": part.sums["counted"],
    }
    if y.baseline is not None:
        sums["apart_count"] = part.count
        transport |= _of_baselines(y)
        largest = _allowed(part) if _has_rule(y) else {}
    found = ByRow(
        elements=y.reference[:, 0].numel(), sums=sums, largest=largest, transport=transport
    ).on_host(bins)
    y.brought.append((bins, found))
    return found


def _in_passes(o: Tensor, e: Tensor | None, y: Yardstick) -> tuple[ByRow, Part]:
    """The same of any output, step by step."""
    error, predicted = _errors(o, e, y)
    part, off = error.part, o - y.floor
    absolute = torch.linalg.vector_norm(error.values, 1, dim=-1)
    found = ByRow(
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


def _transport(found: ByRow, output: Tensor, part: Part, y: Yardstick) -> None:
    """Adds the Wasserstein distances; the output is sorted in the format it is in, and once where
    that will do."""
    ordered = _sorted(output, part, y)
    found.transport["w1"] = w1_of_sorted(part.sorted_reference, ordered)
    if y.unrounded is not None:
        found.transport["precision_w1"] = y.precision_w1
    if y.baseline is not None:
        found.transport.update(_of_baselines(y))
        both = y.beside(part, y.baseline)
        if both is not part:
            ordered = _sorted(output, both, y)
        found.transport["from_baseline_w1"] = w1_of_sorted(ordered, both.sorted_baseline)


def _of_baselines(y: Yardstick) -> dict[str, Tensor]:
    """W1 of the baseline here from those in other formats, where there are any."""
    found = {}
    if y.baseline_fp32 is not None:
        found["low_precision_w1"] = y.low_precision_w1
    if y.baseline_lower is not None:
        found["lower_w1"] = y.lower_w1
    return found


def _sorted(output: Tensor, part: Part, y: Yardstick) -> Tensor:
    """An output's elements, in order; the yardstick's own floor and baseline are known in it."""
    if output is y.floor:
        return part.sorted_floor
    if output is y.baseline:
        return part.sorted_baseline
    return sorted_rows(by_head(part.kept(widened(output))))


def _beside_baseline(
    found: ByRow, apart: Tensor, both: Part, judged: Part, from_floor: Tensor, y: Yardstick
) -> None:
    """Adds what is apart from the baseline over `both`, and the parts of flash-attention's own rule
    over `judged`."""
    found.sums.update(apart=apart, apart_count=both.count)
    if _has_rule(y):
        found.largest.update(from_floor=from_floor, **_allowed(judged))


def _has_rule(y: Yardstick) -> bool:
    """Whether flash-attention's own rule is for its format: PyTorch has no arithmetic in 8 bits."""
    return dtype_of(y.format).itemsize > 1


def _allowed(judged: Part) -> dict[str, Tensor]:
    plain, shifted = judged.allowed
    return {"plain_from_floor": plain, "shifted": shifted}


def compare_precision(y: Yardstick) -> Comparison:
    """The distances of the reference from that of the unrounded inputs."""
    k = y.known
    if k is None or k.unrounded is None or k.moved is None:
        assert y.unrounded is not None
        return compare_plain(y.reference, y.unrounded, y.empty, y.precision_w1)
    assert k.moved_absolute is not None
    assert k.moved_most is not None
    return ByRow(
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
    o = widened(output)
    table = plain_heads(o, reference, empty, sorted_rows if w1 is None else None)
    if table is not None:
        return PlainByHead(table=table, rows=o.shape[2], elements=o[:, 0].numel(), w1=w1)
    here, there, seen = finite(o), finite(reference), ~empty[..., None]
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
    return ByRow(
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


def by_bin(rows: Tensor, bins: Tensor) -> Tensor:
    """[..., B, H, rows], summed over the batch, the heads and the rows of each bin: [..., bins]."""
    summed: Tensor = rows.sum(dim=(-3, -2)) @ bins
    return summed


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


def _beside_expected(found: ByRow, size: Tensor, predicted: Tensor, part: Part) -> None:
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
    allowed = allowed.clamp_min(part.least_allowed)
    return torch.where(size > 0, size / allowed, 0.0)
