"""Where an audit's time goes: seconds by section, each second counted once.

A section within another takes its time from it, so that sections add up to the whole. What a
section is called is its user's business; `words` is how a report's times are said.

On a GPU work is under way when the call that began it returns. There a border is a mark in what the
device has to do (`numdev.audit.devicetime`), and times are between the moments when it came by: nobody
waits for it, and what the host did while it was busy costs nothing.

Times belong to a report, never to its rows: those depend on the task alone.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

SECTIONS = (
    "capture",
    "kernels",
    "reference",
    "predictions",
    "metrics",
    "baseline",
    "weights",
    "other",
)
"""Of an audit or a sweep, in the order in which they are reported. `other` is what no section was
opened for."""
OF_DIAGNOSIS = ("capture", "chain", "cures", "kernels", "other")
OF_TRAINING = ("training", "metrics", "saving", "other")
TOTAL = "total"
SHOWN_S = 0.05
"""What is shorter is 0.0 with one decimal, and not said."""


class Timeline(Protocol):
    """Moments, and how far they are apart."""

    def mark(self) -> Any:
        """Now."""

    def between(self, one: Any, other: Any, *, wait: bool) -> float | None:
        """Seconds from one moment to a later one; None where that has not come yet, unless it is to
        be waited for."""


@dataclass(frozen=True)
class OnHost:
    """A clock's moments, in seconds."""

    clock: Callable[[], float] = time.perf_counter

    def mark(self) -> float:
        return self.clock()

    def between(self, one: float, other: float, *, wait: bool) -> float:
        return other - one


class Stopwatch:
    """Runs from when it is made. `with watch("reference"):` counts for that section."""

    def __init__(
        self, timeline: Timeline | None = None, *, sections: Sequence[str] = SECTIONS
    ) -> None:
        self._timeline: Timeline = timeline or OnHost()
        self._spent = dict.fromkeys(sections, 0.0)
        self._open = ["other"]
        self._laps: deque[tuple[str, Any, Any]] = deque()
        """Whose they are, and the marks at both ends: of those whose length is not known yet."""
        self._last = self._timeline.mark()

    @contextlib.contextmanager
    def __call__(self, section: str) -> Iterator[None]:
        """Count for `section`, one of its sections, until the block is left, however that happens;
        within the block another may be opened. Raises KeyError for an unknown one."""
        _ = self._spent[section]
        if section == self._open[-1]:
            yield
            return
        self._lap()
        self._open.append(section)
        try:
            yield
        finally:
            self._lap()
            self._open.pop()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Count nothing until the block is left: somebody else works, and counts."""
        self._lap()
        try:
            yield
        finally:
            self._last = self._timeline.mark()

    def add(self, seconds: Mapping[str, float]) -> None:
        """Count what another one counted. Raises KeyError for an unknown section."""
        for section, spent in seconds.items():
            if section != TOTAL:
                self._spent[section] += spent

    def seconds(self) -> dict[str, float]:
        """Seconds by section until now, and their sum as `total`. Waits for what is under way."""
        self._lap()
        self._count(wait=True)
        return {**self._spent, TOTAL: sum(self._spent.values())}

    def _lap(self) -> None:
        """The time since the last border is of the section that is open."""
        now = self._timeline.mark()
        self._laps.append((self._open[-1], self._last, now))
        self._last = now
        self._count(wait=False)

    def _count(self, *, wait: bool) -> None:
        while self._laps:
            section, since, until = self._laps[0]
            spent = self._timeline.between(since, until, wait=wait)
            if spent is None:
                return
            self._spent[section] += spent
            self._laps.popleft()


def words(timings: Mapping[str, float]) -> str:
    """`12.3 s: capture 2.1, kernels 0.8, ...`, without what is too short to say; empty where there
    are no times."""
    if TOTAL not in timings:
        return ""
    parts = (*SECTIONS, *OF_TRAINING, *OF_DIAGNOSIS)
    known = [s for s in dict.fromkeys(parts) if timings.get(s, 0.0) >= SHOWN_S]
    shares = [f"{s} {timings[s]:.1f}" for s in known]
    return f"{timings[TOTAL]:.1f} s{': ' if shares else ''}{', '.join(shares)}"
