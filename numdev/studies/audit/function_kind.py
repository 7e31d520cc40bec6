"""What numdev knows of reports of functions beside their reference: an audit's rows and
tests, by rules and in words of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from numdev.gate.findings import findings_in, joined_words
from numdev.gate.judgement import Judgement, Statement, Test
from numdev.gate.row_checks import check_whole
from numdev.gate.rules import Rules, default_rules, default_rules_for_functions
from numdev.gate.thresholds import tests_of_rows
from numdev.grouping import grouped
from numdev.report import (
    DeviationRow,
    Finding,
    FunctionReport,
    InputRecord,
    Outcome,
    TolerancePower,
    WrongKernelRecord,
)
from numdev.report import document as doc
from numdev.report.document import Cell, Column
from numdev.report.number_text import ratio, si, three
from numdev.report_kinds import Judged, Kind
from numdev.studies.audit.failed_numbers import FailedNumbers
from numdev.studies.audit.kind import moves

SOUND = 1.1  # times the floor: as exact as the format allows
MOSTLY_EXPLAINED = 1.3  # times what the reference's operations explain
SENSITIVE = 3.0  # times what rounding explains, that inputs moved by half an ulp move
SHOWN = 8  # inputs that are not judged
NARROW = 10.0  # times what rounding explains: data that move the result less judge little


def tests(report: FunctionReport, rules: Rules) -> Iterator[Test]:
    """Yields a test for every rule on every tensor of the function, then for which calls
    ran, and for whether the inputs are finite. The default rules of attention are
    replaced by those of functions; the rule on mismatches is left out where no row
    counts any. A call without a result of the reference is no pass."""
    if rules.thresholds == default_rules().thresholds:
        rules = default_rules_for_functions()
    rules = rules.model_copy(update={"skipped": "never"})
    numbers = [row.beside_reference for row in report.rows]
    if not any(x is not None and x.mismatches is not None for x in numbers):
        floats = [t for t in rules.thresholds if t.metric != "mismatches"]
        rules = rules.model_copy(update={"thresholds": tuple(floats)})
    return tests_of_rows(report, rules)


def findings(
    judgement: Judgement, report: FunctionReport
) -> tuple[Sequence[Finding], Sequence[str]]:
    """Returns the findings of a judgement, and sentences on what was tested, on the
    reference and the inputs, and what the report doubts."""
    wrong, tested = findings_in(judgement, report.rows, report.words)
    words = (*remarks(report.rows), *inputs_not_judged(report.inputs))
    power = power_sentences(report.power)
    return wrong, (*power, *tested, *words, *report.doubts)


def inputs_not_judged(inputs: Sequence[InputRecord]) -> Iterator[str]:
    """Yields a sentence for each format in which inputs are not judged, with the reason
    for each of the first SHOWN; nothing where all are."""
    open_ones = [record for record in inputs if not record.is_judged]
    for fmt, of_format in grouped(open_ones, lambda record: record.format).items():
        names = [_too_little(record) for record in of_format[:SHOWN]]
        names += [f"and {len(of_format) - SHOWN} more"] * (len(of_format) > SHOWN)
        yield (
            f"Inputs that are not judged ({fmt}), since a function that reads them wrong "
            f"would pass: {', '.join(names)}."
        )


def _too_little(record: InputRecord) -> str:
    """Returns an input's name with the reason why it is not judged in brackets."""
    if record.moved is None or (record.reason and not record.moved):
        return f"{record.input} ({record.reason})"
    if not record.moved:
        return f"{record.input} (leaving it out changes nothing)"
    needed = f"needed: {record.needed:g}×"
    return f"{record.input} (moves {record.tensor} by {three(record.moved)}×; {needed})"


def power_sentences(power: TolerancePower | None) -> Iterator[str]:
    """Yields for each format how many wrong kernels a tolerance passes and how many the
    rules do; nothing for None."""
    for part in power.formats if power is not None else ():
        judged = [kernel for kernel in part.kernels if kernel.tolerance is not None]
        count = len(judged)
        by_tolerance = sum(k.tolerance is Outcome.PASSED for k in judged)
        by_rules = sum(k.rules is Outcome.PASSED for k in judged)
        not_judged = sum(k.rules is Outcome.NOT_JUDGED for k in judged)
        sentence = (
            f"The tolerance {_tolerance_text(power)} passes {by_tolerance} of {count} "
            f"wrong kernels on these inputs; numdev {by_rules}"
        )
        if not_judged:
            sentence += f", and {not_judged} are not judged"
        yield f"{sentence} ({part.format})."


def _tolerance_text(power: TolerancePower | None) -> str:
    """Returns a tolerance in words: one number where rtol and atol are the same. Empty
    without one."""
    if power is None:
        return ""
    if power.rtol == power.atol:
        return f"{power.rtol:g}"
    return f"rtol {power.rtol:g}, atol {power.atol:g}"


