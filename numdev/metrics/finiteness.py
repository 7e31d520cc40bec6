"""What is not finite, in any tensors, by one wait for the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from numdev.formats import all_finite
from numdev.metrics.yardstick import finite, widened


@dataclass(frozen=True)
class Outside:
    """How many elements of one unit (a head) are not finite, in the rows that are not
    measured."""

    nonfinite: int  # elements that are not finite, and should be
    unknown: str | None = None  # why more cannot be said, as a clause


def nonfinite_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Returns how many elements are NaN or infinite, by the tensor's name. Left out are
    tensors that have none, and tensors of integers, bools or complex numbers. The names
    differ: of one that comes twice the last count stays."""
    floating = ((name, x) for name, x in tensors if x.is_floating_point())
    counts = {name: count_nonfinite(x) for name, x in floating}
    return {name: count for name, count in counts.items() if count}


def count_nonfinite(x: Tensor) -> int:
    """Returns how many elements of a floating-point tensor are NaN or infinite; 0 for an
    empty tensor."""
    return 0 if all_finite([x]) else int((~finite(widened(x))).sum())
