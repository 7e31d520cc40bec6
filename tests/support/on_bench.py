"""A case on the bench, and the rows of one kernel on it, as the main line makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from click.testing import CliRunner, Result
from recipes import drawn

from numdev.cases import AttentionCase
from numdev.cli.main import cli
from numdev.kernels import Kernel
from numdev.metrics.row_samples import Sample
from numdev.report import DeviationRow
from numdev.studies.audit.case_measurement import bench_of, measure_one, measure_task
from numdev.studies.audit.plan import Task
from numdev.studies.audit.prepared_attention import Bench
from numdev.system import System

THIS_CPU = System.probe("cpu")


def prepare(
    case: AttentionCase, format_name: str | None = None, heads: Sequence[int] | None = None, *,
    gradients: bool = False, sample: Sample | None = None,
) -> Bench:  # fmt: skip
    """The case in a format, by default its own."""
    name = case.format.name if format_name is None else format_name
    return bench_of(case, name, heads, gradients=gradients, sample=sample)


def measured_rows(
    task: Task,
    kernel: Kernel,
    case: AttentionCase,
    system: System = THIS_CPU,
    **fields: Any,
) -> list[DeviationRow]:
    """The rows of a task; `fields` of it may be changed."""
    return measure_one(dataclasses.replace(task, **fields), kernel, case, system)


def grouped_step(length: int, **changes: Any) -> AttentionCase:
    """Two sequences, four query heads on two kv heads, with dO; `changes` are the
    case's."""
    shape: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
    return drawn(length, dtype=torch.float32, **shape, **{"scale": 0.25, **changes})


def task_of(bench: Bench, kernel: Kernel, **changes: Any) -> Task:
    """The task of a kernel on a bench."""
    passed = {"role": "kernel", "gradients": bench.selection.gradients, **changes}
    return Task(
        case=bench.case.ref, kernel=kernel.name, format=bench.format.name, **passed
    )


def rows_on(
    bench: Bench, kernel: Kernel, system: System = THIS_CPU, **changes: Any
) -> Any:
    """The rows of a kernel on a bench; `changes` are fields of its task."""
    return measure_task(task_of(bench, kernel, **changes), kernel, bench, system).rows


def invoked(*arguments: Any) -> Result:
    """`numdev ARGUMENTS` in this process."""
    return CliRunner().invoke(cli, [str(x) for x in arguments])
