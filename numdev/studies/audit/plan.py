"""What an audit measures of every case: kernels x options x formats, and which rows and
heads.

What cannot be run here is refused before anything is measured. Tasks are plain data."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path

import numdev
from numdev.cases import CaseRef
from numdev.errors import UsageError
from numdev.formats import Format, dtype_of, format_named, format_of
from numdev.kernels import Kernel, find
from numdev.kernels.emulation.faults import CONTROLS
from numdev.metrics.row_samples import Sample
from numdev.report import PlannedKernel, PlanRecord, Role
from numdev.request_models import AuditRequest, Choice, SweepRequest
from numdev.system import System

# What always runs beside the kernels under audit, first: (role, kernel).
ALWAYS: tuple[tuple[Role, str], ...] = (
    ("precision", "reference"),
    ("floor", "floor"),
    ("baseline", "baseline"),
)

RECORDED = ("backward", "heads", "rows", "repeats", "named")  # of a plan, in the report


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A kernel with its options, in one role: `kernel` (under audit), `precision`,
    `floor`, `baseline`, or `control` (a planted fault)."""

    role: Role
    kernel: Kernel
    options: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One kernel on one case in one format. The kernel runs on the whole case; `heads`
    and `sample` say which query heads and rows are measured (None: all)."""

    case: CaseRef
    role: Role
    kernel: str
    options: Mapping[str, object] = field(default_factory=dict)
    format: str
    heads: tuple[int, ...] | None = None
    # Whether it is a training step, and dq, dk and dv are measured too
    gradients: bool = False
    repeats: int = 1
    """How often the kernel runs on the same inputs; from two on its noise is measured."""
    sample: Sample | None = None

    @cached_property
    def key(self) -> str:
        """Returns 16 hexadecimal digits that identify the task: a hash of its fields.
        Versions, machine and kernels' sources are in the journal's header."""
        sample = None if self.sample is None else vars(self.sample)
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return digest({**plain, "case": vars(self.case), "sample": sample})


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is the same for all cases of a run: fields of `AuditRequest`, and `details`:
    whether the rows that err most and errors along calls are looked at."""

    system: System
    formats: Sequence[Format]
    kernels: Sequence[Planned]
    heads: tuple[int, ...] | None = None
    explain: bool = False
    details: bool = False
    backward: bool = False
    rows: int | None = None
    seed: int = 0
    repeats: int = 1
    named: bool = False  # whether the kernels were asked for by name

    @classmethod
    def of(
        cls,
        request: AuditRequest | SweepRequest,
        system: System,
        unregistered: Mapping[str, Kernel] | None = None,
    ) -> Plan:
        """Returns the plan of an audit or a sweep. `unregistered`: kernels by name that
        come before those of the registry, in an audit alone; None: none. Raises
        UsageError for an unknown kernel, option or format, and for a format that no
        kernel could run in."""
        same = ["backward", "rows", "repeats"]
        if isinstance(request, SweepRequest):
            kernels = plan_kernels((*request.kernels, request.baseline))
        else:
            kernels = plan_kernels(request.kernels, unregistered, under_audit=True)
            kernels += (
                plan_controls(gradients=request.backward) if request.control else []
            )
            same += ["heads", "explain", "seed"]
        return cls(
            system=system,
            formats=plan_formats(request.formats, kernels),
            kernels=kernels,
            details=isinstance(request, AuditRequest),
            named="kernels" in request.model_fields_set,
            **{name: getattr(request, name) for name in same},
        )

    def record(self, calls: Iterable[CaseRef]) -> PlanRecord:
        """Returns the plan for the report: kernels and formats in the order of the plan,
        and `calls` in theirs."""
        return PlanRecord(
            kernels=tuple(
                PlannedKernel(role=p.role, kernel=p.kernel.name, options=dict(p.options))
                for p in self.kernels
            ),
            formats=tuple(fmt.name for fmt in self.formats),
            calls=tuple((ref.case, ref.seed) for ref in calls),
            **{name: getattr(self, name) for name in RECORDED},
        )

    def tasks(self, ref: CaseRef) -> Iterator[tuple[Planned, Task]]:
        """Yields each task of a case with its kernel: format by format, in each the
        kernels in their order, what always runs first."""
        for fmt in self.formats:
            for planned in self.kernels:
                yield planned, self.task(planned, fmt.name, ref)

    def task(self, planned: Planned, format_name: str, ref: CaseRef) -> Task:
        """Returns the task of a kernel on a case in a format, by its name. Only a kernel
        under audit gets the plan's `repeats`; others run once."""
        return Task(
            case=ref,
            role=planned.role,
            kernel=planned.kernel.name,
            options=planned.options,
            format=format_name,
            repeats=self.repeats if planned.role == "kernel" else 1,
            heads=self.heads,
            gradients=self.backward,
            sample=self.sample(ref),
        )

    def sample(self, ref: CaseRef) -> Sample | None:
        """Returns which rows of a case are measured: so many, drawn by the plan's seed,
        or by the case's own where it has one; None: all."""
        if self.rows is None:
            return None
        return Sample(count=self.rows, seed=self.seed if ref.seed is None else ref.seed)


