"""A diagnosis, shown: the heads ranked, the running sums of delta's error, the map of what the
error does to every head, then cures and real kernels on the head that the answer is about, and the
curves over training. What is null is a dash."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from numdev.diagnose.guilt import (
    CONDITIONS,
    MOVED,
    WRONG,
    judged,
    leading,
    moved,
    same_head,
    used_delta,
)
from numdev.diagnose.report import (
    Bias,
    CureRow,
    DiagnoseReport,
    HeadRow,
    KernelRow,
    Place,
    Ranked,
    RunningError,
)
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
from numdev.report.numbers import NONE

SHOWN = 10
"""Heads in the ranked table; all are behind a fold of the page."""
BARS = " ▁▂▃▄▅▆▇█"
ROOM = 50
"""Bars of a running sum in the terminal."""
COLOURS = 6
SHADES = (MOVED / 4, MOVED, 4 * MOVED, 16 * MOVED)
"""From where on a score is darker: MOVED is what counts."""
MEETS = Column("meets", says="how many of the chain, of those that could be judged")


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
        head = brief(leading(ranking))
        first = f", the first {SHOWN} of {len(ranking)}" if len(ranking) > SHOWN else ""
        name = f"Heads{first}, by {order(ranking)}"
        yield _ranked(report, SHOWN, name, ("terminal", "html"))
        yield _ranked(report, len(ranking), f"Heads, by {order(ranking)}", ("markdown",))
        yield from notes((f"The chain: {', '.join(CONDITIONS)}.",), PAGE)
        yield from _sums(report)
        yield _map(report)
        yield from notes((_darker(ranking),), PAGE)
        cures, kernels = of_first(report.cures, report), of_first(report.kernels, report)
        yield _cures(cures, report, f"{head}: the same inputs with one thing changed")
        yield _side_by_side(kernels, f"{head}: real kernels on the same inputs")
        if report.figures:
            yield Heading("Over training")
            yield Figures(charts(report.figures, report.summary.axis, "", seeds=""))
        if len(ranking) > SHOWN:
            table = _ranked(report, len(ranking), "", PAGE)
            yield Fold(f"All {len(ranking)} heads", (table,))
    yield from notes((f"{_attention(report)}, on the same inputs.",), TERMINAL)
    if report.summary.notes:
        yield Heading("Notes", TEXT)
        yield bullets(report.summary.notes)


def _attention(report: DiagnoseReport) -> str:
    """What was diagnosed: `preset fa2, pv bfloat16 in bfloat16`."""
    options = ", ".join(f"{name} {value}" for name, value in report.attention.items())
    return f"Emulated: attention with {options} in {report.request['format']}, against fp64"


def _columns(name: str, numbers: Sequence[Number]) -> tuple[Column, ...]:
    return (
        Column(name, align="left"),
        *(Column(n.title, width=n.width, says=n.says) for n in numbers),
    )


def _ranked(report: DiagnoseReport, count: int, title: str, only: tuple[Medium, ...]) -> Table:
    """The first heads, each with its numbers and how much of the chain it meets."""

    def cells(ranked: Ranked, row: HeadRow) -> Iterator[str | Cell]:
        yield Cell(brief(ranked), style="strong")
        yield Cell(SCORE.cell(ranked), shade=shade(ranked.score))
        yield from (number.cell(row) for number in HEAD)
        states = "; ".join(f"{name}: {state}" for name, state in chain(ranked))
        yield Cell(met(ranked), title=states)

    rows = (tuple(cells(*pair)) for pair in rows_of(report, report.summary.ranking[:count]))
    columns = (*_columns("head", (SCORE, *HEAD)), MEETS)
    return table(columns, rows, title=title, dense=True, only=only)


def _map(report: DiagnoseReport) -> Table:
    """What every head scores, layer (down) by head (across)."""
    heads, scores = score_map(report)
    title = f"{mapped(report.summary.ranking)}: layer by head"
    return heat_map(title, heads, scores, compact, share, shade, only=("terminal", "html"))


def _darker(ranking: Sequence[Ranked]) -> str:
    limits = ", ".join(f"{100 * limit:.2g} %" for limit in SHADES)
    rounding = "; rounding dW_Q itself to bfloat16 moves it by up to 0.39 %"
    return f"Darker from {limits} on{rounding if weights_known(ranking) else ''}."


def _cures(rows: Sequence[CureRow], report: DiagnoseReport, title: str) -> Table:
    """What each cure changes on one head; where it fails, or what it takes."""

    def cells(row: CureRow) -> Iterator[str | Cell]:
        yield Cell(row.cure, after="not with this" if refused(row) else "")
        yield from (number.cell(row) for number in CURE)
        cost = row.nulls["out"] if refused(row) else report.costs.get(row.cure, "")
        yield cost + (f"; here: {row.broken}" if row.broken else "")

    last = Column("where it fails, or what it takes", align="left", width=200)
    columns = (*_columns("cure", CURE), last)
    standard = [row.cure == "none" for row in rows]
    return table(columns, (tuple(cells(row)) for row in rows), standard, title=title)


def _side_by_side(rows: Sequence[KernelRow], title: str) -> Table:
    def cells(row: KernelRow) -> Iterator[str | Cell]:
        yield Cell(row.kernel, style="strong", title=row.ran or "", after=row.reason or "")
        yield from (number.cell(row) for number in KERNEL)

    return table(_columns("kernel", KERNEL), (tuple(cells(row)) for row in rows), title=title)


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
    yield Bullets(
        tuple(
            Item(
                f"{_bars(row.sums, largest)} {_signed_end(row)}",
                lead=f"{brief(row):<10} {_formula(row):<5}",
                style="" if _used(row, report) else "soft",
            )
            for row in rows
        ),
        only=TERMINAL,
    )
    drawn = [row for row in rows if len(row.sums) > 1]
    if drawn:
        yield Figures((_picture(drawn, report),), PAGE)


def _bars(sums: Sequence[float], largest: float) -> str:
    """One character for each stretch of tokens: the size of the sum at its end."""
    ends = range(len(sums))
    if len(sums) > ROOM:
        ends = [max(0, round((i + 1) * len(sums) / ROOM) - 1) for i in range(ROOM)]  # type: ignore
    return "".join(BARS[round(8 * abs(sums[i]) / largest)] for i in ends)


def _signed_end(row: RunningError) -> str:
    return f"{row.sums[-1]:+.2g}".replace("-", "−")


def _picture(rows: Sequence[RunningError], report: DiagnoseReport) -> Chart:
    """A colour for each head, dashed by the formula it does not use."""
    end = max(token for row in rows for token in row.tokens)
    step = max(1, round(end / 4))
    places = sorted({*range(0, end, step), end} if end % step else {*range(0, end + 1, step)})
    heads = list(dict.fromkeys((row.case, row.head) for row in rows))
    figure = Figure(
        title="Running sum of delta's error, worst sequence",
        metric="running",
        relative=False,
        y_title="sum of errors / √rows",
        y_scale="linear",
        curves=tuple(_curve(row) for row in rows),
    )
    return Chart(
        figure,
        Axis(
            name="token",
            title="token",
            scale="linear",
            ticks=tuple(Tick(x=float(place), label=str(place)) for place in places),
        ),
        seeds="",
        styles=tuple(
            f"c{heads.index((row.case, row.head)) % COLOURS}"
            + ("" if _used(row, report) else " dashed")
            for row in rows
        ),
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
    head = next((h for h in report.heads if same_head(h, row)), None)
    return head is None or not head.delta or head.delta[0].formula == row.formula


def _formula(row: RunningError) -> str:
    return row.formula.replace("*", "∘")


# --- numbers -------------------------------------------------------------------------------------


HEAD = (
    Number(
        "dW_Q by δ", lambda h: share(moved(h)), 0,
        "what delta makes of its dW_Q by not fitting the dP and P it is subtracted from",
    ),
    Number(
        *("dW_Q, all", lambda h: share(h.dw_q_error), 90, "its whole error, over that of the head")
    ),
    Number(
        "δ error", lambda h: signed(_of_delta(h, "mean")), 0,
        "its mean, over the rms of what delta is summed from",
    ),
    Number("t", lambda h: t(_of_delta(h, "t")), 0, "of that mean"),
    Number(
        "run", lambda h: plain(_of_delta(h, "run")), 0,
        "the largest running sum over rms √rows, near 1 where signs are random",
    ),
    Number("tied rows", lambda h: share(h.tied)),
    Number("P̄ = 1", lambda h: share(h.ones), 120),
    Number("P at 2ⁿ", lambda h: share(h.powers), 130),
    Number("V one sign", lambda h: share(h.one_signed), 90),
    Number(
        "O bias, ulp", lambda h: ulps(h.out), 0, "along the sign of O, + is away from zero"
    ),
    Number("t ", lambda h: t(h.out.t), 110),
    Number("rows of dS", lambda h: share(h.ds_row_sum), 150),
    Number(
        "alike", lambda h: share(h.similarity), 115,
        "the share of dW_Q's terms in one direction",
    ),
    Number("‖W_Q‖₂", lambda h: plain(h.spectral_norm), 140),
    Number(
        "× layer", lambda h: plain(h.spectral_ratio), 90,
        "spectral norm of W_Q over its layer's median",
    ),
)  # fmt: skip
SCORE = Number(
    "of layer", lambda r: share(r.score), 0,
    "the order, |error of the head's dW_Q| over |dW_Q| of its layer",
)  # fmt: skip
"""Of a `Ranked`: the number that heads are ordered by."""
CURE = (
    Number("δ error", lambda c: signed(c.delta_mean)),
    Number("t", lambda c: t(c.delta_t)),
    Number("δ rms", lambda c: share(c.delta_rms)),
    Number("dW_Q", lambda c: share(c.dw_q_error)),
    Number("dQ", lambda c: share(c.dq_rel)),
    Number("dK", lambda c: share(c.dk_rel), 120),
    Number("dV", lambda c: share(c.dv_rel), 120),
    Number("rows of dS", lambda c: share(c.ds_row_sum), 110),
    Number("P̄V bias", lambda c: ulps(c.pv), 120),
    Number("O bias, ulp", lambda c: ulps(c.out)),
    Number("NaN/inf", lambda c: str(c.nonfinite or NONE)),
)
KERNEL = (
    Number("δ error", lambda k: signed(k.delta and k.delta.mean)),
    Number("t", lambda k: t(k.delta and k.delta.t)),
    Number("run", lambda k: plain(k.delta and k.delta.run)),
    Number("dW_Q", lambda k: share(k.dw_q_error)),
    Number("dQ", lambda k: share(k.dq_rel)),
    Number("O bias, ulp", lambda k: ulps(k.out)),
    Number("t ", lambda k: t(k.out.t)),
)


def rows_of(
    report: DiagnoseReport, ranking: Sequence[Ranked]
) -> tuple[tuple[Ranked, HeadRow], ...]:
    """Ranked heads with their rows."""
    return tuple((r, next(h for h in report.heads if same_head(h, r))) for r in ranking)


def of_first(rows: Sequence[Any], report: DiagnoseReport) -> tuple[Any, ...]:
    """The rows of the head that the answer is about."""
    ranking = report.summary.ranking
    return tuple(row for row in rows if ranking and same_head(row, leading(ranking)))


def met(ranked: Ranked) -> str:
    """`7 of 8`: of the conditions that could be judged."""
    judged = len(ranked.conditions) + len(ranked.missing)
    return f"{len(ranked.conditions)} of {judged}"


def chain(ranked: Ranked) -> tuple[tuple[str, str], ...]:
    """Every condition with `met`, `missing` or `unknown`."""
    known = dict.fromkeys(ranked.conditions, "met") | dict.fromkeys(ranked.missing, "missing")
    return tuple((name, known.get(name, "unknown")) for name in CONDITIONS)


def brief(place: Place) -> str:
    """`L3 H5`, or the call's name with the head."""
    where = f"L{place.layer}" if place.layer is not None else place.module or place.case
    call = f"#{place.call}" if place.call else ""
    return f"{where}{call} H{place.head}"


