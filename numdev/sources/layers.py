"""The layers that were asked for, and those that there are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from numdev.errors import MeasurementError

SHOWN = 8
"""So many numbers are said one by one."""


class Layers:
    """Chooses calls by their layer, and remembers whose were met. None: all are chosen."""

    def __init__(self, asked: Sequence[int] | None) -> None:
        self.asked = asked
        self.met: set[int | None] = set()

    def choose(self, layer: int | None) -> bool:
        self.met.add(layer)
        return self.asked is None or layer in self.asked

    def notes(self, target: str | None) -> tuple[str, ...]:
        """What to say when all calls were met: layers that were asked for, and have none. Raises
        MeasurementError where no call is in any of them."""
        lacking = sorted(set(self.asked or ()) - self.met)
        if not lacking:
            return ()
        there = sorted(layer for layer in self.met if layer is not None)
        known = f"calls were met in {_words(there)}" if there else "no call has a number"
        found = f"no attention call in {_words(lacking)}; {known}"
        if self.asked and self.met and self.met.isdisjoint(self.asked):
            raise MeasurementError(f"{target}: {found}", hint="check --layers")
        return (f"--layers: {found}.",)


def _words(layers: Sequence[int]) -> str:
    """`layer 3`, `layers 0, 4 and 5`, `layers 0 to 31`."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if len(layers) > 2 and all(b - a == 1 for a, b in pairwise(layers)):
        return f"layers {layers[0]} to {layers[-1]}"
    first, more = layers[:SHOWN], len(layers) - SHOWN
    if more > 0:
        return f"layers {', '.join(map(str, first))} and {more} more"
    return f"layers {', '.join(map(str, first[:-1]))} and {first[-1]}"
