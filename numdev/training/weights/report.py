"""What `numdev weights` found, as a report holds it.

A row is about the tensors of one name in a set of weights (`of`) and in the one all others are
compared with (`against`), the first on the command line. Differences are of - against; averages are
over the elements that are finite in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from numdev.report import Record, Report

Cast = Literal["bfloat16", "float16", "float8_e4m3fn"]
Matter = Literal[
    "damaged", "missing", "extra", "reshaped", "not finite", "empty", "not compared", "tied"
]


class WeightNumbers(Record):
    """What rows of one tensor and of several have in common. A cast is that of the tensor of
    `against`, over the elements the format holds; its W1 is its mean change, since rounding keeps
    the order; `times` is mean_abs over that."""

    of: str
    against: str
    elements: int
    nonfinite_of: int
    nonfinite_against: int
    max_abs: float | None
    mean_abs: float | None
    rel: float | None  # ||of - against|| / ||against||
    cosine: float | None
    equal: float | None  # the share of elements
    bfloat16_mean_abs: float | None
    bfloat16_nonfinite: int | None  # that the format cannot hold, or that were not finite
    bfloat16_times: float | None
    float16_mean_abs: float | None
    float16_nonfinite: int | None
    float16_times: float | None
    float8_e4m3fn_mean_abs: float | None
    float8_e4m3fn_nonfinite: int | None
    float8_e4m3fn_times: float | None
    nulls: dict[str, str] = Field(default_factory=dict)  # number to the reason it is null

    def times(self, format: str) -> float | None:
        """How many times what a cast to the format would have changed."""
        value: float | None = getattr(self, f"{format}_times")
        return value


class TensorRow(WeightNumbers):
    """One tensor."""

    tensor: str
    layer: str | None
    kind: str
    shape: tuple[int, ...]
    stored_of: str
    stored_against: str
    w1: float | None  # blind to which value stands where
    spread: float | None  # the mean absolute deviation of `against` from its mean: W1's scale
    w1_rel: float | None


class GroupRow(WeightNumbers):
    """Tensors together, every element counting alike."""

    group: Literal["all", "kind", "layer"]
    name: str
    tensors: int
    identical: int  # of them, equal in every element
    max_tensor: str | None
    mean_w1: float | None  # of the tensors' W1, by elements: never below W1 of all their values
    mean_spread: float | None
    mean_w1_rel: float | None
    yardstick: Cast | None
    """The first cast coarser than what most tensors of `against` are stored in: a cast to what they
    are in changes nothing, to a finer format next to nothing."""
    times_median: float | None  # the median tensor's; then the largest, and whose that is
    times_largest: float | None
    times_tensor: str | None


class Remark(Record):
    """What there is to say of one tensor of one set of weights, or of a whole file."""

    source: str
    tensor: str | None
    what: Matter
    words: str


class SourceRecord(Record):
    """One set of weights."""

    name: str
    files: tuple[str, ...]
    tensors: int
    elements: int
    sha256: str  # over the names and contents of the files that are there
    prefix_removed: str = ""
    tied: dict[str, str] = Field(default_factory=dict)
    """Names that share the storage of another; it is compared once."""


class WeightsSummary(Record):
    """What a reader wants first."""

    answer: tuple[str, ...]
    notes: tuple[str, ...]


class WeightsReport(Report):
    """The result of `numdev weights`, which judges nothing."""

    kind: Literal["weights"] = "weights"
    summary: WeightsSummary
    tested: tuple[str, ...] = ()
    sources: Annotated[tuple[SourceRecord, ...], Field(min_length=1)]
    """The first is the one that all others are compared with."""
    rows: tuple[TensorRow, ...]
    groups: tuple[GroupRow, ...]
    remarks: tuple[Remark, ...] = ()

    @property
    def damage(self) -> tuple[Remark, ...]:
        """What could not be read, and so was not compared."""
        return tuple(r for r in self.remarks if r.what == "damaged")

    @property
    def totals(self) -> tuple[GroupRow, ...]:
        """All compared tensors together, of each set beside the first."""
        return tuple(g for g in self.groups if g.group == "all")

    def tables(self) -> dict[str, Sequence[Record]]:
        return {"rows": self.rows, "groups": self.groups, "remarks": self.remarks}
