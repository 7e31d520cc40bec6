"""A job: what is left to do of one case, in every format and through every kernel.

Tasks of one case share its bench, and with it the fp64 references, so a job is what travels to
another process and what is done again where one died: no reference is computed twice but for that.
`entries` does a job, wherever that is; what it gives goes to the journal of whoever asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numdev.audit.attempt import Failure, attempt
from numdev.audit.bench import Bench
from numdev.audit.examine import examine, kept, remarkable
from numdev.audit.explain_rows import explain
from numdev.audit.journal import Row, Task
from numdev.audit.profile_rows import profile
from numdev.audit.records import case_record
from numdev.audit.task import Runner, bare_row, run_task
from numdev.audit.timing import Stopwatch
from numdev.cases import AttentionCase, CaseRef
from numdev.formats import Format
from numdev.kernels import Kernel
from numdev.metrics.sampling import Sample
from numdev.sources.opening import Located
from numdev.system import System

Tell = Callable[[str], None]
"""Called with what is being done."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A kernel as every case will meet it."""

    role: str
    kernel: Kernel
    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is the same for all jobs of a run."""

    system: System
    formats: Sequence[Format]
    plan: Sequence[Planned]
    heads: tuple[int, ...] | None = None
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """A case that is in memory already."""

    case: AttentionCase
    axes: dict[str, Any]

    @property
    def ref(self) -> CaseRef:
        return self.case.ref

    def load(self) -> AttentionCase:
        return self.case


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A case, and which of its entries in the journal are wanted."""

    located: Located
    wanted: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What goes into the journal: the rows of one kind under one key."""

    key: str
    kind: str = "row"
    rows: Sequence[Row] = ()
    """As plain data, or as they were made."""
    what: str = ""
    """What was done, for people."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A task of a job, and what is journalled beside its rows."""

    planned: Planned
    task: Task
    examined: bool
    profiled: bool
    explained: bool

    @property
    def what(self) -> str:
        return f"{self.task.case.module} {self.task.kernel}"

    @property
    def worst(self) -> str:
        return f"worst {self.task.key}"

    @property
    def profile(self) -> str:
        return f"profile {self.task.key}"

    @property
    def explanation(self) -> str:
        return f"explain {self.task.key}"

    @property
    def keys(self) -> dict[str, str]:
        """Of all its entries, in the order a report has them: key to kind."""
        worst = {self.worst: "worst"} if self.examined else {}
        explained = {self.explanation: "attribution"} if self.explained else {}
        profile = {self.profile: "profile"} if self.profiled else {}
        return {**worst, **profile, self.task.key: "row", **explained}


def case_key(ref: CaseRef) -> str:
    """Whatever the seed, it is the same call."""
    return f"case {ref.case}"


def steps(ref: CaseRef, setting: Setting) -> Iterator[Step]:
    """All tasks of a case, in the order they are reported. Loads nothing."""
    sample = sample_of(ref, setting.sampled_rows, setting.seed)
    for fmt in setting.formats:
        for planned in setting.plan:
            task = task_of(
                planned,
                fmt,
                ref,
                setting.heads,
                gradients=setting.gradients,
                repeats=setting.repeats,
                sample=sample,
            )
            yield Step(
                planned=planned,
                task=task,
                examined=setting.examine and planned.role == "kernel",
                profiled=setting.profile,
                explained=setting.explain and planned.role in ("baseline", "kernel"),
            )


def in_turn(reported: Iterable[Step]) -> Iterator[Step]:
    """The same in the order they are done: in each format the baseline first. What is predicted for
    it takes a GPU longest, and with what comes next the host is ahead by then."""
    for _, some in itertools.groupby(reported, lambda step: step.task.format):
        yield from sorted(some, key=lambda step: step.task.role != "baseline")


def bench_of(located: Located, setting: Setting, watch: Stopwatch) -> Bench:
    return Bench(
        located.ref,
        located.load,
        setting.heads,
        gradients=setting.gradients,
        watch=watch,
        sample=sample_of(located.ref, setting.sampled_rows, setting.seed),
    )


def entries(
    job: Job, setting: Setting, run: Runner, watch: Stopwatch, tell: Tell = lambda what: None
) -> Iterator[Entry]:
    """Do a job: each wanted entry as soon as it is finished. Kernels under audit run by `run`.

    Where none of the selected heads is in the case there are none but the case's own. A case of
    whose entries none is wanted is not even loaded.
    """
    bench = bench_of(job.located, setting, watch)
    key = case_key(bench.ref)
    if key in job.wanted:
        record = case_record(bench.case, job.located.axes)
        yield Entry(key=key, kind="case", rows=[record.model_dump(mode="json")])
    for step in in_turn(steps(bench.ref, setting)):
        tell(step.what)
        if not job.wanted.isdisjoint(step.keys) and bench.heads:
            yield from _entries(step, job.wanted, bench, setting, run)
    with watch("metrics"):
        bench.settle()  # before the next call is begun, nothing of this one is kept


def _entries(
    step: Step, wanted: frozenset[str], bench: Bench, setting: Setting, run: Runner
) -> Iterator[Entry]:
    task, kernel = step.task, step.planned.kernel
    if task.role != "kernel":
        run = attempt
    if task.key in wanted:
        rows = run_task(task, kernel, bench, setting.system, run)
        if step.profiled:  # before the rows: a task that is finished has both
            yield Entry(key=step.profile, kind="profile", rows=profile(task, bench))
        if step.examined:
            with bench.watch("metrics"):
                worst = []
                if remarkable(rows):  # a report shows no others
                    worst = examine(task, kernel, bench, setting.system)
            yield Entry(key=step.worst, kind="worst", rows=kept(worst))
        yield Entry(key=task.key, rows=rows, what=step.what)
    if step.explanation in wanted:
        bench.settle()
        found = explain(task, kernel, bench, setting.system, run)
        dumped = [row.model_dump(mode="json") for row in found]
        yield Entry(key=step.explanation, kind="attribution", rows=dumped)


def without_result(step: Step, wanted: frozenset[str], reason: str) -> Iterator[Entry]:
    """The wanted entries of a task that could not be done anywhere: one row that says why."""
    row = bare_row(step.task, Failure("failed", reason)).model_dump(mode="json")
    for key, kind in step.keys.items():
        if key in wanted or (kind in ("worst", "profile") and step.task.key in wanted):
            yield Entry(key=key, kind=kind, rows=[row] if kind == "row" else [], what=step.what)


def task_of(
    planned: Planned,
    fmt: Format,
    ref: CaseRef,
    heads: tuple[int, ...] | None = None,
    *,
    gradients: bool = False,
    repeats: int = 1,
    sample: Sample | None = None,
) -> Task:
    """The task of one planned kernel in one format on a case."""
    return Task(
        case=ref,
        role=planned.role,
        kernel=planned.kernel.name,
        options=planned.options,
        format=fmt.name,
        heads=heads,
        gradients=gradients,
        repeats=repeats if planned.role == "kernel" else 1,
        sample=sample,
    )


def sample_of(ref: CaseRef, rows: int | None, seed: int) -> Sample | None:
    """Which rows of a case are measured: each seed of a sweep has its own."""
    if rows is None:
        return None
    return Sample(count=rows, seed=seed if ref.seed is None else ref.seed)
