"""Nobody waits for a GPU before numbers are looked at: and they are what they would have been.

The one pass over a GPU's memory is pretended by PyTorch, on a CPU.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rowwise_cases import made
from test_comparison import waits
from test_profile import drawn, request
from test_rowwise import in_torch
from test_sweep import request as swept
from torch import Tensor

from numdev.audit import jobs
from numdev.audit import profile_rows as profiles
from numdev.audit.attempt import Failure, attempt
from numdev.audit.bench import Bench
from numdev.audit.jobs import Held, Job, Planned, Setting, entries, steps
from numdev.audit.journal import Task
from numdev.audit.run import Run
from numdev.audit.study import audit
from numdev.audit.sweep import plan, sweep
from numdev.audit.task import run_task
from numdev.audit.timing import Stopwatch
from numdev.cases import AttentionCase
from numdev.formats import FORMATS, Format
from numdev.kernels import Kernel, Output, find
from numdev.metrics import comparison, yardstick
from numdev.metrics.arrival import Arrival
from numdev.metrics.deviation import measured, measured_plain, measured_precision
from numdev.metrics.lazy import Lazy
from numdev.metrics.rowwise import BY_ROW, LARGEST, SUMS, OutputHeads, Scales
from numdev.report import AuditReport, DeviationRow
from numdev.system import System

HERE = System.here("cpu")
SHAPE = (2, 3, 37, 9)


def heads(
    o: Tensor,
    y: Mapping[str, Tensor],
    scales: Scales,
    ordered: Callable[[], Sequence[Tensor]],
    *,
    expected: Tensor | None,
    baseline: Tensor | None,
) -> OutputHeads:
    """What the kernels make of an output."""
    r, off = y["reference"], o.double() - y["floor"]
    error, ulps = o.double() - r, off / y["spacing"]
    e, b = (o.double() if x is None else x.double() for x in (expected, baseline))
    unit = torch.where(scales.scale >= scales.smallest, scales.scale, math.inf)
    assert scales.arithmetic is not None
    predicted = ((e - r).square().sum(dim=-1) + scales.arithmetic.square()).sqrt()
    least = (scales.least / unit).square().sum(dim=(0, 2))
    typical = torch.maximum((predicted / unit).square().sum(dim=(0, 2)), least)
    typical = (typical / unit.isfinite().sum(dim=(0, 2))).sqrt()[:, None] * scales.scale
    allowed = torch.stack([predicted, typical, scales.least]).amax(dim=0)
    size = error.square().sum(dim=-1).sqrt()
    by_row = {"relative": (size / unit).square(), "predicted": (predicted / unit).square()}
    sums = {
        **by_row,
        "absolute": error.abs().sum(dim=-1),
        "square": error.square().sum(dim=-1),
        "apart": (o.double() - b).square().sum(dim=-1),
    }
    largest = {
        "max_abs": error.abs(),
        "max_ulp": (error / y["spacing"]).abs(),
        "from_floor": off.abs(),
        "worst_row": (size / allowed)[..., None],
    }
    mine, *others = ordered()
    return OutputHeads(
        sums=torch.stack([comparison.dealt(sums[name]) for name in SUMS]),
        largest=torch.stack([largest[name].amax(dim=(0, 2, 3)) for name in LARGEST]),
        by_row=torch.stack([by_row[name] for name in BY_ROW]),
        features=ulps.sum(dim=2),
        along=(ulps * r.sign()).sum(dim=(2, 3)),
        w1=torch.stack([(mine.double() - x).abs().mean(dim=1) for x in others]),
    )


@pytest.fixture
def one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "output_heads", heads)
    monkeypatch.setattr(yardstick, "yardstick_sums", in_torch)


def by_steps(*given: Any, **more: Any) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "output_heads", lambda *given, **more: None)
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
    """Once the yardstick has looked at itself. Then once, and once for what is the yardstick's."""
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
        assert waited == ["arrays", "arrays"]
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
    bench.settle()
    own: list[DeviationRow] = rows(bench, find("sdpa-flash"), "kernel")
    assert {row.status for row in own} == {"ok"}
    for _ in range(2):
        (row,) = floor
        assert row.status == "failed"
        assert row.reason == (
            "while measuring: RuntimeError: CUDA error: an illegal memory access was encountered"
        )


# --- whole audits on a pretended GPU --------------------------------------------------------------


class Gpu:
    """Whose queue is busy or not, and which can break."""

    busy = False
    broken = False

    def query(self) -> bool:
        self.synchronize()
        return not self.busy

    def synchronize(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, one_pass: None) -> type[Gpu]:
    class Here(Gpu):
        pass

    def under_way(self: Arrival, tensors: Any) -> None:
        begin(self, tensors)
        self._there = Here()  # type: ignore[assignment]

    begin = Arrival.__init__
    monkeypatch.setattr(Arrival, "__init__", under_way)
    monkeypatch.setattr(torch.cuda, "current_stream", Here)
    monkeypatch.setattr(Run, "_on_gpu", True)
    return Here


def audited(directory: Path, **changes: Any) -> AuditReport:
    return audit(request("sdpa-flash", **changes), directory)


def written(directory: Path) -> list[str]:
    """The keys of its journal, in their order."""
    lines = (json.loads(line) for line in (directory / "rows.jsonl").open())
    return [line["task"] for line in lines if "task" in line]


ONE = {"cases": request().cases[:1]}


