"""`numdev train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from numdev.cli.options import device_option, seed_option
from numdev.cli.session import FILE, Results, command

STEPS = "Steps to take, in place of the file's."
STOP = "Stop then, with everything saved; the same command continues."


@command(
    "Train small networks side by side; measure how far they drift.",
    "train configs/train/tiny-ci.yaml",
)
@click.argument("config", type=FILE)
@click.option("--steps", type=click.IntRange(1, 10_000_000), metavar="N", help=STEPS)
@click.option(
    "--stop-after", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help=STOP
)
@seed_option
@device_option
def train(config: Path, results: Results, stop_after: float | None, **flags: Any) -> None:
    """Train small networks side by side, and measure how far their weights drift apart.

    CONFIG is a YAML file. Its variants (another attention kernel, format, seed, optimiser, or a
    difference of rounding alone) start from the same weights and see the same batches; at recorded
    steps their weights are compared with the golden run's. With --seed N the seeds are counted from
    N. The same request into the same directory continues where it stopped, bit for bit.
    """
    from numdev.training.config import TrainConfig, resolve
    from numdev.training.study import train as run
    from numdev.yamlfile import read_yaml

    request = resolve(read_yaml(config, TrainConfig), config.name, **flags)
    directory = results.directory(config.stem, request.measured())
    found = results.study(run, request, directory, stop_after=stop_after)
    if found is not None:
        results.hand_over(found, directory)
    else:
        results.say(f"Stopped, and saved in {directory}; continue with the same command.")
