"""How far two tensors of one shape are apart, element by element and as bags of values.

W1 does not know which value stood where: it is zero under any permutation, and two seeds look to it
like one cast. So it never stands alone: whatever compares weights shows all of these.

The elements are read in blocks, so that two tensors are compared in little more memory than W1
takes, and the device is waited for once, and once more for W1."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.errors import UsageError
from numdev.metrics.wasserstein import blocks, total, w1


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Distances of a from b, in the units of their values.

    Over the elements that are finite in both. A number is None where there is no such element,
    where what it is relative to is zero, and where the squares it takes leave float64's range."""

    elements: int
    nonfinite: int  # NaN or infinite in a, in b or in both, alike or not: left out of what follows
    max_abs: float | None
    mean_abs: float | None
    rel: float | None  # ||a - b|| / ||b||
    cosine: float | None  # <a, b> / (||a|| ||b||)
    w1: float | None
    spread: float | None  # the mean absolute deviation of b from its mean: the scale of W1
    equal: float | None  # the share of elements that are equal, between 0 and 1


def paired(a: Tensor, b: Tensor) -> Paired:
    """All distances, in fp64, of tensors of any real floating-point dtypes, also two.

    NaN and infinity are counted and left out. UsageError for other dtypes, shapes or devices."""
    if a.shape != b.shape or a.device != b.device:
        raise UsageError(
            f"{list(a.shape)} on {a.device} and {list(b.shape)} on {b.device} cannot be paired"
        )
    if not (a.is_floating_point() and b.is_floating_point()):
        raise UsageError(f"only floating-point tensors are paired, not {a.dtype} and {b.dtype}")
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)
    count, apart, squares, aa, bb, ab, equal, largest, spread = (
        _sums(a, b) if a.numel() else [0.0] * 9
    )
    if not count:
        fields = ("max_abs", "mean_abs", "rel", "cosine", "w1", "spread", "equal")
        return Paired(elements=a.numel(), nonfinite=a.numel(), **dict.fromkeys(fields))
    finite = (a, b)
    if count < a.numel():
        kept = torch.cat([kept for _, _, kept in _blocks(a, b)])
        finite = (a[kept], b[kept])
    return Paired(
        elements=a.numel(),
        nonfinite=a.numel() - int(count),
        max_abs=_ratio(largest, 1.0),
        mean_abs=_ratio(apart, count),
        rel=_ratio(math.sqrt(squares), math.sqrt(bb)),
        cosine=_ratio(ab, math.sqrt(aa) * math.sqrt(bb)),
        w1=_ratio(w1(*finite), 1.0),
        spread=_ratio(spread, count),
        equal=_ratio(equal, count),
    )


def _sums(a: Tensor, b: Tensor) -> list[float]:
    """Over the elements that are finite in both: how many; the sums of |a - b|, (a - b)^2, a^2,
    b^2, a b and a = b; the largest |a - b|; the sum of |b - mean b|.

    In two passes, as the last needs the mean; waits for the device once, at the end."""
    found, of_b, largest, spread = [], [], [], []
    for x, y, kept in _blocks(a, b):
        gap = (x - y).abs_()
        equal = (x == y) & kept
        terms = (kept.double(), gap, gap * gap, x * x, y * y, x * y, equal.double())
        found.append(torch.stack([total(term) for term in terms]))  # [7]
        of_b.append(total(y))
        largest.append(gap.max())
    sums = torch.stack(found).sum(dim=0)
    mean = torch.stack(of_b).sum() / sums[0]
    for _, y, kept in _blocks(a, b):
        spread.append(total(torch.where(kept, y - mean, 0.0).abs_()))
    rest = torch.stack([torch.stack(largest).max(), torch.stack(spread).sum()])
    numbers: list[float] = torch.cat([sums, rest]).tolist()
    return numbers


def _blocks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Both in float64, block by block, with 0 where either is not finite, and where both are."""
    for part in blocks(a.numel(), a.device):
        x, y = a[part].double(), b[part].double()
        kept = x.isfinite() & y.isfinite()
        yield torch.where(kept, x, 0.0), torch.where(kept, y, 0.0), kept


def _ratio(x: float, y: float) -> float | None:
    """x / y, where both are known and y is not zero."""
    return x / y if y and math.isfinite(x) and math.isfinite(y) else None
