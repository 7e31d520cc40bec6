"""The reports: of an audit, of a sweep; and what every report has, whatever
its kind: where its numbers come from, and what is wrong."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, field_validator

import numdev
from numdev.errors import UsageError, closest
from numdev.report.records.judgement_outcomes import Outcome
from numdev.report.records.measurements import (
    AttributionRow,
    CaseRecord,
    DeviationRow,
    FunctionCallRecord,
    InputRecord,
    OfKernel,
    ProfileRow,
    Record,
    Role,
    WeightRow,
    WorstRow,
)
from numdev.report.records.summaries import AuditSummary, CellRow, Figure, SweepSummary
from numdev.report.safe_text import plain
from numdev.tensor_properties import ATTENTION_WORDS, Words

if TYPE_CHECKING:
    import pandas

SCHEMA_VERSION = 3


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
        """Returns the place of a row."""
        return cls(**{name: getattr(row, name) for name in cls.model_fields})


class Places:
    """What to call a place in a report of these rows: `layer 3 head 2`. The module stands
    in place of the layer where several have its number, the case where it has no layer.
    Phase and step are named, and seed and call where there are several. `words`: of the
    operation."""

    def __init__(
        self,
        rows: Sequence[DeviationRow | WorstRow | Place],
        words: Words = ATTENTION_WORDS,
    ) -> None:
        self.words = words
        modules = {(row.layer, row.module): getattr(row, "attends", None) for row in rows}
        layers = Counter(layer for layer, _ in modules)
        self._names = {
            (layer, module): module
            if layers[layer] > 1
            else f"layer {layer} {attends or ''}".strip()
            for (layer, module), attends in modules.items()
        }
        self._seeds = len({row.seed for row in rows}) > 1
        self._calls = len({row.call for row in rows}) > 1

    def layer(self, place: Place | DeviationRow | WorstRow) -> str:
        """Returns a place's layer in words, with what it attends to and its phase, where
        it has these: `layer 3 cross`, `layer 3 decode`. The module's name where several
        modules have that layer's number, and for a place of other rows; the case's where
        the place has no layer."""
        name = self._names.get((place.layer, place.module), place.module)
        name = place.case if place.layer is None else name
        return f"{name} {place.phase}" if place.phase else name

    def __call__(self, place: Place | DeviationRow | WorstRow) -> str:
        """Returns a place in words: `layer 3 decode step 2 call 1 head 5, seed 0`, of
        these what the place has, and the call and the seed only where the report has
        several."""
        words = self.layer(place)
        words += f" step {place.step}" if place.step is not None else ""
        words += f" call {place.call}" if self._calls and place.call != place.step else ""
        if place.head is not None and self.words.has_units:
            words += f" {self.words.unit} {place.head}"
        return words + (f", seed {place.seed}" if self._seeds else "")


class PlannedKernel(Record):
    role: Role
    kernel: str
    options: dict[str, object] = Field(default_factory=dict)


class PlanRecord(Record):
    """What was to be measured: every kernel on every call in every format, head by head.
    A call that ran with none of the heads asked for has no rows."""

    kernels: tuple[PlannedKernel, ...]
    named: bool = False  # whether the kernels were asked for by name
    formats: tuple[str, ...]
    # The case, and the seed of one that was drawn
    calls: tuple[tuple[str, int | None], ...]
    backward: bool = False  # dq, dk and dv too
    # Query heads; None: all; with gradients whole groups
    heads: tuple[int, ...] | None = None
    rows: int | None = None  # of each head; then baselines and planted faults lack dk, dv
    repeats: int = 1  # how often each kernel ran on the same inputs


class Finding(Record):
    """One thing wrong with one kernel, as a sentence and as data."""

    # The threshold's name; `runs` for a kernel that failed, `refuses` for declined calls
    rule: str
    severity: Literal["exceeded", "unmeasured", "note"]
    sentence: str  # what is wrong, in a line
    details: str = ""  # further sentences: where else, how it is explained
    kernel: str
    options: dict[str, object] = Field(default_factory=dict)
    formats: tuple[str, ...]
    tensor: str | None = None
    metric: str | None = None
    observed: float | None = None  # the worst
    limit: float | None = None
    count: int  # of `judged` heads; for `runs` and `refuses` of calls
    judged: int
    place: Place | None = None  # the worst one
    cause: str | None = None  # what explains it, where that is known

    @property
    def whole(self) -> str:
        """Returns the sentence with its details."""
        return f"{self.sentence} {self.details}".rstrip()

    @property
    def folder(self) -> str:
        """Returns the name of the folder of its reproducer: kernel, tensor, rule and
        first format, joined by `-`, which also stands for each run of other characters
        than letters, digits, `_`, `.` and `-`. Findings that differ in options or place
        alone share one."""
        parts = (self.kernel, self.tensor or "", self.rule, *self.formats[:1])
        return re.sub(r"[^\w.-]+", "-", "-".join(part for part in parts if part))


class KernelVerdict(OfKernel):
    """One kernel under audit in one format, held to the rules; the check that matters
    most: of what failed the gravest, of what passed the one nearest to its limit."""

    role: Role = "kernel"
    outcome: Outcome
    rule: str | None = None
    tensor: str | None = None
    metric: str | None = None
    observed: float | None = None
    limit: float | None = None
    place: Place | None = None
    finding: int | None = None  # which of the report's findings it is
    reason: str | None = None  # why it could not be judged, or what it passed
    details: str = ""  # further sentences to that


class Provenance(Record):
    """Where a report comes from: which numdev made it, by which command, when, on which
    system, and what was measured."""

    numdev: str
    command: str
    created: str  # UTC, ISO 8601
    system: dict[str, Any]
    # The checkpoint's name and hash and the prompt, or the configuration's
    source: dict[str, Any]

    @classmethod
    def now(
        cls, command: str, system: Mapping[str, object], source: Mapping[str, object]
    ) -> Provenance:
        """Returns the provenance of a report that this version makes now. `command`: the
        command line; `source`: what the numbers were measured on."""
        created = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(
            numdev=numdev.__version__,
            command=command,
            created=created,
            system=dict(system),
            source=dict(source),
        )


class RequestedKernel(BaseModel):
    """A kernel of a request: its name, and whatever else the command records of it."""

    name: str


class RequestShape(BaseModel):
    """The fields of a request that judging reads. Each command records more of its
    own."""

    target: str | None = None
    checkpoint: str | None = None
    kernels: list[RequestedKernel] | None = None
    formats: list[str] = []
    heads: list[int] | None = None
    axes: list[str] | None = None


Request = dict[str, Any]
"""What was asked for, as JSON has it: a key for each option."""


class Report(Record):
    """What every report has, whatever its kind."""

    kind: str
    schema_version: Literal[3] = 3
    # That it is judged by, whole; None: it is not judged
    rules: dict[str, object] | None = None
    outcome: Outcome | None = None  # by these rules, of all that was planned
    verdicts: tuple[KernelVerdict, ...] = ()
    provenance: Provenance
    request: Request
    timings: dict[str, float] = Field(default_factory=dict)
    """Seconds by section, and `total`: of the run that made the report, not of one it
    resumed."""
    findings: tuple[Finding, ...] = ()
    tested: tuple[str, ...] = ()  # by which rules, and which could not be applied
    doubts: tuple[str, ...] = ()  # about what was read, which no row tells

    @field_validator("request")
    @classmethod
    def _checked_request(cls, request: dict[str, object]) -> dict[str, object]:
        """Returns the request; raises pydantic's ValidationError where a field that
        judging reads is of another type."""
        RequestShape.model_validate(request)
        return request

    @property
    def passed(self) -> bool:
        """Whether all that was planned was judged, and nothing exceeds a limit; False
        where nothing was judged."""
        return self.outcome is Outcome.PASSED

    @property
    def measured(self) -> bool:
        """Whether anything was measured; True for a kind of report that does not override
        it."""
        return True

    @property
    def unmeasured(self) -> str:
        """Returns what to say of a report that is not `measured`, as a clause."""
        return "no kernel under audit could be measured"

    def tables(self) -> Mapping[str, Sequence[Record]]:
        """Returns what is written as CSV beside the report: records by the name of the
        file, without `.csv`. Empty for a kind of report that does not override it."""
        return {}

    def to_pandas(self, table: str = "") -> pandas.DataFrame:
        """Returns one of its tables, by default the first (`rows` of an audit), as a
        DataFrame: a field a column, None as NaN among numbers. A table without records
        has no columns. Raises UsageError for a table that it does not have, and where it
        has none."""
        import pandas

        tables = self.tables()
        name = table or next(iter(tables), "")
        if not isinstance(name, str) or name not in tables:
            raise UsageError(
                f"to_pandas: no table {name!r}", hint=closest(str(name), tables)
            )
        return pandas.DataFrame([record.model_dump() for record in tables[name]])

    def plot(self, metric: str = "floor_ratio", **which: Any) -> Any:
        """Draws the size of `metric` by layer and head with matplotlib, kernels side by
        side, and returns the axes, as an array of one for each kernel. `which`: `tensor`
        (default `out`) and `format` (default: the first). For reports with rows by layer
        and head, as of an audit. Raises UsageError without matplotlib, for a wrong
        argument or an unknown metric, and where no row has the number, or all are 0."""
        return _renderer("matplotlib_heat_map").draw(self, metric, **which)

    def __repr__(self) -> str:
        failed = dict.fromkeys(
            v.kernel for v in self.verdicts if v.outcome == self.outcome
        )
        verdict = "" if self.outcome is None else self.outcome.word
        verdict += f" ({', '.join(failed)})" if failed and not self.passed else ""
        sizes = [f"{len(lines)} {name}" for name, lines in self.tables().items()]
        sizes.append(f"{len(self.findings)} finding{'s' * (len(self.findings) != 1)}")
        name = self.request.get("target") or self.provenance.command
        return plain(
            f"<{type(self).__name__} {name}: {'; '.join((verdict, *sizes)).strip('; ')}>"
        )

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Returns its page for a notebook, in a frame of its own."""
        return str(_renderer("html").frame(self))


