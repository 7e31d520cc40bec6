"""Times on a GPU: when it came by, and not when it was told."""

from __future__ import annotations

import contextlib
import time

import torch

Moment = tuple[torch.cuda.Event | None, float]
"""An event in what the device has to do, None where there was none to be had; and the host's."""


class OnDevice:
    """The moments of the current GPU (`stopwatch.Timeline`). A fault of the device is not for this
    to report, whatever touches the device next says so: then the host's moments have to do."""

    def mark(self) -> Moment:
        event = None
        with contextlib.suppress(RuntimeError):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return event, time.perf_counter()

    def between(self, one: Moment, other: Moment, *, wait: bool) -> float | None:
        (since, before), (until, after) = one, other
        if since is not None and until is not None:
            with contextlib.suppress(RuntimeError):
                if wait:
                    until.synchronize()
                if not until.query():
                    return None
                return float(since.elapsed_time(until)) / 1e3
        return float(after - before)
