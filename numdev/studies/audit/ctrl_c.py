"""Ctrl-C with a handler of numdev, Ctrl-C that waits for the end of a block, and whether
an exception came from Ctrl-C at all."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[object]:
    """Runs the block with SIGINT handled by `handler`. Gives the handler that was set
    before, and sets it again at the end. In a thread other than the main one, and where
    that handler was not set by Python, it changes nothing and gives None."""
    is_main = threading.current_thread() is threading.main_thread()
    # Python cannot set again what it did not set
    if not is_main or signal.getsignal(signal.SIGINT) is None:
        yield None
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield before
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def noticing() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether SIGINT came since the block began. That tells
    the user's Ctrl-C from a KeyboardInterrupt that foreign code raised. The handler that
    was set before is still called, and an ignored signal stays ignored. The function
    always says False in other threads, and where SIGINT has the system's handler or none
    of Python."""
    before = signal.getsignal(signal.SIGINT)
    came = threading.Event()
    if before is signal.SIG_DFL:  # it ends the process
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
    """Runs a block that must be done whole. A first SIGINT during the block calls the
    handler that was set before, at the block's end, and raises KeyboardInterrupt there; a
    second one does so at once. An exception that leaves the block takes the place of a
    first SIGINT's. In a thread other than the main one, and where the handler was not set
    by Python, it changes nothing."""
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
