"""What was found: the report, its rows, and how they stand on disk.

A report is plain data with a schema version. It needs neither torch nor a GPU to be read, so the
gate and the renderers run anywhere; they compute no measurement, everything they show is here.
JSON has no NaN: a number that means nothing is null, and the row's `nulls` says why.

`report.json` is built from `rows.jsonl` (see `execute.Journal`) and written atomically.
"""

from __future__ import annotations

import csv
import importlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from numdev.collector import uncollected
from numdev.errors import MeasurementError, UsageError
from numdev.foreign import cell

SCHEMA_VERSION = 1
Status = Literal["ok", "skipped", "failed"]
Role = Literal["precision", "floor", "baseline", "kernel", "control"]
Tensor = Literal["out", "lse", "dq", "dk", "dv"]
Phase = Literal["prefill", "decode"]
Attends = Literal["self", "cross", "joint"]
Count = Annotated[int, Field(ge=0, lt=2**63)]
"""A number of things; not one that only JSON can hold."""
NUMBERS = (float, int, bool, type(None))
NOT_PREDICTED = "nothing is predicted for single keys where query rows are sampled"
"""Why dk and dv have no expected_ratio, worst_row and baseline_ratio then."""


class Record(BaseModel):
    """Immutable, and strict: no unknown fields, and no number that JSON cannot hold."""

    # Each model is built when it is first used: a command needs few of them.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class CaseRecord(Record):
    """What one attention call was. Rows name it in `case`."""

    case: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_dim: int
    source_format: str
    """The format its tensors came in, before they were rounded to the audited ones."""
    mask: Literal["none", "bool", "additive"]
    is_causal: bool
    causal_offset: int
    window: tuple[int | None, int | None] | None
    softcap: float | None
    sinks: bool
    scale: float
    grad_out: str | None = None
    """Where the gradient with respect to its output comes from, where there is one."""
    axes: dict[str, Any] = Field(default_factory=dict)
    """For a cell of a grid: the value on every axis."""


