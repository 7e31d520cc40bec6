"""The report of an audit, and of a conformance check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from numdev.report.records.base import Record
from numdev.report.records.report import Report
from numdev.report.records.rows import (
    AttributionRow,
    CaseRecord,
    DeviationRow,
    ProfileRow,
    WeightRow,
)
from numdev.report.records.summaries import AuditSummary


class AuditReport(Report):
    """The result of `numdev audit`."""

    kind: Literal["audit"] = "audit"
    summary: AuditSummary
    tested: tuple[str, ...] = ()  # by which rules, and which could not be applied
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
    words: str  # the cause, the reason, or a convention; may be empty
    right: int
    checks: int


class ConformanceReport(Record):
    """The result of `numdev kernels --check`."""

    kind: Literal["conformance"] = "conformance"
    schema_version: Literal[2] = 2
    kernel: str
    options: dict[str, str]
    system: dict[str, Any]
    conforms: bool
    sentence: str
    features: tuple[FeatureRecord, ...]
    checks: tuple[CheckRecord, ...]