def _renderer(name: str) -> ModuleType:
    """Returns the module of a renderer, imported when it is asked for: records know
    none."""
    return importlib.import_module(f"numdev.report.renderers.{name}")


class AuditReport(Report):
    """The result of `numdev audit`."""

    kind: Literal["audit"] = "audit"
    summary: AuditSummary
    plan: PlanRecord
    cases: tuple[CaseRecord | FunctionCallRecord, ...] = ()
    rows: tuple[DeviationRow, ...]
    weights: tuple[WeightRow, ...] = ()
    attributions: tuple[AttributionRow, ...] = ()
    profiles: tuple[ProfileRow, ...] = ()

    @property
    def words(self) -> Words:
        """Returns the words of the operation that was called; attention's without
        calls."""
        return self.cases[0].words if self.cases else ATTENTION_WORDS

    @property
    def attention_calls(self) -> list[CaseRecord]:
        """Returns the calls of this report that are calls of attention."""
        return [case for case in self.cases if isinstance(case, CaseRecord)]

    @property
    def measured(self) -> bool:
        """Whether any kernel under audit ran, or no row is of one."""
        status = {row.status for row in self.rows if row.role == "kernel"}
        return "ok" in status or not status

    def tables(self) -> Mapping[str, Sequence[Record]]:
        """Returns the tables that are written as CSV, by name: `rows`, and `weights`
        where stored weights were cast."""
        return {"rows": self.rows, **({"weights": self.weights} if self.weights else {})}


