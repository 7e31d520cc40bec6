"""`numdev bounds`."""

from __future__ import annotations

from pathlib import Path

import click

from numdev.cli.session import FILE, Results, command, command_line
from numdev.errors import UsageError

ROLES = {
    "golden": "The checkpoint that distances are taken from, in place of RUN.",
    "flash": "As the golden one, with a flash kernel.",
    "low-precision": "As the golden one, all of it in another format.",
    "attention-precision": "As the golden one, with attention alone in another format.",
    "other-seed": "From another initialisation.",
    "null": "That differs by chance alone: re-rounded at random, or moved by one ulp.",
}


@command(
    "Set flash beside low precision, another seed, and chance.",
    "bounds numdev-reports/proxy-1234abcd",
)
@click.argument("run", required=False, type=FILE)
def bounds(
    run: Path | None, golden: tuple[Path, ...], results: Results, **others: tuple[Path, ...]
) -> None:
    """Set how far flash moves weights beside low precision, another seed, and chance.

    RUN is the report of a `numdev train`, or its directory; it needs neither torch nor a GPU. In
    its place checkpoints can be given by role, each several times for several seeds: the k-th of a
    role belongs to the k-th --golden. Distances between weights are proxies.
    """
    from numdev.training.bounds.study import of_checkpoints, of_run

    roles = {role: paths for role, paths in others.items() if paths}
    if run is not None and not golden and not roles:
        found = of_run(run, command=command_line())
    elif run is None and golden and roles:
        found = of_checkpoints(golden, roles, command=command_line())
    else:
        raise UsageError(
            "bounds: expected the report of a training run, or checkpoints by role",
            hint="give RUN, or --golden with --flash, --low-precision, --other-seed, --null",
        )
    directory = results.claim(f"bounds-{found.request['target']}", found.request)
    results.hand_over(found, directory)


bounds.params[1:1] = [
    click.Option([f"--{name}"], multiple=True, type=FILE, metavar="CHECKPOINT",
                 help=f"{role} Repeatable.")
    for name, role in ROLES.items()
]  # fmt: skip
