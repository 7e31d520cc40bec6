"""`numdev weights`."""

from __future__ import annotations

from pathlib import Path

import click

from numdev.cli.options import device_option, result_options
from numdev.cli.session import command_line, hand_over, measuring
from numdev.errors import MeasurementError, UsageError


@click.command(
    short_help="Compare sets of weights, tensor by tensor.",
    epilog="Example:  numdev weights run-1/checkpoint run-2/checkpoint",
)
@click.argument("targets", nargs=-1, required=True, metavar="A B [C]...")
@device_option
@result_options
def weights(
    targets: tuple[str, ...],
    device: str | None,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Compare sets of weights tensor by tensor: B, and any further ones, with A.

    Each is a safetensors file, the index of a sharded one, a .pt, .pth or .bin file, a directory of
    either (of a Hugging Face checkpoint, say), a torch.distributed.checkpoint directory, or `demo`.
    No model is built. Exit code 0 however far apart they are; 3 where something is damaged, after
    the rest was compared and reported.
    """
    from numdev.audit.plan import digest
    from numdev.training.weights.study import weights as run

    if len(targets) < 2:
        raise UsageError(
            "there is one set of weights and nothing to compare it with", hint="numdev weights A B"
        )
    name = f"{Path(targets[0]).stem or 'weights'}-{digest([list(targets), device])[:8]}"
    directory = output or Path("numdev-reports") / name
    with measuring(show=not (quiet or as_json)) as progress:
        found = run(
            targets,
            directory,
            device=device or "auto",
            overwrite=overwrite,
            command=command_line(),
            progress=progress,
        )
    hand_over(found, directory, as_json=as_json, quiet=quiet)
    if found.damage:
        first = found.damage[0]
        raise MeasurementError(
            f"{first.tensor + ' ' if first.tensor else ''}{first.words}",
            hint=f"the rest was compared; {directory}/report.json names all that is damaged",
        )
