"""A figure as SVG that follows the page's colours, light and dark.

Nothing is measured or averaged here: a figure holds means and intervals. Figures of one
metric have the same range, and a line differs from the others by colour, marker and dash,
so that colour alone carries nothing. A figure by itself is as wide as the page, each
line's name beside its end; on a phone, and where several are panels of one, names stand
in a legend below."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from xml.etree import ElementTree as ET

from markupsafe import Markup

from numdev.grouping import grouped
from numdev.report import Axis, Figure, Point
from numdev.report.document import Figures
from numdev.report.number_text import power, three
from numdev.report.safe_text import plain

LINE = 14  # height of a line of text
MAX_PANEL_NAMES = 6  # named places on the axis of a panel; more need the page's width
SELF_EXPLAINING = ("format", "inputs", "case")  # axes whose values need no name
COLOURS = 6
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z",
    "M-3.7-3.7h7.4v7.4h-7.4Z",
    "M0-5l4.8 8.6h-9.6Z",
    "M0-5.4l5.4 5.4l-5.4 5.4l-5.4-5.4Z",
)

Pair = tuple[float, float]


class DrawingFrame(NamedTuple):
    """The size of a drawing, and where its axes stand in it, in pixels."""

    width: float
    left: float
    right: float
    top: float
    bottom: float
    has_names: bool  # whether a curve's name stands beside its end


WIDE = DrawingFrame(900, 78, 700, 14, 318, has_names=True)
HALF = DrawingFrame(420, 58, 410, 12, 220, has_names=False)
THIRD = DrawingFrame(290, 56, 282, 10, 170, has_names=False)


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
        """Returns the pixel of a value, rounded to a tenth; at the edge for one beyond
        `low` or `high`, and at `start` for one that has no logarithm where the scale is
        logarithmic."""
        at = value if not self.log else math.log10(value) if value > 0 else -math.inf
        share = min(max((at - self.low) / (self.high - self.low), 0.0), 1.0)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Returns where ticks stand, as values: powers of ten, with 2 and 5 between where
        they are few, and only some where they are many; on a linear axis, and where a
        logarithmic one holds fewer than three of these, round numbers in equal steps."""
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
    the range as air at both ends: at least 0.02 on a logarithmic scale, and on another
    0.5 where the values are equal. `pixels`: where it starts and ends; `log`: values are
    positive, and their logarithms are drawn."""
    places = [math.log10(v) if log else v for v in values]
    low, high = min(places), max(places)
    air = max(share * (high - low), 0.02 * log) or 0.5
    return Scale(low - air, high + air, *pixels, log)


def _y_scale(figures: Sequence[Figure], frame: DrawingFrame) -> Scale:
    """Returns the vertical scale of all that is drawn in these figures, at least one:
    logarithmic where one of them asks for it and a mean is above 0, else linear, with
    zero in it. A logarithmic one does not reach to ends of intervals far beyond the
    means."""
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
    return _scale_over(ends, (frame.bottom, frame.top), log, 0.06)


class Legend(NamedTuple):
    """A line of a legend: a curve's label, the number of its look, and the look."""

    label: str
    number: int
    swatch: Markup


class Panels(NamedTuple):
    """Figures as a page shows them together, under one title."""

    title: str
    panels: tuple[tuple[str, Markup], ...]  # each with its title
    columns: int  # of panels on a wide screen
    wide: Markup | None  # of one figure alone: how it is drawn where there is room
    legend: tuple[Legend, ...]


