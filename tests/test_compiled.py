"""Every Triton kernel is built for GPUs that are not here, and fits into what their blocks have.

A change that no longer compiles on a GPU is seen where there is none; and of generations on which
nobody measured it is known which paths are there.
"""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import torch
from interpreted import HERE, python
from torch._subclasses.fake_tensor import FakeTensorMode

from numdev.cases import AttentionCase, CaseRef
from numdev.kernels.reference import fused

SHARED = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that a block may have, by compute capability (CUDA C++ Programming Guide,
technical specifications)."""
KERNELS = {
    "compare_rows",
    *("forward", "score_gradients", "of_queries", "of_keys"),
}


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    done = python(str(HERE / "compiled_cases.py"), *map(str, SHARED), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
def test_every_kernel_is_built(capability: int, built: dict[str, Any]) -> None:
    mine = {name: x for name, x in built.items() if name.startswith(f"{capability}: ")}
    assert {name: x["refused"] for name, x in mine.items() if x["refused"]} == {}
    kernels = [kernel for x in mine.values() for kernel in x["built"]]
    assert {kernel["kernel"] for kernel in kernels} == KERNELS
    large = {
        name.partition(": ")[2]
        for name, x in mine.items()
        if any(kernel["shared"] > SHARED[capability] for kernel in x["built"])
    }
    # Its tiles are options, and Triton's message says what to do.
    assert large == ({"triton-flash, 256 bfloat16"} if capability == 120 else set())


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_tiles_are_those_that_were_measured_where_they_can_be(
    capability: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that are pretended to be on such a GPU get them."""
    monkeypatch.setattr(fused, "_of_gpu", lambda _: (SHARED[capability], capability // 10))
    tile = tile_there(width)
    assert (tile in fused.FORWARD.values()) == (capability in (80, 90))
    assert (tile in fused.ELSEWHERE.values()) == (capability in (100, 120))


def tile_there(width: int) -> fused.Tile:
    with FakeTensorMode():
        x = torch.empty(1, 2, 8, width, device="cuda:0")
        case = AttentionCase(ref=CaseRef(case="there"), q=x, k=x, v=x, scale=1.0)
        return fused._forward_tile(case)
