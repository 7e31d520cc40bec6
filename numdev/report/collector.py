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


FROM_THE_START = 1000
"""Python 3.12 hides some hundred objects of its own; whoever calls `gc.freeze` hides far more."""
_AT_WORK: list[int] = []
"""Not empty within `only_new`: how many pieces of work are done."""


@contextmanager
def only_new() -> Iterator[None]:
    """The collector looks at nothing that is there already, until afterwards; what is made from now
    on is still collected, tensors in a cycle among it. Nested, the inner one does nothing; nor does
    one where the caller hid objects himself, which could not be told from ours afterwards."""
    if _AT_WORK or gc.get_freeze_count() > FROM_THE_START:
        yield
        return
    try:
        gc.collect()  # garbage of before would stay until the end
        gc.freeze()
        _AT_WORK.append(0)
        yield
    finally:
        gc.unfreeze()
        _AT_WORK.clear()


def let_be() -> None:
    """Within `only_new`: collect once more, and look no more at what is left."""
    if _AT_WORK:
        gc.collect()
        gc.freeze()


def piece_done() -> None:
    """Within `only_new`: `let_be` after the first, second, fourth, eighth piece of work, with which
    models and modules come in. Not after each: what is in use and in a cycle then, as a kernel's
    workspace may be, would stay until the end once it is dropped."""
    if _AT_WORK:
        _AT_WORK[0] += 1
        if not _AT_WORK[0] & (_AT_WORK[0] - 1):  # a power of two
            let_be()