class DeviationRow(Record):
    """One head of one call, through one kernel, in one format. No numbers unless `ok`."""

    case: str
    source: str
    module: str
    layer: int | None
    call: int
    seed: int | None
    phase: Phase | None = None
    """Of a generation: its first pass, or one of those that follow."""
    step: int | None = None
    """Of a diffusion pipeline: the denoising step, from 0."""
    attends: Attends | None = None
    """Of a diffusion pipeline: to the image itself, to the text alone, or to both as one."""
    head: int | None
    """Query head for out, lse and dq, key head for dk and dv; None on a row that stands for the
    whole call."""
    role: Role
    kernel: str
    options: dict[str, Any] = Field(default_factory=dict)
    format: str
    tensor: Tensor
    status: Status
    reason: str | None = None
    """Why it was skipped or failed; on an `ok` row, a limit of the measurement."""
    ran: str | None = None
    """Evidence of what ran, for example the operator the dispatcher chose."""
    out_format: str | None = None
    """The format the kernel returned; its floor is the one `floor_ratio` divides by."""

    sampled: bool = False
    """Whether only some rows were measured (keys, for dk and dv): then a maximum is a lower bound,
    and averages are estimates."""
    rows_measured: Count | None = None
    """How many of each head, where they are sampled."""
    interval: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """Metric name to the 95 % interval of its estimate from sampled rows."""
    elements: Count | None = None
    sequences: Count | None = None
    empty_rows: Count | None = None
    nonfinite: Count | None = None
    empty_nonfinite: Count | None = None
    """Of a kernel's output: elements of the measured rows that see no key that are NaN or infinite;
    `nonfinite` leaves those out. None where every row sees a key."""
    max_abs: float | None = None
    mean_abs: float | None = None
    rms: float | None = None
    row_rel: float | None = None
    rel: float | None = None
    max_ulp: float | None = None
    w1: float | None = None
    floor_ratio: float | None = None
    baseline_ratio: float | None = None
    fa_rule: bool | None = None
    from_baseline_rms: float | None = None
    from_baseline_w1: float | None = None
    precision_rms: float | None = None
    precision_w1: float | None = None
    flash_vs_precision: float | None = None
    flash_vs_precision_w1: float | None = None
    low_precision_rms: float | None = None
    """The baseline here from the baseline in float32."""
    low_precision_w1: float | None = None
    flash_vs_low_precision: float | None = None
    """from_baseline_rms over low_precision_rms."""
    flash_vs_low_precision_w1: float | None = None
    lower_format: str | None = None
    lower_rms: float | None = None
    """The baseline of inputs in this lower format from the baseline here."""
    lower_w1: float | None = None
    flash_vs_lower: float | None = None
    flash_vs_lower_w1: float | None = None
    bias: float | None = None
    bias_sign: float | None = None
    bias_feature: float | None = None
    bias_of: str | None = None
    bias_size: float | None = None
    bias_t: float | None = None
    bias_p: float | None = None
    expected_ratio: float | None = None
    worst_row: float | None = None
    claim: str | None = None
    """The preset of `emulated` whose roundings are expected of the kernel; of one that declares
    none and errs beyond `fa2`, the way that explains it: `as sdpa-flash rounds on this CPU`."""
    noise: float | None = None
    """rms difference of repeated runs; 0 is bitwise the same."""
    bits: str | None = None
    """Checksum of the bits of the head as it came back (`numdev.checksum`), rows that were not
    measured included: as long as it is the same, so is the output."""
    amplification: float | None = None
    """Of a gradient: row_rel of its exact response to one ulp on every input."""
    suspicion: str | None = None
    """What the kernel seems to compute instead, as a clause: `the causal mask is ignored`."""
    suspicion_cut: float | None = None
    """How many times smaller the residual is against that function's reference."""
    nulls: dict[str, str] = Field(default_factory=dict)
    """Metric name to the reason it is null."""


class SiteShare(Record):
    """What one rounding site contributes to an explained error."""

    site: str
    rounds: str
    share: float
    """Of the explanation's squared error: what goes when the site is exact."""
    residual: float
    """Of the kernel, against the explanation with this site exact."""


class AttributionRow(Record):
    """Which roundings explain one kernel's errors in one call; rows count alike (as in row_rel)."""

    case: str
    source: str
    module: str
    layer: int | None
    call: int
    seed: int | None
    phase: Phase | None = None
    step: int | None = None
    attends: Attends | None = None
    role: Role
    kernel: str
    options: dict[str, Any] = Field(default_factory=dict)
    format: str
    tensor: Tensor = "out"
    heads: tuple[int, ...]
    """The query heads that were compared."""
    explained_by: str | None
    """The preset whose emulation makes these errors; null: unknown, and `reason` says why."""
    reason: str | None = None
    nearest: str | None = None
    recipe: dict[str, Any] = Field(default_factory=dict)
    """The options of `emulated` that fit best."""
    residual: float | None = None
    """|o - emulation| / |o - r|."""
    size: float | None = None
    """|o - r| over the emulation's: the ratio of sizes."""
    next_preset: str | None = None
    next_residual: float | None = None
    sites: tuple[SiteShare, ...] = ()
    sentence: str


