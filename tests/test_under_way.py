"""Nobody waits for a GPU before numbers are looked at: and they are what they would have been.

The one pass over a GPU's memory is pretended by PyTorch, on a CPU.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from rowwise_cases import made
from test_comparison import waits
from test_profile import drawn
from test_rowwise import in_torch
from torch import Tensor

from numdev import comparison, yardstick
from numdev.arrival import Arrival
from numdev.attempt import attempt
from numdev.bench import Bench
from numdev.cases import AttentionCase
from numdev.deviation import measured, measured_plain, measured_precision
from numdev.execute import Task
from numdev.jobs import Held, Job, Planned, Setting, entries, steps
from numdev.kernels import Kernel, Output, find
from numdev.lazy import Lazy
from numdev.measuring import run_task, settle
from numdev.report import DeviationRow
from numdev.rowwise import OutputSums
from numdev.stopwatch import Stopwatch
from numdev.system import System

HERE = System.here("cpu")
SHAPE = (2, 3, 37, 9)


def sums(o: Tensor, y: Mapping[str, Tensor], e: Tensor | None, b: Tensor | None) -> OutputSums:
    """What the kernel sums of an output."""
    r, off = y["reference"], o.double() - y["floor"]
    error, ulps = o.double() - r, off / y["spacing"]
    return OutputSums(
        absolute=error.abs().sum(dim=-1),
        square=error.square().sum(dim=-1),
        max_abs=error.abs().amax(dim=-1),
        max_ulp=(error / y["spacing"]).abs().amax(dim=-1),
        features=ulps.sum(dim=2),
        along=(ulps * r.sign()).sum(dim=(2, 3)),
        predicted=None if e is None else (e.double() - r).square().sum(dim=-1),
        apart=None if b is None else (o.double() - b).square().sum(dim=-1),
        from_floor=None if b is None else off.abs().amax(dim=-1),
    )


@pytest.fixture
def one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "output_sums", sums)
    monkeypatch.setattr(yardstick, "yardstick_sums", in_torch)


def by_steps(*given: Any, **more: Any) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "output_sums", lambda *given: None)
        return measured(*given, **more).metrics


def same(found: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """But for the order in which numbers were added up. Biases nearly cancel."""

    def like(a: Any, b: Any, name: str) -> bool:
        if isinstance(a, float) and b is not None:
            return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9 if "bias" in name else 0.0)
        return bool(a == b)

    return all(
        a.keys() == b.keys() and all(like(a[n], b[n], n) for n in a)
        for a, b in zip(found, other, strict=True)
    )


@pytest.mark.usefixtures("one_pass")
@pytest.mark.parametrize("which", ["floor", "baseline", "other"])
@pytest.mark.parametrize("expected", [False, True])
def test_nobody_waits_before_numbers_are_looked_at(
    which: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the yardstick has looked at itself. Then once."""
    y, o, e = made(SHAPE, baseline=True)
    assert y.regular
    x = {"floor": y.floor, "baseline": y.baseline, "other": o}[which]
    assert x is not None
    given = (x, y, e) if expected else (x, y)
    with waits(monkeypatch) as waited:
        found = measured(*given)
        measured_precision(y)
        measured_plain(o, y.reference, y.empty)
        assert waited == []
        metrics = found.metrics
        assert waited == ["arrays"]
    assert same(metrics, by_steps(*given))


@pytest.mark.usefixtures("one_pass")
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("of", ["output", "expected"])
def test_what_is_not_finite_is_seen_when_it_arrives(of: str, value: float) -> None:
    """And done again step by step, its sums along the rows too."""
    y, o, e = made(SHAPE, baseline=True)
    (o if of == "output" else e)[0, 1, 2, 3] = value
    bins = torch.ones(SHAPE[2], 1, dtype=torch.float64)
    found = measured(o, y, e, bins=bins)
    assert same(found.metrics, by_steps(o, y, e, bins=bins))
    assert all(math.isfinite(x[0]) for x in found.along.values())
    assert [head["nonfinite"] for head in found.metrics] == [0, int(of == "output"), 0]


