"""One row held to one limit."""

from __future__ import annotations

from dataclasses import dataclass

from numdev.report import DeviationRow
from numdev.rules import Limit, Value


@dataclass(frozen=True)
class Held:
    """A number beside its limit."""

    row: DeviationRow
    limit: Limit
    value: Value
    excess: float
    """Above 1 it is exceeded."""
    interval: tuple[float, float] | None = None
    """Of an estimate from sampled rows."""
    excused: bool = False
    """Beyond a limit on a change, and yet within the seeds' own spread or the noise: then `excess`
    is 1."""

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the most that the excess may be."""
        if self.interval is None:
            return self.excess, self.excess
        low, high = (self.limit.excess(end) for end in self.interval)
        return low, high


Lacking = tuple[DeviationRow, str]
"""A row that is not judged, and why."""
