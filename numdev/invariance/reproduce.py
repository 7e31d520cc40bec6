"""A script for each finding: its kernel along its axis alone, from the same calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numdev.audit.reproduce import written
from numdev.audit.script import folder_of
from numdev.config import InvarianceRequest
from numdev.gate.rules import Rules
from numdev.invariance.report import InvarianceReport
from numdev.report import Finding


def reproducers(
    report: InvarianceReport, request: InvarianceRequest, rules: Rules, directory: Path, **_: Any
) -> list[Path]:
    """The scripts of what was found by the rules, in `directory`."""
    source = request.checkpoint
    if source is not None and Path(source).exists():
        request = request.model_copy(update={"checkpoint": str(Path(source).resolve())})

    def facts(finding: Finding) -> dict[str, Any]:
        kernel = {"name": finding.kernel, "options": finding.options}
        alone = {"kernels": (kernel,), "axes": (finding.rule.split()[0],), "logits": False}
        asked = request.model_dump() | alone | {"formats": finding.formats}
        folder = folder_of(finding.kernel.partition(":")[0])
        return {
            "folders": [folder] if ":" in finding.kernel and folder else [],
            "request": InvarianceRequest.model_validate(asked).model_dump_json(),
            "limits": rules.invariance.model_dump_json(),
        }

    return written(report.findings, directory, "invariance", facts)
