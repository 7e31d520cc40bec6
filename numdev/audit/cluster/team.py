"""A run's jobs on Dask: worker processes of this machine, or those of a scheduler that is there.

Who these are is in `numdev.audit.cluster.crew`, what is done on a worker in `numdev.audit.cluster.remote`. Dask
decides which worker does which job and notices when one dies. What follows from that is decided
here:

- What travels is a job: a case with all its tasks. What a worker can make itself (drawn cases,
  cases in a file it has too) goes as a few words; a case out of a running model is shipped, and
  then the model waits while there is one for each worker and one more, so that memory does not grow
  with the number of layers.
- A job whose worker died comes back with every kernel under audit in a process of its own, so that
  the row of the guilty one is `failed` and says how; later jobs have that kernel isolated from the
  start. Where the worker dies even so, its tasks go one at a time, and one whose worker has then
  died TRIES times is `failed` itself. So a kernel that always crashes ends, and a worker that was
  merely killed costs time.
- This process alone writes the journal. Where it dies, or the scheduler, the same command
  continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import queue
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import safetensors.torch

from numdev.audit.attempt import one_line
from numdev.audit.cluster.crew import Crew, client_of, dashboard
from numdev.audit.cluster.remote import Parcel, Stamp, packed_setting, work
from numdev.audit.jobs import Entry, Job, Setting, Step, Tell, case_key, steps, without_result
from numdev.audit.run import Executor, Here, runner
from numdev.audit.task import Runner
from numdev.audit.timing import Stopwatch
from numdev.audit.worker import parts_of, torch_settings
from numdev.errors import MeasurementError, UsageError
from numdev.sources.opening import Drawn, GivenUpstream, Located
from numdev.sources.tensorfile import StoredCase

if TYPE_CHECKING:
    from distributed import Client, Future

TRIES = 3
"""How often a task may lose its worker when it is alone there."""
TICK_S = 1.0
"""How often it is looked whether scheduler and workers are there, while nothing arrives."""
START_S = 300.0
"""How long this machine's workers may all be away: seconds, but minutes on a cold network disk."""
RESULT_S = 30.0


@contextlib.contextmanager
def working(
    crew: Crew | None,
    setting: Setting,
    head: Mapping[str, Any],
    *,
    isolated: bool,
    limit_s: float,
    watch: Stopwatch,
    say: Callable[[str], None],
) -> Iterator[tuple[Executor, Runner]]:
    """Who does a run's jobs; and where kernels run in this process, apart from jobs.

    `head` is the journal's. `isolated`, `limit_s`: whether kernels under audit run in a process of
    their own, and what they may take; with a crew the limit holds for all of them. Workers are
    started for the first job.
    """
    # What has cost a worker its life must not be run in this process afterwards.
    with runner(isolated=isolated or crew is not None, limit_s=limit_s) as run:
        if crew is None:
            yield Here(setting=setting, runner=run, watch=watch), run
            return
        with contextlib.ExitStack() as stack:
            yield (
                Team(
                    crew=crew,
                    setting=setting,
                    expected=expectation(head),
                    isolated=isolated,
                    limit_s=limit_s,
                    watch=watch,
                    say=say,
                    stack=stack,
                ),
                run,
            )


def expectation(head: Mapping[str, Any]) -> str:
    """What must be the same on a worker, as `cluster.remote.work` takes it."""
    same = {name: head[name] for name in ("environment", "kernels")}
    return json.dumps({**same, "torch": torch_settings()}, default=str)


@dataclass(kw_only=True, eq=False)
class Flight:
    """A job under way."""

    job: Job
    parcel: Parcel
    tensors: bytes | None = None
    """Of a case that is shipped."""
    alone: bool = False
    """Whether it is one task of its case."""
    deaths: int = 0
    future: Future[dict[str, Any]] | None = None


