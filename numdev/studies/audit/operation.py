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
from numdev.metrics.sampling import Strata
from numdev.metrics.yardstick import Yardstick
from numdev.studies.audit.isolation import Runner
from numdev.studies.audit.timing import Stopwatch
from numdev.system import System


class Returned(Protocol):
    """What a kernel returned of a call."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors that the kernel returned, by name."""

    @property
    def ran(self) -> str | None:
        """Evidence of what really ran, in words."""

    @property
    def ran_backward(self) -> str | None: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Distance:
    """The exact value of a tensor that is held to no rounding: its distance is measured,
    and nothing else."""

    exact: Tensor
    empty: Tensor  # bool: rows that are left out


class PreparedCall(Protocol):
    """One call of an operation in one format, with what its kernels are held to. Tensors
    are [batch, units, rows, features]; some of their units and rows may be measured."""

    @property
    def case(self) -> Any:
        """The case that a kernel gets."""

    @property
    def format(self) -> Format: ...

    @property
    def watch(self) -> Stopwatch: ...

    @property
    def yardsticks(self) -> Mapping[str, Yardstick]:
        """What each tensor is held to, by tensor, outputs first."""

    @property
    def distances(self) -> Mapping[str, Distance]:
        """The exact values, by tensor, of those that are held to no rounding where a
        kernel returns them."""

    @property
    def baseline(self) -> object:
        """What plain code in the format returned, or a Failure."""

    @property
    def by_row(self) -> Sequence[str]:
        """The tensors that the measured rows of the output give alone."""

    @property
    def restricted(self) -> object:
        """What a planted fault is given: the case, in what is measured of it."""

    @property
    def exact_by(self) -> str | None:
        """The way the exact result was computed, in words."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the inputs that a kernel gets."""

    @property
    def unscreened(self) -> str | None:
        """The reason why a sample was not screened for rows that stand out; None where it
        was."""

    def as_output(self, tensors: Mapping[str, Tensor], ran: str | None = None) -> object:
        """These tensors, as if a kernel had returned them."""

    def units(self, tensor: str) -> Sequence[int]:
        """Which units of a tensor are measured."""

    def select(self, x: Tensor, tensor: str) -> Tensor:
        """The measured units and rows of a tensor, or those alone."""

    def select_units(self, x: Tensor, tensor: str) -> Tensor: ...

    def sampled_from(self, tensor: str) -> int | Strata | None:
        """The number of rows, or the strata, of which the measured ones are a sample;
        None where all rows are measured."""

    def drawn_rows(self, tensor: str) -> Tensor | None:
        """Where the rows of a sample stand in the call; None where all are measured."""

    def bins(self, tensor: str) -> Tensor | None:
        """The membership of rows in bins of positions, [rows, bins]; None where errors
        along a call are not asked for."""

    def format_of(self, x: Tensor) -> Format:
        """The format that a tensor came back in."""

    def unpredicted(self, claim: Mapping[str, object] | None, fmt: Format) -> str | None:
        """Why no size of error is expected of a tensor that came back in a format, as a
        clause; None where one is."""

    def expected(
        self, claim: Mapping[str, object] | None, output: Any
    ) -> Mapping[str, Tensor]:
        """What a kernel with these roundings returns where it returns these formats."""

    def outside_sample(self, output: Any) -> Mapping[str, Sequence[Outside]]:
        """What is not finite in rows that are not measured, by tensor and unit; empty
        where all rows are finite, as they should be."""

    def annotate(
        self,
        output: Any,
        tensor: str,
        units: Sequence[Metrics],
        deviation: Deviation,
        measured: Tensor,
    ) -> None:
        """Adds to a kernel's metrics of each unit what the operation knows of them.
        `measured` is what is measured of the tensor, `deviation` what it came to."""


Call = TypeVar("Call", bound=PreparedCall)


class Operation(Protocol[Call]):
    """What is done for an operation's calls beside measuring them."""

    def screened(self, call: Call, output: Any) -> Call:
        """The call, of a sample of rows with those beside it in which an output stands
        out."""

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
        """`measured` (a `Measured` of the `Runs`), with what is known of why a kernel
        errs. What needs other calls beside it waits in `later`, if there is one."""
