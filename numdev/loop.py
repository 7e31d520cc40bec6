"""The loop: every case, in every format, through every kernel, with what is finished journalled.

What `audit` and `sweep` share. A source hands over cases one at a time; on the bench each is
rounded to each format and every kernel's output measured against the reference of those same
rounded inputs; what is finished goes to the journal at once. What the rows come to is the study's
business.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import numdev
from numdev.attempt import Failure, attempt
from numdev.bench import Bench
from numdev.cases import AttentionCase, CaseRef
from numdev.config import Choice
from numdev.controls import CONTROLS
from numdev.errors import UsageError
from numdev.examine import examine, kept, remarkable
from numdev.execute import Journal, Task
from numdev.explain import explain
from numdev.formats import Format, dtype_of, format_named, format_of
from numdev.isolation import Supervised
from numdev.kernels import Kernel, Output, find
from numdev.measuring import Runner, run_task
from numdev.profiling import profile
from numdev.records import case_record, recorded, weight_row
from numdev.report import (
    AttributionRow,
    CaseRecord,
    DeviationRow,
    ProfileRow,
    Provenance,
    WeightRow,
    WorstRow,
)
from numdev.sampling import Sample
from numdev.sources import Located, Source
from numdev.stopwatch import SECTIONS, Stopwatch
from numdev.system import System
from numdev.tensorwriter import Writer

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many tasks are behind it, and how many there are."""

ALWAYS = (("precision", "reference"), ("floor", "floor"), ("baseline", "baseline"))
"""What always runs beside the kernels under audit: (role, kernel)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """A kernel as every case will meet it."""

    role: str
    kernel: Kernel
    options: Mapping[str, Any]


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
    """What a run must have in common with the journal it continues."""
    return {
        "request": request,
        "environment": {**system.as_dict(), "numdev": own_fingerprint()},
        "kernels": {p.kernel.name: p.kernel.made_from for p in plan},
        "source": described,
    }


def own_fingerprint() -> str:
    """The version of numdev that measures: its number, and a hash of its source."""
    whole = hashlib.sha256()
    package = Path(numdev.__file__).parent
    for path in sorted(package.rglob("*.py")):
        whole.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
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
    """A running one; on a GPU it waits for what is under way. A fault of the device is not its to
    report: whatever touches the device next says so."""

    def settle() -> None:
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()

    if system.device != "cuda":
        return Stopwatch(sections=sections)
    return Stopwatch(settle, sections=sections)


@dataclasses.dataclass(kw_only=True)
class Run:
    """One pass over a source: what is the same for all its tasks."""

    journal: Journal
    system: System
    formats: Sequence[Format]
    plan: Sequence[Planned]
    heads: tuple[int, ...] | None
    progress: Progress
    total: int
    explain: bool = False
    examine: bool = False
    """Whether the rows that err most are looked at."""
    profile: bool = False
    """Whether it is kept how kernels err along their calls."""
    gradients: bool = False
    sampled_rows: int | None = None
    """How many query rows of each head are measured; None: all."""
    seed: int = 0
    """From which they are drawn, where a case has no seed of its own."""
    repeats: int = 1
    """How often each kernel under audit runs on the same inputs."""
    runner: Runner = attempt
    """Where kernels under audit run."""
    writer: Writer | None = None
    """Where cases are saved as they come by."""
    watch: Stopwatch = dataclasses.field(default_factory=Stopwatch)
    visited: int = 0

    def over(self, source: Source, say: Callable[[str], None]) -> None:
        """Every case of the source. `say` is told whether an earlier run was continued."""
        before = self.journal.finished
        with self.watch("capture"):
            source.visit(self.case)
        if before and self.journal.finished == before:
            say("Every task was finished before; --overwrite measures them again.")
        elif before:
            say("Continued an earlier run; its finished tasks were kept.")

    @property
    def rows(self) -> tuple[DeviationRow, ...]:
        return tuple(DeviationRow.model_validate(row) for row in self.journal.rows())

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
            self._case(located)

    def _case(self, located: Located) -> None:
        bench = Bench(
            located.ref,
            located.load,
            self.heads,
            gradients=self.gradients,
            watch=self.watch,
            sample=sample_of(located.ref, self.sampled_rows, self.seed),
        )
        if self.writer is not None:
            self.writer.add(bench.case, located.axes)
        key = f"case {located.ref.case}"  # whatever the seed, it is the same call
        if not self.journal.visit(key, "case"):
            record = case_record(bench.case, located.axes)
            self.journal.add(key, [record.model_dump(mode="json")], "case")
        for fmt in self.formats:
            for planned in self.plan:
                self.task(planned, fmt, bench)

    def task(self, planned: Planned, fmt: Format, bench: Bench) -> None:
        task = task_of(
            planned, fmt, bench, self.heads, gradients=self.gradients, repeats=self.repeats
        )
        self.progress(f"{bench.ref.module} {task.kernel}", self.visited, self.total)
        examined = self.examine and planned.role == "kernel"
        if examined:
            self.journal.visit(f"worst {task.key}", "worst")
        if self.profile:
            self.journal.visit(f"profile {task.key}", "profile")
        if not self.journal.visit(task.key) and bench.heads:
            run = self.runner if planned.role == "kernel" else attempt
            rows = run_task(task, planned.kernel, bench, self.system, run)
            if self.profile:  # before the rows: a task that is finished has both
                along = [row.model_dump(mode="json") for row in profile(task, bench)]
                self.journal.add(f"profile {task.key}", along, "profile")
            if examined:
                with self.watch("metrics"):
                    # The worst of a sample is not the worst: worth a look where it is bad enough.
                    look = bench.sample is None or remarkable(rows)
                    worst = examine(task, planned.kernel, bench, self.system) if look else []
                self.journal.add(f"worst {task.key}", kept(worst), "worst")
            self.journal.add(task.key, [row.model_dump(mode="json") for row in rows])
        if self.explain and planned.role in ("baseline", "kernel"):
            self.attribution(task, planned.kernel, bench)
        self.visited += 1

    def attribution(self, task: Task, kernel: Kernel, bench: Bench) -> None:
        key = f"explain {task.key}"
        if not self.journal.visit(key, "attribution") and bench.heads:
            run = self.runner if task.role == "kernel" else attempt
            rows = explain(task, kernel, bench, self.system, run)
            self.journal.add(key, [row.model_dump(mode="json") for row in rows], "attribution")

    def weight(self, name: str, tensor: torch.Tensor) -> list[WeightRow]:
        """One stored tensor cast to every format. Cheap, and so not journalled."""
        if not tensor.is_floating_point():
            return []
        self.progress(f"weights {name}", self.visited, self.total)
        with self.watch("weights"):
            tensor = tensor.to(self.system.device)
            return [weight_row(name, tensor, fmt) for fmt in self.formats]


def task_of(
    planned: Planned,
    fmt: Format,
    bench: Bench,
    heads: tuple[int, ...] | None = None,
    *,
    gradients: bool = False,
    repeats: int = 1,
) -> Task:
    """The task of one planned kernel in one format on the bench's case."""
    return Task(
        case=bench.ref,
        role=planned.role,
        kernel=planned.kernel.name,
        options=planned.options,
        format=fmt.name,
        heads=heads,
        gradients=gradients,
        repeats=repeats if planned.role == "kernel" else 1,
        sample=bench.sample,
    )


def sample_of(ref: CaseRef, rows: int | None, seed: int) -> Sample | None:
    """Which rows of a case are measured: each seed of a sweep has its own."""
    if rows is None:
        return None
    return Sample(count=rows, seed=seed if ref.seed is None else ref.seed)


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
