"""`numdev train`."""

from __future__ import annotations

from pathlib import Path

import click

from numdev.cli.options import output_options
from numdev.cli.session import command_line, hand_over, measuring


@click.command(
    short_help="Train small networks side by side; measure how far they drift.",
    epilog="Example:  numdev train configs/train/tiny-ci.yaml",
)
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Steps to take, in place of the file's.",
)
@click.option(
    "--stop-after",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Stop then, with everything saved; the same command continues.",
)
@output_options
def train(
    config: Path,
    steps: int | None,
    stop_after: float | None,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    seed: int | None,
    device: str | None,
) -> None:
    """Train small networks side by side, and measure how far their weights drift apart.

    CONFIG is a YAML file. Its variants (another attention kernel, format, seed, optimiser, or a
    difference of rounding alone) start from the same weights and see the same batches; at recorded
    steps their weights are compared with the golden run's. With --seed N the seeds are counted from
    N. The same request into the same directory continues where it stopped, bit for bit.
    """
    from numdev.audit.plan import digest
    from numdev.training.config import TrainConfig, resolve
    from numdev.training.study import train as run
    from numdev.yamlfile import read_yaml

    request = resolve(
        read_yaml(config, TrainConfig), config.name, steps=steps, seed=seed, device=device
    )
    directory = output or Path("numdev-reports") / f"{config.stem}-{digest(request.measured())[:8]}"
    with measuring(show=not (quiet or as_json)) as progress:
        found = run(
            request,
            directory,
            overwrite=overwrite,
            stop_after=stop_after,
            command=command_line(),
            progress=progress,
        )
    if found is not None:
        hand_over(found, directory, as_json=as_json, quiet=quiet)
    elif not quiet:
        click.echo(f"Stopped, and saved in {directory}; continue with the same command.", err=True)
