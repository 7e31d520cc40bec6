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
from numdev.report import document as doc
from numdev.report.views.parts import KINDS, repeats

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
LEGEND = (
    "Root mean square over the rows of a bin, heads and sequences together, of a row's error over "
    "the size of its terms; the first bins hold 1, 1, 2, 4, 8 rows and so on, the rest are even. "
    "Where the first row errs less than a tenth of the next it is not drawn: under a causal mask "
    "it sees one key, and its exact result is a row of V."
)
OVER_CALLS = (
    " Lines are medians over calls (a model's layers), bands go from the least to the largest."
)


def along(profiles: Sequence[ProfileSummary], remark: str | None) -> Iterator[doc.Node]:
    """The profiles as figures, those of gradients folded."""
    out = figures([p for p in profiles if p.tensor == "out"])
    gradients = figures([p for p in profiles if p.tensor != "out"])
    if not (out or gradients):
        return
    yield doc.Heading("Error against position", doc.TEXT)
    if remark:
        yield doc.Paragraph(remark, "warn", doc.TERMINAL)
        yield doc.Paragraph(remark, "strong", doc.TEXT)
    yield doc.Figures(out, doc.TEXT)
    if gradients:
        yield doc.Figures(gradients, ("markdown",))
        yield doc.Fold("Gradients", (doc.Figures(gradients),))
    several = any(p.calls > 1 for p in profiles)
    yield from doc.notes((LEGEND + (OVER_CALLS if several else ""),), doc.PAGE)


def figures(profiles: Sequence[ProfileSummary]) -> tuple[doc.Chart, ...]:
    """For each format, tensor and length of call: the errors, beside those of the floor and the
    baseline; and where something is predicted, the errors over that."""
    groups: dict[tuple[object, ...], list[ProfileSummary]] = {}
    for p in profiles:
        groups.setdefault((p.format, p.attends, p.tensor, p.length), []).append(p)
    calls = [key[:3] for key in groups]
    return tuple(
        chart for key, own in groups.items() for chart in _of(own, calls.count(key[:3]) > 1)
    )


def _of(own: Sequence[ProfileSummary], several: bool) -> Iterator[doc.Chart]:
    first, calls = own[0], max(p.calls for p in own)
    what = _what(first)
    kind = f" {KINDS[first.attends]}," if first.attends else ""
    name = f"{first.format},{kind} {first.tensor}"
    name += f" ({first.length} {what}s)" if several else ""
    axis = Axis(
        name="position",
        title="first key of the bin" if what == "key" else "first query row of the bin",
        scale="linear",
        ticks=tuple(Tick(x=float(i), label=str(start)) for i, start in enumerate(first.starts)),
    )
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
            yield doc.Chart(figure, axis, of="median", interval="range of calls",
                            seeds="calls" if calls > 1 else "")  # fmt: skip


def _curves(own: Sequence[ProfileSummary], relative: bool) -> tuple[Curve, ...]:
    drawn = [(p, _points(p, relative)) for p in own if p.role == "kernel" or not relative]
    every = [points for _, points in drawn]
    return tuple(
        Curve(label=doc.labelled(p.kernel, p.options), role=p.role, kernel=p.kernel,
              options=p.options, points=points)
        for p, points in drawn
        if points and not repeats(p.kernel, points, every)
    )  # fmt: skip


def _points(p: ProfileSummary, relative: bool) -> tuple[Point, ...]:
    ratios = (p.ratios, p.ratio_lows, p.ratio_highs)
    values, lows, highs = ratios if relative else (p.errors, p.lows, p.highs)
    following = next((x for x in p.errors[1:] if x is not None), None)
    little = None not in (p.errors[0], following) and p.errors[0] < LITTLE * following  # type: ignore[operator]
    several = p.calls > 1
    points = []
    for i, value in enumerate(values):
        if value is None or (little and i == 0):
            continue
        first, last = p.starts[i], p.ends[i]
        where = f"{_what(p)}s {first} to {last}" if last > first else f"{_what(p)} {first}"
        low, high = (lows[i], highs[i]) if several else (None, None)
        points.append(Point(x=float(i), label=where, mean=value, low=low, high=high,
                            seeds=p.calls if several else 0))  # fmt: skip
    return tuple(points)


def _what(p: ProfileSummary) -> str:
    return "key" if p.tensor in ("dk", "dv") else "row"


def of_worst(rows: Sequence[WorstRow]) -> tuple[Figure, ...]:
    """No figure where no row has a ratio: what is not finite has none."""
    figures = []
    for predicted, metric, title, y_title in (
        (True, "worst_row", "Error over what is predicted", "error, times predicted"),
        (False, "row_rel", "Error over the size of its terms", "error over its terms"),
    ):
        curves = tuple(_curve(w) for w in rows if w.predicted is predicted and w.ratio)
        if curves:
            figures.append(Figure(title=f"{title}, by position", metric=metric, relative=False,
                                  y_title=y_title, y_scale="log", curves=curves))  # fmt: skip
    return tuple(figures)


def _curve(w: WorstRow) -> Curve:
    place = f"layer {w.layer} " if w.layer is not None else ""
    point = Point(x=100 * w.row / max(1, w.rows - 1), label=f"row {w.row} of {w.rows}",
                  mean=w.ratio or 0.0, low=None, high=None, seeds=1)  # fmt: skip
    label = f"{w.kernel or w.case} {w.tensor}, {place}head {w.head}, row {w.row}"
    return Curve(label=label, role=w.role, kernel=w.kernel, points=(point,))
