"""`numdev compare`."""

from __future__ import annotations

from pathlib import Path

import click

from numdev.cli.options import result_options
from numdev.cli.session import command_line, hand_over
from numdev.errors import MeasurementError


@click.command(
    short_help="Say what moved from audit A to audit B beyond noise.",
    epilog="Example:  numdev compare reports/torch-2.11 reports/torch-2.13",
)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option(
    "--allow",
    multiple=True,
    metavar="KEY",
    help="Compare although the requests differ in this key, for example seed. Repeatable.",
)
@result_options
@click.pass_context
def compare(
    context: click.Context,
    a: Path,
    b: Path,
    allow: tuple[str, ...],
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Say what moved from audit A to audit B: other versions, machines, or commits of a kernel. Or
    from sweep to sweep, which must have kept the rows of heads.

    Each is a report.json or a directory with one, of the same request. Needs neither torch nor a
    GPU. Exit code 0: nothing moved. 1: a number moved beyond noise, something else ran, or a row is
    gone. 2: the two are not comparable, or a wrong option. 3: a report cannot be read, a kernel
    failed, or no row is in both.
    """
    import hashlib
    import json

    from numdev.gate.compare import compare as run
    from numdev.report.io import claim

    found = run(a, b, allow=allow, command=command_line())
    digest = hashlib.sha256(json.dumps(found.request, sort_keys=True).encode()).hexdigest()
    directory = output or Path("numdev-reports") / f"compare-{digest[:8]}"
    claim(directory, "compare", found.request, overwrite=overwrite)
    context.find_root().obj = found.exit_code
    hand_over(found, directory, as_json=as_json, quiet=quiet)
    if found.exit_code == 3:
        first = found.failed[0]
        raise MeasurementError(
            f"{first.kernel} failed in {first.side}: {first.reason}",
            hint="what was measured in both was compared",
        )
    context.exit(found.exit_code)
