"""A report of an audit as a document: the kernels ranked, their gradients and phases,
maps of errors by layer and head, errors along a call's rows, and which roundings make
them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import add, attrgetter

from numdev.grouping import grouped
from numdev.metrics.metrics_by_name import ULPS
from numdev.report import (
    AuditReport,
    Axis,
    Curve,
    DeviationRow,
    Explanation,
    Figure,
    KernelSummary,
    PartSummary,
    Places,
    ProfileRow,
    Role,
    Tick,
    WeightRow,
    WorstRow,
)
from numdev.report import document as doc
from numdev.report.document import Cell, Column, Item, floor_cell
from numdev.report.number_text import NONE, SHADES, label, ratio, shade, short, si
from numdev.studies.audit.number_colouring import FailedNumbers
from numdev.tensor_properties import Words, tensor_spec

REASONS = 3  # that are said of a kernel that did not run
LEGEND = (
    "error / floor: rms error, against fp64 on the same rounded inputs, divided by "
    "the least "
    "possible (the exact result rounded once), median and worst {unit}; shaded from "
    "1.25, 2, 4, 16. "
    "error / expected: divided by what the kernel's rounding model predicts, worst "
    "{unit}. error / "
    "{baseline}: divided by {plain}'s (the row baseline), median. Mean and max "
    "error are in the "
    "output's units. Red: beyond a rule's limit."
)
SAMPLED = (
    "Only {} random query rows per head were measured, over all positions, and the {} "
    "where the kernel looked worst. Averages and ratios are estimates (95 % intervals in "
    "report.json), maxima lower bounds (≥). NaN and infinity are counted in all rows."
)
RESIDUAL = (
    "residual: the share of the error that remains after the emulation's error is "
    "subtracted, "
    "element by element; 0.5 or less: explained. next: that of the second-best preset."
)
POSITIONS = (
    "Each point is the rms of error / expected (without a prediction: of error / "
    "size of the "
    "summed terms) over a bin's rows, all heads and sequences. Bins hold 1, 1, 2, "
    "4, 8 rows and so "
    "on, then equal numbers. Lines are medians over calls (a model's layers)."
)
ULP_LABELS = (f"<1/{2 ** -ULPS[0]}", *(f"1/{2 ** -p}" if p < 0 else str(2**p)
              for p in range(ULPS[0], ULPS[1] + 1)))  # fmt: skip


def blocks(report: AuditReport) -> Iterator[doc.Node]:
    """Yields the blocks of an audit's report, below its answer: ranking, legend, maps,
    curves, worst rows, explanations, weights."""
    summary, words, failed = report.summary, report.words, FailedNumbers(report)
    for name, kernels in grouped(summary.kernels, attrgetter("format")).items():
        yield from _format_blocks(name, kernels, words, failed)
    rows = max((k.rows_measured or 0 for k in summary.kernels), default=0)
    suspects = max((k.suspects or 0 for k in summary.kernels), default=0)
    legend = LEGEND.format(unit=words.unit, plain=words.plain, baseline=words.baseline)
    yield from doc.notes((legend,), doc.ON_REQUEST)
    yield from doc.notes((SAMPLED.format(rows, suspects) if rows else "",))
    if "architecture" in report.provenance.source:
        target = report.request.get("checkpoint")
        note = f"What this does at the model's output: `numdev effects {target}`"
        yield from doc.notes(
            [f"At the model's output: {x}" for x in summary.effects] or [note]
        )
    yield doc.TableChoice(tuple(maps(report, failed)))
    yield from by_layer(report)
    yield from spread(report.profiles)
    if figures := tuple(positions(report.profiles)):
        yield doc.Heading("Error against position", doc.TEXT)
        yield from figures
        yield doc.Paragraph(POSITIONS, "soft", doc.PAGE)
    yield from _worst_row_blocks(summary.worst_rows, words, sampled=bool(rows))
    yield from _explanation_blocks(summary.explanations)
    yield doc.text_table(
        ("format", "tensors", "mean change (= W1)", "max change", "in", "not finite"),
        _weight_lines(report.weights),
        title="Stored weights, cast",
        only=doc.ON_REQUEST,
    )


# --- the ranking ----------------------------------------------------------------------


def _name_cell(k: KernelSummary) -> Cell:
    """Returns the cell with a kernel's name and options; strong for a kernel under
    audit."""
    return Cell(label(k), style="strong" if k.role == "kernel" else "")


def _max_error_text(k: KernelSummary) -> str:
    """Returns a kernel's largest absolute error as text, with `≥` before it where rows
    are sampled: it is a lower bound then."""
    return ("" if k.rows_measured is None or k.max_abs is None else "≥") + si(k.max_abs)


KERNEL = Column("kernel", align="left")


def _ratio_columns(words: Words) -> list[Column]:
    """Returns the heads of the four columns of `_ratio_cells`, in the words of the
    operation."""
    return [
        Column("error / floor"),
        Column(f"worst {words.unit}"),
        Column("error / expected"),
        Column(f"error / {words.baseline}"),
    ]


def _ratio_cells(
    k: KernelSummary, part: KernelSummary | PartSummary, failed: FailedNumbers
) -> list[Cell]:
    """Returns four cells with errors of a kernel, or of a part of it (a gradient, a
    phase): the median and the worst over the floor, the worst over the expected one, and
    the median over the baseline's. Each has the style of its number by the rules: `bad`
    where one refuses it; `good` where one passes it and none refuses it, but not of a
    phase; else none."""
    tensor, phase = "out", None
    if isinstance(part, PartSummary):
        tensor, phase = part.tensor, part.phase

    def styled(cell: Cell, metric: str) -> Cell:
        """Returns the cell in the style that its number has by the rules."""
        style = failed.style_of_tensor(label(k), k.format, tensor, metric, phase)
        return replace(cell, style=style)

    where = part.floor_ratio_where or ""
    return [
        styled(floor_cell(part.floor_ratio), "floor_ratio"),
        styled(floor_cell(part.floor_ratio_worst, where), "floor_ratio"),
        styled(Cell(ratio(part.expected_ratio_worst)), "expected_ratio"),
        styled(Cell(ratio(part.baseline_ratio)), "baseline_ratio"),
    ]


def _format_blocks(
    name: str, kernels: Sequence[KernelSummary], words: Words, failed: FailedNumbers
) -> Iterator[doc.Node]:
    """Yields the blocks of one format: a table of the kernels ranked, tables of their
    gradients and phases, and remarks. `words`: of the operation; `failed`: the numbers
    that rules refuse."""
    shown = [k for k in kernels if k.ok and k.role != "precision"]
    ratios = _ratio_columns(words)
    yield doc.table(
        [KERNEL, *ratios, Column("mean error"), Column("max error")],
        (_ranking_line(k, failed) for k in shown),
        [k.role != "kernel" for k in shown],
        title=f"{name}: error of the output, the closest to fp64 first",
    )
    yield _parts_table(
        f"{name}: gradients",
        ratios,
        [(k, g.tensor, g) for k in shown for g in k.gradients],
        failed,
    )
    phased = [k for k in shown if len(k.phases) > 1]
    phases = [(k, p.phase or "", p) for k in phased for p in k.phases]
    yield _parts_table(f"{name}: prefill beside decode", ratios, phases, failed)
    yield doc.Bullets(tuple(_format_remarks(name, kernels, words)))


def _ranking_line(k: KernelSummary, failed: FailedNumbers) -> list[Cell]:
    """Returns a kernel's line of the ranking. Where elements of its output are finite,
    infinite or NaN unlike the exact result, every number is `NaN`, since its other
    elements do not describe it."""
    errors = Cell(si(k.mean_abs)), Cell(_max_error_text(k))
    numbers = [*_ratio_cells(k, k, failed), *errors]
    if k.nonfinite:
        numbers = [Cell("NaN", style="bad")] * len(numbers)
    return [_name_cell(k), *numbers]


def _parts_table(
    title: str,
    ratios: Sequence[Column],
    parts: Sequence[tuple[KernelSummary, str, PartSummary]],
    failed: FailedNumbers,
) -> doc.Table:
    """Returns a table with a row for each part. `ratios`: the columns of the numbers;
    `parts`: (kernel, name of the part, its numbers); `failed`: the numbers that rules
    refuse."""
    return doc.table(
        [KERNEL, Column("of", align="left"), *ratios],
        [
            (_name_cell(k), name, *_ratio_cells(k, part, failed))
            for k, name, part in parts
        ],
        [k.role != "kernel" for k, _, _ in parts],
        title=title,
    )


def _format_remarks(
    name: str, kernels: Sequence[KernelSummary], words: Words
) -> Iterator[Item]:
    """Yields the remarks on one format: what rounding the inputs costs, what ran by
    default, noise, and why a kernel was skipped or failed in some calls, with at most
    REASONS reasons. Where a kernel ran in no call, its verdict says why. `words`: of the
    operation."""
    for k in kernels:
        if k.role == "precision" and k.mean_abs:
            yield Item(
                f"Rounding {words.inputs} to {name} alone moved the answer by "
                f"{si(k.mean_abs)} on "
                f"average, {_max_error_text(k)} at most.",
                style="soft",
            )
        if k.kernel == "sdpa-default" and k.ran:
            ran = ", ".join(r.removeprefix("_scaled_dot_product_") for r in k.ran)
            yield Item(f"sdpa-default ran {ran}.", style="soft")
        if k.noise:
            text = (
                f"{k.kernel} changes between two runs by {si(k.noise)}× the "
                "rounding floor."
            )
            yield Item(text, style="soft")
        if k.reasons and k.ok:  # else its verdict says why
            more = (
                f"; and {len(k.reasons) - REASONS} more"
                if len(k.reasons) > REASONS
                else ""
            )
            lead = (
                f"{k.kernel} "
                f"{'failed' if k.failed else 'skipped' if k.skipped else 'ran'}:"
            )
            yield Item(
                "; ".join(k.reasons[:REASONS]) + more,
                lead=lead,
                style="bad" if k.failed else "warn",
            )


# --- where ----------------------------------------------------------------------------

# Of a terminal's colours
LIMITS = {"expected_ratio": (1.1, 1.5, 3.0, 10.0), "floor_ratio": SHADES}


Group = tuple[str, str, str]  # kernel with its options, format and tensor


def maps(report: AuditReport, failed: FailedNumbers | None = None) -> Iterator[doc.Table]:
    """Yields for each kernel under audit, format and tensor a heat map, layer by unit, of
    the error over the expected one; over the floor, where one of its heads has no
    expected error. Tensors without an error over the floor have none. Of several calls of
    a layer it has the largest error. The kernel that is farthest off comes first.
    `failed`: numbers that a rule refuses, which are `bad`; None: there are none."""
    places = Places(report.rows, report.words)
    groups = defaultdict[Group, dict[tuple[str, int | None], DeviationRow]](dict)
    for row in report.rows:
        if row.role == "kernel" and row.status == "ok" and row.floor_ratio is not None:
            of = groups[label(row), row.format, row.tensor]
            at = places.layer(row), row.head
            if at not in of or _severity(row) > _severity(of[at]):
                of[at] = row
    ranked = sorted(
        groups.items(), key=lambda item: -max(map(_severity, item[1].values()))
    )
    for (kernel, fmt, tensor), cells in ranked:
        relative = all(row.expected_ratio is not None for row in cells.values())
        metric = "expected_ratio" if relative else "floor_ratio"
        heads = sorted({head for _, head in cells}, key=lambda head: head or 0)
        layers = {
            layer.removeprefix("layer "): [
                _head_cell(
                    cells.get((layer, h)),
                    metric,
                    doc.cell_id(kernel, fmt, tensor, layer, h),
                    failed,
                )
                for h in heads
            ]
            for layer in dict.fromkeys(layer for layer, _ in cells)
        }
        title = (
            f"{kernel}, {fmt}, {tensor}: error / {'expected' if relative else 'floor'}"
        )
        yield doc.heat_map(f"{title}, layer by {report.words.unit}", heads, layers)


def _severity(row: DeviationRow) -> float:
    """Returns the number by which rows of a head are compared: infinity for elements that
    are not finite, else error over expected; where that is None or 0, error over floor,
    or 0."""
    return math.inf if row.nonfinite else row.expected_ratio or row.floor_ratio or 0.0


def _head_cell(
    row: DeviationRow | None, metric: str, name: str, failed: FailedNumbers | None
) -> Cell:
    """Returns the cell of a head: its value of `metric`, coloured by the logarithm, with
    its ratios and largest error as tooltip. A dash without a row or value, `NaN` where
    elements are not finite. `name`: the cell's id."""
    value: float | None = None if row is None else getattr(row, metric)
    if row is None or value is None:
        return Cell(NONE)
    most = LIMITS[metric][-1]
    heat = round(100 * min(1.0, max(0.0, math.log(max(value, 1e-9), most))))
    about = (
        f"error / expected {ratio(row.expected_ratio)}, error / floor "
        f"{ratio(row.floor_ratio)}"
    )
    about += f", max error {si(row.max_abs)}"
    if row.nonfinite:
        about = (
            f"{row.nonfinite} elements that are finite, infinite or NaN unlike the exact "
            f"result; of the others {about}"
        )
        return Cell("NaN", 4, style="bad", title=about, heat=100, id=name)
    return Cell(
        short(value),
        shade(value, LIMITS[metric]),
        style=failed.style(row, metric) if failed else "",
        title=about,
        heat=heat,
        id=name,
    )