class WorstRow(Record):
    """A row that errs most, of the head of a call where one errs most, and what is special about
    it. For dk and dv a row is a key, and what is said of queries' rows is null; and the reverse."""

    case: str
    source: str
    module: str
    layer: int | None
    call: int
    seed: int | None
    phase: Phase | None = None
    step: int | None = None
    attends: Attends | None = None
    role: Role = "kernel"
    kernel: str = ""
    options: dict[str, Any] = Field(default_factory=dict)
    format: str
    tensor: Tensor
    head: int
    """Query head for out and dq, key head for dk and dv."""
    batch: int
    row: int
    rows: int
    """How many there are: the number of queries, or of keys."""
    nonfinite: int
    """Elements that are not finite where the exact ones, rounded once, are."""
    error: float | None
    """|o_i - r_i| over finite elements."""
    ratio: float | None
    """To what is predicted for the row; without a prediction, to the size of its terms. Null where
    that is 0."""
    predicted: bool
    cancellation: float | None
    """|r_i| over the size of its terms: 1 where nothing cancels."""
    sees: int
    """Keys a query sees; queries that see a key, counted in every query head that reads it."""
    position: int
    """How many of them come before the row's own place (query row + causal_offset)."""
    max_probability: float
    lse: float | None = None
    tied: int | None = None
    """Keys that have the maximum score, the first included."""
    nearly_tied: int | None = None
    """Keys within 0.001 of the maximum score, those that have it included."""
    first_key: float | None = None
    """The probability of key 0."""
    sink: float | None = None
    """The probability of the attention sink, where there is one."""
    entropy: float | None = None
    """In nats, the sink being one outcome."""
    carriers: int | None = None
    """The fewest keys that carry 90 % of what probability keys have; for dk and dv the fewest
    queries that carry 90 % of what the key receives."""
    one_sign: float | None = None
    """How far V keeps its sign over the carriers: mean over features of |sum_j P_ij sign(V_jd)| /
    sum_j P_ij; 1 where every feature has one sign."""
    mass: float | None = None
    """The probability a key receives, summed over queries."""
    sentence: str


class ProfileRow(Record):
    """How one tensor of one call errs along its rows: in bins by position, heads and sequences
    pooled. Errors are relative to the row's term scale, as row_rel; null in a bin without a row."""

    case: str
    layer: int | None
    attends: Attends | None = None
    role: Role
    kernel: str
    options: dict[str, Any] = Field(default_factory=dict)
    format: str
    tensor: Tensor
    length: int
    """Rows of the call: queries, or keys for dk and dv."""
    starts: tuple[int, ...]
    """The first row of each bin, which ends before the next, and the last one with the call."""
    counts: tuple[int, ...]
    """Rows of each bin that were measured and have a relative error."""
    errors: tuple[float | None, ...]
    """Root mean square."""
    predicted: tuple[float | None, ...] | None = None
    """The same of what its roundings predict; null where nothing is predicted."""


class Explanation(Record):
    """Which roundings make one kernel's errors in one tensor: all its calls together."""

    kernel: str
    options: dict[str, Any] = Field(default_factory=dict)
    format: str
    tensor: Tensor
    known: bool
    nearest: str | None
    """The emulation that makes its errors, or unless `known` comes nearest to it, in words."""
    residual: float | None
    """Medians over its calls, here and below."""
    next_preset: str | None
    next_residual: float | None
    explained: int
    calls: int
    """With an error to explain; `explained` of them are."""
    sites: tuple[SiteShare, ...] = ()
    sentence: str


class WeightRow(Record):
    """What casting one stored tensor to a format costs. W1 equals mean_abs: rounding is monotone,
    so pairing in order is the optimal transport."""

    tensor: str
    shape: tuple[int, ...]
    stored: str
    format: str
    elements: int
    nonfinite: int
    """Finite weights that the format cannot hold, plus weights that were not finite to begin."""
    max_abs: float | None
    mean_abs: float | None
    rel: float | None
    w1: float | None


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


