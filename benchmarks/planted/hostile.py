"""Kernels that turn on the process they run in.

`ATTACKS` is the table: a function, and the arguments by which its kernels differ. A
kernel's name is `function-arguments`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import os
import pickle
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.kernels import Output, Refused
from numdev.kernels.baseline import baseline
from planted.record import plant, planted

LONG = 1000.0  # seconds, which no test waits for


def descriptors() -> list[int]:
    """All that are open, for a kernel to find."""
    return [int(name) for name in os.listdir("/proc/self/fd")]


def sockets() -> list[int]:
    links = ((fd, Path(f"/proc/self/fd/{fd}")) for fd in descriptors())
    return [
        fd for fd, link in links if link.is_symlink() and "socket:" in os.readlink(link)
    ]


def sound(case: AttentionCase) -> Output:
    return baseline.attend(case)


def token() -> bytes:
    """Of the task being answered, which the worker's frame holds."""
    frame: Any = sys._getframe()
    while frame.f_code.co_name != "serve":
        frame = frame.f_back
    value = frame.f_locals["token"]
    assert isinstance(value, bytes)
    return value


# --- what is written into descriptors -------------------------------------------------


class Evil:
    """What an unpickler would run: a file says that it was."""

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {os.environ['HOSTILE_NOTE']}",))


