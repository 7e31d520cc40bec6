"""The 1-Wasserstein distance between two samples of numbers, exactly.

W1 is the least total distance the values of one sample must travel to become the other,
and equals the integral of |F - G|, the difference of their distribution functions
(Vallender 1974). In one dimension the best plan keeps the order: for two equally long
samples W1 is mean |sort(a) - sort(b)| (Peyre and Cuturi, "Computational Optimal
Transport", remark 2.28). Sorting, counts and each difference are exact or correctly
rounded, and sums are taken in float64 over positive terms, so the answer is good to about
1e-15.

A 16-bit or 8-bit sample has at most 65,536 different values, however long it is: these
are counted. Other samples are sorted, by numpy on a CPU, where it is faster than torch.
bfloat16, which numpy does not know, and 8-bit values are widened to float32 first, which
changes no value."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Values = NDArray[np.number]

# A block of a long sum. On a CPU, in float64, 256 KB: it stays in the cache, and torch
# starts no threads for it. On an accelerator 32 MB, so that starting a kernel costs
# little beside running it.
_CPU_BLOCK, _DEVICE_BLOCK = 2**15, 2**22
_COUNTED_AT_ONCE = 2**20  # bincount makes an int64 copy of what it counts


def w1(a: Tensor, b: Tensor) -> float:
    """Returns W1 between the values of two tensors of one length [n], n > 0, on one
    device.

    In the units of the values; any real floating-point dtypes, also two different ones.
    NaN anywhere gives NaN, it is never dropped. An infinity gives infinity, or NaN where
    both samples have one of the same sign (how far apart they are is not defined). Both
    zeros are the same value. Where the sum of their distances leaves float64's range it
    is infinite."""
    a, b = a.detach(), b.detach()
    if max(a.dtype.itemsize, b.dtype.itemsize) <= 2:
        return _w1_of_counts(*_count_values(a), *_count_values(b))
    a, b = _sorted_copy(a), _sorted_copy(b)
    sum_ = torch.zeros((), dtype=torch.float64, device=a.device)
    for part in blocks(len(a), a.device):
        sum_ += total((a[part].double() - b[part]).abs_())
    return float(sum_) / len(a)


def _sorted_copy(x: Tensor) -> Tensor:
    """Returns a sorted copy of x [n], NaN last, on its device, of its dtype or a wider
    one."""
    if x.device.type != "cpu":
        return torch.sort(x.float() if x.dtype.itemsize == 1 else x).values
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    values: Values = x.to(wide, copy=True, memory_format=torch.contiguous_format).numpy()
    values.sort()
    return torch.from_numpy(values)


def _count_values(x: Tensor) -> tuple[Values, Values]:
    """Returns the values of x [n], of an 8- or 16-bit dtype, in ascending order, NaN
    last, and how often each occurs, on the host. Several bit patterns may have one value
    (both zeros, all NaN): such a value comes once for each pattern in x."""
    size = 256**x.dtype.itemsize
    bits = x.view(torch.uint8 if x.dtype.itemsize == 1 else torch.int16)
    counts = torch.zeros(size, dtype=torch.int64, device=x.device)
    for part in bits.split(_COUNTED_AT_ONCE):
        counts += torch.bincount(part.long() & (size - 1), minlength=size)
    values, order = _sorted_patterns(x.dtype)
    often = counts.cpu().numpy()[order]
    present = np.flatnonzero(often)
    return values[present], often[present]


@functools.cache
def _sorted_patterns(dtype: torch.dtype) -> tuple[Values, Values]:
    """Returns the values of all bit patterns of an 8- or 16-bit dtype in ascending order,
    NaN last, and the patterns in that order."""
    patterns = np.arange(256**dtype.itemsize, dtype=f"u{dtype.itemsize}")
    values = torch.from_numpy(patterns).view(dtype).double().numpy()
    order = np.argsort(values, kind="stable")
    return values[order], order


def _w1_of_counts(a: Values, of_a: Values, b: Values, of_b: Values) -> float:
    """Returns W1 between two samples of one length, each as values in order and how often
    each occurs. Between two neighbouring values F - G is constant, and an integer over n.
    NaN anywhere gives NaN, as do infinities of one sign in both; another infinity gives
    infinity."""
    ends = (float(a[0]), float(a[-1]), float(b[0]), float(b[-1]))
    if any(map(math.isnan, ends)):  # a high end of NaN is NaN anywhere
        return math.nan
    if ends[0] == ends[2] == -math.inf or ends[1] == ends[3] == math.inf:
        return math.nan
    if any(map(math.isinf, ends)):
        return math.inf
    values = np.concatenate([a, b])
    # Two ordered runs, which a merge sort joins
    order = np.argsort(values, kind="stable")
    # N (F - G) above each value
    ahead = np.cumsum(np.concatenate([of_a, -of_b])[order])[:-1]
    with np.errstate(over="ignore"):
        return float(np.sum(np.abs(ahead) * np.diff(values[order]))) / int(of_a.sum())


def blocks(length: int, device: torch.device) -> Iterator[slice]:
    """Yields slices that cover 0 to length - 1 in order, in blocks of a size that suits
    the device; the last may be shorter. Nothing for a length of 0."""
    size = _CPU_BLOCK if device.type == "cpu" else _DEVICE_BLOCK
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def total(x: Tensor) -> Tensor:
    """Returns the sum of a float64 tensor that requires no gradient, as a tensor without
    dimensions, on its device. NaN and infinity propagate, a sum beyond float64's range is
    infinite, and that of nothing is 0."""
    if x.device.type != "cpu":
        return x.sum()
    # numpy's sum, unlike torch's, adds in the same order however many threads there are.
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.tensor(float(np.sum(x.numpy())), dtype=torch.float64)
