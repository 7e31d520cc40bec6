"""Kernels are foreign code: a fault of one costs its own row alone.

`attempt` runs a kernel here and turns what it raises into a `Failure` with its reason in
words. A CUDA fault ruins its process, a segmentation fault ends it, a hang never does:
`Isolated` runs kernels in a worker process with a time limit, kept as long as nothing
fails, bit for bit as here. `worker_lifetime` starts the worker, and `worker_parent` ends
all that the worker started: at the limit, on Ctrl-C, on `close`, and when this process is
gone. (`multiprocessing` would import the caller's main module.)"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from numdev.cases import AttentionCase, strided_as
from numdev.errors import (
    MeasurementError,
    NumdevError,
    Refused,
    first_line,
    one_line,
    signal_name,
)
from numdev.kernels import Kernel, Output, all_kernels, find
from numdev.kernels.output import as_output
from numdev.metrics.bit_checksums import same
from numdev.studies.audit.ctrl_c import noticing
from numdev.studies.audit.worker_lifetime import END_S, WorkerProcess
from numdev.studies.audit.worker_messages import (
    TOKEN_BYTES,
    Channel,
    Ended,
    Late,
    failed_answer,
    output_answer,
    read_answer,
    read_task,
)
from numdev.system import switches
from numdev.temporary_files import remove_stale


@dataclass(frozen=True)
class Failure:
    """Why a kernel gave no output, in plain words: an exception would keep the kernel's
    tensors alive."""

    status: Literal["skipped", "failed"]
    reason: str


Runner = Callable[..., Output | Failure]  # `attempt`, or an `Isolated`
# How a case is laid out in memory, and in what state the process is, while a kernel runs.
# It can be pickled, and leaves the values of the tensors as they are.
Within = Callable[[AttentionCase], AbstractContextManager[AttentionCase]]


def attempt(
    kernel: Kernel,
    case: AttentionCase,
    options: Mapping[str, object],
    *,
    gradients: bool = False,
    within: Within = contextlib.nullcontext,
) -> Output | Failure:
    """Returns the kernel's output, with `gradients` that of one training step; or a
    Failure that says what went wrong: `skipped` where the kernel declines (Refused),
    `failed` for any other exception, SystemExit included, and for a kernel that writes
    into its inputs. Only the user's Ctrl-C is raised, as KeyboardInterrupt. The kernel
    gets a copy of the inputs, in the state of `within`, and the output is copied too."""
    run = kernel.gradients if gradients else kernel.attend
    with noticing() as is_interrupted:
        try:
            with torch.set_grad_enabled(gradients), within(copied(case)) as inputs:
                output = run(inputs, **options)
            if case.q.is_cuda:
                # A fault of this kernel comes out here, not in the next
                torch.cuda.synchronize()
            if written := [
                n for n, x in tensors_of(inputs).items() if not same(x, getattr(case, n))
            ]:
                return Failure("failed", f"writes into its inputs ({', '.join(written)})")
            # A kernel may return the same memory every time
            result: Output = copied(output)
            return result
        except BaseException as error:
            if is_interrupted():
                raise KeyboardInterrupt from error
            if isinstance(error, Refused):
                return Failure("skipped", first_line(str(error.message)))
            if isinstance(error, SystemExit) and isinstance(error.code, int | None):
                return Failure("failed", f"ended the program (exit code {error.code})")
            return Failure("failed", one_line(error))


def declined_here(kernel: Kernel, case: AttentionCase) -> Failure | None:
    """Returns the Failure, `skipped`, of a plain function that has no parameter for what
    the case needs: that is known without a run of it. None for any other, and for a
    registered kernel, whose own code says what it declines."""
    if kernel.adapted is None:
        return None
    try:
        kernel.accept(case)
    except Refused as error:
        return Failure("skipped", first_line(str(error.message)))
    return None


def copied(record: Any, device: str | torch.device | None = None) -> Any:
    """Returns a case or an output with its tensors detached. Without a `device` all
    tensors are copied; with one they are on it, and those that were on it already are not
    copied. Strides stay."""
    moved = {
        name: strided_as(x.detach().to(device or x.device, copy=device is None), x)
        for name, x in tensors_of(record).items()
    }
    return dataclasses.replace(record, **moved)


def tensors_of(record: object) -> dict[str, Tensor]:
    """Returns the tensors among the attributes of a case or an output, by name."""
    return {name: x for name, x in vars(record).items() if isinstance(x, Tensor)}


# --- in a process of its own ----------------------------------------------------------

UNUSABLE = "its process gave an unusable answer"
# What importing torch may take: seconds, but minutes on a cold network disk
START_S = 300.0
NOTHING = bytes(TOKEN_BYTES)  # the token of the answer to no task: the worker is ready


class IsolatedRun(NamedTuple):
    """A kernel by its name, and its arguments. Two are equal only for the very same case,
    the same options, gradients and `within`."""

    name: str
    case: AttentionCase
    options: Mapping[str, object]
    gradients: bool
    within: Within


# None: the worker did not come to it
Run = Future[Output | Failure | None]


@dataclass
class Begun:
    """Runs of one call that have begun in a worker, while this process goes on."""

    call: IsolatedRun
    ready: Future[None]  # raises where the worker cannot be started
    is_shared: bool  # whether another kernel ran in that worker before
    results: list[Run]  # of those that nobody took yet, in order


class Isolated(contextlib.AbstractContextManager["Isolated"]):
    """Runs kernels in a worker process, as `attempt` does in this one. The process is
    started when it is first needed, or by `start`. Use as a context manager; not from two
    threads at once. `limit_s`: seconds for a kernel."""

    def __init__(self, limit_s: float = 60.0) -> None:
        self.limit_s = limit_s
        self.worker: Worker | None = None
        self._begun: Begun | None = None
        self._suspects: set[str] = set()  # kernels that failed in a worker of no other

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, started: WorkerProcess | None = None) -> None:
        """Takes a process as the worker, or starts one; it need not be ready yet. There
        must be no worker. `started`: the process; None: a new one. Raises OSError where
        no process can be started."""
        self.worker = Worker(started or WorkerProcess.start())

    def __call__(
        self,
        kernel: Kernel,
        case: AttentionCase,
        options: Any,
        *,
        gradients: bool = False,
        within: Within = contextlib.nullcontext,
    ) -> Output | Failure:
        """Returns what `attempt` returns for the kernel of this name in the worker; the
        result of a run that `begin` has begun, if there is one for the same arguments. A
        function that has no parameter for what the case needs is not run.
        The limit holds for sending the task, and again for the kernel, its compilation
        and the answer; it does not hold for the start of a worker. A kernel that fails in
        a worker where another kernel ran is run again in a new one, so that another
        kernel's fault costs it no row. A failure ends the worker. Raises MeasurementError
        where no worker can be started, and OSError where no process can be. Every
        exception, Ctrl-C included, ends the worker first."""
        if (declined := declined_here(kernel, case)) is not None:
            return declined
        call = IsolatedRun(kernel.name, case, dict(options), gradients, within)
        try:
            result, was_shared = self._result_of(call)
            if isinstance(result, Failure) and result.status == "failed" and was_shared:
                self.close()
                result, _ = self._result_of(call)
        except BaseException:
            self.close()
            raise
        if isinstance(result, Output):
            return result
        if result.status == "failed":
            self._suspects.add(kernel.name)
            self.close()
        return result

    def begin(
        self,
        kernel: Kernel,
        case: AttentionCase,
        options: Mapping[str, object],
        *,
        gradients: bool = False,
        times: int = 1,
    ) -> None:
        """Begins to run a kernel `times` times (at least once), one after another, while
        this process goes on. As many later calls with the same arguments take the
        results. Does nothing for a function that declines the case without a run, nor
        where these runs have begun already and exactly `times` results are left to take.
        Otherwise, as any other call does, waits for the run that goes on, and drops
        results that are left. Raises MeasurementError where the worker could not be
        started, and OSError where no process can be."""
        if declined_here(kernel, case) is not None:
            return
        call = IsolatedRun(
            kernel.name, case, dict(options), gradients, contextlib.nullcontext
        )
        begun = self._begun
        if begun is None or begun.call != call or len(begun.results) != times:
            self._begin(call, times)

    def _begin(self, call: IsolatedRun, times: int = 1) -> Begun:
        """Begins to run a call `times` times, one after another, and returns the runs.
        The result of a run is None where the one before gave no output, or the worker has
        ended since. First waits for the run that goes on, cancels those that have not
        begun, and drops their results. Raises as `_worker_for`."""
        for left in reversed(self._begun.results if self._begun else ()):
            # A worker has one task at a time
            if not left.cancel():
                left.result()
        name, case, *how = call
        # Kernels may be found where sys.path was longer than when the worker started
        state = str(case.q.device), torch_settings(), [*sys.path]
        sent = (name, (*how,), copied(case, "cpu"), *state)
        # Once, and by the thread that sends it: it takes as long as a small call
        task = functools.cache(functools.partial(packed, sent))
        worker = self._worker_for(name)
        is_shared = bool(worker.kernels - {name})

        def run(before: Run | None) -> Output | Failure | None:
            """Returns the worker's answer. None where the run `before` gave no output, or
            the worker has ended since."""
            # The first is sure of its worker, which `_worker_for` has looked at
            if before is not None and (
                not isinstance(before.result(), Output) or worker.is_spoiled()
            ):
                return None
            return worker.answer(name, task(), case, self.limit_s)

        runs: list[Run] = [worker.thread.submit(run, None)]
        while len(runs) < times:
            runs.append(worker.thread.submit(run, runs[-1]))
        self._begun = Begun(call, worker.ready, is_shared, runs)
        return self._begun

    def _result_of(self, call: IsolatedRun) -> tuple[Output | Failure, bool]:
        """Returns the result of a call, and whether another kernel ran in the worker
        before. Takes the next run where this call was begun, else begins one, and waits
        for it. Raises as `_worker_for`."""
        begun = self._begun
        if begun is None or begun.call != call or not begun.results:
            begun = self._begin(call)
        begun.ready.result()
        result = begun.results.pop(0).result()
        if result is None or not begun.results:
            self._begun = None  # which would keep the case's tensors alive
        if result is None:
            return self._result_of(call)
        return result, begun.is_shared

    def close(self) -> None:
        """Ends the worker, and all that it started; does nothing without a worker.
        Results of runs that have begun are lost. This object can be used again: the next
        call starts a worker."""
        worker, self.worker, self._begun = self.worker, None, None
        if worker is not None:
            worker.close()

    def _worker_for(self, name: str) -> Worker:
        """Returns a worker that will take a task for the kernel `name`. That is the
        present one, unless it is gone or spoiled, or the kernel has failed before and
        another kernel ran there; then it is a new one, which may not be ready yet. Raises
        MeasurementError where the present one could not be started, and OSError where no
        process can be."""
        worker = self.worker
        # Nothing has run yet where it is not ready
        if worker is not None and worker.ready.done():
            worker.ready.result()
            if worker.is_spoiled() or (
                name in self._suspects and worker.kernels - {name}
            ):
                self.close()
        if self.worker is None:
            self.start()
            assert self.worker is not None
        return self.worker


@dataclass(eq=False)
class Worker:
    """A process that answers tasks, as this process sees it. `process` is the worker's
    supervisor."""

    started: WorkerProcess
    kernels: set[str] = field(default_factory=set)  # that were run there
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    """Waits for it to be ready, and then for its answers."""
    ready: Future[None] = field(init=False)

    def __post_init__(self) -> None:
        started = self.started
        self.process = started.process
        self.channel = Channel(
            started.socket, started.stderr, lambda: self.process.poll() is not None
        )
        self.ready = self.thread.submit(self.expect_ready)

    def expect_ready(self) -> None:
        """Waits until the worker says that it has imported what it needs. Raises
        MeasurementError where it ends before, sends something else, or takes longer than
        START_S seconds."""
        try:
            token = self.channel.read(TOKEN_BYTES, time.monotonic() + START_S)
            reason = UNUSABLE if token != NOTHING else None
        except Late:
            reason = f"no answer within {START_S:g} s"
        except Ended:
            reason = self.fate()
        if reason:
            raise MeasurementError(f"an isolated process cannot be started: {reason}")

    def is_spoiled(self) -> bool:
        """Whether the process has ended, has closed its end of the socket, or has sent
        something that no task asked for."""
        return self.process.poll() is not None or not self.channel.is_clean()

    def answer(
        self, name: str, task: bytes, case: AttentionCase, limit_s: float
    ) -> Output | Failure:
        """Returns the worker's answer to a task, on the case's device. `name`: the
        kernel's; `task`: as `packed` returns it. Returns a Failure where the kernel gave
        no output, the worker ended, sending or the answer took longer than `limit_s`
        seconds, or the answer is unusable."""
        self.kernels.add(name)
        self.channel.forget()
        token = secrets.token_bytes(TOKEN_BYTES)
        try:
            self.channel.send(token + task, time.monotonic() + limit_s)
            answer = read_answer(self.channel, token, case, time.monotonic() + limit_s)
            if not isinstance(answer, Output):
                return Failure(*answer)
            return as_output(copied(answer, case.q.device), case)
        except Late:
            return Failure("failed", f"no answer within {limit_s:g} s")
        except Ended:
            return Failure("failed", self.fate())
        except (
            Exception
        ) as error:  # a process in which foreign code ran may answer anything
            return Failure("failed", f"{UNUSABLE} ({one_line(error)})")

    def fate(self) -> str:
        """Returns in words how the process ended, with the last line of its stderr: `its
        process was killed by SIGSEGV (...)`, `its process ended with exit code 1`. Waits
        up to END_S seconds for its end; of one that still runs it says that the process
        closed its pipe."""
        try:
            code = self.process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            what = "its process closed its pipe"
        else:
            what = f"its process ended with exit code {code}"
            if code < 0:
                what = f"its process was killed by {signal_name(-code)}"
            if code == -signal.SIGKILL:
                what += ", perhaps out of memory"
        line = first_line(self.channel.last_line())
        return f"{what} ({line})" if line else what

    def close(self) -> None:
        """Ends the process and all that it started, and removes temporary files of dead
        processes. This object cannot be used again."""
        self.started.end()
        # Without a process it has its answer; only then is nothing read any more
        self.thread.shutdown(cancel_futures=True)
        self.channel.close()
        remove_stale(Path(tempfile.gettempdir()), "numdev-")  # of a kernel that was ended


def serve(descriptor: int) -> None:
    """Runs one task after another, in the worker, until numdev closes the socket; then
    ends the process. `descriptor`: the socket's. Does not return. Raises OSError where
    the connection breaks."""
    end = socket.socket(fileno=descriptor)
    with contextlib.suppress(OSError):  # Linux: when memory runs out, take this process
        Path("/proc/self/oom_score_adj").write_text("1000")
    all_kernels()  # what they import takes no kernel's time
    end.sendall(NOTHING)
    while True:
        try:
            message = read_task(end)
        except EOFError:
            os._exit(0)
        token = bytes(message[:TOKEN_BYTES])
        name, how, case, device, settings, path = unpacked(message[TOKEN_BYTES:])
        set_torch(settings)
        sys.path[:] = path
        try:
            kernel = find(name)
            inputs = copied(case, device)
        except NumdevError as error:
            result: Any = Failure("failed", f"not found in the isolated process: {error}")
        else:
            options, gradients, within = how
            result = attempt(kernel, inputs, options, gradients=gradients, within=within)
        try:
            failed = isinstance(result, Failure)
            answer = (
                failed_answer(result.status, result.reason)
                if failed
                else output_answer(result)
            )
        except Exception as error:
            answer = failed_answer(
                "failed", f"its output cannot be sent: {one_line(error)}"
            )
        for part in (token, *answer, token):
            end.sendall(part)


def packed(message: object) -> bytes:
    """Returns a message as bytes, pickled by torch: Python's own pickling cannot read
    tensors of 8 bits."""
    buffer = io.BytesIO()
    torch.save(message, buffer)
    return buffer.getvalue()


def unpacked(sent: bytes | bytearray) -> Any:
    """Returns the message that `packed` made. It unpickles: only for messages of numdev
    to its worker, never for a worker's answer, which is foreign."""
    return torch.load(io.BytesIO(sent), weights_only=False)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Runs the block with PyTorch on `count` threads of the CPU; sets the former number
    again at the end. Raises RuntimeError for a `count` below 1."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Numbers in the largest tensor; with fewer, threads wait for one another:
# benchmarks/threads.py.
SMALL = 1 << 20


def fitting_threads(numbers: int) -> AbstractContextManager[None]:
    """Returns a context with PyTorch on one thread of the CPU, or on all for work whose
    largest tensor has at least SMALL numbers (`numbers`). It depends on the shape alone,
    never on the load, since sums may depend on the number of threads."""
    return threads(1 if numbers < SMALL else torch.get_num_threads())


SETTINGS = {**switches(), "threads": (torch.get_num_threads, torch.set_num_threads)}


def torch_settings() -> dict[str, object]:
    """Returns the present values of the settings of torch that change a kernel's result,
    by the names in SETTINGS."""
    return {name: read() for name, (read, _) in SETTINGS.items()}


def set_torch(wanted: Mapping[str, Any]) -> None:
    """Sets torch's settings to values that `torch_settings` returned, perhaps in another
    process. A setting that has its value already is not set again, which may have
    effects. Raises KeyError for a missing one."""
    now = torch_settings()
    for name, (_, set_to) in SETTINGS.items():
        if now[name] != wanted[name]:
            set_to(wanted[name])
