"""The part of a call on which an alternative is held against what a kernel returned.

At most 2 batch entries, 8 heads and 64 query rows of a head (fewer of each when there are
many keys), among them the first rows, the last and the worst."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from numdev.cases import AttentionCase, CaseChanges
from numdev.formats import format_of
from numdev.kernels.reference import attend
from numdev.kernels.reference.blocked import Reference, scores
from numdev.metrics.yardstick import finite

LEAST_ELEMENTS = 32  # fewer numbers than this agree with something by chance
MAX_BATCH, MAX_HEADS, MAX_ROWS, MIN_ROWS = 2, 8, 64, 8
SCORES = 1 << 20  # how many scores a probe's reference may have, before MIN_ROWS applies
HEAD_KEYS = 1 << 16  # heads times keys in a probe, before one head applies


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """The part of a call on which alternatives are evaluated. `batch`, `heads` and `rows`
    are its indices in the call; its tensors are [b, h, rows, v_dim]."""

    # Whole: alternatives are made from it, as a wrong layout mixes heads, rows
    case: AttentionCase
    batch: list[int]
    heads: list[int]
    rows: Tensor  # its query rows, ascending
    out: Tensor  # what the kernel returned, fp64
    unit_roundoff: float  # of the format the kernel returned
    whole: Tensor | None  # the reference of the whole case, if there is one already
    stale: dict[int, Reference] = field(default_factory=dict)  # by tile: `alternatives`

    @classmethod
    def of(
        cls,
        case: AttentionCase,
        out: Tensor,
        heads: list[int],
        errors: Tensor,
        whole: Tensor | None,
        *,
        every: bool = False,
        entry: int | None = None,
    ) -> Probe:
        """Returns the part of `case` in these query heads: at most MAX_BATCH batch
        entries and MAX_ROWS rows (`rows_of`), with what the kernel returned, `out` [B, H,
        q_len, v_dim]; `errors` [B, len(heads), q_len] is the size of rows' errors.
        `whole`: the reference's output of the whole case, or None; `every`: take all
        rows, and all batch entries without `entry`, where those of the call are no more
        than SCORES scores; `entry`: take this batch entry alone; None: the ones that err
        most."""
        every = every and len(errors) * len(heads) * case.q_len * case.kv_len <= SCORES
        most = len(errors) if every else MAX_BATCH
        batch = (
            errors.sum(dim=(1, 2)).argsort(descending=True)[:most].sort().values.tolist()
        )
        if entry is not None:
            batch, errors = [entry], errors[[entry]]
        room = SCORES // (len(batch) * len(heads) * case.kv_len)
        worst = int(errors.sum(dim=(0, 1)).argmax())
        count = case.q_len if every else max(MIN_ROWS, min(MAX_ROWS, room))
        rows = rows_of(case.q_len, count, worst).to(out.device)
        unit_roundoff = format_of(out.dtype).unit_roundoff
        probe = cls(case=case, batch=batch, heads=heads, rows=rows, out=out,
                    unit_roundoff=unit_roundoff, whole=whole)  # fmt: skip
        return dataclasses.replace(probe, out=probe.take(out).double())

    def take(self, x: Tensor) -> Tensor:
        """Returns the probe's elements of a tensor [B, H, q_len, ...]: [b, h, rows,
        ...]."""
        return x[self.batch][:, self.heads][:, :, self.rows]

    def part(self, case: AttentionCase) -> AttentionCase:
        """Returns a variant of the case restricted to the probe's batch entries, heads
        and rows."""
        return case.restrict(batch=self.batch, heads=self.heads, rows=self.rows)

    def answer(self, case: AttentionCase) -> Reference:
        """Returns the fp64 reference of a variant of the case, at the probe's
        elements."""
        return attend(self.part(case))

    @cached_property
    def measured(self) -> AttentionCase:
        """Returns the case itself restricted to the probe's batch entries, heads and
        rows."""
        return self.part(self.case)

    @cached_property
    def scores(self) -> Tensor:
        """Returns the scores of the probe's rows, fp64 [b, h, rows, kv_len], -inf where
        hidden."""
        return all_scores(self.measured)

    def scaled(self, factor: float) -> Reference:
        """Returns the fp64 reference of the case with `factor` times its scale, at the
        probe's elements."""
        return attend(dataclasses.replace(self.measured, scale=self.case.scale * factor))

    @cached_property
    def exact(self) -> Reference:
        """Returns the fp64 reference of the case at the probe's elements."""
        return self.scaled(1.0)

    @cached_property
    def usable(self) -> Tensor:
        """Returns which elements are finite in the output and the reference and belong to
        a row that sees a key: bool [b, h, rows, v_dim]."""
        return finite(self.out) & finite(self.exact.out) & ~self.exact.empty[..., None]

    @cached_property
    def unit(self) -> Tensor:
        """Returns the term scale [b, h, rows, v_dim]; infinite where that is 0, so that
        nothing over it counts."""
        return torch.where(self.exact.term_scale > 0, self.exact.term_scale, math.inf)

    def multiplied(self, factor: float | Tensor) -> Reference:
        """Returns the exact reference with its output multiplied by `factor`, a number or
        a tensor that broadcasts to [b, h, rows, v_dim]."""
        return self.with_out(self.exact.out * factor)

    def with_out(self, out: Tensor) -> Reference:
        """Returns the exact reference with its output replaced; all other fields stay."""
        return dataclasses.replace(self.exact, out=out)

    def cut(self, alternative: Reference, rows: Tensor | None = None) -> float:
        """Returns how many times smaller the residual (a norm) is against the alternative
        than against the exact result: the smaller of two ratios, taken plainly and with
        the term scale as the unit. `rows`: bool [b, h, rows], the rows that count; None:
        all. 0 where fewer than LEAST_ELEMENTS elements, or fewer than half of the usable
        ones, can be compared; a row that sees no key in the alternative can be compared
        only where the output is 0. The residual against the alternative counts as a
        rounding floor at least, the one against the exact result as it is."""
        usable = self.usable if rows is None else self.usable & rows[..., None]
        none = self.out == 0  # which is what code returns for a row that sees no key
        both = usable & (~alternative.empty[..., None] | none) & finite(alternative.out)
        if int(both.sum()) < max(LEAST_ELEMENTS, 0.5 * int(usable.sum())):
            return 0.0
        errors = (self.out - self.exact.out, self.out - alternative.out, alternative.out)
        before, after, size = (torch.where(both, x, 0.0) for x in errors)
        floor = self.unit_roundoff / math.sqrt(12)
        lowest = 2.0**-53 * float(self.exact.term_scale.norm()) + math.ulp(0.0)
        cuts = []
        for unit in (1.0, self.unit):
            b, x, least = (float((y / unit).norm()) for y in (before, after, size))
            cuts.append(b / max(x, floor * least, lowest))
        return min(cuts)

    def share(self, alternative: Reference) -> float:
        """Returns the share of the rms error that goes if the alternative is what should
        come out; negative where the error grows, 0 where there is none. Elements are
        those that `cut` compares, however few they are."""
        none = self.out == 0
        both = (
            self.usable & (~alternative.empty[..., None] | none) & finite(alternative.out)
        )
        before, after = (
            float(torch.where(both, self.out - x, 0.0).norm())
            for x in (self.exact.out, alternative.out)
        )
        return 1 - after / before if before else 0.0


