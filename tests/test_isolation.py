"""Isolation: whatever a kernel does to its process costs its own result and nothing
else."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from oracles import FEATURES, make_case
from planted import Planted, of_family
from planted.processes import CUDA_ERROR

from numdev.cases import AttentionCase, CaseRef
from numdev.errors import MeasurementError
from numdev.kernels import Kernel, Output, find, kernel_of_function
from numdev.request_models import SweepRequest
from numdev.sources.capture import Captured
from numdev.studies.audit import isolation, sweep, worker_lifetime
from numdev.studies.audit.case_measurement import Unmeasured
from numdev.studies.audit.ctrl_c import deferred, handling, noticing
from numdev.studies.audit.isolation import (
    Failure,
    Isolated,
    Runner,
    attempt,
)
from numdev.studies.audit.journal import Journal
from numdev.studies.audit.plan import Plan
from numdev.studies.audit.run import run_source
from numdev.studies.audit.section_timing import Stopwatch


@pytest.fixture(scope="module")
def shared() -> Iterator[Isolated]:
    """One for all tests here: each finds it as the one before left it."""
    with Isolated() as isolated:
        yield isolated


def ran(
    isolated: Isolated, name: str, case: Any, options: Any, limit_s: float = 600.0
) -> Any:
    """What a kernel, by its name, gives in a process of its own."""
    isolated.limit_s = limit_s
    return isolated(find(name), case, options)


@pytest.fixture
def case() -> AttentionCase:
    return make_case(dtype=torch.bfloat16, heads=2, q_len=5, kv_len=7, head_dim=4)


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def wait_for(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def wait_for_the_end(note: Path) -> None:
    """Of the processes in a note; there is none where a busy machine did not come to
    write it."""
    for pid in note.read_text().split() if note.exists() else ():
        wait_for(lambda pid=pid: gone(int(pid)))


def plain(x: Any) -> Any:
    """A value, or the bits of a tensor."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.dtype, x.shape, bytes(x.cpu().contiguous().view(torch.uint8).numpy())


def same(a: Any, b: Any) -> bool:
    """Outputs equal in every field, tensors bit for bit."""
    return {n: plain(x) for n, x in vars(a).items()} == {
        n: plain(x) for n, x in vars(b).items()
    }


BROKEN = [entry for entry in of_family("process") if entry.says]


@pytest.mark.slow
@pytest.mark.parametrize("entry", BROKEN, ids=lambda entry: entry.name)
@pytest.mark.one_in(4)
def test_a_broken_kernel_costs_its_own_row(
    shared: Isolated, case: Any, entry: Planted
) -> None:
    """The reason says what became of it, and the next kernel runs as if nothing had
    been."""
    failure = ran(shared, entry.address, case, {})
    assert failure.status == "failed"
    assert re.match(str(entry.says), failure.reason), failure.reason
    after = ran(shared, "baseline", case, {})
    assert isinstance(after, Output), after
    assert same(find("baseline").attend(case), after)


@pytest.mark.slow
def test_a_hang_ends_at_its_limit(
    shared: Isolated, case: AttentionCase, tmp_path: Path
) -> None:
    """A kernel that holds the interpreter's lock for ever is ended, and so is what it
    started."""
    # So that a worker is there, and the clock is the kernel's
    ran(shared, "baseline", case, {})
    note = tmp_path / "note"
    failure = ran(shared, "planted:hangs", case, {"note": str(note)}, limit_s=1.0)
    assert failure == Failure("failed", "no answer within 1 s")
    wait_for_the_end(note)


def test_ctrl_c_ends_the_worker(case: AttentionCase, tmp_path: Path) -> None:
    """KeyboardInterrupt comes out, and leaves neither the worker nor what it started."""
    note = tmp_path / "note"

    def interrupt() -> None:
        wait_for(note.exists)
        os.kill(os.getpid(), signal.SIGINT)

    # Where the tests run in the background of a shell, SIGINT is ignored from the start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Isolated() as isolated:
            threading.Thread(target=interrupt).start()
            with pytest.raises(KeyboardInterrupt):
                ran(isolated, "planted:hangs", case, {"note": str(note)})
            assert isolated.worker is None
    finally:
        signal.signal(signal.SIGINT, before)
    wait_for_the_end(note)


