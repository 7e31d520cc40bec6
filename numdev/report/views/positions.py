"""Where in their calls the rows stand that err most, as figures.

The rows of different calls and tensors are of different counts, so a row's place is its share of
the way. A ratio to what is predicted and a ratio to the size of the terms are not drawn together.
"""

from __future__ import annotations

from collections.abc import Sequence

from numdev.report import Axis, Curve, Figure, Point, Tick, WorstRow

AXIS = Axis(
    name="position",
    title="position of the row in its call",
    scale="linear",
    ticks=tuple(Tick(x=float(share), label=f"{share} %") for share in (0, 25, 50, 75, 100)),
)
TITLES = {
    True: ("Error over what is predicted, by position", "error, times predicted"),
    False: ("Error over the size of its terms, by position", "error over its terms"),
}


def figures(rows: Sequence[WorstRow]) -> tuple[Figure, ...]:
    """None where no row has a ratio: what is not finite has none."""
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
