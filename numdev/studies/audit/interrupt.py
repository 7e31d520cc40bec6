"""Ctrl-C by a handler of our own, Ctrl-C that waits, and whether an exception is Ctrl-C
at all."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[object]:
    """Runs the block with SIGINT handled by `handler`; gives the handler before, and
    restores it. In other threads than the main one it changes nothing and gives None."""
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield before
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def noticing() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether an interrupt came since the block began, which
    tells the user's from a KeyboardInterrupt that foreign code raised. What handled it
    before still does, or it is ignored still; where that is not Python's, the function
    says False."""
    before = signal.getsignal(signal.SIGINT)
    came = threading.Event()
    # It ends the process, or is not Python's
    if before is signal.SIG_DFL or before is None:
        yield came.is_set
        return

    def remember(number: int, frame: FrameType | None) -> None:
        came.set()
        if callable(before):
            before(number, frame)

    with handling(remember):
        yield came.is_set


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Runs the block, which must not be done by halves, before an interrupt that comes
    meanwhile has its effect: it raises KeyboardInterrupt at the end. A second one does at
    once."""
    came = False

    def remember(number: int, frame: object) -> None:
        nonlocal came
        if came:
            interrupt()
        came = True

    def interrupt() -> None:
        if callable(before):
            before(signal.SIGINT, None)
        raise KeyboardInterrupt

    with handling(remember) as before:
        yield
    if came:
        interrupt()
