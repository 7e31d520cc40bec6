"""Runs the kernel of `numdev.metrics.row_sums_triton` in Triton's interpreter, on the CPU, and
prints as JSON how far its sums are from PyTorch's, relative to the largest of each."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from interpreted import prepare

SHAPES = [(1, 1, 1, 1), (2, 3, 37, 9), (1, 2, 130, 64), (1, 1, 5, 80), (3, 1, 17, 128)]
# Triton's interpreter is wrong in bfloat16.
DTYPES = [torch.float64, torch.float32, torch.float16]


def yardstick(shape: tuple[int, ...], seed: int = 0) -> Any:
    from numdev.formats import FORMATS
    from numdev.metrics.yardstick import Yardstick

    generator = torch.Generator().manual_seed(seed)

    def drawn() -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    r = drawn()
    return Yardstick(
        reference=r,
        term_scale=r.abs() + drawn().abs(),
        empty=torch.zeros(shape[:3], dtype=torch.bool),
        format=FORMATS["float16"],
        baseline=(r + 1e-3 * drawn()).half(),
    )


def main() -> None:
    prepare()
    from numdev.metrics import row_sums, row_sums_triton

    far: dict[str, float] = {}
    for shape in SHAPES:
        for dtype in DTYPES:
            for expects, baseline in ((True, True), (False, False)):
                y = yardstick(shape)
                y = y if baseline else dataclasses.replace(y, baseline=None)
                o = (y.reference * 1.001).to(dtype)
                e = (y.reference * 0.999).float() if expects else None
                usable = y.usable
                beside = usable if baseline else None
                by_steps = row_sums.element_sums(o, e, y, usable, beside, usable)
                by_kernel = row_sums_triton.element_sums(o, e, y)
                for name, x in vars(by_steps).items():
                    z = getattr(by_kernel, name)
                    assert (x is None) == (z is None), name
                    if x is not None:
                        gap = float((x - z).abs().max() / x.abs().max().clamp_min(1e-300))
                        far[name] = max(far.get(name, 0.0), gap)
    print(json.dumps(far))


if __name__ == "__main__":
    main()
