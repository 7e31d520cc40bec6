"""Processes that compute together, one for each rank, kept from call to call.

`Ranks` starts them, hands all of them the same task and waits until every one has answered. Where
one dies, raises or says nothing in time, all are ended, and what happened to it is the message: a
rank that waits for another which is gone waits for ever. The next call starts new ones
(`together`).

No orphans: a rank ends when the lifeline's other end is closed, as the end of this process does,
even by SIGKILL. Ranks stay in this process's group, so that whoever kills that kills them.
What a rank writes to stdout goes nowhere; the last line of its stderr is quoted when it dies.
Between the processes go bytes that hold tensors and plain data, which are read without executing
anything in them.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any

import torch

from numdev.errors import MeasurementError

START_S = 180.0
"""How long ranks may take to import torch and to find each other."""
LIMIT_S = 300.0
"""How long an answer may take. `--isolate` has a limit of its own, of which this knows nothing."""
GRACE_S = 1.0
"""How long it is waited, where a rank reports a failure, for another to show why."""
BOOT = """
import json, sys
sys.path[:], *place = json.loads(sys.argv[1])
from numdev.kernels.rank import main
main(*place)
"""
Answer = dict[str, Any]

_running: dict[tuple[int, str], Ranks] = {}


def together(world: int, device: str) -> Ranks:
    """The ranks of this process for so many devices of one kind, started when first asked for."""
    found = _running.get((world, device))
    if found is None or found.ended:
        found = _running[world, device] = Ranks(world, device)
    return found


@atexit.register
def end_all() -> None:
    """End the ranks that `together` started."""
    while _running:
        _running.popitem()[1].close()


def packed(task: Mapping[str, Any]) -> bytes:
    """Tensors and plain data as bytes."""
    buffer = io.BytesIO()
    torch.save(dict(task), buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Answer:
    """What was packed; raises an exception of pickle's for anything but tensors and plain data."""
    found: Answer = torch.load(io.BytesIO(data), weights_only=True)
    return found


class Ranks:
    """So many processes, each with a device of its own where devices are CUDA's. Raises
    MeasurementError where they cannot be started."""

    def __init__(self, world: int, device: str) -> None:
        self.world, self.ended = world, False
        self._folder = tempfile.TemporaryDirectory(prefix="numdev-ranks-")
        self._lifeline, self._kept = os.pipe()
        self._ranks: list[_Rank] = []
        try:
            store = str(Path(self._folder.name) / "store")
            for rank in range(world):
                place = (rank, world, device, store)
                self._ranks.append(_Rank(place, self._lifeline))
            self._answers("start", START_S)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The processes, by rank."""
        return [rank.process.pid for rank in self._ranks]

    def ask(self, task: Mapping[str, Any], limit_s: float = LIMIT_S) -> list[Answer]:
        """Every rank's answer, in order. Raises MeasurementError, and ends all ranks, where one
        fails, dies, or does not answer in time; so does any exception, Ctrl-C included."""
        try:
            data = packed(task)
            for rank in self._ranks:
                with contextlib.suppress(OSError):  # it is gone, and so it will be found
                    rank.pipe.send_bytes(data)
            return self._answers("answer", limit_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every rank and remove what they shared."""
        if self.ended:
            return
        self.ended = True
        for rank in self._ranks:
            rank.kill()
        os.close(self._kept)
        os.close(self._lifeline)
        self._folder.cleanup()

    def _answers(self, what: str, limit_s: float) -> list[Answer]:
        deadline = time.monotonic() + limit_s
        answers: dict[int, Answer] = {}
        while len(answers) < self.world:
            waiting = {r.pipe: i for i, r in enumerate(self._ranks) if i not in answers}
            left = deadline - time.monotonic()
            if left <= 0:
                who = ", ".join(str(i) for i in sorted(waiting.values()))
                raise MeasurementError(
                    f"rank {who} of {self.world} did not {what} within {limit_s:g} s"
                )
            for pipe in wait(list(waiting), timeout=left):
                number = waiting[pipe]  # type: ignore[index]
                answers[number] = self._answer(number)
        return [answers[i] for i in range(self.world)]

    def _answer(self, number: int) -> Answer:
        rank = self._ranks[number]
        try:
            answer = unpacked(rank.pipe.recv_bytes())
        except (EOFError, OSError):
            raise MeasurementError(self._fate_of(number)) from None
        if "error" in answer:
            dead = self._dead_within(GRACE_S)
            why = f"rank {number} of {self.world}: {answer['error']}"
            raise MeasurementError(why if dead is None else self._fate_of(dead))
        return answer

    def _dead_within(self, seconds: float) -> int | None:
        """A rank that has died: what others report is then a consequence."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for number, rank in enumerate(self._ranks):
                if rank.process.poll() is not None:
                    return number
            time.sleep(0.02)
        return None

    def _fate_of(self, number: int) -> str:
        return f"rank {number} of {self.world} {self._ranks[number].fate()}"


class _Rank:
    """One process, its pipe and what it wrote to stderr."""

    def __init__(self, place: tuple[Any, ...], lifeline: int) -> None:
        self.pipe: Connection
        self.pipe, theirs = Pipe()
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        arguments = json.dumps([sys.path, *place, theirs.fileno(), lifeline])
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BOOT, arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=(theirs.fileno(), lifeline),
            )
        finally:
            theirs.close()

    def fate(self) -> str:
        """What became of a process that answers no more."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=GRACE_S)
        code = self.process.poll()
        if code is None:
            what = "closed its pipe"
        elif code < 0:
            what = f"was killed by {signal.Signals(-code).name}"
        else:
            what = f"ended with exit code {code}"
        last = self._last_line()
        return f"{what} ({last})" if last else what

    def kill(self) -> None:
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the driver, nothing ends it
            self.process.wait(timeout=10)
        self.pipe.close()
        self._stderr.close()

    def _last_line(self) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - 4096))
        text = self._stderr.read().decode(errors="replace")
        return next((x.strip() for x in reversed(text.splitlines()) if x.strip()), "")
