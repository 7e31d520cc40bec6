"""What numdev knows of reports of invariance: how they are judged, compared and shown."""

from __future__ import annotations

from numdev.report_kinds import Judged, Kind
from numdev.studies.invariance import report_comparison, verdict, view
from numdev.studies.invariance.consistency import check_consistency
from numdev.studies.invariance.report import InvarianceReport

INVARIANCE = Kind(
    report=InvarianceReport,
    blocks=view.blocks,
    judged=Judged(
        check=check_consistency,
        tests=verdict.tests,
        findings=verdict.findings,
        summarised=verdict.with_summary,
        passing=verdict.passing,
    ),
    moves=report_comparison.moves,
    limits=verdict.InvarianceLimits,
)
