"""Runs on Dask: what travels, who refuses, and what becomes of jobs whose workers die."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from distributed import KilledWorker

from numdev.audit.cluster import crew, remote
from numdev.audit.cluster import team as cluster
from numdev.audit.cluster.crew import Crew, client_of, crew_of, sharing
from numdev.audit.cluster.team import Team, expectation
from numdev.audit.jobs import Held, Job, Setting, case_key, entries, steps
from numdev.audit.journal import Journal
from numdev.audit.run import Executor, Here, Run, header, plan_controls, plan_formats, plan_kernels
from numdev.audit.sweep import plan, sweep
from numdev.audit.timing import Stopwatch
from numdev.config import AuditConfig, Choice, SweepRequest
from numdev.errors import MeasurementError, UsageError
from numdev.report import read
from numdev.sources.opening import Captured, ConfigSource, Located
from numdev.sources.tensorfile import open_cases
from numdev.sources.tensorwriter import Writer
from numdev.system import System
from numdev.yamlfile import validated

HERE = str(Path(__file__).parent)
KERNELS = ("sdpa-math", "fragile_kernels:raises")
CASES = [{"name": "a", "heads": 2, "head_dim": 8, "seq_len": [8, 16]}]


def source_of(seeds: tuple[int, ...] = (0, 1)) -> ConfigSource:
    configs = validated({"cases": CASES}, AuditConfig, "here").cases
    return ConfigSource("here", configs, seeds, System.here("cpu"))


def setting_of(*kernels: str, **changes: Any) -> Setting:
    planned = plan_kernels(Choice(name=name) for name in kernels or KERNELS)
    planned += plan_controls(gradients=False)[:1]
    given = {"formats": plan_formats(("bfloat16", "float16"), planned), "plan": planned, **changes}
    return Setting(system=System.here("cpu"), **given)


def head_of(setting: Setting) -> dict[str, Any]:
    return header({"a": 1}, setting.system, setting.plan, {})


class Lives:
    """A Dask client whose worker is this process. `dies` is asked before every job, with the parcel
    of that job, whether its worker dies of it."""

    status = "running"

    def __init__(self, dies: Callable[[remote.Parcel], bool], workers: int = 2) -> None:
        self.dies, self.workers = dies, workers
        self.shipped = self.under_way = 0
        self.scheduler = type("Scheduler", (), {"address": "tcp://here"})

    def nthreads(self) -> dict[str, int]:
        return {f"tcp://{i}": 1 for i in range(self.workers)}

    def submit(self, function: Any, expected: str, parcel: bytes, tensors: Any, **_: Any) -> Any:
        self.shipped += tensors is not None
        self.under_way += 1
        return Future(self, function, expected, parcel, tensors)


class Future:
    """Of a `Lives`: done as soon as somebody waits for it."""

    def __init__(self, client: Lives, function: Any, *given: Any) -> None:
        self.client, self.function, self.given = client, function, given

    def add_done_callback(self, call: Callable[[Any], None]) -> None:
        call(self)

    def result(self, timeout: float | None = None) -> Any:
        self.client.under_way -= 1
        opened = remote.pickle.loads(self.given[1])
        if self.client.dies(opened):
            raise KilledWorker("numdev", None, 0)
        return self.function(*self.given)


@pytest.fixture(autouse=True)
def found_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fragile_kernels` is found here and in processes that are started."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{Path(HERE).parent}")


def run_of(
    tmp_path: Path,
    setting: Setting,
    source: Any,
    client: Lives | Crew | None,
    name: str = "out",
    **given: Any,
) -> tuple[list[Any], list[str]]:
    """All rows of a run in the order of a report, and the keys in its journal."""
    watch, head = Stopwatch(), head_of(setting)
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(Journal.open(tmp_path / name, head, overwrite=False))
        team: Executor = Here(setting=setting, watch=watch)
        if client is not None:
            here = isinstance(client, Lives)
            plain: dict[str, Any] = {"expected": expectation(journal.header), "limit_s": 60.0}
            team = Team(
                crew=Crew(workers=2) if here else client,
                setting=setting,
                isolated=False,
                watch=watch,
                say=lambda text: None,
                stack=stack,
                client=client if here else None,
                **{**plain, **given},
            )
        run = Run(
            journal=journal,
            setting=setting,
            executor=team,
            progress=lambda what, done, total: None,
            total=0,
            watch=watch,
        )
        run.over(source, lambda text: None)
        rows = [list(journal.rows(kind)) for kind in ("case", "row", "worst", "attribution")]
    lines = (tmp_path / name / "rows.jsonl").read_text().splitlines()[1:]
    return rows, [json.loads(line)["task"] for line in lines]


# --- who measures --------------------------------------------------------------------------------


def test_workers_and_a_scheduler_exclude_each_other() -> None:
    """A crew is this machine's or a cluster's; neither is nobody."""
    assert crew_of(None, None) is None
    with pytest.raises(UsageError, match="give one of them"):
        crew_of(2, "tcp://10.0.0.1:8786")


@pytest.mark.parametrize("address", ["nonsense", "foo://here:1", "tcp://127.0.0.1"])
def test_what_is_no_address_is_refused_at_once(address: str) -> None:
    """Before a client is made for it, whose end would take a minute and leave a traceback."""
    begun = client_of(Crew(scheduler=address), System.here("cpu"))
    with pytest.raises(UsageError, match="is no address that can be reached"), begun:
        pytest.fail("a client of nothing")


def test_workers_are_at_most_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU; each is a process with a torch of its own."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    with sharing(Crew(workers=4), "cpu"):
        pass
    begun = sharing(Crew(workers=5), "cpu")
    with pytest.raises(UsageError, match="--workers 5: this machine has 4 processors"), begun:
        pytest.fail("too many")


@pytest.mark.parametrize("given", [{"workers": 2}, {"scheduler": "tcp://10.0.0.1:8786"}])
def test_without_dask_the_extra_is_named(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing is said with the command that installs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r'needs Dask.*pip install "numdev\[dask\]"'):
        Crew(**given)


def test_threads_are_shared_out_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers on a CPU get equal shares of the threads, at least one, and so does this process."""
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        for workers, share in ((1, 4), (2, 2), (3, 1), (9, 1)):
            with sharing(Crew(workers=workers), "cpu"):
                assert torch.get_num_threads() == share
            assert torch.get_num_threads() == 4
        with sharing(None, "cpu"), sharing(Crew(scheduler="tcp://a:1"), "cpu"):
            assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_no_more_workers_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker has a GPU of its own."""
    monkeypatch.setattr(System, "here", lambda device: System(device="cuda"))
    monkeypatch.setattr(crew, "visible_gpus", lambda: ["3", "5"])
    with sharing(Crew(workers=2), "auto"):
        pass
    with (
        pytest.raises(UsageError, match="--workers 3: each needs a GPU, and 2 can be seen"),
        sharing(Crew(workers=3), "auto"),
    ):
        pass


def test_a_worker_with_several_threads_is_refused(tmp_path: Path) -> None:
    """Jobs in one process would share torch's settings."""
    client = Lives(lambda parcel: False)
    client.nthreads = lambda: {"tcp://10.0.0.2:1": 8}  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"worker tcp://10.0.0.2:1: does 8 jobs .*--nthreads 1"):
        run_of(tmp_path, setting_of(), source_of(), client)


