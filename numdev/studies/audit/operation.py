"""What the loop of an audit asks of an operation.

The loop runs kernels, measures what they return and writes rows. An operation knows which
tensors there are, what is exact, what roundings predict, and what a kernel that errs
computes instead. `numdev.studies.audit.attention` is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from numdev.formats import Format
from numdev.kernels import Kernel
from numdev.metrics.deviation import Deviation, Metrics
from numdev.metrics.finiteness import Outside
from numdev.metrics.row_samples import Strata
from numdev.metrics.yardstick import Yardstick
from numdev.studies.audit.isolation import Runner
from numdev.studies.audit.section_timing import Stopwatch
from numdev.system import System


class Returned(Protocol):
    """What a kernel returned for a call."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Returns the tensors that the kernel returned, by name."""

    @property
    def ran(self) -> str | None:
        """Returns in words what ran, by evidence (an operator's name in a graph); None
        without evidence."""

    @property
    def ran_backward(self) -> str | None:
        """Returns in words what ran in the backward pass, by evidence; None without
        evidence."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Distance:
    """The exact value of a tensor of which only the distance is measured, without
    comparing it with rounding (the log-sum-exp)."""

    exact: Tensor
    empty: Tensor  # bool: rows that are left out


class MeasuredPart(Protocol):
    """Which units and rows of a call's tensors are measured."""

    def units(self, tensor: str) -> Sequence[int]:
        """Returns the numbers of the units of a tensor that are measured."""

    def select(self, x: Tensor, tensor: str, *, all_rows: bool = False) -> Tensor:
        """Returns the measured units and rows of a tensor [batch, units, rows, ...]; with
        `all_rows` the measured units in all rows. An axis that has the measured ones
        alone already stays as it is."""

    def sampled_from(self, tensor: str) -> int | Strata | None:
        """Returns what the measured rows of a tensor are a sample of: a number of rows,
        or strata where rows that stood out were added; None where all rows are
        measured."""

    def drawn_rows(self, tensor: str) -> Tensor | None:
        """Returns the positions in the call of the rows that were drawn, int64, without
        those that stood out; None where nothing of the call is a sample."""

    def bins(self, tensor: str) -> Tensor | None:
        """Returns which measured rows are in which bin of positions, [rows, bins] of 0
        and 1; None where there are no bins."""


class Everything:
    """All rows of tensors that have a single unit, number 0: a `MeasuredPart`."""

    def units(self, tensor: str) -> Sequence[int]:
        """Returns (0,): the single unit."""
        return (0,)

    def select(self, x: Tensor, tensor: str, *, all_rows: bool = False) -> Tensor:
        """Returns x as it is."""
        return x

    def sampled_from(self, tensor: str) -> None:
        """Returns None: nothing is a sample."""

    def drawn_rows(self, tensor: str) -> None:
        """Returns None: nothing is a sample."""

    def bins(self, tensor: str) -> None:
        """Returns None: there are no bins of positions."""


class PreparedCall(Protocol):
    """One call of an operation in one format, with all that kernels' outputs of it are
    measured against. Tensors are [batch, units, rows, features]; perhaps only some of the
    units and rows are measured."""

    @property
    def case(self) -> Any:
        """Returns the case that a kernel gets."""

    @property
    def selection(self) -> MeasuredPart:
        """Returns which units and rows of the tensors are measured."""

    @property
    def format(self) -> Format:
        """Returns the format that the call is computed in."""

    @property
    def watch(self) -> Stopwatch:
        """Returns the stopwatch that times go to."""

    @property
    def yardsticks(self) -> Mapping[str, Yardstick]:
        """Returns what each tensor is measured against, by the tensor's name, outputs
        first."""

    @property
    def distances(self) -> Mapping[str, Distance]:
        """Returns the exact values, by name, of tensors of which only the distance is
        measured, for kernels that return them."""

    @property
    def baseline(self) -> object:
        """Returns the output of plain code in the format, or a Failure that says why it
        cannot run."""

    @property
    def by_row(self) -> Sequence[str]:
        """Returns the names of the tensors that can be computed from the measured rows of
        the output alone."""

    @property
    def restricted(self) -> object:
        """Returns the input of a planted fault: the case, in its measured units and
        rows."""

    @property
    def exact_by(self) -> str | None:
        """Returns in words how the exact result was computed; None where that is not
        known."""

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the inputs that a kernel gets."""

    @property
    def unscreened(self) -> str | None:
        """Returns why a sample was not screened for rows that look worst; None where it
        was, or no rows are sampled."""

    def as_output(self, tensors: Mapping[str, Tensor], ran: str | None = None) -> object:
        """Returns an output with these tensors, by name, as a kernel would return it.
        `ran`: what ran, in words."""

    def format_of(self, x: Tensor) -> Format:
        """Returns the format that a tensor came back in: its dtype's, but the call's own
        where an attention kernel's wider dtype has numbers of that alone. Raises
        UsageError for a dtype of no format."""

    def unpredicted(self, claim: Mapping[str, object] | None, fmt: Format) -> str | None:
        """Returns why no size of error is predicted for a tensor that came back in `fmt`,
        as a clause; None where one is. `claim`: the kernel's roundings; None: it declares
        none."""

    def expected(
        self, claim: Mapping[str, object] | None, output: Any
    ) -> Mapping[str, Tensor]:
        """Returns by name, in float32, the tensors that a kernel with the roundings of
        `claim` (None: the default ones) returns for the measured units and rows, rounded
        to the formats of `output`. Empty where no rounding model predicts anything."""

    def outside_sample(self, output: Any) -> Mapping[str, Sequence[Outside]]:
        """Returns, by tensor and for every unit in order, what is not finite in rows that
        are not measured, or why that is unknown. Empty where all rows are measured, or
        all numbers are finite, those of the inputs too."""

    def annotate(
        self,
        output: Any,
        tensor: str,
        units: Sequence[Metrics],
        deviation: Deviation,
        measured: Tensor,
    ) -> None:
        """Adds what the operation alone knows to the metrics of each unit, `units`, of
        one tensor of a kernel's `output`, in place. `measured`: that tensor's measured
        units and rows; `deviation`: its metrics."""


Call = TypeVar("Call", bound=PreparedCall)


class Operation(Protocol[Call]):
    """What the loop asks of an operation besides measuring its calls."""

    def screened(self, call: Call, output: Any) -> Call:
        """Returns the call, with more rows measured where they are a sample: those in
        which the output looks worst. Where these cannot be told, it is the same call with
        a reason in `unscreened`."""

    def explained(
        self,
        kernel: Kernel,
        options: Mapping[str, object],
        runs: Any,
        measured: Any,
        system: System,
        run: Runner,
        later: list[Any] | None,
    ) -> Any:
        """Returns `measured` (a `Measured` of the `Runs`), with what is known of why a
        kernel errs in its rows. A call that must be looked at together with others is
        appended to the list `later` instead; None: no call waits."""
