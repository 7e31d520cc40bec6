"""A figure as geometry: where lines, bands, ticks and labels go. The template draws them.

Nothing is measured here and nothing averaged: a report's figure already holds means and intervals.
What is decided here is what a reader sees first: logarithmic axes where the figure says so, the
same range for figures of one metric, and each line's name beside its end instead of a legend. A
line differs from the others by colour, marker and dash, so that colour alone carries nothing.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from numdev.report import Axis, Curve, Figure, Point
from numdev.report.document import Chart as Described

WIDTH, HEIGHT = 660, 400
LEFT, RIGHT, TOP, BOTTOM = 78, 168, 14, 82
UNDER = 36  # below the frame, for the axis and its title, without the lines of its labels
LINE = 14  # height of a line of text
LABEL_CHARACTERS = 22
SMALLEST, LARGEST = 1e-150, 1e150  # what is beyond is drawn there
COLOURS, MARKERS = 6, 4
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Range = tuple[float, float]
Scale = Callable[[float], float]
Styles = Mapping[str, tuple[str, int]]


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A point, and the ends of its interval as heights in the drawing; None without one."""

    x: float
    y: float
    low: float | None
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
    one: float | None  # where the baseline is, on a figure of ratios to it
    drawn: tuple[Drawn, ...]
    bars: bool  # whether intervals are bars at points, which have no order, and not bands
    marks: tuple[tuple[float, str], ...]  # upright lines: where, and the words beside each
    height: int
    width: int = WIDTH
    frame: tuple[int, int, int, int] = (LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)


def drawn(of: Described) -> Chart:
    """A chart's geometry. Figures beside it share its range, and a kernel looks the same in all."""
    figure, axis = of.figure, of.axis
    figures = of.beside or (figure,)
    like = (figure.metric, figure.relative)
    alike = [f for f in figures if (f.metric, f.relative) == like]
    points = [p for f in alike for c in f.curves for p in c.points]
    log = any(f.y_scale == "log" for f in alike) and any(p.mean > 0 for p in points)
    limits = _limits(points, log, figure.relative)
    x, y = _x_scale(axis), _scale(limits, (HEIGHT - BOTTOM, TOP), log)
    styles = _styles(figures, of.baseline)
    lines = _labelled(
        [_drawn(c, i, figure, axis, x, y, limits, styles) for i, c in enumerate(figure.curves)]
    )
    ticks = _x_ticks(axis, x)
    y_ticks = _y_ticks(limits, log)
    plain = all(v == 0 or 1e-3 <= abs(v) < 1e4 for v in y_ticks)
    below = LINE * max((len(words) for _, words in ticks), default=1)
    feet = [math.ceil(line.label_y + LINE * len(line.label) / 2) for line in lines]
    if of.styles:
        pairs = zip(lines, of.styles, strict=True)
        lines = [replace(line, style=style, dots=()) for line, style in pairs]
    return Chart(
        figure=figure,
        x_title=axis.title,
        x_ticks=ticks,
        y_ticks=tuple((y(v), _number(v, plain)) for v in y_ticks),
        one=y(1.0) if figure.relative and limits[0] <= 1 <= limits[1] else None,
        drawn=tuple(lines),
        height=max([HEIGHT - BOTTOM + UNDER + below, *feet]),
        bars=axis.scale == "category",
        marks=tuple((x(place), words) for place, words in of.marks),
    )


def _styles(figures: Sequence[Figure], baseline: str) -> Styles:
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


# --- scales and ticks ----------------------------------------------------------------------------


def _limits(points: Sequence[Point], log: bool, relative: bool) -> Range:
    """The range of all that is drawn, with some air; from zero where the scale is linear."""
    ends = [_held(v) for p in points for v in (p.mean, p.low, p.high) if v is not None]
    if relative:
        ends.append(1.0)
    if log:
        means = [_held(p.mean) for p in points if p.mean > 0]
        # An interval that reaches down to zero, or that two seeds make endless, must not stretch
        # the axis until nothing is to be seen.
        ends = [v for v in ends if min(means) / 3 <= v <= 10 * max(means)]
        air = max(1.05, math.exp(0.06 * (math.log(max(ends)) - math.log(min(ends)))))
        return min(ends) / air, max(ends) * air
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
    if log:
        factor = (high / low) ** 0.04
        low, high = low / factor, high * factor
    else:
        air = 0.5 if axis.scale == "category" else 0.04 * (high - low)
        low, high = low - air, high + air
    return _scale((low, high), (LEFT, WIDTH - RIGHT), log)


