"""`numdev bounds`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from numdev.cli.options import result_options
from numdev.cli.session import command_line, hand_over
from numdev.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])


def checkpoint_options(function: F) -> F:
    """A checkpoint for each role that `bounds` knows."""
    for name, role in (
        ("null", "That differs by chance alone: re-rounded at random, or moved by one ulp."),
        ("other-seed", "From another initialisation."),
        ("attention-precision", "As the golden one, with attention alone in another format."),
        ("low-precision", "As the golden one, all of it in another format."),
        ("flash", "As the golden one, with a flash kernel."),
        ("golden", "The checkpoint that distances are taken from, in place of RUN."),
    ):
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
    run: Path | None,
    golden: tuple[Path, ...],
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    **others: tuple[Path, ...],
) -> None:
    """Set how far flash moves weights beside low precision, another seed, and chance.

    RUN is the report of a `numdev train`, or its directory; it needs neither torch nor a GPU. In
    its place checkpoints can be given by role, each several times for several seeds: the k-th of a
    role belongs to the k-th --golden. Distances between weights are proxies.
    """
    import hashlib
    import json

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
    digest = hashlib.sha256(json.dumps(found.request, sort_keys=True).encode()).hexdigest()
    name = f"bounds-{found.request['target']}-{digest[:8]}"
    directory = output or Path("numdev-reports") / name
    claim(directory, "bounds", found.request, overwrite=overwrite)
    hand_over(found, directory, as_json=as_json, quiet=quiet)