class KernelSummary(Record):
    """One kernel in one format over all heads and calls."""

    kernel: str
    options: dict[str, Any]
    role: Role
    format: str
    ok: int
    skipped: int
    failed: int
    reasons: tuple[str, ...]
    ran: tuple[str, ...]
    rows_measured: int | None = None
    """Query rows of each head, where they are sampled: then maxima are lower bounds."""
    out_formats: tuple[str, ...] = ()
    mean_abs: float | None = None
    max_abs: float | None = None
    rms: float | None = None
    row_rel: float | None = None
    w1: float | None = None
    nonfinite: int = 0
    floor_ratio: float | None = None
    """Median over heads; `_worst` the largest, `_where` its layer and head."""
    floor_ratio_worst: float | None = None
    floor_ratio_where: str | None = None
    baseline_ratio: float | None = None
    baseline_ratio_worst: float | None = None
    flash_vs_precision: float | None = None
    flash_vs_precision_worst: float | None = None
    flash_vs_precision_where: str | None = None
    flash_vs_precision_w1: float | None = None
    flash_vs_low_precision: float | None = None
    """Median over heads, as the following: how far it is from the baseline, over how far the
    baseline is from itself in float32; and from itself in `lower_format`."""
    flash_vs_low_precision_w1: float | None = None
    lower_format: str | None = None
    flash_vs_lower: float | None = None
    flash_vs_lower_w1: float | None = None
    expected_ratio: float | None = None
    expected_ratio_worst: float | None = None
    expected_ratio_where: str | None = None
    expected_ratio_interval: tuple[float, float] | None = None
    """Of the worst head, where rows are sampled."""
    worst_row: float | None = None
    """The largest over heads, and where."""
    worst_row_where: str | None = None
    gradients: tuple[GradientSummary, ...] = ()
    noise: float | None = None
    """The largest over heads and tensors, in units of the floor's rms; 0 is bitwise reproducible.
    None where no kernel ran twice."""
    noise_where: str | None = None
    fa_rule_heads: int | None = None
    """Heads that pass flash-attention's own rule, of `ok` ones."""
    biased_heads: int = 0
    biased_worst: float | None = None
    biased_where: str | None = None
    bias_testable: bool = False
    """Whether there were enough independent sequences to say anything about bias in general."""


class PartSummary(Record):
    """One kernel in one format over some of its calls: a phase of a generation, or what attends
    alike in one denoising step."""

    kernel: str
    options: dict[str, Any]
    role: Role
    format: str
    phase: Phase | None = None
    step: int | None = None
    attends: Attends | None = None
    calls: int
    ok: int
    """Heads that were measured, of all these calls."""
    row_rel: float | None = None
    """Median over heads, as the following; `_worst` the largest."""
    floor_ratio: float | None = None
    floor_ratio_worst: float | None = None
    floor_ratio_where: str | None = None
    baseline_ratio: float | None = None
    expected_ratio: float | None = None
    expected_ratio_worst: float | None = None


OF_A_BIN = (
    *("first", "last", "rows", "error", "low", "high"),
    *("predicted", "ratio", "ratio_low", "ratio_high"),
)


class ProfileSummary(Record):
    """How one kernel errs along the rows of calls of one length: of each bin the median over these
    calls, the least and the largest. Null where no call has a number."""

    kernel: str
    options: dict[str, Any]
    role: Role
    format: str
    tensor: Tensor
    attends: Attends | None = None
    length: int
    calls: int
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    """Rows of each bin, of all calls together."""
    errors: tuple[float | None, ...]
    lows: tuple[float | None, ...]
    highs: tuple[float | None, ...]
    predicted: tuple[float | None, ...] = ()
    """The median of what is predicted; empty, as the following, where nothing is."""
    ratios: tuple[float | None, ...] = ()
    """Error over what is predicted, taken call by call."""
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
        names = [name for name in ProfileBin.model_fields if name not in OF_A_BIN]
        shared = {name: getattr(self, name) for name in names}
        none = (None,) * len(self.starts)
        always = (self.starts, self.ends, self.counts, self.errors, self.lows, self.highs)
        ratios = (self.predicted, self.ratios, self.ratio_lows, self.ratio_highs)
        columns = (*always, *(x or none for x in ratios))
        for own in zip(*columns, strict=True):
            yield ProfileBin(**shared, **dict(zip(OF_A_BIN, own, strict=True)))


