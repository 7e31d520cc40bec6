"""`numdev bounds`."""

from __future__ import annotations

from pathlib import Path

import click

from numdev.cli.session import FILE, Results, command, command_line


@command(
    "Set flash beside low precision, another seed, and chance.",
    "bounds numdev-reports/proxy-1234abcd",
)
@click.argument("run", type=FILE)
def bounds(run: Path, results: Results) -> None:
    """Set how far flash moves weights beside low precision, another seed, and chance.

    RUN is the report of a `numdev train`, or its directory. Needs neither torch nor a GPU.
    Distances between weights are proxies.
    """
    from numdev.training.bounds import study

    found = study.bounds(run, command=command_line())
    directory = results.claim(f"bounds-{found.request['target']}", found.request)
    results.hand_over(found, directory)
