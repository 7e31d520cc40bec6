"""How reports of audits and of sweeps are judged, compared and shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numdev.gate.compare_report import Compared
from numdev.gate.findings import findings_in
from numdev.gate.judgement import Beside, Judgement
from numdev.gate.row_groups import Measured, check_whole
from numdev.gate.row_pairs import RowKeys
from numdev.gate.row_tests import power_of, tests_of_rows
from numdev.gate.rules import Rules
from numdev.report import AuditReport, CaseRecord, DeviationRow, Finding, SweepReport
from numdev.report.summary import summarise
from numdev.report_kinds import Judged, Kind
from numdev.studies.audit import sweep_view, view
from numdev.tensor_properties import ATTENTION_WORDS

TAKE_SINKS = (
    "Nothing was judged: every call has attention sinks, and no kernel that was "
    "asked for takes "
    "them here. These do: triton-flash (on CUDA), flash-attn-4 (sinks in bfloat16), "
    "and a function "
    "of yours with an argument `sinks`; give one with --kernel."
)


def beside(report: Measured, rules: Rules) -> Beside:
    """Returns further fields of a judgement. `power`: for each planted fault and format
    the dose from which on the rules catch it; empty without planted faults. `fa_rule`: in
    how many heads flash-attention's own rule holds, and of how many; None where no row
    has it."""
    rows = report.rows if report.words == ATTENTION_WORDS else ()
    fa_rule = [r.fa_rule for r in rows if r.role == "kernel" and r.fa_rule is not None]
    return {
        "power": tuple(power_of(report.rows, report.plan, rules)),
        "fa_rule": (sum(fa_rule), len(fa_rule)) if fa_rule else None,
    }


def findings(
    judgement: Judgement, report: Measured
) -> tuple[Sequence[Finding], Sequence[str]]:
    """Returns the findings of a judgement; and sentences on what was tested and what
    could not be, on kernels that take sinks, and the report's doubts."""
    wrong, tested = findings_in(judgement, report.rows, report.words)
    return wrong, (*tested, *_advise_on_sinks(report), *report.doubts)


def _advise_on_sinks(report: Measured) -> Iterator[str]:
    """Yields a sentence on which kernels take attention sinks, where all calls have sinks
    and no kernel of the report ran; else nothing."""
    kernels = [row for row in report.rows if row.role == "kernel"]
    ran = any(row.status == "ok" for row in kernels)
    calls = [case for case in report.cases if isinstance(case, CaseRecord)]
    if kernels and not ran and calls and all(case.sinks for case in calls):
        yield TAKE_SINKS


def summarised(report: AuditReport) -> AuditReport:
    """Returns the report with its kernels ranked and its answer, computed from rows and
    findings. Other parts of the summary stay."""
    ranked = summarise(report.rows, report.findings, words=report.words)
    changes = {"answer": ranked.answer, "kernels": ranked.kernels}
    return report.model_copy(
        update={"summary": report.summary.model_copy(update=changes)}
    )


def sweep_summarised(report: SweepReport) -> SweepReport:
    """Returns the report with cells, figures and sentences computed from its rows;
    without rows it is returned as it is. Raises MeasurementError where rows, plan and
    request contradict each other."""
    if not report.rows:
        return report
    # It needs pandas, as no other report does
    from numdev.studies.audit.sweep_summary import summarised

    return summarised(report)


def moves(a: Measured, b: Measured) -> tuple[RowKeys[DeviationRow], Compared]:
    """Returns how rows are named in sentences, and the comparison of an older report A
    with a newer one B: groups of rows, what moved from A to B, and notes."""
    # It needs scipy, for which a gate need not wait
    from numdev.gate.compare import moves_of_rows

    return moves_of_rows(a, b)


AUDIT = Kind(
    report=AuditReport,
    blocks=view.blocks,
    judged=Judged(
        check=check_whole,
        tests=tests_of_rows,
        findings=findings,
        summarised=summarised,
        beside=beside,
    ),
    moves=moves,
    has_map=True,
)
SWEEP = Kind(
    report=SweepReport,
    blocks=sweep_view.blocks,
    judged=Judged(
        check=check_whole,
        tests=tests_of_rows,
        findings=findings,
        summarised=sweep_summarised,
        beside=beside,
    ),
    moves=moves,
)