def by_layer(report: AuditReport) -> Iterator[doc.Node]:
    """Yields one block of figures of the output's error over the floor, of kernels under
    audit and the baseline, layer by layer, the median over heads, a figure for each
    format. Nothing for fewer than three layers."""
    rows = [
        row
        for row in report.rows
        if tensor_spec(row.tensor).is_output
        and row.role in ("kernel", "baseline")
        and row.floor_ratio
    ]
    layers = sorted({row.layer for row in rows if row.layer is not None})
    if len(layers) < 3:
        return
    figures = []
    for fmt, of_format in grouped(rows, attrgetter("format")).items():
        curves: list[Curve] = []
        for (kernel, role), of_kernel in grouped(of_format, _label_and_role).items():
            by_layer = grouped(of_kernel, attrgetter("layer"))
            ratios = {
                n: [row.floor_ratio or 0.0 for row in by_layer.get(n, ())] for n in layers
            }
            curves += doc.curve(
                kernel, role, {(n, f"layer {n}"): x for n, x in ratios.items()}
            )
        title = f"{fmt}: error / floor by layer, median {report.words.unit}"
        figures.append(Figure(
            title=title, metric="floor_ratio", relative=True,
            y_title="error / floor", y_scale="log", curves=tuple(curves),
        ))  # fmt: skip
    ticks = tuple(Tick(x=layer, label=str(layer)) for layer in layers)
    axis = Axis(name="layer", title="layer", scale="linear", ticks=ticks)
    yield doc.Figures(tuple(figures), axis, only=doc.PAGE)


