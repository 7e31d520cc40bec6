"""What the report of `numdev diagnose` consists of, in the letters of Qiu & Yao, arXiv
2510.04212 (docs/derivations.md). An error is the computed value less the exact one in
fp64, from the same rounded q, k, v and dO. Ulps and t are those of
`numdev.studies.diagnose.head_error_means`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self, TypedDict

from pydantic import Field, model_validator

from numdev.report import Axis, Figure, Record, Report

Value = float | None
Fields = dict[str, object]  # fields of a record, by name


class DiagnosedCheckpoint(Record):
    """One set of weights that was diagnosed."""

    name: str
    step: int | None = None  # of training, where its name or the run it is from tells
    sha256: str | None = None


class CallFields(TypedDict):
    """The fields of a record that say which call of which checkpoint it is about."""

    checkpoint: str
    step: int | None
    case: str
    module: str
    layer: int | None
    call: int


class HeadFields(CallFields):
    """The fields of a record that say which head of which call of which checkpoint it is
    about."""

    head: int


class HeadPlace(Record):
    """One query head of one call, for one checkpoint. Means are over its sequences and
    rows."""

    checkpoint: str
    step: int | None = None
    case: str
    module: str = ""
    layer: int | None = None
    call: int = 0
    head: int

    @property
    def place(self) -> HeadFields:
        """Returns the fields that say where the head is, for another record on this
        head."""
        return {
            "checkpoint": self.checkpoint,
            "step": self.step,
            "case": self.case,
            "module": self.module,
            "layer": self.layer,
            "call": self.call,
            "head": self.head,
        }

    @property
    def brief(self) -> str:
        """Returns the head's short name: `L3H5`, or `L3#1 H5` in a layer's second call.
        Where the layer is None, the module's name, or the case's, stands in its place:
        `attn H5`."""
        where = f"{self.module or self.case} " if self.layer is None else f"L{self.layer}"
        return f"{where}{f'#{self.call} ' if self.call else ''}H{self.head}"

    @property
    def key(self) -> tuple[str, str, int]:
        """Returns what identifies the head: its checkpoint, its case and its number."""
        return self.checkpoint, self.case, self.head


class HeadRow(HeadPlace):
    """The numbers of the chain for one query head, from ties to the error of dW_Q. A bias
    is the mean error in ulps along the exact value's sign, positive away from zero; a t
    is that of a mean, over blocks of rows."""

    rows: int  # query rows that see more than one key, over all sequences
    # Ties, and what P is at them.
    # Share of rows whose largest S, as rounded, is met by more than one key
    tied: Value = None
    # Share of rows with P-bar exactly 1 at two keys or more, as it meets V
    ones: Value = None
    # Share of a row's probability at keys where P is an exact power of two
    powers: Value = None
    # Share of V's features of one sign over the keys within 1e-3 of the maximum, mean
    # over rows with several; by chance 2^(1 - keys).
    one_signed: Value = None
    # Forward.
    # Of P-bar V, by rounding the product alone: `pv`, `accumulator`, `state`
    pv_bias: Value = None
    pv_t: Value = None
    out_bias: Value = None  # of O, by all roundings
    out_t: Value = None
    # Backward: errors of delta, relative to the rms over rows of rowsum|dO o O|.
    # Rms of sum_j dS_ij over that of sum_j |dS_ij|; unrounded exactly 0
    ds_row_sum: Value = None
    delta_mean: Value = None
    delta_t: Value = None
    # Largest |running sum of errors| of a sequence over rms sqrt(rows): near 1 for errors
    # of random sign, up to sqrt(rows) for errors of one sign.
    delta_run: Value = None
    # The weights. |dW_Q error| / |dW_Q| of the head, Frobenius: that which delta makes by
    # formula 2 where it differs from rowsum(dP o P) / rowsum(P) of the dP and P that the
    # attention has; and that of all roundings.
    moved: Value = None
    dw_q_error: Value = None
    dw_q_norm: Value = None  # |dW_Q| of this head, exact: the unit
    # Share of sum_T |R_T|^2 in one direction, R_T = (P K)[T]^T X[T]; all parallel: 1.
    similarity: Value = None
    spectral_norm: Value = None  # the largest singular value of the head's part of W_Q
    spectral_ratio: Value = None  # that over the median of the layer's heads
    nulls: dict[str, str] = Field(default_factory=dict)  # why a number is null


class SeenRow(HeadPlace):
    """The numbers that any attention has of one head on the same inputs, or why it has
    none."""

    options: dict[str, object] = Field(default_factory=dict)
    reason: str | None = None  # why there are no numbers
    out_bias: Value = None
    delta_mean: Value = None
    delta_t: Value = None
    dq_rel: Value = None  # |dQ error| / |dQ|
    dw_q_error: Value = None


class CureRow(SeenRow):
    """What one cure does for one head: the attention with one thing changed."""

    cure: str  # `none` is the attention as it is
    # Elements of O or a gradient that are not finite: where the cure breaks
    nonfinite: int = 0


class KernelRow(SeenRow):
    """What a real kernel does for one head, as far as it shows from outside: delta is of
    its output O, summed in fp64."""

    kernel: str
    ran: str | None = None


class Ranked(HeadPlace):
    """A head in the order of the answer, with what decided its rank."""

    rank: int
    # |dW_Q error| over |dW_Q| of its layer; without W_Q |delta's mean error|
    score: float
    conditions: tuple[str, ...]  # of the chain that it meets, by name
    missing: tuple[str, ...] = ()  # that it does not
    # Cures that leave less than half of the error, best first
    cured_by: tuple[str, ...] = ()


class DiagnoseSummary(Record):
    """The answer in sentences, and the heads of the last checkpoint in their order."""

    answer: tuple[str, ...]
    ranking: tuple[Ranked, ...]
    notes: tuple[str, ...] = ()  # what could not be seen, and why
    # Steps of training, where there are several checkpoints with steps
    axis: Axis | None = None


class DiagnoseReport(Report):
    """The result of `numdev diagnose`."""

    kind: Literal["diagnose"] = "diagnose"
    summary: DiagnoseSummary
    attention: dict[str, object]  # the options of `emulated` that were diagnosed
    checkpoints: tuple[DiagnosedCheckpoint, ...]
    heads: tuple[HeadRow, ...]
    cures: tuple[CureRow, ...] = ()
    # By cure: where it fails, what it takes
    costs: dict[str, str] = Field(default_factory=dict)
    kernels: tuple[KernelRow, ...] = ()
    figures: tuple[Figure, ...] = ()  # over training

    @model_validator(mode="after")
    def _check_ranking(self) -> Self:
        """Returns the report as it is. Raises ValueError where the ranking has a head
        that the report lacks."""
        heads = {head.key for head in self.heads}
        if strange := [r.brief for r in self.summary.ranking if r.key not in heads]:
            raise ValueError(
                f"summary.ranking: expected heads of the report, got {strange[0]}"
            )
        return self

    @property
    def measured(self) -> bool:
        """Whether at least one head has a mean error of delta."""
        return any(head.delta_mean is not None for head in self.heads)

    @property
    def unmeasured(self) -> str:
        """Returns a clause that says why no head has a mean error of delta."""
        reasons = sorted(
            {h.nulls["delta_mean"] for h in self.heads if "delta_mean" in h.nulls}
        )
        return f"no head's error of delta could be measured: {', or '.join(reasons)}"

    def tables(self) -> dict[str, Sequence[Record]]:
        """Returns the tables that are written as CSV files, by file name: those of
        `heads`, `cures` and `kernels` that have rows."""
        named = {"heads": self.heads, "cures": self.cures, "kernels": self.kernels}
        return {name: rows for name, rows in named.items() if rows}
