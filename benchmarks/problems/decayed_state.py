"""A recurrence with a gate that decays its state."""

import torch
from torch import Tensor, nn

batch, length, width = 4, 32, 32


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.decay = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        decay, value = torch.sigmoid(self.decay(x)), torch.tanh(self.value(x))
        state, states = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + (1 - decay[:, t]) * value[:, t]
            states.append(state)
        return torch.stack(states, dim=1)


def get_inputs() -> list[Tensor]:
    return [torch.rand(batch, length, width)]


def get_init_inputs() -> list[int]:
    return [width]