def _label_and_role(row: DeviationRow | ProfileRow) -> tuple[str, Role]:
    """Returns the kernel's name with its options, and its role."""
    return label(row), row.role


# --- what stands below it -------------------------------------------------------------


def positions(profiles: Sequence[ProfileRow]) -> Iterator[doc.Node]:
    """Yields figures of errors over what is predicted, by bin of positions, for each
    format, tensor and kind of attention; of the errors themselves where nothing is
    predicted. Behind them come remarks on where kernels err most. A curve has the medians
    over calls of one length: that of most calls, of several such lengths the longest.
    Nothing without profiles."""
    figures = defaultdict(list)
    groups = grouped(profiles, attrgetter("format", "attends", "tensor"))
    for (name, attends, tensor), rows in groups.items():
        calls = Counter(length for length, _ in {(row.length, row.case) for row in rows})
        length = max(calls, key=lambda n: (calls[n], n))
        rows = [row for row in rows if row.length == length]
        relative = any(row.predicted for row in rows)
        what = tensor_spec(tensor).row
        curves: list[Curve] = []
        for (kernel, role), of_kernel in grouped(rows, _label_and_role).items():
            errors = (_errors_by_bin(row, relative) for row in of_kernel)
            bins = (
                [x for x in of_bin if x is not None]
                for of_bin in zip(*errors, strict=True)
            )
            names = ((i, f"{what} {start}") for i, start in enumerate(rows[0].starts))
            curves += doc.curve(kernel, role, dict(zip(names, bins, strict=True)))
        figure = Figure(
            title=f"{name}, {f'{attends} attention, ' if attends else ''}{tensor} "
            f"({length} "
            f"{what}s): error {'/ expected ' if relative else ''}by position",
            metric="expected_ratio" if relative else "row_rel",
            relative=relative,
            y_title="error / expected"
            if relative
            else "rms error of a row / size of its terms",
            y_scale="log",
            curves=tuple(curves),
        )
        if curves:
            ticks = tuple(
                Tick(x=i, label=str(start)) for i, start in enumerate(rows[0].starts)
            )
            title = f"first {'key' if what == 'key' else 'query row'} of the bin"
            axis = Axis(name="position", title=title, scale="linear", ticks=ticks)
            figures[axis].append(figure)
    for axis, drawn in figures.items():
        yield doc.Figures(tuple(drawn), axis, only=doc.TEXT)
        yield doc.Bullets(
            tuple(item for each in drawn for item in _peak_remarks(each)), only=doc.TEXT
        )


