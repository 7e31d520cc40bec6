"""What a summary calls where a row is.

Encoder, decoder and cross attention of one model share their layers' numbers, so that there the
words that tell their modules apart join it; the module's name where that is not enough. In a
generation the phase is part of the place. In a diffusion pipeline it is what they attend to that
tells calls apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from numdev.report import DeviationRow

T = TypeVar("T")


class _Call(NamedTuple):
    """All of a row that its place depends on."""

    layer: int | None
    module: str
    case: str
    phase: str | None
    attends: str | None


_CALL = attrgetter(*_Call._fields)
Places = Mapping[tuple[Any, ...], str]
"""What to call the place of each call."""


def places_of(rows: Iterable[DeviationRow]) -> Places:
    """Of each call of these rows its layer, or the case where there is none."""
    calls = [_Call(*call) for call in dict.fromkeys(map(_CALL, rows))]
    told = len({call.attends for call in calls if call.attends}) > 1
    roles = {} if told else _roles({call.module for call in calls})
    kinds = {call: f" {call.attends}" if told and call.attends else "" for call in calls}
    short = {call: f"layer {call.layer}{kinds[call]}" for call in calls}
    long = {call: short[call] + roles.get(call.module, "") for call in calls}
    alone = _of_one_module({call: call.layer for call in calls})
    numbered = all(call.layer is not None for call in calls)
    enough = numbered and _of_one_module(long) == set(long.values())

    def place(call: _Call) -> str:
        if call.layer is None:
            return call.case
        if call.layer in alone:
            return short[call]
        return long[call] if enough else call.module

    return {call: place(call) + (f" {call.phase}" if call.phase else "") for call in calls}


def place_of(row: DeviationRow, places: Places) -> str:
    """`layer 3`."""
    return places[_CALL(row)]


def where(row: DeviationRow, places: Places) -> str:
    """`layer 3 step 0 head 2`."""
    step = f" step {row.step}" if row.step is not None else ""
    return f"{place_of(row, places)}{step} head {row.head}"


def _of_one_module(named: Mapping[_Call, T]) -> set[T]:
    """The names that stand for the calls of a single module."""
    modules: dict[T, set[str]] = defaultdict(set)
    for call, name in named.items():
        modules[name].add(call.module)
    return {name for name, those in modules.items() if len(those) == 1}


def _roles(modules: Collection[str]) -> dict[str, str]:
    """What tells modules apart beside their numbers: ` decoder EncDecAttention` for
    `decoder.block.0.layer.1.EncDecAttention`, where some are not in a decoder."""
    parts = {module: module.split(".") for module in modules}
    common = set.intersection(*map(set, parts.values()))
    return {
        module: "".join(f" {part}" for part in own if part not in common and not part.isdigit())
        for module, own in parts.items()
    }