POWER_COLUMNS = (
    Column("wrong kernel", align="left"),
    Column("tolerance", align="left"),
    Column("numdev", align="left"),
)
POWER_LEGEND = (
    "The wrong kernels are made from the reference's results and arguments, without "
    "knowing what it computes: other mistakes may pass either. The tolerance is held to "
    "the reference as PyTorch runs it in the format, as torch.allclose; numdev's rules "
    "to its exact result, without a search for causes."
)


def power_blocks(report: FunctionReport) -> Iterator[doc.Node]:
    """Yields a table of wrong kernels for each format, with what a tolerance and numdev's
    rules say of each, and a legend; nothing where that was not asked for."""
    if report.power is None:
        return
    for part in report.power.formats:
        yield doc.table(
            POWER_COLUMNS,
            map(_power_line, part.kernels),
            title=f"Wrong kernels, {part.format}, {part.case}",
            kind="words",
        )
    yield from doc.notes((POWER_LEGEND,))


def _power_line(kernel: WrongKernelRecord) -> list[Cell]:
    """Returns a row of the table: what is wrong, and whether it passes either; why it is
    not counted where neither was asked."""
    if kernel.tolerance is None or kernel.rules is None:
        return [Cell(kernel.words), Cell(kernel.reason or "–"), Cell("–")]
    caught = {Outcome.PASSED: "passes", Outcome.EXCEEDED: "fails"}
    words = [caught.get(x, "not judged") for x in (kernel.tolerance, kernel.rules)]
    return [Cell(kernel.words), *map(Cell, words)]


def remarks(rows: Sequence[DeviationRow]) -> Iterator[str]:
    """Yields sentences on each tensor with a reference that errs by more than its
    operations explain, on one that inputs moved by half an ulp move by more than
    SENSITIVE times what rounding explains, and on one that other data move by less than
    NARROW times that; nothing where none of these holds. Rows that are not `ok` do not
    count."""
    ok = [row for row in rows if row.status == "ok"]
    yield from _of_reference([row for row in ok if row.role == "baseline"])
    for tensor, of_tensor in grouped(ok, lambda row: row.tensor).items():
        kernels = [row for row in of_tensor if row.role == "kernel"]
        numbers = [row.beside_reference for row in kernels if row.beside_reference]
        layouts = dict.fromkeys(x.layout for x in numbers if x.layout)
        for layout in layouts:
            yield f"{tensor} {layout}, so this is no failure."
        shaken = max((x.conditioning or 0.0 for x in numbers), default=0.0)
        if shaken > SENSITIVE:
            yield (
                f"{tensor} is sensitive: inputs moved by half an ulp move it by "
                f"{three(shaken)}× what rounding explains."
            )
        moved = min((x.moved for x in numbers if x.moved is not None), default=NARROW)
        if moved < NARROW:
            yield (
                f"The inputs judge {tensor} only roughly: another seed's data move it by "
                f"{three(moved)}× what rounding explains."
            )


def _of_reference(rows: Sequence[DeviationRow]) -> Iterator[str]:
    """Yields a sentence on the tensors in which the reference errs by more than
    MOSTLY_EXPLAINED times what its operations explain, one for those of one cause; with
    the largest error of any call. Nothing where it errs by at most that. `rows`: of the
    reference as PyTorch runs it."""
    of_tensors = grouped(rows, lambda row: row.tensor)
    worst = {name: max(each, key=_own_ratio) for name, each in of_tensors.items()}
    far = [row for row in worst.values() if _own_ratio(row) > MOSTLY_EXPLAINED]
    alike = grouped(far, lambda row: (row.suspicion, _is_yardstick(row)))
    for (cause, is_yardstick), each in alike.items():
        largest = max(each, key=_own_ratio)
        up_to = "up to " if len(each) > 1 else ""
        sentence = (
            f"The reference errs in {joined_words(row.tensor for row in each)} by {up_to}"
            f"{three(_own_ratio(largest))}× what its operations explain, as PyTorch runs "
            f"it here ({largest.case})"
        )
        sentence += f": {cause}" if cause else ""
        yield sentence + ("." if is_yardstick else "; it is no yardstick.")


def _is_yardstick(row: DeviationRow) -> bool:
    """Whether the reference's own error leaves it a yardstick, by its row."""
    numbers = row.beside_reference
    return numbers is None or (numbers.yardstick or 1.0) >= 1.0


def _own_ratio(row: DeviationRow) -> float:
    """Returns the reference's error over what its operations explain, from its row; 0
    without numbers."""
    numbers = row.beside_reference
    return 0.0 if numbers is None else numbers.predicted_ratio or 0.0


