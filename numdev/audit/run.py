"""The loop: every case, in every format, through every kernel, with what is finished journalled.

What `audit` and `sweep` share. A source hands over cases one at a time; each is a job
(`numdev.audit.jobs`) for an executor, which does it here or has it done elsewhere; what is finished goes
to the journal at once, or while a GPU is next waited for, and this process alone writes that. What
the rows come to is the study's business.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import torch

import numdev
from numdev.audit.attempt import Failure, attempt
from numdev.audit.devicetime import OnDevice
from numdev.audit.isolation import Supervised
from numdev.audit.jobs import (
    Entry,
    Held,
    Job,
    Planned,
    Setting,
    Tell,
    bench_of,
    case_key,
    entries,
    steps,
)
from numdev.audit.journal import Journal, Row
from numdev.audit.meanwhile import catch_up, forget, put_off
from numdev.audit.records import recorded, weight_row
from numdev.audit.task import Runner
from numdev.audit.timing import SECTIONS, OnHost, Stopwatch
from numdev.cases import AttentionCase, CaseRef
from numdev.config import Choice
from numdev.errors import UsageError
from numdev.formats import Format, dtype_of, format_named, format_of
from numdev.kernels import Kernel, Output, find
from numdev.kernels.emulation.faults import CONTROLS
from numdev.report import (
    AttributionRow,
    CaseRecord,
    DeviationRow,
    ProfileRow,
    Provenance,
    WeightRow,
    WorstRow,
)
from numdev.report.collector import piece_done, uncollected
from numdev.sources.opening import Located, Source
from numdev.sources.tensorwriter import Writer
from numdev.system import System

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many tasks are behind it, and how many there are."""

READING = ("streamed",)
"""What a source says of how it was read, which may differ from run to run."""
ALWAYS = (("precision", "reference"), ("floor", "floor"), ("baseline", "baseline"))
"""What always runs beside the kernels under audit: (role, kernel)."""


def plan_kernels(choices: Iterable[Choice]) -> list[Planned]:
    """The standard three and the kernels under audit, in the order they will run, each once."""
    planned = [Planned(role=role, kernel=find(name), options={}) for role, name in ALWAYS]
    for choice in choices:
        kernel = find(choice.name)
        options = recorded(kernel.with_options(choice.options))
        known = any(p.kernel.name == kernel.name and p.options == options for p in planned)
        if not known and kernel.name not in {name for _, name in ALWAYS}:
            planned.append(Planned(role="kernel", kernel=kernel, options=options))
    return planned


def plan_controls(*, gradients: bool) -> list[Planned]:
    """Planted faults in every dose, to be measured beside the kernels on the same data."""
    return [
        Planned(role="control", kernel=control.kernel(), options={"dose": dose})
        for control in CONTROLS.values()
        for dose in control.doses
        if gradients or not control.in_backward_only
    ]


@contextlib.contextmanager
def runner(*, isolated: bool, limit_s: float) -> Iterator[Runner]:
    """Where kernels under audit run: here, or in a supervised process with a time limit."""
    if not isolated:
        yield attempt
        return
    with Supervised() as process:

        def run(
            kernel: Kernel,
            case: AttentionCase,
            options: Mapping[str, Any],
            *,
            gradients: bool = False,
        ) -> Output | Failure:
            return process.run(kernel.name, options, case, gradients=gradients, limit_s=limit_s)

        yield run


def plan_formats(names: Iterable[str], plan: Sequence[Planned]) -> list[Format]:
    """The formats by name, each once; raises UsageError for one that no kernel could run in."""
    return list(dict.fromkeys(_workable(name, plan) for name in names))


def header(
    request: Mapping[str, Any],
    system: System,
    plan: Sequence[Planned],
    described: Mapping[str, Any],
) -> dict[str, Any]:
    """What a run must have in common with the journal it continues. How the source was read is no
    part of that: no number depends on it."""
    return {
        "request": request,
        "environment": environment(system),
        "kernels": {p.kernel.name: p.kernel.made_from for p in plan},
        "source": {name: x for name, x in described.items() if name not in READING},
    }


def environment(system: System) -> dict[str, Any]:
    """All of a machine and its software that may change a number."""
    return {**system.as_dict(), "numdev": own_fingerprint()}


@functools.cache
def own_fingerprint() -> str:
    """The version of numdev that measures: its number, and a hash of its source."""
    whole = hashlib.sha256()
    package = os.path.join(os.path.dirname(numdev.__file__), "")
    found = [
        os.path.join(folder, name)
        for folder, _, names in os.walk(package)
        for name in names
        if name.endswith(".py")
    ]
    # Paths as text and files without a buffer: a third of the time, at the start of every run.
    for path in sorted(found, key=lambda path: path.split(os.sep)):
        with open(path, "rb", buffering=0) as file:
            whole.update(path.removeprefix(package).encode() + b"\0" + file.read())
    return f"{numdev.__version__}+{whole.hexdigest()[:12]}"


def provenance(system: System, described: Mapping[str, Any], command: str) -> Provenance:
    """Where the numbers of a report made now, here, come from."""
    return Provenance(
        numdev=numdev.__version__,
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        system=system.as_dict(),
        source=dict(described),
    )


def stopwatch(system: System, sections: Sequence[str] = SECTIONS) -> Stopwatch:
    """A running one, in the time of the device."""
    return Stopwatch(OnDevice() if system.device == "cuda" else OnHost(), sections=sections)


