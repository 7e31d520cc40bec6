"""Reports: their records, how they are read and written, what is shown of them.

A report is plain data with a schema version. It needs neither torch nor a GPU to be read. All that
other packages need of `records` and `io` is exported here.
"""

from __future__ import annotations

from numdev.report.io import KINDS, read, replacing, write, write_csv
from numdev.report.records.audit import AuditReport, CheckRecord, ConformanceReport, FeatureRecord
from numdev.report.records.base import (
    NOT_PREDICTED,
    Attends,
    Count,
    Phase,
    Record,
    Role,
    Status,
    Tensor,
)
from numdev.report.records.report import SCHEMA_VERSION, Finding, Place, Provenance, Report
from numdev.report.records.rows import (
    AttributionRow,
    CaseRecord,
    DeviationRow,
    ProfileRow,
    SiteShare,
    WeightRow,
    WorstRow,
)
from numdev.report.records.summaries import (
    AuditSummary,
    Explanation,
    GradientSummary,
    HeadMap,
    KernelSummary,
    PartSummary,
    ProfileBin,
    ProfileSummary,
    WeightSummary,
)
from numdev.report.records.sweep import (
    Axis,
    CellRow,
    Curve,
    Figure,
    Point,
    SweepReport,
    SweepSummary,
    Tick,
)

__all__ = [
    "KINDS", "NOT_PREDICTED", "SCHEMA_VERSION", "Attends", "AttributionRow", "AuditReport",
    "AuditSummary", "Axis", "CaseRecord", "CellRow", "CheckRecord", "ConformanceReport",
    "Count", "Curve", "DeviationRow", "Explanation", "FeatureRecord", "Figure", "Finding",
    "GradientSummary", "HeadMap", "KernelSummary", "PartSummary", "Phase", "Place", "Point",
    "ProfileBin", "ProfileRow", "ProfileSummary", "Provenance", "Record", "Report", "Role",
    "SiteShare", "Status", "SweepReport", "SweepSummary", "Tensor", "Tick", "WeightRow",
    "WeightSummary", "WorstRow", "read", "replacing", "write", "write_csv",
]  # fmt: skip
