"""Rows of 16-bit numbers in order, counted on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from numdev.metrics.wasserstein import ordering, sorted_rows
from numdev.metrics.wasserstein.ordering import LEAST, ordered

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def test_on_a_cpu_there_is_none() -> None:
    assert ordered(torch.zeros(2, LEAST, dtype=torch.bfloat16)) is None


@pytest.mark.parametrize("kilobytes", [48, 99, 128])
def test_half_of_the_patterns_must_fit(kilobytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the block needs besides; else nothing is compiled."""
    monkeypatch.setattr(ordering, "shared_memory", lambda device: 1024 * kilobytes)
    monkeypatch.setattr(ordering, "compiled", lambda *given, **more: pytest.fail("compiled"))
    assert ordering._kernel.__wrapped__(0) is None


def patterns(rows: int, length: int, kind: str, dtype: torch.dtype) -> Tensor:
    g = torch.Generator().manual_seed(length)
    if kind == "normal":
        return torch.randn(rows, length, generator=g).to(dtype)
    if kind == "one":
        return torch.full((rows, length), -1.5, dtype=dtype)
    bits = torch.randint(-(2**15), 2**15, (rows, length), generator=g).to(torch.int16)
    if kind == "ends":
        few = torch.tensor([0, 1, 0x7F80, 0x7C00, 0x7FFF], dtype=torch.int16)
        few = torch.cat([few, few | torch.tensor(-(2**15), dtype=torch.int16)])
        bits = few[(bits % 10).long()]
    return bits.view(dtype)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["normal", "one", "any", "ends"])
@pytest.mark.parametrize("shape", [(1, LEAST), (3, LEAST + 1), (8, 100_003), (32, 1 << 19)])
def test_the_order_is_the_hosts(shape: tuple[int, int], kind: str, dtype: torch.dtype) -> None:
    """Of numbers of all kinds: infinities, zeros and NaN of both signs among them."""
    x = patterns(*shape, kind, dtype)
    found = ordered(x.cuda())
    assert found is not None
    assert found.dtype == dtype
    expected = x.float().sort(dim=1).values
    assert torch.equal(found.cpu().float().nan_to_num(nan=7e30), expected.nan_to_num(nan=7e30))


@pytest.mark.gpu
@on_gpu
def test_what_is_not_taken_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other formats, short rows, and where there is no kernel; rows with gaps are taken."""
    x = torch.randn(4, 2 * LEAST, device="cuda")
    for other in (x, x.double(), x.half()[:, :100]):
        assert ordered(other) is None
        assert torch.equal(sorted_rows(other), other.sort(dim=1).values)
    wide = x.half()[:, ::2]
    assert torch.equal(sorted_rows(wide), wide.sort(dim=1).values)
    monkeypatch.setattr(ordering, "_kernel", lambda device: None)
    assert ordered(wide) is None
    assert torch.equal(sorted_rows(wide), wide.sort(dim=1).values)
