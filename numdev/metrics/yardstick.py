"""What outputs are measured against: the fp64 reference and what stands beside it.

A `Yardstick` holds the reference of a case in one format, its term scale, the baseline,
and the reference of the unrounded inputs. Many outputs are held to one yardstick, so what
depends on no output is computed here and cached. `numdev.metrics.row_sums` sums over
rows."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from numdev.formats import Format, all_finite, dtype_of, each_finite, round_to, ulp

# A row whose terms are smaller has no relative error: its products are subnormals of
# fp32, which hardware keeps or flushes to zero, and a key that hardly anybody sees would
# be 100 % wrong. Its errors are still held to rounding something of this size: a number
# where none belongs is seen.
SMALLEST_SCALE = 2.0**-100

Sums = dict[str, Tensor]  # sums over the elements of rows by name, fp64 [B, H, rows]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowScales:
    """What the errors of rows are measured against, over the elements that count. fp64
    [B, H, rows]."""

    usable: Tensor  # bool [B, H, rows, features]: the elements that count
    count: Tensor  # how many
    size: Tensor  # |r_i|
    scale: Tensor  # |term scale_i|, over its finite elements
    judged: Tensor  # bool: rows that have a relative error
    unit: Tensor  # what it is relative to: the scale, infinity in rows not judged
    least: Tensor  # u |r_i| / sqrt(12), the least a row's error may be predicted to be
    arithmetic: Tensor | None  # what fp32 arithmetic alone may err
    least_allowed: float  # what any row may err: u SMALLEST_SCALE
    judged_count: Tensor  # int64 [H]: how many rows of each head are judged
    observed: Tensor
    """[B, H, features]: in how many rows an element that counts may tell of a bias. Rows
    that repeat others do not count, nor do elements whose floor is not finite."""

    sums: Sums
    """What does not depend on any error, by name: count, counted, reference, terms."""

    def predicted(self, sizes: Tensor) -> Tensor:
        """Returns rows' predicted errors `sizes` [B, H, rows] and what fp32 arithmetic
        may err, joined as the root of the sum of their squares; `sizes` alone where
        `arithmetic` is None."""
        return sizes if self.arithmetic is None else torch.hypot(sizes, self.arithmetic)


@dataclass(frozen=True, kw_only=True, eq=False)
class Yardstick:
    """What outputs of one case in one format are measured against: the exact result and
    what is derived from it. Shapes [B, H, q_len, v_dim] unless said otherwise."""

    # fp64, from the same rounded inputs the kernel sees; never rounded back
    reference: Tensor
    # fp64, sum_j P_ij |V_jd|: what is added up before anything cancels
    term_scale: Tensor
    empty: Tensor  # bool [B, H, q_len]: fully masked rows
    format: Format  # the output's format
    lse: Tensor | None = None
    """fp64 [B, H, q_len], the reference's log-sum-exp: tells which rows repeat others."""
    # Bool [rows]: which alone tell of a bias, where not all do
    drawn: Tensor | None = None
    baseline: Tensor | None = None
    arithmetic: Tensor | None = None
    """fp64 [B, H, rows]: what fp32 arithmetic may err, relative to a row's term scale.
    Beside what an emulation predicts, which leaves it out or makes it in another
    order."""
    unrounded: Tensor | None = None
    """fp64, the reference of the inputs before they were rounded to the audited
    format."""
    baseline_fp32: Tensor | None = None
    """The baseline in float32, of the unrounded inputs; None where that is no wider
    format."""

    def for_format(self, fmt: Format) -> Yardstick:
        """Returns the yardstick for an output in another format, which has another floor;
        itself for its own format."""
        return self if fmt == self.format else dataclasses.replace(self, format=fmt)

    @cached_property
    def floor(self) -> Tensor:
        """Returns the reference rounded once to the format, to nearest, in fp64: the
        least error possible in it. Values beyond the format's largest become infinite, or
        NaN in a format without infinity."""
        return round_to(self.reference, self.format)

    @cached_property
    def floor_finite(self) -> Tensor:
        """Returns where the floor is finite: bool, of its shape."""
        return finite(self.floor)

    @cached_property
    def baseline_finite(self) -> Tensor | None:
        """Returns where the baseline is finite: bool, of its shape; None without a
        baseline."""
        return None if self.baseline is None else finite(self.baseline)

    @cached_property
    def spacing(self) -> Tensor:
        """Returns one ulp of the format at each element's term scale, fp64; NaN where the
        term scale is not finite."""
        return ulp(self.term_scale, self.format)

    @cached_property
    def usable(self) -> Tensor:
        """Returns which elements are of rows that see a key and have a finite reference:
        bool."""
        seen = (~self.empty)[..., None].expand_as(self.reference)
        return seen if self._finite_flags[0] else seen & finite(self.reference)

    @cached_property
    def _finite_flags(self) -> list[bool]:
        """Returns, one after another, whether all elements of the reference, of the
        floor, of the spacing and of the baseline (if there is one) are finite."""
        every = [self.reference, self.floor, self.spacing]
        return each_finite(every if self.baseline is None else [*every, self.baseline])

    @cached_property
    def repeated(self) -> Tensor:
        """Returns which rows are no independent observation: bool [B, H, q_len], True for
        rows whose exact result an earlier sequence has at the same place, and for rows
        not drawn.

        Sequences with a common beginning, or the same text twice, are not independent.
        Results alone can agree by chance (V = 1); log-sum-exps do not, and are compared
        where there are any."""
        r, repeated = self.reference, torch.zeros_like(self.empty)
        if self.drawn is not None:
            repeated |= ~self.drawn
        for shift in range(1, r.shape[0]):
            # Rarely true: spares most comparisons
            same = r[shift:, ..., 0] == r[:-shift, ..., 0]
            if self.lse is not None:
                same &= self.lse[shift:] == self.lse[:-shift]
            if bool(same.any()):
                repeated[shift:] |= same & (r[shift:] == r[:-shift]).all(dim=-1)
        return repeated

    @cached_property
    def regular(self) -> bool:
        """Whether all rows and elements count. Every row sees a key. All elements of the
        reference, the floor, the spacing and the baseline (if there is one) are finite.
        No row has the result of one in an earlier sequence, and none is left out of the
        sample."""
        return all(self._finite_flags) and not bool((self.empty | self.repeated).any())

    @cached_property
    def rows(self) -> RowScales:
        """Returns the scales of rows over all usable elements, for an output that is
        finite."""
        return self.rows_where(None)

    def rows_where(self, usable: Tensor | None) -> RowScales:
        """Returns the scales of rows over the elements of a mask `usable`, bool [B, H,
        rows, features]; None: over those of `self.usable`."""
        is_everything = usable is None and self.regular
        usable = self.usable if usable is None else usable
        if is_everything:
            batch, heads, rows, features = self.reference.shape
            size, scale = row_norm(self.reference), row_norm(self.term_scale)
            count = torch.full_like(size, features)
            observed = size.new_full((batch, heads, features), rows)
        else:
            size = row_norm(torch.where(usable, self.reference, 0.0))
            terms = torch.where(usable, self.term_scale, 0.0)
            scale = row_norm(torch.where(finite(terms), terms, 0.0))
            count = count_of(usable, dim=-1)
            distinct = usable & self.floor_finite & ~self.repeated[..., None]
            observed = count_of(distinct, dim=2)
        arithmetic = None
        if self.arithmetic is not None:
            # Inputs that are not finite make it NaN in rows of which no element is
            # usable.
            arithmetic = (scale * self.arithmetic).nan_to_num_()
        judged = (scale >= SMALLEST_SCALE) & finite(scale)
        sums = {
            "count": count,
            "counted": judged.double(),
            "reference": size.square(),
            "terms": scale.square(),
        }
        return RowScales(
            usable=usable,
            count=count,
            size=size,
            scale=scale,
            judged=judged,
            unit=torch.where(judged, scale, math.inf),
            least=size * rounding_rms(self.format),
            arithmetic=arithmetic,
            least_allowed=self.format.unit_roundoff * SMALLEST_SCALE,
            judged_count=judged.sum(dim=(0, 2)),
            observed=observed,
            sums=sums,
        )

    @cached_property
    def sums(self) -> Sums:
        """Returns sums over the elements of each row, by name, [B, H, rows] each. They
        are of the squares of the floor's error (`floor`), of the baseline's (`plain`), of
        what rounding the inputs moves the reference (`moved`), and of the baseline's
        difference from `baseline_fp32` (`cast_apart`). With each comes the number of its
        elements: `floor_count`, `plain_count`, `moved_count` and `cast_count`. These are
        the usable ones that are finite in both tensors. Without a tensor its sums are
        left out. Also `least`, and `empty_rows` (1 or 0).

        `least` is u^2 |r_i|^2 / 12, the least a rounding floor may count as. It is below
        the floor of values that fill their binades, and stands in where all are exact (V
        = 1) and the floor is 0."""
        size = self.rows.size
        if not self.regular:
            fine = self.usable & self.floor_finite
            size = row_norm(torch.where(fine, self.reference, 0.0))
        sums = dict.fromkeys(("empty_rows", "floor"), self.empty.double())
        sums["least"] = (size * rounding_rms(self.format)).square()
        distances = (
            ("floor", "floor_count", self.reference, self.floor),
            ("moved", "moved_count", self.reference, self.unrounded),
            ("plain", "plain_count", self.reference, self.baseline),
            ("cast_apart", "cast_count", self.baseline, self.baseline_fp32),
        )
        for name, count, a, b in distances:
            if a is None or b is None:
                continue
            distance = a.double() - b  # in fp64: a and b may be of one narrow dtype
            # That the floor and the baseline are finite, `regular` says already
            is_finite = b is self.floor or b is self.baseline
            if self.regular and (is_finite or all_finite([b])):
                sums[name], sums[count] = row_norm(distance).square(), self.rows.count
            else:
                both = self.usable & finite(a) & finite(b)
                sums[name] = row_norm(torch.where(both, distance, 0.0)).square()
                sums[count] = count_of(both, dim=-1)
        return sums

    @cached_property
    def allowance(self) -> Sums:
        """Returns `plain_from_floor` and `shifted`, as `fa_allowance`, over all elements
        of a regular yardstick. Needs a baseline."""
        return self.fa_allowance(None)

    def fa_allowance(self, usable: Tensor | None) -> Sums:
        """Returns the largest of |plain - ref| and of |((ref + 0.3) - 0.3) - ref| in each
        row, as `plain_from_floor` and `shifted` [B, H, rows]. Plain is the baseline, ref
        the exact answer cast to the format, in which the shifts are computed.
        Flash-attention's own test allows twice the sum of both. `usable`: a mask of the
        elements that count where the floor is finite; None: all, of a regular yardstick.
        Needs a baseline that is finite in these elements, and a format of 16 bits or more
        that torch has a dtype for."""
        assert self.baseline is not None
        floor, plain = self.floor, self.baseline - self.floor
        if usable is not None:
            judged = usable & self.floor_finite
            floor, plain = (torch.where(judged, x, 0.0) for x in (floor, plain))
        cast = floor.to(dtype_of(self.format))  # exact: the floor is representable
        return {
            "plain_from_floor": row_max(plain),
            "shifted": row_max(cast + 0.3 - 0.3 - cast).double(),
        }


