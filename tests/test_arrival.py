"""Numbers on their way to the host: all of them, as they were, and nobody waits before he looks."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from numdev.audit import meanwhile
from numdev.audit.meanwhile import catch_up, put_off, wait
from numdev.metrics.arrival import Arrival


class Stream:
    """A GPU's queue, which is always busy."""

    def query(self) -> bool:
        return False


class Event:
    """Comes by when it is waited for, or a fault comes out."""

    def __init__(self, fault: bool = False) -> None:
        self.waited, self.fault = 0, fault

    def synchronize(self) -> None:
        self.waited += 1
        if self.fault:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture(autouse=True)
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    yield
    assert not meanwhile._OFF


def under_way(value: float, event: Event) -> Arrival:
    found = Arrival([torch.tensor([value])])
    found._there = event  # type: ignore[assignment]
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_everything_arrives(dtype: torch.dtype) -> None:
    """Shapes and values as they were, of strided tensors and of empty ones too."""
    x = torch.arange(24).view(2, 3, 4).to(dtype)
    given = [x, x.transpose(0, 2), x[0, 0, 0], x[:0], x[..., 1]]
    for found, tensor in zip(Arrival(given).arrays, given, strict=True):
        assert found.shape == tensor.shape
        np.testing.assert_array_equal(found, tensor.numpy())
    assert np.array_equal(Arrival([torch.tensor([2**62 + 1])]).arrays[0], [2**62 + 1])


def test_what_has_begun_does_not_change() -> None:
    x = torch.ones(3)
    found = Arrival([x])
    x.zero_()
    assert found.arrays[0].tolist() == [1.0, 1.0, 1.0]


def test_who_looks_waits_once() -> None:
    event = Event()
    found = under_way(2.0, event)
    assert event.waited == 0
    for _ in range(2):
        assert found.arrays[0].tolist() == [2.0]
    assert event.waited == 1


def test_work_that_waits_lets_nothing_go_before_it() -> None:
    """What is put off looks at numbers itself: what was put off after it stays behind it."""
    done: list[float] = []
    for value in (1.0, 2.0, 3.0):
        found = under_way(value, Event())
        put_off(lambda found=found: done.append(float(found.arrays[0][0])))
    wait()
    assert done == [1.0, 2.0, 3.0]
    for value in (4.0, 5.0):
        found = under_way(value, Event())
        put_off(lambda found=found: done.append(float(found.arrays[0][0])))
    catch_up()
    assert done == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_fault_comes_out_every_time() -> None:
    found = under_way(1.0, Event(fault=True))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            _ = found.arrays


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has half a second to do when its numbers are asked for; many are under way, and are looked
    at in another order."""
    monkeypatch.undo()
    x = torch.randn(8192, 8192, device="cuda")
    warm = [Arrival([torch.full((1000,), 1.0, device="cuda")]) for _ in range(40)]
    assert [found.arrays[0][0] for found in warm] == [1.0] * 40
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        _ = x @ x
    found = [Arrival([torch.full((1000,), float(i), device="cuda")]) for i in range(40)]
    begun = time.perf_counter() - start
    for i in reversed(range(40)):
        assert (found[i].arrays[0] == i).all()
    assert begun < 0.5 * (time.perf_counter() - start)
