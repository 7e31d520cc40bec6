"""`numdev weights`."""

from __future__ import annotations

from pathlib import Path

import click

from numdev.cli.options import device_option
from numdev.cli.session import Results, result_options
from numdev.errors import MeasurementError, UsageError


@click.command(
    short_help="Compare sets of weights, tensor by tensor.",
    epilog="Example:  numdev weights run-1/checkpoint run-2/checkpoint",
)
@click.argument("targets", nargs=-1, required=True, metavar="A B [C]...")
@device_option
@result_options
def weights(targets: tuple[str, ...], device: str | None, results: Results) -> None:
    """Compare sets of weights tensor by tensor: B, and any further ones, with A.

    Each is a safetensors file, the index of a sharded one, a .pt, .pth or .bin file, a directory of
    either (of a Hugging Face checkpoint, say), a torch.distributed.checkpoint directory, or `demo`.
    No model is built. Exit code 0 however far apart they are; 3 where something is damaged, after
    the rest was compared and reported.
    """
    from numdev.training.weights.study import weights as run

    if len(targets) < 2:
        raise UsageError(
            "there is one set of weights and nothing to compare it with", hint="numdev weights A B"
        )
    directory = results.directory(Path(targets[0]).stem or "weights", [list(targets), device])
    found = results.study(run, targets, directory, device=device or "auto")
    results.hand_over(found, directory)
    if found.damage:
        first = found.damage[0]
        raise MeasurementError(
            f"{first.tensor + ' ' if first.tensor else ''}{first.words}",
            hint=f"the rest was compared; {directory}/report.json names all that is damaged",
        )
