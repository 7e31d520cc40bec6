"""Run a model whose weights stay on disk: a layer's are read when it runs, and let go after it.

A `Deferred` stands for a stored tensor while transformers puts a model together, and records what
is done to it (renaming, casting, stacking experts). Units are the members of an outermost
`ModuleList` (layers) and the modules that hold no such list; hooks fill in one's weights before it
runs and take them out after, while a thread reads the next one's. Values are made as the whole
model's are, operation by operation, and lie in memory as these do, so kernels that care about
alignment give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from numdev.errors import MeasurementError
from numdev.sources import files as storage
from numdev.sources.capture import Enough
from numdev.sources.watch import numbered

CANNOT = "this model cannot be streamed; load it whole with --no-stream"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in a file."""

    file: Path
    name: str


@dataclass(frozen=True, kw_only=True, eq=False)
class _Step:
    """One operation of a recipe, and which of its outputs is meant."""

    operation: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: int


class Deferred(Tensor):
    """A tensor without values. `origin` says where they come from; `sealed` whose place it holds
    free: no operation may use such a one. Only out-of-place operations are recorded."""

    origin: Stored | _Step
    sealed: str
    _empty: Tensor

    @staticmethod
    def of(empty: Tensor, origin: Stored | _Step, *, device: Any = "cpu", sealed: str = "") -> Any:
        """One like `empty` (on the meta device) that says it is on `device`."""
        made: Any = Tensor._make_wrapper_subclass(
            Deferred, empty.shape, strides=empty.stride(), dtype=empty.dtype, device=device
        )
        made._empty, made.origin, made.sealed = empty, origin, sealed
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        # Tensor's own would ask for values.
        return f"Deferred({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # All of a recipe happens on one device, which is chosen when it is followed.
        kwargs = {name: x for name, x in (kwargs or {}).items() if name != "device"}
        sealed = [x.sealed for x in tree_flatten((args, kwargs))[0] if isinstance(x, Deferred)]
        if any(sealed):
            name = next(filter(None, sealed))
            what = f"{name} is used while the module that holds it does not run"
            raise MeasurementError(what, hint=CANNOT)
        if func._schema.is_mutable:
            what = f"the weights are changed in place ({func}) while the model is built"
            raise MeasurementError(what, hint=CANNOT)
        empties, named = tree_map_only(Deferred, lambda x: x._empty, (args, kwargs))
        outputs, whole = tree_flatten(func(*empties, **named))
        return whole.unflatten(
            Deferred.of(x, _Step(operation=func, args=args, kwargs=kwargs, output=i))
            if isinstance(x, Tensor)
            else x
            for i, x in enumerate(outputs)
        )

    def made(self, read: Callable[[Stored], Tensor]) -> Tensor:
        """The tensor itself, on the device that `read` puts stored tensors on."""
        step = self.origin
        if isinstance(step, Stored):
            return read(step)
        args, kwargs = tree_map_only(Deferred, lambda x: x.made(read), (step.args, step.kwargs))
        found: Tensor = tree_flatten(step.operation(*args, **kwargs))[0][step.output]
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Slot:
    """The place of one weight."""

    module: nn.Module
    kind: str  # `_parameters` or `_buffers`
    name: str
    weight: Deferred
    empty: Any  # What stands there while the weight is not

    def put(self, value: Any) -> None:
        self.module.__dict__[self.kind][self.name] = value

    def fill(self, value: Tensor) -> None:
        is_buffer = self.kind == "_buffers"
        self.put(value if is_buffer else nn.Parameter(value, requires_grad=False))


