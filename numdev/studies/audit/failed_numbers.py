"""What the rules of a report say of its numbers, by which a table colours them.

A number is coloured by the rule that it was held to, and by no limit of a table: one of
1.41 may be beyond its limit, and one of 1.6, of a few scattered rows, within."""

from __future__ import annotations

from numdev.gate.judgement import Test
from numdev.gate.row_checks import Measured
from numdev.gate.rules import rules_from_data
from numdev.report import DeviationRow, Standing
from numdev.report.document import Style
from numdev.report.number_text import label
from numdev.report_kinds import judged_by

Numbers = tuple[str, str, str, str, str | None]
"""Which numbers: label of the kernel, format, tensor, metric, and phase (None: all)."""


class FailedNumbers:
    """The numbers that the rules of a report refuse, and those that they pass: of single
    rows, and of a kernel in a tensor. Of a report that was not judged, or whose rules
    cannot be read, there are neither."""

    def __init__(self, report: Measured) -> None:
        self._failed_rows: set[tuple[int, str]] = set()
        self._styles: dict[Numbers, Style] = {}
        self._rules: dict[tuple[str, str, str], dict[str, None]] = {}
        rules = rules_from_data(report.rules)
        for test in judged_by(report.kind).tests(report, rules) if rules else ():
            if not test.runs:
                self._add(test)

    def _add(self, test: Test) -> None:
        """Notes what a test says of the numbers that it judged; a failed one stays
        failed. A test that is neither exceeded nor held says nothing."""
        failed = test.standing is Standing.EXCEEDED
        if not failed and test.standing is not Standing.HELD:
            return
        name, fmt, tensor = label(test), test.format or "", test.tensor or ""
        numbers: dict[Numbers, None] = {
            (name, fmt, tensor, test.metric or "", None): None
        }
        for offender in test.beyond if failed else ():
            row, metric = offender.row, offender.limit.metric
            self._failed_rows.add((id(row), metric))
            self._rules.setdefault((name, fmt, row.case), {})[test.rule] = None
            for phase in (None, row.phase):
                numbers[name, fmt, tensor, metric, phase] = None
        for key in numbers:
            if failed:
                self._styles[key] = "bad"
            else:
                self._styles.setdefault(key, "good")

    def style(self, row: DeviationRow, metric: str) -> Style:
        """Returns `bad` for a number of a row that a rule refuses, else no style."""
        return "bad" if (id(row), metric) in self._failed_rows else ""

    def rules_of_case(self, kernel: str, format: str, case: str) -> list[str]:
        """Returns the rules that refuse a number of a kernel (its name with options) in
        one case; none where all pass."""
        return list(self._rules.get((kernel, format, case), ()))

    def style_of_tensor(
        self,
        kernel: str,
        format: str,
        tensor: str,
        metric: str,
        phase: str | None = None,
    ) -> Style:
        """Returns `bad` where a rule refuses this metric of a kernel (its name with
        options) in a tensor, in any row of one phase or (None) of all; `good` where every
        rule on it passes; no style where none was applied."""
        return self._styles.get((kernel, format, tensor, metric, phase), "")
