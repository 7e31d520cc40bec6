"""Tensors whose values come later: what is done to them is recorded, and done when they are wanted.

A checkpoint's weights are not always its model's: transformers renames them, casts them, stacks the
experts of a layer. A `Deferred` stands for a stored tensor while a model is put together: it has
shape, format and device, but no values. Every operation on one gives another that knows how it is
made. So the model's weights come out as recipes over stored tensors, whatever was done to them, and
`Deferred.made` follows a recipe for one of them alone.

Only out-of-place operations are recorded. A `sealed` one is a place held free: no operation may use
it, and one that does raises MeasurementError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from numdev.errors import MeasurementError


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
    """A tensor without values. `origin` says where they come from, `sealed` whose place it holds
    free, in words."""

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
        for x in _deferred((args, kwargs)):
            if x.sealed:
                raise MeasurementError(
                    f"{x.sealed} is used while the module that holds it does not run",
                    hint="this model cannot be streamed; load it whole with --no-stream",
                )
        if func._schema.is_mutable:
            raise MeasurementError(
                f"the weights are changed in place ({func}) while the model is built",
                hint="this model cannot be streamed; load it whole with --no-stream",
            )
        empty = func(*_emptied(args), **_emptied(kwargs))
        outputs, whole = tree_flatten(empty)
        return whole.unflatten(
            Deferred.of(x, _Step(operation=func, args=args, kwargs=kwargs, output=i))
            if isinstance(x, Tensor)
            else x
            for i, x in enumerate(outputs)
        )

    def holding_place(self, name: str, device: Any) -> Any:
        """A sealed one of the same shape and format that says it is on `device`."""
        return Deferred.of(self._empty, self.origin, device=device, sealed=name)

    def sources(self) -> set[Stored]:
        """The stored tensors its values come from."""
        if isinstance(self.origin, Stored):
            return {self.origin}
        return set().union(
            *(x.sources() for x in _deferred((self.origin.args, self.origin.kwargs)))
        )

    def made(self, read: Callable[[Stored], Tensor]) -> Tensor:
        """The tensor itself, on the device that `read` puts stored tensors on."""
        step = self.origin
        if isinstance(step, Stored):
            return read(step)
        args, kwargs = tree_map_only(Deferred, lambda x: x.made(read), (step.args, step.kwargs))
        found: Tensor = tree_flatten(step.operation(*args, **kwargs))[0][step.output]
        return found


def _deferred(tree: Any) -> Iterator[Deferred]:
    return (x for x in tree_flatten(tree)[0] if isinstance(x, Deferred))


def _emptied(tree: Any) -> Any:
    return tree_map_only(Deferred, lambda x: x._empty, tree)
