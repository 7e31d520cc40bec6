"""A Hugging Face checkpoint, opened lazily and safely, and the model it says it is.

It is `config.json` beside safetensors files or `pytorch_model.bin`, whole or sharded, or what
torch.distributed.checkpoint wrote. transformers builds the model from the config and the tensors
that `numdev.sources.files` read, so neither its search for files nor the network is in play.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from numdev.errors import MeasurementError, UsageError
from numdev.sources import files as storage
from numdev.sources.capture import attention_implementation
from numdev.sources.dcp import Weights, files_of, is_distributed, open_distributed, taken_off
from numdev.sources.files import blaming, quiet, read, read_json, some
from numdev.sources.streaming import Deferred, Stored

WHOLE = ("model.safetensors", "pytorch_model.bin")
ACCEPTED = "a Hugging Face directory: config.json with model.safetensors or pytorch_model.bin"
META = torch.device("meta")
TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model")
# Models that number positions from pad_token_id + 1, so that they read fewer than their table has.
POSITIONS_AFTER_PADDING = re.compile(
    "roberta|camembert|longformer|mpnet|xmod|luke|data2vec-text|layoutlmv3|lilt"
)


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Weights):
    """An opened checkpoint: its config is read, its weight files are found and can be opened."""

    config: Mapping[str, Any]

    @property
    def vocab_size(self) -> int | None:
        """How many token ids the model knows; None where the config does not say."""
        return size(self.config, "vocab_size")

    @property
    def max_length(self) -> int | None:
        """The longest sequence the model has positions for; None where the config sets none."""
        limit = size(self.config, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
        if limit and POSITIONS_AFTER_PADDING.search(str(self.config.get("model_type"))):
            return limit - int(self.config.get("pad_token_id") or 0) - 1
        return limit

    def identity(self) -> str:
        """SHA-256 over the names and contents of config.json and the weight files."""
        return storage.identity((self.path / "config.json", *self.files))

    def load_model(self, *, dtype: torch.dtype, device: str) -> nn.Module:
        """The model in eval mode, its weights cast to `dtype`, its attention open to capture.
        Raises MeasurementError for an unknown architecture, and names weights that are missing, of
        the wrong shape, or of no use to the model; heads it does not have are passed over."""
        return self._built(self._state(), dtype).to(device).eval()

    def deferred_model(self, *, dtype: torch.dtype) -> nn.Module:
        """The same model on the CPU with a `Deferred` for every stored weight. Raises as
        `load_model`, and UsageError where it cannot be streamed."""
        if not self.can_be_streamed:
            file = next((f for f in self.files if f.suffix in storage.PICKLES), self.path)
            raise UsageError(
                f"{file}: a model is streamed from safetensors files, and this is a "
                + ("distributed checkpoint" if self.split else "pickle"),
                hint="save it with save_pretrained, which writes safetensors",
            )
        if find_spec("accelerate") is None:
            raise UsageError(
                "streaming a model needs accelerate",
                hint="pip install 'numdev[large]', or load it whole with --no-stream",
            )
        empty, deferred = {}, {}
        for file in self.files:
            for name, x in read(file):
                empty[name] = torch.empty_like(x, device=META)
                deferred[name] = Deferred.of(empty[name], Stored(file=file, name=name))
        # Once all on the meta device, to find out what is missing: values are drawn for that, in
        # the memory of a model that has none.
        self._built(empty, dtype, device_map={"": META})
        return self._built(deferred, dtype).eval()

    @property
    def can_be_streamed(self) -> bool:
        return not self.split and all(file.suffix not in storage.PICKLES for file in self.files)

    def size_in(self, dtype: torch.dtype) -> int:
        """Bytes of the model's weights in a format, by the headers of its safetensors files."""
        return sum(x.numel() for path in self.files for _, x in read(path)) * dtype.itemsize

    def _built(self, state: Mapping[str, Tensor], dtype: torch.dtype, **options: Any) -> nn.Module:
        """transformers' model of these weights, checked."""
        cls, config = self._class_and_config()
        with quiet(), blaming(self.path, "build the model with transformers"):
            model, loaded = cls.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=dtype,
                attn_implementation=attention_implementation(cls),
                # The grouped product of experts, transformers' default, has no fp64.
                experts_implementation="eager" if dtype == torch.float64 else None,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # so as to name them, below
                output_loading_info=True,
                **options,
            )
        unused = [k for k in loaded["unexpected_keys"] if not _may_be_left_over(k, model)]
        misshapen = [
            f"{name} {list(stored)} instead of {list(expected)}"
            for name, stored, expected in loaded["mismatched_keys"]
        ]
        for problem, names in (
            ("needs weights that are not there", loaded["missing_keys"]),
            ("has no place for the weights", unused),
            ("needs other shapes than the stored", misshapen),
        ):
            if names:
                raise MeasurementError(
                    f"{self.path}: {type(model).__name__} {problem}: {some(sorted(names))}",
                    hint='is "architectures" in config.json the class they were saved from?',
                )
        # A cache would keep every layer's keys and values, and a capture needs memory for one.
        model.config.get_text_config().use_cache = False
        built: nn.Module = model
        return built

    def _state(self) -> dict[str, Tensor]:
        """All stored tensors, those of a distributed checkpoint named as the model names them."""
        if not self.split:
            return {name: tensor for path in self.files for name, tensor in read(path)}
        cls, config = self._class_and_config()
        with quiet(), blaming(self.path, "build the model with transformers"), META:
            empty = cls(config)
        return dict(self.fitted(empty).tensors())

    def tokenizer(self) -> Any | None:
        """The directory's tokenizer (a transformers one), or None when it has none."""
        return load_tokenizer(self.path)

    def _class_and_config(self) -> tuple[Any, Any]:
        """The config's first architecture, and the config as transformers has it."""
        with quiet():
            import transformers

            file, kind = self.path / "config.json", str(self.config.get("model_type"))
            if kind not in transformers.CONFIG_MAPPING:
                what = f"transformers {transformers.__version__} knows no model type {kind!r}"
                raise MeasurementError(f"{file}: {what}", hint="a newer transformers may")
            with blaming(self.path, "read config.json with transformers"):
                stored = copy.deepcopy(dict(self.config))
                config = transformers.CONFIG_MAPPING[kind].from_dict(stored)
            names = self.config.get("architectures")
            name = names[0] if isinstance(names, list) and names else None
            cls = getattr(transformers, name, None) if isinstance(name, str) else None
            if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
                return cls, config
        what = f"transformers has no architecture {name!r}" if name else "names no architecture"
        hint = 'set "architectures" to the class that the weights belong to'
        raise MeasurementError(f"{file}: {what}", hint=hint)


