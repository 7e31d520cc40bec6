"""What a model takes besides text: named tensors out of a file, and drawn ones where none is given.

A model's inputs are keyword arguments of its `forward`. Which of them a run needs follows from the
model: its main input, the images of a model with two towers, what the decoder of an encoder-decoder
model reads. Images and spectrograms are drawn from N(0, 1), as processors hand them over after
normalising; nothing in them looks like a photograph or a voice. Numbers come from the seed alone.

Text and token ids are `numdev.sources.prompts`' business.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from numdev.errors import UsageError, closest
from numdev.sources.files import read_safetensors
from numdev.sources.prompts import Prompt, drawn

GIVE = "give it with --inputs FILE, a safetensors file with a tensor of that name"
# What stands for an input: given the one, the other is not needed.
INSTEAD = {"input_ids": "inputs_embeds", "decoder_input_ids": "decoder_inputs_embeds"}


def wanted(model: nn.Module, *, given: Collection[str] = (), generates: bool = False) -> list[str]:
    """The arguments a run of the model needs beside the `given` ones.

    For a model that is not of transformers: the arguments without a default. A model that
    generates makes its decoder's inputs itself.
    """
    parameters = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    if config is None or main is None:
        names = [n for n, p in parameters.items() if p.default is p.empty and not _open_ended(p)]
    else:
        names = [main]
        if "pixel_values" in parameters and _has_two_towers(config):
            names.append("pixel_values")
        if config.is_encoder_decoder and "decoder_input_ids" in parameters and not generates:
            names.append("decoder_input_ids")
    present = {name for name in names if INSTEAD.get(name) in given} | set(given)
    return list(dict.fromkeys(name for name in names if name not in present))


def read(path: Path, model: nn.Module) -> Prompt:
    """The tensors of a safetensors file, named after the arguments of the model's forward.

    Raises UsageError for a file that is not there, is empty, or names an argument the model does
    not have; MeasurementError for one that is damaged.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file", hint="--inputs takes a safetensors file")
    inputs = dict(sorted(read_safetensors(path)))
    if not inputs:
        raise UsageError(f"{path}: holds no tensor", hint="name tensors after the model's inputs")
    parameters = inspect.signature(model.forward).parameters
    takes = [name for name, p in parameters.items() if not _open_ended(p)]
    for name, tensor in inputs.items():
        if name not in takes:
            raise UsageError(
                f"{path}: {type(model).__name__} takes no input {name!r}", hint=closest(name, takes)
            )
        if tensor.ndim == 0 or 0 in tensor.shape:
            raise UsageError(
                f"{path}: {name} has shape {list(tensor.shape)}",
                hint="its first axis is the batch, and none may be empty",
            )
    return Prompt(inputs=inputs, description=f"{' and '.join(inputs)} of {path.name}")


def draw(name: str, model: nn.Module, *, count: int, length: int, seed: int) -> Prompt:
    """The argument `name` of the model, for `count` sequences, drawn with `seed`.

    `length` is the most a decoder reads. Raises UsageError for an argument that numdev cannot draw,
    or for which the model's config does not give the size.
    """
    if name == "decoder_input_ids":
        return _draw_ids(model, count=count, length=length, seed=seed)
    shape, what = _spectrogram(model) if name == "input_features" else _image(model)
    if name not in ("input_features", "pixel_values") or shape is None:
        raise UsageError(
            f"{type(model).__name__} reads {name}, which numdev cannot draw for it", hint=GIVE
        )
    generator = torch.Generator().manual_seed(seed)
    size = " x ".join(str(n) for n in shape)
    return Prompt(
        inputs={name: torch.randn(count, *shape, generator=generator)},
        description=f"{count} {what} of {size} drawn with seed {seed}",
    )


def shifted(prompt: Prompt, model: nn.Module) -> Prompt:
    """What the decoder reads beside such a text: the same text, one place to the right.

    It begins with the config's `decoder_start_token_id`, as in training on copying the text.
    """
    config: Any = model.config
    start = next(
        (x for x in (config.decoder_start_token_id, config.pad_token_id) if x is not None), 0
    )
    ids, mask = prompt.inputs["input_ids"], prompt.inputs.get("attention_mask")
    inputs = {"decoder_input_ids": _after(start, ids)}
    if mask is not None and "decoder_attention_mask" in inspect.signature(model.forward).parameters:
        inputs["decoder_attention_mask"] = _after(1, mask)
    return Prompt(inputs=inputs, description="the same shifted right for the decoder")


def together(prompts: list[Prompt]) -> Prompt:
    """Several inputs of one run as one prompt."""
    inputs: dict[str, Tensor] = {}
    for prompt in prompts:
        inputs |= prompt.inputs
    return Prompt(inputs=inputs, description=", ".join(p.description for p in prompts))


def _after(first: int, x: Tensor) -> Tensor:
    return torch.cat([torch.full_like(x[:, :1], first), x[:, :-1]], dim=1)


def _draw_ids(model: nn.Module, *, count: int, length: int, seed: int) -> Prompt:
    text: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator,union-attr]
    limit = getattr(text, "max_target_positions", None) or getattr(
        text, "max_position_embeddings", None
    )
    length = min(length, limit or length)
    ids = drawn(text.vocab_size, length=length, sequences=count, seed=seed)
    return Prompt(
        inputs={"decoder_input_ids": ids.inputs["input_ids"]},
        description=f"{ids.description} for the decoder",
    )


def _image(model: nn.Module) -> tuple[tuple[int, ...] | None, str]:
    """[channels, height, width] of the images the model's config speaks of."""
    config: Any = getattr(model, "config", None)
    for place in (config, getattr(config, "vision_config", None), getattr(config, "encoder", None)):
        size = getattr(place, "image_size", None)
        height, width = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)
        if isinstance(height, int) and isinstance(width, int):
            return (getattr(place, "num_channels", 3), height, width), "images"
    return None, "images"


def _spectrogram(model: nn.Module) -> tuple[tuple[int, ...] | None, str]:
    """[mel bins, frames], as Whisper has them: two frames to a position of the encoder."""
    config: Any = getattr(model, "config", None)
    bins = getattr(config, "num_mel_bins", None)
    positions = getattr(config, "max_source_positions", None)
    if isinstance(bins, int) and isinstance(positions, int):
        return (bins, 2 * positions), "spectrograms"
    return None, "spectrograms"


def _has_two_towers(config: Any) -> bool:
    """A text and a vision model side by side, as in CLIP; in others, images replace tokens."""
    towers = all(hasattr(config, name) for name in ("text_config", "vision_config"))
    return towers and not any(hasattr(config, n) for n in ("image_token_id", "image_token_index"))


def _open_ended(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)


def first_axis(inputs: Mapping[str, Tensor]) -> int | None:
    """How many sequences given inputs hold; None where nothing is given."""
    return next((x.shape[0] for x in inputs.values()), None)
