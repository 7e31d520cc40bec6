"""`numdev diagnose`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from numdev.cli.options import output_options
from numdev.cli.requests import numbers
from numdev.cli.session import command_line, hand_over, measuring

F = TypeVar("F", bound=Callable[..., Any])


def reading_options(function: F) -> F:
    """What a model is and reads, as in `numdev audit`."""
    for option in (
        click.option("--layers", metavar="LIST", help="Only these layers, for example 0,3-5."),
        click.option("--sequences", type=click.IntRange(min=1), help="Independent sequences.  [8]"),
        click.option("--length", type=click.IntRange(min=1), help="Tokens in a sequence.  [256]"),
        click.option("--inputs", metavar="FILE", help="Safetensors file of further inputs."),
        click.option(
            "--tokenizer",
            type=click.Path(),
            metavar="DIR",
            help="Directory of the tokenizer for --text.  [the checkpoint's]",
        ),
        click.option(
            "--text",
            multiple=True,
            type=click.Path(),
            help="Text file the model reads. Repeatable. Without it token ids are drawn.",
        ),
        click.option(
            "--model-dtype", metavar="NAME", help="Format the model itself runs in.  [float32]"
        ),
        click.option(
            "--model",
            metavar="FACTORY",
            help="For a state dict: package.module:factory, which builds its model.",
        ),
    ):
        function = option(function)
    return function


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
    "format_name",
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
@reading_options
@output_options
def diagnose(
    targets: tuple[str, ...],
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    **flags: Any,
) -> None:
    """Find the heads whose rounding errors do not cancel, show why, and what each cure changes.

    TARGET is what `numdev audit` takes: a checkpoint, `demo`, or captured tensors with grad_out.
    Several checkpoints, or a directory of them such as that of a `numdev train`, are a series over
    training. The same request into the same directory continues where it stopped.
    """
    from numdev.audit.plan import digest
    from numdev.diagnose.request import DiagnoseRequest
    from numdev.diagnose.study import diagnose as run

    request = DiagnoseRequest(**_given(targets, flags))
    name = f"diagnose-{Path(request.target).stem or 'series'}"
    hashed = digest(request.model_dump(mode="json"))[:8]
    directory = output or Path("numdev-reports") / f"{name}-{hashed}"
    with measuring(show=not (quiet or as_json)) as progress:
        found = run(
            request,
            directory,
            overwrite=overwrite,
            command=command_line(),
            progress=progress,
            say=lambda text: None if quiet else click.echo(text, err=True),
        )
    hand_over(found, directory, as_json=as_json, quiet=quiet)


def _given(targets: tuple[str, ...], flags: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request that were asked for."""
    from numdev.config import Choice
    from numdev.diagnose.request import attention_options

    first = targets[0]
    given = {
        "target": first if first == "demo" else Path(first).resolve().name,
        "targets": targets,
        "attention": attention_options(flags.pop("preset"), flags.pop("attention")),
        "format": flags.pop("format_name"),
        "kernels": tuple(Choice(name=name) for name in flags.pop("kernels")) or None,
        "cures": not flags.pop("no_cures"),
        "layers": numbers(flags.pop("layers"), "--layers"),
        **flags,
    }
    return {name: value for name, value in given.items() if value is not None}