class ProfileBin(Record):
    """One bin of a ProfileSummary, as a line of profiles.csv."""

    kernel: str
    options: dict[str, Any]
    role: Role
    format: str
    tensor: Tensor
    attends: str | None
    length: int
    calls: int
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
    explanations: tuple[Explanation, ...] = ()
    """For `--explain`: which roundings make each kernel's errors."""
    worst_rows: tuple[WorstRow, ...] = ()
    parts: tuple[PartSummary, ...] = ()
    """Of a generation by phase; of a diffusion pipeline by denoising step and what attends."""
    profiles: tuple[ProfileSummary, ...] = ()
    """Of the lengths that most calls have."""
    along: str | None = None
    """What is remarkable of them, as a sentence."""


class Place(Record):
    """Where something was found: what names the row again."""

    case: str
    module: str
    layer: int | None
    call: int
    head: int | None
    phase: str | None
    step: int | None = None
    seed: int | None

    @classmethod
    def of(cls, row: DeviationRow) -> Place:
        return cls(**{name: getattr(row, name) for name in cls.model_fields})


class Finding(Record):
    """One thing wrong with one kernel, as a sentence and as data."""

    rule: str
    """The threshold's name; `runs` for a kernel that failed, `refuses` for calls it declined."""
    severity: Literal["exceeded", "unmeasured", "note"]
    sentence: str
    kernel: str
    also: tuple[str, ...] = ()
    """Other kernels with the same numbers, as the default dispatch has those of what it ran."""
    options: dict[str, Any] = Field(default_factory=dict)
    formats: tuple[str, ...]
    tensor: str | None = None
    metric: str | None = None
    observed: float | None = None
    """The worst."""
    limit: float | None = None
    count: int
    """Of `judged` heads; for `runs` and `refuses` of calls."""
    judged: int
    place: Place | None = None
    """The worst one."""

    @property
    def folder(self) -> str:
        """What its reproducer's folder is called: kernel, tensor, rule and format."""
        parts = (self.kernel, self.tensor or "", self.rule, *self.formats[:1])
        return re.sub(r"[^\w.-]+", "-", "-".join(part for part in parts if part))


