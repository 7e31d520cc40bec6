"""One row held to one limit."""

from __future__ import annotations

from dataclasses import dataclass

from numdev.gate.rules import Limit, Value
from numdev.report import DeviationRow


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
        """The least and the most that the excess may be. An interval that does not contain its own
        estimate, or has its ends the wrong way round, excuses nothing."""
        if self.interval is None:
            return self.excess, self.excess
        both = (self.excess, *map(self.limit.excess, self.interval))
        return min(both), max(both)


Lacking = tuple[DeviationRow, str]
"""A row that is not judged, and why."""
