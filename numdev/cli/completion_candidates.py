"""What a shell is offered while a command is typed: kernels, formats, axes, files.

The shell waits for it, so neither torch nor a model is imported: names that the packages
of kernels and formats define stand here once more, and tests hold them to those."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

from numdev.request_models import AXES, BACKENDS

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
KERNELS = (
    "reference", "floor", "baseline", "emulated", *BACKENDS, "triton-flash", "flex",
    "flash-attn-2", "flash-attn-3", "flash-attn-4", "flashinfer", "varlen-attn",
    "inductor", "sharded", "context-parallel",
)  # fmt: skip
FORMATS = (
    "bfloat16", "float16", "float32", "float64", "tf32", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
PRESETS = ("fa2", "fa2-consistent", "fa4", "eager", "exact", "golden2024", "qiu2025")


def plugin_kernels() -> list[str]:
    """Returns the names under which other packages declare kernels; none is imported."""
    points = importlib.metadata.entry_points(group="numdev.kernels")
    return [point.name for point in points]


def _beginning(names: Iterable[str], start: str) -> list[CompletionItem]:
    """Returns the names that begin with `start`, each once, as completions."""
    return [CompletionItem(n) for n in dict.fromkeys(names) if n.startswith(start)]


def names_of(names: Iterable[str]) -> Complete:
    """Returns a completion that offers those of the names that begin with what was
    typed."""
    words = tuple(names)
    return lambda context, parameter, start: _beginning(words, start)


def complete_kernel(
    context: click.Context, parameter: click.Parameter, start: str
) -> list[CompletionItem]:
    """Returns the names of kernels that begin with `start`. Where none does, one item by
    which the shell completes files, since a function in a file may be named."""
    names = _beginning((*KERNELS, *plugin_kernels()), start)
    return names or [CompletionItem(start, type="file")]


def complete_target(
    context: click.Context, parameter: click.Parameter, start: str
) -> list[CompletionItem]:
    """Returns `demo` where it begins with `start`, and the item by which the shell
    completes files and directories."""
    return [*_beginning(("demo",), start), CompletionItem(start, type="file")]


# By the name of a parameter
COMPLETIONS: dict[str, Complete] = {
    "kernels": complete_kernel,
    "against": complete_kernel,
    "formats": names_of(FORMATS),
    "format": names_of(FORMATS),
    "model_dtype": names_of(FORMATS),
    "axes": names_of(AXES),
    "require": names_of(AXES),
    "preset": names_of(PRESETS),
    "target": complete_target,
    "targets": complete_target,
}


def with_completions(command: click.Command) -> click.Command:
    """Returns the command, changed in place: parameters of COMPLETIONS that are plain
    text complete their words; those of another type are left alone. The target of `check`
    is a kernel."""
    special = {"target": complete_kernel} if command.name == "check" else {}
    completions = {**COMPLETIONS, **special}
    for parameter in command.params:
        complete = completions.get(parameter.name or "")
        if complete and isinstance(parameter.type, click.types.StringParamType):
            parameter._custom_shell_complete = complete
    return command
