"""What every report has, an audit's, and a conformance check's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from numdev.report.record import Record
from numdev.report.rows import AttributionRow, CaseRecord, DeviationRow, ProfileRow, WeightRow
from numdev.report.summaries import AuditSummary, Finding


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
    """Seconds by section (`numdev.audit.timing`), and `total`: of the run that made the report,
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