def _x_ticks(axis: Axis, x: Scale) -> tuple[tuple[float, tuple[str, ...]], ...]:
    """Labels in lines; where they would run into each other, the less important go."""
    if axis.scale == "category":
        fitting = max(6, int((WIDTH - LEFT - RIGHT) / len(axis.ticks) / 6.2))
        return tuple((x(t.x), _wrapped(_broken(t.label, fitting), fitting)) for t in axis.ticks)
    shown: list[tuple[float, tuple[str, ...]]] = []
    taken: list[Range] = []
    ends = (axis.ticks[0], axis.ticks[-1])
    for tick in sorted(axis.ticks, key=lambda t: (not t.below, t not in ends)):
        at, lines = x(tick.x), (tick.label, tick.below) if tick.below else (tick.label,)
        half = 3.6 * max(map(len, lines)) + 2
        if all(at + half < a or at - half > b for a, b in taken):
            taken.append((at - half, at + half))
            shown.append((at, lines))
    return tuple(sorted(shown))


def _broken(label: str, width: int) -> str:
    """`regime(option=1)` with places to break it at, as long a line as there is room for."""
    parts = label.replace("(", " ").removesuffix(")").replace(",", " ").split()
    return " ".join(p if len(p) <= width else p.replace("=", "= ") for p in parts)


def _wrapped(label: str, width: int) -> tuple[str, ...]:
    """In lines; what does not fit into four is in the table below."""
    return tuple(textwrap.wrap(label, width, max_lines=4, placeholder="…", break_on_hyphens=False))


def _y_ticks(limits: Range, log: bool) -> list[float]:
    """Powers of ten and what is round between them; where these are few, and on a linear axis,
    round numbers in equal steps."""
    low, high = limits
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
            ticks = [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high]
            if len(ticks) >= 4:
                break
        if len(ticks) >= 3:
            return ticks[:: 1 + len(decades) // 8]
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    fifth = (high - low) / 5 * (1 - 1e-9)
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= fifth)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [tick for i in range(first, last + 1) if low <= (tick := i * step) <= high]


def _number(value: float, plain: bool) -> str:
    """A tick's label: 10⁻³, 2·10⁻³, or an ordinary number."""
    if value in (0, 1) or plain:
        return f"{value:.6g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    power = f"10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    shown = mantissa.removesuffix(".0")
    return power if shown == "1" else f"{shown}·{power}"


# --- curves --------------------------------------------------------------------------------------


def _drawn(
    curve: Curve, index: int, figure: Figure, axis: Axis, x: Scale, y: Scale, limits: Range,
    styles: Styles,
) -> Drawn:  # fmt: skip
    style, marker = styles[curve.label]
    points = [p for p in curve.points if p.mean > 0 or limits[0] <= 0]
    apart = 0.0
    if axis.scale == "category":  # beside each other, not on top
        slot = (WIDTH - LEFT - RIGHT) / len(axis.ticks)
        step = min(14.0, 0.8 * slot / len(figure.curves))
        apart = (index - (len(figure.curves) - 1) / 2) * step
    places = [x(p.x or 0.0) + apart for p in points]
    if curve.constant:
        points = points[:1] * 2
        places = [float(LEFT), float(WIDTH - RIGHT)] if points else []
    dots = tuple(
        Dot(
            x=round(at, 1),
            y=y(p.mean),
            low=None if p.low is None else y(p.low),
            high=None if p.high is None else y(p.high),
            hollow=p.limited,
            says=f"{curve.label}{f' at {p.label}' if p.label else ''}: {value(p)}",
        )
        for p, at in zip(points, places, strict=True)
    )
    lined = axis.scale != "category" or curve.constant
    end = (dots[-1].x, dots[-1].y) if dots else (float(WIDTH - RIGHT), float(HEIGHT - BOTTOM))
    return Drawn(
        style=style,
        marker=marker,
        path=_path([(d.x, d.y) for d in dots]) if lined else "",
        # What is only there for comparison needs no band: its interval is in the table.
        band=_band(dots) if lined and style not in ("floor", "precision") else "",
        dots=() if curve.constant else dots,
        label=_wrapped(curve.label, LABEL_CHARACTERS),
        label_y=end[1],
        end=end,
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


def _labelled(lines: Sequence[Drawn]) -> list[Drawn]:
    """With the labels moved apart until none covers another, in the order of their lines' ends:
    down from the top, then up from the bottom."""
    order = sorted(range(len(lines)), key=lambda i: lines[i].label_y)
    height = [LINE * max(1, len(line.label)) + 3 for line in lines]
    tops: dict[int, float] = {}
    free = 0.0
    for n, i in enumerate(order):
        top = lines[i].label_y - height[i] / 2
        tops[i] = max(top, free) if n else max(top, 0)
        free = tops[i] + height[i]
    bottom = float(HEIGHT)
    for i in reversed(order):
        bottom = tops[i] = min(tops[i], bottom - height[i])
    return [
        replace(line, label_y=round(tops[i] + height[i] / 2, 1)) for i, line in enumerate(lines)
    ]
