"""Python's cyclic garbage collector, out of the way while much is made that stays.

A report of 100,000 rows is a million objects, none of them garbage. The collector looks through all
of them again and again as they come in, which takes longer than reading them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the collector, as it was afterwards. What is not in a cycle is freed all the same."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
