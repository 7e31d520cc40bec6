"""Models and factories that tests name as `factories:NAME`, as a user would their own."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

NANO = {"vocab_size": 96, "block_size": 24, "n_layer": 2, "n_head": 2, "n_embd": 16}


class Block(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for y in self.c_attn(x).chunk(3, dim=-1)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.c_proj(out.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """The shape of nanoGPT: `idx`, a block size it insists on, a head tied to its
    embedding."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self.register_buffer("steps", torch.arange(config.block_size), persistent=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        assert idx.shape[1] <= self.config.block_size
        x = self.wte(idx) * math.sqrt(2.0) + self.wpe(self.steps[: idx.shape[1]])
        for block in self.h:
            x = block(x)
        return self.lm_head(x)


class WeightsAlone(nn.Module):
    """A model that reads which tokens attend, and not what they attend to."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(96, 16), nn.Linear(16, 96)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        logits: Tensor = self.head(x + self.attention(x, x, x)[1] @ x)
        return logits


def nanogpt(model_args: dict[str, Any]) -> nn.Module:
    return GPT(SimpleNamespace(**model_args))


def gpt() -> nn.Module:
    return nanogpt(NANO)


def half_gpt() -> nn.Module:
    return gpt().to(torch.bfloat16)


def hidden_length() -> nn.Module:
    return GPT(SimpleNamespace(**NANO, max_position_embeddings=48))


def gemma2(config: dict[str, Any]) -> nn.Module:
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**config))


def saved_gpt() -> nn.Module:
    torch.manual_seed(0)
    return gpt()


def raises() -> nn.Module:
    raise KeyError("no such\nthing")


def returns_nothing() -> None:
    return None


class Flexible(nn.Module):
    """A model whose only layer attends by FlexAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(96, 8), nn.Linear(8, 24)

    def forward(self, input_ids: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention  # loads the compiler

        x = self.project(self.embed(input_ids)).unflatten(-1, (3, 2, 4))
        return cast(Tensor, flex_attention(*x.permute(2, 0, 3, 1, 4)))
