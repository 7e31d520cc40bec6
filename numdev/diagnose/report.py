"""What `numdev diagnose` says, as a report holds it: per head the conditions of biased rounding,
what the errors then do to delta and to the gradient of W_Q, and what each cure changes.

Letters are those of Qiu & Yao (arXiv 2510.04212); docs/method.md has every formula. `error` is
always the value computed less the exact one. An exact value is in fp64 from the same rounded q, k,
v and dO. An ulp is that of the working format at the exact value's own size, or where that is what
is left of larger terms, at a sixteenth of their sum |P V|. A t is over means of blocks of rows,
which `numdev.diagnose.statistics` describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from numdev.report import Axis, Figure, Record, Report

Formula = Literal["dO*O", "dP*P"]


class Checkpoint(Record):
    """One set of weights that was diagnosed."""

    name: str
    step: int | None = None
    """Of training, where its name or the run it is from tells."""
    sha256: str | None = None


class Place(Record):
    """One query head of one call, for one checkpoint. Means are over its sequences and rows."""

    checkpoint: str
    step: int | None = None
    case: str
    module: str = ""
    layer: int | None = None
    call: int = 0
    head: int


class Bias(Record):
    """Signed errors in ulps: the mean over all elements, and how sure it is."""

    mean: float | None = None
    rms: float | None = None
    t: float | None = None
    """Of the mean along the exact value's sign, over rows taken in blocks; null where there are too
    few."""
    outward: float | None = None
    """The mean along the sign of the exact value: positive means away from zero."""
    feature: float | None = None
    """The mean of the feature in which it is largest."""
    worst_feature: int | None = None


class DeltaError(Record):
    """The error of delta by one formula. Relative to the rms over rows of rowsum|dO o O|."""

    formula: Formula
    mean: float | None = None
    rms: float | None = None
    t: float | None = None
    """Of the mean, over rows taken in blocks."""
    run: float | None = None
    """max over T of |sum of the errors of rows up to T|, over rms sqrt(rows), worst sequence: near
    1 for errors of random sign, up to sqrt(rows) for errors of one sign."""
    dw_q: float | None = None
    """|dW_Q error that it alone makes by formula 2| / |dW_Q|, Frobenius norms, this head's rows of
    W_Q. Null where the call's projection is not known."""


class Imbalance(Record):
    """Delta less the delta with which rows of dS sum to zero, rowsum(dP o P) / rowsum(P) of the dP
    and P that the attention has. Numbers as those of a `DeltaError`."""

    mean: float | None = None
    rms: float | None = None
    t: float | None = None
    run: float | None = None


class HeadRow(Place):
    """The risk factors of one head, and what came of them."""

    rows: int
    """Query rows that see more than one key, over all sequences."""
    # Ties, and what P is at them.
    tied: float | None = None
    """The share of rows whose largest S, as it was rounded, is met by more than one key."""
    nearly_tied: float | None = None
    """The share whose largest S is within 1e-3 of that of another key."""
    tied_keys: float | None = None
    """Keys at the maximum, mean over tied rows."""
    ones: float | None = None
    """The share of rows with P-bar exactly 1 at two keys or more, as it meets V; in tiles that come
    under a maximum no smaller than any other of the row's."""
    powers: float | None = None
    """The share of a row's probability that lies at keys where P (P-bar where it is not normalised
    before V) is an exact power of two; mean over rows."""
    # Where attention goes.
    sink_key: int | None = None
    """The key that receives most probability."""
    sink_mass: float | None = None
    """Its share, mean over the rows that see it."""
    sink_v: float | None = None
    """|V| there over the median |V| of all keys that any row sees, mean over sequences."""
    one_signed: float | None = None
    """The share of V's features that have one sign over the keys at the maximum (within 1e-3), mean
    over rows that have several; by chance 2^(1 - keys)."""
    # What is wrong in forward.
    pv: Bias
    """The error that rounding the product P V (`pv`, `accumulator`, `state`) alone makes in
    P-bar V."""
    out: Bias
    """The whole error of O."""
    # What is wrong in backward.
    dp_rel: float | None = None
    """|dP error| / |dP|, over what rows see."""
    ds_row_sum: float | None = None
    """rms over rows of sum_j dS_ij, over the rms of sum_j |dS_ij|; exactly 0 without rounding."""
    ds_row_sum_t: float | None = None
    """Of its mean."""
    delta: tuple[DeltaError, ...] = ()
    """By the formula the attention uses, first; then by the other one, the rest unchanged."""
    delta_unbalanced: Imbalance = Imbalance()
    """The part of delta's error that its own dP and P do not share: where S is rounded, P is
    another, and so, rightly, is its delta."""
    # What it does to the weights.
    similarity: float | None = None
    """The share of sum_T |R_T|^2 in the leading direction of R_T = (P K)[T]^T X[T], vectors of
    head_dim * width: 1 where all are parallel, 1 / rank where none is preferred."""
    similarity_cos: float | None = None
    """The mean cosine of R_T and R_T' over pairs T != T'."""
    similarity_tokens: int | None = None
    """Of how many tokens these are: at most 2048, evenly spread over all sequences."""
    dw_q_error: float | None = None
    """|dW_Q error| / |dW_Q| of this head, with everything rounded that the recipe rounds."""
    dw_q_predicted: float | None = None
    """The part that formula 2 predicts from the measured error of delta, same unit."""
    dw_q_cos: float | None = None
    """The cosine of the predicted and the whole error."""
    dw_q_unbalanced: float | None = None
    """The part that formula 2 predicts from `delta_unbalanced`, same unit."""
    dw_q_norm: float | None = None
    """|dW_Q| of this head, exact: the unit of the three above and of `DeltaError.dw_q`."""
    spectral_norm: float | None = None
    """The largest singular value of the head's part of W_Q."""
    spectral_ratio: float | None = None
    """That over the median of the layer's heads."""
    nulls: dict[str, str] = Field(default_factory=dict)
    """Metric name to the reason it is null. Of `pv`, `out` and `delta` that is the name where there
    is nothing of it, and such as `pv.t` where a part is missing."""


