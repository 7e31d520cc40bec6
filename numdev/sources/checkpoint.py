"""Open a checkpoint lazily and safely, build its model, and say which one it was.

A checkpoint is a Hugging Face directory: `config.json` beside its weights, which are safetensors
files or `pytorch_model.bin`, whole or sharded with an index, or what torch.distributed.checkpoint
wrote. Opening one reads `config.json`, the
index and the headers of safetensors files; weights are read when they are asked for, through
memory maps where the file allows it.

A checkpoint is foreign data and is not trusted: its files are read by `numdev.sources.files`, and
a config that asks for code of its own (`auto_map`) is refused. transformers builds the model, but
never touches the files: it is handed the config and the tensors read here, so neither its search
for weight files nor its adapters, nor the network, are in play.

Where the model's attention goes is `numdev.sources.capture`'s business, what it reads
`numdev.sources.prompts`'.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numdev.errors import MeasurementError, NumdevError, UsageError
from numdev.sources import files as storage
from numdev.sources.capture import attention_implementation
from numdev.sources.dcp import (
    NESTED,
    SplitTensor,
    files_of,
    nested_under,
    open_distributed,
    taken_off,
    under,
)
from numdev.sources.dcp_metadata import METADATA
from numdev.sources.deferred import Deferred, Stored
from numdev.sources.files import one_line, open_safetensors, read, read_json, shards, some

WHOLE = ("model.safetensors", "pytorch_model.bin")
ACCEPTED = "a Hugging Face directory: config.json with model.safetensors or pytorch_model.bin"
META = torch.device("meta")
EMPTY = {"": META}
TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model")
# Models that number positions from pad_token_id + 1, so that they read fewer than their table has.
POSITIONS_AFTER_PADDING = re.compile(
    "roberta|camembert|longformer|mpnet|xmod|luke|data2vec-text|layoutlmv3|lilt"
)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint: its config is read, its weight files are found and can be opened."""

    path: Path
    name: str
    config: Mapping[str, Any]
    weights: tuple[Path, ...]
    """The weight files, in the order of their names."""
    split: Mapping[str, SplitTensor] = field(default_factory=dict)
    """The tensors of a distributed checkpoint, where the weights are one."""
    prefix: str = ""
    """What is taken off all their names."""

    def describe(self) -> dict[str, Any]:
        """What a report says of it beside its name and identity."""
        return {"prefix_removed": self.prefix} if self.prefix else {}

    def fitted(self, model: torch.nn.Module) -> Checkpoint:
        """The same, of a distributed checkpoint without what such a one nests the names of this
        model's weights under."""
        if not self.split:
            return self
        split = under(nested_under(self.split, model.state_dict()), self.split)
        return dataclasses.replace(self, split=split, prefix=taken_off(split))

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
        return storage.identity((self.path / "config.json", *self.weights))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every stored tensor with its name, one at a time in file order, in its stored format.

        Tensors that share their storage in a pickle (tied weights) come once, under the first
        name. Raises MeasurementError, naming the file, where one cannot be read.
        """
        if self.split:
            yield from ((name, x.read()) for name, x in self.split.items())
            return
        for path in self.weights:
            yield from storage.distinct(path, read(path))

    def load_model(self, *, dtype: torch.dtype, device: str) -> torch.nn.Module:
        """The model in eval mode, its weights cast to `dtype`, its attention open to capture.

        The class is the config's first architecture. Raises MeasurementError for an architecture
        that transformers does not have, and, naming them, for weights that are missing, of the
        wrong shape, or of no use to the model; heads it does not have are passed over.
        """
        built: torch.nn.Module = self._built(self._state(), dtype).to(device).eval()
        return built

    def deferred_model(self, *, dtype: torch.dtype) -> torch.nn.Module:
        """The same model on the CPU with a `Deferred` for every weight: how each is made of which
        stored tensors. What is not stored (rotary frequencies) is there.

        Raises what `load_model` does, and UsageError for weights in pickles, and without
        accelerate.
        """
        stored = self._headers()
        if find_spec("accelerate") is None:
            raise UsageError(
                "streaming a model needs accelerate",
                hint="pip install 'numdev[large]', or load it whole with --no-stream",
            )
        # Once all on the meta device, to find out what is missing: values are drawn for that, in
        # the memory of a model that has none.
        self._built({n: empty for n, (_, empty) in stored.items()}, dtype, device_map=EMPTY)
        return self._built({n: Deferred.of(x, at) for n, (at, x) in stored.items()}, dtype).eval()

    def _headers(self) -> dict[str, tuple[Stored, Tensor]]:
        """Where every tensor is, and one like it on the meta device; no value is read."""
        found = {}
        if self.split:
            raise UsageError(
                f"{self.path}: is a distributed checkpoint, and a model is streamed from "
                "safetensors files alone",
                hint="save it with save_pretrained, which writes safetensors",
            )
        for path in self.weights:
            if path.suffix in storage.PICKLES:
                raise UsageError(
                    f"{path}: is a pickle, and a model is streamed from safetensors files alone",
                    hint="save it with save_pretrained, which writes safetensors",
                )
            for name, tensor in read(path):
                found[name] = (Stored(file=path, name=name), torch.empty_like(tensor, device=META))
        return found

    def size_in(self, dtype: torch.dtype) -> int | None:
        """Bytes of the model's weights in a format, by the files' headers; None where nothing of
        them can be streamed."""
        if self.split or any(path.suffix in storage.PICKLES for path in self.weights):
            return None
        return sum(x.numel() for path in self.weights for _, x in read(path)) * dtype.itemsize

    def _built(
        self, state: Mapping[str, Tensor], dtype: torch.dtype, **options: Any
    ) -> torch.nn.Module:
        """transformers' model of these weights, checked."""
        with _quiet_transformers():
            config = self._model_config()
            cls = self._model_class()
            with _blaming_transformers(self.path, "build the model"):
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
        self._check_loaded(model, loaded)
        # A cache would keep every layer's keys and values, and a capture needs memory for one.
        model.config.get_text_config().use_cache = False
        built: torch.nn.Module = model
        return built

    def _state(self) -> dict[str, Tensor]:
        """All stored tensors, those of a distributed checkpoint named as the model names them."""
        if not self.split:
            return {name: tensor for path in self.weights for name, tensor in read(path)}
        with _quiet_transformers():
            cls, config = self._model_class(), self._model_config()
            with _blaming_transformers(self.path, "build the model"), torch.device("meta"):
                empty = cls(config)
        return dict(self.fitted(empty).tensors())

    def tokenizer(self) -> Any | None:
        """The directory's tokenizer (a transformers one), or None when it has none."""
        return load_tokenizer(self.path)

    def _model_config(self) -> Any:
        from transformers import CONFIG_MAPPING, __version__

        kind = str(self.config.get("model_type"))
        if kind not in CONFIG_MAPPING:
            raise MeasurementError(
                f"{self.path / 'config.json'}: transformers {__version__} knows no model type "
                f"{kind!r}",
                hint="a newer transformers may",
            )
        with _blaming_transformers(self.path, "read config.json"):
            return CONFIG_MAPPING[kind].from_dict(copy.deepcopy(dict(self.config)))

    def _model_class(self) -> Any:
        import transformers

        names = self.config.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        cls = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            return cls
        raise MeasurementError(
            f"{self.path / 'config.json'}: "
            + (f"transformers has no architecture {name!r}" if name else "names no architecture"),
            hint='set "architectures" to the class that the weights belong to',
        )

    def _check_loaded(self, model: torch.nn.Module, loaded: Mapping[str, Any]) -> None:
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


