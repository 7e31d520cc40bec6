"""What `numdev bounds` says, as a report holds it: how far flash moves weights, beside low
precision, another seed, and null runs, which tell what any perturbation would grow to. Distances
are from the golden run of the same seed, of all weights together; a step counts updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from numdev.report import Axis, Figure, Record, Report
from numdev.training.report import VariantRole

PAIRED = "mean_abs"
FAR_BELOW = 0.1  # the end of the interval of what is far below
MERGED = 2.0  # the largest perturbation over the smallest null where curves have merged
Window = Literal["first", "early", "saturated", "start"]
"""Over which steps a ratio is: the first recorded one; all before curves bend towards each other;
from where they have merged; the first gradient, before any update."""


class Saturation(Record):
    """Where curves merge, by the paired mean |difference|: the marks that
    `numdev.training.bounds.study` defines."""

    bends: int | None = None
    saturated: int | None = None
    chance: int | None = None
    early: tuple[int, ...]  # before `bends` and `chance`; without a null the first recorded one
    late: tuple[int, ...] = ()  # from `saturated` on
    reason: str | None = None  # why it is not known


class Comparison(Record):
    """One kind of run's distance over another's, by seed: their geometric mean."""

    metric: str
    variant: str
    against: str
    role: VariantRole | None = None  # of the variant
    against_role: VariantRole
    window: Window
    steps: tuple[int, ...]
    ratio: float | None
    low: float | None  # 95 % over seeds, by logarithms; null for fewer than three
    high: float | None
    by_seed: dict[int, float] = Field(default_factory=dict)
    nulls: dict[str, str] = Field(default_factory=dict)

    @property
    def standing(self) -> str:
        """By the interval. A null is of chance: what is up to twice as far is within it."""
        if self.low is None or self.high is None:
            return "No verdict beside"
        most = MERGED if self.against_role.startswith("null") else 1.0
        if self.low <= 1 and self.high <= most:
            within = "Within twice" if most > 1 else "No more than"
            return "Far less than" if self.high < FAR_BELOW else within
        return "More than" if self.low > 1 else "Undecided beside"


def said(compared: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Those that the answer is made of: each flash run early beside low precision, the null that
    re-rounds (else that of one ulp) and another seed, by the mean |difference|."""
    chosen: dict[tuple[str, str], Comparison] = {}
    for c in sorted(compared, key=lambda c: c.ratio is None):
        about, beside = (c.role, c.metric, c.window), c.against_role
        early = about == ("flash", PAIRED, "early")
        if early and beside not in ("attention_precision", "null_repeat"):
            chosen.setdefault((c.variant, beside.partition("_")[0]), c)
    return tuple(chosen.values())


class BoundsSummary(Record):
    answer: tuple[str, ...]
    seeds: tuple[int, ...]
    deterministic: bool | None
    """Whether the golden run, repeated, gave the same bits; null where it was not repeated."""
    axis: Axis | None  # of the figures; null for one step


class BoundsReport(Report):
    """The result of `numdev bounds`."""

    kind: Literal["bounds"] = "bounds"
    summary: BoundsSummary
    saturation: Saturation
    comparisons: tuple[Comparison, ...]
    figures: tuple[Figure, ...] = ()

    @property
    def measured(self) -> bool:
        return any(c.ratio is not None for c in self.comparisons)

    @property
    def unmeasured(self) -> str:
        return "no two distances could be compared"

    def tables(self) -> dict[str, Sequence[Record]]:
        return {"comparisons": self.comparisons}
