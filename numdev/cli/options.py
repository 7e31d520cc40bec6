"""Options as decorators: those of a request's fields are made of its model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar, get_origin

import click
from annotated_types import Gt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from numdev.config import Option, Reading
from numdev.errors import UsageError
from numdev.yamlfile import parts_of

F = TypeVar("F", bound=Callable[..., object])
DEVICES = ("auto", "cpu", "cuda")
GROUPS = {
    "Common options": (
        "kernels kernel formats format axes backward against sites length output"
    ),
    "What the model reads": "text tokenizer inputs sequences seed generate denoise steps",
    "How it is built": "model model_dtype stream",
    "What is measured": "layers heads rows repeats control explain save_cases "
    "preset attention "
    "by_layer compile",
    "Where and how it runs": "device isolate time_limit workers scheduler dry_run",
    "Cures": "cures every_checkpoint",
    "Verdict": "gate rules junit summary github",
    "Results": "",  # what has no other group
}
"""How `--help` orders the options of a command that has many, by the names of their
parameters."""
MANY = 18


class Grouped(click.Command):
    """A command whose options stand in groups, where they are many."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options for `--help`, in GROUPS where there are MANY or more."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        if len(options) < MANY:
            super().format_options(ctx, formatter)
            return
        records = {p.name: p.get_help_record(ctx) for p in options}
        for title, names in GROUPS.items():
            chosen = [records.pop(n) for n in names.split() or [*records] if n in records]
            if chosen:
                with formatter.section(title):
                    formatter.write_dl([record for record in chosen if record])


class NumberList(click.ParamType):  # type: ignore[type-arg]
    """`0,3-5` as (0, 3, 4, 5)."""

    name = "list"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Returns the numbers in order, each once; raises UsageError for anything but
        numbers and ranges."""
        chosen: list[int] = []
        for part in value.split(","):
            match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part, re.ASCII)
            numbers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else ()
            if not numbers:
                flag = param.opts[0] if param else self.name
                raise UsageError(f"{flag}: expected e.g. 0,3-5, got {value!r}")
            chosen += numbers
        return tuple(dict.fromkeys(chosen))


class AtLeast(click.ParamType):  # type: ignore[type-arg]
    """A whole number that is not below `least`, or with `whole` False any number above
    it."""

    name = "number"

    def __init__(self, least: int, *, whole: bool = True) -> None:
        self.least, self.whole = least, whole

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | float:
        """Returns the number. Raises UsageError for text that is none, and for one that
        is too small or not finite."""
        try:
            number = int(value) if self.whole else float(value)
        except ValueError:
            number = math.nan
        fits = number >= self.least if self.whole else self.least < number < math.inf
        if not fits:
            flag = param.opts[0] if param else self.name
            bound = "of at least" if self.whole else "above"
            kind = "a whole number" if self.whole else "a number"
            raise UsageError(f"{flag}: expected {kind} {bound} {self.least}, got {value}")
        return number


def options_of(model: type[BaseModel], *names: str) -> Callable[[F], F]:
    """Returns a decorator that adds an option for each field of a model that has one, or
    for the fields `names` alone. A value that is not on the command line is None, or
    ()."""

    def decorate(function: F) -> F:
        """Returns the function with the options, in the order of the fields."""
        declared = (n for n in model.__annotations__ if n in model.model_fields)
        for name in reversed(
            names or tuple(dict.fromkeys((*declared, *model.model_fields)))
        ):
            field = model.model_fields[name]
            option = next((m for m in field.metadata if isinstance(m, Option)), None)
            if option is not None:
                flag = option.flag or f"--{name.replace('_', '-')}"
                more = {"metavar": option.metavar} | _option_type(name, flag, field)
                function = click.option(flag, name, help=field.description, **more)(
                    function
                )
        return function

    return decorate


def _option_type(name: str, flag: str, field: FieldInfo) -> dict[str, Any]:
    """Returns the arguments of `click.option` for a field's type, by name. `name`: the
    field's; `flag`: the option's."""
    parts = [*parts_of(field.annotation), *field.metadata]
    several = any(get_origin(part) is tuple for part in parts)
    if name == "device":
        return {"type": click.Choice(DEVICES), "metavar": None}
    if bool in parts:
        return {"default": None} | ({} if "/" in flag else {"is_flag": True})
    if int in parts and several:
        return {"type": NumberList()}
    if int in parts:
        return {"type": AtLeast(int(any(isinstance(x, Gt) for x in parts)))}
    if float in parts:
        return {"type": AtLeast(0, whole=False)}
    return {"multiple": several}


seed_option = options_of(Reading, "seed")
device_option = options_of(Reading, "device")


def cluster_options(function: F) -> F:
    """Returns a command with `--workers` and `--scheduler`, by which processes other than
    this one measure."""
    scheduler = click.option(
        "--scheduler", metavar="ADDRESS",
        help="Measure on the workers of the Dask scheduler at ADDRESS, e.g. tcp://10.0.0.1:8786.",
    )  # fmt: skip
    workers = click.option(
        "--workers",
        type=AtLeast(1),
        metavar="N",
        help="Measure in N processes of this machine: one GPU each, or a "
        "share of "
        "the CPU's "
        "threads.",
    )
    return workers(scheduler(function))
