"""Tiny models that tests build on the spot: real architectures, and modules written by hand.

Weights are drawn far wider than a trained model's start, so that scores spread over several units:
with scores near zero a soft cap, a window or a wrong scale would hardly move the output.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

SMALL = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE = {**SMALL, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}


def gpt2() -> PreTrainedModel:
    config = transformers.GPT2Config(
        **SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3
    )
    return _seeded(transformers.GPT2LMHeadModel, config)


def llama(**changes: object) -> PreTrainedModel:
    """Grouped heads, 4 queries to a key."""
    config = transformers.LlamaConfig(
        **{
            **WIDE,
            "intermediate_size": 48,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            **changes,
        }
    )
    return _seeded(transformers.LlamaForCausalLM, config)


def bert() -> PreTrainedModel:
    config = transformers.BertConfig(
        **WIDE, intermediate_size=48, num_attention_heads=4, max_position_embeddings=64
    )
    return _seeded(transformers.BertForMaskedLM, config)


def t5() -> PreTrainedModel:
    """An encoder whose learned position bias is added to the scores."""
    config = transformers.T5Config(
        **SMALL, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, initializer_factor=1.0
    )
    return _seeded(transformers.T5EncoderModel, config)


def falcon() -> PreTrainedModel:
    """Calls SDPA itself, past transformers' attention interface; one key head for all queries."""
    config = transformers.FalconConfig(
        **WIDE, num_attention_heads=4, max_position_embeddings=64, multi_query=True, alibi=False
    )
    return _seeded(transformers.FalconForCausalLM, config)


def modernbert() -> PreTrainedModel:
    """An encoder with a window of 2 tokens to either side in its second layer."""
    config = transformers.ModernBertConfig(
        **WIDE,
        intermediate_size=48,
        num_attention_heads=4,
        max_position_embeddings=64,
        local_attention=4,
        cls_token_id=1,
        sep_token_id=2,
    )
    return _seeded(transformers.ModernBertForMaskedLM, config)


def gemma2() -> PreTrainedModel:
    """A soft cap that bites; a window of 4 in the first layer, none in the second."""
    config = transformers.Gemma2Config(
        **WIDE,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        max_position_embeddings=64,
        attn_logit_softcapping=0.5,
        sliding_window=4,
    )
    return _seeded(transformers.Gemma2ForCausalLM, config)


