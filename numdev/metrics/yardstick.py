"""What outputs are measured against, and all that follows from it alone.

A `Yardstick` holds the fp64 reference of a case in one format, its term scale, the baseline and the
reference of the unrounded inputs. Many outputs are held to one yardstick, so whatever does not
depend on an output is computed here, once. A `Part` is the elements an output is held to, with
what is known of them; nearly every output shares one, that of all rows that see a key
(`Yardstick.standard`), and where every row does it needs no mask.

Whether that is allowed takes a look at the values, and so a wait for the device: one for each
yardstick (`settled` and what is found with it), however many outputs follow.

What an output comes to beside a yardstick is `numdev.metrics.comparison`'s business.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from numdev.formats import Format, dtype_of, round_to, ulp
from numdev.metrics.rowwise import Scales, YardstickSums, yardstick_sums
from numdev.metrics.wasserstein import sorted_rows, w1_of_sorted

SMALLEST_SCALE = 2.0**-100
"""A row whose terms are smaller is left out of relative errors: its products are numbers that fp32
keeps as subnormals, as zero, or (where the hardware flushes) either, and a key that hardly anybody
sees would be 100 % wrong. Its errors are still held to rounding something of this size
(`comparison.row_ratios`), so that a number where nothing belongs is seen."""

Sums = dict[str, Tensor]
"""What metrics are made of, by name: sums over a row's elements, [B, H, rows]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Elements of a yardstick's tensors [B, H, rows, features], and what follows from them. It
    holds the tensors and not the yardstick, which keeps parts: a cycle would outlive its use."""

    usable: Tensor | None
    """Which elements, bool; None: all."""
    reference: Tensor
    term_scale: Tensor
    floor: Tensor
    baseline: Tensor | None
    arithmetic: Tensor | None
    format: Format
    known: YardstickSums | None = None
    """Sums over all elements, where these are all there are."""

    def where(self, *conditions: Tensor) -> Part:
        """The elements of this part where all of these hold, which broadcast to them."""
        known = () if self.usable is None else (self.usable,)
        usable = functools.reduce(torch.logical_and, (*known, *conditions))
        return dataclasses.replace(self, usable=usable.expand_as(self.reference), known=None)

    def kept(self, x: Tensor) -> Tensor:
        """x, with 0 wherever it is not usable."""
        return x if self.usable is None else torch.where(self.usable, x, 0.0)

    @cached_property
    def count(self) -> Tensor:
        """[B, H, rows], in fp64 as all sums are."""
        if self.usable is None:
            *rows, features = self.reference.shape
            return self.reference.new_full(rows, features)
        return self.usable.sum(dim=-1, dtype=torch.float64)

    @cached_property
    def feature_count(self) -> Tensor:
        """[B, H, features]: the usable elements of each feature."""
        if self.usable is None:
            batch, heads, rows, features = self.reference.shape
            return self.reference.new_full((batch, heads, features), rows)
        return self.usable.sum(dim=2, dtype=torch.float64)

    @cached_property
    def size(self) -> Tensor:
        """[B, H, rows]: |r_i|."""
        if self.known is not None:
            return self.known.reference.sqrt()
        return row_norm(self.kept(self.reference))

    @cached_property
    def scale(self) -> Tensor:
        """[B, H, rows]: |term scale_i|, over its finite elements."""
        if self.known is not None:
            return self.known.terms.sqrt()
        terms = self.kept(self.term_scale)
        return row_norm(torch.where(finite(terms), terms, 0.0))

    @cached_property
    def judged(self) -> Tensor:
        """bool [B, H, rows]: rows that have a relative error."""
        large = self.scale >= SMALLEST_SCALE
        return large if self.known is not None else large & finite(self.scale)

    @cached_property
    def judged_count(self) -> Tensor:
        """[H]."""
        return self.judged.sum(dim=(0, 2))

    @cached_property
    def _unit(self) -> Tensor:
        return torch.where(self.judged, self.scale, math.inf)

    def relative(self, size: Tensor) -> Tensor:
        """Rows' sizes [..., B, H, rows] over their |term scale_i|; 0 in rows that are not judged.
        Sizes are finite."""
        return size / self._unit

    @cached_property
    def _arithmetic_size(self) -> Tensor | None:
        """[B, H, rows]: what fp32 arithmetic may err in a row, and 0 where that is not a number:
        inputs that are not finite make such rows, and no element of them is usable."""
        return None if self.arithmetic is None else (self.scale * self.arithmetic).nan_to_num_()

    def predicted(self, size: Tensor) -> Tensor:
        """[B, H, rows]: rows' predicted errors, which what fp32 arithmetic may err joins in
        squares."""
        beside = self._arithmetic_size
        return size if beside is None else torch.hypot(size, beside)

    @cached_property
    def least(self) -> Tensor:
        """[B, H, rows]: u |r_i| / sqrt(12), the least a row's error may be predicted to be."""
        return self.size * rounding(self.format)

    @property
    def scales(self) -> Scales:
        """What a GPU needs to know of it."""
        return Scales(
            scale=self.scale,
            least=self.least,
            arithmetic=self._arithmetic_size,
            smallest=SMALLEST_SCALE,
            unit_roundoff=self.format.unit_roundoff,
        )

    @property
    def least_allowed(self) -> float:
        """What any row may err."""
        return self.format.unit_roundoff * SMALLEST_SCALE

    @cached_property
    def sums(self) -> Sums:
        """Sums that no error enters."""
        k = self.known
        return {
            "count": self.count,
            "counted": self.judged.double(),
            "reference": self.size.square() if k is None else k.reference,
            "terms": self.scale.square() if k is None else k.terms,
        }

    @cached_property
    def sorted_reference(self) -> Tensor:
        return sorted_rows(by_head(self.kept(self.reference)))

    @cached_property
    def sorted_floor(self) -> Tensor:
        """Rounding keeps the order."""
        return round_to(self.sorted_reference, self.format)

    @cached_property
    def sorted_baseline(self) -> Tensor:
        assert self.baseline is not None
        return sorted_rows(by_head(self.kept(self.baseline)))

    @cached_property
    def allowed(self) -> tuple[Tensor, Tensor]:
        """The largest of |plain - ref| and of |((ref + 0.3) - 0.3) - ref| in each row, of which
        flash-attention's own test allows twice; ref is the exact answer cast to the format, and
        the shifts are computed in it."""
        assert self.baseline is not None
        plain = None if self.known is None else self.known.plain_from_floor
        if plain is None:
            plain = row_max(self.kept(self.baseline - self.floor))
        cast = self.kept(self.floor).to(dtype_of(self.format))  # exact: the floor is representable
        return plain, row_max(cast + 0.3 - 0.3 - cast).double()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is asked of a yardstick's values, with one wait for the device."""

    some_empty: bool
    """Whether a row sees no key."""
    some_repeated: bool
    settled: bool
    """Whether floor, baseline and unrounded reference are finite in all rows that see a key."""
    finished: bool
    """Whether so are the baselines in other formats."""
    even: bool
    """Whether the spacing is finite everywhere."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Yardstick:
    """What outputs of one case in one format are measured against. Shapes [B, H, q_len, v_dim]."""

    reference: Tensor
    """fp64, from the same rounded inputs the kernel sees; never rounded back."""
    term_scale: Tensor
    """fp64, sum_j P_ij |V_jd|: what is added up before anything cancels."""
    empty: Tensor
    """bool [B, H, q_len]: fully masked rows."""
    format: Format
    """The output's format."""
    lse: Tensor | None = None
    """fp64 [B, H, q_len], the reference's log-sum-exp: tells which rows repeat others."""
    baseline: Tensor | None = None
    arithmetic: Tensor | None = None
    """fp64 [B, H, rows]: what fp32 arithmetic may err, relative to a row's term scale. Beside what
    an emulation predicts, which leaves it out or makes it in another order."""
    unrounded: Tensor | None = None
    """fp64, the reference of the inputs before they were rounded to the audited format."""
    baseline_fp32: Tensor | None = None
    """The baseline in float32, of the unrounded inputs; None where that is no wider format."""
    baseline_lower: Tensor | None = None
    """The baseline of inputs rounded to `lower`, the next lower format."""
    lower: Format | None = None
    brought: list[tuple[Tensor | None, Any]] = field(default_factory=list, init=False)
    """What `numdev.metrics.comparison` has begun to bring to the host, by bins."""

    @cached_property
    def _at_once(self) -> YardstickSums | None:
        """What one pass over a GPU's memory gives, where there is one."""
        return yardstick_sums(
            *(self.reference, self.term_scale, self.format),
            unrounded=self.unrounded,
            baseline=self.baseline,
            fp32=None if self.baseline is None else self.baseline_fp32,
            lower=None if self.baseline is None else self.baseline_lower,
        )

    @cached_property
    def floor(self) -> Tensor:
        found = self._at_once
        return round_to(self.reference, self.format) if found is None else found.floor

    @cached_property
    def spacing(self) -> Tensor:
        """One ulp of the format at the term scale."""
        found = self._at_once
        return ulp(self.term_scale, self.format) if found is None else found.spacing

    @cached_property
    def seen(self) -> Tensor:
        """bool [B, H, q_len, 1]: rows that see a key."""
        return ~self.empty[..., None]

    @cached_property
    def shown(self) -> Tensor:
        """Elements in a row that sees a key, where the reference is finite."""
        return self.seen & finite(self.reference)

    @cached_property
    def floor_finite(self) -> Tensor:
        return finite(self.floor)

    @cached_property
    def repeated(self) -> Tensor:
        """bool [B, H, q_len]: rows whose exact result an earlier sequence has at the same place.

        Sequences with a common beginning, or the same text twice, are no independent observations.
        Results alone can agree by chance (with V = 1 all are 1); the log-sum-exp does not.
        """
        r, found = self.reference, torch.zeros_like(self.empty)
        alike = []
        for shift in range(1, r.shape[0]):
            same = r[shift:, ..., 0] == r[:-shift, ..., 0]
            if self.lse is not None:
                same &= self.lse[shift:] == self.lse[:-shift]
            alike.append(same)
        if alike and bool(torch.cat(alike).any()):  # rarely: sparing a comparison of all features
            for shift, same in enumerate(alike, 1):
                found[shift:] |= same & (r[shift:] == r[:-shift]).all(dim=-1)
        return found

    @cached_property
    def _facts(self) -> Facts:
        """Floor, baseline and unrounded reference settle a yardstick. (Where the floor is finite so
        is the reference.)"""
        settling = [x for x in (self.floor, self.baseline, self.unrounded) if x is not None]
        beside = [x for x in (self.baseline_fp32, self.baseline_lower) if x is not None]
        flags = torch.stack([x.any() for x in (self.empty, self.repeated)])
        asked = torch.cat([self._sizes(settling, beside), flags.double()])
        *sizes, empty, repeated = asked.tolist()
        even, *fine = (math.isfinite(x) for x in sizes)
        if not all(fine):  # which may be in rows that see no key
            some = torch.stack([(self.seen & ~finite(x)).any() for x in (*settling, *beside)])
            fine = [not lost for lost in some.tolist()]
        return Facts(
            some_empty=bool(empty),
            some_repeated=bool(repeated),
            settled=all(fine[: len(settling)]),
            finished=all(fine),
            even=even,
        )

    def _sizes(self, settling: Sequence[Tensor], beside: Sequence[Tensor]) -> Tensor:
        """Numbers that are finite where all elements are: of the spacing, then of these."""
        k = self._at_once
        if k is None:
            return torch.stack([_largest(x) for x in (self.spacing, *settling, *beside)])
        sums = (k.terms, k.off, k.plain, k.unrounded, k.cast, k.lower)
        return torch.stack([x for x in sums if x is not None]).sum(dim=(1, 2, 3))

    def look(self) -> None:
        """Ask the device for all that is asked of these values."""
        _ = self._facts

    @property
    def settled(self) -> bool:
        """Whether floor, baseline and unrounded reference are finite in all rows that see a key."""
        return self._facts.settled

    @property
    def regular(self) -> bool:
        """Whether it is settled, its spacing is finite, and every row sees a key and repeats no
        other: so that all elements count, in every respect."""
        facts = self._facts
        return facts.settled and facts.even and not (facts.some_empty or facts.some_repeated)

    @cached_property
    def known(self) -> YardstickSums | None:
        """Sums over all elements, where a GPU made them and all elements count."""
        return self._at_once if self.regular and self._facts.finished else None

    @cached_property
    def standard(self) -> Part:
        """All elements of rows that see a key. Of a settled yardstick, what a finite output is held
        to in every respect but its bias."""
        some_empty = self._facts.some_empty
        return Part(
            usable=self.seen.expand_as(self.reference) if some_empty else None,
            reference=self.reference,
            term_scale=self.term_scale,
            floor=self.floor,
            baseline=self.baseline,
            arithmetic=self.arithmetic,
            format=self.format,
            known=self.known,
        )

    @cached_property
    def distinct(self) -> Part:
        """The standard part without rows that repeat others."""
        some_repeated = self._facts.some_repeated
        return self.standard.where(~self.repeated[..., None]) if some_repeated else self.standard

    def beside(self, part: Part, other: Tensor) -> Part:
        """Elements of `part` where this tensor of the yardstick's own is finite too."""
        return part if self.settled else part.where(finite(other))

    @cached_property
    def sums(self) -> Sums:
        """Of the floor, the baseline and the precision deviation, each over what is finite of it.

        u^2 |r_i|^2 / 12 is the least a rounding floor may count as: it is below the floor of values
        that fill their binades, and stands in where all are exactly representable (V = 1, or
        float64) and the floor itself is 0.
        """
        whole = self.standard if self.settled else self.standard.where(self.shown)
        floor = self.beside(whole, self.floor)
        found = {
            "empty_rows": self.empty.double(),
            "floor": self._distance("off", self.floor, self.reference, floor),
            "least": floor.least.square(),
            "floor_count": floor.count,
        }
        if self.unrounded is not None:
            moved = self.beside(whole, self.unrounded)
            found["moved"] = self._distance("moved", self.reference, self.unrounded, moved)
            found["moved_count"] = moved.count
        if self.baseline is not None:
            plain = self.beside(whole, self.baseline)
            found["plain"] = self._distance("plain", self.baseline, self.reference, plain)
            found["plain_count"] = plain.count
        for name, other in (("cast", self.baseline_fp32), ("lower", self.baseline_lower)):
            if other is not None and self.baseline is not None:
                both = self._beside_baseline(other)
                found[f"{name}_apart"] = self._distance(name, self.baseline, other, both)
                found[f"{name}_count"] = both.count
        return found

    def _distance(self, name: str, a: Tensor, b: Tensor, part: Part) -> Tensor:
        """[B, H, rows]: the squares of a - b over a part; where that is known, by this name."""
        found: Tensor | None = getattr(self.known, name, None)
        return row_norm(part.kept(a.double() - b)).square() if found is None else found

    @cached_property
    def precision_w1(self) -> Tensor:
        """[H]: W1 between the references of rounded and of unrounded inputs, over all elements:
        those that are not usable are 0 in both."""
        assert self.unrounded is not None
        whole = self.standard if self.settled else self.standard.where(self.shown)
        part = self.beside(whole, self.unrounded)
        unrounded = sorted_rows(by_head(part.kept(self.unrounded)))
        return w1_of_sorted(part.sorted_reference, unrounded)

    @cached_property
    def low_precision_w1(self) -> Tensor:
        """[H]: W1 between the baseline here and in float32, counted as in `precision_w1`."""
        assert self.baseline_fp32 is not None
        return self._w1_from_baseline(self.baseline_fp32)

    @cached_property
    def lower_w1(self) -> Tensor:
        """[H]: W1 between the baseline here and in the next lower format."""
        assert self.baseline_lower is not None
        return self._w1_from_baseline(self.baseline_lower)

    def _w1_from_baseline(self, other: Tensor) -> Tensor:
        part = self._beside_baseline(other)
        moved = sorted_rows(by_head(part.kept(other)))  # in its own dtype, which sorts faster
        return w1_of_sorted(moved, part.sorted_baseline)

    def _beside_baseline(self, other: Tensor) -> Part:
        """Elements where the baseline and another run of it are finite. Inputs that overflow in a
        lower format are no reason to call a yardstick unsettled."""
        assert self.baseline is not None
        if self._facts.finished:
            return self.standard
        return self.standard.where(self.shown, finite(self.baseline), finite(other))

    def for_format(self, fmt: Format) -> Yardstick:
        """The same yardstick for an output in another format: its own floor."""
        return self if fmt == self.format else dataclasses.replace(self, format=fmt)


def finite(x: Tensor) -> Tensor:
    """Where x is neither NaN nor infinite (several times faster than isfinite on a CPU)."""
    return x.abs() < math.inf


def _largest(x: Tensor) -> Tensor:
    """Of all magnitudes, in fp64: finite where every element is."""
    largest: Tensor = torch.linalg.vector_norm(x, math.inf).double()
    return largest


def rounding(fmt: Format) -> float:
    """u / sqrt(12): the least rms of a rounding error, relative to what is rounded."""
    return fmt.unit_roundoff / math.sqrt(12)


def row_norm(x: Tensor) -> Tensor:
    """[B, H, rows, features] to the rows' Euclidean norms [B, H, rows]."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norm


def row_max(x: Tensor) -> Tensor:
    """[B, H, rows, features] to the rows' largest magnitudes."""
    largest: Tensor = torch.linalg.vector_norm(x, math.inf, dim=-1)
    return largest


def by_head(x: Tensor) -> Tensor:
    """[B, H, ...] to [H, all elements]."""
    return x.transpose(0, 1).flatten(1)
