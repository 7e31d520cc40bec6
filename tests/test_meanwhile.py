"""Host work done while a GPU computes: in order, all of it, and nothing after what went wrong."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from numdev.audit import attempt, meanwhile
from numdev.audit.meanwhile import LONGEST_S, MOST, catch_up, forget, put_off, wait
from numdev.cases import AttentionCase, CaseRef
from numdev.kernels import Kernel, Output
from numdev.metrics.lazy import Lazy


class Stream:
    """A GPU's queue that is empty after so many questions."""

    def __init__(self, busy: int) -> None:
        self.busy = busy

    def query(self) -> bool:
        self.busy -= 1
        return self.busy < 0


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    left = [*meanwhile._OFF, *meanwhile._FAILED]
    meanwhile._OFF.clear()
    meanwhile._FAILED.clear()
    assert not left


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the device busy until it was asked so often."""

    def set_to(times: int) -> None:
        stream = Stream(times)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    return set_to


def broken() -> None:
    raise OSError(28, "No space left on device")


def test_work_is_done_in_order_while_the_device_is_busy(busy: Callable[[int], None]) -> None:
    """And no longer: the rest waits for the next time, or for `catch_up`."""
    done: list[int] = []
    for i in range(5):
        put_off(lambda i=i: done.append(i))
    assert done == []
    busy(2)
    wait()
    assert done == [0, 1]
    busy(0)
    wait()
    assert done == [0, 1]
    busy(1)
    wait()
    assert done == [0, 1, 2]
    catch_up()
    assert done == [0, 1, 2, 3, 4]


def test_not_more_than_so_much_is_put_off() -> None:
    done: list[int] = []
    for i in range(MOST):
        put_off(lambda i=i: done.append(i))
    assert done == []
    put_off(lambda: done.append(MOST))
    assert done == [*range(MOST)]
    catch_up()
    assert done == [*range(MOST + 1)]


@pytest.mark.parametrize("ask", [catch_up, lambda: put_off(lambda: None)])
def test_what_went_wrong_is_said_to_who_put_it_off(
    ask: Callable[[], None], busy: Callable[[int], None]
) -> None:
    """Not to who waits for the device, as a kernel's attempt does: it is no fault of the kernel.
    Nothing is done after it: of a journal that could not be written the rest is not written."""
    done: list[int] = []
    put_off(lambda: done.append(0))
    put_off(broken)
    put_off(lambda: done.append(1))
    busy(10)
    wait()
    wait()
    assert done == [0]
    with pytest.raises(OSError, match="No space left"):
        ask()
    catch_up()
    assert done == [0]


def test_nothing_is_put_off_for_long(
    monkeypatch: pytest.MonkeyPatch, busy: Callable[[int], None]
) -> None:
    """Not for longer than a second where more comes; that itself may not be there yet."""
    now, done = [100.0], list[int]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for i in range(4):
        put_off(lambda i=i: done.append(i))
        assert done == ([] if i < 3 else [0, 1, 2])
        now[0] += 0.4 * LONGEST_S
    put_off(lambda: done.append(4))
    busy(1)
    wait()
    assert done == [0, 1, 2, 3]
    now[0] += 0.9 * LONGEST_S
    put_off(lambda: done.append(5))
    assert done == [0, 1, 2, 3]  # the fourth has gone, the fifth has not waited for long
    catch_up()
    assert done == [*range(6)]


@pytest.mark.parametrize("begin", [wait, catch_up, lambda: put_off(lambda: None)])
def test_an_interrupt_loses_nothing(
    begin: Callable[[], None], busy: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes out at once. What it came in is done once more, and then what was put off behind."""
    now, done = [100.0], list[int]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def interrupted() -> None:
        done.append(0)
        if len(done) == 1:
            raise KeyboardInterrupt

    put_off(interrupted)
    put_off(lambda: done.append(1))
    now[0] += 2 * LONGEST_S
    busy(10)
    with pytest.raises(KeyboardInterrupt):
        begin()
    assert done == [0]
    catch_up()
    assert done == [0, 0, 1]


def test_what_is_forgotten_is_not_done() -> None:
    put_off(broken)
    forget()
    catch_up()


@pytest.mark.parametrize("by", [wait, None])
def test_work_is_done_while_a_baseline_runs(
    by: Callable[[], None] | None, busy: Callable[[int], None]
) -> None:
    """An attempt waits for the device, so that the kernel's faults come out there. One under audit
    may take microseconds, and is not made to look slower."""
    done: list[int] = []

    class OnGpu(torch.Tensor):
        is_cuda = True

    q = torch.zeros(1, 1, 4, 8)
    case = AttentionCase(ref=CaseRef(case="c", source="s", module="m"), q=q, k=q, v=q, scale=1.0)
    object.__setattr__(case, "q", q.as_subclass(OnGpu))
    put_off(lambda: done.append(1))
    put_off(broken)
    busy(10)
    kernel = Kernel(name="k", function=lambda case: Output(out=case.v))
    monkey = pytest.MonkeyPatch()
    monkey.setattr(attempt, "copied", lambda case: case)
    assert isinstance(attempt.attempt(kernel, case, {}, wait=by), Output)
    monkey.undo()
    assert done == [1] * (by is not None)
    with pytest.raises(OSError, match="No space left"):
        catch_up()


def test_a_lazy_list_is_made_once_and_when_it_is_looked_at() -> None:
    made: list[int] = []

    def make() -> list[str]:
        made.append(1)
        return ["a", "b", "c"]

    found = Lazy(make)
    assert made == []
    assert len(found) == 3
    assert (*found,) == ("a", "b", "c")
    assert (found[0], found[1:], found[-1]) == ("a", ["b", "c"], "c")
    assert found == ["a", "b", "c"]
    assert found != ["a"]
    assert repr(found) == "['a', 'b', 'c']"
    copy = pickle.loads(pickle.dumps(found))
    assert type(copy) is list
    assert copy == found
    assert made == [1]
    with pytest.raises(TypeError):
        hash(found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_busy_gpu_is_not_waited_for_twice() -> None:
    """Work of 20 ms on the host beside 50 ms and more on the device costs nothing."""
    x = torch.randn(8192, 8192, device="cuda")

    def spent(*work: Callable[[], None]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(4):
            _ = x @ x  # 1.1e12 operations each in fp32: 20 ms on an H100
        for each in work:
            put_off(each)
        wait()
        return time.perf_counter() - start

    spent()
    alone, beside = spent(), spent(lambda: time.sleep(0.02))
    assert beside < alone + 0.01
    assert not meanwhile._OFF
