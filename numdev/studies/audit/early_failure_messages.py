"""Messages that a kernel fails, as soon as one of its calls shows it, while other calls
are still to be measured.

All kernels see a call before the next one is loaded, so that they end together; yet a
failure that one call shows stands, whatever other calls show. That holds for a limit on
one head's number. It does not hold for a median over heads, nor for a bias, whose
certainty depends on how many are tested: these wait for the verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from numdev.gate.findings import findings_in
from numdev.gate.judging import judge
from numdev.gate.row_tests import threshold_tests
from numdev.gate.rules import Rules, default_rules
from numdev.report import DeviationRow, PlannedKernel, PlanRecord, Standing
from numdev.report.number_text import label

DECIDED_BY_A_ROW = frozenset(
    {"nonfinite", "empty_nonfinite", "suspicion", "expected_ratio", "rms_ratio"}
    | {"worst_row"}
)
"""Metrics of which one row beyond its limit fails the kernel, whatever other rows say."""


class EarlyFailures:
    """A function of a task's rows that reports a kernel that fails, once in each
    format."""

    def __init__(self, rules: Rules | None, say: Callable[[str], None]) -> None:
        """`rules`: those of the verdict; None: the default ones. `say` gets a sentence
        for each kernel and format that fails."""
        self.rules, self.say = rules or default_rules(), say
        self.reported: set[tuple[str, str]] = set()

    def __call__(self, rows: Sequence[DeviationRow]) -> None:
        """Calls `say` with `FAIL, by MODULE alone: ` and the gravest finding, where a row
        of this call is beyond a limit on single rows. Does nothing for a kernel and
        format that were reported before, for a yardstick or a planted fault, and without
        rows. `rows`: those of one task."""
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
