"""Every Triton kernel where there is no GPU: it runs in Triton's interpreter, and is
built for GPUs that are not here and fits into what their blocks have.

    python tests/test_triton.py 80 90               compiles for these; what became of each as JSON
    python tests/test_triton.py 90 --only mask      what has this in its name

A change that no longer compiles on a GPU is seen where there is none; and of generations
on which nobody measured it is known which paths are there. Nothing runs that was
compiled: what kernels would have written is whatever was in memory. CUDA's own assembler
comes with Triton."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from interpreted import FOLDER, ROOT, python
from oracles import step
from torch._subclasses.fake_tensor import FakeTensorMode

from numdev.cases import AttentionCase, CaseRef
from numdev.errors import Refused
from numdev.formats import FORMATS
from numdev.kernels import find
from numdev.kernels.reference import fused
from numdev.metrics.yardstick import Yardstick

SHARED = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that a block may have, by compute capability (CUDA C++
Programming Guide, technical specifications)."""
KERNELS = {"compare_rows", "forward", "score_gradients", "of_queries", "of_keys"}
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton"
)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "marked"),
    [
        ("fused_cases.py", "not thorough"),
        pytest.param("fused_cases.py", "thorough", marks=pytest.mark.thorough),
        pytest.param("triton_flash_cases.py", "not nothing", marks=pytest.mark.thorough),
    ],
)
def test_in_the_interpreter(cases: str, marked: str) -> None:
    """A file's tests pass, in a process of its own."""
    arguments = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(FOLDER / cases),
        "-m",
        marked,
    )
    done = python(*arguments, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]


@needs_triton
@pytest.mark.slow
def test_functions_in_the_interpreter() -> None:
    """A sound SwiGLU passes beside its reference, two faulty ones do not; its rows of
    1,000 numbers fill no block."""
    arguments = ("--device", "cpu", "--seeds", "1", "--only", "swiglu")
    done = python(
        str(ROOT / "benchmarks/functions_gpu.py"), *arguments, TRITON_INTERPRET="1"
    )
    assert done.returncode == 0, done.stdout + done.stderr[-1000:]
    assert "judged wrongly: 0 of 3" in done.stdout


def build(*arguments: str) -> dict[str, Any]:
    """What became of each launch, in a process of its own: what it compiles runs
    nowhere."""
    done = python(__file__, *arguments, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-3000:]
    launched: dict[str, Any] = json.loads(done.stdout)
    return launched


@needs_triton
@pytest.mark.slow
def test_the_usual_kernels_are_built() -> None:
    """For a GPU that many have. Each of these takes Triton's compiler some seconds."""
    launched = build("90", "--only", "row sums", "--only", "64 bfloat16")
    assert {name: x["refused"] for name, x in launched.items() if x["refused"]} == {}
    kernels = [kernel for x in launched.values() for kernel in x["built"]]
    assert {kernel["kernel"] for kernel in kernels} == KERNELS
    assert max(kernel["shared"] for kernel in kernels) <= SHARED[90]


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    return build(*map(str, SHARED))


