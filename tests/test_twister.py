"""The normals of PyTorch's CPU generator, made as a GPU makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from numdev.cases import AttentionCase, CaseRef
from numdev.sources import regime_registry as registry
from numdev.sources import twister
from numdev.sources.loss import with_drawn
from numdev.sources.synthetic import REGIMES, Shapes, draw
from numdev.sources.twister import Twister, seeded

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
CPU = torch.device("cpu")
N, M = 624, 397
REF = CaseRef(case="drawn", source="test")


def words(x: Tensor) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return x.numpy().view(np.uint32)


def model_of_twist(*, block: Sequence[int], args: Sequence[Any]) -> None:
    """What the kernel does, from the generator's definition: one word after the other."""
    last, out, count = args
    state = words(last).tolist()
    for i in range(count):
        y = (state[i] & 0x80000000) | (state[i + 1] & 0x7FFFFFFF)
        state.append(state[i + M] ^ (y >> 1) ^ (0x9908B0DF if y & 1 else 0))
    words(out)[:] = twister._tempered(np.array(state[N:], np.uint32))
    words(last)[:] = np.array(state[count:], np.uint32)


def model_of_normals(*, grid: Sequence[int], block: Sequence[int], args: Sequence[Any]) -> None:
    """The other, with an error of its own: where it says that it is unsure, it is wrong."""
    given, out, count, first, unsure, unsures, most = args
    assert grid[0] * block[0] >= count // 2
    uniform = twister._uniform(words(given)[: 2 * count]).tolist()
    for place in range(count):
        at = place // 16 * 16 + place % 8
        out[place] = twister._normal(uniform[at], uniform[at + 8], place % 16 < 8)
        if place % 101 == 8:  # in both halves of 16, and their ends
            out[place] += 1.0
            if (k := int(unsures)) < most:
                row = [first + place, uniform[at], uniform[at + 8]]
                unsure[k] = torch.tensor(row, dtype=torch.float64)
            unsures += 1


MODELS = (model_of_twist, model_of_normals)


def modelled(seed: int) -> Twister:
    """A twister whose kernels are their models, on the CPU."""
    made = Twister()
    made.device_of_normals, made.stays = CPU, False
    made.manual_seed(seed)
    return made


def on_host(count: int, generator: Generator) -> Tensor:
    return torch.randn(count, generator=generator, dtype=torch.float64).float()