def spread(profiles: Sequence[ProfileRow]) -> Iterator[doc.Node]:
    """Yields one block of histograms as curves, a figure for each format and tensor: the
    share of elements, in %, by the size of their error in ulps, for kernels, the floor
    and what is predicted. Without profiles the block has no figure."""
    groups = defaultdict[tuple[str, str], dict[tuple[str, Role], list[int]]](dict)
    for row in profiles:
        if row.role == "baseline":
            continue
        of, kernel = groups[row.format, row.tensor], label(row)
        predicted: tuple[str, Role] = f"{kernel}, predicted", "precision"
        for key, counts in (
            ((kernel, row.role), row.ulps),
            (predicted, row.ulps_predicted),
        ):
            if counts:
                of[key] = [*map(add, counts, of.get(key, [0] * len(counts)))]
    figures = []
    for (fmt, tensor), by_kernel in groups.items():
        curves: list[Curve] = []
        for (kernel, role), numbers in by_kernel.items():
            shares = ([100 * n / max(1, sum(numbers))] for n in numbers)
            names = ((i, name) for i, name in enumerate(ULP_LABELS))
            curves += doc.curve(kernel, role, dict(zip(names, shares, strict=True)))
        title = f"{fmt}, {tensor}: elements by the size of their error"
        figures.append(
            Figure(
                title=title,
                metric="share",
                y_title="elements, %",
                y_scale="log",
                curves=tuple(curves),
            )
        )
    ticks = tuple(Tick(x=i, label=label) for i, label in enumerate(ULP_LABELS))
    axis = Axis(
        name="ulps",
        title="error, in ulp of the summed terms",
        scale="linear",
        ticks=ticks,
    )
    yield doc.Figures(tuple(figures), axis, only=doc.TEXT)


