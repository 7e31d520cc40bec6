"""What may be erred, element by element, and how far an error is beyond it.

Of a tensor the mean square error D of the reference's rounded runs is what plain code
errs: at least ulp^2/12, and a tenth of its mean everywhere, since that an element's few
runs hit it is luck. A kernel may also err as much as the reference does as PyTorch runs
it here (`plain`), sum by sum.

A ratio of root mean squares over numbers that D weighs counts as one of
n_eff = (sum D)^2 / sum D^2 numbers: that is how luck widens it (`OF_ALL`, and the largest
of m slices, `of_slices`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import stdev
from typing import NamedTuple

import torch
from torch import Tensor

from numdev.formats import FORMATS, Format, round_to, ulp

SHARE_OF_MEAN = 0.1  # of the mean of D, that is added everywhere
OF_ALL = 1.5  # standard deviations that ln of the ratio over all may be above 0
OF_RUNS = 5.0  # the same in standard deviations of the runs' own errors
LEAST_Z = 1.0  # the same of the largest of m slices, in units of sqrt(2 ln m / n_eff)
TIMES_SOUND = 2.0  # or so many times as many as sound runs have
LEAST_EFFECTIVE = 4.0  # numbers that a slice has in effect, below which it is not judged
LEAST_ELEMENT = 5.0  # what single elements of a sound kernel reach, in sqrt(D)
OF_U = 1 / 8  # of a unit roundoff: what an output may lean by
OF_U_IN_FLOAT32 = 1.0  # the same in float32 and wider: libraries' functions lean so much
TIMES_LEAN = 3.0  # or so many times what the yardstick's runs lean
LEAST_FOR_LEAN = 16.0  # numbers in effect, below which a lean is not told from luck
BLOCKS = (1, 16, 128)  # places of an axis that are a slice together
# Times what is predicted, and what luck adds to a ratio over all: beyond it the plain
# reference is none
NO_YARDSTICK = 3.0
# Times the error of a reference that is no yardstick: what errs by less is not judged,
# since nobody knows what its operations err
NOT_TOLD_FROM = 10.0
TINY = 1e-300
NOT_WORSE = (
    "the reference itself errs by {ratio}× what its operations explain, as PyTorch runs "
    "it here, and this by less than ten times as much"
)
TOO_FEW = "too few numbers to tell a lean from luck"


class Lean(NamedTuple):
    """How an error goes along with the truth: a slope on it, or a mean over its rms,
    `size` in unit roundoffs; and the t statistic of that."""

    size: float
    t: float


class Element(NamedTuple):
    """The element that errs most beside what is allowed for it: error over allowed error,
    and its indices."""

    ratio: float
    place: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The slice of a tensor (places or blocks of one axis, or a row) that errs most
    beside what is allowed for it: `ratio` of rms errors, how large chance may make it
    (`luck`), and its `place` in words."""

    ratio: float
    luck: float
    place: str
    z: float  # of ln ratio, in units of sqrt(2 ln m / n_eff)


