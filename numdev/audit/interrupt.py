"""Ctrl-C by a handler of our own, and Ctrl-C that waits."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def handling(handler: Callable[[int, Any], None]) -> Iterator[Any]:
    """SIGINT by `handler`; gives the one before, and restores it. Nothing in other threads."""
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
    """An interrupt waits for the end of what must not be done by halves; a second does not."""
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
