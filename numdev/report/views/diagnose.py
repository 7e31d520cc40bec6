"""A diagnosis, shown: the heads ranked, the running sums of delta's error, the map of what the
error does to every head, then cures and real kernels on the head that the answer is about, and the
curves over training. What is null is a dash."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from numdev.diagnose.heads import (
    CONDITIONS,
    MOVED,
    WRONG,
    judged,
    leading,
    moved,
    percent,
    t_in_words,
    used_delta,
)
from numdev.diagnose.report import CureRow, DiagnoseReport, Place, Ranked, RunningError
from numdev.report import Axis, Curve, Figure, Point, Tick
from numdev.report.document import (
    PAGE,
    TERMINAL,
    TEXT,
    Bullets,
    Cell,
    Chart,
    Column,
    Figures,
    Fold,
    Heading,
    Item,
    Medium,
    Node,
    Table,
    bullets,
    charts,
    heat_map,
    notes,
    table,
)
from numdev.report.numbers import NONE, power

SHOWN = 10  # heads in the ranked table; all are behind a fold of the page
BARS = " ▁▂▃▄▅▆▇█"
ROOM = 50  # bars of a running sum in the terminal
COLOURS = 6
SHADES = (MOVED / 4, MOVED, 4 * MOVED, 16 * MOVED)  # from where on a score is darker


class Number(NamedTuple):
    """One number of a row: its column, how it is written, the columns a terminal needs for it, and
    what it is where the title does not say it."""

    title: str
    cell: Callable[[Any], str]
    width: int = 0
    says: str = ""


def title(report: DiagnoseReport) -> str:
    return f"Diagnosis: {report.request.get('target')}"


def line(report: DiagnoseReport) -> str:
    count = len(report.checkpoints)
    last = f" of the last of {count} checkpoints" if count > 1 else ""
    return (
        f"{_attention(report)}: {len(report.summary.ranking)} heads{last}. What a head's errors "
        "may do to training is not among these numbers."
    )


def blocks(report: DiagnoseReport) -> Iterator[Node]:
    ranking = report.summary.ranking
    if ranking:
        first, of_weights = leading(ranking), weights_known(ranking)
        some = f", the first {SHOWN} of {len(ranking)}" if len(ranking) > SHOWN else ""
        by = (
            "how far they move their layer's dW_Q"
            if of_weights
            else "the mean error of their delta"
        )
        yield _ranked(report, SHOWN, f"Heads{some}, by {by}", ("terminal", "html"))
        yield _ranked(report, len(ranking), f"Heads, by {by}", ("markdown",))
        yield from notes((f"The chain: {', '.join(CONDITIONS)}.",), PAGE)
        yield from _sums(report)
        what = "|Mean error of delta|, % of what it is summed from"
        what = "dW_Q of the layer moved by each head, %" if of_weights else what
        heads, scores = score_map(report)
        yield heat_map(f"{what}: layer by head", heads, scores, compact, percent, shade,
                       only=("terminal", "html"))  # fmt: skip
        limits = ", ".join(f"{100 * limit:.2g} %" for limit in SHADES)
        rounding = "; rounding dW_Q itself to bfloat16 moves it by up to 0.39 %" * of_weights
        yield from notes((f"Darker from {limits} on{rounding}.",), PAGE)
        yield _cures([row for row in report.cures if row.is_of(first)], report, brief(first))
        yield table(
            _columns("kernel", KERNEL),
            (
                (Cell(row.kernel, style="strong", title=row.ran or "", after=row.reason or ""),
                 *(number.cell(row) for number in KERNEL))
                for row in report.kernels if row.is_of(first)
            ),
            title=f"{brief(first)}: real kernels on the same inputs",
        )  # fmt: skip
        if report.figures:
            yield Heading("Over training")
            yield Figures(charts(report.figures, report.summary.axis, "", seeds=""))
        if len(ranking) > SHOWN:
            every = _ranked(report, len(ranking), "", PAGE)
            yield Fold(f"All {len(ranking)} heads", (every,))
    yield from notes((f"{_attention(report)}, on the same inputs.",), TERMINAL)
    if report.summary.notes:
        yield Heading("Notes", TEXT)
        yield bullets(report.summary.notes)


def _attention(report: DiagnoseReport) -> str:
    """What was diagnosed: `preset fa2, pv bfloat16 in bfloat16`."""
    options = ", ".join(f"{name} {value}" for name, value in report.attention.items())
    return f"Emulated: attention with {options} in {report.request['format']}, against fp64"


def _columns(name: str, numbers: Iterable[Number]) -> tuple[Column, ...]:
    columns = (Column(n.title, width=n.width, says=n.says) for n in numbers)
    return (Column(name, align="left"), *columns)


def _ranked(report: DiagnoseReport, count: int, title: str, only: tuple[Medium, ...]) -> Table:
    """The first heads, each with its numbers and how much of the chain it meets."""

    def cells(ranked: Ranked) -> Iterator[str | Cell]:
        row = next(head for head in report.heads if head.is_of(ranked))
        yield Cell(brief(ranked), style="strong")
        yield Cell(SCORE.cell(ranked), shade=shade(ranked.score))
        yield from (number.cell(row) for number in HEAD)
        verdicts = dict.fromkeys(CONDITIONS, "unknown") | dict.fromkeys(ranked.conditions, "met")
        verdicts |= dict.fromkeys(ranked.missing, "missing")
        known = len(ranked.conditions) + len(ranked.missing)
        states = "; ".join(f"{name}: {state}" for name, state in verdicts.items())
        yield Cell(f"{len(ranked.conditions)} of {known}", title=states)

    meets = Column("meets", says="how many of the chain, of those that could be judged")
    columns = (*_columns("head", (SCORE, *HEAD)), meets)
    rows = map(cells, report.summary.ranking[:count])
    return table(columns, rows, title=title, dense=True, only=only)


def _cures(rows: Sequence[CureRow], report: DiagnoseReport, head: str) -> Table:
    """What each cure changes on one head; where it fails, or what it takes."""

    def cells(row: CureRow) -> Iterator[str | Cell]:
        refused = "out" in row.nulls and not row.nonfinite  # it contradicts the attention
        yield Cell(row.cure, after="not with this" if refused else "")
        yield from (number.cell(row) for number in CURE)
        cost = row.nulls["out"] if refused else report.costs.get(row.cure, "")
        yield cost + (f"; here: {row.broken}" if row.broken else "")

    last = Column("where it fails, or what it takes", align="left", width=200)
    standard = [row.cure == "none" for row in rows]
    name = f"{head}: the same inputs with one thing changed"
    return table((*_columns("cure", CURE), last), map(cells, rows), standard, title=name)


# --- running sums --------------------------------------------------------------------------------


def _sums(report: DiagnoseReport) -> Iterator[Node]:
    """The running sums of delta's error: lines on the page, bars of one scale in the terminal."""
    rows = [row for row in report.running if row.sums]
    if not rows:
        return
    largest = max(abs(s) for row in rows for s in row.sums) or 1.0
    yield Heading(
        "|Running sum of delta's error| over tokens, worst sequence, and its end", TERMINAL
    )
    items = []
    for row in rows:
        count = len(row.sums)
        ends = [max(0, round((i + 1) * count / ROOM) - 1) for i in range(ROOM)]
        sums = [row.sums[i] for i in ends] if count > ROOM else row.sums
        bars = "".join(BARS[round(8 * abs(s) / largest)] for s in sums)
        end = f"{row.sums[-1]:+.2g}".replace("-", "−")
        lead = f"{brief(row):<10} {_formula(row):<5}"
        items.append(Item(f"{bars} {end}", lead=lead, style="" if _used(row, report) else "soft"))
    yield Bullets(tuple(items), only=TERMINAL)
    drawn = [row for row in rows if len(row.sums) > 1]
    if drawn:
        yield Figures((_picture(drawn, report),), PAGE)


