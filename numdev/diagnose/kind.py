"""What numdev knows of reports of diagnoses."""

from __future__ import annotations

from numdev.diagnose import view
from numdev.diagnose.report import DiagnoseReport
from numdev.studies import Kind

DIAGNOSE = Kind(report=DiagnoseReport, blocks=view.blocks, styles=view.styles)
