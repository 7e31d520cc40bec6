"""Run a model whose weights stay on disk: a layer's are read when it runs, and let go after it.

A model without values (`Checkpoint.deferred_model`) is divided into units: every member of an
outermost `ModuleList` (a layer) is one, and beside these every module that holds no such list
(embeddings, final norm, head). A hook before a unit runs fills in its weights, one after it takes
them out; the hidden states go from layer to layer as they always do. While a unit runs the next one
is read by a thread. So there are two units' weights in memory, whatever the depth.

Weights that are tied are read for each unit that has them. What a module that holds lists has of
its own stays: it is small. A unit whose weights are used while it does not run is found out
(`numdev.sources.deferred`). Values are made as the whole model's are, operation by operation, and
lie in memory as these do (mapped where nothing is to be cast), so that kernels which care about
alignment give the same bits.

accelerate's hooks do the same one linear layer at a time, from files that transformers opens itself
or copies; here only `numdev.sources.files` opens a checkpoint's files, and reading overlaps with
running.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from numdev.sources import files as storage
from numdev.sources.capture import Enough
from numdev.sources.deferred import Deferred, Stored
from numdev.sources.watch import numbered

PAGE = 4096
"""Bytes. Reading one of each brings a mapped tensor into memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Slot:
    """The place of one weight."""

    module: nn.Module
    kind: str
    """`_parameters` or `_buffers`."""
    name: str
    weight: Deferred
    empty: Any
    """What stands there while the weight is not."""

    def put(self, value: Any) -> None:
        self.module.__dict__[self.kind][self.name] = value

    def fill(self, value: Tensor) -> None:
        is_buffer = self.kind == "_buffers"
        self.put(value if is_buffer else nn.Parameter(value, requires_grad=False))


@dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """What is filled and emptied as one."""

    name: str
    module: nn.Module
    slots: tuple[Slot, ...]


@dataclass(kw_only=True, eq=False)
class _Pass:
    """One pass over the model: what is read ahead, and which units still matter."""

    pool: ThreadPoolExecutor
    waited_for: set[Unit] | None
    """Units after which nothing matters; None: all of the model is run."""
    ahead: tuple[Unit, Future[list[Tensor]]] | None = field(default=None)


class Streamed:
    """A model on `device` whose weights come and go. It is run within `running`."""

    def __init__(self, model: nn.Module, *, device: str) -> None:
        self.model, self.device = model, torch.empty(0, device=device).device
        names = {module: name for name, module in model.named_modules()}
        self._free: dict[int, Any] = {}  # a tied weight stays one, if only by what holds its places
        modules = list(_divided(model))
        self.units = [
            Unit(name=names[m], module=m, slots=slots)
            for m in modules
            if (slots := tuple(s for part in m.modules() for s in self._emptied(names, part)))
        ]
        inside = {part for m in modules for part in m.modules()}
        for module in model.modules():
            for name, buffer in module.__dict__["_buffers"].items():
                if buffer is not None and not isinstance(buffer, Deferred):
                    module.__dict__["_buffers"][name] = buffer.to(self.device)
            if module not in inside:
                for slot in self._emptied(names, module):
                    slot.fill(self._read((slot,))[0])

    def _emptied(self, names: dict[nn.Module, str], module: nn.Module) -> Iterator[Slot]:
        """The places of a module's own weights, all held free."""
        for kind in ("_parameters", "_buffers"):
            for name, weight in list(module.__dict__[kind].items()):
                if isinstance(weight, Deferred) and not weight.sealed:
                    path = f"{names[module]}.{name}".lstrip(".")
                    if id(weight) not in self._free:
                        self._free[id(weight)] = weight.holding_place(path, self.device)
                    empty = self._free[id(weight)]
                    empty._is_param = kind == "_parameters"
                    slot = Slot(module=module, kind=kind, name=name, weight=weight, empty=empty)
                    slot.put(empty)
                    yield slot

    @contextmanager
    def running(self, layers: Sequence[int] | None = None) -> Iterator[None]:
        """Let the model be run, with what is not stored for as long as it lasts. Where only the
        attention of these layers matters, and the last of them is known, the run ends after it
        (`Enough`), and no later weight is read. None: all of the model is run."""
        with ExitStack() as stack:
            now = _Pass(
                pool=stack.enter_context(ThreadPoolExecutor(1)), waited_for=self._with(layers)
            )
            for unit, after in zip(self.units, [*self.units[1:], None], strict=True):
                for handle in self._hooked(now, unit, after):
                    stack.callback(handle.remove)
            yield

    def _hooked(self, now: _Pass, unit: Unit, after: Unit | None) -> Iterator[Any]:
        def enter(*_: Any) -> None:
            values = self._values(now, unit)
            for slot in unit.slots:
                slot.fill(values.pop(0))
            if after and now.waited_for != {unit}:
                now.ahead = (after, now.pool.submit(self._read, after.slots))

        def leave(*_: Any) -> None:
            for slot in unit.slots:
                slot.put(slot.empty)

        def stop(*_: Any) -> None:
            if now.waited_for is not None:
                now.waited_for.discard(unit)
                if not now.waited_for:
                    raise Enough

        yield unit.module.register_forward_pre_hook(enter)
        yield unit.module.register_forward_hook(leave, always_call=True)
        yield unit.module.register_forward_hook(stop)

    def _values(self, now: _Pass, unit: Unit) -> list[Tensor]:
        """Of all its slots: read ahead, or now."""
        ahead, now.ahead = now.ahead, None
        if ahead is None or ahead[0] is not unit:
            return self._read(unit.slots)
        return ahead[1].result()

    def _read(self, slots: Sequence[Slot]) -> list[Tensor]:
        with ExitStack() as stack:
            files: dict[Any, Any] = {}

            def read(stored: Stored) -> Tensor:
                if stored.file not in files:
                    opened = storage.open_safetensors(stored.file)
                    files[stored.file] = stack.enter_context(opened)
                value: Tensor = files[stored.file].get_tensor(stored.name)
                if value.numel():
                    value.view(-1).view(torch.uint8)[::PAGE].max()
                return value.to(self.device)

            with torch.no_grad():
                return [slot.weight.made(read) for slot in slots]

    def _with(self, layers: Sequence[int] | None) -> set[Unit] | None:
        """The units that hold the attention of these layers; None where that cannot be told: where
        a layer has no number of its own, or may run more than once."""
        if layers is None:  # a generation chooses its next token by the head
            return None
        numbers = numbered(self.model)
        config: Any = self.model.config
        depth = getattr(config.get_text_config(), "num_hidden_layers", None)
        if numbers is None or len(set(numbers.values())) != depth:
            return None
        modules = dict(self.model.named_modules())
        asked = {modules[name] for name, number in numbers.items() if number in layers}
        return {u for u in self.units if not asked.isdisjoint(u.module.modules())} or None


def _divided(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of the units, in the model's order, each once."""
    found: dict[nn.Module, None] = {}

    def walk(part: nn.Module) -> None:
        if isinstance(part, nn.ModuleList):
            found.update(dict.fromkeys(part))
        elif any(isinstance(m, nn.ModuleList) for m in part.modules()):
            for child in part.children():
                walk(child)
        else:
            found[part] = None

    walk(module)
    return iter(found)
