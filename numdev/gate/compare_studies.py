"""What comparisons of studies share: rows that both reports have, and what one alone
has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from numdev.gate.compare_report import Presence
from numdev.report import Place

NOWHERE: dict[str, Any] = {**dict.fromkeys(Place.model_fields), "module": "", "call": 0}


def lost_numbers(a: object, b: object, names: Sequence[str]) -> list[str]:
    """Returns the names of numbers that row A has and row B lacks."""
    return [
        name
        for name in names
        if getattr(a, name) is not None and getattr(b, name) is None
    ]


def measured_pairs(
    names: Any, old: Iterable[Any], new: Iterable[Any]
) -> list[tuple[Any, Any]]:
    """Returns the rows, of A and of B, that were measured in both."""
    before = {names.row(row): row for row in old if row.status == "ok"}
    after = {names.row(row): row for row in new if row.status == "ok"}
    return [(before[key], row) for key, row in after.items() if key in before]


def both_numbers(
    rows: Iterable[tuple[object, object]], metric: str
) -> list[tuple[float, float]]:
    """Returns a metric of A and of B for each pair of rows in which both have it."""
    values = ((getattr(a, metric), getattr(b, metric)) for a, b in rows)
    return [(a, b) for a, b in values if a is not None and b is not None]


def of_model(fmt: str, kernel: str = "model") -> dict[str, Any]:
    """Returns the fields of a record that name the model, or a kernel in it."""
    return {"role": "kernel", "kernel": kernel, "options": {}, "format": fmt}


def nowhere(name: str) -> Place:
    """Returns the place of something that belongs to no call."""
    return Place(**{**NOWHERE, "case": name})


def in_one_alone(
    of: dict[str, Any], place: Place, gone: bool, tensor: str, why: str, *lacks: str
) -> Presence:
    """Returns the record of a row or number that is gone from B, or new in it."""
    what: Literal["gone", "new"] = "gone" if gone else "new"
    why = why or "no number"
    of = {**of, "tensors": (tensor,), "place": place}
    return Presence(**of, what=what, rows=1, why=why, lacks=lacks)