def header(
    request: Mapping[str, object],
    system: System,
    kernels: Sequence[Planned],
    source: Mapping[str, object],
) -> dict[str, object]:
    """Returns what a run must have in common with a journal that it continues: the
    request, the environment, a fingerprint of each kernel's source by the kernel's name,
    and the source's description without `streamed`, which says how weights were read."""
    return {
        "request": request,
        "environment": environment(system),
        "kernels": {p.kernel.name: p.kernel.made_from for p in kernels},
        "source": {name: x for name, x in source.items() if name != "streamed"},
    }


def environment(system: System) -> dict[str, object]:
    """Returns the facts of a machine and its software that may change a number, numdev's
    version included, as plain data."""
    return {**system.as_dict(), "numdev": fingerprint()}


@functools.cache
def fingerprint() -> str:
    """Returns numdev's version and 12 hexadecimal digits of a hash of its source:
    `0.1.0+1f2e...`. Computed once for a process."""
    package = Path(numdev.__file__).parent
    whole = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        whole.update(
            path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes()
        )
    return f"{numdev.__version__}+{whole.hexdigest()[:12]}"


def plan_kernels(
    choices: Iterable[Choice],
    unregistered: Mapping[str, Kernel] | None = None,
    *,
    under_audit: bool = False,
) -> list[Planned]:
    """Returns the standard three (ALWAYS) and the kernels under audit, in the order they
    run, each with the same options once. A standard one that is chosen runs a second time
    as a kernel with `under_audit`; else it does not, whatever its options.
    `unregistered`: kernels by name that come before the registry's; None: none. Raises
    UsageError for a kernel or an option that does not exist."""
    planned = [Planned(role=role, kernel=find(name), options={}) for role, name in ALWAYS]
    for choice in choices:
        kernel = (unregistered or {}).get(choice.name) or find(choice.name)
        options = recorded(kernel.with_options(choice.options))
        rivals = [p for p in planned if p.role == "kernel" or not under_audit]
        twice = any(p.kernel.name == kernel.name and p.options == options for p in rivals)
        standard = kernel.name in dict(ALWAYS).values()
        if not twice and (under_audit or not standard):
            planned.append(Planned(role="kernel", kernel=kernel, options=options))
    return planned


def plan_controls(*, gradients: bool) -> list[Planned]:
    """Returns the planted faults, each in every dose, with the role `control`. Without
    `gradients` those of the backward pass alone are left out."""
    possible = [c for c in CONTROLS.values() if gradients or not c.in_backward_only]
    return [
        Planned(role="control", kernel=control.kernel(), options={"dose": dose})
        for control in possible
        for dose in control.doses
    ]


def plan_formats(names: Iterable[str], kernels: Sequence[Planned]) -> list[Format]:
    """Returns the formats by name, in order, each once; empty for no names. A format with
    the values of a torch dtype becomes that dtype's (`e8m7`: bfloat16). Raises UsageError
    for an unknown name, for a format whose torch dtype has 8 bits or fewer, and for one
    without a dtype where no kernel under audit takes such."""
    any_format = any(p.kernel.any_format for p in kernels if p.role == "kernel")
    formats: dict[Format, None] = {}
    for name in names:
        fmt, why = format_named(name), None
        try:
            dtype = dtype_of(fmt)
        except UsageError:
            why = (
                None
                if any_format
                else "PyTorch has no dtype for it; only `emulated` runs in it"
            )
        else:
            why = "no kernel takes plain 8-bit q, k and v" if dtype.itemsize < 2 else None
            fmt = format_of(dtype)
        if why:
            hint = "use float64, float32, bfloat16 or float16"
            raise UsageError(f"format {fmt.name}: {why}", hint=hint)
        formats.setdefault(fmt)
    return list(formats)


def digest(data: object) -> str:
    """Returns 16 hexadecimal digits of the SHA-256 of plain data as JSON with sorted
    keys. A value that JSON does not have counts as its `str`."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def recorded(options: Mapping[str, object]) -> dict[str, object]:
    """Returns options as a report can have them, by name. None, bools, integers, text and
    finite floats stay. Any other value (a dtype, a function, a list, NaN) becomes its
    qualified name, or its `repr` where it has none."""

    def plain(value: object) -> object:
        """Returns None, a bool, an integer, text or a finite float as it is; of any other
        value its qualified name or `repr`."""
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float) and math.isfinite(value):
            return value
        return getattr(value, "__qualname__", None) or repr(value)

    return {name: plain(value) for name, value in options.items()}
