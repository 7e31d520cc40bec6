"""A diagnosis, shown: the heads ranked, the map of what every head's error does, cures and real
kernels on the head that the answer is about, and the curves over training. Null is a dash."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from numdev.diagnose.heads import CONDITIONS, MOVED, WRONG, judged, leading, percent
from numdev.diagnose.report import CureRow, DiagnoseReport, Place, Ranked
from numdev.report import document as doc
from numdev.report.numbers import NONE, ratio, si

SHOWN = 10  # heads in the ranked table; all are behind a fold of the page
SHADES = (MOVED / 4, MOVED, 4 * MOVED, 16 * MOVED)  # from where on a score is darker


def title(report: DiagnoseReport) -> str:
    return f"Diagnosis: {report.request.get('target')}"


def line(report: DiagnoseReport) -> str:
    count = len(report.summary.ranking)
    return f"{_attention(report)}: {count} heads, {len(report.checkpoints)} checkpoints, the last."


def blocks(report: DiagnoseReport) -> Iterator[doc.Node]:
    ranking = report.summary.ranking
    if ranking:
        first, count = leading(ranking), len(ranking)
        some = f"Heads by {_score(report)}, the first {min(count, SHOWN)} of {count}"
        yield _ranked(report, SHOWN, some, ("terminal", "html"))
        yield _ranked(report, count, f"Heads by {_score(report)}", ("markdown",))
        yield from doc.notes((f"The chain: {', '.join(CONDITIONS)}.",), doc.PAGE)
        yield _map(report)
        limits = ", ".join(f"{100 * limit:.2g} %" for limit in SHADES)
        yield from doc.notes((f"Darker from {limits} on.",), doc.PAGE)
        yield _cures([row for row in report.cures if row.is_of(first)], report, first.brief)
        rows: Iterator[tuple[str | doc.Cell, ...]] = (
            (doc.Cell(row.kernel, style="strong", title=row.ran or "", after=row.reason or ""),
             *(number.cell(row) for number in KERNEL))
            for row in report.kernels if row.is_of(first)
        )  # fmt: skip
        name = f"{first.brief}: real kernels on the same inputs"
        yield doc.table(_columns("kernel", KERNEL), rows, title=name)
        if report.summary.axis:
            yield doc.Heading("Over training")
            yield doc.Figures(report.figures, report.summary.axis, "")
        if count > SHOWN:
            yield doc.Fold(f"All {count} heads", (_ranked(report, count, "", doc.PAGE),))
    yield from doc.notes((f"{_attention(report)}, on the same inputs.",), doc.TERMINAL)
    if report.summary.notes:
        yield doc.Heading("Notes", doc.TEXT)
        yield doc.bullets(report.summary.notes)


def _attention(report: DiagnoseReport) -> str:
    """What was diagnosed: `preset fa2, pv bfloat16 in bfloat16`."""
    options = ", ".join(f"{name} {value}" for name, value in report.attention.items())
    return f"Emulated: attention with {options} in {report.request['format']}, against fp64"


def _score(report: DiagnoseReport) -> str:
    """What heads are ordered by."""
    if any(judged(ranked, WRONG) for ranked in report.summary.ranking):
        return "dW_Q of the layer moved by each head"
    return "|mean error of delta|"


def _ranked(
    report: DiagnoseReport, count: int, title: str, only: tuple[doc.Medium, ...]
) -> doc.Table:
    """The first heads, each with its numbers and how much of the chain it meets."""

    def cells(ranked: Ranked) -> Iterator[str | doc.Cell]:
        row = next(head for head in report.heads if head.is_of(ranked))
        yield doc.Cell(ranked.brief, style="strong")
        yield doc.Cell(SCORE.cell(ranked), shade=shade(ranked.score))
        yield from (number.cell(row) for number in HEAD)
        verdicts = dict.fromkeys(CONDITIONS, "unknown") | dict.fromkeys(ranked.conditions, "met")
        verdicts |= dict.fromkeys(ranked.missing, "missing")
        known = len(ranked.conditions) + len(ranked.missing)
        states = "; ".join(f"{name}: {state}" for name, state in verdicts.items())
        yield doc.Cell(f"{len(ranked.conditions)} of {known}", title=states)

    meets = doc.Column("meets", says="how many of the chain, of those that could be judged")
    columns = (*_columns("head", (SCORE, *HEAD)), meets)
    rows = map(cells, report.summary.ranking[:count])
    return doc.table(columns, rows, title=title, dense=True, only=only)


def _cures(rows: Sequence[CureRow], report: DiagnoseReport, head: str) -> doc.Table:
    """What each cure changes on one head; where it fails, or what it takes."""
    cells: Iterator[tuple[str | doc.Cell, ...]] = (
        (doc.Cell(row.cure, after="not with this" if row.reason else ""),
         *(number.cell(row) for number in CURE), row.reason or report.costs.get(row.cure, ""))
        for row in rows
    )  # fmt: skip
    last = doc.Column("where it fails, or what it takes", align="left", width=200)
    standard = [row.cure == "none" for row in rows]
    name = f"{head}: the same inputs with one thing changed"
    return doc.table((*_columns("cure", CURE), last), cells, standard, title=name)


def _map(report: DiagnoseReport) -> doc.Table:
    """What each head scores, by call; a dash for a head whose W_Q is not known where another's is.
    A call goes by its layer, or by its name where layers make several."""
    ranking = sorted(report.summary.ranking, key=lambda r: -1 if r.layer is None else r.layer)
    of_weights = any(judged(r, WRONG) for r in ranking)
    calls = {r.case: r.layer for r in ranking}
    alone = None not in calls.values() and len(set(calls.values())) == len(calls)
    heads = sorted({r.head for r in ranking})
    scores: dict[str, list[float | None]] = {}
    for r in ranking:
        of_call = scores.setdefault(str(r.layer) if alone else r.case, [None] * len(heads))
        of_call[heads.index(r.head)] = r.score if judged(r, WRONG) or not of_weights else None
    cell = lambda score: doc.Cell(percent(score).removesuffix(" %"), shade(score))  # noqa: E731
    title = f"Layer by head, in %: {_score(report)}"
    return doc.heat_map(title, heads, scores, cell, only=("terminal", "html"))


def shade(score: float | None) -> int | None:
    """0 to 4: how dark a score is shown."""
    return None if score is None else sum(score >= limit for limit in SHADES)


# --- numbers -------------------------------------------------------------------------------------


class Number(NamedTuple):
    """One number of a row: its column, how it is written, where it is, the columns a terminal needs
    for it, and what it is where the title does not say it."""

    title: str
    write: Callable[[Any], str]
    path: str
    width: int = 0
    says: str = ""

    def cell(self, row: Place) -> str:
        value = row.at(self.path)
        return NONE if value is None else self.write(value)


def _columns(name: str, numbers: Sequence[Number]) -> tuple[doc.Column, ...]:
    columns = (doc.Column(n.title, width=n.width, says=n.says) for n in numbers)
    return (doc.Column(name, align="left"), *columns)


def _signed(share: float) -> str:
    return percent(share, sign=True)


def _ulps(outward: float) -> str:
    """Along the exact value's sign: + is away from zero."""
    return f"{outward:+.3f}".replace("-", "−")