def panels_of(of: Figures) -> Iterator[Panels]:
    """Yields figures in the groups in which they are shown: those of one metric together.
    Three metrics or more with one figure each are one group. On an axis of many names
    each figure stands by itself."""
    groups = list(grouped(of.figures, lambda f: (f.metric, f.relative)).values())
    is_crowded = of.axis.scale == "category" and len(of.axis.ticks) > MAX_PANEL_NAMES
    if is_crowded:
        groups = [[figure] for figure in of.figures]
    elif len(groups) > 2 and all(len(group) == 1 for group in groups):
        groups = [list(of.figures)]
    looks = _styles(of)
    for group in groups:
        labels = dict.fromkeys(c.label for figure in group for c in figure.curves)
        legend = tuple(
            Legend(label, list(looks).index(label), _swatch(*looks[label]))
            for label in labels
        )
        if len(group) == 1:
            narrow = svg(group[0], of, HALF)
            wide = svg(group[0], of)
            yield Panels(group[0].title, ((group[0].title, narrow),), 1, wide, legend)
            continue
        columns = 2 if len(group) in (2, 4) else 3
        frame = HALF if columns == 2 else THIRD
        titles = _panel_titles(group)
        panels = tuple(zip(titles, (svg(f, of, frame) for f in group), strict=True))
        what = group[0].y_title
        title = f"{what[:1].upper()}{what[1:]}, by {of.axis.title}"
        title = title if group[0].place else ""
        yield Panels(title, panels, columns, None, legend)


def _panel_titles(group: Sequence[Figure]) -> list[str]:
    """Returns a title for each figure of a group: its place on the other axes, by name
    and value unless the value says what it is; the whole title of a figure without
    one."""
    return [
        ", ".join(
            value if name in SELF_EXPLAINING else f"{name} {value}"
            for name, value in figure.place.items()
        )
        or figure.title
        for figure in group
    ]


def _swatch(look: str, marker: int) -> Markup:
    """Returns a short piece of a curve as an SVG element: its line and its marker."""
    root = ET.Element("svg", {"viewBox": "0 0 30 12", "class": look})
    root.set("aria-hidden", "true")
    _draw_path(root, "line", [(1, 6), (29, 6)])
    dot = {"class": "dot", "d": MARKERS[marker], "transform": "translate(15 6)"}
    ET.SubElement(root, "path", dot)
    return Markup(ET.tostring(root, encoding="unicode"))


def svg(figure: Figure, of: Figures, frame: DrawingFrame = WIDE) -> Markup:
    """Returns one of these figures as an SVG element of the frame's width, as high as it
    needs, with the vertical scale of all of its metric. A curve that the axis does not
    move is a level line without points. Only where there is room for names do points have
    tooltips: a phone has none. On a logarithmic scale points of 0 or below are left
    out."""
    axis, categories = of.axis, of.axis.scale == "category"
    kind = (figure.metric, figure.relative)
    y = _y_scale([f for f in of.figures if (f.metric, f.relative) == kind], frame)
    air = 0.5 / max(1, len(axis.ticks) - 1) if categories else 0.04
    across = (frame.left, frame.right)
    x = _scale_over((tick.x for tick in axis.ticks), across, axis.scale == "log", air)
    root = ET.Element("svg", {"role": "img", "aria-label": plain(figure.title)})
    below = _draw_axes(root, axis, figure.y_title, x, y, frame)
    if figure.relative and frame.top < y(1.0) < frame.bottom:
        _draw_path(root, "one", [(frame.left, y(1.0)), (frame.right, y(1.0))])
    styles, ends = _styles(of), []
    room = 0.8 * (frame.right - frame.left) / len(axis.ticks)
    step = min(14.0, room / max(1, len(figure.curves)))
    for i, curve in enumerate(figure.curves):
        style, marker = styles[curve.label]
        number = str(list(styles).index(curve.label))
        group = ET.SubElement(root, "g", {"class": style, "data-curve": number})
        drawn = [p for p in curve.points if p.mean > 0 or not y.log]
        # Points of a category stand beside each other.
        shift = (i - (len(figure.curves) - 1) / 2) * step if categories else 0.0
        level = any(p.x is None for p in drawn)
        if level:
            places = [(edge, y(drawn[0].mean)) for edge in across]
        else:
            places = [(x(p.x or 0.0) + shift, y(p.mean)) for p in drawn]
            named = curve.label if frame.has_names else ""
            _draw_points(group, named, drawn, places, y, MARKERS[marker], categories)
        if level or not categories:
            _draw_path(group, "line", places)
        end = places[-1] if places else (frame.right, frame.bottom)
        ends.append((group, end, _wrapped_label(curve.label, 28)))
    if frame.has_names:
        below = max(below, _draw_labels(ends, frame))
    root.set("viewBox", f"0 0 {frame.width:g} {math.ceil(below)}")
    return Markup(ET.tostring(root, encoding="unicode"))


