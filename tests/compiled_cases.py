"""Compiles the Triton kernels for GPUs that are not here, and prints as JSON what became of each.

    python tests/compiled_cases.py 80 90

`test_compiled.py` starts it and asserts. Nothing runs: what kernels would have written is whatever
was in memory. CUDA's own assembler comes with Triton.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from oracles import step
from test_compiled import SHARED
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from numdev.cases import AttentionCase
from numdev.errors import Refused
from numdev.formats import FORMATS
from numdev.kernels import find
from numdev.kernels.reference import fused
from numdev.metrics import row_sums_triton
from numdev.metrics.yardstick import Yardstick


class Driver:
    """What Triton asks of a GPU before it compiles for it."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def cases() -> Iterator[tuple[str, AttentionCase]]:
    """What makes other code of the kernels of attention."""
    for width, dtype in ((64, "bfloat16"), (128, "bfloat16"), (128, "float32"), (256, "bfloat16")):
        yield f"{width} {dtype}", made(head_dim=width, v_dim=width, dtype=getattr(torch, dtype))
    mask = torch.rand(70, 70) < 0.7
    yield "mask", made(mask=mask, sinks=True)
    yield "soft cap", made(softcap=30.0, window=(9, 3), is_causal=False)


def made(**changes: Any) -> AttentionCase:
    usual = {"head_dim": 64, "v_dim": 64, "dtype": torch.bfloat16, "is_causal": True}
    return step(**{"heads": 2, "q_len": 70, "kv_len": 70, **usual, **changes})


def launches() -> Iterator[tuple[str, Any]]:
    """What is to be compiled, by name."""
    o, r = torch.randn(1, 2, 64, 128).bfloat16(), torch.randn(1, 2, 64, 128).double()
    y = Yardstick(
        reference=r,
        term_scale=r.abs(),
        empty=torch.zeros(1, 2, 64, dtype=torch.bool),
        format=FORMATS["bfloat16"],
        baseline=o,
    )
    yield "row sums", lambda: row_sums_triton.element_sums(o, r.float(), y)
    flash = find("triton-flash")
    for name, case in cases():
        yield f"reference, {name}", lambda case=case: fused.gradients(case)
        if case.softcap is None:
            yield f"triton-flash, {name}", lambda case=case: flash.gradients(case)


def main() -> None:
    built: list[dict[str, Any]] = []
    run = JITFunction.run

    def compiled(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *given, grid=grid, warmup=True, **options)
        built.append({"kernel": self.__name__, "shared": kernel.metadata.shared})
        assert kernel.asm["cubin"]

    JITFunction.run = compiled
    measured = fused.FORWARD
    fused.accept = fused.accept_scores = lambda *given: None
    found = {}
    for capability in map(int, sys.argv[1:]):
        driver.set_active(Driver(capability))
        elsewhere = not fused.suits(SHARED[capability], capability // 10)
        fused.FORWARD = fused.ELSEWHERE if elsewhere else measured
        for name, launch in launches():
            built.clear()
            why = None
            try:
                launch()
            except Refused as error:
                why = error.message
            found[f"{capability}: {name}"] = {"refused": why, "built": list(built)}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
