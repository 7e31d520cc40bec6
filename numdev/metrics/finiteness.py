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
    """One unit of a tensor, in the rows that are not measured."""

    nonfinite: int  # elements that are not finite, and should be
    unknown: str | None = None  # why more cannot be said, as a clause


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all elements of all these are, by one wait for the device: of a tensor with
    an infinity or NaN the largest magnitude is one."""
    return all(map(math.isfinite, largest_magnitudes(tensors)))


def nonfinite_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """How many elements of tensors are NaN or infinite, by name; those that have none
    left out."""
    floating = ((name, x) for name, x in tensors if x.is_floating_point())
    counts = {name: count_nonfinite(x) for name, x in floating}
    return {name: count for name, count in counts.items() if count}


def count_nonfinite(x: Tensor) -> int:
    """How many elements are NaN or infinite."""
    return 0 if not x.numel() or all_finite([x]) else int((~finite(widened(x))).sum())


def largest_magnitudes(tensors: Iterable[Tensor]) -> list[float]:
    """Of each tensor, NaN where it holds one; by one wait for the device."""
    largest = [torch.linalg.vector_norm(widened(x), math.inf).double() for x in tensors]
    return torch.stack(largest).tolist() if largest else []