@pytest.mark.parametrize("busy", [False, True])
def test_a_report_is_the_same(busy: bool, gpu: type[Gpu], tmp_path: Path) -> None:
    """Whether rows are made while the device is busy or at the end, as where nothing is put off."""
    gpu.busy = busy
    found = audited(tmp_path / "gpu", formats=("bfloat16", "float16"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "_on_gpu", False)
        expected = audited(tmp_path / "cpu", formats=("bfloat16", "float16"))
    assert found.rows == expected.rows
    assert found.profiles == expected.profiles
    assert {row.status for row in found.rows} == {"ok"}
    assert written(tmp_path / "gpu") == written(tmp_path / "cpu")


@pytest.mark.usefixtures("gpu")
def test_a_call_s_numbers_are_waited_for_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of what runs beside the kernel, and its own, its noise and checksums among them."""
    seen: list[str] = []
    begin, arrive = Arrival.__init__, Arrival._apart

    def begun(self: Arrival, tensors: Any) -> None:
        seen.append("begun")
        begin(self, tensors)

    def arrived(self: Arrival, whole: Any) -> Any:
        seen.append("arrived")
        return arrive(self, whole)

    monkeypatch.setattr(Arrival, "__init__", begun)
    monkeypatch.setattr(Arrival, "_apart", arrived)
    found = audited(tmp_path, **ONE, repeats=2)
    assert {row.noise for row in found.rows if row.role == "kernel"} == {0.0}
    assert seen.count("begun") == seen.count("arrived") == 9
    assert list(itertools.pairwise(seen)).count(("begun", "arrived")) == 2


def test_a_broken_device_costs_no_other_rows(gpu: type[Gpu], tmp_path: Path) -> None:
    """What ran beside the kernel that broke it is complete, checksums and profiles too."""

    def breaks(*_: Any, **__: Any) -> Failure:
        gpu.broken = True
        return Failure("failed", "CUDA error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "_entries", by(breaks))
        found = audited(tmp_path, **ONE)
    for role in ("precision", "floor", "baseline", "kernel"):
        status = {row.status for row in found.rows if row.role == role}
        assert status == {"failed" if role == "kernel" else "ok"}
    assert all(row.bits for row in found.rows if row.role in ("floor", "baseline"))
    assert {row.role for row in found.profiles} == {"floor", "baseline"}


def by(run: Any) -> Any:
    """`jobs._entries` with kernels under audit run by another."""

    def entered(step: Any, wanted: Any, bench: Any, setting: Any, _: Any) -> Any:
        return entries_of(step, wanted, bench, setting, run)

    entries_of = jobs._entries
    return entered


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("role", ["baseline", "kernel"])
def test_what_cannot_be_measured_costs_its_rows_alone(role: str, tmp_path: Path) -> None:
    """Not the audit. What is not finite is done again step by step: there is no memory for that."""

    def full(*_: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    def spoilt(*given: Any, **more: Any) -> Any:
        output = attempt(*given, **more)
        assert isinstance(output, Output)
        output.out[0, 1, 2, 3] = math.nan
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "_step_by_step", full)
        if role == "kernel":
            patch.setattr(jobs, "_entries", by(spoilt))
        else:
            patch.setattr(comparison.Totals, "finite", False)
        found = audited(tmp_path, **ONE)
    failed = [row for row in found.rows if row.status == "failed"]
    assert role in {row.role for row in failed}
    assert {row.role for row in failed} <= {"floor", "baseline", "kernel"}
    assert all("out of memory" in (row.reason or "") for row in failed)
    assert role not in {row.role for row in found.profiles}


@pytest.mark.parametrize("busy", [False, True])
def test_an_interrupt_loses_nothing_for_good(
    busy: bool, gpu: type[Gpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the midst of a profile that is made: a run that is continued has it, and all others."""
    made, times = profiles._row, list[int]()

    def interrupted(task: Task, *given: Any) -> Any:
        times.append(1)
        if len(times) == 3:
            raise KeyboardInterrupt
        return made(task, *given)

    gpu.busy = busy
    monkeypatch.setattr(profiles, "_row", interrupted)
    with pytest.raises(KeyboardInterrupt):
        audited(tmp_path / "a")
    found, whole = audited(tmp_path / "a"), audited(tmp_path / "b")
    assert found.profiles == whole.profiles
    assert found.rows == whole.rows


@pytest.mark.usefixtures("one_pass")
def test_one_format_goes_before_the_next_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no kernel under audit ran in it, and numbers were under way."""
    case, alive = drawn(), list[bool]()
    planned = [Planned(role=role, kernel=find(name), options={}) for role, name in BESIDE]
    formats = (FORMATS["bfloat16"], FORMATS["float16"])
    setting = Setting(system=HERE, formats=formats, plan=planned)
    wanted = frozenset(step.task.key for step in steps(case.ref, setting))
    prepare, made = Bench._prepare, list[Any]()

    def prepared(self: Bench, fmt: Format) -> Any:
        alive.extend(ref() is not None for ref in made)
        found = prepare(self, fmt)
        made.append(weakref.ref(found.yardstick))
        return found

    monkeypatch.setattr(Bench, "_prepare", prepared)
    gc.disable()
    try:
        job = Job(located=Held(case=case, axes={}), wanted=wanted)
        assert len(list(entries(job, setting, attempt, Stopwatch()))) == 6
    finally:
        gc.enable()
    assert alive == [False]


@pytest.mark.usefixtures("gpu")
def test_what_is_put_off_is_written_once(tmp_path: Path) -> None:
    """The record of a case that comes by with every seed of a sweep."""
    sweep(plan(swept(tmp_path, kernels=["sdpa-math"], seeds=3)), tmp_path / "out")
    keys = written(tmp_path / "out")
    assert len(keys) == len(set(keys)) > 6
