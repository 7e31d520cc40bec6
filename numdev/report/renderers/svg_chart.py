"""A figure as SVG that follows the page's colours, light and dark.

Nothing is measured or averaged here: a figure holds means and intervals. Figures of one
metric have the same range, each line's name stands beside its end instead of a legend,
and a line differs from the others by colour, marker and dash, so that colour alone
carries nothing."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from markupsafe import Markup

from numdev.report import Axis, Figure, Point
from numdev.report.document import Figures
from numdev.report.number_text import power, three
from numdev.report.safe_text import plain

WIDTH = 660
LEFT, RIGHT, TOP, BOTTOM = 78.0, 492.0, 14.0, 318.0  # the drawing's width, and its frame
LINE = 14  # height of a line of text
COLOURS = 6
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z",
    "M-3.7-3.7h7.4v7.4h-7.4Z",
    "M0-5l4.8 8.6h-9.6Z",
    "M0-5.4l5.4 5.4l-5.4 5.4l-5.4-5.4Z",
)

Pair = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """Values to pixels, from `start` to `end`; beyond `low` and `high`, to the edge. Both
    are logarithms where the scale is logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        at = value if not self.log else math.log10(value) if value > 0 else -math.inf
        share = min(max((at - self.low) / (self.high - self.low), 0.0), 1.0)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Returns where ticks stand, as values: powers of ten, with 2 and 5 between where
        they are few; on a linear axis, and where a logarithmic one holds fewer than three
        of these, round numbers in equal steps."""
        low, high = (10**self.low, 10**self.high) if self.log else (self.low, self.high)
        if self.log:
            decades = range(math.floor(self.low), math.ceil(self.high) + 1)
            steps = (1, 2, 5) if len(decades) < 6 else (1,)
            every = (step * 10.0**decade for decade in decades for step in steps)
            ticks = [tick for tick in every if low <= tick <= high]
            if len(ticks) >= 3:
                return ticks[:: 1 + len(decades) // 8]
        fifth = (high - low) / 5 * (1 - 1e-9)
        power = 10.0 ** math.floor(math.log10(fifth))
        step = next(s * power for s in (1, 2, 5, 10) if s * power >= fifth)
        return [
            i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)
        ]


def _scale_over(values: Iterable[float], pixels: Pair, log: bool, share: float) -> Scale:
    """Returns a scale from the least value to the largest, at least one, with `share` of
    the range as air at both ends. `pixels`: where it starts and ends; `log`: values are
    positive, and their logarithms are drawn."""
    places = [math.log10(v) if log else v for v in values]
    low, high = min(places), max(places)
    air = max(share * (high - low), 0.02 * log) or 0.5
    return Scale(low - air, high + air, *pixels, log)


def _y_scale(figures: Sequence[Figure]) -> Scale:
    """Returns the vertical scale of all that is drawn in these figures; with zero in it
    where the scale is linear."""
    points = [p for f in figures for c in f.curves for p in c.points]
    numbers = itertools.chain.from_iterable((p.mean, p.low, p.high) for p in points)
    ends = [number for number in numbers if number is not None]
    ends += [1.0] if figures[0].relative else []
    means = [p.mean for p in points if p.mean > 0]
    log = any(f.y_scale == "log" for f in figures) and bool(means)
    if log:
        # An interval that reaches down to zero, or that two seeds make endless, must not
        # stretch the axis until nothing is to be seen.
        ends = [v for v in ends if min(means) / 3 <= v <= 10 * max(means)]
    else:
        ends += [0.0] if any(ends) else [0.0, 1.0]
    return _scale_over(ends, (BOTTOM, TOP), log, 0.06)


def svg(figure: Figure, of: Figures) -> Markup:
    """Returns one of these figures as an SVG element."""
    axis, categories = of.axis, of.axis.scale == "category"
    kind = (figure.metric, figure.relative)
    y = _y_scale([f for f in of.figures if (f.metric, f.relative) == kind])
    air = 0.5 / max(1, len(axis.ticks) - 1) if categories else 0.04
    x = _scale_over(
        (tick.x for tick in axis.ticks), (LEFT, RIGHT), axis.scale == "log", air
    )
    root = ET.Element("svg", {"role": "img", "aria-label": plain(figure.title)})
    below = _draw_axes(root, axis, figure.y_title, x, y)
    if figure.relative and TOP < y(1.0) < BOTTOM:
        _draw_path(root, "one", [(LEFT, y(1.0)), (RIGHT, y(1.0))])
    styles, ends = _styles(of), []
    step = min(14.0, 0.8 * (RIGHT - LEFT) / len(axis.ticks) / max(1, len(figure.curves)))
    for i, curve in enumerate(figure.curves):
        style, marker = styles[curve.label]
        group = ET.SubElement(root, "g", {"class": style})
        drawn = [p for p in curve.points if p.mean > 0 or not y.log]
        # Points of a category stand beside each other.
        shift = (i - (len(figure.curves) - 1) / 2) * step if categories else 0.0
        level = any(p.x is None for p in drawn)
        if level:
            places = [(edge, y(drawn[0].mean)) for edge in (LEFT, RIGHT)]
        else:
            places = [(x(p.x or 0.0) + shift, y(p.mean)) for p in drawn]
            _draw_points(
                group, curve.label, drawn, places, y, MARKERS[marker], categories
            )
        if level or not categories:
            _draw_path(group, "line", places)
        ends.append(
            (
                group,
                places[-1] if places else (RIGHT, BOTTOM),
                _wrapped_label(curve.label, 22),
            )
        )
    root.set("viewBox", f"0 0 {WIDTH} {math.ceil(max(below, _draw_labels(ends)))}")
    return Markup(ET.tostring(root, encoding="unicode"))


def _styles(of: Figures) -> dict[str, tuple[str, int]]:
    """Returns by label a curve's CSS class and the index of its marker: the standard
    roles have their own, kernels a colour each."""
    styles: dict[str, tuple[str, int]] = {}
    colours = itertools.count()
    for label, role in {c.label: c.role for f in of.figures for c in f.curves}.items():
        if label == of.baseline or role in ("floor", "precision"):
            styles[label] = (role, 3 if role == "precision" else 0)
        else:
            dashes, marker = divmod(i := next(colours), len(MARKERS))
            styles[label] = (f"c{i % COLOURS}{' dashed' * (dashes % 2)}", marker)
    return styles


def _draw_axes(root: ET.Element, axis: Axis, y_title: str, x: Scale, y: Scale) -> float:
    """Draws the frame, its ticks and titles, without overlaps; returns where the drawing
    ends below, in pixels."""
    for v in y.ticks():
        _draw_path(root, "grid", [(LEFT, y(v)), (RIGHT, y(v))])
        _draw_text(root, power(f"{v:.3g}"), LEFT - 8, y(v) + 4, "tick", "end")
    _draw_path(root, "grid", [(LEFT, BOTTOM), (RIGHT, BOTTOM)])
    fitting = max(6, int((RIGHT - LEFT) / len(axis.ticks) / 6.2))
    free, lowest = -math.inf, 0.0
    for tick in axis.ticks:
        # `regime(option=1)` is broken at its options.
        label = tick.label.replace("(", " ").removesuffix(")").replace(",", " ")
        lines = (
            _wrapped_label(label, fitting) if axis.scale == "category" else [tick.label]
        )
        at, half = x(tick.x), 3.4 * max(map(len, lines), default=0)
        if at - half >= free:
            free = at + half + 4
            _draw_path(root, "grid", [(at, BOTTOM), (at, BOTTOM + 5)])
            for i, words in enumerate(lines):
                lowest = max(lowest, BOTTOM + 18 + LINE * i)
                _draw_text(root, words, at, BOTTOM + 18 + LINE * i, "tick")
    _draw_text(root, axis.title, (LEFT + RIGHT) / 2, lowest + 20, "title")
    title = _draw_text(root, y_title, 0, 0, "title")
    title.set("transform", f"translate(13 {(TOP + BOTTOM) / 2}) rotate(-90)")
    return lowest + 32


def _wrapped_label(label: str, width: int) -> list[str]:
    """Returns a label in lines of at most `width` characters, at most four."""
    return textwrap.wrap(
        label, width, max_lines=4, placeholder="…", break_on_hyphens=False
    )


def _draw_labels(ends: Sequence[tuple[ET.Element, Pair, list[str]]]) -> float:
    """Draws each curve's name beside its end, moved until none covers another: down from
    the top, then up from the bottom. Returns where the lowest ends, in pixels; 0 without
    curves. `ends`: each curve's group, end point and label in lines."""
    heights = [LINE * len(label) + 3 for _, _, label in ends]
    order = sorted(range(len(ends)), key=lambda i: ends[i][1][1])
    tops, free, bottom = [0.0] * len(ends), 0.0, max(BOTTOM + 82.0, sum(heights))
    for i in order:
        tops[i] = max(ends[i][1][1] - heights[i] / 2, free)
        free = tops[i] + heights[i]
    for i in reversed(order):
        bottom = tops[i] = min(tops[i], bottom - heights[i])
    for (group, (x, y), label), top, height in zip(ends, tops, heights, strict=True):
        _draw_path(group, "leader", [(x + 5, y), (RIGHT + 12, top + height / 2)])
        for n, words in enumerate(label):
            _draw_text(group, words, RIGHT + 15, top + LINE * (n + 0.9), "name", "start")
    return max(map(sum, zip(tops, heights, strict=True)), default=0.0)


