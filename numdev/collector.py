"""Python's cyclic garbage collector, out of the way while much is made that stays.

A report of 100,000 rows is a million objects, none of them garbage. The collector looks through all
of them again and again as they come in, which takes longer than reading them. And beside an audit's
rows it would look through all that PyTorch and transformers hold, a fifth of a second each time.
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


_AT_WORK: list[bool] = []
"""Not empty within `only_new`. (Python tells by counting, a million objects each time.)"""


@contextmanager
def only_new() -> Iterator[None]:
    """The collector looks at nothing that is there already, until afterwards; what is made from now
    on is still collected, tensors in a cycle among it. Nested, the inner one does nothing."""
    if _AT_WORK:
        yield
        return
    _AT_WORK.append(True)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        _AT_WORK.clear()


def let_be() -> None:
    """Within `only_new`: collect once more, and look no more at what is left."""
    if _AT_WORK:
        gc.collect()
        gc.freeze()