@pytest.mark.usefixtures("one_pass")
def test_what_has_arrived_holds_nothing() -> None:
    """Not the tensors from which it would have been made otherwise."""
    y, o, e = made(SHAPE, baseline=True)
    found = measured(o, y, e)
    held = weakref.ref(y)
    gc.disable()
    try:
        del y
        assert held() is not None
        assert len(found.totals.groups) > 0
        assert held() is None
    finally:
        gc.enable()
    assert len(found.metrics) == SHAPE[1]


class Noted(Arrival):
    """Of which all that there are is known."""

    every: list[Noted]
    broken = False

    def __init__(self, tensors: Any) -> None:
        super().__init__(tensors)
        self.every.append(self)
        if self.broken:
            self._there = Fault()  # type: ignore[assignment]

    @property
    def arrived(self) -> bool:
        return self._flat is None


class Fault:
    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> type[Noted]:
    Noted.every = []
    monkeypatch.setattr(comparison, "Arrival", Noted)
    monkeypatch.setattr(Noted, "broken", False)
    monkeypatch.setattr(torch.cuda, "current_stream", None)  # it is not asked where nothing waits
    return Noted


def rows(bench: Bench, which: Kernel, role: str) -> Any:
    task = Task(case=bench.ref, role=role, kernel=which.name, format="bfloat16", repeats=1)
    return run_task(task, which, bench, HERE)


BESIDE = (("precision", "reference"), ("floor", "reference"), ("baseline", "baseline"))


def test_all_has_arrived_before_a_kernel_under_audit_runs(noted: type[Noted]) -> None:
    """Which may break the device. What runs beside it was waited for by nobody until then, and its
    rows are made later still, of what arrived."""
    case = drawn()
    bench = Bench(case.ref, lambda: case)
    beside = [rows(bench, find(name), role) for role, name in BESIDE]
    assert [type(x) for x in beside] == [Lazy] * 3
    assert [found.arrived for found in noted.every] == [False] * 3
    seen: list[bool] = []

    def run(case: AttentionCase) -> Output:
        seen.extend(found.arrived for found in noted.every)
        return find("sdpa-flash").attend(case)

    own = rows(bench, Kernel(name="own", function=run), "kernel")
    assert seen == [True] * 3
    assert all(found.arrived for found in noted.every)
    bench.case.q.fill_(math.nan)
    for some in (*beside, own):
        assert {row.status for row in some} == {"ok"}


def test_nothing_is_under_way_when_a_call_is_done(noted: type[Noted]) -> None:
    """Even if no kernel under audit came after it."""
    case = drawn()
    planned = [Planned(role=role, kernel=find(name), options={}) for role, name in BESIDE]
    setting = Setting(system=HERE, formats=(made(SHAPE, baseline=False)[0].format,), plan=planned)
    wanted = frozenset(step.task.key for step in steps(case.ref, setting))
    job = Job(located=Held(case=case, axes={}), wanted=wanted)
    found = list(entries(job, setting, attempt, Stopwatch()))
    assert len(found) == 3
    assert len(noted.every) == 3
    assert all(one.arrived for one in noted.every)


def test_a_fault_is_said_where_numbers_are_looked_at(noted: type[Noted]) -> None:
    """The rows that hang on them fail; the kernel that runs next is not blamed for it."""
    case = drawn()
    bench = Bench(case.ref, lambda: case)
    noted.broken = True
    torch.cuda.current_stream = lambda: None  # type: ignore[assignment]
    floor = rows(bench, find("reference"), "floor")
    noted.broken = False
    settle(bench)
    own: list[DeviationRow] = rows(bench, find("sdpa-flash"), "kernel")
    assert {row.status for row in own} == {"ok"}
    for _ in range(2):
        (row,) = floor
        assert row.status == "failed"
        assert row.reason == (
            "while measuring: RuntimeError: CUDA error: an illegal memory access was encountered"
        )
