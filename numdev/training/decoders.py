"""The decoders: networks with transformers' modules and parameter names.

`Llama` computes what LlamaForCausalLM does and `GPT2` what GPT2LMHeadModel does, without dropout
and with the output tied to the embedding, so that what is trained is saved as a checkpoint that
others open.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from numdev.training.config import ModelConfig
from numdev.training.network import LAYER_EPS, Attend, Batch, Network, next_token_loss, sdpa

ROPE_THETA = 10000.0
RMS_EPS = 1e-6


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), RMS_EPS)
        return normed.to(x.dtype)


class LayerNorm(nn.Module):
    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        normed = F.layer_norm(x.float(), (x.shape[-1],), self.weight.float(), bias, LAYER_EPS)
        return normed.to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, heads, length, head_dim] with its positions in it, as transformers does it: the
    second half of the features is paired with the first."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.head_dim, self.attend = config.head_dim, attend
        kv_width = (config.kv_heads or config.heads) * config.head_dim
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, kv_width, bias=False)
        self.v_proj = nn.Linear(config.width, kv_width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        out = self.attend(rotated(q, cos, sin), rotated(k, cos, sin), v, True)
        merged: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return merged


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class LlamaLayer(nn.Module):
    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, attend)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = RMSNorm(config.width)
        self.post_attention_layernorm = RMSNorm(config.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class LlamaModel(nn.Module):
    def __init__(self, config: ModelConfig, vocabulary: int, attend: Attend) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, config.width)
        self.layers = nn.ModuleList(LlamaLayer(config, attend) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        assert config.context is not None
        features = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float()
        rates = 1.0 / ROPE_THETA ** (features / config.head_dim)
        angles = torch.outer(torch.arange(config.context).float(), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]  # type: ignore[index]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


class Llama(Network):
    """A decoder as LlamaForCausalLM computes it."""

    def __init__(self, config: ModelConfig, vocabulary: int, attend: Attend = sdpa) -> None:
        super().__init__()
        self.heads = config.heads
        self.model = LlamaModel(config, vocabulary, attend)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [batch, length, vocabulary] of ids [batch, length]."""
        return F.linear(self.model(input_ids), self.model.embed_tokens.weight)

    def loss(self, batch: Batch) -> Tensor:
        return next_token_loss(self(batch["inputs"]), batch["targets"])

    def query_weights(self) -> Iterator[Tensor]:
        for layer in self.model.layers:
            attention = layer.self_attn
            assert isinstance(attention, LlamaAttention)
            yield attention.q_proj.weight.unflatten(0, (self.heads, -1))


class GPT2Attention(nn.Module):
    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = config.heads, attend
        self.c_attn = nn.Linear(config.width, 3 * config.width, bias=bool(config.biases))
        self.c_proj = nn.Linear(config.width, config.width, bias=bool(config.biases))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.c_attn(x).chunk(3, dim=-1)
        )
        merged: Tensor = self.c_proj(self.attend(q, k, v, True).transpose(1, 2).flatten(2))
        return merged


class GPT2MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.width, config.hidden, bias=bool(config.biases))
        self.c_proj = nn.Linear(config.hidden, config.width, bias=bool(config.biases))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return out


class GPT2Block(nn.Module):
    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.width, bias=bool(config.biases))
        self.attn = GPT2Attention(config, attend)
        self.ln_2 = LayerNorm(config.width, bias=bool(config.biases))
        self.mlp = GPT2MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT2Model(nn.Module):
    def __init__(self, config: ModelConfig, vocabulary: int, attend: Attend) -> None:
        super().__init__()
        assert config.context is not None
        self.wte = nn.Embedding(vocabulary, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.h = nn.ModuleList(GPT2Block(config, attend) for _ in range(config.layers))
        self.ln_f = LayerNorm(config.width, bias=bool(config.biases))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        out: Tensor = self.ln_f(x)
        return out


class GPT2(Network):
    """A decoder as GPT2LMHeadModel computes it; its Conv1D weights are transposed here."""

    def __init__(self, config: ModelConfig, vocabulary: int, attend: Attend = sdpa) -> None:
        super().__init__()
        self.heads = config.heads
        self.transformer = GPT2Model(config, vocabulary, attend)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [batch, length, vocabulary] of ids [batch, length]."""
        return F.linear(self.transformer(input_ids), self.transformer.wte.weight)

    def loss(self, batch: Batch) -> Tensor:
        return next_token_loss(self(batch["inputs"]), batch["targets"])

    def query_weights(self) -> Iterator[Tensor]:
        for block in self.transformer.h:
            attention = block.attn
            assert isinstance(attention, GPT2Attention)
            yield attention.c_attn.weight.chunk(3, dim=0)[0].unflatten(0, (self.heads, -1))