def saved(message: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(message, buffer)
    return buffer.getvalue()


def framed(
    header: Any, behind: bytes = b"", length: int | None = None
) -> Callable[[], bytes]:
    """An answer with this task's token; of a length that is not the header's."""

    def message() -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return (
            token()
            + struct.pack(">Q", len(text) if length is None else length)
            + text
            + behind
        )

    return message


def tensors(**layout: Any) -> dict[str, Any]:
    """The header of an output with one tensor."""
    first = {
        "dtype": "torch.bfloat16",
        "shape": [1, 2, 5, 4],
        "stride": [40, 20, 4, 1],
        **layout,
    }
    texts = dict.fromkeys(("did", "ran", "not_lse", "ran_backward"))
    return {"tensors": {"out": first}, **texts}


MESSAGES: dict[str, Callable[[], bytes]] = {
    "zeros": lambda: bytes(64),
    "noise": lambda: bytes(range(256)) * 4,
    "newline": lambda: b"\n",
    # As multiprocessing's connections count
    "old-length": lambda: struct.pack("!i", 2**31 - 1),
    "old-huge-length": lambda: struct.pack("!i", -1) + struct.pack("!Q", 2**63),
    "pickle": lambda: pickle.dumps(Evil()),
    "torch-pickle": lambda: saved(Evil()),
    "framed-pickle": lambda: struct.pack("!i", len(pickle.dumps(Evil()))) + pickle.dumps(Evil()),
    "megabytes": lambda: bytes(1 << 24),
    "token-alone": lambda: token(),
    "huge-header": framed({}, length=2**63),
    "long-header": framed({}, length=1 << 19),
    "pickled-header": lambda: framed(pickle.dumps(Evil()))(),
    "no-json": framed(b"{"),
    "deep-json": framed(b"[" * 100_000),
    "list": framed([1, 2]),
    "number": framed(b"1" * 100_000),
    "empty": framed({}),
    "ok-status": framed({"status": "ok", "reason": ""}),
    "reason-of-numbers": framed({"status": "failed", "reason": [1]}),
    "no-tensors": framed({"tensors": {}, **dict.fromkeys(("did", "ran", "not_lse"))}),
    "other-shape": framed(tensors(shape=[1 << 30, 2, 5, 4])),
    "other-rank": framed(tensors(shape=[], stride=[])),
    "other-dtype": framed(tensors(dtype="os.system")),
    "integers": framed(tensors(dtype="torch.int64")),
    "huge-strides": framed(tensors(stride=[1 << 70, 20, 4, -1])),
    "strides-of-text": framed(tensors(stride=["a"] * 4)),
    "short-tensor": framed(tensors(), behind=b"1234"),
    "other-tensor": framed({**tensors(), "tensors": {"case": tensors()["tensors"]["out"]}}),
}  # fmt: skip


def writes(case: AttentionCase, message: str) -> Output:
    """Writes into all it finds but its stderr, and computes."""
    content = MESSAGES[message]()
    for fd in set(descriptors()) - {0, 2}:
        with contextlib.suppress(OSError):
            os.write(fd, content)
    return sound(case)


def drips(case: AttentionCase, whole: bool) -> Output:
    """Writes an answer one byte at a time, so that something always comes."""
    reason = json.dumps({"status": "failed", "reason": "x" * 500}).encode()
    content = framed(reason)() if whole else bytes(1000)
    for i in range(len(content)):
        for fd in sockets():
            os.write(fd, content[i : i + 1])
        time.sleep(0.05)
    return sound(case)


def floods(case: AttentionCase, fd: int, rounds: int) -> Output:
    """Megabytes of text, and then the end; or for ever."""
    for _ in range(rounds):
        os.write(fd, b"all is well\n" * 10_000)
    os._exit(7)


def closes(case: AttentionCase, which: str) -> Output:
    if which == "shut down":
        for fd in sockets():
            socket.socket(fileno=os.dup(fd)).shutdown(socket.SHUT_RDWR)
        time.sleep(LONG)
    chosen = sockets() if which == "sockets" else descriptors()
    for fd in chosen:
        with contextlib.suppress(OSError):
            os.close(fd)
    if which == "all and waits":
        time.sleep(LONG)
    return sound(case)


def replaces(case: AttentionCase, which: str) -> Output:
    """The answer's socket by something else."""
    for fd in sockets():
        if which == "null":
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
        elif which == "pair":
            os.dup2(socket.socketpair()[0].detach(), fd)
        else:
            # Takes what is not for it, which never comes
            socket.socket(fileno=os.dup(fd)).recv(1)
    return sound(case)


def sends_descriptors(case: AttentionCase) -> Output:
    for fd in sockets():
        socket.send_fds(socket.socket(fileno=os.dup(fd)), [b"x"], [0] * 10)
    return sound(case)


# --- what is sent to, and done with, processes ----------------------------------------


def dies(case: AttentionCase, number: int) -> Output:
    with contextlib.suppress(OSError):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    time.sleep(LONG)
    return sound(case)


def exits(case: AttentionCase, when: str) -> Output:
    """With code 0, as if all were well."""
    if when == "in half an answer":
        content = framed(tensors(), behind=bytes(40))()
        for fd in sockets():
            os.write(fd, content)
    if when == "in a thread":
        threading.Timer(0.05, os._exit, (0,)).start()
        time.sleep(LONG)
    if when == "at the end":
        result = sound(case)
        os._exit(0)
        return result
    os._exit(0)


def kills(case: AttentionCase, whom: str) -> Output:
    parent = os.getppid()
    if whom == "own group":
        os.killpg(0, signal.SIGKILL)
    elif whom == "parent's group":
        os.killpg(os.getpgid(parent), signal.SIGKILL)
    elif whom == "parent's session":
        os.killpg(os.getsid(parent), signal.SIGTERM)
        os.killpg(os.getsid(parent), signal.SIGKILL)
    elif whom == "stop parent":
        os.kill(parent, signal.SIGSTOP)
    else:
        os.kill(parent, {"parent": signal.SIGKILL, "int": signal.SIGINT}[whom])
    time.sleep(LONG)
    return sound(case)


def interrupts(case: AttentionCase, number: int) -> Output:
    """Every catchable way to ask the parent's group to stop; ends none but the worker."""
    os.killpg(os.getpgid(os.getppid()), number)
    os.killpg(0, number)
    time.sleep(LONG)
    return sound(case)


def note(pid: int) -> None:
    with open(os.environ["HOSTILE_NOTE"], "a") as file:
        file.write(f"{pid}\n")


def forks(case: AttentionCase, how: str) -> Output:
    """Leaves a process behind that holds every descriptor, notes it, and ends or hangs
    itself."""
    if os.fork() == 0:
        if how in ("double", "session"):
            if how == "session":
                os.setsid()
            if os.fork():
                os._exit(0)
        if how == "ignores":
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                with contextlib.suppress(OSError):
                    signal.signal(number, signal.SIG_IGN)
        note(os.getpid())
        time.sleep(LONG)
        os._exit(0)
    while not Path(os.environ["HOSTILE_NOTE"]).exists():
        time.sleep(0.01)
    if how == "hangs":
        time.sleep(LONG)
    os._exit(0)


def answers_twice(case: AttentionCase) -> Output:
    """In a fork and here: two answers to one task."""
    os.fork()
    raise RuntimeError("in two processes")


def daemonises(case: AttentionCase) -> Output:
    done = subprocess.Popen(
        [
            "setsid",
            "sh",
            "-c",
            f"echo $$ >> {os.environ['HOSTILE_NOTE']}; exec sleep 1000",
        ],
        close_fds=False,
    )
    while not Path(os.environ["HOSTILE_NOTE"]).exists():
        done.poll()
        time.sleep(0.01)
    raise RuntimeError("leaves a daemon")


def hangs(case: AttentionCase, how: str) -> Output:
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "locked":
        ctypes.PyDLL(None).sleep(1000)  # with the interpreter's lock
    elif how == "blocked":
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            pass
    elif how == "joins":
        threading.Thread(target=time.sleep, args=(LONG,)).start()
        threading.main_thread().join(LONG)
    elif how == "reads":
        for fd in sockets():
            os.set_blocking(fd, True)
            os.read(fd, 1)
    elif how == "finally":
        try:
            time.sleep(LONG)
        finally:
            time.sleep(LONG)
    else:
        time.sleep(LONG)
    return sound(case)


def limits(case: AttentionCase, which: str) -> Output:
    """Changes its process's limits, and runs into them."""
    number = getattr(resource, f"RLIMIT_{which}")
    resource.setrlimit(number, (0, 0))
    if which == "CPU":
        while True:
            pass
    if which == "NOFILE":
        os.pipe()
    if which == "AS":
        torch.zeros(1 << 28)
        bytearray(1 << 30)
    if which == "NPROC":
        raise RuntimeError("no processes")
    raise RuntimeError("no limit held")


# --- what is raised -------------------------------------------------------------------


class OwnBase(BaseException):
    pass


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")

    __repr__ = __str__


class Unstoppable(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class Leaving(Exception):
    def __str__(self) -> str:
        raise SystemExit(0)


class Endless(Exception):
    def __str__(self) -> str:
        time.sleep(LONG)
        return ""


class Wordless(Exception):
    def __str__(self) -> str:
        return " \n "

    def __repr__(self) -> str:
        return ""


class NotText(Exception):
    def __str__(self) -> Any:
        return 3


class Novel(Exception):
    def __str__(self) -> str:
        return "x" * (1 << 24)


class Binary(Exception):
    def __str__(self) -> str:
        return "\udc80\x00\x1b[2J"


class Ending(Exception):
    def __str__(self) -> str:
        os._exit(0)


class OddRefusal(Refused):
    def __init__(self) -> None:
        super().__init__("")
        self.message: Any = {"a": 1}


ERRORS: dict[str, Callable[[], BaseException]] = {
    "base": lambda: OwnBase("of its own"),
    "interrupt": lambda: KeyboardInterrupt("by itself"),
    "exit": lambda: SystemExit("leaving"),
    "exit-none": lambda: SystemExit(),
    "generator-exit": lambda: GeneratorExit(),
    "base-group": lambda: BaseExceptionGroup("both", [KeyboardInterrupt(), OwnBase()]),
    "stop-iteration": lambda: StopIteration(),
    "memory": lambda: MemoryError(),
    "recursion": lambda: RecursionError(),
    "unspeakable": Unspeakable,
    "unstoppable": Unstoppable,
    "leaving": Leaving,
    "endless": Endless,
    "ending": Ending,
    "wordless": Wordless,
    "not-text": NotText,
    "novel": Novel,
    "binary": Binary,
    "timeout": lambda: TimeoutError("as if late"),
    "broken-pipe": lambda: BrokenPipeError("as if gone"),
    "eof": lambda: EOFError("as if ended"),
    "odd-refusal": OddRefusal,
}


def raises(case: AttentionCase, error: str) -> Output:
    raise ERRORS[error]()


# --- what is returned -----------------------------------------------------------------


class Reducing(torch.Tensor):
    """A tensor that would be unpickled by a call of its choice."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (os.system, (f"touch {os.environ['HOSTILE_NOTE']}",))


RESULTS: dict[str, Callable[[AttentionCase], Any]] = {
    "none": lambda case: None,
    "evil": lambda case: Evil(),
    "text": lambda case: "out",
    "generator": lambda case: iter([case.q]),
    "lambda": lambda case: lambda: case.q,
    "module": lambda case: os,
    "wrong-shape": lambda case: case.q[:, :, :1],
    "integers": lambda case: case.q.to(torch.int64),
    "sparse": lambda case: case.q.to_sparse(),
    "meta": lambda case: case.q.to("meta"),
    "long-words": lambda case: Output(out=sound(case).out, ran="x" * (1 << 24)),
    "odd-ran": lambda case: Output(out=sound(case).out, ran=Evil()),  # type: ignore[arg-type]
    "odd-did": lambda case: Output(out=sound(case).out, did={"x": Endless()} | {"y": Evil()}),
    "circular": lambda case: Output(out=sound(case).out, did=circle()),
    "out-of-list": lambda case: Output(out=[1.0]),  # type: ignore[arg-type]
}  # fmt: skip


def circle() -> dict[str, Any]:
    ring: dict[str, Any] = {}
    ring["ring"] = ring
    return ring


def returns(case: AttentionCase, result: str) -> Any:
    return RESULTS[result](case)


def corrupts(case: AttentionCase, what: str) -> Output:
    """Replaces what an answer is made with, and then fails or answers by it."""
    if what == "torch.save":
        torch.save = lambda *x, **y: os._exit(0)
        raise RuntimeError("without torch.save")
    if what == "pickle":
        pickle.dumps = pickle.loads = pickle.Pickler = None  # type: ignore[assignment,misc]
        raise RuntimeError("without pickle")
    if what == "json":
        json.dumps = lambda *x, **y: "{}"
    if what == "socket":
        for one in gc.get_objects():
            if isinstance(one, socket.socket):
                one.close()
    if what == "struct":
        from numdev.studies.audit import worker_messages

        worker_messages.LENGTH = struct.Struct("<I")
    if what == "attempt":
        from numdev.studies.audit import isolation

        isolation.output_answer = lambda output: [b"nothing"]
    return sound(case)


def each(*names: str) -> dict[str, tuple[Any, ...]]:
    return {name: (name,) for name in names}


def signals(names: str) -> dict[str, tuple[Any, ...]]:
    return {name: (getattr(signal, f"SIG{name}"),) for name in names.split()}


Attack = tuple[Callable[..., Any], dict[str, tuple[Any, ...]]]
ATTACKS: dict[str, Attack] = {
    "writes": (writes, each(*MESSAGES)),
    "drips": (drips, {"an-answer": (True,), "garbage": (False,)}),
    "floods": (floods, {"stdout": (1, 500), "stderr": (2, 500), "stderr-for-ever": (2, 10**9)}),
    "closes": (closes, each("all", "sockets", "all and waits", "shut down")),
    "replaces": (replaces, each("null", "pair", "reads")),
    "sends": (sends_descriptors, {"descriptors": ()}),
    "dies": (dies, signals("KILL SEGV ABRT PIPE BUS FPE ILL TERM HUP ALRM")),
    "exits": (exits, each("at once", "in half an answer", "in a thread", "at the end")),
    "kills": (kills, {
        "own-group": ("own group",), "parent": ("parent",), "parents-group": ("parent's group",),
        "parents-session": ("parent's session",), "stops-parent": ("stop parent",),
        "interrupts-parent": ("int",),
    }),
    "interrupts": (interrupts, signals("INT TERM HUP QUIT PIPE")),
    "forks": (forks, each("once", "double", "session", "ignores", "hangs")),
    "answers": (answers_twice, {"twice": ()}),
    "daemonises": (daemonises, {"itself": ()}),
    "hangs": (hangs, each("sleeps", "stopped", "locked", "blocked", "joins", "reads", "finally")),
    "limits": (limits, each("CPU", "NOFILE", "AS", "FSIZE", "STACK", "NPROC")),
    "raises": (raises, each(*ERRORS)),
    "returns": (returns, each(*RESULTS)),
    "corrupts": (corrupts, each("torch.save", "pickle", "json", "socket", "struct", "attempt")),
}  # fmt: skip


def _kernel(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Callable[..., Any]:
    def run(case: AttentionCase) -> Any:
        return function(case, *arguments)

    return run


for _attack, (_function, _variants) in ATTACKS.items():
    for _variant, _arguments in _variants.items():
        _name = re.sub(r"[^a-z0-9]+", "-", f"{_attack}-{_variant}".lower())
        _what = f"{_function.__doc__ or _attack.capitalize() + '.'} ({_variant})"
        plant(_name, "hostile", _what, _kernel(_function, _arguments))


@planted(
    "process", "Sound, and leaves behind what fails whatever runs next in its process."
)
def poisons(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    resource.setrlimit(resource.RLIMIT_AS, (0, resource.RLIM_INFINITY))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


@planted("process", "Sound, and writes into the answer's socket later on.")
def babbles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:

    def write() -> None:
        while True:
            for fd in sockets():
                os.write(fd, b"more")
            time.sleep(0.01)

    threading.Timer(0.2, write).start()
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)
