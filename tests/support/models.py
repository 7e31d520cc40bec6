"""Tiny models that tests build on the spot: real architectures, and modules written by
hand.

Weights are drawn far wider than a trained model's start: with scores near zero a soft cap
or a wrong scale would hardly move the output."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

SMALL = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE = {**SMALL, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
HEADS = {"intermediate_size": 48, "num_attention_heads": 4}
DECODER = {**WIDE, **HEADS, "max_position_embeddings": 64}
GROUPED = {**DECODER, "num_key_value_heads": 2, "head_dim": 8}
T5 = {**SMALL, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"initializer_factor": 1.0, "decoder_start_token_id": 0}
SEQ2SEQ = {**SMALL, "d_model": 32, "init_std": 0.3, "max_position_embeddings": 64}
for part in ("encoder", "decoder"):
    SEQ2SEQ |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 48}
TOWER = {"hidden_size": 32, "num_hidden_layers": 2, **HEADS}
# Ten tokens: nine patches and one for the class
IMAGE = {"image_size": 12, "patch_size": 4}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# Architecture and configuration, by name.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {**WIDE, "n_head": 4, "n_positions": 64}),
    # Grouped heads, 4 queries to a key.
    "llama": (
        "LlamaForCausalLM",
        {**DECODER, "num_attention_heads": 8, "num_key_value_heads": 2},
    ),
    "bert": ("BertForMaskedLM", DECODER),
    # A learned position bias is added to the scores.
    "t5": ("T5EncoderModel", T5),
    "t5_seq2seq": ("T5ForConditionalGeneration", T5),
    # Calls SDPA itself, past transformers' attention interface; one key head for all
    # queries.
    "falcon": (
        "FalconForCausalLM",
        {**WIDE, "num_attention_heads": 4, "max_position_embeddings": 64}
        | {"multi_query": True, "alibi": False},
    ),
    # A window of 2 tokens to either side in its second layer.
    "modernbert": (
        "ModernBertForMaskedLM",
        {**DECODER, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
    ),
    # A soft cap that bites; a window of 4 in the first layer, none in the second.
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            **GROUPED,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 0.5,
            "sliding_window": 4,
        },
    ),
    # Norms of q and k; the same windows.
    "gemma3": (
        "Gemma3ForCausalLM",
        {**GROUPED, "query_pre_attn_scalar": 8, "sliding_window": 4}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    # Attention sinks, and a window of 4 in the first layer.
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            **GROUPED,
            "intermediate_size": 16,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        }
        | {"sliding_window": 4, "rope_parameters": ROPE},
    ),
    "bart": (
        "BartForConditionalGeneration",
        {**SEQ2SEQ, "decoder_start_token_id": 2, "forced_eos_token_id": None},
    ),
    # Neither supports SDPA: their modules do not say truly whether they are causal, and
    # only the masks do. An encoder-decoder, its experts left out; an encoder.
    "nllb_moe": (
        "NllbMoeForConditionalGeneration",
        {**SEQ2SEQ, "decoder_start_token_id": 2, "forced_eos_token_id": None}
        | {"encoder_sparse_step": 0, "decoder_sparse_step": 0},
    ),
    "splinter": ("SplinterModel", DECODER),
    # An encoder of 24 frames of 8 mel bins as 12 positions, and a decoder.
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **SEQ2SEQ,
            "num_mel_bins": 8,
            "max_source_positions": 12,
            "max_target_positions": 24,
        }
        | {"decoder_start_token_id": 3},
    ),
    "vit": ("ViTForImageClassification", {**TOWER, **IMAGE, "initializer_range": 0.3}),
    # A causal tower for text, and one for images.
    "clip": (
        "CLIPModel",
        {
            "text_config": {**TOWER, **SMALL, "max_position_embeddings": 64},
            "vision_config": {**TOWER, **IMAGE},
            "projection_dim": 16,
            "initializer_factor": 6.0,
        },
    ),
    # Rotary embeddings, grouped heads, and a norm over each head of q and k.
    "qwen3": ("Qwen3ForCausalLM", GROUPED),
    # One norm over all heads of q, so that every head depends on all of W_Q.
    "olmo2": ("Olmo2ForCausalLM", {**DECODER, "num_key_value_heads": 4}),
    # q, k and v of a head beside each other in one layer; rotary embeddings on a quarter
    # of it.
    "gpt_neox": ("GPTNeoXForCausalLM", {**DECODER, "use_parallel_residual": True}),
    # A window of 4 in every layer.
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 4}),
    # Every expert is stored by itself, and the model has them stacked.
    "mixtral": (
        "MixtralForCausalLM",
        {
            **DECODER,
            "intermediate_size": 16,
            "num_key_value_heads": 2,
            "num_local_experts": 3,
        },
    ),
    # Each query sees 4 keys, which the model chooses by their scores in a head of their
    # own.
    "deepseek_v32": (
        "DeepseekV32ForCausalLM",
        {
            **DECODER,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        }
        | {
            "qk_nope_head_dim": 8,
            "index_topk": 4,
            "index_n_heads": 2,
            "index_head_dim": 16,
        }
        | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}
        | {
            "moe_intermediate_size": 16,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
        },
    ),
    # A linear attention, called self_attn too, before one with a softmax.
    "minimax": (
        "MiniMaxForCausalLM",
        {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 8}
        | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    # A recurrent block, and attention with a window of 4.
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM",
        {**GROUPED, "num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 4}
        | {"block_types": ["recurrent", "attention"]},
    ),
    # Attends by hand; and as its rotary embedding counts from the right, later tokens
    # matter.
    "roformer": (
        "RoFormerForCausalLM",
        {**DECODER, "is_decoder": True, "embedding_size": 32},
    ),
    # State spaces alone.
    "mamba2": (
        "Mamba2ForCausalLM",
        {
            **WIDE,
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 8,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
    # One layer that runs twice.
    "albert": ("AlbertModel", {**DECODER, "embedding_size": 16}),
    # Reads a raw waveform.
    "wav2vec2": (
        "Wav2Vec2Model",
        {**TOWER, **SMALL, "conv_dim": (8,), "conv_stride": (4,), "conv_kernel": (4,)}
        | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
        | {"feat_extract_norm": "layer"},
    ),
}


def __getattr__(name: str) -> Callable[..., PreTrainedModel]:
    """`models.llama(**changes)` builds a model of the table."""
    if name not in MODELS:
        raise AttributeError(name)
    return partial(build, name)


def build(name: str, **changes: Any) -> PreTrainedModel:
    """A model of the table in eval mode, the same weights every time."""
    kind, fields = MODELS[name]
    architecture = getattr(transformers, kind)
    config = architecture.config_class(**{**fields, **changes})
    torch.manual_seed(0)
    return architecture(config).eval()


def save(model: PreTrainedModel, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory


def saved(name: str, directory: Path, **changes: Any) -> Path:
    return save(build(name, **changes), directory / name)


class Attending(nn.Module):
    """One attention layer over an embedding; `how` attends, `then` does in a second
    run."""

    def __init__(
        self, how: str, then: str = "", *, dim: int = 16, heads: int = 2
    ) -> None:
        super().__init__()
        self.embed, self.then = nn.Embedding(96, dim), then
        self.attn = self.Layer(how, dim, heads)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.attn(self.embed(input_ids))
        if not self.then:
            return x
        self.attn.how = self.then
        return self.attn(x)

    class Layer(nn.Module):
        def __init__(self, how: str, dim: int, heads: int) -> None:
            super().__init__()
            self.how, self.heads = how, heads
            self.q_proj, self.k_proj, self.v_proj = (
                nn.Linear(dim, dim) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for proj in (self.q_proj, self.k_proj, self.v_proj)
            )
            if self.how == "softmax":
                out = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v
            elif self.how == "aten":  # below what numdev meets
                out = torch.ops.aten.scaled_dot_product_attention(q, k, v)
            else:
                dropout = 0.1 if self.how == "dropout" else 0.0
                out = F.scaled_dot_product_attention(
                    q, k, v, None, dropout, is_causal=True
                )
            return out.transpose(1, 2).flatten(2)


def moving() -> nn.Module:
    """A model whose output moves with its neighbours in the batch: its encoder takes the
    first dimension for the tokens, and is fed [batch, length]."""
    return Encoder(batch_first=False)


def still() -> nn.Module:
    """The same, told which dimension is which."""
    return Encoder(batch_first=True)


def backwards() -> nn.Module:
    """A decoder whose tokens see only themselves and later ones."""
    return Encoder(batch_first=True, ahead=True)


class Encoder(nn.Module):
    def __init__(self, *, batch_first: bool, ahead: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ahead = ahead
        self.embed = nn.Embedding(96, 16)
        layer = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.0, batch_first=batch_first
        )
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x, mask = self.embed(input_ids), None
        if self.ahead:
            hidden = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype)
            mask = hidden.tril(-1)
        return self.encoder(x, mask=mask)
