"""A function in a process of its own, in which the reference is never imported or run.

The process is a fork, begun before anything is computed, which costs no second import of
PyTorch; where the parent has asked for CUDA devices, so that PyTorch cannot use them in a
fork, it goes on as a new interpreter. It reads tasks that numdev pickled. Its answers are
a JSON header and the bytes of tensors, and are never unpickled. It is no sandbox: the
process may read and write what its user may."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from numdev.errors import MeasurementError, UsageError, one_line, signal_name
from numdev.operations.function.function_runs import FunctionRun
from numdev.operations.function.problem_files import ModuleBuild
from numdev.operations.function.shapes_and_dtypes import INTEGERS
from numdev.operations.function.task_environment import Surroundings
from numdev.operations.function.trees import Arguments, Values

LIMIT_S = 600.0  # for all draws of a call for the function, its compilation included
LARGEST_HEADER = 1 << 26  # bytes
GROUPS = ("outputs", "gradients", "written")
# What reading nonsense raises: a missing key, another type, lists a thousand deep
BAD_DATA = (KeyError, TypeError, OverflowError, RecursionError)
Answer = FunctionRun | str  # or why there is none


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the process is asked: a target that it imports, and what to call it with."""

    target: str
    draws: Sequence[tuple[int, Arguments]]  # by seed
    backward: bool
    build: ModuleBuild | None = None
    """How the function is made of the target, where that is a class; without draws the
    answer is what its state looks like, as JSON."""
    surroundings: Surroundings | None = None  # in which the target is imported and run


Message = tuple[list[dict[str, object]], list[Tensor]]  # header, and what it names
RunWork = Callable[[Work], Sequence[Answer]]