def _picture(rows: Sequence[RunningError], report: DiagnoseReport) -> Chart:
    """A colour for each head, dashed by the formula it does not use."""
    end = max(token for row in rows for token in row.tokens)
    places = sorted({*range(0, end + 1, max(1, round(end / 4))), end})
    heads = list(dict.fromkeys((row.case, row.head) for row in rows))
    colours = (f"c{heads.index((row.case, row.head)) % COLOURS}" for row in rows)
    dashes = ("" if _used(row, report) else " dashed" for row in rows)
    figure = Figure(
        title="Running sum of delta's error, worst sequence", metric="running", relative=False,
        y_title="sum of errors / √rows", y_scale="linear", curves=tuple(map(_curve, rows)),
    )  # fmt: skip
    ticks = tuple(Tick(x=float(place), label=str(place)) for place in places)
    return Chart(
        figure,
        Axis(name="token", title="token", scale="linear", ticks=ticks),
        seeds="",
        styles=tuple(map(str.__add__, colours, dashes)),
        note="Solid: delta by the formula in use. Dashed: by the other one, all else the same. "
        "Errors of random sign wander about zero; errors of one sign leave it on a line.",
    )


def _curve(row: RunningError) -> Curve:
    points = tuple(
        Point(x=float(token), label=f"token {token}", mean=s, low=None, high=None, seeds=1)
        for token, s in zip(row.tokens, row.sums, strict=True)
    )
    return Curve(label=f"{brief(row)}, {_formula(row)}", role="kernel", kernel="", points=points)


def _used(row: RunningError, report: DiagnoseReport) -> bool:
    """Whether this is the formula that the attention uses."""
    used = next((used_delta(head) for head in report.heads if head.is_of(row)), None)
    return used is None or used.formula == row.formula


def _formula(row: RunningError) -> str:
    return row.formula.replace("*", "∘")


# --- the map -------------------------------------------------------------------------------------


def weights_known(ranking: Sequence[Ranked]) -> bool:
    """Whether scores are those of dW_Q, for any head; else all are the mean error of delta."""
    return any(judged(ranked, WRONG) for ranked in ranking)


