"""How kernels err along their calls, as figures: the error by position, and over what is predicted.

All numbers are the summary's (`report.ProfileSummary`). The axis goes from bin to bin: these double
in width at first, so that it is like a logarithmic one there, and even further on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from numdev.report import Axis, Curve, Figure, Point, ProfileSummary, Tick
from numdev.report.renderers import chart
from numdev.report.renderers.parts import DEFAULT, KINDS

FEWEST = 2
"""Places that a line needs."""
LITTLE = 0.1
"""The first row is left out where it errs less than this share of the next: it sees one key, there
is hardly anything to round, and the axes would stretch until nothing else is to be seen."""


@dataclass(frozen=True, kw_only=True)
class Along:
    """One figure, with the axis it runs along."""

    figure: Figure
    axis: Axis
    calls: int
    """Of how many its numbers are medians, at most."""


def figures(profiles: Sequence[ProfileSummary]) -> tuple[Along, ...]:
    """For each format, tensor and length of call: the errors, beside those of the floor and the
    baseline; and where something is predicted, the errors over that."""
    groups: dict[tuple[object, ...], list[ProfileSummary]] = {}
    for p in profiles:
        groups.setdefault((p.format, p.attends, p.tensor, p.length), []).append(p)
    lengths = {(*key[:3],): {k[3] for k in groups if k[:3] == key[:3]} for key in groups}
    return tuple(
        found for key, own in groups.items() for found in _of(own, len(lengths[key[:3]]) > 1)
    )


def charts(profiles: Sequence[ProfileSummary]) -> list[tuple[chart.Chart, int]]:
    """Every figure as a drawing, and of how many calls it is."""
    return [
        (drawn, along.calls)
        for along in figures(profiles)
        for drawn in chart.charts([along.figure], along.axis, "baseline")
    ]


def _of(own: Sequence[ProfileSummary], several: bool) -> Iterator[Along]:
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
            metric="row_rel" if not relative else "expected_ratio",
            relative=relative,
            y_title=y_title,
            y_scale="log",
            curves=_curves(own, relative),
        )
        if any(len(curve.points) >= FEWEST for curve in figure.curves):
            yield Along(figure=figure, axis=_axis(first), calls=calls)


def _axis(p: ProfileSummary) -> Axis:
    ticks = tuple(Tick(x=float(i), label=str(start)) for i, start in enumerate(p.starts))
    title = "first key of the bin" if _what(p) == "key" else "first query row of the bin"
    return Axis(name="position", title=title, scale="linear", ticks=ticks)


def _curves(own: Sequence[ProfileSummary], relative: bool) -> tuple[Curve, ...]:
    """Without PyTorch's default choice where another line has its every number."""
    drawn = [(p, _points(p, relative)) for p in own if p.role == "kernel" or not relative]
    return tuple(
        Curve(label=_label(p), role=p.role, kernel=p.kernel, options=p.options, points=points)
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


def _label(p: ProfileSummary) -> str:
    options = ",".join(f"{k}={v}" for k, v in p.options.items() if v is not None)
    return p.kernel + (f"[{options}]" if options else "")
