"""What goes into a function and what comes out of it, by name.

A report names tensors by an identifier: of an output by itself `output`, of several
`output_0` or `output_loss`; of an argument the parameter's name; of a gradient that and
`_grad`."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from numdev.exact.result_dtypes import is_floating
from numdev.exact.wide_copies import storage_extent, tensors_in
from numdev.exact.wide_tensors import Wide
from numdev.tensor_properties import GRADIENT

OUTPUT = "output"
LONGEST_NAME = 70  # characters of a name, beside what tells two apart
Values = dict[str, Tensor]  # tensors by name
# Dtypes that are names for bits alone: PyTorch cannot even convert them
UNCOMPUTED = re.compile(r"bits\d+(x\d)?|u?int[1-7]|float4_\w+")


@dataclass(frozen=True, kw_only=True, eq=False)
class Arguments:
    """What a function is called with: trees (tuples, lists, mappings) of tensors and
    other objects. Two names stand for one tensor where it is passed twice."""

    positional: tuple[object, ...] = ()
    named: Mapping[str, object] = field(default_factory=dict)
    names: tuple[str, ...] = ()  # of the positional ones, as far as they are told

    @property
    def tree(self) -> tuple[tuple[object, ...], dict[str, object]]:
        """Returns the positional arguments, and the named ones in a new mapping."""
        return self.positional, dict(self.named)

    @property
    def device(self) -> str:
        """Returns the device of the first tensor, as text; `cpu` without one."""
        return next((str(x.device) for x in self.leaves().values()), "cpu")

    def leaves(self) -> Values:
        """Returns each tensor once, by name, those of positional arguments first. A
        positional argument whose parameter's name is not known is `argument_0`, by its
        place. A tensor inside a tree has its path in the name (`x_0`)."""
        named = (*self.names, *(f"argument_{i}" for i in range(len(self.positional))))
        pairs: list[tuple[str, object]] = []
        for i, value in enumerate(self.positional):
            first = named[i] if i < len(self.names) else f"argument_{i}"
            pairs += _flat(value, first)
        for name, value in self.named.items():
            pairs += _flat(value, name)
        once: dict[int, tuple[str, object]] = {}
        for path, x in pairs:
            once.setdefault(id(x), (path, x))
        return _named(once.values())

    def unseen(self) -> list[str]:
        """Returns the names of the classes of objects among the arguments that hold
        tensors, as dataclasses and caches do, each once. Their tensors are no `leaves`:
        they are neither rounded nor differentiated, and what is written into them is no
        result."""
        every = [x for _, x in _flat(self.tree, "") if not isinstance(x, Tensor)]
        closed = [x for x in every if next(tensors_in(x), None) is not None]
        return list(dict.fromkeys(type(x).__name__ for x in closed))

    def mapped(self, change: Callable[[str, Tensor], Tensor]) -> Arguments:
        """Returns arguments with each tensor replaced by `change(name, tensor)`, called
        once for a tensor that stands in several places; anything else is as it is."""
        by_identity = {id(x): change(name, x) for name, x in self.leaves().items()}
        positional, named = tree_map(lambda x: by_identity.get(id(x), x), self.tree)
        return Arguments(positional=positional, named=named, names=self.names)

    def copied(self, *, gradients: bool) -> Arguments:
        """Returns arguments whose tensors are copies in memory of their own, apart from
        autograd, with the same strides: elements that share memory do so in the copy.
        With `gradients` all floating-point ones, real or complex, require a gradient;
        without, none does. Other objects (a cache, a generator) are deep copies too,
        since a function may change them; one that cannot be copied is as it is."""

        def copy(name: str, x: Tensor) -> Tensor:
            """Returns a copy of a tensor, apart from autograd."""
            if isinstance(x, Wide):
                # Detached by PyTorch it would load its distributed tensors, for seconds
                copied: Tensor = Wide.of(x.exact.clone(), x.dtype)
            else:
                copied = changed_in_memory(x.detach(), Tensor.clone)
            return copied.requires_grad_() if gradients and is_floating(x) else copied

        return self._mapped_with_objects(copy)

    def _mapped_with_objects(self, change: Callable[[str, Tensor], Tensor]) -> Arguments:
        """Returns arguments as `mapped`, with deep copies of the objects that are no
        tensors, in which `change(name, tensor)` stands for a tensor among the arguments
        too. An object that cannot be copied is as it is."""
        changed = {id(x): change(name, x) for name, x in self.leaves().items()}
        memo: dict[int, object] = dict(changed)

        def copied(x: object) -> object:
            """Returns what stands for a tensor, a deep copy of anything else."""
            if id(x) in changed:
                return changed[id(x)]
            try:
                return deepcopy(x, memo)
            except Exception:  # of a class that cannot be copied, or foreign code
                return x

        positional, named = tree_map(copied, self.tree)
        return Arguments(positional=positional, named=named, names=self.names)


def changed_in_memory(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns a tensor with the strides of `x`, also where it is expanded or a slice,
    whose elements are those of `change(memory)`. `memory` has one axis: all numbers from
    the first to the last of x, those in gaps between them too. What `change` returns, a
    copy of as many numbers, may be of another dtype or on another device. `x` must have
    a number for each element, and be apart from autograd."""
    memory = x.as_strided((storage_extent(x),), (1,), x.storage_offset())
    changed = change(memory.resolve_conj().resolve_neg())
    return changed.as_strided(x.shape, x.stride(), 0)


