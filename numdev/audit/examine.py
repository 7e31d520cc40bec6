"""What a measured kernel's rows look like: those that err most, and how errors go along a call."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from numdev.audit.bench import KV_TENSORS, Bench
from numdev.audit.plan import Task
from numdev.audit.rows import COUNTED, Measured, formats_of, identity
from numdev.kernels import Kernel
from numdev.kernels.emulation.predict import returning, unexpected
from numdev.metrics.binning import starts
from numdev.metrics.row_sums import Numbers
from numdev.metrics.worst_rows import worst_rows
from numdev.report import DeviationRow, ProfileRow, WorstRow
from numdev.system import System

SHOWN = 3  # rows in a report's summary
# From this multiple of what is predicted for it a row is shown. In sound kernels on a model's own
# inputs the worst is at 1.01 in forward and 1.42 in backward (the demo, bfloat16): naming those
# would be noise. Half as far as the smallest limit of the rules (`worst row`, 5), so that what
# comes near one is seen.
NOTABLE = 2.0
# The same, whatever the order in which the two places that compute a ratio add up its squares.
NEARLY = NOTABLE * (1 - 1e-9)
PROFILED = ("floor", "baseline", "kernel")  # roles that have a profile
PLACE = ("case", "layer", "call", "tensor", "head", "batch", "row")
OF_PROFILE = ("case", "layer", "attends", "role", "kernel", "options", "format")


def examine(
    task: Task, kernel: Kernel, measured: Measured, bench: Bench, system: System
) -> list[WorstRow]:
    """The worst rows of each tensor of a measured task, beside what its rows were held to; none
    where it returned nothing."""
    output, held_to, select = measured.output, measured.held_to, bench.selection
    worst: list[WorstRow] = []
    if output is None:
        return worst
    try:
        claim = kernel.claims(bench.case, output, system)
        formats = formats_of(output, bench)
        for tensor, fmt in formats.items():
            if tensor in KV_TENSORS and len(select.heads) != bench.case.heads:
                continue  # what a key receives comes from query heads that are not measured
            predicted = None
            if tensor in bench.by_row and unexpected(claim, bench.case.format, fmt) is None:
                held_to = held_to or bench.predicted(returning(claim, bench.case, formats))
                predicted = held_to[tensor]
            worst += worst_rows(
                bench.case,
                select.select(getattr(output, tensor), tensor),
                bench.yardsticks[tensor].for_format(fmt),
                select.heads_of(tensor),
                predicted=predicted,
                tensor=tensor,
                lse=bench.lse if tensor in KV_TENSORS else None,
                rows=select.rows_of(tensor),
                identity=identity(task),
            )
    except COUNTED:
        return worst
    return worst


def remarkable(rows: Iterable[DeviationRow]) -> bool:
    """Whether some row of some head errs NOTABLE times what is predicted for it, or is not finite,
    or nothing is predicted: whether `most` may show one."""
    return any(
        row.status == "ok"
        and row.tensor != "lse"
        and (row.worst_row is None or row.worst_row >= NEARLY or bool(row.nonfinite))
        for row in rows
    )


def most(rows: Iterable[WorstRow]) -> tuple[WorstRow, ...]:
    """Those a summary shows: what is not finite and should be, then the largest ratios to what is
    predicted, from NOTABLE on; each row once."""
    notable = [row for row in rows if row.nonfinite or (row.predicted and _ratio(row) >= NOTABLE)]
    unique: dict[tuple[object, ...], WorstRow] = {}
    for row in sorted(notable, key=lambda row: (-row.nonfinite, -_ratio(row))):
        unique.setdefault(tuple(getattr(row, name) for name in PLACE), row)
    return tuple(list(unique.values())[:SHOWN])


def _ratio(row: WorstRow) -> float:
    return row.ratio or 0.0


def profile(task: Task, measured: Measured, bench: Bench) -> Sequence[ProfileRow]:
    """How each tensor errs along its call, by bin of positions; none where there are no bins.

    Errors are root mean squares in the unit of `row_rel`, relative to each row's term scale. Not
    times the floor: where a row sees one key its result is a row of V, which needs no rounding, and
    the floor is 0.
    """
    rows: list[ProfileRow] = []
    about = {name: x for name, x in identity(task).items() if name in OF_PROFILE}
    for tensor, deviation in measured.along.items() if task.role in PROFILED else ():
        along, length = deviation.along, bench.selection.length_of(tensor)
        if not along:
            continue
        predicted = None
        if task.role == "kernel" and "predicted" in along:
            least = np.maximum(along["predicted"], along["least_row"])  # as in expected_ratio
            predicted = _rms(least, along["expected_count"])
        shown = {
            "tensor": tensor,
            "length": length,
            "starts": starts(length),
            "counts": [int(n) for n in along["counted"]],
            "errors": _rms(along["relative"], along["counted"]),
            "predicted": predicted,
        }
        rows.append(ProfileRow.model_validate({**about, **shown}))
    return rows


def _rms(squares: Numbers, counts: Numbers) -> tuple[float | None, ...]:
    """Of each bin, to four digits; None where it has no row."""
    with np.errstate(all="ignore"):
        values = np.sqrt(squares / counts)
    return tuple(float(f"{x:.4g}") if math.isfinite(x) else None for x in values)
