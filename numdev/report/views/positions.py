"""Where in a call a kernel errs, as figures: its error by position, beside what is predicted there,
and where the rows stand that err most.

The axis of a profile goes from bin to bin: these double in width at first, so that it is like a
logarithmic one there, and even further on. Worst rows come from calls of different lengths, so
their place is a share of the way; a ratio to what is predicted and a ratio to the size of the terms
are not drawn together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numdev.report import Axis, Curve, Figure, Point, ProfileSummary, Tick, WorstRow
from numdev.report.document import (
    PAGE,
    TERMINAL,
    TEXT,
    Chart,
    Figures,
    Fold,
    Heading,
    Node,
    Paragraph,
    labelled,
    notes,
)
from numdev.report.views.parts import DEFAULT, KINDS

FEWEST = 2
"""Places that a line needs."""
LITTLE = 0.1
"""The first row is left out where it errs less than this share of the next: it sees one key, there
is hardly anything to round, and the axes would stretch until nothing else is to be seen."""
SHARE = Axis(
    name="position",
    title="position of the row in its call",
    scale="linear",
    ticks=tuple(Tick(x=float(share), label=f"{share} %") for share in (0, 25, 50, 75, 100)),
)
TITLES = {
    True: ("Error over what is predicted, by position", "error, times predicted"),
    False: ("Error over the size of its terms, by position", "error over its terms"),
}
LEGEND = (
    "Root mean square over the rows of a bin, heads and sequences together, of a row's error over "
    "the size of its terms; the first bins hold 1, 1, 2, 4, 8 rows and so on, the rest are even. "
    "Where the first row errs less than a tenth of the next it is not drawn: under a causal mask "
    "it sees one key, and its exact result is a row of V."
)
OVER_CALLS = (
    "Lines are medians over calls (a model's layers), bands go from the least to the largest."
)


def along(profiles: Sequence[ProfileSummary], remark: str | None) -> Iterator[Node]:
    """The profiles as figures, those of gradients folded."""
    out = figures([p for p in profiles if p.tensor == "out"])
    gradients = figures([p for p in profiles if p.tensor != "out"])
    if not (out or gradients):
        return
    yield Heading("Error against position", TEXT)
    if remark:
        yield Paragraph(remark, "warn", TERMINAL)
        yield Paragraph(remark, "strong", TEXT)
    yield Figures(out, TEXT)
    if gradients:
        yield Figures(gradients, ("markdown",))
        yield Fold("Gradients", (Figures(gradients),))
    several = any(p.calls > 1 for p in profiles)
    yield from notes((f"{LEGEND} {OVER_CALLS}" if several else LEGEND,), PAGE)


def figures(profiles: Sequence[ProfileSummary]) -> tuple[Chart, ...]:
    """For each format, tensor and length of call: the errors, beside those of the floor and the
    baseline; and where something is predicted, the errors over that."""
    groups: dict[tuple[object, ...], list[ProfileSummary]] = {}
    for p in profiles:
        groups.setdefault((p.format, p.attends, p.tensor, p.length), []).append(p)
    lengths = {(*key[:3],): {k[3] for k in groups if k[:3] == key[:3]} for key in groups}
    return tuple(
        chart for key, own in groups.items() for chart in _of(own, len(lengths[key[:3]]) > 1)
    )


def _of(own: Sequence[ProfileSummary], several: bool) -> Iterator[Chart]:
    first, calls = own[0], max(p.calls for p in own)
    rows = f" ({first.length} {_what(first)}s)" if several else ""
    kind = f" {KINDS[first.attends]}," if first.attends else ""
    name = f"{first.format},{kind} {first.tensor}{rows}"
    for relative, title, y_title in (
        (False, "error by position", "rms error of a row over its terms"),
        (True, "error over what is predicted, by position", "error, times predicted"),
    ):
        figure = Figure(
            title=f"{name}: {title}",
            metric="expected_ratio" if relative else "row_rel",
            relative=relative,
            y_title=y_title,
            y_scale="log",
            curves=_curves(own, relative),
        )
        if any(len(curve.points) >= FEWEST for curve in figure.curves):
            yield Chart(
                figure,
                _axis(first),
                of="median",
                interval="range of calls",
                seeds="calls" if calls > 1 else "",
            )


def _axis(p: ProfileSummary) -> Axis:
    ticks = tuple(Tick(x=float(i), label=str(start)) for i, start in enumerate(p.starts))
    title = "first key of the bin" if _what(p) == "key" else "first query row of the bin"
    return Axis(name="position", title=title, scale="linear", ticks=ticks)


def _curves(own: Sequence[ProfileSummary], relative: bool) -> tuple[Curve, ...]:
    """Without PyTorch's default choice where another line has its every number."""
    drawn = [(p, _points(p, relative)) for p in own if p.role == "kernel" or not relative]
    return tuple(
        Curve(
            label=labelled(p.kernel, p.options),
            role=p.role,
            kernel=p.kernel,
            options=p.options,
            points=points,
        )
        for p, points in drawn
        if points
        and not (p.kernel == DEFAULT and any(points == other for o, other in drawn if o is not p))
    )


def _points(p: ProfileSummary, relative: bool) -> tuple[Point, ...]:
    ratios = (p.ratios, p.ratio_lows, p.ratio_highs)
    values, lows, highs = ratios if relative else (p.errors, p.lows, p.highs)
    begins = 1 if _little_at_first(p) else 0
    drawn = [(i, x) for i, x in enumerate(values) if x is not None and i >= begins]
    return tuple(
        Point(
            x=float(i),
            label=_rows(p, i),
            mean=value,
            low=lows[i] if p.calls > 1 else None,
            high=highs[i] if p.calls > 1 else None,
            seeds=p.calls if p.calls > 1 else 0,
        )
        for i, value in drawn
    )


def _little_at_first(p: ProfileSummary) -> bool:
    first, *rest = p.errors
    following = next((x for x in rest if x is not None), None)
    return first is not None and following is not None and first < LITTLE * following


def _rows(p: ProfileSummary, i: int) -> str:
    first, last = p.starts[i], p.ends[i]
    return f"{_what(p)}s {first} to {last}" if last > first else f"{_what(p)} {first}"


def _what(p: ProfileSummary) -> str:
    return "key" if p.tensor in ("dk", "dv") else "row"


def of_worst(rows: Sequence[WorstRow]) -> tuple[Figure, ...]:
    """No figure where no row has a ratio: what is not finite has none."""
    made = []
    for predicted, (title, y_title) in TITLES.items():
        curves = tuple(_curve(w) for w in rows if w.predicted is predicted and w.ratio)
        if curves:
            made.append(
                Figure(
                    title=title,
                    metric="worst_row" if predicted else "row_rel",
                    relative=False,
                    y_title=y_title,
                    y_scale="log",
                    curves=curves,
                )
            )
    return tuple(made)


def _curve(w: WorstRow) -> Curve:
    place = f"layer {w.layer} " if w.layer is not None else ""
    point = Point(
        x=100 * w.row / max(1, w.rows - 1),
        label=f"row {w.row} of {w.rows}",
        mean=w.ratio or 0.0,
        low=None,
        high=None,
        seeds=1,
    )
    label = f"{w.kernel or w.case} {w.tensor}, {place}head {w.head}, row {w.row}"
    return Curve(label=label, role=w.role, kernel=w.kernel, points=(point,))
