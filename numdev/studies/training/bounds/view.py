"""Shows a bounds report: all three metrics, ratios by window, doses, the ladder and the
curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from numdev.report import document as doc
from numdev.report.document import PAGE, TERMINAL, Cell, Column
from numdev.report.number_text import NONE, percent, ratio
from numdev.studies.training.bounds.answer_sentences import (
    chance_comparisons,
    dose_in_words,
    ratio_in_words,
)
from numdev.studies.training.bounds.report import (
    FAR_BELOW,
    FEWEST_SEEDS,
    MERGED,
    PAIR,
    PAIRED,
    PAPER,
    WITHIN,
    AtOutput,
    BoundsReport,
    Comparison,
    DoseReading,
    Rung,
    Window,
)
from numdev.studies.training.bounds.rounding_doses import FLAT, WIDEST, strength_in_words

WINDOWS: Mapping[Window, str] = {
    "first": "step",
    "early": "early, step",
    "saturated": "merged, step",
    "start": "gradient",
}
SHORT = {PAIRED: "mean", "w1": "pooled W1", "max_abs": "largest"}
STYLES: dict[str, doc.Style] = {
    "NOT": "bad", "Reproduced": "good", "Not reproduced": "warn", "Within": "good",
    "Far less": "good", "More": "warn",
}  # fmt: skip
LEGEND = (
    "×: a ratio of two distances, the geometric mean over steps and seeds [95 % "
    "interval, with three or more seeds]. A distance is of all weights from those of the "
    "golden run: plain attention, the same seed, the same step. mean and largest: of "
    "|difference|; W1: of all weights pooled, blind to which stands where.",
    "The paper: reproduced, where the interval in pooled W1, early, lies within "
    f"{PAPER[0]:g} to {PAPER[1]:g}; not reproduced, where it lies outside; else, and "
    f"with fewer than {FEWEST_SEEDS} seeds, undecided. Controls: what an ulp on every "
    "weight and attention alone in that format make of the same distance; where they are "
    "as far as flash, the ratio says nothing of flash.",
    "Dose: how many floors of random re-rounding of attention's output move the weights "
    "as far, in the same seed at the same step, [95 % interval over seeds]. A floor is "
    "the rms error of rounding the output once. Distances do not keep the proportion of "
    "their causes: a dose does. Undecided, in brackets (): a ladder whose highest rung "
    f"moves weights at most {FLAT:g} times as far as its lowest, an interval above a "
    f"factor of {WIDEST:g}, or fewer than {FEWEST_SEEDS} seeds. At output: what the same "
    "kernel does to the golden run's first attention calls, rms, in floors.",
    "Verdicts: within twice, of chance, which varies by itself, where the interval ends "
    f"at {WITHIN:g} or below; far less than, where it ends below {FAR_BELOW:g}; more "
    "than, where it starts above 1; else undecided: more seeds would tell. How much "
    "more, the dose says.",
    "step: the first recorded step.",
    "early: {early}.",
    (
        "merged: {merged}; distances then say how chaotic training is, not how large "
        "flash's was."
    ),
    "gradient: the same of the first step's gradients, before any update.",
    "Without a ratio: {others}, in the curves only.",
    "Repeat: the golden run, repeated, gives {bits}.",
    "Proxies: distances between weights say how far runs part, as in the first paper "
    "(Golden et al. 2024), and not whether either trains well.",
)


def styles(report: BoundsReport) -> tuple[doc.Style, ...]:
    """Returns the style of each sentence of the answer; empty where no question is
    answered."""
    is_answered = bool(chance_comparisons(report.comparisons) or report.answers)
    return tuple(map(_sentence_style, report.summary.answer)) if is_answered else ()


def _sentence_style(sentence: str) -> doc.Style:
    """Returns the style of a sentence by its first words (STYLES); the empty style for
    any other."""
    fitting = (style for words, style in STYLES.items() if sentence.startswith(words))
    return next(fitting, "")


def blocks(report: BoundsReport) -> Iterator[doc.Node]:
    """Yields what is shown below the answer: tables of early ratios, of ratios by window,
    of doses and of the ladder; then a legend. Where the summary has an axis figures
    follow: on a page all, in a terminal those of the mean alone."""
    measured = [
        c for c in report.comparisons if c.metric == PAIRED and c.ratio is not None
    ]
    windows, marks = _window_titles(measured), _legend_clauses(report, measured)
    early = [c for c in report.comparisons if c.window == "early" and c.ratio is not None]
    yield _early_ratios_table(early, windows)
    yield _window_ratios_table(measured, windows)
    yield _dose_table(report, windows)
    yield _ladder_table(report.ladder, windows)
    absent = {words.partition(",")[0] for w, words in WINDOWS.items() if w not in windows}
    absent |= set() if marks["others"] else {"Without a ratio"}
    absent |= set() if report.answers else {"The paper"}
    absent |= set() if report.ladder else {"Dose"}
    lines = (
        line.format_map(marks) for line in LEGEND if line.partition(":")[0] not in absent
    )
    yield doc.Bullets(tuple(map(doc.item_with_lead, lines)))
    if axis := report.summary.axis:
        yield doc.Figures(report.figures, axis, "golden", PAGE)
        means = tuple(figure for figure in report.figures if figure.metric == PAIRED)
        yield doc.Figures(means, axis, "golden", TERMINAL)


def _legend_clauses(
    report: BoundsReport, measured: list[Comparison]
) -> Mapping[str, str]:
    """Returns the words for the places in braces of LEGEND, by name: which steps are
    `early` and `merged`, which curves are in no ratio (`others`), and what a repeat gave
    (`bits`). `measured`: the comparisons that have a ratio."""
    mark = report.saturation
    begins = {
        mark.chance: "chance begins to decide",
        mark.bends: "doses lose their proportion",
    }
    ends = min((step for step in begins if step is not None), default=None)
    early = "all steps, with no sign that curves merge"
    if ends is not None:
        early = f"the recorded steps before step {ends}, where {begins[ends]}"
    if mark.reason is not None:
        early = f"the first step, since where curves merge is not known: {mark.reason}"
    low, high = PAIR
    merged = "at no step" if mark.saturated is None else f"from step {mark.saturated} on"
    merged += (
        f", where {high:g} floors move weights at most {MERGED:g} times as far as {low:g}"
    )
    bits = {None: "nothing (not run)", True: "the same bits", False: "other bits"}
    of_distances = [figure for figure in report.figures if not figure.relative]
    drawn = dict.fromkeys(c.label for figure in of_distances for c in figure.curves)
    beside = {label for c in measured for label in (c.variant, c.against)}
    rungs = {label for label in drawn if label.startswith("null: re-rounded at ")}
    others = ", ".join(label for label in drawn if label not in beside | rungs)
    same = bits[report.summary.deterministic]
    return {"early": early, "merged": merged, "others": others, "bits": same}


def _window_titles(measured: list[Comparison]) -> Mapping[Window, str]:
    """Returns the titles of the columns of ratios by window, each with its first and last
    step: `early, step 1–18`. A window without a ratio is left out, and so is `first`
    where `early` has the same steps."""
    spans = {c.window: () if c.window == "start" else c.steps for c in measured}
    if spans.get("first") == spans.get("early"):
        spans.pop("first", None)
    ends = {w: dict.fromkeys((*steps[:1], *steps[-1:])) for w, steps in spans.items()}
    return {
        w: f"{WINDOWS[w]} {'–'.join(map(str, ends[w]))}".strip()
        for w in WINDOWS
        if w in ends
    }


def _pair_columns(first: str, second: str) -> list[str | Column]:
    """Returns two columns of these titles, which a table that begins with them aligns as
    text."""
    return [first, Column(second, align="left")]


def _early_ratios_table(
    early: Sequence[Comparison], windows: Mapping[Window, str]
) -> doc.Table:
    """Returns the table of early ratios: for each pair of runs, how many times as far as
    the second the first moves the weights, by mean difference, W1 and largest difference.
    Pairs whose first run has a known role other than flash are shown softly."""
    cells = {(c.variant, c.against, c.metric): ratio_in_words(c) for c in early}
    pairs = list(dict.fromkeys((c.variant, c.against) for c in early))
    flash = {c.variant for c in early if c.role in ("flash", None)}
    columns = [
        *_pair_columns("distance of", "over that of"),
        *(f"{s}, ×" for s in SHORT.values()),
    ]
    rows = (
        (*pair, *(cells.get((*pair, metric), NONE) for metric in SHORT)) for pair in pairs
    )
    early_steps = windows.get("early", "early").capitalize()
    title = f"{early_steps}: mean, Wasserstein distance and largest"
    return doc.table(columns, rows, [a not in flash for a, _ in pairs], title=title)


def _window_ratios_table(
    measured: list[Comparison], windows: Mapping[Window, str]
) -> doc.Table:
    """Returns the table of the ratios of mean distances with their intervals, a row for
    each pair of runs, a column for each window. Pairs whose first run has a known role
    other than flash are shown softly."""
    cells = {(c.variant, c.against, c.window): c for c in measured}
    columns = [
        *_pair_columns("distance of", "over that of"),
        *(f"{x}, ×" for x in windows.values()),
    ]
    pairs = list(dict.fromkeys((c.variant, c.against) for c in measured))
    rows = (
        (*pair, *(_ratio_cell(cells.get((*pair, window))) for window in windows))
        for pair in pairs
    )
    flash = {c.variant for c in measured if c.role in ("flash", None)}
    title = "Mean |difference| from the golden run: the first run's over the second's"
    return doc.table(columns, rows, [a not in flash for a, _ in pairs], title=title)


def _ratio_cell(c: Comparison | None) -> str:
    """Returns a ratio with its interval; a dash for None."""
    return NONE if c is None else ratio_in_words(c)


def _dose_table(report: BoundsReport, windows: Mapping[Window, str]) -> doc.Table:
    """Returns the table of each run's dose, with a column for each window in which any
    run has one, and of the errors of its attention's output. Runs other than flash are
    shown softly."""
    cells = {(d.variant, d.window): d for d in report.doses}
    outputs = {output.variant: output for output in report.outputs}
    read_in = {d.window for d in report.doses if d.dose is not None}
    used = [w for w in windows if w in read_in]
    at_output = ("at output: apart", "error", "bias, ulp", "slope")
    columns = ["dose of", *(windows[w] for w in used), *at_output]
    rows = []
    variants = list(dict.fromkeys(d.variant for d in report.doses))
    for variant in variants:
        doses = (_dose_cell(cells.get((variant, window))) for window in used)
        rows.append((variant, *doses, *_output_cells(outputs.get(variant))))
    flash = {d.variant for d in report.doses if d.role == "flash"}
    title = "As far as re-rounding attention's output at how many floors"
    return doc.table(columns, rows, [v not in flash for v in variants], title=title)


def _output_cells(output: AtOutput | None) -> tuple[str, str, str, str]:
    """Returns the cells of the errors of an attention's output: its distance from the
    golden run's, its error, bias and slope; dashes for None."""
    if output is None:
        return (NONE, NONE, NONE, NONE)
    return (
        ratio(output.from_golden),
        ratio(output.floors),
        _signed_cell(output.bias),
        percent(output.slope),
    )


