"""How reports of functions beside their reference are judged and shown: by an audit's
rows and tests, with rules and words of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from numdev.gate.findings import findings_in, joined_words
from numdev.gate.judgement import Judgement, Statement, Test
from numdev.gate.row_groups import check_whole
from numdev.gate.row_tests import tests_of_rows
from numdev.gate.rules import Rules, default_rules, default_rules_for_functions
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
from numdev.studies.audit.kind import moves
from numdev.studies.audit.number_colouring import FailedNumbers
from numdev.tensor_properties import GRADIENT

SOUND = 1.1  # times the floor: as exact as the format allows
MOSTLY_EXPLAINED = 1.3  # times what the reference's operations explain
FORMULA_IS_CLOSER = 3.0  # times: from there on it is told that PyTorch's kernels err more
WITHOUT_TF32 = (
    " PyTorch leaves TF32 alone with `torch.backends.cudnn.allow_tf32 = False` (matrix "
    "products: `torch.backends.cuda.matmul`) in the reference's file."
)
SENSITIVE = 3.0  # times what rounding explains, that inputs moved by half an ulp move
SHOWN = 8  # inputs that are not judged
NOT_COMPARED = "Not compared"  # how sentences on results that are not judged begin
NARROW = 10.0  # times what rounding explains: data that move the result less judge little


def tests(report: FunctionReport, rules: Rules) -> Iterator[Test]:
    """Yields a test for every rule on every tensor of the function, then tests of which
    calls ran, and of whether the inputs are finite. The default rules of attention are
    replaced by those for functions. The rule on mismatches is left out where no row
    counts any. A call without a result of the reference is no pass, whatever the rules
    say of skipped calls."""
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
    """Returns the findings of a judgement, and sentences: on a tolerance's power, on what
    was tested, on the reference and the inputs, and the report's doubts."""
    wrong, tested = findings_in(judgement, report.rows, report.words)
    words = (*remarks(report.rows), *not_judged(report), *report.doubts)
    power = power_sentences(report.power)
    return wrong, (*power, *tested, *dict.fromkeys(words))


def not_judged(report: FunctionReport) -> Iterator[str]:
    """Yields sentences on what was asked for and is not judged: gradients in each format
    in which the reference has none, elements and other results that are not compared, and
    inputs; nothing where all is."""
    if report.request.get("backward"):
        rows = (row for row in report.rows if row.role == "baseline")
        for fmt, of_format in grouped(rows, lambda row: row.format).items():
            ran = [row for row in of_format if row.status == "ok"]
            if ran and not any(row.tensor.endswith(GRADIENT) for row in ran):
                yield (
                    f"Gradients are not judged ({fmt}): the reference lets none back to "
                    "its inputs."
                )
    yield from elements_not_judged(report.rows)
    yield from (doubt for doubt in report.doubts if doubt.startswith(NOT_COMPARED))
    yield from inputs_not_judged(report.inputs)


def elements_not_judged(rows: Sequence[DeviationRow]) -> Iterator[str]:
    """Yields a sentence for each tensor of a function in each format that has elements
    without an error where the reference is not finite, with the most in one call."""
    kernels = [row for row in rows if row.role == "kernel" and row.beside_reference]
    for (tensor, fmt), each in grouped(kernels, lambda x: (x.tensor, x.format)).items():
        worst = max(each, key=_unjudged)
        if count := _unjudged(worst):
            yield (
                f"{NOT_COMPARED}: {count:,} of {worst.elements:,} elements of {tensor} "
                f"({worst.case}, {fmt}), where the exact result is finite and the "
                "reference in this format is not."
            )


def _unjudged(row: DeviationRow) -> int:
    """Returns how many finite elements of a row's tensor have no error beside the
    reference; 0 where that was not counted."""
    numbers = row.beside_reference
    return 0 if numbers is None else numbers.unjudged or 0


def inputs_not_judged(inputs: Sequence[InputRecord]) -> Iterator[str]:
    """Yields a sentence for each format in which inputs are not judged, with the first
    SHOWN of them and the reason of each; nothing where all are judged."""
    open_ones = [record for record in inputs if not record.is_judged]
    for fmt, of_format in grouped(open_ones, lambda record: record.format).items():
        names = [_too_little(record) for record in of_format[:SHOWN]]
        names += [f"and {len(of_format) - SHOWN} more"] * (len(of_format) > SHOWN)
        yield (
            f"Inputs that are not judged ({fmt}), since a function that reads them wrong "
            f"would pass: {', '.join(names)}."
        )


