"""What a judgement can come to, and what a single test can: closed lists.

Whoever decides by one matches all its members and ends in `assert_never`, so that a
member that is added is an error of types wherever it was forgotten."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import assert_never


class Outcome(StrEnum):
    """What a report, or a kernel in it, comes to; the gravest first, PASSED last."""

    EXCEEDED = "exceeded"  # certain, whatever else could not be judged
    NOT_JUDGED = "unmeasured"
    PASSED = "passed"

    def __repr__(self) -> str:
        return repr(self.value)

    @property
    def exit_code(self) -> int:
        """Returns the exit code of a command: 0 passed, 1 exceeded, 3 not judged."""
        match self:
            case Outcome.EXCEEDED:
                return 1
            case Outcome.NOT_JUDGED:
                return 3
            case Outcome.PASSED:
                return 0
            case _:
                assert_never(self)

    @property
    def word(self) -> str:
        """Returns `FAIL`, `NOT JUDGED` or `PASS`."""
        match self:
            case Outcome.EXCEEDED:
                return "FAIL"
            case Outcome.NOT_JUDGED:
                return "NOT JUDGED"
            case Outcome.PASSED:
                return "PASS"
            case _:
                assert_never(self)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Returns the gravest of the outcomes; NOT_JUDGED where there is none, since silence
    is no pass."""
    return min(outcomes, key=list(Outcome).index, default=Outcome.NOT_JUDGED)


class Standing(StrEnum):
    """Where one test stands; the gravest first."""

    EXCEEDED = "exceeded"  # the number is beyond its limit
    MISSING = "missing"  # planned, or required, and not measured
    # Measured, and too little to tell on which side of the limit it is
    UNDECIDED = "undecided"
    HELD = "held"  # within its limit
    # There is nothing to judge, and nobody asked for it
    NOT_APPLICABLE = "not applicable"

    @property
    def outcome(self) -> Outcome | None:
        """Returns the best outcome that a report with such a test can have: EXCEEDED,
        NOT_JUDGED for a missing or undecided test, PASSED for one that held. None where
        nothing follows from the test, as it is not applicable."""
        match self:
            case Standing.EXCEEDED:
                return Outcome.EXCEEDED
            case Standing.MISSING | Standing.UNDECIDED:
                return Outcome.NOT_JUDGED
            case Standing.HELD:
                return Outcome.PASSED
            case Standing.NOT_APPLICABLE:
                return None
            case _:
                assert_never(self)

    @property
    def word(self) -> str:
        """Returns the word of tables: `FAIL`, `NOT JUDGED`, `PASS`, or `not applied`."""
        return "not applied" if self.outcome is None else self.outcome.word
