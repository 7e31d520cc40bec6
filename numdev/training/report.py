"""What a training run of variants in lockstep found, as a report holds it (`numdev train`).

All distances are from the golden run's weights, of the same seed and at the same step. Steps count
updates: step 0 is the initialisation, and what a row says of a step is after that many updates,
except `loss`, `grad_norm` and `max_logit`, which are of the batch that the last update used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from numdev.report import Axis, Figure, Record, Report

VariantRole = Literal[
    "golden",
    "flash",
    "low_precision",
    "attention_precision",
    "other_seed",
    "null_repeat",
    "null_rounding",
    "null_ulp",
    "variant",
]
"""What a variant is to the golden run, which is the eager baseline in the working format: `flash`
another kernel in the same format; `low_precision` the same in another format, the whole network;
`attention_precision` the same with attention alone in another format; `other_seed` another
initialisation; `null_repeat` the same again; `null_rounding` the same with outputs of attention
re-rounded at random, at the size of the floor; `null_ulp` the same with all weights moved by one
ulp before the first step; `variant` anything else."""


class VariantRecord(Record):
    """One variant, as it ran."""

    name: str
    role: VariantRole
    kernel: str
    options: dict[str, Any] = Field(default_factory=dict)
    format: str
    """`float32`, `bfloat16` or `float16` (autocast over fp32 weights), `pure bfloat16`."""
    attention_format: str
    ran: str | None = None
    """What the kernel said it ran."""
    differs: dict[str, Any] = Field(default_factory=dict)
    """What else differs from the golden run: seed, data order, optimiser settings, the kernel whose
    gradients it has."""


class TrainRow(Record):
    """One variant at one recorded step."""

    seed: int
    variant: str
    step: int
    loss: float | None
    """Mean nats a token (squared error a pixel for a denoiser); None once it is not finite."""
    grad_norm: float | None
    """Before clipping."""
    lr: float | None
    max_logit: float | None
    """The largest |scaled score| of any head, bf16 and fp32 alike computed in fp32."""
    spectral_norm: float | None
    """The largest over heads and layers of the spectral norm of a head's rows of W_Q."""
    spectral_where: str | None = None
    spectral_norms: tuple[tuple[float, ...], ...] = ()
    """By layer and head."""
    spike: bool = False
    """Whether the loss stood far above its recent past (docs/training.md has the rule)."""
    nulls: dict[str, str] = Field(default_factory=dict)


class DistanceRow(Record):
    """How far a variant's weights are from those of the golden run of its seed."""

    seed: int
    variant: str
    step: int
    of: Literal["weights", "gradient"]
    """The gradient is that of the first batch, before any update: step 0."""
    group: str
    """`all`, or a kind of parameter: embedding, attention, mlp, norm, head."""
    elements: int
    nonfinite: int = 0
    """Of them, not finite in one of the two. Then there is no distance."""
    max_abs: float | None
    mean_abs: float | None
    rel: float | None
    cosine: float | None
    w1: float | None
    spread: float | None
    equal: float | None
    nulls: dict[str, str] = Field(default_factory=dict)


class TrainSummary(Record):
    """What a reader wants first."""

    answer: tuple[str, ...]
    steps: int
    """Taken by every seed."""
    seeds: tuple[int, ...]
    parameters: int
    model: str
    data: str
    axis: Axis | None = None
    """What the figures' curves run along: recorded steps."""


class TrainReport(Report):
    """The result of `numdev train`."""

    kind: Literal["train"] = "train"
    summary: TrainSummary
    variants: tuple[VariantRecord, ...]
    rows: tuple[TrainRow, ...]
    distances: tuple[DistanceRow, ...]
    figures: tuple[Figure, ...] = ()

    def tables(self) -> dict[str, Sequence[Record]]:
        return {"rows": self.rows, "distances": self.distances}
