"""What numdev knows of reports of effects: how they are judged, compared and shown."""

from __future__ import annotations

from numdev.effects import verdict, view
from numdev.effects.report import EffectsReport
from numdev.effects.wholeness import check
from numdev.gate.compare_studies import effects_moves
from numdev.studies import Judged, Kind

EFFECTS = Kind(
    report=EffectsReport,
    blocks=view.blocks,
    judged=Judged(
        check=check,
        tests=verdict.tests,
        findings=verdict.findings,
        summary=verdict.summary,
        passing=verdict.passing,
    ),
    moves=effects_moves,
    limits=verdict.EffectsLimits,
)
