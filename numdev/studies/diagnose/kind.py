"""What numdev knows of reports of diagnoses."""

from __future__ import annotations

from numdev.report_kinds import Kind
from numdev.studies.diagnose import view
from numdev.studies.diagnose.report import DiagnoseReport

DIAGNOSE = Kind(report=DiagnoseReport, blocks=view.blocks, styles=view.styles)
