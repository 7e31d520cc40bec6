"""Dask workers: the report of one process, whatever dies along the way."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from numdev.cases import AttentionCase, CaseRef
from numdev.errors import UsageError
from numdev.kernels import find
from numdev.request_models import AuditConfig, Choice
from numdev.sources.capture import Captured
from numdev.sources.case_sources import ConfigSource, Drawn
from numdev.studies.audit import dask_workers
from numdev.studies.audit.dask_workers import Cluster, at_work, cluster_of, sharing
from numdev.studies.audit.isolation import Isolated, attempt, torch_settings
from numdev.studies.audit.journal import Journal
from numdev.studies.audit.plan import (
    Plan,
    Task,
    header,
    plan_controls,
    plan_formats,
    plan_kernels,
)
from numdev.studies.audit.run import run_source
from numdev.studies.audit.section_timing import Stopwatch
from numdev.system import System
from numdev.yamlfile import validated

CASES = [{"name": "a", "heads": 2, "head_dim": 8, "seq_len": [8, 16]}]


def source_of(seeds: tuple[int, ...] = (0, 1)) -> ConfigSource:
    configs = validated({"cases": CASES}, AuditConfig, "here").cases
    return ConfigSource("here", configs, seeds, System.probe("cpu"))


def plan_of(
    *kernels: str, formats: Any = ("bfloat16", "float16"), **changes: Any
) -> Plan:
    planned = plan_kernels(Choice(name=name) for name in kernels)
    planned += plan_kernels([Choice(name="emulated", options={"preset": "eager"})])[3:]
    planned += plan_controls(gradients=False)[:1]
    chosen = plan_formats(formats, planned)
    return Plan(system=System.probe("cpu"), formats=chosen, kernels=planned, **changes)


def header_of(plan: Plan) -> dict[str, Any]:
    return header({}, plan.system, plan.kernels, {})


def rows_of(
    directory: Path,
    source: Any,
    plan: Plan,
    crew: Cluster | None = None,
    limit_s: float = 60.0,
) -> dict[str, list[Any]]:
    """All rows of a run by kind, as plain data."""
    shared, watch = header_of(plan), Stopwatch()
    with (
        Journal.open(directory, shared, overwrite=False) as journal,
        Isolated(limit_s) if crew is not None else contextlib.nullcontext(attempt) as run,
        at_work(crew, plan, shared, limit_s, watch, lambda text: None) as workers,
    ):
        run_source(source, plan, journal, run, watch, workers)
        plain = {
            kind: [row.model_dump(mode="json") for row in journal.rows(kind)]
            for kind in ("case", "row", "worst", "profile")
        }
    lines = (directory / "rows.jsonl").read_text().splitlines()[1:]
    keys = [line.split('"')[3] for line in lines]
    assert len(keys) == len(set(keys)), "a task stands twice in the journal"
    return plain


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers find the kernels of this folder."""
    folder = str(Path(__file__).parent / "support")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    )


