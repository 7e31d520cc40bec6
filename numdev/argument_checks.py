"""Checks of the arguments of public functions against their annotations, before a
function does anything.

A wrong argument raises UsageError, which says which argument it is, what was expected and
what was passed, in place of an AttributeError of some line far below."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import numbers
import os
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, cast

from numdev.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")
NUMBERS: Mapping[object, type] = {int: numbers.Integral, float: numbers.Real}
WORDS: Mapping[object, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "True or False",
    Path: "a path",
    type(None): "None",
    Any: "anything",
    object: "anything",
}
LISTS = (collections.abc.Sequence, collections.abc.Collection, tuple, list)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Returns `function` with a check of its arguments before each call. A call raises
    UsageError for an argument that its annotation does not allow and that is not the
    default, and for one that is missing, unknown or too many. An empty string is refused
    where a string is asked for, unless it is the default, and so is a path that can name
    no file. Values of `**options` are not checked."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        """Checks the arguments, then calls the function."""
        __tracebackhide__ = True
        signature, hints = _signature_and_types(function)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"{function.__name__}: {error}") from None
        for name, value in bound.arguments.items():
            parameter = signature.parameters[name]
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            each = value if parameter.kind is parameter.VAR_POSITIONAL else [value]
            for one in each:
                expect(name, one, hints.get(name, Any), default=parameter.default)
        return function(*args, **kwargs)

    return call


def expect_fields(record: object) -> None:
    """Raises UsageError, which names the field, for the first field of a dataclass
    instance whose value is neither its default nor what its annotation allows. Fields
    that are no arguments of the class are not checked."""
    signature, hints = _signature_and_types(cast(Any, type(record)))
    for name, parameter in signature.parameters.items():
        expect(name, getattr(record, name), hints[name], default=parameter.default)


def expect(
    name: str, value: object, hint: object, *, default: object = inspect.Parameter.empty
) -> None:
    """Raises UsageError, which names the argument, for a value that is not of the
    annotation `hint` (as `_is_of_type`) and not the default. Raises it too for a string
    or path that can name no file, where `hint` is a union with Path."""
    if value is default or (isinstance(value, str) and value == default):
        return
    if type(value) is hint and hint is not str:  # mostly, and at once
        return
    if Path in typing.get_args(hint) and isinstance(value, str | Path):
        try:
            can_name = b"\0" not in os.fsencode(value)
        except UnicodeEncodeError:  # a lone surrogate
            can_name = False
        if not can_name:
            got = reprlib.repr(str(value))
            raise UsageError(f"{name}: expected a path that can name a file, got {got}")
    if not _is_of_type(value, hint):
        choices = _joined_with_or([*dict.fromkeys(_allowed_words(hint))])
        raise UsageError(f"{name}: expected {choices}, got {_value_in_words(value)}")


@functools.cache
def _signature_and_types(function: Any) -> tuple[inspect.Signature, dict[str, object]]:
    """Returns the signature of a function or class, and the evaluated types of its
    annotations, by name. Cached."""
    return inspect.signature(function), typing.get_type_hints(function)


def _is_of_type(value: object, hint: Any) -> bool:
    """Whether a value is of an annotation. For a Sequence, Collection, list or tuple of
    elements it is a collection of these; strings, bytes, mappings, tensors and arrays are
    not, and a set, which has no order, is a Collection alone. A tuple of several types
    has one element of each. Of a Mapping
    only the keys are checked, of other classes with parameters none of these. A bool is
    no number, an empty string no string. `int` and `float` allow numbers of other
    libraries (numpy). A type variable allows every value."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_is_of_type(value, part) for part in inner)
    if origin is Literal:
        return any(type(value) is type(x) and value == x for x in inner)
    if origin in LISTS:
        unordered = () if origin is collections.abc.Collection else (set, frozenset)
        is_other = isinstance(value, (str, bytes, Mapping, *unordered))
        # Nor is a tensor a list
        if is_other or hasattr(value, "ndim") or not isinstance(value, Collection):
            return False
        if origin is tuple and ... not in inner:
            return len(value) == len(inner) and all(map(_is_of_type, value, inner))
        return all(_is_of_type(x, inner[0]) for x in value)
    if origin is collections.abc.Mapping:
        return isinstance(value, Mapping) and all(
            _is_of_type(key, inner[0]) for key in value
        )
    if origin is collections.abc.Callable:
        return callable(value)
    if hint is str:
        return isinstance(value, str) and value != ""
    if hint in NUMBERS:
        return isinstance(value, NUMBERS[hint]) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def _allowed_words(hint: object) -> Iterator[str]:
    """Yields in words what an annotation allows, one choice at a time, also those of a
    union or Literal: `a string`, `None`, `'auto'`, `a sequence (integer)`, `a mapping`,
    `a function`. Every other type is its name with an article: `a Tensor`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for part in inner:
            yield from _allowed_words(part)
    elif origin is Literal:
        yield from map(repr, inner)
    elif origin in LISTS:
        words = _allowed_words(inner[0])
        several = [word.removeprefix("a ").removeprefix("an ") for word in words]
        yield f"a sequence ({_joined_with_or(several)})"
    elif origin is collections.abc.Mapping:
        yield "a mapping"
    elif origin is collections.abc.Callable:
        yield "a function"
    elif hint in WORDS:
        yield WORDS[hint]
    else:
        yield _with_article(getattr(hint, "__name__", str(hint)))


def _value_in_words(value: object) -> str:
    """Returns an argument in a few words: None, a number or text as `repr`, shortened,
    and `an empty string`; a list or tuple of one element with that element (`a list of
    'x'`), others with their length (`a tuple of 3`); a class as `the class int`; anything
    else by its type (`a dict`)."""
    if isinstance(value, str) and not value:
        return "an empty string"
    if value is None or isinstance(value, str | numbers.Number):
        return reprlib.repr(value)
    name = getattr(type(value), "__name__", "something")
    if isinstance(value, list | tuple):
        return (
            f"{_with_article(name)} of {_value_in_words(value[0])}"
            if len(value) == 1
            else f"{_with_article(name)} of {len(value)}"
        )
    return (
        f"the class {value.__name__}" if isinstance(value, type) else _with_article(name)
    )


def _with_article(noun: str) -> str:
    """Returns a noun with `a`, or `an` where it begins with a vowel."""
    return f"{'an' if noun[:1] in 'AEIOUaeiou' else 'a'} {noun}"


def _joined_with_or(words: list[str]) -> str:
    """Returns words joined as in `a, b or c`. `words`: at least one."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
