"""Writes a network as a Hugging Face directory.

It is written as LlamaForCausalLM or GPT2LMHeadModel have it, in float32; GPT-2's biases
are zero."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from numdev.sources.tensor_files import naming
from numdev.studies.training.config import ModelConfig, folder_prefix
from numdev.studies.training.networks import (
    LAYER_EPS,
    RMS_EPS,
    ROPE_THETA,
    SPREAD,
    Network,
)
from numdev.studies.training.token_batches import BOS_ID, EOS_ID, Tokens

FOLDER = "checkpoints"
NAMES = {
    "llama": {
        "tokens": "model.embed_tokens",
        "blocks": "model.layers",
        "final": "model.norm",
        "norm_1": "input_layernorm",
        "norm_2": "post_attention_layernorm",
        "attention": "self_attn",
        "q": "q_proj",
        "k": "k_proj",
        "v": "v_proj",
        "out": "o_proj",
        "gate": "gate_proj",
        "up": "up_proj",
        "down": "down_proj",
    },
    "gpt2": {
        "tokens": "transformer.wte",
        "positions": "transformer.wpe",
        "blocks": "transformer.h",
        "final": "transformer.ln_f",
        "norm_1": "ln_1",
        "norm_2": "ln_2",
        "attention": "attn",
        "qkv": "c_attn",
        "out": "c_proj",
        "up": "c_fc",
        "down": "c_proj",
    },
}
"""transformers' names of our parts."""


def checkpoint_folder(directory: Path, variant: str, seed: int, step: int) -> Path:
    """Returns the path of a checkpoint's folder in a run's directory,
    `checkpoints/NAME-seed0-step100`; nothing is created. NAME is
    `folder_prefix(variant)`."""
    return directory / FOLDER / f"{folder_prefix(variant)}-seed{seed}-step{step}"


def write_checkpoint(
    network: Network,
    model: ModelConfig,
    data: Tokens,
    path: Path,
    about: Mapping[str, object],
) -> None:
    """Writes the network into the directory `path`, which is made: `config.json`,
    `model.safetensors` in float32, the files of a trained tokenizer where `data` has one,
    and `about` (how it was trained, plain data) in `training.json`. Existing files of
    these names are replaced, others stay. Raises MeasurementError where the weights
    cannot be written, OSError where another file or the directory cannot, and ValueError
    for an `about` with NaN or infinity."""
    path.mkdir(parents=True, exist_ok=True)
    if data.tokenizer is not None:
        data.tokenizer.save_pretrained(path)
    _transformers_config(model, data).save_pretrained(path)
    weights = path / "model.safetensors"
    with naming(weights, "cannot be written", "is there room, and may you write there?"):
        save_file(
            _transformers_state(network, model.kind), weights, metadata={"format": "pt"}
        )
    weights.chmod(0o644)  # safetensors lets its owner alone read it
    described = json.dumps(about, indent=2, allow_nan=False) + "\n"
    (path / "training.json").write_text(described, encoding="utf-8")


def _transformers_config(model: ModelConfig, data: Tokens) -> Any:
    """Returns the configuration by which transformers loads the network: a LlamaConfig
    for the kind `llama`, else a GPT2Config."""
    import transformers

    library: Any = transformers
    special = data.tokenizer is not None
    common: dict[str, object] = {
        "vocab_size": data.vocabulary,
        "bos_token_id": BOS_ID if special else None,
        "eos_token_id": EOS_ID if special else None,
        "tie_word_embeddings": True,
        "initializer_range": SPREAD,
        "dtype": "float32",
    }
    if model.kind == "llama":
        return library.LlamaConfig(
            **common,
            architectures=["LlamaForCausalLM"],
            hidden_size=model.width,
            intermediate_size=model.hidden,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            num_key_value_heads=model.kv_heads or model.heads,
            max_position_embeddings=model.context,
            rms_norm_eps=RMS_EPS,
            rope_parameters={"rope_theta": ROPE_THETA, "rope_type": "default"},
        )
    return library.GPT2Config(
        **common,
        architectures=["GPT2LMHeadModel"],
        n_embd=model.width,
        n_inner=model.hidden,
        n_layer=model.layers,
        n_head=model.heads,
        n_positions=model.context,
        layer_norm_epsilon=LAYER_EPS,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    )


def _transformers_state(network: Network, kind: str) -> dict[str, Tensor]:
    """Returns the state dict, copied to the CPU in float32 where it is not there yet,
    under transformers' names. For `gpt2`, weights of linear layers are transposed to
    Conv1D's [in, out], and biases of zeros are added. `kind`: `llama` or `gpt2`."""
    state = {
        n: x.detach().float().cpu().contiguous() for n, x in network.state_dict().items()
    }
    if kind == "gpt2":
        linear = (".qkv.weight", ".out.weight", ".up.weight", ".down.weight")
        for name, x in list(state.items()):
            if name.endswith(linear):
                state[name] = x.t().contiguous()
            if name.endswith((*linear, "norm_1.weight", "norm_2.weight", "final.weight")):
                state[name.removesuffix("weight") + "bias"] = torch.zeros(x.shape[0])
    names = NAMES[kind]
    return {
        ".".join(names.get(part, part) for part in n.split(".")): x
        for n, x in state.items()
    }
