"""How a kernel that was just measured errs along its call: rows for the report.

The sums by bin come with the metrics' own (`numdev.metrics.comparison`); here they become root mean
squares, in the unit of `row_rel`: relative to each row's term scale. Not times the floor: where a
row sees one key its result is a row of V, which needs no rounding, and the floor is 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from numdev.audit.bench import Bench
from numdev.audit.journal import Task
from numdev.audit.task import COUNTED
from numdev.metrics.binning import starts
from numdev.metrics.comparison import Along, Numbers
from numdev.metrics.deviation import Measured
from numdev.metrics.lazy import Lazy
from numdev.report import ProfileRow

ROLES = ("floor", "baseline", "kernel")
"""Who has a profile. Planted faults have none, nor has what rounding the inputs costs."""


def profile(task: Task, bench: Bench) -> Sequence[ProfileRow]:
    """A row for each tensor of the task that was measured last on this bench; none where nothing
    was, or where the call has no bins. Made when they are looked at."""
    if task.role not in ROLES or bench.along is None or bench.along[0] != task.key:
        return []
    found = [(tensor, bench.length_of(tensor), x) for tensor, x in bench.along[1].items()]
    return Lazy(functools.partial(_rows, task, found))


def _rows(task: Task, found: Sequence[tuple[str, int, Measured]]) -> list[ProfileRow]:
    try:
        return [_row(task, tensor, length, x.along) for tensor, length, x in found if x.along]
    except COUNTED:  # which its rows say
        return []


def _row(task: Task, tensor: str, length: int, along: Along) -> ProfileRow:
    predicted = None
    if task.role == "kernel" and "predicted" in along:
        most = np.maximum(along["predicted"], along["least_row"])  # as in expected_ratio
        predicted = _rms(most, along["expected_count"])
    return ProfileRow.model_validate(
        {
            "case": task.case.case,
            "layer": task.case.layer,
            "attends": task.case.attends,
            "role": task.role,
            "kernel": task.kernel,
            "options": dict(task.options),
            "format": task.format,
            "tensor": tensor,
            "length": length,
            "starts": starts(length),
            "counts": [int(n) for n in along["counted"]],
            "errors": _rms(along["relative"], along["counted"]),
            "predicted": predicted,
        }
    )


def _rms(squares: Numbers, counts: Numbers) -> tuple[float | None, ...]:
    """Of each bin, to four digits; None where it has no row."""
    with np.errstate(all="ignore"):
        values = np.sqrt(squares / counts)
    return tuple(float(f"{x:.4g}") if math.isfinite(x) else None for x in values)
