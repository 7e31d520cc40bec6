"""Ctrl-C that is not lost, and Ctrl-C that waits."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def _handling(handler: Callable[[int, Any], None]) -> Iterator[Any]:
    """SIGINT by `handler`; gives the one before, and restores it. Outside the main thread, where
    Python allows no handlers, it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield before
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def watching() -> Iterator[Callable[[], None]]:
    """A function that raises KeyboardInterrupt if one came and was lost: a native extension that
    calls back into Python may clear the error. The loop asks at every task."""
    came = threading.Event()

    def remember(number: int, frame: Any) -> None:
        came.set()
        raise KeyboardInterrupt

    def check() -> None:
        if came.is_set():
            raise KeyboardInterrupt

    with _handling(remember):
        yield check


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """An interrupt that comes in here takes effect at the end, for what must not be done by halves.
    A second one takes effect at once."""
    came = False

    def remember(number: int, frame: Any) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    with _handling(remember):
        yield
    if came:
        raise KeyboardInterrupt
