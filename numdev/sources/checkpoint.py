"""Weights on disk, opened lazily and safely, and their model.

A Hugging Face checkpoint is `config.json` beside weight files: transformers builds the
model of the tensors read here, so neither its search for files nor the network is in
play. The model of a state dict (files, or a `torch.distributed.checkpoint` directory) is
the user's own `package.module:factory`, handed the stored configuration if it takes one.
Loading is strict."""

from __future__ import annotations

import copy
import hashlib
import inspect
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_flatten, tree_map_only

from numdev.errors import MeasurementError, UsageError, one_line
from numdev.kernels import fingerprint, import_callable
from numdev.sources import tensor_files as storage
from numdev.sources.capture import attention_implementation, module_hooks
from numdev.sources.captured_calls import headerless_hint
from numdev.sources.containers import (
    INDEX,
    SUFFIXES,
    Container,
    StoredTensor,
    container_at,
    containers_at,
    containers_of_model,
    is_weights,
)
from numdev.sources.tensor_files import blaming, quiet, read_json
from numdev.sources.unsupported_files import (
    file_format,
    refuse_config,
    refuse_directory,
    refuse_pointer,
)
from numdev.target_names import name_of

WHOLE = ("model.safetensors", "pytorch_model.bin")
LENGTHS = (
    *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "block_size"),
    *(
        "seq_length",
        "max_seq_length",
        "max_sequence_length",
        "sequence_length",
        "seq_len",
    ),
    *("context_length", "context_size", "n_context", "ctx_len", "max_context_length"),
)
META = torch.device("meta")
# Of a tensor class that overrides operations by `__torch_dispatch__` alone
NO_OVERRIDE = torch._C._disabled_torch_function_impl
# No model has so many
MANY = re.compile(r'"\w*(?:layers?|depths?|experts|blocks)": \[?\d{5,}')
LABELS = re.compile(r'"num_labels": (\d+)')
FEW_LABELS = 1 << 16  # take megabytes, whatever is stored: a model may lack its head
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# Where training scripts put the model's configuration: nanoGPT, Lightning, and others.
CONFIGS = ("model_args", "hyper_parameters", "model_config", "config", "args")
TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model")
# Numbers that JSON has no word for: transformers stores one as an object with this key
# alone.
SPECIAL, NUMBERS = "__float__", ("Infinity", "-Infinity", "NaN")
# Models that number positions from pad_token_id + 1, so that they read fewer than their
# table has.
POSITIONS_AFTER_PADDING = re.compile(
    "roberta|camembert|longformer|mpnet|xmod|luke|data2vec-text|layoutlmv3|lilt"
)


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """The stored weights of a model, opened and not loaded. `config`: the stored
    configuration, empty where there is none."""

    path: Path
    name: str
    containers: tuple[Container, ...]
    config: Mapping[str, Any] = field(default_factory=dict)  # Stored with the weights
    prefix: str = ""  # What is taken off all names

    @property
    def files(self) -> tuple[Path, ...]:
        """Returns the files whose names and contents identify the weights. Raises
        MeasurementError for damaged metadata of a distributed checkpoint."""
        return tuple(file for container in self.containers for file in container.files)

    @property
    def has_more(self) -> bool:
        """Whether more than the weights may be stored with them (an optimiser's
        state)."""
        return any(container.has_more for container in self.containers)

    @property
    def vocab_size(self) -> int | None:
        """Returns how many token ids the model has, by its config or the `text_config` in
        it; None where neither says."""
        return first_positive(self.config, "vocab_size")

    @property
    def max_length(self) -> int | None:
        """Returns the longest sequence, in tokens, that the model has positions for, by
        its config or the `text_config` in it; None where neither sets one."""
        limit = first_positive(self.config, *LENGTHS)
        if limit and POSITIONS_AFTER_PADDING.search(str(self.config.get("model_type"))):
            return limit - int(self.config.get("pad_token_id") or 0) - 1
        return limit

    def start_identity(self) -> Callable[[], str]:
        """Begins to hash the files in threads. Returns a function that waits for the 64
        hex digits that identify the weights by the names and contents of their files. It
        raises OSError for a file that cannot be read, and may be called again."""
        return storage.start_identity(self.files)

    def identity(self) -> str:
        """Returns the 64 hex digits that identify the weights by the names and contents
        of their files. Reads all files; raises OSError for a file that cannot be read."""
        return self.start_identity()()

    def describe(self) -> dict[str, object]:
        """Returns what a report says of the weights beside their name and identity. Keys,
        each only where it applies: `prefix_removed`, the prefix that was taken off all
        names; `auto_map` (`not run`), for code that is stored with the weights."""
        code = "not run" if self.config.get("auto_map") else ""
        nesting = "".join(container.nesting for container in self.containers)
        details = {"prefix_removed": nesting + self.prefix, "auto_map": code}
        return {name: text for name, text in details.items() if text}

    def fitted(self, model: nn.Module) -> Self:
        """Returns the weights under this model's names: where all names in the model's
        state dict begin with the prefix that was taken off, a copy with it put back. Else
        returns the weights themselves."""
        if self.prefix and all(
            name.startswith(self.prefix) for name in model.state_dict()
        ):
            return replace(self, prefix="")
        return self

    def tensors(self, *, tied: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yields name (without `prefix`) and value of every stored tensor, one at a time
        in file order, in its stored format. Tied tensors share storage, as only a pickle
        can hold them: they come once, by the first name, or with `tied` by each name.
        Raises MeasurementError for a damaged file, for a tensor that is no dense array,
        and for weights that are no real numbers."""
        for container in self.containers:
            seen = set()
            for stored in container.tensors():
                if tied or stored.tie is None or stored.tie not in seen:
                    seen.add(stored.tie)
                    tensor = storage.checked_tensor(
                        container.path, stored.name, stored.read()
                    )
                    yield stored.name.removeprefix(self.prefix), tensor


@dataclass(frozen=True, kw_only=True)
class Checkpoint(StoredWeights):
    """An opened Hugging Face checkpoint: its config is read, its weight files exist."""

    def start_identity(self) -> Callable[[], str]:
        """Begins to hash config.json and the weight files in threads. Returns a function
        that waits for the 64 hex digits that identify them; it raises OSError for a file
        that cannot be read, and may be called again."""
        return storage.start_identity((self.path / "config.json", *self.files))

    def load_model(self, *, dtype: torch.dtype, device: str) -> nn.Module:
        """Returns transformers' model in eval mode on this device, its weights cast to
        `dtype`, its attention open to capture. Raises MeasurementError for an unknown
        architecture, for weights that do not fit it or are far fewer than its config asks
        for, for damaged files, and for whatever transformers raises."""
        return self._build_model(dict(self.tensors(tied=True)), dtype).to(device).eval()

    def deferred_model(self, *, dtype: torch.dtype) -> nn.Module:
        """Returns transformers' model in eval mode on the CPU, with a `Deferred` without
        values for every stored weight that it has. Raises UsageError where the files are
        not safetensors or accelerate is missing. Raises MeasurementError for an unknown
        architecture, for damaged files and weights that do not fit it, and for a model
        whose weights are changed in place while it is built."""
        if not all(container.is_lazy for container in self.containers):
            what = f"{self.path}: --stream: expected safetensors files"
            raise UsageError(what, hint="save_pretrained writes them")
        if find_spec("accelerate") is None:
            raise UsageError(
                "--stream needs accelerate", hint="pip install 'numdev[large]'"
            )
        empty, deferred = dict[str, Tensor](), dict[str, Tensor]()
        for container in self.containers:
            for stored in container.tensors():
                x = storage.checked_tensor(container.path, stored.name, stored.read())
                empty[stored.name] = torch.empty_like(x, device=META)
                make = partial(read_to_device, stored)
                deferred[stored.name] = Deferred.of(empty[stored.name], make)
        # Once all on the meta device, to find out what is missing: values are drawn for
        # that, in the memory of a model that has none.
        self._build_model(empty, dtype, device_map={"": META})
        return self._build_model(deferred, dtype).eval()

    def _build_model(
        self, state: dict[str, Tensor], dtype: torch.dtype, **options: object
    ) -> nn.Module:
        """Returns transformers' model of the weights `state`. `options` are passed to its
        from_pretrained. Raises MeasurementError for an unknown architecture or
        quantisation, for a config that asks for too much, for missing, unused or
        misshapen weights, and for whatever transformers raises. May change `state`:
        scales of quantised weights become one for each row and column."""
        self._refuse_counts(state)
        cls, config = self._model_class_and_config()
        self._refuse_larger(cls, config, state)
        with quiet(), blaming(self.path, "build the model with transformers"):
            self._even_out_blocks(state)
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
        missing, misshapen = loaded["missing_keys"], loaded["mismatched_keys"]
        storage.refuse_misfits(
            self.path, type(model).__name__, missing, unused, misshapen
        )
        # A cache would keep every layer's keys and values, and a capture needs memory for
        # one.
        model.config.get_text_config().use_cache = False
        return cast(nn.Module, model)

    def _refuse_counts(self, state: Mapping[str, Tensor]) -> None:
        """Raises MeasurementError for a config that counts 10000 or more layers, depths,
        experts or blocks, or more labels than the longest side of a stored tensor and
        than FEW_LABELS. These alone would take all memory, or forever. `state`: the
        stored weights, by name."""
        if many := MANY.search(json.dumps(dict(self.config))):
            what = f"config.json: asks for {many[0]}, more than numdev builds"
            raise MeasurementError(f"{self.path}: {what}", hint=storage.FETCH)
        # transformers names every label one by one as soon as it reads the config.
        largest = max((n for x in state.values() for n in x.shape), default=0)
        for labels in map(int, LABELS.findall(json.dumps(dict(self.config)))):
            if labels > max(largest, FEW_LABELS):
                what = (
                    f"num_labels: expected at most {largest:,}, the longest side "
                    "of a tensor"
                )
                what = f"config.json: {what} that is stored, got {labels:,}"
                raise MeasurementError(f"{self.path}: {what}", hint=storage.FETCH)

    def _refuse_larger(
        self, cls: Any, config: object, state: Mapping[str, Tensor]
    ) -> None:
        """Raises MeasurementError for a model with more than 2 n + 2^20 parameters, where
        n is the number of values in the stored weights `state`: it would fill the memory
        before it does not fit. A class that cannot be built empty passes."""
        stored, needs = sum(x.numel() for x in state.values()), 0
        with quiet(), suppress(Exception), META:
            needs = sum(x.numel() for x in cls(copy.deepcopy(config)).parameters())
        if needs > 2 * stored + (1 << 20):  # each tied weight is stored once
            what = (
                f"config.json asks for {needs:,} parameters, but {stored:,} "
                "values are stored"
            )
            raise MeasurementError(f"{self.path}: {what}", hint=storage.FETCH)

    def _even_out_blocks(self, state: dict[str, Tensor]) -> None:
        """Gives each row, or column, of a quantised weight a scale of its own where its
        blocks do not divide that side evenly: transformers would divide the weight into
        equal blocks. Replaces these entries of `state` (`NAME_scale_inv`). Does nothing
        without `weight_block_size` in the config. Raises KeyError for a scale without its
        weight, ValueError for a weight of one axis."""
        quantisation: Any = self.config.get("quantization_config") or {}
        block = quantisation.get("weight_block_size")
        for name in [n for n in state if block and n.endswith("_scale_inv")]:
            sizes = state[name.removesuffix("_scale_inv")].shape[-2:]
            for axis, n, b in zip((-2, -1), sizes, block, strict=True):
                if n % b:
                    state[name] = (
                        state[name].repeat_interleave(b, axis).narrow(axis, 0, n)
                    )

    def _model_class_and_config(self) -> tuple[Any, object]:
        """Returns the model class of transformers that the config names first, and the
        config as an object of transformers; weights in fp8 are to be dequantised. Raises
        MeasurementError for an unknown class or type, for a config that transformers
        cannot read, and for a quantisation other than fp8 with scales of blocks."""
        with quiet():
            import transformers

            kind, names = (
                str(self.config.get("model_type")),
                self.config.get("architectures"),
            )
            name = str(names[0]) if isinstance(names, list) and names else "none"
            cls = getattr(transformers, name, None)
            model = isinstance(cls, type) and issubclass(
                cls, transformers.PreTrainedModel
            )
            if not model or kind not in transformers.CONFIG_MAPPING:
                what = (
                    f"transformers {transformers.__version__} has no model "
                    f"{name} of type {kind}"
                )
                if name == "none":
                    what = (
                        f'{self.path / "config.json"}: names no model in "architectures"'
                    )
                    raise MeasurementError(what, hint="name the class that it is for")
                if self.config.get("auto_map"):
                    what += ", and numdev does not run code shipped with it (auto_map)"
                hint = (
                    'try a newer transformers, or correct "architectures" in config.json'
                )
                raise MeasurementError(f"{self.path / 'config.json'}: {what}", hint=hint)
            with blaming(self.path, "read config.json with transformers"):
                stored = copy.deepcopy(dict(self.config))
                if how := stored.get("quantization_config"):
                    if how["quant_method"] != "fp8":
                        what = (
                            f"{self.path}: is quantised by "
                            f"{how['quant_method']}, expected fp8"
                        )
                        raise MeasurementError(
                            what, hint="audit the checkpoint it was made from"
                        )
                    if not how.get("weight_block_size"):
                        what = f"{self.path}: is fp8 with one scale a tensor or channel"
                        what += ", expected scales of blocks (weight_block_size)"
                        raise MeasurementError(
                            what, hint="audit the checkpoint it was made from"
                        )
                    how["dequantize"] = True  # each weight times its scale, on any device
                return cls, transformers.CONFIG_MAPPING[kind].from_dict(stored)


def load_tokenizer(directory: Path) -> Any | None:
    """Returns transformers' tokenizer in a directory; None where no file there has a
    tokenizer's name (TOKENIZER_FILES). Raises MeasurementError for files that cannot be
    read."""
    if not any(any(directory.glob(pattern)) for pattern in TOKENIZER_FILES):
        return None
    for pattern in TOKENIZER_FILES:
        for file in directory.glob(pattern):
            refuse_pointer(file)
    from transformers import AutoTokenizer

    with quiet(), blaming(directory, "load the tokenizer with transformers"):
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens the Hugging Face checkpoint in a directory without loading its weights.
    Raises UsageError where it has no config.json or no weights. Raises MeasurementError
    where config.json, an index or a distributed checkpoint's metadata is damaged, where a
    file that an index names is missing, and for a config that is not transformers'.
    Weight files themselves are not looked into."""
    stored = path / "config.json"
    if not stored.is_file():
        refuse_directory(path)
        raise UsageError(
            f"{path}: has no config.json",
            hint=headerless_hint(path) or "give a Hugging Face directory",
        )
    config = read_config(stored)
    refuse_config(stored, config)
    hint = f"expected {' or '.join(WHOLE)}, whole or sharded with an index"
    try:
        containers = containers_of_model(path, WHOLE, hint)
    except UsageError:
        refuse_directory(path)
        raise
    opened = Checkpoint(
        path=path, name=name_of(path), containers=containers, config=config
    )
    # transformers' own files have transformers' names
    if not opened.has_more:
        return opened
    return replace(opened, prefix=storage.common_prefix(_tensor_names(containers)))


def _tensor_names(containers: Sequence[Container]) -> list[str]:
    """Returns the names of all tensors in these containers, in the order in which they
    are stored. Raises MeasurementError for a damaged container."""
    stored = itertools.chain.from_iterable(x.tensors() for x in containers)
    return [tensor.name for tensor in stored]


def read_config(path: Path) -> dict[str, object]:
    """Returns a stored configuration as transformers reads it: `{"__float__":
    "Infinity"}` is infinity, and likewise -infinity and NaN. Raises MeasurementError
    where the file is missing, or is no JSON object."""

    def number(stored: dict[str, object]) -> object:
        """Returns infinity, -infinity or NaN for an object that stands for it; any other
        object as it is."""
        word = stored.get(SPECIAL)
        return float(word) if len(stored) == 1 and word in NUMBERS else stored

    return read_json(path, number)


def _may_be_left_over(key: str, model: nn.Module) -> bool:
    """Whether a stored tensor `key` without a place in the model changes nothing. True
    for what the model computes (a buffer, a causal mask), and for a part that the model
    was built without (a pooler). False for any other, and for all else inside a numbered
    layer: that would be a missing layer, or a part of the attention that is silently not
    applied."""
    if key.endswith(".masked_bias") or key in dict(model.named_buffers()):
        return True
    parts = key.split(".")[:-1]
    numbered = any(part.isdigit() for part in parts)
    return not numbered and ".".join(parts) not in dict(model.named_modules())


def first_positive(config: Mapping[str, object], *names: str) -> int | None:
    """Returns the first value that is an int above 0 (True is 1): under these keys of
    `config`, in their order, then of its `text_config`. None where no key has one."""
    text = config.get("text_config")
    places = (config, text if isinstance(text, Mapping) else {})
    sizes = (place.get(name) for place in places for name in names)
    return next(
        (int(number) for number in sizes if isinstance(number, int) and number > 0), None
    )


@dataclass(frozen=True, kw_only=True)
class StateDict(StoredWeights):
    """Opened weights and the factory of their model, the user's own function or class."""

    factory: str
    build: Callable[..., object]

    def describe(self) -> dict[str, object]:
        """Returns what a report says of the weights: `model`, the factory's name;
        `model_made_from`, a hash of its source; and what all weights have."""
        build = self.build
        made_from = (
            vars(build).get("__init__", build) if isinstance(build, type) else build
        )
        described = {"model": self.factory, "model_made_from": fingerprint(made_from)}
        return {**described, **super().describe()}

    def load_model(self, *, dtype: torch.dtype, device: str) -> nn.Module:
        """Returns the factory's model with the stored weights, cast to `dtype`, in eval
        mode on this device. Raises UsageError for a factory that returns no module;
        MeasurementError for one that raises or exits, for damaged files, and for weights
        that are not the model's."""
        model = self._build_model()
        # Where transformers is loaded, its models may be inside.
        transformers: Any = sys.modules.get("transformers")
        for module in () if transformers is None else model.modules():
            if isinstance(module, transformers.PreTrainedModel):
                module.config.get_text_config().use_cache = False
        # Before loading, which would round to the factory's own format
        model = model.to(dtype)
        state = dict(self.fitted(model).tensors(tied=True))
        self._check_fit(model, state)
        model.load_state_dict(state, strict=False)
        return model.to(device).eval()

    def _build_model(self) -> nn.Module:
        """Returns what the factory builds. It is called with the stored configuration, a
        dict, where it requires an argument and there is a configuration; else without
        argument. Raises UsageError where it returns no module, MeasurementError where it
        raises or exits."""
        try:
            parameters = inspect.signature(self.build).parameters.values()
            takes = any(
                p.default is p.empty and p.kind not in VARIADIC for p in parameters
            )
            model = self.build(*((dict(self.config),) if takes and self.config else ()))
        except (Exception, SystemExit) as error:
            what = f"the factory {self.factory} raised {one_line(error)}"
            raise MeasurementError(
                what, hint="its argument is the stored config"
            ) from error
        if not isinstance(model, nn.Module):
            got = f"expected a torch.nn.Module, got {type(model).__name__}"
            raise UsageError(
                f"the factory {self.factory}: {got}", hint="let it return the model"
            )
        return model

    def _check_fit(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Raises MeasurementError unless the stored weights `state` are those of the
        model, name by name and shape by shape. Of tied weights one name is enough, and a
        stored buffer may be one that the model does not store."""
        expected = {
            name: x for name, x in model.state_dict().items() if isinstance(x, Tensor)
        }
        named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        named |= dict(model.named_buffers(remove_duplicate=False))
        stored = {id(x) for name, x in named.items() if name in state}
        tied = {name for name, x in named.items() if id(x) in stored}
        both = [
            (name, state[name].shape, x.shape)
            for name, x in expected.items()
            if name in state
        ]
        places = model.state_dict().keys() | dict(model.named_buffers()).keys()
        storage.refuse_misfits(
            self.path,
            f"{type(model).__name__} of {self.factory}",
            missing=expected.keys() - state.keys() - tied,
            unused=state.keys() - places,
            misshapen=[(name, old, new) for name, old, new in both if old != new],
        )


def open_state_dict(path: Path, factory: str | None) -> StateDict:
    """Opens the weights at `path`, and imports the factory `package.module:name` of their
    model. The config is what the file holds beside its tensors, under the first key of
    CONFIGS that has a dict. For a kind of file that holds tensors alone, and for an
    index, it is a config.json in the same directory; for a distributed checkpoint one
    inside it; else it is empty. Raises UsageError where `path` holds no weights, or the
    factory is None or cannot be imported; MeasurementError for a file that is damaged or
    missing, or holds no tensor."""
    if not is_weights(path):
        accepted = f"{', '.join(SUFFIXES)}, {INDEX} or a distributed checkpoint"
        got = file_format(path)
        what = f"{path}: expected {accepted}" + f", got {got}" * bool(got)
        raise UsageError(what, hint="see docs/inputs.md")
    if not factory or ":" not in factory:
        got = f", got {factory!r}" if factory else ""
        what = f"{path}: weights alone need --model package.module:factory{got}"
        hint = headerless_hint(path)
        if not hint:
            hint = "or give the directory of a Hugging Face checkpoint"
        raise UsageError(what, hint=hint)
    build = import_callable(factory, "model")
    config: Mapping[str, object] = {}
    beside = (path if path.is_dir() else path.parent) / "config.json"
    container = container_at(path)
    content = None if container is None else container.beside()
    if content is not None:
        config = next(
            (c for key in CONFIGS if isinstance(c := content.get(key), dict)), {}
        )
    elif beside.is_file():
        config = read_config(beside)
    containers = containers_at(path)
    names = _tensor_names(containers)
    if not names:
        raise MeasurementError(f"{path}: holds no tensor", hint="save model.state_dict()")
    return StateDict(
        path=path,
        name=name_of(path),
        containers=containers,
        config=config,
        prefix=storage.common_prefix(names),
        factory=factory,
        build=build,
    )


# --- a model whose weights stay on disk: a layer's are read when it runs, and let go af
#
# A `Deferred` stands for a stored tensor while transformers puts a model together, and
# records what is done to it (casting, stacking experts). Units are the members of an
# outermost `ModuleList` (layers) and the modules that hold no such list; hooks fill in
# one's weights before it runs and take them out after. Values are made as the whole
# model's are and lie in memory as these do, so kernels that care about alignment give the
# same bits.

CANNOT = "this model cannot be streamed; load it whole, without --stream"


def read_to_device(stored: StoredTensor, device: torch.device) -> Tensor:
    """Returns a stored tensor, read from disk now, on a device. Raises MeasurementError
    where its file is damaged or missing."""
    return stored.read().to(device)


class Deferred(Tensor):
    """A tensor without values, which `make(device)` computes. An out-of-place operation
    on it gives another `Deferred`, whose values are computed by the same operations. An
    in-place operation raises MeasurementError. `sealed`: empty, or the name of the weight
    whose place it holds; then every operation on it raises MeasurementError."""

    make: Callable[[torch.device], Tensor]  # the tensor itself, on a device
    sealed: str
    _empty: Tensor
    _is_param: bool  # whether what stands in its place is a parameter

    @staticmethod
    def of(
        empty: Tensor,
        make: Callable[[torch.device], Tensor],
        *,
        device: str | torch.device = "cpu",
        sealed: str = "",
    ) -> Deferred:
        """Returns a `Deferred` of the shape, strides and dtype of `empty`, a tensor on
        the meta device, that says it is on `device`. `make` computes its values on a
        device; `sealed`: the name of the weight whose place it holds, if it must not be
        used."""
        x: Any = Tensor._make_wrapper_subclass(
            Deferred,
            empty.shape,
            strides=empty.stride(),
            dtype=empty.dtype,
            device=torch.device(device),
        )
        x._empty, x.make, x.sealed = empty, make, sealed
        deferred: Deferred = x
        return deferred

    __torch_function__ = NO_OVERRIDE  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        # All of a recipe happens on one device, which is chosen when it is followed.
        kwargs = {name: x for name, x in (kwargs or {}).items() if name != "device"}
        for x in tree_flatten((args, kwargs))[0]:
            if isinstance(x, Deferred) and x.sealed:
                what = f"{x.sealed} is used while the module that holds it does not run"
                raise MeasurementError(what, hint=CANNOT)
        if func._schema.is_mutable:
            what = f"the weights are changed in place ({func}) while the model is built"
            raise MeasurementError(what, hint=CANNOT)

        def output(i: int, device: torch.device) -> Tensor:
            """Returns the i-th result of the operation, computed on a device."""
            values, named = tree_map_only(
                Deferred, lambda x: x.make(device), (args, kwargs)
            )
            value: Tensor = tree_flatten(func(*values, **named))[0][i]
            return value

        empties, named = tree_map_only(Deferred, lambda x: x._empty, (args, kwargs))
        outputs, whole = tree_flatten(func(*empties, **named))
        return whole.unflatten(
            Deferred.of(x, partial(output, i)) if isinstance(x, Tensor) else x
            for i, x in enumerate(outputs)
        )


# A weight's `_parameters` or `_buffers`, its name there, itself, and what stands in its
# place.
Slot = tuple[dict[str, object], str, Deferred, Deferred]


class Streamed:
    """A model on `device` whose weights are read when a layer runs and dropped after it.
    It must be run within `running`. Making it changes `model` in place: its deferred
    weights are replaced by tensors that raise when they are used."""

    def __init__(self, model: nn.Module, *, device: str) -> None:
        self.model, self.device = model, torch.empty(0, device=device).device
        names = {module: name for name, module in model.named_modules()}
        # A tied weight stays one, if only by what holds its places
        empties: dict[int, Deferred] = {}
        # The slots that are filled and emptied as one, by their module, in the model's
        # order.
        self.units: dict[nn.Module, list[Slot]] = {}

        def slots(module: nn.Module) -> Iterator[Slot]:
            """Yields the places of a module's own deferred weights, and puts a sealed one
            there; moves its other buffers to the device."""
            for kind in ("_parameters", "_buffers"):
                places = module.__dict__[kind]
                for name, x in list(places.items()):
                    if isinstance(x, Deferred) and not x.sealed:
                        path = f"{names[module]}.{name}".lstrip(".")
                        empty = empties.setdefault(
                            id(x),
                            Deferred.of(
                                x._empty, x.make, device=self.device, sealed=path
                            ),
                        )
                        empty._is_param = kind == "_parameters"
                        places[name] = empty
                        yield places, name, x, empty
                    elif kind == "_buffers" and type(x) is Tensor:
                        places[name] = x.to(self.device)

        for unit in dict.fromkeys(_streamed_units(model)):
            self.units[unit] = [slot for part in unit.modules() for slot in slots(part)]
        inside = {part for unit in self.units for part in unit.modules()}
        # What a module that holds lists has itself is small
        for module in names.keys() - inside:
            self._fill(list(slots(module)))

    def running(self) -> AbstractContextManager[None]:
        """Returns a context in which each layer reads its weights before it runs, and
        drops them afterwards, also where it raises."""

        def enter(unit: nn.Module, *_: object) -> None:
            """Fills in the weights of a layer that is about to run."""
            self._fill(self.units[unit])

        def leave(unit: nn.Module, *_: object) -> None:
            """Drops the weights of a layer that has run."""
            for places, name, _weight, empty in self.units[unit]:
                places[name] = empty

        return module_hooks(self.units, enter, leave)

    def replace(
        self, module: nn.Module, name: str, change: Callable[[Tensor], Tensor]
    ) -> bool:
        """Replaces a weight that stays on disk by what `change` returns for it, each time
        it is read. `name`: that of the parameter in `module`. Returns whether the module
        has such a weight; False also for one that is in memory."""
        for slots in self.units.values():
            for i, (places, leaf, weight, empty) in enumerate(slots):
                if places is module.__dict__["_parameters"] and leaf == name:
                    changed = partial(_changed_on, weight.make, change)
                    slots[i] = (
                        places, leaf, Deferred.of(weight._empty, changed), empty,
                    )  # fmt: skip
                    return True
        return False

    @torch.no_grad()
    def _fill(self, slots: Sequence[Slot]) -> None:
        """Computes the weights of these slots and puts them in place, parameters without
        gradient."""
        for places, name, weight, empty in slots:
            value = weight.make(self.device)
            places[name] = (
                nn.Parameter(value, requires_grad=False) if empty._is_param else value
            )


def _changed_on(
    make: Callable[[torch.device], Tensor],
    change: Callable[[Tensor], Tensor],
    device: torch.device,
) -> Tensor:
    """Returns `change(make(device))`: a weight, read onto the device and changed."""
    return change(make(device))


def _streamed_units(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules whose weights come and go together, in the model's order: the
    members of each outermost ModuleList, and modules without such a list inside. One may
    come twice."""
    if isinstance(module, nn.ModuleList):
        yield from module
    elif any(isinstance(m, nn.ModuleList) for m in module.modules()):
        for child in module.children():
            yield from _streamed_units(child)
    else:
        yield module


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """A model that a caller has in memory, in place of opened weights, and the inputs
    that it is run on, by the names of its arguments."""

    model: nn.Module
    inputs: Mapping[str, Any]
    has_more: bool = False

    @property
    def name(self) -> str:
        """Returns the name of the model's class, followed by `in memory`."""
        return f"{type(self.model).__name__} in memory"

    @property
    def inputs_in_words(self) -> str:
        """Returns the inputs in words: the name of each with its shape, or its value."""
        named = self.inputs.items()
        return ", ".join(
            f"{n} {list(x.shape) if isinstance(x, Tensor) else x}" for n, x in named
        )

    def describe(self) -> dict[str, object]:
        """Returns what a report says of the model beside its name: a hash of the code of
        its forward functions."""
        code = dict.fromkeys(type(module).forward for module in self.model.modules())
        return {"model_made_from": fingerprint(*code)}

    def start_identity(self) -> Callable[[], str]:
        """Returns `identity`, which hashes nothing before it is called."""
        return self.identity

    def identity(self) -> str:
        """Returns 64 hex digits, SHA-256 over the names and values of the model's
        parameters and buffers. Copies each to the CPU."""
        return digest_of({**dict(self.tensors()), **dict(self.model.named_buffers())})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and value of the model's parameters, each once."""
        return self.model.named_parameters()

    def load_model(self, *, dtype: torch.dtype, device: str) -> nn.Module:
        """Returns the model as it is; `dtype` and `device` have no effect."""
        return self.model

    def fitted(self, model: nn.Module) -> InMemory:
        """Returns itself: the names are the model's."""
        return self


def digest_of(tensors: Mapping[str, object]) -> str:
    """Returns 64 hex digits, a SHA-256 over tensors in the order of their names: over
    name, dtype, shape and values of each, wherever it is stored. What is no tensor counts
    by its repr."""
    whole = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        if isinstance(x, Tensor):
            whole.update(f"{name} {x.dtype} {list(x.shape)}\n".encode())
            whole.update(
                x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            )
        else:
            whole.update(f"{name} {x!r}\n".encode())
    return whole.hexdigest()
