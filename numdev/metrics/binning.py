"""Rows in bins by where they stand in their call, to show an error against the position.

A bin is as wide as all that comes before it, until bins of one width reach the end: 0, 1, 2-3, 4-7,
8-15 and so on, then equal ones. Under a causal mask row i averages i + 1 keys, so that among the
first rows every doubling changes what is computed, and later a position hardly does.
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 20
"""At most so many."""
FEWEST = 4
"""A call of fewer rows has no bins: nothing can be seen along it."""


def starts(length: int) -> tuple[int, ...]:
    """The first row of every bin of the rows 0 to length - 1, ascending from 0; nothing where there
    are no bins. At most BINS."""
    found: list[int] = []
    at = 0 if length >= FEWEST else length
    while at < length:
        left = BINS - len(found)
        found.append(at)
        even = -(-(length - at) // left)
        at += even if left == 1 else min(max(at, 1), even)
    return tuple(found)


def membership(length: int, positions: Tensor) -> Tensor | None:
    """Which of these rows are in which bin: 1.0 or 0.0, fp64 [rows, bins], on their device; None
    where there are no bins. Sums over rows [..., rows] are by bin after a product with it, which
    adds in the same order every time."""
    first = starts(length)
    if not first:
        return None
    inner = torch.tensor(first[1:], device=positions.device)
    of = torch.bucketize(positions, inner, right=True)
    return (of[:, None] == torch.arange(len(first), device=positions.device)).double()
