"""The loop: every case, in every format, through every kernel, with what is finished journalled.

What `audit` and `sweep` share. A source hands over cases one at a time; on the bench each is
rounded to each format and every kernel's output measured against the reference of those same
rounded inputs; what is finished goes to the journal at once. What the rows come to is the study's
business.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import numdev
from numdev.bench import Bench, case_record, recorded, run_task, weight_row
from numdev.config import Choice
from numdev.errors import UsageError
from numdev.execute import Journal, Task
from numdev.formats import Format, dtype_of, format_named, format_of
from numdev.kernels import Kernel, find
from numdev.report import CaseRecord, DeviationRow, Provenance, WeightRow
from numdev.sources import Located, Source
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
    writer: Writer | None = None
    """Where cases are saved as they come by."""
    visited: int = 0

    def over(self, source: Source, say: Callable[[str], None]) -> None:
        """Every case of the source. `say` is told whether an earlier run was continued."""
        before = self.journal.finished
        source.visit(self.case)
        if before and self.journal.finished == before:
            say("Every task was finished before; --overwrite measures them again.")
        elif before:
            say("Continued an earlier run; its finished tasks were kept.")

    @property
    def rows(self) -> tuple[DeviationRow, ...]:
        return tuple(DeviationRow.model_validate(row) for row in self.journal.rows())

    @property
    def cases(self) -> tuple[CaseRecord, ...]:
        return tuple(CaseRecord.model_validate(row) for row in self.journal.rows("case"))

    def case(self, located: Located) -> None:
        """Every kernel in every format on one case; what is finished is not even loaded."""
        bench = Bench(located.ref, located.load, self.heads)
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
        task = task_of(planned, fmt, bench, self.heads)
        self.progress(f"{bench.ref.module} {task.kernel}", self.visited, self.total)
        if not self.journal.visit(task.key) and bench.heads:
            rows = run_task(task, planned.kernel, bench, self.system)
            self.journal.add(task.key, [row.model_dump(mode="json") for row in rows])
        self.visited += 1

    def weight(self, name: str, tensor: torch.Tensor) -> list[WeightRow]:
        """One stored tensor cast to every format. Cheap, and so not journalled."""
        if not tensor.is_floating_point():
            return []
        self.progress(f"weights {name}", self.visited, self.total)
        tensor = tensor.to(self.system.device)
        return [weight_row(name, tensor, fmt) for fmt in self.formats]


def task_of(
    planned: Planned, fmt: Format, bench: Bench, heads: tuple[int, ...] | None = None
) -> Task:
    """The task of one planned kernel in one format on the bench's case."""
    return Task(
        case=bench.ref,
        role=planned.role,
        kernel=planned.kernel.name,
        options=planned.options,
        format=fmt.name,
        heads=heads,
    )


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