def passing(report: FunctionReport, passed: Sequence[Test]) -> Statement:
    """Returns the statement on a function that passed: as exact as its format allows,
    where no row errs by more than SOUND times the floor; else as the reference is, or
    without an error in floats its integers. `passed`: its tests, at least one."""
    name = passed[0].kernel
    rows = [r for r in report.rows if r.role == "kernel" and r.kernel == name]
    over_floor = [row.floor_ratio for row in rows if row.floor_ratio is not None]
    numbers = [row.beside_reference for row in rows if row.beside_reference]
    ratios = [x.reference_ratio for x in numbers if x.reference_ratio is not None]
    if not ratios:
        are_integers = any(x.mismatches is not None for x in numbers)
        return Statement(
            "the reference's integers" if are_integers else "as the reference"
        )
    beside = f"rms error up to {three(max(ratios))}× explained{_limit_clause(passed)}"
    if over_floor and max(over_floor) <= SOUND:
        return Statement(f"as exact as the format allows; {beside}")
    if not over_floor:
        return Statement("as the reference")
    return Statement(f"as the reference; {beside}, {ratio(max(over_floor))}× floor")


def _limit_clause(passed: Sequence[Test]) -> str:
    """Returns ` (limit 1.14×)`, of the largest error over the explained one; empty where
    no rule judges that."""
    judged = [t for t in passed if t.metric == "reference_ratio" and t.bound is not None]
    numbers = [(t.observed, t.bound) for t in judged if isinstance(t.observed, float)]
    return f" (limit {three(max(numbers)[1])}×)" if numbers else ""


def summarised(report: FunctionReport) -> FunctionReport:
    """Returns the report with its answer: a sentence for each function and format that
    has a row, with its largest error over what the reference's rounding explains, or
    that it has no such number."""
    rows = [row for row in report.rows if row.role == "kernel"]
    answer = tuple(
        f"{name}, {fmt}: {_largest_error_text(of_function)}"
        for (name, fmt), of_function in grouped(
            rows, lambda row: (row.kernel, row.format)
        ).items()
    )
    summary = report.summary.model_copy(update={"answer": answer})
    return report.model_copy(update={"summary": summary})


def _largest_error_text(rows: Sequence[DeviationRow]) -> str:
    """Returns the rest of a sentence on the rows of one function in one format."""
    ratios = [
        row.beside_reference.reference_ratio
        for row in rows
        if row.beside_reference and row.beside_reference.reference_ratio is not None
    ]
    if not ratios:
        return "no error over what the reference's rounding explains"
    return f"rms error up to {three(max(ratios))}× explained"


COLUMNS = (
    Column("call", align="left"),
    Column("tensor", align="left"),
    Column("error / explained"),
    Column("worst slice"),
    Column("worst element"),
    Column("error / floor"),
    Column("error / reference"),
    Column("max error"),
)
LEGEND = (
    "explained: what the reference errs where its operations are rounded, one by one. "
    "floor: the exact result rounded once. reference: as PyTorch runs it here. Worst: "
    "the largest of a slice along an axis, and of an element, over what is explained. "
    "Judged are error / explained and the worst slice and element, with limits that are "
    "wider where they are of few numbers. The other columns are not judged."
)


def blocks(report: FunctionReport) -> Iterator[doc.Node]:
    """Yields a table for each function, and for the reference as PyTorch runs it, with
    the numbers of each tensor in each call that ran, and a legend."""
    failed = FailedNumbers(report)
    rows = [row for row in report.rows if row.role in ("kernel", "baseline")]
    ok = [row for row in rows if row.status == "ok"]
    by_kernel = grouped(ok, lambda row: row.kernel)
    # What is under audit comes before what it is compared with.
    for name, of_kernel in sorted(
        by_kernel.items(), key=lambda item: item[1][0].role != "kernel"
    ):
        yield doc.table(
            COLUMNS,
            (_line(row, failed) for row in of_kernel),
            [row.role != "kernel" for row in of_kernel],
            title=f"{name}, {of_kernel[0].format}",
        )
    yield from doc.notes((LEGEND,), doc.ON_REQUEST)
    yield from power_blocks(report)


def _line(row: DeviationRow, failed: FailedNumbers) -> list[Cell]:
    """Returns a row of the table: call, tensor and six numbers, `–` for a missing one,
    `bad` for one that a rule refuses."""
    beside = row.beside_reference
    numbers: Mapping[str, object] = vars(beside) if beside is not None else {}

    def cell(name: str) -> Cell:
        value = numbers.get(name)
        text = ratio(value if isinstance(value, float) else None)
        return Cell(text, style=failed.style(row, name))

    return [
        Cell(row.case),
        Cell(row.tensor),
        *map(cell, ("reference_ratio", "slice_ratio", "element_ratio")),
        Cell(ratio(row.floor_ratio), style=failed.style(row, "floor_ratio")),
        Cell(ratio(row.baseline_ratio), style=failed.style(row, "baseline_ratio")),
        Cell(si(row.max_abs), style=failed.style(row, "max_abs")),
    ]


FUNCTION = Kind(
    report=FunctionReport,
    blocks=blocks,
    judged=Judged(
        check=check_whole,
        tests=tests,
        findings=findings,
        summarised=summarised,
        passing=passing,
    ),
    moves=moves,
)