def _too_little(record: InputRecord) -> str:
    """Returns an input with the reason why it is not judged: `x (leaving it out changes
    nothing)`, `x (moves output by 0.100×; needed: 1×)`, or with the record's own
    reason."""
    if record.moved is None or (record.reason and not record.moved):
        return f"{record.input} ({record.reason})"
    if not record.moved:
        return f"{record.input} (leaving it out changes nothing)"
    needed = f"needed: {record.needed:g}×"
    return f"{record.input} (moves {record.tensor} by {three(record.moved)}×; {needed})"


def power_sentences(power: TolerancePower | None) -> Iterator[str]:
    """Yields for each format a sentence on how many wrong kernels a tolerance passes, and
    how many the rules pass; nothing for None."""
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
    """Returns a tolerance in words: `0.01` where rtol and atol are the same, else `rtol
    0.001, atol 1e-05`; empty for None."""
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
    """Yields a table of wrong kernels for each format, with the outcome of a tolerance
    and of numdev's rules for each, and a legend; nothing for a report without a
    tolerance."""
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
    """Returns a row of the table: the wrong kernel, and whether it passes the tolerance
    and the rules, each `passes`, `fails` or `not judged`; for one that is not counted the
    reason, and a dash."""
    if kernel.tolerance is None or kernel.rules is None:
        return [Cell(kernel.words), Cell(kernel.reason or "–"), Cell("–")]
    caught = {Outcome.PASSED: "passes", Outcome.EXCEEDED: "fails"}
    words = [caught.get(x, "not judged") for x in (kernel.tolerance, kernel.rules)]
    return [Cell(kernel.words), *map(Cell, words)]


def remarks(rows: Sequence[DeviationRow]) -> Iterator[str]:
    """Yields sentences on each tensor in each format, from rows that are `ok`. One says
    that the reference errs by more than its operations explain. One says that the steps
    of PyTorch's kernels err by more than FORMULA_IS_CLOSER times what its formula does.
    One says that a tensor differs harmlessly in layout. One says that inputs moved by
    half an ulp move it by more than SENSITIVE times what rounding explains. One says that
    other data move it by less than NARROW times that. Nothing where none of these
    holds."""
    ok = [row for row in rows if row.status == "ok"]
    of_reference = [row for row in ok if row.role == "baseline"]
    yield from _reference_sentences(of_reference)
    yield from _kernel_step_sentences(of_reference)
    by_tensor = grouped(ok, lambda row: (row.tensor, row.format))
    for (tensor, fmt), of_tensor in by_tensor.items():
        kernels = [row for row in of_tensor if row.role == "kernel"]
        numbers = [row.beside_reference for row in kernels if row.beside_reference]
        layouts = dict.fromkeys(x.layout for x in numbers if x.layout)
        for layout in layouts:
            yield f"{tensor} {layout} in {fmt}, so this is no failure."
        shaken = max((x.conditioning or 0.0 for x in numbers), default=0.0)
        if shaken > SENSITIVE:
            yield (
                f"{tensor} is sensitive in {fmt}: inputs moved by half an ulp move it "
                f"by {three(shaken)}× what rounding explains."
            )
        moved = min((x.moved for x in numbers if x.moved is not None), default=NARROW)
        if moved < NARROW:
            yield (
                f"The inputs judge {tensor} only roughly in {fmt}: another seed's data "
                f"move it by {three(moved)}× what rounding explains."
            )


def _reference_sentences(rows: Sequence[DeviationRow]) -> Iterator[str]:
    """Yields a sentence for each format and cause on the tensors in which the reference
    errs by more than MOSTLY_EXPLAINED times what its operations explain, with the largest
    error of any call; tensors without a cause share one. Tensors for which it is no
    yardstick have a sentence of their own. Nothing where it errs by at most that. `rows`:
    those of the reference as PyTorch runs it."""
    of_tensors = grouped(rows, lambda row: (row.format, row.tensor)).values()
    worst = [max(each, key=_own_ratio) for each in of_tensors]
    far = [row for row in worst if _own_ratio(row) > MOSTLY_EXPLAINED]
    alike = grouped(far, lambda row: (row.format, row.suspicion, _is_yardstick(row)))
    for (fmt, cause, is_yardstick), each in alike.items():
        largest = max(each, key=_own_ratio)
        up_to = "up to " if len(each) > 1 else ""
        sentence = (
            f"The reference errs in {joined_words(row.tensor for row in each)} by {up_to}"
            f"{three(_own_ratio(largest))}× what its operations explain, as PyTorch runs "
            f"it here ({largest.case}, {fmt})"
        )
        sentence += f": {cause}" if cause else ""
        sentence += "." if is_yardstick else "; it is no yardstick."
        yield sentence + (WITHOUT_TF32 if cause and "tf32" in cause else "")


