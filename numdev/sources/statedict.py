"""A state dict and the factory that builds its model: any PyTorch module can be audited.

The weights are a `.safetensors` file, the index of a sharded one, what torch.save wrote (`.pt`,
`.pth`, `.bin`), or a `torch.distributed.checkpoint` directory. The model is the user's own
`package.module:factory`. Training scripts save more than weights: a state dict under one of
`NESTED` is found, and the configuration under one of `CONFIGS` is handed to a factory that takes a
parameter (where the file is no pickle, the `config.json` beside it).

Loading is strict: a weight missing or left over is named, and so is one of another shape. What
torch.compile and DistributedDataParallel put before names is taken off, and said.

The interface is that of `numdev.sources.checkpoint.Checkpoint`.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from numdev.errors import MeasurementError, UsageError
from numdev.kernels import fingerprint, imported
from numdev.sources import files as storage
from numdev.sources.capture import attention_implementation
from numdev.sources.checkpoint import size
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

SUFFIXES = (".safetensors", *storage.PICKLES)
INDEX = ".index.json"
ACCEPTED = (
    "a file .safetensors, .safetensors.index.json, .pt, .pth or .bin, or a "
    "torch.distributed.checkpoint directory"
)
CONFIGS = ("model_args", "hyper_parameters", "model_config", "config", "args")
"""Where they put the model's configuration: nanoGPT, Lightning, and others."""
PREFIXES = ("_orig_mod.", "module.")
"""What torch.compile and DistributedDataParallel put before the names of weights."""
LENGTHS = ("block_size", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


@dataclass(frozen=True, kw_only=True)
class StateDict:
    """Opened weights and the factory of their model."""

    path: Path
    name: str
    files: tuple[Path, ...]
    factory: str
    build: Callable[..., Any]
    config: Mapping[str, Any] | None
    """The configuration stored with the weights, if there is one."""
    prefix: str
    """What is taken off all names."""
    split: Mapping[str, SplitTensor] = field(default_factory=dict)
    """The tensors of a distributed checkpoint."""

    def identity(self) -> str:
        """SHA-256 over the names and contents of the files."""
        return storage.identity(self.files)

    def describe(self) -> dict[str, Any]:
        """What a report says of it beside its name and identity."""
        build = self.build
        made_from = vars(build).get("__init__", build) if isinstance(build, type) else build
        described = {"model": self.factory, "model_made_from": fingerprint(made_from)}
        return {**described, **({"prefix_removed": self.prefix} if self.prefix else {})}

    def fitted(self, model: nn.Module) -> StateDict:
        """The same, of a distributed checkpoint without what such a one nests the names of this
        model's weights under; only then is it known which of its tensors these are."""
        if not self.split:
            return self
        split = under(nested_under(self.split, model.state_dict()), self.split)
        return dataclasses.replace(self, split=split, prefix=taken_off(split))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every stored weight with its name, one at a time; tied ones of a pickle once."""
        if self.split:
            yield from ((name, x.read()) for name, x in self.split.items())
            return
        for path in self.files:
            for name, tensor in storage.distinct(path, _weights(path)):
                yield name.removeprefix(self.prefix), tensor

    def load_model(self, *, dtype: torch.dtype, device: str) -> nn.Module:
        """The factory's model with the stored weights, cast to `dtype`, in eval mode.

        Raises UsageError for a factory that cannot be called or gives no module, MeasurementError
        for one that raises, and for weights that are not the model's.
        """
        model = self._built()
        _open_to_capture(model)
        model = model.to(dtype)  # before loading, which would round to the factory's own format
        own = model.state_dict()
        if self.split:
            state = dict(self.fitted(model).tensors())
        else:
            state = {name: x for path in self.files for name, x in _weights(path)}
        if not self.split and self.prefix and not all(name.startswith(self.prefix) for name in own):
            state = {name.removeprefix(self.prefix): x for name, x in state.items()}
        self._check(model, own, state)
        model.load_state_dict(state, strict=False)
        return model.to(device).eval()

    def _built(self) -> nn.Module:
        arguments = self._arguments()
        try:
            model = self.build(*arguments)
        except (Exception, SystemExit) as error:
            raise MeasurementError(
                f"the factory {self.factory} raised {type(error).__name__}: "
                f"{storage.one_line(error)}",
                hint="call it in Python to see where",
            ) from error
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"the factory {self.factory} returned {_what(model)}, not a torch.nn.Module",
                hint="let it return the model",
            )
        return model

    def _arguments(self) -> tuple[Any, ...]:
        """None for a factory without parameters, the stored configuration for one with one."""
        try:
            parameters = inspect.signature(self.build).parameters.values()
        except ValueError:  # a callable written in C
            return ()
        required = [
            p.name
            for p in parameters
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if len(required) > 1:
            raise UsageError(
                f"the factory {self.factory} needs {len(required)} arguments "
                f"({', '.join(required)})",
                hint="write one that takes none, or the stored configuration",
            )
        if required and self.config is None:
            raise UsageError(
                f"the factory {self.factory} takes {required[0]!r}, and {self.path} stores no "
                "configuration",
                hint="write one that takes no argument",
            )
        return (dict(self.config),) if required and self.config is not None else ()

    def _check(self, model: nn.Module, own: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
        """Raises MeasurementError unless the stored weights are the model's own, name by name.

        A tied weight may be stored under one of its names, and a buffer that the model does not
        store (a causal mask it computes) may be left over.
        """
        given = {id(x) for name, x in _named(model) if name in state}
        tied = {name for name, x in _named(model) if id(x) in given}
        tensors = {name: x for name, x in own.items() if isinstance(x, Tensor)}
        missing = sorted(tensors.keys() - state.keys() - tied)
        unused = sorted(state.keys() - own.keys() - dict(model.named_buffers()).keys())
        misshapen = [
            f"{name} {list(state[name].shape)} instead of {list(x.shape)}"
            for name, x in tensors.items()
            if name in state and state[name].shape != x.shape
        ]
        problems = [
            f"{problem} {storage.some(names)}"
            for problem, names in (
                ("needs", missing),
                ("has no place for", unused),
                ("needs other shapes than the stored", misshapen),
            )
            if names
        ]
        if problems:
            raise MeasurementError(
                f"{self.path}: {type(model).__name__} of {self.factory} " + ", and ".join(problems),
                hint="is it the model these weights were saved from?",
            )


def open_state_dict(path: Path, factory: str | None) -> StateDict:
    """Open the weights at `path`, and import the factory of their model.

    Raises UsageError where there are none, where no factory is given or it cannot be imported,
    MeasurementError for a damaged file and one without a state dict.
    """
    if not (is_distributed(path) or path.suffix in SUFFIXES or path.name.endswith(INDEX)):
        raise UsageError(f"{path}: is no checkpoint that numdev reads", hint=f"give {ACCEPTED}")
    if not factory:
        beside = path.is_file() and (path.parent / "config.json").is_file()
        hint = "give --model package.module:factory"
        raise UsageError(
            f"{path}: holds weights, and says not of which model",
            hint=f"{hint}, or its directory {path.parent}" if beside else hint,
        )
    if ":" not in factory:
        raise UsageError(f"--model {factory!r}: is no factory", hint="write package.module:factory")
    build = imported(factory, "model")
    if is_distributed(path):
        split = open_distributed(path, NESTED)
        return StateDict(
            path=path,
            name=path.resolve().name,
            files=files_of(path, split),
            factory=factory,
            build=build,
            config=_config(path / METADATA),
            prefix=taken_off(split),
            split=split,
        )
    files = storage.shards(path) if path.name.endswith(INDEX) else (path,)
    names = [name for file in files for name in _names(file)]
    if not names:
        raise MeasurementError(f"{path}: holds no tensor", hint="save model.state_dict()")
    return StateDict(
        path=path,
        name=path.resolve().name,
        files=files,
        factory=factory,
        build=build,
        config=_config(path),
        prefix=common_prefix(names),
    )


def is_distributed(path: Path) -> bool:
    """Whether torch.distributed.checkpoint wrote this directory."""
    return (path / METADATA).is_file()


def vocabulary(model: nn.Module, config: Mapping[str, Any] | None) -> int | None:
    """How many token ids a model knows: by the configuration stored with it, else the rows of its
    first embedding. None for a model that embeds nothing."""
    known = size(config or {}, "vocab_size")
    tables = (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
    return known or next(tables, None)


def longest(model: nn.Module, config: Mapping[str, Any] | None) -> int | None:
    """The longest sequence a model has positions for; None where neither the stored configuration
    nor the model's own (`model.config`) says."""
    own = getattr(model, "config", None)
    its = {name: getattr(own, name, None) for name in LENGTHS}
    return size(config or {}, *LENGTHS) or size(its, *LENGTHS)


def _weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    if path.suffix not in storage.PICKLES:
        return storage.read(path)
    state = state_in(path, storage.read_pickle(path))
    return ((str(name), x) for name, x in state.items() if isinstance(x, Tensor))


def _names(path: Path) -> list[str]:
    if path.suffix in storage.PICKLES:
        return [name for name, _ in _weights(path)]
    with storage.open_safetensors(path) as file:
        return list(file.keys())


def state_in(path: Path, content: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The state dict in what torch.save wrote: under one of NESTED, or the whole."""
    for state in (*(content.get(key) for key in NESTED), content):
        if isinstance(state, dict) and any(isinstance(x, Tensor) for x in state.values()):
            return state
    keys = storage.some([repr(key) for key in content]) or "nothing"
    raise MeasurementError(
        f"{path}: holds no state dict (but {keys})",
        hint=f"save model.state_dict(), itself or under one of: {', '.join(NESTED)}",
    )


def _config(path: Path) -> Mapping[str, Any] | None:
    if path.suffix in storage.PICKLES:
        content = storage.read_pickle(path)
        return next((c for key in CONFIGS if isinstance(c := content.get(key), dict)), None)
    beside = path.parent / "config.json"
    return storage.read_json(beside) if beside.is_file() else None


def common_prefix(names: list[str]) -> str:
    """The known prefixes that all names have, in whichever order they stand."""
    taken = ""
    while found := next(
        (p for p in PREFIXES if all(name.startswith(taken + p) for name in names)), None
    ):
        taken += found
    return taken


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _open_to_capture(model: nn.Module) -> None:
    """Lead transformers' models inside to numdev's attention function, as a checkpoint's are.

    Elsewhere a soft cap would be lost on the way to SDPA, and some would not go there at all.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None:  # then no model of its can be inside
        return
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            module.set_attn_implementation(attention_implementation(type(module)))
            module.config.get_text_config().use_cache = False


def _what(x: Any) -> str:
    return "nothing" if x is None else f"a {type(x).__name__}"
