"""Rows of a report in groups, and what stands beside a row: the same cell of another kernel, the
regime of its case. Rows alone; nothing is measured here.

A cell is where a row was measured: case, module, layer, call, seed, phase, head, format and tensor.
A kernel has one row in it for each set of options.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, get_args

from numdev.gate.comparable import Measured, spelt
from numdev.gate.rules import Judgeable, Kernel, Limit, Over, Selector, Value, value_of, whose
from numdev.report import DeviationRow

GRADIENTS = ("dq", "dk", "dv")
Key = tuple[Any, ...]
Groups = dict[Any, list[DeviationRow]]
cell_of = attrgetter("case", "module", "layer", "call", "seed", "phase", "head", "format", "tensor")


def grouped(rows: Iterable[DeviationRow], key: Callable[[DeviationRow], Any]) -> Groups:
    """Rows of equal keys, in the order they first came."""
    groups: Groups = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def by_tensor(rows: Iterable[DeviationRow]) -> Groups:
    """Rows by role, kernel, options, format and tensor."""
    return grouped(rows, lambda r: (r.role, r.kernel, spelt(r.options), r.format, r.tensor))


def measured(groups: Groups, roles: Container[str]) -> Groups:
    """Of rows by tensor those of these roles that there is something to judge in.

    There is nothing in a head without a row that sees a key, or that overflows as it should: no
    element is left, and none is missing; unless there are more rows than those that were looked at.
    """
    return {
        key: some
        for key, rows in groups.items()
        if key[0] in roles
        and (some := [row for row in rows if row.status == "ok" and something(row)])
    }


def something(row: DeviationRow) -> bool:
    """Whether there is anything to judge in a measured row."""
    return bool(row.elements != 0 or row.nonfinite or row.sampled)


@dataclass(frozen=True, kw_only=True, eq=False)
class Around:
    """What is known of a report besides the row at hand. Indices are made when they are asked."""

    rows: Sequence[DeviationRow] = ()
    regimes: Mapping[str, str] = field(default_factory=dict)
    """Of drawn inputs, by the name of the case."""
    old: Sequence[DeviationRow] | None = None
    """The rows of the older report, where one was given."""

    @classmethod
    def of(cls, report: Measured, old: Measured | None = None) -> Around:
        drawn = _regimes(report) | ({} if old is None else _regimes(old))
        return cls(rows=report.rows, regimes=drawn, old=None if old is None else old.rows)

    @cached_property
    def groups(self) -> Groups:
        """Its rows by tensor."""
        return by_tensor(self.rows)

    @cached_property
    def old_groups(self) -> Groups:
        """Those of the older report."""
        return by_tensor(self.old or ())

    def older(self, where: Selector) -> Groups:
        """What a selector chooses of the older report, by the keys of `measured`."""
        groups = self._older.items()
        return {key: rows for key, g in groups if (rows := where.of(g, self.regimes))}

    @cached_property
    def _older(self) -> Groups:
        return measured(self.old_groups, get_args(Judgeable))

    def read(self, row: DeviationRow, limit: Limit) -> tuple[Value, str | None, bool]:
        """The number of a row that a limit is for, divided by what it says. Where it is None, why,
        and whether that means nothing and says so, unlike one that was not measured."""
        value, why = value_of(row, limit.metric)
        if value is None:
            return None, why or NOT_MEASURED, why is not None
        if limit.over is None or limit.over == "before":
            return value, None, False
        name, other = whose(limit.over), self._beside(row, limit.over)
        if isinstance(other, str):
            return None, other, False
        under, why = value_of(other, limit.metric)
        if under is None:
            return None, f"{name} {limit.metric}: {why or NOT_MEASURED}", why is not None
        if under:
            return abs(float(value)) / abs(float(under)), None, False
        return (None, f"{name} {limit.metric} is 0 there", True) if value else (0.0, None, False)

    def _beside(self, row: DeviationRow, over: Over) -> DeviationRow | str:
        """The row of the same cell, or why there is none."""
        if isinstance(over, Kernel):
            wanted = over.options.items()
            found = self._kernels.get((over.kernel, cell_of(row)), [])
            found = [r for r in found if all(r.options.get(k) == v for k, v in wanted)]
        else:
            found = self._kernels.get(((over,), cell_of(row)), [])
        if len(found) == 1:
            return found[0]
        name = whose(over).removesuffix("'s")
        return f"{name} has several rows there: give its options" if found else f"no {name} there"

    @cached_property
    def _kernels(self) -> Groups:
        """Measured rows by kernel and cell, and by (role,) and cell; no planted faults."""
        rows = [row for row in self.rows if row.status == "ok" and row.role != "control"]
        by_name = grouped(rows, lambda r: (r.kernel, cell_of(r)))
        return by_name | grouped(rows, lambda r: ((r.role,), cell_of(r)))


NOT_MEASURED = "not measured"


def _regimes(report: Measured) -> dict[str, str]:
    """What the request says of each case's inputs; a request is whatever a file says."""
    cases = report.request.get("cases")
    named = [c for c in cases if isinstance(c, dict)] if isinstance(cases, list) else []
    return {
        case["name"]: str(case["inputs"].get("name"))
        for case in named
        if isinstance(case.get("inputs"), dict) and isinstance(case.get("name"), str)
    }