@contextmanager
def _blaming_transformers(path: Path, what: str) -> Iterator[None]:
    """Whatever transformers raises on foreign data, as one line that names the checkpoint."""
    try:
        yield
    except NumdevError:
        raise
    except Exception as error:
        raise MeasurementError(
            f"{path}: transformers cannot {what}: {one_line(error)}",
            hint="is the checkpoint complete, and made for this transformers?",
        ) from error


def load_tokenizer(directory: Path) -> Any | None:
    """The tokenizer in a directory (a transformers one), or None when there is none."""
    if not any(any(directory.glob(pattern)) for pattern in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    stored = directory / "tokenizer_config.json"
    if stored.is_file():
        _refuse_code(read_json(stored), stored)
    with _quiet_transformers(), _blaming_transformers(directory, "load the tokenizer"):
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint at `path` without loading its weights.

    Raises UsageError where there is none or it asks for code of its own, MeasurementError where it
    is damaged; the message names the file.
    """
    if not path.exists():
        raise UsageError(f"{path}: does not exist", hint=f"give {ACCEPTED}")
    if not path.is_dir():
        raise UsageError(f"{path}: is a file, not a checkpoint", hint=f"give {ACCEPTED}")
    stored = path / "config.json"
    if not stored.is_file():
        raise UsageError(f"{path}: has no config.json", hint=f"give {ACCEPTED}")
    config = read_json(stored)
    _refuse_code(config, stored)
    if (path / METADATA).is_file():
        split = open_distributed(path, NESTED)
        return Checkpoint(
            path=path,
            name=path.resolve().name,
            config=config,
            weights=files_of(path, split),
            split=split,
            prefix=taken_off(split),
        )
    weights = _weight_files(path)
    for file in weights:
        if file.suffix == ".safetensors":
            open_safetensors(file).__exit__(None, None, None)
    return Checkpoint(path=path, name=path.resolve().name, config=config, weights=weights)


def _weight_files(directory: Path) -> tuple[Path, ...]:
    for name in WHOLE:
        index = directory / f"{name}.index.json"
        if (directory / name).is_file():
            return (directory / name,)
        if index.is_file():
            return shards(index)
    others = sorted(p.name for p in directory.glob("*.safetensors"))
    raise UsageError(
        f"{directory}: has no weights that numdev reads"
        + (f" (it has {some(others)})" if others else ""),
        hint=f"expected {' or '.join(WHOLE)}, whole or sharded with an index",
    )


def _refuse_code(config: Mapping[str, Any], path: Path) -> None:
    if config.get("auto_map"):
        raise UsageError(
            f"{path}: asks for Python code of its own (auto_map), and numdev runs no code that "
            "comes with a checkpoint",
            hint="if transformers has this architecture too, delete auto_map from a copy of it",
        )


def _may_be_left_over(key: str, model: torch.nn.Module) -> bool:
    """Whether a stored tensor without a place in the model changes nothing.

    Either the model computes it (older files store causal masks), or it belongs to a part that the
    model was built without: BertForMaskedLM's weights hold a pooler and a next-sentence head.
    Inside a numbered layer no weight may be left over. There it means a missing layer, or a part of
    the attention that would silently not be applied.
    """
    if key.endswith(".masked_bias") or key in dict(model.named_buffers()):
        return True
    parts = key.split(".")[:-1]
    if any(part.isdigit() for part in parts):
        return False
    known = dict(model.named_modules())
    return ".".join(parts) not in known


def size(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these keys that holds a number, here or in the config of the text model."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, Mapping) else {}):
        for name in names:
            if isinstance(place.get(name), int):
                return int(place[name])
    return None


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars, log lines or warnings from transformers, and all as before afterwards."""
    import transformers.utils.logging
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars

    chatter: Any = transformers.utils.logging
    logger = logging.getLogger("transformers")
    level, bars = logger.level, chatter.is_progress_bar_enabled()
    hub_bars_off = are_progress_bars_disabled()
    logger.setLevel(logging.CRITICAL)
    chatter.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        if bars:
            chatter.enable_progress_bar()  # which switches those of huggingface_hub on as well
        if hub_bars_off:
            disable_progress_bars()
