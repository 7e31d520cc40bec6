"""The arguments of a PyTorch operator: by name, and the leaves among them.

Operators take values, and lists of values, and no other trees: looking through these is
several times faster than through any tree, and is done for every operation of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

from torch._ops import OpOverload

Tree = object  # a value, or a list, tuple or mapping of trees


class Parameter(NamedTuple):
    """An argument that an operator takes."""

    place: int  # its index among the positional arguments
    kind: str  # its type as the schema writes it, such as `Optional[number]`
    is_written: bool
    default: object


@cache
def parameters_of(func: OpOverload) -> Mapping[str, Parameter]:
    """Returns the arguments that an operator takes, by name, in their order. Kept
    for each operator."""
    parameters: dict[str, Parameter] = {}
    for i, x in enumerate(func._schema.arguments):
        is_written = x.alias_info is not None and x.alias_info.is_write
        parameters[x.name] = Parameter(i, str(x.type), is_written, x.default_value)
    return parameters


def operator_argument(
    func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object], name: str
) -> object:
    """Returns the value of an operator's argument `name` in a call, given by position or
    by name, else its default; None where the operator has no such argument."""
    parameter = parameters_of(func).get(name)
    if parameter is None:
        return None
    if parameter.place < len(args):
        return args[parameter.place]
    return kwargs.get(name, parameter.default)


def leaves_of(tree: Tree) -> list[object]:
    """Returns the values in lists, tuples and dicts, in each other too, in their order;
    of any other `tree` itself alone."""
    if not isinstance(tree, list | tuple | dict):
        return [tree]
    leaves: list[object] = []
    for each in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(each, list | tuple | dict):
            leaves += leaves_of(each)
        else:
            leaves.append(each)
    return leaves


def with_leaves(tree: Tree, change: Callable[[object], object]) -> Tree:
    """Returns lists, tuples and dicts like those of `tree`, with `change(value)` in place
    of each value. A named tuple becomes a tuple, and a subclass of list or dict a plain
    one."""
    if isinstance(tree, list):
        return [with_leaves(each, change) for each in tree]
    if isinstance(tree, tuple):
        return tuple(with_leaves(each, change) for each in tree)
    if isinstance(tree, dict):
        return {name: with_leaves(each, change) for name, each in tree.items()}
    return change(tree)
