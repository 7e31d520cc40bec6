"""What `numdev weights` found, as a report holds it.

Every row is about two tensors of one name: that of a set of weights (`of`) and that of the set all
others are compared with (`against`), which is the first one named on the command line. Differences
are of - against; averages are over the elements that are finite in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from numdev.report import Record, Report


class WeightNumbers(Record):
    """What rows of one tensor and rows of several have in common. Elements that are NaN or infinite
    in either are left out of every number. A cast is that of the tensor of `against`, over the
    elements the format holds; W1 of a cast is its mean change, since rounding keeps the order;
    `times` is mean_abs over that."""

    of: str
    against: str
    elements: int
    nonfinite_of: int
    nonfinite_against: int
    max_abs: float | None
    mean_abs: float | None
    rel: float | None
    """||of - against|| / ||against||."""
    cosine: float | None
    equal: float | None
    """The share of elements that are equal."""
    bfloat16_mean_abs: float | None
    bfloat16_w1: float | None
    bfloat16_nonfinite: int | None
    """Elements the format cannot hold, or that were not finite to begin with."""
    bfloat16_times: float | None
    float16_mean_abs: float | None
    float16_w1: float | None
    float16_nonfinite: int | None
    float16_times: float | None
    float8_e4m3fn_mean_abs: float | None
    float8_e4m3fn_w1: float | None
    float8_e4m3fn_nonfinite: int | None
    float8_e4m3fn_times: float | None
    nulls: dict[str, str] = Field(default_factory=dict)
    """Number to the reason it is null."""

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
    w1: float | None
    """Blind to which value stands where."""
    spread: float | None
    """The mean absolute deviation of `against` from its mean: the scale of W1."""
    w1_rel: float | None


class GroupRow(WeightNumbers):
    """Tensors together: elements count alike, so sums add up over tensors."""

    group: Literal["all", "kind", "layer"]
    name: str
    tensors: int
    mean_w1: float | None
    """The mean of the tensors' W1 by their elements: never below W1 of all their values."""
    mean_spread: float | None
    mean_w1_rel: float | None


Matter = Literal[
    "damaged", "missing", "extra", "reshaped", "not finite", "empty", "not compared", "tied"
]


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
    sha256: str
    """Over the names and contents of the files that are there."""
    prefix_removed: str = ""
    tied: dict[str, str] = Field(default_factory=dict)
    """Names that share the storage of another; it is compared once."""


class PairSummary(Record):
    """One set of weights against the first, all tensors together."""

    of: str
    against: str
    tensors: int
    """Compared."""
    identical: int
    """Of them, equal in every element."""
    elements: int
    max_abs: float | None
    max_tensor: str | None
    mean_abs: float | None
    rel: float | None
    mean_w1: float | None
    yardstick: Literal["bfloat16", "float16", "float8_e4m3fn"] | None
    """The first format of casts coarser than most tensors of `against`; null: there is none."""
    times_median: float | None
    """mean_abs over what a cast to the yardstick changes, of the median tensor; then the largest,
    and which tensor that is."""
    times_largest: float | None
    times_tensor: str | None


class WeightsSummary(Record):
    """What a reader wants first."""

    answer: tuple[str, ...]
    notes: tuple[str, ...]
    pairs: tuple[PairSummary, ...]


class WeightsReport(Report):
    """The result of `numdev weights`."""

    kind: Literal["weights"] = "weights"
    summary: WeightsSummary
    tested: tuple[str, ...] = ()
    """Nothing is judged."""
    sources: Annotated[tuple[SourceRecord, ...], Field(min_length=1)]
    """The first is the one that all others are compared with."""
    rows: tuple[TensorRow, ...]
    groups: tuple[GroupRow, ...]
    remarks: tuple[Remark, ...] = ()

    @property
    def damage(self) -> tuple[Remark, ...]:
        """What could not be read, and so was not compared."""
        return tuple(r for r in self.remarks if r.what == "damaged")

    def tables(self) -> dict[str, Sequence[Record]]:
        return {"rows": self.rows, "groups": self.groups, "remarks": self.remarks}