def gpt_oss() -> PreTrainedModel:
    """Attention sinks, and a window of 4 in the first layer."""
    config = transformers.GptOssConfig(
        **WIDE,
        intermediate_size=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        sliding_window=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return _seeded(transformers.GptOssForCausalLM, config)


def t5_seq2seq() -> PreTrainedModel:
    """Encoder and decoder, each with a position bias that is added to its scores; cross attention
    without one."""
    config = transformers.T5Config(
        **SMALL,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        initializer_factor=1.0,
        decoder_start_token_id=0,
    )
    return _seeded(transformers.T5ForConditionalGeneration, config)


def bart() -> PreTrainedModel:
    config = transformers.BartConfig(
        **SMALL,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        init_std=0.3,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    return _seeded(transformers.BartForConditionalGeneration, config)


TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
IMAGE = {"image_size": 12, "patch_size": 4}


def vit() -> PreTrainedModel:
    """Ten tokens: nine patches and one for the class."""
    config = transformers.ViTConfig(**TOWER, **IMAGE, initializer_range=0.3)
    return _seeded(transformers.ViTForImageClassification, config)


def clip() -> PreTrainedModel:
    """A causal tower for text, and one for images."""
    text = {**TOWER, **SMALL, "max_position_embeddings": 64}
    config = transformers.CLIPConfig(
        text_config=text,
        vision_config={**TOWER, **IMAGE},
        projection_dim=16,
        initializer_factor=6.0,
    )
    return _seeded(transformers.CLIPModel, config)


def whisper() -> PreTrainedModel:
    """An encoder of 24 frames of 8 mel bins as 12 positions, and a decoder."""
    config = transformers.WhisperConfig(
        **SMALL,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=24,
        decoder_start_token_id=3,
        init_std=0.3,
    )
    return _seeded(transformers.WhisperForConditionalGeneration, config)


def gemma3() -> PreTrainedModel:
    """Grouped heads with norms of their own; a window of 4 in the first layer, none in the
    second."""
    config = transformers.Gemma3TextConfig(
        **WIDE,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        max_position_embeddings=64,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    )
    return _seeded(transformers.Gemma3ForCausalLM, config)


def qwen3() -> PreTrainedModel:
    """Rotary embeddings, grouped heads, and a norm over each head of q and k."""
    config = transformers.Qwen3Config(
        **WIDE,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )
    return _seeded(transformers.Qwen3ForCausalLM, config)


def olmo2() -> PreTrainedModel:
    """One norm over all heads of q, so that every head depends on all of W_Q."""
    config = transformers.Olmo2Config(
        **WIDE,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
    )
    return _seeded(transformers.Olmo2ForCausalLM, config)


def gpt_neox() -> PreTrainedModel:
    """q, k and v of a head beside each other in one layer; rotary embeddings on a quarter of it."""
    config = transformers.GPTNeoXConfig(
        **WIDE,
        intermediate_size=48,
        num_attention_heads=4,
        max_position_embeddings=64,
        use_parallel_residual=True,
    )
    return _seeded(transformers.GPTNeoXForCausalLM, config)


def mistral() -> PreTrainedModel:
    """A window of 4 in every layer."""
    config = transformers.MistralConfig(
        **WIDE,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        sliding_window=4,
    )
    return _seeded(transformers.MistralForCausalLM, config)


def wav2vec2() -> PreTrainedModel:
    """Reads a raw waveform."""
    config = transformers.Wav2Vec2Config(
        **{**TOWER, **SMALL},
        conv_dim=(8,),
        conv_stride=(4,),
        conv_kernel=(4,),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        feat_extract_norm="layer",
    )
    return _seeded(transformers.Wav2Vec2Model, config)


def save(model: PreTrainedModel, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory


class Attending(nn.Module):
    """One attention layer over an embedding, written by hand; `how` computes the attention."""

    def __init__(self, how: str, *, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.how, self.heads = how, heads
        self.embed = nn.Embedding(96, dim)
        self.attn = self.Layer(how, dim, heads)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.attn(self.embed(input_ids))

    class Layer(nn.Module):
        def __init__(self, how: str, dim: int, heads: int) -> None:
            super().__init__()
            self.how, self.heads = how, heads
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for proj in (self.q_proj, self.k_proj, self.v_proj)
            )
            if self.how == "softmax":
                P = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1)
                return (P @ v).transpose(1, 2).flatten(2)
            dropout = 0.1 if self.how == "dropout" else 0.0
            out = F.scaled_dot_product_attention(q, k, v, None, dropout, is_causal=True)
            return out.transpose(1, 2).flatten(2)


class Twice(nn.Module):
    """One attention layer run twice, which attends only every other time when `lazy`."""

    def __init__(self, *, lazy: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 16)
        self.attn = Attending.Layer("sdpa", 16, 2)
        self.lazy = lazy

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.attn(self.embed(input_ids))
        self.attn.how = "softmax" if self.lazy else "sdpa"
        return self.attn(x)


class Split(nn.Module):
    """Projections in a module of their own, attention in their parent (`attends`), or nowhere."""

    def __init__(self, *, attends: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 16)
        self.project = self.Project()
        self.attends = attends

    def forward(self, input_ids: Tensor) -> Tensor:
        q, k, v = self.project(self.embed(input_ids))
        return F.scaled_dot_product_attention(q, k, v) if self.attends else v

    class Project(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            heads = self.qkv(x).unflatten(-1, (6, 8)).transpose(1, 2)
            return heads.chunk(3, dim=1)


def _seeded(cls: type[PreTrainedModel], config: transformers.PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return cls(config).eval()
