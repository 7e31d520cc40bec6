"""What a reader wants first: rows brought together when the report is made; a sweep's
cells, figures."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from numdev.report.records.measurements import (
    OfKernel,
    Phase,
    Record,
    Role,
    SiteShare,
    Tensor,
    WorstRow,
)


class Explanation(Record):
    """Which roundings make one kernel's errors in one tensor: all its calls together."""

    kernel: str
    options: dict[str, object] = Field(default_factory=dict)
    format: str
    tensor: Tensor
    is_identified: bool  # whether the nearest emulation makes its errors
    nearest: str | None  # the emulation that makes its errors, or comes nearest, in words
    residual: float | None  # medians over its calls, here and below
    next_preset: str | None
    next_residual: float | None
    explained: int
    calls: int  # with an error to explain; `explained` of them are
    # Why nothing could be compared; null where there is no error at all
    reason: str | None = None
    sites: tuple[SiteShare, ...] = ()


class _OverHeads(Record):
    """Metrics over heads: medians, `_worst` the largest, `_where` the layer and head of
    that."""

    ok: int  # heads that were measured, of all calls
    nonfinite: int | None = 0  # None: of some heads it is not known, the others have 0
    floor_ratio: float | None = None
    floor_ratio_worst: float | None = None
    floor_ratio_where: str | None = None
    baseline_ratio: float | None = None
    expected_ratio: float | None = None
    expected_ratio_worst: float | None = None
    expected_ratio_where: str | None = None


class PartSummary(_OverHeads):
    """One gradient of a kernel, or its output in one phase of a generation."""

    tensor: Tensor = "out"
    phase: Phase | None = None


class KernelSummary(OfKernel, _OverHeads):
    """One kernel in one format over all heads and calls."""

    skipped: int
    failed: int
    reasons: tuple[str, ...]
    ran: tuple[str, ...]
    # Of each head, where sampled: then maxima are lower bounds
    rows_measured: int | None = None
    suspects: int | None = None  # rows of a call beside those, which stood out among all
    mean_abs: float | None = None
    max_abs: float | None = None
    flash_vs_precision: float | None = None
    # Of the worst head, where sampled
    expected_ratio_interval: tuple[float, float] | None = None
    gradients: tuple[PartSummary, ...] = ()
    phases: tuple[PartSummary, ...] = ()
    # The largest, over the floor's rms; 0: same bits; None: ran once, or it differs where
    # the floor has no error
    noise: float | None = None
    # Null where too few independent sequences tell of a bias
    biased_heads: int | None = None


class AuditSummary(Record):
    """What a reader wants first, computed once from the rows."""

    answer: tuple[str, ...]
    kernels: tuple[KernelSummary, ...]
    explanations: tuple[Explanation, ...] = ()  # for `--explain`
    worst_rows: tuple[WorstRow, ...] = ()
    effects: tuple[str, ...] = ()  # what `numdev effects` said of the same checkpoint


class CellRow(OfKernel):
    """One metric of one kernel in one cell of a sweep: heads pooled, then the mean over
    seeds with its 95 % interval from a t-distribution, null for a single seed."""

    case: str
    axes: dict[str, object] = Field(default_factory=dict)
    metric: str
    seeds: int  # with a number
    mean: float | None
    low: float | None
    high: float | None
    ratio: float | None  # to the baseline's, seed by seed, and then the mean
    ratio_low: float | None
    ratio_high: float | None
    limited: bool = False  # whether the reference is no more exact than what it judges


class Tick(Record):
    x: float
    label: str


class Axis(Record):
    name: str
    title: str
    scale: Literal["linear", "log", "category"]
    ticks: Annotated[tuple[Tick, ...], Field(min_length=1)]


class Point(Record):
    """A curve at one place: the mean over seeds and its 95 % interval."""

    x: float | None  # null on a curve that the axis does not move: it holds all along
    label: str
    mean: float
    low: float | None
    high: float | None
    limited: bool = False  # whether the reference is no more exact than what it judges
    note: str = ""  # how many of the seeds it is of, where not of all: `1 of 3`


class Curve(Record):
    label: str
    role: Role
    points: tuple[Point, ...]


class Figure(Record):
    """One metric along the axis, at one place of all other axes."""

    title: str
    metric: str
    relative: bool = False  # whether its values are ratios, and 1 is a line of its own
    place: dict[str, str] = Field(default_factory=dict)
    y_title: str
    y_scale: Literal["linear", "log"]
    curves: tuple[Curve, ...]


class SweepSummary(Record):
    answer: tuple[str, ...]
    notes: tuple[str, ...] = ()  # who could not be measured where, and why
    axis: Axis
    seeds: tuple[int, ...]
    baseline: str
