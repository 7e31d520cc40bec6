"""Writing a network as others read it: a Hugging Face directory, or a state dict with its factory.

Decoders are written as LlamaForCausalLM and GPT2LMHeadModel have them, in float32; what GPT-2 has
and ours has not (biases) is zero. A denoiser's directory holds its weights, the configuration that
`numdev.training.models:denoiser` takes, and inputs for an audit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from numdev.errors import MeasurementError
from numdev.training.config import ModelConfig, folder_of
from numdev.training.data import BOS_ID, EOS_ID, Data
from numdev.training.models import LAYER_EPS, RMS_EPS, ROPE_THETA, SPREAD, Network, noisy

FOLDER = "checkpoints"
AUDITED = 8
"""Images among a denoiser's inputs for an audit."""


def place(directory: Path, variant: str, seed: int, step: int) -> Path:
    """Where a checkpoint of a run in `directory` goes."""
    return directory / FOLDER / f"{folder_of(variant)}-seed{seed}-step{step}"


def write(
    network: Network, model: ModelConfig, data: Data, path: Path, about: Mapping[str, Any]
) -> None:
    """Write the network into the directory `path`, with its tokenizer if it has one of its own and
    how it was trained (`training.json`). Raises MeasurementError where there is no room."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {n: x.detach().float().cpu().contiguous() for n, x in network.state_dict().items()}
    if model.kind == "gpt2":
        tensors = _as_gpt2(tensors)
    _write_json(path / "config.json", _configuration(model, data))
    if data.tokenizer is not None:
        data.tokenizer.save_pretrained(path)
    if model.kind == "dit":
        batch = {name: x[:AUDITED].cpu() for name, x in data.batch(0, 1).items()}
        images, times = noisy(**batch).contiguous(), batch["times"].contiguous()
        _save({"images": images, "times": times}, path / "inputs.safetensors")
    _save(tensors, path / "model.safetensors")
    (path / "model.safetensors").chmod(0o644)  # written readable by its owner alone
    _write_json(path / "training.json", about)


def _configuration(model: ModelConfig, data: Data) -> dict[str, Any]:
    """`config.json`: transformers' for a decoder, else our own."""
    if model.kind == "dit":
        return model.model_dump(exclude_none=True)
    special = data.tokenizer is not None
    common = {
        "vocab_size": data.vocabulary,
        "bos_token_id": BOS_ID if special else None,
        "eos_token_id": EOS_ID if special else None,
        "tie_word_embeddings": True,
        "initializer_range": SPREAD,
        "dtype": "float32",
    }
    if model.kind == "llama":
        return {
            **common,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": model.width,
            "intermediate_size": model.hidden,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads or model.heads,
            "head_dim": model.head_dim,
            "max_position_embeddings": model.context,
            "hidden_act": "silu",
            "rms_norm_eps": RMS_EPS,
            "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
            "attention_bias": False,
            "mlp_bias": False,
        }
    return {
        **common,
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": model.width,
        "n_inner": model.hidden,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_positions": model.context,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": LAYER_EPS,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    }


def _as_gpt2(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict as GPT2LMHeadModel's: Conv1D keeps [in, out], and every bias is there."""
    found = {}
    for name, x in tensors.items():
        conv = ".attn.c_" in name or ".mlp.c_" in name
        found[name] = x.t().contiguous() if conv and x.ndim == 2 else x
        bias = name.removesuffix("weight") + "bias"
        if name.endswith("weight") and bias not in tensors and (conv or ".ln_" in name):
            found[bias] = torch.zeros(x.shape[0])
    return found


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise MeasurementError(
            f"{path}: {error}", hint="is there room, and may you write there?"
        ) from error


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
