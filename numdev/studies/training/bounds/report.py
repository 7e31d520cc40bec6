"""What the report of `numdev bounds` consists of: how far flash moves weights, beside low
precision, another seed, and null runs, which show how far any perturbation would grow.
Distances are from the golden run of the same seed, of all weights together; a step counts
updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from numdev.report import Axis, Figure, Record, Report
from numdev.studies.training.report import VariantRole

PAIRED = "mean_abs"
# The metrics that are compared, in the order of a table
METRICS: dict[str, str] = {
    PAIRED: "mean |difference|",
    "w1": "Wasserstein distance W1 of all weights pooled",
    "max_abs": "largest |difference|",
}
FAR_BELOW = 0.1  # a ratio is far below 1 where its interval ends below this
WITHIN = 2.0  # up to so many times as far as chance a distance may be chance
MERGED = (
    1.25  # curves have merged where the dose PAIR[1] moves at most so far over PAIR[0]
)
# Two strengths of re-rounding, in floors. While their distances differ, distances tell
# causes apart
PAIR = (1.0, 16.0)
# Flash over low precision in W1, as Golden et al. report it: two to five times less
PAPER = (0.2, 0.5)
FEWEST_SEEDS = 3  # of an interval: that of two reaches over orders of magnitude
# The steps of a ratio: the first recorded one; all before curves bend towards each other;
# from where they have merged; and `start`, the first gradient, before any update
Window = Literal["first", "early", "saturated", "start"]


class Saturation(Record):
    """The steps at which curves merge, from the mean |difference| of null runs alone: the
    marks that `numdev.studies.training.bounds.rounding_doses` defines. None where there
    is no such step."""

    bends: int | None = None
    saturated: int | None = None
    chance: int | None = None
    # Before `bends` and `chance`; without a pair the first recorded one
    early: tuple[int, ...]
    late: tuple[int, ...] = ()  # from `saturated` on
    reason: str | None = None  # why there are no marks


class Comparison(Record):
    """One kind of run's distance over another's: in each seed the geometric mean over
    steps (`by_seed`), and the geometric mean of these (`ratio`). `nulls` has the reason
    of each number that is None."""

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
        """Returns the verdict that the interval gives, to be followed by the name of the
        other run. An interval within 1 gives `No more than`; beside a null, where up to
        WITHIN times as far is chance, `Within twice` up to WITHIN; either is `Far less
        than` where it ends below FAR_BELOW. An interval above 1 gives `More than`,
        another one `Undecided beside`, none `No verdict beside`."""
        if self.low is None or self.high is None:
            return "No verdict beside"
        most = WITHIN if self.against_role.startswith("null") else 1.0
        if self.low <= 1 and self.high <= most:
            within = "Within twice" if most > 1 else "No more than"
            return "Far less than" if self.high < FAR_BELOW else within
        return "More than" if self.low > 1 else "Undecided beside"


class Rung(Record):
    """One strength of re-rounding in a window: its distance over that of one floor, the
    geometric mean over steps and seeds."""

    times: float  # in floors
    runs: int  # of this strength in a seed
    window: Window
    steps: tuple[int, ...]
    ratio: float | None
    low: float | None  # as of a Comparison
    high: float | None


class DoseReading(Record):
    """A distance of one variant in one window as a dose: the strength of re-rounding that
    moves the weights as far."""

    variant: str
    role: VariantRole
    window: Window
    steps: tuple[int, ...]
    dose: float | None  # in floors, the geometric mean over steps and seeds
    low: float | None  # 95 % over seeds, not beyond the ladder's ends
    high: float | None
    # The share of readings beyond an end of the ladder, which count as that end
    below: float = 0.0
    above: float = 0.0
    by_seed: dict[int, float] = Field(default_factory=dict)
    why: str | None = None  # why it is undecided


class AtOutput(Record):
    """The errors of a variant's attention on the golden run's first calls: means over
    seeds of the rows in `outputs` of a training run."""

    variant: str
    role: VariantRole
    floors: float | None  # rms error over the floor's
    from_golden: float | None  # rms difference from the golden run's attention, in floors
    bias: float | None
    slope: float | None
    # Rms error over the floor's with q scaled until scores reach 8
    sharp: float | None = None
    nonfinite: int = 0  # elements of all seeds


class Answer(Record):
    """The answer to the paper's question, whether flash moves weights two to five times
    less than low precision, for one run of each, over early steps."""

    variant: str
    against: str
    verdict: Literal["reproduced", "not reproduced", "undecided"]
    why: str | None = None  # why it is undecided


class BoundsSummary(Record):
    """The answer in sentences, and what they are about."""

    answer: tuple[str, ...]
    seeds: tuple[int, ...]
    deterministic: bool | None
    """Whether the golden run, repeated, gave the same bits; null where it was not
    repeated."""
    axis: Axis | None  # of the figures; null for one step


class BoundsReport(Report):
    """The result of `numdev bounds`."""

    kind: Literal["bounds"] = "bounds"
    summary: BoundsSummary
    saturation: Saturation
    answers: tuple[Answer, ...] = ()
    comparisons: tuple[Comparison, ...]
    ladder: tuple[Rung, ...] = ()
    doses: tuple[DoseReading, ...] = ()
    outputs: tuple[AtOutput, ...] = ()
    figures: tuple[Figure, ...] = ()

    @property
    def measured(self) -> bool:
        """Whether any two distances could be compared: any comparison has a ratio."""
        return any(c.ratio is not None for c in self.comparisons)

    @property
    def unmeasured(self) -> str:
        """Returns a clause that says that no two distances could be compared."""
        return "no two distances could be compared"

    def tables(self) -> dict[str, Sequence[Record]]:
        """Returns the tables that are written as CSV files, by file name: `comparisons`,
        `ladder` and `doses`."""
        return {
            "comparisons": self.comparisons,
            "ladder": self.ladder,
            "doses": self.doses,
        }
