"""What was found: the report, its rows, and how they stand on disk.

A report is plain data with a schema version. It needs neither torch nor a GPU to be read, so the
gate and the renderers run anywhere; they compute no measurement, everything they show is here.
JSON has no NaN: a number that means nothing is null, and the row's `nulls` says why.

`report.json` is built from `rows.jsonl` (see `execute.Journal`) and written atomically.
"""

from __future__ import annotations

import csv
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from numdev.errors import MeasurementError, UsageError

SCHEMA_VERSION = 1
Status = Literal["ok", "skipped", "failed"]
Role = Literal["precision", "floor", "baseline", "kernel"]


class Record(BaseModel):
    """Immutable, and strict: no unknown fields, and no number that JSON cannot hold."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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
    phase: Literal["prefill", "decode"] | None = None
    """Of a generation: its first pass, or one of those that follow."""
    head: int | None
    """Query head for out and lse; None on a row that stands for the whole call."""
    role: Role
    kernel: str
    options: dict[str, Any] = Field(default_factory=dict)
    format: str
    tensor: Literal["out", "lse"]
    status: Status
    reason: str | None = None
    """Why it was skipped or failed; on an `ok` row, a limit of the measurement."""
    ran: str | None = None
    """Evidence of what ran, for example the operator the dispatcher chose."""
    out_format: str | None = None
    """The format the kernel returned; its floor is the one `floor_ratio` divides by."""

    elements: int | None = None
    sequences: int | None = None
    empty_rows: int | None = None
    nonfinite: int | None = None
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
    bias: float | None = None
    bias_sign: float | None = None
    bias_feature: float | None = None
    bias_of: str | None = None
    bias_size: float | None = None
    bias_t: float | None = None
    bias_p: float | None = None
    expected_ratio: float | None = None
    worst_row: float | None = None
    noise: float | None = None
    suspicion: str | None = None
    """What the kernel seems to compute instead, as a clause: `the causal mask is ignored`."""
    suspicion_cut: float | None = None
    """How many times smaller the residual is against that function's reference."""
    nulls: dict[str, str] = Field(default_factory=dict)
    """Metric name to the reason it is null."""


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
    fa_rule_heads: int | None = None
    """Heads that pass flash-attention's own rule, of `ok` ones."""
    biased_heads: int = 0
    biased_worst: float | None = None
    biased_where: str | None = None
    bias_testable: bool = False
    """Whether there were enough independent sequences to say anything about bias in general."""


class Accusation(Record):
    """A kernel that computes a different function, and which; over all its calls and heads."""

    kernel: str
    options: dict[str, Any]
    cause: str
    cut: float
    """The median over the heads of which it can be said."""
    heads: int
    measured: int
    formats: tuple[str, ...]
    where: str
    """The first of these heads."""
    sentence: str


class HeadMap(Record):
    """One metric of one kernel, layer by head."""

    kernel: str
    format: str
    metric: str
    layers: tuple[str, ...]
    heads: tuple[int, ...]
    values: tuple[tuple[float | None, ...], ...]


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
    accusations: tuple[Accusation, ...] = ()
    map: HeadMap | None = None
    weights: tuple[WeightSummary, ...] = ()
    sequences: int | None = None


class Provenance(Record):
    """Where the numbers come from."""

    numdev: str
    command: str
    created: str
    """UTC, ISO 8601."""
    system: dict[str, Any]
    source: dict[str, Any]
    """The checkpoint's name and hash and the prompt, or the configuration's name."""


class Report(Record):
    """What every report has, whatever its kind."""

    kind: str
    schema_version: Literal[1] = 1
    provenance: Provenance
    request: dict[str, Any]


class AuditReport(Report):
    """The result of `numdev audit`."""

    kind: Literal["audit"] = "audit"
    summary: AuditSummary
    cases: tuple[CaseRecord, ...] = ()
    rows: tuple[DeviationRow, ...]
    weights: tuple[WeightRow, ...] = ()


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
    ticks: tuple[Tick, ...]


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
    figures: tuple[Figure, ...]
    cells: tuple[CellRow, ...]
    cases: tuple[CaseRecord, ...] = ()
    rows: tuple[DeviationRow, ...] = ()
    """Empty where only cells were asked for."""


AnyReport = AuditReport | SweepReport
KINDS: dict[str, type[AuditReport] | type[SweepReport]] = {
    "audit": AuditReport,
    "sweep": SweepReport,
}


class _Kind(BaseModel):
    kind: str


def read(path: Path) -> AnyReport:
    """Read `report.json`, or a directory that holds one.

    Raises UsageError where there is none, and MeasurementError for one that cannot be understood
    (unknown schema version included): a report is read right, or not at all.
    """
    path = path / "report.json" if path.is_dir() else path
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path}: cannot read a report there ({error.strerror})",
            hint="give a report.json, or a directory an audit wrote",
        ) from error
    try:
        kind = _Kind.model_validate_json(text).kind
        return KINDS.get(kind, AuditReport).model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise MeasurementError(
            f"{path}: not a report this version understands: {where}: {first['msg']}",
            hint=f"this version reads schema {SCHEMA_VERSION}",
        ) from error


def write(report: AnyReport, directory: Path) -> None:
    """Write report.json and its lists as CSV (rows, weights, cells); each atomically."""
    lists: dict[str, Sequence[Record]] = {"rows": report.rows}
    if isinstance(report, AuditReport):
        lists["weights"] = report.weights
    else:
        lists["cells"] = report.cells
    for name, rows in lists.items():
        if rows or name == "rows":
            with replacing(directory / f"{name}.csv") as file:
                _write_csv(file, rows)
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


def _write_csv(file: IO[str], rows: Sequence[Record]) -> None:
    if not rows:
        return
    writer = csv.DictWriter(file, fieldnames=list(type(rows[0]).model_fields))
    writer.writeheader()
    for row in rows:
        flat = row.model_dump()
        writer.writerow({k: json.dumps(v) if isinstance(v, dict) else v for k, v in flat.items()})
