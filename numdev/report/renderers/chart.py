"""A figure as geometry: where lines, bands, ticks and labels go. The template draws them.

Nothing is measured here and nothing averaged: a report's figure already holds means and intervals.
What is decided here is what a reader sees first: logarithmic axes where the figure says so, the
same range for figures of one metric, and each line's name beside its end instead of a legend. A
line differs from the others by colour, marker and dash, so that colour alone carries nothing.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from numdev.report import Axis, Curve, Figure, Point
from numdev.report.document import Chart as Described

WIDTH, HEIGHT = 660, 400
LEFT, RIGHT, TOP, BOTTOM = 78, 168, 14, 82
UNDER = 36
"""Below the frame, for the axis and its title, without the lines of its labels."""
LINE = 14
"""Height of a line of text."""
LABEL_CHARACTERS = 22
SMALLEST, LARGEST = 1e-150, 1e150
"""What is beyond is drawn there."""
COLOURS, MARKERS = 6, 4
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Range = tuple[float, float]
Scale = Callable[[float], float]


@dataclass(frozen=True, kw_only=True)
class Dot:
    x: float
    y: float
    low: float | None
    """The interval's ends, as heights in the drawing; None without one."""
    high: float | None
    hollow: bool
    says: str


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One curve in the drawing's coordinates."""

    style: str
    marker: int
    path: str
    band: str
    dots: tuple[Dot, ...]
    label: tuple[str, ...]
    label_y: float
    end: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Chart:
    figure: Figure
    x_title: str
    x_ticks: tuple[tuple[float, tuple[str, ...]], ...]
    y_ticks: tuple[tuple[float, str], ...]
    one: float | None
    """Where the baseline is, on a figure of ratios to it."""
    drawn: tuple[Drawn, ...]
    bars: bool
    """Whether intervals are bars at points, which have no order, and not bands."""
    marks: tuple[tuple[float, str], ...] = ()
    """Upright lines: where, and what is said beside each."""
    width: int = WIDTH
    height: int = HEIGHT
    frame: tuple[int, int, int, int] = field(
        default=(LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)
    )


def drawn(of: Described) -> Chart:
    """A chart's geometry. Figures beside it share its range, and a kernel looks the same in all."""
    figures = of.beside or (of.figure,)
    like = (of.figure.metric, of.figure.relative)
    alike = [f for f in figures if (f.metric, f.relative) == like]
    made = _chart(of.figure, alike, of.axis, _styles(figures, of.baseline))
    x = _x_scale(of.axis)
    lines = made.drawn
    if of.styles:
        lines = tuple(
            dataclasses.replace(line, style=style, dots=())
            for line, style in zip(lines, of.styles, strict=True)
        )
    marks = tuple((x(place), words) for place, words in of.marks)
    return dataclasses.replace(made, drawn=lines, marks=marks)