def _dose_cell(dose: DoseReading | None) -> str:
    """Returns a dose in words, in brackets if it is undecided; a dash for None."""
    if dose is None:
        return NONE
    return dose_in_words(dose) if dose.why is None else f"({dose_in_words(dose)})"


def _signed_cell(value: float | None) -> str:
    """Returns a number with its sign and two decimals, `+0.12`; a dash for None."""
    return NONE if value is None else f"{value:+.2f}"


def _ladder_table(rungs: Sequence[Rung], windows: Mapping[Window, str]) -> doc.Table:
    """Returns the table of how far every strength moves the weights, over one floor;
    without rows for fewer than two strengths."""
    cells = {(r.times, r.window): r for r in rungs}
    strengths = sorted({r.times for r in rungs})
    shown = strengths if len(strengths) > 1 else []

    def cell(rung: Rung | None) -> Cell:
        """Returns a ratio with its interval, if it has one; a dash for None and for a
        rung without a ratio."""
        if rung is None or rung.ratio is None:
            return Cell(NONE)
        ends = "" if rung.low is None else f" [{ratio(rung.low)}, {ratio(rung.high)}]"
        return Cell(ratio(rung.ratio) + ends)

    rows = (
        (Cell(strength_in_words(x)), *(cell(cells.get((x, w))) for w in windows))
        for x in shown
    )
    columns = ["floors", *(f"{title}, ×" for title in windows.values())]
    return doc.table(columns, rows, title="The ladder: distance over that of one floor")
