"""What a judgement consists of: tests, and what they come to. Records alone.

A test is one thing that was planned, held to one rule. Every kind of report is judged by
a list of them, exactly one for each thing planned; `judging` makes a judgement of the
list."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple, Required, TypedDict, assert_never

from pydantic import Field, SkipValidation

from numdev.gate.rules import Limit
from numdev.metrics.metrics_by_name import Value
from numdev.report import DeviationRow, Outcome, Place, Record, Role, Standing
from numdev.tensor_properties import tensor_spec

RATIOS = frozenset(
    {
        *("expected_ratio", "rms_ratio", "baseline_ratio", "floor_ratio", "worst_row"),
        *("noise_ratio", "reference_ratio", "slice_ratio", "element_ratio"),
        *("over", "excess", "excess_of_a_row", "rms_over_predicted"),
    }
)
"""Metrics that are a ratio of two measured numbers."""
MODEL = "model"  # whose tests are of no kernel
# Whose tests are of no kernel and no model: what was read, what is required
REPORT = "report"
RUNS = "runs"  # the rule that what was asked for ran
SOMETHING = "something is judged"  # the rule that some other one could be applied
REQUIRED = "required"


class JudgedRow(NamedTuple):
    """A number of a row beside its limit."""

    row: DeviationRow
    limit: Limit
    value: Value
    excess: float  # above 1 it is exceeded
    interval: tuple[float, float] | None = None  # of an estimate from sampled rows
    unsure: str = ""  # why it decides nothing

    @property
    def ends(self) -> tuple[float, float]:
        """Returns the least and the most that the excess may be. An interval that does
        not contain its own estimate, or has its ends the wrong way round, excuses
        nothing."""
        both = (self.excess, *map(self.limit.excess, self.interval or ()))
        return min(both), max(both)


class Test(Record):
    """One rule applied to one tensor (axis, check, output) of one kernel in one format; a
    test without a kernel is of the report or the model. Of the rule `runs` the rows are
    calls: `judged` of them ran, `unjudged` were declined, in `offending` the kernel
    failed."""

    rule: str
    standing: Standing
    role: Role | None = None
    kernel: str | None = None
    options: dict[str, object] = Field(default_factory=dict)
    format: str | None = None
    tensor: str | None = None
    required: bool = False  # whether it may not be declined
    judged: int = 0  # rows that had what the rule needs
    offending: int = 0
    observed: float | str | None = None
    """The number farthest toward or beyond its limit; a suspicion in words."""
    interval: tuple[float, float] | None = None  # 95 %, of an estimate
    metric: str | None = None
    limit: str = ""  # the limit that this number was held to
    median: bool = False  # the number is the median over heads
    bound: float | None = None
    places: tuple[Place, ...] = ()
    """Of the first offending rows, the worst one first; of the rows that lack the
    number."""
    unjudged: int = 0
    reasons: tuple[str, ...] = ()  # why rows were not judged
    beyond: Annotated[tuple[Any, ...], SkipValidation] = Field(default=(), exclude=True)
    """What offends, the worst first: records of the study, for its sentences."""

    @property
    def outcome(self) -> Outcome | None:
        """Returns the outcome that the test's standing has for the whole; None where it
        has none."""
        return self.standing.outcome

    @property
    def decides_nothing(self) -> bool:
        """Whether the test applies and neither held nor was exceeded: it is undecided or
        missing."""
        match self.outcome:
            case Outcome.PASSED | Outcome.EXCEEDED | None:
                return False
            case Outcome.NOT_JUDGED:
                return True
            case never:
                assert_never(never)

    @property
    def runs(self) -> bool:
        """Whether the test is of the rule `runs` on a kernel: it counts in how many calls
        the kernel ran."""
        return self.rule == RUNS and self.kernel is not None

    @property
    def is_backward(self) -> bool:
        """Whether the test is of a gradient."""
        return self.tensor is not None and tensor_spec(self.tensor).is_gradient

    @property
    def is_of_output(self) -> bool:
        """Whether the test is of a result that is measured against its format."""
        return self.tensor is not None and tensor_spec(self.tensor).is_output

    @property
    def nearness(self) -> float:
        """Returns the size of the number over its limit (`bound`); infinite where the
        limit is 0 or None and the number is not 0. 0 where there is no number, or words
        in its place."""
        if not isinstance(self.observed, float | int):
            return 0.0
        size = abs(self.observed)
        return size / self.bound if self.bound else math.inf if size else 0.0


class Statement(NamedTuple):
    """What a verdict says of a kernel, in a line without the kernel, and further
    sentences below it."""

    line: str
    details: str = ""


class TestFields(TypedDict, total=False):
    """Fields of a test but those that say whose it is."""

    rule: Required[str]
    standing: Required[Standing]
    metric: str
    observed: float
    interval: tuple[float, float] | None
    bound: float
    limit: str
    judged: int
    offending: int
    reasons: tuple[str, ...]
    beyond: tuple[object, ...]


class PlantedDose(Record):
    """One size of a planted fault, and whether the rules caught it."""

    dose: float
    outcome: Literal["caught", "missed", "unmeasured"]
    by: tuple[str, ...] = ()  # the rules it exceeded


class Power(Record):
    """From which dose on the rules catch one planted fault in one format, on the data of
    this report."""

    fault: str
    format: str
    doses: tuple[PlantedDose, ...]  # growing
    caught_from: float | None
    """The smallest dose from which on every measured one is caught; None if the last is
    missed."""

    def __str__(self) -> str:
        what = f"{self.fault} ({self.format})"
        measured = [dose.dose for dose in self.doses if dose.outcome != "unmeasured"]
        if not measured:
            return f"{what} could not be measured"
        if self.caught_from is None:
            return f"{what} at no dose up to {max(measured):g}"
        return f"{what} from dose {self.caught_from:g} on"


class Beside(TypedDict, total=False):
    """Fields of a Judgement that a kind of reports has beside its tests."""

    power: tuple[Power, ...]
    fa_rule: tuple[int, int] | None


class Judgement(Record):
    """The tests of a report by a set of rules, and their outcome."""

    rules: str
    outcome: Outcome
    tests: tuple[Test, ...]
    power: tuple[Power, ...] = ()
    # Heads that pass flash-attention's own, of all
    fa_rule: tuple[int, int] | None = None

    @property
    def exit_code(self) -> int:
        """Returns the exit code of the outcome: 0 passed, 1 exceeded, 3 not judged."""
        return self.outcome.exit_code
