"""Differences that mean nothing: how far apart runs drift that differ by no more than rounding.

Training is chaotic, so any difference grows. A distance between two runs says something about what
was changed only beside the distance that such a null reaches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ODDS = 12
"""One output in so many is moved. Rounding to nearest errs by ulp²/12 in the mean square, and so
does moving one value in twelve by an ulp."""
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def rerounded(out: Tensor, generator: torch.Generator) -> Tensor:
    """out with one in ODDS of its values, drawn at random, moved to a neighbouring number of its
    dtype, up or down alike: an error without bias, as large as that of one rounding. Gradients
    pass unchanged. Zeros, infinities and NaN stay."""
    drawn = torch.randint(
        2 * ODDS, out.shape, generator=generator, device=out.device, dtype=torch.uint8
    )
    moved: Tensor = _Moved.apply(out, (drawn == 0).to(torch.int8) - (drawn == 1).to(torch.int8))  # type: ignore[no-untyped-call]
    return moved


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, steps: Tensor) -> Tensor:
        return moved_by(out, steps)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        return given[0], None


def moved_by(x: Tensor, steps: Tensor) -> Tensor:
    """x moved by so many numbers of its dtype (-1, 0 or 1), away from zero where positive: the
    bits of a float, its sign aside, count its dtype's numbers. Zeros, infinities and NaN stay."""
    bits = x.contiguous().view(BITS[x.dtype])
    stays = (x == 0) | ~x.isfinite()
    return (bits + steps.to(bits.dtype).masked_fill(stays, 0)).view(x.dtype)


@torch.no_grad()
def move_weights(network: nn.Module, generator: torch.Generator) -> None:
    """Every weight to a neighbouring number of its dtype, away from zero or toward it with equal
    odds. Weights that are 0 stay. `generator` is on the CPU, and the network too."""
    for parameter in network.parameters():
        up = torch.randint(2, parameter.shape, generator=generator, dtype=torch.int8)
        parameter.copy_(moved_by(parameter, 2 * up - 1))
