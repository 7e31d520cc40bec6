"""Rows by hand, for the gate and the findings."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from numdev.gate import findings, judging
from numdev.gate.judgement import SOMETHING, Judgement
from numdev.gate.row_tests import power_of, run_tests, threshold_tests
from numdev.gate.rules import Rules, default_rules
from numdev.report import (
    AuditReport,
    AuditSummary,
    CaseRecord,
    DeviationRow,
    PlannedKernel,
    PlanRecord,
    Provenance,
)

SOUND: dict[str, Any] = {
    "elements": 10_000, "sequences": 8, "nonfinite": 0, "max_abs": 4e-3, "mean_abs": 8e-4,
    "rms": 1e-3, "row_rel": 1e-3, "floor_ratio": 1.1, "baseline_ratio": 0.3, "fa_rule": True,
    "bias_p": 0.5, "bias_size": 0.01, "bias_of": "mean", "expected_ratio": 1.02,
    "rms_ratio": 1.0, "worst_row": 1.5, "noise": 0.0, "narrow_sum": 0.0,
}  # fmt: skip


def row(head: int | None = 0, **changes: Any) -> DeviationRow:
    """A head of a sound kernel, all measured, but for the changes."""
    identity: dict[str, Any] = {
        "case": "c", "source": "s", "module": "m", "layer": 0, "call": 0, "seed": 0, "head": head,
        "role": "kernel", "kernel": "mine", "format": "bfloat16", "tensor": "out", "status": "ok",
    }  # fmt: skip
    numbers = SOUND if changes.get("status", "ok") == "ok" else {}
    fields = {**identity, **numbers, **changes}
    usual = {"out_format": fields["format"], "tensors": (fields["tensor"],)}
    if fields["status"] != "ok":
        usual = {"reason": "it does not run"}
    return DeviationRow(**{**usual, **fields})


def lse(head: int = 0, **changes: Any) -> DeviationRow:
    nothing = dict.fromkeys(SOUND)
    measured = {"elements": 10_000, "nonfinite": 0, "rms": 1e-5, "rel": 2e-6}
    measured |= {"max_abs": 1e-4, "mean_abs": 1e-6}
    return row(
        head, **{**nothing, **measured, "tensor": "lse", "out_format": None, **changes}
    )


def control(fault: str, dose: float, ratio: float | None, **changes: Any) -> DeviationRow:
    fields = {"role": "control", "kernel": f"control:{fault}", "options": {"dose": dose}}
    return row(**{**fields, "expected_ratio": ratio, **changes})


def case(
    name: str = "c", heads: int = 4, kv_heads: int | None = None, dim: int = 10
) -> CaseRecord:
    return CaseRecord(
        case=name, batch=8, heads=heads, kv_heads=kv_heads or heads, q_len=100, kv_len=100,
        head_dim=dim, v_dim=dim, source_format="float32", mask="none", is_causal=True,
        causal_offset=0, window=None, softcap=None, sinks=False, scale=1.0,
    )  # fmt: skip


def planned(rows: Sequence[DeviationRow], /, **fields: Any) -> PlanRecord:
    """What these rows are all of."""
    kernels = {(r.role, r.kernel, str(r.options)): r for r in rows}
    heads = {r.head for r in rows if r.head is not None and r.tensor not in ("dk", "dv")}
    return PlanRecord(**{
        "kernels": tuple(PlannedKernel(role=r.role, kernel=r.kernel, options=r.options)
                         for r in kernels.values()),
        "formats": tuple(dict.fromkeys(r.format for r in rows)),
        "calls": tuple(dict.fromkeys((r.case, r.seed) for r in rows)),
        "backward": any(r.tensor in ("dq", "dk", "dv") for r in rows),
        "heads": tuple(heads) if heads and heads != set(range(max(heads) + 1)) else None,
        "repeats": 2,
        "rows": 50 if any(r.sampled for r in rows) else None,
        **fields,
    })  # fmt: skip


def judge(
    rows: Sequence[DeviationRow], rules: Rules | None = None, **plan: Any
) -> Judgement:
    """Rows that are all that was planned."""
    rules, record = rules or default_rules(), planned(rows, **plan)
    power = tuple(power_of(rows, record, rules))
    fa_rule = [r.fa_rule for r in rows if r.role == "kernel" and r.fa_rule is not None]
    passed = (sum(fa_rule), len(fa_rule)) if fa_rule else None
    tests = [*threshold_tests(rows, record, rules), *run_tests(rows, record, rules)]
    return judging.judge(tests, rules, power=power, fa_rule=passed)


def rule_tests(judgement: Judgement) -> list[Any]:
    """The tests of rules: not of which calls ran, nor that something was judged."""
    return [t for t in judgement.tests if not t.runs and t.rule != SOMETHING]


def findings_of(
    rows: Sequence[DeviationRow], rules: Rules | None = None, **plan: Any
) -> Any:
    """The same in words."""
    return findings.findings_in(judge(rows, rules, **plan), rows)


def report(*rows: DeviationRow, **system: Any) -> AuditReport:
    """A report that claims to be whole: by its plan these rows are all there should
    be."""
    return judging.judged(unjudged(*together(rows), **system))


def together(rows: Sequence[DeviationRow]) -> list[DeviationRow]:
    """Rows of one call of one kernel, which say which tensors they are of."""
    task = attrgetter("case", "seed", "format", "role", "kernel", "options")
    tensors: dict[str, dict[str, None]] = {}
    for r in rows:
        if r.status == "ok":
            tensors.setdefault(str(task(r)), {})[r.tensor] = None
    return [
        r.model_copy(update={"tensors": tuple(tensors[str(task(r))])})
        if r.status == "ok"
        else r
        for r in rows
    ]


def unjudged(*rows: DeviationRow, **system: Any) -> AuditReport:
    """The same before it was judged."""
    cases = dict.fromkeys(r.case for r in rows)
    heads = {
        name: 1 + max([r.head or 0 for r in rows if r.case == name]) for name in cases
    }
    return AuditReport(
        provenance=Provenance(
            numdev="0", command="numdev audit", created="2026-01-01T00:00:00+00:00",
            system=system, source={},
        ),
        request={},
        summary=AuditSummary(answer=(), kernels=()),
        plan=planned(rows),
        cases=tuple(case(name, heads[name]) for name in cases),
        rows=rows,
    )  # fmt: skip
