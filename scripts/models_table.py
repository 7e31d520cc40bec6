"""Audit a tiny model, with random weights, of each architecture most in use; print the
table.

    python scripts/models_table.py [recent | ARCHITECTURE ...]

`recent`: those of 2025 and 2026. Each is built from transformers' own configuration made
small, saved, and audited from there: the table of docs/models.md says how many calls it
makes and which layers have no softmax, or the line of the refusal."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from numdev.cli.main import main as numdev

SMALL: dict[str, Any] = {
    **{"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{
        "decoder_start_token_id": 1,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "n_layer": 2,
    },
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "n_head": 4, "n_embd": 32},
    **{
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "n_positions": 64,
        "head_dim": 8,
    },
    **{"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dim": 32},
    **{
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "n_layers": 2,
    },
    **{
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "n_heads": 4,
    },
    **{
        "hidden_dim": 48,
        "image_size": 16,
        "patch_size": 4,
        "ffn_dim": 48,
        "embedding_size": 32,
    },
    **{"word_embed_proj_dim": 32, "num_mel_bins": 8, "max_source_positions": 12},
    **{"num_local_experts": 2, "num_experts": 2, "moe_intermediate_size": 16},
    **{
        "num_experts_per_tok": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
    },
    **{"qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1},
    **{"topk_group": 1, "projection_dim": 16, "max_target_positions": 24},
}
# Of recent models: experts, state spaces, linear attention, and keys that are chosen.
RECENT_SMALL: dict[str, Any] = {
    **{
        "n_shared_experts": 1,
        "num_shared_experts": 1,
        "shared_expert_intermediate_size": 16,
    },
    **{"num_experts_per_token": 2, "first_k_dense_replace": 1, "block_size": 8},
    **{"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16, "sliding_window": 4},
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_expand": 2},
    **{"mamba_n_groups": 1, "linear_num_value_heads": 4, "linear_num_key_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_heads": 4},
    **{"linear_head_dim": 8},
}
INSTEAD: dict[str, dict[str, Any]] = {  # where those would make no model
    "DeepseekV2ForCausalLM": {"num_key_value_heads": 4},
    "DeepseekV3ForCausalLM": {"num_key_value_heads": 4},
    "GPTJForCausalLM": {"rotary_dim": 4},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "SwinModel": {
        "num_heads": [2, 4],
        "depths": [1, 1],
        "embed_dim": 16,
        "window_size": 2,
    },
}
EVERY_HEAD = {"num_key_value_heads": 4}  # latent attention, whose keys are of every head
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}  # a layer of each kind
CONVOLVING = {"layer_types": ["conv", "full_attention"]}
RECENT_INSTEAD: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "DeepseekV32ForCausalLM",
            "Glm4MoeLiteForCausalLM",
            "GlmMoeDsaForCausalLM",
            "HYV4ForCausalLM",
            "LongcatFlashForCausalLM",
            "YoutuForCausalLM",
        ),
        EVERY_HEAD,
    ),
    **dict.fromkeys(
        (
            "MiniMaxForCausalLM",
            "OlmoHybridForCausalLM",
            "Qwen3NextForCausalLM",
            "Qwen3_5ForCausalLM",
            "Qwen3_5MoeForCausalLM",
        ),
        LINEAR,
    ),
    **dict.fromkeys(
        ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm3ForCausalLM"),
        CONVOLVING,
    ),
    "KimiLinearForCausalLM": {**EVERY_HEAD, **LINEAR},
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"]},
    "JambaForCausalLM": {
        **{"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_period": 2},
        **{"mamba_dt_rank": 4},
    },
    "RecurrentGemmaForCausalLM": {
        "block_types": ["recurrent", "attention"],
        "lru_width": 32,
    },
    "FalconH1ForCausalLM": {"mamba_d_ssm": 64},
}
NAMES = [
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "PhiForCausalLM",
    "Phi3ForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "GPTJForCausalLM",
    "GPTNeoForCausalLM",
    "OPTForCausalLM",
    "BloomForCausalLM",
    "FalconForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
    "GPTBigCodeForCausalLM",
    "CohereForCausalLM",
    "OlmoForCausalLM",
    "Olmo2ForCausalLM",
    "GraniteForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4ForCausalLM",
    "SmolLM3ForCausalLM",
    "MptForCausalLM",
    "GptOssForCausalLM",
    "MambaForCausalLM",
    "BertForMaskedLM",
    "RobertaForMaskedLM",
    "XLMRobertaForMaskedLM",
    "DistilBertForMaskedLM",
    "AlbertForMaskedLM",
    "ElectraForMaskedLM",
    "MPNetForMaskedLM",
    "ModernBertForMaskedLM",
    "DebertaV2ForMaskedLM",
    "T5ForConditionalGeneration",
    "MT5ForConditionalGeneration",
    "BartForConditionalGeneration",
    "MarianMTModel",
    "PegasusForConditionalGeneration",
    "ViTForImageClassification",
    "DeiTForImageClassification",
    "Dinov2Model",
    "SwinModel",
    "WhisperForConditionalGeneration",
    "Wav2Vec2Model",
    "HubertModel",
    "CLIPModel",
    "SiglipModel",
]

RECENT = [
    "AfmoeForCausalLM",
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "BambaForCausalLM",
    "Cohere2ForCausalLM",
    "Cohere2MoeForCausalLM",
    "DINOv3ViTModel",
    "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM",
    "DiffLlamaForCausalLM",
    "DogeForCausalLM",
    "Dots1ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "EuroBertForMaskedLM",
    "Exaone4ForCausalLM",
    "ExaoneMoeForCausalLM",
    "FalconH1ForCausalLM",
    "FlexOlmoForCausalLM",
    "Gemma4ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "GraniteSWAForCausalLM",
    "HYV3ForCausalLM",
    "HYV4ForCausalLM",
    "HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "Jais2ForCausalLM",
    "JambaForCausalLM",
    "KimiLinearForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Lfm3ForCausalLM",
    "Llama4ForCausalLM",
    "LongcatFlashForCausalLM",
    "MiMoV2FlashForCausalLM",
    "MiniMaxForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM",
    "MinistralForCausalLM",
    "ModernBertDecoderForCausalLM",
    "NanoChatForCausalLM",
    "NemotronHForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoHybridForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "RecurrentGemmaForCausalLM",
    "SeedOssForCausalLM",
    "SolarOpenForCausalLM",
    "VaultGemmaForCausalLM",
    "YoutuForCausalLM",
    "ZayaForCausalLM",
]


def audited(name: str, folder: Path) -> str:
    """What came of an architecture, in one line."""
    wanted = SMALL | (RECENT_SMALL if name in RECENT else {})
    try:
        cls = getattr(transformers, name)
        fields = cls.config_class().to_dict()
        small = {key: value for key, value in wanted.items() if key in fields}
        for part in ("text_config", "vision_config"):
            if isinstance(fields.get(part), dict):
                of_part = {
                    key: value for key, value in wanted.items() if key in fields[part]
                }
                small[part] = of_part
        small |= INSTEAD.get(name, {}) | RECENT_INSTEAD.get(name, {})
        torch.manual_seed(0)
        cls(cls.config_class(**small)).save_pretrained(folder / name)
    except Exception as error:
        return f"not built: {type(error).__name__}: {str(error).splitlines()[0][:90]}"
    errors, code = io.StringIO(), 0
    arguments = ["audit", str(folder / name), "--kernel", "emulated", "--length", "16"]
    arguments += [
        "--sequences",
        "2",
        "--device",
        "cpu",
        "-q",
        "-o",
        str(folder / f"{name}-out"),
    ]
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            numdev(arguments)
        except SystemExit as stop:
            code = int(stop.code or 0)
    if code:
        line = next(
            (x for x in errors.getvalue().splitlines() if "error: " in x), f"exit {code}"
        )
        return (
            line.partition("error: ")[2].replace(f"{folder}/", "").replace("|", "/")
            or line
        )
    report = json.loads((folder / f"{name}-out" / "report.json").read_text())
    left_out = report["provenance"]["source"].get("not_audited")
    return f"audited: {len(report['cases'])} calls" + (
        f"; not: {left_out}" if left_out else ""
    )


def main() -> None:
    print("| architecture | audited, or why not |\n|---|---|")
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        for name in RECENT if sys.argv[1:] == ["recent"] else sys.argv[1:] or NAMES:
            print(f"| {name} | {audited(name, Path(folder))} |", flush=True)


if __name__ == "__main__":
    main()
