"""What workers import, imported before there are any, and beside what this process imports.

Python's fork server is a process that has imported what a worker needs, PyTorch above all; workers
are copies of it. They are there at once, the ones that replace others too, and share its memory. It
ends with this process. It keeps the environment that it was started in, so it is for a process that
does nothing else than one command; elsewhere workers are started as ever, by `spawn`. On Linux
alone: what the system's libraries on a Mac do in a copy of a process is not defined.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from typing import Literal

from numdev.ending import is_ours

NEEDED = ["distributed", "numdev.cluster.remote"]
_BEGUN: list[bool] = []


def begin(workers: int) -> None:
    """Start the server, for so many workers; where it is not to be, do nothing."""
    if _BEGUN or not is_ours() or sys.platform != "linux":
        return
    multiprocessing.set_forkserver_preload(NEEDED)
    share = str(max(1, (os.cpu_count() or 1) // workers))
    before = os.environ.get("OMP_NUM_THREADS")
    # For libraries that start their threads when they are imported; PyTorch is told what to use.
    os.environ["OMP_NUM_THREADS"] = before or share
    try:
        forkserver.ensure_running()
        _BEGUN.append(True)
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]


def method() -> Literal["forkserver", "spawn"]:
    """How workers are to be started."""
    return "forkserver" if _BEGUN else "spawn"
