"""What `numdev invariance` says, as a report holds it: one row for each tensor of a kernel on a
call, held against the same rows computed another way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from numdev.report import OfKernel, Record, Report, Status, Tensor
from numdev.report.numbers import labelled

Value = float | None
Place = tuple[int, int, int, int]


class Cause(Record):
    """What tells the two forms apart: two ways to cut or order the keys, as options of `emulated`
    under which it makes the same difference, or two operators."""

    base: dict[str, Any]
    variant: dict[str, Any]
    residual: float | None = None
    """The norm of what is left of the difference, over that of the difference; None of operators,
    which are what ran."""


class InvarianceRow(OfKernel):
    """One tensor of one kernel along one axis, over all rows that were computed both ways."""

    case: str
    layer: int | None = None
    phase: str | None = None
    axis: str
    variant: str
    tensor: Tensor
    status: Status = "ok"
    reason: str | None = None  # why there are no numbers
    elements: int = 0  # that were compared
    differ: int = 0  # of them with other bits
    nonfinite: int = 0  # that are NaN or infinite in one form alone
    difference: Value = None  # its rms
    floor_ratio: Value = None  # that over the rms error of the exact result, rounded once
    error_base: Value = None  # rms error of either form, over the same
    error_variant: Value = None
    ulps: Value = None  # the largest difference, in units in the last place of the larger value
    first: Place | None = None
    """The first row, or key of dk and dv, that differs: sequence, head, row and feature."""
    keys: int | None = None  # how many keys that row sees
    cause: Cause | None = None
    closest: Value = None  # the residual of the best pair of tilings, where it explains nothing

    @property
    def same(self) -> bool:
        return self.status == "ok" and self.differ == 0

    @property
    def excess(self) -> float:
        """The difference over the error of the better form, or the floor's where that is larger:
        two sound forms differ by about 1.4 of their errors at most."""
        errors = [x for x in (self.error_base, self.error_variant) if x is not None]
        return (self.floor_ratio or 0.0) / max(1.0, min(errors, default=1.0))

    @property
    def label(self) -> str:
        return labelled(self.kernel, self.options)


class ModelRow(Record):
    """The model's own output, computed another way."""

    axis: str
    kernel: str
    format: str
    differ: int = 0
    elements: int = 0
    difference: Value = None  # rms, over the rms of the output
    rest: Value = None  # the same with attention in fp64, whose answer cannot change
    share: Value = None  # of the mean square of the change, what attention adds
    reason: str | None = None


class InvarianceSummary(Record):
    """What a reader wants first."""

    answer: tuple[str, ...]
    kernels: tuple[()] = ()


class InvarianceReport(Report):
    """The result of `numdev invariance`."""

    kind: Literal["invariance"] = "invariance"
    rules: str
    named: bool = False  # whether the kernels were asked for by name
    summary: InvarianceSummary
    tested: tuple[str, ...] = ()
    rows: tuple[InvarianceRow, ...]
    models: tuple[ModelRow, ...] = Field(default=())

    @property
    def measured(self) -> bool:
        """Whether any kernel ran along any axis."""
        return any(row.status == "ok" for row in self.rows)

    @property
    def unmeasured(self) -> str:
        reasons = sorted({row.reason for row in self.rows if row.reason})
        return f"no kernel ran along any axis: {', or '.join(reasons[:4])}"

    def tables(self) -> dict[str, Sequence[Record]]:
        return {"rows": self.rows, **({"models": self.models} if self.models else {})}
