"""The measurement of cases by Dask workers: processes of this machine, or those of a
scheduler.

Each case is a future; a case that cannot be drawn on the worker is sent to it. Kernels
under audit run isolated within workers. Dask does a case again elsewhere when its worker
died; one whose workers died twice gets failed rows. This process alone writes the
journal. A worker measures what this process would: it gets its settings of torch, and
refuses where anything else that may change a number differs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import logging
import os
import pickle
import queue
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from numdev.errors import MeasurementError, NumdevError, UsageError, one_line
from numdev.kernels import find
from numdev.kernels.emulation.faults import CONTROLS, PREFIX
from numdev.sources.case_sources import Drawn, Located
from numdev.studies.audit.case_measurement import (
    Finished,
    Unmeasured,
    as_located,
    measured_here,
)
from numdev.studies.audit.deviation_rows import bare_row
from numdev.studies.audit.isolation import (
    Failure,
    Isolated,
    copied,
    set_torch,
    threads,
    torch_settings,
)
from numdev.studies.audit.journal import first_difference
from numdev.studies.audit.plan import Plan, Planned, Task, environment
from numdev.studies.audit.section_timing import Stopwatch
from numdev.system import System, visible_gpus

if TYPE_CHECKING:
    from distributed import Client, Future

T = TypeVar("T")
CONNECT_S = 30.0
TICK_S = 1.0  # how often it is looked whether the scheduler is there
CONFIG = {
    "distributed.scheduler.allowed-failures": 1,  # a case is tried twice
    # So that no case that waits dies with another
    "distributed.scheduler.worker-saturation": 1.0,
    "distributed.nanny.pre-spawn-environ": {},  # it would stay set in this process
    # Cases are large, and few at a time
    "distributed.admin.large-graph-warning-threshold": "1 TB",
    "distributed.worker.profile.enabled": False,
}
Tasks = Sequence[tuple[Planned, Task]]
GONE, CONTINUES = (
    "the Dask scheduler is gone",
    "what is finished is kept; the same command continues",
)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The Dask workers that measure in this process's place: `workers` processes started
    here, or those of the scheduler at the address `scheduler`."""

    workers: int | None = None
    scheduler: str | None = None


def cluster_of(workers: int | None, scheduler: str | None) -> Cluster | None:
    """Returns the cluster of so many workers, or of a scheduler's address; None where
    both are None: this process measures. Starts nothing. Raises UsageError for both
    together, for fewer than one worker, and without Dask."""
    if workers is None and scheduler is None:
        return None
    if workers is not None and workers < 1:
        raise UsageError(f"--workers: expected at least 1, got {workers}")
    if workers is not None and scheduler is not None:
        raise UsageError(
            "workers and scheduler exclude each other", hint="give one of them"
        )
    if importlib.util.find_spec("distributed") is None:
        raise UsageError(
            "--workers needs Dask, which is not installed",
            hint='pip install "numdev[dask]"',
        )
    return Cluster(workers=workers, scheduler=scheduler)


