"""What numdev knows of reports of invariance: how they are judged, compared and shown."""

from __future__ import annotations

from numdev.kinds import Judged, Kind
from numdev.studies.invariance import moves, verdict, view
from numdev.studies.invariance.report import InvarianceReport
from numdev.studies.invariance.wholeness import check_consistency

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
    moves=moves.moves,
    limits=verdict.InvarianceLimits,
)
