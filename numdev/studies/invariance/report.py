"""What the report of `numdev invariance` consists of: one row for each tensor of a kernel
on a call, compared with the same rows computed another way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from numdev.report import OfKernel, PlannedKernel, Record, Report, Status, Tensor, Who
from numdev.request_models import Axis

Value = float | None
Place = tuple[int, int, int, int]


class Cause(Record):
    """Why two forms of a call differ: two ways to cut or order the keys, as options of
    `emulated` under which the emulation makes the same difference, or two operators that
    ran."""

    base: dict[str, object]
    variant: dict[str, object]
    # Whether the keys of one form begin at other places than those of the other
    moved: bool = False
    residual: float | None = None
    """The norm of what is left of the difference, over that of the difference; None of
    operators, which are what ran."""

    def __str__(self) -> str:
        """Returns the cause as a clause: `explained by tiling: 64 keys a tile in one
        split against 64 keys a tile in 4 splits`, or `flash, splits 4 ran in place of
        flash, splits 1`."""
        if self.residual is None:
            base, variant = map(_operator_in_words, (self.base, self.variant))
            return f"{variant} ran in place of {base}"
        one, two = _tiling_in_words(self.base), _tiling_in_words(self.variant)
        if one != two:
            return f"explained by tiling: {one} against {two}"
        if self.moved:
            begins = "the tiles start at other keys"
        elif self.base.get("splits") not in (None, 1):
            begins = "the splits start at other keys"
        else:
            begins = "there are other keys around"
        return f"explained by tiling: {one} in both, but {begins}"


def _operator_in_words(did: Mapping[str, object]) -> str:
    """Returns an operator and its options in words, such as `flash, splits 4`. `did`:
    what a kernel says that it ran, by name; the operator stands under `operator`."""
    return ", ".join(
        str(value) if name == "operator" else f"{name} {value}"
        for name, value in did.items()
    )


def _tiling_in_words(options: Mapping[str, object]) -> str:
    """Returns how the keys are tiled, split and ordered: `64 keys a tile, the last first,
    in 4 splits`. Without a tile it is `all keys at once`, and splits are left out.
    `options`: `block_kv`, `splits` and `kv_order` of the kernel `emulated`."""
    tile, splits = options.get("block_kv"), options.get("splits") or 1
    text = f"{tile} keys a tile" if tile else "all keys at once"
    text += ", the last first," if options.get("kv_order") == "descending" else ""
    if not tile:
        return text
    return f"{text} in one split" if splits == 1 else f"{text} in {splits} splits"


class Way(Record):
    """One call of one format, computed another way along an axis: what every kernel was
    to do."""

    format: str
    case: str
    axis: Axis
    variant: str
    # Why no kernel was tried: no such call can be made, or its exact answer is another
    reason: str = ""
    part: str = ""  # the part of the call that is compared, where that is not all
    adds: Literal["", "mask", "option", "way"] = ""
    """What it asks of a kernel that the call as it is does not: a mask, an option of the
    kernel's, or a way to run that a sound kernel may not have. Only these excuse a kernel
    that declines it."""


class InvariancePlan(Record):
    """What was to be compared: every kernel in every way, and the model's own output with
    it."""

    kernels: tuple[PlannedKernel, ...]
    named: bool  # whether the kernels were asked for by name
    formats: tuple[str, ...]
    axes: tuple[Axis, ...]
    asked: bool  # whether the axes were asked for by name
    backward: bool
    ways: tuple[Way, ...]
    models: tuple[Axis, ...] = ()  # along which the model's own output was to be compared


Excuse = Literal["", "call", "option", "mask", "kernel", "memory", "way", "repeat"]
"""Why a row has no numbers: no such call can be made; the kernel has no such option; it
declines a mask that the call as it is has not; it declines the call, or cannot run here;
memory ran out; a way in which a sound kernel may not run; the kernel does not repeat
itself."""


class OfWay(Who):
    """The fields of a row that say which kernel, call, axis and variant it is about."""

    case: str
    layer: int | None
    phase: str | None
    axis: Axis
    variant: str
    part: str


class InvarianceRow(OfKernel):
    """One tensor of one kernel in one variant of a call along one axis, over all rows
    that were computed both ways."""

    case: str
    layer: int | None = None
    phase: str | None = None
    axis: Axis
    variant: str
    part: str = ""  # the part of the call that is compared, where that is not all
    tensor: Tensor
    # The tensors that were compared together, each in a row; none without numbers
    tensors: tuple[Tensor, ...]
    status: Status = "ok"
    excuse: Excuse = ""
    # Why there are no numbers; if `ok`, why there are no gradients
    reason: str | None = None
    # Whether both forms gave their bits again; None where they did not run again
    repeats: bool | None = None
    elements: int = 0  # elements that were compared
    differ: int = 0  # those with other bits
    nonfinite: int = 0  # those that are NaN or infinite in one form alone
    difference: Value = None  # rms difference
    # The same over the floor's rms error: that of the exact result, rounded once
    floor_ratio: Value = None
    error_base: Value = None  # rms error of either form, over the floor's
    error_variant: Value = None
    excess: Value = None
    """The difference over what roundings explain, rms: the error of the better form, the
    floor's, or what fp32 makes of the scores, whichever is largest. Of the log-sum-exp:
    over the rms of 1 + its size."""
    excess_of_a_row: Value = None  # the same of the row where it is largest
    # The largest difference, in units in the last place of the larger value
    ulps: Value = None
    first: Place | None = None
    """The first row, or key of dk and dv, that differs: sequence, head, row and
    feature."""
    keys: int | None = None  # how many keys that row sees
    cause: Cause | None = None
    # The residual of the best pair of tilings, and how many pairs were tried
    closest: Value = None
    tried: int | None = None

    @property
    def same(self) -> bool:
        """Whether the tensor was measured, and every bit is the same."""
        return self.status == "ok" and self.differ == 0

    @property
    def base_errs(self) -> bool:
        """Whether the call as it is is far from exact and the other form is not: its
        error is over 4 times the floor's, and over 4 times the other form's."""
        return (self.error_base or 0.0) > 4 * max(1.0, self.error_variant or 0.0)


TINY = 1e-300  # a divisor that is never 0


class ModelRow(Record):
    """The model's own output with a kernel, along one axis: computed another way, and
    compared."""

    axis: Axis
    kernel: str
    options: dict[str, object] = Field(default_factory=dict)
    format: str
    differ: int = 0
    elements: int = 0
    difference: Value = None  # rms, over the rms of the output
    explained: Value = None  # the error of the better of both ways, over the same
    # The difference with attention in fp64, which cannot change: that of all else
    other_difference: Value = None
    share: Value = None  # of the mean square of the change, what attention adds
    reason: str | None = None  # why there are no numbers

    @property
    def times_explained(self) -> float | None:
        """Returns the change over what roundings explain, which rules judge; None without
        numbers. Where `explained` is 0 it is huge, or 0 where nothing changes."""
        if self.difference is None or self.explained is None:
            return None
        return self.difference / max(self.explained, TINY)


class InvarianceSummary(Record):
    """The sentences that a reader wants first: causes of differences, and the model's
    output."""

    answer: tuple[str, ...]


class InvarianceReport(Report):
    """The result of `numdev invariance`."""

    kind: Literal["invariance"] = "invariance"
    plan: InvariancePlan
    summary: InvarianceSummary
    rows: tuple[InvarianceRow, ...]
    models: tuple[ModelRow, ...] = ()

    @property
    def measured(self) -> bool:
        """Whether a kernel ran along at least one axis."""
        return any(row.status == "ok" for row in self.rows)

    @property
    def unmeasured(self) -> str:
        """Returns a clause that says that no kernel ran along an axis, with the first
        four of the rows' reasons, sorted. Nothing follows the colon where no row has a
        reason."""
        reasons = sorted({row.reason for row in self.rows if row.reason})
        return f"no kernel ran along any axis: {', or '.join(reasons[:4])}"

    def tables(self) -> dict[str, Sequence[Record]]:
        """Returns the tables that are written as CSV files, by file name: `rows`, and
        `models` if the model's own output was compared."""
        return {"rows": self.rows, **({"models": self.models} if self.models else {})}
