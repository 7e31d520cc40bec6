"""What stands beside a row: the same cell of another kernel, the regime of its case.

A cell is where a row was measured: case, module, layer, call, seed, phase, head, format and tensor.
A kernel has one row in it for each set of options. Rows alone; nothing is measured here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple, get_args

from numdev.gate.rules import Limit, Value, value_of
from numdev.gate.selecting import Judgeable, Kernel, Over, Selector, whose
from numdev.report import AuditReport, DeviationRow, SweepReport

Cell = tuple[Any, ...]
_ALIKE = attrgetter("role", "kernel", "format", "tensor")
_OPTIONS, _STATUS, _ELEMENTS, _SAMPLED = map(
    attrgetter, ("options", "status", "elements", "sampled")
)
_CELL = attrgetter("case", "module", "layer", "call", "seed", "phase", "head", "format", "tensor")
Groups = dict[Any, list[DeviationRow]]
Older = AuditReport | SweepReport


class Read(NamedTuple):
    """A number as a limit asks for it; None, and why."""

    value: Value
    why: str = "not measured"
    meant: bool = False
    """Whether the null is one that means nothing, and says so; not one that was not measured."""


def cell_of(row: DeviationRow) -> Cell:
    cell: Cell = _CELL(row)
    return cell


def key_of(row: DeviationRow, *, but: str = "") -> tuple[str, ...]:
    """Kernel, options (without one of them) and format."""
    given = row.options
    options = str({k: v for k, v in sorted(given.items()) if k != but}) if given else ""
    return row.kernel, options, row.format


def grouped(rows: Iterable[DeviationRow], key: Callable[[DeviationRow], Any]) -> Groups:
    """Rows of equal keys, in the order they first came."""
    groups: Groups = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def by_tensor(rows: Sequence[DeviationRow]) -> Groups:
    """Rows by role, kernel, options, format and tensor, in the order they first came."""
    alike: Groups = defaultdict(list)
    for same, row in zip(map(_ALIKE, rows), rows, strict=True):
        alike[same].append(row)
    if not any(map(_OPTIONS, rows)):  # they are slow to tell apart, and mostly none
        return {(role, name, "", fmt, t): some for (role, name, fmt, t), some in alike.items()}
    at = {id(row): i for i, row in enumerate(rows)}
    groups: Groups = {}
    for some in alike.values():
        groups |= grouped(some, lambda row: (row.role, *key_of(row), row.tensor))
    return dict(sorted(groups.items(), key=lambda group: at[id(group[1][0])]))


def measured(groups: Groups, roles: Container[str]) -> Groups:
    """Of rows by tensor those that there is something to judge in.

    There is nothing in a head without a row that sees a key, or that overflows as it should: no
    element is left, and none is missing; unless there are more rows than those that were looked at.
    """
    chosen = {key: rows for key, rows in groups.items() if key[0] in roles}
    return {key: some for key, rows in chosen.items() if (some := _with_something(rows))}


def _with_something(rows: list[DeviationRow]) -> list[DeviationRow]:
    if set(map(_STATUS, rows)) == {"ok"} and 0 not in map(_ELEMENTS, rows):
        return rows
    return [row for row in rows if row.status == "ok" and something(row)]


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
    def of(cls, report: Older, old: Older | None = None) -> Around:
        drawn = _regimes(report) | ({} if old is None else _regimes(old))
        return cls(rows=report.rows, regimes=drawn, old=None if old is None else old.rows)

    @cached_property
    def sampled(self) -> bool:
        """Whether any row of the report is one of sampled rows."""
        return any(map(_SAMPLED, self.rows))

    @cached_property
    def groups(self) -> Groups:
        """Its rows by tensor."""
        return by_tensor(self.rows)

    @cached_property
    def old_groups(self) -> Groups:
        """Those of the older report."""
        return by_tensor(self.old or ())

    def by_tensor(self, rows: Sequence[DeviationRow]) -> Groups:
        """Some rows; the report's own are grouped once."""
        return self.groups if rows is self.rows else by_tensor(rows)

    def read(self, row: DeviationRow, limit: Limit) -> Read:
        """The number of a row that a limit is for, divided by what it says."""
        value, reason = value_of(row, limit.metric)
        if value is None:
            return Read(None, reason or "not measured", meant=reason is not None)
        if limit.over is None or limit.over == "before":
            return Read(value)
        name, other = whose(limit.over), self._beside(row, limit.over)
        if isinstance(other, str):
            return Read(None, other)
        under, reason = value_of(other, limit.metric)
        if under is None:
            why = f"{name} {limit.metric}: {reason or 'not measured'}"
            return Read(None, why, meant=reason is not None)
        if not under:
            zero = f"{name} {limit.metric} is 0 there"
            return Read(None, zero, meant=True) if value else Read(0.0)
        return Read(abs(float(value)) / abs(float(under)))

    def older(self, where: Selector) -> Groups:
        """What a selector chooses of the older report, by the keys of `measured`."""
        groups = self._older.items()
        return {key: rows for key, g in groups if (rows := where.of(g, self.regimes))}

    @cached_property
    def _older(self) -> Groups:
        return measured(self.old_groups, get_args(Judgeable))

    def _beside(self, row: DeviationRow, over: Over) -> DeviationRow | str:
        """The row of the same cell, or why there is none."""
        if isinstance(over, Kernel):
            found = self._kernels.get((over.kernel, cell_of(row)), [])
            wanted = over.options.items()
            found = [r for r in found if all(r.options.get(k) == v for k, v in wanted)]
        else:
            found = self._kernels.get(((over,), cell_of(row)), [])
        if len(found) == 1:
            return found[0]
        name = whose(over).removesuffix("'s")
        return f"{name} has several rows there: give its options" if found else f"no {name} there"

    @cached_property
    def _kernels(self) -> dict[tuple[str | tuple[str], Cell], list[DeviationRow]]:
        """Measured rows by kernel and cell, and by (role,) and cell; no planted faults."""
        found: dict[tuple[str | tuple[str], Cell], list[DeviationRow]] = {}
        for row in self.rows:
            if row.status == "ok" and row.role != "control":
                cell = cell_of(row)
                found.setdefault((row.kernel, cell), []).append(row)
                found.setdefault(((row.role,), cell), []).append(row)
        return found


def _regimes(report: Older) -> dict[str, str]:
    """What the request says of each case's inputs."""
    found = {}
    cases = report.request.get("cases")
    for case in cases if isinstance(cases, list) else ():
        inputs = case.get("inputs") if isinstance(case, dict) else None
        if isinstance(inputs, dict) and isinstance(case.get("name"), str):
            found[case["name"]] = str(inputs.get("name"))
    return found
