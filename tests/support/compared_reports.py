"""Audits by hand, for the comparison of two."""

from __future__ import annotations

from typing import Any

from gate_rows import case, planned, row, together, unjudged

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
    findings: tuple[Finding, ...] = (), heads: int = 1,
) -> AuditReport:  # fmt: skip
    """A whole report with these rows, and what differs from REQUEST, SYSTEM and no
    source; not judged, since a comparison asks for no judgement. Its call has as many
    heads as they need, or more; where gradients are asked of, it has them all."""
    rows = with_gradients(rows)
    audited = unjudged(*together(rows), **{**SYSTEM, **(system or {})})
    where = audited.provenance.model_copy(update={"source": source or {}})
    heads = max([heads, *(1 + (r.head or 0) for r in rows)])
    plan = planned(rows).model_copy(update={"heads": None})
    named = ("backward", "rows", "heads")
    plan = plan.model_copy(
        update={n: x for n, x in (request or {}).items() if n in named}
    )
    agreed = {
        "formats": list(plan.formats),
        "backward": plan.backward,
        "repeats": plan.repeats,
    }
    agreed["rows"] = plan.rows
    asked = {**REQUEST, **agreed, **(request or {})}
    changes = {"provenance": where, "request": asked, "findings": findings}
    changes |= {"cases": (case(heads=heads),), "plan": plan}
    return audited.model_copy(update=changes)


def with_gradients(rows: tuple[DeviationRow, ...]) -> tuple[DeviationRow, ...]:
    """The rows, and where one is of a gradient, sound ones of the other tensors beside
    it."""
    tensors = ("out", "dq", "dk", "dv")
    if not any(r.tensor in tensors[1:] for r in rows):
        return rows
    measured = {(*key_of(r), r.tensor) for r in rows}
    more = (
        head(**{**r.who, "number": r.head, "tensor": tensor})
        for key, r in {key_of(r): r for r in rows}.items()
        for tensor in tensors
        if (*key, tensor) not in measured
    )
    return (*rows, *more)


def key_of(of: DeviationRow) -> tuple[Any, ...]:
    return (of.role, of.kernel, str(of.options), of.format, of.head)


def head(number: int = 0, **changes: Any) -> DeviationRow:
    """A head well known: of 100,000 elements."""
    return row(number, **{"elements": 100_000, **changes})


def floor(number: int = 0, **changes: Any) -> DeviationRow:
    """The floor of a head, which tells of the inputs."""
    return row(
        number,
        **{
            "role": "floor",
            "kernel": "floor",
            "rel": 2e-3,
            "noise": None,
            "elements": 100_000,
        }
        | changes,
    )


def times(result: DeviationRow, factor: float) -> DeviationRow:
    """The row with all its errors multiplied."""
    names = (
        "max_abs",
        "rms",
        "mean_abs",
        "row_rel",
        "floor_ratio",
        "baseline_ratio",
        "expected_ratio",
    )
    grown = {name: factor * getattr(result, name) for name in (*names, "worst_row")}
    return result.model_copy(update=grown)
