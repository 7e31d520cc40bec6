"""A state dict and the factory that builds its model: any PyTorch module can be audited.

The weights are a file, the index of sharded ones, or a `torch.distributed.checkpoint` directory;
the model is the user's own `package.module:factory`, which is handed the stored configuration (of
`CONFIGS`, or the `config.json` beside) if it takes one. Loading is strict.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from numdev.errors import MeasurementError, UsageError
from numdev.kernels import fingerprint, imported
from numdev.sources import files as storage
from numdev.sources.capture import attention_implementation
from numdev.sources.checkpoint import size
from numdev.sources.dcp import Weights, files_of, is_distributed, open_distributed, taken_off

SUFFIXES = (".safetensors", *storage.PICKLES)
INDEX = ".index.json"
ACCEPTED = (
    "a file .safetensors, .safetensors.index.json, .pt, .pth or .bin, or a "
    "torch.distributed.checkpoint directory"
)
CONFIGS = ("model_args", "hyper_parameters", "model_config", "config", "args")
"""Where training scripts put the model's configuration: nanoGPT, Lightning, and others."""
LENGTHS = ("block_size", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


@dataclass(frozen=True, kw_only=True)
class StateDict(Weights):
    """Opened weights and the factory of their model."""

    factory: str
    build: Callable[..., Any]
    config: Mapping[str, Any] | None  # The configuration stored with the weights, if there is one

    def describe(self) -> dict[str, Any]:
        """What a report says of it beside its name and identity."""
        build = self.build
        made_from = vars(build).get("__init__", build) if isinstance(build, type) else build
        described = {"model": self.factory, "model_made_from": fingerprint(made_from)}
        return {**described, **super().describe()}

    def load_model(self, *, dtype: torch.dtype, device: str) -> nn.Module:
        """The factory's model with the stored weights, cast to `dtype`, in eval mode. Raises
        UsageError for a factory that cannot be called or gives no module, MeasurementError for one
        that raises, and for weights that are not the model's."""
        model = self._built()
        _open_to_capture(model)
        model = model.to(dtype)  # before loading, which would round to the factory's own format
        own = model.state_dict()
        if self.split:
            state = dict(self.fitted(model).tensors())
        else:
            state = {name: x for path in self.files for name, x in storage.read(path)}
            if self.prefix and not all(name.startswith(self.prefix) for name in own):
                state = {name.removeprefix(self.prefix): x for name, x in state.items()}
        self._check(model, own, state)
        model.load_state_dict(state, strict=False)
        return model.to(device).eval()

    def _built(self) -> nn.Module:
        arguments = self._arguments()
        try:
            model = self.build(*arguments)
        except (Exception, SystemExit) as error:
            words = f"{type(error).__name__}: {storage.one_line(error)}"
            raise MeasurementError(
                f"the factory {self.factory} raised {words}", hint="call it in Python to see where"
            ) from error
        if isinstance(model, nn.Module):
            return model
        what = "nothing" if model is None else f"a {type(model).__name__}"
        raise UsageError(
            f"the factory {self.factory} returned {what}, not a torch.nn.Module",
            hint="let it return the model",
        )

    def _arguments(self) -> tuple[Any, ...]:
        """None for a factory without parameters, the stored configuration for one with one."""
        try:
            parameters = inspect.signature(self.build).parameters.values()
        except ValueError:  # a callable written in C
            return ()
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        names = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
        if not names:
            return ()
        if len(names) == 1 and self.config is not None:
            return (dict(self.config),)
        raise UsageError(
            f"the factory {self.factory} needs {len(names)} arguments ({', '.join(names)})"
            if len(names) > 1
            else f"the factory {self.factory} takes {names[0]!r}, and {self.path} stores no "
            "configuration",
            hint="write one that takes none, or the stored configuration",
        )

    def _check(self, model: nn.Module, own: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
        """Raises MeasurementError unless the stored weights are the model's own, name by name. A
        tied weight may be stored under one of its names, and a buffer that the model computes be
        left over."""
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        given = {id(x) for name, x in named if name in state}
        tied = {name for name, x in named if id(x) in given}
        tensors = {name: x for name, x in own.items() if isinstance(x, Tensor)}
        unused = sorted(state.keys() - own.keys() - dict(model.named_buffers()).keys())
        misshapen = [
            f"{name} {list(state[name].shape)} instead of {list(x.shape)}"
            for name, x in tensors.items()
            if name in state and state[name].shape != x.shape
        ]
        problems = [
            f"{problem} {storage.some(names)}"
            for problem, names in (
                ("needs", sorted(tensors.keys() - state.keys() - tied)),
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
    """Open the weights at `path`, and import the factory of their model. Raises UsageError where
    there are none or no factory, MeasurementError for a damaged file and one without a state dict.
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
    split = open_distributed(path) if is_distributed(path) else {}
    if split:
        files, prefix = files_of(path, split), taken_off(split)
    else:
        files = storage.shards(path) if path.name.endswith(INDEX) else (path,)
        names = [name for file in files for name in storage.names_in(file)]
        if not names:
            raise MeasurementError(f"{path}: holds no tensor", hint="save model.state_dict()")
        prefix = storage.common_prefix(names)
    return StateDict(
        path=path,
        name=path.resolve().name,
        files=files,
        split=split,
        prefix=prefix,
        factory=factory,
        build=build,
        config=_config(path),
    )


def vocabulary(model: nn.Module, config: Mapping[str, Any] | None) -> int | None:
    """How many token ids a model knows: by the stored configuration, else its first embedding."""
    tables = (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
    return size(config or {}, "vocab_size") or next(tables, None)


def longest(model: nn.Module, config: Mapping[str, Any] | None) -> int | None:
    """The longest sequence a model has positions for, by the stored configuration or its own."""
    own = getattr(model, "config", None)
    its = {name: getattr(own, name, None) for name in LENGTHS}
    return size(config or {}, *LENGTHS) or size(its, *LENGTHS)


def _config(path: Path) -> Mapping[str, Any] | None:
    if path.suffix in storage.PICKLES:
        content = storage.read_pickle(path)
        return next((c for key in CONFIGS if isinstance(c := content.get(key), dict)), None)
    beside = (path if path.is_dir() else path.parent) / "config.json"
    return storage.read_json(beside) if beside.is_file() else None


def _open_to_capture(model: nn.Module) -> None:
    """Lead transformers' models inside to numdev's attention function; elsewhere a soft cap would
    be lost on the way to SDPA."""
    transformers = sys.modules.get("transformers")
    if transformers is None:  # then no model of its can be inside
        return
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            module.set_attn_implementation(attention_implementation(type(module)))
            module.config.get_text_config().use_cache = False
