"""A bounds report, shown: ratios before curves merge, after, and the null's; the curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from numdev.report import document as doc
from numdev.report.document import PAGE, TERMINAL, Column
from numdev.report.numbers import NONE, times
from numdev.training.bounds.report import BoundsReport, Comparison, Window, said

WINDOWS: Mapping[Window, str] = {
    **{"first": "step", "early": "early, step", "saturated": "merged, step", "start": "gradient"}
}
STANDINGS: Mapping[str, doc.Style] = {"Within": "good", "Beyond": "warn"}
LEGEND = (
    "×: a ratio of two distances, by the geometric mean over steps and seeds [95 % interval over "
    "seeds, from three on]. A distance is the mean |difference| of all weights from those of the "
    "golden run: plain attention, the same seed, the same step.",
    "early: {early}.",
    "merged: {merged}; distances then say how chaotic training is, not how large flash's was.",
    "gradient: the same of the first step's gradients, before any update.",
    "Repeat: the golden run repeated gives {bits}.",
    "Proxies: distances between weights say how far runs part, as in the first paper (Golden et "
    "al. 2024), and not whether either trains well.",
)


def styles(report: BoundsReport) -> tuple[doc.Style, ...]:
    """Of each sentence of the answer; what voids the rest stands before it."""
    told = said(report.comparisons)
    voids: list[doc.Style] = ["bad"] * (len(report.summary.answer) - len(told)) if told else []
    return (*voids, *(STANDINGS.get(c.standing, "") for c in told))


def blocks(report: BoundsReport) -> Iterator[doc.Node]:
    yield _table([c for c in report.comparisons if c.metric == "mean_abs" and c.ratio is not None])
    yield doc.Bullets(tuple(doc.headed(line.format_map(_marks(report))) for line in LEGEND))
    if axis := report.summary.axis:
        yield doc.Figures(report.figures, axis, "golden", PAGE)
        means = tuple(figure for figure in report.figures if figure.metric == "mean_abs")
        yield doc.Figures(means, axis, "golden", TERMINAL)


def _marks(report: BoundsReport) -> Mapping[str, str]:
    """Which steps are early and merged, and what a repeat gave."""
    mark = report.saturation
    begins = {mark.chance: "chance begins to decide", mark.bends: "curves begin to merge"}
    ends = min((step for step in begins if step is not None), default=None)
    early = "all steps, with no sign that curves merge"
    if ends is not None:
        early = f"before step {ends}, where {begins[ends]}"
    if mark.reason is not None:
        early = f"the first step, since where curves merge is not known: {mark.reason}"
    merged = "at no step" if mark.saturated is None else f"from step {mark.saturated} on"
    bits = {None: "nothing (not run)", True: "the same bits", False: "other bits"}
    return {"early": early, "merged": merged, "bits": bits[report.summary.deterministic]}


def _table(known: list[Comparison]) -> doc.Table:
    """Every ratio with its interval, a window beside the other; flash's in full ink."""
    cells = {(c.variant, c.against, c.window): c for c in known}
    spans = {c.window: c.steps for c in known}
    if spans.get("first") == spans.get("early"):
        spans.pop("first", None)
    windows = [window for window in WINDOWS if window in spans]
    columns: list[str | Column] = ["distance of", Column("over that of", align="left")]
    for window in windows:
        steps = () if window == "start" else spans[window]
        ends = "–".join(str(step) for step in dict.fromkeys((*steps[:1], *steps[-1:])))
        columns.append(f"{WINDOWS[window]} {ends}".strip() + ", ×")
    pairs = list(dict.fromkeys((c.variant, c.against) for c in known))
    rows = ((*pair, *(_ratio(cells.get((*pair, window))) for window in windows)) for pair in pairs)
    flash = {c.variant for c in known if c.role in ("flash", None)}
    title = "How many times as far one run ends from the golden run as another"
    return doc.table(columns, rows, [a not in flash for a, _ in pairs], title=title)


def _ratio(c: Comparison | None) -> str:
    """A ratio and its interval, where it has one."""
    if c is None:
        return NONE
    return times(c.ratio) + ("" if c.low is None else f" [{times(c.low)}, {times(c.high)}]")