def _kernel_step_sentences(rows: Sequence[DeviationRow]) -> Iterator[str]:
    """Yields a sentence for each format on the tensors in which the steps of PyTorch's
    kernels err by more than FORMULA_IS_CLOSER times what the reference's formula does,
    with the largest of any call, and why. `rows`: those of the reference as PyTorch runs
    it."""
    far = [row for row in rows if _formula_ratio(row) > FORMULA_IS_CLOSER]
    for fmt, each in grouped(far, lambda row: row.format).items():
        largest = max(each, key=_formula_ratio)
        tensors = joined_words(dict.fromkeys(row.tensor for row in each))
        up_to = "up to " if len(each) > 1 else ""
        why = largest.beside_reference and largest.beside_reference.kernel_steps
        yield (
            f"In {tensors} the steps of PyTorch's kernels err by {up_to}"
            f"{three(_formula_ratio(largest))}× what the reference's formula does, and a "
            f"function may err as much ({largest.case}, {fmt}): {why}."
        )


def _formula_ratio(row: DeviationRow) -> float:
    """Returns what the steps of PyTorch's kernels err over what the formula does, from a
    row of the reference; 0 where the row has no such number."""
    numbers = row.beside_reference
    return 0.0 if numbers is None else numbers.formula_ratio or 0.0


def _is_yardstick(row: DeviationRow) -> bool:
    """Whether the reference can still be compared with, given its own error: its row has
    no `yardstick` below 1."""
    numbers = row.beside_reference
    return numbers is None or (numbers.yardstick or 1.0) >= 1.0


def _own_ratio(row: DeviationRow) -> float:
    """Returns the reference's error over what its operations explain, from its row; 0
    where the row has no such number."""
    numbers = row.beside_reference
    return 0.0 if numbers is None else numbers.predicted_ratio or 0.0


def passing(report: FunctionReport, passed: Sequence[Test]) -> Statement:
    """Returns the statement on a function that passed in a format. It is `as exact as the
    format allows` where no row errs by more than SOUND times the floor, else `as the
    reference`, each with the largest error. It is `as the reference` alone where no row
    has an error over the floor. Without an error in floats it is `the reference's
    integers`, or `as the reference`. `passed`: its tests in that format, at least one."""
    name, fmt = passed[0].kernel, passed[0].format
    of_function = (r for r in report.rows if r.role == "kernel" and r.kernel == name)
    rows = [r for r in of_function if r.format == fmt]
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
    """Returns ` (limit 1.14×)`: the limit on error over explained error, of the test that
    measured the largest. Empty where no test has both."""
    judged = [t for t in passed if t.metric == "reference_ratio" and t.bound is not None]
    numbers = [(t.observed, t.bound) for t in judged if isinstance(t.observed, float)]
    return f" (limit {three(max(numbers)[1])}×)" if numbers else ""


def summarised(report: FunctionReport) -> FunctionReport:
    """Returns the report with its answer: a sentence for each function and format of its
    rows, with the largest error over what the reference's rounding explains, or that
    there is no such number."""
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
    """Returns the end of a sentence on one function in one format: `rms error up to 1.02×
    explained`, or that there is no such number."""
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
    """Yields a table for each function in each format, and behind these one in each
    format for the reference as PyTorch runs it, with the numbers of each tensor in each
    call that ran; then a legend, and the tables of `power_blocks`."""
    failed = FailedNumbers(report)
    rows = [row for row in report.rows if row.role in ("kernel", "baseline")]
    ok = [row for row in rows if row.status == "ok"]
    by_format = grouped(ok, lambda row: (row.role != "kernel", row.kernel, row.format))
    # What is under audit comes before what it is compared with.
    for (is_beside, name, fmt), same in sorted(
        by_format.items(), key=lambda item: item[0][0]
    ):
        yield doc.table(
            COLUMNS,
            (_line(row, failed) for row in same),
            [is_beside] * len(same),
            title=f"{name}, {fmt}",
        )
    yield from doc.notes((LEGEND,), doc.ON_REQUEST)
    yield from power_blocks(report)


def _line(row: DeviationRow, failed: FailedNumbers) -> list[Cell]:
    """Returns a row of the table: call, tensor and six numbers. A missing number is a
    dash, one that a rule refuses has the style `bad`."""
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
