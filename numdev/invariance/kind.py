"""What numdev knows of reports of invariance: how they are judged, compared and shown."""

from __future__ import annotations

from numdev.invariance import moves, verdict, view
from numdev.invariance.report import InvarianceReport
from numdev.invariance.wholeness import check
from numdev.studies import Judged, Kind

INVARIANCE = Kind(
    report=InvarianceReport,
    blocks=view.blocks,
    judged=Judged(
        check=check,
        tests=verdict.tests,
        findings=verdict.findings,
        summarised=verdict.summarised,
        passing=verdict.passing,
    ),
    moves=moves.moves,
    limits=verdict.InvarianceLimits,
)
