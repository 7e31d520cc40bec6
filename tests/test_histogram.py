"""Counting 16-bit patterns in a GPU's shared memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from numdev.metrics.wasserstein import counts, histogram, w1
from numdev.metrics.wasserstein.histogram import PATTERNS, _parts, counted

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize(
    ("kilobytes", "parts"), [(1000, 1), (256, 1), (227, 2), (128, 2), (99, 4), (64, 4), (48, 8)]
)
def test_the_counters_fit(kilobytes: int, parts: int) -> None:
    """Into so many parts, a power of two, for what one block may have."""
    assert _parts(1024 * kilobytes) == parts


def test_nothing_is_counted_on_a_cpu() -> None:
    assert counted(torch.zeros(10, dtype=torch.int16)) is None


@pytest.mark.parametrize("toolkit", [None, "/opt/cuda"])
def test_it_is_compiled_without_a_toolkit(
    toolkit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch asks for a toolkit's headers, which one from pip lacks; the source needs none."""
    asked: list[list[str]] = []

    def compiled(source: str, name: str) -> Any:
        assert "#include" not in source
        asked.append(cpp_extension.include_paths("cuda"))
        return SimpleNamespace(set_shared_memory_config=lambda size: None)

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", toolkit)
    monkeypatch.setattr(torch.cuda, "_compile_kernel", compiled)
    monkeypatch.setattr(histogram, "shared_memory", lambda device: 227 * 1024)
    assert histogram._kernel.__wrapped__(0) is not None
    assert toolkit == cpp_extension.CUDA_HOME
    assert ("/opt/cuda/include" in asked[0]) == (toolkit is not None)


def expected(bits: torch.Tensor) -> torch.Tensor:
    return torch.bincount(bits.cpu().int() % PATTERNS, minlength=PATTERNS)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 1000, 8 * 1024 * 66 + 5, 3_000_001])
@pytest.mark.parametrize("kind", ["any", "one", "ends"])
def test_every_pattern_is_counted(length: int, kind: str) -> None:
    """Of any length; where all are the same, or the first and the last pattern of each half."""
    drawn = torch.Generator("cuda").manual_seed(length)
    bits = torch.randint(PATTERNS, (length,), generator=drawn, device="cuda")
    if kind == "one":
        bits = torch.full_like(bits, 0xBF80)
    if kind == "ends":
        bits = torch.tensor([0, 0x7FFF, 0x8000, 0xFFFF], device="cuda")[bits % 4]
    bits = bits.to(torch.int16)
    found = counted(bits)
    assert found is not None
    assert found.is_cuda
    assert torch.equal(found.cpu(), expected(bits))


@pytest.mark.gpu
@on_gpu
def test_slices_and_chunks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What begins at no multiple of 16 bytes, has gaps, or is longer than is counted at once."""
    monkeypatch.setattr(histogram, "MOST", 1001)
    drawn = torch.Generator("cuda").manual_seed(0)
    bits = torch.randint(PATTERNS, (20_000,), generator=drawn, device="cuda").to(torch.int16)
    for some in (bits[3:], bits[::2], bits[1:-1:3]):
        found = counted(some)
        assert found is not None
        assert torch.equal(found.cpu(), expected(some))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_distance_is_the_same_without_a_compiler(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted so, by `torch.unique`, and on the CPU: the same number, NaN and infinity too."""
    monkeypatch.setattr(counts, "_FEW", 100)
    drawn = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(n, generator=drawn, device="cuda").to(dtype) for n in (100_003, 77_777))
    one = w1(a, b)
    assert one == w1(a.cpu(), b.cpu()) > 0
    b[5] = torch.inf
    assert w1(a, b) == torch.inf
    b[5] = torch.nan
    assert w1(a, b) != w1(a, b)
    b[5] = 0.0
    with_compiler = w1(a, b)
    monkeypatch.setattr(histogram, "_kernel", lambda device: None)
    assert counted(a.view(torch.int16)) is None
    assert w1(a, b) == with_compiler
