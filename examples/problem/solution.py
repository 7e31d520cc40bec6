"""A solution, written out."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)

    def forward(self, x):
        centred = x - x.mean(dim=-1, keepdim=True)
        scale = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + self.norm.eps)
        normed = centred * scale * self.norm.weight + self.norm.bias
        y = torch.addmm(self.up.bias, normed, self.up.weight.T)
        return y * torch.sigmoid(y)