# Of a `Ranked`: the number that heads are ordered by.
SCORE = Number(
    "of layer", percent, "score", 0, "|error of the head's dW_Q| over |dW_Q| of its layer"
)
HEAD = (
    Number("dW_Q by δ", percent, "moved", 0,
           "what delta makes of its dW_Q by not fitting the dP and P it is subtracted from"),
    Number("dW_Q, all", percent, "dw_q_error", 90, "its whole error, over that of the head"),
    Number("δ error", _signed, "delta.mean", 0,
           "its mean, over the rms of what delta is summed from"),
    Number("t", si, "delta.t", 0, "of that mean"),
    Number("run", ratio, "delta.run", 0,
           "the largest running sum over rms √rows, near 1 where signs are random"),
    Number("tied rows", percent, "tied"),
    Number("P̄ = 1", percent, "ones", 120),
    Number("P at 2ⁿ", percent, "powers", 130),
    Number("V one sign", percent, "one_signed", 90),
    Number("O bias, ulp", _ulps, "out.outward", 0, "along the sign of O, + is away from zero"),
    Number("t ", si, "out.t", 110),
    Number("rows of dS", percent, "ds_row_sum", 150),
    Number("alike", percent, "similarity", 115, "the share of dW_Q's terms in one direction"),
    Number("‖W_Q‖₂", ratio, "spectral_norm", 140),
    Number("× layer", ratio, "spectral_ratio", 90, "spectral norm of W_Q over its layer's median"),
)  # fmt: skip
CURE = (
    Number("δ error", _signed, "delta_mean"),
    Number("t", si, "delta_t"),
    Number("δ rms", percent, "delta_rms"),
    Number("dW_Q", percent, "dw_q_error"),
    Number("dQ", percent, "dq_rel"),
    Number("dK", percent, "dk_rel", 120),
    Number("dV", percent, "dv_rel", 120),
    Number("rows of dS", percent, "ds_row_sum", 110),
    Number("P̄V bias", _ulps, "pv.outward", 120),
    Number("O bias, ulp", _ulps, "out.outward"),
    Number("NaN/inf", lambda count: str(count or NONE), "nonfinite"),
)
KERNEL = (
    Number("δ error", _signed, "delta.mean"),
    Number("t", si, "delta.t"),
    Number("run", ratio, "delta.run"),
    Number("dW_Q", percent, "dw_q_error"),
    Number("dQ", percent, "dq_rel"),
    Number("O bias, ulp", _ulps, "out.outward"),
    Number("t ", si, "out.t"),
)
