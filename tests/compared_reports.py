"""Audits by hand, for the comparison of two."""

from __future__ import annotations

from typing import Any

from gate_rows import case, report, row

from numdev.report import AuditReport, DeviationRow, Finding

SYSTEM: dict[str, Any] = {
    "device": "cuda", "gpu": "H200", "driver": "570.1", "cpu": "c", "cpu_capability": "AVX512",
    "packages": {"torch": "2.11.0", "numdev": "0.1.0"},
}  # fmt: skip
REQUEST: dict[str, Any] = {
    "target": "demo", "checkpoint": "demo", "cases": [], "model": None, "formats": ["bfloat16"],
    "model_dtype": "float32", "seed": 0, "text": [], "inputs": None, "generate": None,
    "length": 256, "sequences": 8, "layers": None, "heads": None, "backward": True,
    "rows": None, "repeats": 2, "isolate": False,
}  # fmt: skip


def audit(
    *rows: DeviationRow, request: dict[str, Any] | None = None,
    source: dict[str, Any] | None = None, system: dict[str, Any] | None = None,
    findings: tuple[Finding, ...] = (),
) -> AuditReport:  # fmt: skip
    """A report with these rows, and what differs from REQUEST, SYSTEM and no source."""
    made = report(*rows, **{**SYSTEM, **(system or {})})
    where = made.provenance.model_copy(update={"source": source or {}})
    asked = {**REQUEST, **(request or {})}
    changes = {"provenance": where, "request": asked, "findings": findings, "cases": (case(),)}
    return made.model_copy(update=changes)


def head(number: int = 0, **changes: Any) -> DeviationRow:
    """A head well known: of 100,000 elements."""
    return row(number, **{"elements": 100_000, **changes})


def floor(number: int = 0, **changes: Any) -> DeviationRow:
    """The floor of a head, which tells of the inputs."""
    return row(
        number,
        **{"role": "floor", "kernel": "floor", "mean_abs": 1e-3, "rel": 2e-3, "noise": None}
        | changes,
    )


def times(found: DeviationRow, factor: float) -> DeviationRow:
    """The row with all its errors multiplied."""
    names = ("max_abs", "rms", "row_rel", "floor_ratio", "baseline_ratio", "expected_ratio")
    grown = {name: factor * getattr(found, name) for name in (*names, "worst_row")}
    return found.model_copy(update=grown)