@pytest.mark.slow
def test_runs_begun_ahead_are_as_if_run_when_asked(
    shared: Isolated, case: AttentionCase
) -> None:
    """Each call takes one of them; a call of anything else gets its own answer, whatever
    has begun, and so does one more of the same."""
    other = make_case(dtype=torch.bfloat16, heads=2, q_len=3, kv_len=7, head_dim=4)
    at_home, elsewhere = (find("baseline").attend(x) for x in (case, other))
    shared.begin(find("baseline"), case, {}, times=2)
    for _ in range(3):
        assert same(at_home, ran(shared, "baseline", case, {}))
    shared.begin(find("baseline"), case, {}, times=2)
    assert same(elsewhere, ran(shared, "baseline", other, {}))
    for name in ("planted:exits", "planted:refuses"):
        shared.begin(find(name), case, {}, times=2)
        for _ in range(2):
            assert ran(shared, name, case, {}) == attempt(find(name), case, {})
    assert same(at_home, ran(shared, "baseline", case, {}))


@pytest.mark.slow
def test_a_worker_that_died_between_runs_is_replaced(
    case: AttentionCase, monkeypatch: Any
) -> None:
    """The second run that was begun ahead has another worker, as if it had been asked for
    only then."""
    look = isolation.Worker.is_spoiled

    def die_and_look(worker: isolation.Worker) -> bool:
        if threading.current_thread() is not threading.main_thread():
            worker.process.kill()
            worker.process.wait()
        return look(worker)

    monkeypatch.setattr(isolation.Worker, "is_spoiled", die_and_look)
    at_home = find("baseline").attend(case)
    with Isolated() as isolated:
        isolated.begin(find("baseline"), case, {}, times=2)
        for _ in range(2):
            assert same(at_home, ran(isolated, "baseline", case, {}))


@pytest.mark.slow
def test_a_run_begun_ahead_ends_with_its_limit_and_with_the_block(
    case: AttentionCase, tmp_path: Path
) -> None:
    """A hang belongs to the call that takes it, though its process was started before;
    where none does, nothing is left of it, nor of the runs after it."""
    taken, dropped = tmp_path / "taken", tmp_path / "dropped"
    with Isolated(limit_s=1.0) as isolated:
        isolated.start()
        started = isolated.worker
        isolated.begin(find("planted:hangs"), case, {"note": str(taken)}, times=2)
        assert isolated.worker is started is not None
        failure = isolated(find("planted:hangs"), case, {"note": str(taken)})
        assert failure == Failure("failed", "no answer within 1 s")
        assert isinstance(ran(isolated, "baseline", case, {}), Output)
        isolated.begin(find("planted:hangs"), case, {"note": str(dropped)}, times=2)
        wait_for(dropped.exists)
    wait_for_the_end(taken)
    wait_for_the_end(dropped)


