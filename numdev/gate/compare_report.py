"""What `numdev compare` found, as a report holds it.

A is the report that was, B the one that is now. A row is one head of one tensor of one kernel in
one call; rows of A and B that say the same of themselves are a pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from numdev.gate.change import Difference
from numdev.report import Finding, Place, Record, Report, Role

Inputs = Literal["same", "nearly the same", "other", "unknown"]
"""Whether both reports measured the same inputs, told by their floors: the exact result rounded
once. `same`: the same bits, or numbers; `nearly`: all its numbers within 1e-4."""


class Side(Record):
    """One of the two reports."""

    path: str
    numdev: str
    command: str
    created: str
    rows: int


class Group(Record):
    """One tensor of one kernel in one format, over all its heads and calls."""

    role: Role
    kernel: str
    options: dict[str, Any] = Field(default_factory=dict)
    format: str
    tensor: str
    pairs: int
    """Measured in both."""
    same_bits: int
    """Of them the output is the same, by its checksum."""
    same_numbers: int
    """Of them all numbers are equal (whatever is known of the bits)."""
    moved: int
    """Of them a number moved beyond noise."""
    metric: str | None
    """The metric of the four below: what the group's moves are told by."""
    a: float | None = None
    """The median over pairs."""
    b: float | None = None
    change: float | None = None
    """The pair whose ratio B / A is farthest from 1, and where it is."""
    where: Place | None = None
    unjudged: int = 0
    """Pairs without a number that could be judged."""


class Move(Record):
    """A number of one pair that changed by more than noise explains."""

    role: Role
    kernel: str
    options: dict[str, Any] = Field(default_factory=dict)
    format: str
    tensor: str
    place: Place
    metric: str
    a: float | None
    """None where there is no number: a suspicion's words are in `words`."""
    b: float | None
    change: float | None
    """B / A; null where either is 0 or has no number."""
    noise: float | None
    """Up to which factor, either way, noise explains a change."""
    excess: float
    """ln |change| over ln noise: how far beyond; above 1. 100 where there is no ratio."""
    floor_a: float | None = None
    """The floor ratio, whatever the metric."""
    floor_b: float | None = None
    inputs: Inputs
    words: str
    """The numbers, as part of a sentence."""


class Ran(Record):
    """What a kernel ran, where that is not the same."""

    kernel: str
    options: dict[str, Any] = Field(default_factory=dict)
    format: str
    backward: bool
    a: str
    b: str
    calls: int
    of: int


class Presence(Record):
    """Rows that one of the reports has and the other lacks."""

    what: Literal["gone", "new"]
    role: Role
    kernel: str
    options: dict[str, Any] = Field(default_factory=dict)
    format: str
    tensors: tuple[str, ...]
    rows: int
    why: str
    """`skipped: REASON` or `failed: REASON` of the other report; else that it has no such row."""
    place: Place


class NewsOfFinding(Record):
    """A finding that only one of the reports has."""

    what: Literal["gone", "new"]
    moved: bool
    """Whether its number moved beyond noise, too; if not, it crossed a limit it was near."""
    finding: Finding


class Failed(Record):
    """Calls of a kernel that failed in a report: nothing can be said of them."""

    side: Literal["A", "B", "A and B"]
    kernel: str
    format: str
    calls: int
    reason: str


class CompareSummary(Record):
    """What a reader wants first."""

    answer: tuple[str, ...]
    notes: tuple[str, ...] = ()
    inputs: dict[str, int] = Field(default_factory=dict)
    """How many pairs were measured on inputs that are the same, nearly so, other."""
    threshold: str
    """What counts as beyond noise, in a sentence."""


class CompareReport(Report):
    """The result of `numdev compare`. Its provenance is that of B."""

    kind: Literal["compare"] = "compare"
    summary: CompareSummary
    a: Side
    b: Side
    allowed: tuple[Difference, ...] = ()
    """What is different and would have been refused."""
    changes: tuple[Difference, ...] = ()
    """In where the numbers come from: versions, machine, settings, kernels' options."""
    ran: tuple[Ran, ...] = ()
    groups: tuple[Group, ...]
    moves: tuple[Move, ...] = ()
    """The farthest beyond noise first."""
    presences: tuple[Presence, ...] = ()
    news: tuple[NewsOfFinding, ...] = ()
    failed: tuple[Failed, ...] = ()

    @property
    def moved(self) -> bool:
        """Whether anything is not as it was: a number, beyond noise; what ran; a row, gone."""
        return bool(self.moves or self.ran or any(p.what == "gone" for p in self.presences))

    @property
    def exit_code(self) -> int:
        """1 something moved; 3 something failed, so that nothing is known of it; else 0. What moved
        is certain, whatever else failed."""
        return 1 if self.moved else 3 if self.failed else 0

    @property
    def measured(self) -> bool:
        return any(group.pairs for group in self.groups)

    @property
    def unmeasured(self) -> str:
        return "no row was measured in both reports"

    def tables(self) -> dict[str, Sequence[Record]]:
        return {"groups": self.groups, "moves": self.moves}
