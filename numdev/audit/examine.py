"""The rows that err most of a kernel that was just measured, and what is special about them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from numdev.audit.bench import KV_TENSORS, Bench
from numdev.audit.journal import Task
from numdev.audit.task import COUNTED, formats_of, identity
from numdev.kernels import Kernel
from numdev.kernels.emulation.predict import returning, unexpected
from numdev.metrics.worst_rows import worst_rows
from numdev.report import DeviationRow, WorstRow
from numdev.system import System

SHOWN = 3
"""How many rows a report's summary shows."""
NOTABLE = 2.0
"""From this multiple of what is predicted for it a row is shown. In sound kernels on a model's own
inputs the worst is at 1.01 in forward and 1.42 in backward (the demo, bfloat16): naming those would
be noise. Half as far as the smallest limit of the rules (`worst row`, 5), so that what comes near
one is seen."""
NEARLY = NOTABLE * (1 - 1e-9)
"""The same, whatever the order in which the two places that compute a ratio add up its squares."""


def examine(task: Task, kernel: Kernel, bench: Bench, system: System) -> list[WorstRow]:
    """The worst rows of each tensor of the task that was measured last on this bench, beside what
    its rows were held to; none where it returned nothing."""
    if bench.last is None or bench.last[0] != task.key:
        return []
    prepared, (_, output, held_to) = bench.at(task.format), bench.last
    found: list[WorstRow] = []
    try:
        claim = kernel.claims(prepared.case, output, system)
        formats = formats_of(output, prepared)
        for tensor, fmt in formats.items():
            x = getattr(output, tensor)
            known = unexpected(claim, prepared.case.format, fmt) is None
            known = known and tensor in prepared.by_row
            if known and held_to is None:
                held_to = prepared.predicted(returning(claim, prepared.case, formats))
            heads = bench.heads_of(tensor)
            if tensor in KV_TENSORS and len(bench.heads) != prepared.case.heads:
                continue  # what a key receives comes from query heads that are not measured
            found += worst_rows(
                prepared.case,
                bench.select(x, tensor),
                prepared.yardsticks[tensor].for_format(fmt),
                heads,
                predicted=held_to[tensor] if known and held_to is not None else None,
                tensor=tensor,
                lse=prepared.lse if tensor in KV_TENSORS else None,
                rows=bench.rows_of(tensor),
                identity=identity(task),
            )
    except COUNTED:
        return found
    return found


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
    ranked = sorted(
        (row for row in rows if row.nonfinite or (row.predicted and _notable(row.ratio))),
        key=lambda row: (-row.nonfinite, -(row.ratio or 0.0)),
    )
    seen: dict[tuple[object, ...], WorstRow] = {}
    for row in ranked:
        place = (row.case, row.layer, row.call, row.tensor, row.head, row.batch, row.row)
        seen.setdefault(place, row)
    return tuple(list(seen.values())[:SHOWN])


def _notable(ratio: float | None) -> bool:
    return ratio is not None and ratio >= NOTABLE


def kept(rows: Sequence[WorstRow]) -> list[dict[str, object]]:
    """As the journal keeps them."""
    return [row.model_dump(mode="json") for row in rows]