@needs_triton
@pytest.mark.thorough
@pytest.mark.parametrize("capability", SHARED)
def test_every_kernel_is_built(capability: int, built: dict[str, Any]) -> None:
    """And takes no more shared memory than a block has there, with one exception."""
    mine = {name: x for name, x in built.items() if name.startswith(f"{capability}: ")}
    assert {name: x["refused"] for name, x in mine.items() if x["refused"]} == {}
    kernels = [kernel for x in mine.values() for kernel in x["built"]]
    assert {kernel["kernel"] for kernel in kernels} == KERNELS
    most = {
        name: max(kernel["shared"] for kernel in x["built"]) for name, x in mine.items()
    }
    large = {
        name.partition(": ")[2] for name, x in most.items() if x > SHARED[capability]
    }
    # Its tiles are options, and Triton's message says what to do.
    assert large == ({"triton-flash, 256 bfloat16"} if capability == 120 else set())


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_tiles_are_the_measured_ones(
    capability: int, width: int, monkeypatch: Any
) -> None:
    """Tensors that are pretended to be on such a GPU get them, where they can be."""
    monkeypatch.setattr(
        fused, "_gpu_limits", lambda _: (SHARED[capability], capability // 10)
    )
    with FakeTensorMode():
        x = torch.empty(1, 2, 8, width, device="cuda:0")
        case = AttentionCase(ref=CaseRef(case="there"), q=x, k=x, v=x, scale=1.0)
        tile = fused._forward_tile(case)
    assert (tile in fused.FORWARD.values()) == (capability in (80, 90))
    assert (tile in fused.ELSEWHERE.values()) == (capability in (100, 120))


# --- the process that compiles --------------------------------------------------------


def launches() -> Iterator[tuple[str, Any]]:
    """What is to be compiled, by name: what makes other code of the kernels."""
    from numdev.metrics import row_sums_triton

    o, r = torch.randn(1, 2, 64, 128).bfloat16(), torch.randn(1, 2, 64, 128).double()
    y = Yardstick(
        reference=r, term_scale=r.abs(), empty=torch.zeros(1, 2, 64, dtype=torch.bool),
        format=FORMATS["bfloat16"], baseline=o,
    )  # fmt: skip
    yield "row sums", lambda: row_sums_triton.element_sums(o, r.float(), y)
    kinds: dict[str, dict[str, Any]] = {
        "64 bfloat16": {},
        "128 bfloat16": {"head_dim": 128, "v_dim": 128},
        "128 float32": {"head_dim": 128, "v_dim": 128, "dtype": torch.float32},
        "256 bfloat16": {"head_dim": 256, "v_dim": 256},
        "mask": {"mask": torch.rand(70, 70) < 0.7, "sinks": True},
        "soft cap": {"softcap": 30.0, "window": (9, 3), "is_causal": False},
    }
    usual = {
        "heads": 2,
        "q_len": 70,
        "kv_len": 70,
        "head_dim": 64,
        "v_dim": 64,
        "is_causal": True,
    }
    flash = find("triton-flash")
    for name, fields in kinds.items():
        case = step(**{"dtype": torch.bfloat16, **usual, **fields})
        yield f"reference, {name}", lambda case=case: fused.gradients(case)
        if case.softcap is None:
            yield f"triton-flash, {name}", lambda case=case: flash.gradients(case)


def main() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Driver:
        """What Triton asks of a GPU before it compiles for it."""

        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)

        def __init__(self, capability: int) -> None:
            self.get_current_target = lambda: GPUTarget("cuda", capability, 32)

    parser = argparse.ArgumentParser(description="Compile the Triton kernels.")
    parser.add_argument("capabilities", nargs="+", type=int)
    parser.add_argument("--only", action="append", default=[])
    asked = parser.parse_args()
    built: list[dict[str, Any]] = []
    run = JITFunction.run

    def compiled(
        self: Any, *passed: Any, grid: Any, warmup: bool, **options: Any
    ) -> None:
        kernel = run(self, *passed, grid=grid, warmup=True, **options)
        built.append({"kernel": self.__name__, "shared": kernel.metadata.shared})
        assert kernel.asm["cubin"]

    JITFunction.run = compiled
    measured = fused.FORWARD
    fused.refuse_unfit = fused.refuse_large_scores = lambda *passed: None
    result = {}
    for capability in asked.capabilities:
        driver.set_active(Driver(capability))
        elsewhere = not fused.suits_forward_tiles(SHARED[capability], capability // 10)
        fused.FORWARD = fused.ELSEWHERE if elsewhere else measured
        for name, launch in launches():
            if asked.only and not any(part in name for part in asked.only):
                continue
            built.clear()
            why = None
            try:
                launch()
            except Refused as error:
                why = error.message
            result[f"{capability}: {name}"] = {"refused": why, "built": list(built)}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
