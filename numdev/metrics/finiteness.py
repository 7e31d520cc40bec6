"""What is not finite, in any tensors, by one wait for the device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.metrics.yardstick import finite, widened


@dataclass(frozen=True)
class Outside:
    """What is not finite in one unit of a tensor, in the rows that are not measured."""

    nonfinite: int  # elements that are not finite, and should be
    unknown: str | None = None  # why more cannot be said, as a clause


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all elements of all tensors are finite, by one wait for the device: of a
    tensor with an infinity or NaN the largest magnitude is one."""
    return all(map(math.isfinite, largest_magnitudes(tensors)))


def nonfinite_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Returns how many elements are NaN or infinite by name of the tensor; tensors
    without any are left out."""
    floating = ((name, x) for name, x in tensors if x.is_floating_point())
    counts = {name: count_nonfinite(x) for name, x in floating}
    return {name: count for name, count in counts.items() if count}


def count_nonfinite(x: Tensor) -> int:
    """Returns how many elements are NaN or infinite."""
    return 0 if not x.numel() or all_finite([x]) else int((~finite(widened(x))).sum())


def largest_magnitudes(tensors: Iterable[Tensor]) -> list[float]:
    """Returns the largest magnitude of each tensor, NaN where it has one, by one wait for
    the device."""
    largest = [torch.linalg.vector_norm(widened(x), math.inf).double() for x in tensors]
    return torch.stack(largest).tolist() if largest else []
