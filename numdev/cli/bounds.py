"""`numdev bounds`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from numdev.cli.session import Results, command_line, result_options
from numdev.errors import UsageError

ROLES = {
    "golden": "The checkpoint that distances are taken from, in place of RUN.",
    "flash": "As the golden one, with a flash kernel.",
    "low-precision": "As the golden one, all of it in another format.",
    "attention-precision": "As the golden one, with attention alone in another format.",
    "other-seed": "From another initialisation.",
    "null": "That differs by chance alone: re-rounded at random, or moved by one ulp.",
}


def checkpoint_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpoint for each role that `bounds` knows."""
    for name, role in reversed(ROLES.items()):
        function = click.option(
            f"--{name}",
            multiple=True,
            type=click.Path(path_type=Path),
            metavar="CHECKPOINT",
            help=f"{role} Repeatable.",
        )(function)
    return function


@click.command(
    short_help="Set flash beside low precision, another seed, and chance.",
    epilog="Example:  numdev bounds numdev-reports/proxy-1234abcd",
)
@click.argument("run", required=False, type=click.Path(path_type=Path))
@checkpoint_options
@result_options
def bounds(
    run: Path | None, golden: tuple[Path, ...], results: Results, **others: tuple[Path, ...]
) -> None:
    """Set how far flash moves weights beside low precision, another seed, and chance.

    RUN is the report of a `numdev train`, or its directory; it needs neither torch nor a GPU. In
    its place checkpoints can be given by role, each several times for several seeds: the k-th of a
    role belongs to the k-th --golden. Distances between weights are proxies.
    """
    from numdev.report.io import claim
    from numdev.training.bounds.study import of_checkpoints, of_run

    roles = {role: paths for role, paths in others.items() if paths}
    if (run is None) == (not golden) or (run is not None and roles):
        raise UsageError(
            "bounds takes the report of a training run, or checkpoints by role",
            hint="give RUN, or --golden with --flash, --low-precision, --other-seed, --null",
        )
    if run is not None:
        found = of_run(run, command=command_line())
    elif roles:
        found = of_checkpoints(golden, roles, command=command_line())
    else:
        raise UsageError("--golden alone is nothing to compare", hint="give --flash too")
    directory = results.directory(f"bounds-{found.request['target']}", found.request)
    claim(directory, "bounds", found.request, overwrite=results.overwrite)
    results.hand_over(found, directory)
