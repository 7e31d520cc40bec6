"""What `numdev weights` found, as a report holds it.

A row is about the tensors of one name in a set of weights (`of`) and in the one all others are
compared with (`against`), the first on the command line. Differences are of - against; averages are
over the elements that are finite in both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from numdev.report import Record, Report

ALL = "all"
Cast = Literal["bfloat16", "float16", "float8_e4m3fn"]
Matter = Literal["damaged", "not finite", "reshaped", "missing", "extra", "not compared"]


class WeightNumbers(Record):
    """What rows of one tensor and of several have in common. `times` is mean_abs over what a cast
    of the tensor of `against` changes, over the elements the format holds; W1 of a cast is that
    too, since rounding keeps the order."""

    of: str
    against: str
    elements: int
    nonfinite_of: int
    nonfinite_against: int
    max_abs: float | None
    mean_abs: float | None
    rel: float | None  # ||of - against|| / ||against||
    equal: float | None  # the share of elements
    bfloat16_times: float | None
    float16_times: float | None
    float8_e4m3fn_times: float | None
    nulls: dict[str, str] = Field(default_factory=dict)  # number to the reason it is null

    def times(self, format: str) -> float | None:
        """How many times what a cast to the format would have changed."""
        value: float | None = getattr(self, f"{format}_times")
        return value


class TensorRow(WeightNumbers):
    tensor: str
    kind: str
    shape: tuple[int, ...]
    w1: float | None  # of its values; blind to which stands where
    zero: bool = False  # in both: such a tensor says nothing of how equal the sets are
    stored_of: str
    stored_against: str


class GroupRow(WeightNumbers):
    """Tensors together, every element counting alike: all, or those of one kind of parameter."""

    name: str
    tensors: int
    mean_w1: float | None
    """The mean of the tensors' W1, by elements: another number than W1 of all values pooled, which
    it is never below."""
    identical: int  # of them, equal in every element, and not 0 throughout in both
    zeros: int = 0  # of them, 0 throughout in both
    max_tensor: str | None
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
    name: str
    tensors: int
    elements: int
    sha256: str  # over the names and contents of the files that are there


class WeightsSummary(Record):
    answer: tuple[str, ...]


class WeightsReport(Report):
    """The result of `numdev weights`, which judges nothing."""

    kind: Literal["weights"] = "weights"
    summary: WeightsSummary
    sources: tuple[SourceRecord, ...]  # the first is the one that all others are compared with
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
        return tuple(g for g in self.groups if g.name == ALL)

    def tables(self) -> dict[str, Sequence[Record]]:
        return {"rows": self.rows, "groups": self.groups, "remarks": self.remarks}
