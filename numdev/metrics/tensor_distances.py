"""How far two tensors of one shape are apart, element by element and as bags of values.

W1 does not know which value stood where: it is zero under any permutation, and two seeds
of some 10^6 values look to it like one cast. So it never stands alone: whatever compares
weights shows all.

The elements are read in blocks, so that two tensors are compared in little more memory
than W1 takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.metrics.wasserstein import blocks, total, w1


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Distances of a from b, in the units of their values.

    Over the elements that are finite in both. A number is None where there is no such
    element, where what it is relative to is zero, and where it, a sum or a square that it
    takes leaves float64's range."""

    elements: int
    # NaN or infinite in a, in b or in both, alike or not: left out of what follows
    nonfinite: int
    max_abs: float | None = None
    mean_abs: float | None = None
    rel: float | None = None  # ||a - b|| / ||b||
    w1: float | None = None
    equal: float | None = None  # the share of elements that are equal, between 0 and 1


def paired(a: Tensor, b: Tensor) -> Paired:
    """Returns all distances, computed in fp64, of two tensors of one shape on one device,
    of any real floating-point dtypes, also two different ones. Elements that are NaN or
    infinite in either are counted in `nonfinite` and left out. All distances are None
    without an element that is finite in both; `rel` also where those of `b` are all 0. A
    distance is None too where it, or a sum of differences or squares that it takes, is
    beyond float64's range."""
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)
    block_sums, largest = [], []
    for x, y, both in _finite_blocks(a, b):
        gap = (x - y).abs_()
        terms = (both.double(), gap, gap * gap, y * y, ((x == y) & both).double())
        block_sums.append(torch.stack([total(term) for term in terms]))
        largest.append(gap.max())
    if not block_sums or not (sums := torch.stack(block_sums).sum(dim=0))[0]:
        return Paired(elements=a.numel(), nonfinite=a.numel())
    count, gaps, squares, of_b, equal = sums.tolist()
    finite = (a, b)
    if count < a.numel():
        both = torch.cat([both for _, _, both in _finite_blocks(a, b)])
        finite = (a[both], b[both])
    return Paired(
        elements=a.numel(),
        nonfinite=a.numel() - int(count),
        max_abs=_ratio_or_none(float(torch.stack(largest).max()), 1.0),
        mean_abs=_ratio_or_none(gaps, count),
        rel=_ratio_or_none(math.sqrt(squares), math.sqrt(of_b)),
        w1=_ratio_or_none(w1(*finite), 1.0),
        equal=_ratio_or_none(equal, count),
    )


def _finite_blocks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields, block by block, the elements of both in float64, with 0 where either is not
    finite, and the mask (bool) of where both are finite."""
    for part in blocks(a.numel(), a.device):
        x, y = a[part].double(), b[part].double()
        both = x.isfinite() & y.isfinite()
        yield torch.where(both, x, 0.0), torch.where(both, y, 0.0), both


def _ratio_or_none(x: float, y: float) -> float | None:
    """Returns x / y; None where y is zero or either is not finite."""
    return x / y if y and math.isfinite(x) and math.isfinite(y) else None
