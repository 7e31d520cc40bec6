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
from numdev.sources.checkpoint import Weights
from numdev.sources.dcp import is_distributed

SUFFIXES = (".safetensors", *storage.PICKLES)
INDEX = ".index.json"
CONFIGS = ("model_args", "hyper_parameters", "model_config", "config", "args")
"""Where training scripts put the model's configuration: nanoGPT, Lightning, and others."""


@dataclass(frozen=True, kw_only=True)
class StateDict(Weights):
    """Opened weights and the factory of their model."""

    factory: str
    build: Callable[..., Any]

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
        state = dict(self.fitted(model).tensors(tied=True))
        self._check(model, state)
        model.load_state_dict(state, strict=False)
        return model.to(device).eval()

    def _built(self) -> nn.Module:
        """The factory's model, of no argument or the stored configuration."""
        arguments = (dict(self.config),) if self.config else ()
        try:
            signature = inspect.signature(self.build)
            required = [p for p in signature.parameters.values() if p.default is p.empty]
            if all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in required):
                arguments = ()
            signature.bind(*arguments)
        except (TypeError, ValueError) as error:  # ValueError: no signature, it is written in C
            what = f"the factory {self.factory} cannot be called for {self.path}: {error}"
            hint = "write one that takes no argument, or the configuration stored with the weights"
            raise UsageError(what, hint=hint) from error
        try:
            model = self.build(*arguments)
        except (Exception, SystemExit) as error:
            words = f"{type(error).__name__}: {storage.one_line(error)}"
            what = f"the factory {self.factory} raised {words}"
            raise MeasurementError(what, hint="call it in Python to see where") from error
        if isinstance(model, nn.Module):
            return model
        what = f"the factory {self.factory}: expected a torch.nn.Module, got {type(model).__name__}"
        raise UsageError(what, hint="let it return the model")

    def _check(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Raises MeasurementError unless the stored weights are the model's own, name by name. A
        tied weight may be stored under one of its names, and a buffer that the model computes be
        left over."""
        own = {name: x for name, x in model.state_dict().items() if isinstance(x, Tensor)}
        named = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        stored = {id(x) for name, x in named.items() if name in state}
        tied = {name for name, x in named.items() if id(x) in stored}
        computed = dict(model.named_buffers()).keys()
        storage.refuse_misfits(
            self.path,
            f"{type(model).__name__} of {self.factory}",
            missing=own.keys() - state.keys() - tied,
            unused=state.keys() - model.state_dict().keys() - computed,
            misshapen=[
                (name, state[name].shape, x.shape)
                for name, x in own.items()
                if name in state and state[name].shape != x.shape
            ],
        )


def open_state_dict(path: Path, factory: str | None) -> StateDict:
    """Open the weights at `path`, and import the factory of their model. Raises UsageError where
    there are none or no factory, MeasurementError for a damaged file and one without a state dict.
    """
    if not (is_distributed(path) or path.suffix in SUFFIXES or path.name.endswith(INDEX)):
        accepted = f"{', '.join(SUFFIXES)}, {INDEX} or a distributed checkpoint"
        raise UsageError(f"{path}: expected {accepted}", hint="see docs/inputs.md")
    if not factory or ":" not in factory:
        what = f"{path}: its model: expected --model package.module:factory, got {factory!r}"
        raise UsageError(what, hint="or give the directory of a Hugging Face checkpoint")
    build = imported(factory, "model")
    own: dict[str, Any] = {"factory": factory, "build": build, "config": _config(path)}
    if is_distributed(path):
        return StateDict.opened(path, **own)
    files = storage.shards(path) if path.name.endswith(INDEX) else (path,)
    names = [name for file in files for name, _ in storage.read(file)]
    if not names:
        raise MeasurementError(f"{path}: holds no tensor", hint="save model.state_dict()")
    return StateDict.opened(path, files, prefix=storage.common_prefix(names), **own)


def _config(path: Path) -> Mapping[str, Any]:
    """The configuration stored with the weights; empty where there is none."""
    if path.suffix in storage.PICKLES:
        content = storage.read_pickle(path)
        return next((c for key in CONFIGS if isinstance(c := content.get(key), dict)), {})
    beside = (path if path.is_dir() else path.parent) / "config.json"
    return storage.read_json(beside) if beside.is_file() else {}


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
