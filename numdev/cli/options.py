"""Options as decorators: those of a request's fields are made of its model."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import annotated_types
import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from numdev.config import Option, Reading
from numdev.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])
DEVICES = ("auto", "cpu", "cuda")


class NumberList(click.ParamType):  # type: ignore[type-arg]
    """`0,3-5` as (0, 3, 4, 5)."""

    name = "list"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        chosen: list[int] = []
        for part in value.split(","):
            match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part, re.ASCII)
            numbers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else ()
            if not numbers:
                raise UsageError(f"{param.opts[0]}: expected a list as 0,3-5, got {value!r}")
            chosen += numbers
        return tuple(dict.fromkeys(chosen))


def options_of(model: type[BaseModel], *names: str) -> Callable[[F], F]:
    """An option for each field of a model that has one, or for these fields alone. What is not
    given on the command line is None, or ()."""

    def decorate(function: F) -> F:
        own = (n for n in model.__annotations__ if n in model.model_fields)
        for name in reversed(names or tuple(dict.fromkeys((*own, *model.model_fields)))):
            field = model.model_fields[name]
            option = next((m for m in field.metadata if isinstance(m, Option)), None)
            if option is not None:
                flag = option.flag or f"--{name.replace('_', '-')}"
                more = {"metavar": option.metavar} | _kind(name, flag, field)
                function = click.option(flag, name, help=field.description, **more)(function)
        return function

    return decorate


def _kind(name: str, flag: str, field: FieldInfo) -> dict[str, Any]:
    """What click is told of a field's type."""
    kind, bounds = _plain(field.annotation)
    if name == "device":
        return {"type": click.Choice(DEVICES), "metavar": None}
    if kind is bool:
        return {"default": None} | ({} if "/" in flag else {"is_flag": True})
    if kind is int:
        positive = any(isinstance(x, annotated_types.Gt) for x in (*bounds, *field.metadata))
        return {"type": click.IntRange(min=1 if positive else 0)}
    if kind is float:
        return {"type": click.FloatRange(min=0, min_open=True)}
    if kind == tuple[int, ...]:
        return {"type": NumberList()}
    return {"multiple": get_origin(kind) is tuple}


def _plain(annotation: Any) -> tuple[Any, list[Any]]:
    """A field's type without None and without what is said of it, and what that is."""
    if get_origin(annotation) is Annotated:
        inner, *said = get_args(annotation)
        kind, bounds = _plain(inner)
        expanded = [m for x in said for m in (x.metadata if isinstance(x, FieldInfo) else [x])]
        return kind, [*expanded, *bounds]
    if get_origin(annotation) is tuple:
        kind, _ = _plain(get_args(annotation)[0])
        return (tuple[int, ...] if kind is int else tuple[str, ...]), []
    members = [a for a in get_args(annotation) if a is not type(None)]
    if members and get_origin(annotation) is not Literal:
        return _plain(members[-1])
    return annotation, []


seed_option = options_of(Reading, "seed")
device_option = options_of(Reading, "device")


def cluster_options(function: F) -> F:
    """Who measures, where it is not this process."""
    scheduler = click.option(
        "--scheduler", metavar="ADDRESS",
        help="Measure on the workers of the Dask scheduler at ADDRESS, as tcp://10.0.0.1:8786.",
    )  # fmt: skip
    workers = click.option(
        "--workers", type=click.IntRange(min=1), metavar="N",
        help="Measure in N processes of this machine: one GPU each, or a share of the CPU's "
        "threads.",
    )  # fmt: skip
    return workers(scheduler(function))
