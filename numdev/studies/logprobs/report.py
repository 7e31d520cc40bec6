"""What the report of `numdev logprobs` consists of: for each sequence the sums that all
its numbers are made of. d is a recorded log-probability less another one of the same
token, in nats: less the exact one in a `SideRow`, trainer less rollout in a `PairRow`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from numdev.report import Record, Report

Value = float | None
Fields = dict[str, object]  # fields of a record, by name
PAIR = "pair"  # whose causes are of no side alone


class PlannedSide(Record):
    """One program's records, and what they are held to."""

    name: str
    file: str
    layout: str  # how the file was understood
    sequences: int
    format: str  # that its noise is predicted in
    head: str | None = None  # the format of its head, where that is another one
    attention: str
    support: str  # temperature and filter that its values are meant to be under
    engine: str | None = None
    weights_version: str | None = None
    # By a setting that a side has one of, what its records say, where that differs
    several: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    causes: tuple[str, ...] = ()  # that were looked for, in their order
    untested: dict[str, str] = Field(
        default_factory=dict
    )  # causes that were not, and why
    fixes: tuple[str, ...] = ()  # whose cost was predicted

    @property
    def recipe(self) -> str:
        """Returns how the program rounds, which explains its errors: `bfloat16`, or
        `bfloat16 with a head in float32`."""
        return f"{self.format} with a head in {self.head}" if self.head else self.format


class LogprobsPlan(Record):
    """What was to be compared: every side beside the truth, if there is a model, and both
    sides with each other."""

    sides: tuple[PlannedSide, ...]
    pairs: int  # sequences of both; 0 with one side
    model: str | None = None
    # Looked for on both sides together: without a model, which side has one is not told
    pair_causes: tuple[str, ...] = ()
    clip: tuple[float, float]  # of the ratio, outside of which training clips it


class SideRow(Record):
    """One sequence of one side beside the truth."""

    role: ClassVar[str] = "kernel"
    side: str
    sequence: int
    uid: str | None = None
    status: Literal["ok", "skipped"] = "ok"
    reason: str | None = None  # why there are no numbers
    tokens: int = 0  # that count, with a finite recorded and exact value
    missing: int = 0  # that count, and have no recorded value
    infinite: int = 0  # that count, with minus infinity, and are within the support
    outside: int = 0  # that count, and lie outside the support in the exact model
    error: Value = None  # sum of d
    square: Value = None  # sum of d²
    largest: Value = None  # |d|
    predicted: Value = None  # sum of the predicted error
    predicted_square: Value = None  # sum of its square
    product: Value = None  # sum of d times the predicted error
    clipped: int = 0  # tokens whose exp(d) is outside the clip band
    predicted_clipped: int = 0  # the same of the predicted errors

    @property
    def kernel(self) -> str:
        """Returns the side's name, under the name by which comparisons of reports know
        it."""
        return self.side

    @property
    def options(self) -> dict[str, object]:
        """Returns an empty dict: a side has no options."""
        return {}

    @property
    def over_predicted(self) -> float | None:
        """Returns the rms error over the predicted one; None without numbers, and where
        the predicted one is missing or 0."""
        if self.square is None or not self.predicted_square:
            return None
        return math.sqrt(self.square / self.predicted_square)


class PairRow(Record):
    """One sequence of both sides, token by token."""

    sequence: int
    uid: str | None = None
    tokens: int = 0  # that count on both sides and have a finite value on both
    missing: int = 0  # that count on both, and lack a value on either
    unshared: int = 0  # tokens of either side that the other does not have
    cut: bool = False  # one side is a part of the other
    mask: int = 0  # shared tokens that count on one side alone
    equal: int = 0  # tokens with the same bits on both sides
    sums: dict[str, float] = Field(default_factory=dict)
    """Sums over tokens by the names in `statistics.TERMS`; empty without tokens."""
    largest: Value = None  # |d|
    largest_probability: Value = None  # |exp(a) - exp(b)|


class CauseRow(Record):
    """One cause on one sequence of one side, or of the pair: how far undoing it brings
    the side to the truth (the pair: to the other side)."""

    side: str  # PAIR for both
    cause: str
    dose: str = ""  # which temperature, which filter
    sequence: int
    tokens: int = 0
    count: int = 0  # tokens with the cause's own sign, for causes that are counted
    before: float = 0.0  # sum of d²
    after: float = 0.0  # the same with the cause undone
    product: float = 0.0  # sum of d times the cause's effect
    effect: float = 0.0  # sum of the effect's square
    noise: float = 0.0  # sum of the predicted error's square; 0 where none is predicted
    noise_left: float = 0.0  # the same as it is with the cause undone
    fitted: bool = False  # whether the dose was chosen by the errors themselves
    # Of a temperature with recorded alternatives: sums that their slope is made of
    top_product: float = 0.0
    top_square: float = 0.0
    top_other: float = 0.0  # of the side's own alternatives, where both err
    stage: int = 0  # how many causes were undone before


