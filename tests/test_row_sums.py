"""Sums over rows: the Triton kernel's are PyTorch's."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from interpreted import results_of
from row_sums_cases import yardstick

from numdev.metrics.deviation import measure

REORDERED = 1e-12  # sums of at most a million numbers in fp64, in another order


@pytest.mark.slow
def test_the_kernel_sums_as_pytorch_does() -> None:
    """In Triton's interpreter, over shapes and dtypes, with and without a baseline and a
    prediction: maxima are equal, sums within their reordering."""
    far: dict[str, float] = results_of("row_sums_cases.py")
    assert {"max_abs", "max_ulp", "from_floor", "features", "along", "predicted"} <= far.keys()
    assert {name: x for name, x in far.items() if x > REORDERED} == {}
    assert far["max_abs"] == far["max_ulp"] == far["from_floor"] == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_measures_what_a_cpu_does(dtype: torch.dtype) -> None:
    """Every metric of every head, the kernel's path and that of an output with a NaN."""
    y = yardstick((2, 3, 200, 64))
    o = (y.reference * (1 + 2.0**-9)).to(dtype)
    e = (y.reference * (1 - 2.0**-9)).float()
    fields = {f.name: getattr(y, f.name) for f in dataclasses.fields(y)}
    there = type(y)(
        **{n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in fields.items()}
    )
    for spoilt in (False, True):
        if spoilt:
            o[0, 1, 7, 3] = math.nan
        here, far = measure(o, y, e).heads, measure(o.cuda(), there, e.cuda()).heads
        for a, b in zip(here, far, strict=True):
            floats = {name: x for name, x in a.items() if isinstance(x, float)}
            assert {name: b[name] for name in floats} == pytest.approx(floats, rel=1e-9, abs=1e-300)
            assert b == a | {name: b[name] for name in floats}