@contextlib.contextmanager
def sharing(cluster: Cluster | None, device: str) -> Iterator[None]:
    """Runs the block with PyTorch on as many threads as each local worker gets: on a CPU
    an equal share, at least one; on a GPU as many as before. This process uses that
    number too, since a report has one number of threads. Changes nothing without local
    workers. `device`: as of `System.probe`. Raises UsageError for more workers than
    processors."""
    if cluster is None or cluster.workers is None:
        yield
        return
    on_cpu = System.probe(device).device == "cpu"
    most = os.cpu_count() or 1
    if cluster.workers > most:
        what = f"{most}, the number of processors here"
        raise UsageError(f"--workers: expected at most {what}, got {cluster.workers}")
    before = torch.get_num_threads()
    with (
        threads(max(1, before // cluster.workers)) if on_cpu else contextlib.nullcontext()
    ):
        yield


@contextlib.contextmanager
def at_work(
    cluster: Cluster,
    plan: Plan,
    header: Mapping[str, object],
    limit_s: float,
    watch: Stopwatch,
    say: Callable[[str], None],
) -> Iterator[Workers]:
    """Gives the workers of a cluster for the block. `header`: that of the journal;
    workers must have the same environment and kernels; `limit_s`: seconds for a kernel;
    `say` gets `Waiting for workers.` where none is connected yet. Raises UsageError where
    no scheduler answers, and as `Workers.present`."""
    with contextlib.ExitStack() as stack:
        with watch.stopped():
            client = stack.enter_context(client_of(cluster, plan.system))
        team = Workers(plan, shared_by(header), limit_s, watch, client)
        if not team.present():
            say("Waiting for workers.")
        yield team


def shared_by(header: Mapping[str, object]) -> str:
    """Returns as JSON what must be the same on a worker: environment and kernels of the
    journal's header, and the settings of torch in this process. Raises KeyError for a
    header without the two."""
    same = {name: header[name] for name in ("environment", "kernels")}
    return json.dumps({**same, "torch": torch_settings()}, default=str)


@dataclass(eq=False)
class Workers:
    """Sends cases to workers. `submit` and `drain` yield the results that have come back
    meanwhile, in the order in which they come."""

    plan: Plan
    expected: str  # JSON: what must be the same on a worker
    limit_s: float
    # Gets the workers' times; the time this process waits is not counted
    watch: Stopwatch
    client: Client
    flights: dict[Future[Any], Tasks] = field(default_factory=dict)
    arrived: queue.SimpleQueue[Future[Any]] = field(default_factory=queue.SimpleQueue)

    def submit(self, located: Located, tasks: Tasks) -> Iterator[Finished]:
        """Sends a case with its unfinished tasks, as soon as there is room for it, and
        yields what has come back meanwhile. It must be iterated to its end, or nothing is
        sent. There is room for two drawn cases for each worker, so that none waits for
        its next one; for cases that are sent whole, room for one more than there are
        workers, so that memory does not grow with the number of layers. Raises as
        `present`, and what a worker raised."""
        shipped = not isinstance(located, Drawn)
        while True:
            present = max(1, self.present())
            if len(self.flights) < (present + 1 if shipped else 2 * present):
                break
            yield from self._next_results()
        if shipped:
            with self.watch("capture"):
                located = as_located(copied(located.load(), "cpu"), located.axes)
        plan = dataclasses.replace(self.plan, kernels=())  # workers find their own
        parcel = pickle.dumps((plan, [task for _, task in tasks], located, self.limit_s))
        future = self.client.submit(work, self.expected, parcel, pure=False)
        self.flights[future] = tasks
        future.add_done_callback(self.arrived.put)

    def drain(self) -> Iterator[Finished]:
        """Yields the results of the cases that are not back yet, until all are. Raises as
        `present`, and what a worker raised."""
        while self.flights:
            yield from self._next_results()

    def _next_results(self) -> Iterator[Finished]:
        """Yields the results of the next case that is done; nothing where none is done
        within TICK_S seconds. A case whose worker died twice gets failed rows. Raises the
        NumdevError of a worker, MeasurementError for another exception in a worker, and
        where the scheduler is gone. Raises as `present` where none is done."""
        from distributed import CancelledError, KilledWorker

        try:
            with self.watch.stopped():
                future = self.arrived.get(timeout=TICK_S)
        except queue.Empty:
            self.present()
            return
        tasks = self.flights.pop(future)
        try:
            answer = future.result()
        except KilledWorker:
            reason = "its worker died twice, perhaps out of memory"
            for _, task in tasks:
                row = bare_row(task, Failure("failed", reason))
                yield task.key, {"row": [row]}, f"{task.case.module} {task.kernel}"
            return
        except (CancelledError, OSError, TimeoutError) as error:
            raise MeasurementError(GONE, hint=CONTINUES) from error
        except Exception as error:
            what = f"a worker failed: {one_line(error)}"
            raise MeasurementError(
                what, hint="is the same numdev installed there?"
            ) from error
        if isinstance(answer, NumdevError):
            raise answer
        finished, seconds = answer
        self.watch.add(seconds)
        yield from finished

    def present(self) -> int:
        """Returns how many workers are connected now. Raises MeasurementError where the
        scheduler is gone, and UsageError for a worker with more than one thread, whose
        cases would share a GPU."""
        if self.client.status != "running":
            raise MeasurementError(GONE, hint=CONTINUES)
        try:
            threads = self.client.nthreads()
        except (OSError, TimeoutError) as error:
            raise MeasurementError(GONE, hint=CONTINUES) from error
        for address, count in threads.items():
            if count > 1:
                hint = "start it by `dask worker --nthreads 1`"
                raise UsageError(
                    f"worker {address}: expected 1 thread, got {count}", hint=hint
                )
        return len(threads)


def shared_out(
    client: Client,
    expected: str,
    function: Callable[..., T],
    parts: Sequence[tuple[object, ...]],
) -> Iterator[T]:
    """Yields what `function(*part)` returns on the workers for each part, in the order in
    which they finish. `expected`: what `shared_by` returned. Raises a NumdevError of a
    worker as it is, and MeasurementError for another exception."""
    from distributed import as_completed

    futures = [
        client.submit(_call_checked, expected, function, part, pure=False)
        for part in parts
    ]
    for future in as_completed(futures, loop=client.loop):
        try:
            yield future.result()
        except NumdevError:
            raise
        except Exception as error:
            raise MeasurementError(
                f"a worker failed: {one_line(error)}", hint=CONTINUES
            ) from error


def _call_checked(
    expected: str, function: Callable[..., T], part: tuple[object, ...]
) -> T:
    """Returns `function(*part)`. Runs on a worker, which is checked first; what is
    printed goes to stderr. Raises UsageError where the worker differs from `expected`."""
    with contextlib.redirect_stdout(sys.stderr):  # foreign kernels print
        check_here(json.loads(expected))
        return function(*part)


@contextlib.contextmanager
def client_of(cluster: Cluster, system: System) -> Iterator[Client]:
    """Gives a client of the cluster's scheduler for the block. At its end what was
    started on this machine is ended; workers of an address end only their processes of
    isolated kernels. Raises UsageError where no scheduler answers."""
    import dask
    from distributed import Client, Nanny, Scheduler, SpecCluster
    from distributed.comm.addressing import resolve_address
    from distributed.utils import silence_logging_cmgr

    with contextlib.ExitStack() as stack:
        stack.enter_context(dask.config.set(CONFIG))
        # It is said by numdev
        stack.enter_context(silence_logging_cmgr(logging.CRITICAL))
        if cluster.workers is None:
            try:
                # Else a client's own end takes a minute
                resolve_address(str(cluster.scheduler))
                client = Client(
                    cluster.scheduler, timeout=CONNECT_S, set_as_default=False
                )
            except (OSError, ValueError, TimeoutError) as error:
                what = f"--workers {cluster.scheduler}: no Dask scheduler answers there"
                raise UsageError(
                    what, hint="give an address, e.g. tcp://10.0.0.1:8786"
                ) from error
            stack.enter_context(client)
            stack.callback(client.run, leave, on_error="ignore")
            yield client
            return
        # A scheduler in this process, and workers in processes of their own, each with a
        # nanny that starts it anew when it dies. They end when this process does, even by
        # SIGKILL.
        gpus = visible_gpus() if system.device == "cuda" else []
        threads = {
            name: str(system.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        }
        visible_to = [
            {"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} if gpus else {}
            for i in range(cluster.workers)
        ]
        local_only = {"host": "127.0.0.1", "dashboard": False}
        # memory_limit: tensors are not Dask's to count, nor to spill.
        shared = {
            **local_only,
            "nthreads": 1,
            "memory_limit": 0,
            "silence_logs": logging.CRITICAL,
        }
        each = ({**shared, "env": {**threads, **environ}} for environ in visible_to)
        local = SpecCluster(
            scheduler={"cls": Scheduler, "options": local_only},
            workers={
                i: {"cls": Nanny, "options": options} for i, options in enumerate(each)
            },
            # What an interrupt left half begun ends with its parent
            shutdown_on_close=False,
        )
        yield stack.enter_context(
            Client(stack.enter_context(local), set_as_default=False)
        )


# --- on a worker ----------------------------------------------------------------------


def work(
    expected: str, parcel: bytes
) -> tuple[list[Finished], dict[str, float]] | NumdevError:
    """Measures a case on a worker. Returns what goes into the journal, and seconds by
    section; or the NumdevError that says why nothing was measured, with the worker's
    name. Raises any other exception as it is. `expected`: JSON of what must be the same
    on the worker; `parcel`: pickled plan, tasks, case and time limit."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # foreign kernels print
            shared = json.loads(expected)
            check_here(shared)  # first: another version might not even read the parcel
            plan, tasks, located, limit_s = pickle.loads(parcel)
            planned = [(_plan_task(task, shared["kernels"]), task) for task in tasks]
            process, watch = _isolated(), Stopwatch(plan.system.device)
            process.limit_s = limit_s
            with watch("capture"):
                case = copied(located.load(), plan.system.device)
            received = as_located(case, located.axes)
            work = Unmeasured(received, planned, plan, watch)
            return list(measured_here(work, process)), watch.seconds()
    except NumdevError as error:
        who = f"{socket.gethostname()}, process {os.getpid()}"
        return type(error)(f"worker {who}: {error.message}", hint=error.hint)


_isolated = functools.cache(Isolated)  # kept from case to case, until `leave`


def leave() -> None:
    """Ends this worker's process of isolated kernels; does nothing without one."""
    _isolated().close()


SAME = "install the same on all workers and restart them"


def check_here(expected: Mapping[str, Any]) -> None:
    """Sets torch's settings as expected. Raises UsageError where another part of the
    environment is different on this worker. The number of GPUs may differ: a worker
    mostly sees one."""
    set_torch(expected["torch"])
    system = System.probe(expected["environment"]["device"])
    actual = json.loads(json.dumps(environment(system), default=str))
    required = {**expected["environment"], "devices": actual["devices"]}
    if actual != required:
        where, wanted, got = first_difference(required, actual)
        raise UsageError(
            f"a worker's environment differs: {where}: expected {wanted!r}, got {got!r}",
            hint=SAME,
        )


def _plan_task(task: Task, sources: Mapping[str, str]) -> Planned:
    """Returns the kernel of a task as this worker has it. `sources`: fingerprints by
    kernel's name. Raises UsageError where the fingerprint of its source is another, and
    for a kernel that the worker does not have."""
    name = task.kernel
    fault = name.removeprefix(PREFIX)
    kernel = CONTROLS[fault].kernel() if task.role == "control" else find(name)
    if kernel.made_from != sources.get(name):
        raise UsageError(f"kernel {name}: a worker has a different source", hint=SAME)
    return Planned(role=task.role, kernel=kernel, options=task.options)
