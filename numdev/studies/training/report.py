"""What the report of `numdev train`, a training run of variants in lockstep, consists of.

All distances are from the golden run's weights, of the same seed and at the same step.
Steps count updates: step 0 is the initialisation. A row is of the weights after that many
updates, except `loss`, `grad_norm` and `max_logit`, which are of the batch that the last
update used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from numdev.report import Axis, Figure, Record, Report

Fields = dict[str, Any]  # fields of a record, by name
# How a variant departs from the golden run
VariantRole = Literal[
    "golden",  # the eager baseline in the working format
    "flash",  # another kernel in the same format
    "low_precision",  # another format for the whole network
    "attention_precision",  # another format in attention alone
    "other_seed",  # another initialisation
    "null_repeat",  # in nothing
    # Outputs of attention re-rounded at random, at the size of the floor
    "null_rounding",
    "null_ulp",  # all weights moved by one ulp before the first step
    "variant",  # anything else
]


class VariantRecord(Record):
    """What one variant computed, and how it departs from the golden run."""

    name: str
    role: VariantRole
    kernel: str
    options: dict[str, object] = Field(default_factory=dict)
    # `float32`, `bfloat16`, `float16` (autocast over fp32 weights), `pure bfloat16`
    format: str
    attention_format: str
    # The dose of a null that re-rounds, in floors
    times: float | None = Field(None, gt=0)
    ran: str | None = None  # what the kernel said it ran
    # What else differs from the golden run: seed, optimiser, the kernel of the gradients
    differs: dict[str, object] = Field(default_factory=dict)


class TrainRow(Record):
    """What was measured of one variant's run with one seed at one recorded step. `nulls`
    has for each number that is None the reason."""

    seed: int
    variant: str
    step: int
    loss: float | None  # mean nats a token; None once it is not finite
    grad_norm: float | None  # before clipping
    lr: float | None
    max_logit: float | None  # the largest |scaled score| of any head, computed in fp32
    spectral_norm: float | None  # the largest of any head's rows of W_Q
    # Whether the loss stood far above its recent past (docs/training.md)
    spike: bool = False
    nulls: dict[str, str] = Field(default_factory=dict)


class DistanceRow(Record):
    """How far a variant's weights, all together, are from those of the golden run of its
    seed at the same step. Numbers are those of `metrics.tensor_distances`; `nulls` has
    for each that is None the reason."""

    seed: int
    variant: str
    step: int
    of: Literal["weights", "gradient"]  # the gradient is of the first batch, at step 0
    elements: int
    # Elements that are not finite in one of the two; with any there is no distance
    nonfinite: int = 0
    max_abs: float | None
    mean_abs: float | None
    rel: float | None
    w1: float | None
    equal: float | None
    nulls: dict[str, str] = Field(default_factory=dict)


class AttentionOutputRow(Record):
    """The errors of a variant's attention on the golden run's own calls of the first
    batch, all together, before any update. A floor is the rms error of rounding the truth
    once."""

    seed: int
    variant: str
    calls: int
    elements: int
    nonfinite: int = 0
    floors: float | None  # rms error
    from_golden: float | None
    """The rms difference from what the golden run's attention returns, in what a
    re-rounding of one floor makes: ulp/√12 of each of its values. (Of values that are
    exact, such as a first row's, the floor is 0.)"""
    # Mean error away from zero over the mean ulp, beyond the floor's own
    bias: float | None
    slope: float | None  # of the error on the truth: 0.02 where an output is off by 2 %
    sharp: float | None = None  # rms error, in floors, with q scaled until scores reach 8
    nulls: dict[str, str] = Field(default_factory=dict)


class TrainSummary(Record):
    """What a training run was, and its answer: sentences, the first being the
    conclusion."""

    answer: tuple[str, ...]
    steps: int  # taken by every seed
    seeds: tuple[int, ...]
    parameters: int
    model: str
    data: str
    axis: Axis | None = None  # what the figures' curves run along: recorded steps


class TrainReport(Report):
    """The result of `numdev train`."""

    kind: Literal["train"] = "train"
    summary: TrainSummary
    variants: tuple[VariantRecord, ...]
    rows: tuple[TrainRow, ...]
    distances: tuple[DistanceRow, ...]
    outputs: tuple[AttentionOutputRow, ...] = ()
    figures: tuple[Figure, ...] = ()

    def tables(self) -> dict[str, Sequence[Record]]:
        """Returns the tables that are written as CSV files, by file name: `rows`,
        `distances` and `outputs`."""
        return {"rows": self.rows, "distances": self.distances, "outputs": self.outputs}
