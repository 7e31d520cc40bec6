"""The report of `numdev weights`.

A row is about the tensors of one name in a set of weights (`of`) and in the one all
others are compared with (`against`), the first on the command line. A difference is `of`
less `against`; averages are over the elements that are finite in both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from numdev.report import Axis, Figure, Record, Report
from numdev.studies.training.report import VariantRole

ALL: Literal["all"] = "all"
# A layer by the first number in a tensor's name; `none` where it has none
Layer = int | Literal["all", "none"]
Cast = Literal["bfloat16", "float16", "float8_e4m3fn"]
Matter = Literal["damaged", "not finite", "reshaped", "missing", "extra", "not compared"]


class WeightNumbers(Record):
    """The numbers that rows of one tensor and of several have in common. `bfloat16_times`
    and the like are mean_abs over the mean change that a cast of the tensor of `against`
    makes, over the elements that the format can represent. That is W1 of a cast too,
    since rounding preserves the order."""

    of: str
    against: str
    elements: int
    nonfinite_of: int
    nonfinite_against: int
    max_abs: float | None
    mean_abs: float | None
    rel: float | None  # ||of - against|| / ||against||
    equal: float | None  # the share of elements; a tensor that is 0 in both has none
    bfloat16_times: float | None
    float16_times: float | None
    float8_e4m3fn_times: float | None
    nulls: dict[str, str] = Field(default_factory=dict)  # number to the reason it is null

    @property
    def is_equal(self) -> bool:
        """Whether every element is finite and equal in both sets; False for tensors that
        are 0 throughout in both, which have no `equal`."""
        return self.equal == 1 and not (self.nonfinite_of or self.nonfinite_against)

    def multiple_of_cast(self, format: str) -> float | None:
        """Returns the mean difference over the mean change that a cast of `against` to
        `format` would make; None where the cast changes nothing, or the number is
        unknown. `format`: `bfloat16`, `float16` or `float8_e4m3fn`; another raises
        AttributeError."""
        value: float | None = getattr(self, f"{format}_times")
        return value


class TensorRow(WeightNumbers):
    """The tensors of one name in a set of weights and in the first."""

    tensor: str
    kind: str
    shape: tuple[int, ...]
    w1: float | None  # of its values; blind to which stands where
    zero: bool = False  # 0 in both sets: then it does not show how equal they are
    stored_of: str
    stored_against: str


class Together(WeightNumbers):
    """Several tensors of one set together, compared with those of the first set; every
    element has the same weight."""

    tensors: int
    mean_w1: float | None
    """The mean of the tensors' W1, by elements: another number than W1 of all values
    pooled, which it is never below."""
    identical: int  # tensors equal in every element, and not 0 throughout in both
    zeros: int = 0  # tensors that are 0 throughout in both
    max_tensor: str | None
    yardstick: Cast | None
    """The first cast coarser than the formats that most tensors of `against` are stored
    in. A cast to their own format would change nothing, one to a finer next to
    nothing."""
    times_median: float | None  # of the median tensor; then the largest, and its tensor
    times_largest: float | None
    times_tensor: str | None


class GroupRow(Together):
    """All tensors of a set (`name` is `all`), or those of one kind of parameter (`name`
    is the kind)."""

    name: str


class RunRecord(Record):
    """A run with weights of several steps. `name`: its variant's, or the list that the
    user gave."""

    name: str
    role: VariantRole
    times: float | None = None  # the dose of a null that re-rounds, in floors
    # Whether the user declares that it differs from the first by rounding alone
    null: bool = False


class WeightsCell(Together):
    """A run compared with the first, of one seed at one step: all tensors together, or
    those of a layer, of a kind, or of a layer and kind."""

    seed: int
    step: int
    layer: Layer
    kind: str  # or ALL


class ChanceComparison(Record):
    """A run's distance in a layer and a kind at a step, beside the distance that chance
    alone makes in the same tensors, seed and step: that of null runs re-rounded at one
    floor, or, without any, of all null runs of at most one floor."""

    variant: str
    role: VariantRole
    layer: Layer
    kind: str
    step: int
    metric: Literal["mean_abs", "mean_w1", "max_abs"]
    value: float | None  # the geometric mean over seeds
    null: float | None  # that of the nulls, in each seed the geometric mean over its runs
    ratio: float | None  # value over null, by seed: the geometric mean, then the ends
    least: float | None
    most: float | None
    # The distance over that of the farthest null run of at most one floor, in the seed
    # where this is least
    margin: float | None
    stands_out: bool | None
    why: str | None = None  # why it is not judged


class QuantileRow(Record):
    """A quantile of a tensor's values in a run less that of the first run (`shift`), and
    the least and largest shift of the same seed's null runs. Of tensors in a layer and
    kind that stand out."""

    variant: str
    seed: int
    step: int
    tensor: str
    quantile: float
    against: float  # of the first run's values
    shift: float
    null_least: float | None
    null_most: float | None


class Remark(Record):
    """A remark on one tensor of a set of weights, or (`tensor` None) on the set."""

    source: str
    tensor: str | None
    what: Matter
    words: str


class SourceRecord(Record):
    """A set of weights that was read."""

    name: str
    tensors: int
    elements: int
    sha256: str  # over the names and contents of the files that exist


class WeightsSummary(Record):
    """The answer, sentences, and the axis of the figures over steps."""

    answer: tuple[str, ...]
    axis: Axis | None = None  # of the figures, over steps


class WeightsReport(Report):
    """The result of `numdev weights`, which judges nothing."""

    kind: Literal["weights"] = "weights"
    summary: WeightsSummary
    # The first is the one that all others are compared with
    sources: tuple[SourceRecord, ...]
    rows: tuple[TensorRow, ...] = ()
    groups: tuple[GroupRow, ...] = ()
    remarks: tuple[Remark, ...] = ()
    # Over the steps of a training, in place of `rows` and `groups`:
    # The first is the one that all others are compared with
    runs: tuple[RunRecord, ...] = ()
    cells: tuple[WeightsCell, ...] = ()
    standings: tuple[ChanceComparison, ...] = ()
    quantiles: tuple[QuantileRow, ...] = ()
    early: tuple[int, ...] = ()  # steps before curves bend (docs/bounds.md)
    figures: tuple[Figure, ...] = ()

    @property
    def damage(self) -> tuple[Remark, ...]:
        """Returns the remarks on what could not be read, and so was not compared."""
        return tuple(r for r in self.remarks if r.what == "damaged")

    @property
    def totals(self) -> tuple[GroupRow, ...]:
        """Returns the rows of all compared tensors together, one for each set but the
        first."""
        return tuple(g for g in self.groups if g.name == ALL)

    def tables(self) -> dict[str, Sequence[Record]]:
        """Returns the tables that are written as CSV files, by file name: of runs over
        steps `cells`, `standings`, `quantiles` and `remarks`; else `rows`, `groups` and
        `remarks`."""
        if self.runs:
            return {
                "cells": self.cells,
                "standings": self.standings,
                "quantiles": self.quantiles,
                "remarks": self.remarks,
            }
        return {"rows": self.rows, "groups": self.groups, "remarks": self.remarks}
