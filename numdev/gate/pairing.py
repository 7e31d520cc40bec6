"""Rows of two audits that are about the same: how they find each other, and whether they measured
the same inputs.

The floor's rows tell of the inputs: the exact result rounded once depends on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from numdev.gate.comparable import options_of, spelt
from numdev.gate.compare_report import Inputs
from numdev.report import CaseRecord, DeviationRow

NEARLY = 1e-4
"""By how much the numbers of two floors may differ, each of them, for nearly the same inputs: drawn
anew they differ by some 1 / sqrt(elements), and all at once by so little never."""
FLOOR = ("rms", "mean_abs", "max_abs", "rel")
IDENTITY = frozenset({"source", "seed", "options", "ran", "bits"})
"""Fields that rows may differ in though all their numbers are equal."""
Key = tuple[Any, ...]


_CALL = attrgetter("case", "module", "layer", "call", "phase")
_SEEDED = attrgetter("case", "module", "layer", "call", "phase", "seed")


class Names:
    """What rows are called in both reports, so that they find each other.

    A kernel's options are part of its name where it ran with several sets of them; else they may
    have changed. So with the seed.
    """

    def __init__(self, a: Sequence[DeviationRow], b: Sequence[DeviationRow]) -> None:
        sets = [options_of(rows) for rows in (a, b)]
        self._several = {k for found in sets for k, v in found.items() if len(v) > 1}
        self._seeds = any(len({row.seed for row in rows}) > 1 for rows in (a, b))

    def kernel(self, row: DeviationRow) -> Key:
        several = self._several and (row.role, row.kernel) in self._several
        return (row.role, row.kernel, spelt(row.options) if several else "", row.format)

    def call(self, row: DeviationRow) -> Key:
        call: Key = _SEEDED(row) if self._seeds else _CALL(row)
        return call

    def row(self, row: DeviationRow) -> Key:
        return (self.kernel(row), self.call(row), row.tensor, row.head)


def widths(cases: Sequence[CaseRecord]) -> dict[tuple[str, str], int]:
    """Elements in a row of each tensor of each case."""
    wide = {"out": "v_dim", "dv": "v_dim", "dq": "head_dim", "dk": "head_dim"}
    return {(c.case, tensor): getattr(c, name) for c in cases for tensor, name in wide.items()}


class Told:
    """Whether two rows were measured on the same inputs, by the floors of their calls."""

    def __init__(
        self,
        a: dict[Key, DeviationRow],
        b: dict[Key, DeviationRow],
        names: Names,
    ) -> None:
        self._names = names
        self._floors = [
            {self._place(row): row for row in rows.values() if row.role == "floor"}
            for rows in (a, b)
        ]
        self._known: dict[Key, Inputs] = {}

    def _place(self, row: DeviationRow, tensor: str | None = None) -> Key:
        return (row.format, *self._names.call(row), tensor or row.tensor, row.head)

    def of(self, row: DeviationRow) -> Inputs:
        place = self._place(row, "out" if row.tensor == "lse" else None)
        if place not in self._known:
            a, b = (floors.get(place) for floors in self._floors)
            self._known[place] = _alike(a, b) if a and b else "unknown"
        return self._known[place]


def _alike(a: DeviationRow, b: DeviationRow) -> Inputs:
    if (a.bits is not None and a.bits == b.bits) or (None in (a.bits, b.bits) and equal(a, b)):
        return "same"
    close = all(_close(getattr(a, name), getattr(b, name)) for name in FLOOR)
    return "nearly the same" if close and a.elements == b.elements else "other"


def _close(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=NEARLY))


def equal(a: DeviationRow, b: DeviationRow) -> bool:
    """Whether two rows are equal in every number, and every reason for not having one."""
    if a.rms != b.rms or a.expected_ratio != b.expected_ratio:  # mostly enough
        return False
    return bool(_NUMBERS(a) == _NUMBERS(b))


_NUMBERS = attrgetter(*(name for name in DeviationRow.model_fields if name not in IDENTITY))
