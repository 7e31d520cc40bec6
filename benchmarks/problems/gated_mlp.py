"""A gated MLP with its residual."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

tokens, width, inner = 64, 96, 256


class Model(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def get_inputs() -> list[Tensor]:
    return [torch.rand(tokens, width)]


def get_init_inputs() -> list[int]:
    return [width, inner]
