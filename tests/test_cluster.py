"""Dask workers: the report of one process, whatever dies along the way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fragile_kernels import Deadly

from numdev.audit import cluster
from numdev.audit.cluster import Cluster, at_work, cluster_of, sharing
from numdev.audit.journal import Journal
from numdev.audit.plan import Plan, plan_controls, plan_formats, plan_kernels
from numdev.audit.run import measure_source, runner
from numdev.audit.timing import Stopwatch
from numdev.config import AuditConfig, Choice
from numdev.errors import UsageError
from numdev.sources.opening import Captured, ConfigSource
from numdev.system import System
from numdev.yamlfile import validated

CASES = [{"name": "a", "heads": 2, "head_dim": 8, "seq_len": [8, 16]}]


def source_of(seeds: tuple[int, ...] = (0, 1)) -> ConfigSource:
    configs = validated({"cases": CASES}, AuditConfig, "here").cases
    return ConfigSource("here", configs, seeds, System.here("cpu"))


def plan_of(*kernels: str, **changes: Any) -> Plan:
    planned = plan_kernels(Choice(name=name) for name in kernels or ("sdpa-math",))
    planned += plan_controls(gradients=False)[:1]
    formats = plan_formats(("bfloat16", "float16"), planned)
    return Plan(system=System.here("cpu"), formats=formats, kernels=planned, **changes)


def rows_of(
    directory: Path, source: Any, plan: Plan, crew: Cluster | None = None, limit_s: float = 60.0
) -> dict[str, list[Any]]:
    """All rows of a run by kind, as plain data."""
    header, watch = plan.header({"a": 1}, {}), Stopwatch()
    with (
        Journal.open(directory, header, overwrite=False) as journal,
        runner(isolated=crew is not None, limit_s=limit_s) as run,
        at_work(crew, plan, header, limit_s, watch, lambda text: None) as workers,
    ):
        measure_source(source, plan, journal, run, watch, workers=workers)
        kinds = ("case", "row", "worst", "profile")
        plain = {
            kind: [
                row if isinstance(row, dict) else row.model_dump(mode="json")
                for row in journal.rows(kind)
            ]
            for kind in kinds
        }
    lines = (directory / "rows.jsonl").read_text().splitlines()[1:]
    keys = [line.split('"')[3] for line in lines]
    assert len(keys) == len(set(keys)), "a task stands twice in the journal"
    return plain


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers find the kernels of this folder, and use one thread."""
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    )


# --- who measures --------------------------------------------------------------------------------


def test_workers_and_a_scheduler_exclude_each_other() -> None:
    """A cluster is this machine's or a scheduler's; neither is nobody."""
    assert cluster_of(None, None) is None
    for given in ({"workers": 1, "scheduler": "tcp://a:1"}, {}):
        with pytest.raises(UsageError, match="expected one of them"):
            Cluster(**given)


@pytest.mark.parametrize("option", [{"workers": 1}, {"scheduler": "tcp://a:1"}])
def test_without_dask_the_extra_is_named(
    option: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing is said with the command that installs it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError) as raised:
        Cluster(**option)
    assert raised.value.hint == 'pip install "numdev[dask]"'


def test_threads_are_shared_out_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers on a CPU get equal shares of the threads, at least one; more workers than processors
    are refused."""
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    before = torch.get_num_threads()
    with sharing(Cluster(workers=3), "cpu"):
        assert torch.get_num_threads() == max(1, before // 3)
    assert torch.get_num_threads() == before
    with pytest.raises(UsageError, match="at most 3, the number of processors here, got 4"):
        sharing(Cluster(workers=4), "cpu").__enter__()


def test_no_more_workers_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker has a GPU of its own."""
    monkeypatch.setattr(System, "here", lambda device: System(device="cuda"))
    monkeypatch.setattr(cluster, "visible_gpus", lambda: ["3", "5"])
    with pytest.raises(UsageError, match="at most 2, the number of GPUs here, got 3"):
        sharing(Cluster(workers=3), "cuda").__enter__()


# --- what comes back -----------------------------------------------------------------------------


