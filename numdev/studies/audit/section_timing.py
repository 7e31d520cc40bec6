"""The time of an audit by section, in seconds; each second is counted once.

A section within another takes its time from it, so that sections add up to the whole. On
a GPU work is under way when the call that began it returns, so a section waits for the
device where it ends. Times belong to a report, never to its rows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

# In the order in which they are reported. `other` is what no section was opened for.
SECTIONS = (
    *(
        "capture",
        "kernels",
        "reference",
        "predictions",
        "metrics",
        "baseline",
        "names",
        "weights",
    ),
    "other",
)
TOTAL = "total"


class Stopwatch:
    """Counts seconds by section, from when it is made. `with watch("reference"):` counts
    for that section; outside of any the time goes to `other`. `device`: on `cuda` a
    section waits for the device where it begins and ends. `sections`: their names, with
    `other` among them."""

    def __init__(self, device: str = "cpu", sections: Sequence[str] = SECTIONS) -> None:
        self._spent = dict.fromkeys(sections, 0.0)
        self._open = ["other"]
        self.searching = True  # for a name of what is far off, as soon as it is measured
        self._waits = device == "cuda"
        self._last = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, section: str) -> Iterator[None]:
        """Counts for `section` until the block is left. A section that is opened within
        it counts alone. Time of a section that the watch was not made with raises
        KeyError."""
        self._lap()
        self._open.append(section)
        try:
            yield
        finally:
            self._lap()
            self._open.pop()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Counts nothing until the block is left, since another process works and counts
        for itself."""
        self._lap()
        try:
            yield
        finally:
            self._last = time.perf_counter()

    def add(self, seconds: Mapping[str, float]) -> None:
        """Adds the seconds of another process, by section. Raises KeyError where a
        section of this watch is missing."""
        for section in self._spent:
            self._spent[section] += seconds[section]

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each section until now, by name, and their sum as
        `total`. Counting goes on."""
        self._lap()
        return {**self._spent, TOTAL: sum(self._spent.values())}

    def _lap(self) -> None:
        """Adds the time since the last change of sections to the section that is open,
        `other` without one. Waits for the device on a GPU; an error of the device is not
        raised here."""
        if self._waits:
            import torch

            # A fault of the device is its kernel's to tell
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize()
        now = time.perf_counter()
        self._spent[self._open[-1]] += now - self._last
        self._last = now


def words(timings: Mapping[str, float]) -> str:
    """Returns times in words, `12.3 s: capture 2.1, kernels 0.8`, without sections that
    round to 0.0. `timings`: as of `Stopwatch.seconds`; empty without `total`."""
    if TOTAL not in timings:
        return ""
    shares = [f"{s} {x:.1f}" for s, x in timings.items() if s != TOTAL and x >= 0.05]
    return f"{timings[TOTAL]:.1f} s{': ' if shares else ''}{', '.join(shares)}"
