"""Host work that nobody waits for yet, done while a GPU computes.

A row that is finished has to be made and written, and the next call's kernels do not depend on it.
Such work is put off until the device is busy for a while and has to be waited for, as with every
call's baseline (`wait`), and is done then, in its order, one at a time. Done in a short wait, or
beside small kernels, it would keep the device waiting. What is put off begins nothing on the
device, nor holds large tensors there; it may wait for numbers that are under way.

There is one queue of it in a process, as there is one of what the device has to do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

__all__ = ["catch_up", "forget", "put_off", "wait"]

MOST = 64
"""That may be put off at a time."""
LONGEST_S = 1.0
"""For how long something is put off where more comes."""

Work = Callable[[], object]
_OFF: deque[tuple[float, Work]] = deque()
"""What is put off, and since when."""
_FAILED: list[Exception] = []
"""What was raised where it would have been taken for somebody else's."""


def put_off(work: Work) -> None:
    """Have it done later: at the latest by `catch_up`. Raises what earlier work raised; then this
    is not done."""
    now = time.monotonic()
    if _FAILED or len(_OFF) >= MOST or (_OFF and now > _OFF[0][0] + LONGEST_S):
        catch_up()
    _OFF.append((now, work))


def wait() -> None:
    """For all that the current GPU has to do, which is some milliseconds' work at least: what was
    put off is done for as long. Raises the device's faults alone."""
    while _OFF and not _FAILED and not torch.cuda.current_stream().query():
        try:
            _do_first()
        except Exception as error:
            _FAILED.append(error)
    torch.cuda.synchronize()


def catch_up() -> None:
    """Do all that was put off, what was interrupted once more. An error ends it: nothing is done
    after it. What an interrupt leaves is still put off."""
    try:
        if _FAILED:
            raise _FAILED.pop()
        while _OFF:
            _do_first()
    except Exception:
        forget()
        raise


def forget() -> None:
    """Do nothing more of it."""
    _OFF.clear()
    _FAILED.clear()


def _do_first() -> None:
    """What is interrupted is still the first."""
    _, work = _OFF[0]
    work()
    _OFF.popleft()
