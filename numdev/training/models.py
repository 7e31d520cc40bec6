"""The networks that are trained: decoders with transformers' names, and a denoiser.

A network calls one function for attention: attend(q, k, v, causal), q [batch, heads, length,
head_dim], k and v with kv heads, which returns [batch, heads, length, head_dim]. Which one is the
whole difference between most variants.

`llama` computes what LlamaForCausalLM does and `gpt2` what GPT2LMHeadModel does, without dropout
and with the output tied to the embedding, so that others open what is saved. `dit` (Peebles and
Xie, "Scalable Diffusion Models with Transformers") cuts images into patches; the time of a noisy
image reaches every block through adaLN. It predicts the noise (Ho et al., "Denoising Diffusion
Probabilistic Models", eq. 14) under the cosine schedule of Nichol and Dhariwal.

Under autocast matrix products are in the working format, and sums along the residual stream in
fp32, as in others' training code. Norms are computed in fp32 either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from numdev.training.config import ModelConfig

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
Batch = Mapping[str, Tensor]
LAYER_EPS, RMS_EPS, ROPE_THETA = 1e-5, 1e-6, 10000.0
SPREAD = 0.02
"""The standard deviation of initial weights, as GPT-2 and Llama have it."""
NARROW = ("c_proj.weight", "o_proj.weight", "down_proj.weight", "proj_out.weight")
"""Matrices that end a branch of the residual stream."""
TIMES = 1000
"""How many degrees of noise a denoiser knows."""
LONGEST_PERIOD = 10000.0
NAMES = {
    "llama": SimpleNamespace(
        root="model", tokens="embed_tokens", positions=None, layers="layers", final="norm",
        attention="self_attn", qkv=("q_proj", "k_proj", "v_proj"), out="o_proj",
        norms=("input_layernorm", "post_attention_layernorm"),
        mlp=("gate_proj", "up_proj", "down_proj"),
        order=("attention", "mlp", "norm_1", "norm_2"),
    ),
    "gpt2": SimpleNamespace(
        root="transformer", tokens="wte", positions="wpe", layers="h", final="ln_f",
        attention="attn", qkv=("c_attn",), out="c_proj", norms=("ln_1", "ln_2"),
        mlp=("c_fc", "c_proj"), order=("norm_1", "attention", "norm_2", "mlp"),
    ),
    "dit": SimpleNamespace(
        qkv=("q_proj", "k_proj", "v_proj"), out="proj_out", mlp=("proj_in", "proj_out")
    ),
}  # fmt: skip
"""transformers' names of the parts; in the `order` of its parameters."""


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """PyTorch's own attention."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)


class Norm(nn.Module):
    """RMSNorm of llama, LayerNorm of gpt2."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.rms = config.kind == "llama"
        self.weight = nn.Parameter(torch.ones(config.width))
        self.bias = nn.Parameter(torch.zeros(config.width)) if config.biases else None

    def forward(self, x: Tensor) -> Tensor:
        weight, shape = self.weight.float(), (x.shape[-1],)
        if self.rms:
            return F.rms_norm(x.float(), shape, weight, RMS_EPS).to(x.dtype)
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), shape, weight, bias, LAYER_EPS).to(x.dtype)


