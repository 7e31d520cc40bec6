"""Python's garbage collector, out of the way."""

from __future__ import annotations

import gc
import weakref

import pytest

from numdev import collector
from numdev.collector import let_be, only_new, uncollected


class Ring:
    """Garbage that only the collector frees."""

    def __init__(self) -> None:
        self.own = self


def test_what_is_in_a_cycle_is_freed_within() -> None:
    """`let_be` frees what was dropped, and hides what is left from later collections."""
    with only_new():
        dropped, kept = weakref.ref(Ring()), Ring()
        let_be()
        assert dropped() is None
        later = weakref.ref(kept)
        del kept
        gc.collect()
        assert later() is not None
    gc.collect()
    assert later() is None


def test_nothing_stays_hidden() -> None:
    """Not after an error, and not by `let_be` outside."""

    def fails() -> None:
        assert gc.get_freeze_count() > before
        raise KeyError

    before = gc.get_freeze_count()
    with pytest.raises(KeyError), only_new():
        fails()
    let_be()
    assert gc.get_freeze_count() == before
    assert not collector._AT_WORK


def test_an_inner_one_ends_nothing() -> None:
    with only_new():
        with only_new():
            pass
        assert gc.get_freeze_count() > 0
        let_be()


def test_it_is_as_it_was() -> None:
    """Switched on again only where it was on."""
    assert gc.isenabled()
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
