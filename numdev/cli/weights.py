"""`numdev weights`."""

from __future__ import annotations

from pathlib import Path

import click

from numdev.cli.options import device_option
from numdev.cli.session import Results, command
from numdev.errors import MeasurementError, UsageError


@command("Compare sets of weights, tensor by tensor.", "weights run-1/checkpoint run-2/checkpoint")
@click.argument("targets", nargs=-1, required=True, metavar="A B [C]...")
@device_option
def weights(targets: tuple[str, ...], device: str | None, results: Results) -> None:
    """Compare sets of weights tensor by tensor: B, and any further ones, with A.

    Each is a safetensors file, the index of a sharded one, a .pt, .pth or .bin file, a directory of
    either (of a Hugging Face checkpoint, say), a torch.distributed.checkpoint directory, or `demo`.
    No model is built. Exit code 0 however far apart they are; 3 where something is damaged, after
    the rest was compared and reported.
    """
    from numdev.training.weights.study import weights as run

    if len(targets) < 2:
        raise UsageError("one set of weights, and nothing to compare it with")
    directory = results.directory(Path(targets[0]).stem or "weights", [list(targets), device])
    found = results.study(run, targets, directory, device=device or "auto")
    results.hand_over(found, directory)
    if found.damage:
        first = found.damage[0]
        what = f"{first.tensor} {first.words}".strip()
        raise MeasurementError(what, hint=f"the rest was compared; see {directory}/report.json")