@dataclass(eq=False)
class FunctionProcess:
    """A process that runs a function. It begins with the context of this object, and ends
    with it. `run`: a function of a module, which the process calls with each task. With
    `starts_cuda` the process starts CUDA at once, which takes a second or two, while the
    caller goes on."""

    run: RunWork
    starts_cuda: bool = False
    limit_s: float = LIMIT_S
    _pid: int = 0
    _to: int = -1
    _back: int = -1
    _fate: str = ""  # why it answers no more

    def __enter__(self) -> FunctionProcess:
        task, self._to = os.pipe()
        self._back, answer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._to)
            os.close(self._back)
            if torch.cuda._is_in_bad_fork():
                _continue_anew(self.run, task, answer)
            if self.starts_cuda:
                with contextlib.suppress(Exception):  # its work will say why
                    torch.zeros(1, device="cuda")
            _serve_and_exit(self.run, task, answer)
        os.close(task)
        os.close(answer)
        return self

    def __exit__(self, *_: object) -> None:
        for end in (self._to, self._back):
            with contextlib.suppress(OSError):
                os.close(end)
        self._kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def answers(self, work: Work) -> list[Answer]:
        """Returns the answer to each draw: the run, or in words why there is none. For a
        module without draws: one answer, the names and shapes of its state as JSON.
        Raises UsageError where the process cannot import the target or make its module.
        Raises MeasurementError where the process ends, answers nonsense, or does not
        answer within `limit_s` seconds; it is killed then, and each later call raises the
        same. Raises MeasurementError for arguments that cannot be pickled, after which
        the process can still be asked."""
        if self._fate:
            raise MeasurementError(self._fate)
        messages = _packed(work)
        until = time.monotonic() + self.limit_s
        try:
            for message in messages:
                _write(self._to, message)
            header = self._read_header(until)
            if header and "usage" in header[0]:
                raise UsageError(str(header[0]["usage"]))
            return [self._one(answer, until) for answer in header]
        except (OSError, EOFError, ValueError, *BAD_DATA) as error:
            self._fate = f"the function's process {self._fate_in_words(error)}"
            self._kill()
            raise MeasurementError(self._fate) from error

    def _kill(self) -> None:
        """Kills the process, and all that it began in its group; does nothing where no
        process was begun."""
        if not self._pid:  # 0 would be this process's own group
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self._pid, signal.SIGKILL)

    def _fate_in_words(self, error: Exception) -> str:
        """Returns a predicate of the process: for an EOFError or BrokenPipeError `ended
        without an answer (signal SIGSEGV)`, for any other error `gave an unusable answer
        (...)`."""
        if not isinstance(error, EOFError | BrokenPipeError):
            return f"gave an unusable answer ({one_line(error)})"
        return f"ended without an answer{ending_of(self._pid)}"

    def _read_header(self, until: float) -> list[Mapping[str, object]]:
        """Returns the header that the process sends before its answers, a mapping for
        each. The mapping of a run has its tensors by group as [name, dtype, shape], whose
        bytes follow the header; another has `reason`, why there is no run, or `usage`,
        the words of a UsageError. `until`: a deadline by time.monotonic(). Raises
        EOFError where the process ended, ValueError for an answer that is late or is no
        such list."""
        (size,) = struct.unpack("<q", self._read(8, until))
        if not 0 <= size <= LARGEST_HEADER:
            raise ValueError("its answer has no header")
        header: list[Mapping[str, object]] = json.loads(self._read(size, until))
        answers = _listed(header)
        if not all(isinstance(answer, dict) for answer in answers):
            raise ValueError("its answer is none")
        return header

    def _one(self, answer: Mapping[str, object], until: float) -> Answer:
        """Returns the answer to one draw: a run, whose tensors are read from the process,
        or the reason why there is none. `answer`: the draw's part of the header; `until`:
        a deadline by time.monotonic(). Raises EOFError where the process ended,
        ValueError for tensors that are late or not well formed, KeyError and TypeError
        for a header without its parts."""
        if "reason" in answer:
            return str(answer["reason"])
        groups: dict[str, Values] = {}
        for group in GROUPS:
            groups[group] = {
                str(name): self._tensor(str(dtype), shape, until)
                for name, dtype, shape in map(_listed, _listed(answer[group]))
            }
        alias, why = answer["alias"], answer["backward_error"]
        other = answer["in_place_of_tensors"]
        strides = {
            str(name): tuple(int(str(n)) for n in _listed(each))
            for name, each in map(_listed, _listed(answer["strides"]))
        }
        devices = {
            str(name): str(device)
            for name, device in map(_listed, _listed(answer["devices"]))
        }
        pairs = map(_listed, _listed(answer["state"]))
        state = {str(name): str(checksum) for name, checksum in pairs}
        run = FunctionRun(
            outputs=groups["outputs"],
            gradients=groups["gradients"],
            written=groups["written"],
            strides=strides,
            devices=devices,
            backward_error=None if why is None else str(why),
        )
        return dataclasses.replace(
            run,
            alias=None if alias is None else str(alias),
            in_place_of_tensors=None if other is None else str(other),
            differentiable=tuple(map(str, _listed(answer["differentiable"]))),
            overwritten=tuple(map(str, _listed(answer["overwritten"]))),
            state=state,
        )

    def _tensor(self, dtype_name: str, shape: object, until: float) -> Tensor:
        """Returns a tensor on the CPU, whose bytes are read from the process. Raises
        ValueError for a name that is no dtype of numbers (a quantized one's bytes are no
        values, and PyTorch crashes on them), for a shape that is none, and after the
        deadline `until`; EOFError where the process ended."""
        dtype = getattr(torch, dtype_name, None)
        is_number = isinstance(dtype, torch.dtype) and (
            dtype.is_floating_point or dtype.is_complex or dtype in INTEGERS
        )
        if not (isinstance(dtype, torch.dtype) and is_number):
            raise ValueError("its answer has a dtype that is none")
        sizes = [int(str(n)) for n in _listed(shape)]
        count = math.prod(sizes)
        # PyTorch's strides are of 64 bits, also where an axis is empty
        if any(n < 0 for n in sizes) or math.prod(n or 1 for n in sizes) >= 1 << 63:
            raise ValueError("its answer has a shape that is none")
        data = bytearray(self._read(count * dtype.itemsize, until))
        if not data:
            return torch.empty(sizes, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(sizes)

    def _read(self, size: int, until: float) -> bytes:
        """Returns the next `size` bytes that the process sends. Raises EOFError where the
        process ended, ValueError after the deadline `until` (time.monotonic())."""
        parts: list[bytes] = []
        while size:
            left = max(0.0, until - time.monotonic())
            ready, _, _ = select.select([self._back], [], [], left)
            if not ready:
                raise ValueError(f"gave no answer within {self.limit_s:g} s")
            part = os.read(self._back, min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _packed(work: Work) -> list[bytes]:
    """Returns a task as two pickled messages: its surroundings, then the whole task,
    since arguments may be of classes that are only found in the surroundings. Raises
    MeasurementError for arguments that cannot be pickled."""
    packed = []
    try:
        for part in (work.surroundings, work):
            stream = io.BytesIO()
            torch.save(part, stream)
            packed.append(stream.getvalue())
    except Exception as error:  # of foreign objects
        why = f"cannot be given the arguments ({one_line(error)})"
        raise MeasurementError(f"the function's process {why}") from error
    return packed


def _answered(run: RunWork, surroundings: bytes, packed: bytes) -> Message:
    """Returns the header and the tensors that answer a task. Both arguments are pickled;
    the task is unpacked and run in its surroundings. A UsageError of the run becomes an
    answer; any other exception is raised."""
    around = torch.load(io.BytesIO(surroundings), weights_only=False)
    with contextlib.ExitStack() as stack:
        if around is not None:
            stack.enter_context(around.entered())
        with around.on_its_device() if around is not None else contextlib.nullcontext():
            work = torch.load(io.BytesIO(packed), weights_only=False)
        try:
            return _as_message(run(work))
        except UsageError as error:
            return [{"usage": str(error)}], []


def _listed(value: object) -> list[object]:
    """Returns the value, which must be a list. Raises ValueError for anything else."""
    if not isinstance(value, list):
        raise ValueError("its answer has no list")
    return value


def ending_of(pid: int) -> str:
    """Returns how a child process ended: ` (exit status 1)` or ` (signal SIGSEGV)`. Empty
    where the system does not tell, for 0, and where the process has not ended within a
    second. The process is not reaped."""
    if not pid or not hasattr(os, "waitid"):
        return ""
    how = os.WEXITED | os.WNOWAIT | os.WNOHANG
    ended = None
    for _ in range(100):  # its pipe may be closed a moment before it has ended
        with contextlib.suppress(ChildProcessError):
            ended = os.waitid(os.P_PID, pid, how)
        if ended is not None:
            break
        time.sleep(0.01)
    if ended is None:
        return ""
    if ended.si_code == os.CLD_EXITED:
        return f" (exit status {ended.si_status})"
    return f" (signal {signal_name(ended.si_status)})"


def _continue_anew(run: RunWork, task: int, answer: int) -> NoReturn:
    """Replaces this process by a new interpreter that serves tasks; never returns.
    `task`, `answer`: the descriptors from which it reads, and into which it writes."""
    module, name = run.__module__, run.__name__
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        f"from {module} import {name}\n"
        "from numdev.operations.function.process import _serve_and_exit\n"
        f"_serve_and_exit({name}, {task}, {answer})"
    )
    for end in (task, answer):
        os.set_inheritable(end, True)
    try:
        os.execv(sys.executable, [sys.executable, "-c", code])
    finally:  # nothing of the caller may run on in here
        os._exit(1)


def _serve_and_exit(run: RunWork, task: int, answer: int) -> None:
    """Answers the tasks that come from the descriptor `task` until its other end is
    closed, then ends the process with status 0; never returns. A UsageError is an answer;
    any other exception is printed to stderr and ends the process with status 1. What
    `run` prints goes to stderr."""
    try:
        with contextlib.suppress(OSError):  # it has one already
            os.setsid()
        os.dup2(2, 1)  # what a foreign function prints
        messages = _messages(task)
        for surroundings in messages:
            header, tensors = _answered(run, surroundings, next(messages))
            text = json.dumps(header).encode()
            os.write(answer, struct.pack("<q", len(text)))
            _write_all(answer, text)
            for x in tensors:
                flat = x.detach().cpu().contiguous().flatten()
                _write_all(answer, flat.view(torch.uint8).numpy().tobytes())
    except BaseException as error:
        print(one_line(error), file=sys.stderr)
        os._exit(1)
    os._exit(0)


def _as_message(answers: Sequence[Answer]) -> Message:
    """Returns the header, which JSON can hold, with one mapping for each answer, and the
    tensors that it names, in its order."""
    header: list[dict[str, object]] = []
    tensors: list[Tensor] = []
    for answer in answers:
        if isinstance(answer, str):
            header.append({"reason": answer})
            continue
        entry: dict[str, object] = {
            "alias": answer.alias,
            "differentiable": list(answer.differentiable),
            "overwritten": list(answer.overwritten),
            "state": [list(pair) for pair in answer.state.items()],
            "strides": [[name, list(x)] for name, x in answer.strides.items()],
            "devices": [list(pair) for pair in answer.devices.items()],
            "backward_error": answer.backward_error,
            "in_place_of_tensors": answer.in_place_of_tensors,
        }
        for name in GROUPS:
            values: Values = vars(answer)[name]
            tensors += values.values()
            entry[name] = [
                (n, str(x.dtype).removeprefix("torch."), list(x.shape))
                for n, x in values.items()
            ]
        header.append(entry)
    return header, tensors


def _messages(descriptor: int) -> Iterator[bytes]:
    """Yields the messages that come from a descriptor, each without its length of 8
    bytes, until the descriptor's other end is closed; closes the descriptor then."""
    with os.fdopen(descriptor, "rb") as stream:
        while head := stream.read(8):
            (size,) = struct.unpack("<q", head)
            yield stream.read(size)


def _write(descriptor: int, message: bytes) -> None:
    """Writes a message to a descriptor, its length in 8 bytes first. Raises OSError where
    the other end is closed."""
    _write_all(descriptor, struct.pack("<q", len(message)))
    _write_all(descriptor, message)


def _write_all(descriptor: int, data: bytes) -> None:
    """Writes all bytes to a descriptor, in as many writes as the system needs. Raises
    OSError where the other end is closed."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
