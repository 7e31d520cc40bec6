"""Who measures, where it is not this process: a crew, and Dask's scheduler and workers for it.

What a crew does is in `numdev.audit.cluster.team`; nothing but these two files is about Dask, which is
imported when a crew begins.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from numdev.audit.attempt import one_line
from numdev.audit.cluster import early
from numdev.audit.cluster.remote import leave
from numdev.errors import UsageError
from numdev.system import System, visible_gpus

if TYPE_CHECKING:
    from distributed import Client, SpecCluster

CONNECT_S = 30.0
CONFIG = {
    "distributed.scheduler.allowed-failures": 0,  # a job whose worker died is this file's business
    "distributed.scheduler.worker-saturation": 1.0,  # so that no job that waits dies with another
    "distributed.nanny.pre-spawn-environ": {},  # it would stay set in this process
    "distributed.admin.large-graph-warning-threshold": "1 TB",  # cases are large, and few at a time
    "distributed.worker.profile.enabled": False,
}


@dataclass(frozen=True, kw_only=True)
class Crew:
    """Who measures in this process's place: `workers` processes of this machine, or those of the
    Dask scheduler at an address. Raises UsageError for both, for neither, and without Dask."""

    workers: int | None = None
    scheduler: str | None = None

    def __post_init__(self) -> None:
        if (self.workers is None) == (self.scheduler is None):
            raise UsageError(
                "--workers starts workers here, and --scheduler uses those of a cluster",
                hint="give one of them",
            )
        option = "--scheduler" if self.workers is None else "--workers"
        if importlib.util.find_spec("distributed") is None:
            raise UsageError(
                f"{option} needs Dask, which is not installed", hint='pip install "numdev[dask]"'
            )


def crew_of(workers: int | None, scheduler: str | None) -> Crew | None:
    """None where neither is given: this process measures."""
    return (
        None
        if workers is None and scheduler is None
        else Crew(workers=workers, scheduler=scheduler)
    )


@contextlib.contextmanager
def sharing(crew: Crew | None, device: str) -> Iterator[None]:
    """PyTorch on the threads that each worker gets: on a CPU an equal share, on a GPU all.

    Here too, since a report is about one number of threads. Raises UsageError for more workers than
    there are GPUs, or on a CPU processors.
    """
    if crew is None or crew.workers is None:
        yield
        return
    before, processors = torch.get_num_threads(), os.cpu_count() or 1
    if System.here(device).device == "cpu":
        if crew.workers > processors:
            raise UsageError(
                f"--workers {crew.workers}: this machine has {processors} processors",
                hint="give fewer; each worker needs one, and memory for torch and a case",
            )
        torch.set_num_threads(max(1, before // crew.workers))
    elif crew.workers > len(visible_gpus()):
        raise UsageError(
            f"--workers {crew.workers}: each needs a GPU, and {len(visible_gpus())} can be seen",
            hint="give fewer, or --device cpu",
        )
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def client_of(crew: Crew, system: System) -> Iterator[Client]:
    """A client of the crew's scheduler; on leaving, nothing that was started here is left."""
    import dask
    from distributed import Client
    from distributed.utils import silence_logging_cmgr

    with contextlib.ExitStack() as stack:
        started = {"distributed.worker.multiprocessing-method": early.method()}
        stack.enter_context(dask.config.set(CONFIG | started))
        stack.enter_context(silence_logging_cmgr(logging.CRITICAL))  # it is said by numdev
        if crew.workers is not None:
            cluster = stack.enter_context(_local(crew.workers, system))
            yield stack.enter_context(Client(cluster, set_as_default=False))
            return
        _check_address(str(crew.scheduler))
        try:
            client = Client(crew.scheduler, timeout=CONNECT_S, set_as_default=False)
        except (OSError, ValueError, TimeoutError) as error:
            raise UsageError(
                f"--scheduler {crew.scheduler}: no Dask scheduler answers there",
                hint="an address is, for example, tcp://10.0.0.1:8786",
            ) from error
        with client:
            try:
                yield client
            finally:
                if client.status == "running":
                    with contextlib.suppress(Exception):  # no reason to lose a finished run
                        client.run(leave, on_error="ignore")


def _check_address(address: str) -> None:
    """Raises UsageError for what cannot be an address here. A client that is given one fails too,
    and then waits a minute for its own end."""
    from distributed.comm.addressing import resolve_address

    try:
        resolve_address(address)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--scheduler {address}: is no address that can be reached ({one_line(error)})",
            hint="an address is, for example, tcp://10.0.0.1:8786",
        ) from error


def _local(workers: int, system: System) -> SpecCluster:
    """A scheduler in this process, and workers in processes of their own, each with a nanny that
    starts it anew when it dies. They end when this process does, even by SIGKILL."""
    from distributed import Nanny, Scheduler, SpecCluster

    shown = importlib.util.find_spec("bokeh") is not None
    gpus = visible_gpus() if system.device == "cuda" else []
    threads = {name: str(system.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}

    def options(i: int) -> dict[str, Any]:
        return {
            "nthreads": 1,
            "host": "127.0.0.1",
            "memory_limit": 0,  # tensors are not Dask's to count, nor to spill
            "silence_logs": logging.CRITICAL,
            "dashboard": False,
            "env": {
                **early.environment(),
                **threads,
                **({"CUDA_VISIBLE_DEVICES": gpus[i]} if gpus else {}),
            },
        }

    return SpecCluster(
        scheduler={
            "cls": Scheduler,
            "options": {
                "host": "127.0.0.1",
                "dashboard": shown,
                "dashboard_address": "127.0.0.1:0",
            },
        },
        workers={i: {"cls": Nanny, "options": options(i)} for i in range(workers)},
        shutdown_on_close=False,  # at exit: what an interrupt left half begun ends with its parent
    )


def dashboard(client: Client) -> str | None:
    """Its address, where the scheduler has what shows one."""
    try:
        shows = client.run_on_scheduler(importlib.util.find_spec, "bokeh")
    except Exception:  # whatever: a run does not need it
        return None
    return str(client.dashboard_link) if shows else None