def all_scores(case: AttentionCase) -> Tensor:
    """Returns the scores S [B, H, q_len, kv_len] of a case in fp64, soft cap and mask
    included, -inf where hidden."""
    X = (
        case.q.double()
        @ case.k.double().repeat_interleave(case.group, dim=1).mT
        * case.scale
    )
    return scores(case, X, slice(0, case.q_len), slice(0, case.kv_len))


def rescored(case: AttentionCase, S: Tensor) -> CaseChanges:
    """Returns the fields to change that give the call the scores S [B, H, q_len, kv_len],
    -inf where hidden: an additive mask in place of mask, soft cap, window and causality.
    The gradient with respect to q and k is then that of a call without a soft cap."""
    bare: CaseChanges = {
        "mask": None,
        "softcap": None,
        "window": None,
        "is_causal": False,
    }
    return {**bare, "mask": S - all_scores(dataclasses.replace(case, **bare))}


class Alternative(NamedTuple):
    """A mistake: its cause in words, and what would come out of it at a probe's
    elements."""

    cause: str
    answer: Callable[[Probe], Reference]
    also: tuple[str, ...] = ()
    """What the cause is an instance of, in words that hold in other calls too."""
    general: bool = False
    """Whether `answer` takes a probe of any call."""


def rows_of(length: int, rows: int, worst: int) -> Tensor:
    """Returns query rows of `length`, ascending, int64: four runs of `rows` // 4 at the
    start, the end, around the row `worst` and in the middle, fewer rows where runs
    overlap; all rows where `length` is at most `rows`. `rows`: at least 4."""
    if length <= rows:
        return torch.arange(length)
    size = max(1, rows // 4)
    starts = (0, length - size, worst - size // 2, length // 2)
    runs = (
        range(x, x + size)
        for x in (max(0, min(start, length - size)) for start in starts)
    )
    return torch.tensor(sorted({*itertools.chain(*runs)}))