def _draw_points(
    group: ET.Element,
    label: str,
    points: Sequence[Point],
    places: Sequence[Pair],
    y: Scale,
    marker: str,
    categories: bool,
) -> None:
    """Draws a curve's points, each with its number as a tooltip, and their intervals:
    bars where points have no order (`categories`), else a band, if all have one.
    `places`: pixels of each point; `y` scales the intervals."""
    intervals = [
        (x, y(point.low), y(point.high))
        for point, (x, _) in zip(points, places, strict=True)
        if point.low is not None and point.high is not None
    ]
    for x, low, high in intervals if categories else ():
        _draw_path(group, "bar", [(x, low), (x, high)])
    if not categories and len(intervals) == len(points) > 1:
        upper, lower = (
            [(x, high) for x, _, high in intervals],
            [(x, low) for x, low, _ in intervals],
        )
        _draw_path(group, "band", [*upper, *reversed(lower)])
    for point, (x, height) in zip(points, places, strict=True):
        dot = {"class": "hollow" if point.limited else "dot", "d": marker,
               "transform": f"translate({x:g} {height:g})"}  # fmt: skip
        title = ET.SubElement(ET.SubElement(group, "path", dot), "title")
        ends = (
            f" [{three(point.low)} to {three(point.high)}]"
            if point.low is not None
            else ""
        )
        title.text = plain(f"{label} at {point.label}: {three(point.mean)}{ends}")


def _draw_path(parent: ET.Element, kind: str, places: Sequence[Pair]) -> None:
    """Draws a line through the places, of the CSS class `kind`; nothing without
    places."""
    if places:
        d = "M" + "L".join(f"{x:g} {y:g}" for x, y in places)
        ET.SubElement(parent, "path", {"class": kind, "d": d})


def _draw_text(
    parent: ET.Element, words: str, x: float, y: float, kind: str, anchor: str = "middle"
) -> ET.Element:
    """Draws text at a place in pixels and returns its element. `kind`: its CSS class;
    `anchor`: which end of the text stands there."""
    at = {"class": kind, "x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor}
    element = ET.SubElement(parent, "text", at)
    element.text = plain(words)
    return element