def score_map(report: DiagnoseReport) -> tuple[tuple[int, ...], Mapping[str, list[float | None]]]:
    """Heads, and by call what each scores, in the order of the calls: all by the same number. A
    call goes by its layer, or by its name where layers make several."""
    of_weights = weights_known(report.summary.ranking)
    ranking = sorted(report.summary.ranking, key=lambda r: -1 if r.layer is None else r.layer)
    layers = {(r.case, r.layer) for r in ranking}
    alone = len({layer for _, layer in layers}) == len(layers)
    heads = tuple(sorted({r.head for r in ranking}))
    scores: dict[str, list[float | None]] = {}
    for r in ranking:
        name = str(r.layer) if alone and r.layer is not None else r.case
        known = judged(r, WRONG) if of_weights else judged(r) or r.score > 0
        of_call = scores.setdefault(name, [None] * len(heads))
        of_call[heads.index(r.head)] = r.score if known else None
    return heads, scores


def brief(place: Place) -> str:
    """`L3 H5`, or the call's name with the head."""
    where = f"L{place.layer}" if place.layer is not None else place.module or place.case
    call = f"#{place.call}" if place.call else ""
    return f"{where}{call} H{place.head}"


def shade(score: float | None) -> int:
    """0 to 4: how dark a score is shown."""
    return 0 if score is None else sum(score >= limit for limit in SHADES)


def compact(score: float | None) -> str:
    """A share in per cent, in four characters without the sign for it."""
    if score is None:
        return NONE
    if score >= 99.995:
        return power(f"{100 * score:.0e}")
    return f"{100 * score:.2f}" if score < 0.0995 else f"{100 * score:.0f}"


# --- numbers -------------------------------------------------------------------------------------


def _share(name: str, title: str, width: int = 0, says: str = "") -> Number:
    return Number(title, lambda row: percent(getattr(row, name)), width, says)


def _plain(title: str, of: Callable[[Any], float | None], width: int = 0, says: str = "") -> Number:
    def cell(row: Any) -> str:
        value = of(row)
        if value is None:
            return NONE
        return (
            f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 1e4 else f"{value:.1e}"
        )

    return Number(title, cell, width, says)


def _bias(name: str, title: str, width: int = 0, says: str = "") -> Number:
    """Signed along the exact value's sign: + is away from zero."""

    def cell(row: Any) -> str:
        outward = getattr(row, name).outward
        return NONE if outward is None else f"{outward:+.3f}".replace("-", "−")

    return Number(title, cell, width, says)


def _delta(of: Callable[[Any], Any]) -> tuple[Number, Number, Number]:
    """The error of delta of a row that has one as a record."""
    return (
        Number("δ error", lambda row: percent(getattr(of(row), "mean", None), sign=True), 0,
               "its mean, over the rms of what delta is summed from"),
        Number("t", lambda row: t_in_words(getattr(of(row), "t", None)), 0, "of that mean"),
        _plain("run", lambda row: getattr(of(row), "run", None), 0,
               "the largest running sum over rms √rows, near 1 where signs are random"),
    )  # fmt: skip


SCORE = _share(
    "score", "of layer", 0, "the order, |error of the head's dW_Q| over |dW_Q| of its layer"
)
"""Of a `Ranked`: the number that heads are ordered by."""
HEAD = (
    Number("dW_Q by δ", lambda head: percent(moved(head)), 0,
           "what delta makes of its dW_Q by not fitting the dP and P it is subtracted from"),
    _share("dw_q_error", "dW_Q, all", 90, "its whole error, over that of the head"),
    *_delta(used_delta),
    _share("tied", "tied rows"),
    _share("ones", "P̄ = 1", 120),
    _share("powers", "P at 2ⁿ", 130),
    _share("one_signed", "V one sign", 90),
    _bias("out", "O bias, ulp", 0, "along the sign of O, + is away from zero"),
    Number("t ", lambda head: t_in_words(head.out.t), 110),
    _share("ds_row_sum", "rows of dS", 150),
    _share("similarity", "alike", 115, "the share of dW_Q's terms in one direction"),
    _plain("‖W_Q‖₂", lambda head: head.spectral_norm, 140),
    _plain("× layer", lambda head: head.spectral_ratio, 90,
           "spectral norm of W_Q over its layer's median"),
)  # fmt: skip
CURE = (
    Number("δ error", lambda cure: percent(cure.delta_mean, sign=True)),
    Number("t", lambda cure: t_in_words(cure.delta_t)),
    _share("delta_rms", "δ rms"),
    _share("dw_q_error", "dW_Q"),
    _share("dq_rel", "dQ"),
    _share("dk_rel", "dK", 120),
    _share("dv_rel", "dV", 120),
    _share("ds_row_sum", "rows of dS", 110),
    _bias("pv", "P̄V bias", 120),
    _bias("out", "O bias, ulp"),
    Number("NaN/inf", lambda cure: str(cure.nonfinite or NONE)),
)
KERNEL = (
    *(number._replace(says="") for number in _delta(lambda kernel: kernel.delta)),
    _share("dw_q_error", "dW_Q"),
    _share("dq_rel", "dQ"),
    _bias("out", "O bias, ulp"),
    Number("t ", lambda kernel: t_in_words(kernel.out.t)),
)
