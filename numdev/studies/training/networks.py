"""Builds the networks that are trained: `llama` and `gpt2`.

A network calls one function for attention: attend(q, k, v), causal, with q [batch, heads,
length, head_dim] and k and v with kv heads; it returns q's shape. Which one is the whole
difference between most variants.

`llama` computes what LlamaForCausalLM does and `gpt2` what GPT2LMHeadModel does, without
dropout and biases, and with the output tied to the embedding;
`numdev.studies.training.hugging_face_writing` knows their names.

Under autocast matrix products are in the working format, and sums along the residual
stream in fp32, as in others' training code. Norms are computed in fp32 either way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from numdev.studies.training.config import ModelConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Batch = Mapping[str, Tensor]
LAYER_EPS, RMS_EPS, ROPE_THETA = 1e-5, 1e-6, 10000.0
SPREAD = 0.02  # the standard deviation of initial weights, as GPT-2 and Llama have it
# Matrices that end a branch of the residual stream
NARROW = ("attention.out.weight", "mlp.down.weight")
# Sums over parameters go in the order in which transformers' models have them.
PARTS = {
    "llama": ("attention", "mlp", "norm_1", "norm_2"),
    "gpt2": ("norm_1", "attention", "norm_2", "mlp"),
}


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns causal attention by PyTorch's `scaled_dot_product_attention`, [batch,
    heads, length, head_dim]. k and v may have fewer heads, of which `heads` is a
    multiple."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


class Norm(nn.Module):
    """RMSNorm in llama, LayerNorm without bias in gpt2; computed in fp32."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.rms = config.kind == "llama"
        self.weight = nn.Parameter(torch.ones(config.width))

    def forward(self, x: Tensor) -> Tensor:
        """Returns x [..., width], normalised over its last axis in fp32 and multiplied by
        the gains, in the dtype of x."""
        wide, shape, weight = x.float(), (x.shape[-1],), self.weight.float()
        if self.rms:
            return F.rms_norm(wide, shape, weight, RMS_EPS).to(x.dtype)
        return F.layer_norm(wide, shape, weight, None, LAYER_EPS).to(x.dtype)


class SelfAttention(nn.Module):
    """The projections before and after `attend`, without biases: three for q, k and v in
    llama, one for all three in gpt2, and that of the output."""

    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.head_dim, self.attend = config.head_dim, attend
        wide, kv = config.width, (config.kv_heads or config.heads) * config.head_dim
        widths = (
            {"qkv": 3 * wide} if config.kind == "gpt2" else {"q": wide, "k": kv, "v": kv}
        )
        for name, out in {**widths, "out": wide}.items():
            self.add_module(name, nn.Linear(wide, out, bias=False))

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Returns attention's output [batch, length, width] for x of the same shape.
        `rotation`: the cosines and sines [length, head_dim] by which q and k are rotated;
        None: they are not."""
        *projections, out = self.children()
        projected = [project(x) for project in projections]
        if len(projected) == 1:
            projected = projected[0].chunk(3, dim=-1)
        q, k, v = (
            p.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projected
        )
        if rotation is not None:
            cos, sin = (part.to(q.dtype) for part in rotation)
            q, k = rotate_positions(q, cos, sin), rotate_positions(k, cos, sin)
        merged: Tensor = out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return merged


def rotate_positions(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x [batch, heads, length, head_dim] rotated by its positions. As in
    transformers, a feature is paired with that half of head_dim further. `cos`, `sin`:
    [length, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class MLP(nn.Module):
    """The feed-forward part, without biases: SwiGLU in llama, GELU by tanh in gpt2."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        for name in ("gate", "up") if config.kind == "llama" else ("up",):
            self.add_module(name, nn.Linear(config.width, config.hidden, bias=False))
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the MLP's output, in the shape of x [..., width]."""
        first, *up, down = self.children()
        inner = (
            F.silu(first(x)) * up[0](x) if up else F.gelu(first(x), approximate="tanh")
        )
        out: Tensor = down(inner)
        return out


class Block(nn.Module):
    """A layer: attention and an MLP, each behind a norm and added to the residual
    stream."""

    attention: SelfAttention
    mlp: MLP
    norm_1: Norm
    norm_2: Norm

    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        parts = {"attention": SelfAttention(config, attend), "mlp": MLP(config)}
        norms = {"norm_1": Norm(config), "norm_2": Norm(config)}
        for name in PARTS[config.kind]:
            self.add_module(name, {**parts, **norms}[name])

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """Returns the residual stream after this layer, [batch, length, width] as `x`
        before it. `rotation`: as in `SelfAttention.forward`."""
        x = x + self.attention(self.norm_1(x), rotation)
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


class Network(nn.Module):
    """A decoder: `llama` or `gpt2`, whose output shares the embedding's weights. Weights
    are as PyTorch draws them; `build_network` gives those of a seed."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, config: ModelConfig, vocabulary: int, attend: Attend = sdpa_attention
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, config.width)
        if config.kind == "gpt2":
            self.positions = nn.Embedding(config.context, config.width)
        else:
            features = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float()
            rates = 1.0 / ROPE_THETA ** (features / config.head_dim)
            angles = torch.outer(torch.arange(config.context).float(), rates).repeat(1, 2)
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.final = Norm(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Returns logits [batch, length, vocabulary] for token ids [batch, length], at
        most `context` of the configuration long. A longer one raises RuntimeError where
        `context` is 2 or more."""
        length, x = input_ids.shape[1], self.tokens(input_ids)
        rotation = None
        if hasattr(self, "positions"):
            x = x + self.positions.weight[:length]
        else:
            rotation = self.cos[:length], self.sin[:length]
        for block in self.blocks:
            x = block(x, rotation)
        return F.linear(self.final(x), self.tokens.weight)

    def loss(self, batch: Batch) -> Tensor:
        """Returns the mean loss of a batch (`inputs` and `targets`, [batch, length]) in
        nats a token, a scalar in float32."""
        logits = self(batch["inputs"])
        return F.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten())

    def query_weights(self) -> Iterator[Tensor]:
        """Yields for each layer in turn its rows of W_Q by head, [heads, head_dim,
        width]: views of the parameters."""
        for part in (m for m in self.modules() if isinstance(m, SelfAttention)):
            first = next(part.parameters())
            queries = first.chunk(3, dim=0)[0] if hasattr(part, "qkv") else first
            yield queries.unflatten(0, (-1, part.head_dim))


@torch.no_grad()
def build_network(
    config: ModelConfig,
    vocabulary: int,
    seed: int | None,
    attend: Attend = sdpa_attention,
) -> Network:
    """Returns the network of a configuration with the weights of a seed, in float32 on
    the CPU: the same on every machine. `seed` None: weights are as PyTorch draws them.

    Matrices are drawn from a normal distribution of standard deviation SPREAD. Those of
    NARROW, which end a branch of the residual stream, are narrower by sqrt(2 layers), as
    GPT-2 has them. Gains are 1."""
    network = Network(config, vocabulary, attend)
    if seed is None:
        return network
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        if parameter.ndim >= 2:
            narrowed = (2 * config.layers) ** 0.5 if name.endswith(NARROW) else 1.0
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn.mul_(SPREAD / narrowed))
    return network
