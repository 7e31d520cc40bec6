"""The loss of a language model's head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

tokens, width, words = 64, 64, 500


class Model(nn.Module):
    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)), target)


def get_inputs() -> list[Tensor]:
    return [torch.randn(tokens, width), torch.randint(words, (tokens,))]


def get_init_inputs() -> list[int]:
    return [width, words]
