"""What the loop needs of a network, and what all of them share.

A network calls one function for attention: attention(q, k, v, causal), q [batch, heads, length,
head_dim], k and v with kv heads, which returns [batch, heads, length, head_dim]. Which one is the
whole difference between most variants. Everything else is PyTorch's.

Under autocast matrix products are in the working format, and sums along the residual stream in
fp32, as in others' training code. Norms are computed in fp32 either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
Batch = Mapping[str, Tensor]
LAYER_EPS = 1e-5
SPREAD = 0.02
"""The standard deviation of initial weights, as GPT-2 and Llama have it."""
NARROW = ("c_proj.weight", "o_proj.weight", "down_proj.weight", "proj_out.weight")
"""Matrices that end a branch of the residual stream."""


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """PyTorch's own attention."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)


class Network(nn.Module):
    """What the loop needs of a network."""

    def loss(self, batch: Batch) -> Tensor:
        """The mean loss of a batch, a scalar in float32."""
        raise NotImplementedError

    def query_weights(self) -> Iterator[Tensor]:
        """Layer by layer, the rows of W_Q by head: [heads, head_dim, width]."""
        raise NotImplementedError


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean nats a token, in float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def initialise(network: nn.Module, generator: torch.Generator, layers: int) -> None:
    """Matrices from a normal distribution, those that end a branch of the residual stream narrower
    by sqrt(2 layers), as GPT-2 has them. Biases are 0; gains stay as they were made, 1."""
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()  # PyTorch draws them, from its global generator
        elif parameter.ndim >= 2:
            spread = SPREAD / (2 * layers) ** 0.5 if name.endswith(NARROW) else SPREAD
            parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(spread))