class WrongKernelRecord(Record):
    """What a tolerance and the rules say of a kernel that is wrong on purpose; both None
    where `reason` says why it is not counted."""

    words: str
    tolerance: Outcome | None = None
    rules: Outcome | None = None
    reason: str | None = None


class FormatPower(Record):
    """Wrong kernels of one call in one format."""

    format: str
    case: str
    kernels: tuple[WrongKernelRecord, ...]


class TolerancePower(Record):
    """Which wrong kernels a tolerance of the user's own test passes, beside the rules."""

    rtol: float
    atol: float
    formats: tuple[FormatPower, ...]


class FunctionReport(AuditReport):
    """The result of a check of a function beside its reference."""

    kind: Literal["function"] = "function"  # type: ignore[assignment]
    inputs: tuple[InputRecord, ...] = ()
    power: TolerancePower | None = None  # None: not asked for

    def tables(self) -> Mapping[str, Sequence[Record]]:
        """Returns the tables that are written as CSV, by name: `rows`, `weights` where
        there are any, and `inputs` where any was tried."""
        inputs = {"inputs": self.inputs} if self.inputs else {}
        return {**super().tables(), **inputs}


class SweepReport(Report):
    """The result of `numdev sweep`, which draws calls of attention."""

    kind: Literal["sweep"] = "sweep"
    summary: SweepSummary
    figures: tuple[Figure, ...]
    cells: tuple[CellRow, ...]
    plan: PlanRecord
    cases: tuple[CaseRecord, ...] = ()
    rows: tuple[DeviationRow, ...] = ()  # empty where only cells were asked for

    @property
    def words(self) -> Words:
        """Returns the words of attention."""
        return ATTENTION_WORDS

    @property
    def measured(self) -> bool:
        """Whether a cell is of a kernel under audit, or the summary has no note, which
        would say why a kernel is missing."""
        return any(cell.role == "kernel" for cell in self.cells) or not self.summary.notes

    def tables(self) -> Mapping[str, Sequence[Record]]:
        """Returns the tables that are written as CSV, by name: `rows` (empty where only
        cells were asked for), and `cells` if there are any."""
        return {"rows": self.rows, **({"cells": self.cells} if self.cells else {})}