@pytest.mark.parametrize("counts", [[16], [320, 1007], [335, 624, 1000], [1024, 5, 2057, 1023]])
def test_the_same_numbers(counts: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever length, however much was drawn before, and however long a part is made at a time;
    and what comes after them, of any kind, is the same too."""
    monkeypatch.setattr(twister, "_AT_ONCE", 512)
    plain, made = Generator().manual_seed(2**62 + 12345), modelled(2**62 + 12345)
    for count in counts:
        expected, state = on_host(count, plain), made.get_state().numpy()
        drawn = made._drawn(count, state, MODELS) if count >= 16 else on_host(count, made)
        assert drawn is not None
        assert torch.equal(drawn, expected)
        for kind in (torch.float32, torch.float64):
            after = torch.rand(3, generator=made, dtype=kind)
            assert torch.equal(after, torch.rand(3, generator=plain, dtype=kind))


def test_too_many_that_are_unsure(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there is room for: nothing is said rather than something wrong."""
    monkeypatch.setattr(twister, "_MOST_UNSURE", 3)
    made = modelled(1)
    assert made._drawn(4096, made.get_state().numpy(), MODELS) is None


@pytest.mark.parametrize("why", ["few", "state", "unsure", "memory"])
def test_the_host_draws_what_a_gpu_cannot(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few numbers, of a state that is laid out otherwise, of which too many are unsure, or without
    memory: the same, and so is what follows."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(twister, "FEWEST", 2000 if why == "few" else 1000)
    monkeypatch.setattr(twister, "_BYTES", 5000 if why == "state" else twister._BYTES)
    monkeypatch.setattr(twister, "_MOST_UNSURE", 3)
    plain, made = Generator().manual_seed(9), modelled(9)

    def refused(**given: Any) -> None:
        assert why == "memory"
        raise torch.OutOfMemoryError

    kernels = MODELS if why == "unsure" else (model_of_twist, refused)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(twister, "_compiled", lambda index: kernels)
    for count in (1000, 1007):
        assert torch.equal(made.randn((count,)), on_host(count, plain))
    assert torch.equal(torch.rand(3, generator=made), torch.rand(3, generator=plain))


@pytest.mark.parametrize("device", [None, "cpu", "meta", CPU])
def test_elsewhere_it_is_a_generator(device: Any) -> None:
    assert type(seeded(3, device)) is Generator
    assert seeded(3, device).initial_seed() == 3


def test_what_may_be_computed_anywhere() -> None:
    """Regimes that only multiply normals by numbers: others are computed on the CPU."""
    assert [name for name, regime in REGIMES.items() if regime.anywhere] == ["normal"]


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize(
    "counts", [[1 << 20], [1_100_003, 3, 1_070_001], [1 << 24, (1 << 24) + 21]]
)
def test_a_gpu_draws_them(counts: Sequence[int], stays: bool) -> None:
    plain, made = Generator().manual_seed(77), seeded(77, "cuda", stays=stays)
    assert isinstance(made, Twister)
    for count in counts:
        drawn = registry.gaussian((count,), made)
        assert drawn.is_cuda is stays
        assert torch.equal(drawn.cpu(), on_host(count, plain))
        assert torch.equal(torch.rand(3, generator=made), torch.rand(3, generator=plain))


@pytest.mark.gpu
@on_gpu
def test_numbers_that_a_gpu_is_unsure_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """All numbers are computed again where all count as unsure, and are the same; and drawn by the
    host where that are more than there is room for."""
    everywhere = twister._SOURCE.replace("1.0 - 0x1p-47", "0.5")
    assert everywhere != twister._SOURCE
    monkeypatch.setattr(twister, "_SOURCE", everywhere)
    twister._compiled.cache_clear()
    try:
        monkeypatch.setattr(twister, "FEWEST", 1 << 15)
        for most in (1 << 17, 1 << 10):
            monkeypatch.setattr(twister, "_MOST_UNSURE", most)
            drawn = registry.gaussian((1 << 16,), seeded(5, "cuda"))
            assert torch.equal(drawn, on_host(1 << 16, Generator().manual_seed(5)))
    finally:
        twister._compiled.cache_clear()


@pytest.mark.gpu
@on_gpu
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or without room for what it takes: the host draws."""
    expected = on_host(1 << 20, Generator().manual_seed(3))

    def full(*given: Any) -> Any:
        raise torch.OutOfMemoryError

    for name, instead in (("_compiled", lambda index: None), ("_tempered", full)):
        with monkeypatch.context() as patch:
            patch.setattr(twister, name, instead)
            drawn = registry.gaussian((1 << 20,), seeded(3, "cuda", stays=True))
        assert drawn.is_cuda
        assert torch.equal(drawn.cpu(), expected)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", REGIMES)
def test_a_seed_means_the_same_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every regime's inputs, in all bits."""
    monkeypatch.setattr(twister, "FEWEST", 1 << 15)
    shapes = Shapes(batch=2, heads=4, kv_heads=2, q_len=300, kv_len=512, head_dim=64, v_dim=64)
    given: Any = {"shapes": shapes, "seed": 3, "options": {}, "label": "x", "gradients": True}
    here, there = draw(name, **given), draw(name, **given, device="cuda")
    for one, other in zip((*here, here.grad_out), (*there, there.grad_out), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other.cpu())


@pytest.mark.gpu
@on_gpu
def test_a_drawn_gradient_is_the_same() -> None:
    q = torch.zeros(1, 4, 5000, 64, dtype=torch.bfloat16)
    case = AttentionCase(ref=REF, q=q, k=q, v=q, scale=1.0)
    there = AttentionCase(ref=REF, q=q.cuda(), k=q.cuda(), v=q.cuda(), scale=1.0)
    one, other = with_drawn(case, 1).grad_out, with_drawn(there, 1).grad_out
    assert one is not None
    assert other is not None
    assert other.is_cuda
    assert torch.equal(one, other.cpu())
