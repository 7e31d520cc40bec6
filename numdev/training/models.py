"""From a configuration to a network with the weights of a seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from numdev.training.config import ModelConfig
from numdev.training.decoders import GPT2, Llama
from numdev.training.denoiser import Denoiser
from numdev.training.network import Attend, Network, initialise, sdpa


def build(config: ModelConfig, vocabulary: int, seed: int | None, attend: Attend = sdpa) -> Network:
    """The network of a configuration with the weights of a seed, in float32 on the CPU: the same
    on every machine. Without a seed weights are whatever PyTorch makes. `vocabulary` is of no
    concern to a denoiser."""
    network: Network
    if config.kind == "dit":
        network = Denoiser(config, attend)
    else:
        network = (Llama if config.kind == "llama" else GPT2)(config, vocabulary, attend)
    if seed is None:
        return network
    initialise(network, torch.Generator().manual_seed(seed), config.layers)
    if isinstance(network, Denoiser):
        network.start_as_identity()
    return network


def denoiser(config: Mapping[str, Any]) -> nn.Module:
    """The factory of a saved denoiser, for `numdev audit --model numdev.training.models:denoiser`.
    `config` is the `config.json` beside its weights."""
    return Denoiser(ModelConfig.model_validate(dict(config)))
