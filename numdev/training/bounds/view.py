"""A bounds report, shown: ratios before curves merge, after, and the null's; the curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from numdev.report import document as doc
from numdev.report.document import PAGE, TERMINAL, Column
from numdev.report.numbers import NONE, times
from numdev.training.bounds.report import FAR_BELOW, MERGED, BoundsReport, Comparison, Window, said

WINDOWS: Mapping[Window, str] = {
    **{"first": "step", "early": "early, step", "saturated": "merged, step", "start": "gradient"}
}
STYLES: dict[str, doc.Style] = {
    "NOT": "bad", "No more": "good", "Within": "good", "Far less": "good", "More": "warn",
}  # fmt: skip
LEGEND = (
    "×: a ratio of two distances, the geometric mean over steps and seeds [95 % interval, with "
    "three or more seeds]. A distance is the mean |difference| of all weights from those of the "
    "golden run: plain attention, the same seed, the same step.",
    "Verdicts: no more than, where the interval ends at 1 or below; within twice, of chance, which "
    f"varies by itself, where it ends at {MERGED:g} or below; far less than, where it ends below "
    f"{FAR_BELOW:g}; more than, where it starts above 1: a real difference, and the ratio says how "
    "large; else undecided: more seeds would tell.",
    "step: the first recorded step.",
    "early: {early}.",
    "merged: {merged}; distances then say how chaotic training is, not how large flash's was.",
    "gradient: the same of the first step's gradients, before any update.",
    "Without a ratio: {others}, in the curves only.",
    "Repeat: the golden run, repeated, gives {bits}.",
    "Proxies: distances between weights say how far runs part, as in the first paper (Golden et "
    "al. 2024), and not whether either trains well.",
)


def styles(report: BoundsReport) -> tuple[doc.Style, ...]:
    """Of each sentence of the answer; what voids the rest stands before it."""
    lines = report.summary.answer if said(report.comparisons) else ()
    return tuple(next((s for w, s in STYLES.items() if a.startswith(w)), "") for a in lines)


def blocks(report: BoundsReport) -> Iterator[doc.Node]:
    known = [c for c in report.comparisons if c.metric == "mean_abs" and c.ratio is not None]
    windows, marks = _windows(known), _marks(report, known)
    yield _table(known, windows)
    absent = {words.partition(",")[0] for w, words in WINDOWS.items() if w not in windows}
    absent |= set() if marks["others"] else {"Without a ratio"}
    lines = (line.format_map(marks) for line in LEGEND if line.partition(":")[0] not in absent)
    yield doc.Bullets(tuple(map(doc.headed, lines)))
    if axis := report.summary.axis:
        yield doc.Figures(report.figures, axis, "golden", PAGE)
        means = tuple(figure for figure in report.figures if figure.metric == "mean_abs")
        yield doc.Figures(means, axis, "golden", TERMINAL)


def _marks(report: BoundsReport, known: list[Comparison]) -> Mapping[str, str]:
    """Which steps are early and merged, which curves are in no ratio, and what a repeat gave."""
    mark = report.saturation
    begins = {mark.chance: "chance begins to decide", mark.bends: "curves begin to merge"}
    ends = min((step for step in begins if step is not None), default=None)
    early = "all steps, with no sign that curves merge"
    if ends is not None:
        early = f"the recorded steps before step {ends}, where {begins[ends]}"
    if mark.reason is not None:
        early = f"the first step, since where curves merge is not known: {mark.reason}"
    merged = "at no step" if mark.saturated is None else f"from step {mark.saturated} on"
    bits = {None: "nothing (not run)", True: "the same bits", False: "other bits"}
    drawn = dict.fromkeys(c.label for f in report.figures if not f.relative for c in f.curves)
    others = ", ".join(drawn.keys() - {label for c in known for label in (c.variant, c.against)})
    same = bits[report.summary.deterministic]
    return {"early": early, "merged": merged, "others": others, "bits": same}


def _windows(known: list[Comparison]) -> Mapping[Window, str]:
    """The columns of ratios: what each is called, with its steps."""
    spans = {c.window: () if c.window == "start" else c.steps for c in known}
    if spans.get("first") == spans.get("early"):
        spans.pop("first", None)
    ends = {w: dict.fromkeys((*steps[:1], *steps[-1:])) for w, steps in spans.items()}
    return {w: f"{WINDOWS[w]} {'–'.join(map(str, ends[w]))}".strip() for w in WINDOWS if w in ends}


def _table(known: list[Comparison], windows: Mapping[Window, str]) -> doc.Table:
    """Every ratio with its interval, a window beside the other; flash's in full ink."""
    cells = {(c.variant, c.against, c.window): c for c in known}
    columns: list[str | Column] = ["distance of", Column("over that of", align="left")]
    columns += [f"{title}, ×" for title in windows.values()]
    pairs = list(dict.fromkeys((c.variant, c.against) for c in known))
    rows = ((*pair, *(_ratio(cells.get((*pair, window))) for window in windows)) for pair in pairs)
    flash = {c.variant for c in known if c.role in ("flash", None)}
    title = "Distance from the golden run: the first run's over the second's"
    return doc.table(columns, rows, [a not in flash for a, _ in pairs], title=title)


def _ratio(c: Comparison | None) -> str:
    if c is None:
        return NONE
    return times(c.ratio) + ("" if c.low is None else f" [{times(c.low)}, {times(c.high)}]")
