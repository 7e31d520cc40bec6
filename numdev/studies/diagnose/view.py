"""Shows a diagnosis: the heads ranked, the map of what every head's error does, cures and
real kernels on the head that the answer is about, and the curves over training. Null is a
dash."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from numdev.report import document as doc
from numdev.report.number_text import NONE, percent, shade, si
from numdev.studies.diagnose.head_ranking import (
    CONDITIONS,
    MOVED,
    WRONG,
    T,
    does_harm,
    is_at_fault,
    is_faultless,
    is_judged,
    leading_head,
)
from numdev.studies.diagnose.report import (
    CureRow,
    DiagnoseReport,
    HeadPlace,
    KernelRow,
    Ranked,
)

SHOWN = 10  # heads in the ranked table; heads.csv has all
ABOUT = (
    "A head is at fault where its rounding errors have one sign: they add up in dW_Q, "
    "the gradient of its query weights, instead of cancelling, and can spoil training "
    "(arXiv 2510.04212)."
)
SHADES = (MOVED / 4, MOVED, 4 * MOVED, 16 * MOVED)  # from where on a score is darker
LEGEND = (
    "layer's dW_Q off: |error of the head's dW_Q| over |dW_Q| of its layer, the "
    "largest first; coloured where the head is at fault or it is half or more, darker "
    f"from {', '.join(f'{100 * limit:.2g}' for limit in SHADES)} %.",
    "tied rows: share of query rows whose largest score several keys have.",
    (
        "O bias: mean error of the output along its sign, + is away from zero; 1 ulp is "
        "its last bit."
    ),
    "δ error: mean error of δ = rowsum(dO∘O), over the rms of what it is summed from. "
    f"Its t: that mean over its standard error; |t| of {T:g} is hardly chance.",
    "dW_Q by δ: how far δ alone moves the head's own dW_Q, by not fitting its dP and P.",
    (
        f"conditions: how many of the chain it meets ({', '.join(CONDITIONS)}), of "
        "those judged."
    ),
)


def styles(report: DiagnoseReport) -> tuple[doc.Style]:
    """Returns the style of the first sentence: `bad` where a head is at fault; `good`
    where every head was judged, none is at fault, and rounding changes half of no layer's
    dW_Q; else `warn`."""
    if any(map(is_at_fault, report.summary.ranking)):
        return ("bad",)
    return ("good" if is_faultless(report.summary.ranking) else "warn",)


def blocks(report: DiagnoseReport) -> Iterator[doc.Node]:
    """Yields what is shown below the answer: the ranked heads with a legend, the heat
    map, tables of cures and kernels, and, where the summary has an axis, figures; then
    what was emulated and the notes. Where every head was judged and none does harm, the
    tables are folded on a page, and left out of a terminal."""
    ranking = report.summary.ranking
    yield doc.Paragraph(ABOUT)
    if ranking:
        first = leading_head(ranking)
        tables = (
            _ranking_table(report),
            doc.Bullets(tuple(map(doc.item_with_lead, LEGEND))),
            _heat_map(report),
            _cure_table(report, first),
            _kernel_table(report, first),
        )
        if _is_clean(ranking):
            yield doc.Details(f"All {len(ranking)} heads in numbers", tables, doc.TEXT)
        else:
            yield from tables
        if report.summary.axis:
            yield doc.Heading("Over training")
            yield doc.Figures(report.figures, report.summary.axis, "")
    series = len(report.checkpoints)
    of_series = f" of the last of {series} checkpoints" if series > 1 else ""
    what = f"{len(ranking)} heads{of_series}"
    options = ", ".join(f"{name} {value}" for name, value in report.attention.items())
    emulated = (
        f"Emulated: attention with {options} in "
        f"{report.request.get('format')}, against fp64"
    )
    yield doc.Paragraph(f"{emulated}: {what}.", "soft")
    yield from doc.notes(report.summary.notes)


def _is_clean(ranking: Sequence[Ranked]) -> bool:
    """Whether every head was judged, and none does harm; True without a head."""
    return all(map(is_judged, ranking)) and not any(map(does_harm, ranking))


def _cure_table(report: DiagnoseReport, head: Ranked) -> doc.Table:
    """Returns the table of what each cure does for the head `head`; the row of the
    attention as it is is shown softly."""
    rows = [row for row in report.cures if row.key == head.key]
    remark = doc.Column("where it fails, or what it takes", align="left", width=200)

    def cells(row: CureRow) -> Iterator[str | doc.Cell]:
        """Yields the cells of a row, one for each column."""
        yield doc.Cell(row.cure, after="not with this" if row.reason else "")
        yield from _number_cells(row, CURE)
        yield row.reason or report.costs.get(row.cure, "")

    return doc.table(
        ("cure", *_column_titles(CURE), remark),
        map(cells, rows),
        [row.cure == "none" for row in rows],
        title=f"{head.brief}: the same inputs with one thing changed",
    )


def _kernel_table(report: DiagnoseReport, head: Ranked) -> doc.Table:
    """Returns the table of each real kernel on the inputs of the head `head`, in the
    report's order, also of one that refused or failed; without rows where no kernel has a
    row on them."""

    def cells(row: KernelRow) -> Iterator[str | doc.Cell]:
        """Yields the cells of a row, one for each column."""
        yield doc.Cell(
            row.kernel, style="strong", title=row.ran or "", after=row.reason or ""
        )
        yield from _number_cells(row, SEEN)

    return doc.table(
        ("kernel", *_column_titles(SEEN)),
        map(cells, (row for row in report.kernels if row.key == head.key)),
        title=f"{head.brief}: real kernels on the same inputs",
    )


def _score_name(report: DiagnoseReport) -> str:
    """Returns the name of the number that heads are ordered by: `error in the layer's
    dW_Q`, or `|mean error of delta|` where that of no head is known."""
    if any(is_judged(ranked, WRONG) for ranked in report.summary.ranking):
        return "error in the layer's dW_Q"
    return "|mean error of delta|"


def _score_cell(head: Ranked) -> doc.Cell:
    """Returns a head's score in per cent, coloured only where the head does harm: a
    colour would accuse it."""
    shown = shade(head.score, SHADES) if does_harm(head) else None
    return doc.Cell(percent(head.score).removesuffix(" %"), shown)


def _ranking_table(report: DiagnoseReport) -> doc.Table:
    """Returns the table of the first SHOWN heads, each with its score, its numbers and
    how many of the chain's conditions it meets."""
    rows = {head.key: head for head in report.heads}

    def cells(ranked: Ranked) -> Iterator[str | doc.Cell]:
        """Yields the cells of a head, one for each column."""
        yield doc.Cell(ranked.brief, style="strong")
        yield _score_cell(ranked)
        yield from _number_cells(rows[ranked.key], HEAD)
        verdicts = dict.fromkeys(CONDITIONS, "unknown") | dict.fromkeys(
            ranked.conditions, "met"
        )
        verdicts |= dict.fromkeys(ranked.missing, "missing")
        judged_count = len(ranked.conditions) + len(ranked.missing)
        states = "; ".join(f"{name}: {state}" for name, state in verdicts.items())
        yield doc.Cell(f"{len(ranked.conditions)} of {judged_count}", title=states)

    columns = ("head", "layer's dW_Q off, %", *_column_titles(HEAD), "conditions")
    first, count = report.summary.ranking[:SHOWN], len(report.summary.ranking)
    title = f"Heads by {_score_name(report)}, the first {len(first)} of {count}"
    return doc.table(columns, map(cells, first), title=title)


