"""What numdev knows of reports of comparisons."""

from __future__ import annotations

from numdev.gate import compare_view
from numdev.gate.compare_report import CompareReport
from numdev.report_kinds import Kind

COMPARE = Kind(
    report=CompareReport, blocks=compare_view.blocks, styles=compare_view.styles
)