class Provenance(Record):
    """Where the numbers come from."""

    numdev: str
    command: str
    created: str
    """UTC, ISO 8601."""
    system: dict[str, Any]
    source: dict[str, Any]
    """The checkpoint's name and hash and the prompt, or the configuration's name."""

    @field_validator("system")
    @classmethod
    def _packages(cls, system: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(system.get("packages", {}), dict):
            raise ValueError("packages: a mapping of names to versions")
        return system


class Report(Record):
    """What every report has, whatever its kind."""

    kind: str
    schema_version: Literal[1] = 1
    provenance: Provenance
    request: dict[str, Any]
    timings: dict[str, float] = Field(default_factory=dict)
    """Seconds by section (`numdev.stopwatch`), and `total`: of the run that made the report,
    without what an earlier one had finished."""
    findings: tuple[Finding, ...] = ()

    @property
    def measured(self) -> bool:
        """Whether there is anything in it."""
        return True

    @property
    def unmeasured(self) -> str:
        """What to say of one that is not `measured`."""
        return "no kernel under audit could be measured"

    def tables(self) -> dict[str, Sequence[Record]]:
        """What is written as CSV beside it, by the name of the file."""
        return {}


class AuditReport(Report):
    """The result of `numdev audit`."""

    kind: Literal["audit"] = "audit"
    summary: AuditSummary
    tested: tuple[str, ...] = ()
    """By which rules, and which could not be applied."""
    cases: tuple[CaseRecord, ...] = ()
    rows: tuple[DeviationRow, ...]
    weights: tuple[WeightRow, ...] = ()
    attributions: tuple[AttributionRow, ...] = ()
    profiles: tuple[ProfileRow, ...] = ()

    @property
    def measured(self) -> bool:
        """Whether any kernel under audit ran, or none was asked for."""
        status = {row.status for row in self.rows if row.role == "kernel"}
        return "ok" in status or not status

    def tables(self) -> dict[str, Sequence[Record]]:
        bins = [line for p in self.summary.profiles for line in p.bins()]
        more: dict[str, Sequence[Record]] = {"weights": self.weights, "profiles": bins}
        return {"rows": self.rows, **{name: rows for name, rows in more.items() if rows}}


class CheckRecord(Record):
    """One small case in one format, in a conformance check."""

    feature: str
    check: str
    format: str
    verdict: Literal["right", "wrong", "raises", "refuses"]
    words: str = ""


class FeatureRecord(Record):
    """One feature of a kernel: the worst verdict of its checks."""

    feature: str
    verdict: Literal["right", "wrong", "raises", "refuses", "partly"]
    words: str
    """The cause, the reason, or a convention; empty where there is nothing to say."""
    right: int
    checks: int


class ConformanceReport(Record):
    """The result of `numdev kernels --check`."""

    kind: Literal["conformance"] = "conformance"
    schema_version: Literal[1] = 1
    kernel: str
    options: dict[str, str]
    system: dict[str, Any]
    conforms: bool
    sentence: str
    features: tuple[FeatureRecord, ...]
    checks: tuple[CheckRecord, ...]


class CellRow(Record):
    """One metric of one kernel in one cell of a sweep: heads pooled, then the mean over seeds."""

    case: str
    axes: dict[str, Any] = Field(default_factory=dict)
    role: Role
    kernel: str
    options: dict[str, Any] = Field(default_factory=dict)
    format: str
    metric: str
    seeds: int
    """With a number; the mean and the interval are over these."""
    mean: float | None
    low: float | None
    """The 95 % interval of the mean, from a t-distribution over seeds; null for a single one."""
    high: float | None
    ratio: float | None
    """To the baseline's, seed by seed, and then the mean."""
    ratio_low: float | None
    ratio_high: float | None


class Tick(Record):
    x: float
    label: str
    below: str = ""
    """A second line, for example the usual name of a format."""


class Axis(Record):
    """What curves run along."""

    name: str
    title: str
    scale: Literal["linear", "log", "category"]
    ticks: Annotated[tuple[Tick, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _drawable(self) -> Axis:
        if self.scale == "log" and min(tick.x for tick in self.ticks) <= 0:
            raise ValueError("a place on a logarithmic axis is above 0")
        return self


class Point(Record):
    """A curve at one place: the mean over seeds and its 95 % interval."""

    x: float | None
    """Null on a curve that the axis does not move."""
    label: str
    mean: float
    low: float | None
    high: float | None
    seeds: int
    limited: bool = False
    """Whether the reference is no more exact than what it judges."""


class Curve(Record):
    label: str
    role: Role
    kernel: str
    options: dict[str, Any] = Field(default_factory=dict)
    constant: bool = False
    """One point, which holds all along the axis."""
    points: tuple[Point, ...]


class Figure(Record):
    """One metric along the axis, at one place of all other axes."""

    title: str
    metric: str
    relative: bool
    """Whether it is the ratio to the baseline."""
    place: dict[str, str] = Field(default_factory=dict)
    y_title: str
    y_scale: Literal["linear", "log"]
    curves: tuple[Curve, ...]


class SweepSummary(Record):
    answer: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """Who could not be measured where, and why."""
    axis: Axis
    cells: int
    seeds: tuple[int, ...]
    baseline: str


class SweepReport(Report):
    """The result of `numdev sweep`."""

    kind: Literal["sweep"] = "sweep"
    summary: SweepSummary
    tested: tuple[str, ...] = ()
    figures: tuple[Figure, ...]
    cells: tuple[CellRow, ...]
    cases: tuple[CaseRecord, ...] = ()
    rows: tuple[DeviationRow, ...] = ()
    """Empty where only cells were asked for."""

    @property
    def measured(self) -> bool:
        """As in an audit: whether a kernel has a number, or nobody lacks one."""
        return any(cell.role == "kernel" for cell in self.cells) or not self.summary.notes

    def tables(self) -> dict[str, Sequence[Record]]:
        return {"rows": self.rows, **({"cells": self.cells} if self.cells else {})}


KINDS = {
    "audit": "numdev.report:AuditReport",
    "sweep": "numdev.report:SweepReport",
    "weights": "numdev.weights.report:WeightsReport",
    "train": "numdev.training.report:TrainReport",
    "bounds": "numdev.bounds.report:BoundsReport",
    "diagnose": "numdev.diagnosis.report:DiagnoseReport",
    "compare": "numdev.comparing.report:CompareReport",
}
"""Where the class of each kind of report is; imported when one is read."""


class _Head(BaseModel):
    """What a file has to say before anything else of it is read."""

    kind: Annotated[str, Field(strict=True)]
    schema_version: Annotated[int, Field(strict=True)]
    provenance: dict[str, Any] = Field(default_factory=dict)


def read(path: Path) -> Report:
    """Read `report.json`, or a directory that holds one.

    Raises UsageError where there is none, and MeasurementError for one that cannot be understood
    (unknown schema version included): a report is read right, or not at all.
    """
    try:
        path = path / "report.json" if path.is_dir() else path
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path}: cannot read a report there ({error.strerror})",
            hint="give a report.json, or a directory an audit wrote",
        ) from error
    try:
        head = _Head.model_validate_json(text)
        _check(head, path)
        module, _, name = KINDS[head.kind].partition(":")
        with uncollected():
            model = getattr(importlib.import_module(module), name)
            found: Report = model.model_validate_json(text)
        return found
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "the file"
        raise MeasurementError(
            f"{path}: not a report this version understands: {where}: {problem['msg']}",
            hint=_written_by(text),
        ) from error


def _written_by(text: bytes) -> str:
    """What is known of a report that was refused: rows of another version may have more fields
    under the same schema number."""
    from numdev import __version__

    read = f"this is numdev {__version__}, which reads schema {SCHEMA_VERSION}"
    try:
        by = _Head.model_validate_json(text).provenance.get("numdev")
    except ValidationError:
        by = None
    return read if by in (None, __version__) else f"numdev {by} wrote it, and {read}"


def _check(head: _Head, path: Path) -> None:
    """Raises MeasurementError for a report of a version or a kind that is not known here."""
    by = str(head.provenance.get("numdev", "another version"))
    what = f"{path}: not a report this version understands"
    if head.schema_version != SCHEMA_VERSION:
        newer = head.schema_version > SCHEMA_VERSION
        raise MeasurementError(
            f"{what}: schema_version: is {head.schema_version}, and this version reads "
            f"schema {SCHEMA_VERSION}",
            hint=f"{'update numdev' if newer else 'measure again'}, or read it with the numdev "
            f"that wrote it ({by})",
        )
    if head.kind not in KINDS:
        raise MeasurementError(
            f"{what}: kind: no report of kind {head.kind!r} is known here",
            hint=f"known: {', '.join(KINDS)}",
        )


def write(report: Report, directory: Path) -> None:
    """Write report.json and its tables as CSV; each atomically."""
    for name, rows in report.tables().items():
        with replacing(directory / f"{name}.csv") as file:
            write_csv(file, rows)
    with replacing(directory / "report.json") as file:
        file.write(report.model_dump_json())


@contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """A text file that takes its name only when it is complete."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", text=True)
    try:
        with os.fdopen(handle, "w", newline="", encoding="utf-8") as file:
            yield file
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def write_csv(file: IO[str], rows: Sequence[Record]) -> None:
    """One line a row, one column a field; nothing where there is no row. See `foreign.cell`."""
    if not rows:
        return
    writer = csv.writer(file)
    writer.writerow(type(rows[0]).model_fields)
    for row in rows:
        values = row.model_dump().values()
        writer.writerow([x if x.__class__ in NUMBERS else cell(x) for x in values])