def _styles(of: Figures) -> dict[str, tuple[str, int]]:
    """Returns by label a curve's CSS class and the index of its marker: the baseline, the
    floor and the role `precision` have their own, the other curves one of COLOURS in
    turn."""
    styles: dict[str, tuple[str, int]] = {}
    colours = itertools.count()
    for label, role in {c.label: c.role for f in of.figures for c in f.curves}.items():
        if label == of.baseline or role in ("floor", "precision"):
            styles[label] = (role, 3 if role == "precision" else 0)
        else:
            dashes, marker = divmod(i := next(colours), len(MARKERS))
            styles[label] = (f"c{i % COLOURS}{' dashed' * (dashes % 2)}", marker)
    return styles


def _draw_axes(
    root: ET.Element, axis: Axis, y_title: str, x: Scale, y: Scale, frame: DrawingFrame
) -> float:
    """Draws the frame, its ticks and titles, without overlaps: a tick that has no room is
    left out. Returns where the drawing ends below, in pixels. Where there is no room for
    names, there is none for the title of the upright axis, which the title above has."""
    left, right, bottom = frame.left, frame.right, frame.bottom
    for v in y.ticks():
        _draw_path(root, "grid", [(left, y(v)), (right, y(v))])
        _draw_text(root, power(f"{v:.3g}"), left - 8, y(v) + 4, "tick", "end")
    _draw_path(root, "grid", [(left, bottom), (right, bottom)])
    fitting = max(6, int((right - left) / len(axis.ticks) / 6.2))
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
            _draw_path(root, "grid", [(at, bottom), (at, bottom + 5)])
            for i, words in enumerate(lines):
                lowest = max(lowest, bottom + 18 + LINE * i)
                _draw_text(root, words, at, bottom + 18 + LINE * i, "tick")
    _draw_text(root, axis.title, (left + right) / 2, lowest + 20, "title")
    if frame.has_names:
        title = _draw_text(root, y_title, 0, 0, "title")
        title.set("transform", f"translate(13 {(frame.top + bottom) / 2}) rotate(-90)")
    return lowest + 32


def _wrapped_label(label: str, width: int) -> list[str]:
    """Returns a label in lines of at most `width` characters, at most four; what is cut
    off is shown as `…`. Empty for a label of blanks."""
    return textwrap.wrap(
        label, width, max_lines=4, placeholder="…", break_on_hyphens=False
    )


def _draw_labels(
    ends: Sequence[tuple[ET.Element, Pair, list[str]]], frame: DrawingFrame
) -> float:
    """Draws each curve's name beside its end, moved until none covers another: down from
    the top, then up from the bottom. Returns where the lowest ends, in pixels; 0 without
    curves. `ends`: each curve's group, its end point in pixels and its label in lines."""
    heights = [LINE * len(label) + 3 for _, _, label in ends]
    order = sorted(range(len(ends)), key=lambda i: ends[i][1][1])
    tops, free = [0.0] * len(ends), 0.0
    bottom = max(frame.bottom + 82.0, sum(heights))
    for i in order:
        tops[i] = max(ends[i][1][1] - heights[i] / 2, free)
        free = tops[i] + heights[i]
    for i in reversed(order):
        bottom = tops[i] = min(tops[i], bottom - heights[i])
    for (group, (x, y), label), top, height in zip(ends, tops, heights, strict=True):
        beside = frame.right + 12
        _draw_path(group, "leader", [(x + 5, y), (beside, top + height / 2)])
        for n, words in enumerate(label):
            _draw_text(group, words, beside + 3, top + LINE * (n + 0.9), "name", "start")
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
    """Draws a curve's points, each with its number as a tooltip unless the `label` is
    empty, and their intervals: bars where points have no order (`categories`), else a
    band, if all have one. `places`: pixels of each point; `y` scales the intervals."""
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
        drawn = ET.SubElement(group, "path", dot)
        if not label:
            continue
        ends = (
            f" [{three(point.low)} to {three(point.high)}]"
            if point.low is not None
            else ""
        )
        title = ET.SubElement(drawn, "title")
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
