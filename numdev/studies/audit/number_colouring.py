"""The numbers of a report that its rules refuse or pass, by which a table colours them.

A number is coloured by the rule that judged it, and by no limit of the table: one of 1.41
may be beyond its limit, and one of 1.6, of a few scattered rows, within its limit."""

from __future__ import annotations

from numdev.gate.judgement import Test
from numdev.gate.row_groups import Measured
from numdev.gate.rules import rules_from_data
from numdev.report import DeviationRow, Standing
from numdev.report.document import Style
from numdev.report.number_text import label
from numdev.report_kinds import judged_by

Numbers = tuple[str, str, str, str, str | None]
"""Which numbers: label of the kernel, format, tensor, metric, and phase (None: all)."""


class FailedNumbers:
    """The numbers that the rules of a report refuse, and those that they pass: of single
    rows, and of a kernel in a tensor. A report that was not judged, or whose rules cannot
    be read, has no such numbers."""

    def __init__(self, report: Measured) -> None:
        self._failed_rows: set[tuple[int, str]] = set()
        self._styles: dict[Numbers, Style] = {}
        self._rules: dict[tuple[str, str, str], dict[str, None]] = {}
        rules = rules_from_data(report.rules)
        for test in judged_by(report.kind).tests(report, rules) if rules else ():
            if not test.runs:
                self._add(test)

    def _add(self, test: Test) -> None:
        """Notes what a test judged. Where it is exceeded, the tensor's number and the
        numbers beyond a limit are `bad`, and the rule is noted for each case with such a
        row. Where it is held, the tensor's number is `good`, unless another test refuses
        it. A test of any other standing is passed over."""
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
        """Returns `bad` where a rule refuses this metric of the row, else an empty style.
        `row`: the very object in the report."""
        return "bad" if (id(row), metric) in self._failed_rows else ""

    def rules_of_case(self, kernel: str, format: str, case: str) -> list[str]:
        """Returns the names of the rules that refuse a number of a kernel's rows in one
        case, each once; empty where none does. `kernel`: its name with options."""
        return list(self._rules.get((kernel, format, case), ()))

    def style_of_tensor(
        self,
        kernel: str,
        format: str,
        tensor: str,
        metric: str,
        phase: str | None = None,
    ) -> Style:
        """Returns `bad` where a rule refuses this metric of the tensor in a row of the
        phase (None: of any phase). Returns `good` where a rule passes it and none refuses
        it, for `phase` None alone; else an empty style. `kernel`: its name with
        options."""
        return self._styles.get((kernel, format, tensor, metric, phase), "")