class Streamed:
    """A model on `device` whose weights come and go. It is run within `running`."""

    def __init__(self, model: nn.Module, *, device: str) -> None:
        self.model, self.device = model, torch.empty(0, device=device).device
        names = {module: name for name, module in model.named_modules()}
        self._free: dict[int, Any] = {}  # a tied weight stays one, if only by what holds its places
        self.units: dict[nn.Module, list[Slot]] = {}
        """The slots that are filled and emptied as one, by their module, in the model's order."""
        inside: set[nn.Module] = set()
        for unit in dict.fromkeys(_divided(model)):
            inside.update(unit.modules())
            if slots := [s for part in unit.modules() for s in self._emptied(names, part)]:
                self.units[unit] = slots
        for module in model.modules():
            for name, buffer in module.__dict__["_buffers"].items():
                if buffer is not None and not isinstance(buffer, Deferred):
                    module.__dict__["_buffers"][name] = buffer.to(self.device)
            if module not in inside:  # what a module that holds lists has of its own is small
                for slot in self._emptied(names, module):
                    slot.fill(self._read((slot,))[0])

    def _emptied(self, names: dict[nn.Module, str], module: nn.Module) -> Iterator[Slot]:
        """The places of a module's own weights, all held free."""
        for kind in ("_parameters", "_buffers"):
            for name, weight in list(module.__dict__[kind].items()):
                if isinstance(weight, Deferred) and not weight.sealed:
                    path = f"{names[module]}.{name}".lstrip(".")
                    if id(weight) not in self._free:
                        self._free[id(weight)] = Deferred.of(
                            weight._empty, weight.origin, device=self.device, sealed=path
                        )
                    empty = self._free[id(weight)]
                    empty._is_param = kind == "_parameters"
                    slot = Slot(module=module, kind=kind, name=name, weight=weight, empty=empty)
                    slot.put(empty)
                    yield slot

    @contextmanager
    def running(self, layers: Sequence[int] | None = None) -> Iterator[None]:
        """Let the model be run. Where only the attention of these layers matters, the run ends
        after the last of them (`Enough`), and no later weight is read. None: all of the model is
        run."""
        waited_for = self._with(layers)
        units = list(self.units)
        after = dict(pairwise(units))
        ahead: dict[nn.Module, Future[list[Tensor]]] = {}

        def enter(unit: nn.Module, _: Any) -> None:
            read = ahead.pop(unit).result() if unit in ahead else self._read(self.units[unit])
            for slot in self.units[unit]:
                slot.fill(read.pop(0))
            ahead.clear()
            if unit in after and waited_for != {unit}:
                ahead[after[unit]] = pool.submit(self._read, self.units[after[unit]])

        def stop(unit: nn.Module, *_: Any) -> None:
            if waited_for is not None:
                waited_for.discard(unit)
                if not waited_for:
                    raise Enough

        def leave(unit: nn.Module, *_: Any) -> None:
            for slot in self.units[unit]:
                slot.put(slot.empty)

        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(1))
            for unit in units:
                for handle in (
                    unit.register_forward_pre_hook(enter),
                    unit.register_forward_hook(leave, always_call=True),
                    unit.register_forward_hook(stop),
                ):
                    stack.callback(handle.remove)
            yield

    def _read(self, slots: Sequence[Slot]) -> list[Tensor]:
        with ExitStack() as stack, torch.no_grad():
            opened: dict[Path, Any] = {}

            def read(stored: Stored) -> Tensor:
                if stored.file not in opened:
                    file = storage.open_safetensors(stored.file)
                    opened[stored.file] = stack.enter_context(file)
                value: Tensor = opened[stored.file].get_tensor(stored.name)
                if value.numel():  # reading a byte of each page brings a mapped tensor into memory
                    value.view(-1).view(torch.uint8)[::4096].max()
                return value.to(self.device)

            return [slot.weight.made(read) for slot in slots]

    def _with(self, layers: Sequence[int] | None) -> set[nn.Module] | None:
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
        return {unit for unit in self.units if not asked.isdisjoint(unit.modules())} or None


def _divided(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of the units, in the model's order; one may come twice."""
    if isinstance(module, nn.ModuleList):
        yield from module
    elif any(isinstance(m, nn.ModuleList) for m in module.modules()):
        for child in module.children():
            yield from _divided(child)
    else:
        yield module
