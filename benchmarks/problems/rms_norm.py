"""RMSNorm over channels of an image."""

import torch
from torch import Tensor, nn

batch, channels, size = 4, 32, 16


class Model(nn.Module):
    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(dim=1, keepdim=True) + self.eps)
        return self.weight * (x * scale)


def get_inputs() -> list[Tensor]:
    return [torch.rand(batch, channels, size, size)]


def get_init_inputs() -> list[int]:
    return [channels]