def test_a_cluster_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers exclude a scheduler; without Dask the extra is named; an address must be
    one."""
    assert cluster_of(None, None) is None
    with pytest.raises(UsageError, match="exclude each other"):
        cluster_of(1, "tcp://a:1")
    plan, nowhere = plan_of("sdpa-math"), Cluster(scheduler="nowhere at all")
    with pytest.raises(UsageError, match="no Dask scheduler answers there"):
        at_work(nowhere, plan, header_of(plan), 1.0, Stopwatch(), print).__enter__()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r'pip install "numdev\[dask\]"'):
        cluster_of(1, None)


def test_a_worker_runs_the_kernel_that_is_asked_for() -> None:
    """By its name and its source, and no other in its place."""
    case = CaseRef(case="a")
    for name in ("sdpa-math", "baseline"):
        task = Task(case=case, role="kernel", kernel=name, format="bfloat16")
        sources = {name: find(name).made_from}
        assert dask_workers._plan_task(task, sources).kernel == find(name)
        with pytest.raises(UsageError, match="different source"):
            dask_workers._plan_task(task, {name: "another"})


def test_threads_are_shared_out_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal shares, at least one; no more workers than processors. On a GPU, which
    several workers may share, as many threads as before."""
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    before = torch.get_num_threads()
    with sharing(Cluster(workers=3), "cpu"):
        assert torch.get_num_threads() == max(1, before // 3)
    assert torch.get_num_threads() == before
    with pytest.raises(
        UsageError, match="at most 3, the number of processors here, got 4"
    ):
        sharing(Cluster(workers=4), "cpu").__enter__()
    monkeypatch.setattr(System, "probe", lambda device: System(device="cuda"))
    with sharing(Cluster(workers=3), "cuda"):
        assert torch.get_num_threads() == before


class Live(list[Captured]):
    """Cases out of a model: none can be made elsewhere."""

    def __init__(self) -> None:
        super().__init__(Captured(ref=x.ref, load=x.load) for x in source_of((0,)).cases)

    def count(self) -> int:
        return len(self)


@pytest.mark.thorough
def test_a_worker_reports_what_one_process_does(tmp_path: Path) -> None:
    """The same rows in the same order, each once; one that raises costs its own."""
    plan = plan_of("sdpa-math", "planted:raises", formats=("bfloat16",))
    team = rows_of(tmp_path / "team", source_of((0,)), plan, Cluster(workers=1))
    assert team == rows_of(tmp_path / "alone", source_of((0,)), plan)


@pytest.mark.thorough
def test_workers_report_what_one_process_does(tmp_path: Path) -> None:
    """The same rows in the same order, each once; one that raises or dies costs its
    own."""
    bad = ("planted:raises", "planted:segfault")
    plan = plan_of("sdpa-math", *bad, formats=("bfloat16",), details=True)
    drawn = rows_of(tmp_path / "drawn", source_of((0,)), plan, Cluster(workers=2), 10.0)
    less = plan_of("sdpa-math", bad[0], formats=("bfloat16",), details=True)
    alone = rows_of(tmp_path / "alone", source_of((0,)), less)
    assert [row for row in drawn["row"] if row["kernel"] != bad[1]] == alone["row"]
    assert drawn["case"] == alone["case"]
    (reason,) = {row["reason"] for row in drawn["row"] if row["kernel"] == bad[1]}
    assert "SIGSEGV" in reason
    plan = plan_of("sdpa-math", formats=("bfloat16",))
    live = rows_of(tmp_path / "live", Live(), plan, Cluster(workers=1))
    assert live == rows_of(tmp_path / "here", Live(), plan)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deadly(Drawn):
    """A case of which the first so many processes die that draw it, but for the one at
    home."""

    home: int
    note: Path
    deaths: int

    def load(self) -> AttentionCase:
        before = len(self.note.read_text()) if self.note.exists() else 0
        if os.getpid() != self.home and before < self.deaths:
            self.note.write_text("x" * (before + 1))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load()


@pytest.mark.thorough
def test_a_killed_worker_costs_nothing_and_a_deadly_case_its_rows(tmp_path: Path) -> None:
    """A case that kills once is measured elsewhere; one that always does fails, with
    why."""
    plan = plan_of("sdpa-math", formats=("bfloat16",))
    fields = ("config", "seed", "source", "device")
    alone = rows_of(tmp_path / "alone", source_of((0,)), plan)
    for deaths, case in ((1, 1), (9, 0)):
        source = source_of((0,))
        passed = {name: getattr(source.cases[case], name) for name in fields}
        passed |= {"home": os.getpid(), "note": tmp_path / str(deaths), "deaths": deaths}
        source.cases[case] = Deadly(**passed)
        team = rows_of(tmp_path / f"team {deaths}", source, plan, Cluster(workers=1))
        if deaths == 1:
            assert team == alone
            continue
        lost = [row for row in team["row"] if row["status"] == "failed"]
        reason = "its worker died twice, perhaps out of memory"
        assert {row["reason"] for row in lost} == {reason}
        assert len(lost) == len(list(plan.tasks(source.cases[0].ref)))
        assert [row for row in alone["row"] if row in team["row"]]


def test_a_case_whose_worker_died_twice_has_a_failed_row_for_each_task() -> None:
    """Whatever it was to measure."""
    from distributed import KilledWorker

    plan, future = plan_of("sdpa-math"), Future[Any]()
    tasks = list(plan.tasks(source_of().cases[0].ref))
    team = dask_workers.Workers(plan, "{}", 1.0, Stopwatch(), Mock())
    team.flights[cast(Any, future)] = tasks
    future.add_done_callback(cast(Any, team.arrived.put))
    future.set_exception(KilledWorker("work", Mock(), 2))
    drained = list(team.drain())
    assert [task.key for _, task in tasks] == [key for key, _, _ in drained]
    for (_, task), (_, rows, _) in zip(tasks, drained, strict=True):
        (row,) = rows["row"]
        assert (row.kernel, row.format, row.status) == (
            task.kernel,
            task.format,
            "failed",
        )
        assert row.reason == "its worker died twice, perhaps out of memory"


@pytest.mark.parametrize("part", ["packages", "numdev"])
def test_a_worker_that_differs_refuses(part: str) -> None:
    """A worker with another version of anything measures nothing, and says what
    differs."""
    shared = header_of(plan_of("sdpa-math"))
    shared_state = json.loads(
        json.dumps({**shared, "torch": torch_settings()}, default=str)
    )
    shared_state["environment"][part] = (
        {"torch": "0.1"} if part == "packages" else "0.0.1"
    )
    answer = dask_workers.work(json.dumps(shared_state), b"not even read")
    assert isinstance(answer, UsageError)
    assert f"a worker's environment differs: {part}" in answer.message
    assert "install the same on all workers" in str(answer)
