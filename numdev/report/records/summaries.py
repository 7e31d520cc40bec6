"""What a reader wants first: rows brought together, once, when the report is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field, model_validator

from numdev.report.records.base import Attends, Phase, Record, Role, Tensor
from numdev.report.records.rows import SiteShare, WorstRow


class Explanation(Record):
    """Which roundings make one kernel's errors in one tensor: all its calls together."""

    kernel: str
    options: dict[str, Any] = Field(default_factory=dict)
    format: str
    tensor: Tensor
    known: bool
    nearest: str | None  # the emulation that makes its errors, or comes nearest, in words
    residual: float | None  # medians over its calls, here and below
    next_preset: str | None
    next_residual: float | None
    explained: int
    calls: int  # with an error to explain; `explained` of them are
    reason: str | None = None  # why nothing could be compared; null where there is no error at all
    sites: tuple[SiteShare, ...] = ()
    sentence: str


class GradientSummary(Record):
    """One gradient of one kernel in one format over all heads and calls."""

    tensor: Tensor
    ok: int
    floor_ratio: float | None = None
    floor_ratio_worst: float | None = None
    floor_ratio_where: str | None = None
    baseline_ratio: float | None = None
    expected_ratio: float | None = None
    expected_ratio_worst: float | None = None
    expected_ratio_where: str | None = None
    row_rel: float | None = None
    amplification: float | None = None
    nonfinite: int = 0


class _OfKernel(Record):
    """Whose numbers they are."""

    kernel: str
    options: dict[str, Any]
    role: Role
    format: str


class KernelSummary(_OfKernel):
    """One kernel in one format over all heads and calls: a metric is its median over heads,
    `_worst` the largest and `_where` the layer and head of that."""

    ok: int
    skipped: int
    failed: int
    reasons: tuple[str, ...]
    ran: tuple[str, ...]
    rows_measured: int | None = None  # of each head, where sampled: then maxima are lower bounds
    out_formats: tuple[str, ...] = ()
    mean_abs: float | None = None
    max_abs: float | None = None
    rms: float | None = None
    row_rel: float | None = None
    w1: float | None = None
    nonfinite: int = 0
    floor_ratio: float | None = None
    floor_ratio_worst: float | None = None
    floor_ratio_where: str | None = None
    baseline_ratio: float | None = None
    baseline_ratio_worst: float | None = None
    flash_vs_precision: float | None = None
    flash_vs_precision_worst: float | None = None
    flash_vs_precision_where: str | None = None
    flash_vs_precision_w1: float | None = None
    flash_vs_low_precision: float | None = None  # from the baseline, over its way from float32
    flash_vs_low_precision_w1: float | None = None
    lower_format: str | None = None
    flash_vs_lower: float | None = None  # from the baseline, over its way on to `lower_format`
    flash_vs_lower_w1: float | None = None
    expected_ratio: float | None = None
    expected_ratio_worst: float | None = None
    expected_ratio_where: str | None = None
    expected_ratio_interval: tuple[float, float] | None = None  # of the worst head, where sampled
    worst_row: float | None = None  # the largest over heads
    worst_row_where: str | None = None
    gradients: tuple[GradientSummary, ...] = ()
    noise: float | None = None  # the largest, over the floor's rms; 0: same bits; None: ran once
    noise_where: str | None = None
    fa_rule_heads: int | None = None  # that pass flash-attention's own rule, of `ok` ones
    biased_heads: int = 0
    biased_worst: float | None = None
    biased_where: str | None = None
    bias_testable: bool = False  # whether there were independent sequences enough to judge bias


class PartSummary(_OfKernel):
    """One kernel in one format over some of its calls: a phase of a generation, or what attends
    alike in one denoising step. Medians over heads; `_worst` the largest."""

    phase: Phase | None = None
    step: int | None = None
    attends: Attends | None = None
    calls: int
    ok: int  # heads that were measured, of all these calls
    row_rel: float | None = None
    floor_ratio: float | None = None
    floor_ratio_worst: float | None = None
    floor_ratio_where: str | None = None
    baseline_ratio: float | None = None
    expected_ratio: float | None = None
    expected_ratio_worst: float | None = None


