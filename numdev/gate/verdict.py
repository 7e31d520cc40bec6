"""What the gate says: verdicts, and what they come to. Records alone; `judging` makes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, SkipValidation

from numdev.gate.rules import Limit
from numdev.metrics.of_rows import Value
from numdev.report import DeviationRow, Place, Record, Role

Outcome = Literal["passed", "exceeded", "unmeasured", "untested"]
"""`untested`: not judged, and allowed not to be."""
EXIT_CODES = {"passed": 0, "exceeded": 1, "unmeasured": 3}


class Held(NamedTuple):
    """A number of a row beside its limit."""

    row: DeviationRow
    limit: Limit
    value: Value
    excess: float  # above 1 it is exceeded
    interval: tuple[float, float] | None = None  # of an estimate from sampled rows

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the most that the excess may be. An interval that does not contain its own
        estimate, or has its ends the wrong way round, excuses nothing."""
        both = (self.excess, *map(self.limit.excess, self.interval or ()))
        return min(both), max(both)


class Verdict(Record):
    """One rule on one tensor of one kernel in one format; without a kernel, a rule nothing met."""

    rule: str
    outcome: Outcome
    role: Role | None = None
    kernel: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    format: str | None = None
    tensor: str | None = None
    judged: int = 0  # rows that had what the rule needs
    offending: int = 0
    observed: float | str | None = None
    """The number farthest toward or beyond its limit; a suspicion in words."""
    metric: str | None = None
    limit: str = ""  # the limit that this number was held to
    median: bool = False  # the number is the median over heads
    bound: float | None = None
    places: tuple[Place, ...] = ()
    """Of the first offending rows, the worst one first; of the rows that lack the number."""
    unjudged: int = 0
    reasons: tuple[str, ...] = ()  # why rows were not judged
    beyond: Annotated[tuple[Held, ...], SkipValidation] = Field(default=(), exclude=True)
    """What offends, the worst first; not known of a verdict that was read from a file."""


class Calls(Record):
    """In how many calls one kernel ran in one format; forward and backward apart."""

    kernel: str
    options: dict[str, Any]
    format: str
    backward: bool
    ok: int
    skipped: int
    failed: int
    required: bool
    reasons: tuple[str, ...]  # why not, where it did not
    place: Place | None = None  # the first call in which it failed
    outcome: Outcome


class Dose(Record):
    """A planted fault of one size."""

    dose: float
    outcome: Literal["caught", "missed", "unmeasured"]
    by: tuple[str, ...] = ()  # the rules it exceeded


class Power(Record):
    """One planted fault in one format: what this gate would have caught, on this data."""

    fault: str
    format: str
    doses: tuple[Dose, ...]  # growing
    caught_from: float | None
    """The smallest dose from which on every measured one is caught; None if the last is missed."""

    def __str__(self) -> str:
        what = f"{self.fault} ({self.format})"
        measured = [dose.dose for dose in self.doses if dose.outcome != "unmeasured"]
        if not measured:
            return f"{what} could not be measured"
        if self.caught_from is None:
            return f"{what} at no dose up to {max(measured):g}"
        return f"{what} from dose {self.caught_from:g} on"


class Judgement(Record):
    rules: str
    outcome: Literal["passed", "exceeded", "unmeasured"]
    verdicts: tuple[Verdict, ...]
    calls: tuple[Calls, ...]
    missing: tuple[str, ...] = ()  # required kernels that are not in the report
    power: tuple[Power, ...] = ()
    fa_rule: tuple[int, int] | None = None  # heads that pass flash-attention's own, of all

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]
