"""Python's garbage collector, out of the way."""

from __future__ import annotations

import gc
import weakref

import pytest

from numdev.report import collector
from numdev.report.collector import FROM_THE_START, let_be, only_new, piece_done, uncollected


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
    assert gc.get_freeze_count() <= before
    assert not collector._AT_WORK


def test_an_inner_one_ends_nothing() -> None:
    with only_new():
        with only_new():
            pass
        assert gc.get_freeze_count() > FROM_THE_START
        let_be()


def test_a_cycle_that_was_in_use_is_freed_before_the_end() -> None:
    """As a kernel's workspace that each call replaces: few are hidden while they are in use."""
    made: list[weakref.ref[Ring]] = []
    with only_new():
        for _ in range(100):
            kept = Ring()
            made.append(weakref.ref(kept))
            piece_done()
        gc.collect()
        assert sum(ref() is not None for ref in made) <= 8
        assert kept.own is kept
        assert gc.get_freeze_count() > FROM_THE_START


def test_what_python_hides_itself_is_no_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 begins with some hundred."""
    real, counted = gc.get_freeze_count, []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or 375)
    with only_new():
        assert real() > FROM_THE_START
    assert counted


def test_garbage_of_before_is_freed_at_once() -> None:
    """As the model of a caller's last audit: not kept while this one needs the memory."""
    before = weakref.ref(Ring())
    with only_new():
        assert before() is None


def test_what_the_caller_hid_stays_hidden() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        assert before > FROM_THE_START
        with only_new():
            let_be()
        assert gc.get_freeze_count() == before
    finally:
        gc.unfreeze()


def test_an_interrupt_at_the_start_leaves_nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    freeze = gc.freeze

    def interrupted() -> None:
        freeze()
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "freeze", interrupted)
    with pytest.raises(KeyboardInterrupt), only_new():
        pass
    assert gc.get_freeze_count() == 0
    assert not collector._AT_WORK


def test_it_is_as_it_was() -> None:
    """Switched on again only where it was on."""
    assert gc.isenabled()
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
