"""Transposed convolution, pooling, a linear layer of the mean."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

batch, channels, size, classes = 4, 16, 12, 10


class Model(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.convolution = nn.ConvTranspose2d(channels, channels, 3, stride=2)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.gelu(self.convolution(x)), 2)
        return self.head(x.mean(dim=(2, 3)))


def get_inputs() -> list[Tensor]:
    return [torch.rand(batch, channels, size, size)]


def get_init_inputs() -> list[int]:
    return [channels, classes]
