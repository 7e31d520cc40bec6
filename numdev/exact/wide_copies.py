"""Copies of arguments and modules whose tensors are `Wide`."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from numdev.exact.result_dtypes import is_floating
from numdev.exact.unsupported_operations import unsupported_error
from numdev.exact.wide_tensors import Wide, widened


def wide_arguments(arguments: tuple[object, ...]) -> tuple[object, ...]:
    """Returns a copy of a tree of arguments (tuples, lists, dicts). Floating-point
    tensors become `Wide` tensors of the same values, shape, strides and dtype, leaves of
    autograd that require a gradient where the originals do; other tensors are cloned.
    Other objects are kept, and so are tensors inside them, as in a dataclass. Tensors
    that are one object stay one in the copy. Tensors that share storage in one dtype do
    so in the copy, but for `Wide` ones, and for a tensor beside its lazy conjugate or
    negative.

    Raises Unsupported for a tensor that is not strided (sparse)."""
    copies = wide_copies(x for x in tree_leaves(arguments) if isinstance(x, Tensor))
    copied: tuple[object, ...] = tree_map(lambda x: copies.get(id(x), x), arguments)
    return copied


def wide_module(module: nn.Module) -> nn.Module:
    """Returns a copy of a module, with its parameters, buffers and tensors in its
    attributes, also inside lists, tuples, dicts, sets, dataclasses and other objects in
    them. Floating-point tensors are `Wide` tensors of the same values, others are cloned.
    A tensor in an object without `__dict__` (`__slots__`, a deque) is copied as it is,
    and one that a function or class refers to is not copied.

    Raises Unsupported for an attribute whose copy raises TypeError, such as a lock, and
    for a tensor that is not strided."""
    tensors = list({id(x): x for x in tensors_in(module)}.values())
    copies = wide_copies(tensors)
    memo: dict[int, object] = {}
    for x in tensors:
        wide = copies[id(x)]
        if isinstance(x, nn.Parameter):
            wide = nn.Parameter(wide.detach(), requires_grad=x.requires_grad)
        memo[id(x)] = wide
    try:
        return copy.deepcopy(module, memo)
    except TypeError as error:
        raise unsupported_error(
            type(module).__name__, f"it cannot be copied: {error}"
        ) from error


def wide_copies(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Returns the copy of each tensor by `id()` of the original: a `Wide` tensor for one
    of floating point, else a clone. Copies share storage where their originals do in one
    dtype, and are all or none of them lazy conjugates, and negatives; those of `Wide`
    tensors share none. Raises Unsupported for a tensor that is not strided."""
    groups: dict[object, list[Tensor]] = defaultdict(list)
    for x in tensors:
        if not isinstance(x, Wide) and x.layout != torch.strided:
            raise unsupported_error(
                "an argument", f"it is a tensor of the layout {x.layout}"
            )
        shared = id(x) if isinstance(x, Wide) else x.untyped_storage()._cdata
        groups[shared, x.dtype, x.is_conj(), x.is_neg()].append(x)
    copies: dict[int, Tensor] = {}
    for group in groups.values():
        copies |= _copies_of_group(group)
    return copies


def _copies_of_group(group: list[Tensor]) -> dict[int, Tensor]:
    """Returns the copies by `id()` of the originals, as views of one copy of the storage
    between the first and the last element in use. `group`: one tensor or more, all of one
    storage and dtype, and all or none of them lazy conjugates, and negatives; or one
    `Wide` tensor."""
    values = [x.exact if isinstance(x, Wide) else x.detach() for x in group]
    begin = min(x.storage_offset() for x in values)
    end = max(x.storage_offset() + storage_extent(x) for x in values)
    base = values[0].as_strided((end - begin,), (1,), begin)
    base = base.resolve_conj().resolve_neg()
    base = widened(base).clone() if is_floating(base) else base.clone()
    copies: dict[int, Tensor] = {}
    for x, value in zip(group, values, strict=True):
        view = base.as_strided(
            value.shape, value.stride(), value.storage_offset() - begin
        )
        if is_floating(x):
            view = Wide.of(view, x.dtype, is_weight=isinstance(x, Wide) and x.is_weight)
            view.requires_grad_(x.requires_grad)
        copies[id(x)] = view
    return copies


def storage_extent(x: Tensor) -> int:
    """Returns how many elements of its storage lie from a tensor's first to its last one,
    gaps included; 0 for an empty tensor."""
    if not x.numel():
        return 0
    steps = zip(x.shape, x.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def tensors_in(owner: object) -> Iterator[Tensor]:
    """Yields each tensor that can be reached from an object's attributes once, a module's
    or another's. What is in
    an object's `__slots__` is not reached; a tensor's own attributes, and those of Python
    modules, classes and functions, are not followed."""
    seen: set[int] = set()
    pending: list[object] = [owner]
    while pending:
        x = pending.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, Tensor):
            yield x
        else:
            pending += _members(x)


def _members(x: object) -> list[object]:
    """Returns the objects directly inside x: the values of a mapping, the members of a
    list, tuple or set, else what is in the `__dict__` of x. None for a Python module,
    class or function, and for any other object without a `__dict__`. Keys of a mapping
    are left out."""
    if isinstance(x, Mapping):
        return list(x.values())
    if isinstance(x, list | tuple | set | frozenset):
        return list(x)
    if isinstance(x, ModuleType | type | FunctionType):
        return []  # the program's, not the module's
    return list(getattr(x, "__dict__", {}).values())
