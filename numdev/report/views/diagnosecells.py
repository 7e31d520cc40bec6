"""The numbers of a diagnosis as they stand in a table: which columns, and what is in each.

Terminal and page share these, so that both say the same. What is null is a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from numdev.diagnose.report import Bias, CureRow, DiagnoseReport, HeadRow, KernelRow, Place, Ranked

NONE = "–"
SHADES = (MOVED / 4, MOVED, 4 * MOVED, 16 * MOVED)
"""From where on a score is darker: MOVED is what counts."""


@dataclass(frozen=True, kw_only=True)
class Column:
    title: str
    cell: Callable[[Any], str]
    width: int = 0
    """Of the terminal, from where on it is shown."""
    says: str = ""
    """What the number is, where the title does not say it."""


def head_columns() -> tuple[Column, ...]:
    """Of a head's row."""
    return (
        Column(
            title="dW_Q by δ",
            cell=lambda h: share(moved(h)),
            says="what delta makes of its dW_Q by not fitting the dP and P it is subtracted from",
        ),
        Column(
            title="dW_Q, all",
            cell=lambda h: share(h.dw_q_error),
            width=90,
            says="its whole error, over that of the head",
        ),
        Column(
            title="δ error",
            cell=lambda h: signed(_of_delta(h, "mean")),
            says="its mean, over the rms of what delta is summed from",
        ),
        Column(title="t", cell=lambda h: t(_of_delta(h, "t")), says="of that mean"),
        Column(
            title="run",
            cell=lambda h: plain(_of_delta(h, "run")),
            says="the largest running sum over rms √rows, near 1 where signs are random",
        ),
        Column(title="tied rows", cell=lambda h: share(h.tied)),
        Column(title="P̄ = 1", cell=lambda h: share(h.ones), width=120),
        Column(title="P at 2ⁿ", cell=lambda h: share(h.powers), width=130),
        Column(title="V one sign", cell=lambda h: share(h.one_signed), width=90),
        Column(
            title="O bias, ulp",
            cell=lambda h: ulps(h.out),
            says="along the sign of O, + is away from zero",
        ),
        Column(title="t ", cell=lambda h: t(h.out.t), width=110),
        Column(title="rows of dS", cell=lambda h: share(h.ds_row_sum), width=150),
        Column(
            title="alike",
            cell=lambda h: share(h.similarity),
            width=115,
            says="the share of dW_Q's terms in one direction",
        ),
        Column(title="‖W_Q‖₂", cell=lambda h: plain(h.spectral_norm), width=140),
        Column(
            title="× layer",
            cell=lambda h: plain(h.spectral_ratio),
            width=90,
            says="spectral norm of W_Q over its layer's median",
        ),
    )


SCORE = Column(
    title="of layer",
    cell=lambda r: share(r.score),
    says="the order, |error of the head's dW_Q| over |dW_Q| of its layer",
)
"""Of a `Ranked`: the number that heads are ordered by."""


def legend(columns: Sequence[Column], last: str) -> str:
    """What those columns of the heads' table are that do not say it themselves; `last` is the title
    of the column with `met`."""
    said = [f"{c.title.strip()}: {c.says}" for c in columns if c.says]
    return "; ".join([*said, f"{last}: how many of the chain, of those that could be judged"]) + "."


def cure_columns() -> tuple[Column, ...]:
    """Of a cure's row."""
    return (
        Column(title="δ error", cell=lambda c: signed(c.delta_mean)),
        Column(title="t", cell=lambda c: t(c.delta_t)),
        Column(title="δ rms", cell=lambda c: share(c.delta_rms)),
        Column(title="dW_Q", cell=lambda c: share(c.dw_q_error)),
        Column(title="dQ", cell=lambda c: share(c.dq_rel)),
        Column(title="dK", cell=lambda c: share(c.dk_rel), width=120),
        Column(title="dV", cell=lambda c: share(c.dv_rel), width=120),
        Column(title="rows of dS", cell=lambda c: share(c.ds_row_sum), width=110),
        Column(title="P̄V bias", cell=lambda c: ulps(c.pv), width=120),
        Column(title="O bias, ulp", cell=lambda c: ulps(c.out)),
        Column(title="NaN/inf", cell=lambda c: str(c.nonfinite or NONE)),
    )


def kernel_columns() -> tuple[Column, ...]:
    """Of a real kernel's row."""
    return (
        Column(title="δ error", cell=lambda k: signed(k.delta and k.delta.mean)),
        Column(title="t", cell=lambda k: t(k.delta and k.delta.t)),
        Column(title="run", cell=lambda k: plain(k.delta and k.delta.run)),
        Column(title="dW_Q", cell=lambda k: share(k.dw_q_error)),
        Column(title="dQ", cell=lambda k: share(k.dq_rel)),
        Column(title="O bias, ulp", cell=lambda k: ulps(k.out)),
        Column(title="t ", cell=lambda k: t(k.out.t)),
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


def options(row: KernelRow | CureRow) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.options.items())
