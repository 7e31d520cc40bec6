"""Rows: what was measured, of one head, one call, one row or one stored tensor."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from numdev.report.records.base import Attends, Count, Phase, Record, Role, Status, Tensor


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
    """Checksum of the bits of the head as it came back (`numdev.metrics.bits`), rows that were not
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