# --- the same as in one process ------------------------------------------------------------------


@pytest.mark.parametrize(
    "more", [{"gradients": True}, {"examine": True, "explain": True}, {"heads": (1,)}, {}]
)
def test_a_team_reports_what_one_process_does(more: dict[str, Any], tmp_path: Path) -> None:
    """The same rows in the same order, each task once in the journal, whatever is measured."""
    setting = setting_of(*KERNELS[: 1 if more else 2], **more)
    source = source_of((0,))
    source.cases = [dataclasses.replace(d, gradients=setting.gradients) for d in source.cases]
    alone, keys = run_of(tmp_path, setting, source, None, "alone")
    together, theirs = run_of(tmp_path, setting, source, Lives(lambda parcel: False), "team")
    assert together == alone
    assert Counter(theirs) == Counter(keys)
    assert len(keys) == len(set(keys)) >= 20


def test_a_finished_run_goes_nowhere(tmp_path: Path) -> None:
    """Of a journal that is whole nothing is sent; of one cut short, what is missing."""
    setting, source = setting_of(), source_of()
    whole, keys = run_of(tmp_path, setting, source, Lives(lambda p: False))
    nobody = Lives(lambda parcel: pytest.fail("a job was sent"))
    assert run_of(tmp_path, setting, source, nobody) == (whole, keys)
    file = tmp_path / "out" / "rows.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:7] + lines[9:]))
    wanted: list[str] = []
    client = Lives(lambda parcel: wanted.extend(parcel.wanted) or False)  # type: ignore[func-returns-value]
    rows, again = run_of(tmp_path, setting, source, client)
    assert (rows, sorted(again)) == (whole, sorted(keys))
    assert sorted(wanted) == sorted([keys[6], keys[7]])


