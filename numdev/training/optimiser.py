"""How a variant's weights are updated: the rate of each step, and PyTorch's own optimisers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from numdev.training.config import Optimiser


def rate(config: Optimiser, step: int, steps: int) -> float:
    """The learning rate of update `step`, counted from 1: linear up to `lr` over the warm-up, then
    constant, or half a cosine down to `final` of it at the last step."""
    if step <= config.warmup:
        return config.lr * step / config.warmup
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup) / max(1, steps - config.warmup)
    low = config.final
    return config.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


def make_optimiser(config: Optimiser, network: nn.Module) -> torch.optim.Optimizer:
    """Fused: one launch for all weights. Decay on matrices, none on gains and biases."""
    parameters = list(network.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    device = parameters[0].device
    # On the device, where a recorded step finds it.
    lr = torch.tensor(config.lr, device=device) if device.type == "cuda" else config.lr
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=config.momentum, fused=True)
    return torch.optim.AdamW(
        groups,
        lr=lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
        capturable=device.type == "cuda",
    )


def set_rate(group: dict[str, Any], lr: float) -> None:
    """The learning rate of a group of parameters."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