class Live:
    """Cases out of a model: none can be made elsewhere."""

    notes = ()

    def __init__(self) -> None:
        self.cases = [Captured(case=located.load()) for located in source_of((0,)).cases]

    def __iter__(self) -> Any:
        return iter(self.cases)

    def count(self) -> int:
        return len(self.cases)


@pytest.mark.slow
def test_workers_report_what_one_process_does(tmp_path: Path) -> None:
    """The same rows in the same order, each task once in the journal: of drawn cases with two
    seeds, of cases out of a model, and of cases in a file. A kernel that raises, hangs or dies
    costs its own rows."""
    bad = ("fragile_kernels:raises", "fragile_kernels:segfaults")
    plan = plan_of("sdpa-math", *bad, examine=True, profile=True)
    crew = Cluster(workers=2)
    drawn = rows_of(tmp_path / "drawn", source_of(), plan, crew, 10.0)
    with runner(isolated=True, limit_s=10.0):
        less = plan_of("sdpa-math", bad[0], examine=True, profile=True)
        alone = rows_of(tmp_path / "alone", source_of(), less)
    sound = [row for row in drawn["row"] if row["kernel"] != bad[1]]
    assert sound == alone["row"]
    assert drawn["case"] == alone["case"]
    reasons = {row["reason"] for row in drawn["row"] if row["kernel"] == bad[1]}
    assert len(reasons) == 1
    assert "SIGSEGV" in reasons.pop()
    plan = plan_of("sdpa-math")
    assert rows_of(tmp_path / "live", Live(), plan, crew) == rows_of(
        tmp_path / "here", Live(), plan
    )


@pytest.mark.slow
def test_a_killed_worker_costs_nothing_and_a_deadly_case_its_rows(tmp_path: Path) -> None:
    """Where a worker dies of a case once, the case is measured elsewhere and the report is the
    same; one whose workers always die becomes failed rows with the reason, and the run ends."""
    plan, fields = plan_of("sdpa-math"), ("config", "seed", "source", "device")
    alone = rows_of(tmp_path / "alone", source_of(), plan)
    reason = "its worker died, twice, as one does where memory runs out"
    for deaths, case in ((1, 1), (9, 0)):
        source = source_of()
        given = {name: getattr(source.cases[case], name) for name in fields}
        source.cases[case] = Deadly(
            **given, home=os.getpid(), note=tmp_path / str(deaths), deaths=deaths
        )
        team = rows_of(tmp_path / f"team {deaths}", source, plan, Cluster(workers=1))
        if deaths == 1:
            assert team == alone
        else:
            lost = [row for row in team["row"] if row["status"] == "failed"]
            assert {row["reason"] for row in lost} == {reason}
            assert len(lost) == len(list(plan.tasks(source.cases[0].ref)))
            assert [row for row in alone["row"] if row in team["row"]]


def test_a_worker_that_differs_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with another version of anything measures nothing, and says what differs."""
    plan = plan_of("sdpa-math")
    header = plan.header({}, {})
    same = {name: header[name] for name in ("environment", "kernels")}
    import json

    from numdev.audit.isolation import torch_settings

    settings = torch_settings()
    known = json.loads(json.dumps({**same, "torch": settings}, default=str))
    known["environment"]["packages"] = (
        {"torch": "0.1"} if "packages" in known["environment"] else None
    )
    known["environment"]["numdev"] = "0.0.1"
    answer = cluster.work(json.dumps(known), b"not even read")
    assert answer is not None
    kind, message, hint = answer["refused"]
    assert kind == "UsageError"
    assert "environment: expected" in message
    assert "a report never mixes two" in hint


def test_a_scheduler_that_is_no_address_is_refused_at_once() -> None:
    """Before a client is made for it, whose end would take a minute."""
    plan, nowhere = plan_of("sdpa-math"), Cluster(scheduler="nowhere at all")
    with pytest.raises(UsageError, match="no Dask scheduler answers there"):
        at_work(nowhere, plan, plan.header({}, {}), 1.0, Stopwatch(), print).__enter__()