def _peak_remarks(figure: Figure) -> Iterator[Item]:
    """Yields for each kernel under audit of a figure where it first errs at least twice
    what is predicted, and where most; nothing for a kernel that never does, and for a
    figure of errors without a prediction."""
    for curve in figure.curves:
        over = [point for point in curve.points if point.mean >= 2]
        if over and figure.relative and curve.role == "kernel":
            most = max(over, key=lambda point: point.mean)
            text = (
                f"first above 2× the predicted error at {over[0].label}; most at "
                f"{most.label}"
            )
            lead = f"{curve.label} ({figure.title}):"
            yield Item(f"{text}: {ratio(most.mean)}×.", lead=lead)


def _errors_by_bin(row: ProfileRow, relative: bool) -> Sequence[float | None]:
    """Returns the error of each bin of a profile, None for a bin without one. With
    `relative` it is over what is predicted, and None too where the prediction is missing
    or 0."""
    if not relative:
        return row.errors
    predicted = row.predicted or [None] * len(row.errors)
    pairs = zip(row.errors, predicted, strict=True)
    return [e / p if e is not None and p else None for e, p in pairs]


def _worst_row_blocks(
    rows: Sequence[WorstRow], words: Words, *, sampled: bool
) -> Iterator[doc.Node]:
    """Yields a list of the rows that err most: where they stand, and what is special
    about them. The heading is missing, and the list empty, without rows. `words`: of the
    operation; `sampled`: whether only some rows were measured."""
    if rows:
        yield doc.Heading(
            f"Rows with the largest errors{', of those measured' * sampled}"
        )
    items, named = [], Places(rows, words)
    for w in rows:
        text = f"({w.format}), {named(w)}, {w.tensor}: {w.sentence}"
        items.append(Item(text, lead=label(w) or w.case))
    yield doc.Bullets(tuple(items))