@dataclass(kw_only=True, eq=False)
class Team:
    """An executor (`numdev.audit.run`) whose jobs are done by Dask workers."""

    crew: Crew
    setting: Setting
    expected: str
    isolated: bool
    limit_s: float
    watch: Stopwatch
    """Gets the workers' times; the time this process waits is not counted."""
    say: Callable[[str], None]
    stack: contextlib.ExitStack
    """Closes what is started."""
    client: Client | None = None
    flights: list[Flight] = field(default_factory=list)
    arrived: queue.SimpleQueue[Flight] = field(default_factory=queue.SimpleQueue)
    guilty: set[str] = field(default_factory=set)
    """Kernels that failed in a process of their own, after a worker had died."""
    away: float | None = None
    """Since when there is no worker."""

    def submit(self, job: Job, tell: Tell) -> Iterator[Entry]:
        flight = self._flight(job)
        with self.watch.stopped():
            client = self._connected()
        while len(self.flights) >= self._room(client, shipped=flight.tensors is not None):
            yield from self._landed(client, tell)
        self._send(client, flight)

    def rest(self, tell: Tell) -> Iterator[Entry]:
        while self.flights:
            yield from self._landed(self._connected(), tell)

    # --- off ---

    def _flight(self, job: Job, *, ship: bool = False) -> Flight:
        sent = None if ship else _as_words(job.located)
        plain: dict[str, Any] = {}
        tensors = None
        if sent is None:
            with self.watch("capture"):
                rest, copies = parts_of(job.located.load())
                plain = {**rest, "axes": job.located.axes}
                tensors = safetensors.torch.save(copies)
        file = _file_of(sent)
        parcel = Parcel(
            setting=packed_setting(self.setting),
            located=sent,
            stamp=None if file is None else Stamp.of(file.path),
            plain=plain,
            wanted=job.wanted,
            isolated=None if self.isolated else frozenset(self.guilty),
            limit_s=self.limit_s,
        )
        return Flight(job=job, parcel=parcel, tensors=tensors)

    def _send(self, client: Client, flight: Flight) -> None:
        key = f"numdev-{uuid.uuid4().hex}"
        sent = pickle.dumps(flight.parcel)
        future = client.submit(work, self.expected, sent, flight.tensors, key=key, pure=False)
        flight.future = future
        self.flights.append(flight)
        future.add_done_callback(lambda _: self.arrived.put(flight))

    def _room(self, client: Client, *, shipped: bool) -> int:
        """How many jobs may be under way: two for each worker, so that none waits for the next one;
        of shipped cases one each, and one more."""
        there = max(1, self._present(client))
        return there + 1 if shipped else 2 * there

    # --- back ---

    def _landed(self, client: Client, tell: Tell) -> Iterator[Entry]:
        """The entries of the next job that is done; none, where none is for a while."""
        with self.watch.stopped():
            answer = self._next(client)
        if answer is None:
            tell("waiting for workers")
            return
        flight, found = answer
        self.flights.remove(flight)
        if found is None:
            yield from self._after_death(client, flight)
        elif "unread" in found:
            self._send(client, self._flight(flight.job, ship=True))
        else:
            self.watch.add(found["seconds"])
            self._note_guilty(flight, found["entries"])
            for given in found["entries"]:
                entry = Entry(**given)
                yield entry
                tell(entry.what)

    def _next(self, client: Client) -> tuple[Flight, dict[str, Any] | None] | None:
        """The next flight that is back, with its answer; with None where its worker died."""
        from distributed import CancelledError, KilledWorker

        try:
            flight = self.arrived.get(timeout=TICK_S)
        except queue.Empty:
            self._look_for_workers(client)
            return None
        assert flight.future is not None
        try:
            found = flight.future.result(timeout=RESULT_S)
        except KilledWorker:
            return flight, None
        except TimeoutError:  # a result that was lost with its worker, and is computed again
            flight.future.add_done_callback(lambda _: self.arrived.put(flight))
            self._look_for_workers(client)
            return None
        except (CancelledError, OSError) as error:
            raise _lost(client) from error
        except Exception as error:
            raise MeasurementError(
                f"a worker could not do its job: {one_line(error)}",
                hint="is the same numdev installed there?",
            ) from error
        if "refused" in found:
            kind, message, hint = found["refused"]
            raise (UsageError if kind == "UsageError" else MeasurementError)(message, hint=hint)
        return flight, found

    def _after_death(self, client: Client, flight: Flight) -> Iterator[Entry]:
        """What becomes of a job whose worker died."""
        flight.deaths += 1
        if flight.parcel.isolated is not None:
            flight.parcel = dataclasses.replace(flight.parcel, isolated=None)
            self._send(client, flight)
        elif not flight.alone:
            for wanted in self._tasks(flight.job):
                self._send(
                    client,
                    dataclasses.replace(
                        flight,
                        job=dataclasses.replace(flight.job, wanted=wanted),
                        parcel=dataclasses.replace(flight.parcel, wanted=wanted),
                        alone=True,
                        deaths=0,
                    ),
                )
        elif flight.deaths < TRIES:
            self._send(client, flight)
        else:
            why = f"its worker died, {TRIES} times over, as one does where memory runs out"
            for step in self._steps(flight.job):
                yield from without_result(step, flight.job.wanted, why)

    def _tasks(self, job: Job) -> Iterator[frozenset[str]]:
        """What is wanted of a job, task by task."""
        case = job.wanted & {case_key(job.located.ref)}
        parts = (case, *(job.wanted & step.keys.keys() for step in self._steps(job)))
        return (frozenset(part) for part in parts if part)

    def _steps(self, job: Job) -> Iterator[Step]:
        return steps(job.located.ref, self.setting)

    def _note_guilty(self, flight: Flight, found: list[dict[str, Any]]) -> None:
        if flight.deaths or flight.alone:
            rows = (row for entry in found if entry["kind"] == "row" for row in entry["rows"])
            under_audit = (r for r in rows if r["role"] == "kernel" and r["status"] == "failed")
            self.guilty |= {row["kernel"] for row in under_audit}

    # --- who is there ---

    def _connected(self) -> Client:
        if self.client is None:
            self.client = self.stack.enter_context(client_of(self.crew, self.setting.system))
            if link := dashboard(self.client):
                self.say(f"Dask dashboard: {link}")
            if not self._present(self.client):
                self.say(f"Waiting for workers at {self.crew.scheduler}.")
        return self.client

    def _present(self, client: Client) -> int:
        """How many workers there are now. Raises UsageError for one that would do several jobs at
        a time: they would share a GPU, and torch's settings."""
        try:
            threads = client.nthreads()
        except (OSError, TimeoutError) as error:
            raise _lost(client) from error
        for address, count in threads.items():
            if count > 1:
                raise UsageError(
                    f"worker {address}: does {count} jobs at a time in one process",
                    hint="start it by `dask worker --nthreads 1`",
                )
        return len(threads)

    def _look_for_workers(self, client: Client) -> None:
        if client.status != "running":
            raise _lost(client)
        if self._present(client):
            self.away = None
            return
        if self.away is None:
            self.away = time.monotonic()
            if self.crew.scheduler is not None:
                self.say(f"No worker is left at {self.crew.scheduler}; waiting for one.")
        if self.crew.workers is not None and time.monotonic() - self.away > START_S:
            raise MeasurementError(
                f"no worker has been running for {START_S:.0f} s",
                hint="what is finished is kept; the same command continues",
            )


def _as_words(located: Located) -> Located | None:
    """A case that a worker can make or read itself, as it may travel; None for others."""
    if isinstance(located, Drawn):
        return located
    if isinstance(located, StoredCase):
        return dataclasses.replace(located, path=located.path.absolute())
    if isinstance(located, GivenUpstream):
        stored = dataclasses.replace(located.stored, path=located.stored.path.absolute())
        return dataclasses.replace(located, stored=stored)
    return None


def _file_of(located: Located | None) -> StoredCase | None:
    if isinstance(located, GivenUpstream):
        return located.stored
    return located if isinstance(located, StoredCase) else None


def _lost(client: Client) -> MeasurementError:
    return MeasurementError(
        f"the scheduler at {client.scheduler.address} is gone",  # type: ignore[union-attr]
        hint="what is finished is kept; the same command continues, with a scheduler",
    )
