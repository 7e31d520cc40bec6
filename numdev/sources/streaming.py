"""Run a model whose weights stay on disk: a layer's are read when it runs, and let go after it.

A `Deferred` stands for a stored tensor while transformers puts a model together, and records what
is done to it (casting, stacking experts). Units are the members of an outermost `ModuleList`
(layers) and the modules that hold no such list; hooks fill in one's weights before it runs and take
them out after. Values are made as the whole model's are and lie in memory as these do, so kernels
that care about alignment give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from numdev.errors import MeasurementError
from numdev.sources import files as storage

CANNOT = "this model cannot be streamed; load it whole, without --stream"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in a file."""

    file: Path
    name: str


Read = Callable[[Stored], Tensor]


class Deferred(Tensor):
    """A tensor without values; `made` makes them. `sealed` names whose place it holds free: no
    operation may use such a one. Only out-of-place operations are recorded."""

    origin: Stored | Callable[[Read], Tensor]  # a file, or a function of how to read one
    sealed: str
    _empty: Tensor

    @staticmethod
    def of(empty: Tensor, origin: Any, *, device: Any = "cpu", sealed: str = "") -> Any:
        """One like `empty` (on the meta device) that says it is on `device`."""
        made: Any = Tensor._make_wrapper_subclass(
            Deferred, empty.shape, strides=empty.stride(), dtype=empty.dtype, device=device
        )
        made._empty, made.origin, made.sealed = empty, origin, sealed
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # All of a recipe happens on one device, which is chosen when it is followed.
        kwargs = {name: x for name, x in (kwargs or {}).items() if name != "device"}
        for x in tree_flatten((args, kwargs))[0]:
            if isinstance(x, Deferred) and x.sealed:
                what = f"{x.sealed} is used while the module that holds it does not run"
                raise MeasurementError(what, hint=CANNOT)
        if func._schema.is_mutable:
            what = f"the weights are changed in place ({func}) while the model is built"
            raise MeasurementError(what, hint=CANNOT)

        def output(i: int, read: Read) -> Any:
            values, named = tree_map_only(Deferred, lambda x: x.made(read), (args, kwargs))
            return tree_flatten(func(*values, **named))[0][i]

        empties, named = tree_map_only(Deferred, lambda x: x._empty, (args, kwargs))
        outputs, whole = tree_flatten(func(*empties, **named))
        return whole.unflatten(
            Deferred.of(x, partial(output, i)) if isinstance(x, Tensor) else x
            for i, x in enumerate(outputs)
        )

    def made(self, read: Read) -> Tensor:
        """The tensor itself, on the device that `read` puts stored tensors on."""
        return read(self.origin) if isinstance(self.origin, Stored) else self.origin(read)


# A weight's `_parameters` or `_buffers`, its name there, itself, and what stands in its place.
Slot = tuple[dict[str, Any], str, Deferred, Any]


class Streamed:
    """A model on `device` whose weights come and go. It is run within `running`."""

    def __init__(self, model: nn.Module, *, device: str) -> None:
        self.model, self.device = model, torch.empty(0, device=device).device
        names = {module: name for name, module in model.named_modules()}
        empties: dict[int, Any] = {}  # a tied weight stays one, if only by what holds its places
        # The slots that are filled and emptied as one, by their module, in the model's order.
        self.units: dict[nn.Module, list[Slot]] = {}

        def slots(module: nn.Module) -> Iterator[Slot]:
            for kind in ("_parameters", "_buffers"):
                places = module.__dict__[kind]
                for name, x in list(places.items()):
                    if isinstance(x, Deferred) and not x.sealed:
                        path = f"{names[module]}.{name}".lstrip(".")
                        empty = empties.setdefault(
                            id(x), Deferred.of(x._empty, x.origin, device=self.device, sealed=path)
                        )
                        empty._is_param = kind == "_parameters"
                        places[name] = empty
                        yield places, name, x, empty
                    elif kind == "_buffers" and type(x) is Tensor:
                        places[name] = x.to(self.device)

        for unit in dict.fromkeys(_divided(model)):
            self.units[unit] = [slot for part in unit.modules() for slot in slots(part)]
        inside = {part for unit in self.units for part in unit.modules()}
        for module in names.keys() - inside:  # what a module that holds lists has itself is small
            self._fill(list(slots(module)))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the model be run."""

        def leave(unit: nn.Module, *_: Any) -> None:
            for places, name, _weight, empty in self.units[unit]:
                places[name] = empty

        with ExitStack() as stack:
            for unit, slots in self.units.items():
                enter = unit.register_forward_pre_hook(lambda *_, slots=slots: self._fill(slots))
                stack.callback(enter.remove)
                stack.callback(unit.register_forward_hook(leave, always_call=True).remove)
            yield

    @torch.no_grad()
    def _fill(self, slots: Sequence[Slot]) -> None:
        for places, name, weight, empty in slots:
            value = weight.made(self._read)
            places[name] = nn.Parameter(value, requires_grad=False) if empty._is_param else value

    def _read(self, stored: Stored) -> Tensor:
        with storage.open_safetensors(stored.file) as file:
            value: Tensor = file.get_tensor(stored.name)
            return value.to(self.device)


def _divided(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of the units, in the model's order; one may come twice."""
    if isinstance(module, nn.ModuleList):
        yield from module
    elif any(isinstance(m, nn.ModuleList) for m in module.modules()):
        for child in module.children():
            yield from _divided(child)
    else:
        yield module