class CostRow(Record):
    """The ratios of one sequence that lie outside the clip band if something is mended:
    of one side to the exact probabilities, or of the second side to the first (PAIR)."""

    side: str
    fix: str  # one of `costs.FIXES`
    sequence: int
    tokens: int = 0
    lost: int = 0  # tokens that have no finite value with it
    clipped: int = 0
    square: float = 0.0  # sum of the squared logarithm of the ratio


class WorstToken(Record):
    """One of the tokens where a side is farthest from the exact model, or the two sides
    from each other."""

    side: str
    sequence: int
    position: int
    token: int  # its id
    error: float
    exact: Value = None
    entropy: Value = None
    text: str | None = None  # only where it was asked for


class Bin(Record):
    """The errors of one side over tokens in one part of a range: of positions, entropies
    (nats) or exact probabilities."""

    side: str
    by: Literal["position", "entropy", "probability"]
    label: str
    tokens: int
    square: float  # sum of d²
    predicted_square: Value = None


class SequenceEstimate(Record):
    """A number over all tokens, with its 95 % interval over sequences where there are
    several."""

    mean: float
    low: Value = None
    high: Value = None


class NamedCause(Record):
    """A cause that is named, and what undoing it leaves."""

    side: str
    cause: str
    dose: str = ""
    words: str  # with all that it cannot be told from
    share: float  # of the squared error that undoing it takes away
    slope: SequenceEstimate | None = None  # of the error on the cause's own effect
    left: Value = None  # rms over predicted that undoing it, and all before it, leaves


class SideSummary(Record):
    """One side over all its sequences that were measured."""

    name: str
    format: str
    sequences: int
    tokens: int
    rms: Value = None
    ratio: SequenceEstimate | None = None  # rms over predicted
    mean: SequenceEstimate | None = None
    expected_mean: Value = None  # -rms²/2 of the predicted error
    correlation: Value = None  # of d with the predicted error
    resolved: Value = None  # the smallest mean that so many tokens resolve
    clipped: Value = None  # share of exp(d) outside the clip band
    predicted_clipped: Value = None
    causes: tuple[NamedCause, ...] = ()


class Cost(Record):
    """The share of a side's ratios, or of the pair's, outside the clip band, as recorded
    or as predicted with a fix."""

    side: str
    fix: str
    tokens: int
    lost: int = 0
    share: SequenceEstimate | None  # None without a token


class Statistic(Record):
    """A number of the two sides as a dashboard shows it."""

    name: str
    formula: str
    shown_by: str  # the frameworks, and what they call it
    value: SequenceEstimate | None


class LogprobsSummary(Record):
    """The answer in sentences, and the tables that are made from the rows."""

    answer: tuple[str, ...]
    sides: tuple[SideSummary, ...] = ()
    pair_causes: tuple[NamedCause, ...] = ()
    statistics: tuple[Statistic, ...] = ()
    costs: tuple[Cost, ...] = ()
    notes: tuple[str, ...] = ()


class LogprobsReport(Report):
    """The result of `numdev logprobs`."""

    kind: Literal["logprobs"] = "logprobs"
    plan: LogprobsPlan
    summary: LogprobsSummary
    rows: tuple[SideRow, ...] = ()
    pairs: tuple[PairRow, ...] = ()
    causes: tuple[CauseRow, ...] = ()
    costs: tuple[CostRow, ...] = ()
    worst: tuple[WorstToken, ...] = ()
    bins: tuple[Bin, ...] = ()
    remarks: tuple[str, ...] = ()  # of the readers, and on what does not match

    @property
    def measured(self) -> bool:
        """Whether at least one token of a side was compared with the model or the other
        side."""
        rows = any(row.tokens for row in self.rows)
        return rows or any(row.tokens for row in self.pairs)

    @property
    def unmeasured(self) -> str:
        """Returns a clause that says why no token was compared, with the reasons of all
        rows that have one, each once, or `none counts`. It says so also where some tokens
        were compared."""
        reasons = sorted({row.reason for row in self.rows if row.reason})
        return f"no token could be compared: {', or '.join(reasons) or 'none counts'}"

    def tables(self) -> Mapping[str, Sequence[Record]]:
        """Returns the tables that are written as CSV, by name: `rows`, and `pairs`,
        `causes`, `costs` and `worst` where there are any."""
        tables: dict[str, Sequence[Record]] = {"rows": self.rows, "pairs": self.pairs}
        tables |= {"causes": self.causes, "costs": self.costs, "worst": self.worst}
        return {name: rows for name, rows in tables.items() if rows or name == "rows"}