class Executor(Protocol):
    """Who does a run's jobs: this process (`Here`), or others (`numdev.audit.cluster.team`)."""

    def submit(self, job: Job, tell: Tell) -> Iterator[Entry]:
        """Take a job on. What is finished by now, of this job or of earlier ones."""

    def rest(self, tell: Tell) -> Iterator[Entry]:
        """What is still to come of all jobs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Here:
    """Does a job as soon as it is given one."""

    setting: Setting
    runner: Runner = attempt
    """Where kernels under audit run."""
    watch: Stopwatch

    def submit(self, job: Job, tell: Tell) -> Iterator[Entry]:
        return entries(job, self.setting, self.runner, self.watch, tell)

    def rest(self, tell: Tell) -> Iterator[Entry]:
        return iter(())


@dataclasses.dataclass(kw_only=True)
class Run:
    """One pass over a source: every case through every kernel, journalled in the order of cases,
    whatever the order in which they are finished."""

    journal: Journal
    setting: Setting
    executor: Executor
    progress: Progress
    total: int
    writer: Writer | None = None
    """Where cases are saved as they come by."""
    watch: Stopwatch = dataclasses.field(default_factory=Stopwatch)
    visited: int = 0
    queued: set[str] = dataclasses.field(default_factory=set)
    """The keys of entries that are put off."""

    def over(self, source: Source, say: Callable[[str], None]) -> None:
        """Every case of the source. `say` is told whether an earlier run was continued."""
        before = self.journal.finished
        try:
            with self.watch("capture"):
                source.visit(self.case)
                with self.watch("other"):
                    self._keep(self.executor.rest(self._tell))
        finally:
            with self.watch("other"):
                try:
                    catch_up()
                finally:
                    forget()  # another run's journal is not this one's
        if before and self.journal.finished == before:
            say("Every task was finished before; --overwrite measures them again.")
        elif before:
            say("Continued an earlier run; its finished tasks were kept.")

    @property
    def rows(self) -> tuple[DeviationRow, ...]:
        with uncollected():
            return tuple(_row(row) for row in self.journal.kept())

    @property
    def worst(self) -> tuple[WorstRow, ...]:
        return tuple(WorstRow.model_validate(row) for row in self.journal.rows("worst"))

    @property
    def profiles(self) -> tuple[ProfileRow, ...]:
        return tuple(ProfileRow.model_validate(row) for row in self.journal.rows("profile"))

    @property
    def attributions(self) -> tuple[AttributionRow, ...]:
        found = self.journal.rows("attribution")
        return tuple(AttributionRow.model_validate(row) for row in found)

    @property
    def cases(self) -> tuple[CaseRecord, ...]:
        return tuple(CaseRecord.model_validate(row) for row in self.journal.rows("case"))

    def case(self, located: Located) -> None:
        """Every kernel in every format on one case; what is finished is not even loaded."""
        with self.watch("other"):
            if self.writer is not None:
                bench = bench_of(located, self.setting, self.watch)
                self.writer.add(bench.case, located.axes)
                located = Held(case=bench.case, axes=located.axes)
            self._tell(located.ref.module)
            wanted = self._wanted(located.ref)
            if wanted:
                self._keep(self.executor.submit(Job(located=located, wanted=wanted), self._tell))
                piece_done()

    def _wanted(self, ref: CaseRef) -> frozenset[str]:
        """The keys of the case's entries that are not finished. All are noted, in their order."""
        keys = {case_key(ref): "case"}
        for step in steps(ref, self.setting):
            keys |= step.keys
        wanted = {key: kind for key, kind in keys.items() if not self.journal.visit(key, kind)}
        rows = list(keys.values()).count("row") - list(wanted.values()).count("row")
        self.visited += rows
        return frozenset(wanted)

    def _keep(self, finished: Iterable[Entry]) -> None:
        for entry in finished:
            if self.journal.visit(entry.key, entry.kind) or entry.key in self.queued:
                continue
            self.visited += entry.kind == "row"
            if self._on_gpu:
                self.queued.add(entry.key)
                put_off(functools.partial(self._add, entry))
            else:
                self._add(entry)

    def _add(self, entry: Entry) -> None:
        self.journal.add(entry.key, entry.rows, entry.kind)
        self.queued.discard(entry.key)

    @property
    def _on_gpu(self) -> bool:
        """Whether this process has a GPU to wait for."""
        return isinstance(self.executor, Here) and self.setting.system.device == "cuda"

    def _tell(self, what: str) -> None:
        self.progress(what, self.visited, self.total)

    def weight(self, name: str, tensor: torch.Tensor) -> list[WeightRow]:
        """One stored tensor cast to every format. Cheap, and so not journalled."""
        if not tensor.is_floating_point():
            return []
        self._tell(f"weights {name}")
        with self.watch("weights"):
            tensor = tensor.to(self.setting.system.device)
            return [weight_row(name, tensor, fmt) for fmt in self.setting.formats]


def _row(kept: Row) -> DeviationRow:
    return kept if isinstance(kept, DeviationRow) else DeviationRow.model_validate(kept)


def _workable(name: str, plan: Sequence[Planned]) -> Format:
    """A format that some kernel under audit takes q, k and v in; raises UsageError for others."""
    fmt = format_named(name)
    hint = "use float64, float32, bfloat16 or float16"
    try:
        dtype = dtype_of(fmt)
    except UsageError as error:
        if any(p.kernel.any_format for p in plan if p.role == "kernel"):
            return fmt
        raise UsageError(
            f"format {fmt.name}: no tensor is stored in it",
            hint=f"{hint}, or a kernel that takes any format, as `emulated` does",
        ) from error
    if dtype.itemsize < 2:
        raise UsageError(
            f"format {fmt.name}: no attention kernel takes plain 8-bit q, k and v on this device",
            hint=hint,
        )
    return format_of(dtype)
