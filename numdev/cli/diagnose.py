"""`numdev diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from numdev.cli.options import device_option, options_of, seed_option
from numdev.cli.session import Results, result_options
from numdev.config import AuditConfig

READING = ("model", "model_dtype", "text", "tokenizer", "inputs", "length", "sequences", "layers")


@click.command(
    short_help="Find heads whose rounding errors do not cancel, and a cure.",
    epilog="Example:  numdev diagnose demo --preset qiu2025",
)
@click.argument("targets", nargs=-1, required=True, metavar="TARGET [TARGET]...")
@click.option(
    "--preset",
    metavar="NAME",
    help="The attention that is diagnosed: a preset of `emulated`. qiu2025 is the paper's.  [fa2]",
)
@click.option(
    "--attention",
    multiple=True,
    metavar="NAME=VALUE",
    help="Another option of `emulated`, for example pv=bfloat16 or delta_from=dP*P. Repeatable.",
)
@click.option(
    "--format",
    metavar="NAME",
    help="Format of q, k, v and of the attention's roundings.  [bfloat16]",
)
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    metavar="NAME",
    help="Real kernel to set beside it on the same inputs. Repeatable.  [sdpa-flash and baseline, "
    "where they run]",
)
@click.option("--no-cures", is_flag=True, help="Leave out what each cure changes.")
@click.option(
    "--every-checkpoint",
    is_flag=True,
    help="Cures and real kernels for every checkpoint of a series, not for the last alone.",
)
@options_of(AuditConfig, *READING)
@seed_option
@device_option
@result_options
def diagnose(
    targets: tuple[str, ...],
    results: Results,
    preset: str | None,
    attention: tuple[str, ...],
    kernels: tuple[str, ...],
    no_cures: bool,
    **flags: Any,
) -> None:
    """Find the heads whose rounding errors do not cancel, show why, and what each cure changes.

    TARGET is what `numdev audit` takes: a checkpoint, `demo`, or captured tensors with grad_out.
    Several checkpoints, or a directory of them such as that of a `numdev train`, are a series over
    training. The same request into the same directory continues where it stopped.
    """
    from numdev.config import Choice
    from numdev.diagnose.request import DiagnoseRequest, attention_options
    from numdev.diagnose.study import diagnose as run

    first = targets[0]
    if kernels:
        flags["kernels"] = tuple(Choice(name=name) for name in kernels)
    request = DiagnoseRequest(
        target=first if first == "demo" else Path(first).resolve().name,
        targets=targets,
        attention=attention_options(preset, attention),
        cures=not no_cures,
        **{name: value for name, value in flags.items() if value is not None},
    )
    name = f"diagnose-{Path(request.target).stem or 'series'}"
    directory = results.directory(name, request.model_dump(mode="json"))
    results.hand_over(results.study(run, request, directory, say=results.say), directory)