def load_tokenizer(directory: Path) -> Any | None:
    """The tokenizer in a directory (a transformers one), or None when there is none."""
    if not any(any(directory.glob(pattern)) for pattern in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    if (stored := directory / "tokenizer_config.json").is_file():
        storage.refuse_code(stored)
    with quiet(), blaming(directory, "load the tokenizer with transformers"):
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint at `path` without loading its weights. Raises UsageError where there is
    none or it asks for code of its own, MeasurementError where it is damaged; both name the file.
    """
    stored = path / "config.json"
    for missing, what in (
        (not path.exists(), "does not exist"),
        (not path.is_dir(), "is a file, not a checkpoint"),
        (not stored.is_file(), "has no config.json"),
    ):
        if missing:
            raise UsageError(f"{path}: {what}", hint=f"give {ACCEPTED}")
    storage.refuse_code(stored)
    config, name = read_json(stored), path.resolve().name
    if is_distributed(path):
        split = open_distributed(path)
        files, prefix = files_of(path, split), taken_off(split)
        return Checkpoint(
            path=path, name=name, files=files, split=split, prefix=prefix, config=config
        )
    hint = f"expected {' or '.join(WHOLE)}, whole or sharded with an index"
    files = storage.weight_files(path, WHOLE, hint)
    for file in files:
        if file.suffix == ".safetensors":
            storage.open_safetensors(file).__exit__(None, None, None)
    return Checkpoint(path=path, name=name, files=files, config=config)


def _may_be_left_over(key: str, model: nn.Module) -> bool:
    """Whether a stored tensor without a place in the model changes nothing: the model computes it
    (causal masks), or was built without its part (a pooler). Inside a numbered layer it means a
    missing layer, or a part of the attention that would silently not be applied."""
    if key.endswith(".masked_bias") or key in dict(model.named_buffers()):
        return True
    parts = key.split(".")[:-1]
    numbered = any(part.isdigit() for part in parts)
    return not numbered and ".".join(parts) not in dict(model.named_modules())


def size(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these keys that holds a number, here or in the config of the text model."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, Mapping) else {}):
        for name in names:
            if isinstance(place.get(name), int):
                return int(place[name])
    return None