def test_live_cases_are_shipped_and_few_at_a_time(tmp_path: Path) -> None:
    """A case out of a model travels with its tensors, strides and all; then one more job than there
    are workers is under way at most."""
    setting, drawn = setting_of("sdpa-math"), source_of(tuple(range(3))).cases
    client = Lives(lambda parcel: False)
    under_way = []

    class Live:
        def visit(self, handle: Callable[[Located], None]) -> None:
            for one in drawn:
                case = one.load()
                handle(Captured(case=dataclasses.replace(case, q=case.q.mT.contiguous().mT)))
                under_way.append(client.under_way)

    there, _ = run_of(tmp_path, setting, Live(), client, "team")
    assert client.shipped == len(drawn)
    assert max(under_way) == 3
    assert there == run_of(tmp_path, setting, Live(), None, "alone")[0]


def test_a_file_that_is_another_one_there_is_not_read(tmp_path: Path) -> None:
    """Cases in files are read by the worker where the file is the same; else they are shipped."""
    with Writer(tmp_path / "cases", overwrite=False) as writer:
        for drawn in source_of((0,)).cases:
            writer.add(drawn.load(), {})
    stored = open_cases(tmp_path / "cases", device="cpu").cases

    class Stored:
        def visit(self, handle: Callable[[Located], None]) -> None:
            for case in stored:
                handle(case)

    setting = setting_of("sdpa-math")
    there, gone = Lives(lambda p: False), Lives(lambda p: False)
    alone, _ = run_of(tmp_path, setting, Stored(), None, "alone")
    assert run_of(tmp_path, setting, Stored(), there, "there")[0] == alone
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote.Stamp, "holds", lambda self: False)
        assert run_of(tmp_path, setting, Stored(), gone, "gone")[0] == alone
    assert (there.shipped, gone.shipped) == (0, len(stored))
    stamp = remote.Stamp.of(stored[0].path)
    assert stamp.holds()
    stored[0].path.write_bytes(b"another")
    assert not stamp.holds()


