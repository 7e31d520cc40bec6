"""Which experts a model's routers choose, and runs in which they choose those that a
program recorded.

A router chooses by `topk` over the scores of all experts. What tells it from other uses
of `topk`: it chooses as many as were recorded, for each token, and is the last of its
layer to do so, since groups of experts are chosen before experts, and keys before
both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from numdev.sources.capture import module_hooks
from numdev.studies.effects.rounding_sites import layer_names

TOPK = (torch.topk, torch.Tensor.topk)
NO_EXPERT = -1  # of a token for which none was recorded
Choice = tuple[int, int]  # a layer, and which of its calls of topk chooses its experts


class NotReplayed(Exception):
    """The recorded experts cannot be put in the place of the model's own; its message
    says why."""


class Routing(NamedTuple):
    """The experts that a model chooses for the n tokens of a sequence, in each layer that
    chooses some."""

    choices: tuple[Choice, ...]  # in the model's order
    experts: np.ndarray  # int64 [n, choices, k]
    of: int  # among how many experts each is chosen
    layers: int  # of the model, with those that choose none

    def at_choices(self, recorded: np.ndarray) -> np.ndarray:
        """Returns recorded experts, [n, layers, k], as int64 [n, choices, k]. `recorded`:
        of all layers of the model, or of those that choose experts. Raises NotReplayed
        for another number of layers, tokens or experts, and for an expert's number that
        is too large for the model."""
        _tokens, layers, k = recorded.shape
        if layers == self.layers != len(self.choices):
            recorded = recorded[:, [layer for layer, _ in self.choices]]
        if recorded.shape != self.experts.shape:
            raise NotReplayed(
                f"routed_experts has {k} experts in {layers} layers, the model chooses "
                f"{self.experts.shape[2]} in {len(self.choices)} of {self.layers}"
            )
        if recorded.max() >= self.of:
            raise NotReplayed(
                f"routed_experts has {recorded.max()}, and a layer has {self.of} experts"
            )
        return recorded

    def count_other(self, recorded: np.ndarray) -> tuple[int, int]:
        """Returns how many of the recorded experts the model does not choose for their
        token and layer, and how many were recorded; NO_EXPERT is none. `recorded`: as
        `at_choices` returns it."""
        return count_other(recorded, self.experts)


def count_other(a: np.ndarray, b: np.ndarray) -> tuple[int, int]:
    """Returns how many experts of `a` are not among those of `b` for the same token and
    layer, and how many experts of `a` were compared. An entry NO_EXPERT of `a`, and a
    token and layer for which `b` has none, are left out. `a`, `b`: [n, layers, k]; k may
    differ."""
    both = (a != NO_EXPERT) & (b != NO_EXPERT).any(axis=-1, keepdims=True)
    shared = (a[..., :, None] == b[..., None, :]).any(axis=-1)
    return int((both & ~shared).sum()), int(both.sum())


class RouterCalls(TorchFunctionMode):
    """A mode that sees every call of `topk` in a model's layers. Where it is told to
    (`forced`), a call returns other indices, with the scores at these as values. `calls`
    has the indices that the model would choose itself."""

    def __init__(
        self, model: nn.Module, forced: Mapping[Choice, np.ndarray] | None = None
    ) -> None:
        """`forced`: by (layer, number of the call in it) the indices to return, int64 [n,
        k]; at NO_EXPERT the model chooses."""
        super().__init__()
        self.layers = {
            model.get_submodule(name): i for i, name in enumerate(layer_names(model))
        }
        self.forced = forced or {}
        self.running: list[int] = []
        # By layer, of each call: the indices that it chose, and among how many
        self.calls: dict[int, list[tuple[Tensor, int]]] = defaultdict(list)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Returns a context in which the model is to run once; its calls of `topk` are
        added to `calls`. A second run needs another object."""

        def enter(layer: nn.Module, *_: object) -> None:
            """Notes that a layer begins."""
            self.running.append(self.layers[layer])

        def leave(*_: object) -> None:
            """Notes that a layer ends."""
            self.running.pop()

        with module_hooks(self.layers, enter, leave), self:
            yield

    def __torch_function__(
        self, func: Callable[..., object], types: object,
        args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None,
    ) -> object:  # fmt: skip
        """Returns the function's result, or that of a forced call of `topk`."""
        named = dict(kwargs or {})
        result = func(*args, **named)
        if func not in TOPK or not self.running:
            return result
        scores = cast(Tensor, args[0] if args else named["input"])
        indices = cast(Sequence[Tensor], result)[1]
        calls = self.calls[self.running[-1]]
        forced = self.forced.get((self.running[-1], len(calls)))
        calls.append((indices, scores.shape[-1]))
        if forced is None:
            return result
        experts = torch.from_numpy(forced).to(indices.device).reshape(indices.shape)
        experts = torch.where(experts == NO_EXPERT, indices, experts)
        return torch.return_types.topk((scores.gather(-1, experts), experts))


def routing_of(
    model: nn.Module, run: Callable[[], object], tokens: int, k: int
) -> Routing:
    """Runs a model once, by `run`, on `tokens` tokens, and returns the experts that it
    chooses where each token has `k` in a layer: in each layer by the last call of `topk`
    of that size. Raises NotReplayed where no layer chooses so many, and where layers have
    different numbers of experts; raises what `run` raises."""
    seen = RouterCalls(model)
    with seen.following():
        run()
    choices, experts, sizes = [], [], set[int]()
    for layer, calls in sorted(seen.calls.items()):
        fitting = [i for i, (x, _) in enumerate(calls) if x.numel() == tokens * k]
        fitting = [i for i in fitting if calls[i][0].shape[-1] == k]
        if fitting:
            indices, size = calls[fitting[-1]]
            choices.append((layer, fitting[-1]))
            experts.append(indices.reshape(tokens, k).cpu().numpy())
            sizes.add(size)
    if not choices:
        raise NotReplayed(f"no layer of the model chooses {k} experts of each token")
    if len(sizes) > 1:
        raise NotReplayed("the model's layers have different numbers of experts")
    (size,) = sizes
    return Routing(tuple(choices), np.stack(experts, axis=1), size, len(seen.layers))