def _styles(figures: Sequence[Figure], baseline: str) -> dict[str, tuple[str, int]]:
    """Label to its class and marker: the standard roles their own, kernels a colour each."""
    styles: dict[str, tuple[str, int]] = {}
    kernels = 0
    for curve in (curve for figure in figures for curve in figure.curves):
        if curve.label in styles:
            continue
        if curve.label == baseline or curve.role in ("floor", "precision"):
            styles[curve.label] = (curve.role, MARKERS - 1 if curve.role == "precision" else 0)
        else:
            dash = " dashed" if (kernels // COLOURS) % 2 else ""
            styles[curve.label] = (f"c{kernels % COLOURS}{dash}", kernels % MARKERS)
            kernels += 1
    return styles


def _chart(
    figure: Figure,
    alike: Sequence[Figure],
    axis: Axis,
    styles: Mapping[str, tuple[str, int]],
) -> Chart:
    log = any(f.y_scale == "log" for f in alike) and _positive(alike)
    limits = _limits(alike, log)
    y = _scale(limits, (HEIGHT - BOTTOM, TOP), log)
    x = _x_scale(axis)
    drawn = [
        _drawn(curve, i, figure, axis, x, y, limits, styles)
        for i, curve in enumerate(figure.curves)
    ]
    drawn = _labelled(drawn)
    ticks = _x_ticks(axis, x)
    lines = max((len(words) for _, words in ticks), default=1)
    return Chart(
        figure=figure,
        x_title=axis.title,
        x_ticks=ticks,
        y_ticks=_labels(_y_ticks(limits, log), y),
        one=y(1.0) if figure.relative and limits[0] <= 1 <= limits[1] else None,
        drawn=tuple(drawn),
        height=max([HEIGHT - BOTTOM + UNDER + LINE * lines, *map(_foot, drawn)]),
        bars=axis.scale == "category",
    )


def _positive(figures: Sequence[Figure]) -> bool:
    return any(p.mean > 0 for f in figures for c in f.curves for p in c.points)


def _limits(figures: Sequence[Figure], log: bool) -> Range:
    """The range of all that is drawn, with some air; from zero where the scale is linear."""
    points = [p for f in figures for c in f.curves for p in c.points]
    ends = [_held(v) for p in points for v in (p.mean, p.low, p.high) if v is not None]
    if any(f.relative for f in figures):
        ends.append(1.0)
    if log:
        means = [_held(p.mean) for p in points if p.mean > 0]
        # An interval that reaches down to zero, or that two seeds make endless, must not stretch
        # the axis until nothing is to be seen.
        ends = [v for v in ends if min(means) / 3 <= v <= 10 * max(means)]
        air = math.exp(0.06 * (math.log(max(ends)) - math.log(min(ends))))
        return min(ends) / max(air, 1.05), max(ends) * max(air, 1.05)
    low, high = min([0.0, *ends]), max([0.0, *ends])
    air = 0.06 * (high - low or 1.0)
    return low - (air if low < 0 else 0.0), high + air


def _held(value: float) -> float:
    """A number that an axis can have: squares and sums of these are finite, and logarithms too."""
    size = min(max(abs(value), SMALLEST), LARGEST)
    return math.copysign(size, value) if value else 0.0


def _scale(limits: Range, pixels: Range, log: bool) -> Scale:
    """Values to pixels; beyond the limits, to the edge."""
    of = (lambda v: math.log(max(v, limits[0]))) if log else (lambda v: v)
    low, high = of(limits[0]), of(limits[1])

    def place(value: float) -> float:
        share = (of(value) - low) / (high - low) if high > low else 0.5
        return round(pixels[0] + min(max(share, 0.0), 1.0) * (pixels[1] - pixels[0]), 1)

    return place


def _x_scale(axis: Axis) -> Scale:
    values = [tick.x for tick in axis.ticks]
    low, high, log = min(values), max(values), axis.scale == "log"
    if axis.scale == "category":
        low, high = low - 0.5, high + 0.5
    elif log:
        air = (high / low) ** 0.04
        low, high = low / air, high * air
    else:
        air = 0.04 * (high - low)
        low, high = low - air, high + air
    return _scale((low, high), (LEFT, WIDTH - RIGHT), log)


def _x_ticks(axis: Axis, x: Scale) -> tuple[tuple[float, tuple[str, ...]], ...]:
    """Labels in lines; where they would run into each other, the less important go."""
    slot = (WIDTH - LEFT - RIGHT) / max(1, len(axis.ticks))
    if axis.scale == "category":
        fitting = max(6, int(slot / 6.2))
        return tuple((x(t.x), _wrapped(_broken(t.label, fitting), fitting)) for t in axis.ticks)
    kept: list[tuple[float, tuple[str, ...]]] = []
    taken: list[Range] = []
    named_first = sorted(axis.ticks, key=lambda t: (not t.below, t not in _ends(axis)))
    for tick in named_first:
        at, lines = x(tick.x), (tick.label, tick.below) if tick.below else (tick.label,)
        half = 3.6 * max(map(len, lines)) + 2
        if all(at + half < a or at - half > b for a, b in taken):
            taken.append((at - half, at + half))
            kept.append((at, lines))
    return tuple(sorted(kept))


def _broken(label: str, width: int) -> str:
    """`regime(option=1)` with places to break it at, as long a line as there is room for."""
    parts = label.replace("(", " ").removesuffix(")").replace(",", " ").split()
    return " ".join(p if len(p) <= width else p.replace("=", "= ") for p in parts)


def _wrapped(label: str, width: int) -> tuple[str, ...]:
    """In lines; what does not fit into four is in the table below."""
    return tuple(textwrap.wrap(label, width, max_lines=4, placeholder="…", break_on_hyphens=False))


def _ends(axis: Axis) -> tuple[object, object]:
    return axis.ticks[0], axis.ticks[-1]


def _y_ticks(limits: Range, log: bool) -> list[float]:
    low, high = limits
    if not log:
        return _even(low, high)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    apart = 1 + len(decades) // 8
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        found = [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high]
        if len(found) >= 4:
            break
    return found[::apart] if len(found) >= 3 else _even(low, high)


def _even(low: float, high: float) -> list[float]:
    """Round numbers in equal steps."""
    step = _nice((high - low) / 5)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = (i * step for i in range(first, last + 1))
    return [tick for tick in ticks if low <= tick <= high]


def _nice(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(s * power for s in (1, 2, 5, 10) if s * power >= step * (1 - 1e-9))


def _labels(ticks: Sequence[float], y: Scale) -> tuple[tuple[float, str], ...]:
    """All as ordinary numbers, or all as powers of ten."""
    plain = all(v == 0 or 1e-3 <= abs(v) < 1e4 for v in ticks)
    return tuple((y(v), _number(v, plain)) for v in ticks)


def _number(value: float, plain: bool) -> str:
    """A tick's label: 10⁻³, 2·10⁻³, or an ordinary number."""
    if value in (0, 1) or plain:
        return f"{value:.6g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    power = f"10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    shown = mantissa.removesuffix(".0")
    return power if shown == "1" else f"{shown}·{power}"


def _drawn(
    curve: Curve,
    index: int,
    figure: Figure,
    axis: Axis,
    x: Scale,
    y: Scale,
    limits: Range,
    styles: Mapping[str, tuple[str, int]],
) -> Drawn:
    style, marker = styles[curve.label]
    points = [p for p in curve.points if p.mean > 0 or limits[0] <= 0]
    apart = 0.0
    if axis.scale == "category":  # beside each other, not on top
        slot = (WIDTH - LEFT - RIGHT) / len(axis.ticks)
        step = min(14.0, 0.8 * slot / len(figure.curves))
        apart = (index - (len(figure.curves) - 1) / 2) * step
    if curve.constant:
        points = [points[0], points[0]] if points else []
        places = [float(LEFT), float(WIDTH - RIGHT)]
    else:
        places = [x(p.x or 0.0) + apart for p in points]
    dots = tuple(_dot(curve, p, at, y) for p, at in zip(points, places, strict=True))
    lined = axis.scale != "category" or curve.constant
    return Drawn(
        style=style,
        marker=marker,
        path=_path([(d.x, d.y) for d in dots]) if lined else "",
        # What is only there for comparison needs no band: its interval is in the table.
        band=_band(dots) if lined and style not in ("floor", "precision") else "",
        dots=() if curve.constant else dots,
        label=_wrapped(curve.label, LABEL_CHARACTERS),
        label_y=dots[-1].y if dots else float(HEIGHT - BOTTOM),
        end=(dots[-1].x, dots[-1].y) if dots else (float(WIDTH - RIGHT), float(HEIGHT - BOTTOM)),
    )


def _dot(curve: Curve, point: Point, at: float, y: Scale) -> Dot:
    low = None if point.low is None else y(point.low)
    high = None if point.high is None else y(point.high)
    where = f" at {point.label}" if point.label else ""
    return Dot(
        x=round(at, 1),
        y=y(point.mean),
        low=low,
        high=high,
        hollow=point.limited,
        says=f"{curve.label}{where}: {value(point)}",
    )


def value(point: Point) -> str:
    """A mean and its interval in words. What is no mean over seeds has 0 of them."""
    if point.low is None or point.high is None:
        return f"{point.mean:.3g}" + (" (one seed)" if point.seeds else "")
    return f"{point.mean:.3g} [{point.low:.3g} to {point.high:.3g}]"


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{'L' if i else 'M'}{x:g} {y:g}" for i, (x, y) in enumerate(points))


def _band(dots: Sequence[Dot]) -> str:
    """The interval as an area; nothing where a point has none."""
    upper = [(d.x, d.high) for d in dots if d.high is not None]
    lower = [(d.x, d.low) for d in dots if d.low is not None]
    if len(upper) < max(2, len(dots)):
        return ""
    return f"{_path([*upper, *reversed(lower)])} Z"


def _labelled(drawn: Sequence[Drawn]) -> list[Drawn]:
    """With the labels moved apart until none covers another, in the order of their lines' ends."""
    order = sorted(range(len(drawn)), key=lambda i: drawn[i].label_y)
    heights = [LINE * max(1, len(drawn[i].label)) + 3 for i in order]
    places: list[float] = []
    for i, height in zip(order, heights, strict=True):
        top = drawn[i].label_y - height / 2
        places.append(max(top, places[-1] + heights[len(places) - 1]) if places else max(top, 0))
    bottom = float(HEIGHT)
    for at in reversed(range(len(places))):
        places[at] = min(places[at], bottom - heights[at])
        bottom = places[at]
    moved = {i: place + height / 2 for i, place, height in zip(order, places, heights, strict=True)}
    return [_moved(d, moved[i]) for i, d in enumerate(drawn)]


def _foot(drawn: Drawn) -> int:
    """How far down a label reaches."""
    return math.ceil(drawn.label_y + LINE * len(drawn.label) / 2)


def _moved(drawn: Drawn, label_y: float) -> Drawn:
    return dataclasses.replace(drawn, label_y=round(label_y, 1))
