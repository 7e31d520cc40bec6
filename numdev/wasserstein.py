"""The 1-Wasserstein distance between two samples of numbers, exactly.

W1 is the least total distance the values of one sample must travel to become the other. In one
dimension the best plan keeps the order: the smallest goes to the smallest, and so on. For two
equally long samples W1 is therefore mean |sort(a) - sort(b)| (Vallender 1974; Peyre and Cuturi,
"Computational Optimal Transport", remark 2.28). Sorting and each difference are exact or
correctly rounded, and the mean is taken in float64, so the answer is good to about 1e-15.

W1 compares two bags of values and does not know which value was where: it is zero under any
permutation, it never exceeds mean |a - b|, and between independent samples it shrinks with their
size. What such a number may be used for, and which paired metric has to stand beside it, is for
`deviation` and the studies to decide. Samples of unequal length, or with weights, are not here.

The values are sorted where they lie: by numpy on a CPU, where it is faster than torch, and by
torch on any other device, which sorts 16-bit values about four times faster than float32. What
the sorter does not know (bfloat16 in numpy, 8-bit values in both) is widened to float32 first,
which changes no value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from numdev.errors import UsageError

Values = np.ndarray[Any, np.dtype[Any]]

__all__ = ["sorted_rows", "w1", "w1_of_sorted", "w1_rows"]


def w1(a: torch.Tensor, b: torch.Tensor) -> float:
    """W1 between the values of two tensors with equally many elements, of any shape.

    In the units of the values; any real floating-point dtypes, also two different ones, on one
    device. NaN anywhere gives NaN, it is never dropped. An infinity gives infinity, or NaN where
    it is paired with one of the same sign (how far apart they are is not defined). Both zeros are
    the same value. Raises `UsageError` for empty tensors, unequal lengths, different devices, and
    dtypes that are not real floating-point.
    """
    if a.numel() != b.numel():
        raise UsageError(
            f"the Wasserstein distance of {a.numel()} values from {b.numel()} is not supported",
            hint="pass two tensors with equally many elements",
        )
    return float(w1_rows(a.reshape(1, -1), b.reshape(1, -1)))


def w1_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """W1 between each row of `a` and the same row of `b`: [n, m] and [n, m] to [n] float64.

    The result stays on the device. A row with NaN or infinity fares as in `w1` and leaves the
    other rows alone. Raises `UsageError` for anything but two equal, two-dimensional, non-empty
    shapes, and for the devices and dtypes `w1` refuses.
    """
    _check_rows(a, b)
    return w1_of_sorted(sorted_rows(a), sorted_rows(b))


def sorted_rows(x: torch.Tensor) -> torch.Tensor:
    """Each row of [n, m] in ascending order, NaN last, as a new tensor on its device.

    What is compared with many others is sorted once (`w1_of_sorted`). The dtype is that of `x` or
    a wider one, with the same values.
    """
    x = x.detach()
    return torch.from_numpy(_sorted_numpy(x)) if x.device.type == "cpu" else _sorted_torch(x)


def w1_of_sorted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`w1_rows` of what `sorted_rows` returned, of equal shapes: [n, m] and [n, m] to [n]."""
    if a.device.type == "cpu":
        return _gap_numpy(a.numpy(), b.numpy())
    return _gap_torch(a, b)


def _check_rows(a: torch.Tensor, b: torch.Tensor) -> None:
    if not (a.is_floating_point() and b.is_floating_point()):
        raise UsageError(
            f"the Wasserstein distance is of floating-point values, not {a.dtype} and {b.dtype}"
        )
    if a.device != b.device:
        raise UsageError(f"the two samples are on different devices, {a.device} and {b.device}")
    if a.ndim != 2 or a.shape != b.shape:
        raise UsageError(
            f"rows of shapes {list(a.shape)} and {list(b.shape)} cannot be compared",
            hint="pass two tensors of the same shape [rows, values]",
        )
    if a.numel() == 0:
        raise UsageError("the Wasserstein distance of no values is not defined")


def _gap_numpy(a: Values, b: Values) -> torch.Tensor:
    with np.errstate(invalid="ignore"):  # inf - inf is NaN here on purpose
        gap = np.subtract(a, b, dtype=np.float64)  # [n, m]
    np.abs(gap, out=gap)
    # numpy's mean, unlike torch's, adds in the same order however many threads there are.
    return torch.from_numpy(gap.mean(axis=1))


def _sorted_numpy(x: torch.Tensor) -> Values:
    """Each row of a CPU tensor in ascending order, NaN last, as a new array."""
    widened = x if x.dtype == torch.float64 else x.float()
    return np.sort(widened.numpy(), axis=1)


def _gap_torch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    gap = a.double() - b  # [n, m]; b is widened as it is read
    return gap.abs_().mean(dim=1)


def _sorted_torch(x: torch.Tensor) -> torch.Tensor:
    """Each row in ascending order, NaN last, as a new tensor."""
    return torch.sort(x.float() if x.dtype.itemsize == 1 else x, dim=1).values
