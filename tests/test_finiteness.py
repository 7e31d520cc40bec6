"""What is not finite outside the rows that were measured."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from oracles import make_case

from numdev.cases import AttentionCase
from numdev.formats import FORMATS
from numdev.kernels.reference import gradients
from numdev.metrics.finiteness import _largest, elsewhere

nan, inf = math.nan, math.inf
ROWS = torch.tensor([0, 3])


def case_of(**changes: Any) -> AttentionCase:
    fields = {"q_len": 6, "kv_len": 6, "heads": 4, "kv_heads": 2, "dtype": torch.float16}
    case: AttentionCase = make_case(**{**fields, **changes})
    shape = (*case.q.shape[:3], case.v.shape[-1])
    dO = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(case.q.dtype)
    return dataclasses.replace(case, grad_out=dO)


def counted(case: AttentionCase, tensor: str, *places: tuple[Any, float]) -> list[Any]:
    """Per head, what is said where a tensor of zeros has these values at these places."""
    source = {"out": "v", "dq": "q", "lse": "q", "dk": "k", "dv": "v"}[tensor]
    like = getattr(case, source)
    heads = case.kv_heads if tensor in ("dk", "dv") else case.heads
    x = torch.zeros(like.shape[0], heads, 6, like.shape[-1], dtype=torch.float16)
    x = x[..., 0] if tensor == "lse" else x
    for place, value in places:
        x[place] = value
    rows = ROWS if tensor != "dk" else torch.tensor([1])
    found = elsewhere(x, tensor, case, rows, FORMATS["float16"])
    return [(f.nonfinite, f.unknown is not None) for f in found]


@pytest.mark.parametrize("tensor", ["dq", "dk", "dv"])
def test_an_infinite_gradient_is_wrong_where_none_can_overflow(tensor: str) -> None:
    """NaN always is; infinity where a bound on the exact gradient excludes it, else it is open."""
    small, large = case_of(), case_of()
    large = dataclasses.replace(large, grad_out=torch.full_like(large.grad_out, 6e4))
    place = (0, 0, 2, 0)
    assert counted(small, tensor, (place, nan))[0] == (1, False)
    assert counted(small, tensor, (place, inf))[0] == (1, False)
    assert counted(large, tensor, (place, nan))[0] == (1, False)
    assert counted(large, tensor, (place, inf))[0] == (0, True)
    assert counted(large, tensor, (place, inf))[1] == (0, False)


@pytest.mark.parametrize("tensor", ["dq", "dk", "dv"])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_the_bound_is_one(tensor: str, softcap: float | None) -> None:
    """No exact gradient exceeds it, over 20 draws and soft caps; and it is no empty one: within a
    factor of 200 of the largest."""
    for seed in range(20):
        case = case_of(softcap=softcap, logits=4.0, seed=seed, dtype=torch.float64)
        exact, bound = getattr(gradients(case), tensor), _largest(case, tensor)
        largest = exact.abs().amax(dim=(0, 2, 3))
        assert (largest <= bound * (1 + 1e-12)).all()
        assert softcap or (bound <= 200 * largest.amax()).all()
