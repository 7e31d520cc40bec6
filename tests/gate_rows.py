"""Rows by hand, for the gate and the findings."""

from __future__ import annotations

from typing import Any

from numdev.report import AuditReport, AuditSummary, DeviationRow, Provenance

SOUND: dict[str, Any] = {
    "elements": 1000,
    "sequences": 8,
    "nonfinite": 0,
    "max_abs": 4e-3,
    "rms": 1e-3,
    "row_rel": 1e-3,
    "floor_ratio": 1.1,
    "baseline_ratio": 0.3,
    "fa_rule": True,
    "bias_p": 0.5,
    "bias_size": 0.01,
    "bias_of": "mean",
    "expected_ratio": 1.02,
    "worst_row": 1.5,
    "noise": 0.0,
}


def row(head: int | None = 0, **changes: Any) -> DeviationRow:
    """A head of a sound kernel, all measured, but for the changes."""
    identity: dict[str, Any] = {
        "case": "c", "source": "s", "module": "m", "layer": 0, "call": 0, "seed": 0, "head": head,
        "role": "kernel", "kernel": "mine", "format": "bfloat16", "tensor": "out", "status": "ok",
    }  # fmt: skip
    numbers = SOUND if changes.get("status", "ok") == "ok" else {}
    fields = {**identity, **numbers, **changes}
    return DeviationRow(**{"out_format": fields["format"], **fields})


def lse(head: int = 0, **changes: Any) -> DeviationRow:
    nothing = dict.fromkeys(SOUND)
    measured = {"elements": 100, "nonfinite": 0, "rms": 1e-5, "rel": 2e-6}
    return row(head, **{**nothing, **measured, "tensor": "lse", "out_format": None, **changes})


def control(fault: str, dose: float, ratio: float | None, **changes: Any) -> DeviationRow:
    fields = {"role": "control", "kernel": f"control:{fault}", "options": {"dose": dose}}
    return row(**{**fields, "expected_ratio": ratio, **changes})


def report(*rows: DeviationRow, **system: Any) -> AuditReport:
    return AuditReport(
        provenance=Provenance(
            numdev="0", command="numdev audit", created="2026-01-01T00:00:00+00:00",
            system=system, source={},
        ),
        request={},
        summary=AuditSummary(answer=(), kernels=()),
        rows=rows,
    )  # fmt: skip