def weights_known(ranking: Sequence[Ranked]) -> bool:
    """Whether scores are those of dW_Q, for any head; else all are the mean error of delta."""
    return any(map(_of_weights, ranking))


def order(ranking: Sequence[Ranked]) -> str:
    """By what heads are sorted."""
    if weights_known(ranking):
        return "how far they move their layer's dW_Q"
    return "the mean error of their delta"


def mapped(ranking: Sequence[Ranked]) -> str:
    """What the map of all heads shows."""
    if weights_known(ranking):
        return "dW_Q of the layer moved by each head, %"
    return "|Mean error of delta|, % of what it is summed from"


def score_map(report: DiagnoseReport) -> tuple[tuple[int, ...], Mapping[str, list[float | None]]]:
    """Heads, and by call what each scores, in the order of the calls: all by the same number."""
    of_weights = weights_known(report.summary.ranking)
    ranking = sorted(report.summary.ranking, key=lambda r: -1 if r.layer is None else r.layer)
    layers = {(r.case, r.layer) for r in ranking}
    alone = len({layer for _, layer in layers}) == len(layers)
    heads = tuple(sorted({r.head for r in ranking}))
    found: dict[str, list[float | None]] = {}
    for r in ranking:
        name = str(r.layer) if alone and r.layer is not None else r.case
        line = found.setdefault(name, [None] * len(heads))
        known = _of_weights(r) if of_weights else judged(r) or r.score > 0
        line[heads.index(r.head)] = r.score if known else None
    return heads, found


