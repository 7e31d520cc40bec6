"""The far end of `numdev.audit.cluster.team`: one job, done in a worker process of Dask's.

A worker measures what the asking process would: first it takes over that one's settings of torch,
then it is checked that nothing else that may change a number differs (`_check`); a worker that is
different refuses, in words. Nothing here is about Dask.

A kernel under audit may take the worker along. One that crashes does so itself; one that hangs, or
leaves the GPU in a state in which nothing runs any more, is helped to it: the worker ends, whoever
watches over it starts another, and the job comes back with its kernels to be run in a process of
their own (`isolated`). That process is kept from job to job, until `leave`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import pickle
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from numdev.audit.attempt import Failure, attempt
from numdev.audit.isolation import Supervised
from numdev.audit.jobs import Held, Job, Planned, Setting, entries
from numdev.audit.journal import first_difference, plain
from numdev.audit.run import environment, stopwatch
from numdev.audit.task import Runner
from numdev.audit.worker import from_parts, set_torch
from numdev.cases import AttentionCase
from numdev.errors import NumdevError, UsageError
from numdev.kernels import Kernel, Output, find
from numdev.kernels.emulation.faults import control_named
from numdev.sources.opening import Located
from numdev.system import System

OOM_SCORE = "500"
"""Where memory runs out Linux ends the process with the highest score: an isolated kernel (1000),
then a worker, and then what watches over workers."""
RUINED = 70
"""The exit code of a worker whose GPU runs nothing any more."""


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """A file as it was seen where the job was made."""

    path: Path
    size: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        found = path.stat()
        return cls(path=path, size=found.st_size, modified_ns=found.st_mtime_ns)

    def holds(self) -> bool:
        """Whether the file is there, and by size and time the same."""
        try:
            return Stamp.of(self.path) == self
        except OSError:
            return False


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """A job and its setting as they travel: plain data, pickled, and nothing of kernels but their
    names."""

    setting: Mapping[str, Any]
    """The fields of a `Setting`, where the plan is (role, name, options)."""
    located: Located | None
    """A case that can be made here; None: its tensors come along."""
    stamp: Stamp | None
    """The file it is read from."""
    plain: Mapping[str, Any]
    """Of a case whose tensors come along: the rest of it, with its `axes`."""
    wanted: frozenset[str]
    isolated: frozenset[str] | None
    """The kernels under audit that run in a process of their own; None: all."""
    limit_s: float
    """What a kernel under audit may take."""


def packed_setting(setting: Setting) -> dict[str, Any]:
    """As a parcel has it."""
    plan = [(p.role, p.kernel.name, dict(p.options)) for p in setting.plan]
    return {**vars(setting), "formats": tuple(setting.formats), "plan": plan}


def work(expected: str, parcel: bytes, tensors: bytes | None) -> dict[str, Any]:
    """Do a job: its `entries`, and the `seconds` they took, by section; or `unread`, where the file
    it is to be read from is not here; or `refused`, with class, message and hint of an error.

    `expected` is JSON: the environment the job is for, torch's settings and the fingerprints of
    kernels. It comes first, since another version might not even read the parcel. `tensors` is a
    safetensors file.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):  # foreign kernels print
            _yield_first()
            known = json.loads(expected)
            _check(known)
            return _work(pickle.loads(parcel), known, tensors)
    except NumdevError as error:
        who = f"{socket.gethostname()}, process {os.getpid()}"
        return {"refused": [type(error).__name__, f"worker {who}: {error.message}", error.hint]}


def leave() -> None:
    """End the process of isolated kernels, if there is one."""
    if _supervised.cache_info().currsize:
        _supervised().close()
        _supervised.cache_clear()


