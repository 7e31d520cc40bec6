"""What numdev knows of reports of log-probabilities: how they are judged, compared and
shown."""

from __future__ import annotations

from numdev.report_kinds import Judged, Kind
from numdev.studies.logprobs import report_comparison, verdict, view
from numdev.studies.logprobs.consistency import check_consistency
from numdev.studies.logprobs.report import LogprobsReport

LOGPROBS = Kind(
    report=LogprobsReport,
    blocks=view.blocks,
    styles=view.styles,
    judged=Judged(
        check=check_consistency,
        tests=verdict.tests,
        findings=verdict.findings,
        summarised=verdict.with_summary,
        passing=verdict.passing,
    ),
    moves=report_comparison.moves,
    limits=verdict.LogprobsLimits,
)
