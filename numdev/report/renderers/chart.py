"""A figure as SVG that follows the page's colours, light and dark.

Nothing is measured or averaged here: a figure holds means and intervals. Figures of one metric have
the same range, each line's name stands beside its end instead of a legend, and a line differs from
the others by colour, marker and dash, so that colour alone carries nothing.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from xml.etree import ElementTree as ET

from markupsafe import Markup

from numdev.report import Axis, Point
from numdev.report.document import Chart
from numdev.report.foreign import plain
from numdev.report.numbers import power

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

Range = tuple[float, float]
Scale = Callable[[float], float]


def svg(chart: Chart) -> Markup:
    """The chart. Figures beside it share its range, and a kernel looks the same in all."""
    figure, axis = chart.figure, chart.axis
    of = (figure.metric, figure.relative)
    alike = [f for f in chart.beside or (figure,) if (f.metric, f.relative) == of]
    points = [p for f in alike for c in f.curves for p in c.points]
    log = any(f.y_scale == "log" for f in alike) and any(p.mean > 0 for p in points)
    limits = _limits(points, log, figure.relative)
    x, y = _x_scale(axis), _scale(limits, (BOTTOM, TOP), log)
    root = ET.Element("svg", {"role": "img", "aria-label": plain(figure.title)})
    below = _axes(root, chart, x, y, _y_ticks(limits, log))
    if figure.relative and limits[0] <= 1 <= limits[1]:  # where the baseline is
        _line(root, "one", (LEFT, y(1.0)), (RIGHT, y(1.0)))
    for i, (at, words) in enumerate(chart.marks):
        _line(root, "one", (x(at), TOP), (x(at), BOTTOM))
        gap, anchor = (-4, "end") if x(at) > (LEFT + RIGHT) / 2 else (4, "start")
        _text(root, words, x(at) + gap, BOTTOM - 6 - LINE * i, "tick", anchor)
    styles, ends = _styles(chart), []
    step = min(14.0, 0.8 * (RIGHT - LEFT) / len(axis.ticks) / max(1, len(figure.curves)))
    for i, curve in enumerate(figure.curves):
        style, marker = styles[curve.label]
        group = ET.SubElement(root, "g", {"class": style})
        drawn = [p for p in curve.points if p.mean > 0 or limits[0] <= 0]
        if curve.constant:
            places = [(edge, y(p.mean)) for edge in (LEFT, RIGHT) for p in drawn]
        else:
            # Points of a category stand beside each other.
            shift = (i - (len(figure.curves) - 1) / 2) * step if axis.scale == "category" else 0.0
            places = [(x(p.x or 0.0) + shift, y(p.mean)) for p in drawn]
            _points(group, curve.label, drawn, places, y, MARKERS[marker], axis.scale)
        if axis.scale != "category" or curve.constant:
            _path(group, "line", places)
        ends.append((group, places[-1] if places else (RIGHT, BOTTOM), _wrapped(curve.label, 22)))
    root.set("viewBox", f"0 0 {WIDTH} {math.ceil(max(below, _labels(ends)))}")
    return Markup(ET.tostring(root, encoding="unicode"))


def value(point: Point) -> str:
    """A mean and its interval in words. What is no mean over seeds has 0 of them."""
    if point.low is None or point.high is None:
        return f"{point.mean:.3g}" + (" (one seed)" if point.seeds else "")
    return f"{point.mean:.3g} [{point.low:.3g} to {point.high:.3g}]"


def _styles(chart: Chart) -> dict[str, tuple[str, int]]:
    """Label to its class and marker: the standard roles their own, kernels a colour each."""
    roles = {c.label: c.role for f in chart.beside or (chart.figure,) for c in f.curves}
    styles: dict[str, tuple[str, int]] = {}
    kernels = itertools.count()
    for label, role in roles.items():
        if label == chart.baseline or role in ("floor", "precision"):
            styles[label] = (role, 3 if role == "precision" else 0)
        else:
            dashes, marker = divmod(i := next(kernels), len(MARKERS))
            styles[label] = (f"c{i % COLOURS}{' dashed' * (dashes % 2)}", marker)
    return styles


# --- scales and axes -----------------------------------------------------------------------------


def _limits(points: Sequence[Point], log: bool, relative: bool) -> Range:
    """The range of all that is drawn, with some air; from zero where the scale is linear."""
    ends = [v for p in points for v in (p.mean, p.low, p.high) if v is not None]
    if relative:
        ends.append(1.0)
    if log:
        means = [p.mean for p in points if p.mean > 0]
        # An interval that reaches down to zero, or that two seeds make endless, must not stretch
        # the axis until nothing is to be seen.
        ends = [v for v in ends if min(means) / 3 <= v <= 10 * max(means)]
        air = max(1.05, math.exp(0.06 * (math.log(max(ends)) - math.log(min(ends)))))
        return min(ends) / air, max(ends) * air
    low, high = min([0.0, *ends]), max([0.0, *ends])
    air = 0.06 * (high - low or 1.0)
    return low - (air if low < 0 else 0.0), high + air


def _scale(limits: Range, pixels: Range, log: bool) -> Scale:
    """Values to pixels; beyond the limits, to the edge."""
    of = (lambda v: math.log(max(v, limits[0]))) if log else (lambda v: v)
    low, high = of(limits[0]), of(limits[1])

    def place(value: float) -> float:
        share = (of(value) - low) / (high - low) if high > low else 0.5
        return round(pixels[0] + min(max(share, 0.0), 1.0) * (pixels[1] - pixels[0]), 1)

    return place


def _x_scale(axis: Axis) -> Scale:
    low, high = min(tick.x for tick in axis.ticks), max(tick.x for tick in axis.ticks)
    if axis.scale == "log":
        factor = (high / low) ** 0.04
        return _scale((low / factor, high * factor), (LEFT, RIGHT), True)
    air = 0.5 if axis.scale == "category" else 0.04 * (high - low)
    return _scale((low - air, high + air), (LEFT, RIGHT), False)


def _axes(root: ET.Element, chart: Chart, x: Scale, y: Scale, y_ticks: Sequence[float]) -> float:
    """The frame, its ticks and titles; returns where the drawing ends below."""
    for v in y_ticks:
        _line(root, "grid", (LEFT, y(v)), (RIGHT, y(v)))
        _text(root, power(f"{v:.3g}"), LEFT - 8, y(v) + 4, "tick", "end")
    _line(root, "grid", (LEFT, BOTTOM), (RIGHT, BOTTOM))
    ticks = _x_ticks(chart.axis, x)
    for at, words in ticks:
        _line(root, "grid", (at, BOTTOM), (at, BOTTOM + 5))
        for i, word in enumerate(words):
            _text(root, word, at, BOTTOM + 18 + 13 * i, "tick")
    below = BOTTOM + 24 + LINE * max((len(words) for _, words in ticks), default=1)
    _text(root, chart.axis.title, (LEFT + RIGHT) / 2, below, "title")
    title = _text(root, chart.figure.y_title, 0, 0, "title")
    title.set("transform", f"translate(13 {(TOP + BOTTOM) / 2}) rotate(-90)")
    return below + 12


def _x_ticks(axis: Axis, x: Scale) -> list[tuple[float, list[str]]]:
    """Labels in lines; where they would run into each other, the less important go."""
    if axis.scale == "category":
        fitting = max(6, int((RIGHT - LEFT) / len(axis.ticks) / 6.2))
        # `regime(option=1)` is broken at its options.
        labels = (t.label.replace("(", " ").removesuffix(")").replace(",", " ") for t in axis.ticks)
        return [(x(t.x), _wrapped(n, fitting)) for t, n in zip(axis.ticks, labels, strict=True)]
    shown: list[tuple[float, list[str]]] = []
    taken: list[Range] = []
    ends = (axis.ticks[0], axis.ticks[-1])
    for tick in sorted(axis.ticks, key=lambda t: (not t.below, t not in ends)):
        at, words = x(tick.x), [tick.label, tick.below] if tick.below else [tick.label]
        half = 3.6 * max(map(len, words)) + 2
        if all(at + half < a or at - half > b for a, b in taken):
            taken.append((at - half, at + half))
            shown.append((at, words))
    return shown


def _y_ticks(limits: Range, log: bool) -> list[float]:
    """Powers of ten, with 2 and 5 between where they are few; on a linear axis, and where a
    logarithmic one holds fewer than three of these, round numbers in equal steps."""
    low, high = limits
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1, 2, 5) if len(decades) < 6 else (1,)
        ticks = [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high]
        if len(ticks) >= 3:
            return ticks[:: 1 + len(decades) // 8]
    fifth = (high - low) / 5 * (1 - 1e-9)
    power = 10.0 ** math.floor(math.log10(fifth))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= fifth)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


# --- elements ------------------------------------------------------------------------------------


def _wrapped(label: str, width: int) -> list[str]:
    return textwrap.wrap(label, width, max_lines=4, placeholder="…", break_on_hyphens=False)


def _labels(ends: Sequence[tuple[ET.Element, Range, list[str]]]) -> float:
    """Each curve's name beside its end, moved until none covers another: down from the top, then
    up from the bottom. Returns where the lowest ends."""
    heights = [LINE * len(label) + 3 for _, _, label in ends]
    tops = [0.0] * len(ends)
    order = sorted(range(len(ends)), key=lambda i: ends[i][1][1])
    free, bottom = 0.0, max(BOTTOM + 82.0, sum(heights))
    for i in order:
        tops[i] = max(ends[i][1][1] - heights[i] / 2, free)
        free = tops[i] + heights[i]
    for i in reversed(order):
        bottom = tops[i] = min(tops[i], bottom - heights[i])
    for (group, (x, y), label), top, height in zip(ends, tops, heights, strict=True):
        middle = top + height / 2
        _line(group, "leader", (x + 5, y), (RIGHT + 12, middle))
        for n, words in enumerate(label):
            at = middle + 4 + LINE * (n - (len(label) - 1) / 2)
            _text(group, words, RIGHT + 15, at, "name", "start")
    return max(map(sum, zip(tops, heights, strict=True)), default=0.0)


def _points(
    group: ET.Element, label: str, points: Sequence[Point], places: Sequence[Range], y: Scale,
    marker: str, scale: str,
) -> None:  # fmt: skip
    """A curve's points, each telling its number, and their intervals: bars where points have no
    order, else a band, if all have one."""
    ends = [(p.low, p.high, x) for p, (x, _) in zip(points, places, strict=True)]
    known = [(x, y(low), y(high)) for low, high, x in ends if low is not None and high is not None]
    if scale == "category":
        for x, low, high in known:
            _line(group, "bar", (x, low), (x, high))
    elif len(known) == len(points) > 1:
        upper, lower = [(x, high) for x, _, high in known], [(x, low) for x, low, _ in known]
        _path(group, "band", [*upper, *reversed(lower)])
    for point, (x, height) in zip(points, places, strict=True):
        dot = {"class": "hollow" if point.limited else "dot", "d": marker,
               "transform": f"translate({x:g} {height:g})"}  # fmt: skip
        where = f" at {point.label}" if point.label else ""
        title = ET.SubElement(ET.SubElement(group, "path", dot), "title")
        title.text = plain(f"{label}{where}: {value(point)}")


def _path(parent: ET.Element, kind: str, places: Sequence[Range]) -> None:
    if places:
        d = "M" + "L".join(f"{x:g} {y:g}" for x, y in places) + ("Z" if kind == "band" else "")
        ET.SubElement(parent, "path", {"class": kind, "d": d})


def _line(parent: ET.Element, kind: str, start: Range, end: Range) -> None:
    ends = {"x1": start[0], "y1": start[1], "x2": end[0], "y2": end[1]}
    ET.SubElement(parent, "line", {"class": kind} | {k: f"{v:g}" for k, v in ends.items()})


def _text(
    parent: ET.Element, words: str, x: float, y: float, kind: str, anchor: str = "middle"
) -> ET.Element:
    at = {"class": kind, "x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor}
    element = ET.SubElement(parent, "text", at)
    element.text = plain(words)
    return element
