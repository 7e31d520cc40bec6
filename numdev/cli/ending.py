"""The end of a process that was started for one command alone.

Python takes a large report apart object by object, and then every module; the system takes back the
memory of a process that ends in no time.
"""

from __future__ import annotations

import atexit
import os
import sys

_OURS: list[bool] = []
"""Not empty in a process that nobody else has anything in."""


def process_is_ours() -> None:
    """Said by the program, before it does anything."""
    _OURS.append(True)


def is_ours() -> bool:
    """Whether it is."""
    return bool(_OURS)


def end(code: int) -> None:
    """End the process, all that was printed being out; called from Python, or with a profiler that
    has yet to say what it saw, do nothing.

    What was registered for the end of Python is done. Raises what flushing raises: BrokenPipeError.
    """
    if _OURS and not _profiled():
        _flush()
        atexit._run_exitfuncs()
        _flush()  # what these printed
        os._exit(code)


def _profiled() -> bool:
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tool = monitoring.get_tool(monitoring.PROFILER_ID) if monitoring else None
    return sys.getprofile() is not None or tool is not None


def _flush() -> None:
    """A stream that is closed from the start (`2>&-`) is none; one may be closed since."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
