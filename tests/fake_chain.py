"""The chain as tests of its command make it up: what a call's heads do is a function of its layer
and step, so that nothing is computed and everything is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import diagnosed_rows as rows

from numdev.cases import AttentionCase
from numdev.diagnose.report import CureRow, HeadRow, KernelRow, RunningError
from numdev.kernels.emulation.recipe import Recipe
from numdev.sources.projection import Projection

GUILTY = (1, 2)
"""The layer and head whose errors do not cancel."""


@dataclass
class Made:
    """What `diagnosed` returns."""

    heads: tuple[HeadRow, ...]

    def running(self, head: int) -> tuple[RunningError, ...]:
        return rows.running(self.heads[head], 0.5)


@dataclass
class FakeChain:
    """Stands in for `numdev.diagnose.call`, and remembers what it was asked."""

    asked: list[tuple[str, str]] = field(default_factory=list)
    """Checkpoint and case."""
    cases: list[AttentionCase] = field(default_factory=list)
    projections: list[Projection | None] = field(default_factory=list)
    recipes: list[Recipe] = field(default_factory=list)
    stops_at: int | None = None
    """Interrupted at this call."""

    def diagnosed(
        self,
        case: AttentionCase,
        made: Recipe,
        projection: Projection | None = None,
        *,
        checkpoint: str = "",
        step: int | None = None,
    ) -> Made:
        if self.stops_at == len(self.asked):
            raise KeyboardInterrupt
        self.asked.append((checkpoint, case.ref.case))
        self.cases.append(case)
        self.projections.append(projection)
        self.recipes.append(made)
        place = {
            "checkpoint": checkpoint,
            "step": step,
            "case": case.ref.case,
            "module": case.ref.module,
        }
        known = None if projection is None else 1.0
        return Made(heads=tuple(self._head(case, head, known, place) for head in range(case.heads)))

    def _head(
        self, case: AttentionCase, head: int, known: float | None, place: dict[str, Any]
    ) -> HeadRow:
        layer = case.ref.layer or 0
        make = rows.guilty if (layer, head) == GUILTY else rows.innocent
        moved = {rows.guilty: 0.03, rows.innocent: 0.0003}[make]
        row = make(layer, head, moved=None if known is None else moved * known)
        return row.model_copy(update=place)

    def cured(self, found: Made, cures: Mapping[str, Any]) -> tuple[CureRow, ...]:
        names = ("none", *cures)
        return tuple(
            rows.cured(name, row, 1.0 if i == 0 else 0.1 * i)
            for row in found.heads
            for i, name in enumerate(names)
        )

    def seen_from_outside(
        self, found: Made, kernel: Any, options: Mapping[str, Any]
    ) -> tuple[KernelRow, ...]:
        return tuple(rows.real(kernel.name, row, options=dict(options)) for row in found.heads)
