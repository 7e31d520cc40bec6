"""`numdev kernels`, and its check of one kernel."""

from __future__ import annotations

import contextlib
import json
import sys

import click

from numdev.cli.options import DEVICES
from numdev.cli.session import command

CHECK = (
    "Put one kernel, a name or package.module:function, through small cases with known answers. "
    "Exit code 1 if it is wrong somewhere, 3 if it cannot run here."
)


@command(
    "List the kernels: which run here, and why the others cannot.",
    "kernels --check sdpa-flash",
)
@click.option(
    "--device", type=click.Choice(DEVICES), default="auto", show_default=True,
    help="Judge availability on this device.",
)  # fmt: skip
@click.option("--check", "checked", metavar="NAME", help=CHECK)
@click.option("--json", "as_json", is_flag=True, help="The table, or the check, as JSON.")
def kernels(device: str, checked: str | None, as_json: bool) -> None:
    """List the kernels: which can run here, and why the others cannot."""
    from numdev.audit.conformance import conformance
    from numdev.kernels import all_kernels, find
    from numdev.report.foreign import json_text
    from numdev.report.renderers import terminal
    from numdev.report.views import kernels as views
    from numdev.system import System

    system = System.here(device)
    if checked is not None:
        with contextlib.redirect_stdout(sys.stderr):  # a foreign kernel may print
            found = conformance(find(checked), system)
        if as_json:
            click.echo(json_text(found.model_dump_json()))
        else:
            terminal.print_document(views.conformance(found))
        click.get_current_context().exit(0 if found.conforms else 1)
    table = [
        {"name": k.name, "missing": k.missing(system), "summary": k.summary, "options": k.options}
        for k in all_kernels().values()
    ]
    if as_json:
        click.echo(json.dumps(table, default=str))
    else:
        terminal.print_document(views.table(table, system.gpu or system.cpu))
