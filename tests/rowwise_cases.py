"""Runs the kernel of `numdev.rowwise` in Triton's interpreter, on the CPU, and prints as JSON how
what it sums is from what PyTorch sums step by step, relative to the largest of each.

    TRITON_INTERPRET=1 python tests/rowwise_cases.py

`test_rowwise.py` starts it once and asserts.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import torch
from interpreted import index_arrays_of_one_element
from torch import Tensor

from numdev import comparison, rowwise
from numdev.comparison import Comparison
from numdev.formats import FORMATS
from numdev.yardstick import Yardstick

SHAPES = ((1, 1, 1, 1), (2, 3, 37, 9), (1, 2, 150, 16), (2, 1, 65, 80), (1, 1, 9, 200))
DTYPES = (torch.float16, torch.float32, torch.float64)


def yardstick(shape: tuple[int, ...], *, baseline: bool) -> tuple[Yardstick, Tensor, Tensor]:
    """A regular one, an output and what is expected of it. Some of the reference is 0."""
    g = torch.Generator().manual_seed(sum(shape))

    def noise(size: float) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64) * size

    reference = noise(1.0)
    reference.flatten()[::7] = 0.0
    y = Yardstick(
        reference=reference,
        term_scale=reference.abs() + noise(1.0).abs() + 0.01,
        empty=torch.zeros(shape[:3], dtype=torch.bool),
        format=FORMATS["float16"],
        baseline=(reference + noise(0.01)).half() if baseline else None,
        unrounded=reference + noise(0.005),
        arithmetic=torch.full(shape[:3], 1e-6, dtype=torch.float64),
    )
    return y, reference + noise(0.003), (reference + noise(0.004)).float()


def tables(found: Comparison) -> dict[str, Tensor]:
    assert found.signed is not None
    signed = dict(zip(("features", "along", "counts"), found.signed.tensors, strict=True))
    return {**found.sums, **found.largest, **found.transport, **signed}


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest there is."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-300))


def case(
    shape: tuple[int, ...], dtype: torch.dtype, expected: bool, baseline: bool
) -> dict[str, Any]:
    y, o, e = yardstick(shape, baseline=baseline)
    o = o.to(dtype)
    if len(shape) == 4 and shape[2] == 150:  # as models have it
        o = o.transpose(1, 2).contiguous().transpose(1, 2)
    given = e if expected else None
    assert y.regular
    at_once = comparison._at_once(o, given, y)
    assert at_once is not None
    one, other = tables(at_once[0]), tables(comparison._in_passes(o, given, y)[0])
    assert one.keys() == other.keys()
    return {
        "name": f"{list(shape)} {dtype} {expected} {baseline}",
        "apart": {name: apart(one[name], other[name]) for name in one},
    }


def main() -> None:
    index_arrays_of_one_element()
    comparison.row_sums = rowwise.computed
    rowwise.ELEMENTS, rowwise.BLOCKS = 512, 2
    grid = itertools.product(SHAPES, DTYPES, (False, True), (False, True))
    json.dump([case(*which) for which in grid], sys.stdout)


if __name__ == "__main__":
    main()