def _explanation_blocks(explanations: Sequence[Explanation]) -> Iterator[doc.Node]:
    """Yields the table of which roundings make each kernel's errors, and a paragraph on
    what the rounding sites in it are. Without explanations the table is empty, and there
    is no paragraph."""
    yield doc.text_table(
        ("kernel", "", "makes the errors of", "residual", "next", "of its squared error"),
        map(_explanation_line, explanations),
        title="Which roundings make these errors",
    )
    sites = {s.site: s.rounds for e in explanations for s in e.sites}
    rounds = "; ".join(f"{site}: {what}" for site, what in sites.items())
    if explanations:
        yield doc.Paragraph(RESIDUAL + (f" {rounds}." if rounds else ""), "soft")


def _explanation_line(e: Explanation) -> tuple[Cell | str, ...]:
    """Returns a line of the table: the kernel, the tensor, the emulation and its
    residual, the next best, and the shares of the sites."""
    kernel = Cell(f"{label(e)} {e.format}", style="strong")
    source = Cell(_rounding_in_words(e), style="" if e.is_identified else "warn")
    following = f"{e.next_preset or NONE} {ratio(e.next_residual)}"
    shares = ", ".join(f"{100 * s.share:.0f} % {s.site}" for s in e.sites)
    return kernel, e.tensor, source, ratio(e.residual), following, shares


def _rounding_in_words(e: Explanation) -> str:
    """Returns in words the emulation that makes these errors, with the number of calls
    where it does not in all (`fa2 (3 of 4 calls)`). `not identified; closest: fa2` where
    no emulation does, `not identified` where none could be compared, `no error` where
    there is none."""
    if e.nearest is None:
        return "not identified" if e.calls or e.reason else "no error"
    name = e.nearest.replace("`", "")
    if not e.is_identified:
        return f"not identified; closest: {name}"
    return name + (
        f" ({e.explained} of {e.calls} calls)" if e.explained < e.calls else ""
    )


def _weight_lines(rows: Sequence[WeightRow]) -> Iterator[tuple[str, ...]]:
    """Yields a line for each format: the number of stored tensors, their mean and largest
    change, the tensor with the largest, and the number of elements that the format cannot
    have, which the mean leaves out."""
    for name, these in grouped(rows, attrgetter("format")).items():
        sized = [row for row in these if row.max_abs is not None]
        worst = max(sized, key=lambda row: row.max_abs or 0.0, default=None)
        count = sum(row.elements - row.nonfinite for row in sized)
        total = sum(
            (row.mean_abs or 0.0) * (row.elements - row.nonfinite) for row in sized
        )
        sizes = (
            si(total / count if count else None),
            si(worst.max_abs if worst else None),
        )
        lost = sum(row.nonfinite for row in these)
        yield name, str(len(these)), *sizes, worst.tensor if worst else NONE, str(lost)
