"""The part of a call on which an alternative is held against what a kernel returned.

At most 2 batch entries, 8 heads and 64 query rows of a head (fewer of each when there are many
keys), among them the first rows, the last and the worst: then an alternative costs one reference of
that size. A `Probe` answers what a variant of the call would return at its elements, and by how
much the residual shrinks against that (`cut`). Which alternatives there are is said in
`numdev.explain.mistakes`, `numdev.explain.alternatives` and `numdev.explain.factors`; what
cut accuses, in `numdev.explain.wrong_function`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.formats import format_of
from numdev.kernels.reference import attend
from numdev.kernels.reference.results import Reference
from numdev.metrics.yardstick import finite

LEAST_ELEMENTS = 32
"""Fewer numbers than this agree with something by chance."""
MAX_BATCH, MAX_HEADS, MAX_ROWS, MIN_ROWS = 2, 8, 64, 8
SCORES = 1 << 20
"""How many scores a probe's reference may have, before MIN_ROWS applies."""
HEAD_KEYS = 1 << 16
"""Heads times keys in a probe, before one head applies."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """The part of a call on which alternatives are evaluated. Its tensors: [b, h, rows, v_dim]."""

    case: AttentionCase
    """Whole: alternatives are made from it, since a wrong layout mixes heads and rows."""
    batch: list[int]
    heads: list[int]
    blocks: list[slice]
    """Query rows."""
    out: Tensor
    """What the kernel returned, fp64."""
    unit_roundoff: float
    """Of the format the kernel returned."""
    whole: Tensor | None
    """The reference of the whole case, if there is one already."""

    @classmethod
    def of(
        cls,
        case: AttentionCase,
        out: Tensor,
        heads: list[int],
        errors: Tensor,
        whole: Tensor | None,
    ) -> Probe:
        """The part of `case` in these heads; `errors` [B, len(heads), q_len] is their size."""
        batch = errors.sum(dim=(1, 2)).argsort(descending=True)[:MAX_BATCH].sort().values.tolist()
        room = SCORES // (len(batch) * len(heads) * case.kv_len)
        worst = int(errors.sum(dim=(0, 1)).argmax())
        blocks = _blocks(case.q_len, max(MIN_ROWS, min(MAX_ROWS, room)), worst)
        probe = cls(
            case=case,
            batch=batch,
            heads=heads,
            blocks=blocks,
            out=out,
            unit_roundoff=format_of(out.dtype).unit_roundoff,
            whole=whole,
        )
        return dataclasses.replace(probe, out=probe.take(out).double())

    def take(self, x: Tensor) -> Tensor:
        """The probe's elements of a tensor [B, H, q_len, ...]."""
        x = x[self.batch][:, self.heads]
        return torch.cat([x[:, :, rows] for rows in self.blocks], dim=2)

    def part(self, case: AttentionCase, rows: slice) -> AttentionCase:
        """A variant of the case, cut down to the probe's batch entries, heads and these rows."""
        case = case.select_heads(self.heads)
        mask = case.mask
        if mask is not None:
            mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
            mask = mask[self.batch] if mask.shape[0] > 1 else mask
            mask = mask[:, :, rows] if mask.shape[2] > 1 else mask
        return dataclasses.replace(
            case,
            q=case.q[self.batch][:, :, rows],
            k=case.k[self.batch],
            v=case.v[self.batch],
            mask=mask,
            causal_offset=case.causal_offset + rows.start,
        )

    def answer(self, case: AttentionCase) -> Reference:
        """The fp64 reference of a variant of the case, at the probe's elements."""
        return self._joined([attend(self.part(case, rows)) for rows in self.blocks])

    def scaled(self, factor: float) -> Reference:
        """The same of the case with `factor` times its scale."""
        scale = self.case.scale * factor
        return self._joined([attend(dataclasses.replace(x, scale=scale)) for x in self._parts])

    @cached_property
    def _parts(self) -> list[AttentionCase]:
        return [self.part(self.case, rows) for rows in self.blocks]

    @staticmethod
    def _joined(parts: Sequence[Reference]) -> Reference:
        def joined(name: str) -> Tensor:
            return torch.cat([getattr(part, name) for part in parts], dim=2)

        return Reference(
            out=joined("out"),
            lse=joined("lse"),
            term_scale=joined("term_scale"),
            empty=joined("empty"),
        )

    @cached_property
    def exact(self) -> Reference:
        return self.scaled(1.0)

    @cached_property
    def usable(self) -> Tensor:
        return finite(self.out) & finite(self.exact.out) & ~self.exact.empty[..., None]

    def with_out(self, out: Tensor) -> Reference:
        """The exact reference with another output: unlike it there and nowhere else."""
        return dataclasses.replace(self.exact, out=out)

    def residuals(self, x: Tensor, where: Tensor) -> tuple[float, float]:
        """||o - x|| over the elements `where`, plainly and with the term scale as the unit."""
        error = torch.where(where, self.out - x, 0.0)
        unit = torch.where(self.exact.term_scale > 0, self.exact.term_scale, math.inf)
        return float(error.norm()), float((error / unit).norm())

    def cut(self, alternative: Reference, rows: Tensor | None = None) -> float:
        """How many times smaller the residual is against the alternative; 0 where it cannot be
        judged: too few numbers, or more than half of them in rows without a key there.

        `rows` [b, h, rows] restricts it. No residual counts as less than a rounding floor of the
        alternative (u * ||a|| / sqrt(12)), so that the cut is never infinite, and alternatives
        that differ by less than the output can hold are alike.
        """
        usable = self.usable if rows is None else self.usable & rows[..., None]
        both = usable & ~alternative.empty[..., None] & finite(alternative.out)
        if int(both.sum()) < max(LEAST_ELEMENTS, 0.5 * int(usable.sum())):
            return 0.0
        before = self.residuals(self.exact.out, both)
        after = self.residuals(alternative.out, both)
        floor = self.unit_roundoff / math.sqrt(12)
        a = torch.where(both, alternative.out, 0.0)
        unit = torch.where(self.exact.term_scale > 0, self.exact.term_scale, math.inf)
        least = (floor * float(a.norm()), floor * float((a / unit).norm()))
        lowest = 2.0**-53 * float(self.exact.term_scale.norm()) + math.ulp(0.0)
        cuts = [b / max(x, low, lowest) for b, x, low in zip(before, after, least, strict=True)]
        return min(cuts)


Alternative = tuple[str, Callable[[Probe], Reference]]
"""A cause in words, and what would come out at a probe's elements."""


def room_for_heads(case: AttentionCase) -> int:
    """How many heads a probe of this call may have."""
    return max(1, min(MAX_HEADS, HEAD_KEYS // case.kv_len))


def _blocks(length: int, rows: int, worst: int) -> list[slice]:
    """At most `rows` query rows in up to four runs: the first, the last, those around the worst
    and those in the middle."""
    if length <= rows:
        return [slice(0, length)]
    size = max(1, rows // 4)
    chosen: set[int] = set()
    for start in (0, length - size, worst - size // 2, length // 2):
        start = max(0, min(start, length - size))
        chosen |= set(range(start, start + size))
    blocks: list[slice] = []
    for i in sorted(chosen):
        if blocks and blocks[-1].stop == i:
            blocks[-1] = slice(blocks[-1].start, i + 1)
        else:
            blocks.append(slice(i, i + 1))
    return blocks
