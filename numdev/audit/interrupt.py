"""Ctrl-C that is not lost.

Python raises KeyboardInterrupt wherever the main thread happens to be. Where that is inside a
native extension which calls back into Python and clears the error, the interrupt vanishes, and a
long run goes on. `watching` remembers that one came; the loop asks at every task.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def watching() -> Iterator[Callable[[], None]]:
    """A function that raises KeyboardInterrupt if one came and was lost. Restores the handler.

    Outside the main thread, where Python allows no handlers, it never raises.
    """
    came = False

    def remember(number: int, frame: Any) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGINT, remember)
    except ValueError:
        yield check
        return
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def deferred() -> Iterator[None]:
    """An interrupt that comes in here takes effect at the end, for what must not be done by halves.
    A second one takes effect at once. Restores the handler.

    Outside the main thread, where Python allows no handlers, it does nothing.
    """
    came = 0
    before: Any = None

    def remember(number: int, frame: Any) -> None:
        nonlocal came
        came += 1
        if came > 1:
            signal.signal(signal.SIGINT, before)
            signal.raise_signal(number)

    try:
        before = signal.signal(signal.SIGINT, remember)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came == 1:
            signal.raise_signal(signal.SIGINT)