class _OfLength(_OfKernel):
    tensor: Tensor
    attends: Attends | None = None
    length: int
    calls: int


class ProfileSummary(_OfLength):
    """How one kernel errs along the rows of calls of one length: of each bin the median over these
    calls, the least and the largest. Null where no call has a number."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]  # rows of each bin, of all calls together
    errors: tuple[float | None, ...]
    lows: tuple[float | None, ...]
    highs: tuple[float | None, ...]
    predicted: tuple[float | None, ...] = ()  # empty, as the following, where nothing is
    ratios: tuple[float | None, ...] = ()  # error over what is predicted, taken call by call
    ratio_lows: tuple[float | None, ...] = ()
    ratio_highs: tuple[float | None, ...] = ()

    @model_validator(mode="after")
    def _aligned(self) -> ProfileSummary:
        bins = len(self.starts)
        always = (self.counts, self.errors, self.lows, self.highs)
        ratios = (self.predicted, self.ratios, self.ratio_lows, self.ratio_highs)
        if {bins} != {*map(len, always)} or {*map(len, ratios)} not in ({0}, {bins}):
            raise ValueError("a number for every bin")
        edges = [*self.starts, self.length]
        if not bins or edges != sorted({*edges}):
            raise ValueError("bins that follow each other within the call")
        return self

    @property
    def ends(self) -> tuple[int, ...]:
        """The last row of each bin."""
        return tuple(start - 1 for start in (*self.starts[1:], self.length))

    def bins(self) -> Iterator[ProfileBin]:
        """A record for each bin."""
        shared = {name: getattr(self, name) for name in _OfLength.model_fields}
        names = [name for name in ProfileBin.model_fields if name not in shared]
        none = (None,) * len(self.starts)
        always = (self.starts, self.ends, self.counts, self.errors, self.lows, self.highs)
        ratios = (self.predicted, self.ratios, self.ratio_lows, self.ratio_highs)
        for own in zip(*always, *(x or none for x in ratios), strict=True):
            yield ProfileBin(**shared, **dict(zip(names, own, strict=True)))


class ProfileBin(_OfLength):
    """One bin of a ProfileSummary, as a line of profiles.csv."""

    first: int
    last: int
    rows: int
    error: float | None
    low: float | None
    high: float | None
    predicted: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None


class HeadMap(Record):
    """One metric of one kernel, layer by head."""

    kernel: str
    format: str
    metric: str
    layers: tuple[str, ...]
    heads: tuple[int, ...]
    values: tuple[tuple[float | None, ...], ...]

    @model_validator(mode="after")
    def _rectangular(self) -> HeadMap:
        if [len(line) for line in self.values] != [len(self.heads)] * len(self.layers):
            raise ValueError("a line for every layer, with a value for every head")
        if not (self.layers and self.heads):
            raise ValueError("a map of nothing")
        return self


class WeightSummary(Record):
    """All stored tensors cast to one format."""

    format: str
    tensors: int
    elements: int
    nonfinite: int
    max_abs: float | None
    max_tensor: str | None
    mean_abs: float | None
    w1: float | None


class AuditSummary(Record):
    """What a reader wants first, computed once from the rows."""

    answer: tuple[str, ...]
    kernels: tuple[KernelSummary, ...]
    map: HeadMap | None = None
    weights: tuple[WeightSummary, ...] = ()
    sequences: int | None = None
    explanations: tuple[Explanation, ...] = ()  # for `--explain`
    worst_rows: tuple[WorstRow, ...] = ()
    parts: tuple[PartSummary, ...] = ()  # by phase, or by denoising step and what attends
    profiles: tuple[ProfileSummary, ...] = ()  # of the lengths that most calls have
    along: str | None = None  # what is remarkable of them, as a sentence
