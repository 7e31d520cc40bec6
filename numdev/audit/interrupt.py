"""Ctrl-C by a handler of our own, and Ctrl-C that waits."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def handling(handler: Callable[[int, Any], None]) -> Iterator[Any]:
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
def deferred() -> Iterator[None]:
    """An interrupt that comes in here takes effect at the end, for what must not be done by halves.
    A second one takes effect at once."""
    came = False

    def remember(number: int, frame: Any) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    with handling(remember):
        yield
    if came:
        raise KeyboardInterrupt
