"""`numdev compare`."""

from __future__ import annotations

from pathlib import Path

import click

from numdev.cli.session import FILE, Results, command, command_line
from numdev.errors import MeasurementError


@command(
    "Say what moved from audit A to audit B beyond noise.",
    "compare reports/torch-2.11 reports/torch-2.13",
)
@click.argument("a", type=FILE)
@click.argument("b", type=FILE)
@click.option(
    "--allow", multiple=True, metavar="KEY",
    help="Compare although the requests differ in this key, for example seed. Repeatable.",
)  # fmt: skip
@click.pass_context
def compare(
    context: click.Context, a: Path, b: Path, allow: tuple[str, ...], results: Results
) -> None:
    """Say what moved from audit A to audit B: other versions, machines, or commits of a kernel. Or
    from sweep to sweep, which must have kept the rows of heads.

    Each is a report.json or a directory with one, of the same request. Needs neither torch nor a
    GPU. Exit code 0: nothing moved. 1: a number moved beyond noise, something else ran, or a row is
    gone. 2: the two are not comparable, or a wrong option. 3: a report cannot be read, a kernel
    failed, or no row is in both.
    """
    from numdev.gate.compare import compare as run

    found = run(a, b, allow=allow, command=command_line())
    directory = results.claim("compare", found.request)
    context.find_root().obj = found.exit_code
    results.hand_over(found, directory)
    if found.exit_code == 3:
        first = found.failed[0]
        raise MeasurementError(f"{first.kernel} failed {first.why}")
    context.exit(found.exit_code)