@dataclass(frozen=True, kw_only=True)
class Excess:
    """How far a tensor's error is beyond what is allowed. Ratios are of root mean
    squares; `luck` is how many times larger chance may make one. A field that is None was
    not judged: `nulls` says why, by the names of `BesideReference`."""

    ratio: float | None = None
    luck: float | None = None
    predicted: float | None = None
    effective: float | None = None
    worst_slice: Slice | None = None
    worst_element: Element | None = None
    element_luck: float | None = None
    slope: Lean | None = None
    slope_luck: float | None = None
    shift: Lean | None = None
    shift_luck: float | None = None
    # At least 1 where it is known what may be erred: by the operations, or the reference
    yardstick: float | None = None
    nulls: dict[str, str] = field(default_factory=dict)

    @property
    def is_doubtful(self) -> bool:
        """Whether the error over all, in a slice or of an element is larger than luck
        makes it, so that a closer look decides."""
        over_all = (self.ratio or 0.0) > (self.luck or 1.0)
        worst, element = self.worst_slice, self.worst_element
        in_slice = worst is not None and worst.ratio > worst.luck
        of_one = element is not None and element.ratio > (self.element_luck or 1.0)
        return over_all or in_slice or of_one

    @property
    def is_leaning(self) -> bool:
        """Whether slope or shift is more than OF_U unit roundoffs times its luck,
        `slope_luck` or `shift_luck`; False for those that are None."""
        pairs = ((self.slope, self.slope_luck), (self.shift, self.shift_luck))
        return any(
            lean is not None and abs(lean.size) > OF_U * (luck or 1.0)
            for lean, luck in pairs
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Errors:
    """What may be erred in one tensor: the truth in fp64, and the errors of runs. An
    element that is not finite in the truth or in a run is not `usable`: it is 0 in all of
    these."""

    truth: Tensor
    format: Format
    runs: tuple[Tensor, ...]  # errors of rounded runs
    sound: tuple[Tensor, ...]  # of further runs
    plain: Tensor  # of the reference as PyTorch runs it
    usable: Tensor  # bool
    further: tuple[Tensor, ...] = ()  # of rounded runs for a closer look
    trusts_plain: bool = False  # whether `plain` may be erred, however much it is

    @classmethod
    def of(
        cls,
        truth: Tensor,
        fmt: Format,
        runs: Sequence[Tensor],
        sound: Sequence[Tensor],
        plain: Tensor,
    ) -> Errors:
        """Returns what may be erred in a tensor. `truth`: fp64; `runs`: results of
        rounded runs, first the one that rounds to nearest; `sound`: those of further
        runs; `plain`: that of the reference as PyTorch runs it. All are fp64 of the
        truth's shape."""
        every = (truth, *runs, *sound, plain)
        usable = torch.stack([x.isfinite() for x in every]).all(dim=0)

        def error(x: Tensor) -> Tensor:
            """Returns the error of a run; 0 where an element is not usable."""
            return torch.where(usable, x - truth, 0.0)

        return cls(
            truth=torch.where(usable, truth, 0.0),
            format=fmt,
            runs=tuple(map(error, runs)),
            sound=tuple(map(error, sound)),
            plain=error(plain),
            usable=usable,
        )

    def with_further(self, runs: Sequence[Tensor]) -> Errors:
        """Returns these errors with `further` replaced by what more rounded runs
        returned, fp64, of the truth's shape. An element that is not finite in one of
        these runs is not usable any more."""
        usable = torch.stack([self.usable, *(x.isfinite() for x in runs)]).all(dim=0)

        def error(x: Tensor) -> Tensor:
            """Returns an error; 0 where an element is not usable."""
            return torch.where(usable, x, 0.0)

        return Errors(
            truth=error(self.truth),
            format=self.format,
            runs=tuple(map(error, self.runs)),
            sound=tuple(map(error, self.sound)),
            plain=error(self.plain),
            usable=usable,
            further=tuple(error(x - self.truth) for x in runs),
        )

    @cached_property
    def floor(self) -> Tensor:
        """Returns the truth rounded once to the format; 0 where an element is not
        usable."""
        return round_to(self.truth, self.format)

    @cached_property
    def mean_square(self) -> Tensor:
        """Returns D of each element, the mean squared error of plain code: that of the
        rounded runs, at least ulp^2/12, plus SHARE_OF_MEAN of the mean over elements; 0
        where an element is not usable."""
        return self._mean_square_of(self.explaining)

    def _mean_square_of(self, errors: Sequence[Tensor]) -> Tensor:
        """Returns D of each element from the errors of these runs, at least one; the
        first is the run that rounds to nearest. With `further` runs that first one weighs
        as much as without them. 0 where an element is not usable."""
        d = torch.stack([e.square() for e in errors]).mean(dim=0)
        if self.further:  # the run to nearest, with half of the square, counts as before
            at_random = torch.stack([e.square() for e in errors[1:]]).mean(dim=0)
            count = len(self.runs)
            d = (errors[0].square() + (count - 1) * at_random) / count
        d = torch.maximum(d, ulp(self.truth, self.format).square() / 12)
        d = torch.where(self.usable, d, 0.0)
        mean = d.sum() / self.usable.sum().clamp_min(1)
        return torch.where(self.usable, d + SHARE_OF_MEAN * mean, 0.0)

    @property
    def explaining(self) -> tuple[Tensor, ...]:
        """Returns the errors of the runs that D is made of: the one that rounds to
        nearest first, then those that round at random."""
        return (*self.runs, *self.further)

    @cached_property
    def rms(self) -> float:
        """Returns the root of the mean of D over usable elements; 0 without any."""
        count = max(1, int(self.usable.sum()))
        return math.sqrt(float(self.mean_square.sum()) / count)

    @cached_property
    def plain_ratio(self) -> float:
        """Returns the rms error of the reference as PyTorch runs it over the root of the
        mean of D; 0 without usable elements."""
        return _root(self.plain.square().sum(), self.mean_square.sum())

    @cached_property
    def effective(self) -> float:
        """Returns how many numbers D is of, in effect: (sum D)^2 / sum D^2; 0 without
        usable elements."""
        d = self.mean_square
        return float(d.sum()) ** 2 / max(float(d.square().sum()), TINY)

    @cached_property
    def own_limit(self) -> float:
        """Returns the `plain_ratio` beyond which the reference is no yardstick:
        NO_YARDSTICK, times what chance allows a tensor of few numbers. Without usable
        elements it is NO_YARDSTICK."""
        if not self.effective:
            return NO_YARDSTICK
        return NO_YARDSTICK * math.exp(OF_ALL / math.sqrt(self.effective))

    @property
    def is_yardstick(self) -> bool:
        """Whether the reference as PyTorch runs it errs as its operations explain: its
        `plain_ratio` is at most `own_limit`."""
        return self.plain_ratio <= self.own_limit

    @cached_property
    def allowed_plain(self) -> Tensor:
        """Returns the squared errors of the reference as PyTorch runs it. Where the
        reference is no yardstick these are 0 everywhere. With `trusts_plain` they are
        then NOT_TOLD_FROM^2 times the squared errors, each counted as at least their
        mean; 0 where an element is not usable."""
        square = self.plain.square()
        if self.is_yardstick:
            return square
        if not self.trusts_plain:
            return torch.zeros_like(square)
        mean = square.sum() / self.usable.sum().clamp_min(1)
        return torch.where(self.usable, square.clamp_min(mean) * NOT_TOLD_FROM**2, 0.0)

    @cached_property
    def of_runs(self) -> tuple[float, float]:
        """Returns two numbers of sound runs: the largest `Slice.z` of their worst slices,
        and the largest ratio of an element's error to what is allowed for it. Runs are
        all but the one that rounds to nearest, each beside the D of the others, since a
        run beside a D that it is part of looks better than a kernel will. Both are 0
        where no run rounds at random, and the first also where no run has a slice."""
        zs, ratios = [0.0], [0.0]
        for run in self.at_random:
            others = [e for e in self.explaining if e is not run]
            if not others:
                continue
            d = self._mean_square_of(others)
            ratios.append(_worst_element(run, d, self.allowed_plain).ratio)
            worst = _worst_slice(run, d, self.allowed_plain, 0.0)
            zs += [] if worst is None else [worst.z]
        return max(zs), max(ratios)

    @cached_property
    def at_random(self) -> tuple[Tensor, ...]:
        """Returns the errors of all runs but the one that rounds to nearest."""
        return (*self.runs[1:], *self.sound, *self.further)

    @cached_property
    def luck_of_runs(self) -> float:
        """Returns how many times larger the error of one run may be than that of another
        by chance, from 1 to e: by the scatter of the errors of runs that round at random;
        1 for fewer than two of these. Errors that elements share (a scalar of each row,
        rounded once) thus count as few, however many elements have them."""
        logs = [
            float(e.square().sum().sqrt().clamp_min(TINY).log()) for e in self.at_random
        ]
        if len(logs) < 2:
            return 1.0
        return math.exp(min(1.0, OF_RUNS * stdev(logs)))

    @cached_property
    def luck_of_leans(self) -> tuple[float, float]:
        """Returns how many times more than OF_U of a unit roundoff slope and shift may
        be: TIMES_LEAN times the largest of any run. It is at least 1 each, and in float32
        and wider formats OF_U_IN_FLOAT32 over OF_U. The reference as PyTorch runs it
        counts among the runs where it is a yardstick."""
        plain = (self.plain,) if self.is_yardstick else ()
        every = [_leans(e, self) for e in (*self.runs, *self.sound, *plain)]
        slopes = [abs(slope.size) for slope, _ in every]
        shifts = [abs(shift.size) for _, shift in every]
        slope, shift = (TIMES_LEAN * max(x) / OF_U for x in (slopes, shifts))
        is_wide = self.format.contains(FORMATS["float32"])
        least = OF_U_IN_FLOAT32 / OF_U if is_wide else 1.0
        return max(least, slope), max(least, shift)

    def beside(self, output: Tensor) -> Excess:
        """Returns how far an output, fp64 of the truth's shape, is beyond what is
        allowed. Where the reference is no yardstick, and the output errs by more than its
        operations explain but by less than NOT_TOLD_FROM times the reference, there are
        only `predicted`, `effective` and a `yardstick` below 1. Elements of the output
        that are not finite count as without an error. Where no element is usable the
        result has no numbers. Where too few are, it has no slice or no leans. `nulls`
        says why."""
        excess = self._beyond(output)
        is_beyond = excess.is_doubtful or excess.is_leaning
        if not is_beyond or self.is_yardstick:
            return excess
        if replace(self, trusts_plain=True)._beyond(output).is_doubtful:
            return excess
        why = NOT_WORSE.format(ratio=f"{self.plain_ratio:.3g}")
        names = ("reference_ratio", "slice_ratio", "element_ratio", "slope", "shift")
        return Excess(
            predicted=excess.predicted,
            effective=excess.effective,
            yardstick=self.own_limit / self.plain_ratio,
            nulls=dict.fromkeys(names, why),
        )

    def _beyond(self, output: Tensor) -> Excess:
        """Returns how far an output (fp64, of the truth's shape) is beyond what is
        allowed. Elements that are not usable, or not finite in the output, count as
        right. Without a usable element there are no numbers, and `nulls` says so."""
        error = torch.where(self.usable & output.isfinite(), output - self.truth, 0.0)
        d = self.mean_square
        total = float(d.sum())
        if not total:
            why = "no element is finite in the exact result and in all runs"
            return Excess(nulls={"reference_ratio": why})
        effective = self.effective
        size, nulls = error.square().sum(), {}
        allowed = torch.maximum(d.sum(), self.allowed_plain.sum())
        z, largest = self.of_runs
        worst = _worst_slice(error, d, self.allowed_plain, z)
        if worst is None:
            nulls["slice_ratio"] = "no slice has enough numbers"
        slope = shift = None
        if effective >= LEAST_FOR_LEAN:
            slope, shift = _leans(error, self)
        else:
            nulls |= dict.fromkeys(("slope", "shift"), TOO_FEW)
        luck_of_slope, luck_of_shift = self.luck_of_leans
        return Excess(
            ratio=_root(size, allowed),
            luck=max(math.exp(OF_ALL / math.sqrt(effective)), self.luck_of_runs),
            predicted=_root(size, d.sum()),
            effective=effective,
            worst_slice=worst,
            worst_element=_worst_element(error, d, self.allowed_plain),
            element_luck=max(LEAST_ELEMENT, largest),
            slope=slope,
            slope_luck=luck_of_slope,
            shift=shift,
            shift_luck=luck_of_shift,
            yardstick=1.0,
            nulls=nulls,
        )


def _root(numerator: Tensor, denominator: Tensor) -> float:
    """Returns the root of a quotient, whose denominator counts as at least TINY."""
    return math.sqrt(float(numerator) / max(float(denominator), TINY))


def _worst_element(error: Tensor, mean_square: Tensor, plain: Tensor) -> Element:
    """Returns the element whose error is largest beside what is allowed for it, with its
    indices; ratio 0 and no indices for an empty tensor. `mean_square`: D; `plain`: the
    squared errors that a reference may allow."""
    if not error.numel():
        return Element(0.0, ())
    allowed = torch.maximum(mean_square, plain).clamp_min(TINY)
    ratios = error.abs() / allowed.sqrt()
    at = int(ratios.argmax())
    return Element(float(ratios.flatten()[at]), tuple(_place_of(at, error.shape)))


def _leans(error: Tensor, of: Errors) -> tuple[Lean, Lean]:
    """Returns the slope of an error on the truth, and its mean over the truth's size,
    both in unit roundoffs: weighted least squares, each with its t. Both are 0 where the
    truth is 0 everywhere."""
    weight = torch.where(of.usable, 1 / of.mean_square.clamp_min(TINY), 0.0)
    weight = weight / weight.sum().clamp_min(TINY)
    u = of.format.unit_roundoff
    size = float((weight * of.truth.square()).sum().sqrt())
    if not size:
        return Lean(0.0, 0.0), Lean(0.0, 0.0)

    def lean(along: Tensor) -> Lean:
        """Returns the slope of the error on `along` with its t, infinite where nothing
        is left."""
        power = float((weight * along.square()).sum())
        slope = float((weight * along * error).sum()) / max(power, TINY)
        left = (weight * along * (error - slope * along)).square().sum()
        spread = float(left.sqrt()) / max(power, TINY)
        return Lean(slope, slope / spread if spread else math.copysign(math.inf, slope))

    slope, shift = lean(of.truth), lean(torch.ones_like(of.truth))
    return Lean(slope.size / u, _number(slope)), Lean(
        shift.size / size / u, _number(shift)
    )


def _number(lean: Lean) -> float:
    """Returns a lean's t between -1e300 and 1e300, as JSON can hold it; 0 for a slope of
    0."""
    if not lean.size:
        return 0.0
    return max(-1e300, min(1e300, lean.t))


def _worst_slice(
    error: Tensor, mean_square: Tensor, plain: Tensor, z: float
) -> Slice | None:
    """Returns the slice that is farthest beyond what is allowed for it, over all axes and
    blocks of these. In each family, slices of at least LEAST_EFFECTIVE numbers in effect
    are judged, where the family has two of them; None where no family has. `mean_square`:
    D; `plain`: the squared errors that a reference may allow. `z`: the largest of random
    runs; twice that, but at least LEAST_Z, is allowed."""
    worst: Slice | None = None
    z = max(LEAST_Z, TIMES_SOUND * z)
    fields = (error.square(), mean_square, mean_square.square(), plain)
    for name, (square, d, d_square, allowed) in _families(torch.stack(fields)):
        effective = d.square() / d_square.clamp_min(TINY)
        judged = effective >= LEAST_EFFECTIVE
        count = int(judged.sum())
        if count < 2:
            continue
        ratio = (square / torch.maximum(d, allowed).clamp_min(TINY)).sqrt()
        spread = (2 * math.log(count) / effective.clamp_min(1.0)).sqrt()
        beyond = torch.where(judged, ratio / (z * spread).exp(), -1.0)
        at = int(beyond.argmax())
        if worst is not None and beyond[at] <= worst.ratio / worst.luck:
            continue
        largest = float(ratio[at])
        above = math.log(max(largest, TINY) / 1.1) / float(spread[at])
        worst = Slice(
            ratio=largest,
            luck=math.exp(z * float(spread[at])),
            place=name.format(at=at),
            z=max(0.0, above),
        )
    return worst


def _families(fields: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields what a slice is called (`place {at} of axis 0`, of a tensor of one axis
    `place {at}`), and the sums of stacked fields [4, ...] over each slice, [4, slices]:
    places of each axis of at least two, blocks of 16 and 128 places of a longer axis (the
    last may be shorter), and with three axes or more, rows of the last."""
    shape = fields.shape[1:]
    for axis, size in enumerate(shape):
        others = [i + 1 for i in range(len(shape)) if i != axis]
        sums = fields.sum(dim=others) if others else fields
        for block in BLOCKS:
            if size < 2 or (block > 1 and size <= block):
                continue
            what = f"of axis {axis}" if len(shape) > 1 else ""
            if block == 1:
                yield f"place {{at}} {what}".strip(), sums
                continue
            padded = torch.nn.functional.pad(sums, (0, -size % block))
            blocks = padded.reshape(4, -1, block).sum(dim=-1)
            yield f"block {{at}} of {block} {what}".strip(), blocks
    if len(shape) > 2:
        yield "row {at} of the last axis", fields.sum(dim=-1).flatten(1)


def _place_of(index: int, shape: Sequence[int]) -> Iterator[int]:
    """Yields the indices, first axis first, of the element that has this index in a
    tensor of the shape when that is flattened."""
    places = []
    for size in reversed(shape):
        index, place = divmod(index, size)
        places.append(place)
    yield from reversed(places)
