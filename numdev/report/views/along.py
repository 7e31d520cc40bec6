"""How a kernel errs along a generation's phases, a diffusion pipeline's steps, and the rows of its
calls: tables and figures.

The axis of positions goes from bin to bin: these double in width at first, so that it is like a
logarithmic one there, and even further on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numdev.report import Axis, Curve, Figure, PartSummary, Point, ProfileSummary, Role, Tick
from numdev.report import document as doc
from numdev.report.numbers import ratio

DEFAULT = "sdpa-default"
KINDS = {
    "self": "self attention",
    "cross": "cross attention",
    "joint": "joint attention",
    None: "attention",
}
FEWEST = 2  # places that a line needs
LITTLE = 0.1
"""The first row is left out where it errs less than this share of the next: it sees one key, there
is hardly anything to round, and the axes would stretch until nothing else is to be seen."""
OF_PARTS = (
    "×floor: median head; worst: the worst head. ×pred: over what the roundings it claims to make "
    "predict, worst head."
)
OF_POSITIONS = (
    "Root mean square over the rows of a bin, heads and sequences together, of a row's error over "
    "the size of its terms; the first bins hold 1, 1, 2, 4, 8 rows and so on, the rest are even. "
    "Where the first row errs less than a tenth of the next it is not drawn: under a causal mask "
    "it sees one key, and its exact result is a row of V. Lines are medians over calls (a model's "
    "layers), bands go from the least to the largest."
)
Kernel = tuple[str, Role]


def repeats(kernel: str, own: object, every: Sequence[object]) -> bool:
    """Whether this is PyTorch's default choice, and another line has its every number."""
    return kernel == DEFAULT and every.count(own) > 1


# --- phases and steps ----------------------------------------------------------------------------


def parts(parts: Sequence[PartSummary]) -> Iterator[doc.Node]:
    """For each format a table of the phases, or one of the steps for each kind of attention."""
    steps = sorted({p.step for p in parts if p.step is not None})
    for fmt, kind in dict.fromkeys((p.format, p.attends) for p in parts):
        kernels: dict[Kernel, list[PartSummary]] = {}
        for p in parts:
            if (p.format, p.attends) == (fmt, kind):
                kernels.setdefault((doc.labelled(p.kernel, p.options), p.role), []).append(p)
        phases = [n for n in ("prefill", "decode") if any(p.phase == n for p in parts)]
        if phases:
            names = [f"{phase} {name}" for phase in phases for name in ("×floor", "worst", "×pred")]
            rows = {k: [c for n in phases for c in _phase(own, n)] for k, own in kernels.items()}
            yield _table(names, rows, title=f"{fmt}: prefill beside decode", kind="words")
        if steps:
            at = {k: {p.step: p.floor_ratio for p in own} for k, own in kernels.items()}
            rows = {k: [doc.floors(own.get(step)) for step in steps] for k, own in at.items()}
            name = f"{fmt}, {KINDS[kind]}: ×floor by denoising step"
            yield _table(list(map(str, steps)), rows, title=name, kind="series")
    if parts:
        yield doc.Paragraph(OF_PARTS, "soft", doc.PAGE)


def _phase(own: Sequence[PartSummary], phase: str) -> tuple[doc.Cell, ...]:
    p = next((p for p in own if p.phase == phase), None)
    return (
        doc.floors(p.floor_ratio if p else None),
        doc.floors(p.floor_ratio_worst if p else None),
        doc.Cell(ratio(p.expected_ratio_worst if p else None)),
    )


def _table(
    names: Sequence[str], rows: dict[Kernel, list[doc.Cell]], title: str, kind: str
) -> doc.Table:
    """A row for each kernel, without PyTorch's default choice where another has its numbers."""
    shown = {k: own for k, own in rows.items() if not repeats(k[0], own, list(rows.values()))}
    return doc.table(
        ["kernel", *names],
        [(label, *own) for (label, _), own in shown.items()],
        [role != "kernel" for _, role in shown],
        title=title,
        kind=kind,
    )


# --- positions -----------------------------------------------------------------------------------


def positions(profiles: Sequence[ProfileSummary]) -> Iterator[doc.Node]:
    """The profiles as figures, those of gradients folded."""
    out = figures([p for p in profiles if p.tensor == "out"])
    gradients = figures([p for p in profiles if p.tensor != "out"])
    if out or gradients:
        yield doc.Heading("Error against position", doc.TEXT)
        yield doc.Figures(out, doc.TEXT)
        yield doc.Figures(gradients, ("markdown",))
        if gradients:
            yield doc.Fold("Gradients", (doc.Figures(gradients),))
        yield doc.Paragraph(OF_POSITIONS, "soft", doc.PAGE)


def figures(profiles: Sequence[ProfileSummary]) -> tuple[doc.Chart, ...]:
    """For each format, tensor and length of call: the errors, beside those of the floor and the
    baseline; and where something is predicted, the errors over that."""
    groups: dict[tuple[object, ...], list[ProfileSummary]] = {}
    for p in profiles:
        groups.setdefault((p.format, p.attends, p.tensor, p.length), []).append(p)
    return tuple(chart for own in groups.values() for chart in _of_length(own))


def _of_length(own: Sequence[ProfileSummary]) -> Iterator[doc.Chart]:
    first, what = own[0], _what(own[0])
    kind = f" {KINDS[first.attends]}," if first.attends else ""
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
        drawn = [(p, _points(p, relative)) for p in own if p.role == "kernel" or not relative]
        every = [points for _, points in drawn]
        figure = Figure(
            title=f"{first.format},{kind} {first.tensor} ({first.length} {what}s): {title}",
            metric="expected_ratio" if relative else "row_rel",
            relative=relative,
            y_title=y_title,
            y_scale="log",
            curves=tuple(
                Curve(label=doc.labelled(p.kernel, p.options), role=p.role, points=points)
                for p, points in drawn
                if points and not repeats(p.kernel, points, every)
            ),
        )
        if any(len(curve.points) >= FEWEST for curve in figure.curves):
            yield doc.Chart(figure, axis, (figure,))


def _points(p: ProfileSummary, relative: bool) -> tuple[Point, ...]:
    ratios = (p.ratios, p.ratio_lows, p.ratio_highs)
    values, lows, highs = ratios if relative else (p.errors, p.lows, p.highs)
    following = next((x for x in p.errors[1:] if x is not None), None)
    little = None not in (p.errors[0], following) and p.errors[0] < LITTLE * following  # type: ignore[operator]
    points = []
    for i, value in enumerate(values):
        if value is not None and not (little and i == 0):
            low, high = (lows[i], highs[i]) if p.calls > 1 else (None, None)
            where = f"{_what(p)}s {p.starts[i]} to {p.ends[i]}"
            points.append(Point(x=float(i), label=where, mean=value, low=low, high=high))
    return tuple(points)


def _what(p: ProfileSummary) -> str:
    return "key" if p.tensor in ("dk", "dv") else "row"