def _work(parcel: Parcel, known: Mapping[str, Any], tensors: bytes | None) -> dict[str, Any]:
    if parcel.stamp is not None and not parcel.stamp.holds():
        return {"unread": True}
    plan = [
        _planned(role, name, options, known["kernels"])
        for role, name, options in parcel.setting["plan"]
    ]
    setting = Setting(**{**parcel.setting, "plan": plan})
    job = Job(located=parcel.located or _held(parcel.plain, tensors), wanted=parcel.wanted)
    watch = stopwatch(setting.system)
    with _healthy(setting.system):
        run = _runner(parcel, setting.system)
        found = [
            vars(entry) | {"rows": [plain(row) for row in entry.rows]}
            for entry in entries(job, setting, run, watch)
        ]
    return {"entries": found, "seconds": watch.seconds()}


def _held(plain: Mapping[str, Any], tensors: bytes | None) -> Held:
    axes = {**plain}.pop("axes")
    rest = {name: value for name, value in plain.items() if name != "axes"}
    return Held(case=from_parts(rest, safetensors.torch.load(tensors or b"")), axes=axes)


# --- the same as where the job comes from --------------------------------------------------------


def _check(expected: Mapping[str, Any]) -> None:
    """Take over torch's settings. Raises UsageError where anything else is different here, but for
    the number of GPUs: a worker mostly sees one."""
    settings = expected["torch"]
    set_torch(settings)
    here = _environment(expected["environment"]["device"], json.dumps(settings, sort_keys=True))
    there = {**expected["environment"], "devices": here["devices"]}
    if here != there:
        where, wanted, found = first_difference(there, here)
        raise UsageError(
            f"has another environment: {where} is {found!r} there, and {wanted!r} here",
            hint="a report never mixes two; give all workers the same, and start them anew",
        )


@functools.cache
def _environment(device: str, settings: str) -> Any:
    """Once a process and settings: so it tells of the source that was imported, not of an edited
    one. Of `settings` it depends through torch."""
    return json.loads(json.dumps(environment(System.here(device)), default=str))


def _planned(
    role: str, name: str, options: Mapping[str, Any], fingerprints: Mapping[str, str]
) -> Planned:
    kernel = _kernel(role, name)
    if kernel.made_from != fingerprints.get(name):
        raise UsageError(
            f"has another source of the kernel {name}",
            hint="give all workers the same, and start them anew",
        )
    return Planned(role=role, kernel=kernel, options=options)


@functools.cache
def _kernel(role: str, name: str) -> Kernel:
    """Found once a process, so that its fingerprint is that of the source that was imported."""
    return control_named(name).kernel() if role == "control" else find(name)


# --- what a kernel may do to this process --------------------------------------------------------


def _runner(parcel: Parcel, system: System) -> Runner:
    def run(
        kernel: Kernel, case: AttentionCase, options: Mapping[str, Any], *, gradients: bool = False
    ) -> Output | Failure:
        if parcel.isolated is None or kernel.name in parcel.isolated:
            return _supervised().run(
                kernel.name, options, case, gradients=gradients, limit_s=parcel.limit_s
            )
        with _ended_after(parcel.limit_s):
            found = attempt(kernel, case, options, gradients=gradients)
        if isinstance(found, Failure) and found.status == "failed":
            _end_if_ruined(system)
        return found

    return run


@contextlib.contextmanager
def _ended_after(limit_s: float) -> Iterator[None]:
    """End this process where the block takes longer, even one that never lets go of the
    interpreter's lock."""
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _healthy(system: System) -> Iterator[None]:
    """End this process, at the end of the block, where its GPU runs nothing any more."""
    try:
        yield
    finally:
        _end_if_ruined(system)


def _end_if_ruined(system: System) -> None:
    if system.device != "cuda":
        return
    try:
        torch.zeros(1, device="cuda").add_(1).item()
    except RuntimeError as error:
        if "out of memory" not in str(error):
            os._exit(RUINED)


@functools.cache
def _supervised() -> Supervised:
    return Supervised()


@functools.cache
def _yield_first() -> None:
    """Once a process: when memory runs out, let it be this one."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
