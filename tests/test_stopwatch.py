"""The stopwatch: every second in one section, and the sections in the report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from numdev import report
from numdev.audit.devicetime import OnDevice
from numdev.audit.run import stopwatch
from numdev.audit.study import audit
from numdev.audit.timing import SECTIONS, OnHost, Stopwatch, words
from numdev.config import AuditRequest, CaseConfig, Choice
from numdev.report.renderers import html
from numdev.system import System


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Device:
    """A device that lags behind its host: a mark comes by when what was begun before it is done."""

    def __init__(self) -> None:
        self.host, self.free = 0.0, 0.0
        """The host's time, and from when the device has nothing to do."""

    def work(self, seconds: float) -> None:
        self.free = max(self.free, self.host) + seconds

    def mark(self) -> float:
        return max(self.free, self.host)

    def between(self, one: float, other: float, *, wait: bool) -> float | None:
        if wait:
            self.host = max(self.host, other)
        return other - one if self.host >= other else None


def spent(watch: Stopwatch) -> dict[str, float]:
    return {section: s for section, s in watch.seconds().items() if s}


def test_a_section_takes_its_time_from_the_one_around_it() -> None:
    """Each second is counted once, whatever is nested in what; the rest is `other`."""
    clock = Clock()
    watch = Stopwatch(OnHost(clock))
    clock.now += 1
    with watch("capture"):
        clock.now += 2
        with watch("metrics"):
            clock.now += 4
            with watch("capture"):
                clock.now += 8
            clock.now += 16
        clock.now += 32
    clock.now += 64
    expected = {"capture": 42.0, "metrics": 20.0, "other": 65.0, "total": 127.0}
    assert spent(watch) == expected
    clock.now += 128
    assert spent(watch) == {**expected, "other": 193.0, "total": 255.0}
    assert list(watch.seconds()) == [*SECTIONS, "total"]


def test_what_raises_is_timed_too() -> None:
    """And the section around it is open again."""
    clock = Clock()
    watch = Stopwatch(OnHost(clock))

    def fail() -> None:
        clock.now += 1
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), watch("kernels"):
        fail()
    clock.now += 2
    assert spent(watch) == {"kernels": 1.0, "other": 2.0, "total": 3.0}


def test_an_unknown_section_is_an_error() -> None:
    """Its time would be in no report."""
    watch = Stopwatch()
    with pytest.raises(KeyError), watch("kernel"):
        pass
    with watch("kernels"):  # and what was open before is so still
        pass


def test_work_under_way_counts_where_it_was_begun() -> None:
    """And nobody waits for it before somebody asks for the times. What the host does beside it
    costs nothing; what the device waits for counts for the section that lets it wait."""
    device = Device()
    watch = Stopwatch(device)
    with watch("kernels"):
        device.work(10)
    assert device.host == 0
    with watch("metrics"):
        device.host += 3  # beside the kernels
        device.work(1)
        device.host = 15  # and of that four for which the device has nothing to do
        device.work(2)
    device.host += 1
    assert spent(watch) == {"kernels": 10.0, "metrics": 7.0, "total": 17.0}
    assert device.host == 17


def test_times_are_kept_until_they_are_known() -> None:
    """Many borders may be under way; those that came by are counted at the next (the
    first, when nothing had begun, at once)."""
    device = Device()
    watch = Stopwatch(device)
    for _ in range(100):
        with watch("kernels"):
            device.work(1)
        device.work(2)
    assert len(watch._laps) == 199
    device.host = 300
    with watch("kernels"):
        pass
    assert len(watch._laps) == 0
    assert spent(watch) == {"kernels": 100.0, "other": 200.0, "total": 300.0}


def test_a_fault_of_the_device_is_not_the_stopwatch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it marks what the device has to do, and leaves it to others to say that it is
    broken: the host's times have to do."""

    def broken(**_: Any) -> None:
        asked.append(1)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", broken)
    watch = stopwatch(System(device="cuda", cpu="x"))
    with watch("kernels"):
        time.sleep(0.01)
    assert len(asked) == 3
    assert watch.seconds()["kernels"] >= 0.01
    asked.clear()
    with stopwatch(System(device="cpu", cpu="x"))("kernels"):
        pass
    assert not asked


def test_a_fault_that_comes_later_leaves_the_host_s_times() -> None:
    class Event:
        def query(self) -> bool:
            raise RuntimeError("CUDA error")

        synchronize = query

    one, other = (Event(), 1.0), (Event(), 3.5)
    assert OnDevice().between(one, other, wait=False) == 2.5  # type: ignore[arg-type]
    assert OnDevice().between(one, other, wait=True) == 2.5  # type: ignore[arg-type]


def test_in_words() -> None:
    """With one decimal; what would be 0.0 is not said; nothing of a report without times."""
    told = {**dict.fromkeys(SECTIONS, 0.0), "capture": 2.14, "other": 0.049, "total": 2.19}
    assert words(told) == "2.2 s: capture 2.1"
    assert words({**told, "kernels": 0.05, "total": 12.34}) == "12.3 s: capture 2.1, kernels 0.1"
    assert words({"total": 0.01}) == "0.0 s"
    assert words({}) == ""


# --- in a report ---------------------------------------------------------------------------------


def request(**changes: Any) -> AuditRequest:
    cases = (CaseConfig(name="c", heads=2, seq_len=200, head_dim=32, causal=True),)
    kernels = (Choice(name="sdpa-math"),)
    return AuditRequest(target="t", cases=cases, kernels=kernels, device="cpu", **changes)


@pytest.mark.parametrize("gradients", [False, True])
def test_an_audit_says_where_its_time_went(tmp_path: Path, gradients: bool) -> None:
    """Every section has some but that of weights, of which there are none here, and they add up;
    the page has them beside the provenance."""
    found = audit(request(gradients=gradients), tmp_path)
    assert list(found.timings) == [*SECTIONS, "total"]
    assert all((found.timings[section] > 0) == (section != "weights") for section in SECTIONS)
    assert sum(found.timings[s] for s in SECTIONS) == pytest.approx(found.timings["total"])
    assert words(found.timings) in html.page(found)
    report.write(found, tmp_path)
    assert report.read(tmp_path).timings == found.timings


def test_a_continued_run_has_its_own_times(tmp_path: Path) -> None:
    """What was finished before is not counted: nothing is left to run. All else is the same."""
    first, second = (audit(request(), tmp_path) for _ in range(2))
    for section in ("kernels", "reference", "predictions", "metrics", "baseline"):
        assert second.timings[section] == 0
    same = {"timings", "provenance"}
    assert first.model_dump(exclude=same) == second.model_dump(exclude=same)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_is_waited_for() -> None:
    """A kernel's time is there, and not what its launch took: products of 8192 x 8192 in fp32 are
    1.1e12 operations, more than a millisecond on any GPU; a launch takes some microseconds."""
    x = torch.randn(8192, 8192, device="cuda")
    _ = x @ x
    watch = stopwatch(System.here("cuda"))
    with watch("kernels"):
        for _ in range(10):
            _ = x @ x
    assert watch.seconds()["kernels"] > 10e-3