@pytest.mark.slow
def test_rows_are_those_of_kernels_that_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel's, one that declines included, though its process begins with each as
    soon as the one before has run, of the next call too, and with the first before what
    it is measured against is there."""
    events: dict[tuple[str, str, str, str], None] = {}

    def noting(what: str, method: str) -> None:
        """Has a method note that a kernel is asked for, or begins, in a call."""
        function = getattr(Isolated, method)

        def noted(isolated: Isolated, asked: Any, *more: Any, **how: Any) -> Any:
            case = more[0] if isinstance(asked, Kernel) else asked.case
            events[what, asked.name, case.ref.case, case.format.name] = None
            return function(isolated, asked, *more, **how)

        monkeypatch.setattr(Isolated, method, noted)

    noting("begins", "_begin")
    noting("asked", "__call__")
    names = ("planted:refuses", "planted:sees")
    request = SweepRequest(
        target="small",
        cases=[{"name": str(n), "heads": 2, "seq_len": n, "head_dim": 8} for n in (5, 3)],
        kernels=[{"name": name} for name in names],
        formats=["bfloat16", "float16"],
        backward=True,
        repeats=2,
        seeds=(0,),
        device="cpu",
    )
    planned, watch = sweep.plan(request), Stopwatch("cpu")

    def rows(run: Runner) -> list[object]:
        with Journal.open(None, {}, overwrite=False) as journal:
            run_source(planned.source, planned.plan, journal, run, watch)
            return journal.rows("row")

    at_home = rows(attempt)
    assert not events
    with Isolated() as isolated:
        assert rows(isolated) == at_home
    calls = [(case, fmt) for case in ("5", "3") for fmt in ("bfloat16", "float16")]
    runs = [(name, *call) for call in calls for name in names]
    measured = [event for event in events if event[-1] != "float32"]  # to name a mistake
    assert measured == [(what, *run) for run in runs for what in ("begins", "asked")]


def test_a_function_without_a_parameter_for_the_call_is_not_run() -> None:
    """Nor is a process started: it says what the function says in this process."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it ran")

    kernel = kernel_of_function("mine:attend", attend)
    case = make_case(dtype=torch.bfloat16, heads=2, q_len=4, kv_len=4, is_causal=True)
    isolated = Isolated()
    isolated.begin(kernel, case, {})
    declined = isolated(kernel, case, {})
    assert declined == attempt(kernel, case, {})
    assert declined.status == "skipped"
    assert "causal" in declined.reason
    assert isolated.worker is None


