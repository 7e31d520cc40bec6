"""What the loop of an audit asks of an operation.

The loop runs kernels, measures what they return and writes rows. Which tensors there are,
what is exact, what roundings predict and what a kernel that errs computes instead, an
operation knows. `numdev.studies.audit.attention` is one."""

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
from numdev.studies.audit.timing import Stopwatch
from numdev.system import System


class Returned(Protocol):
    """What a kernel returned of a call."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Returns the tensors that the kernel returned, by name."""

    @property
    def ran(self) -> str | None:
        """Returns evidence of what really ran, in words; None without."""

    @property
    def ran_backward(self) -> str | None:
        """Returns evidence of what really ran in the backward pass, in words; None
        without."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Distance:
    """The exact value of a tensor of which only the distance is measured, such as the
    log-sum-exp."""

    exact: Tensor
    empty: Tensor  # bool: rows that are left out


class MeasuredPart(Protocol):
    """Which units and rows of a call's tensors are measured."""

    def units(self, tensor: str) -> Sequence[int]:
        """Returns which units of a tensor are measured."""

    def select(self, x: Tensor, tensor: str, *, all_rows: bool = False) -> Tensor:
        """Returns the measured units and rows of a tensor, or with `all_rows` the
        measured units; it may hold these alone already."""

    def sampled_from(self, tensor: str) -> int | Strata | None:
        """Returns the number of rows, or the strata, of which the measured ones are a
        sample; None where all rows are measured."""

    def drawn_rows(self, tensor: str) -> Tensor | None:
        """Returns the positions in the call of the rows of a sample, int64; None where
        all rows are measured."""

    def bins(self, tensor: str) -> Tensor | None:
        """Returns the membership of rows in bins of positions, [rows, bins] of 0 and 1;
        None where errors along a call are not asked for."""


class Everything:
    """All rows of tensors that have a single unit, 0: a `MeasuredPart`."""

    def units(self, tensor: str) -> Sequence[int]:
        """Returns the single unit, 0."""
        return (0,)

    def select(self, x: Tensor, tensor: str, *, all_rows: bool = False) -> Tensor:
        """Returns x as it is."""
        return x

    def sampled_from(self, tensor: str) -> None:
        """Returns None: nothing is a sample."""

    def drawn_rows(self, tensor: str) -> None:
        """Returns None: nothing is a sample."""

    def bins(self, tensor: str) -> None:
        """Returns None: errors along a call are not asked for."""


class PreparedCall(Protocol):
    """One call of an operation in one format, with all that its kernels are measured
    against. Tensors are [batch, units, rows, features]; some of their units and rows may
    be measured."""

    @property
    def case(self) -> Any:
        """Returns the case that a kernel gets."""

    @property
    def selection(self) -> MeasuredPart:
        """Returns which units and rows of its tensors are measured."""

    @property
    def format(self) -> Format:
        """Returns the format that the call is computed in."""

    @property
    def watch(self) -> Stopwatch:
        """Returns the stopwatch that times go to."""

    @property
    def yardsticks(self) -> Mapping[str, Yardstick]:
        """Returns what each tensor is measured against, by tensor, outputs first."""

    @property
    def distances(self) -> Mapping[str, Distance]:
        """Returns the exact values, by tensor, of those of which only the distance is
        measured, where a kernel returns them."""

    @property
    def baseline(self) -> object:
        """Returns what plain code in the format returned, or a Failure."""

    @property
    def by_row(self) -> Sequence[str]:
        """Returns the names of the tensors that the measured rows of the output give
        alone."""

    @property
    def restricted(self) -> object:
        """Returns what a planted fault is given: the case, in what is measured of it."""

    @property
    def exact_by(self) -> str | None:
        """Returns the way the exact result was computed, in words; None where nothing is
        known of it."""

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the inputs that a kernel gets."""

    @property
    def unscreened(self) -> str | None:
        """Returns the reason why a sample was not screened for rows that look worst; None
        where it was, or no rows are sampled."""

    def as_output(self, tensors: Mapping[str, Tensor], ran: str | None = None) -> object:
        """Returns these tensors, as if a kernel had returned them; `ran`: what ran, in
        words."""

    def format_of(self, x: Tensor) -> Format:
        """Returns the format that a tensor came back in."""

    def unpredicted(self, claim: Mapping[str, object] | None, fmt: Format) -> str | None:
        """Returns why no size of error is expected of a tensor that came back in a
        format, as a clause; None where one is. `claim`: the kernel's roundings, None if
        it claims none."""

    def expected(
        self, claim: Mapping[str, object] | None, output: Any
    ) -> Mapping[str, Tensor]:
        """Returns by name, in float32, what a kernel with the roundings of `claim` (None:
        the default ones) returns for what is measured, rounded to the formats of
        `output`; empty where no rounding model predicts anything."""

    def outside_sample(self, output: Any) -> Mapping[str, Sequence[Outside]]:
        """Returns what is not finite in rows that are not measured, by tensor and unit;
        empty where all rows are finite, as they should be."""

    def annotate(
        self,
        output: Any,
        tensor: str,
        units: Sequence[Metrics],
        deviation: Deviation,
        measured: Tensor,
    ) -> None:
        """Adds to a kernel's metrics of each unit, in place, what the operation knows of
        them. `measured`: the measured units and rows of the tensor; `deviation`: its
        metrics."""


Call = TypeVar("Call", bound=PreparedCall)


class Operation(Protocol[Call]):
    """What an operation does for its calls besides measuring them."""

    def screened(self, call: Call, output: Any) -> Call:
        """Returns the call with more rows measured, where they are a sample: those in
        which an output looks worst."""

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
        kernel errs. What needs other calls too is appended to `later`, if there is
        one."""
