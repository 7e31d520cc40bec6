"""A problem as benchmarks of kernels state them: a norm, a product and an activation."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)

    def forward(self, x):
        return torch.nn.functional.silu(self.up(self.norm(x)))


def get_inputs():
    return [torch.randn(64, 128)]


def get_init_inputs():
    return [128, 96]