def arguments_of(data: object, function: Callable[..., object]) -> Arguments:
    """Returns what a function of inputs returned, as arguments of `function`: a mapping
    whose keys are all strings as named arguments, a tuple or a list as positional ones,
    anything else as a single positional one."""
    if isinstance(data, Mapping) and all(isinstance(name, str) for name in data):
        return Arguments(named=dict(data))
    positional = tuple(data) if isinstance(data, tuple | list) else (data,)
    return Arguments(positional=positional, names=parameters_of(function))


def parameters_of(function: Callable[..., object]) -> tuple[str, ...]:
    """Returns the names of a function's positional parameters, of a module those of
    `forward`; empty where they cannot be read."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds)


def outputs_of(output: object) -> Values:
    """Returns the tensors of what a function returned by name, in order: one that is
    returned by itself is `output`, one in a tuple, list, dict or dataclass has its path
    in the name (`output_0`, `output_loss`). A tensor that is returned twice has two
    names, as if it were a copy. What is no tensor is left out, and so is what other
    objects hold, as a mapping that PyTorch does not look into; empty without tensors."""
    return _named(_flat(opened(output), OUTPUT))


def others_of(output: object) -> list[str]:
    """Returns what a function returned that `outputs_of` leaves out, each by its name and
    type: `output_1 (float)`. None is left out too."""
    return [
        f"{identifier(path)} ({type(x).__name__})"
        for path, x in _flat(opened(output), OUTPUT)
        if x is not None and not isinstance(x, Tensor)
    ]


def opened(tree: object) -> object:
    """Returns a tree in which a mapping of its fields by name stands for each dataclass,
    also for one inside another; PyTorch does not look into dataclasses. A dataclass's
    type, where it stands in the tree itself, stays."""

    def fields_of(x: object) -> object:
        """Returns the fields of a dataclass by name, opened too; anything else as it
        is."""
        if not dataclasses.is_dataclass(x) or isinstance(x, type):
            return x
        return {f.name: opened(getattr(x, f.name)) for f in dataclasses.fields(x)}

    return tree_map(fields_of, tree)


def gradient_name(name: str) -> str:
    """Returns the name of a tensor's gradient: `x_grad` for `x`."""
    return f"{name}{GRADIENT}"


def _flat(value: object, first: str) -> list[tuple[str, object]]:
    """Returns the leaves of a tree (of tuples, lists and dicts) with their paths, which
    begin with `first`: `output[0]['loss']`. None is a leaf, and so is a dataclass."""
    paths, _ = tree_flatten_with_path(value)
    return [(first + keystr(path), x) for path, x in paths]


def _named(pairs: Iterable[tuple[str, object]]) -> Values:
    """Returns the tensors of (path, leaf) pairs by name; a leaf that is no tensor is left
    out. A name that an earlier tensor has gets `_2`, `_3`, ..."""
    values: Values = {}
    for path, x in pairs:
        if not isinstance(x, Tensor):
            continue
        name = identifier(path)
        number = 1
        while name in values:
            number += 1
            name = f"{identifier(path)}_{number}"
        values[name] = x
    return values


def identifier(path: str) -> str:
    """Returns a path in a tree as a name: `output_0_loss` for `output[0]['loss']`. It
    keeps ASCII letters, digits and dots, has one `_` for each run of anything else, no
    `_` or dot at either end, and then one `_` before a first character that is no letter;
    it is cut to LONGEST_NAME characters. Two paths may share one."""
    words = re.sub(r"[^A-Za-z0-9.]+", "_", path).strip("_.")
    words = words if words[:1].isalpha() else f"_{words}"
    return words[:LONGEST_NAME]


def without_numbers(x: Tensor) -> str | None:
    """Returns in words why a tensor has no memory with a number for each element that
    PyTorch computes with: on the device meta, sparse, nested, quantized, or of a dtype in
    UNCOMPUTED; None where it has."""
    dtype = str(x.dtype).removeprefix("torch.")
    kinds = {
        "on the device meta": x.is_meta,
        "nested": x.is_nested,
        f"a {str(x.layout).removeprefix('torch.')} tensor": x.layout != torch.strided,
        "quantized": x.is_quantized,
        f"{dtype}, with which PyTorch does not compute": UNCOMPUTED.fullmatch(dtype),
    }
    return next((kind for kind, holds in kinds.items() if holds), None)


def looks_unwritten(x: Tensor) -> bool:
    """Whether a tensor looks like memory for an output into which nobody has written
    (`task_environment.uninitialised_is_nan`): it is NaN everywhere, or of integers the
    largest number. False for fewer than two elements, or for a bool or complex tensor."""
    if x.numel() < 2 or x.dtype == torch.bool or x.is_complex():
        return False
    if x.is_floating_point():
        return bool(x.isnan().all())
    return bool((x == torch.iinfo(x.dtype).max).all())


def as_real(x: Tensor) -> Tensor:
    """Returns a complex tensor as its real and imaginary parts, [..., 2]; any other as
    it is."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