def _heat_map(report: DiagnoseReport) -> doc.Table:
    """Returns the heat map of what each head scores, calls by heads, ordered by layer. A
    row is named by its layer, or by its case where a layer makes several calls or is
    unknown. A dash stands for a head that a call lacks, and for one whose W_Q is unknown
    where that of another is known."""
    ranking = sorted(
        report.summary.ranking, key=lambda r: -1 if r.layer is None else r.layer
    )
    of_weights = any(is_judged(r, WRONG) for r in ranking)
    calls = {r.case: r.layer for r in ranking}
    alone = None not in calls.values() and len(set(calls.values())) == len(calls)
    heads = sorted({r.head for r in ranking})
    cells: dict[str, list[doc.Cell]] = {}
    for r in ranking:
        name = str(r.layer) if alone else r.case
        of_call = cells.setdefault(name, [doc.Cell(NONE)] * len(heads))
        if is_judged(r, WRONG) or not of_weights:
            of_call[heads.index(r.head)] = _score_cell(r)
    title = f"Layer by head, in %: {_score_name(report)}"
    return doc.heat_map(title, heads, cells, only=("terminal", "html"))


# By the field of a row, what its column is called and how its numbers are written.
NUMBERS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "tied": ("tied rows, %", percent),
    "out_bias": ("O bias, ulp", "{:+.3f}".format),
    "delta_mean": ("δ error, %", partial(percent, sign=True)),
    "delta_t": ("its t", si),
    "moved": ("dW_Q by δ, %", percent),
    "dw_q_error": ("dW_Q error, %", percent),
    "dq_rel": ("dQ error, %", percent),
    "nonfinite": ("NaN/inf", lambda count: str(count or NONE)),
}
HEAD = ("tied", "out_bias", "delta_mean", "delta_t", "moved")
SEEN = ("delta_mean", "delta_t", "dw_q_error", "dq_rel", "out_bias")
CURE = (*SEEN, "nonfinite")


def _column_titles(fields: Sequence[str]) -> list[str]:
    """Returns the titles of the columns of these fields."""
    return [NUMBERS[name][0] for name in fields]


def _number_cells(row: HeadPlace, fields: Sequence[str]) -> list[str]:
    """Returns the numbers of these fields of a row, as written, per cent without its
    sign; a dash for None. `fields`: keys of NUMBERS."""
    values = ((NUMBERS[name][1], getattr(row, name)) for name in fields)
    return [NONE if x is None else write(x).removesuffix(" %") for write, x in values]
