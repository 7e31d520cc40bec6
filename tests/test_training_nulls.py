"""Differences that mean nothing are exactly as large as they are said to be."""

from __future__ import annotations

import math

import pytest
import torch

from numdev.formats import format_of, ulp
from numdev.training.lane import move_weights, rerounded

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rerounding_errs_as_much_as_a_rounding(dtype: torch.dtype) -> None:
    """On 2^20 values in [1, 2), whose ulp is one: the mean square is ulp²/12 and the mean 0, each
    within 5 standard deviations (a value moves with probability 1/12, and then by one ulp)."""
    n = 1 << 20
    made = torch.Generator().manual_seed(0)
    # No power of two, below which the neighbour is nearer.
    x = (1.25 + 0.5 * torch.rand(n, generator=made)).to(dtype)
    error = rerounded(x, made).double() - x.double()
    error /= ulp(x[:1], format_of(dtype)).double()
    assert set(error.unique().tolist()) == {-1.0, 0.0, 1.0}
    share = 1 / 12
    assert abs(error.square().mean() - share) < 5 * math.sqrt(share * (1 - share) / n)
    assert abs(error.mean()) < 5 * math.sqrt(share / n)


def test_a_rerounding_lets_gradients_pass() -> None:
    x = torch.linspace(1, 2, 9).requires_grad_()
    given = torch.linspace(-1, 1, 9)
    rerounded(x, torch.Generator().manual_seed(0)).backward(given)
    assert x.grad is not None
    assert torch.equal(x.grad, given)


def test_every_weight_moves_by_an_ulp() -> None:
    """To torch.nextafter's neighbour, some up and some down; zeros stay."""
    layer = torch.nn.Linear(40, 30)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
        layer.bias[:7] = 0.0
    before = [p.detach().clone() for p in layer.parameters()]
    move_weights(layer, torch.Generator().manual_seed(0))
    for old, new in zip(before, layer.parameters(), strict=True):
        up = torch.nextafter(old, torch.full_like(old, math.inf))
        down = torch.nextafter(old, torch.full_like(old, -math.inf))
        zero = old == 0
        assert bool(((new == up) | (new == down) | zero).all())
        assert bool((new[zero] == 0).all())
        assert 0.2 < float((new == up)[~zero].float().mean()) < 0.8