# --- a worker that is different ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (("environment", "packages", "torch"), r"packages\.torch is '.*' there, and 'other' here"),
        (("environment", "numdev"), r"numdev is '.*' there, and 'other' here"),
        (("environment", "cpu_capability"), r"cpu_capability is '.*' there, and 'other' here"),
        (("kernels", "sdpa-math"), "another source of the kernel sdpa-math"),
    ],
)
def test_another_environment_is_refused(
    part: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker with another version or source measures nothing, and says what differs."""
    head = json.loads(json.dumps(head_of(setting_of()), default=str))
    inner = head
    for name in part[:-1]:
        inner = inner[name]
    inner[part[-1]] = "other"
    client = Lives(lambda parcel: False)
    with pytest.raises(UsageError, match=words):
        run_of(tmp_path, setting_of(), source_of(), client, expected=expectation(head))


def test_a_worker_may_see_one_gpu_of_many() -> None:
    """Whoever starts workers sees all, each worker its own."""
    head = head_of(setting_of())
    head["environment"]["devices"] = 4
    remote._check(json.loads(expectation(head)))


def test_a_worker_takes_over_the_settings_of_torch() -> None:
    """Threads and switches are set before anything is compared or measured."""
    setting = setting_of("sdpa-math")
    expected = expectation(head_of(setting))
    torch.set_num_threads(3)
    try:
        remote._check(json.loads(expected))
        assert torch.get_num_threads() == setting.system.threads
    finally:
        torch.set_num_threads(setting.system.threads)


# --- workers that die ----------------------------------------------------------------------------


def test_deaths_by_chance_change_nothing(tmp_path: Path) -> None:
    """Whichever jobs lose their workers, none three times alone: the same report."""
    setting, source = setting_of("sdpa-math"), source_of((0,))
    alone, keys = run_of(tmp_path, setting, source, None, "alone")
    for seed in range(10):
        draw, died = random.Random(seed), Counter[frozenset[str]]()

        def dies(parcel: remote.Parcel, draw: Any = draw, died: Any = died) -> bool:
            hit = draw.random() < 0.5 and died[parcel.wanted] < 2
            died[parcel.wanted] += hit
            return bool(hit)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(remote, "_supervised", lambda: InThisProcess)
            found, theirs = run_of(tmp_path, setting, source, Lives(dies), f"team{seed}")
        assert found == alone
        assert sorted(theirs) == sorted(keys)


class InThisProcess:
    """In the place of an isolated process, for numbers alone."""

    @staticmethod
    def run(name: str, options: Any, case: Any, *, gradients: bool, limit_s: float) -> Any:
        return remote.attempt(remote.find(name), case, options, gradients=gradients)


def test_a_task_that_always_kills_ends(tmp_path: Path) -> None:
    """A task whose worker dies whatever is done becomes one failed row, after TRIES alone; all
    others are measured, and later jobs have the kernels that failed isolated from the start."""
    setting, source = setting_of(), source_of()
    alone, _ = run_of(tmp_path, setting, source, None, "alone")
    floor = {
        step.task.key
        for located in source.cases
        for step in steps(located.ref, setting)
        if step.task.role == "floor" and step.task.format == "bfloat16"
    }
    seen: list[remote.Parcel] = []

    def dies(parcel: remote.Parcel) -> bool:
        seen.append(parcel)
        return not floor.isdisjoint(parcel.wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "_supervised", lambda: InThisProcess)
        client = Lives(dies, workers=1)  # so that some jobs are sent when others are back
        (cases, rows, *_), keys = run_of(tmp_path, setting, source, client, "team")
    failed = [row for row in rows if row["reason"] and "its worker died, 3 times" in row["reason"]]
    assert {(r["role"], r["format"], r["status"]) for r in failed} == {
        ("floor", "bfloat16", "failed")
    }
    assert len(failed) == len(floor)
    assert cases == alone[0]
    rest = [row for row in alone[1] if (row["role"], row["format"]) != ("floor", "bfloat16")]
    assert [row for row in rows if row not in failed] == rest
    assert len(keys) == len(set(keys))
    per_job = Counter(key for parcel in seen for key in parcel.wanted & floor)
    assert set(per_job.values()) == {2 + cluster.TRIES}
    assert seen[0].isolated == frozenset()
    assert any(p.isolated == {"fragile_kernels:raises"} for p in seen)


def test_a_scheduler_that_is_gone_ends_the_run(tmp_path: Path) -> None:
    """With exit code 3, and the word that what is finished is kept."""
    with pytest.MonkeyPatch.context() as patch:

        def result(self: Future, timeout: float | None = None) -> Any:
            raise CancelledError

        patch.setattr(Future, "result", result)
        with pytest.raises(MeasurementError, match=r"scheduler at tcp://here is gone.*is kept"):
            run_of(tmp_path, setting_of(), source_of(), Lives(lambda parcel: False))


def test_a_hanging_kernel_ends_its_process() -> None:
    """Even where it holds the interpreter's lock; one in time does not."""
    code = """
import ctypes, time
from numdev.audit.cluster.remote import _ended_after
with _ended_after(5): pass
with _ended_after(0.2): ctypes.PyDLL(None).sleep(30)
"""
    began = time.monotonic()
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1
    assert time.monotonic() - began < 25


def test_only_what_is_wanted_is_done() -> None:
    """A job gives the entries that are wanted, and loads no case for none."""
    setting, located = setting_of("sdpa-math"), source_of().cases[0]
    every = [
        e.key for e in entries(_job(located, None, setting), setting, remote.attempt, Stopwatch())
    ]
    assert every[0] == case_key(located.ref)
    job = _job(located, frozenset(every[3:5]), setting)
    assert [e.key for e in entries(job, setting, remote.attempt, Stopwatch())] == every[3:5]

    class Nowhere(Held):
        def load(self) -> Any:
            raise AssertionError("was loaded")

    nowhere = _job(Nowhere(case=located.load(), axes={}), frozenset(), setting)
    assert list(entries(nowhere, setting, remote.attempt, Stopwatch())) == []


def _job(located: Located, wanted: frozenset[str] | None, setting: Setting) -> Job:
    keys = [key for step in steps(located.ref, setting) for key in step.keys]
    if wanted is None:
        wanted = frozenset([case_key(located.ref), *keys])
    return Job(located=located, wanted=wanted)


# --- with Dask -----------------------------------------------------------------------------------


def request_of(*kernels: str) -> SweepRequest:
    given = {"cases": CASES, "kernels": [*kernels], "seeds": 2, "device": "cpu", "reproducers": 0}
    return validated({"target": "here", **given}, SweepRequest, "here")


def comparable(found: Any) -> dict[str, Any]:
    plain: dict[str, Any] = found.model_dump(mode="json")
    del plain["timings"], plain["provenance"]["created"]
    return plain


@pytest.mark.slow
def test_kernels_that_crash_hang_and_eat_memory_cost_their_rows(tmp_path: Path) -> None:
    """With real workers: every other row is there, and the same as from one process."""
    bad = {
        "fragile_kernels:segfaults": "its process was killed by SIGSEGV",
        "fragile_kernels:hangs": "no answer within 15 s",
        "fragile_kernels:exhausts": "RuntimeError: [enforce fail",
        "fragile_kernels:raises": "ValueError: no",
    }
    formats = {"formats": plan_formats(("bfloat16",), [])}
    setting, source = setting_of("sdpa-math", *bad, **formats), source_of((0,))
    source.cases = source.cases[:1]
    (_, rows, *_), keys = run_of(tmp_path, setting, source, Crew(workers=1), "team", limit_s=15.0)
    failed = {row["kernel"]: row["reason"] for row in rows if row["status"] == "failed"}
    assert failed.keys() == bad.keys()
    assert all(failed[kernel].startswith(words) for kernel, words in bad.items())
    assert len(keys) == len(set(keys))
    alone, _ = run_of(tmp_path, setting_of("sdpa-math", **formats), source, None, "alone")
    assert [row for row in rows if row["kernel"] not in bad] == alone[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_kernel_that_ruins_the_gpu_costs_its_row(tmp_path: Path) -> None:
    """A device-side assert, after which nothing runs in its process: every other row is there, and
    the same as from one process."""
    bad = "broken_kernels:poisons_cuda"
    asked = request_of(bad, "sdpa-math").model_copy(update={"device": "cuda"})
    found = sweep(plan(asked), tmp_path / "team", crew=Crew(workers=1))
    failed = [row for row in found.rows if row.status == "failed"]
    assert {row.kernel for row in failed} == {bad}
    assert len(failed) == len(found.cases) * len(asked.seeds)
    sound = asked.model_copy(update={"kernels": asked.kernels[1:]})
    alone = sweep(plan(sound), tmp_path / "alone")
    assert [row for row in found.rows if row.kernel != bad] == list(alone.rows)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_every_worker_has_a_gpu_of_its_own(tmp_path: Path) -> None:
    """Two workers on two GPUs, and the report of one process."""
    asked = request_of("sdpa-math", "fragile_kernels:where").model_copy(update={"device": "cuda"})
    alone = sweep(plan(asked), tmp_path / "alone")
    together = sweep(plan(asked), tmp_path / "team", crew=Crew(workers=2))
    plain = [comparable(x) for x in (together, alone)]
    seen = {row["ran"] for row in plain[0]["rows"] if row["kernel"] == "fragile_kernels:where"}
    assert len(seen) == 2
    for found in plain:
        found["rows"] = [r for r in found["rows"] if r["kernel"] != "fragile_kernels:where"]
    assert plain[0]["rows"] == plain[1]["rows"]


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_nothing(tmp_path: Path) -> None:
    """SIGKILL to a worker while it measures: the same report."""
    asked = request_of("sdpa-math")
    alone = sweep(plan(asked), tmp_path / "alone")
    killed = []

    def kill_one(what: str, done: int, total: int) -> None:
        for process in psutil.Process().children(recursive=True) if done and not killed else ():
            if "spawn_main" in " ".join(process.cmdline()):
                process.kill()
                killed.append(process.pid)
                break

    together = sweep(plan(asked), tmp_path / "team", crew=Crew(workers=2), progress=kill_one)
    assert killed
    assert comparable(together) == comparable(alone)
    left = psutil.Process().children(recursive=True)
    assert not [p for p in left if "spawn_main" in " ".join(p.cmdline())]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers are copied on Linux alone")
@pytest.mark.parametrize("server_too", [False, True])
def test_workers_of_the_program_are_copies_and_may_be_killed(
    tmp_path: Path, server_too: bool
) -> None:
    """`python -m numdev sweep --workers 2`: SIGKILL to a worker, and to what workers are copies of;
    the report of a run without either."""
    file, out = tmp_path / "sweep.yaml", tmp_path / "team"
    given = {"cases": CASES, "kernels": ["sdpa-math"], "seeds": 2, "reproducers": 0}
    file.write_text(json.dumps(given))
    command = [sys.executable, "-m", "numdev", "sweep", str(file), "-q", "--device", "cpu", "-o"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert subprocess.run([*command, str(tmp_path / "alone")], env=alone).returncode == 0
    client = subprocess.Popen([*command, str(out), "--workers", "2"], env=alone)
    copies: list[psutil.Process] = []
    _until(lambda: _lines(out / "rows.jsonl") >= 2 or client.poll() is not None)
    for server in psutil.Process(client.pid).children():
        if "multiprocessing.forkserver" in " ".join(server.cmdline()):
            copies = server.children()
            if server_too:
                server.kill()
            copies[0].kill()
    assert client.wait() == 0
    assert len(copies) == 2
    _, left = psutil.wait_procs(copies, timeout=30)
    assert not left
    found = [comparable(read(tmp_path / name)) for name in ("alone", "team")]
    for each in found:
        del each["provenance"]["command"]
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers are copied on Linux alone")
def test_the_server_imports_from_where_the_program_does(tmp_path: Path) -> None:
    """The console script imports nothing from the working directory; nor does what workers are
    copies of, and they have the environment that they would have had."""
    (tmp_path / "queue.py").write_text("raise RuntimeError('not from here')")
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "unsafe.py").write_text(
        "import os\ndef attend(q, k, v):\n"
        "    raise ValueError(f'safe is {os.environ.get(\"PYTHONSAFEPATH\")!r}')\n"
    )
    given = {"cases": CASES, "kernels": ["unsafe:attend"], "seeds": 1, "reproducers": 0}
    (tmp_path / "sweep.yaml").write_text(json.dumps(given))
    script = tmp_path / "bin" / "numdev"
    script.parent.mkdir()
    script.write_text("from numdev.cli import program\nif __name__ == '__main__':\n    program()\n")
    command = [sys.executable, str(script), "sweep", "sweep.yaml", "-q", "--device", "cpu"]
    path = os.pathsep.join([str(kernels), *filter(None, sys.path)])
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    alone.pop("PYTHONSAFEPATH", None)
    answer = subprocess.run(
        [*command, "--workers", "2", "-o", "out"],
        cwd=tmp_path, env=alone, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.stderr.count("\n") == 1  # that there is no row with a number
    rows = read(tmp_path / "out").rows
    reasons = {row.reason for row in rows if row.kernel == "unsafe:attend"}
    assert reasons == {"ValueError: safe is ''"}


@pytest.mark.slow
def test_where_no_server_can_be_workers_are_started_as_ever(tmp_path: Path) -> None:
    """A socket's path has at most 107 bytes."""
    file, folder = tmp_path / "sweep.yaml", tmp_path / ("d" * 100)
    folder.mkdir()
    given = {"cases": CASES, "kernels": ["sdpa-math"], "seeds": 1, "reproducers": 0}
    file.write_text(json.dumps(given))
    command = [sys.executable, "-m", "numdev", "sweep", str(file), "-q", "--device", "cpu"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    assert subprocess.run([*command, "--workers", "1", "-o", str(tmp_path / "out")], env=alone,
                          check=False).returncode == 0  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers are copied on Linux alone")
@pytest.mark.parametrize("after", [0.0, 0.5, 4.0])
def test_ctrl_c_is_for_the_program_alone(tmp_path: Path, after: float) -> None:
    """A terminal sends SIGINT to all processes of a command, also while its server imports."""
    file = tmp_path / "sweep.yaml"
    file.write_text(json.dumps({"cases": CASES, "kernels": ["sdpa-math"], "seeds": 1000}))
    command = [sys.executable, "-m", "numdev", "sweep", str(file), "-q", "--device", "cpu"]
    client = subprocess.Popen(
        [*command, "--workers", "2", "-o", str(tmp_path / "out")],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    here = psutil.Process(client.pid)
    _until(lambda: len(here.children()) == 2)  # the server, and Python's tracker of resources
    time.sleep(after)
    family = here.children(recursive=True)
    os.killpg(client.pid, signal.SIGINT)
    _, said = client.communicate(timeout=60)
    assert client.returncode != 0  # not always 130: PyTorch's import makes other errors of it
    assert "Traceback" not in said
    _, left = psutil.wait_procs(family, timeout=30)
    assert not left


@pytest.mark.slow
def test_killed_schedulers_and_clients_are_survived(tmp_path: Path) -> None:
    """SIGKILL to the client, then to the scheduler under the next: a third one ends with the same
    report, with each task in the journal once."""
    asked = request_of("sdpa-math")
    alone = sweep(plan(asked), tmp_path / "alone")
    journal = tmp_path / "team" / "rows.jsonl"
    with _cluster() as (address, scheduler):
        client = _client(tmp_path, asked, address)
        _until(lambda: _lines(journal) >= 3 or client.poll() is not None)
        client.kill()
        client.wait()
        kept = _lines(journal)
        client = _client(tmp_path, asked, address)
        _until(lambda: _lines(journal) > kept or client.poll() is not None)
        scheduler.kill()
        assert client.wait() in (0, 3)
    with _cluster() as (address, _):
        assert _client(tmp_path, asked, address).wait() == 0
    plan_again = sweep(plan(asked), tmp_path / "team")  # all is there: read from the journal
    assert comparable(plan_again) == comparable(alone)
    tasks = [json.loads(line)["task"] for line in journal.read_text().splitlines()[1:]]
    assert len(tasks) == len(set(tasks))


def _client(tmp_path: Path, asked: SweepRequest, address: str) -> subprocess.Popen[bytes]:
    code = f"""
import sys
from pathlib import Path
import torch
from numdev.audit.cluster.crew import Crew
from numdev.config import SweepRequest
from numdev.errors import NumdevError
from numdev.audit.sweep import plan, sweep
torch.set_num_threads(1)
asked = SweepRequest.model_validate_json({asked.model_dump_json()!r})
try:
    sweep(plan(asked), Path({str(tmp_path / "team")!r}), crew=Crew(scheduler={address!r}))
except NumdevError as error:
    sys.exit(error.exit_code)
"""
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def _cluster() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    where = ["--host", "127.0.0.1", "--no-dashboard"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    python = [sys.executable, "-m"]
    commands = [
        [*python, "distributed.cli.dask_scheduler", *where, "--port", str(port)],
        [*python, "distributed.cli.dask_worker", address, "--nthreads", "1", *where],
    ]
    started = [subprocess.Popen(command, **quiet) for command in commands]
    try:
        yield address, started[0]
    finally:
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.wait()


def _lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def _until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not true() and time.monotonic() < until:
        time.sleep(0.02)
