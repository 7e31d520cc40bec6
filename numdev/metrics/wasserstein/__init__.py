"""The 1-Wasserstein distance between two samples of numbers, exactly.

W1 is the least total distance the values of one sample must travel to become the other, and equals
the integral of |F - G|, the difference of their distribution functions (Vallender 1974). In one
dimension the best plan keeps the order: for two equally long samples W1 is mean |sort(a) - sort(b)|
(Peyre and Cuturi, "Computational Optimal Transport", remark 2.28). Sorting, counts and each
difference are exact or correctly rounded, and sums are taken in float64 over positive terms, so the
answer is good to about 1e-15.

W1 compares two bags of values and does not know which value was where: it is zero under any
permutation, it never exceeds mean |a - b|, and between independent samples it shrinks with their
size. What such a number may be used for, and which paired metric has to stand beside it, is for
`deviation` and the studies to decide. Samples with weights are not here.

How depends on the samples: 16-bit and 8-bit values are counted (`wasserstein.counts`), others
sorted (`wasserstein.sorting`), and those too long for the device one range of values after another
(`wasserstein.ranges`).
"""

from __future__ import annotations

import torch

from numdev.errors import UsageError
from numdev.metrics.wasserstein.counts import countable, tally, w1_of_tallies
from numdev.metrics.wasserstein.ranges import w1_in_ranges
from numdev.metrics.wasserstein.sorting import both_sorted, sorted_rows, w1_of_sorted, w1_of_unequal

__all__ = ["AT_ONCE", "sorted_rows", "w1", "w1_of_sorted", "w1_rows"]

AT_ONCE = 2**29
"""How many values of both samples are sorted at once, unless said otherwise."""

_LONGEST_SORT = 2**31 - 1  # torch sorts no longer tensor on CUDA


def w1(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    device: torch.device | str | None = None,
    at_once: int = AT_ONCE,
) -> float:
    """W1 between the values of two tensors, of any shapes and lengths.

    In the units of the values; any real floating-point dtypes, also two different ones. NaN
    anywhere gives NaN, it is never dropped. An infinity gives infinity, or NaN where both samples
    have one of the same sign (how far apart they are is not defined). Both zeros are the same
    value. Float64 values so large that the sum of their distances (weighted with lcm of the
    lengths where these differ) leaves the range of float64 give infinity.

    Computed on `device`, by default the one that holds both. Of samples with more than `at_once`
    values together no more are there at a time: they are read repeatedly, and the result differs
    only in the order of a sum. A float32 value takes some 20 to 45 bytes there, 4 to 8 on a CPU.

    Raises `UsageError` for empty tensors, two devices where none is named, an `at_once` below 1,
    dtypes that are not real floating-point or pack several values into one element, and lengths
    whose least common multiple is not below 2^63.
    """
    _check_samples(a, b)
    if at_once < 1:
        raise UsageError(f"at_once is {at_once}", hint="at least one value is needed at a time")
    if device is None:
        _check_devices(a, b)
    where = a.device if device is None else torch.device(device)
    at_once = min(at_once, _LONGEST_SORT)
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)
    if countable(a) and countable(b):
        return w1_of_tallies(tally(a, where, at_once), tally(b, where, at_once))
    if a.numel() + b.numel() > at_once:
        return w1_in_ranges(a, b, where, at_once)
    x, y = both_sorted(a.to(where).reshape(1, -1), b.to(where).reshape(1, -1))
    return float(w1_of_sorted(x, y)) if x.shape == y.shape else w1_of_unequal(x[0], y[0])


def w1_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """W1 between each row of `a` and the same row of `b`: [n, m] and [n, m] to [n] float64.

    The result stays on the device. A row with NaN or infinity fares as in `w1` and leaves the
    other rows alone. Raises `UsageError` for anything but two equal, two-dimensional, non-empty
    shapes, for two devices, and for the dtypes `w1` refuses.
    """
    _check_samples(a, b)
    _check_devices(a, b)
    if a.ndim != 2 or a.shape != b.shape:
        raise UsageError(
            f"rows of shapes {list(a.shape)} and {list(b.shape)} cannot be compared",
            hint="pass two tensors of the same shape [rows, values]",
        )
    return w1_of_sorted(*both_sorted(a, b))


def _check_samples(a: torch.Tensor, b: torch.Tensor) -> None:
    if not (_is_real(a.dtype) and _is_real(b.dtype)):
        raise UsageError(
            f"the Wasserstein distance is of floating-point values, not {a.dtype} and {b.dtype}"
        )
    if a.numel() == 0 or b.numel() == 0:
        raise UsageError("the Wasserstein distance of no values is not defined")


def _is_real(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype != torch.float4_e2m1fn_x2  # two values an element


def _check_devices(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.device != b.device:
        raise UsageError(f"the two samples are on different devices, {a.device} and {b.device}")
