"""Tells of a kernel that fails as soon as one of its calls shows it, while others are
still to be measured.

All kernels see a call before the next one is loaded, so that they end together; but what
one call decides no other can take back. That holds for a limit on one head's number, not
for a median over heads nor for a bias, whose certainty depends on how many are tested.
These wait for the verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from numdev.gate.findings import findings_in
from numdev.gate.judging import judge
from numdev.gate.rules import Rules, default_rules
from numdev.gate.thresholds import threshold_tests
from numdev.report import DeviationRow, PlannedKernel, PlanRecord, Standing
from numdev.report.number_text import label

DECIDED_BY_A_ROW = frozenset(
    {"nonfinite", "empty_nonfinite", "suspicion", "expected_ratio", "rms_ratio"}
    | {"worst_row"}
)
"""Metrics of which one row beyond its limit fails the kernel, whatever other rows say."""


class EarlyFailures:
    """The kernels that failed so far, each told of once in each format."""

    def __init__(self, rules: Rules | None, say: Callable[[str], None]) -> None:
        """`rules`: those of the verdict, None for the default ones; `say` gets the
        sentences."""
        self.rules, self.say = rules or default_rules(), say
        self.reported: set[tuple[str, str]] = set()

    def __call__(self, rows: Sequence[DeviationRow]) -> None:
        """Says that a kernel fails, once, where a row of one of its calls shows it.
        `rows`: of one task, maybe none; those of a yardstick, or of a planted fault, are
        passed over."""
        if not rows or rows[0].role != "kernel":
            return
        first = rows[0]
        who = (label(first), first.format)
        if who in self.reported:
            return
        kernel = PlannedKernel(
            role=first.role, kernel=first.kernel, options=first.options
        )
        plan = PlanRecord(
            kernels=(kernel,),
            formats=(first.format,),
            calls=((first.case, first.seed),),
        )
        tests = [
            test
            for test in threshold_tests(rows, plan, self.rules)
            if test.standing is Standing.EXCEEDED
            and test.metric in DECIDED_BY_A_ROW
            and not test.median
        ]
        if not tests:
            return
        findings, _ = findings_in(judge(tests, self.rules), rows)
        if findings:
            self.reported.add(who)
            where = first.module or first.case
            self.say(f"FAIL, by {where} alone: {findings[0].sentence}")
