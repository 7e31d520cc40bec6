"""Options as decorators: those of a request's fields are made of its model."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar, get_origin

import click
from annotated_types import Gt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from numdev.errors import UsageError
from numdev.request_models import Option, Reading
from numdev.yamlfile import parts_of

F = TypeVar("F", bound=Callable[..., object])
DEVICES = ("auto", "cpu", "cuda")
# The options that `--help` shows of a command that has many, by parameter
COMMON = (
    "kernels kernel formats format axes require backward reference inputs shapes problem "
    "task definition cases model preset text sequences length layers rows temperature "
    "dry_run device output gate rules"
)
# How `--help-all` orders the others
GROUPS = {
    "What it reads": "text tokenizer inputs sequences seed seeds generate denoise steps "
    "previous adapter repeat",
    "How the model is built": "model model_dtype stream",
    "What it is checked against": "claims power",
    "What is measured": "against sites layers heads rows repeats control explain "
    "save_cases preset attention by_layer compile logits head",
    "What values are meant to be": "temperature top_p top_k min_p clip_low clip_high",
    "Where and how it runs": "device isolate time_limit workers dry_run",
    "Cures": "cures every_checkpoint",
    "Verdict": "gate rules junit summary github",
    "Results": "",  # what has no other group
}
MANY = 14  # options; with fewer, `--help` shows all
WHOLE = "numdev.help_all"  # in a context's `meta`: whether all are to be shown


class Grouped(click.Command):
    """A command whose help shows the common options, and with `--help-all` all in groups,
    where they are many."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Returns the command's parameters, and `--help-all` where they are MANY or more,
        so that it shows more than `--help`."""
        params = super().get_params(ctx)
        return params if len(self.params) < MANY else [*params, HELP_ALL]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options for `--help`: all where there are fewer than MANY, else the
        common ones and how many more there are; with WHOLE in the context's `meta` also
        the others, in GROUPS."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        if len(self.params) < MANY:
            super().format_options(ctx, formatter)
            return
        # The name of click's own option for help depends on its version
        names_of = {p: "help" if "--help" in p.opts else p.name for p in options}
        records = {name: p.get_help_record(ctx) for p, name in names_of.items()}
        groups = {"Common options": f"{COMMON} help help_all"}
        if ctx.meta.get(WHOLE):
            groups |= GROUPS
        for title, names in groups.items():
            chosen = [records.pop(n) for n in names.split() or [*records] if n in records]
            if chosen:
                with formatter.section(title):
                    formatter.write_dl([record for record in chosen if record])
        if records:
            line = f"{len(records)} more options: {ctx.command_path} --help-all"
            formatter.write_paragraph()
            formatter.write_text(line)


def _show_all(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    """Prints the help with all options and ends the command, where `asked`."""
    if asked and not context.resilient_parsing:
        context.meta[WHOLE] = True
        click.echo(context.get_help())
        context.exit()


HELP_ALL = click.Option(
    ["--help-all"], is_flag=True, is_eager=True, expose_value=False,
    callback=_show_all, help="Show all options and exit.",
)  # fmt: skip


class NumberList(click.ParamType):  # type: ignore[type-arg]
    """`0,3-5` as (0, 3, 4, 5)."""

    name = "list"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Returns the numbers in the order in which they stand, each once. Raises
        UsageError for anything but numbers of at most six digits and ascending ranges of
        these."""
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
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | float | str:
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


def options_of(
    model: type[BaseModel], *names: str, without: str = ""
) -> Callable[[F], F]:
    """Returns a decorator that adds an option for each field of a model that has one; for
    the fields `names` alone, if there are any. Fields in `without` (names between
    blanks), which a file may set, get none. A value that is not on the command line is
    None, or () for an option that may be repeated."""

    def decorate(function: F) -> F:
        """Returns the function with the options, in the order of the fields."""
        declared = (n for n in model.__annotations__ if n in model.model_fields)
        for name in reversed(
            names or tuple(dict.fromkeys((*declared, *model.model_fields)))
        ):
            field = model.model_fields[name]
            option = next((m for m in field.metadata if isinstance(m, Option)), None)
            if option is not None and name not in without.split():
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


class WorkersOrAddress(AtLeast):
    """How many processes of this machine measure, or the address of a Dask scheduler
    whose workers do."""

    name = "workers"

    def __init__(self) -> None:
        super().__init__(1)

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | float | str:
        """Returns text with a colon, which an address has, as it is; else a whole number,
        at least 1. Raises UsageError for any other text."""
        return value if ":" in value else super().convert(value, param, ctx)


def cluster_options(function: Callable[..., object]) -> Callable[..., object]:
    """Returns a command with `--workers`, by which processes other than this one measure.
    The function gets it as `workers`, a number, and `scheduler`, an address; each is None
    where the option is not that."""

    @click.option(
        "--workers", type=WorkersOrAddress(), metavar="N|ADDRESS",
        help="Measure in N processes of this machine, which share its GPUs or the CPU's "
        "threads. Or on the workers of the Dask scheduler at ADDRESS, e.g. "
        "tcp://10.0.0.1:8786.",
    )  # fmt: skip
    @functools.wraps(function)
    def with_cluster(*args: object, workers: object, **parameters: object) -> object:
        """Calls the command with the option as two parameters."""
        is_address = isinstance(workers, str)
        return function(
            *args,
            workers=None if is_address else workers,
            scheduler=workers if is_address else None,
            **parameters,
        )

    return with_cluster