class CureRow(Place):
    """What one cure does for one head: the same inputs, the attention with one thing changed."""

    cure: str
    """`none` is the attention as it is."""
    options: dict[str, Any] = Field(default_factory=dict)
    """What it changes in the options of `emulated`."""
    pv: Bias
    out: Bias
    delta_mean: float | None = None
    delta_rms: float | None = None
    delta_t: float | None = None
    ds_row_sum: float | None = None
    dq_rel: float | None = None
    """|dQ error| / |dQ|."""
    dk_rel: float | None = None
    dv_rel: float | None = None
    dw_q_error: float | None = None
    nonfinite: int = 0
    """Elements of O or a gradient that are not finite: where the cure breaks."""
    broken: str = ""
    """Why they are not, where that is known."""
    nulls: dict[str, str] = Field(default_factory=dict)
    """As a `HeadRow` has them; where the cure contradicts the attention, all, and why."""


class KernelRow(Place):
    """A real kernel on the same inputs, as far as it shows from outside."""

    kernel: str
    options: dict[str, Any] = Field(default_factory=dict)
    status: Literal["ok", "skipped", "failed"] = "ok"
    reason: str | None = None
    ran: str | None = None
    out: Bias = Bias()
    delta: DeltaError | None = None
    """From its own O, the sum in fp64."""
    dq_rel: float | None = None
    dw_q_error: float | None = None


class RunningError(Place):
    """The running sum over tokens of the error of delta, of one sequence, relative as `DeltaError`
    and divided by sqrt(rows)."""

    formula: Formula
    tokens: tuple[int, ...]
    sums: tuple[float, ...]

    @model_validator(mode="after")
    def _alike(self) -> RunningError:
        if len(self.tokens) != len(self.sums):
            raise ValueError("a sum for every token")
        return self


class Ranked(Place):
    """A head's place in the answer."""

    rank: int
    score: float
    """|dW_Q error| of this head, by all its roundings, over |dW_Q| of all heads of its call: by how
    much the head moves its layer's gradient. Where W_Q is not known, |delta's mean error|."""
    conditions: tuple[str, ...]
    """Which conditions of the chain it meets, by name."""
    missing: tuple[str, ...] = ()
    """Which it does not."""
    cured_by: tuple[str, ...] = ()
    """Cures that take most of the error of delta away, best first."""
    evidence: str
    """One sentence."""


class DiagnoseSummary(Record):
    """What a reader wants first."""

    answer: tuple[str, ...]
    ranking: tuple[Ranked, ...]
    notes: tuple[str, ...] = ()
    """What could not be seen, and why."""
    axis: Axis | None = None
    """Steps of training, where there are several checkpoints with steps."""


class DiagnoseReport(Report):
    """The result of `numdev diagnose`."""

    kind: Literal["diagnose"] = "diagnose"
    summary: DiagnoseSummary
    attention: dict[str, Any]
    """The options of `emulated` that were diagnosed."""
    checkpoints: tuple[Checkpoint, ...]
    heads: tuple[HeadRow, ...]
    cures: tuple[CureRow, ...] = ()
    costs: dict[str, str] = Field(default_factory=dict)
    """Of each cure: where it fails, or what it takes."""
    kernels: tuple[KernelRow, ...] = ()
    running: tuple[RunningError, ...] = ()
    """Of the heads at fault, then of those that rank first; a few."""
    figures: tuple[Figure, ...] = ()
    """Over training, where there are several checkpoints with steps."""

    @model_validator(mode="after")
    def _has_ranked(self) -> DiagnoseReport:
        there = {(h.checkpoint, h.case, h.head) for h in self.heads}
        for r in self.summary.ranking:
            if (r.checkpoint, r.case, r.head) not in there:
                raise ValueError(f"{r.case} head {r.head} is ranked, and has no row")
        return self

    @property
    def measured(self) -> bool:
        """Whether the error of delta of any head is known."""
        return any(delta.mean is not None for head in self.heads for delta in head.delta)

    @property
    def unmeasured(self) -> str:
        reasons = sorted({head.nulls["delta"] for head in self.heads if "delta" in head.nulls})
        return f"no head's error of delta could be measured: {', or '.join(reasons)}"

    def tables(self) -> dict[str, Sequence[Record]]:
        named = {"heads": self.heads, "cures": self.cures, "kernels": self.kernels}
        return {name: rows for name, rows in named.items() if rows}
