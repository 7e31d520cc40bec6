"""What `numdev effects` says, as a report holds it. Every number is of a model's output beside the
same output in fp64, on the same tokens. `cost` is the Kullback-Leibler divergence from the exact
distribution, in nats a position, where the output is logits, and the squared relative error of the
final states where it is none; both add up over independent small roundings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from numdev.report import Record, Report

Value = float | None
Kind = Literal[
    "whole",  # the model in the format with a kernel: what a user runs
    "repeat",  # that again
    "moved",  # that, the embedded inputs moved by one unit in the last place
    "attention",  # attention alone in the format, all else in fp64
    "predicted",  # that, as the kernel's rounding model has it
    "site",  # one rounding site alone, all else in fp64
    "emulated",  # all sites together, in fp64 arithmetic
    "random",  # that, each rounding up or down at random: what chance does
]


class OfRun(Record):
    """One way to run the model, and what became of its output: over the scored positions of one
    sequence, or of all (means; of `_p999`, `_max` and `first_flip` the worst)."""

    role: ClassVar[str] = "kernel"
    kind: Kind
    format: str
    kernel: str = ""
    options: dict[str, Any] = Field(default_factory=dict)
    at: Literal["", "latents", "image"] = ""  # of a pipeline: which of its two outputs
    site: str = ""
    layer: int | None = None  # with attention in the format in this layer alone
    reason: str | None = None  # why there are no numbers
    cost_p999: Value = None  # the 99.9 % point over positions
    cost_max: Value = None
    log_prob_p999: Value = None
    log_prob_max: Value = None
    log_perplexity: Value = None  # its change, with its sign
    error: Value = None  # rms error of the output (logits less their mean) over its exact rms
    angle: Value = None  # mean angle between final states and the exact ones, degrees
    apart: Value = None  # rms difference from the run with the kernel `against`, over the exact rms
    positions: int = 0
    flips: int | None = None  # positions where another token, or class, is the likeliest
    unexplained: int | None = None
    """Flips that are no near ties: the exact margin is over four times the largest error that the
    format's own roundings make there. Null with a router, whose choices may move one token far."""
    first_flip: int | None = None
    growth: tuple[float, ...] = ()  # the cost in eight equal parts of the sequence

    @property
    def place(self) -> str:
        return {"": "output", "latents": "denoised latents"}.get(self.at, self.at)

    @property
    def run(self) -> tuple[Any, ...]:
        """What tells one run from another."""
        which = (self.kernel, str(self.options), self.site, self.layer)
        return self.kind, self.format, self.at, *which


class OutputRow(OfRun):
    """One run on one sequence."""

    sequence: int
    status: Literal["ok", "skipped", "failed"] = "ok"
    cost: Value = None
    log_prob: Value = None  # |change| of the log-probability of the text's own tokens


class Estimate(Record):
    """A mean over sequences, with its 95 % interval where there are several."""

    mean: float
    low: Value = None
    high: Value = None


class RunSummary(OfRun):
    """One run over all sequences, of which `failed` have no number since the run failed."""

    failed: int = 0
    cost: Estimate | None = None
    log_prob: Estimate | None = None
    share: Estimate | None = None  # of the whole's cost
    over: Estimate | None = None  # its cost over that of what it is held against
    over_worst: Value = None  # of the one sequence where it is largest
    beside: Literal["predicted", "eager", "sites"] | None = None
    """What: the kernel's rounding model, else eager attention; of the whole, all sites together."""

    @model_validator(mode="after")
    def _is_over_something(self) -> Self:
        if self.beside is None and (self.over is not None or self.over_worst is not None):
            raise ValueError("beside: expected what `over` is held against, got null")
        return self


class Budget(Record):
    """Whether the sites of one format account for the whole model's error in it."""

    format: str
    kernel: str  # with which the whole model ran
    parts: Estimate  # the sum of the sites' `cost` over the whole's
    adds_up: bool


class Check(Record):
    """A property that the exact model must have, and whether it has."""

    name: str
    holds: bool | None  # None: it could not be tried
    difference: Value = None  # the largest, over the rms of the exact output
    limit: Value = None
    format: str = ""  # where it is a check in a format
    reason: str = ""  # why it could not be tried, or what is wrong


class EffectsSummary(Record):
    """What a reader wants first."""

    answer: tuple[str, ...]
    runs: tuple[RunSummary, ...]
    budgets: tuple[Budget, ...] = ()
    notes: tuple[str, ...] = ()


class EffectsReport(Report):
    """The result of `numdev effects`."""

    kind: Literal["effects"] = "effects"
    output: Literal["logits", "states"]
    named: bool = False  # whether the kernels were asked for by name
    tokens: tuple[int, ...] = ()  # of the first sequence, where the model reads `input_ids`
    summary: EffectsSummary
    checks: tuple[Check, ...] = ()
    rows: tuple[OutputRow, ...]

    @property
    def measured(self) -> bool:
        """Whether the model ran in any format with any kernel."""
        return any(row.kind == "whole" and row.status == "ok" for row in self.rows)

    @property
    def unmeasured(self) -> str:
        reasons = sorted({row.reason for row in self.rows if row.reason})
        return f"the model ran with no kernel: {', or '.join(reasons)}"

    def tables(self) -> dict[str, Sequence[Record]]:
        return {"rows": self.rows}
