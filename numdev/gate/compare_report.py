"""The records of a report of `numdev compare`: report B beside the earlier report A.

A row is one head of one tensor of one kernel in one call; rows of A and B that agree are
a pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NotRequired, TypedDict

from pydantic import Field

from numdev.report import OfKernel, Place, Provenance, Record, Report, Who


class Difference(Record):
    """A key in which two reports differ, and both values, shortened to be read."""

    key: str  # with the first place in it where they differ, as in `cases.0.seq_len`
    a: str
    b: str

    @property
    def root(self) -> str:
        """Returns the key of the request, without the path inside it: `cases` of
        `cases.0.seq_len`."""
        return self.key.partition(".")[0]


Which = Literal["gone", "new", "failed"]


class About(Who):
    """The fields of a record that name a tensor of a kernel, or what stands for one."""

    tensor: str


class Changed(TypedDict):
    """The fields of a move that say what changed."""

    metric: str
    a: NotRequired[float | None]
    b: NotRequired[float | None]
    change: NotRequired[float | None]
    excess: float
    words: str


class Group(OfKernel):
    """One tensor of one kernel in one format, over all heads and calls."""

    tensor: str
    pairs: int  # measured in both reports
    same_bits: int  # pairs whose outputs have the same checksum
    moved: int  # pairs in which something moved beyond noise
    metric: str | None  # of the four fields below
    a: float | None = None  # median over pairs
    b: float | None = None
    change: float | None = None  # the ratio B / A farthest from 1
    where: Place | None = None  # the pair that has this ratio
    unjudged: int = 0  # pairs without a number that could be judged


class Move(OfKernel):
    """Something about one pair that changed by more than noise explains."""

    tensor: str
    place: Place
    metric: str  # a metric of rows, or `ran`: another operator ran
    a: float | None = None
    b: float | None = None
    change: float | None = None  # B / A; null where either is 0 or there is no number
    noise: float | None = None  # the factor, either way, that noise explains
    excess: float  # ln(change) / ln(noise): above 1; 100 where there is no ratio
    words: str  # what changed, as part of a sentence


class Presence(OfKernel):
    """Rows, or numbers of rows, that one report has and not the other; or rows that
    failed."""

    what: Which
    tensors: tuple[str, ...]
    rows: int
    why: str
    place: Place
    lacks: tuple[
        str, ...
    ] = ()  # numbers that the rows lack in the other; none: the rows themselves


class Past(Record):
    created: str
    numdev: str
    torch: str
    on: str  # the GPU, or the CPU
    outcome: str
    # By kernel and format: median error of the output over the floor
    errors: dict[str, float]


@dataclass(frozen=True)
class Compared:
    """The groups, moves and notes of a comparison of two reports."""

    groups: Sequence[Group]
    moves: Sequence[Move]
    notes: tuple[str, ...]
    inputs: dict[str, int] = field(default_factory=dict)
    presences: tuple[Presence, ...] = ()  # beside those of rows


class CompareSummary(Record):
    answer: tuple[str, ...]
    notes: tuple[str, ...] = ()
    # Pairs of kernels under audit; of the baseline, where no kernel was asked for
    judged: int = 0
    # Of these pairs, those that differ and have no number that could be judged
    unjudged: int = 0
    inputs: dict[str, int] = Field(default_factory=dict)  # pairs by `Inputs`


class CompareReport(Report):
    """The result of `numdev compare`. Its provenance is that of B."""

    kind: Literal["compare"] = "compare"
    summary: CompareSummary
    a: Provenance
    b: Provenance
    # Differences of the requests that `--allow` let pass
    allowed: tuple[Difference, ...] = ()
    # Versions, machine, settings, options of kernels
    changes: tuple[Difference, ...] = ()
    groups: tuple[Group, ...]
    moves: tuple[Move, ...] = ()  # the farthest beyond noise first
    presences: tuple[Presence, ...] = ()
    # Of three reports or more: all of them, in the order compared
    history: tuple[Past, ...] = ()

    @property
    def moved(self) -> bool:
        """Whether a number moved beyond noise, another operator ran, or a row or number
        is gone."""
        return bool(self.moves) or any(p.what == "gone" for p in self.presences)

    @property
    def failed(self) -> tuple[Presence, ...]:
        """Returns the records of rows that failed, in A or in B."""
        return tuple(p for p in self.presences if p.what == "failed")

    @property
    def exit_code(self) -> int:
        """Returns 1 where something moved or is gone, which is certain whatever else
        failed; 3 where a call failed, nothing was judged, or a pair that differs could
        not be judged; else 0."""
        whole = self.measured and not self.summary.unjudged
        return 1 if self.moved else 3 if self.failed or not whole else 0

    @property
    def passed(self) -> bool:
        """Whether the exit code is 0: nothing moved beyond noise in either direction,
        nothing is gone or failed, at least one pair was judged, and every pair that
        differs was."""
        return self.exit_code == 0

    @property
    def measured(self) -> bool:
        """Whether a pair of a kernel under audit was judged, or something moved or is
        gone."""
        return self.moved or self.summary.judged > 0

    @property
    def unmeasured(self) -> str:
        """Returns why a report that is not `measured` has nothing judged, as a clause."""
        if unjudged := self.summary.unjudged:
            return (
                f"none of {unjudged} rows that differ has a number that could be judged"
            )
        return "no kernel under audit was measured in both reports"

    def tables(self) -> dict[str, Sequence[Record]]:
        """Returns the tables that are written as CSV: `groups` and `moves`."""
        return {"groups": self.groups, "moves": self.moves}
