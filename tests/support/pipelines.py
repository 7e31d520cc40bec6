"""Tiny diffusers pipelines, made and saved where a test wants them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
)

WORDS = ("a", "cat", "dog", "on", "red", "mat", "small", "house")


def tokenizer(directory: Path) -> CLIPTokenizer:
    """Of byte letters and a few words; it is saved with the pipeline."""
    directory.mkdir(parents=True, exist_ok=True)
    letters = [chr(c) for c in range(97, 123)]
    tokens = [
        *letters,
        *(f"{x}</w>" for x in letters),
        *(f"{w}</w>" for w in WORDS if len(w) > 1),
    ]
    vocabulary = {
        t: i for i, t in enumerate([*tokens, "<|startoftext|>", "<|endoftext|>"])
    }
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(
        str(directory / "vocab.json"), str(directory / "merges.txt"), model_max_length=12
    )


def vae(channels: int = 4, **more: Any) -> diffusers.AutoencoderKL:
    """With attention of its own, in its middle block."""
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8), in_channels=3, out_channels=3, latent_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4, **more,
    )  # fmt: skip


def text_config(words: CLIPTokenizer) -> CLIPTextConfig:
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    tokens = {name: getattr(words, name) for name in ("bos_token_id", "eos_token_id")}
    read = {
        "vocab_size": len(words),
        "max_position_embeddings": 12,
        "num_attention_heads": 2,
    }
    return CLIPTextConfig(
        **size, **tokens, **read, pad_token_id=words.pad_token_id, projection_dim=16
    )


def stable_diffusion(directory: Path, scheduler: Any = None) -> Path:
    """A UNet with self and cross attention, a CLIP text encoder, a VAE; guided by
    default."""
    torch.manual_seed(0)
    words = tokenizer(directory / "made")
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, norm_num_groups=8,
        block_out_channels=(16, 32), cross_attention_dim=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        mid_block_type="UNetMidBlock2DCrossAttn",
        attention_head_dim=2,  # the number of heads, in this class
    )  # fmt: skip
    pipeline = diffusers.StableDiffusionPipeline(
        vae=vae(), text_encoder=CLIPTextModel(text_config(words)), tokenizer=words, unet=unet,
        scheduler=scheduler or diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    return saved(pipeline, directory)


def saved(pipeline: diffusers.DiffusionPipeline, directory: Path) -> Path:
    pipeline.save_pretrained(directory / "pipeline", safe_serialization=True)
    return directory / "pipeline"


def dit(directory: Path) -> Path:
    """A transformer of two layers for classes, without text."""
    torch.manual_seed(0)
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2,
        sample_size=8, patch_size=2, num_embeds_ada_norm=1000,
    )  # fmt: skip
    scheduler = diffusers.DDIMScheduler()
    pipeline = diffusers.DiTPipeline(
        transformer=transformer, vae=vae(), scheduler=scheduler
    )
    return saved(pipeline, directory)


def sd3(directory: Path) -> Path:
    """A transformer with joint attention, and flow matching; two CLIP and a T5 text
    encoder."""
    torch.manual_seed(0)
    words = tokenizer(directory / "made")
    t5 = {"vocab_size": len(words), "d_model": 32, "d_kv": 8, "d_ff": 32, "num_heads": 2}
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2,
        attention_head_dim=8, num_attention_heads=2, joint_attention_dim=32,
        caption_projection_dim=16, pooled_projection_dim=32, pos_embed_max_size=8,
    )  # fmt: skip
    clips = (CLIPTextModelWithProjection(text_config(words)) for _ in range(2))
    pipeline = diffusers.StableDiffusion3Pipeline(
        transformer=transformer, vae=vae(shift_factor=0.1),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        **dict(zip(("text_encoder", "text_encoder_2"), clips, strict=True)),
        text_encoder_3=T5EncoderModel(T5Config(**t5, num_layers=2)),
        tokenizer=words, tokenizer_2=words, tokenizer_3=words,
    )  # fmt: skip
    return saved(pipeline, directory)
