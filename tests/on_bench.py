"""A case on the bench, and the rows of one kernel on it, as the main line makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from numdev.audit.bench import Bench
from numdev.audit.plan import Task
from numdev.audit.task import bench_of, measure_one
from numdev.cases import AttentionCase
from numdev.kernels import Kernel
from numdev.metrics.sampling import Sample
from numdev.report import DeviationRow
from numdev.system import System

HERE = System.here("cpu")


def prepare(
    case: AttentionCase,
    format_name: str | None = None,
    heads: Sequence[int] | None = None,
    *,
    gradients: bool = False,
    sample: Sample | None = None,
) -> Bench:
    """The case in a format, by default its own."""
    name = case.format.name if format_name is None else format_name
    return bench_of(case, name, heads, gradients=gradients, sample=sample)


def measured_rows(
    task: Task, kernel: Kernel, case: AttentionCase, system: System = HERE, **fields: Any
) -> list[DeviationRow]:
    """The rows of a task; `fields` of it may be changed."""
    return measure_one(dataclasses.replace(task, **fields), kernel, case, system)
