"""What numdev knows of reports of effects: how they are judged, compared and shown."""

from __future__ import annotations

from numdev.effects import moves, verdict, view
from numdev.effects.report import EffectsReport
from numdev.effects.wholeness import check
from numdev.studies import Judged, Kind

EFFECTS = Kind(
    report=EffectsReport,
    blocks=view.blocks,
    judged=Judged(
        check=check,
        tests=verdict.tests,
        findings=verdict.findings,
        summarised=verdict.summarised,
        passing=verdict.passing,
    ),
    moves=moves.moves,
    limits=verdict.EffectsLimits,
)