class Attention(nn.Module):
    """The projections around `attend`: of q, k and v by themselves, or of all three in one."""

    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        names, head_dim = NAMES[config.kind], config.head_dim
        self.head_dim, self.attend, self.causal = head_dim, attend, config.kind != "dit"
        wide, kv = config.width, (config.kv_heads or config.heads) * head_dim
        widths = (wide, kv, kv) if len(names.qkv) == 3 else (3 * wide,)
        for name, out in zip((*names.qkv, names.out), (*widths, wide), strict=True):
            self.add_module(name, nn.Linear(wide, out, bias=config.has_biases))
        self.parts = tuple(self.children())  # a tuple registers nothing

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None = None) -> Tensor:
        *projections, out = self.parts
        projected = [project(x) for project in projections]
        if len(projected) == 1:
            projected = projected[0].chunk(3, dim=-1)
        q, k, v = (p.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projected)
        if rotation is not None:
            cos, sin = (part.to(q.dtype) for part in rotation)
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        merged: Tensor = out(self.attend(q, k, v, self.causal).transpose(1, 2).flatten(2))
        return merged

    def query_weight(self) -> Tensor:
        """W_Q by head: [heads, head_dim, width]."""
        first: Any = self.parts[0].weight
        own = first if len(self.parts) == 4 else first.chunk(3, dim=0)[0]
        heads: Tensor = own.unflatten(0, (-1, self.head_dim))
        return heads


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, heads, length, head_dim] with its positions in it, as transformers does it: the
    second half of the features is paired with the first."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class MLP(nn.Module):
    """SwiGLU where there are three matrices, GELU by tanh where there are two."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        *into, out = NAMES[config.kind].mlp
        for name in into:
            self.add_module(name, nn.Linear(config.width, config.hidden, bias=config.has_biases))
        self.add_module(out, nn.Linear(config.hidden, config.width, bias=config.has_biases))
        self.parts = tuple(self.children())

    def forward(self, x: Tensor) -> Tensor:
        first, *up, out = self.parts
        inner = F.silu(first(x)) * up[0](x) if up else F.gelu(first(x), approximate="tanh")
        found: Tensor = out(inner)
        return found


class Block(nn.Module):
    """A decoder's layer."""

    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        names = NAMES[config.kind]
        norms, attention, mlp = (Norm(config), Norm(config)), Attention(config, attend), MLP(config)
        parts = {
            "attention": (names.attention, attention),
            "mlp": ("mlp", mlp),
            "norm_1": (names.norms[0], norms[0]),
            "norm_2": (names.norms[1], norms[1]),
        }
        for part in names.order:
            self.add_module(*parts[part])
        self.parts = (*norms, attention, mlp)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        norm_1, norm_2, attention, mlp = self.parts
        x = x + attention(norm_1(x), rotation)
        out: Tensor = x + mlp(norm_2(x))
        return out


class Network(nn.Module):
    """What the training loop needs of a network."""

    attentions: tuple[Attention, ...]
    """Layer by layer."""

    def loss(self, batch: Batch) -> Tensor:
        """The mean loss of a batch, a scalar in float32: nats a token, squared error a pixel."""
        raise NotImplementedError

    def query_weights(self) -> Iterator[Tensor]:
        """Layer by layer, the rows of W_Q by head: [heads, head_dim, width]."""
        return (attention.query_weight() for attention in self.attentions)


