"""Routing of tokens to two of eight experts."""

import torch
from torch import Tensor, nn

tokens, width, inner, experts = 64, 32, 48, 8


class Model(nn.Module):
    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, inner) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(dim=-1).topk(2, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        hidden = torch.relu(torch.einsum("td,tkdh->tkh", x, self.up[chosen]))
        out = torch.einsum("tkh,tkhd->tkd", hidden, self.down[chosen])
        return (weights[..., None] * out).sum(dim=1)


def get_inputs() -> list[Tensor]:
    return [torch.randn(tokens, width)]


def get_init_inputs() -> list[int]:
    return [width, inner, experts]
