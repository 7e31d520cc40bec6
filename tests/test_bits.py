"""Checksums of heads: any change of bits shows, no change of anything else does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from numdev.metrics import bits as module
from numdev.metrics.bits import Bits, checksums

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn)
WHOLE = 1 << 64


def by_hand(x: Tensor) -> list[str]:
    """The sum of the module's formula in Python's integers, element by element."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = x.contiguous().view(kinds[x.element_size()])
    found = []
    for head in range(x.shape[1]):
        total = 0
        for i, b in enumerate(bits[:, head].flatten().tolist()):
            w = ((i + 1) * 0x9E3779B97F4A7C15) % WHOLE
            w = ((w ^ _shifted(w, 29)) * 0xBF58476D1CE4E5B9) % WHOLE
            total += (b + 1) * ((w ^ _shifted(w, 32)) | 1)
        found.append(f"{total % WHOLE:016x}")
    return found


def _shifted(w: int, by: int) -> int:
    """To the right with its sign, as signed 64-bit integers are."""
    return ((w - WHOLE if w >= WHOLE // 2 else w) >> by) % WHOLE


def of(x: Tensor) -> list[str]:
    return checksums({"out": x})["out"]


def drawn(dtype: torch.dtype = torch.bfloat16, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape or (2, 3, 5, 4), generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_sum_it_says(dtype: torch.dtype) -> None:
    """In every storage width, the sum of the docstring in exact integers."""
    assert of(drawn(dtype)) == by_hand(drawn(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bit_shows_in_its_head_alone(dtype: torch.dtype) -> None:
    """Whichever element changes, by one ulp."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    x = drawn(dtype)
    before = of(x)
    for batch, row, column in ((0, 0, 0), (1, 4, 3), (0, 2, 1)):
        changed = x.clone()
        changed.view(kinds[x.element_size()])[batch, 1, row, column] ^= 1
        after = of(changed)
        assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]


def test_elements_that_change_places_show() -> None:
    """A sum of bits alone would not tell: rows exchanged, and reversed."""
    x = drawn()
    assert of(x.flip(2)) != of(x)
    assert of(x[:, :, [1, 0, 2, 3, 4]]) != of(x)


def test_changes_that_cancel_in_a_progression_show() -> None:
    """+1, -2, +1 on neighbours, and +1, -1."""
    bits = torch.zeros(1, 1, 8, 1, dtype=torch.int16)
    seen = {of(bits.view(torch.bfloat16))[0]}
    for changes in ([1, -2, 1], [1, -1], [0, 1, -1], [1, -1, -1, 1]):
        other = bits.clone()
        other[0, 0, : len(changes), 0] += torch.tensor(changes, dtype=torch.int16)
        seen.add(of(other.view(torch.bfloat16))[0])
    assert len(seen) == 5


def test_zeros_of_different_sign_and_nan_of_different_bits_differ() -> None:
    zeros = torch.zeros(1, 1, 1, 1)
    assert of(zeros) != of(-zeros)
    quiet = torch.tensor(0x7FC00000, dtype=torch.int32).view(torch.float32).expand(1, 1, 1, 1)
    other = torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32).expand(1, 1, 1, 1)
    assert of(quiet.contiguous()) != of(other.contiguous())
    assert of(quiet.contiguous()) == of(quiet.contiguous().clone())


def test_how_it_lies_in_memory_and_in_which_parts_it_is_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Strides and parts change nothing."""
    x = drawn()
    before = of(x)
    assert of(x.transpose(1, 2).contiguous().transpose(1, 2)) == before
    monkeypatch.setattr(module, "AT_ONCE", 7)
    assert of(x) == before


def test_several_tensors_and_none() -> None:
    """Each gets its own; log-sum-exps have no features; a tensor without heads has none."""
    x, lse = drawn(), drawn(torch.float32, 2, 3, 5)
    found = checksums({"out": x, "lse": lse, "dq": x[:, :0]})
    assert found == {"out": of(x), "lse": of(lse), "dq": []}
    assert checksums({}) == {}
    assert checksums({"out": torch.empty(0, 2, 3, 4)}) == {"out": ["0" * 16] * 2}


@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_of_several_tensors(dtype: torch.dtype) -> None:
    """Of each what its own runs come to, however many there are of others; any run may be the
    different one; what heads begin with is looked at in the first run."""
    x, other = drawn(dtype), drawn(dtype)
    x[0, 1, 0, 0] = math.nan
    other[-1, -1, -1, -1] = 0.0
    tensors = [[x], [x, x.clone(), other], [x, x.clone()], [other, x], [x[:, :, :0]], [x[:0]]]
    found = Bits(tensors)
    assert [found.same(i) for i in range(6)] == [True, False, True, False, True, True]
    assert [found.checksums(i) for i in range(6)] == [by_hand(runs[0]) for runs in tensors]
    first, none = [True, False, True], [False] * 3
    begun = [first, first, first, [True] * 3, none, none]
    assert [found.begin_finite(i) for i in range(6)] == begun


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_says_the_same(dtype: torch.dtype) -> None:
    x = drawn(dtype, 2, 3, 100, 64)
    assert of(x.cuda()) == of(x)
