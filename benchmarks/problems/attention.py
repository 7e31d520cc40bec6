"""Causal attention with its projections."""

import torch
from torch import Tensor, nn

batch, length, width, heads = 2, 64, 64, 4


class Model(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = (
            y.reshape(b, n, self.heads, -1).transpose(1, 2)
            for y in self.qkv(x).chunk(3, dim=-1)
        )
        hidden = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))


def get_inputs() -> list[Tensor]:
    return [torch.rand(batch, length, width)]


def get_init_inputs() -> list[int]:
    return [width, heads]