def test_a_call_that_cannot_be_loaded_says_so_where_it_is_needed() -> None:
    """Though a thread has tried before; one without a task is not loaded."""
    located = Captured(ref=CaseRef(case="a"), load=lambda: 1 // 0)
    task: Any = ("planned", "task")
    work = Unmeasured(located, [task], Plan.__new__(Plan), Stopwatch())
    work.begin_loading()
    with pytest.raises(ZeroDivisionError):
        _ = work.case
    finished = dataclasses.replace(work, tasks=[], loading=None)
    finished.begin_loading()
    assert finished.loading is None


def hang_in_isolation(note: str) -> None:
    Isolated()(find("planted:hangs"), make_case(), {"note": note})


@pytest.mark.slow
def test_no_orphans_of_a_killed_parent(tmp_path: Path) -> None:
    """Where numdev itself is killed, and can do nothing, worker and its children die all
    the same, though the kernel holds the interpreter's lock."""
    note = tmp_path / "note"
    source = f"import test_isolation as t; t.hang_in_isolation({str(note)!r})"
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    parent = subprocess.Popen([sys.executable, "-c", source], env=env)
    wait_for(note.exists)
    parent.kill()
    parent.wait()
    wait_for_the_end(note)


@pytest.mark.slow
def test_a_worker_that_died_idle_is_replaced(
    shared: Isolated, case: AttentionCase
) -> None:
    """That is no fault of the next kernel."""
    ran(shared, "baseline", case, {})
    assert shared.worker is not None
    shared.worker.process.kill()
    shared.worker.process.wait()
    assert isinstance(ran(shared, "baseline", case, {}), Output)


def test_a_worker_that_cannot_start_is_said(
    case: AttentionCase, tmp_path: Path, monkeypatch: Any
) -> None:
    """That is no kernel's failure, and the reason is quoted."""
    script = tmp_path / "supervisor.py"
    script.write_text("import no_such_module")
    monkeypatch.setattr(worker_lifetime, "SUPERVISOR", script)
    says = r"exit code 1 \(ModuleNotFoundError: .*no_such_mod"
    with Isolated() as isolated, pytest.raises(MeasurementError, match=says):
        ran(isolated, "baseline", case, {})


@pytest.mark.slow
def test_torch_settings_go_along(shared: Isolated, case: AttentionCase) -> None:
    """Threads and determinism are those of this process, at every task."""
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for deterministic in (True, False):
            torch.use_deterministic_algorithms(deterministic)
            from_worker = ran(shared, "planted:sees", case, {})
            assert from_worker.ran == repr((torch.get_num_threads(), deterministic))
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("feature", FEATURES)
def test_every_case_crosses_unchanged(shared: Isolated, feature: str) -> None:
    """Each feature of a case arrives as it left: the kernel gives what it gives here."""
    case = make_case(**FEATURES[feature])
    at_home = attempt(find("reference"), case, {})
    from_worker = ran(shared, "reference", case, {})
    assert isinstance(from_worker, Output), from_worker
    assert same(at_home, from_worker)


def test_an_output_of_eight_bits_comes_back(
    shared: Isolated, case: AttentionCase
) -> None:
    at_home = attempt(find("planted:eight_bits"), case, {})
    from_worker = ran(shared, "planted:eight_bits", case, {})
    assert isinstance(from_worker, Output), from_worker
    assert from_worker.out.dtype == torch.float8_e4m3fn
    assert same(at_home, from_worker)


def test_an_attempt_reports_what_was_raised(case: AttentionCase) -> None:
    """Exceptions of any kind, refusals and the end of the program become failures."""
    for name, status, reason in (
        ("raises", "failed", CUDA_ERROR),
        ("exits", "failed", "ended the program (exit code 4)"),
        ("refuses", "skipped", "head_dim 4 is too small"),
        ("interrupts", "failed", "KeyboardInterrupt: from within"),
    ):
        assert attempt(find(f"planted:{name}"), case, {}) == Failure(status, reason)


def test_the_users_ctrl_c_is_told_from_a_kernels(case: AttentionCase) -> None:
    """It comes out, whatever the kernel makes of it; the handler is what it was
    before."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for name in ("is_interrupted", "turns_interrupts"):
            with pytest.raises(KeyboardInterrupt):
                attempt(find(f"planted:{name}"), case, {})
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_python_did_not_set_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a program of another language in which Python is embedded."""
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", Mock(return_value=None))
    with handling(lambda number, frame: None) as before, deferred(), noticing() as came:
        assert (before, came()) == (None, False)
    signal.signal.assert_not_called()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGRTMIN + 1, "SIGRTMIN+1")]
)
def test_any_signal_that_ends_a_worker_is_named(
    case: AttentionCase, number: int, name: str
) -> None:
    end, lifeline = os.pipe()
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["sh", "-c", f"kill -{number} $$"])
    theirs.close()
    worker = isolation.Worker(worker_lifetime.WorkerProcess(process, ours, end, lifeline))
    why = f"its process was killed by {name}"
    with pytest.raises(MeasurementError, match=re.escape(f"started: {why}")):
        worker.ready.result()
    assert worker.answer("k", b"", case, 60.0) == Failure("failed", why)
    worker.close()


@pytest.mark.gpu
def test_a_cuda_fault_costs_its_own_row(shared: Isolated) -> None:
    """A device-side assertion ruins its process for good; this one, and the next row, are
    well."""
    case = make_case(dtype=torch.bfloat16, heads=2, q_len=64, kv_len=64, head_dim=64)
    case = dataclasses.replace(
        case, **{n: getattr(case, n).cuda() for n in ("q", "k", "v")}
    )
    failure = ran(shared, "planted:poisons_cuda", case, {}, limit_s=120)
    assert "CUDA error" in failure.reason
    after = ran(shared, "sdpa-flash", case, {}, limit_s=120)
    assert isinstance(after, Output), after
    assert after.out.is_cuda
    at_home = find("sdpa-flash").attend(case)
    assert plain(at_home.out) == plain(after.out)