class Decoder(Network):
    """`llama` or `gpt2`."""

    def __init__(self, config: ModelConfig, vocabulary: int, attend: Attend = sdpa) -> None:
        super().__init__()
        assert config.context is not None
        names, root = NAMES[config.kind], nn.Module()
        tokens, final = nn.Embedding(vocabulary, config.width), Norm(config)
        blocks = [Block(config, attend) for _ in range(config.layers)]
        positions = nn.Embedding(config.context, config.width) if names.positions else None
        root.add_module(names.tokens, tokens)
        if positions is not None:
            root.add_module(names.positions, positions)
        else:
            features = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float()
            rates = 1.0 / ROPE_THETA ** (features / config.head_dim)
            angles = torch.outer(torch.arange(config.context).float(), rates).repeat(1, 2)
            root.register_buffer("cos", angles.cos(), persistent=False)
            root.register_buffer("sin", angles.sin(), persistent=False)
        root.add_module(names.layers, nn.ModuleList(blocks))
        root.add_module(names.final, final)
        self.add_module(names.root, root)
        self.parts: Any = (root, tokens, positions, blocks, final)
        self.attentions = tuple(block.parts[2] for block in blocks)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [batch, length, vocabulary] of ids [batch, length]."""
        root, tokens, positions, blocks, final = self.parts
        length = input_ids.shape[1]
        x = tokens(input_ids)
        rotation = None
        if positions is None:
            rotation = root.cos[:length], root.sin[:length]
        else:
            x = x + positions.weight[:length]
        for block in blocks:
            x = block(x, rotation)
        return F.linear(final(x), tokens.weight)

    def loss(self, batch: Batch) -> Tensor:
        logits = self(batch["inputs"])
        return F.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten())


def kept_of_image(times: Tensor) -> Tensor:
    """The share of a noisy image's variance that is the image, float32, of times in [0, TIMES):
    cos²(((t + 1) / T + s) / (1 + s) · π / 2) with s = 0.008, at least 1e-5."""
    share = ((times.float() + 1) / TIMES + 0.008) / 1.008
    return (share * math.pi / 2).cos().square().clamp(min=1e-5)


def noisy(images: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """Images [batch, 1, side, side] with as much noise as their times [batch] say."""
    kept = kept_of_image(times)[:, None, None, None]
    return kept.sqrt() * images + (1 - kept).sqrt() * noise


def normed(x: Tensor) -> Tensor:
    return F.layer_norm(x.float(), (x.shape[-1],), eps=LAYER_EPS).to(x.dtype)


class ModulatedBlock(nn.Module):
    """A denoiser's layer: the time shifts and scales what norms return and gates what is added."""

    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.attn = Attention(config, attend)
        self.mlp = MLP(config)
        self.modulation = nn.Linear(config.width, 6 * config.width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(time)[:, None].chunk(
            6, dim=-1
        )
        x = x + gate * self.attn(normed(x) * (1 + scale) + shift)
        out: Tensor = x + mlp_gate * self.mlp(normed(x) * (1 + mlp_scale) + mlp_shift)
        return out


class Denoiser(Network):
    """`dit`."""

    def __init__(self, config: ModelConfig, attend: Attend = sdpa) -> None:
        super().__init__()
        assert config.image is not None
        assert config.patch is not None
        width, self.patch = config.width, config.patch
        tokens, pixels = (config.image // config.patch) ** 2, config.patch**2
        blocks = [ModulatedBlock(config, attend) for _ in range(config.layers)]
        self.patch_embed = nn.Linear(pixels, width)
        self.position_embed = nn.Parameter(torch.zeros(tokens, width))
        self.time_embed = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(blocks)
        self.head_modulation = nn.Linear(width, 2 * width)
        self.head = nn.Linear(width, pixels)
        self.attentions = tuple(block.attn for block in blocks)
        self.zero_at_first = [*(b.modulation for b in blocks), self.head_modulation, self.head]
        """adaLN-Zero: blocks add nothing at first, and the prediction is zero."""

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        """The noise in noisy images [batch, 1, side, side] at int64 times [batch]."""
        side = images.shape[-1] // self.patch
        cut = images[:, 0].unflatten(1, (side, self.patch)).unflatten(3, (side, self.patch))
        patches = cut.transpose(2, 3).flatten(3).flatten(1, 2).to(self.patch_embed.weight.dtype)
        x = self.patch_embed(patches) + self.position_embed
        time = F.silu(self.time_embed(_waves(times, x.shape[-1]).to(x.dtype)))
        for block in self.blocks:
            x = block(x, time)
        shift, scale = self.head_modulation(time)[:, None].chunk(2, dim=-1)
        found = self.head(normed(x) * (1 + scale) + shift)
        found = found.unflatten(1, (side, side)).unflatten(3, (self.patch, self.patch))
        whole: Tensor = found.transpose(2, 3).flatten(3).flatten(1, 2)[:, None]
        return whole

    def loss(self, batch: Batch) -> Tensor:
        found = self(noisy(batch["images"], batch["noise"], batch["times"]), batch["times"])
        return F.mse_loss(found.float(), batch["noise"])


def _waves(times: Tensor, width: int) -> Tensor:
    """[batch, width]: cosines and sines of the times, with periods up to LONGEST_PERIOD."""
    half = width // 2
    place = torch.arange(half, device=times.device, dtype=torch.float32)
    angles = times.float()[:, None] * torch.exp(-math.log(LONGEST_PERIOD) * place / half)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


@torch.no_grad()
def build(config: ModelConfig, vocabulary: int, seed: int | None, attend: Attend = sdpa) -> Network:
    """The network of a configuration with the weights of a seed, in float32 on the CPU: the same
    on every machine. Without a seed weights are whatever PyTorch makes. `vocabulary` is of no
    concern to a denoiser.

    Matrices are drawn from a normal distribution, those that end a branch of the residual stream
    narrower by sqrt(2 layers), as GPT-2 has them. Biases are 0, gains 1.
    """
    network: Network = (
        Denoiser(config, attend) if config.kind == "dit" else Decoder(config, vocabulary, attend)
    )
    if seed is None:
        return network
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()  # PyTorch draws them, from its global generator
        elif parameter.ndim >= 2:
            spread = SPREAD / (2 * config.layers) ** 0.5 if name.endswith(NARROW) else SPREAD
            parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(spread))
    for layer in network.zero_at_first if isinstance(network, Denoiser) else ():
        layer.weight.zero_()
    return network


def denoiser(config: Mapping[str, Any]) -> nn.Module:
    """The factory of a saved denoiser, for `numdev audit --model numdev.training.models:denoiser`.
    `config` is the `config.json` beside its weights."""
    return Denoiser(ModelConfig.model_validate(dict(config)))