def finite(x: Tensor) -> Tensor:
    """Returns a mask (bool) of where x is neither NaN nor infinite, several times faster
    than isfinite on a CPU. `x`: of a dtype that PyTorch computes in, so of no 8-bit
    format."""
    return x.abs() < math.inf


def count_of(mask: Tensor, dim: int) -> Tensor:
    """Returns how many elements of a bool tensor are True along an axis, in fp64."""
    # Counted as integers: bools added up in fp64 take three times as long on a CPU
    return mask.sum(dim=dim).double()


def widened(x: Tensor) -> Tensor:
    """Returns x detached, of the same values, in a dtype that PyTorch can compute with:
    dtypes of 8 bits, integers too, become float32, others stay."""
    return x.detach() if x.element_size() > 1 else x.detach().float()


def rounding_rms(fmt: Format) -> float:
    """Returns u / sqrt(12): the least rms of rounding errors, relative to what is
    rounded, where values fill their binades."""
    return fmt.unit_roundoff / math.sqrt(12)


def row_norm(x: Tensor) -> Tensor:
    """Returns the Euclidean norms [B, H, rows] of the rows of x [B, H, rows,
    features]."""
    # Contiguous, since the order of a sum, and with it the last bit, goes with the
    # strides.
    norm: Tensor = torch.linalg.vector_norm(x.contiguous(), dim=-1)
    return norm


def row_max(x: Tensor) -> Tensor:
    """Returns the largest magnitude [B, H, rows] of each row of x [B, H, rows, features],
    at least one feature; NaN where the row has a NaN."""
    # An infinity norm takes eight times as long on a CPU
    largest: Tensor = x.abs().amax(dim=-1)
    return largest