def _of_weights(ranked: Ranked) -> bool:
    """Whether the score of a head is that of its dW_Q."""
    return WRONG in ranked.conditions or WRONG in ranked.missing


def shade(score: float | None) -> int:
    """0 to 4: how dark a score is shown."""
    return 0 if score is None else sum(score >= limit for limit in SHADES)


def compact(score: float | None) -> str:
    """A share in per cent, in four characters without the sign for it."""
    if score is None:
        return NONE
    if score >= 99.995:
        return f"{100 * score:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{100 * score:.2f}" if score < 0.0995 else f"{100 * score:.0f}"


def _of_delta(head: HeadRow, name: str) -> float | None:
    used = used_delta(head)
    value: float | None = getattr(used, name, None)
    return value


def share(value: float | None) -> str:
    """In per cent, with two digits, of small ones with one."""
    if value is None:
        return NONE
    percent = abs(100 * value)
    sign = "−" if value < 0 else ""
    if percent == 0:
        return "0 %"
    if percent < 5e-4:
        return f"{sign}{percent:.0e} %".replace("e-0", "e−").replace("e-", "e−")
    if percent >= 1e5:
        return f"{sign}{percent:.0e} %".replace("e+0", "e").replace("e+", "e")
    digits = next(d for d, limit in enumerate((9.95, 0.995, 0.0995, 0)) if percent >= limit)
    return f"{sign}{percent:.{digits}f} %"


def signed(value: float | None) -> str:
    """A share with its sign."""
    if value is None:
        return NONE
    return f"{'−' if value < 0 else '+'}{share(abs(value))}"


def t(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.{0 if abs(value) >= 9.95 else 1}f}".replace("-", "−")


def plain(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 1e4 else f"{value:.1e}"


def ulps(bias: Bias) -> str:
    """Signed along the exact value's sign: + is away from zero."""
    if bias.outward is None:
        return NONE
    return f"{bias.outward:+.3f}".replace("-", "−")


def refused(row: CureRow) -> bool:
    """Whether there is nothing of a cure: it contradicts the attention."""
    return "out" in row.nulls and not row.nonfinite
