"""Kernels that mean harm to numdev: each costs its own row, and nothing hangs, ends or
stays.

Workers are forked from the process of these tests, which must therefore have one thread:
tests/test_hostile.py runs this file by itself. All of it, some minutes: python -m pytest
tests/support/hostile_table.py"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles import make_case
from planted import Planted, of_family
from test_isolation import gone, ran, same, wait_for

from numdev.cases import AttentionCase
from numdev.kernels import Output, find
from numdev.studies.audit import isolation, worker_parent
from numdev.studies.audit.isolation import Failure, Isolated

LIMIT_S = 1.5
QUICK = (
    "writes-old-length", "writes-token-alone", "writes-torch-pickle", "drips-garbage",
    "floods-stderr-for-ever", "kills-parents-group", "kills-stops-parent", "forks-session",
    "raises-unspeakable", "returns-circular",
)  # fmt: skip
SKIPPED = {"raises-odd-refusal"}


@pytest.fixture(scope="module")
def note(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a kernel writes which processes it started; a pickle that is loaded makes it
    too."""
    path = tmp_path_factory.mktemp("hostile") / "note"
    os.environ["HOSTILE_NOTE"] = str(path)
    yield path
    del os.environ["HOSTILE_NOTE"]


class Forked:
    """In place of `subprocess.Popen`, the supervisor in a fork of this process: torch is
    imported here, so that a worker starts at once and not after seconds. All else is as
    it is."""

    def __init__(
        self, command: list[Any], *, stderr: int, pass_fds: tuple[int, ...], **_: object
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        try:
            faulthandler.disable()  # it writes to a descriptor that is closed here
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor, source in ((0, null), (1, null), (2, stderr)):
                os.dup2(source, descriptor)
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                if descriptor > 2 and descriptor not in pass_fds:
                    with contextlib.suppress(OSError):  # the one that listed them
                        os.close(descriptor)
            sys.stdout, sys.stderr = (open(fd, "w", closefd=False) for fd in (1, 2))  # noqa: SIM115
            sys.argv[1:] = [command[-1]]
            worker_parent.main()
        except BaseException:
            traceback.print_exc()
        os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("supervisor", timeout)
            time.sleep(0.002)
        return code


@pytest.fixture(scope="module")
def shared(note: Path) -> Iterator[Isolated]:
    namespace = SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
    with pytest.MonkeyPatch.context() as patch, Isolated() as isolated:
        patch.setattr(isolation, "subprocess", namespace)
        yield isolated


@pytest.fixture
def case() -> AttentionCase:
    return make_case(dtype=torch.bfloat16, heads=2, q_len=5, kv_len=7, head_dim=4)


def table() -> list[object]:
    slow = pytest.mark.slow
    return [
        pytest.param(entry, marks=() if entry.name in QUICK else slow, id=entry.name)
        for entry in of_family("hostile")
    ]


@pytest.mark.parametrize("entry", table())
@pytest.mark.one_in(8)
def test_a_hostile_kernel_costs_its_own_row(
    shared: Isolated, note: Path, case: AttentionCase, entry: Planted
) -> None:
    """It ends in a failed row, by its limit at the latest; what it started is gone,
    nothing it sent was unpickled, and the next kernel gives what it gives here."""
    note.unlink(missing_ok=True)
    result = ran(shared, entry.address, case, {}, limit_s=LIMIT_S)
    assert isinstance(result, Failure), result
    assert result.status == ("skipped" if entry.name in SKIPPED else "failed"), result
    result.reason.encode()
    assert len(result.reason.splitlines()) == 1, result
    if entry.name.startswith(("forks", "daemonises")):
        for pid in note.read_text().split():
            wait_for(lambda pid=pid: gone(int(pid)), seconds=60)
    else:
        assert not note.exists(), "a pickle was loaded"
    after = ran(shared, "baseline", case, {})
    assert isinstance(after, Output), after
    assert same(find("baseline").attend(case), after)


def test_what_a_kernel_leaves_behind_costs_no_other_its_row(
    shared: Isolated, case: AttentionCase
) -> None:
    """A kernel that answers and spoils its process: the next one is asked again in a
    fresh one."""
    for name in ("planted:poisons", "planted:babbles"):
        shared.close()  # a thread that starts without memory would wait for ever
        assert isinstance(ran(shared, name, case, {}), Output)
        after = ran(shared, "baseline", case, {})
        assert isinstance(after, Output), after
        assert same(find("baseline").attend(case), after)
